"""Which slot holds, or is about to hold, the beginning of a prompt."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cbatch.core.lifecycle import Status
from cbatch.core.prefix_index import PrefixIndex, n_common

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence

    from cbatch.core.driver import SequenceDriver
    from cbatch.core.kv import KvLedger
    from cbatch.core.plan import KvCapabilities, Slot
    from cbatch.core.prefix_index import Branch
    from cbatch.options import AdapterSet

MIN_SHARED_TOKENS = 32
"""Cells worth a copy, or waiting for: fewer are computed in about the time of one small step."""


@dataclass(frozen=True, slots=True)
class Source:
    """`n_cells` cells of a slot that are the beginning of a prompt."""

    slot: Slot
    n_cells: int


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """What is in memory of a prompt's beginning: cells to take over, and a sequence that will soon have many more."""

    source: Source | None = None
    leader: SequenceDriver | None = None
    n_then: int = 0
    """Cells that the leader will have to give."""


@dataclass(frozen=True, slots=True)
class _Match:
    """Tokens that a prompt has in common with those of slots; the slots in `hidden` hold others by now."""

    n_tokens: int
    branch: Branch
    hidden: Container[Slot]


@dataclass(frozen=True, slots=True)
class _Standing:
    """The tokens that stand in a slot, computed or about to be."""

    adapters: AdapterSet
    tokens: list[int]
    is_retained: bool = False
    """Whether the slot is free and keeps the cells for sequences that begin alike."""
    owner: int | None = None
    """With retained cells: the number of the sequence that left them."""


@dataclass(frozen=True, slots=True)
class PrefixChanges:
    """What a plan leaves standing in slots, and how recently each was used."""

    standing: Mapping[Slot, _Standing | None]
    used_at: tuple[int, ...]


