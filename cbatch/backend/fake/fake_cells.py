"""The cells and histories of a backend without a model, and what plans have done to them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cbatch.backend.fake.fake_tokens import shifted, state_after
from cbatch.backend.plan_check import PlanCheck
from cbatch.core.plan import KvCapabilities, Slot, StepPlan
from cbatch.core.span import Span
from cbatch.errors import PlanError


class FakeCells:
    """The cells of each slot, and what was saved; a plan's moves are done in the order of `StepPlan`.

    `start` is the state of an empty slot; `swaps` is called with a key before cells are saved or loaded, and lets that
    fail by False.
    """

    def __init__(
        self,
        n_slots: int,
        n_window: int,
        memory: KvCapabilities,
        start: int,
        swaps: Callable[[int], bool],
    ) -> None:
        self.cells: list[list[int]] = [[] for _ in range(n_slots)]
        self.states = [start] * n_slots
        """The state that the cells of each slot lead to; see `state_after`."""
        self.saved: dict[int, list[int]] = {}
        self.n_said: dict[int, int] = {}
        """How many cells were announced under each key of a state that came from elsewhere."""
        self._start, self._swaps = start, swaps
        self._rules = PlanCheck(memory, n_slots, n_window)
        self._is_unified = memory.kind == "unified"
        self._numbers: list[list[int]] = [
            [] for _ in range(n_slots)
        ]  # of a pool: which cell each one is
        self._n_made = 0

    @property
    def n_used(self) -> int:
        """Cells in use; in unified memory a cell that several slots share counts once."""
        return len(set().union(*self._numbers)) if self._is_unified else sum(map(len, self.cells))

    def append(self, slot: int, cells: list[int], state: int) -> None:
        """Put cells after those of a slot, which leave it in `state`."""
        self.cells[slot].extend(cells)
        self.states[slot] = state
        self._number(slot)

    def put(self, slot: int, cells: list[int], numbers: Sequence[int] = ()) -> None:
        """Set a slot's cells; `numbers` are those of the first cells, which are kept or shared with another slot."""
        self.cells[slot] = cells
        self.states[slot] = state_after(self._start, cells)
        self._numbers[slot] = [*numbers]
        self._number(slot)

    def _number(self, slot: int) -> None:
        """Give each new cell of a slot a number of its own in a pool: a copy has those of its source."""
        if self._is_unified:
            n_new = len(self.cells[slot]) - len(self._numbers[slot])
            self._numbers[slot] += range(self._n_made, self._n_made + n_new)
            self._n_made += n_new

    def do(self, plan: StepPlan) -> tuple[int, ...]:
        """Do a plan's moves, which come before computing; return the keys of cells that were lost."""
        dropped = plan.dropped
        for key in dropped:
            self.saved.pop(key, None)
        wanted = [(slot, key) for slot, key in plan.saves if key not in dropped]
        lost = [key for slot, key in wanted if not self._save(slot, key)]
        for slot in range(len(self.cells)) if plan.is_rebuild else plan.clears:
            self.put(slot, [])
        for slot, n_cells in plan.trims:
            self.put(slot, self.cells[slot][:n_cells], self._numbers[slot][:n_cells])
        unloaded = [key for slot, key, n in plan.loads if not self._load(slot, key, n)]
        for key in (*unloaded, *plan.forgets):
            self.saved.pop(key, None)
        for source, slot, n_cells in () if unloaded else plan.copies:
            self.put(slot, self.cells[source][:n_cells], self._numbers[source][:n_cells])
        for slot, n_kept, n in plan.shifts:
            cells = self.cells[slot]
            if len(cells) >= n_kept + n:  # else they were lost
                self.put(slot, shifted(self._start, cells, n_kept, n), self._numbers[slot][:n_kept])
        return (*lost, *unloaded)

    def _save(self, slot: Slot, key: int) -> bool:
        if not self._swaps(key):
            return False
        self.saved[key] = list(self.cells[slot])
        self.n_said.pop(key, None)
        return True

    def _load(self, slot: Slot, key: int, n_cells: int) -> bool:
        cells = self.saved.get(key)
        if cells is None or len(cells) < n_cells or not self._swaps(key):
            return False
        self.put(slot, cells[:n_cells])
        return True

    def check(self, plan: StepPlan) -> None:
        """Refuse a plan whose moves or spans do not fit what slots hold.

        Raises:
            PlanError: it breaks a rule of `StepPlan`.
        """
        saved = {key: self.n_said.get(key, len(cells)) for key, cells in self.saved.items()}
        self._rules.check(plan, [len(cells) for cells in self.cells], saved)
        for (
            slot,
            n_kept,
            _,
        ) in plan.shifts:  # in a pool, cells that other slots share would move as well
            others = set[int]().union(*(s for i, s in enumerate(self._numbers) if i != slot))
            is_copied = self._is_unified and any(slot in c[:2] for c in plan.copies)
            if is_copied or not others.isdisjoint(self._numbers[slot][n_kept:]):
                raise PlanError(f"slot {slot} cannot shift cells that other slots share: {plan}")


class History:
    """The tokens that a sequence was bound with, and every token that is computed after them.

    What is pending when a sequence is bound is in its history already, so nothing is new up to the first output.
    `native/edit.cpp` does the same.
    """

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens = list(tokens)
        self._end: int | None = None

    def shift(self, n_removed: int) -> None:
        """Note that the tokens that come are so many positions earlier: others have left the window."""
        if self._end is not None:
            self._end -= n_removed

    def feed(self, span: Span) -> None:
        """Add the new tokens of a span; a span that is computed again has none."""
        end = span.start + len(span.inputs)
        if self._end is None:
            self._end = end if span.has_output else None
        elif end > self._end:
            self.tokens += span.inputs[max(0, self._end - span.start) :]
            self._end = end
