"""What the next plan has to do to cells before it computes: empty, trim, copy, save, load, forget."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, TypedDict

from cbatch.core.sharing import PrefixCache

if TYPE_CHECKING:
    from collections.abc import Collection, Container

    from cbatch.core.driver import SequenceDriver
    from cbatch.core.kv import KvLedger
    from cbatch.core.plan import KvCapabilities, Slot
    from cbatch.core.sharing import Source


class Orders(TypedDict, total=False):
    """Fields of a `StepPlan`; only those with something in them."""

    clears: tuple[Slot, ...]
    trims: tuple[tuple[Slot, int], ...]
    copies: tuple[tuple[Slot, Slot, int], ...]
    saves: tuple[tuple[Slot, int], ...]
    shifts: tuple[tuple[Slot, int, int], ...]
    loads: tuple[tuple[Slot, int, int], ...]
    forgets: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Stored:
    """Whose cells were copied out to be written to disk: so many, under a key, or None where that failed."""

    driver: SequenceDriver
    key: int | None
    n_cells: int


class Cells:
    """Keeps the ledger and the drivers' counters in step with the orders that go with the next plan.

    Cells of a sequence that leaves its slot to come back are saved in host memory where the backend can and the budget
    allows; otherwise they are lost, and computed again. What a slot holds stays when it is given back, for whoever
    begins alike, until somebody else needs the slot or, in a shared pool, the cells.
    """

    def __init__(
        self,
        ledger: KvLedger,
        memory: KvCapabilities | None,
        n_bytes_max: int,
        sharing: PrefixCache | None = None,
    ) -> None:
        self.ledger = ledger
        self.sharing = sharing or PrefixCache(ledger, (), memory, is_on=False)
        self.n_saved_bytes = 0
        self._memory = memory if memory and memory.can_save else None
        self._can_trim = memory is None or memory.can_trim
        self._n_bytes_max = n_bytes_max
        self._keys = count()
        self._saved: dict[int, tuple[SequenceDriver, int]] = {}  # by key, with the bytes
        self._adopted: set[int] = set()
        self._storing: dict[int, tuple[SequenceDriver, int]] = {}  # by key, with the cells
        self._stored: deque[Stored] = deque()
        self._loading = self.sharing.loading
        self._copying: list[SequenceDriver] = []
        self._clears: list[Slot] = []
        self._late_clears: list[Slot] = []
        self._trims: dict[Slot, int] = {}
        self._copies: list[tuple[Slot, Slot, int]] = []
        self._shifts: dict[Slot, tuple[int, int]] = {}
        self._saves: list[tuple[Slot, int]] = []
        self._loads: list[tuple[Slot, int, int]] = []
        self._forgets: list[int] = []
        # as ordered with the last plan: done, or not if it was broken off
        self._forgotten: list[int] = []

    @property
    def n_to_copy(self) -> int:
        """Cells that the next plan copies from slot to slot."""
        return sum(n for _, _, n in self._copies)

    def clear(self, slot: Slot) -> None:
        """Have a slot emptied, whatever is in it: a failed step may have left more than the books say."""
        self.ledger.trim(slot, 0)
        self.sharing.forget(slot)
        self._trims.pop(slot, None)
        self._shifts.pop(slot, None)
        self._clears.append(slot)

    def leave(self, driver: SequenceDriver, slot: Slot) -> None:
        """Take in that a driver gives `slot` back; what it computed stays where that costs nobody anything."""
        n_cells, n_known = self.ledger.n_cells[slot], self._n_known(driver, slot)
        is_sound = driver.finish_reason != "error" and self.sharing.is_on
        if not is_sound or not n_known or self.sharing.is_private(driver):
            self.clear(slot)
            return
        if n_known < n_cells:
            self._shifts.pop(slot, None)
            self._order_trim(slot, n_known)
        self.sharing.leave(slot, driver, n_known)

    def _n_known(self, driver: SequenceDriver, slot: Slot) -> int:
        """Return how many cells of a driver's slot are of use to others: a run may have sampled past a stop string."""
        n_cells = self.ledger.n_cells[slot]
        n_known = min(n_cells, driver.n_lasting)
        return n_known if self._can_trim or n_known == n_cells else 0

    def make_room(self, n_cells: int) -> bool:
        """Empty slots that nobody has until so many cells are free, the one unused for longest first.

        Returns:
            Whether any was emptied.
        """
        is_emptied = False
        while self.ledger.n_free_cells < n_cells:
            slot = self.sharing.oldest_rest([source for source, _, _ in self._copies])
            if slot is None:
                break
            self.clear(slot)
            is_emptied = True
        return is_emptied

    def enter(self, driver: SequenceDriver, slot: Slot, source: Source | None) -> None:
        """Fill a slot for a driver that just got it: with its saved cells, or with what somebody else computed."""
        n_kept = source.n_cells if source is not None and source.slot == slot else 0
        if not n_kept:
            if self.ledger.n_cells[slot]:
                self.clear(slot)
        elif n_kept < self.ledger.n_cells[slot]:
            self._order_trim(slot, n_kept)
        self.load(driver, slot)
        if source is not None:
            if not n_kept:
                self._order_copy(driver, source.slot, slot, source.n_cells)
            driver.take_over(source.n_cells)
        self.sharing.enter(slot, driver)
        if driver.is_over_window:
            self.shift(driver, slot)

    def move(self, driver: SequenceDriver, source: Slot, slot: Slot) -> None:
        """Have all cells of a driver in another slot, which it just got; the one that it had keeps them for others."""
        n_cells = self.ledger.n_cells[source]
        if self.ledger.n_cells[slot]:
            self.clear(slot)
        self._order_copy(driver, source, slot, n_cells)
        self.sharing.enter(slot, driver)
        if self.sharing.is_on and not self.sharing.is_private(driver):
            self.sharing.leave_copy(source, driver, n_cells)
        else:
            self.ledger.trim(source, 0)
            self._late_clears.append(source)  # clearing comes before copying in a plan

    def shift(self, driver: SequenceDriver, slot: Slot) -> None:
        """Have tokens taken out of a full window, with their cells."""
        n_keep, n_cells = driver.shift()
        self.sharing.forget(slot)
        if n_cells:
            self.ledger.trim(slot, self.ledger.n_cells[slot] - n_cells)
            self._shifts[slot] = n_keep, n_cells

    def _order_copy(self, driver: SequenceDriver, source: Slot, slot: Slot, n_cells: int) -> None:
        self.sharing.copy(source, n_cells)
        self._copies.append((source, slot, n_cells))
        self._copying.append(driver)
        self.ledger.share(source, slot, n_cells)

    def _order_trim(self, slot: Slot, n_cells: int) -> None:
        self.ledger.trim(slot, n_cells)
        self._trims[slot] = n_cells

    def trim(self, driver: SequenceDriver, slot: Slot, n_cells: int) -> None:
        """Have all but the first `n_cells` cells of a slot taken off; it may hold more than the books say."""
        driver.rewind(n_cells)
        n_more = n_cells - self.ledger.n_cells[slot]
        if n_more > 0:
            self.ledger.add(slot, n_more)
        self._order_trim(slot, n_cells)

    def save(self, driver: SequenceDriver, slot: Slot) -> None:
        """Have the cells of a driver that leaves `slot` saved, if that can be."""
        n_bytes = self._memory.n_saved_bytes(driver.n_computed) if self._memory else 0
        has_room = self.n_saved_bytes + n_bytes <= self._n_bytes_max
        is_changing = slot in self._trims or slot in self._shifts
        if not n_bytes or not driver.n_computed or not has_room or is_changing:
            driver.rewind()
            return
        key = driver.saved_key = next(self._keys)
        self._saved[key] = driver, n_bytes
        self.n_saved_bytes += n_bytes
        self._saves.append((slot, key))

    def load(self, driver: SequenceDriver, slot: Slot) -> None:
        """Have a driver's saved cells put into its new slot, if it has any."""
        key = driver.saved_key
        if key is not None:
            self._drop(key)
            self._loading[key] = driver
            self._loads.append((slot, key, driver.n_computed))
            self.make_room(driver.n_computed)
            self.ledger.add(slot, driver.n_computed)

    def adopt(self, driver: SequenceDriver, n_cells: int) -> int:
        """Return a key under which the backend is to get cells from disk, for a waiting driver to begin with."""
        key = next(self._keys)
        driver.adopt(key, n_cells)
        self._saved[key] = driver, 0
        self._adopted.add(key)
        return key

    def store(self, driver: SequenceDriver, slot: Slot) -> bool:
        """Have the cells of a driver that ended copied out, to be written to disk; return whether there are any."""
        n_cells = self._n_known(driver, slot)
        is_short = slot in self._trims or slot in self._clears or not self._memory
        if not n_cells or is_short:
            driver.warnings.append("the cells were not saved: none were left when it ended")
            return False
        key = next(self._keys)
        self._saves.append((slot, key))
        self._storing[key] = driver, n_cells
        return True

    def give_up_store(self, slot: Slot) -> None:
        """Take in that a slot's cells are lost that were to be stored."""
        lost = [key for s, key in self._saves if s == slot and key in self._storing]
        self._saves = [(s, key) for s, key in self._saves if key not in lost]
        given_up = {key: self._storing.pop(key) for key in lost}
        for driver, n_cells in given_up.values():
            self._end_store(driver, None, n_cells)

    def take_stored(self) -> Stored | None:
        """Return one whose cells were copied out, each once, or None; where they were lost, without a key."""
        return self._stored.popleft() if self._stored else None

    def forget(self, driver: SequenceDriver) -> None:
        """Give up a driver's saved cells, if it has any."""
        key = driver.saved_key
        if key is None:
            return
        self._drop(key)
        n_ordered = len(self._saves)
        self._saves = [(slot, other) for slot, other in self._saves if other != key]
        if len(self._saves) == n_ordered:  # it is saved already
            self._forgets.append(key)

    def forget_all(self) -> None:
        """Give up all saved cells: nobody knows which of the last orders were done. Those from disk may come again."""
        holders = {**self._loading, **{key: driver for key, (driver, _) in self._saved.items()}}
        for key in self._adopted & holders.keys():
            holders[key].ask_again()
        for driver, _ in list(self._saved.values()):
            self.forget(driver)
            driver.rewind()
        self._forgets += [*self._loading, *self._storing, *self._forgotten]
        self._settle_stores(self._storing)
        self._loading.clear()
        self._shifts.clear()
        self.sharing.copied.clear()
        self._copying, self._copies, self._loads = [], [], []

    def settle(self, lost: Collection[int]) -> list[SequenceDriver]:
        """Take in what a run made of the orders; the tokens of lost cells are pending again.

        Returns:
            Whose cells came from disk and could not be put into a slot.
        """
        unloaded = [key for key in self._loading if key in lost]
        for driver in (self._loading[key] for key in unloaded):
            self._lose(driver)
        for driver in self._copying if unloaded else ():  # nothing is copied then
            self._lose(driver)
        for key in lost:
            if key not in self._loading and key not in self._storing:
                driver = self._saved[key][0]
                self._drop(key)
                self._lose(driver)
        for key in self._loading.keys() - set(unloaded):
            self._loading[key].load_followers = ()
        from_disk = [self._loading[key] for key in unloaded if key in self._adopted]
        for driver in from_disk:
            driver.lose_adopted()
        self._settle_stores(lost)
        self._forgotten = []
        self._loading.clear()
        self._adopted &= self._saved.keys()
        self._copying = []
        return from_disk

    def _settle_stores(self, lost: Container[int]) -> None:
        """Take in that what was to be stored is copied out, but for what was lost."""
        for key, (driver, n_cells) in self._storing.items():
            self._end_store(driver, None if key in lost else key, n_cells)
        self._storing.clear()

    def _end_store(self, driver: SequenceDriver, key: int | None, n_cells: int) -> None:
        if key is None:
            driver.warnings.append("the cells were not saved: they could not be copied out")
        self._stored.append(Stored(driver, key, n_cells))

    def _lose(self, driver: SequenceDriver) -> None:
        driver.rewind()
        if driver.slot is not None:
            self.ledger.trim(driver.slot, 0)

    def take_saves(self) -> Orders:
        """Return only what is to be copied out; what is there to be done besides stays."""
        saves, self._saves = tuple(self._saves), []
        return Orders(saves=saves)

    def take(self) -> Orders:
        """Return the orders; each once."""
        orders = Orders()
        if self._clears:
            orders["clears"] = tuple(sorted(set(self._clears)))
        self._clears, self._late_clears = self._late_clears, []
        if self._trims:
            orders["trims"] = tuple(sorted(self._trims.items()))
            self._trims = {}
        if self._shifts:
            orders["shifts"] = tuple((slot, *shift) for slot, shift in self._shifts.items())
            self._shifts = {}
        if self._copies:
            orders["copies"] = tuple(self._copies)
            self._copies = []
            self.sharing.copied.clear()
        if self._saves or self._loads or self._forgets:
            orders["saves"], orders["loads"] = tuple(self._saves), tuple(self._loads)
            orders["forgets"] = tuple(self._forgets)
            self._forgotten = self._forgets
            self._saves, self._loads, self._forgets = [], [], []
        return orders

    def _drop(self, key: int) -> None:
        driver, n_bytes = self._saved.pop(key)
        driver.saved_key = None
        self.n_saved_bytes -= n_bytes
