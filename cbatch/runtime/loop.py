"""The owner thread, the only one that uses the backend: it does commands and steps, and delivers output."""

from __future__ import annotations

import logging
import os
import threading
import time
from concurrent.futures import CancelledError
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from cbatch.core.plan import StepPlan
from cbatch.errors import EngineClosedError, InsideStepError, words_of
from cbatch.options import DryBreakers, Grammar
from cbatch.runtime.cache_io import CacheIo
from cbatch.runtime.commands import Command, Commands, FairLock
from cbatch.runtime.compiler import Compiler
from cbatch.runtime.delivery import deliver
from cbatch.runtime.mailbox import refused
from cbatch.runtime.row_comparison import RowComparison, check_comparable, check_room, compare_rows
from cbatch.runtime.side_work import SideWork
from cbatch.runtime.step_record import StepRecord, record_of
from cbatch.support.interrupts import (
    HeldBack,
    Latch,
    Postponed,
    Sleepers,
    is_for_program,
    is_locked_here,
)
from cbatch.support.logs import HeldLogs, Log, is_handling
from cbatch.support.thread_start import started

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

    from cbatch.backend import Backend
    from cbatch.cache.store import CacheStore, NoStore
    from cbatch.core.driver import SequenceDriver
    from cbatch.core.plan import StepResult
    from cbatch.core.scheduler import ContinuousBatchScheduler, Plan
    from cbatch.runtime.in_flight import Route
    from cbatch.runtime.prompts import PromptLanes
    from cbatch.runtime.wants import SequenceWants
    from cbatch.stats import EngineStats

T = TypeVar("T")

_log = Log("cbatch")

_LONGEST_SLEEP_S = 3600.0
"""A wait of years is more than a lock can count; waking once an hour costs nothing."""

_REST_AFTER_S = 0.05
"""A backend that rests needs about a millisecond more for its next run: requests one after another do not pay that."""

_LONGEST_DOZE_S = 0.05
"""Without an owner thread, other threads may take a turn meanwhile and find work."""

_N_CALLS = 100
"""Calls, one in another, that a step has room for in the caller's thread: more than it needs."""


