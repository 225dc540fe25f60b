"""What a plan and the events before it do to cells: operations, and what saved cells weigh."""

from __future__ import annotations

from dataclasses import fields

import pytest

from cbatch.backend.fake import FakeVocab
from cbatch.core.books import KvLedger
from cbatch.core.cell_ops import SlotCells
from cbatch.core.driver import MovingWindow, SequenceDriver
from cbatch.core.plan import KvCapabilities, Slot
from cbatch.core.prefix import PrefixCache, PrefixSource
from cbatch.core.saved_cells import SavedCells
from tests.helpers import make_request, partitioned, shared_pool

KIB = 1024


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


def waiting(cells: SlotCells, n_computed: int, key: int) -> SequenceDriver:
    """A sequence without a slot whose cells are saved."""
    driver, slot = running(cells, n_computed)
    cells.ledger.free(slot)
    cells.ledger.trim(slot, 0)
    driver.slot, driver.saved_key = None, key
    return driver


# ---- events, and what they leave to do ----


def test_no_operations_are_an_empty_part_of_a_plan() -> None:
    cells = make_cells()
    assert (ops_of(cells), cells.has_ops) == ({}, False)


def test_operations_stay_until_they_are_done_and_slots_ascend() -> None:
    cells = make_cells()
    slots = [running(cells, 5)[1] for _ in range(4)]
    for slot in (slots[3], slots[1], slots[3]):
        cells.clear(slot)
    for slot in (slots[2], slots[0]):
        cells.settle(slot, 4)
    for _ in range(2):
        assert ops_of(cells) == {"clears": (1, 3), "trims": ((0, 4), (2, 4))}
    cells.note_done()
    assert ops_of(cells) == {}
    assert cells.ledger.n_cells == [4, 0, 4, 0]


def test_clear_of_a_trimmed_slot_replaces_the_trim() -> None:
    cells = make_cells()
    _, slot = running(cells, 5)
    cells.trim(slot, 3)
    cells.clear(slot)
    assert ops_of(cells) == {"clears": (0,)}


def test_clear_of_a_slot_that_is_to_move_replaces_the_move() -> None:
    cells = make_cells()
    _, slot = moved(cells)
    cells.clear(slot)
    assert ops_of(cells) == {"clears": (0,)}
    assert [*cells.rebinds] == [0]  # positions have changed all the same


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


def test_slot_may_hold_more_cells_than_the_ledger_had() -> None:
    cells = make_cells()
    _, slot = running(cells, 5)
    cells.settle(slot, 8)
    assert cells.ledger.n_cells[slot] == 8


# ---- a view ----


def test_view_changes_nothing_below_and_has_what_was_left_to_do() -> None:
    cells = make_cells(is_on=True)
    _, slot = running(cells, 5)
    cells.trim(slot, 4)
    view = cells.view()
    view.clear(slot)
    assert ops_of(view) == {"clears": (0,)}
    assert ops_of(cells) == {"trims": ((0, 4),)}
    assert (cells.ledger.n_cells[0], view.ledger.n_cells[0]) == (4, 0)


def test_saved_cells_are_loaded_into_a_slot_that_is_emptied_for_them() -> None:
    cells = make_cells(is_on=True)
    cells.leave(*running(cells, 9))
    driver = waiting(cells, 5, key=7)
    view = cells.view()
    assert view.fill(driver, Slot(0), None) == 5
    assert ops_of(view) == {"clears": (0,), "loads": ((0, 7, 5),), "forgets": (7,)}
    assert view.ledger.n_cells[0] == 5


@pytest.mark.parametrize(
    ("slot", "ops"), [(0, {"trims": ((0, 4),)}), (1, {"copies": ((0, 1, 4),)})]
)
def test_cells_in_common_stay_where_they_are_or_are_copied(slot: int, ops: object) -> None:
    cells = make_cells(is_on=True)
    cells.leave(*running(cells, 9))
    cells.note_done()
    cells.ledger.free(Slot(0))
    driver = SequenceDriver.of(make_request(), FakeVocab(320).piece, 0.0)
    view = cells.view()
    view.ledger.assign(Slot(slot), driver)
    assert view.fill(driver, Slot(slot), PrefixSource(Slot(0), 4)) == 4
    assert ops_of(view) == ops


# ---- saved cells ----


def saved(n_kib: int = 1024, memory: KvCapabilities | None = None) -> SavedCells:
    return SavedCells(memory or partitioned(256), n_kib * KIB)


def driver_of(n_computed: int) -> SequenceDriver:
    driver = SequenceDriver.of(make_request(), FakeVocab(320).piece, 0.0)
    driver.tokens, driver.n_computed = [1] * (n_computed + 1), n_computed
    return driver


def test_saved_cells_weigh_until_they_are_taken() -> None:
    saved_cells, driver = saved(), driver_of(5)
    driver.number = 3
    saved_cells.add(driver)
    assert (driver.saved_key, saved_cells.n_bytes) == (3, 5 * KIB)
    assert not saved_cells.take(3)
    assert (driver.saved_key, saved_cells.n_bytes, driver.n_computed) == (None, 0, 5)


def test_cells_that_are_given_up_make_all_tokens_pending() -> None:
    saved_cells, driver = saved(), driver_of(5)
    saved_cells.add(driver)
    assert saved_cells.give_up([0]) == []
    assert (driver.saved_key, saved_cells.n_bytes, driver.n_computed) == (None, 0, 0)


def test_cells_from_disk_weigh_nothing_and_are_told_when_given_up() -> None:
    saved_cells, driver = saved(), driver_of(0)
    key = saved_cells.add_from_disk(driver, 4)
    assert (driver.saved_key, driver.n_computed, driver.n_cached, saved_cells.n_bytes) == (
        key,
        4,
        0,
        0,
    )
    assert saved_cells.give_up([key]) == [driver]


def test_memory_that_cannot_save_weighs_nothing() -> None:
    saved_cells = SavedCells(KvCapabilities("partitioned", 256), KIB)
    assert (saved_cells.n_bytes_of(5), saved_cells.can_save) == (0, False)


def test_state_without_cells_weighs_what_memory_says() -> None:
    memory = KvCapabilities("recurrent", 4, can_trim=False, can_save=True, saved_bytes=4 * KIB)
    assert saved(8, memory).n_bytes_of(5) == 4 * KIB
    assert saved(8, memory).n_bytes_of(0) == 0
