"""The script that tells how long a long prompt holds up those that decode."""

from __future__ import annotations

from cbatch.bench.experiments.stall import step_gaps
from cbatch.runtime.step_record import StepRecord


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