class Loop:
    """Drives a scheduler and its backend, in a thread of its own or by `pump`.

    Commands wait in a queue and are done between two runs; an urgent one has a run in flight end after its current
    step. Commands that a callback or finalizer gives in the owner's thread during a step wait there, too, but no caller
    waits for them. Log records of the owner go to handlers after the step.
    """

    def __init__(
        self,
        backend: Backend,
        scheduler: ContinuousBatchScheduler,
        stats: EngineStats,
        clock: Callable[[], float],
        store: CacheStore | NoStore,
        prompts: PromptLanes,
        wants: SequenceWants,
        *,
        is_threaded: bool,
    ) -> None:
        self.routes: dict[str, Route] = {}
        """Where the output of each request in flight goes, by id; see `InFlight`."""
        self.recorder: Callable[[StepRecord], object] | None = None
        self.on_end: Callable[[EngineClosedError | None], object] | None = None
        """Called once at the end, before the requests in flight end; with the error that has ended the loop, if any."""
        self.on_admit: Callable[[Sequence[str]], object] | None = None
        """Called with the ids of sequences before the first step that computes something of them."""
        self.admit_late: Callable[[], object] = bool
        """Called before each plan, and when the loop ends: queues sequences that wait for room in the queue, some at a
        time; returns whether there are more for which there is room."""
        self.end_texts: Callable[[EngineClosedError | None], object] = bool
        """Called when the loop ends: ends texts that are to be embedded, by the error if there is one, and frees what
        computes them."""
        self.is_inside_texts: Callable[[], bool] = bool
        """Whether the caller's thread computes texts."""
        self.waiters = Sleepers()
        """Threads in `wait_for_change`: they look again after every plan."""
        self._backend, self._scheduler = backend, scheduler
        self._batcher = batcher = scheduler.batcher
        self._stats, self._clock = stats, clock
        self.deliver = partial(deliver, self.routes, batcher, stats)
        self._commands = Commands()
        post = self._resolve
        self._prompts, self._wants = prompts, wants
        prompts.begin(self._resolve_prompts, self._take_prompt)
        self._cache_io = CacheIo(
            store, backend, batcher, wants, clock, post, is_threaded=is_threaded
        )
        self._compiler = Compiler(backend, post, is_threaded=is_threaded)
        itl_s = scheduler.budget.itl_s
        self._side = SideWork(self._step_amid, self._is_watched, self.check_open, clock, itl_s)
        self._thread: threading.Thread | None = None
        self._ended = Latch()
        """Opened by the owner once the backend is freed."""
        self._pid = os.getpid()
        self._is_closed = False
        self._error: BaseException | None = None
        self._closing = threading.RLock()  # a handler of a signal may close while its thread does
        self._turns = FairLock()
        """Of an engine without a thread: the thread that holds it is the owner."""
        self._unapplied: Plan | None = None
        """The plan of a run in flight, or of one that was broken off."""

    # ---- the step ----

    def step(self) -> bool:
        """Do the commands that wait and one run; False where there was nothing to compute. Owner thread."""
        with HeldLogs():
            return self._step()

    def _step(self) -> bool:
        self._commands.do_all()
        start = self._clock()
        self._commands.do_due(start)
        has_late = self.admit_late()
        if not self._batcher.in_flight:
            self._check_books()
        self._scheduler.begin_step(start)
        self._order_wants()
        if self._batcher.n_ended:  # refused ones are told before the run
            self.deliver(())
        begun = self._clock()
        plan = self._scheduler.plan(start)
        if plan is None:
            self.waiters.wake()
            return self.deliver(()) or len(self._commands) > 0 or bool(has_late)
        built = self._clock()
        self._unapplied = plan
        if self.on_admit is not None and (
            new := [d for d in plan.slot_plan.placed if not d.has_run]
        ):
            self.on_admit([d.request.id for d in new])
        result = self._backend.run(plan.step)
        ran = self._clock()
        record = None
        if self.recorder is not None and plan.step.spans:
            n_cells = self._batcher.occupancy().n_cells
            record = record_of(plan, result, n_cells, (start, begun, built, ran))
        changed = self._scheduler.apply(plan, result, ran)
        self._unapplied = None
        self.waiters.wake()
        self._order_wants()
        applied = self._clock()
        self.deliver(changed)
        delivered = self._clock()
        self._count(result, built - start, ran - built, delivered - ran)
        self._side.earn(delivered - start)
        if record is not None:
            self._tell_recorder(record, applied - ran, delivered - applied)
        return True

    def _count(self, result: StepResult, plan_s: float, run_s: float, apply_s: float) -> None:
        stats = self._stats
        stats.decode_s += result.decode_s
        stats.sample_s += result.sample_s
        stats.n_threads = result.n_threads or stats.n_threads
        stats.plan_s += plan_s
        stats.run_s += run_s
        stats.apply_s += apply_s

    def _tell_recorder(self, record: StepRecord, apply_s: float, deliver_s: float) -> None:
        """Call the recorder; one that raises is called no more, and requests are not affected."""
        n_waiting = self._batcher.n_waiting
        try:
            if self.recorder is not None:
                self.recorder(
                    replace(record, n_waiting=n_waiting, apply_s=apply_s, deliver_s=deliver_s)
                )
        except BaseException as error:
            if is_for_program(error):
                raise
            self.recorder = None
            _log.fail(
                "the function given to record_steps raised an error and is not called any more"
            )

    def _order_wants(self) -> None:
        """Have compiled, read and written what sequences wait for."""
        while (want := self._wants.take()) is not None:
            if isinstance(want, Grammar | DryBreakers):
                is_wanted = partial(self._wants.is_wanted, want)
                self._compiler.compile(want, is_wanted, self._take_compiled)
            else:
                self._cache_io.order(want)

    def _take_compiled(self, want: Grammar | DryBreakers, found: object) -> None:
        self._wants.resolve(want, found, self._clock())

    # ---- from other threads ----

    @property
    def n_entering(self) -> int:
        """Waiting sequences that have a slot as soon as the run in flight is applied. From any thread."""
        plan = self._unapplied
        return 0 if plan is None else plan.slot_plan.n_entering

    @property
    def is_inside(self) -> bool:
        """Whether the caller is the owner's thread during a step, or a thread that the owner may wait for."""
        works = self._cache_io, self._compiler, self._prompts
        if any(work.is_current_thread for work in works) or self.is_inside_texts():
            return True
        if self._thread is None:
            return self._turns.is_mine
        return self._thread is threading.current_thread() or is_handling()

    @property
    def must_not_wait(self) -> bool:
        """Whether the owner, or another thread, may wait for the caller."""
        return self.is_inside or is_locked_here()

    @property
    def is_closed(self) -> bool:
        """Whether the loop is closed, or has failed. From any thread."""
        return self._is_closed

    def check_wait(self) -> None:
        """Raise an `InsideStepError` if the caller's thread would wait for itself."""
        if self.must_not_wait:
            raise InsideStepError

    def call(self, command: Callable[[], T], now: Callable[[], T] | None = None) -> T:
        """Do `command` between two runs and return its result. From any thread; waits. Raises as `check_open`.

        If the caller's thread must not wait, `command` is done later and the result is that of `now`, which changes
        nothing. Without `now`, an `InsideStepError` is raised and nothing is done.
        """
        self.check_open()
        if now is not None and self.must_not_wait:
            self.post(command)
            return now()
        self.check_wait()
        if self._thread is None:
            self._backend.interrupt()
            with self._turn():
                return command()
        asked = Command(command)
        self.post(asked)
        return asked.wait()

    def look(self, look: Callable[[], T]) -> T:
        """Return the result of `look` between two runs, or at once if the caller's thread must not wait.

        `look` must do no harm during a step. Raises as `check_open`.
        """
        if self.must_not_wait:
            self.check_open()
            return look()
        return self.call(look)

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Be the owner for a block, in an engine without a thread. Do commands posted before the block and in it."""
        with HeldLogs(), self._turns.held():
            self._commands.do_all()
            try:
                yield
            finally:
                self._commands.do_all()
                if self._is_closed and not self._ended.is_open:
                    self._end()

    def post(self, command: Callable[[], object], *, is_urgent: bool = True) -> None:
        """Have `command` done between two runs; an urgent one has a run in flight end after its current step.

        From any thread; does not wait. Raises as `check_open`.
        """
        self.check_open()
        self._commands.put(command)
        if self._thread is not None:
            if is_urgent:
                self.hurry()
            if self._is_closed and not self.is_inside:
                # the owner has ended meanwhile: no other thread will do the commands
                self._ended.wait()
                with self._closing:
                    self._commands.do_all()

    def _resolve(self, command: Callable[[], object]) -> None:
        """Have what was compiled, read or written taken soon. From the threads of these works; also once closed."""
        self._commands.put(command)
        self.hurry()

    def _resolve_prompts(self, command: Callable[[], object], *, is_refused: bool) -> None:
        """Have prompts taken between two runs; interrupt the run if one is refused, or a slot is free."""
        self._commands.put(command)
        if is_refused or self._batcher.occupancy().n_open_slots > self.n_entering:
            self.hurry()

    def _take_prompt(self, driver: SequenceDriver) -> None:
        self._wants.take_prompt(driver, self._clock())

    def hurry(self) -> None:
        """End a run in flight after its current step, and pause work beside steps. From any thread."""
        self._backend.interrupt()
        self._side.hurry()

    def do_beside(
        self, work: Callable[[Callable[[], float]], T], hurry: Callable[[], object]
    ) -> tuple[T, float]:
        """Have work done by the owner thread between steps; see `SideWork.do`. From other threads; waits."""

        def wake(is_urgent: bool) -> None:
            self.post(bool, is_urgent=False)  # no step is due for it
            if is_urgent:
                self._backend.interrupt()

        self.check_open()
        return self._side.do(work, hurry, wake)

    def _is_watched(self) -> bool:
        """Whether a reader waits for the next token of a row."""
        return any(driver.reply.is_watched for _, driver in self._batcher.decoding())

    def call_at(self, when_s: float, action: Callable[[], object]) -> None:
        """Have `action` done by the owner when its clock says `when_s`. From any thread; does not wait."""
        self.post(partial(self._commands.set_timer, when_s, action), is_urgent=False)

    def wait_for_change(self, is_ready: Callable[[], object], until_s: float) -> None:
        """Wait until something is ready, the loop is closed, or its clock says `until_s`; without a thread, do a step.

        May return earlier.
        """
        if self._thread is None:
            self.pump()
            return
        timeout = min(max(0.0, until_s - self._clock()), _LONGEST_SLEEP_S)
        self.waiters.wait_for(lambda: self._is_closed or is_ready(), timeout)

    def _check_books(self) -> None:
        """Check the counts of slots and cells while nothing is in flight; if they are wrong, empty all slots."""
        if problem := self._batcher.imbalance():
            _log.write(logging.ERROR, "internal error, all slots are emptied: %s", problem)
            self._batcher.start_anew()

    def compiled(self, want: Grammar | DryBreakers) -> object:
        """Compile something; return the result or the error. From any thread; waits. Raises as `check_open`."""
        found = self.call(lambda: self._compiler.ask(want))
        try:
            return found.result()
        except CancelledError:
            raise EngineClosedError("the engine is closed") from self._error

    def check_open(self) -> None:
        """Raise an `EngineClosedError` where the engine is closed, has failed, or belongs to the parent process."""
        if os.getpid() != self._pid:
            raise EngineClosedError(
                "this engine belongs to the parent process: load another one after the fork"
            )
        if self._is_closed:
            raise EngineClosedError("the engine is closed") from self._error

    # ---- the owner ----

    def start(self) -> None:
        """Start the owner thread. Raises a NoThreadError."""
        with HeldBack():
            self._thread = started(self._run, "cbatch")

    def _run(self) -> None:
        try:
            while not self._is_closed:
                if self._side.is_due:
                    self._side.do_next()
                elif not (self.step() or self._is_closed or self._side.begin_idle()):
                    self._await_command()
        except BaseException as error:
            self._error, self._is_closed = error, True
        self._end()

    def _step_amid(self) -> bool:
        """Do a step amid work beside steps; one that fails ends the loop, and the work by the error of that."""
        try:
            return self.step()
        except BaseException as error:
            self._error, self._is_closed = error, True
            raise self._failure(error) from error

    def _await_command(self) -> None:
        """Wait for a command and do it, or until a deadline or a timer; the backend rests after a while."""
        timeout = self._until_next()
        if timeout is None or timeout > _REST_AFTER_S:
            if self._commands.wait(_REST_AFTER_S):
                return
            self._backend.rest()
            timeout = self._until_next()
        self._commands.wait(timeout)

    def _until_next(self) -> float | None:
        """Return the seconds until the next deadline or timer, or None."""
        times = (self._batcher.next_deadline_s, self._commands.next_s)
        next_s = min((t for t in times if t is not None), default=None)
        return None if next_s is None else min(max(0.0, next_s - self._clock()), _LONGEST_SLEEP_S)

    def pump(self) -> bool:
        """Do one step in an engine without a thread, in the caller's; see `step`. A step that fails ends the engine.

        Ctrl-C during the step is raised after it, and the requests go on with the next step.
        """
        self.check_open()
        self.check_wait()
        _check_depth(_N_CALLS)
        with self._turn():
            self.check_open()
            try:
                has_worked = self.step() or len(self._commands) > 0
            except Exception as error:
                self._error, self._is_closed = error, True
                raise self._failure(error) from error
            except BaseException:  # such as `SystemExit` of what is called in a step
                self._give_up_run()
                raise
        return has_worked or (not self._is_closed and self._has_dozed())

    def _has_dozed(self) -> bool:
        """Wait a little where a deadline or a timer will come, in an engine without a thread; else return False."""
        timeout = self._until_next()
        if timeout is None:
            self._backend.rest()
            return False
        time.sleep(min(timeout, _LONGEST_DOZE_S))
        return True

    def _give_up_run(self) -> None:
        """After a run that was broken off, have the next plan empty every slot and bind the running sequences anew."""
        if self._unapplied is not None:
            self._batcher.lose_cells(self._unapplied.step)
            self._unapplied = None

    def enqueue(self, drivers: Sequence[SequenceDriver]) -> None:
        """Queue sequences whose routes are set. Owner thread."""
        self._stats.n_submitted += len(drivers)
        for driver in drivers:
            if route := self.routes.get(driver.request.id):
                driver.reply.reader = route.target
        self._batcher.submit(drivers)
        if self._is_closed:
            self._end_requests()

    def compare_rows(self, ids: Collection[str] | None) -> list[RowComparison]:
        """Compare the next rows of sequences, of all where `ids` is None; see `Engine.compare_rows`. Owner thread.

        Where computing fails, the sequences go on from their tokens.
        """
        check_comparable(self._backend.memory)
        suspects = self._scheduler.bisection.suspects()
        rows = [row for row in self._batcher.decoding() if row[1] not in suspects]
        if ids is not None:
            rows = [row for row in rows if row[1].request.id in ids]
        check_room(self._backend.memory, self._batcher.occupancy().n_cells, len(rows))
        try:
            return compare_rows(self._backend, rows, self._scheduler.binding)
        except BaseException:
            self._batcher.lose_cells()
            raise

    def take_out(self, ids: Iterable[str]) -> None:
        """Take out sequences that never had a slot, as if they had not been submitted. Owner thread."""
        for id in ids:
            self._stats.n_submitted -= 1
            self._batcher.take_out(id)

    # ---- the end ----

    def close(self) -> None:
        """End every request, the thread and the backend. Twice is harmless; from any thread.

        Ctrl-C meanwhile is raised when that is done: the thread must not outlive its model, nor a process its threads.
        Where the caller must not wait, for example if the engine's last reference dies during a step, all of this is
        done after the step.
        """
        if os.getpid() != self._pid:
            return
        if self.is_inside or (self._thread is not None and self.must_not_wait):
            self._commands.put(self._mark_closed)
            self.hurry()
            return
        with Postponed(), self._closing:
            if self._thread is not None:
                self._end_thread(self._thread)
            elif not self._is_closed:
                self._backend.interrupt()
                with self._turn():
                    self._is_closed = True

    def _end_thread(self, thread: threading.Thread) -> None:
        """Have the thread end and free the backend; return when it has. Signals are to be postponed meanwhile."""
        if not self._ended.is_open:
            self._commands.put(self._mark_closed)
            self.hurry()
        self._ended.wait()
        thread.join()

    def wait_for_end(self) -> None:
        """Wait, after closing, until the owner's thread has ended every request, unless the caller must not wait."""
        if self._thread is not None and not self.must_not_wait:
            self._ended.wait()

    def _mark_closed(self) -> None:
        self._is_closed = True

    def _end(self) -> None:
        """End every request, then free the backend. Owner thread, once."""
        try:
            with HeldLogs():
                self._end_all()
        finally:
            self._ended.open()

    def _end_all(self) -> None:
        self._commands.do_all()
        self._give_up_run()  # slots may hold anything: their cells must not be saved
        if self.on_end is not None:
            self.on_end(None if self._error is None else self._failure(self._error))
        self.admit_late()
        self._side.close()
        self.end_texts(None if self._error is None else self._failure(self._error))
        self._end_requests()
        self._save_last()
        self._compiler.close()
        self._prompts.close()
        self._order_wants()
        self._cache_io.close()
        self._commands.do_all()
        self.deliver(())
        self._backend.close()

    def _save_last(self) -> None:
        """Have the cells copied out that are to be stored of requests that have just ended."""
        step = StepPlan(())
        try:
            plan = self._scheduler.plan(self._clock())
            if plan is not None and plan.step.saves:
                step = plan.step
                self._scheduler.apply(plan, self._backend.run(step), self._clock())
        except Exception:  # what ended the loop may fail again
            self._batcher.lose_cells(step)

    def _end_requests(self) -> None:
        self.waiters.wake()
        for id, driver in list(self._batcher.in_flight.items()):
            try:
                self._end_request(driver)
            except Exception as error:  # noqa: PERF203  # the sequence cannot end either
                if route := self.routes.pop(id, None):  # None if it was refused before
                    mailbox, i, _ = route
                    mailbox.deliver(*refused(id, i, self._failure(error)))
        self.deliver(())

    def _end_request(self, driver: SequenceDriver) -> None:
        batcher, now = self._batcher, self._clock()
        if driver.finish_reason is not None:  # it was not retired when an error struck
            batcher.retire(driver)
        elif self._error is None:
            batcher.cancel(driver.request.id, now)
        else:
            batcher.fail(driver, self._failure(self._error), now)

    def _failure(self, cause: BaseException) -> EngineClosedError:
        error = EngineClosedError(f"the engine stopped: {words_of(cause)}")
        error.__cause__ = cause
        return error


def _check_depth(n_calls: int) -> None:
    """Raise a `RecursionError` if `n_calls` more calls are too many, because one amid a step would end the engine."""
    if n_calls:
        _check_depth(n_calls - 1)
