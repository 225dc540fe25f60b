"""What a plan does to slots: which sequences leave, enter, move and wait, and whether their cells fit in a pool.

Decided on a view of slots and cells.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Literal, NamedTuple

from cbatch.core.driver import BY_AGE, SequenceDriver, Status, Wait
from cbatch.core.plan import Slot
from cbatch.core.prefix import PrefixMatch, PrefixSource, with_mark
from cbatch.core.queue import is_to_be_had

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from cbatch.core.batcher import MultiRequestBatcher
    from cbatch.core.books import KvLedger
    from cbatch.core.cell_ops import SlotCells

N_LOOK = 4
"""How many waiting sequences are tried if the first cannot get a slot."""

N_OVERTAKEN_MAX = 16
"""How many sequences may pass one that waits for cells; after that, it blocks all later ones."""

N_WORTH_MOVE = 8
"""Fewest remaining tokens for which a sequence is moved; the copy takes less than a step."""

N_READ_PER_SLOT = 2
"""For each slot, how many sequences may wait for cells from disk, which take memory once read. Others stay queued."""

N_STORING_PER_SLOT = 2
"""For each slot, how many sequences may wait in host memory for their cells to be written. At the limit, no sequence
that saves its cells is admitted."""

N_PREEMPTED_MAX = 3
"""Most preemptions of one sequence while any cell is free; admission then
assumes the worst case for all slots while the sequence has one."""

_FIRST_RATIO = 0.7
"""Share of the cap that an output is expected to use before any has ended. Source: SGLang's initial new-token ratio."""

_N_REMEMBERED = 32
"""The expectation follows about this many of the last requests."""

Reason = Literal["turn", "cells", "parked"]
"""Why a sequence leaves its slot. "turn": its quantum is over; "cells": the pool is full; "parked": it is paused, and
its slot or cells are needed."""


class Leave(NamedTuple):
    """A sequence that leaves its slot. Its cells are lost unless they are saved."""

    driver: SequenceDriver
    reason: Reason
    is_saved: bool
    is_full: bool = False
    """Whether the sequence's window was to move in this plan; it moves once the sequence has a slot again."""


class Place(NamedTuple):
    """The slot of an entering sequence, and the cells it starts with: loaded, copied, or in the slot already."""

    slot: Slot
    n_cells: int


