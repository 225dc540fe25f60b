"""The script that tells how long a long prompt holds up those that decode."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

from cbatch.bench.experiments import stall
from cbatch.bench.experiments.stall import step_gaps
from cbatch.runtime.step_record import StepRecord

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def record(start_s: float, run_s: float, n_steps: int = 1, n_tokens: int = 2) -> StepRecord:
    """A run of two rows whose time is all in the backend."""
    return StepRecord(start_s, 2, n_steps, n_tokens, 0, 0, 0, 0, run_s, run_s, 0, 0, 0)


def test_gap_between_deliveries_is_shared_by_the_steps_of_a_run() -> None:
    records = [record(0.0, 1.0), record(1.5, 1.5, n_steps=4), record(3.0, 2.0, n_tokens=9)]
    assert list(step_gaps(records)) == [0.5, 0.5, 0.5, 0.5, 2.0]
    assert list(step_gaps(records, has_prompt=True)) == [2.0]
    assert list(step_gaps(records, has_prompt=False)) == [0.5] * 4


def test_run_that_failed_adds_its_time_to_the_next() -> None:
    records = [record(0.0, 1.0), record(1.0, 1.0, n_steps=0), record(2.0, 1.0)]
    assert list(step_gaps(records)) == [2.0]


def test_script_prints_a_line_for_each_round_and_their_medians(
    test_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ["--decoders", "2", "--prompt", "60", "--rounds", "2", "--around", "6"]
    monkeypatch.setattr(sys, "argv", ["stall", str(test_model), *sizes, "--prefill-budget", "20"])
    stall.main()
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [f["round"] for f in found] == [0, 1, "median"]
    for f in found:
        assert f["n_prompt_steps"] == 3
        assert 0 < f["gap_p50_ms"] <= f["gap_p99_ms"] <= f["gap_max_ms"]
        assert 0 < f["read_p50_ms"] <= f["read_p99_ms"] <= f["read_max_ms"]
        assert f["ttft_ms"] > 0
        assert f["tokens_per_s"] > 0
