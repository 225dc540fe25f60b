"""Orders for the next plan, and the books that follow them: what is saved, what is lost, what it may weigh."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from cbatch.backend.fake import FakeVocab
from cbatch.core.cell_ops import Cells, Stored
from cbatch.core.driver import SequenceDriver
from cbatch.core.kv import KvLedger
from cbatch.core.plan import KvCapabilities, Slot
from cbatch.core.sharing import PrefixCache
from tests.helpers import make_request, partitioned, shared_pool

if TYPE_CHECKING:
    from cbatch.core.cell_ops import Orders

KIB = 1024


def make_cells(n_kib: int = 1024, memory: KvCapabilities | None = None) -> Cells:
    """Cells of four slots; a saved one takes 1 KiB, and `n_kib` are allowed."""
    return Cells(KvLedger(4, 64), memory or partitioned(256), n_kib * KIB)


def running(cells: Cells, n_computed: int) -> tuple[SequenceDriver, Slot]:
    """A sequence with so many cells in the lowest free slot."""
    driver = SequenceDriver.of(make_request(), FakeVocab(320).piece, 0.0)
    driver.tokens, driver.n_computed = [1] * (n_computed + 1), n_computed
    slot = driver.slot = cells.ledger.lend()
    cells.ledger.add(slot, n_computed)
    return driver, slot


def moved(cells: Cells) -> tuple[SequenceDriver, Slot]:
    """A sequence whose window of 16 was full, and that has 12 cells now, 2 of them where they were."""
    driver, slot = running(cells, 16)
    driver.request = make_request(n_discard=4, n_keep=2)
    driver.n_window, driver.n_prompt = 16, 2
    driver.keep_in_window(2)
    cells.shift(driver, slot)
    return driver, slot


def shared(memory: KvCapabilities) -> Cells:
    """Cells of four slots that keep what it holds when it is left."""
    ledger = KvLedger(4, 64, memory)
    return Cells(ledger, memory, KIB, PrefixCache(ledger, [None] * 4, memory))


def leave(cells: Cells, driver: SequenceDriver, slot: Slot) -> None:
    """As the batcher does it."""
    cells.save(driver, slot)
    cells.ledger.give_back(slot)
    cells.clear(slot)
    driver.slot = None


def enter(cells: Cells, driver: SequenceDriver) -> Slot:
    slot = driver.slot = cells.ledger.lend()
    cells.load(driver, slot)
    return slot


def parked(cells: Cells, n_computed: int) -> SequenceDriver:
    driver, slot = running(cells, n_computed)
    leave(cells, driver, slot)
    return driver


def test_no_orders_are_an_empty_part_of_a_plan() -> None:
    assert make_cells().take() == {}


def test_orders_are_given_once_and_slots_ascend() -> None:
    cells = make_cells()
    drivers = [running(cells, 5) for _ in range(4)]
    for driver, slot in (drivers[3], drivers[1]):
        cells.clear(slot)
        driver.rewind()
    cells.clear(Slot(3))
    for driver, slot in (drivers[2], drivers[0]):
        cells.trim(driver, slot, 4)
    assert cells.take() == {"clears": (1, 3), "trims": ((0, 4), (2, 4))}
    assert cells.take() == {}
    assert cells.ledger.n_cells == [4, 0, 4, 0]


def test_clear_of_a_trimmed_slot_takes_the_trim_back() -> None:
    cells = make_cells()
    driver, slot = running(cells, 5)
    cells.trim(driver, slot, 3)
    cells.clear(slot)
    assert cells.take() == {"clears": (0,)}


def test_clear_of_a_slot_that_is_to_move_takes_the_move_back() -> None:
    cells = make_cells()
    _, slot = moved(cells)
    cells.clear(slot)
    assert cells.take() == {"clears": (0,)}


def test_slot_that_is_left_before_it_moves_keeps_what_would_not() -> None:
    cells = shared(partitioned(256))
    cells.leave(*moved(cells))
    assert cells.take() == {"trims": ((0, 2),)}
    assert cells.ledger.n_cells[0] == 2


def test_slot_that_is_to_move_is_not_saved() -> None:
    cells = make_cells()
    driver, slot = moved(cells)
    cells.save(driver, slot)
    assert cells.take() == {"shifts": ((0, 2, 4),)}
    assert (driver.n_computed, driver.saved_key) == (0, None)


def test_slot_of_a_pool_whose_cells_move_for_all_is_left_empty() -> None:
    cells = shared(shared_pool(200, can_copy=True))
    driver, slot = running(cells, 5)
    driver.request = make_request(n_discard=4)
    cells.leave(driver, slot)
    assert cells.take() == {"clears": (0,)}


def test_trim_may_keep_more_cells_than_the_books_had() -> None:
    cells = make_cells()
    driver, slot = running(cells, 5)
    driver.tokens += [1] * 5
    cells.trim(driver, slot, 8)
    assert (driver.n_computed, cells.ledger.n_cells[slot]) == (8, 8)


def test_saved_cells_restored_to_another_slot_add_no_pending_token() -> None:
    cells = make_cells()
    driver = parked(cells, 5)
    assert cells.n_saved_bytes == 5 * KIB
    assert cells.take() == {"clears": (0,), "saves": ((0, 0),), "loads": (), "forgets": ()}
    running(cells, 2)
    assert enter(cells, driver) == 1
    assert cells.take() == {"saves": (), "loads": ((1, 0, 5),), "forgets": ()}
    assert (driver.n_computed, driver.saved_key, cells.n_saved_bytes) == (5, None, 0)
    assert cells.ledger.n_cells == [2, 5, 0, 0]


def test_keys_are_never_used_again() -> None:
    cells = make_cells()
    keys = []
    for _ in range(3):
        driver = parked(cells, 5)
        keys.append(driver.saved_key)
        cells.forget(driver)
    assert keys == [0, 1, 2]


@pytest.mark.parametrize("memory", [KvCapabilities("partitioned", 256), None])
def test_memory_that_cannot_save_loses_the_cells(memory: KvCapabilities | None) -> None:
    cells = Cells(KvLedger(4, 64), memory, 1024 * KIB)
    driver = parked(cells, 5)
    assert (driver.n_computed, driver.saved_key) == (0, None)
    assert cells.take() == {"clears": (0,)}


@pytest.mark.parametrize(("n_kib", "kept"), [(0, [0, 0, 0]), (8, [5, 0, 3]), (14, [5, 6, 3])])
def test_budget_takes_what_fits_and_the_rest_is_computed_again(n_kib: int, kept: list[int]) -> None:
    cells = make_cells(n_kib)
    drivers = [parked(cells, n) for n in (5, 6, 3)]
    assert [d.n_computed for d in drivers] == kept
    assert cells.n_saved_bytes == sum(kept) * KIB


def test_budget_is_free_again_after_a_load_and_after_a_forget() -> None:
    cells = make_cells(n_kib=5)
    first = parked(cells, 5)
    enter(cells, first)
    second = parked(cells, 5)
    assert second.n_computed == 5
    cells.forget(second)
    assert parked(cells, 5).n_computed == 5


def test_state_without_cells_weighs_what_memory_says() -> None:
    memory = KvCapabilities("recurrent", 4, can_trim=False, can_save=True, saved_bytes=4 * KIB)
    cells = make_cells(8, memory)
    assert [parked(cells, 5).n_computed for _ in range(3)] == [5, 5, 0]
    assert cells.n_saved_bytes == 8 * KIB


def test_slot_without_cells_is_not_saved() -> None:
    cells = make_cells(memory=KvCapabilities("recurrent", 4, can_save=True, saved_bytes=KIB))
    assert parked(cells, 0).saved_key is None
    assert "saves" not in cells.take()


def test_slot_with_a_trim_still_to_do_is_not_saved() -> None:
    cells = make_cells()
    driver, slot = running(cells, 5)
    cells.trim(driver, slot, 4)
    leave(cells, driver, slot)
    assert (driver.n_computed, driver.saved_key) == (0, None)


def test_forgotten_cells_are_ordered_away_once() -> None:
    cells = make_cells()
    driver = parked(cells, 5)
    cells.take()
    cells.forget(driver)
    cells.forget(driver)
    assert cells.take()["forgets"] == (0,)
    assert cells.n_saved_bytes == 0


def test_lost_save_makes_all_tokens_pending() -> None:
    cells = make_cells()
    driver = parked(cells, 5)
    cells.take()
    cells.settle((0,))
    assert (driver.n_computed, driver.saved_key, cells.n_saved_bytes) == (0, None, 0)


def test_lost_load_makes_all_tokens_pending_and_its_slot_empty() -> None:
    cells = make_cells()
    driver = parked(cells, 5)
    slot = enter(cells, driver)
    cells.take()
    cells.settle((0,))
    assert (driver.n_computed, cells.ledger.n_cells[slot]) == (0, 0)


def test_settled_loads_are_not_looked_for_again() -> None:
    cells = make_cells()
    driver = parked(cells, 5)
    enter(cells, driver)
    cells.settle(())
    with pytest.raises(KeyError):
        cells.settle((0,))


def test_forget_all_gives_up_every_saved_sequence() -> None:
    cells = make_cells()
    drivers = [parked(cells, n) for n in (5, 6)]
    cells.take()
    cells.forget_all()
    orders: Orders = cells.take()
    assert orders["forgets"] == (0, 1)
    assert [d.n_computed for d in drivers] == [0, 0]
    assert cells.n_saved_bytes == 0


def test_store_of_a_slot_whose_cells_are_lost_is_given_up_and_others_stay() -> None:
    cells = make_cells()
    (lost, first), (kept, second) = running(cells, 5), running(cells, 7)
    assert cells.store(lost, first)
    assert cells.store(kept, second)
    cells.give_up_store(first)
    assert cells.take()["saves"] == ((1, 1),)
    assert cells.take_stored() == Stored(lost, None, 5)
    assert ["not saved" in w for w in lost.warnings] == [True]
    cells.settle(())
    assert cells.take_stored() == Stored(kept, 1, 7)
    assert cells.take_stored() is None
    assert not kept.warnings


def test_giving_up_stores_of_a_slot_leaves_what_is_saved_from_it_for_later() -> None:
    cells = make_cells()
    driver, slot = running(cells, 5)
    leave(cells, driver, slot)
    cells.give_up_store(slot)
    assert cells.take()["saves"] == ((0, 0),)
    assert cells.take_stored() is None


def test_saved_cells_an_interrupted_plan_was_to_drop_are_dropped_again() -> None:
    cells = make_cells()
    driver = parked(cells, 5)
    cells.take()
    cells.forget(driver)
    assert cells.take()["forgets"] == (0,)
    cells.forget_all()  # nobody knows whether it was done
    assert cells.take()["forgets"] == (0,)
    cells.settle(())
    cells.forget_all()
    assert cells.take() == {}
