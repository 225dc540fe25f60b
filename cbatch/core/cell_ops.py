"""What a plan does to cells: a value, made against a view of the ledger and the prefix cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypedDict

if TYPE_CHECKING:
    from collections import deque
    from collections.abc import Collection, Iterable, Sequence

    from cbatch.core.driver import SequenceDriver
    from cbatch.core.kv import KvLedger
    from cbatch.core.plan import KvCapabilities, Slot, StepPlan
    from cbatch.core.prefix import PrefixCache, PrefixChanges, Source
    from cbatch.core.waiting import Want


class CellOps(TypedDict, total=False):
    """Fields of a `StepPlan`; only those with something in them."""

    clears: tuple[Slot, ...]
    trims: tuple[tuple[Slot, int], ...]
    copies: tuple[tuple[Slot, Slot, int], ...]
    saves: tuple[tuple[Slot, int], ...]
    shifts: tuple[tuple[Slot, int, int], ...]
    loads: tuple[tuple[Slot, int, int], ...]
    forgets: tuple[int, ...]


class SlotCells:
    """The ledger and the prefix cache, with the cell operations that the backend has still to do.

    Events between plans change the ledger at once and leave an operation for the next plan; a plan adds its own in a
    `view`. Cells of a slot that is given back stay for sequences that begin alike, until the slot or, in a shared pool,
    the cells are needed.
    """

    def __init__(
        self, ledger: KvLedger, prefixes: PrefixCache, memory: KvCapabilities | None
    ) -> None:
        self.ledger, self.prefixes = ledger, prefixes
        self._memory = memory
        self._can_trim = memory is None or memory.can_trim
        self.clears: dict[Slot, None] = {}
        self.trims: dict[Slot, int] = {}
        self.shifts: dict[Slot, tuple[int, int]] = {}
        self.saves: list[tuple[Slot, int]] = []
        self.forgets: list[int] = []
        self.rebinds: dict[Slot, None] = {}
        """Slots to bind anew: their sequences' positions or the backend's bindings have changed."""
        # of a view alone
        self.copies: list[tuple[Slot, Slot, int]] = []
        self.loads: list[tuple[Slot, int, int]] = []

    @property
    def n_to_copy(self) -> int:
        """Cells that the plan copies from slot to slot."""
        return sum(n for _, _, n in self.copies)

    def view(self, running: Sequence[SequenceDriver | None]) -> SlotCells:
        """Return what a plan changes in place of this."""
        ledger = self.ledger.copy()
        view = SlotCells(ledger, self.prefixes.view(ledger, running), self._memory)
        view.clears, view.trims, view.shifts = (
            dict(self.clears),
            dict(self.trims),
            dict(self.shifts),
        )
        view.saves, view.forgets, view.rebinds = [*self.saves], [*self.forgets], dict(self.rebinds)
        return view

    def ops(self) -> CellOps:
        """Return all operations as a part of a plan."""
        ops = CellOps()
        if self.clears:
            ops["clears"] = tuple(sorted(self.clears))
        if self.trims:
            ops["trims"] = tuple(sorted(self.trims.items()))
        if self.shifts:
            ops["shifts"] = tuple((slot, *shift) for slot, shift in self.shifts.items() if shift[1])
        if self.copies:
            ops["copies"] = tuple(self.copies)
        if self.saves:
            ops["saves"] = tuple(self.saves)
        if self.loads:
            ops["loads"] = tuple(self.loads)
        if self.forgets:
            ops["forgets"] = tuple(self.forgets)
        return ops

    def commit(self, changes: PrefixChanges, plan: StepPlan, lost: Collection[int]) -> None:
        """Enter what a plan's run did to cells, and what its slots hold now."""
        self.ledger.do(plan, lost)
        self.prefixes.commit(changes)

    def note_done(self) -> None:
        """Drop the operations that were left to do: a plan had them all, and was run."""
        for ops in (self.clears, self.trims, self.shifts, self.rebinds):
            ops.clear()
        self.saves, self.forgets = [], []

    def clear(self, slot: Slot) -> None:
        """Empty a slot, whatever is in it: a failed step may have left more than the ledger says."""
        self.ledger.trim(slot, 0)
        self.prefixes.forget(slot)
        self.trims.pop(slot, None)
        self.shifts.pop(slot, None)
        self.clears[slot] = None

    def trim(self, slot: Slot, n_cells: int) -> None:
        """Keep the first `n_cells` cells of a slot."""
        self.ledger.trim(slot, n_cells)
        self.trims[slot] = n_cells

    def settle(self, slot: Slot, n_cells: int) -> None:
        """Keep the first `n_cells` cells of a slot that holds at least as many; the ledger may have known of fewer."""
        n_more = n_cells - self.ledger.n_cells[slot]
        if n_more > 0:
            self.ledger.add(slot, n_more)
        self.trim(slot, n_cells)

    def shift(self, driver: SequenceDriver, slot: Slot) -> None:
        """Take tokens out of a full window, with their cells."""
        n_keep, n_cells = driver.shift()
        self.prefixes.forget(slot)
        self.ledger.trim(slot, self.ledger.n_cells[slot] - n_cells)
        self.shifts[slot] = n_keep, n_cells
        self.rebinds[slot] = None

    def leave(self, driver: SequenceDriver, slot: Slot) -> None:
        """Retain what a driver computed in a slot that it gives back, where that is of use to others."""
        n_known = self.n_known(driver, slot)
        self.rebinds.pop(slot, None)
        if driver.finish_reason == "error" or not n_known or not self.prefixes.can_retain(driver):
            self.clear(slot)
            return
        if n_known < self.ledger.n_cells[slot]:
            self.shifts.pop(slot, None)
            self.trim(slot, n_known)
        self.prefixes.retain(slot, driver, n_known)

    def n_known(self, driver: SequenceDriver, slot: Slot) -> int:
        """Return how many cells of a driver's slot are of use to others: a run may have sampled past a stop string."""
        n_cells = self.ledger.n_cells[slot]
        n_known = min(n_cells, driver.n_lasting)
        return n_known if self._can_trim or n_known == n_cells else 0

    # ---- in a view ----

    def enter(self, driver: SequenceDriver, slot: Slot, source: Source | None) -> int:
        """Fill a driver's new slot with its saved cells, or with cells that others computed; return how many."""
        n_kept = source.n_cells if source is not None and source.slot == slot else 0
        n_cells = driver.n_computed
        if not n_kept:
            if self.ledger.n_cells[slot]:
                self.clear(slot)
        elif n_kept < self.ledger.n_cells[slot]:
            self.trim(slot, n_kept)
        if driver.saved_key is not None:
            self._load(driver, slot, driver.saved_key)
        elif source is not None:
            n_cells = source.n_cells
            if not n_kept:
                self._copy(source.slot, slot, n_cells)
        self.prefixes.entering[driver] = n_cells
        self.prefixes.enter(slot, driver)
        return n_cells

    def move(self, driver: SequenceDriver, source: Slot, slot: Slot) -> None:
        """Copy all cells of a driver to another slot."""
        n_cells = self.ledger.n_cells[source]
        if self.ledger.n_cells[slot]:
            self.clear(slot)
        self._copy(source, slot, n_cells)
        self.prefixes.enter(slot, driver)
        if self.prefixes.can_retain(driver):
            self.prefixes.retain(source, driver, n_cells, is_moved=True)

    def make_room(self, n_cells: int) -> bool:
        """Empty free slots until `n_cells` cells are free, the one unused for longest first; return whether any was."""
        is_emptied = False
        while self.ledger.n_free_cells < n_cells:
            slot = self.prefixes.oldest_retained()
            if slot is None:
                break
            self.clear(slot)
            is_emptied = True
        return is_emptied

    def _load(self, driver: SequenceDriver, slot: Slot, key: int) -> None:
        n_cells = driver.n_computed
        self.make_room(n_cells)
        self.ledger.add(slot, n_cells)
        self.loads.append((slot, key, n_cells))
        self.prefixes.loading.append(driver)

    def _copy(self, source: Slot, slot: Slot, n_cells: int) -> None:
        self.prefixes.copy(source, n_cells)
        self.copies.append((source, slot, n_cells))
        self.ledger.share(source, slot, n_cells)


