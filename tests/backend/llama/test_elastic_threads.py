"""Fewer threads while other programs take cores: what is tried and when, on virtual time, and what answers are then."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

from cbatch.backend.llama import llama_backend
from cbatch.backend.llama.elastic_threads import (
    DOWN_WAIT_S,
    TRIAL_S,
    UP_WAIT_S,
    WINDOW_S,
    ElasticThreads,
    Setting,
)
from cbatch.core.plan import StepPlan, StepResult
from cbatch.loading import load
from cbatch.options import RunOptions
from tests.backend.slots import chunk

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from cbatch.response import BatchResult

ALONE = {1: 0.010, 2: 0.006, 3: 0.005, 4: 0.004}
"""Seconds of a step of one row by its threads."""
BESIDE_ONE = {1: 0.010, 2: 0.006, 3: 0.005, 4: 0.012}
BESIDE_ALL = {1: 0.020, 2: 0.013, 3: 0.010, 4: 0.008}
N_RUN = 8


@dataclass(eq=False, slots=True)
class Machine:
    """Cores on which a step takes the seconds of its threads; the owner has a core for a share of them."""

    step_s: Mapping[int, float]
    cpu_share: Mapping[int, float] = field(default_factory=dict)
    """By threads; 1 where nothing is said."""
    now: float = 0.0
    runs: list[int] = field(default_factory=list)
    """Threads of each run."""
    code: int = 0
    short_s: Mapping[int, float] | None = None
    """Seconds of a step if waits are short; None if they change nothing."""
    is_short: bool = False
    n_short: int = 0
    """Runs with short waits."""

    def want(self, whose: object, n_threads: int, *, is_wanted: bool) -> None:
        self.is_short = is_wanted

    def compute(self, plan: StepPlan, n_threads: int) -> StepResult:
        self.runs.append(n_threads)
        self.n_short += self.is_short
        step_s = self.short_s if self.is_short and self.short_s is not None else self.step_s
        if self.code:
            return StepResult([[]] * len(plan.spans), 0, self.code, decode_s=1.0)
        n_tokens = sum(len(c.inputs) for c in plan.spans)
        n_steps, seconds, first_s = 0, 0.0, 0.0
        while n_steps < plan.n_steps and (not plan.slice_s or seconds <= plan.slice_s):
            seconds += step_s[n_threads] * (len(plan.spans) if n_steps else n_tokens)
            first_s = first_s or seconds
            n_steps += 1
        self.now += seconds
        waited_s = seconds * (1 - self.cpu_share.get(n_threads, 1.0))
        return StepResult([[7]], n_steps, decode_s=seconds, first_s=first_s, waited_s=waited_s)


def plan(n_steps: int = N_RUN, *lengths: int) -> StepPlan:
    tokens = [[7] * n for n in lengths or (1,)]
    return StepPlan(tuple(chunk(i, 3, t) for i, t in enumerate(tokens)), n_steps=n_steps)


def do(
    found: ElasticThreads, machine: Machine, seconds: float, wanted: StepPlan | None = None
) -> list[int]:
    """Run a plan for so long; return the threads of each run."""
    end_s, n_before = machine.now + seconds, len(machine.runs)
    while machine.now < end_s:
        found.run(wanted or plan(), machine.compute)
    return machine.runs[n_before:]


def threads(machine: Machine, n_most: int = 4) -> ElasticThreads:
    return ElasticThreads(n_most)


def mostly(runs: Sequence[int]) -> int:
    """Return the threads of nearly all runs: fewer are tried now and then."""
    found = max(runs, key=runs.count)
    assert runs.count(found) > 0.95 * len(runs)
    return found


def test_one_core_that_is_taken_costs_one_thread_until_it_is_free() -> None:
    machine = Machine(BESIDE_ONE, {4: 0.4})
    found = threads(machine)
    do(found, machine, WINDOW_S + 2 * TRIAL_S)
    runs = do(found, machine, 20)
    assert runs.count(3) > 0.9 * len(runs)
    assert set(runs) == {3, 4}  # all of them are tried again, and no fewer
    machine.step_s, machine.cpu_share = ALONE, {}
    do(found, machine, 2.0)
    assert mostly(do(found, machine, 20)) == 4


def test_fewer_threads_that_bring_nothing_are_tried_more_and_more_seldom() -> None:
    machine = Machine(BESIDE_ALL, dict.fromkeys(BESIDE_ALL, 0.5))
    found = threads(machine)
    n_tries = [sum(n < 4 for n in do(found, machine, 10 * DOWN_WAIT_S)) for _ in range(6)]
    assert n_tries[0] > n_tries[-1] > 0
    assert {3, 2} <= set(machine.runs)  # one fewer and half as many, in turn
    assert found.run(plan(), machine.compute)
    assert machine.runs[-1] == 4


def test_gain_within_the_noise_changes_nothing() -> None:
    machine = Machine({1: 0.0097, 2: 0.010}, {2: 0.5})
    found = threads(machine, 2)
    do(found, machine, 30)
    assert set(do(found, machine, WINDOW_S)) == {2}


def test_many_taken_cores_are_given_up_one_after_another() -> None:
    machine = Machine({1: 0.010, 2: 0.012, 3: 0.016, 4: 0.024}, {2: 0.6, 3: 0.5, 4: 0.4})
    found = threads(machine)
    do(found, machine, 3)
    assert max(do(found, machine, WINDOW_S, plan(1)), key=machine.runs.count) == 1


@pytest.mark.parametrize(("n_before", "then"), [(8, [3, 3, 3]), (1, [3, 3, 4])])
def test_trial_without_a_step_of_equal_shape_is_compared_by_kind(
    n_before: int, then: list[int]
) -> None:
    machine = Machine(BESIDE_ONE, {4: 0.4})
    found = threads(machine)
    do(found, machine, WINDOW_S, plan(1, n_before))
    n_runs, start_s = len(machine.runs), machine.now
    for n in (30, 60, 16):  # magnitudes of prompts that no step had before
        found.run(plan(1, n), machine.compute)
    assert machine.runs[n_runs:] == then
    assert machine.now - start_s >= TRIAL_S


def test_mixed_steps_are_compared_by_their_shapes() -> None:
    machine = Machine(BESIDE_ONE, {4: 0.4})
    found = threads(machine)
    for i in range(200):
        found.run(plan(1, 1, 20) if i % 3 else plan(4, 1, 1), machine.compute)
    assert machine.runs[-20:].count(3) >= 15


def test_failed_run_teaches_nothing() -> None:
    machine = Machine(BESIDE_ONE, {4: 0.4}, code=1)
    found = threads(machine)
    for _ in range(5):
        found.run(plan(), machine.compute)
    machine.code = 0
    assert set(do(found, machine, WINDOW_S)) == {4}


def test_trial_waits_for_computing_not_for_the_clock() -> None:
    machine = Machine(BESIDE_ONE, {4: 0.4})
    found = threads(machine)
    do(found, machine, 1)
    runs = do(found, machine, UP_WAIT_S - TRIAL_S)
    assert runs.count(3) >= len(runs) - 1


class Others:
    """What other programs keep busy, of which some may end."""

    n_taken = 2.0


def test_end_of_another_program_is_noticed_at_once() -> None:
    others = Others()
    machine = Machine({1: 0.010, 2: 0.200}, {2: 0.4})
    found = ElasticThreads(2, n_taken=lambda: others.n_taken)
    do(found, machine, 20)
    assert set(do(found, machine, TRIAL_S)) == {1}  # the next trial is seconds away
    machine.step_s, machine.cpu_share, others.n_taken = {1: 0.010, 2: 0.006}, {}, 0.0
    do(found, machine, 3 * TRIAL_S)
    assert mostly(do(found, machine, 20)) == 2


# ---- short waits ----


def waiting(machine: Machine, n_most: int = 4, *, is_fixed: bool = False) -> ElasticThreads:
    return ElasticThreads(n_most, want_waits=machine.want, is_fixed=is_fixed)


def test_waits_stay_long_on_a_machine_without_other_programs() -> None:
    machine = Machine(ALONE, short_s=dict.fromkeys(ALONE, 0.001))
    assert mostly(do(waiting(machine), machine, 60)) == 4
    assert not machine.n_short


def test_short_waits_come_before_fewer_threads_and_end_in_time() -> None:
    machine = Machine({**ALONE, 4: 0.040}, {4: 0.4}, short_s={4: 0.0045})
    found = waiting(machine)
    do(found, machine, 1)
    n_before, runs = machine.n_short, do(found, machine, 20)
    assert machine.n_short - n_before > 0.9 * len(runs)
    assert runs.count(4) > 0.9 * len(runs)
    machine.step_s, machine.cpu_share = ALONE, {}
    do(found, machine, 2)
    n_before, runs = machine.n_short, do(found, machine, 20)
    assert machine.n_short - n_before < 0.1 * len(runs)


def test_fewer_threads_follow_where_short_waits_are_not_enough() -> None:
    machine = Machine({**BESIDE_ONE, 4: 0.040}, {4: 0.4}, short_s={4: 0.012})
    found = waiting(machine)
    do(found, machine, 3)
    runs = do(found, machine, 20)
    assert runs.count(3) > 0.8 * len(runs)


@pytest.mark.parametrize("n_most", [2, 4])
def test_fixed_threads_change_their_waits_alone(n_most: int) -> None:
    machine = Machine(dict.fromkeys(ALONE, 0.040), {n_most: 0.4}, short_s={n_most: 0.010})
    found = waiting(machine, n_most, is_fixed=True)
    do(found, machine, 1)
    n_before, runs = machine.n_short, do(found, machine, 20)
    assert machine.n_short - n_before > 0.9 * len(runs)
    assert set(runs) == {n_most}


@pytest.mark.parametrize(("factor", "is_short"), [(1.2, False), (1.0, True)])
def test_short_waits_are_given_up_where_they_cost(factor: float, *, is_short: bool) -> None:
    slower = {n: factor * seconds for n, seconds in BESIDE_ALL.items()}
    machine = Machine(BESIDE_ALL, {4: 0.5}, short_s=slower)
    found = waiting(machine, is_fixed=True)
    do(found, machine, 30)
    n_before, runs = machine.n_short, do(found, machine, 20)
    assert (machine.n_short - n_before > 0.5 * len(runs)) == is_short


@pytest.mark.parametrize(("factor", "is_short"), [(0.85, True), (0.5, False)])
def test_long_waits_are_not_taken_for_being_fast_by_chance(
    factor: float, *, is_short: bool
) -> None:
    machine = Machine({4: 0.040}, {4: 0.4}, short_s={4: 0.010})
    found = waiting(machine, is_fixed=True)
    do(found, machine, 2)
    machine.step_s = {4: 0.010 * factor}  # while another program still has a core
    n_before, runs = machine.n_short, do(found, machine, 20)
    assert (machine.n_short - n_before > 0.7 * len(runs)) == is_short


def test_engine_that_rests_leaves_long_waits_to_others() -> None:
    machine = Machine({4: 0.040}, {4: 0.4}, short_s={4: 0.010})
    found = waiting(machine, is_fixed=True)
    do(found, machine, 2)
    assert machine.is_short
    found.rest()
    assert not machine.is_short


# ---- on llama.cpp ----


class EveryOther(ElasticThreads):
    """Computes each run with another number of threads."""

    def run(self, plan: StepPlan, compute: Callable[[StepPlan, int], StepResult]) -> StepResult:
        self._now = Setting(1 + self._now.n_threads % 2)
        return compute(plan, self._now.n_threads)


def answers(model: Path, **settings: Any) -> tuple[list[BatchResult], int]:
    """Return answers to three chats, and the threads of the last step."""
    options = RunOptions(max_tokens=24, temperature=0.8, seed=1, logprobs=True, ignore_eos=True)
    with load(model, ctx_per_seq=512, **settings) as engine:
        chats = [[{"role": "user", "content": f"Count to {i}."}] for i in range(3)]
        return engine.run(chats, options=options).results(), engine.stats().n_threads


@pytest.fixture
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama_backend, "available_cores", lambda: 2)
    monkeypatch.setattr(llama_backend, "ElasticThreads", EveryOther)


@pytest.mark.usefixtures("two_cores")
def test_exact_answers_are_the_same_with_any_threads(test_model: Path) -> None:
    exact: dict[str, Any] = {"exact": True, "parallel": 4}
    varied, _ = answers(test_model, **exact)
    fixed, _ = answers(test_model, n_threads=1, **exact)
    assert [(r.token_ids, r.logprobs) for r in varied] == [(r.token_ids, r.logprobs) for r in fixed]


@pytest.mark.usefixtures("two_cores")
@pytest.mark.parametrize(
    "settings",
    [{"n_threads": 2, "parallel": 2}, {"exact": True, "parallel": 1, "flash_attn": "on"}],
    ids=["asked for", "bits"],
)
def test_threads_stay_where_they_are_asked_for_or_change_bits(
    settings: dict[str, Any], test_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[bool] = []

    class Noted(ElasticThreads):
        def __init__(self, *args: Any, is_fixed: bool = False, **kwargs: Any) -> None:
            made.append(is_fixed)
            super().__init__(*args, is_fixed=is_fixed, **kwargs)

    monkeypatch.setattr(llama_backend, "ElasticThreads", Noted)
    assert answers(test_model, **settings)[1] == 2
    assert all(made)
