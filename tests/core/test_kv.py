"""The books of slots and cells."""

from __future__ import annotations

import pytest

from cbatch.core.kv import KvLedger
from cbatch.core.plan import Slot
from cbatch.errors import LedgerError
from tests.helpers import shared_pool


def test_lend_gives_the_lowest_free_slot_first() -> None:
    ledger = KvLedger(n_slots=3, n_window=8)
    assert [ledger.lend(), ledger.lend(), ledger.lend()] == [0, 1, 2]
    ledger.give_back(Slot(2))
    ledger.give_back(Slot(0))
    assert [ledger.lend(), ledger.lend()] == [0, 2]


def test_lend_of_one_in_the_middle_leaves_the_lowest_first() -> None:
    ledger = KvLedger(n_slots=6, n_window=8)
    for _ in range(6):
        ledger.lend()
    for i in (0, 1, 3, 4, 2, 5):
        ledger.give_back(Slot(i))
    assert ledger.lend(Slot(1)) == 1
    assert [ledger.lend() for _ in range(5)] == [0, 2, 3, 4, 5]


def test_lend_with_no_free_slot_raises() -> None:
    ledger = KvLedger(n_slots=1, n_window=8)
    ledger.lend()
    assert not ledger.has_free_slot
    with pytest.raises(LedgerError, match="all 1 slots are lent"):
        ledger.lend()


def test_counts_follow_lending() -> None:
    ledger = KvLedger(n_slots=3, n_window=8)
    assert (ledger.n_lent, ledger.has_free_slot) == (0, True)
    slot = ledger.lend()
    assert ledger.n_lent == 1
    ledger.give_back(slot)
    assert ledger.n_lent == 0


def test_give_back_twice_raises_and_the_books_still_balance() -> None:
    ledger = KvLedger(n_slots=2, n_window=8)
    slot = ledger.lend()
    ledger.give_back(slot)
    with pytest.raises(LedgerError, match="slot 0 is not lent"):
        ledger.give_back(slot)
    ledger.check()


def test_add_up_to_the_window_and_no_further() -> None:
    ledger = KvLedger(n_slots=1, n_window=8)
    slot = ledger.lend()
    ledger.add(slot, 5)
    ledger.add(slot, 3)
    assert ledger.n_cells == [8]
    with pytest.raises(LedgerError, match="9 of 8"):
        ledger.add(slot, 1)
    assert ledger.n_cells == [8]


def test_add_to_a_slot_that_is_not_lent_raises() -> None:
    ledger = KvLedger(n_slots=2, n_window=8)
    with pytest.raises(LedgerError):
        ledger.add(Slot(1), 1)
    assert ledger.n_cells == [0, 0]


def test_trim_strikes_out_cells_of_one_slot_only() -> None:
    ledger = KvLedger(n_slots=2, n_window=8)
    for slot in (ledger.lend(), ledger.lend()):
        ledger.add(slot, 4)
    ledger.trim(Slot(0), 0)
    assert ledger.n_cells == [0, 4]


def pool_of(n_cells: int) -> KvLedger:
    """Three slots, all lent, of 8 cells each at most."""
    ledger = KvLedger(n_slots=3, n_window=8, memory=shared_pool(n_cells))
    for _ in range(3):
        ledger.lend()
    return ledger


def test_pool_gives_what_is_free_and_no_more() -> None:
    ledger = pool_of(12)
    ledger.add(Slot(0), 8)
    assert ledger.n_free_cells == 4
    with pytest.raises(LedgerError, match="4 are free"):
        ledger.add(Slot(1), 5)
    with pytest.raises(LedgerError, match="9 of 8"):
        ledger.add(Slot(0), 1)
    ledger.check()


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
    ledger.check()


def test_cells_behind_shared_ones_are_a_slots_own() -> None:
    ledger = pool_of(12)
    ledger.add(Slot(0), 4)
    ledger.share(Slot(0), Slot(1), 4)
    ledger.add(Slot(1), 2)
    assert (ledger.n_cells, ledger.n_own(Slot(1))) == ([4, 6, 0], 2)
    ledger.check()


def test_cells_of_three_slots_that_are_cut_at_different_places_balance() -> None:
    ledger = pool_of(12)
    ledger.add(Slot(0), 6)
    ledger.share(Slot(0), Slot(1), 6)
    ledger.share(Slot(1), Slot(2), 3)
    ledger.trim(Slot(1), 5)
    ledger.trim(Slot(0), 2)
    assert (ledger.n_cells, ledger.n_used) == ([2, 5, 3], 5)
    assert [ledger.n_own(Slot(i)) for i in range(3)] == [0, 2, 0]
    ledger.check()


def test_slot_takes_over_cells_when_it_is_empty_and_no_more_than_there_are() -> None:
    ledger = pool_of(12)
    ledger.add(Slot(0), 4)
    ledger.add(Slot(1), 1)
    for slot, n_cells in [(1, 2), (2, 5)]:
        with pytest.raises(LedgerError, match="cannot have"):
            ledger.share(Slot(0), Slot(slot), n_cells)
    ledger.check()


def test_check_finds_a_slot_that_is_free_and_lent() -> None:
    ledger = KvLedger(n_slots=2, n_window=8)
    slot = ledger.lend()
    ledger.check()
    ledger._free.append(slot)
    with pytest.raises(LedgerError, match="lent twice"):
        ledger.check()


def test_check_finds_a_slot_that_is_free_twice() -> None:
    ledger = KvLedger(n_slots=2, n_window=8)
    ledger._free.append(Slot(0))
    with pytest.raises(LedgerError, match="lent twice"):
        ledger.check()


def test_check_finds_a_lost_slot() -> None:
    ledger = KvLedger(n_slots=2, n_window=8)
    ledger._free.pop()
    with pytest.raises(LedgerError, match="0 lent and 1 free of 2"):
        ledger.check()


@pytest.mark.parametrize("n_cells", [-1, 9])
def test_check_finds_cells_out_of_bounds(n_cells: int) -> None:
    ledger = KvLedger(n_slots=1, n_window=8)
    ledger.n_cells[0] = n_cells
    with pytest.raises(LedgerError, match="out of bounds"):
        ledger.check()
