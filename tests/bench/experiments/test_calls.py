"""The script that counts the Python calls of a steady step."""

from __future__ import annotations

import pytest

from cbatch.bench.experiments.calls import count_calls


@pytest.mark.parametrize("is_streamed", [False, True])
def test_counts_are_the_same_each_time(is_streamed: bool) -> None:
    first, second = (count_calls(4, 5, is_streamed=is_streamed) for _ in range(2))
    assert first == second
    assert first.by_file["cbatch/core/scheduler.py"] > 0
    assert first.backend_run > 0


def test_step_that_is_delivered_costs_more_calls() -> None:
    assert count_calls(4, 5, is_streamed=True).total > count_calls(4, 5).total


def test_steady_step_of_32_rows_costs_at_most_240_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # else each step checks the books
    assert count_calls(32, 5).total <= 240
