"""Who gets a slot: by policy, by the cells of a shared pool, and never at the cost of looking at everybody."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, get_args

import pytest

from cbatch.core.slots import N_LOOK, N_OVERTAKEN_MAX
from cbatch.engine_options import Policy
from cbatch.errors import PromptTooLongError, RequestFailedError
from cbatch.runtime.wants import N_REFUSED_MAX
from tests.helpers import (
    Rig,
    drive,
    make_request,
    make_scheduler,
    make_sequences,
    recurrent,
    shared_pool,
    step,
)

if TYPE_CHECKING:
    from cbatch.core.plan import KvCapabilities
    from cbatch.core.request import Request


def shared(n_pool: int, n_slots: int = 4, n_window: int | None = None, **options: Any) -> Rig:
    """A scheduler whose slots share `n_pool` cells."""
    said = {"admission": "reserve", **options}
    return make_scheduler(n_slots, n_window or n_pool, 64, memory=shared_pool(n_pool), **said)


def one_step(rig: Rig) -> None:
    rig.backend.interrupt()
    step(rig)


def small(i: int, **options: Any) -> Request:
    """A request that needs five cells and one step."""
    return make_request(f"small{i}", (i, 2, 3, 4), max_tokens=1, **options)


def in_order(rig: Rig) -> list[str]:
    """The ids in order of admission."""
    having = [d for d in rig.drivers.values() if d.clock.admitted_s is not None]
    return [d.request.id for d in sorted(having, key=lambda d: d.clock.admitted_s or 0.0)]


# ---- policies ----


def test_low_priority_is_served_while_high_ones_keep_coming() -> None:
    rig = make_scheduler(1, policy="priority", ageing_s=2.0)
    rig.submit(make_request("high0", priority=5, max_tokens=1), make_request("low", max_tokens=1))
    for i in range(1, 30):
        step(rig)
        rig.submit(make_request(f"high{i}", priority=5, max_tokens=1))
    # one that came ten seconds later than `low`, or still later, stands behind it
    assert in_order(rig).index("low") <= 11
    drive(rig)


def test_long_prompt_is_served_while_short_ones_keep_coming() -> None:
    rig = make_scheduler(1, policy="shortest")
    rig.submit(make_request("first", max_tokens=1), make_request("long", [1] * 9, max_tokens=1))
    for i in range(20):
        step(rig)
        rig.submit(small(i))
    assert in_order(rig).index("long") <= 1 + 9
    drive(rig)


# ---- a shared pool ----


@pytest.mark.parametrize(("admission", "n_running"), [("reserve", 2), ("optimistic", 3), (None, 3)])
def test_pool_admits_by_the_worst_case_or_by_what_can_be_expected(
    admission: str | None, n_running: int
) -> None:
    rig = shared(32, admission=admission)  # each: 4 + 8 in the worst case, 4 + 6 expected
    rig.submit(*make_sequences(4, max_tokens=8))
    one_step(rig)
    assert len(rig.running()) == n_running


def test_reserve_never_preempts_and_every_answer_is_whole() -> None:
    rig = shared(24, n_window=16)
    rig.submit(*make_sequences(9, n_prompt=4, max_tokens=8))
    drive(rig, before=lambda rig: rig.backend.interrupt())
    assert rig.stats.n_active_max == 2
    assert sum(d.n_preempted for d in rig.drivers.values()) == rig.stats.n_recomputed_tokens == 0
    assert [len(r.token_ids) for r in rig.results.values()] == [8] * 9


def test_optimistic_lets_more_run_when_answers_are_shorter_than_their_caps() -> None:
    rig = shared(64, n_slots=8, n_window=40, admission="optimistic")
    stops = rig.alone(make_request(), 1)
    rig.submit(*(make_request(f"s{i}", max_tokens=30, stop_token_ids=stops) for i in range(80)))
    one_step(rig)
    assert rig.stats.n_active_max == 2
    drive(rig)
    assert rig.state.demand.ratio < 0.15
    assert rig.stats.n_active_max >= 6


# ---- who does not fit ----


def test_head_that_does_not_fit_lets_a_bounded_number_pass() -> None:
    rig = shared(40)
    rig.submit(make_request("runs", max_tokens=20), make_request("big", max_tokens=30))
    rig.submit(*(small(i) for i in range(40)))
    drive(rig)
    assert in_order(rig).index("big") == 1 + N_OVERTAKEN_MAX
    assert rig.drivers["big"].n_overtaken == N_OVERTAKEN_MAX
    assert len(rig.results) == 42


def test_head_that_fits_at_last_goes_before_those_behind_it() -> None:
    rig = shared(40)
    rig.submit(make_request("runs", max_tokens=3), make_request("big", max_tokens=36))
    rig.submit(small(0, seed=1))
    drive(rig)
    assert in_order(rig) == ["runs", "small0", "big"]
    assert rig.drivers["big"].n_overtaken == 1


def test_admission_looks_at_the_first_few_alone() -> None:
    rig = shared(40, n_slots=9)
    rig.submit(make_request("runs", max_tokens=20))
    rig.submit(*(make_request(f"big{i}", max_tokens=30) for i in range(N_LOOK)), small(0))
    one_step(rig)
    assert rig.running() == ["runs"]


@pytest.mark.parametrize("policy", get_args(Policy))
@pytest.mark.parametrize("memory", [None, shared_pool(64), recurrent(4)])
def test_long_queue_costs_a_plan_what_a_short_one_does(
    policy: str, memory: KvCapabilities | None
) -> None:
    n_visited = []
    for n in (20, 500):
        rig = make_scheduler(4, memory=memory, policy=policy)
        rig.submit(*(make_request(str(i), (1, 2, 3), max_tokens=3) for i in range(n)))
        for _ in range(4):
            step(rig)
        n_visited.append(rig.n_visited)
    assert n_visited[0] == n_visited[1] <= 4 * 4 * N_LOOK  # plans, slots


def test_long_queue_behind_one_that_does_not_fit_is_not_looked_through() -> None:
    rig = shared(40)
    rig.submit(make_request("runs", max_tokens=20), make_request("big", max_tokens=36))
    rig.submit(*(make_request(str(i), max_tokens=30) for i in range(2_000)))
    for _ in range(5):
        one_step(rig)
    assert rig.n_visited <= 5 * (4 + 2 * N_LOOK)  # plans, slots


# ---- who never fits ----


@pytest.mark.parametrize("memory", [None, shared_pool(80)])
def test_tokens_that_never_fit_are_refused_on_submission(memory: KvCapabilities | None) -> None:
    rig = make_scheduler(2, n_window=64, memory=memory)
    rig.submit(
        make_request("bad", [1] * 60, max_tokens=5, strict_max_tokens=True),
        make_request("good", [1] * 60, max_tokens=4),
    )
    [bad] = rig.batcher.take_ended()
    assert isinstance(bad.error, PromptTooLongError)
    assert (bad.error.n_prompt, bad.error.n_limit, bad.error.n_output) == (60, 64, 5)
    assert [*rig.batcher.in_flight] == ["good"]
    assert rig.backend.plans == []


def test_text_that_never_fits_is_refused_at_its_turn() -> None:
    rig = make_scheduler(1, n_window=64)
    rig.submit(make_request("first", max_tokens=2), make_request("bad", "x" * 64))
    assert not rig.batcher.occupancy().n_ended
    drive(rig)
    assert isinstance(rig.results["bad"].error, PromptTooLongError)
    assert [*rig.results] == ["first", "bad"]


def test_shortest_knows_on_submission_what_never_fits() -> None:
    rig = make_scheduler(1, n_window=64, policy="shortest")
    rig.submit(make_request("bad", "x" * 64))
    [bad] = rig.batcher.take_ended()
    assert isinstance(bad.error, PromptTooLongError)


@pytest.mark.parametrize("policy", ["fcfs", "shortest"])
def test_prompt_without_a_token_is_refused(policy: str) -> None:
    rig = make_scheduler(policy=policy, tokens_of=lambda *_: ())
    rig.submit(make_request("bad", "x"))
    drive(rig)
    assert isinstance(rig.results["bad"].error, RequestFailedError)


def test_many_bad_prompts_are_refused_in_portions_and_the_good_one_runs() -> None:
    rig = make_scheduler(1, n_window=64)
    rig.submit(
        *(make_request(str(i), "x" * 64) for i in range(150)), make_request("good", max_tokens=1)
    )
    n_refused = []
    while rig.batcher.in_flight:
        step(rig)
        n_refused.append(sum(r.error is not None for r in rig.results.values()))
    assert n_refused == [N_REFUSED_MAX, 2 * N_REFUSED_MAX, 150]
    assert rig.results["good"].finish_reason == "length"


def test_bad_ones_in_a_pool_are_refused_though_the_head_does_not_fit() -> None:
    rig = shared(40)
    rig.submit(make_request("runs", max_tokens=20), make_request("big", max_tokens=30))
    rig.submit(make_request("bad", "x" * 64), small(0))
    one_step(rig)
    assert isinstance(rig.results["bad"].error, PromptTooLongError)
    assert "small0" in rig.results
