"""The script that counts the Python calls of a steady step."""

from __future__ import annotations

import subprocess
import sys

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


@pytest.mark.real
def test_steady_step_of_32_rows_costs_at_most_240_calls() -> None:
    count = (
        "from cbatch.bench.experiments.calls import count_calls; print(count_calls(32, 5).total)"
    )
    found = subprocess.run(  # apart, because each step of a test checks the books
        [sys.executable, "-c", count], capture_output=True, text=True, check=True
    )
    assert float(found.stdout) <= 240