class PrefixCache:
    """Finds the cells that a newcomer can take over: in a free slot, or by a copy from one that is in use.

    `chunk_alignment` as of a backend: only whole chunks of prompts are the same bits in any company, so with it
    beginnings end at its multiples, and output is taken over only by the request that goes on from it. Cells computed
    with other adapters are those of another text.

    A plan looks at a `view`, which says what the slots hold once the plan is done; `commit` enters it.
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
        self._indexes: dict[AdapterSet, PrefixIndex] = {}
        self._known: dict[Slot, tuple[AdapterSet, int | None]] = {}  # adapters and owner
        self._used_at = [0] * ledger.n_slots
        self._n_used = 0
        # of a view alone
        self._base: PrefixCache | None = None
        self._changed: dict[Slot, _Standing | None] = {}
        self._unindexed: dict[Slot, None] = {}
        self.copied: dict[Slot, int] = {}
        """Free slots of which the plan copies so many cells: until then they keep them."""
        self.entering: dict[SequenceDriver, int] = {}
        """Sequences that the plan gives a slot, with the cells that they begin with."""
        self.loading: list[SequenceDriver] = []
        """Sequences whose cells the plan loads: until then there is nothing to copy."""

    def view(self, ledger: KvLedger, running: Sequence[SequenceDriver | None]) -> PrefixCache:
        """Return what a plan changes in place of this, over the plan's own ledger and slots."""
        view = copy(self)
        view._base, view._ledger, view._running = self, ledger, running
        view._indexes, view._known, view._used_at = {}, {}, self._used_at[:]
        view._changed, view._unindexed, view.copied = {}, {}, {}
        view.entering, view.loading = {}, []
        return view

    def changes(self) -> PrefixChanges:
        """Return what was changed in this view."""
        return PrefixChanges(dict(self._changed), tuple(self._used_at))

    def commit(self, changes: PrefixChanges) -> None:
        """Enter what a plan changed in its view."""
        for slot, standing in changes.standing.items():
            self._put(slot, standing)
        self._used_at = [*changes.used_at]
        self._n_used = max(self._used_at)

    def can_share(self, driver: SequenceDriver) -> bool:
        """Whether a driver's slot can have the cells of another's, and the other way round."""
        return self._can_copy and self.can_retain(driver)

    def index(self, adapters: AdapterSet = ()) -> PrefixIndex:
        """Return what stands in the slots that are computed with `adapters`."""
        if adapters not in self._indexes:
            self._indexes[adapters] = PrefixIndex()
        return self._indexes[adapters]

    def enter(self, slot: Slot, driver: SequenceDriver) -> None:
        """Enter that a sequence has a slot, where its prompt will stand."""
        self.use(slot)
        window = driver.window
        n_known = window.n_keep if window and window.n_shifts else driver.n_prompt
        self._stand(slot, driver, n_known)

    def use(self, slot: Slot) -> None:
        """Mark a slot as recently used, so that eviction takes others first."""
        self._n_used += 1
        self._used_at[slot] = self._n_used

    def copy(self, slot: Slot, n_cells: int) -> None:
        """Note that the plan copies the first `n_cells` of a slot."""
        self.use(slot)
        if self._running[slot] is None:
            self.copied[slot] = max(n_cells, self.copied.get(slot, 0))

    def retain(
        self, slot: Slot, driver: SequenceDriver, n_cells: int, *, is_moved: bool = False
    ) -> None:
        """Keep the first `n_cells` of a sequence that ended, left its slot, or was moved to another."""
        n_known = min(n_cells, driver.n_prompt) if self._chunk_alignment else n_cells
        self._stand(slot, driver, n_known, owner=None if is_moved else driver.number, is_left=True)

    def forget(self, slot: Slot) -> None:
        """Enter that a slot was emptied, or holds no text's beginning."""
        self._put(slot, None)

    def is_private(self, driver: SequenceDriver) -> bool:
        """Whether no other sequence may take over a driver's cells.

        Those of a window that moves would move for all in a pool; and chunks of another size are other bits.
        """
        options = driver.request.options
        is_other = driver.own_alignment(self._chunk_alignment) != self._chunk_alignment
        is_moving = bool(options.n_discard) and not options.prefill_only
        return is_other or (self._is_pool and is_moving)

    def can_retain(self, driver: SequenceDriver) -> bool:
        """Whether a slot keeps a driver's cells for others when it is given back."""
        return self.is_on and not self.is_private(driver)

    def _stand(
        self,
        slot: Slot,
        driver: SequenceDriver,
        n_tokens: int,
        *,
        owner: int | None = None,
        is_left: bool = False,
    ) -> None:
        standing = None
        if self.can_retain(driver):
            tokens = driver.tokens[:n_tokens]
            standing = _Standing(driver.request.adapters, tokens, is_left, owner)
        self._put(slot, standing)

    def _put(self, slot: Slot, standing: _Standing | None) -> None:
        if self._base is None:
            self._index(slot, standing)
        else:  # the index of a view is made when a second newcomer looks into it
            self._changed[slot] = standing
            self._unindexed[slot] = None

    def _index(self, slot: Slot, standing: _Standing | None) -> None:
        known = self._known.pop(slot, None)
        if known is not None:
            index = self._indexes[known[0]]
            index.remove(slot)
            if index.is_empty:
                del self._indexes[known[0]]
        if standing is not None:
            self._known[slot] = standing.adapters, standing.owner
            index = self.index(standing.adapters)
            index.put(slot, standing.tokens, is_left=standing.is_retained)

    def find(self, driver: SequenceDriver) -> PrefixMatch:
        """Return what is in memory of a prompt's beginning; changes nothing."""
        if driver.saved_key is not None:
            return PrefixMatch()
        matches = self._matches(driver)
        source = self._source(driver, matches)
        n_least = MIN_SHARED_TOKENS + (source.n_cells if source else 0)
        for match in matches if self._can_copy else ():
            n_then = self._whole(match.n_tokens)
            if n_then < n_least:
                break
            leader = self._on_the_way(match)
            if leader is not None:
                return PrefixMatch(source, leader, n_then)
        return PrefixMatch(source)

    def best(self, driver: SequenceDriver) -> Source | None:
        """Return where most of a prompt's beginning is computed; in a free slot if there is as good a one."""
        return self._source(driver, self._matches(driver))

    def _source(self, driver: SequenceDriver, matches: Sequence[_Match]) -> Source | None:
        own = self._own_retained(driver)
        retained = ((m.n_tokens, self._last_used_first(m)) for m in matches)
        found = self._most(retained, own.n_cells if own else 0, self._can_take) or own
        if not self._can_copy:
            return found
        n_least = max(found.n_cells if found else 0, MIN_SHARED_TOKENS - 1)
        in_use = ((m.n_tokens, (s for s in m.branch.in_use if s not in m.hidden)) for m in matches)
        return self._most(in_use, n_least, self._can_copy_from) or found

    def _last_used_first(self, match: _Match) -> list[Slot]:
        """Return the free slots of a match, the most recently used first: waiting requests may continue the rest."""
        slots = [s for s in match.branch.left if s not in match.hidden]
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
        """Whether a free slot may be taken over: a short match does not justify losing many cells."""
        if n_cells < self.copied.get(slot, 0):
            return False
        return (
            n_cells >= MIN_SHARED_TOKENS or self._ledger.n_cells[slot] - n_cells < MIN_SHARED_TOKENS
        )

    def _own_retained(self, driver: SequenceDriver) -> Source | None:
        """Return the cells retained from the request that a driver goes on from, where their slot is still free."""
        number = driver.request.continues
        if number is None or not self.is_on or self.is_private(driver):
            return None
        for slot, owner in self._owners():
            n_cells = self._ledger.n_cells[slot]
            is_ours = owner == number and self._running[slot] is None
            if is_ours and 0 < n_cells <= driver.n_takeable:
                return Source(slot, n_cells)
        return None

    def _owners(self) -> Iterator[tuple[Slot, int | None]]:
        """Yield the slots whose cells were left by a sequence, with its number."""
        known = self._known if self._base is None else self._base._known
        yield from ((s, owner) for s, (_, owner) in known.items() if s not in self._changed)
        yield from ((s, standing.owner) for s, standing in self._changed.items() if standing)

    def _on_the_way(self, match: _Match) -> SequenceDriver | None:
        """Return a sequence that will soon have a beginning's cells: it computes them, or the plan loads them."""
        for slot in match.branch.in_use:
            other = None if slot in match.hidden else self._running[slot]
            if other is None or not self._is_running(other):
                continue
            if self.entering.get(other, other.n_computed) < match.n_tokens or other in self.loading:
                return other
        return None

    def _is_running(self, driver: SequenceDriver) -> bool:
        return driver.status is Status.RUNNING or driver in self.entering

    def n_usable(self, driver: SequenceDriver, tokens: Sequence[int], n_given: int) -> int:
        """Return how many saved cells are the beginning of a prompt; of their `tokens` `n_given` were a prompt.

        Few of many are none: every chat begins with the same tokens of its template.
        """
        n_there, n_wanted = n_given if self._chunk_alignment else len(tokens), self._n_most(driver)
        n = self._whole(n_common([*tokens[:n_there]], driver.tokens[:n_wanted]))
        is_worth = self._can_trim and (n >= MIN_SHARED_TOKENS or n == self._whole(n_wanted))
        return n if is_worth or n == len(tokens) else 0

    def oldest_retained(self) -> Slot | None:
        """Return the free slot with cells that is unused for longest and that the plan does not copy, or None."""
        n_cells, copied = self._ledger.n_cells, self.copied
        slots = (s for s in self._ledger.free_slots if n_cells[s] and s not in copied)
        return min(slots, key=self._used_at.__getitem__, default=None)

    def place(self, source: Source | None, *, has_room: bool = False) -> Slot:
        """Return which free slot to give: the source's own, else one next to slots in use that was empty for longest.

        Where another slot is to spare that is empty or unused for longer, the source's slot keeps what it holds behind
        the common beginning, for a sequence that may come back.
        """
        if source is None or self._running[source.slot] is not None:
            return self._best_place()
        if not has_room or not self._can_copy_retained(source):
            return source.slot
        best = self._best_place()
        is_older = self._used_at[best] < self._used_at[source.slot]
        return best if is_older or not self._ledger.n_cells[best] else source.slot

    def _best_place(self) -> Slot:
        """Return the best free slot: with the most neighbours in use, for a gap costs a graph run.

        Among equals an empty slot comes first, then the least recently used.
        """
        running, n_cells, used_at = self._running, self._ledger.n_cells, self._used_at
        last = len(running) - 1
        ranks: list[tuple[int, int, Slot]] = []
        for slot in self._ledger.free_slots:
            if slot in self.copied:
                continue
            n_beside = 0
            if not self._is_pool:
                n_beside += slot > 0 and running[slot - 1] is not None
                n_beside += slot < last and running[slot + 1] is not None
            ranks.append((-n_beside, used_at[slot] if n_cells[slot] else 0, slot))
        return min(ranks)[2]

    def _can_copy_retained(self, source: Source) -> bool:
        n_lost = self._ledger.n_cells[source.slot] - source.n_cells
        return (
            self._can_copy and n_lost >= MIN_SHARED_TOKENS and source.n_cells >= MIN_SHARED_TOKENS
        )

    def _matches(self, driver: SequenceDriver) -> list[_Match]:
        """Return what the index has for a prompt, the most tokens in common first."""
        adapters = driver.request.adapters
        if self.is_private(driver):
            return []
        tokens = driver.tokens[: self._n_most(driver)]
        for slot in self._unindexed:
            self._index(slot, self._changed[slot])
        self._unindexed.clear()
        own = self._indexes.get(adapters)
        found = [_Match(n, branch, ()) for n, branch in own.matches(tokens)] if own else []
        base = self._base._indexes.get(adapters) if self._base else None
        if base is None:
            return found
        found += [_Match(n, branch, self._changed) for n, branch in base.matches(tokens)]
        if own:
            found.sort(key=lambda match: -match.n_tokens)
        return found

    def _n_most(self, driver: SequenceDriver) -> int:
        """Return the most tokens to take over."""
        n_most = driver.n_takeable
        return min(n_most, driver.n_prompt - 1) if self._chunk_alignment else n_most

    def _can_copy_from(self, slot: Slot, n_cells: int) -> bool:
        """Whether it pays to copy from a slot in use; a paused sequence may lose it in the same plan."""
        holder = self._running[slot]
        is_there = holder is not None and self._is_running(holder)
        return n_cells >= MIN_SHARED_TOKENS and is_there and holder not in self.loading

    def _usable(self, n_common: int, slot: Slot) -> int:
        n_cells = self._ledger.n_cells[slot]
        if not self._can_trim:
            return n_cells if n_cells <= n_common and n_cells == self._whole(n_cells) else 0
        return self._whole(min(n_common, n_cells))

    def _whole(self, n: int) -> int:
        return n - n % self._chunk_alignment if self._chunk_alignment else n
