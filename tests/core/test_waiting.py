"""Why a request waits, and whom that concerns: holds, pauses, and what becomes of slot and cells meanwhile."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from cbatch.core.cell_ops import SlotCells
from cbatch.core.driver import Status, Wait
from cbatch.errors import PromptTooLongError, RequestCancelledError
from tests.helpers import (
    Rig,
    drive,
    make_request,
    make_scheduler,
    make_sequences,
    partitioned,
    settle_compiled,
    settle_disk,
    shared_pool,
    step,
)

if TYPE_CHECKING:
    from cbatch.core.request import Request

REASONS = (Wait.COMPILE, Wait.CACHE)


def one_step(rig: Rig) -> None:
    rig.backend.interrupt()
    step(rig)


def rig_of(n_slots: int, n: int, **options: int) -> Rig:
    rig = make_scheduler(n_slots, memory=partitioned(64 * n_slots))
    rig.submit(*make_sequences(n, **{"max_tokens": 3, **options}))
    return rig


# ---- held ----


@dataclass(frozen=True, slots=True)
class Held:
    """A rig whose request "0" was held at its turn, until `release`."""

    rig: Rig
    request: Request
    wants: tuple[list[Any], list[Any]]

    def release(self) -> None:
        self.rig.compiling, self.rig.fetching = self.wants
        settle_compiled(self.rig)
        settle_disk(self.rig)


def held(reason: Wait, n: int, n_slots: int = 1, **options: Any) -> Held:
    """Hold the first of `n` requests."""
    rig = make_scheduler(n_slots, memory=partitioned(64 * n_slots), **options)
    why: dict[str, Any] = {"regex": "1"} if reason is Wait.COMPILE else {"cache_key": "k"}
    [first] = make_sequences(1, max_tokens=3, **why)
    rig.submit(first, *make_sequences(n, max_tokens=3)[1:])
    step(rig)
    assert rig.drivers["0"].waits_for is reason
    wants = rig.compiling, rig.fetching
    rig.compiling, rig.fetching = [], []  # so nobody brings it
    return Held(rig, first, wants)


@pytest.mark.parametrize("reason", REASONS)
def test_held_one_is_passed_by_those_behind_it(reason: Wait) -> None:
    made = held(reason, 3)
    rig = made.rig
    for _ in range(6):
        step(rig)
    assert [*rig.results] == ["1", "2"]
    assert rig.drivers["0"].waits_for is reason
    assert (rig.batcher.occupancy().n_held, rig.batcher.occupancy().n_waiting) == (1, 0)
    made.release()
    drive(rig)
    assert rig.results["0"].token_ids == tuple(rig.alone(made.request, 3))


def test_one_with_a_grammar_that_can_never_run_is_refused_on_submission() -> None:
    rig = make_scheduler(1, n_window=8)
    rig.submit(make_request("held", [1] * 9, regex="1"))
    assert isinstance(rig.drivers["held"].error, PromptTooLongError)
    assert (rig.batcher.occupancy().n_held, rig.batcher.in_flight) == (0, {})


def test_released_one_goes_before_those_that_came_later() -> None:
    made = held(Wait.CACHE, 4)
    made.release()
    drive(made.rig)
    assert [*made.rig.results] == ["1", "0", "2", "3"]


@pytest.mark.parametrize("is_held", [False, True])
def test_only_want_of_cells_holds_up_those_behind(is_held: bool) -> None:
    rig = make_scheduler(4, 40, memory=shared_pool(40))
    why: dict[str, Any] = {"regex": "1"} if is_held else {}
    rig.submit(make_request("runs", max_tokens=20), make_request("big", max_tokens=30, **why))
    rig.submit(make_request("small", max_tokens=1))
    rig.drivers["big"].n_overtaken = 99
    one_step(rig)
    assert ("small" in rig.results) is is_held
    assert rig.running() == ["runs"]


@pytest.mark.parametrize("reason", REASONS)
def test_cancel_of_a_held_one_ends_it_at_once(reason: Wait) -> None:
    rig = held(reason, 2).rig
    assert rig.cancel("0")
    drive(rig)
    assert isinstance(rig.results["0"].error, RequestCancelledError)
    assert rig.batcher.occupancy().n_held == 0


@pytest.mark.parametrize("reason", REASONS)
def test_pause_of_a_held_one_stands_until_it_is_released_and_resumed(reason: Wait) -> None:
    made = held(reason, 2)
    rig = made.rig
    assert rig.batcher.pause("0")
    while "1" not in rig.results:
        step(rig)
    made.release()
    assert step(rig) is None or "0" not in rig.running()
    assert rig.batcher.resume("0")
    drive(rig)
    assert rig.results["0"].finish_reason == "length"


def test_pause_of_a_held_one_takes_nobody_else_out_of_the_queue() -> None:
    rig = held(Wait.COMPILE, 4, policy="priority").rig
    rig.batcher.pause("0")
    assert [d.request.id for d in rig.state.queue.candidates([])] == ["2", "3"]


@pytest.mark.parametrize("reason", REASONS)
def test_resumed_one_still_waits_for_what_held_it(reason: Wait) -> None:
    rig = held(reason, 1).rig
    rig.batcher.pause("0")
    rig.batcher.resume("0")
    assert rig.drivers["0"].waits_for is reason
    assert step(rig) is None


# ---- paused ----


def test_paused_one_keeps_slot_and_cells_while_nobody_needs_them() -> None:
    rig = rig_of(2, 2, max_tokens=9)
    one_step(rig)
    assert rig.batcher.pause("0")
    for _ in range(3):
        one_step(rig)
    assert [rig.drivers[id].n_output for id in "01"] == [1, 4]
    assert (rig.drivers["0"].slot, rig.ledger.n_cells[0]) == (0, 4)
    assert rig.batcher.occupancy().n_paused == 1
    assert rig.batcher.resume("0")
    drive(rig)
    assert rig.stats.n_recomputed_tokens == 0
    assert rig.results["0"].token_ids == tuple(rig.alone(make_sequences(1)[0], 9))


def test_paused_one_alone_leaves_nothing_to_do() -> None:
    rig = rig_of(1, 1)
    one_step(rig)
    rig.batcher.pause("0")
    assert step(rig) is None
    assert rig.running() == ["0"]


@pytest.mark.parametrize("can_save", [True, False])
def test_paused_one_gives_its_slot_to_who_needs_it_and_comes_back(can_save: bool) -> None:
    rig = make_scheduler(1, memory=partitioned(64) if can_save else None)
    requests = make_sequences(2, max_tokens=5)
    rig.submit(*requests)
    one_step(rig)
    rig.batcher.pause("0")
    one_step(rig)
    assert rig.running() == ["1"]
    assert len(rig.backend.saved) == can_save
    assert rig.batcher.resume("0")
    drive(rig)
    assert rig.stats.n_recomputed_tokens == (0 if can_save else 4)
    for request in requests:
        assert rig.results[request.id].token_ids == tuple(rig.alone(request, 5))
    assert rig.backend.saved == {}


def test_paused_one_keeps_its_slot_where_another_is_free() -> None:
    rig = rig_of(2, 1, max_tokens=9)
    one_step(rig)
    rig.batcher.pause("0")
    rig.submit(make_request("next", max_tokens=2))
    one_step(rig)
    assert rig.running() == ["0", "next"]


@pytest.mark.parametrize("n_paused", [1, 2])
def test_paused_one_keeps_its_slot_where_nobody_can_enter_by_it(n_paused: int) -> None:
    rig = make_scheduler(3, 60, 64, memory=shared_pool(60, can_save=True), admission="reserve")
    requests = [make_request(id, max_tokens=12) for id in "ab"[:n_paused]]
    requests += [make_request("runs", max_tokens=5), make_request("big", [1] * 20, max_tokens=34)]
    rig.submit(*requests[:-1])
    one_step(rig)
    for paused in requests[:n_paused]:
        rig.batcher.pause(paused.id)
    rig.submit(requests[-1])  # it needs 54 of 60 cells, and `runs` takes 9
    while "runs" not in rig.results:
        one_step(rig)
        assert [rig.drivers[r.id].slot is None for r in requests[:n_paused]] == [False] * n_paused
        assert (rig.backend.saved, rig.drivers["big"].status) == ({}, Status.WAITING)
    one_step(rig)
    assert rig.running()[-1] == "big"
    for paused in requests[:n_paused]:
        rig.batcher.resume(paused.id)
    drive(rig)
    for request in requests:
        n_output = request.options.max_tokens or 0
        assert rig.results[request.id].token_ids == tuple(rig.alone(request, n_output))


def test_plan_tries_no_slots_of_paused_ones_where_all_are_not_enough(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = make_scheduler(8, 60, 64, memory=shared_pool(60), admission="reserve")
    rig.submit(make_request("runs", max_tokens=20), *make_sequences(4, max_tokens=3))
    one_step(rig)
    for i in range(4):
        rig.batcher.pause(str(i))
    rig.submit(make_request("big", [1] * 20, max_tokens=34))
    made: list[SlotCells] = []
    view = SlotCells.view

    def counted(cells: SlotCells) -> SlotCells:
        made.append(cells)
        return view(cells)

    monkeypatch.setattr(SlotCells, "view", counted)
    one_step(rig)
    assert rig.drivers["big"].status is Status.WAITING
    assert not made


def test_paused_one_keeps_its_slot_while_cells_for_the_next_are_read() -> None:
    rig = make_scheduler(1, memory=partitioned(64))
    rig.submit(make_request("a", max_tokens=9))
    one_step(rig)
    rig.batcher.pause("a")
    rig.submit(make_request("reads", range(9, 40), max_tokens=2, cache_key="k"))
    one_step(rig)
    assert (len(rig.fetching), rig.running()) == (1, ["a"])
    one_step(rig)
    assert rig.running() == ["reads"]
    rig.batcher.resume("a")
    drive(rig)


@pytest.mark.parametrize("policy", ["fcfs", "shortest", "priority", "round_robin"])
def test_paused_in_the_queue_and_resumed_keeps_its_place(policy: str) -> None:
    rig = make_scheduler(1, policy=policy)
    rig.submit(*make_sequences(5, max_tokens=1))
    for id in "3234":
        assert rig.batcher.pause(id)
        assert rig.batcher.resume(id)
    drive(rig)
    assert [*rig.results] == [*"01234"]


def test_paused_before_it_was_queued_goes_behind_those_that_were() -> None:
    made = held(Wait.COMPILE, 6)
    rig = made.rig
    rig.batcher.pause("0")
    made.release()
    step(rig)
    assert rig.drivers["0"].waits_for is None
    assert rig.batcher.resume("0")
    drive(rig)
    assert [*rig.results] == [*"123450"]


def test_paused_in_the_queue_is_passed_and_goes_first_once_resumed() -> None:
    rig = rig_of(1, 4)
    one_step(rig)
    assert rig.batcher.pause("1")
    assert (rig.batcher.occupancy().n_waiting, rig.batcher.occupancy().n_held) == (2, 1)
    while "2" not in rig.running():
        one_step(rig)
    assert rig.batcher.resume("1")
    drive(rig)
    assert [*rig.results] == ["0", "2", "1", "3"]


def test_paused_prompt_goes_on_in_the_middle() -> None:
    rig = make_scheduler(1, n_batch=4, memory=partitioned(64))
    request = make_request("0", range(10), max_tokens=2)
    rig.submit(request)
    one_step(rig)
    rig.batcher.pause("0")
    assert step(rig) is None
    assert rig.drivers["0"].n_computed == 4
    rig.batcher.resume("0")
    drive(rig)
    assert rig.results["0"].token_ids == tuple(rig.alone(request, 2))
    assert rig.stats.n_prompt_tokens == 10


@pytest.mark.parametrize("is_parked", [True, False])
def test_cancel_while_paused_keeps_the_text_and_leaves_nothing(is_parked: bool) -> None:
    rig = rig_of(1, 1 + is_parked)
    one_step(rig)
    rig.batcher.pause("0")
    one_step(rig)
    assert rig.cancel("0")
    drive(rig)
    assert rig.results["0"].finish_reason == "cancelled"
    assert rig.results["0"].error is None
    assert len(rig.results["0"].token_ids) == 1
    assert (rig.backend.saved, rig.backend.cells, rig.batcher.occupancy().n_held) == ({}, [[]], 0)


def test_cancel_of_one_paused_in_the_queue_is_an_error() -> None:
    rig = rig_of(1, 2)
    one_step(rig)
    rig.batcher.pause("1")
    assert rig.cancel("1")
    drive(rig)
    assert isinstance(rig.results["1"].error, RequestCancelledError)


def test_commands_given_twice_too_late_or_for_no_request_are_false() -> None:
    rig = rig_of(1, 1)
    batcher = rig.batcher
    assert not batcher.pause("nobody")
    assert not batcher.resume("nobody")
    assert not batcher.resume("0")
    one_step(rig)
    assert not batcher.resume("0")
    assert [batcher.pause("0"), batcher.pause("0")] == [True, False]
    assert [batcher.resume("0"), batcher.resume("0")] == [True, False]
    drive(rig)
    assert [batcher.pause("0"), batcher.resume("0")] == [False, False]
    assert rig.results["0"].token_ids == tuple(rig.alone(make_sequences(1)[0], 3))


def test_many_paused_in_a_long_queue_cost_those_behind_nothing() -> None:
    rig = rig_of(1, 1000, max_tokens=1)
    for i in range(999):
        rig.batcher.pause(str(i))
    step(rig)
    assert [*rig.results] == ["999"]
    assert rig.n_visited == 2  # to make its prompt tokens, and to plan
    assert rig.scheduler.options.policy == "fcfs"
    assert {d.status for d in rig.batcher.in_flight.values()} == {Status.PAUSED}
