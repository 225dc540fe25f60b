"""The memory of one context: how many cells each slot has, what plans do to cells, and which states are saved."""

from __future__ import annotations

import math
import time
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from cbatch.backend.llama.context import padded
from cbatch.backend.llama.memory import LlamaCells, SavedState
from cbatch.backend.llama.positions import cuts_picture, first_pictures, n_positions, position_of
from cbatch.backend.plan_check import PlanCheck
from cbatch.core.plan import BROKEN_ROW, Slot, StepPlan
from cbatch.errors import EngineError, PlanError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from cbatch.backend.llama.memory import FoundMemory
    from cbatch.backend.llama.positions import FlatPictures
    from cbatch.backend.llama.saved import SavedFormat
    from cbatch.core.plan import TokenLogprobs
    from cbatch.core.span import Span


class ContextMemory:
    """Moves the cells of one context's slots as plans say, and counts them.

    llama.cpp ends the process at some moves, so `check` refuses them by these counts.
    """

    def __init__(
        self,
        ctx: Any,
        found: FoundMemory,
        *,
        n_slots: int,
        n_window: int,
        is_on_device: bool,
        n_pad_cells: int = 0,
        keeps_places: bool = False,
    ) -> None:
        """Take a `llama_context *` whose slots are empty, and what its options say.

        Whether cells may be in the memory of a device, the cells that pad rows take beyond a window, and whether cells
        are loaded into the places where they were computed.
        """
        self._found, self._n_slots, self._n_window = found, n_slots, n_window
        self._memory, self._is_on_device = found.capabilities, is_on_device
        self._n_wiped = n_window + n_pad_cells
        self._keeps_places = keeps_places
        self._rules = PlanCheck(found.capabilities, n_slots, n_window)
        self.saved: dict[int, SavedState] = {}
        """States in host memory, by their keys."""
        self.renew(ctx)

    def renew(self, ctx: Any) -> None:
        """Go on with a new context, whose slots are empty; saved states stay."""
        self._cells = self._own = LlamaCells(ctx)
        self.n_cells = [0] * self._n_slots
        """How many cells each slot has."""
        self._pictures: dict[int, FlatPictures] = {}
        """By slot, the pictures in it whose rows share positions: also those that are being computed."""
        self._uncopied: set[Slot] = set()
        """Slots into which bytes are copied at the next decode."""
        self._unshifted: set[Slot] = set()
        """Slots whose cells move up at the next decode."""
        self._aside: dict[Slot, SavedState] = {}
        """What slots hold whose memory pad rows have meanwhile."""
        self._maybe_nonfinite: set[Slot] = set()
        """Slots whose cells or states may hold a NaN or an infinity, now or after the next tokens."""
        self._maybe_nonfinite_cells: set[Slot] = set()
        """Those of them of whose cells no later row has shown that they are finite."""

    def check(self, plan: StepPlan) -> None:
        """Refuse what llama.cpp would answer with an abort, before anything is done.

        Raises:
            PlanError: the plan does not fit what the slots hold.
        """
        is_needed = plan.saves or plan.loads
        n_saved = {key: s.n_cells for key, s in self.saved.items()} if is_needed else {}
        self._rules.check(plan, self.n_cells, n_saved)
        cut = [(self._pictures.get(slot, ()), n) for slot, n in plan.trims]
        cut += [(self._pictures.get(source, ()), n) for source, _, n in plan.copies]
        cut += [(self.saved[key].pictures, n) for _, key, n in plan.loads if key in self.saved]
        if any(cuts_picture(pictures, n) for pictures, n in cut):
            raise PlanError(f"the plan keeps only a part of a picture's cells: {plan!r}")

    def position(self, slot: int, i: int) -> int:
        """Return the position of a slot's cell at index `i`, or of the next one."""
        pictures = self._pictures.get(slot)
        return position_of(pictures, i) if pictures else i

    def expect(self, slot: Slot, pictures: FlatPictures) -> None:
        """Note the pictures in a chunk whose rows share positions, before the chunk is computed."""
        self._pictures[slot] = [*self._pictures.get(slot, ()), *pictures]

    def forget_expected(self, slot: Slot) -> None:
        """Forget the pictures of a chunk that was not computed."""
        self._cut_pictures(slot, self.n_cells[slot])

    def _cut_pictures(self, slot: int, n_cells: int) -> None:
        if slot in self._pictures:
            self._pictures[slot] = first_pictures(self._pictures[slot], n_cells)

    # ---- before computing, in this order ----

    def save(self, plan: StepPlan) -> list[int]:
        """Forget and save the states that a plan names; return the keys under which nothing could be saved."""
        dropped = plan.dropped
        for key in dropped:
            self.saved.pop(key, None)
        wanted = [(slot, key) for slot, key in plan.saves if key not in dropped]
        return [key for slot, key in wanted if not self._save(slot, key)]

    def _save(self, slot: Slot, key: int) -> bool:
        if slot in self._uncopied or slot in self._unshifted:  # the step that does it has failed
            return False
        state = self._state(slot)
        if state is None:
            return False
        self.saved[key] = replace(state, maybe_nonfinite=slot in self._maybe_nonfinite)
        return True

    def _state(self, slot: Slot) -> SavedState | None:
        """Return a copy of a slot's cells; None where that failed, or they are not as many as they are here."""
        state, n_cells = self._cells.save(slot), self.n_held(slot)
        pictures = self._pictures.get(slot, ())
        if state is None or state.n_cells != n_positions(pictures, n_cells):
            return None
        return replace(state, n_cells=n_cells, pictures=pictures) if pictures else state

    def trim_and_load(self, plan: StepPlan) -> list[int]:
        """Empty, trim and load the slots that a plan names; return the keys that could not be loaded."""
        for slot in plan.clears:
            self._trim(slot, 0)
        for slot, n_cells in plan.trims:
            self._trim(slot, n_cells)
        if self._maybe_nonfinite:
            self._wipe()
        unloaded = [key for slot, key, n in plan.loads if not self._load(slot, key, n)]
        for key in (*unloaded, *plan.forgets):
            self.saved.pop(key, None)
        return unloaded

    @property
    def can_move(self) -> bool:
        """Whether nothing waits for the next decode, and no cells are known that may be not finite."""
        return not (self._uncopied or self._unshifted or self._maybe_nonfinite)

    def move(self, cells: LlamaCells | None, format: SavedFormat, *, is_checked: bool) -> bool:
        """Go on in the memory of another context, None for the first one; return whether that was possible.

        Args:
            cells: what holds nothing, and has room for what all slots hold.
            format: how it writes a sequence.
            is_checked: refuse what is not finite.
        """
        cells = cells or self._own
        held = self._held
        is_moved = all(self._move(slot, cells, format, is_checked=is_checked) for slot in held)
        left = self._cells if is_moved else cells
        for slot in held:
            left.trim(slot, 0)
        if is_moved:
            self._cells = cells
        return is_moved

    def _move(
        self, slot: Slot, cells: LlamaCells, format: SavedFormat, *, is_checked: bool
    ) -> bool:
        state = self._state(slot)
        if state is None:
            return False
        try:
            data = format.cut(state.data, is_checked=is_checked)
        except (ValueError, MemoryError):
            return False
        return cells.load(slot, replace(state, data=data))

    def _trim(self, slot: Slot, n_cells: int) -> None:
        self._cells.trim(slot, self.position(slot, n_cells))
        self.n_cells[slot] = n_cells
        self._cut_pictures(slot, n_cells)

    def _load(self, slot: Slot, key: int, n_cells: int) -> bool:
        state = self.saved.get(key)
        if state is None or not self._put(slot, state):
            return False
        pictures = first_pictures(state.pictures, n_cells)
        n_there = n_positions(pictures, n_cells)
        if self._cells.count(slot) > n_there:
            self._cells.trim(slot, position_of(pictures, n_cells))
        if self._cells.count(slot) != n_there:
            self._cells.trim(slot, 0)
            return False
        self.n_cells[slot] = n_cells
        if pictures:
            self._pictures[slot] = pictures
        if state.maybe_nonfinite:
            self._suspect(slot)
        return True

    def _put(self, slot: Slot, state: SavedState) -> bool:
        """Load a state into a slot, unless bytes wait to be copied: what is loaded could be taken for them."""
        return not self._uncopied and self._load_state(slot, state)

    def _load_state(self, slot: Slot, state: SavedState) -> bool:
        format = self._found.format
        if self._keeps_places and format is not None:
            try:
                state = replace(state, data=format.placed(state.data))
            except (ValueError, MemoryError):
                return False
        return self._cells.load(slot, state)

    def _wipe(self) -> None:
        """Overwrite the memory that slots have left which may hold a NaN or an infinity.

        Attention multiplies cells of no sequence by zero, and a NaN stays a NaN.
        """
        if self._uncopied or self._cells is not self._own:  # see `_put`; a pool is left
            return
        empty = [Slot(slot) for slot, n in enumerate(self.n_cells) if not n]
        left = [slot for slot in empty if slot in self._maybe_nonfinite]
        if left and self._found.state is not None:
            self._cells.wipe(empty, self._found.state)
        left_cells = [slot for slot in left if slot in self._maybe_nonfinite_cells]
        self._maybe_nonfinite.difference_update(left)
        self._maybe_nonfinite_cells.difference_update(left)
        if left_cells:
            with suppress(MemoryError):
                self._wipe_cells(left_cells)

    def _wipe_cells(self, left: Sequence[Slot]) -> None:
        """Overwrite the free cells of slots with memory of their own, or all free cells of a pool.

        Raises:
            EngineError: llama.cpp does not take back what the other slots held.
        """
        memory, format = self._memory, self._found.format
        if memory.kind != "unified" and format is not None:
            if format.has_cells:
                self._cells.wipe(left, SavedState(format.zeros(self._n_wiped), self._n_wiped))
        elif not any(self.n_cells):
            self._cells.clear()
        elif memory.can_copy and format is not None:
            self._wipe_pool(left[0], format)
        elif memory.can_save and not (self._keeps_places and format is None):
            self._rewrite()

    def _wipe_pool(self, empty: Slot, format: SavedFormat) -> None:
        """Overwrite the free cells of a pool, in which slots may share cells."""
        n_bytes = self._cells.n_bytes_together(self._held, empty)
        if n_free := self._memory.n_cells - format.n_cells(n_bytes):
            self._cells.wipe([empty], SavedState(format.zeros(n_free), n_free))

    def _rewrite(self) -> None:
        """Empty the memory with zeros, and load again what slots held; they share no cells.

        Raises:
            EngineError: llama.cpp does not take it back.
        """
        states = {slot: self._state(slot) for slot in self._held}
        if None in states.values():
            return
        self._cells.clear()
        for slot, state in states.items():
            if state is not None and not self._load_state(slot, state):
                raise EngineError(f"slot {slot} could not be restored after memory was cleared")

    @property
    def _held(self) -> Sequence[Slot]:
        return [Slot(slot) for slot, n in enumerate(self.n_cells) if n]

    def copy(self, copies: Sequence[tuple[Slot, Slot, int]]) -> float:
        """Copy beginnings from slot to slot; return the seconds it took.

        Between slots with memory of their own llama.cpp copies all that a slot can hold. Cells of a slot that is at
        most half full are copied faster through host memory: 700 cells of 12 layers took 1.5 ms, and 0.3 ms for each
        further slot, against 1.6 ms a slot in windows of 2,048 and 5.5 ms in windows of 8,192.
        """
        start = time.perf_counter()
        states: dict[Slot, SavedState | None] = {}
        for source, slot, n_cells in copies:
            if source not in states:
                states[source] = self._state(source) if self._is_half_empty(source) else None
            state, n_there = states[source], self.position(source, n_cells)
            if state is None or not self._put(slot, state):
                self._cells.copy(source, slot, n_there)
                if self._cells is self._own:
                    self._uncopied.add(slot)
            else:
                self._cells.trim(slot, n_there)
            self.n_cells[slot] = n_cells
            if pictures := first_pictures(self._pictures.get(source, ()), n_cells):
                self._pictures[slot] = pictures
            if source in self._maybe_nonfinite:
                self._suspect(slot)
        return time.perf_counter() - start

    def _is_half_empty(self, slot: Slot) -> bool:
        """Whether copying a slot's cells is faster than copying all that the slot can hold."""
        is_settled = slot not in self._uncopied and slot not in self._unshifted
        is_own = self._cells is self._own
        is_apart = is_own and self._memory.kind == "partitioned" and not self._is_on_device
        return is_apart and is_settled and 2 * self.n_cells[slot] <= self._n_window

    def shift(self, shifts: Sequence[tuple[Slot, int, int]]) -> None:
        """Take cells out of the middle of slots, except where a load that failed lost them."""
        for slot, n_kept, n in shifts:
            if self.n_cells[slot] >= n_kept + n:
                self._cells.shift(slot, n_kept, n)
                self.n_cells[slot] -= n
                self._unshifted.add(slot)

    # ---- after computing ----

    def n_held(self, slot: Slot) -> int:
        """Return how many cells a slot or a sequence above the slots holds."""
        return self.n_cells[slot] if slot < self._n_slots else 0

    def is_in_the_way(self, slot: Slot) -> bool:
        """Whether a slot holds what has to be put aside before a pad row may stand there."""
        return self.n_held(slot) > 0 and not self._found.can_cut

    def has_pad_room(self, slot: Slot, n_steps: int, n_longest: int) -> bool:
        """Whether pad rows fit behind what an idle slot holds, and attention looks at no more cells with them.

        It looks at as many cells of each row as the longest has, rounded up. Source: src/llama-kv-cache.cpp, get_n_kv.

        Args:
            slot: has memory of its own, or there is no room.
            n_steps: pad rows, one a step.
            n_longest: cells that the longest row has before the steps.
        """
        if self._cells is not self._own or slot in self._maybe_nonfinite:
            return False
        n_after = self.n_cells[slot] + n_steps
        return n_after <= self._n_window and padded(n_after) <= padded(n_longest + n_steps)

    def place_pad(self, slot: Slot) -> int:
        """Return the position of a pad row in a slot; what cannot be cut is put aside first.

        Raises:
            EngineError: no host memory for what the slot holds.
        """
        if not self.is_in_the_way(slot):
            return self.n_held(slot)
        state = self._state(slot)
        if state is None:
            raise EngineError(f"out of memory while saving slot {slot} for a pad row")
        self._aside[slot] = state
        self._cells.trim(slot, 0)
        return 0

    def remove_pad(self, slot: Slot) -> None:
        """Remove the cells of a slot's pad rows; the slot holds again what was put aside.

        Raises:
            EngineError: llama.cpp does not take back what was put aside.
        """
        state = self._aside.pop(slot, None)
        n_kept = self.position(slot, self.n_held(slot))
        self._cells.trim(slot, n_kept if state is None else 0)
        if state is not None and not self._load_state(slot, state):
            raise EngineError(f"slot {slot} could not be restored after a pad row")

    def add(
        self,
        chunks: Sequence[Span],
        tokens: Sequence[Sequence[int]],
        scores: Mapping[Slot, Sequence[TokenLogprobs]],
    ) -> None:
        """Count the cells of at least one step that was done, by what was sampled; note whose row or score was broken.

        A row that is not broken shows that its cells are finite; a recurrent state may still grow.
        """
        self._uncopied.clear()
        self._unshifted.clear()
        for chunk, sampled in zip(chunks, tokens, strict=True):
            self.n_cells[chunk.slot] += len(chunk.inputs) + max(0, len(sampled) - 1)
            if sampled and sampled[-1] == BROKEN_ROW:  # a run ends with it
                self._suspect(chunk.slot)
            elif sampled:
                self._maybe_nonfinite_cells.discard(chunk.slot)
                if self._found.state is None:
                    self._maybe_nonfinite.discard(chunk.slot)
        for slot, found in scores.items():
            if any(math.isnan(score.logprob) for score in found):
                self._suspect(slot)

    def _suspect(self, slot: Slot) -> None:
        self._maybe_nonfinite.add(slot)
        self._maybe_nonfinite_cells.add(slot)

    def keep(self, chunk: Span, n_sampled: int) -> int:
        """Keep the cells that a failed step left of a chunk's slot, after steps that sampled `n_sampled` tokens.

        Returns:
            How many cells the slot has now.
        """
        end = chunk.start + len(chunk.inputs)
        n_kept = self._n_left(chunk, end if n_sampled else chunk.start)
        n_kept = min(end + n_sampled, n_kept) if self._memory.can_trim else 0
        self._trim(chunk.slot, n_kept)
        return n_kept

    def _n_left(self, chunk: Span, n_before: int) -> int:
        """Return how many cells a failed step left of a chunk's slot, which had `n_before` before it."""
        n_there, pictures = self._cells.count(chunk.slot), self._pictures.get(chunk.slot)
        if not pictures:
            return n_there
        if pictures[-1].end > n_before:  # nobody knows how many rows there are
            return n_before
        return n_before + max(0, n_there - self.position(chunk.slot, n_before))

    def undo(self, chunks: Sequence[Span]) -> bool:
        """Take back the cells of chunks that were computed but not counted yet; return whether that was possible."""
        undone = [
            (self._found.can_cut or not c.start)
            and self._cells.trim(c.slot, self.position(c.slot, c.start))
            for c in chunks
        ]
        return all(undone)

    def take_back(self, chunks: Sequence[Span]) -> bool:
        """Take back the last cells, of chunks that were counted; return whether that was possible."""
        if not self._found.can_cut:
            return False
        for chunk in chunks:
            self._trim(chunk.slot, chunk.start)
        return True
