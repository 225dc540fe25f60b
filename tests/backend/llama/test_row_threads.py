"""Fewer threads for steps of few rows: what is tried, settled and tried again, on virtual time."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest

from cbatch.backend.llama.elastic_threads import ElasticThreads
from cbatch.backend.llama.row_threads import (
    MOST_LOST,
    N_STEPS_TRIED,
    RowThreads,
)
from cbatch.core.plan import StepPlan, StepResult
from tests.backend.slots import chunk

if TYPE_CHECKING:
    from collections.abc import Callable

    Cost = Callable[[int, int], float]


def small(n_rows: int, n_threads: int) -> float:
    """Return the seconds of a step of a small model: threads wait for each other."""
    return 0.001 * n_rows / n_threads + 0.002 * (n_threads - 1)


def large(n_rows: int, n_threads: int) -> float:
    """Return the same of a large one: threads share the weights."""
    return (0.02 + 0.001 * n_rows) / n_threads


def up_to_four(n_rows: int, n_threads: int) -> float:
    """Return the same of a small model up to four rows, and of a large one above."""
    return small(n_rows, n_threads) if n_rows <= 4 else large(n_rows, n_threads)


@dataclass(eq=False, slots=True)
class RowMachine:
    """A step takes the seconds that its rows and threads cost."""

    cost: Cost
    waited: float = 0.0
    """Share of the time in which the owner has no core."""
    seconds: float = 0.0
    runs: list[tuple[int, int]] = field(default_factory=list)
    """Threads and most draft tokens of each run."""

    def compute(self, plan: StepPlan, n_threads: int) -> StepResult:
        self.runs.append((n_threads, plan.n_drafts))
        n_drafts = plan.n_drafts
        step_s = self.cost(len(plan.spans) + n_drafts, n_threads)
        n_steps = 1
        while n_steps < plan.n_steps and (not plan.slice_s or n_steps * step_s <= plan.slice_s):
            n_steps += 1
        self.seconds += n_steps * step_s
        tokens = [[7] * n_steps for _ in plan.spans]
        return StepResult(
            tokens,
            n_steps,
            decode_s=n_steps * step_s,
            first_s=step_s,
            n_drafts=(n_drafts * n_steps, 0, 0),
            waited_s=self.waited * n_steps * step_s,
        )

    def share(self, n_threads: int, n: int = 400) -> float:
        """Return the share of the last runs that had so many threads."""
        return sum(found == n_threads for found, _ in self.runs[-n:]) / len(self.runs[-n:])


def rows(
    n: int, n_steps: int = 8, *, at: int = 3, n_prompt: int = 1, n_drafts: int = 0
) -> StepPlan:
    spans = tuple(chunk(i, at, [7] * (n_prompt if i == n - 1 else 1)) for i in range(n))
    return StepPlan(spans, n_steps=n_steps, n_drafts=n_drafts)


def do(
    found: RowThreads | ElasticThreads, machine: RowMachine, seconds: float, *plans: StepPlan
) -> None:
    end_s = machine.seconds + seconds
    while machine.seconds < end_s:
        for plan in plans:
            found.run(plan, machine.compute)


@pytest.mark.parametrize("n_most", [2, 3, 4, 64])
@pytest.mark.parametrize("n_steps", [1, 8])
def test_small_steps_come_to_have_one_thread_and_large_ones_keep_all(
    n_most: int, n_steps: int
) -> None:
    for cost, n_best in ((small, 1), (large, n_most)):
        found, machine = RowThreads(n_most), RowMachine(cost)
        do(found, machine, 300, rows(1, n_steps))
        assert found.n_best(rows(1)) == n_best
        assert machine.share(n_best) > 0.95


def test_best_number_between_one_and_all_is_found() -> None:
    def cost(n_rows: int, n_threads: int) -> float:
        return 0.016 / n_threads + 0.0005 * n_threads  # least with 5 or 6

    found, machine = RowThreads(64), RowMachine(cost)
    do(found, machine, 120, rows(1))
    assert found.n_best(rows(1)) in {4, 8}


def test_each_magnitude_of_rows_and_histories_is_learned_by_itself() -> None:
    found, machine = RowThreads(4), RowMachine(up_to_four)
    for _ in range(20):
        do(found, machine, 5, rows(1))
        do(found, machine, 5, rows(16))
    assert found.n_best(rows(1)) == 1
    assert found.n_best(rows(1, at=5000)) == found.n_best(rows(16)) == 4


def test_prompts_have_all_threads() -> None:
    found, machine = RowThreads(4), RowMachine(small)
    do(found, machine, 60, rows(1))
    n_before = len(machine.runs)
    do(found, machine, 20, rows(2, 1, n_prompt=9), rows(1, 1))
    assert {n for n, _ in machine.runs[n_before::2]} == {4}
    assert found.n_best(rows(1)) == 1


@pytest.mark.parametrize("cost", [large, lambda _, n: 0.1 * n], ids=["all", "one"])
def test_trials_cost_a_bounded_share(cost: Cost) -> None:
    found, machine = RowThreads(2), RowMachine(cost)
    best_s, most_s = sorted((cost(1, 1), cost(1, 2)))
    n_steps = sum(found.run(rows(1), machine.compute).n_steps for _ in range(20_000))
    before_the_first = 2 * N_STEPS_TRIED * most_s / MOST_LOST
    assert machine.seconds <= n_steps * best_s * (1 + 2 * MOST_LOST) + before_the_first


def test_gain_within_the_noise_changes_nothing() -> None:
    found, machine = RowThreads(2), RowMachine(lambda _, n: 0.01 if n == 2 else 0.0096)
    do(found, machine, 120, rows(1))
    assert found.n_best(rows(1)) == 2


def test_chance_does_not_give_up_threads_that_are_needed() -> None:
    drawn = random.Random(1)
    found, machine = RowThreads(2), RowMachine(lambda _, n: 0.01 / n * drawn.uniform(0.7, 1.3))
    for _ in range(40):
        do(found, machine, 10, rows(4))
        assert found.n_best(rows(4)) == 2


def test_fewer_threads_are_given_up_again_where_they_are_slower_later() -> None:
    found, machine = RowThreads(4), RowMachine(small)
    do(found, machine, 30, rows(1))
    assert found.n_best(rows(1)) == 1
    machine.cost = large
    do(found, machine, 300, rows(1))
    assert found.n_best(rows(1)) == 4


def test_draft_tokens_count_as_rows() -> None:
    found, machine = RowThreads(2), RowMachine(up_to_four)
    do(found, machine, 60, rows(1))
    do(found, machine, 60, rows(1, n_drafts=15))
    assert machine.share(2) > 0.95
    do(found, machine, 60, rows(1, n_drafts=2))
    assert machine.share(1) > 0.95
    assert found.n_best(rows(1)) == 1


def test_failed_run_teaches_nothing() -> None:
    found, machine = RowThreads(2), RowMachine(small)

    def fail(plan: StepPlan, n_threads: int) -> StepResult:
        return StepResult([[] for _ in plan.spans], 0, 1, decode_s=0.001)

    for i in range(3000):
        found.run(rows(1), machine.compute if i % 3 else fail)
    assert found.n_best(rows(1)) == 1


# ---- with what other programs leave ----


def test_trials_that_are_ended_settle_nothing_and_stay_seldom() -> None:
    found, machine = RowThreads(2), RowMachine(small)
    for _ in range(3000):
        found.run(rows(1, 4), machine.compute)
        if machine.runs[-1][0] == 1:
            found.end_trial()
    assert found.n_best(rows(1)) == 2
    assert machine.share(1, 3000) < 0.02


def test_what_is_best_for_few_rows_stays_so_beside_other_programs() -> None:
    found, machine = ElasticThreads(4), RowMachine(small)
    do(found, machine, 30, rows(1))
    machine.waited = 0.5
    do(found, machine, 30, rows(1))
    assert machine.share(1) > 0.95


def test_number_that_is_asked_for_stays() -> None:
    found, machine = ElasticThreads(2, is_fixed=True), RowMachine(small)
    do(found, machine, 30, rows(1))
    assert machine.share(2) == 1
