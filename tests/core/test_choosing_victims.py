"""Which of those that run is to leave its slot: the victim of a full pool, and who closes a gap."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from cbatch.core.books import KvLedger
from cbatch.core.driver import MovingWindow, Status
from cbatch.core.plan import KvCapabilities, Slot
from cbatch.core.slots import N_PREEMPTED_MAX, N_WORTH_MOVE, choose_mover, choose_victim
from tests.core.drivers import make_running
from tests.helpers import at_end_only, partitioned, recurrent, shared_pool

if TYPE_CHECKING:
    from cbatch.core.driver import SequenceDriver


def at(slot: int, n_computed: int = 9, **given: int | Status | MovingWindow) -> SequenceDriver:
    """A sequence in a slot, as old as its slot is low, with much to sample."""
    driver = make_running()
    driver.slot, driver.number, driver.n_computed, driver.n_cap = Slot(slot), slot, n_computed, 99
    for name, value in given.items():
        setattr(driver, name, value)
    return driver


def ledger_of(drivers: list[SequenceDriver | None], memory: KvCapabilities) -> KvLedger:
    """A ledger in which each has its slot, with as many cells as it has computed."""
    ledger = KvLedger(4, 64, memory)
    for driver in drivers:
        if driver is not None and driver.slot is not None:
            ledger.assign(driver.slot, driver)
            ledger.add(driver.slot, driver.n_computed)
    return ledger


# ---- a victim ----


def test_victim_frees_cells_that_nobody_else_has() -> None:
    drivers = [at(0, 10), at(1, 0), at(2, 12)]
    ledger = ledger_of([*drivers], shared_pool(100))
    ledger.share(Slot(0), Slot(1), 10)
    drivers[1].n_computed = 10
    assert choose_victim(ledger) is drivers[2]


def test_victim_of_too_many_times_is_one_again_where_nobody_can_go_on() -> None:
    drivers = [at(0, 10), at(1, 2, n_preempted=N_PREEMPTED_MAX)]
    assert choose_victim(ledger_of([*drivers], shared_pool(100))) is None
    assert choose_victim(ledger_of([*drivers], shared_pool(12))) is drivers[1]
    assert choose_victim(ledger_of([drivers[0]], shared_pool(10))) is None


# ---- who closes a gap ----


def test_highest_one_above_a_gap_moves() -> None:
    drivers = [at(0), None, at(2)]
    assert choose_mover(ledger_of(drivers, partitioned(256))) is drivers[2]


@pytest.mark.parametrize("memory", [recurrent(4, can_save=True), at_end_only("partitioned", 256)])
def test_one_moves_by_saving_where_memory_cannot_copy(memory: KvCapabilities) -> None:
    drivers = [at(0), None, at(2)]
    assert choose_mover(ledger_of(drivers, memory)) is drivers[2]
    assert choose_mover(ledger_of(drivers, at_end_only("unified", 256))) is None


def test_nobody_moves_where_there_is_no_gap() -> None:
    assert choose_mover(ledger_of([None, at(1), at(2)], partitioned(256))) is None
    drivers = [at(0), at(1), None]
    assert choose_mover(ledger_of(drivers, partitioned(256))) is None
    assert choose_mover(KvLedger(2, 64, partitioned(128))) is None


@pytest.mark.parametrize(
    "memory", [KvCapabilities("partitioned", 256), shared_pool(256, can_copy=True), recurrent(4)]
)
def test_nobody_moves_where_it_cannot_be_or_saves_nothing(memory: KvCapabilities) -> None:
    drivers = [at(0), None, at(2)]
    assert choose_mover(ledger_of(drivers, memory)) is None


@pytest.mark.parametrize(
    ("mover", "moves"),
    [
        (at(2, n_cap=N_WORTH_MOVE), True),
        (at(2, n_cap=N_WORTH_MOVE - 1), False),
        (at(2, window=MovingWindow(1, 4, (0,) * 9)), False),
        (at(2, status=Status.PAUSED), False),
        (at(2, n_computed=0), False),
    ],
)
def test_one_moves_that_has_much_to_come_and_cells_that_stay_as_they_are(
    mover: SequenceDriver, moves: bool
) -> None:
    drivers = [at(0), None, mover]
    assert (choose_mover(ledger_of(drivers, partitioned(256))) is mover) is moves
