"""The script that tells what a long queue costs a step."""

from __future__ import annotations

import json
import sys

import pytest

from cbatch.bench import queues
from cbatch.bench.queues import CASES, POLICIES, Case, measure
from cbatch.engine_options import ScheduleOptions


@pytest.mark.parametrize("policy", ["fcfs", "priority", "shortest"])
@pytest.mark.parametrize(("case", "n_visited"), [("decode", 0.0), ("admission", 1.0)])
def test_step_looks_at_whom_it_admits_and_at_nobody_else(
    policy: str, case: Case, n_visited: float
) -> None:
    options = ScheduleOptions(policy=policy)  # type: ignore[arg-type]
    for n_queued in (3, 300):
        found = measure(options, case, n_slots=4, n_queued=n_queued, n_steps=20)
        assert found.visited_per_plan == n_visited


def test_round_robin_looks_at_one_for_each_turn_that_ends() -> None:
    options = ScheduleOptions(policy="round_robin", quantum=10)
    found = measure(options, "decode", n_slots=4, n_queued=300, n_steps=20)
    assert found.visited_per_plan == pytest.approx(2 * 4 / 20)


def test_script_prints_a_line_for_each_combination(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        sys, "argv", ["queues", "--slots", "2", "--queued", "3", "30", "--steps", "8"]
    )
    queues.main()
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(f["policy"], f["case"], f["queued"]) for f in found] == [
        (p, c, n) for p in POLICIES for c in CASES for n in (3, 30)
    ]
    for f in found:
        assert min(f["plan_us"], f["apply_us"], f["submit_us"], f["cancel_us"]) > 0
