"""Deadlines: who is due when, what ends how, and how little is kept of those that ended before."""

from __future__ import annotations

import math

import pytest

from cbatch.backend.fake import FakeVocab
from cbatch.core.batcher import N_ENDED_MAX
from cbatch.core.driver import SequenceDriver
from cbatch.core.queue import Deadlines
from cbatch.errors import DeadlineError
from tests.helpers import (
    Rig,
    drive,
    make_request,
    make_scheduler,
    make_sequences,
    partitioned,
    step,
    with_deadline,
)


def timed(number: int, timeout_s: float | None) -> SequenceDriver:
    request = with_deadline(make_request(str(number), timeout_s=timeout_s), 0.0)
    driver = SequenceDriver.of(request, FakeVocab(320).piece, 0.0)
    driver.number = number
    return driver


def n_entries(deadlines: Deadlines) -> int:
    """How many entries are kept, those of ended sequences too."""
    return len(deadlines._heap)


def ends(rig: Rig) -> dict[str, tuple[str, int]]:
    """Why each request ended and with how many tokens."""
    return {id: (r.finish_reason, len(r.token_ids)) for id, r in rig.results.items()}


def one_step(rig: Rig) -> None:
    """One step of one second, whatever the plan would repeat."""
    rig.backend.interrupt()
    step(rig)


# ---- the heap ----


def test_due_ones_come_in_order_of_their_deadlines_and_no_other() -> None:
    deadlines = Deadlines()
    for i, timeout_s in enumerate((5.0, 2.0, None, 9.0)):
        deadlines.add(timed(i, timeout_s))
    assert deadlines.next_s() == 2.0
    due = [d.number for _ in range(2) if (d := deadlines.pop_due(5.0))]
    assert due == [1, 0]
    assert deadlines.pop_due(5.0) is None
    assert deadlines.next_s() == 9.0


def test_who_ended_before_is_not_given_out() -> None:
    deadlines, drivers = Deadlines(), [timed(i, 1.0) for i in range(2)]
    for driver in drivers:
        deadlines.add(driver)
    drivers[0].cancel(0.0)
    deadlines.note_end()
    assert deadlines.pop_due(1.0) is drivers[1]
    assert deadlines.pop_due(1.0) is None


@pytest.mark.parametrize("n_alive", [0, 3, 500])
def test_dead_entries_are_thrown_out_and_live_ones_kept(n_alive: int) -> None:
    deadlines = Deadlines()
    for i in range(n_alive):
        deadlines.add(timed(i, 1e6 + i))
    for i in range(n_alive, n_alive + 2000):
        driver = timed(i, 1e5)
        deadlines.add(driver)
        driver.cancel(0.0)
        deadlines.note_end()
        assert n_entries(deadlines) <= 2 * n_alive + 130
    alive = [d.number for _ in range(n_alive) if (d := deadlines.pop_due(math.inf))]
    assert alive == [*range(n_alive)]


def test_long_run_of_requests_with_deadlines_keeps_the_heap_short() -> None:
    rig = make_scheduler(n_slots=2)
    for i in range(300):
        rig.submit(make_request(str(i), max_tokens=1, timeout_s=1e6))
        step(rig)
    assert len(rig.results) == 300
    assert n_entries(rig.batcher._deadlines) <= 66


# ---- how it ends ----


def test_deadline_of_a_paused_one_in_its_slot_ends_it() -> None:
    rig = make_scheduler()
    rig.submit(make_request("a", timeout_s=2.0), make_request("b", max_tokens=5))
    one_step(rig)
    rig.batcher.pause("a")
    drive(rig, before=lambda rig: rig.backend.interrupt())
    assert ends(rig) == {"a": ("timeout", 1), "b": ("length", 5)}
    assert rig.ledger.n_used_slots == 0


def test_deadline_of_a_paused_one_without_a_slot_is_an_error() -> None:
    rig = make_scheduler(n_slots=1)
    rig.submit(make_request("a", max_tokens=5), make_request("b", timeout_s=2.0))
    rig.batcher.pause("b")
    drive(rig, before=lambda rig: rig.backend.interrupt())
    assert ends(rig) == {"b": ("timeout", 0), "a": ("length", 5)}
    assert isinstance(rig.results["b"].error, DeadlineError)


def test_deadline_of_a_parked_one_keeps_its_text_and_forgets_its_cells() -> None:
    rig = make_scheduler(1, memory=partitioned(64), policy="round_robin", quantum=2)
    rig.submit(make_request("a", max_tokens=9, timeout_s=4.0), make_request("b", max_tokens=30))
    for _ in range(4):
        one_step(rig)
    assert rig.running() == ["b"]
    assert len(rig.backend.saved) == 1
    one_step(rig)
    assert ends(rig) == {"a": ("timeout", 2)}
    assert rig.results["a"].error is None
    assert rig.backend.saved == {}


def test_many_deadlines_at_once_end_some_a_plan_and_spare_the_others() -> None:
    rig = make_scheduler(n_slots=2)
    rig.submit(make_request("keeps", max_tokens=4))
    rig.submit(*make_sequences(3 * N_ENDED_MAX, timeout_s=1.0))
    one_step(rig)
    one_step(rig)
    assert not rig.batcher.queue
    assert 2 < len(rig.results) <= N_ENDED_MAX + 2
    assert {r.finish_reason for r in rig.results.values()} == {"timeout"}
    assert [len(rig.results[id].token_ids) for id in ("0", "1")] == [1, 0]
    drive(rig)
    assert ends(rig)["keeps"] == ("length", 4)
