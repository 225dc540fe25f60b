"""The one thread that touches the backend: commands in, steps, delivery out."""

from __future__ import annotations

import heapq
import math
import os
import threading
import time
from collections import deque
from concurrent.futures import CancelledError
from contextlib import contextmanager, suppress
from functools import partial
from itertools import count
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Generic, TypeVar

from cbatch.core.status import Status
from cbatch.errors import EngineClosedError, QueueFullError, words_of
from cbatch.interrupts import HeldBack, Latch, Postponed, Sleepers
from cbatch.logs import Log
from cbatch.runtime.choices import Choices
from cbatch.runtime.delivery import deliver
from cbatch.runtime.disk import Disk
from cbatch.runtime.mailbox import refused
from cbatch.runtime.records import UNSEEN, record_of, seen_in
from cbatch.runtime.routes import drop, find, ids_of, member_ids

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from cbatch.backend import Backend
    from cbatch.core.driver import SequenceDriver
    from cbatch.core.scheduler import ContinuousBatchScheduler
    from cbatch.core.stats import StepRecord
    from cbatch.options import Breakers, Grammar
    from cbatch.runtime.cache_io import CacheIo, Post
    from cbatch.runtime.compiler import Compiler
    from cbatch.runtime.mailbox import Mailbox
    from cbatch.runtime.routes import Route

    MakeCacheIo = Callable[[Post], CacheIo]
    MakeCompiler = Callable[[Post], Compiler]

T = TypeVar("T")

_log = Log("cbatch")

_LONGEST_SLEEP_S = 3600.0
"""A wait of years is more than a lock can count; waking once an hour costs nothing."""

_LONGEST_DOZE_S = 0.05
"""Without a thread, others may take a turn meanwhile and find work."""


