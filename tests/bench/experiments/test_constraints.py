"""The benchmark of constraints: both turns give what was asked, and the figures follow from them."""

from __future__ import annotations

import json
import sys

import pytest

from cbatch.backend.fake import FakeBackend
from cbatch.bench.experiments import constraints
from cbatch.bench.experiments.constraints import ConstraintTurn
from cbatch.engine import Engine


def test_each_round_has_a_free_and_a_bound_turn() -> None:
    with Engine(FakeBackend(3, 64, 32)) as engine:
        rounds = constraints.compare(engine, {"regex": "1"}, 8, 2, 2)
    assert len(rounds) == 2
    assert all(free.tps > 0 < bound.tps for free, bound in rounds)


def test_summary_is_the_middle_and_the_range_of_each_rounds_ratio() -> None:
    free = ConstraintTurn(100.0, 2.0, 0.5, 8)
    rounds = [(free, ConstraintTurn(tps, 3.0, 1.0, 6)) for tps in (80.0, 90.0, 120.0)]
    found = constraints.summary(rounds)
    assert (found["ratio_min"], found["ratio"], found["ratio_max"]) == (0.8, 0.9, 1.2)
    assert (found["free_ms_step"], found["bound_ms_sample"]) == (2.0, 1.0)


@pytest.mark.real
def test_script_prints_a_line_for_each_constraint(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--rows", "2", "--tokens", "6", "--rounds", "1", "--only", "letters", "records"]
    monkeypatch.setattr(sys, "argv", ["constraints", *given])
    constraints.main()
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [f["constraint"] for f in found] == ["letters", "records"]
    assert all(f["ratio"] > 0 for f in found)
