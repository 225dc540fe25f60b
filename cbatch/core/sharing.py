"""Who has already computed, or is about to compute, the beginning of a prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from cbatch.core.driver import SequenceDriver, Status
from cbatch.core.prefix import PrefixIndex

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from cbatch.core.kv import KvLedger
    from cbatch.core.plan import Memory, Slot

N_WORTH = 32
"""Cells worth a copy, or waiting for: fewer are computed in about the time of one small step."""


@dataclass(frozen=True, slots=True)
class Source:
    """`n_cells` cells of a slot that are the beginning of somebody's prompt."""

    slot: Slot
    n_cells: int


class Sharing:
    """Finds what a newcomer can take over: from a slot that nobody has, or by a copy from one that is in use.

    `n_piece` as of a backend: only whole pieces of prompts are the same bits whoever computes them, so with it
    beginnings end at its multiples, and output is nothing to take over.
    """

    def __init__(
        self,
        ledger: KvLedger,
        running: Sequence[SequenceDriver | None],
        memory: Memory | None,
        *,
        n_piece: int = 0,
        is_on: bool = True,
    ) -> None:
        self.index = PrefixIndex()
        self._ledger, self._running = ledger, running
        self._n_piece = n_piece
        self._can_trim = memory is not None and memory.can_trim
        self._can_copy = memory is not None and memory.can_copy
        self.is_on = is_on and memory is not None
        self.loading: dict[int, SequenceDriver] = {}
        """Whose cells the next plan puts back, by key: until then there is nothing to copy."""
        self._used_at: dict[Slot, int] = {}
        self._n_used = 0

    def enter(self, slot: Slot, driver: SequenceDriver) -> None:
        """Take in that a driver has a slot, with its prompt."""
        self._n_used += 1
        self._used_at[slot] = self._n_used
        if self.is_on:
            self.index.put(slot, driver.tokens[: driver.n_prompt])

    def leave(self, slot: Slot, tokens: Sequence[int], n_prompt: int) -> None:
        """Take in what a slot still holds that nobody has any more."""
        if self.is_on and self._ledger.n_cells[slot]:
            self.index.put(slot, tokens[:n_prompt] if self._n_piece else tokens)

    def forget(self, slot: Slot) -> None:
        """Take in that a slot was emptied."""
        self.index.remove(slot)

    def best(self, driver: SequenceDriver) -> Source | None:
        """Return where most of a prompt's beginning is computed; in a free slot if there is as good a one."""
        best: Source | None = None
        best_rank = (0, True)
        for n, slot in self._matches(driver):
            holder, n_cells = self._running[slot], self._usable(n, slot)
            n_lost = self._ledger.n_cells[slot] - n_cells
            if holder is None and n_cells < N_WORTH <= n_lost:
                continue  # a common first token is not worth what somebody else may come back for
            rank = (n_cells, holder is None)
            if rank > best_rank and (holder is None or self._can_copy_from(holder, n_cells)):
                best, best_rank = Source(slot, n_cells), rank
        return best

    def leader(self, driver: SequenceDriver) -> tuple[SequenceDriver, int] | None:
        """Return who is about to compute much more of a prompt's beginning than there is, and how much then."""
        if not self._can_copy or driver.saved_key is not None:
            return None
        best = self.best(driver)
        n_now = best.n_cells if best else 0
        for n, slot in self._matches(driver):
            other = self._running[slot]
            if n < n_now + N_WORTH:
                return None
            if other is not None and other.status is Status.RUNNING and other.n_computed < n:
                n_then = self._whole(n)
                return (other, n_then) if n_then >= n_now + N_WORTH else None
        return None

    def oldest_rest(self) -> Slot | None:
        """Return the slot that nobody has whose cells are unused for longest, or None."""
        rests = (s for s in self._ledger.free_slots if self._ledger.n_cells[s])
        return min(rests, key=lambda s: self._used_at.get(s, 0), default=None)

    def place(self, source: Source | None) -> Slot:
        """Return which free slot to give: the source's own, else one beside those in use that was empty for longest."""
        if source is not None and self._running[source.slot] is None:
            return source.slot
        return min(self._ledger.free_slots, key=self._place_rank)

    def _place_rank(self, slot: Slot) -> tuple[int, int, int]:
        """Rank by neighbours in use, for a gap costs a graph run; then by what is lost; then by number."""
        running = self._running
        n_beside = sum(
            0 <= s < len(running) and running[s] is not None for s in (slot - 1, slot + 1)
        )
        used_at = self._used_at.get(slot, 0) if self._ledger.n_cells[slot] else 0
        return -n_beside, used_at, slot

    def _matches(self, driver: SequenceDriver) -> Iterator[tuple[int, Slot]]:
        """Yield what the index has for a prompt, but for its last token: it is computed for its logits."""
        if not self.is_on:
            return iter(())
        n_most = driver.n_prompt if self._n_piece else driver.n_tokens
        return self.index.matches(driver.tokens[: n_most - 1])

    def _can_copy_from(self, holder: SequenceDriver, n_cells: int) -> bool:
        """Whether it pays to copy from one that has a slot; a paused one may lose it in the same plan."""
        is_there = holder.status is Status.RUNNING and holder not in self.loading.values()
        return self._can_copy and n_cells >= N_WORTH and is_there

    def _usable(self, n_common: int, slot: Slot) -> int:
        n_cells = self._ledger.n_cells[slot]
        if not self._can_trim:
            return n_cells if n_cells <= n_common and n_cells == self._whole(n_cells) else 0
        return self._whole(min(n_common, n_cells))

    def _whole(self, n: int) -> int:
        return n - n % self._n_piece if self._n_piece else n
