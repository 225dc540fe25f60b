"""The state of cells, with the operations still to be done on them; and cells saved in host memory."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cbatch.core.plan import StepPlan

if TYPE_CHECKING:
    from collections.abc import Iterable

    from cbatch.core.driver import SequenceDriver
    from cbatch.core.kv import KvLedger
    from cbatch.core.plan import Binding, Chunk, KvCapabilities, Slot
    from cbatch.core.prefix import PrefixCache, PrefixSource
    from cbatch.options import AdapterSet


class SlotCells:
    """The ledger and the prefix cache, with the cell operations that the backend has still to do.

    Commands between plans change the ledger at once and leave an operation for the next plan; a plan adds its own in a
    `view`. Cells of a slot that is given back stay for sequences that begin alike, until the slot or, in a shared pool,
    the cells are needed.
    """

    def __init__(self, ledger: KvLedger, prefixes: PrefixCache) -> None:
        self.ledger, self.prefixes = ledger, prefixes
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
    def has_ops(self) -> bool:
        """Whether the backend has an operation to do, or a slot to bind anew."""
        to_do = self.clears or self.trims or self.shifts or self.saves or self.forgets
        return bool(to_do or self.rebinds or self.copies or self.loads)

    def is_settled(self, slot: Slot) -> bool:
        """Whether the backend holds of a slot what the ledger says: no operation is left to do there."""
        ops = self.clears, self.trims, self.shifts, self.rebinds
        return not any(slot in slots for slots in ops)

    def view(self) -> SlotCells:
        """Return what a plan changes in place of this."""
        view = copy(self)
        view.ledger = self.ledger.view()
        view.prefixes = self.prefixes.view(view.ledger)
        view.clears, view.trims = self.clears.copy(), self.trims.copy()
        view.shifts, view.rebinds = self.shifts.copy(), self.rebinds.copy()
        view.saves, view.forgets = self.saves.copy(), self.forgets.copy()
        view.copies, view.loads = self.copies.copy(), self.loads.copy()
        return view

    def step(
        self,
        chunks: tuple[Chunk, ...] = (),
        n_steps: int = 1,
        slice_s: float = 0.0,
        *,
        n_drafts: int = 0,
        binds: tuple[Binding, ...] = (),
        adapters: AdapterSet = (),
        is_rebuild: bool = False,
    ) -> StepPlan:
        """Return a step that does all operations before it computes."""
        return StepPlan(
            chunks,
            n_steps,
            slice_s,
            n_drafts,
            clears=tuple(sorted(self.clears)),
            binds=binds,
            trims=tuple(sorted(self.trims.items())),
            copies=tuple(self.copies),
            saves=tuple(self.saves),
            loads=tuple(self.loads),
            shifts=tuple([(slot, *shift) for slot, shift in self.shifts.items() if shift[1]]),
            forgets=tuple(self.forgets),
            adapters=adapters,
            is_rebuild=is_rebuild,
        )

    def note_done(self) -> None:
        """Drop the operations that were to do: a plan had them all, and was run."""
        for ops in (self.clears, self.trims, self.shifts, self.rebinds):
            ops.clear()
        for moves in (self.saves, self.forgets, self.copies, self.loads):
            moves.clear()

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
        """Retain what a driver computed in the slot that it gives back, or empty the slot where that is of no use."""
        n_known = self.n_known(driver, slot)
        self.rebinds.pop(slot, None)
        if driver.finish_reason == "error" or not n_known or not self.prefixes.can_retain(driver):
            self.clear(slot)
            return
        # the ledger has left out shifted cells already, the backend has them still: it cuts to what stands before them
        has_shift = self.shifts.pop(slot, None) is not None
        if has_shift or n_known < self.ledger.n_cells[slot]:
            self.trim(slot, n_known)
        self.prefixes.retain(slot, driver, n_known)

    def n_known(self, driver: SequenceDriver, slot: Slot) -> int:
        """Return how many cells of a driver's slot are of use to others: a run may have sampled past a stop string."""
        n_cells = self.ledger.n_cells[slot]
        n_known = min(n_cells, driver.n_lasting)
        return n_known if self.ledger.memory.can_trim or n_known == n_cells else 0

    # ---- in a view ----

    def can_load(self, driver: SequenceDriver, source: PrefixSource | None) -> bool:
        """Whether there is room for what a driver loads, its own or a checkpoint, once free slots are emptied."""
        ledger, n_cells = self.ledger, 0
        if driver.saved_key is not None:
            n_cells = driver.n_computed
        elif source is not None and not ledger.memory.can_copy:
            n_cells = source.n_cells
        if not n_cells or not ledger.is_overcommitted:
            return True
        return ledger.n_in_use(self.prefixes.copied) + n_cells <= ledger.n_pool

    def fill(self, driver: SequenceDriver, slot: Slot, source: PrefixSource | None) -> int:
        """Fill a driver's new slot with its saved cells, or with cells that others computed; return how many."""
        n_kept = source.n_cells if source is not None and source.slot == slot else 0
        key = driver.saved_key
        if key is not None:
            self.forgets.append(key)
        elif source is not None and not n_kept and not self.ledger.memory.can_copy:
            key = self._checkpoint_of(driver, source)
        if not n_kept:
            self._empty(slot)
        elif n_kept < self.ledger.n_cells[slot]:
            self.trim(slot, n_kept)
        if key is not None:
            self._load(slot, key, driver.n_computed if source is None else source.n_cells)
        elif self.ledger.memory.can_copy and source is not None and source.slot not in (None, slot):
            self._copy(source.slot, slot, source.n_cells)
        self.prefixes.record(slot, driver)
        return self.ledger.n_cells[slot]

    def keep(self, driver: SequenceDriver, slot: Slot, n_cells: int) -> int | None:
        """Take a checkpoint of a slot that holds the first `n_cells` of a driver's text, and no more; return its key.

        The cells are saved as they are before the plan. None where the budget has no room.
        """
        found = self.prefixes.keep(driver, n_cells)
        if found is None:
            return None
        if found.is_new:
            self.saves.append((slot, found.key))
            self.forgets += found.gone
        return found.key

    def move(self, driver: SequenceDriver, source: Slot, slot: Slot) -> None:
        """Copy all cells of a driver to another slot; where that cannot be done, load those saved by its number."""
        n_cells, can_copy = self.ledger.n_cells[source], self.ledger.memory.can_copy
        self._empty(slot)
        if can_copy:
            self._copy(source, slot, n_cells)
        else:
            self.clear(source)
            self._load(slot, driver.number, n_cells)
            self.forgets.append(driver.number)
        self.prefixes.record(slot, driver)
        if can_copy and self.prefixes.can_retain(driver):
            self.prefixes.retain(source, driver, n_cells)

    def make_room(self, n_free_cells: int) -> None:
        """Empty free slots until `n_free_cells` cells are free, first the one whose cells are unused for longest."""
        while self.ledger.n_free_cells < n_free_cells:
            slot = self.prefixes.oldest_retained()
            if slot is None:
                break
            self.clear(slot)

    def _empty(self, slot: Slot) -> None:
        if self.ledger.n_cells[slot]:
            self.clear(slot)

    def _checkpoint_of(self, driver: SequenceDriver, source: PrefixSource) -> int | None:
        """Return the key of what a driver goes on from: a checkpoint, or a slot of which one is taken."""
        if source.slot is not None:
            return self.keep(driver, source.slot, source.n_cells)
        if source.key is not None:
            self.prefixes.checkpoints.use(source.key)
        return source.key

    def _load(self, slot: Slot, key: int, n_cells: int) -> None:
        self.make_room(n_cells)
        self.ledger.add(slot, n_cells)
        self.loads.append((slot, key, n_cells))
        self.prefixes.loaded.add(slot)

    def _copy(self, source: Slot, slot: Slot, n_cells: int) -> None:
        self.prefixes.copy(source, n_cells)
        self.copies.append((source, slot, n_cells))
        self.ledger.share(source, slot, n_cells)