@dataclass(slots=True)
class SlotPlan:
    """What a plan does to slots. The first change makes a view of slots and cells; without changes nothing is copied.

    Two plans are equal if they do the same.
    """

    batcher: MultiRequestBatcher = field(compare=False)
    running: list[SequenceDriver] = field(compare=False)
    """The running sequences before the plan, the oldest first."""
    leaves: list[Leave] = field(default_factory=list)
    placed: dict[SequenceDriver, Place] = field(default_factory=dict)
    """Sequences that are new in their slots: admitted ones, or one that moves to a lower slot."""
    holds: dict[SequenceDriver, tuple[Wait, PrefixMatch]] = field(default_factory=dict)
    """Sequences that leave the queue to wait for their leader or for cells from disk."""
    overtaken: dict[SequenceDriver, int] = field(default_factory=dict)
    """How many sequences pass the first one in the queue."""
    marks: dict[SequenceDriver, tuple[int, ...]] = field(default_factory=dict)
    """New positions for checkpoints, for sequences whose positions change."""
    cells: SlotCells = field(init=False, compare=False)
    ledger: KvLedger = field(init=False, compare=False)
    """The ledger of `cells`."""
    _n_saved_bytes: int = field(init=False, compare=False)

    def __post_init__(self) -> None:
        self.cells, self.ledger = self.batcher.cells, self.batcher.cells.ledger
        self._n_saved_bytes = self.batcher.saved.n_bytes

    # ---- questions ----

    @property
    def has_view(self) -> bool:
        """Whether the plan changes slots or cells."""
        return self.cells is not self.batcher.cells

    @property
    def has_changes(self) -> bool:
        """Whether `apply` has anything to commit."""
        return self.has_view or bool(self.holds or self.overtaken or self.marks)

    def running_then(self) -> list[SequenceDriver]:
        """Return the sequences that run after these changes, the oldest first."""
        if not (self.leaves or self.placed):
            return self.running
        gone = {*self.leaving(), *self.placed}
        rows = [d for d in self.running if d not in gone]
        return sorted([*rows, *self.placed], key=BY_AGE)

    def leaving(self) -> list[SequenceDriver]:
        """Return the sequences that leave their slots."""
        return [leave.driver for leave in self.leaves]

    @property
    def n_entering(self) -> int:
        """Number of waiting sequences that get a slot."""
        return len([d for d in self.placed if d.slot is None])

    @property
    def n_waiting(self) -> int:
        """Number of sequences that wait for a slot after these changes."""
        if not (self.leaves or self.placed or self.holds):
            return len(self.batcher.queue)
        n_left = sum(leave.reason != "parked" for leave in self.leaves)
        return len(self.batcher.queue) - self.n_entering - len(self.holds) + n_left

    @property
    def can_admit(self) -> bool:
        """Whether a slot is free, or can be taken from a paused sequence."""
        ledger = self.ledger
        return ledger.n_free_slots > 0 or len(self.running) < ledger.n_slots

    @property
    def n_following(self) -> int:
        """Number of sequences that wait for another's prefix; a slot stays free for each."""
        n_following = len(self.batcher.held[Wait.LEADER])
        if self.holds:
            n_following += sum(reason is Wait.LEADER for reason, _ in self.holds.values())
        return n_following

    @property
    def n_awaiting_cells(self) -> int:
        """Number of sequences that wait for a prefix or for cells from disk."""
        return self.batcher.n_awaiting_cells + len(self.holds)

    def n_computed(self, driver: SequenceDriver) -> int:
        """Return how many cells a sequence has after these changes."""
        return self.placed[driver].n_cells if driver in self.placed else driver.n_computed

    def n_to_mark(self, driver: SequenceDriver, start: int) -> int | None:
        """Return the number of tokens from `start` to the next checkpoint's position; None if there is none."""
        marks = self.marks.get(driver, driver.marks)
        return next((mark - start for mark in marks if mark > start), None)

    # ---- checkpoints ----

    def take_checkpoints(self) -> None:
        """Take a checkpoint of each sequence that is at one of its marks."""
        for driver in self.running:
            n_cells = driver.n_computed
            if driver.marks and n_cells >= driver.marks[0]:
                if n_cells in driver.marks and driver.slot is not None:
                    self._edit().keep(driver, driver.slot, n_cells)
                self.marks[driver] = tuple(mark for mark in driver.marks if mark > n_cells)

    # ---- leaving ----

    def make_room(self, n_free_cells: int) -> bool:
        """Empty free slots until `n_free_cells` cells are free; return whether any was emptied."""
        has_room = self.ledger.n_free_cells >= n_free_cells
        if has_room or self.cells.prefixes.oldest_retained() is None:
            return False
        self._edit().make_room(n_free_cells)
        return True

    def free_a_slot(self) -> bool:
        """Take the slot of a paused sequence or else of a victim, but not its cells yet; False if there is neither."""
        if paused := self._paused():
            self.leave(paused[0], "parked")
        elif victim := choose_victim(self.ledger):
            self.leave(victim, "cells")
        else:
            return False
        return True

    def leave(self, driver: SequenceDriver, reason: Reason) -> None:
        """Make a sequence leave its slot."""
        cells, slot = self._edit(), driver.slot
        if slot is None:
            return
        n_back = cells.unshift(slot)
        is_saved = self._save(driver, slot, driver.n_computed + n_back)
        self.leaves.append(Leave(driver, reason, is_saved, n_back > 0))
        cells.ledger.free(slot)
        cells.leave(driver, slot)

    def _save(self, driver: SequenceDriver, slot: Slot, n_cells: int) -> bool:
        """Save the cells of a leaving sequence if possible; return whether they are saved."""
        cells, saved = self.cells, self.batcher.saved
        n_bytes = saved.n_bytes_of(n_cells)
        has_room = self._n_saved_bytes + n_bytes <= saved.n_bytes_max
        if not n_bytes or not has_room or slot in cells.trims:
            return False
        self._n_saved_bytes += n_bytes
        cells.saves.append((slot, driver.number))
        return True

    # ---- moving ----

    def compact(self) -> None:
        """Move the sequence in the highest slot to a free slot below, if that is possible and pays."""
        mover = choose_mover(self.ledger)
        if mover is None or mover.slot is None:
            return
        cells, slot = self._edit(), _first_gap(self.ledger)
        if not self.ledger.memory.can_copy and not self._save(mover, mover.slot, mover.n_computed):
            return
        cells.ledger.assign(slot, mover)
        cells.move(mover, mover.slot, slot)
        cells.ledger.free(mover.slot)
        self.placed[mover] = Place(slot, mover.n_computed)

    # ---- entering ----

    def admit(self, n_copied_max: int | None = None) -> None:
        """Admit waiting sequences in the order of the queue.

        Stops once the plan copies more than `n_copied_max` cells; the copy that exceeds the limit is still made.
        """
        waiting = self._tokenized()
        first = [*islice(waiting, N_LOOK)]
        demand = self._demand()
        while n_copied_max is None or sum(n for _, _, n in self.cells.copies) <= n_copied_max:
            n_left = len(self.leaves)
            driver = self._admit_next(first, demand)
            if driver is None:
                break
            first.remove(driver)
            first += islice(waiting, 1)
            if len(self.leaves) > n_left:
                demand = self._demand()

    @property
    def awaits_prompts(self) -> bool:
        """Whether the prompts of the first waiting sequences are still being tokenized."""
        first = islice(
            self.batcher.queue.candidates(self.ledger.holders), self.batcher.wants.n_ahead
        )
        return not all(driver.is_tokenized for driver in first)

    def _tokenized(self) -> Iterator[SequenceDriver]:
        """Yield in order the waiting sequences with tokenized prompts; they pass the others.

        Sequences with refused prompts are left out; they end before the next plan.
        """
        n_passed = 0
        for driver in self.batcher.queue.candidates(self.ledger.holders):
            if driver.is_tokenized and driver.error is None:
                yield driver
            elif n_passed == self.batcher.wants.n_ahead:
                return
            else:
                n_passed += 1

    def _admit_next(
        self, waiting: Sequence[SequenceDriver], demand: Demand
    ) -> SequenceDriver | None:
        """Admit the first sequence that can get a slot, or hold one that waits for a prefix; return it, or None.

        Any number of sequences may pass one that waits for the disk; `N_OVERTAKEN_MAX` may pass one that waits for
        cells. A chosen slot is not given to a later sequence.
        """
        passed: SequenceDriver | None = None
        reserved: list[Slot] = []
        for driver in waiting:
            chosen = driver.chosen_slot
            if chosen is not None and not is_to_be_had(self.ledger.holders[chosen]):
                continue  # an earlier sequence got it in this plan
            if self.ledger.n_free_slots + len(self._paused()) <= self.n_following:
                return None
            found, files = self.cells.prefixes.find(driver), self.batcher.wants.files
            n_found = found.source.n_cells if found.source else 0
            must_read = found.leader is None and files.must_read(driver, n_found)
            if not self._waits_for_disk(driver, must_read=must_read):
                if found.leader is not None or must_read:
                    self._hold(driver, found, must_read=must_read)
                    return driver
                if self._place(driver, found, demand, reserved) or self._place_in_paused(
                    driver, reserved
                ):
                    if passed is not None:
                        self.overtaken[passed] = self.overtaken.get(passed, 0) + 1
                    return driver
                passed = passed or driver
                if passed.n_overtaken + self.overtaken.get(passed, 0) >= N_OVERTAKEN_MAX:
                    return None
            if chosen is not None:
                reserved.append(chosen)
        return None

    def _hold(self, driver: SequenceDriver, found: PrefixMatch, *, must_read: bool) -> None:
        """Make a sequence wait for its file or for its leader, which leaves a checkpoint for it if needed."""
        self.holds[driver] = Wait.CACHE if must_read else Wait.LEADER, found
        leader = found.leader
        if leader is not None and self.cells.prefixes.checkpoints.is_on:
            marks = self.marks.get(leader, leader.marks)
            self.marks[leader] = with_mark(marks, found.n_leader_cells)

    def _waits_for_disk(self, driver: SequenceDriver, *, must_read: bool) -> bool:
        """Whether a sequence must wait because too many cells are being read or written."""
        n_slots = self.ledger.n_slots
        n_read = self.n_awaiting_cells - self.n_following
        if must_read and n_read >= N_READ_PER_SLOT * n_slots:
            return True
        is_saving = bool(driver.request.options.save_cache)
        return is_saving and len(self.batcher.storing) >= N_STORING_PER_SLOT * n_slots

    def _place_in_paused(self, driver: SequenceDriver, reserved: Collection[Slot]) -> bool:
        """Take slots of paused sequences until a waiting one can be admitted; take none if that is not enough."""
        paused = self._paused(driver.chosen_slot)
        if not (paused and self._fits_without(paused, driver)):
            return False
        before, n_left = (self.cells, self.ledger, self._n_saved_bytes), len(self.leaves)
        self._branch()
        for holder in paused:
            self.leave(holder, "parked")
            if self._place(driver, self.cells.prefixes.find(driver), self._demand(), reserved):
                return True
        self.cells, self.ledger, self._n_saved_bytes = before
        del self.leaves[n_left:]
        return False

    def _fits_without(self, paused: Collection[SequenceDriver], driver: SequenceDriver) -> bool:
        """Whether the pool may have room for a sequence once all these have left their slots; makes no view."""
        source = self.cells.prefixes.find(driver).source
        n_shared = source.n_cells if source else 0
        return self._demand(paused).fits(driver, self.ledger, n_shared, paused)

    def _paused(self, slot: Slot | None = None) -> list[SequenceDriver]:
        """Return the paused sequences with slots; the one in `slot` comes first."""
        had_none_paused = len(self.running) == self.batcher.cells.ledger.n_used_slots
        if had_none_paused:
            return []
        paused = [d for d in self.ledger.holders if d is not None and d.status is Status.PAUSED]
        return sorted(paused, key=lambda d: d.slot != slot)

    def _demand(self, leaving: Collection[SequenceDriver] = ()) -> Demand:
        """Return the demand of sequences with slots but for `leaving` ones; admitted sequences are added to it."""
        demand = Demand(self.batcher.demand)
        for driver in self.ledger.holders if self.ledger.is_overcommitted else ():
            if driver is not None and driver not in leaving:
                demand.join(driver, self.n_computed(driver))
        return demand

    def _place(
        self,
        driver: SequenceDriver,
        found: PrefixMatch,
        demand: Demand,
        reserved: Collection[Slot],
    ) -> bool:
        """Admit a sequence to a free slot that is not `reserved`; False if there is none or the cells do not fit."""
        ledger, source, n_shared = self.ledger, found.source, 0
        if ledger.memory.can_copy and source is not None and source.slot is not None:
            n_shared = source.n_cells if ledger.holders[source.slot] is not None else 0
        if ledger.n_free_slots <= self.n_following or not demand.fits(driver, ledger, n_shared):
            return False
        slot = self._slot_for(driver, source, reserved)
        # saved cells that do not fit beside copies fit in the next plan, which copies nothing
        if slot is None or not self.cells.can_load(driver, source):
            return False
        cells = self._edit()
        cells.ledger.assign(slot, driver)
        if source is None or not cells.prefixes.can_reach(source, slot):
            source = cells.prefixes.own_source(driver, slot, found.alike)
        n_cells = cells.fill(driver, slot, source)
        self.placed[driver] = Place(slot, n_cells)
        if marks := cells.prefixes.marks(driver, n_cells, found):
            self.marks[driver] = marks
        if ledger.is_overcommitted:
            demand.join(driver, n_cells)
        return True

    def _slot_for(
        self, driver: SequenceDriver, source: PrefixSource | None, reserved: Collection[Slot]
    ) -> Slot | None:
        """Return the free slot for a sequence; None if it must wait for one."""
        prefixes, slot = self.cells.prefixes, driver.chosen_slot
        if slot is None:
            avoided = self.batcher.queue.chosen_slots
            has_room = self._has_slot_to_spare()
            return prefixes.choose_slot(
                source, has_room=has_room, reserved=reserved, avoided=avoided
            )
        is_copied = slot in prefixes.copied and (source is None or source.slot != slot)
        return (
            None if is_copied or self.ledger.holders[slot] is not None or slot in reserved else slot
        )

    def _has_slot_to_spare(self) -> bool:
        """Whether more slots are free than waiting sequences will take."""
        n_waiting = len(self.batcher.queue) - self.n_entering - len(self.holds)
        n_taken = self.n_following + len(self.cells.prefixes.copied) + n_waiting - 1
        return self.ledger.n_free_slots - n_taken > 1

    def _edit(self) -> SlotCells:
        """Return the view of the cells; the first call makes it."""
        if not self.has_view:
            self._branch()
        return self.cells

    def _branch(self) -> None:
        """Make a view of slots and cells, and continue with it."""
        self.cells = self.cells.view()
        self.ledger = self.cells.ledger


