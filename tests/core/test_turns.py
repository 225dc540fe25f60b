"""Round robin: more requests than slots take turns of a quantum, fairly and without losing what was computed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cbatch.core.scheduler import DEFAULT_QUANTUM
from cbatch.engine_options import Policy
from tests.helpers import (
    Rig,
    drive,
    make_request,
    make_scheduler,
    make_sequences,
    partitioned,
    recurrent,
    shared_pool,
    step,
)

if TYPE_CHECKING:
    from cbatch.core.plan import KvCapabilities
    from cbatch.core.scheduler import Plan


@dataclass(frozen=True)
class Turn:
    """Whose turn begins, who is left waiting then, and who has a slot."""

    id: str
    waiting: set[str]
    running: set[str]


def fair(n_slots: int = 1, quantum: int | None = 2, memory: KvCapabilities | None = None) -> Rig:
    memory = memory or partitioned(n_slots * 128)
    return make_scheduler(n_slots, 128, memory=memory, policy="round_robin", quantum=quantum)


def watch_turns(rig: Rig) -> list[Turn]:
    """Return a list that grows with each turn."""
    turns: list[Turn] = []
    plan = rig.scheduler.plan

    def watched(now: float) -> Plan | None:
        planned = plan(now)
        if planned is not None and planned not in seen:  # planning twice begins no turn
            seen.append(planned)
            entering = [d.request.id for d in planned.slot_plan.placed]
            admitted = {*entering}
            left = {leave.driver.request.id for leave in planned.slot_plan.leaves}
            running = ({*rig.running()} - left) | admitted
            waiting = rig.batcher.in_flight.keys() - running
            turns.extend(Turn(id, waiting, running) for id in entering)
        return planned

    seen: list[Plan | None] = []
    rig.scheduler.plan = watched  # type: ignore[method-assign]
    return turns


def whose(turns: list[Turn]) -> str:
    return "".join(turn.id for turn in turns)


def test_three_requests_on_one_slot_take_turns_in_order() -> None:
    rig = fair(quantum=2)
    turns = watch_turns(rig)
    rig.submit(*make_sequences(3, max_tokens=6))
    drive(rig)
    assert whose(turns) == "012012012"
    assert [*rig.results] == ["0", "1", "2"]


def test_newcomer_takes_its_turn_behind_those_that_wait_already() -> None:
    rig = fair(quantum=2)
    turns = watch_turns(rig)
    rig.submit(*make_sequences(3, max_tokens=6))
    step(rig)
    rig.submit(make_request("n", (9, 9), max_tokens=2))
    drive(rig)
    assert whose(turns) == "012n012012"  # its first turn over, 0 goes to the end


@given(
    n_slots=st.integers(1, 3),
    quantum=st.integers(1, 5),
    caps=st.lists(st.integers(1, 14), min_size=2, max_size=9),
    n_prompt=st.integers(1, 30),
    can_save=st.booleans(),
)
def test_nobody_gets_two_quanta_before_anothers_one(
    n_slots: int, quantum: int, caps: list[int], n_prompt: int, can_save: bool
) -> None:
    rig = fair(n_slots, quantum, partitioned(128 * n_slots) if can_save else recurrent(n_slots))
    turns = watch_turns(rig)
    rig.submit(*(make_request(str(i), [i] * n_prompt, max_tokens=n) for i, n in enumerate(caps)))
    drive(rig)
    last: dict[str, int] = {}
    for i, turn in enumerate(turns):
        if turn.id in last:
            assert turn.waiting <= set[str]().union(*(t.running for t in turns[last[turn.id] : i]))
        last[turn.id] = i


@given(
    n_slots=st.integers(1, 3),
    quantum=st.integers(1, 5),
    n=st.integers(2, 9),
    cap=st.integers(1, 20),
)
def test_no_run_passes_the_quantum_while_somebody_waits(
    n_slots: int, quantum: int, n: int, cap: int
) -> None:
    rig = fair(n_slots, quantum)
    rig.submit(*make_sequences(n, max_tokens=cap))
    while rig.batcher.in_flight:
        before = {id: d.n_output for id, d in rig.drivers.items()}
        step(rig)
        if rig.batcher.occupancy().n_waiting:
            assert all(d.n_output - before[id] <= quantum for id, d in rig.drivers.items())
            if n_slots == 1:
                assert all(d.n_turn <= quantum for d in rig.drivers.values())


def test_turns_cost_no_prefill_while_the_cells_are_saved() -> None:
    rig = fair(quantum=2)
    requests = make_sequences(4, max_tokens=9)
    rig.submit(*requests)
    plans = drive(rig)
    assert (rig.stats.n_recomputed_tokens, rig.stats.n_prompt_tokens) == (0, 4 * 4)
    assert [len(c.inputs) for p in plans for c in p.spans if p.loads] == [1] * 16
    for request in requests:
        assert rig.results[request.id].token_ids == tuple(rig.alone(request, 9))
    assert rig.backend.saved == {}


@pytest.mark.parametrize("memory", [None, recurrent(1)])
def test_turns_without_saved_cells_compute_again_and_give_the_same(memory: Any) -> None:
    rig = make_scheduler(1, memory=memory, policy="round_robin", quantum=2)
    requests = make_sequences(2, max_tokens=6)
    rig.submit(*requests)
    drive(rig)
    # each comes back twice: with 4 + 1 and 4 + 3 cells lost
    assert rig.stats.n_recomputed_tokens == 2 * (5 + 7)
    for request in requests:
        assert rig.results[request.id].token_ids == tuple(rig.alone(request, 6))


def test_only_as_many_leave_as_others_wait_for() -> None:
    rig = fair(n_slots=3, quantum=2)
    rig.submit(*make_sequences(4, max_tokens=20))
    step(rig)
    step(rig)
    assert sorted(rig.running()) == ["1", "2", "3"]


def test_last_one_left_runs_on_to_its_end() -> None:
    rig = fair(quantum=2)
    turns = watch_turns(rig)
    rig.submit(make_request("a", max_tokens=20), make_request("b", (1,), max_tokens=2))
    drive(rig)
    assert whose(turns) == "aba"


def test_quantum_not_said_is_the_default() -> None:
    rig = fair(quantum=None)
    rig.submit(*make_sequences(2, max_tokens=DEFAULT_QUANTUM + 9))
    n_steps = [p.n_steps for p in drive(rig) if p.spans]
    assert n_steps == [DEFAULT_QUANTUM, DEFAULT_QUANTUM, 9, 9]


def test_one_that_had_most_of_its_turn_leaves_first() -> None:
    rig = fair(quantum=4, n_slots=2)
    rig.submit(make_request("long", range(60), max_tokens=40))
    rig.submit(make_request("short", (1, 2), max_tokens=40))
    while rig.drivers["long"].n_turn < 5:
        rig.backend.interrupt()
        step(rig)
    rig.submit(make_request("new", (3, 4), max_tokens=4))
    step(rig)
    assert rig.running() == ["long", "new"]


def test_nobody_leaves_for_one_that_has_a_slot_to_go_to_but_no_cells() -> None:
    rig = fair(n_slots=3, quantum=4, memory=shared_pool(64))
    rig.submit(*make_sequences(2, max_tokens=20), make_request("c", range(30), max_tokens=20))
    drive(rig)
    assert [rig.drivers[id].n_before_turn for id in "01c"] == [0, 0, 0]


@pytest.mark.parametrize("policy", [p for p in get_args(Policy) if p != "round_robin"])
def test_other_policies_let_everybody_finish(policy: str) -> None:
    rig = make_scheduler(1, 256, policy=policy)
    turns = watch_turns(rig)
    rig.submit(*make_sequences(3, max_tokens=2 * DEFAULT_QUANTUM))
    drive(rig)
    assert whose(turns) == "012"


def test_set_of_adapters_keeps_its_turns_while_new_sets_come_and_go() -> None:
    rig = make_scheduler(2, 128, adapters=("a",))
    long = make_request("long", range(20), max_tokens=20, adapter="a")
    rig.submit(long)
    for i in range(60):
        rig.submit(make_request(f"{i}", [i] * 5, max_tokens=1, adapter={"a": 1 + (i + 1) / 1000}))
    for _ in range(45):  # a piece of 4 tokens beside another set, and 20 steps of its own
        rig.backend.interrupt()
        step(rig)
    assert rig.results["long"].token_ids == tuple(rig.alone(long, 20))
    assert 15 < len(rig.results) - 1 < 30
    drive(rig)


@pytest.mark.parametrize("n_discard", [4, 8, 9])
def test_turn_that_ends_where_a_window_moves_saves_the_cells(n_discard: int) -> None:
    memory = replace(partitioned(64), can_shift=True)
    rig = make_scheduler(1, 64, 64, memory=memory, policy="round_robin", quantum=8)
    requests = [
        make_request(f"{i}", [i] * 40, max_tokens=100, n_keep=1, n_discard=n_discard)
        for i in range(2)
    ]
    rig.submit(*requests)
    drive(rig)
    assert rig.stats.n_recomputed_tokens == 0
    for request in requests:
        assert rig.results[request.id].token_ids == tuple(rig.alone(request, 100))
