"""The books of slots and cells."""

from __future__ import annotations

import pytest

from cbatch.core.kv import KvLedger
from cbatch.core.plan import Slot
from cbatch.errors import LedgerError


def test_lend_gives_the_lowest_free_slot_first() -> None:
    ledger = KvLedger(n_slots=3, n_window=8)
    assert [ledger.lend(), ledger.lend(), ledger.lend()] == [0, 1, 2]
    ledger.give_back(Slot(2))
    ledger.give_back(Slot(0))
    assert [ledger.lend(), ledger.lend()] == [0, 2]


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
