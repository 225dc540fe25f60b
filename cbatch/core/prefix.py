"""Finds the slot or checkpoint that has, or will soon have, the beginning of a prompt."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cbatch.core.driver import SequenceDriver, Status
from cbatch.core.plan import Slot
from cbatch.core.saved_cells import Checkpoints, KeptCheckpoint
from cbatch.core.span import ANYWHERE, PromptCuts
from cbatch.support.prefix_index import PrefixIndex, n_common

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable, Iterable, Sequence

    from cbatch.core.books import KvLedger
    from cbatch.options import AdapterSet

MIN_SHARED_TOKENS = 32
"""Fewest cells worth copying or waiting for. Fewer are computed in about the time of one small step."""

N_BETWEEN = 2048
"""Tokens of a long prompt from one checkpoint to the next, for later prompts that share some of it."""

N_TAIL_MAX = 16
"""Most tokens at the end of a chat's prompt that may differ in the next turn, such as a reasoning marker."""


@dataclass(frozen=True, slots=True)
class PrefixSource:
    """The first `n_cells` cells of a slot, or of a checkpoint, that match the beginning of a prompt."""

    slot: Slot | None
    n_cells: int
    key: int | None = None
    """The checkpoint's key; None for a slot."""


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """What is in memory of a prompt's beginning: cells to reuse, and a sequence that will soon have many more."""

    source: PrefixSource | None = None
    leader: SequenceDriver | None = None
    n_leader_cells: int = 0
    """Cells of the leader that can be reused later."""
    n_known: int = 0
    """Length of the longest prefix in the index, reusable or not."""
    n_short: int = 0
    """How many tokens at the end of the most similar checkpoint differ from the prompt, if only a few do; else 0."""
    alike: Sequence[tuple[int, int]] = ()
    """For each slot or checkpoint that begins alike: tokens in common with the prompt, and the slot or the key."""


