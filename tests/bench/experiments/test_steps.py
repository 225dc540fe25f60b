"""The bare loop and the script that compares the engine with it."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import pytest

from cbatch.backend.load.open_model import open_model
from cbatch.bench.bare import BareLoop
from cbatch.bench.experiments import steps
from cbatch.engine_options import EngineOptions

if TYPE_CHECKING:
    from pathlib import Path


def test_bare_loop_runs_again_and_frees_what_it_took(test_model: Path) -> None:
    model = open_model(test_model)
    for _ in range(3):
        loop = BareLoop(model, EngineOptions(parallel=3, ctx_per_seq=256, n_threads=1))
        assert loop.run(4) > 0
        assert loop.run(2) > 0
        loop.close()
    model.close()


def test_script_prints_a_line_for_each_width(
    test_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [str(test_model), "--rows", "1", "3", "--steps", "4", "--rounds", "1"]
    monkeypatch.setattr(sys, "argv", ["steps", *given])
    steps.main()
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [f["rows"] for f in found] == [1, 3]
    for f in found:
        parts = f["ms_decode"] + f["ms_sample"] + f["ms_outside"]
        assert f["ms_step"] == pytest.approx(parts, abs=0.01)
        assert f["engine_over_bare"] > 0
