"""Requests that run in a slot of their own choosing: they wait for it, hold up nobody, and come back to it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cbatch.core.slots import N_LOOK, choose_mover
from cbatch.engine_options import Policy
from cbatch.errors import ConfigError
from cbatch.options import RunOptions
from tests.helpers import (
    Rig,
    drive,
    make_request,
    make_scheduler,
    partitioned,
    recurrent,
    shared_pool,
    step,
)
from tests.profiles import examples

if TYPE_CHECKING:
    from cbatch.core.plan import KvCapabilities
    from cbatch.core.request import Request

POLICIES: tuple[str, ...] = get_args(Policy)
A_TEXT = range(40)


def one_step(rig: Rig) -> None:
    rig.backend.interrupt()
    step(rig)


def slots_of(rig: Rig) -> dict[str, int | None]:
    return {id: d.slot for id, d in rig.drivers.items()}


def check_streams(rig: Rig, *requests: Request) -> None:
    for request in requests:
        n_output = request.options.max_tokens or 0
        assert rig.results[request.id].token_ids == tuple(rig.alone(request, n_output))


def in_order(rig: Rig) -> list[str]:
    """The ids in order of admission."""
    at = {id: d.clock.admitted_s for id, d in rig.drivers.items()}
    return sorted(at, key=lambda id: at[id] or 0.0)


# ---- which slot, and when ----


def test_one_waits_for_its_slot_and_the_others_pass() -> None:
    rig = make_scheduler(2)
    rig.submit(make_request("runs", slot=1, max_tokens=6), make_request("waits", slot=1))
    rig.submit(*(make_request(f"o{i}", max_tokens=2) for i in range(3)))
    drive(rig, n_max=200)
    assert in_order(rig) == ["runs", "o0", "o1", "o2", "waits"]
    assert slots_of(rig) == {"runs": 1, "waits": 1, "o0": 0, "o1": 0, "o2": 0}
    assert rig.drivers["waits"].n_overtaken == 0


def test_others_take_another_slot_than_the_one_that_is_chosen() -> None:
    rig = make_scheduler(2)
    rig.submit(make_request("other", max_tokens=9), make_request("own", slot=0, max_tokens=9))
    one_step(rig)
    assert slots_of(rig) == {"other": 1, "own": 0}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("memory", [None, shared_pool(128)])
def test_any_number_that_wait_for_one_slot_cost_those_behind_nothing(
    policy: str, memory: KvCapabilities | None
) -> None:
    n_visited = []
    for n in (20, 500):
        rig = make_scheduler(2, memory=memory, policy=policy)
        rig.submit(make_request("runs", slot=0, max_tokens=50))
        rig.submit(*(make_request(str(i), slot=0, max_tokens=50) for i in range(n)))
        rig.submit(make_request("other", max_tokens=3))
        for _ in range(3):
            one_step(rig)
        assert "other" in rig.results
        n_visited.append(rig.n_visited)
    assert n_visited[0] == n_visited[1] <= 3 * 4 * N_LOOK


def test_slot_is_given_in_the_order_of_all_that_wait() -> None:
    rig = make_scheduler(1)
    slots = [None, 0, None, 0, 0, None]
    rig.submit(*(make_request(str(i), slot=s, max_tokens=2) for i, s in enumerate(slots)))
    drive(rig)
    assert in_order(rig) == [str(i) for i in range(6)]


def test_priority_counts_among_those_that_chose_and_those_that_did_not() -> None:
    rig = make_scheduler(1, policy="priority")
    asked = [(0, None), (1, 0), (4, None), (3, 0), (2, None)]
    rig.submit(
        *(make_request(str(p), slot=s, priority=p, max_tokens=1) for p, s in asked),
    )
    drive(rig)
    assert in_order(rig) == ["4", "3", "2", "1", "0"]


def test_turns_on_one_slot_go_round_whoever_chose_it() -> None:
    rig = make_scheduler(1, policy="round_robin", quantum=2, memory=partitioned(64))
    requests = [make_request(id, slot=s, max_tokens=8) for id, s in [("a", 0), ("b", None)]]
    rig.submit(*requests)
    seen = list[str]()
    while rig.batcher.in_flight:
        one_step(rig)
        seen += rig.running()
    assert "".join(seen).startswith("aabbaabb")
    check_streams(rig, *requests)


def test_turn_ends_for_one_that_chose_the_slot_though_another_is_free() -> None:
    rig = make_scheduler(2, policy="round_robin", quantum=2, memory=partitioned(128))
    requests = [make_request(id, slot=1, max_tokens=9, seed=i) for i, id in enumerate("ab")]
    rig.submit(*requests)
    for _ in range(3):
        one_step(rig)
    assert rig.running() == ["b"]
    drive(rig)
    check_streams(rig, *requests)


# ---- paused ones, full pools ----


def test_paused_one_gives_up_the_slot_that_another_chose() -> None:
    rig = make_scheduler(3, memory=partitioned(192))
    requests = [make_request(id, max_tokens=5) for id in "abc"]
    rig.submit(*requests)
    one_step(rig)
    rig.batcher.pause("a")
    rig.batcher.pause("c")
    rig.submit(own := make_request("own", slot=2, max_tokens=2))
    one_step(rig)
    assert slots_of(rig) == {"a": 0, "b": 1, "c": None, "own": 2}
    rig.batcher.resume("a")
    rig.batcher.resume("c")
    drive(rig)
    check_streams(rig, own, *requests)


def test_paused_one_comes_back_to_the_slot_that_it_chose() -> None:
    rig = make_scheduler(2, memory=partitioned(128))
    rig.submit(own := make_request("own", slot=0, max_tokens=9))
    one_step(rig)
    rig.batcher.pause("own")
    rig.submit(*(make_request(f"o{i}", max_tokens=4) for i in range(2)))
    one_step(rig)
    assert slots_of(rig) == {"own": None, "o0": 1, "o1": 0}
    rig.batcher.resume("own")
    one_step(rig)
    assert rig.drivers["own"].slot is None
    drive(rig)
    assert rig.drivers["own"].slot == 0
    check_streams(rig, own)


@pytest.mark.parametrize("can_save", [True, False])
def test_one_that_lost_its_cells_comes_back_to_the_slot_that_it_chose(can_save: bool) -> None:
    memory = shared_pool(16, can_save=can_save)
    rig = make_scheduler(4, 16, 64, memory=memory, admission="optimistic")
    rig.state.demand.ratio = 0.01
    requests = [make_request("old", max_tokens=12), make_request("own", slot=3, max_tokens=12)]
    rig.submit(*requests)
    while not rig.drivers["own"].n_preempted:
        one_step(rig)
    rig.submit(late := make_request("late", (1,), max_tokens=1))
    drive(rig)
    assert slots_of(rig)["own"] == 3
    check_streams(rig, late, *requests)


def test_slot_is_kept_for_the_one_before_that_waits_for_cells() -> None:
    rig = make_scheduler(3, 40, 64, memory=shared_pool(40), admission="reserve")
    rig.submit(make_request("runs", slot=2, max_tokens=12))
    rig.submit(make_request("own", slot=0, max_tokens=30))
    rig.submit(*(make_request(f"o{i}", (i,), max_tokens=9) for i in range(4)))
    while "runs" not in rig.results:
        one_step(rig)
        assert rig.ledger.holders[0] is None
    drive(rig)
    assert len(rig.results) == 6


def test_sequence_in_a_slot_that_it_chose_is_not_moved() -> None:
    rig = make_scheduler(3, memory=partitioned(192))
    rig.submit(make_request("short", max_tokens=1), make_request("own", slot=2, max_tokens=30))
    one_step(rig)
    assert rig.running() == ["own"]
    assert choose_mover(rig.ledger) is None
    for _ in range(3):
        one_step(rig)
        assert rig.drivers["own"].slot == 2
    rig.submit(make_request("other", slot=None, max_tokens=30))
    drive(rig)


# ---- what it begins with ----


@pytest.mark.parametrize("is_running", [True, False])
def test_cells_of_another_slot_are_copied_into_the_chosen_one(is_running: bool) -> None:
    rig = make_scheduler(3, 96, 96, memory=partitioned(288), share_prefixes=True)
    rig.submit(make_request("first", A_TEXT, slot=0, max_tokens=30 if is_running else 1))
    one_step(rig)
    rig.submit(own := make_request("own", [*A_TEXT, 99], slot=2, max_tokens=5))
    drive(rig)
    assert rig.results["own"].usage.cached_tokens == 40
    assert rig.drivers["own"].slot == 2
    check_streams(rig, own)


def test_followers_take_what_their_leader_computes_to_the_slots_they_chose() -> None:
    rig = make_scheduler(3, 96, 16, memory=partitioned(288), share_prefixes=True)
    requests = [
        make_request(str(i), [*A_TEXT, 90 + i], slot=s, max_tokens=3)
        for i, s in enumerate((2, 0, 1))
    ]
    rig.submit(*requests)
    drive(rig)
    assert slots_of(rig) == {"0": 2, "1": 0, "2": 1}
    assert rig.stats.n_prompt_tokens == 43
    check_streams(rig, *requests)


@pytest.mark.parametrize("slot", [0, 1])
def test_memory_that_cannot_copy_goes_on_in_the_slot_of_its_cells_alone(slot: int) -> None:
    rig = make_scheduler(2, 96, 96, memory=recurrent(2), share_prefixes=True)
    rig.submit(first := make_request("first", A_TEXT, slot=0, max_tokens=3))
    drive(rig)
    prompt = [*A_TEXT, *rig.alone(first, 2), 7]
    rig.submit(own := make_request("own", prompt, slot=slot, max_tokens=5))
    drive(rig)
    assert rig.drivers["own"].slot == slot
    assert rig.results["own"].usage.cached_tokens == (42 if slot == 0 else 0)
    check_streams(rig, own)


# ---- many ----


@given(
    asked=st.lists(
        st.tuples(st.none() | st.integers(0, 2), st.integers(1, 9), st.integers(0, 8)), min_size=9
    ),
    policy=st.sampled_from(POLICIES),
    memory=st.sampled_from([None, partitioned(192), shared_pool(64), recurrent(3)]),
)
@settings(max_examples=examples(150), deadline=None)
def test_nobody_waits_for_ever_and_no_slot_is_idle_that_one_could_have(
    asked: list[tuple[int | None, int, int]], policy: str, memory: KvCapabilities | None
) -> None:
    rig = make_scheduler(3, memory=memory, policy=policy)  # whose plans are checked
    requests = [
        make_request(str(i), [i] * n, slot=slot, max_tokens=n + 1)
        for i, (slot, n, _) in enumerate(asked)
    ]
    arrivals = sorted(zip(asked, requests, strict=True), key=lambda pair: pair[0][2])
    for i_plan in range(9):
        while arrivals and arrivals[0][0][2] == i_plan:
            rig.submit(arrivals.pop(0)[1])
        one_step(rig)
    n_steps = sum(n + 2 for _, n, _ in asked)
    drive(rig, n_max=4 * n_steps)
    check_streams(rig, *requests)
    assert all(slot in (None, rig.drivers[str(i)].slot) for i, (slot, *_) in enumerate(asked))


@pytest.mark.parametrize("options", [{"slot": -1}, {"slot": 0, "n": 2}, {"slot": 1.5}])
def test_slot_below_0_or_for_several_answers_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="slot"):
        RunOptions(**options)
