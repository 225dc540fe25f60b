"""A short run of `tests.type_fuzz`; longer ones are by hand."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

import pytest

from tests import type_fuzz

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.real
@pytest.mark.parametrize("has_model", [False, True])
def test_values_of_every_kind_give_results_or_typed_errors(
    has_model: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"")))
    with type_fuzz.engines(has_model=has_model) as found:
        wrong = [
            f"--seed 0 --case {n}: {said}"
            for n in range(100 if has_model else 500)
            if (said := type_fuzz.one(f"0:{n}", found, tmp_path, has_model=has_model))
        ]
    assert not wrong
