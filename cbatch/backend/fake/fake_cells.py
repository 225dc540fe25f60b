"""The cells of a backend without a model, and what plans have done to them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cbatch.backend.fake.fake_tokens import state_after
from cbatch.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Callable

    from cbatch.core.plan import KvCapabilities, Slot, StepPlan


class FakeCells:
    """What each slot holds, and what was saved; a plan's orders are done in the order of `StepPlan`.

    Args:
        n_slots: sequences at once.
        n_window: cells of a slot.
        memory: what can be done with them.
        start: the state of an empty slot.
        swaps: called with a key before cells are saved or loaded; False makes that fail.
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
        """What the cells of each slot come to; see `state_after`."""
        self.saved: dict[int, list[int]] = {}
        self.n_said: dict[int, int] = {}
        """How many there should be, under keys of those that came from elsewhere."""
        self._n_window, self._memory, self._start, self._swaps = n_window, memory, start, swaps
        self._is_unified = memory.kind == "unified"
        self._shared: list[list[int]] = [[] for _ in range(n_slots)]  # which cell each one is
        self._n_made = 0

    @property
    def n_used(self) -> int:
        """Cells in use; in unified memory those that several slots have are one."""
        return len(set().union(*self._shared)) if self._is_unified else sum(map(len, self.cells))

    def append(self, slot: int, cells: list[int], state: int) -> None:
        """Put cells behind those of a slot, which leave it in `state`."""
        self.cells[slot].extend(cells)
        self.states[slot] = state
        if self._is_unified:
            self._number(slot)

    def put(self, slot: int, cells: list[int], shared: list[int] | None = None) -> None:
        """Have a slot hold these cells and no others; `shared` are the numbers of those that are a copy."""
        n_kept = len(cells) if cells == self.cells[slot][: len(cells)] else 0
        self.cells[slot] = cells
        self.states[slot] = state_after(self._start, cells)
        if self._is_unified:
            self._shared[slot] = shared or self._shared[slot][:n_kept]
            self._number(slot)

    def _number(self, slot: int) -> None:
        """Give each new cell of a slot a number of its own: a copy has those of its source."""
        n_new = len(self.cells[slot]) - len(self._shared[slot])
        self._shared[slot] += range(self._n_made, self._n_made + n_new)
        self._n_made += n_new

    def do(self, plan: StepPlan) -> tuple[int, ...]:
        """Do what comes before computing; return the keys of cells that were lost."""
        for key in plan.forgets:
            self.saved.pop(key, None)
        wanted = [(slot, key) for slot, key in plan.saves if key not in plan.forgets]
        lost = [key for slot, key in wanted if not self._save(slot, key)]
        for slot in range(len(self.cells)) if plan.is_rebuild else plan.clears:
            self.put(slot, [])
        for slot, n_cells in plan.trims:
            self.put(slot, self.cells[slot][:n_cells])
        unloaded = [key for slot, key, n in plan.loads if not self._load(slot, key, n)]
        for source, slot, n_cells in () if unloaded else plan.copies:
            self.put(slot, self.cells[source][:n_cells], self._shared[source][:n_cells])
        for slot, n_kept, n in plan.shifts:
            cells = self.cells[slot]
            if len(cells) >= n_kept + n:  # else they were lost
                self.put(slot, cells[:n_kept] + cells[n_kept + n :])
        return (*lost, *unloaded)

    def _save(self, slot: Slot, key: int) -> bool:
        if not self._swaps(key):
            return False
        self.saved[key] = list(self.cells[slot])
        return True

    def _load(self, slot: Slot, key: int, n_cells: int) -> bool:
        cells = self.saved.pop(key, None)
        if cells is None or len(cells) < n_cells or not self._swaps(key):
            return False
        self.put(slot, cells[:n_cells])
        return True

    def after(self, plan: StepPlan) -> list[int]:
        """Return what each slot holds when computing begins, or refuse an order that cannot be done."""
        self._check_slots(plan)
        saved = self._saved_after(plan)
        n_cells = [0 if plan.is_rebuild else len(cells) for cells in self.cells]
        for slot in plan.clears:
            n_cells[slot] = 0
        for slot, n in plan.trims:
            if not self._memory.can_trim or not 0 <= n <= n_cells[slot]:
                raise PlanError(f"slot {slot} cannot be cut to {n} cells: {plan}")
            n_cells[slot] = n
        for source, slot, n in plan.copies:
            if not self._memory.can_copy or n_cells[slot] or not 0 < n <= n_cells[source]:
                raise PlanError(f"cannot copy {n} cells of slot {source} to {slot}: {plan}")
            n_cells[slot] = n
        for slot, key, n in plan.loads:
            if n_cells[slot] or not 0 < n <= min(saved.pop(key, 0), self._n_window):
                raise PlanError(f"cannot load {n} cells of {key} into slot {slot}: {plan}")
            n_cells[slot] = n
        for slot, n_kept, n in plan.shifts:
            self._check_shift(plan, slot, n_kept, n, n_cells[slot])
            n_cells[slot] -= n
        return n_cells

    def _check_slots(self, plan: StepPlan) -> None:
        named: list[int] = [*plan.clears, *(b.slot for b in plan.binds)]
        named += [slot for slot, *_ in (*plan.trims, *plan.saves, *plan.loads, *plan.shifts)]
        named += [slot for source, target, _ in plan.copies for slot in (source, target)]
        if any(not 0 <= slot < len(self.cells) for slot in named):
            raise PlanError(f"slots are 0 … {len(self.cells) - 1}: {plan}")

    def _saved_after(self, plan: StepPlan) -> dict[int, int]:
        """Return how many cells are said to be under each key when loading begins, or refuse to save."""
        saved = {key: self.n_said.get(key, len(cells)) for key, cells in self.saved.items()}
        for slot, key in plan.saves:
            if not self._memory.can_save or key in saved or not self.cells[slot]:
                raise PlanError(f"slot {slot} cannot be saved under {key}: {plan}")
            saved[key] = len(self.cells[slot])
        for key in plan.forgets:
            saved.pop(key, None)
        return saved

    def _check_shift(self, plan: StepPlan, slot: Slot, n_kept: int, n: int, n_cells: int) -> None:
        """Refuse to take out what is not there, or what others have too: in a pool they would move with it."""
        if not self._memory.can_shift or n < 1 or not 0 <= n_kept <= n_cells - n:
            raise PlanError(f"cannot take {n} cells out of slot {slot}: {plan}")
        others = [set(s) for i, s in enumerate(self._shared) if i != slot]
        is_copied = self._is_unified and any(slot in c[:2] for c in plan.copies)
        if is_copied or set(self._shared[slot][n_kept:]) & set().union(*others):
            raise PlanError(f"cells of slot {slot} belong to others too: {plan}")