class KvDemandEstimator:
    """Estimates how many cells a sequence will need: in the worst case, or as ended sequences suggest.

    The estimate is a share of the cap, `ratio`, which follows ended requests and rises when the pool was full. Without
    a cap, nothing is known of the output's length: the estimate is an equal part of the pool, at most the rest of the
    window.
    """

    def __init__(self, ledger: KvLedger, *, is_optimistic: bool) -> None:
        self.ratio = _FIRST_RATIO
        self.is_optimistic = is_optimistic
        self._n_unknown = ledger.n_pool // ledger.n_slots

    def learn(self, driver: SequenceDriver) -> None:
        """Learn which share of its cap an ended sequence used, if it ended by itself."""
        if driver.is_capped and driver.n_cap > 0 and driver.finish_reason in ("stop", "length"):
            self.ratio += (driver.n_output / driver.n_cap - self.ratio) / _N_REMEMBERED

    def raise_ratio(self) -> None:
        """Expect longer outputs, because the pool was full."""
        self.ratio = min(1.0, self.ratio * 1.1 + 0.05)

    def n_expected(self, driver: SequenceDriver, *, is_worst_case: bool) -> int:
        """Return how many more cells a sequence will need, as an estimate or in the worst case."""
        n_left = driver.n_left
        n_most = max(0, min(n_left, driver.n_window - driver.n_tokens))
        if is_worst_case:
            return n_most
        if not driver.is_capped:
            return min(n_most, self._n_unknown)
        return min(n_most, math.ceil(self.ratio * n_left))


