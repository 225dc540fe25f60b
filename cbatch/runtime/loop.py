"""The one thread that touches the backend: commands in, steps, delivery out."""

from __future__ import annotations

import os
import threading
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, TypeVar

from cbatch.core.driver import Status
from cbatch.core.plan import Slot, StepPlan
from cbatch.errors import EngineClosedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from cbatch.backend import Backend
    from cbatch.core.driver import SequenceDriver
    from cbatch.core.scheduler import ContinuousBatchScheduler
    from cbatch.response import BatchOutputChunk, BatchResult
    from cbatch.runtime.mailbox import Mailbox

T = TypeVar("T")
Route = tuple["Mailbox", int]


class Loop:
    """Drives a scheduler and its backend, in a thread of its own or by `step`.

    Commands wait in a queue and are done between two runs; a run in flight is asked to end after its current step.
    `routes` tells where a request's output goes; its keys are the ids in flight.
    """

    def __init__(
        self, backend: Backend, scheduler: ContinuousBatchScheduler, clock: Callable[[], float]
    ) -> None:
        self.routes: dict[str, Route] = {}
        self._backend, self._scheduler, self._clock = backend, scheduler, clock
        self._commands: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()
        self._is_closed = False
        self._error: BaseException | None = None
        self._closing = threading.Lock()
        # of an engine without a thread; two locks, so that a loop over `pump` lets others in
        self._door, self._room = threading.Lock(), threading.RLock()
        self._is_interrupted = False

    def start(self) -> None:
        """Start the owner thread."""
        self._thread = threading.Thread(target=self._run, name="cbatch", daemon=True)
        self._thread.start()

    def submit(self, drivers: Sequence[SequenceDriver]) -> None:
        """Queue sequences whose routes are set. From any thread; does not wait.

        Behind others that wait there is no hurry: a run in flight ends by itself before a slot is free.
        """
        self._post(lambda: self._submit(drivers), is_urgent=not self._scheduler.batcher.n_waiting)

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
            with self._turn():
                return command()
        done: Future[T] = Future()
        self._post(lambda: _settle(done, command))
        return done.result()

    def cancel(self, ids: Iterable[str]) -> int:
        """End requests by id; return how many were in flight. From any thread; waits for the current step."""
        return self.call(lambda: self._cancel(list(ids)))

    def cancel_batch(self, mailbox: Mailbox) -> int:
        """End what a batch has in flight; else as `cancel`."""
        return self.call(lambda: self._cancel(self._ids_of(mailbox)))

    def cancel_batch_soon(self, mailbox: Mailbox) -> None:
        """End what a batch has in flight before the next plan; does not wait; a closed engine has ended it already."""
        with suppress(EngineClosedError):
            self._post(lambda: self._cancel(self._ids_of(mailbox)))

    def step(self) -> bool:
        """Do the commands that wait and one run; False where there was nothing to compute. Owner thread."""
        self._do_commands()
        start = self._clock()
        plan = self._scheduler.plan(start)
        if plan is None:
            return self._deliver(())
        planned = self._clock()
        result = self._backend.run(plan)
        ran = self._clock()
        changed = self._scheduler.apply(plan, result, ran)
        self._deliver(changed)
        stats = self._scheduler.stats
        stats.decode_s += result.decode_s
        stats.sample_s += result.sample_s
        stats.plan_s += planned - start
        stats.run_s += ran - planned
        stats.apply_s += self._clock() - ran
        return True

    def pump(self) -> bool:
        """Do one step in an engine without a thread, in the thread of whoever waits; see `step`.

        Ctrl-C during the run leaves the engine usable: what runs is computed anew.

        Raises:
            EngineClosedError: the engine is closed, or this step failed and ended it.
        """
        self.check_open()
        with self._turn():
            self.check_open()
            try:
                self._restore()
                return self.step()
            except Exception as error:
                self._error, self._is_closed = error, True
                self._end()
                raise self._failure() from error
            except BaseException:  # Ctrl-C, or what a signal handler raised
                self._is_interrupted = True
                raise

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
        """End every request, the thread and the backend. Twice is harmless; from any thread."""
        if os.getpid() != self._pid:
            return
        if self._thread is threading.current_thread():  # the engine's last reference died here
            self._is_closed = True
            return
        with self._closing:
            if self._thread is not None and self._thread.is_alive():
                self._commands.put(self._mark_closed)
                self._backend.interrupt()
                _join(self._thread)
            elif not self._is_closed:
                self._backend.interrupt()
                with self._turn():
                    self._is_closed = True
                    self._end()

    def _post(self, command: Callable[[], object], *, is_urgent: bool = True) -> None:
        self.check_open()
        self._commands.put(command)
        if self._thread is not None:
            if is_urgent:
                self._backend.interrupt()
            if self._is_closed:  # it ended in between: nobody else will look into the queue
                self._thread.join()
                with self._closing:
                    self._do_commands()

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Have an engine without a thread to oneself; first come, first served."""
        with self._door:
            self._room.acquire()
        try:
            yield
        finally:
            self._room.release()

    def _restore(self) -> None:
        """After an interrupted run: empty every slot and bind anew what runs, for that may not have been done."""
        if not self._is_interrupted:
            return
        self._scheduler.recompute_all()
        running = enumerate(self._scheduler.batcher.running)
        binds = tuple(d.binding(Slot(i)) for i, d in running if d is not None)
        clears = tuple(Slot(i) for i in range(self._backend.n_slots))
        self._backend.run(StepPlan((), clears=clears, binds=binds))
        self._is_interrupted = False

    def _run(self) -> None:
        try:
            while not self._is_closed:
                if not self.step() and not self._is_closed:
                    self._commands.get()()
        except BaseException as error:
            self._error = error
            self._is_closed = True
        self._end()

    def _do_commands(self) -> None:
        while True:
            try:
                command = self._commands.get_nowait()
            except Empty:
                return
            command()

    def _submit(self, drivers: Sequence[SequenceDriver]) -> None:
        batcher, stats = self._scheduler.batcher, self._scheduler.stats
        stats.n_submitted += len(drivers)
        for driver in drivers:
            batcher.submit(driver)
        if self._is_closed:
            self._end_requests()

    def _ids_of(self, mailbox: Mailbox) -> list[str]:
        return [id for id, (box, _) in list(self.routes.items()) if box is mailbox]

    def _cancel(self, ids: Sequence[str]) -> int:
        now = self._clock()
        n_cancelled = sum(self._scheduler.batcher.cancel(id, now) for id in ids)
        self._deliver(())
        return n_cancelled

    def _mark_closed(self) -> None:
        self._is_closed = True

    def _end(self) -> None:
        """Leave nobody waiting, then free the backend. Owner thread, or after it."""
        self._do_commands()
        self._end_requests()
        self._backend.close()

    def _end_requests(self) -> None:
        batcher, now = self._scheduler.batcher, self._clock()
        for id, driver in list(batcher.in_flight.items()):
            if driver.status is Status.FINISHED:  # an error struck between its end and its leaving
                batcher.retire(driver)
            elif self._error is None:
                batcher.cancel(id, now)
            else:
                driver.finish("error", now, self._failure())
                batcher.retire(driver)
        self._deliver(())

    def _failure(self) -> EngineClosedError:
        error = EngineClosedError(f"the engine stopped: {self._error}")
        error.__cause__ = self._error
        return error

    def _deliver(self, changed: Sequence[SequenceDriver]) -> bool:
        """Hand out what is new, one delivery per batch; False where there was nothing."""
        ended = self._scheduler.batcher.take_ended()
        parcels: dict[Mailbox, tuple[list[BatchOutputChunk], list[tuple[int, BatchResult]]]] = {}
        for driver in changed:
            if driver.finish_reason is None:
                mailbox, _ = self.routes[driver.request.id]
                if mailbox.is_streamed and (chunk := driver.take_chunk()):
                    parcels.setdefault(mailbox, ([], []))[0].append(chunk)
        for driver in ended:
            mailbox, i = self.routes.pop(driver.request.id)
            chunks, results = parcels.setdefault(mailbox, ([], []))
            if chunk := driver.take_chunk():
                chunks.append(chunk)
            results.append((i, driver.result()))
            self._count(driver)
        for mailbox, (chunks, results) in parcels.items():
            mailbox.deliver(chunks, results)
        return bool(parcels)

    def _count(self, driver: SequenceDriver) -> None:
        counts, reason = self._scheduler.stats.n_finished, str(driver.finish_reason)
        counts[reason] = counts.get(reason, 0) + 1


def _join(thread: threading.Thread) -> None:
    """Wait for a thread that ends soon; Ctrl-C meanwhile is raised behind it, for it must not outlive its model."""
    interrupt: KeyboardInterrupt | None = None
    while thread.is_alive():
        try:
            thread.join()
        except KeyboardInterrupt as error:  # noqa: PERF203
            interrupt = error
    if interrupt is not None:
        raise interrupt


def _settle(done: Future[T], command: Callable[[], T]) -> None:
    try:
        done.set_result(command())
    except BaseException as error:
        done.set_exception(error)
