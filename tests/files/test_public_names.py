"""The public names of runs over files, where they are and where scripts of earlier days look for them."""

from __future__ import annotations

from importlib import import_module

import pytest

import cbatch.files

FORMER = {
    "check": "check_file",
    "estimate": "estimate_file",
    "frames": "run_table",
    "recorder": "RunRecorder",
    "report": "write_report",
    "run": "run_file",
    "settings": "FileOptions",
    "sort": "sort_in_place",
    "source": "open_source",
    "status": "status_of",
    "trace": "TraceWriter",
}


@pytest.mark.parametrize("name", cbatch.files.__all__)
def test_public_name_is_to_be_had(name: str) -> None:
    assert getattr(cbatch.files, name).__name__ == name


@pytest.mark.parametrize(("module", "name"), FORMER.items())
def test_name_is_also_where_it_was_once(module: str, name: str) -> None:
    former = import_module(f"cbatch.files.{module}")
    assert getattr(former, name) is getattr(cbatch.files, name)


def test_unknown_name_is_an_attribute_error() -> None:
    for module in (cbatch.files, import_module("cbatch.files.report")):
        with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
            _ = module.nothing
