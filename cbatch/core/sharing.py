"""Who has already computed, or is about to compute, the beginning of a prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from cbatch.core.driver import SequenceDriver, Status
from cbatch.core.prefix import PrefixIndex, n_common

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Sequence

    from cbatch.core.kv import KvLedger
    from cbatch.core.plan import KvCapabilities, Slot
    from cbatch.core.prefix import Branch
    from cbatch.options import AdapterSet

MIN_SHARED_TOKENS = 32
"""Cells worth a copy, or waiting for: fewer are computed in about the time of one small step."""


@dataclass(frozen=True, slots=True)
class Source:
    """`n_cells` cells of a slot that are the beginning of somebody's prompt."""

    slot: Slot
    n_cells: int


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """What there is of a prompt's beginning: the cells to take over, and who is about to have many more."""

    source: Source | None = None
    leader: SequenceDriver | None = None
    n_then: int = 0
    """Cells that the leader will have to give."""


class PrefixCache:
    """Finds what a newcomer can take over: from a slot that nobody has, or by a copy from one that is in use.

    `chunk_alignment` as of a backend: only whole pieces of prompts are the same bits whoever computes them, so with it
    beginnings end at its multiples, and output is nothing to take over but for who goes on from it. What was computed
    with other adapters is another text.
    """

    def __init__(
        self,
        ledger: KvLedger,
        running: Sequence[SequenceDriver | None],
        memory: KvCapabilities | None,
        *,
        chunk_alignment: int = 0,
        is_on: bool = True,
    ) -> None:
        self._ledger, self._running = ledger, running
        self._chunk_alignment = chunk_alignment
        self._can_trim = memory is not None and memory.can_trim
        self._can_copy = memory is not None and memory.can_copy
        self._is_pool = memory is not None and memory.kind == "unified"
        self.is_on = is_on and memory is not None
        self.loading: dict[int, SequenceDriver] = {}
        """Whose cells the next plan puts back, by key: until then there is nothing to copy."""
        self.copied: dict[Slot, int] = {}
        """Slots that nobody has of which the next plan copies so many cells: until then they keep them."""
        self._indexes: dict[AdapterSet, PrefixIndex] = {}
        self._adapters_at: dict[Slot, AdapterSet] = {}
        self._rests: dict[Slot, int] = {}  # whose cells, by number
        self._used_at = [0] * ledger.n_slots
        self._n_used = 0

    def can_share(self, driver: SequenceDriver) -> bool:
        """Whether a driver's slot can have the cells of another's, and the other way round."""
        return self._can_copy and self.is_on and not self.is_private(driver)

    def index(self, adapters: AdapterSet = ()) -> PrefixIndex:
        """Return what stands in the slots that are computed with `adapters`."""
        if adapters not in self._indexes:
            self._indexes[adapters] = PrefixIndex()
        return self._indexes[adapters]

    def enter(self, slot: Slot, driver: SequenceDriver) -> None:
        """Take in that a driver has a slot, with its prompt."""
        self.use(slot)
        n_known = driver.n_keep if driver.n_shifts else driver.n_prompt
        self._put(slot, driver, n_known)

    def use(self, slot: Slot) -> None:
        """Take in that a slot is needed now: of those that nobody has it is emptied last."""
        self._n_used += 1
        self._used_at[slot] = self._n_used

    def copy(self, slot: Slot, n_cells: int) -> None:
        """Take in that the next plan copies the first `n_cells` of a slot."""
        self.use(slot)
        if self._running[slot] is None:
            self.copied[slot] = max(n_cells, self.copied.get(slot, 0))

    def leave(self, slot: Slot, driver: SequenceDriver, n_cells: int) -> None:
        """Take in that a slot still holds the first `n_cells` of a driver that ended or lost it."""
        self.leave_copy(slot, driver, n_cells)
        self._rests[slot] = driver.number

    def leave_copy(self, slot: Slot, driver: SequenceDriver, n_cells: int) -> None:
        """Take in that a slot still holds the first `n_cells` of a driver that went on to another."""
        n_known = min(n_cells, driver.n_prompt) if self._chunk_alignment else n_cells
        self._put(slot, driver, n_known, is_left=True)

    def forget(self, slot: Slot) -> None:
        """Take in that a slot was emptied, or holds what is no text's beginning."""
        self._rests.pop(slot, None)
        adapters = self._adapters_at.pop(slot, None)
        if adapters is None:
            return
        index = self._indexes[adapters]
        index.remove(slot)
        if index.is_empty:
            del self._indexes[adapters]

    def is_private(self, driver: SequenceDriver) -> bool:
        """Whether a driver's cells must be nobody else's.

        Those of a window that moves would move for all in a pool; and pieces of another size are other bits.
        """
        options = driver.request.options
        is_other = driver.own_alignment(self._chunk_alignment) != self._chunk_alignment
        is_moving = bool(options.n_discard) and not options.prefill_only
        return is_other or (self._is_pool and is_moving)

    def _put(
        self, slot: Slot, driver: SequenceDriver, n_tokens: int, *, is_left: bool = False
    ) -> None:
        self.forget(slot)
        if self.is_on and not self.is_private(driver):
            self._adapters_at[slot] = driver.request.adapters
            index = self.index(driver.request.adapters)
            index.put(slot, driver.tokens[:n_tokens], is_left=is_left)

    def find(self, driver: SequenceDriver) -> PrefixMatch:
        """Return what there is of a prompt's beginning, by one look into the index; changes nothing."""
        if driver.saved_key is not None:
            return PrefixMatch()
        matches = self._matches(driver)
        source = self._source(driver, matches)
        n_least = MIN_SHARED_TOKENS + (source.n_cells if source else 0)
        for n, branch in matches if self._can_copy else ():
            n_then = self._whole(n)
            if n_then < n_least:
                break
            leader = self._on_the_way(branch.in_use, n)
            if leader is not None:
                return PrefixMatch(source, leader, n_then)
        return PrefixMatch(source)

    def best(self, driver: SequenceDriver) -> Source | None:
        """Return where most of a prompt's beginning is computed; in a free slot if there is as good a one."""
        return self._source(driver, self._matches(driver))

    def _source(
        self, driver: SequenceDriver, matches: Sequence[tuple[int, Branch]]
    ) -> Source | None:
        rest = self._own_rest(driver)
        left = ((n, self._last_used_first(b.left)) for n, b in matches)
        in_use = ((n, b.in_use) for n, b in matches)
        rest = self._most(left, rest.n_cells if rest else 0, self._can_take) or rest
        if not self._can_copy:
            return rest
        n_least = max(rest.n_cells if rest else 0, MIN_SHARED_TOKENS - 1)
        return self._most(in_use, n_least, self._can_copy_from) or rest

    def _last_used_first(self, slots: Iterable[Slot]) -> list[Slot]:
        """Return slots in the order in which to take one: those who wait have theirs from before."""
        return sorted(slots, key=self._used_at.__getitem__, reverse=True)

    def _most(
        self,
        matches: Iterable[tuple[int, Iterable[Slot]]],
        n_most: int,
        can_use: Callable[[Slot, int], bool],
    ) -> Source | None:
        """Return which slot has most of a beginning, if that is more than `n_most` cells."""
        best = None
        for n, slots in matches:
            for slot in slots:
                if self._whole(n) <= n_most:
                    return best
                n_cells = self._usable(n, slot)
                if n_cells > n_most and can_use(slot, n_cells):
                    best, n_most = Source(slot, n_cells), n_cells
        return best

    def _can_take(self, slot: Slot, n_cells: int) -> bool:
        """Whether a free slot is to be had: a common first token is not worth what somebody may come back for."""
        if n_cells < self.copied.get(slot, 0):
            return False
        return (
            n_cells >= MIN_SHARED_TOKENS or self._ledger.n_cells[slot] - n_cells < MIN_SHARED_TOKENS
        )

    def _own_rest(self, driver: SequenceDriver) -> Source | None:
        """Return what is left of the request that a driver goes on from, where it still has a slot to itself."""
        number = driver.request.continues
        if number is None or not self.is_on or self.is_private(driver):
            return None
        for slot, owner in self._rests.items():
            n_cells = self._ledger.n_cells[slot]
            is_ours = owner == number and self._running[slot] is None
            if is_ours and 0 < n_cells <= driver.n_takeable:
                return Source(slot, n_cells)
        return None

    def _on_the_way(self, slots: Iterable[Slot], n_cells: int) -> SequenceDriver | None:
        """Return who is about to have so many cells: it computes them, or they come from host memory."""
        loading = self.loading.values()
        for slot in slots:
            other = self._running[slot]
            if other is None or other.status is not Status.RUNNING:
                continue
            if other.n_computed < n_cells or other in loading:
                return other
        return None

    def n_usable(self, driver: SequenceDriver, tokens: Sequence[int], n_given: int) -> int:
        """Return how many saved cells are the beginning of a prompt; of their `tokens` `n_given` were a prompt.

        Few of many are none: every chat begins with the same tokens of its template.
        """
        n_there, n_wanted = n_given if self._chunk_alignment else len(tokens), self._n_most(driver)
        n = self._whole(n_common([*tokens[:n_there]], driver.tokens[:n_wanted]))
        is_worth = self._can_trim and (n >= MIN_SHARED_TOKENS or n == self._whole(n_wanted))
        return n if is_worth or n == len(tokens) else 0

    def oldest_rest(self, needed: Container[Slot] = ()) -> Slot | None:
        """Return the slot that nobody has or needs whose cells are unused for longest, or None."""
        n_cells = self._ledger.n_cells
        rests = (s for s in self._ledger.free_slots if n_cells[s] and s not in needed)
        return min(rests, key=self._used_at.__getitem__, default=None)

    def place(self, source: Source | None, *, has_room: bool = False) -> Slot:
        """Return which free slot to give: the source's own, else one beside those in use that was empty for longest.

        Where there is room beside, what the source's slot holds beyond the common beginning is left there for who may
        come back, if another slot is empty or unused for longer.
        """
        if source is None or self._running[source.slot] is not None:
            return self._best_place()
        if not has_room or not self._can_copy_rest(source):
            return source.slot
        best = self._best_place()
        is_older = self._used_at[best] < self._used_at[source.slot]
        return best if is_older or not self._ledger.n_cells[best] else source.slot

    def _best_place(self) -> Slot:
        places = (slot for slot in self._ledger.free_slots if slot not in self.copied)
        return min(places, key=self._place_rank)

    def _can_copy_rest(self, source: Source) -> bool:
        n_lost = self._ledger.n_cells[source.slot] - source.n_cells
        return (
            self._can_copy and n_lost >= MIN_SHARED_TOKENS and source.n_cells >= MIN_SHARED_TOKENS
        )

    def _place_rank(self, slot: Slot) -> tuple[int, int, int]:
        """Rank by neighbours in use, for a gap costs a graph run; then by what is lost; then by number."""
        used_at = self._used_at[slot] if self._ledger.n_cells[slot] else 0
        return 0 if self._is_pool else -self._n_beside(slot), used_at, slot

    def _n_beside(self, slot: Slot) -> int:
        around = self._running[max(0, slot - 1) : slot + 2]
        return len(around) - around.count(None)

    def _matches(self, driver: SequenceDriver) -> list[tuple[int, Branch]]:
        """Return what the index has for a prompt."""
        index = self._indexes.get(driver.request.adapters)
        if index is None or self.is_private(driver):
            return []
        return index.matches(driver.tokens[: self._n_most(driver)])

    def _n_most(self, driver: SequenceDriver) -> int:
        """Return the most tokens to take over."""
        n_most = driver.n_takeable
        return min(n_most, driver.n_prompt - 1) if self._chunk_alignment else n_most

    def _can_copy_from(self, slot: Slot, n_cells: int) -> bool:
        """Whether it pays to copy from a slot in use; a paused one may lose it in the same plan."""
        holder = self._running[slot]
        is_there = holder is not None and holder.status is Status.RUNNING
        return n_cells >= MIN_SHARED_TOKENS and is_there and holder not in self.loading.values()

    def _usable(self, n_common: int, slot: Slot) -> int:
        n_cells = self._ledger.n_cells[slot]
        if not self._can_trim:
            return n_cells if n_cells <= n_common and n_cells == self._whole(n_cells) else 0
        return self._whole(min(n_common, n_cells))

    def _whole(self, n: int) -> int:
        return n - n % self._chunk_alignment if self._chunk_alignment else n