@dataclass(eq=False, slots=True)
class _Saved:
    """Cells in host memory of a sequence that waits to come back."""

    driver: SequenceDriver
    n_bytes: int
    is_from_disk: bool = False


@dataclass(frozen=True, slots=True)
class ToStore:
    """An ended sequence whose cells are to be written to disk: the first `n_cells`, which are saved under `key`.

    With a checkpoint, its key and its cells, the file can be begun with there too.
    """

    driver: SequenceDriver
    key: int
    n_cells: int
    checkpoint: tuple[int, int] | None = None


class SavedCells:
    """Cells in host memory of sequences that come back, where the backend can save and the budget allows.

    Other cells are lost, and computed again. The key of cells is the number of their sequence.
    """

    def __init__(self, memory: KvCapabilities, n_bytes_max: int) -> None:
        self.n_bytes = 0
        self.n_bytes_max = n_bytes_max
        self._memory = memory
        self._saved: dict[int, _Saved] = {}  # by key

    @property
    def can_save(self) -> bool:
        """Whether the backend can copy cells out."""
        return self._memory.can_save

    @property
    def n_counted(self) -> int:
        """The bytes of all saved cells, counted anew."""
        return sum(saved.n_bytes for saved in self._saved.values())

    @property
    def keys(self) -> list[int]:
        """The keys of all saved cells."""
        return [*self._saved]

    def n_bytes_of(self, n_cells: int) -> int:
        """Return what saved cells of one sequence take; 0 where none can be saved."""
        return self._memory.n_saved_bytes(n_cells) if self.can_save and n_cells else 0

    def add(self, driver: SequenceDriver) -> None:
        """Record that a driver's cells were saved."""
        driver.saved_key = driver.number
        saved = self._saved[driver.number] = _Saved(driver, self.n_bytes_of(driver.n_computed))
        self.n_bytes += saved.n_bytes

    def add_from_disk(self, driver: SequenceDriver, n_cells: int) -> int:
        """Return a key under which the backend is to get cells from disk, for a waiting driver to begin with."""
        driver.saved_key, driver.n_computed = driver.number, n_cells
        self._saved[driver.number] = _Saved(driver, 0, is_from_disk=True)
        return driver.number

    def take(self, key: int) -> bool:
        """Record that saved cells were loaded, or could not be; return whether they came from disk."""
        saved = self._saved.pop(key)
        saved.driver.saved_key = None
        self.n_bytes -= saved.n_bytes
        return saved.is_from_disk

    def give_up(self, keys: Iterable[int]) -> list[SequenceDriver]:
        """Give up saved cells: their tokens are pending again; return the sequences whose cells came from disk.

        A key that was loaded already, by a plan that was half committed, is passed over.
        """
        from_disk = []
        for saved in [self._saved[key] for key in keys if key in self._saved]:
            if self.take(saved.driver.number):
                from_disk.append(saved.driver)
            saved.driver.n_computed = 0
        return from_disk