class PrefixCache:
    """Finds cells that a new sequence can reuse: in a free slot, or by a copy from a slot in use.

    In memory that cannot be trimmed, the cells of a sequence can only be reused all together. There a new sequence
    continues from a checkpoint, which was taken at one of the `marks` of an earlier sequence.

    With the backend's `cuts`, a reused prefix ends where prompts may be cut, and output is reused only by the request
    that continues it. Cells computed with different adapters, or with another `cache_salt`, never match.

    A plan changes a `view`, which replaces this object once the plan has run.
    """

    def __init__(
        self,
        ledger: KvLedger,
        *,
        cuts: PromptCuts = ANYWHERE,
        is_on: bool = True,
        n_checkpoint_bytes: int = 0,
    ) -> None:
        memory = ledger.memory
        self.is_on = is_on
        self.checkpoints = Checkpoints(memory, n_checkpoint_bytes if is_on else 0)
        self._ledger = ledger
        self._cuts = cuts
        self._can_trim, self._can_copy = memory.can_trim, memory.can_copy
        self._is_unified = memory.kind == "unified"
        self._index = PrefixIndex()
        self._left_by: dict[Slot, tuple[int, list[Hashable]]] = {}
        """By slot: the number of the sequence that left its cells there, and their text."""
        self._used_at = [0] * ledger.n_slots
        self.copied: dict[Slot, int] = {}
        """In a view: the free slots from which the plan copies, with the cells that they keep until then."""
        self.loaded: set[Slot] = set()
        """In a view: the slots into which the plan loads cells."""
        self._n_tail = 0
        """Tokens at the end of a chat's prompt that differed in the next turn of earlier chats."""

    def view(self, ledger: KvLedger) -> PrefixCache:
        """Return a copy for a plan to change, with the plan's own ledger."""
        view = copy(self)
        view._ledger = ledger
        view._index, view._left_by = self._index.copy(), self._left_by.copy()
        view._used_at, view.copied = self._used_at.copy(), self.copied.copy()
        view.checkpoints, view.loaded = self.checkpoints.view(), self.loaded.copy()
        return view

    def settle(self) -> None:
        """Forget what a plan that was run has copied and loaded."""
        self.copied.clear()
        self.loaded.clear()
        self.checkpoints.settle()

    # ---- what slots hold ----

    def record(self, slot: Slot, driver: SequenceDriver) -> None:
        """Record that a slot will hold a sequence's prompt."""
        self._use(slot)
        window = driver.window
        n_known = window.n_keep if window and driver.n_removed else driver.n_prompt
        self.forget(slot)
        if self.can_retain(driver):
            self._index.put(slot, _text(driver, n_known))

    def retain(self, slot: Slot, driver: SequenceDriver, n_cells: int) -> None:
        """Record that a slot retains the first `n_cells` cells of a sequence that ended or left it."""
        text = _text(driver, n_cells)
        self._left_by[slot] = driver.number, text
        self._index.put(slot, text[: driver.n_prompt + 1] if self._cuts else text)

    def forget(self, slot: Slot) -> None:
        """Record that a slot is empty or holds nothing reusable."""
        self._index.remove(slot)
        self._left_by.pop(slot, None)

    def _use(self, slot: Slot) -> None:
        """Mark a slot as recently used, so that eviction takes others first."""
        self._used_at[slot] = max(self._used_at) + 1

    def copy(self, slot: Slot, n_cells: int) -> None:
        """Record that the plan copies the first `n_cells` of a slot."""
        self._use(slot)
        if self._ledger.holders[slot] is None:
            self.copied[slot] = max(n_cells, self.copied.get(slot, 0))

    def is_private(self, driver: SequenceDriver) -> bool:
        """Whether no other sequence may reuse a sequence's cells.

        In unified memory a shift would move shared cells. Other chunk sizes are not bit-identical.
        """
        options = driver.request.options
        is_other = driver.own_cuts(self._cuts).multiple != self._cuts.multiple
        is_moving = bool(options.n_discard) and not options.prefill_only
        return is_other or (self._is_unified and is_moving)

    def can_retain(self, driver: SequenceDriver) -> bool:
        """Whether a slot retains a sequence's cells for others after the sequence left."""
        return self.is_on and not self.is_private(driver)

    def can_share(self, driver: SequenceDriver) -> bool:
        """Whether a sequence can reuse cells of others, and others can reuse its cells."""
        return self._can_copy and self.can_retain(driver)

    # ---- checkpoints ----

    def keep(self, driver: SequenceDriver, n_cells: int) -> KeptCheckpoint | None:
        """Record a checkpoint of the first `n_cells` of a sequence's text; None if there is no room."""
        text = _text(driver, n_cells)
        for place, n in self._index.find(text).items():
            if place < 0 and n == len(text) and self.checkpoints.n_cells(place) == n_cells:
                self.checkpoints.use(place)
                return KeptCheckpoint(place)
        kept = self.checkpoints.add(n_cells)
        if kept is not None:
            self._index.put(kept.key, text)
            self._forget_all(kept.gone)
        return kept

    def adopt(self, driver: SequenceDriver, n_cells: int) -> KeptCheckpoint | None:
        """Record a checkpoint that comes from a file, outside of a plan; None if there is no room."""
        if not (self.checkpoints.is_on and self.can_retain(driver)):
            return None
        kept = self.keep(driver, n_cells)
        self.checkpoints.settle()
        return kept

    def checkpoint_in(self, driver: SequenceDriver, n_most: int) -> tuple[int, int] | None:
        """Return key and cells of the longest checkpoint in a sequence's first `n_most` tokens, and mark it as used.

        None if there is none. For use outside of a plan.
        """
        if not self.checkpoints.is_on:
            return None
        alike = self._index.find(_text(driver, n_most))
        sizes = {key: self.checkpoints.n_cells(key) for key in alike if key < 0}
        fitting = [(n, key) for key, n in sizes.items() if n < alike[key]]
        if not fitting:
            return None
        n_cells, key = max(fitting)
        self.checkpoints.touch(key)
        return key, n_cells

    def drop(self, keys: Collection[int]) -> None:
        """Record that checkpoints are lost or dropped; other keys are ignored."""
        self._forget_all(self.checkpoints.drop(keys))

    def _forget_all(self, keys: Iterable[int]) -> None:
        for key in keys:
            self._index.remove(key)

    def marks(self, driver: SequenceDriver, n_cells: int, found: PrefixMatch) -> tuple[int, ...]:
        """Return where a new sequence with `n_cells` cells leaves checkpoints; learn where turns of chats diverge.

        The places are: where its prompt diverges from a text in memory, because other prompts may do the same; the end
        of a chat's prompt, where the next turn continues; before scored tokens, for other continuations of the same
        context; some places in a long prompt; and before the last token of a prompt whose cells go to disk, from where
        the same prompt can start.
        """
        if not (self.checkpoints.is_on and self.can_retain(driver)):
            return ()
        n_prompt, marks = driver.n_prompt, list[int]()
        wanted = [found.n_known, *range(N_BETWEEN, n_prompt, N_BETWEEN)]
        if driver.request.prompt.messages:
            self._n_tail = min(N_TAIL_MAX, self._n_tail + found.n_short)
            wanted.append(n_prompt - self._n_tail)
        if n_before := driver.request.options.prompt_logprobs_start:
            wanted.append(min(n_before, n_prompt) - 1)
        if driver.request.options.save_cache:
            wanted = [min(n, n_prompt - 1) for n in (*wanted, n_prompt)]
        for n in (self._n_stop(driver, n) for n in sorted(wanted)):
            if n >= MIN_SHARED_TOKENS + (marks[-1] if marks else n_cells):
                marks.append(n)
        return tuple(marks)

    # ---- what a new sequence can start with ----

    def find(self, driver: SequenceDriver) -> PrefixMatch:
        """Return what is in memory of a prompt's beginning. Changes nothing."""
        if driver.saved_key is not None:
            return PrefixMatch()
        alike = self._alike(driver)
        source = self._best(driver, alike)
        n_known, n_short = alike[0][0] if alike else 0, self._n_short(alike)
        n_least = MIN_SHARED_TOKENS + (source.n_cells if source else 0)
        for n_alike, place in alike:
            n_leader_cells = driver.n_whole(self._cuts, n_alike)
            if n_leader_cells < n_least:
                break
            can_lead = self._can_copy or self.checkpoints.has_room(n_leader_cells)
            leader = self._ledger.holders[place] if place >= 0 and can_lead else None
            if leader is None:
                continue
            if not self._can_trim:
                n_leader_cells = self._n_stop(leader, n_leader_cells)
            is_worth = n_leader_cells >= n_least
            if is_worth and self._is_leading(leader, Slot(place), n_leader_cells):
                return PrefixMatch(source, leader, n_leader_cells, n_known, n_short, alike)
        return PrefixMatch(source, n_known=n_known, n_short=n_short, alike=alike)

    def _n_short(self, alike: Sequence[tuple[int, int]]) -> int:
        """Return how many final tokens of the most similar checkpoint the prompt lacks, if only a few; else 0."""
        lacking = (self.checkpoints.n_cells(place) - n for n, place in alike if place < 0)
        n_short = next(lacking, 0)
        return n_short if 0 < n_short <= N_TAIL_MAX else 0

    def _alike(self, driver: SequenceDriver) -> list[tuple[int, int]]:
        """Return (tokens in common with the prompt, slot or key) of all matches, longest first."""
        if not self.can_retain(driver):
            return []
        text = _text(driver, self._n_most(driver))
        return [(n - 1, place) for place, n in self._index.find(text).items()]

    def common(
        self, adapters: AdapterSet, tokens: Sequence[int], salt: str | None = None
    ) -> dict[Slot, int]:
        """Return for each slot with the same adapters and salt how many leading tokens it has in common with a text."""
        found = self._index.find([(adapters, salt), *tokens])
        return {Slot(place): n - 1 for place, n in found.items() if place >= 0}

    def _best(
        self, driver: SequenceDriver, alike: Sequence[tuple[int, int]]
    ) -> PrefixSource | None:
        """Return the source with the most cells, free slots before slots in use.

        Among free slots, the most recently used one comes first, because waiting requests may continue the others.
        """
        best, best_rank, chosen = None, (0, 0, 0, 0), driver.chosen_slot
        for n_alike, place in alike:
            if place < 0:
                n_cells = self.checkpoints.n_cells(place)
                rank = (n_cells, 0, n_alike, 0)
                can_use = n_cells <= n_alike and n_cells == driver.n_whole(self._cuts, n_cells)
                if can_use and rank > best_rank:
                    best, best_rank = PrefixSource(None, n_cells, place), rank
                continue
            slot = Slot(place)
            n_cells = self._n_common_cells(driver, slot, n_alike)
            is_free = self._ledger.holders[slot] is None
            rank = (n_cells, is_free + (slot == chosen), n_alike, self._used_at[slot] * is_free)
            can_take = is_free and chosen in (None, slot)
            is_usable = self._can_take if can_take else self._can_copy_from
            if n_cells and rank > best_rank and is_usable(slot, n_cells):
                best, best_rank = PrefixSource(slot, n_cells), rank
        return best

    def _n_common_cells(self, driver: SequenceDriver, slot: Slot, n_alike: int) -> int:
        """Return how many cells of a slot can be reused by a prompt that has `n_alike` tokens in common with it."""
        n_cells = self._ledger.n_cells[slot]
        number, left = self._left_by.get(slot, (None, []))
        if number is not None and number == driver.request.continues:
            # in a result of another process, the number may be that of an unrelated request here
            is_own = n_common(_text(driver, n_cells), left) > n_cells
            if is_own and n_cells <= driver.n_reusable:
                return n_cells
        if not self._can_trim:
            is_whole = n_cells <= n_alike and n_cells == driver.n_whole(self._cuts, n_cells)
            return n_cells if is_whole else 0
        return driver.n_whole(self._cuts, min(n_alike, n_cells))

    def _can_take(self, slot: Slot, n_cells: int) -> bool:
        """Whether to reuse a free slot in place; a short match does not justify losing many cells."""
        if n_cells < self.copied.get(slot, 0):
            return False
        n_lost = self._ledger.n_cells[slot] - n_cells
        return n_cells >= MIN_SHARED_TOKENS or n_lost < MIN_SHARED_TOKENS

    def _can_copy_from(self, slot: Slot, n_cells: int) -> bool:
        """Whether enough cells of a slot can be copied. Not from a paused sequence: the same plan may take its slot.

        In memory that cannot copy, a checkpoint is taken of the cells as they are before the plan.
        """
        can_copy = self._can_copy or (self.checkpoints.is_on and slot not in self.loaded)
        if not can_copy or n_cells < MIN_SHARED_TOKENS:
            return False
        holder = self._ledger.holders[slot]
        return holder is None or (holder.status is not Status.PAUSED and holder.saved_key is None)

    def _is_leading(self, driver: SequenceDriver, slot: Slot, n_cells: int) -> bool:
        """Whether a sequence will soon have the first `n_cells` cells of its slot, because it computes or loads them.

        In memory that cannot copy, the caller needs a checkpoint, so the sequence must not be past that place.
        """
        is_loading = self._can_copy and driver.saved_key is not None
        is_coming = self._ledger.n_cells[slot] < n_cells or is_loading
        return is_coming and driver.status is not Status.PAUSED

    def n_usable(
        self, driver: SequenceDriver, tokens: Sequence[int], n_given: int, n_checkpoint: int = 0
    ) -> int:
        """Return how many saved cells match the beginning of a prompt.

        The cells are those of `tokens`, whose first `n_given` were a prompt. Few cells of many count as none, because
        every chat begins with the same tokens of its template. In memory that cannot be trimmed, the result is all
        cells, the first `n_checkpoint`, or none.
        """
        n_there, n_wanted = n_given if self._cuts else len(tokens), self._n_most(driver)
        n = self._cuts.whole(n_common([*tokens[:n_there]], driver.tokens[:n_wanted]))
        is_worth = self._can_trim and (n >= MIN_SHARED_TOKENS or n == self._cuts.whole(n_wanted))
        if is_worth or n == len(tokens):
            return n
        return n_checkpoint if n_checkpoint <= n else 0

    def _n_most(self, driver: SequenceDriver) -> int:
        """Return how many tokens a sequence may reuse at most."""
        if not self._cuts:
            return driver.n_reusable
        return driver.n_whole(self._cuts, min(driver.n_reusable, driver.n_prompt - 1))

    def _n_stop(self, driver: SequenceDriver, n: int) -> int:
        """Return the last position up to `n` where a sequence can stop: a cut, or the end of its prompt."""
        if self._cuts and self._cuts.whole(n) != n:
            n = min(n, driver.n_prompt - 1)
        return driver.n_whole(self._cuts, n)

    # ---- which slot to give or to empty ----

    def oldest_retained(self) -> Slot | None:
        """Return the least recently used free slot that has cells and is not copied by the plan, or None."""
        n_cells, copied = self._ledger.n_cells, self.copied
        slots = (s for s in self._ledger.free_slots if n_cells[s] and s not in copied)
        return min(slots, key=self._used_at.__getitem__, default=None)

    def choose_slot(
        self,
        source: PrefixSource | None,
        *,
        has_room: bool,
        reserved: Collection[Slot] = (),
        avoided: Collection[Slot] = (),
    ) -> Slot | None:
        """Return the free slot for a sequence: the source's own or the best one; None if no slot is free.

        If another free slot is empty or older, the source's slot is copied and keeps its other cells, for a sequence
        that may come back.

        Args:
            source: the cells to start with.
            has_room: whether there are more free slots than needed.
            reserved: slots that must not be used.
            avoided: slots to use last.
        """
        best = self._best_slot(reserved, avoided)
        if (
            source is None
            or source.slot is None
            or self._ledger.holders[source.slot] is not None
            or source.slot in reserved
        ):
            return best
        if best is None or not has_room or not self._is_worth_leaving(source.slot, source.n_cells):
            return source.slot
        is_older = self._used_at[best] < self._used_at[source.slot]
        return best if is_older or not self._ledger.n_cells[best] else source.slot

    def own_source(
        self, driver: SequenceDriver, slot: Slot, alike: Sequence[tuple[int, int]]
    ) -> PrefixSource | None:
        """Return the cells of its new slot that a sequence can keep. Even a few are kept: all others are lost."""
        is_empty = not self._ledger.n_cells[slot]
        if is_empty or driver.saved_key is not None or not self.can_retain(driver):
            return None
        n_alike = next((n for n, place in alike if place == slot), 0)
        n_cells = self._n_common_cells(driver, slot, n_alike)
        return (
            PrefixSource(slot, n_cells) if n_cells and n_cells >= self.copied.get(slot, 0) else None
        )

    def can_reach(self, source: PrefixSource, slot: Slot) -> bool:
        """Whether the source's cells are in a slot, or can be copied there."""
        if source.slot is None:
            return True
        return source.slot == slot or self._can_copy_from(source.slot, source.n_cells)

    def _best_slot(self, reserved: Collection[Slot], avoided: Collection[Slot]) -> Slot | None:
        """Return the best free slot: the one with the most neighbours in use, because a gap costs a graph run.

        Among equals, empty slots come first, then the least recently used.
        """
        n_cells = self._ledger.n_cells
        ranks: list[tuple[bool, int, int, Slot]] = []
        for slot in self._ledger.free_slots:
            if slot not in self.copied and slot not in reserved:
                beside = (
                    () if self._is_unified else self._ledger.holders[max(0, slot - 1) : slot + 2]
                )
                n_beside = len([d for d in beside if d is not None])
                used_at = self._used_at[slot] if n_cells[slot] else 0
                ranks.append((slot in avoided, -n_beside, used_at, slot))
        return min(ranks)[3] if ranks else None

    def _is_worth_leaving(self, slot: Slot, n_cells: int) -> bool:
        """Whether to copy from a free slot and not reuse it in place: it has many cells after the common prefix."""
        n_lost = self._ledger.n_cells[slot] - n_cells
        return self._can_copy and min(n_lost, n_cells) >= MIN_SHARED_TOKENS


def with_mark(marks: tuple[int, ...], n: int) -> tuple[int, ...]:
    """Return `marks` with one at `n`, unless one lies shortly before it. Marks shortly after `n` are removed.

    One checkpoint serves all prompts that diverge nearby.
    """
    if any(n - MIN_SHARED_TOKENS < mark <= n for mark in marks):
        return marks
    return tuple(sorted([*(m for m in marks if not n < m < n + MIN_SHARED_TOKENS), n]))


def _text(driver: SequenceDriver, n_tokens: int) -> list[Hashable]:
    """Return the index key of a sequence's cells: its adapters and salt, then its first tokens."""
    request = driver.request
    return [(request.adapters, request.options.cache_salt), *driver.tokens[:n_tokens]]
