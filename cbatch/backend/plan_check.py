"""The rules of `StepPlan` that depend on what slots hold: a plan that breaks one is refused before anything is done."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from cbatch.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from cbatch.core.plan import KvCapabilities, StepPlan


class PlanCheck:
    """Checks plans of one backend; llama.cpp would end the process at some that this refuses."""

    def __init__(self, memory: KvCapabilities, n_slots: int, n_window: int) -> None:
        self._memory, self._n_slots, self._n_window = memory, n_slots, n_window

    def check(self, plan: StepPlan, n_cells: Sequence[int], saved: Mapping[int, int]) -> None:
        """Refuse a plan that cannot be done.

        Args:
            plan: what is to be done.
            n_cells: how many cells each slot holds now.
            saved: how many cells are saved under each key now.

        Raises:
            PlanError: a slot out of range, a move that the memory cannot do, or a chunk that does not follow its
                slot's cells or ends past the window.
        """
        moves = (*plan.trims, *plan.copies, *plan.saves, *plan.loads, *plan.shifts)
        moved = (*plan.clears, *(slot for slot, *_ in moves), *(slot for _, slot, _ in plan.copies))
        named = (*moved, *(b.slot for b in plan.binds))
        if named and not 0 <= min(named) <= max(named) < self._n_slots:
            raise PlanError(f"a slot of the plan is not in 0 … {self._n_slots - 1}: {plan!r}")
        held = n_cells
        if moved or plan.forgets or plan.is_rebuild:
            held = self._after_moves(plan, n_cells, saved)
        previous = -1
        for chunk in plan.spans:
            end = chunk.start + len(chunk.inputs) + plan.n_steps - 1
            if (
                not previous < chunk.slot < self._n_slots
                or not chunk.inputs
                or chunk.start != held[chunk.slot]
                or end > self._n_window
            ):
                self._refuse(plan, n_cells, f"slot {chunk.slot} cannot compute its chunk")
            previous = chunk.slot

    def _after_moves(
        self, plan: StepPlan, n_cells: Sequence[int], saved: Mapping[int, int]
    ) -> list[int]:
        """Return how many cells each slot holds when computing begins, or refuse a move that cannot be done."""
        memory, n_saved = self._memory, self._saved_after(plan, n_cells, saved)
        held = [0] * self._n_slots if plan.is_rebuild else list(n_cells)
        for slot in plan.clears:
            held[slot] = 0
        for slot, n_kept in plan.trims:
            if not memory.can_trim or not 0 <= n_kept <= held[slot]:
                self._refuse(plan, n_cells, f"slot {slot} cannot be cut to {n_kept} cells")
            held[slot] = n_kept
        for source, slot, n in plan.copies:
            if not memory.can_copy or held[slot] or not 0 < n <= held[source]:
                why = f"{n} cells of slot {source} cannot be copied to slot {slot}"
                self._refuse(plan, n_cells, why)
            held[slot] = n
        for slot, key, n in plan.loads:
            n_there = n_saved.get(key, 0)
            is_part = not memory.can_trim and n != n_there
            if held[slot] or is_part or not 0 < n <= min(n_there, self._n_window):
                why = f"{n} cells saved under {key} cannot be put into slot {slot}"
                self._refuse(plan, n_cells, why)
            held[slot] = n
        for slot, n_kept, n in plan.shifts:
            if not memory.can_shift or not 0 < n <= held[slot] - n_kept or n_kept < 0:
                self._refuse(plan, n_cells, f"{n} cells cannot be taken out of slot {slot}")
            held[slot] -= n
        return held

    def _saved_after(
        self, plan: StepPlan, n_cells: Sequence[int], saved: Mapping[int, int]
    ) -> dict[int, int]:
        """Return how many cells are saved under each key when loading begins, or refuse to save."""
        n_saved = dict(saved)
        dropped = plan.dropped
        for slot, key in plan.saves:
            if not self._memory.can_save or key in n_saved or not n_cells[slot]:
                self._refuse(plan, n_cells, f"slot {slot} cannot be saved under {key}")
            n_saved[key] = 0 if key in dropped else n_cells[slot]
        return n_saved

    def _refuse(self, plan: StepPlan, n_cells: Sequence[int], why: str) -> NoReturn:
        raise PlanError(f"{why}: slots have {list(n_cells)} cells of {self._n_window}: {plan!r}")