class Demand:
    """The cells that sequences with slots will need in a shared pool; decides whether one more fits."""

    def __init__(self, estimator: KvDemandEstimator) -> None:
        self._estimator = estimator
        self._is_worst_case = not estimator.is_optimistic
        self._n_coming = self._n_coming_at_worst = 0

    def join(self, driver: SequenceDriver, n_computed: int) -> None:
        """Add a running sequence with `n_computed` cells."""
        self._is_worst_case |= driver.n_preempted >= N_PREEMPTED_MAX
        n_pending = min(driver.n_tokens, driver.n_window) - n_computed
        self._n_coming += n_pending + self._estimator.n_expected(driver, is_worst_case=False)
        self._n_coming_at_worst += n_pending + self._estimator.n_expected(
            driver, is_worst_case=True
        )

    def fits(
        self,
        driver: SequenceDriver,
        ledger: KvLedger,
        n_shared: int = 0,
        leaving: Collection[SequenceDriver] = (),
    ) -> bool:
        """Return whether the pool has room for `driver`; `n_shared` of its cells are in other slots already."""
        if not ledger.is_overcommitted:
            return True
        is_worst_case = self._is_worst_case or driver.n_preempted >= N_PREEMPTED_MAX
        n_coming = self._n_coming_at_worst if is_worst_case else self._n_coming
        n_new = min(driver.n_tokens, driver.n_window) - n_shared
        n_new += self._estimator.n_expected(driver, is_worst_case=is_worst_case)
        return ledger.n_in_use(leaving=leaving) + n_coming + n_new <= ledger.n_pool


