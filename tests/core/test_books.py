"""The ledger of slots and cells."""

from __future__ import annotations

import pytest

from cbatch.core.books import KvLedger, find_ledger_imbalance
from cbatch.core.plan import Slot
from cbatch.errors import LedgerError
from tests.core.drivers import make_driver
from tests.helpers import partitioned, shared_pool

SOMEBODY = make_driver()


def ledger_of(n_slots: int) -> KvLedger:
    """Slots of 8 cells each."""
    return KvLedger(n_slots, 8, partitioned(n_slots * 8))


def test_lend_of_a_slot_that_is_lent_raises() -> None:
    ledger = ledger_of(1)
    ledger.assign(Slot(0), SOMEBODY)
    with pytest.raises(LedgerError, match="slot 0 is in use"):
        ledger.assign(Slot(0), SOMEBODY)
    assert ledger.n_used_slots == 1


def test_free_twice_raises_and_the_ledger_still_balances() -> None:
    ledger, slot = ledger_of(2), Slot(0)
    ledger.assign(slot, SOMEBODY)
    ledger.free(slot)
    with pytest.raises(LedgerError, match="slot 0 is free"):
        ledger.free(slot)
    assert not find_ledger_imbalance(ledger)


def test_add_up_to_the_window_and_no_further() -> None:
    ledger, slot = ledger_of(1), Slot(0)
    ledger.assign(slot, SOMEBODY)
    ledger.add(slot, 5)
    ledger.add(slot, 3)
    assert ledger.n_cells == [8]
    with pytest.raises(LedgerError, match="cannot hold 9 cells"):
        ledger.add(slot, 1)
    assert ledger.n_cells == [8]


def test_add_to_a_slot_that_is_not_lent_raises() -> None:
    ledger = ledger_of(2)
    with pytest.raises(LedgerError):
        ledger.add(Slot(1), 1)
    assert ledger.n_cells == [0, 0]


def pool_of(n_cells: int) -> KvLedger:
    """Three slots, all in use, of 8 cells each at most."""
    ledger = KvLedger(n_slots=3, n_window=8, memory=shared_pool(n_cells))
    for i in range(3):
        ledger.assign(Slot(i), SOMEBODY)
    return ledger


def test_pool_gives_what_is_free_and_no_more() -> None:
    ledger = pool_of(12)
    ledger.add(Slot(0), 8)
    assert ledger.n_free_cells == 4
    with pytest.raises(LedgerError, match="4 cells are free"):
        ledger.add(Slot(1), 5)
    with pytest.raises(LedgerError, match="cannot hold 9 cells"):
        ledger.add(Slot(0), 1)
    assert not find_ledger_imbalance(ledger)


def test_shared_cells_of_a_pool_are_counted_once_and_freed_by_the_last() -> None:
    ledger = pool_of(12)
    ledger.add(Slot(0), 6)
    ledger.share(Slot(0), Slot(1), 4)
    assert (ledger.n_used, ledger.n_in_use()) == (6, 6)
    assert (ledger.n_own(Slot(0)), ledger.n_own(Slot(1))) == (2, 0)
    ledger.trim(Slot(0), 0)
    assert (ledger.n_used, ledger.n_own(Slot(1))) == (4, 4)
    ledger.trim(Slot(1), 0)
    assert ledger.n_used == 0
    assert not find_ledger_imbalance(ledger)


def test_cells_of_three_slots_that_are_cut_at_different_places_balance() -> None:
    ledger = pool_of(12)
    ledger.add(Slot(0), 6)
    ledger.share(Slot(0), Slot(1), 6)
    ledger.share(Slot(1), Slot(2), 3)
    ledger.trim(Slot(1), 5)
    ledger.trim(Slot(0), 2)
    assert (ledger.n_cells, ledger.n_used) == ([2, 5, 3], 5)
    assert [ledger.n_own(Slot(i)) for i in range(3)] == [0, 2, 0]
    assert not find_ledger_imbalance(ledger)


def test_slot_takes_over_cells_when_it_is_empty_and_no_more_than_there_are() -> None:
    ledger = pool_of(12)
    ledger.add(Slot(0), 4)
    ledger.add(Slot(1), 1)
    for slot, n_cells in [(1, 2), (2, 5)]:
        with pytest.raises(LedgerError, match="cannot share"):
            ledger.share(Slot(0), Slot(slot), n_cells)
    assert not find_ledger_imbalance(ledger)


def test_view_changes_on_its_own() -> None:
    ledger = pool_of(12)
    ledger.add(Slot(0), 4)
    ledger.share(Slot(0), Slot(1), 4)
    other = ledger.view()
    other.trim(Slot(1), 2)
    other.free(Slot(2))
    assert (ledger.n_cells, ledger.n_own(Slot(0)), ledger.n_used_slots) == ([4, 4, 0], 0, 3)
    assert (other.n_cells, other.n_own(Slot(0)), other.n_used_slots) == ([4, 2, 0], 2, 2)
    assert not find_ledger_imbalance(ledger)
    assert not find_ledger_imbalance(other)
