"""The public names of runs over files."""

from __future__ import annotations

from importlib import import_module

import pytest

import cbatch.files


@pytest.mark.parametrize("name", cbatch.files.__all__)
def test_public_name_is_to_be_had(name: str) -> None:
    assert getattr(cbatch.files, name).__name__ == name


def test_unknown_name_is_an_attribute_error() -> None:
    for module in (cbatch.files, import_module("cbatch.files.report")):
        with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
            _ = module.nothing
