"""What goes into each step, and what a failed step does to whom."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import pytest

from cbatch.backend.fake import StepCost
from cbatch.core.plan import N_STEPS_MAX, KvCapabilities, StepResult
from cbatch.errors import PlanError
from tests.helpers import (
    Rig,
    drive,
    make_request,
    make_scheduler,
    make_sequences,
    shared_pool,
    step,
)

T = TypeVar("T")

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cbatch.core.plan import StepPlan
    from cbatch.core.span import Span


def sizes(plan: StepPlan) -> dict[int, int]:
    """Tokens by slot."""
    return {c.slot: len(c.inputs) for c in plan.spans}


def must(plan: T | None) -> T:
    assert plan is not None
    return plan


def test_stop_on_the_first_token_frees_the_slot_at_once() -> None:
    rig = make_scheduler(n_slots=1)
    [token] = rig.alone(make_request(), 1)
    rig.submit(make_request("a", stop_token_ids=[token]), make_request("b", max_tokens=1))
    step(rig)
    assert (rig.results["a"].finish_reason, rig.results["a"].token_ids) == ("stop", ())
    assert len(must(step(rig)).binds) == 1
    assert "b" in rig.results


def test_long_prompt_loads_in_the_room_that_decode_rows_leave() -> None:
    rig = make_scheduler(n_slots=2, n_batch=8)
    rig.submit(make_request("a", (1, 2), max_tokens=20))
    rig.backend.interrupt()
    step(rig)
    rig.submit(make_request("b", range(30), max_tokens=1))
    plans = [must(step(rig)) for _ in range(5)]
    assert [sizes(p) for p in plans] == [{0: 1, 1: 7}] * 4 + [{0: 1, 1: 2}]
    assert [p.n_steps for p in plans] == [1] * 5
    assert len(rig.drivers["a"].tokens) == 2 + 1 + 5
    assert "b" in rig.results


def test_rows_that_decode_come_before_an_older_prompt_that_loads() -> None:
    rig = make_scheduler(n_slots=4, n_batch=4)
    rig.submit(make_request("long", range(9)), *make_sequences(3, n_prompt=1, max_tokens=9))
    assert [sizes(must(step(rig))) for _ in range(3)] == [{0: 1, 1: 1, 2: 1, 3: 1}] * 3


@pytest.mark.parametrize(
    ("n_batch", "memory"),
    [(8, None), (24, shared_pool(512)), (96, None), (150, shared_pool(512))],
    ids=str,
)
def test_first_token_comes_before_the_last_prompt_is_computed(
    n_batch: int, memory: KvCapabilities | None
) -> None:
    rig = make_scheduler(n_slots=8, n_batch=n_batch, memory=memory)
    rig.submit(*make_sequences(8, n_prompt=24, max_tokens=40))
    drivers = [rig.drivers[str(i)] for i in range(8)]
    while not any(d.n_output for d in drivers):
        step(rig)
    assert drivers[0].n_output
    assert min(d.n_computed for d in drivers) < 24


def test_slots_freed_together_are_refilled_in_one_plan() -> None:
    rig = make_scheduler(n_slots=4)
    rig.submit(*make_sequences(8, max_tokens=3))
    plans = drive(rig)
    assert [len(p.binds) for p in plans if p.binds] == [4, 4]


def test_prompt_that_waits_is_not_passed_by_one_as_long() -> None:
    rig = make_scheduler(2, 64, 17, memory=shared_pool(120))
    rig.submit(make_request("x", max_tokens=1), make_request("old", range(60), max_tokens=1))
    step(rig)
    rig.submit(make_request("new", range(50), max_tokens=1))
    plan = step(rig)
    assert plan is not None
    assert rig.running() == ["new", "old"]
    assert sizes(plan) == {1: 17}


def test_short_prompt_passes_a_long_one_that_came_first() -> None:
    rig = make_scheduler(n_slots=2, n_batch=8)
    rig.submit(make_request("long", range(40)), make_request("short", (1, 2, 3), max_tokens=1))
    assert sizes(must(step(rig))) == {0: 5, 1: 3}
    assert [*rig.results] == ["short"]


def test_plan_repeats_until_the_first_row_reaches_its_cap() -> None:
    rig = make_scheduler(n_slots=2)
    rig.submit(make_request("a", max_tokens=9), make_request("b", max_tokens=4))
    plans = drive(rig)
    assert [(sizes(p), p.n_steps) for p in plans] == [
        ({0: 4, 1: 4}, 4),
        ({0: 1}, 5),
        ({}, 1),
    ]


def test_plan_repeats_no_more_than_its_buffers_hold() -> None:
    rig = make_scheduler(n_slots=1, n_window=512)
    rig.submit(make_request(max_tokens=N_STEPS_MAX + 36))
    assert [p.n_steps for p in drive(rig)] == [N_STEPS_MAX, 36, 1]


def run_lengths(rig: Rig, n_runs: int) -> list[int]:
    """The steps of the next runs, which end by their seconds, too."""
    rig.has_slices = True
    lengths = []
    for _ in range(n_runs):
        n_before = rig.backend.n_steps
        step(rig)
        lengths.append(rig.backend.n_steps - n_before)
    return lengths


def test_run_is_short_where_output_is_read_as_it_comes() -> None:
    rig = make_scheduler(n_slots=1, n_window=512, cost=StepCost(base_s=0.03))
    rig.submit(make_request(max_tokens=200))
    assert run_lengths(rig, 2) == [17, 17]  # the last of them ends later than half a second
    rig.batcher.in_flight["a"].reply.is_watched = True
    assert run_lengths(rig, 1) == [1]  # later than 20 ms


def test_run_ends_in_time_for_the_next_deadline() -> None:
    rig = make_scheduler(n_slots=2, n_window=512, cost=StepCost(base_s=0.03))
    rig.submit(make_request(max_tokens=200), make_request("b", max_tokens=200, timeout_s=0.1))
    assert run_lengths(rig, 2) == [4, 17]
    assert rig.drivers["b"].finish_reason == "timeout"


def test_run_is_short_where_a_stop_string_may_end_it() -> None:
    rig = make_scheduler(n_slots=1, n_window=512, cost=StepCost(base_s=0.03))
    rig.submit(make_request(max_tokens=200, stop=["never"]))
    assert run_lengths(rig, 2) == [1, 1]


def test_run_is_short_where_a_slot_is_free_for_one_that_waits() -> None:
    memory = shared_pool(100)
    rig = make_scheduler(2, 64, 64, memory=memory, admission="reserve", cost=StepCost(base_s=0.006))
    rig.submit(*make_sequences(2, max_tokens=50))
    assert run_lengths(rig, 2) == [4, 4]
    assert rig.drivers["1"].slot is None


def test_arrival_joins_between_steps_without_stopping_the_running_row() -> None:
    rig = make_scheduler(n_slots=2)
    rig.submit(make_request("a", max_tokens=8))
    rig.backend.interrupt()
    step(rig)
    rig.submit(make_request("b", (7, 8, 9), max_tokens=2))
    assert sizes(must(step(rig))) == {0: 1, 1: 3}


def test_apply_for_an_empty_slot_raises() -> None:
    rig = make_scheduler()
    rig.submit(make_request())
    plan = must(rig.scheduler.plan(0.0))
    rig.cancel("a")
    with pytest.raises(PlanError, match="slot 0"):
        rig.scheduler.apply(plan, StepResult([[1]], 1), 0.0)


def once(code: int, at: int) -> Callable[[Sequence[Span]], int]:
    """Fail step number `at` with `code`."""
    n_calls = -1

    def fail(chunks: Sequence[Span]) -> int:
        nonlocal n_calls
        n_calls += 1
        return code if n_calls == at else 0

    return fail


@pytest.mark.parametrize("code", [1, -3])
def test_culprit_deep_in_its_prompt_is_found_and_nobody_restarts_forever(code: int) -> None:
    def fail(chunks: Sequence[Span]) -> int:
        return code if any(99 in c.inputs for c in chunks) else 0

    rig = make_scheduler(n_slots=2, n_batch=8, code=fail)
    guilty = make_request("guilty", [1] * 30 + [99], max_tokens=4)
    good = make_request("good", [2] * 30, max_tokens=4)
    rig.submit(guilty, good)
    drive(rig, n_max=40)
    assert rig.results["guilty"].finish_reason == "error"
    assert rig.results["good"].token_ids == tuple(rig.alone(good, 4))


def test_failed_step_is_tried_in_halves_then_all_again() -> None:
    rig = make_scheduler(n_slots=3, code=once(1, at=0))
    rig.submit(*make_sequences(3, max_tokens=3))
    plans = drive(rig)
    assert [[*sizes(p)] for p in plans[:4]] == [[0, 1, 2], [0, 1], [2], [0, 1, 2]]
    assert all(p.n_steps == 1 for p in plans[1:3])


@pytest.mark.parametrize(("code", "n_computed"), [(1, 4), (-1, 4), (2, 4), (-2, 0), (-3, 0)])
def test_failure_keeps_or_drops_the_cells_as_llama_cpp_does(code: int, n_computed: int) -> None:
    rig = make_scheduler(n_slots=2, code=once(code, at=1))
    rig.submit(*make_sequences(2, max_tokens=5))
    rig.backend.interrupt()
    step(rig)
    step(rig)
    assert [rig.drivers[id].n_computed for id in "01"] == [n_computed] * 2
    assert [rig.drivers[id].n_output for id in "01"] == [1, 1]
    plan = must(rig.scheduler.plan(rig.now)).step
    assert plan.clears == (() if n_computed else (0, 1))
    assert plan.trims == (((0, 4), (1, 4)) if code == 2 else ())


def test_newcomer_during_the_search_for_the_guilty_waits_and_is_served() -> None:
    rig = make_scheduler(n_slots=3, code=once(-3, at=0))
    rig.submit(*make_sequences(2, max_tokens=3))
    step(rig)
    late = make_request("late", (5, 6), max_tokens=3)
    rig.submit(late)
    assert [*sizes(must(step(rig)))] == [0]
    drive(rig)
    assert rig.results["late"].token_ids == tuple(rig.alone(late, 3))


def test_stop_string_in_the_middle_of_a_run_drops_what_came_after() -> None:
    rig = make_scheduler(n_slots=1, n_vocab=4096)
    text = "".join(
        rig.backend.vocab.piece(t).decode("utf-8", "replace") for t in rig.alone(make_request(), 9)
    )
    rig.submit(make_request(max_tokens=9, stop=text[3:5]))
    [plan] = [p for p in drive(rig) if p.spans]
    assert plan.n_steps == 9
    result = rig.results["a"]
    assert (result.finish_reason, result.text) == ("stop", text[:3])
    assert result.usage.completion_tokens == 5
