"""Admission: who waits, who gets a slot and cells, who gives them back, who leaves."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING

from cbatch.core.cell_ops import Cells
from cbatch.core.deadlines import Deadlines
from cbatch.core.demand import KvDemandEstimator
from cbatch.core.driver import SequenceDriver, Status, Wait
from cbatch.core.line import AdmissionQueue
from cbatch.core.plan import Slot
from cbatch.core.preemption import choose_mover, choose_victim, slot_of
from cbatch.core.prompts import Prompts
from cbatch.core.sharing import PrefixCache
from cbatch.core.waiting import CacheReads, GrammarBuilds, PrefixWaiters
from cbatch.engine_options import ScheduleOptions
from cbatch.errors import GrammarError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from cbatch.core.kv import KvLedger
    from cbatch.core.plan import KvCapabilities
    from cbatch.core.prompts import Tokenize
    from cbatch.core.sharing import PrefixMatch, Source
    from cbatch.errors import CBatchError
    from cbatch.options import AdapterSet, Breakers, Grammar
    from cbatch.response import FinishReason

N_LOOK = 4
"""How many of those that wait are looked at where the first does not fit."""

N_OVERTAKEN_MAX = 16
"""How many may be admitted before one that waits for cells; then it holds up all behind it."""

N_REFUSED_MAX = 64
"""Most requests that one plan ends without computing them: a step must not wait for a long row of bad ones."""

N_FETCHED_PER_SLOT = 2
"""How many may wait for cells from disk: others pass them, and what was read for them takes memory."""

N_STORED_PER_SLOT = 2
"""How many may wait for their cells to be written, in host memory meanwhile; then nobody enters who saves."""


class MultiRequestBatcher:
    """A queue with a policy in front of the slots, and the only one who lends and takes back slots and cells.

    A prompt becomes tokens when its turn comes, so a long queue costs nothing; a prompt that cannot run then
    ends with its own error and the next one gets the slot. Who lost its slot comes before the queue, the oldest
    first; but in `round_robin` it goes to the queue's end.
    """

    def __init__(
        self,
        ledger: KvLedger,
        tokenize: Tokenize,
        options: ScheduleOptions | None = None,
        memory: KvCapabilities | None = None,
        chunk_alignment: int = 0,
    ) -> None:
        options = options or ScheduleOptions()
        self.ledger = ledger
        self.running: list[SequenceDriver | None] = [None] * ledger.n_slots
        """Who has each slot; a paused one may."""
        self.in_flight: dict[str, SequenceDriver] = {}
        self.demand = KvDemandEstimator(ledger, is_optimistic=options.admission != "reserve")
        self.sharing = PrefixCache(
            ledger,
            self.running,
            memory,
            chunk_alignment=chunk_alignment,
            is_on=options.share_prefixes,
        )
        self.cells = Cells(ledger, memory, options.swap_mib * 2**20, self.sharing)
        self.deadlines = Deadlines()
        self.n_visited = 0
        """Waiting sequences looked at since the beginning."""
        self.n_changes = 0
        """Grows whenever other sequences run than before."""
        self.storing: dict[str, SequenceDriver] = {}
        """Those that ended and wait for their cells to be on disk."""
        self._is_sorted_by_length = options.policy == "shortest"
        self.prompts = Prompts(tokenize, ledger.n_window)
        self._line = AdmissionQueue(options)
        self.followers = PrefixWaiters()
        self.fetches = CacheReads(self.sharing, self.cells)
        self.compiles = GrammarBuilds()
        self.last_adapters: AdapterSet = ()
        """What the last step was computed with."""
        self._numbers = count()
        self._ended: list[SequenceDriver] = []

    @property
    def n_waiting(self) -> int:
        """Sequences without a slot that could take one."""
        return len(self._line)

    @property
    def n_held(self) -> int:
        """Sequences without a slot that could not take one: paused, or waiting for something else."""
        return self._line.n_held

    @property
    def n_paused_in_slots(self) -> int:
        """Sequences that are paused and have a slot, which they give up when somebody needs it."""
        return sum(d is not None and d.status is Status.PAUSED for d in self.running)

    @property
    def n_awaited(self) -> int:
        """Sequences that wait for what they can begin with; for those that wait for another one a slot is free."""
        return len(self.followers) + self.fetches.n_waiting

    @property
    def has_ended(self) -> bool:
        """Whether `take_ended` would return any."""
        return bool(self._ended)

    def submit(self, drivers: Iterable[SequenceDriver]) -> None:
        """Queue waiting sequences; their ids must not be in flight. One that is known never to fit ends at once.

        One that `waits_for` something is held until it is released.
        """
        ready: list[SequenceDriver] = []
        for driver in drivers:
            driver.number = next(self._numbers)
            self.in_flight[driver.request.id] = driver
            self.deadlines.add(driver)
            if self._is_sorted_by_length or driver.request.prompt.tokens is not None:
                self.prompts.prepare(driver)
            if driver.refusal is not None:
                self._end(driver, "error", driver.clock.submitted_s, driver.refusal)
            elif driver.is_held or self._waits_to_compile(driver):
                self._line.hold(driver)
            else:
                ready.append(driver)
        self._line.add(ready)

    def _waits_to_compile(self, driver: SequenceDriver) -> bool:
        want = self.compiles.missing(driver)
        if want is None:
            return False
        driver.waits_for = Wait.COMPILE
        self.compiles.add(driver, want)
        return True

    def take_compiled(
        self, want: Grammar | Breakers, found: object | GrammarError, now: float
    ) -> None:
        """Take what compiling brought: who waited for it queues now, or ends where it cannot be compiled."""
        if isinstance(found, GrammarError):
            for driver in self.compiles.arrive(want, None):
                self._withdraw(driver)
                driver.finish("error", now, GrammarError(found.kind, found.reason))
                self.retire(driver)
            return
        drivers = [d for d in self.compiles.arrive(want, found) if not self._waits_to_compile(d)]
        for driver in drivers:
            driver.waits_for = None
        ready = [d for d in drivers if d.status is Status.WAITING]  # others are paused
        for driver in ready:
            self._line.let_go(driver)
        self._line.add(ready)

    def admit(self, now: float, n_copied_max: int | None = None) -> list[SequenceDriver]:
        """Give free slots to those whose turn it is and whose cells fit; return who got one.

        Nobody gets one behind whom more than `n_copied_max` cells are to be copied already.
        """
        admitted: list[SequenceDriver] = []
        for driver in self.followers.take_released(self.last_adapters):
            self.release(driver)
        n_refusable = N_REFUSED_MAX
        if self.n_waiting and self.ledger.has_free_slot:
            self.demand.begin(self.running)
        while self.n_waiting and (self.ledger.has_free_slot or self.park_paused()):
            if n_copied_max is not None and self.cells.n_to_copy > n_copied_max:
                break
            first = self._first(N_LOOK if self.ledger.is_shared else 1)
            refused = [d for d in first if d.refusal is not None]
            for driver in refused:
                self._line.remove(driver)
                self._end(driver, "error", now, driver.refusal)
            n_refusable -= len(refused)
            found = None if refused else self._fitting(first)
            if found is not None:
                if not self._lets_in(*found, now, admitted):
                    break
            elif n_refusable <= 0 or not (refused or self.park_paused()):
                break
        return admitted

    def _lets_in(
        self,
        driver: SequenceDriver,
        found: PrefixMatch,
        now: float,
        admitted: list[SequenceDriver],
    ) -> bool:
        """Give a slot to one that fits, or hold it until it can begin further on; False if none would be free then."""
        if self.ledger.n_free_slots <= len(self.followers):
            return False
        if driver.request.options.save_cache and len(self.storing) >= (
            N_STORED_PER_SLOT * self.ledger.n_slots
        ):
            return False
        if found.leader is not None:
            self.hold(driver, Wait.LEADER)
            self.followers.add(driver, found.leader, found.n_then)
        elif self.fetches.is_needed(driver):
            if self.fetches.n_waiting >= N_FETCHED_PER_SLOT * self.ledger.n_slots:
                return False
            self.hold(driver, Wait.CACHE)
            self.fetches.add(driver)
        elif driver.refusal is None:  # else it ends when it is looked at again
            self._enter(driver, found.source, now)
            admitted.append(driver)
        return True

    def _first(self, n: int) -> list[SequenceDriver]:
        """Return the next `n` of those that wait, prepared."""
        first = self._line.first(n)
        self.n_visited += len(first)
        for driver in first:
            self.prompts.prepare(driver)
        return first

    def _fitting(
        self, waiting: Sequence[SequenceDriver]
    ) -> tuple[SequenceDriver, PrefixMatch] | None:
        """Return the first that fits or follows, with what it begins with; the head lets some pass, not for ever."""
        head = waiting[0]
        for driver in waiting:
            found = self.sharing.find(driver)
            if found.leader is not None or self._fits(driver, found.source):
                head.n_overtaken += driver is not head
                return driver, found
            driver.waits_for = Wait.CELLS
            if head.n_overtaken >= N_OVERTAKEN_MAX:
                break
        return None

    def _fits(self, driver: SequenceDriver, source: Source | None) -> bool:
        """Whether there are cells for one that waits, beside those that run."""
        has_holder = source is not None and self.running[source.slot] is not None
        n_shared = source.n_cells if source is not None and has_holder else 0
        return self.demand.fits(driver, n_shared)

    def _enter(self, driver: SequenceDriver, source: Source | None, now: float) -> None:
        self._line.remove(driver)
        place = self.sharing.place(source, has_room=self._has_room_beside())
        slot = self.ledger.lend(place)
        driver.admit(slot, now)
        self.running[slot] = driver
        self.n_changes += 1
        self.cells.enter(driver, slot, source)
        self.demand.join(driver)

    def _has_room_beside(self) -> bool:
        """Whether a slot stays free when all have one that want one."""
        n_taken = len(self.followers) + len(self.sharing.copied) + self.n_waiting
        return self.ledger.n_free_slots - n_taken > 1

    def compact_slots(self) -> SequenceDriver | None:
        """Move the sequence of the highest slot into a gap below it; return it, or None where that cannot be or pay."""
        mover = choose_mover(self.running, self.ledger)
        if mover is None:
            return None
        source, gap = slot_of(mover), min(self.ledger.free_slots)
        self.ledger.lend(gap)
        self.cells.move(mover, source, gap)
        self.ledger.give_back(source)
        self.running[gap], self.running[source] = mover, None
        mover.slot = gap
        self.n_changes += 1
        return mover

    def make_room(self) -> bool:
        """Take slot and cells from a paused one, else from a victim, for want of cells; False if there is neither."""
        if self.park_paused():
            return True
        victim = choose_victim(self.running, self.ledger)
        if victim is None:
            return False
        self.demand.raise_ratio()
        victim.n_preempted += 1
        self._leave_slot(victim)
        victim.preempt()
        self._line.put_back(victim)
        return True

    def end_turn(self, driver: SequenceDriver) -> None:
        """Take the slot from one that has had its quantum; it goes to the end of the queue."""
        self._leave_slot(driver)
        driver.preempt()
        self._line.add([driver])

    def park_paused(self) -> bool:
        """Take slot and cells from one that is paused; False where there is none."""
        for driver in self.running:
            if driver is not None and driver.status is Status.PAUSED:
                self._leave_slot(driver)
                self._line.hold(driver)
                self.demand.begin(self.running)
                return True
        return False

    def _leave_slot(self, driver: SequenceDriver) -> None:
        """Have the cells saved where that can be, and give back the slot."""
        slot = slot_of(driver)
        self.cells.save(driver, slot)
        self._vacate(driver, slot)
        driver.slot = None

    def pause(self, id: str) -> bool:
        """Stop a request where it is; False where it is not in flight or paused already.

        It keeps slot and cells until somebody else needs them.
        """
        driver = self.in_flight.get(id)
        if driver is None or driver.status is Status.PAUSED:
            return False
        if driver.status is Status.WAITING and not self._line.is_held(driver):
            self._line.remove(driver)
            self._line.hold(driver)
        driver.pause()
        driver.release_load_followers()
        self.n_changes += 1
        return True

    def resume(self, id: str) -> bool:
        """Let a paused request go on; False where it is not in flight or not paused."""
        driver = self.in_flight.get(id)
        if driver is None or driver.status is not Status.PAUSED:
            return False
        if driver.slot is None:
            driver.requeue()
            if not driver.is_held:
                self._line.put_back(driver)
        else:
            driver.resume()
            self.n_changes += 1
        return True

    def hold(self, driver: SequenceDriver, reason: Wait) -> None:
        """Keep a waiting sequence from its turn until `release`: those behind it pass."""
        self._line.remove(driver)
        driver.waits_for = reason
        self._line.hold(driver)

    def release(self, driver: SequenceDriver) -> None:
        """Let a held sequence take its turn: among the first, for it has waited."""
        driver.waits_for = None
        if driver.status is Status.WAITING and self._line.is_held(driver):
            self._line.put_back(driver)

    def cancel(self, id: str, now: float) -> bool:
        """End a request by id; False where no such request is in flight."""
        driver = self.in_flight.get(id)
        if driver is None:
            return False
        self._withdraw(driver)
        driver.cancel(now)
        self.retire(driver)
        return True

    def expire(self, now: float) -> None:
        """End those whose time is over."""
        while (driver := self.deadlines.pop_due(now)) is not None:
            self._withdraw(driver)
            driver.expire(now)
            self.retire(driver)

    def retire(self, driver: SequenceDriver) -> None:
        """Take a finished sequence out of the books; what its cells are worth, its slot keeps.

        One whose cells go to disk has not ended before `end_stored`.
        """
        del self.in_flight[driver.request.id]
        driver.release_load_followers()
        if driver.status is not Status.STORING:
            if driver.request.options.save_cache and driver.error is None:
                driver.warnings.append("the cells were not saved: it had no slot when it ended")
            self._ended.append(driver)
        elif self.cells.store(driver, slot_of(driver)):
            self.storing[driver.request.id] = driver
        else:
            driver.end_storing()
            self._ended.append(driver)
        self.cells.forget(driver)
        self.deadlines.note_end()
        self.demand.learn(driver)
        if driver.slot is not None:
            self._vacate(driver, driver.slot)

    def end_stored(self, driver: SequenceDriver, problem: str | None = None) -> None:
        """Let one end whose cells are on disk, or could not be put there."""
        if problem is not None:
            driver.warnings.append(problem)
        del self.storing[driver.request.id]
        driver.end_storing()
        self._ended.append(driver)

    def drop_cells(self, driver: SequenceDriver) -> None:
        """Have a running sequence's slot emptied; all its tokens are pending again."""
        driver.rewind()
        self.cells.clear(slot_of(driver))
        self.sharing.enter(slot_of(driver), driver)

    def keep_cells(self, driver: SequenceDriver, n_cells: int) -> None:
        """Have all but the first `n_cells` cells of a running sequence taken off."""
        self.cells.trim(driver, slot_of(driver), n_cells)

    def lose_all_cells(self) -> None:
        """Take in that nobody knows what the slots hold."""
        for i, driver in enumerate(self.running):
            if driver is None:
                self.cells.clear(Slot(i))
            else:
                self.drop_cells(driver)

    def take_ended(self) -> list[SequenceDriver]:
        """Return the sequences that ended since the last call, in order."""
        ended, self._ended = self._ended, []
        return ended

    def _vacate(self, driver: SequenceDriver, slot: Slot) -> None:
        self.running[slot] = None
        self.n_changes += 1
        self.ledger.give_back(slot)
        self.cells.leave(driver, slot)

    def _withdraw(self, driver: SequenceDriver) -> None:
        """Take a sequence without a slot from wherever it waits."""
        if driver.waits_for is Wait.LEADER:
            self.followers.drop(driver)
        elif driver.waits_for is Wait.CACHE:
            self.fetches.drop(driver)
        elif driver.waits_for is Wait.COMPILE:
            self.compiles.drop(driver)
        if not self._line.let_go(driver) and driver.status is Status.WAITING:
            self._line.remove(driver)

    def _end(
        self, driver: SequenceDriver, reason: FinishReason, now: float, error: CBatchError | None
    ) -> None:
        driver.finish(reason, now, error)
        self.retire(driver)
