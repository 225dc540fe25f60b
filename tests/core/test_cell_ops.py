"""What events leave to do to cells, where no sequence that runs can tell."""

from __future__ import annotations

from dataclasses import fields

from cbatch.backend.fake import FakeVocab
from cbatch.core.books import KvLedger
from cbatch.core.cell_ops import SlotCells
from cbatch.core.driver import MovingWindow, SequenceDriver
from cbatch.core.plan import KvCapabilities, Slot
from cbatch.core.prefix import PrefixCache
from tests.helpers import make_request, partitioned, shared_pool


def make_cells(memory: KvCapabilities | None = None, *, is_on: bool = False) -> SlotCells:
    """Cells of four slots; with `is_on` they keep what they hold when they are left."""
    memory = memory or partitioned(256)
    ledger = KvLedger(4, 64, memory)
    prefixes = PrefixCache(ledger, is_on=is_on)
    return SlotCells(ledger, prefixes)


def ops_of(cells: SlotCells) -> dict[str, object]:
    """The operations of a step that have something to do."""
    step = cells.step()
    return {
        f.name: value
        for f in fields(step)
        if (value := getattr(step, f.name)) and f.name != "n_steps"
    }


def running(cells: SlotCells, n_computed: int) -> tuple[SequenceDriver, Slot]:
    """A sequence with so many cells in the lowest free slot."""
    driver = SequenceDriver.of(make_request(), FakeVocab(320).piece, 0.0)
    driver.tokens, driver.n_computed = [1] * (n_computed + 1), n_computed
    slot = driver.slot = min(cells.ledger.free_slots)
    cells.ledger.assign(slot, driver)
    cells.ledger.add(slot, n_computed)
    return driver, slot


def moved(cells: SlotCells) -> tuple[SequenceDriver, Slot]:
    """A sequence whose window of 16 was full, and that has 12 cells now, 2 of them where they were."""
    driver, slot = running(cells, 16)
    driver.request = make_request(n_discard=4)
    driver.n_window, driver.window = 16, MovingWindow(2, 4)
    cells.shift(driver, slot)
    return driver, slot


def test_slot_that_is_left_before_it_moves_keeps_what_would_not() -> None:
    cells = make_cells(is_on=True)
    cells.leave(*moved(cells))
    assert ops_of(cells) == {"trims": ((0, 2),)}
    assert cells.ledger.n_cells[0] == 2


def test_slot_of_a_pool_whose_cells_move_for_all_is_left_empty() -> None:
    cells = make_cells(shared_pool(200, can_copy=True), is_on=True)
    driver, slot = running(cells, 5)
    driver.request = make_request(n_discard=4)
    cells.leave(driver, slot)
    assert ops_of(cells) == {"clears": (0,)}
