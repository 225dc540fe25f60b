"""Requests in flight (held, queued, in slots, ended), and the slots and cells they have."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import count, islice
from typing import TYPE_CHECKING, Protocol

from cbatch.core.books import KvLedger, find_imbalance
from cbatch.core.cell_ops import SlotCells
from cbatch.core.driver import BY_AGE, Event, SequenceDriver, Status, Wait
from cbatch.core.plan import Slot, StepPlan, StepResult
from cbatch.core.prefix import PrefixCache
from cbatch.core.queue import BY_PROMPT, AdmissionQueue, Deadlines
from cbatch.core.saved_cells import SavedCells, ToStore
from cbatch.core.slots import KvDemandEstimator, Leave, Place, SlotPlan
from cbatch.core.span import ANYWHERE, PromptCuts

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

    from cbatch.engine_options import ScheduleOptions
    from cbatch.errors import CBatchError

N_ENDED_MAX = 1024
"""Most sequences without a slot that are cancelled, or end at their deadlines, before one plan, so that a step does not
wait for many thousands of results: some twenty milliseconds. Our choice: 50,000 end within a second."""


class Wants(Protocol):
    """Gets what sequences need from outside the scheduler. Called between plans, except where noted."""

    @property
    def n_ahead(self) -> int:
        """How many prompts of waiting sequences are tokenized before a slot is free."""

    @property
    def files(self) -> Files:
        """Cells on disk."""

    def serve(self, batcher: MultiRequestBatcher) -> None:
        """Get what the sequences of this batcher need, and call `go_on` with those that have it."""

    def lack_of(self, driver: SequenceDriver) -> Wait | None:
        """Start preparing what a sequence lacks; return what it must wait for before it is queued, or None."""

    def look_ahead(self, ending: Collection[SequenceDriver], now: float) -> None:
        """Tokenize the prompts that the next plan may need; `ending` sequences are about to leave their slots."""

    def store(self, want: ToStore) -> None:
        """Write cells that a run has copied out, then call `end_storing`."""


class Files(Protocol):
    """Cells on disk. Called between plans, except where noted."""

    def must_read(self, driver: SequenceDriver, n_found: int) -> bool:
        """Whether a sequence should wait for its file of cells, although `n_found` cells in memory can be reused.

        Called by plans; changes nothing.
        """

    def read(self, driver: SequenceDriver) -> None:
        """Read the file of a held sequence, then call `go_on`."""

    def enter(self, driver: SequenceDriver) -> None:
        """Note that a sequence gets a slot."""

    def lose(self, driver: SequenceDriver, now: float) -> None:
        """Note that the backend could not load the cells of a sequence's file."""


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
    """Waiting for a slot, or before that for the tokens or the grammar of their prompt."""
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
    """Holds the requests in flight; the only class that changes the state of slots and cells.

    Commands change the state at once: `submit`, `cancel`, `cancel_all`, `pause`, `resume`, `go_on` for sequences that
    have what they waited for, and `begin_step` for deadlines. A plan is made for this state and changes nothing; the
    backend executes it, and `commit` records what it did.
    """

    def __init__(
        self,
        ledger: KvLedger,
        wants: Wants,
        options: ScheduleOptions,
        cuts: PromptCuts = ANYWHERE,
    ) -> None:
        """Start with nothing in flight.

        Args:
            ledger: slots and cells, all of them free.
            wants: gets what sequences need from outside.
            cuts: where prompts may be cut.
        """
        self.in_flight: dict[str, SequenceDriver] = {}
        self.is_by_prompt = options.policy in BY_PROMPT
        """Whether the order of the queue depends on the tokens of prompts."""
        self.storing: dict[int, ToStore] = {}
        """Ended sequences whose cells are not on disk yet, by number."""
        self.wants = wants
        self._options, self._cuts = options, cuts
        self._open_books(ledger)
        self._numbers = count()
        self._ended: list[SequenceDriver] = []
        wants.serve(self)

    def _open_books(self, ledger: KvLedger) -> None:
        """Set up the state with all slots free. Commands and `commit` change it; a plan never does."""
        options = self._options
        prefixes = PrefixCache(
            ledger,
            cuts=self._cuts,
            is_on=options.share_prefixes,
            n_checkpoint_bytes=options.n_checkpoint_bytes,
        )
        self.cells = SlotCells(ledger, prefixes)
        self.saved = SavedCells(ledger.memory, options.swap_mib * 2**20)
        self.queue = AdmissionQueue(options)
        self.held: dict[Wait, dict[SequenceDriver, None]] = {reason: {} for reason in Wait}
        """Sequences outside the queue, by what they wait for."""
        self.demand = KvDemandEstimator(ledger, is_optimistic=options.admission != "reserve")
        self._deadlines = Deadlines()
        self._running: list[SequenceDriver] | None = None
        """The running sequences, the oldest first; None after a change, until computed again."""

    def imbalance(self) -> str:
        """Return what is wrong with the counts of slots and cells; "" if they balance. Call it between two runs."""
        return find_imbalance(self)

    def start_anew(self) -> None:
        """Forget all cells, also saved ones; the next plan empties the slots. No request may be in flight."""
        old = self.ledger
        self._order_writes([key for _, key in self.cells.saves])
        kept = [*self.saved.keys, *self.cells.prefixes.checkpoints.kept]
        self._open_books(KvLedger(old.n_slots, old.n_window, old.memory))
        for i in range(old.n_slots):
            self.cells.clear(Slot(i))
        self.cells.prefixes.drop(kept)  # so that none of these keys is used again
        self.cells.forgets += kept

    # ---- questions ----

    @property
    def ledger(self) -> KvLedger:
        """Slots and cells. A plan that changes them has a view, which replaces this object."""
        return self.cells.ledger

    @property
    def n_awaiting_cells(self) -> int:
        """Number of sequences that wait for a prefix or for cells from disk."""
        return len(self.held[Wait.LEADER]) + len(self.held[Wait.CACHE])

    @property
    def n_waiting(self) -> int:
        """Number of sequences that could take a slot. Callable from any thread."""
        return len(self.queue)

    @property
    def n_ended(self) -> int:
        """Number of ended requests that `take_ended` has not returned. Callable from any thread."""
        return len(self._ended)

    def occupancy(self) -> Occupancy:
        """Return the counts of sequences and cells. From any thread; `n_held` is only exact in the owner thread."""
        n_free, n_waiting = self.ledger.n_free_slots, self.n_waiting
        n_paused = sum(d is not None and d.status is Status.PAUSED for d in self.ledger.holders)
        n_used_slots = self.ledger.n_slots - n_free
        return Occupancy(
            n_waiting,
            n_held=len(self.in_flight) - n_used_slots - n_waiting,
            n_running=n_used_slots - n_paused,
            n_paused=n_paused,
            n_unserved=n_waiting + len(self.held[Wait.PROMPT]) + len(self.held[Wait.COMPILE]),
            n_open_slots=n_free + n_paused - self.n_awaiting_cells,
            n_storing=len(self.storing),
            n_ended=len(self._ended),
            n_cells=self.ledger.n_used,
            n_pool=self.ledger.n_pool,
            n_checkpoints=len(self.cells.prefixes.checkpoints),
            n_checkpoint_bytes=self.cells.prefixes.checkpoints.n_bytes,
        )

    def decoding(self) -> list[tuple[Slot, SequenceDriver]]:
        """Return the sequences whose next step computes one output token, including paused ones, by slot.

        Sequences with pending changes of cells or bindings are left out.
        """
        rows = [(Slot(i), d) for i, d in enumerate(self.ledger.holders) if d and d.is_decoding]
        return [(slot, driver) for slot, driver in rows if self.cells.is_settled(slot)]

    def residents(self) -> list[tuple[SequenceDriver | None, int]]:
        """Return the sequence of each slot, None for a free one, and its cells."""
        return [*zip(self.ledger.holders, self.ledger.n_cells, strict=False)]

    @property
    def next_deadline_s(self) -> float | None:
        """A time before which no deadline passes; None without deadlines. −∞ if sequences wait for their end."""
        return -math.inf if self.held[Wait.END] else self._deadlines.next_s()

    def is_storing(self, id: str) -> bool:
        """Whether a request has ended but its cells are still being written to disk."""
        return any(want.driver.request.id == id for want in [*self.storing.values()])

    def is_paused(self, id: str) -> bool:
        """Whether a request is in flight and paused. Callable from any thread."""
        driver = self.in_flight.get(id)
        return driver is not None and driver.status is Status.PAUSED

    def has_ended(self, id: str) -> bool:
        """Whether a request has ended and `take_ended` has not returned it. Callable from any thread."""
        return self.is_storing(id) or any(driver.request.id == id for driver in [*self._ended])

    # ---- coming ----

    def submit(self, drivers: Iterable[SequenceDriver]) -> None:
        """Queue new sequences, whose ids must not be in flight. Sequences with a refused prompt end at once."""
        ready: list[SequenceDriver] = []
        for driver in drivers:
            driver.number = next(self._numbers)
            self.in_flight[driver.request.id] = driver
            self._deadlines.add(driver)
            reason = self.wants.lack_of(driver)
            if driver.error is not None:
                driver.finish("error", driver.clock.submitted_s, driver.error)
                self.retire(driver)
            elif reason is None:
                ready.append(driver)
            else:
                self._note_wait(driver, reason)
        self.queue.add(ready)

    def begin_step(self, now: float, ending: Collection[SequenceDriver] = ()) -> None:
        """Handle what precedes a plan: deadlines, finished waits, and tokenizing.

        Requests past their deadline and with refused prompts end. Sequences whose leader has computed their prefix, or
        no longer runs, are queued again. `ending` sequences are about to leave their slots.
        """
        due = [*iter(lambda: self._deadlines.pop_due(now), None)]
        self._end_or_hold([d for d in due if d.waits_for is not Wait.END], now)
        for driver in [*islice(self.held[Wait.END], N_ENDED_MAX)]:
            self._end(driver, now)
        if followers := self.held[Wait.LEADER]:
            self.go_on([driver for driver in followers if driver.has_prefix])
        if self.queue or self.held[Wait.PROMPT]:
            self.wants.look_ahead(ending, now)

    def n_open(self, ending: Collection[SequenceDriver]) -> int:
        """Return how many slots run no sequence, or one of `ending`."""
        return self.ledger.n_slots - len(self._rows()) + len(ending)

    def candidates(self, ending: Collection[SequenceDriver]) -> Iterator[SequenceDriver]:
        """Yield the sequences that may get a slot; see `AdmissionQueue.candidates`."""
        return self.queue.candidates(self.ledger.holders, ending)

    # ---- waiting for more than a slot ----

    def hold(self, driver: SequenceDriver, reason: Wait) -> None:
        """Take a waiting sequence out of the queue until `go_on`, so that later ones can pass it."""
        self.queue.remove(driver)
        self._note_wait(driver, reason)

    def _note_wait(self, driver: SequenceDriver, reason: Wait) -> None:
        driver.waits_for = reason
        self.held[reason][driver] = None

    def go_on(self, drivers: Iterable[SequenceDriver]) -> None:
        """Queue held sequences that have what they waited for, unless they lack more.

        A sequence that waited for its leader or for cells from disk returns to the front of the queue.
        """
        new: list[SequenceDriver] = []
        for driver in drivers:
            if driver.waits_for is None:
                continue
            reason, lack = driver.waits_for, self.wants.lack_of(driver)
            del self.held[reason][driver]
            driver.waits_for = driver.leader = None
            if lack is not None:
                self._note_wait(driver, lack)
            elif driver.status is not Status.WAITING:
                continue  # a paused one is queued by `resume`
            elif reason in (Wait.LEADER, Wait.CACHE):
                self.queue.put_back(driver)
            else:
                new.append(driver)
        self.queue.add(new)

    def give_cells(self, driver: SequenceDriver, n_cells: int) -> int:
        """Add `n_cells` cells that a held sequence will load from disk at its start; return their key."""
        return self.saved.add_from_disk(driver, n_cells)

    def adopt(self, driver: SequenceDriver) -> int | None:
        """Make a checkpoint of the cells that a sequence loads from disk; return its key, None if it is not new."""
        kept = self.cells.prefixes.adopt(driver, driver.n_computed)
        if kept is None:
            return None
        self.cells.forgets += kept.gone
        return kept.key if kept.is_new else None

    def drop_checkpoint(self, key: int) -> None:
        """Record that the backend has no cells for a checkpoint's key."""
        self.cells.prefixes.drop([key])

    def forget_cells(self, driver: SequenceDriver) -> None:
        """Drop a sequence's saved cells, if it has any."""
        key = driver.saved_key
        if key is not None:
            self.saved.give_up([key])
            self.cells.forgets.append(key)

    def end_storing(self, driver: SequenceDriver) -> None:
        """End a sequence whose cells were written to disk, or cannot be."""
        del self.storing[driver.number]
        driver.undergo(Event.FINISH)
        self._ended.append(driver)

    # ---- pausing and ending ----

    def pause(self, id: str) -> bool:
        """Pause a request; False if it is not in flight or is paused already.

        The request keeps its slot and cells until others need them.
        """
        driver = self.in_flight.get(id)
        if driver is None or driver.status is Status.PAUSED:
            return False
        if self._is_queued(driver):
            self.queue.set_aside(driver)
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
            if driver.waits_for is not None:
                pass  # `go_on` queues it
            elif driver.kept_rank is None and not driver.has_run:
                self.queue.add([driver])  # it was paused before it was queued
            else:
                self.queue.put_back(driver)
        else:
            driver.undergo(Event.RESUME)
            self._running = None
        return True

    def run_on(self, id: str) -> None:
        """Let a request go on to its end, paused or not: it pauses no more, whatever its options say."""
        driver = self.in_flight.get(id)
        if driver is not None:
            self.resume(id)
            driver.go_on_for(None)

    def cancel(self, id: str, now: float) -> bool:
        """Cancel a request by id; False if it is not in flight."""
        driver = self.in_flight.get(id)
        if driver is None:
            return False
        self._withdraw(driver)
        driver.cancel(now)
        self.retire(driver)
        return True

    def cancel_all(self, ids: Iterable[str], now: float) -> list[str]:
        """Cancel requests by id; return the ids of those that are in flight and were not cancelled before.

        Of more than `N_ENDED_MAX`, those without a slot leave the queue at once and end before the next plans.
        """
        drivers = map(self.in_flight.get, dict.fromkeys(ids))
        found = [d for d in drivers if d is not None and d.waits_for is not Wait.END]
        self._end_or_hold(found, now)
        return [driver.request.id for driver in found]

    def _end_or_hold(self, drivers: Sequence[SequenceDriver], now: float) -> None:
        """End sequences that are cancelled or late; of many, those without a slot wait for their end."""
        if len(drivers) > N_ENDED_MAX:
            waiting = [d for d in drivers if d.slot is None]
            self.queue.remove_all([d for d in waiting if self._is_queued(d)])
            for driver in waiting:
                if driver.waits_for is not None:
                    del self.held[driver.waits_for][driver]
                self._note_wait(driver, Wait.END)
        for driver in drivers:
            if driver.waits_for is not Wait.END:
                self._end(driver, now)

    def _end(self, driver: SequenceDriver, now: float) -> None:
        self._withdraw(driver)
        if driver.request.deadline_s <= now:
            driver.expire(now)
        else:
            driver.cancel(now)
        self.retire(driver)

    def fail(self, driver: SequenceDriver, error: CBatchError, now: float) -> None:
        """End a request in flight with an error."""
        self._withdraw(driver)
        driver.finish("error", now, error)
        self.retire(driver)

    def take_out(self, id: str) -> None:
        """Forget a sequence that never had a slot, as if it had not been submitted."""
        driver = self.in_flight.pop(id)
        self._withdraw(driver)
        driver.cancel(driver.clock.submitted_s)  # `Deadlines` drops only ended sequences
        self.forget_cells(driver)
        self._deadlines.note_end()

    def retire(self, driver: SequenceDriver, *, has_cells: bool = True) -> None:
        """Remove a finished sequence; with `has_cells`, its slot retains the cells that others can reuse.

        A sequence whose cells are written to disk ends in `end_storing`.
        """
        del self.in_flight[driver.request.id]
        if driver.status is Status.STORING:
            self._store(driver, has_cells=has_cells)
        else:
            if driver.request.options.save_cache and driver.error is None:
                driver.warnings.append(
                    "the cells were not saved: the request had no slot when it ended"
                )
            self._ended.append(driver)
        self.forget_cells(driver)
        self._deadlines.note_end()
        self.demand.learn(driver)
        if driver.slot is not None:
            self._running = None
            self.ledger.free(driver.slot)
            self.cells.leave(driver, driver.slot)
            if not has_cells:
                self.cells.clear(driver.slot)

    def take_ended(self) -> list[SequenceDriver]:
        """Return the sequences that ended since the last call, in order."""
        ended, self._ended = self._ended, []
        return ended

    def _store(self, driver: SequenceDriver, *, has_cells: bool) -> None:
        """Plan a copy of an ended sequence's cells for the disk; if none are left, use a checkpoint."""
        slot, n_cells = driver.slot, 0
        if slot is not None and has_cells and slot not in self.cells.trims:
            n_cells = self.cells.n_known(driver, slot) if self.saved.can_save else 0
        checkpoint = self.cells.prefixes.checkpoint_in(driver, driver.n_prompt - 1)
        want = ToStore(driver, driver.number, n_cells, checkpoint)
        if checkpoint is not None and not n_cells:
            want = ToStore(driver, *checkpoint)
        self.storing[driver.number] = want
        if slot is not None and n_cells:
            self.cells.saves.append((slot, driver.number))
        elif want.n_cells:
            self.wants.store(want)
        else:
            driver.warnings.append(
                "the cells were not saved: the request had lost them when it ended"
            )
            self.end_storing(driver)

    def _order_writes(self, lost: Collection[int]) -> None:
        """Have the cells that a run copied written to disk, except those of lost keys."""
        for _, key in self.cells.saves:
            want = self.storing[key]
            if key in lost:
                why = "the cells were not saved: they could not be copied to host memory"
                want.driver.warnings.append(why)
                self.end_storing(want.driver)
            else:
                self.wants.store(want)

    def _withdraw(self, driver: SequenceDriver) -> None:
        """Remove a sequence without a slot from the queue or wherever it waits."""
        if driver.waits_for is not None:
            self.held[driver.waits_for].pop(driver, None)
        elif self._is_queued(driver):
            self.queue.remove(driver)

    def _is_queued(self, driver: SequenceDriver) -> bool:
        return driver.status is Status.WAITING and driver.waits_for is None

    # ---- for the scheduler ----

    def _rows(self) -> list[SequenceDriver]:
        """Return the running sequences, the oldest first."""
        if self._running is None:
            running = [
                d for d in self.ledger.holders if d is not None and d.status is Status.RUNNING
            ]
            self._running = sorted(running, key=BY_AGE)
        return self._running

    def slot_plan(self) -> SlotPlan:
        """Return a slot plan without changes."""
        return SlotPlan(self, self._rows())

    def commit(
        self, slot_plan: SlotPlan, step: StepPlan, result: StepResult, made_s: float, now: float
    ) -> None:
        """Commit a plan's changes of slots and cells after the run: its view becomes the state.

        Args:
            slot_plan: the changes of slots.
            made_s: when the plan was made, which is the time of its admissions.
            now: when the run ended.
        """
        lost = result.lost
        self._order_writes(lost)
        if slot_plan.has_view:
            self.cells = slot_plan.cells
            self.cells.prefixes.settle()
            self._running = None
        self.cells.note_done()
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
            self.hold(driver, reason)
            if reason is Wait.CACHE:
                self.wants.files.read(driver)
            elif found.leader is not None:
                driver.leader = found.leader, found.n_leader_cells

    def _commit_checkpoints(self, slot_plan: SlotPlan, result: StepResult) -> None:
        for driver, marks in slot_plan.marks.items():
            driver.marks = marks
        prefixes = self.cells.prefixes
        prefixes.checkpoints.learn(result.saved_bytes)
        prefixes.drop(result.lost)

    def _commit_leave(self, leave: Leave, lost: Collection[int]) -> None:
        driver = leave.driver
        if leave.is_full:
            driver.unshift()
        if leave.is_saved and driver.number not in lost:
            self.saved.add(driver)
        else:
            driver.keep(0)
        driver.slot = None
        if leave.reason == "parked":
            return
        driver.undergo(Event.LOSE_SLOT)
        if leave.reason == "turn":
            self.queue.add([driver])
        else:
            driver.n_preempted += 1
            self.demand.raise_ratio()
            self.queue.put_back(driver)

    def _commit_admission(
        self, driver: SequenceDriver, place: Place, made_s: float, now: float, *, has_cells: bool
    ) -> None:
        """Give a sequence its slot, and its cells if they were loaded or copied."""
        self.queue.remove(driver)
        self.wants.files.enter(driver)
        driver.admit(place.slot, made_s)
        key = driver.saved_key
        is_from_disk = key is not None and self.saved.take(key)
        if has_cells:
            driver.reuse(place.n_cells)
            return
        self.keep_cells(driver, 0)
        if is_from_disk:
            self.wants.files.lose(driver, now)

    def _commit_move(self, driver: SequenceDriver, slot: Slot, lost: Collection[int]) -> None:
        source, driver.slot = driver.slot, slot
        if not self.ledger.memory.can_copy:  # its cells were saved and loaded again
            if driver.number in lost:
                self.keep_cells(driver, 0)
        elif source is not None and not self.cells.prefixes.can_retain(driver):
            self.cells.clear(source)

    def record_step(
        self,
        cells: Iterable[tuple[Slot, int]],
        finished: Iterable[SequenceDriver],
        *,
        has_paused: bool,
        has_cells: bool,
    ) -> None:
        """Record the computed cells by slot, and the ended sequences; `has_cells` as in `retire`."""
        self.cells.ledger.add_all(cells)
        if has_paused:
            self._running = None
        for driver in finished:
            self.retire(driver, has_cells=has_cells)

    def shift_full_windows(self) -> None:
        """Move the full windows of running sequences; the next plan removes the cells of tokens that leave them."""
        for driver in self._rows():
            if driver.window is not None and driver.is_full and driver.slot is not None:
                self.cells.shift(driver, driver.slot)

    def keep_cells(self, driver: SequenceDriver, n_cells: int) -> None:
        """Keep only the first `n_cells` cells of a running sequence; the other tokens become pending."""
        if driver.slot is None:
            return
        n_cells = driver.keep(n_cells)
        if driver.window is not None:
            self.cells.rebinds[driver.slot] = None  # tokens that the window removed may be back
        if n_cells:
            self.cells.settle(driver.slot, n_cells)
        else:
            self.cells.clear(driver.slot)
            self.cells.prefixes.record(driver.slot, driver)

    def lose_cells(self, broken_off: StepPlan | None = None) -> None:
        """Record that all cells of slots are lost; the next plan empties the slots and binds the sequences again.

        If a run was aborted, the cells that its plan saves or loads are lost, too.
        """
        if broken_off is not None:
            self._lose_saved(broken_off)
        for i, driver in enumerate(self.ledger.holders):
            if driver is None:
                self.cells.clear(Slot(i))
            else:
                self.keep_cells(driver, 0)
                self.cells.rebinds[Slot(i)] = None

    def _lose_saved(self, plan: StepPlan) -> None:
        loaded = [key for _, key, _ in plan.loads]
        saved = [key for _, key in plan.saves]
        self._order_writes([key for _, key in self.cells.saves])
        for driver in self.saved.give_up([*loaded, *saved]):
            driver.is_done_with_disk = False
        self.cells.prefixes.drop([*loaded, *saved, *plan.forgets])
        self.cells.saves = []
        self.cells.forgets += [*loaded, *saved]
