"""Requests in flight (held, queued, in slots, ended), and the slots and cells they have."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING

from cbatch.core.books import find_imbalance
from cbatch.core.cell_ops import SavedCells, SlotCells, ToStore
from cbatch.core.driver import BY_AGE, Event, Status, Wait
from cbatch.core.kv import KvLedger
from cbatch.core.plan import ANYWHERE, Slot
from cbatch.core.preemption import KvDemandEstimator
from cbatch.core.prefix import PrefixCache
from cbatch.core.queue import BY_PROMPT, AdmissionQueue, Deadlines
from cbatch.core.slots import N_LOOK, BatcherState, SlotPlan
from cbatch.core.waiting import (
    CacheEntry,
    CacheRead,
    CacheReads,
    CacheRef,
    GrammarBuilds,
    PrefixWaiters,
    PromptWaiters,
)
from cbatch.errors import CacheError, GrammarError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from cbatch.core.driver import SequenceDriver
    from cbatch.core.plan import PromptCuts, StepPlan, StepResult
    from cbatch.core.slots import Leave, Place
    from cbatch.core.waiting import ToCompile, Want
    from cbatch.engine_options import ScheduleOptions
    from cbatch.errors import CBatchError

N_REFUSED_MAX = 64
"""Most requests refused before one plan, so that a step does not wait for many of them."""


@dataclass(frozen=True, slots=True)
class Occupancy:
    """How many sequences are waiting, running and paused, and how many cells are in use."""

    n_waiting: int
    """In the queue."""
    n_held: int
    """Without a slot and outside the queue: paused, or waiting for something other than a slot."""
    n_running: int
    n_paused: int
    """Paused with a slot, which others may take."""
    n_unserved: int
    """Waiting for a slot, or first for their tokens or grammar."""
    n_open_slots: int
    """Slots open to new requests; negative if over-reserved."""
    n_storing: int
    """Ended, but their cells are still being written to disk."""
    n_ended: int
    """Ended, but not yet returned by `take_ended`."""
    n_cells: int
    n_pool: int
    """Total cells of all slots."""
    n_checkpoints: int
    n_checkpoint_bytes: int
    """Bytes of host memory of checkpoints."""


class MultiRequestBatcher:
    """The requests in flight, and the only part that changes the state of slots and cells.

    Commands change the state at once: `submit`, `cancel`, `pause`, `resume`, `resolve` for results from outside, and
    `begin_step` for deadlines. A plan is made for this state and changes nothing; the backend executes it, and `commit`
    records what it did.
    """

    def __init__(
        self,
        ledger: KvLedger,
        tokenize: Callable[[SequenceDriver], object],
        options: ScheduleOptions,
        cuts: PromptCuts = ANYWHERE,
        *,
        n_ahead: int = 0,
        takes_long: Callable[[SequenceDriver], bool] = lambda _: False,
    ) -> None:
        """Start with nothing in flight.

        Args:
            ledger: slots and cells, all of them free.
            tokenize: tokenizes a sequence's prompt, at once or later by a command that calls `take_prompt`.
            options: how requests are scheduled.
            cuts: where prompts may be cut.
            n_ahead: how many prompts are tokenized before a slot is free.
            takes_long: whether a prompt takes long to tokenize; others pass it meanwhile.
        """
        self.in_flight: dict[str, SequenceDriver] = {}
        self._wants: deque[Want] = deque()
        self._storing: dict[int, ToStore] = {}
        self._options, self._cuts, self._n_ahead = options, cuts, n_ahead
        self._open_books(ledger)
        self._tokenize, self._takes_long = tokenize, takes_long
        self._is_by_prompt = options.policy in BY_PROMPT
        self._numbers = count()
        self._ended: list[SequenceDriver] = []

    def _open_books(self, ledger: KvLedger) -> None:
        """Set up the state with all slots free."""
        options = self._options
        prefixes = PrefixCache(
            ledger,
            cuts=self._cuts,
            is_on=options.share_prefixes,
            n_checkpoint_bytes=options.n_checkpoint_bytes,
        )
        saved = SavedCells(ledger.memory, options.swap_mib * 2**20)
        self._state = BatcherState(
            SlotCells(ledger, prefixes),
            saved,
            AdmissionQueue(options),
            PrefixWaiters(),
            CacheReads(lambda: self._cells.prefixes, saved, self._wants),
            KvDemandEstimator(ledger, is_optimistic=options.admission != "reserve"),
            self._storing,
            self._n_ahead,
        )
        self._ledger, self._queue = ledger, self._state.queue
        self._cells, self._saved, self._reads = self._state.cells, saved, self._state.reads
        self._followers = self._state.followers
        self._builds = GrammarBuilds(self._wants)
        self._untokenized = PromptWaiters(ledger.n_slots + self._n_ahead)
        self._waiters: dict[Wait, PromptWaiters | GrammarBuilds | PrefixWaiters | CacheReads] = {
            Wait.PROMPT: self._untokenized,
            Wait.COMPILE: self._builds,
            Wait.LEADER: self._followers,
            Wait.CACHE: self._reads,
        }
        self._deadlines = Deadlines()
        self._running: list[SequenceDriver] | None = None
        """The running sequences, the oldest first; None after a change, until computed again."""

    def imbalance(self) -> str:
        """Return what is wrong with the counts of slots and cells; "" if they balance. Call it between two runs."""
        return find_imbalance(self._state, self.in_flight)

    def start_anew(self) -> None:
        """Forget all cells, also saved ones; the next plan empties the slots. Nothing may be in flight."""
        old = self._ledger
        self._order_writes([key for _, key in self._cells.saves])
        kept = [*self._saved.keys, *self._cells.prefixes.checkpoints.kept]
        self._open_books(KvLedger(old.n_slots, old.n_window, old.memory))
        for i in range(old.n_slots):
            self._cells.clear(Slot(i))
        self._cells.prefixes.drop(kept)  # the counter stays, so no key is used again
        self._cells.forgets += kept

    # ---- questions ----

    @property
    def n_waiting(self) -> int:
        """Number of sequences that could take a slot. From any thread."""
        return len(self._queue)

    @property
    def n_ended(self) -> int:
        """Number of ended requests that `take_ended` has not returned. From any thread."""
        return len(self._ended)

    def occupancy(self) -> Occupancy:
        """Return the counts of sequences and cells. From any thread, but `n_held` is only exact in the owner thread."""
        n_free, n_waiting = self._ledger.n_free_slots, self.n_waiting
        n_paused = sum(d is not None and d.status is Status.PAUSED for d in self._ledger.holders)
        n_used_slots = self._ledger.n_slots - n_free
        return Occupancy(
            n_waiting,
            n_held=len(self.in_flight) - n_used_slots - n_waiting,
            n_running=n_used_slots - n_paused,
            n_paused=n_paused,
            n_unserved=n_waiting + len(self._untokenized) + len(self._builds),
            n_open_slots=n_free + n_paused - len(self._followers) - len(self._reads),
            n_storing=len(self._storing),
            n_ended=len(self._ended),
            n_cells=self._ledger.n_used,
            n_pool=self._ledger.n_pool,
            n_checkpoints=len(self._cells.prefixes.checkpoints),
            n_checkpoint_bytes=self._cells.prefixes.checkpoints.n_bytes,
        )

    def decoding(self) -> list[tuple[Slot, SequenceDriver]]:
        """Return the sequences whose next step computes one output token, including paused ones, by slot.

        Sequences with pending changes of cells or bindings are left out.
        """
        rows = [(Slot(i), d) for i, d in enumerate(self._ledger.holders) if d and d.is_decoding]
        return [(slot, driver) for slot, driver in rows if self._cells.is_settled(slot)]

    def residents(self) -> list[tuple[SequenceDriver | None, int]]:
        """Return the sequence of each slot, None for a free one, and its cells."""
        return [*zip(self._ledger.holders, self._ledger.n_cells, strict=False)]

    @property
    def next_deadline_s(self) -> float | None:
        """A time before which no deadline passes; None without deadlines."""
        return self._deadlines.next_s()

    def is_storing(self, id: str) -> bool:
        """Whether a request has ended but its cells are still being written to disk."""
        return any(want.driver.request.id == id for want in [*self._storing.values()])

    def is_paused(self, id: str) -> bool:
        """Whether a request is in flight and paused. From any thread."""
        driver = self.in_flight.get(id)
        return driver is not None and driver.status is Status.PAUSED

    def has_ended(self, id: str) -> bool:
        """Whether a request has ended and `take_ended` has not returned it. From any thread."""
        return self.is_storing(id) or any(driver.request.id == id for driver in [*self._ended])

    # ---- coming ----

    def submit(self, drivers: Iterable[SequenceDriver]) -> None:
        """Queue new sequences, whose ids must not be in flight. Those that can never fit end at once."""
        ready: list[SequenceDriver] = []
        for driver in drivers:
            driver.number = next(self._numbers)
            self.in_flight[driver.request.id] = driver
            self._deadlines.add(driver)
            is_early = self._is_by_prompt or driver.is_early
            takes_long = not driver.is_tokenized and self._takes_long(driver)
            needs_prompt = self._is_by_prompt or driver.request.is_grammar_open
            if is_early or (driver.request.prompt.tokens is not None and not takes_long):
                self._tokenize(driver)
            if driver.error is not None:
                driver.finish("error", driver.clock.submitted_s, driver.error)
                self.retire(driver)
            elif takes_long or (needs_prompt and not driver.is_tokenized):
                driver.waits_for = Wait.PROMPT
                self._untokenized.add(driver)
            elif not self._waits_to_compile(driver):
                ready.append(driver)
        self._queue.add(ready)

    def take_prompt(self, driver: SequenceDriver, now: float) -> None:
        """Continue with a sequence whose prompt was tokenized or refused."""
        if self.in_flight.get(driver.request.id) is not driver:
            return  # `submit` will see it
        if driver.error is not None:
            self.fail(driver, driver.error, now)
        elif driver.waits_for is Wait.PROMPT:
            self._untokenized.let_go(driver)
            self._go_on_compiled([driver])

    def begin_step(self, now: float, ending: Collection[SequenceDriver] = ()) -> None:
        """Handle what precedes a plan: deadlines, finished waits, and tokenizing.

        Requests past their deadline and with refused prompts end. Sequences whose leader has computed their prefix, or
        no longer runs, are queued again. Only as many prompts are tokenized as the plan may admit, counting the slots
        of `ending` sequences, so the cost does not depend on the length of the queue.
        """
        while (driver := self._deadlines.pop_due(now)) is not None:
            self._withdraw(driver)
            driver.expire(now)
            self.retire(driver)
        for driver in self._followers.pop_ready():
            self._release(driver)
        for driver in self._untokenized.due():
            self._tokenize(driver)
            if driver.is_tokenized:  # an engine without threads tokenizes at once
                self.take_prompt(driver, now)
        n_open = self._ledger.n_slots - len(self._rows()) + len(ending)
        if self._queue and (n_wanted := n_open + self._state.n_ahead):
            self._tokenize_prompts(n_wanted, ending, now)

    def _tokenize_prompts(
        self, n_wanted: int, ending: Collection[SequenceDriver], now: float
    ) -> None:
        """Tokenize the first prompts, and prompts that may pass them.

        Sequences with refused prompts end. They, and prompts that take long to tokenize, do not count.
        """
        refused: list[tuple[SequenceDriver, CBatchError]] = []
        slow: list[SequenceDriver] = []
        n_ready, n_passed = 0, N_LOOK - 1 if self._ledger.is_overcommitted else 0
        for driver in self._queue.candidates(self._ledger.holders, ending):
            if not driver.is_tokenized and self._takes_long(driver):
                slow.append(driver)
            else:
                self._tokenize(driver)
                n_ready += driver.error is None
                has_key = driver.request.options.cache_key is not None
                n_passed = min(n_passed + has_key, N_LOOK - 1)
                if driver.error is not None:
                    refused.append((driver, driver.error))
            if n_ready == n_wanted + n_passed or N_REFUSED_MAX in (len(refused), len(slow)):
                break
        for driver, error in refused:
            self.fail(driver, error, now)
        for driver in slow:
            self._hold(driver, Wait.PROMPT)
            self._untokenized.add(driver)

    # ---- results from outside ----

    def _waits_to_compile(self, driver: SequenceDriver) -> bool:
        if not self._builds.wait(driver):
            return False
        driver.waits_for = Wait.COMPILE
        return True

    def is_wanted(self, want: ToCompile) -> bool:
        """Whether a sequence still waits for `want`. From any thread."""
        return self._builds.is_wanted(want)

    def take_want(self) -> Want | None:
        """Return the next want of a sequence that was not returned before, or None."""
        return self._wants.popleft() if self._wants else None

    def resolve(self, want: Want, found: object, now: float) -> list[tuple[SequenceDriver, int]]:
        """Give a result to the sequences that wait for it.

        Args:
            want: what they wait for.
            found: the compiled grammar, or a `GrammarError`; for a file to read or write its `CacheEntry`, or a
                `CacheError`; None if nothing was compiled or read because no sequence waited any more.
            now: the time of the result.

        Returns:
            The sequences for which the backend must load cells of the file, with a key for each. A negative key is that
            of a checkpoint, which other sequences may use too.
        """
        if isinstance(want, ToStore):
            self._end_storing(want.driver, found)
        elif isinstance(want, CacheRead):
            given = self._reads.resolve(want, found)
            for driver, what in given.items():
                if isinstance(what, CacheError):
                    self.refuse_cells(driver, what, now)
                if driver.error is None:
                    self._release(driver)
            loads = [(driver, what) for driver, what in given.items() if isinstance(what, int)]
            return loads + [load for driver, _ in loads[:1] for load in self._adopt(driver)]
        elif found is None:
            self._builds.pass_over(want)
        elif isinstance(found, GrammarError):
            for driver in self._builds.resolve(want, None):
                self.fail(driver, GrammarError(found.kind, found.reason), now)
        else:
            self._go_on_compiled(self._builds.resolve(want, found))
        return []

    def _adopt(self, driver: SequenceDriver) -> list[tuple[SequenceDriver, int]]:
        """Make a checkpoint of cells from a file with which a sequence starts; return its key if it is a new one."""
        kept = self._cells.prefixes.adopt(driver, driver.n_computed)
        if kept is None:
            return []
        self._cells.forgets += kept.gone
        return [(driver, kept.key)] if kept.is_new else []

    def drop_checkpoint(self, key: int) -> None:
        """Record that the backend has no cells for a checkpoint's key."""
        self._cells.prefixes.drop([key])

    def _go_on_compiled(self, drivers: Sequence[SequenceDriver]) -> None:
        """Queue sequences for which something was compiled, unless they wait for more."""
        ready = [d for d in drivers if not self._waits_to_compile(d)]
        for driver in ready:
            driver.waits_for = None
        self._queue.add([d for d in ready if d.status is Status.WAITING])  # the others are paused

    def _end_storing(self, driver: SequenceDriver, found: object) -> None:
        """End a sequence whose cells were written to disk, or were not; `found` says why."""
        if isinstance(found, CacheEntry):
            self._reads.learn(CacheRef.of(driver.request), found)
        else:
            driver.warnings.append(str(found))
        del self._storing[driver.number]
        driver.undergo(Event.FINISH)
        self._ended.append(driver)

    def refuse_cells(self, driver: SequenceDriver, error: CacheError, now: float) -> None:
        """Let a sequence continue without the cells of its file, or end it if it requires them."""
        driver.proceed_uncached(error)
        if driver.error is None:
            self._forget(driver)
        else:
            self.fail(driver, driver.error, now)

    def _hold(self, driver: SequenceDriver, reason: Wait) -> None:
        """Take a waiting sequence out of the queue until `_release`, so that later ones pass it."""
        self._queue.remove(driver)
        driver.waits_for = reason

    def _release(self, driver: SequenceDriver) -> None:
        """Put a held sequence back among the first of the queue."""
        driver.waits_for = None
        if driver.status is Status.WAITING:
            self._queue.put_back(driver)

    # ---- pausing and ending ----

    def pause(self, id: str) -> bool:
        """Pause a request; False if it is not in flight or is paused already.

        The request keeps its slot and cells until others need them.
        """
        driver = self.in_flight.get(id)
        if driver is None or driver.status is Status.PAUSED:
            return False
        if driver.status is Status.WAITING and driver.waits_for is None:
            self._queue.remove(driver)
        driver.undergo(Event.PAUSE)
        self._running = None
        return True

    def resume(self, id: str, n_tokens: int | None = None) -> bool:
        """Resume a paused request; False if it is not in flight or not paused.

        The request pauses again after `n_tokens` tokens; with None, as its options say.
        """
        driver = self.in_flight.get(id)
        if driver is None or driver.status is not Status.PAUSED:
            return False
        driver.go_on_for(driver.request.options.pause_every if n_tokens is None else n_tokens)
        if driver.slot is None:
            driver.undergo(Event.REQUEUE)
            if driver.waits_for is None:
                self._queue.put_back(driver)
        else:
            driver.undergo(Event.RESUME)
            self._running = None
        return True

    def cancel(self, id: str, now: float) -> bool:
        """Cancel a request by id; False if it is not in flight."""
        driver = self.in_flight.get(id)
        if driver is None:
            return False
        self._withdraw(driver)
        driver.cancel(now)
        self.retire(driver)
        return True

    def fail(self, driver: SequenceDriver, error: CBatchError, now: float) -> None:
        """End a request in flight with an error."""
        self._withdraw(driver)
        driver.finish("error", now, error)
        self.retire(driver)

    def take_out(self, id: str) -> None:
        """Forget a sequence that never had a slot, as if it had not been submitted."""
        driver = self.in_flight.pop(id)
        self._withdraw(driver)
        driver.cancel(driver.clock.submitted_s)  # so that the deadlines forget it
        self._forget(driver)
        self._deadlines.note_end()

    def retire(self, driver: SequenceDriver, *, has_cells: bool = True) -> None:
        """Remove a finished sequence; with `has_cells`, its slot retains the useful ones.

        A sequence whose cells are written to disk ends in `resolve`.
        """
        del self.in_flight[driver.request.id]
        if driver.status is Status.STORING:
            self._store(driver, has_cells=has_cells)
        else:
            if driver.request.options.save_cache and driver.error is None:
                driver.warnings.append("the cells were not saved: it had no slot when it ended")
            self._ended.append(driver)
        self._forget(driver)
        self._deadlines.note_end()
        self._state.demand.learn(driver)
        if driver.slot is not None:
            self._running = None
            self._ledger.free(driver.slot)
            self._cells.leave(driver, driver.slot)
            if not has_cells:
                self._cells.clear(driver.slot)

    def take_ended(self) -> list[SequenceDriver]:
        """Return the sequences that ended since the last call, in order."""
        ended, self._ended = self._ended, []
        return ended

    def _store(self, driver: SequenceDriver, *, has_cells: bool) -> None:
        """Order a copy of an ended sequence's cells for the disk; if none are left, use a checkpoint."""
        slot, n_cells = driver.slot, 0
        if slot is not None and has_cells and slot not in self._cells.trims:
            n_cells = self._cells.n_known(driver, slot) if self._saved.can_save else 0
        checkpoint = self._cells.prefixes.checkpoint_in(driver, driver.n_prompt - 1)
        want = ToStore(driver, driver.number, n_cells, checkpoint)
        if checkpoint is not None and not n_cells:
            want = ToStore(driver, *checkpoint)
        self._storing[driver.number] = want
        if slot is not None and n_cells:
            self._cells.saves.append((slot, driver.number))
        elif want.n_cells:
            self._wants.append(want)
        else:
            self._end_storing(driver, "the cells were not saved: none were left when it ended")

    def _order_writes(self, lost: Collection[int]) -> None:
        """Order that cells copied by a run be written to disk, except for lost keys."""
        for _, key in self._cells.saves:
            want = self._storing[key]
            if key in lost:
                why = "the cells were not saved: they could not be copied out"
                self._end_storing(want.driver, why)
            else:
                self._wants.append(want)

    def _forget(self, driver: SequenceDriver) -> None:
        """Drop a sequence's saved cells, if it has any."""
        key = driver.saved_key
        if key is not None:
            self._saved.give_up([key])
            self._cells.forgets.append(key)

    def _withdraw(self, driver: SequenceDriver) -> None:
        """Remove a sequence without a slot from the queue or wherever it waits."""
        if driver.waits_for is not None:
            self._waiters[driver.waits_for].drop(driver)
        elif driver.status is Status.WAITING:
            self._queue.remove(driver)

    # ---- for the scheduler ----

    def _rows(self) -> list[SequenceDriver]:
        """Return the running sequences, the oldest first."""
        if self._running is None:
            running = [
                d for d in self._ledger.holders if d is not None and d.status is Status.RUNNING
            ]
            self._running = sorted(running, key=BY_AGE)
        return self._running

    def slot_plan(self) -> SlotPlan:
        """Return a slot plan without changes."""
        return SlotPlan(self._state, self._rows())

    def commit(
        self, slot_plan: SlotPlan, step: StepPlan, result: StepResult, made_s: float, now: float
    ) -> None:
        """Commit a plan's changes of slots and cells after the run: its view becomes the state.

        Args:
            slot_plan: the changes of slots.
            step: the step that was run.
            result: the result. If a load failed, nothing was copied, and requests that require the cells of their file
                end.
            made_s: when the plan was made, which is the time of its admissions.
            now: when the run ended.
        """
        lost = result.lost
        self._order_writes(lost)
        if slot_plan.has_view:
            self._state.cells = self._cells = slot_plan.cells
            self._ledger = self._cells.ledger
            self._cells.prefixes.settle()
            self._running = None
        self._cells.note_done()
        if slot_plan.marks or result.saved_bytes or lost:
            self._commit_checkpoints(slot_plan, result)
        self._commit_waits(slot_plan)
        for leave in slot_plan.leaves:
            self._commit_leave(leave, lost)
        empty: set[Slot] = set()
        if lost and (empty := {slot for slot, key, _ in step.loads if key in lost}):
            empty |= {slot for _, slot, _ in step.copies}
        for driver, place in slot_plan.placed.items():
            if driver.slot is None:
                has_cells = place.slot not in empty
                self._commit_admission(driver, place, made_s, now, has_cells=has_cells)
            else:
                self._commit_move(driver, place.slot, lost)

    def _commit_waits(self, slot_plan: SlotPlan) -> None:
        for driver, n_more in slot_plan.overtaken.items():
            driver.n_overtaken += n_more
        for driver, (reason, found) in slot_plan.holds.items():
            self._hold(driver, reason)
            if reason is Wait.CACHE:
                self._reads.add(driver)
            elif found.leader is not None:
                self._followers.add(driver, found.leader, found.n_leader_cells)

    def _commit_checkpoints(self, slot_plan: SlotPlan, result: StepResult) -> None:
        for driver, marks in slot_plan.marks.items():
            driver.marks = marks
        prefixes = self._cells.prefixes
        prefixes.checkpoints.learn(result.saved_bytes)
        prefixes.drop(result.lost)

    def _commit_leave(self, leave: Leave, lost: Collection[int]) -> None:
        driver = leave.driver
        if leave.is_saved and driver.number not in lost:
            self._saved.add(driver)
        else:
            driver.n_computed = 0
        driver.slot = None
        if leave.reason == "parked":
            return
        driver.undergo(Event.LOSE_SLOT)
        if leave.reason == "turn":
            self._queue.add([driver])
        else:
            driver.n_preempted += 1
            self._state.demand.raise_ratio()
            self._queue.put_back(driver)

    def _commit_admission(
        self, driver: SequenceDriver, place: Place, made_s: float, now: float, *, has_cells: bool
    ) -> None:
        """Give a sequence its slot, and its cells if they were loaded or copied."""
        problem = self._reads.why_useless(driver)
        self._queue.remove(driver)
        driver.admit(place.slot, made_s)
        if problem is not None:
            driver.is_done_with_disk = True
            self.refuse_cells(driver, problem, now)
        key = driver.saved_key
        is_from_disk = key is not None and self._saved.take(key)
        if has_cells:
            driver.reuse(place.n_cells)
            return
        self.keep_cells(driver, 0)
        if is_from_disk:
            file = CacheRef.of(driver.request).key
            self.refuse_cells(driver, CacheError(file, "llama.cpp cannot take these cells"), now)

    def _commit_move(self, driver: SequenceDriver, slot: Slot, lost: Collection[int]) -> None:
        source, driver.slot = driver.slot, slot
        if not self._ledger.memory.can_copy:  # its cells were saved and loaded again
            if driver.number in lost:
                self.keep_cells(driver, 0)
        elif source is not None and not self._cells.prefixes.can_retain(driver):
            self._cells.clear(source)

    def record_step(
        self,
        cells: Iterable[tuple[Slot, int]],
        finished: Iterable[SequenceDriver],
        *,
        has_paused: bool,
        has_cells: bool,
    ) -> None:
        """Record the computed cells by slot, and the ended sequences; `has_cells` as in `retire`."""
        self._ledger.add_all(cells)
        if has_paused:
            self._running = None
        for driver in finished:
            self.retire(driver, has_cells=has_cells)

    def shift(self, driver: SequenceDriver) -> None:
        """Move the full window of a running sequence; its cells are removed with the next plan."""
        if driver.slot is not None:
            self._cells.shift(driver, driver.slot)

    def keep_cells(self, driver: SequenceDriver, n_cells: int) -> None:
        """Keep only the first `n_cells` cells of a running sequence; the other tokens become pending."""
        if driver.slot is None:
            return
        driver.n_computed = n_cells
        if n_cells:
            self._cells.settle(driver.slot, n_cells)
        else:
            self._cells.clear(driver.slot)
            self._cells.prefixes.record(driver.slot, driver)

    def lose_cells(self, broken_off: StepPlan | None = None) -> None:
        """Record that all cells of slots are lost; the next plan empties the slots and binds the sequences again.

        If a run was aborted, the cells that its plan saves or loads are lost, too.
        """
        if broken_off is not None:
            self._lose_saved(broken_off)
        for i, driver in enumerate(self._ledger.holders):
            if driver is None:
                self._cells.clear(Slot(i))
            else:
                self.keep_cells(driver, 0)
                self._cells.rebinds[Slot(i)] = None

    def _lose_saved(self, plan: StepPlan) -> None:
        loaded = [key for _, key, _ in plan.loads]
        saved = [key for _, key in plan.saves]
        self._order_writes([key for _, key in self._cells.saves])
        for driver in self._saved.give_up([*loaded, *saved]):
            driver.is_done_with_disk = False
        self._cells.prefixes.drop([*loaded, *saved, *plan.forgets])
        self._cells.saves = []
        self._cells.forgets += [*loaded, *saved]