class Loop:
    """Drives a scheduler and its backend, in a thread of its own or by `step`.

    Commands wait in a queue and are done between two runs; a run in flight is asked to end after its current step.
    `routes` tells where a request's output goes; its keys are the ids in flight.
    """

    def __init__(
        self,
        backend: Backend,
        scheduler: ContinuousBatchScheduler,
        clock: Callable[[], float],
        keeper: MakeCacheIo | None = None,
        compiler: MakeCompiler | None = None,
    ) -> None:
        self.routes: dict[str, Route] = {}
        self.recorder: Callable[[StepRecord], object] | None = None
        self.on_end: Callable[[EngineClosedError | None], object] | None = None
        """Called once when it ends, before the requests in flight are; with the error where one has ended it."""
        self._backend, self._scheduler, self._clock = backend, scheduler, clock
        self._deliver = partial(deliver, self.routes, scheduler)
        self._commands: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self._disk = Disk(
            backend, scheduler.batcher, keeper(self._commands.put) if keeper else None
        )
        self._compiler = compiler(self._commands.put) if compiler else None
        self._thread: threading.Thread | None = None
        self._ended = Latch()
        """Opened by the thread when it has freed the backend."""
        self._pid = os.getpid()
        self._is_closed = False
        self._error: BaseException | None = None
        self._closing = threading.RLock()  # a handler of a signal may close while its thread does
        # of an engine without a thread; two locks, so that a loop over `pump` lets others in
        self._door, self._room = threading.Lock(), threading.Lock()
        self._owner: int | None = None
        self._is_interrupted = False
        self._timers: list[tuple[float, int, Callable[[], object]]] = []
        self._n_timers = count()
        self._wanting_room = Sleepers()
        self._outside: dict[str, SequenceDriver] = {}
        """By id, those that wait for room in the queue."""

    def start(self) -> None:
        """Start the owner thread."""
        self._thread = threading.Thread(target=self._run, name="cbatch", daemon=True)
        self._thread.start()

    def submit(self, drivers: Sequence[SequenceDriver]) -> None:
        """Queue sequences whose routes are set. From any thread; does not wait.

        Behind others that wait there is no hurry: a run in flight ends by itself before a slot is free.
        """
        self._post(lambda: self._submit(drivers), is_urgent=not self._scheduler.batcher.n_waiting)

    def submit_within(self, drivers: Sequence[SequenceDriver], n_limit: int) -> None:
        """Queue sequences, all or none, if no more than `n_limit` wait for a slot then; else as `submit`.

        Raises:
            QueueFullError: more would wait; nothing was queued.
        """

        def submit() -> None:
            n_waiting, n_room = self._queue_room(n_limit)
            if len(drivers) > n_room:
                raise QueueFullError(n_waiting, n_limit, len(drivers))
            self._submit(drivers)

        self.call(submit)

    def submit_as_room_comes(self, drivers: Sequence[SequenceDriver], n_limit: int) -> None:
        """Queue sequences, never so many that more than `n_limit` wait for a slot; return when the last one is in.

        One whose time is over meanwhile needs no room, nor one that is cancelled or paused: it comes in for that.
        """
        todo = deque(drivers)
        until_s = min((d.request.deadline_s for d in todo), default=math.inf)
        self._outside.update((d.request.id, d) for d in todo)

        def submit_some() -> int:
            nonlocal todo, until_s
            now, n_room = self._clock(), self._queue_room(n_limit)[1]
            some = self._first_outside(todo, n_room)
            if until_s <= now:
                some += [d for d in todo if d.request.deadline_s <= now]
                todo = deque(d for d in todo if d.request.deadline_s > now)
                until_s = min((d.request.deadline_s for d in todo), default=math.inf)
            self._take_in(some)
            return len(some)

        while todo:
            if not self.call(submit_some) and todo:
                self._wait_for_room(todo[0], n_limit, until_s)

    def _first_outside(self, todo: deque[SequenceDriver], n_max: int) -> list[SequenceDriver]:
        """Take the first of those that still wait for room out of `todo`, and all before them that do not."""
        found: list[SequenceDriver] = []
        while todo and (len(found) < n_max or not self._is_outside(todo[0])):
            driver = todo.popleft()
            if self._is_outside(driver):
                found.append(driver)
        return found

    def _is_outside(self, driver: SequenceDriver) -> bool:
        return self._outside.get(driver.request.id) is driver

    def _take_in(self, drivers: Iterable[SequenceDriver]) -> None:
        """Queue those of these that wait for room, whether there is any or not."""
        newcomers = [d for d in drivers if self._is_outside(d)]
        for driver in newcomers:
            del self._outside[driver.request.id]
        if newcomers:
            self._submit(newcomers)
            self._wanting_room.wake()  # the thread that brought them may wait for nothing else

    def _take_in_members(self, id: str) -> list[str]:
        """Return the ids of the sequences that answer a request, after those that wait for room have come in."""
        members = member_ids(self.routes, id)
        self._take_in([d for m in members if (d := self._outside.get(m))])
        return members

    def forget(self, routes: Mapping[str, Route]) -> None:
        """End what came in of requests whose submission was broken off, and give up the rest. From any thread."""

        def forget() -> None:
            lives = {id: route for id, route in routes.items() if self.routes.get(id) is route}
            for id in lives:
                self._outside.pop(id, None)
            in_flight = self._scheduler.batcher.in_flight
            self._cancel([id for id in lives if id in in_flight])
            storing = self._scheduler.batcher.storing
            drop(self.routes, {id: route for id, route in lives.items() if id not in storing})

        try:
            self._post(forget)
        except EngineClosedError:
            if self._thread is not None:
                self._ended.wait()  # for the thread ends what came in
            self._outside.clear()
            drop(self.routes, routes)

    def _wait_for_room(self, first: SequenceDriver, n_limit: int, until_s: float) -> None:
        """Wait until there is room for the first of some that wait, or it has come in without."""
        if self._thread is None:
            self.pump()
            return
        timeout = min(max(0.0, until_s - self._clock()), _LONGEST_SLEEP_S)
        self._wanting_room.wait_for(
            lambda: (
                self._is_closed or self._queue_room(n_limit)[1] > 0 or not self._is_outside(first)
            ),
            timeout,
        )

    def _queue_room(self, n_limit: int) -> tuple[int, int]:
        """Return how many wait and how many more may: those that a slot is there for do not count."""
        batcher = self._scheduler.batcher
        n_slots = batcher.ledger.n_free_slots + batcher.n_paused_in_slots - batcher.n_awaited
        n_waiting = batcher.n_waiting + len(batcher.compiles)
        return n_waiting, max(0, n_limit + n_slots - n_waiting)

    def call(self, command: Callable[[], T]) -> T:
        """Do `command` between two runs and return what it returns. From any thread; waits.

        Raises:
            EngineClosedError: the loop has ended.
        """
        if self._thread is threading.current_thread():
            self.check_open()
            return command()
        if self._thread is None:
            self.check_open()
            self._backend.interrupt()
            is_within = self._owner == threading.get_ident()
            with self._turn():
                if not is_within:  # what was asked for before comes first
                    self._do_commands()
                return command()
        asked = _Asked(command)
        self._post(asked.do)
        return asked.wait()

    def compiled(self, want: Grammar | Breakers) -> object:
        """Return what compiling something brings, as a request that wants it is told. From any thread; waits.

        Raises:
            EngineClosedError: the loop has ended.
        """
        compiler = self._compiler
        if compiler is None:
            return None
        found = self.call(lambda: compiler.ask(want))
        try:
            return found.result()
        except CancelledError:
            raise EngineClosedError("the engine is closed") from self._error

    def cancel(self, ids: Iterable[str]) -> int:
        """End requests by id; return how many were in flight. From any thread; waits for the current step.

        Who ends meanwhile is not touched, nor is a new request of the same id.
        """
        lives = {id: route for id in ids if (route := find(self.routes, id))}
        return self.call(
            lambda: self._cancel([id for id in lives if self.routes.get(id) is lives[id]])
        )

    def pause(self, id: str) -> bool:
        """Stop a request where it is; False where it is not in flight or paused already."""
        return self._order(id, self._pause)

    def resume(self, id: str) -> bool:
        """Let a paused request go on; False where it is not in flight or not paused."""
        return self._order(id, self._resume)

    def _pause(self, id: str) -> bool:
        return sum(map(self._scheduler.batcher.pause, self._take_in_members(id))) > 0

    def _resume(self, id: str) -> bool:
        return sum(map(self._scheduler.batcher.resume, member_ids(self.routes, id))) > 0

    def _order(self, id: str, do: Callable[[str], bool]) -> bool:
        life = find(self.routes, id)
        if life is None:
            return False

        return self.call(lambda: self.routes.get(id) is life and do(id))

    def call_at(self, when_s: float, action: Callable[[], object]) -> None:
        """Have `action` done by the owner when its clock says `when_s`. From any thread."""
        timer = (when_s, next(self._n_timers), action)
        self._post(lambda: heapq.heappush(self._timers, timer), is_urgent=False)

    def cancel_batch(self, mailbox: Mailbox) -> int:
        """End what a batch has in flight; else as `cancel`."""
        return self.call(lambda: self._cancel(ids_of(self.routes, mailbox)))

    def cancel_waiting_soon(self, mailbox: Mailbox) -> None:
        """End what a batch has in flight that never had a slot; else as `cancel_batch_soon`."""

        def cancel() -> None:
            self._cancel([id for id in ids_of(self.routes, mailbox) if not self._has_begun(id)])

        with suppress(EngineClosedError):
            self._post(cancel, is_urgent=False)

    def _has_begun(self, id: str) -> bool:
        """Whether a request, or a choice of it where it has several, ever had a slot."""
        target = self.routes[id].target
        return any(map(self._has_run, target.member_ids if isinstance(target, Choices) else [id]))

    def _has_run(self, id: str) -> bool:
        driver = self._scheduler.batcher.in_flight.get(id)
        return id not in self._outside and (driver is None or driver.has_run)

    def cancel_batch_soon(self, mailbox: Mailbox) -> None:
        """End what a batch has in flight before the next plan; does not wait; a closed engine has ended it already."""
        with suppress(EngineClosedError):
            self._post(lambda: self._cancel(ids_of(self.routes, mailbox)))

    def step(self) -> bool:
        """Do the commands that wait and one run; False where there was nothing to compute. Owner thread."""
        self._do_commands()
        start = self._clock()
        if self._timers:
            self._do_timers(start)
        if self._compiler is not None:
            self._compile(self._compiler)
        admitted_now = self._scheduler.admit(start)
        self._disk.fetch()
        admitted = self._clock()
        plan = self._scheduler.build(admitted_now)
        self._wanting_room.wake()
        if plan is None:
            self._disk.store()
            return self._deliver(()) or not self._commands.empty()
        built = self._clock()
        result = self._backend.run(plan)
        ran = self._clock()
        seen = UNSEEN if self.recorder is None else seen_in(plan, result, self._scheduler.batcher)
        changed = self._scheduler.apply(plan, result, ran)
        self._disk.store()
        applied = self._clock()
        self._deliver(changed)
        stats = self._scheduler.stats
        stats.decode_s += result.decode_s
        stats.sample_s += result.sample_s
        stats.plan_s += built - start
        stats.run_s += ran - built
        delivered = self._clock()
        stats.apply_s += delivered - ran
        if self.recorder is not None and plan.chunks:
            times = (start, admitted, built, ran, applied, delivered)
            self._report(record_of(plan, result, self._scheduler.batcher.n_waiting, times, seen))
        return True

    def _compile(self, compiler: Compiler) -> None:
        """Have compiled what somebody waits for."""
        for want in self._scheduler.batcher.compiles.take_orders():
            compiler.compile(want, self._take_compiled)

    def _take_compiled(self, want: Grammar | Breakers, found: object) -> None:
        self._scheduler.batcher.take_compiled(want, found, self._clock())

    def _report(self, record: StepRecord) -> None:
        """Hand a record out; a recorder that raises is called no more, for requests are not to suffer by it."""
        try:
            if self.recorder is not None:
                self.recorder(record)
        except Exception:
            self.recorder = None
            _log.fail("the function given to record_steps raised and is called no more")

    def pump(self) -> bool:
        """Do one step in an engine without a thread, in the thread of whoever waits; see `step`.

        Ctrl-C during the step is raised behind it, and the requests go on with the next step.

        Raises:
            EngineClosedError: the engine is closed, or this step failed and ended it.
        """
        self.check_open()
        with self._turn():
            self.check_open()
            try:
                self._restore()
                if self.step():
                    return True
            except Exception as error:
                self._error, self._is_closed = error, True
                self._end()
                raise self._failure(error) from error
            except BaseException:  # such as SystemExit from a function given to `record_steps`
                self._is_interrupted = True
                raise
        return self._has_dozed()

    def check_open(self) -> None:
        """Refuse work that nobody would do.

        Raises:
            EngineClosedError: the engine is closed, has failed, or belongs to the parent process.
        """
        if os.getpid() != self._pid:
            raise EngineClosedError(
                "this engine belongs to the parent process: load one after the fork"
            )
        if self._is_closed:
            raise EngineClosedError("the engine is closed") from self._error

    def close(self) -> None:
        """End every request, the thread and the backend. Twice is harmless; from any thread.

        Ctrl-C meanwhile is raised when that is done: the thread must not outlive its model, nor a process its threads.
        """
        if os.getpid() != self._pid:
            return
        if self._thread is threading.current_thread():  # the engine's last reference died here
            self._is_closed = True
            return
        if self._disk.is_current_thread and self._thread is not None:  # the same, in the keeper's
            self._commands.put(self._mark_closed)
            return
        with Postponed(), self._closing:
            if self._thread is not None:
                self._end_thread(self._thread)
            elif not self._is_closed:
                self._backend.interrupt()
                with self._turn():
                    self._is_closed = True
                    self._end()

    def _end_thread(self, thread: threading.Thread) -> None:
        """Have the thread end and free the backend; return when it has. Signals are to be postponed meanwhile."""
        if not self._ended.is_open:
            self._commands.put(self._mark_closed)
            self._backend.interrupt()
        self._ended.wait()
        thread.join()

    def _post(self, command: Callable[[], object], *, is_urgent: bool = True) -> None:
        self.check_open()
        self._commands.put(command)
        if self._thread is not None:
            if is_urgent:
                self._backend.interrupt()
            if self._is_closed:  # it ended in between: nobody else will look into the queue
                self._ended.wait()
                with self._closing:
                    self._do_commands()

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Let one thread at a time use an engine without a thread of its own; first come, first served.

        Handlers of signals are called when the turn is over, for they may use the engine and must not find a step
        half done.
        """
        if self._owner == threading.get_ident():
            yield
            return
        with HeldBack():
            with self._door:
                self._room.acquire()
            self._owner = threading.get_ident()
            try:
                yield
            finally:
                self._owner = None
                self._room.release()

    def _restore(self) -> None:
        """After an interrupted run: empty every slot and bind anew what runs, for that may not have been done."""
        if not self._is_interrupted:
            return
        self._backend.run(self._scheduler.start_over())
        self._is_interrupted = False

    def _run(self) -> None:
        try:
            while not self._is_closed:
                if not self.step() and not self._is_closed:
                    self._sleep()
        except BaseException as error:
            self._error = error
            self._is_closed = True
        try:
            self._end()
        finally:
            self._ended.open()

    def _sleep(self) -> None:
        """Wait for a command, or until somebody's time is over."""
        with suppress(Empty):
            self._commands.get(timeout=self._until_next())()

    def _has_dozed(self) -> bool:
        """Wait a little, in an engine without a thread, where somebody's time will be over; else return False."""
        timeout = self._until_next()
        if timeout is not None:
            time.sleep(min(timeout, _LONGEST_DOZE_S))
        return timeout is not None

    def _until_next(self) -> float | None:
        """Return the seconds until the next deadline or timer, or None."""
        next_s = self._scheduler.batcher.deadlines.next_s()
        if self._timers:
            next_s = min(self._timers[0][0], math.inf if next_s is None else next_s)
        return None if next_s is None else min(max(0.0, next_s - self._clock()), _LONGEST_SLEEP_S)

    def _do_timers(self, now: float) -> None:
        while self._timers and self._timers[0][0] <= now:
            heapq.heappop(self._timers)[2]()

    def _do_commands(self) -> None:
        while True:
            try:
                command = self._commands.get_nowait()
            except Empty:
                return
            command()

    def _submit(self, drivers: Sequence[SequenceDriver]) -> None:
        self._scheduler.stats.n_submitted += len(drivers)
        self._scheduler.batcher.submit(drivers)
        if self._is_closed:
            self._end_requests()

    def _cancel(self, ids: Sequence[str]) -> int:
        """Cancel requests, with all their choices; return how many of them were in flight."""
        now, n_cancelled = self._clock(), 0
        for id in ids:
            members = self._take_in_members(id)
            done = [self._scheduler.batcher.cancel(m, now) for m in members]
            n_cancelled += any(done)
        self._deliver(())
        return n_cancelled

    def _mark_closed(self) -> None:
        self._is_closed = True

    def _end(self) -> None:
        """Leave nobody waiting, then free the backend. Owner thread, or after it."""
        self._do_commands()
        if (
            self._is_interrupted
        ):  # nobody knows what slots hold: it must not go to disk as what they should
            self._scheduler.start_over()
        if self.on_end is not None:
            self.on_end(None if self._error is None else self._failure(self._error))
        self._end_requests()
        self._disk.close()
        if self._compiler is not None:
            self._compiler.close()
        self._do_commands()
        self._deliver(())
        self._backend.close()

    def _end_requests(self) -> None:
        self._wanting_room.wake()
        for id, driver in list(self._scheduler.batcher.in_flight.items()):
            try:
                self._end_request(driver)
            except Exception as error:  # noqa: PERF203  # it struck again: told with fewer words
                mailbox, i, _ = self.routes.pop(id)
                mailbox.deliver(*refused(id, i, self._failure(error)))
        self._deliver(())

    def _end_request(self, driver: SequenceDriver) -> None:
        batcher, now = self._scheduler.batcher, self._clock()
        if driver.status is Status.FINISHED:  # an error struck between its end and its leaving
            batcher.retire(driver)
        elif self._error is None:
            batcher.cancel(driver.request.id, now)
        else:
            driver.finish("error", now, self._failure(self._error))
            batcher.retire(driver)

    def _failure(self, cause: BaseException) -> EngineClosedError:
        error = EngineClosedError(f"the engine stopped: {words_of(cause)}")
        error.__cause__ = cause
        return error


class _Asked(Generic[T]):
    """A command that somebody waits for, in whose thread handlers of signals may be called meanwhile."""

    def __init__(self, command: Callable[[], T]) -> None:
        self._command, self._done = command, Latch()
        self._result: list[T] = []
        self._error: BaseException | None = None

    def do(self) -> None:
        """Do it. Owner thread."""
        try:
            self._result.append(self._command())
        except BaseException as error:
            self._error = error
        self._done.open()

    def wait(self) -> T:
        """Return what it returned, or raise what it raised."""
        self._done.wait()
        error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # its frames would keep each other alive
        return self._result[0]