@dataclass(frozen=True, slots=True)
class Stored:
    """A sequence whose cells were copied out to be written to disk: `n_cells` under `key`, None where that failed."""

    driver: SequenceDriver
    key: int | None
    n_cells: int


class SavedCells:
    """Cells outside of slots, by key: those of sequences without a slot, and those on their way to disk.

    Cells of a sequence that leaves its slot to come back are saved in host memory where the backend can and the budget
    allows; otherwise they are lost, and computed again.
    """

    def __init__(self, memory: KvCapabilities | None, n_bytes_max: int, wants: deque[Want]) -> None:
        self.n_bytes = 0
        self.n_bytes_max = n_bytes_max
        self.next_key = 0
        """The key that is given next; none is given twice."""
        self._memory = memory if memory and memory.can_save else None
        self._saved: dict[int, tuple[SequenceDriver, int]] = {}  # with the bytes
        self._adopted: set[int] = set()
        self._storing: dict[int, tuple[SequenceDriver, int]] = {}  # with the cells
        self._wants = wants

    @property
    def can_save(self) -> bool:
        """Whether the backend can copy cells out."""
        return self._memory is not None

    def n_bytes_of(self, n_cells: int) -> int:
        """Return what saved cells of one sequence take; 0 where none can be saved."""
        return self._memory.n_saved_bytes(n_cells) if self._memory and n_cells else 0

    def add(self, key: int, driver: SequenceDriver) -> None:
        """Enter that a driver's cells were saved."""
        n_bytes = self.n_bytes_of(driver.n_computed)
        driver.saved_key = key
        self._saved[key] = driver, n_bytes
        self.n_bytes += n_bytes

    def adopt(self, driver: SequenceDriver, n_cells: int) -> int:
        """Return a key under which the backend is to get cells from disk, for a waiting driver to begin with."""
        key = self._new_key()
        driver.adopt(key, n_cells)
        self._saved[key] = driver, 0
        self._adopted.add(key)
        return key

    def take(self, key: int) -> bool:
        """Enter that saved cells were loaded, or could not be; return whether they came from disk."""
        driver, n_bytes = self._saved.pop(key)
        driver.saved_key = None
        self.n_bytes -= n_bytes
        is_adopted = key in self._adopted
        self._adopted.discard(key)
        return is_adopted

    def give_up(self, keys: Iterable[int]) -> list[SequenceDriver]:
        """Give up saved cells: their tokens are pending again; return the sequences whose cells came from disk.

        A key that was loaded already, by a plan that was half committed, is passed over.
        """
        adopted = []
        for key in keys:
            if key not in self._saved:
                continue
            driver = self._saved[key][0]
            if self.take(key):
                adopted.append(driver)
            driver.rewind()
        return adopted

    def store(self, driver: SequenceDriver, n_cells: int) -> int:
        """Return a key to save the cells of an ended driver under, to be written to disk."""
        key = self._new_key()
        self._storing[key] = driver, n_cells
        return key

    def end_stores(self, lost: Collection[int], *, are_all_lost: bool = False) -> None:
        """Enter that a run has copied out what was to be stored, but for the keys that were lost."""
        for key, (driver, n_cells) in self._storing.items():
            is_lost = are_all_lost or key in lost
            if is_lost:
                driver.warnings.append("the cells were not saved: they could not be copied out")
            self._wants.append(Stored(driver, None if is_lost else key, n_cells))
        self._storing.clear()

    def _new_key(self) -> int:
        self.next_key += 1
        return self.next_key - 1