def choose_victim(ledger: KvLedger) -> SequenceDriver | None:
    """Return the sequence to preempt: the one with the fewest computed tokens, but never the oldest.

    Sequences that were preempted too often, or share all their cells, are chosen only if no cell is free. Shared cells
    become free when all sequences that share them have left.
    """
    by_age = sorted([d for d in ledger.holders if d is not None], key=BY_AGE)
    eligible = [d for d in by_age[1:] if d.slot is not None and ledger.n_own(d.slot)]
    if ledger.n_free_cells:
        eligible = [d for d in eligible if d.n_preempted < N_PREEMPTED_MAX]
    elif not eligible:
        eligible = [d for d in by_age[1:] if d.slot is not None]
    return min(eligible, key=_cost, default=None)


def _cost(victim: SequenceDriver) -> tuple[bool, int, int]:
    return victim.n_preempted >= N_PREEMPTED_MAX, victim.n_computed, -victim.number


def _first_gap(ledger: KvLedger) -> Slot:
    """Return the lowest free slot above the lowest one in use; there must be one."""
    used = [d is not None for d in ledger.holders]
    return Slot(used.index(False, used.index(True)))


def choose_mover(ledger: KvLedger) -> SequenceDriver | None:
    """Return the sequence in the highest slot, if a lower slot is free and moving is possible and pays.

    In partitioned memory each gap costs a graph run, which takes as long as a step; the move costs less. A sequence in
    a chosen slot is not moved.

    Source: measured on hybrid, recurrent and sliding-window models of tests/zoo: three rows took 1.3 to 2 times as long
    with gaps, and saving and loading 210 cells or a state less than a step.
    """
    memory = ledger.memory
    if memory.kind == "unified" or not (memory.can_copy or memory.can_save):
        return None
    used = [i for i, d in enumerate(ledger.holders) if d is not None]
    if not used or used[-1] - used[0] < len(used):
        return None
    highest = ledger.holders[used[-1]]
    if highest is None or highest.chosen_slot is not None:
        return None
    is_settled = highest.status is Status.RUNNING and highest.n_computed and not highest.n_removed
    return highest if is_settled and highest.n_left >= N_WORTH_MOVE else None
