"""The state of cells, and operations that the backend has yet to do."""

from __future__ import annotations

from copy import copy
from typing import TYPE_CHECKING

from cbatch.core.plan import Binding, Slot, StepPlan

if TYPE_CHECKING:
    from cbatch.core.books import KvLedger
    from cbatch.core.driver import SequenceDriver
    from cbatch.core.prefix import PrefixCache, PrefixSource
    from cbatch.core.span import Span
    from cbatch.options import AdapterSet


class SlotCells:
    """The ledger and the prefix cache, with the cell operations that the backend has yet to do.

    Commands between plans change the ledger at once and add an operation to the next plan. A plan adds its own in a
    `view`. A slot that is given back retains its cells for prompts with the same beginning, until another sequence
    needs the slot or, in a shared pool, the cells.
    """

    def __init__(self, ledger: KvLedger, prefixes: PrefixCache) -> None:
        self.ledger, self.prefixes = ledger, prefixes
        self.clears: dict[Slot, None] = {}
        self.trims: dict[Slot, int] = {}
        self.shifts: dict[Slot, tuple[int, int]] = {}
        self.saves: list[tuple[Slot, int]] = []
        self.forgets: list[int] = []
        self.rebinds: dict[Slot, None] = {}
        """Slots to bind again: removed tokens of their sequences are back, or the backend lost its bindings."""
        # only in a view
        self.copies: list[tuple[Slot, Slot, int]] = []
        self.loads: list[tuple[Slot, int, int]] = []

    @property
    def has_ops(self) -> bool:
        """Whether the backend has an operation to do or a slot to bind."""
        to_do = self.clears or self.trims or self.shifts or self.saves or self.forgets
        return bool(to_do or self.rebinds or self.copies or self.loads)

    def is_settled(self, slot: Slot) -> bool:
        """Whether the backend's slot is as the ledger says: no operation is left for it."""
        ops = self.clears, self.trims, self.shifts, self.rebinds
        return not any(slot in slots for slots in ops)

    def view(self) -> SlotCells:
        """Return a copy for a plan to change."""
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
        spans: tuple[Span, ...] = (),
        n_steps: int = 1,
        slice_s: float = 0.0,
        *,
        n_drafts: int = 0,
        binds: tuple[Binding, ...] = (),
        adapters: AdapterSet = (),
        is_rebuild: bool = False,
    ) -> StepPlan:
        """Return a step that does all pending operations before it computes."""
        return StepPlan(
            spans,
            n_steps,
            slice_s,
            n_drafts,
            clears=tuple(sorted(self.clears)),
            binds=binds,
            trims=tuple(sorted(self.trims.items())),
            copies=tuple(self.copies),
            saves=tuple(self.saves),
            loads=tuple(self.loads),
            shifts=tuple([(slot, *shift) for slot, shift in self.shifts.items()]),
            forgets=tuple(self.forgets),
            adapters=adapters,
            is_rebuild=is_rebuild,
        )

    def note_done(self) -> None:
        """Forget the pending operations, after a plan that contained them was run."""
        for ops in (self.clears, self.trims, self.shifts, self.rebinds):
            ops.clear()
        for moves in (self.saves, self.forgets, self.copies, self.loads):
            moves.clear()

    def clear(self, slot: Slot) -> None:
        """Empty a slot. A failed step may have left more in it than the ledger says."""
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
        """Keep the first `n_cells` cells of a slot that has at least as many, even if the ledger has fewer."""
        n_more = n_cells - self.ledger.n_cells[slot]
        if n_more > 0:
            self.ledger.add(slot, n_more)
        self.trim(slot, n_cells)

    def shift(self, driver: SequenceDriver, slot: Slot) -> None:
        """Move a full window: remove `n_discard` tokens after the first `n_keep`, and their cells."""
        n_keep, n_cells = driver.shift()
        self.prefixes.forget(slot)
        self.ledger.trim(slot, self.ledger.n_cells[slot] - n_cells)
        self.shifts[slot] = n_keep, n_cells
        if driver.request.grammar is not None:
            self.rebinds[slot] = (
                None  # tokens that it forces may be held until there is room for them
            )

    def unshift(self, slot: Slot) -> int:
        """Cancel a window's move that the backend has yet to do; return how many cells the move would have removed."""
        n_cells = self.shifts.pop(slot, (0, 0))[1]
        if n_cells:
            self.ledger.add(slot, n_cells)
        return n_cells

    def leave(self, driver: SequenceDriver, slot: Slot) -> None:
        """Retain a leaving sequence's cells in its slot, or empty the slot if they are of no use."""
        n_known = self.n_known(driver, slot)
        self.rebinds.pop(slot, None)
        if driver.finish_reason == "error" or not n_known or not self.prefixes.can_retain(driver):
            self.clear(slot)
            return
        self.shifts.pop(slot, None)  # the move would leave more cells than are known
        if n_known < self.ledger.n_cells[slot]:
            self.trim(slot, n_known)
        self.prefixes.retain(slot, driver, n_known)

    def n_known(self, driver: SequenceDriver, slot: Slot) -> int:
        """Return how many cells of a sequence's slot match its tokens: a run may have sampled past a stop string."""
        n_cells = self.ledger.n_cells[slot]
        n_known = min(n_cells, driver.n_lasting)
        return n_known if self.ledger.memory.can_trim or n_known == n_cells else 0

    # ---- in a view ----

    def can_load(self, driver: SequenceDriver, source: PrefixSource | None) -> bool:
        """Whether the cells that a sequence loads, its own or a checkpoint's, would fit if free slots were emptied."""
        ledger, n_cells = self.ledger, 0
        if driver.saved_key is not None:
            n_cells = driver.n_computed
        elif source is not None and not ledger.memory.can_copy:
            n_cells = source.n_cells
        if not n_cells or not ledger.is_overcommitted:
            return True
        return ledger.n_in_use(self.prefixes.copied) + n_cells <= ledger.n_pool

    def fill(self, driver: SequenceDriver, slot: Slot, source: PrefixSource | None) -> int:
        """Fill a sequence's new slot with its saved cells or cells of others; return how many."""
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
        """Take a checkpoint of a slot that holds exactly the first `n_cells` of a sequence's text; return its key.

        The cells are saved as they are before the plan. Returns None if the budget has no room.
        """
        found = self.prefixes.keep(driver, n_cells)
        if found is None:
            return None
        if found.is_new:
            self.saves.append((slot, found.key))
            self.forgets += found.gone
        return found.key

    def move(self, driver: SequenceDriver, source: Slot, slot: Slot) -> None:
        """Copy all cells of a sequence to another slot; if memory cannot copy, load the sequence's saved cells."""
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
        """Empty free slots until `n_free_cells` cells are free, the least recently used first."""
        while self.ledger.n_free_cells < n_free_cells:
            slot = self.prefixes.oldest_retained()
            if slot is None:
                break
            self.clear(slot)

    def _empty(self, slot: Slot) -> None:
        if self.ledger.n_cells[slot]:
            self.clear(slot)

    def _checkpoint_of(self, driver: SequenceDriver, source: PrefixSource) -> int | None:
        """Return the key of the source's checkpoint; for a slot, take one."""
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
