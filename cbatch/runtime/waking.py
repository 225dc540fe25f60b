"""Wakes waiting readers, in threads and in event loops (asyncio or trio), and lets tasks wait for work in threads."""

from __future__ import annotations

import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from typing import Any

import anyio
from anyio.lowlevel import RunVar, checkpoint, current_token

from cbatch.errors import EngineClosedError, EngineError
from cbatch.support.interrupts import Sleepers
from cbatch.support.thread_start import start


class LoopWaker:
    """Sets events of one event loop from other threads; `LoopWaker.here()` is the running loop's only one.

    One call into the loop wakes all tasks that wait there.
    """

    def __init__(self, call_soon: Callable[[Callable[[], None]], object]) -> None:
        """Make one for the loop that does what is given to `call_soon`, which any thread may call."""
        self._call_soon = call_soon
        self._events: deque[anyio.Event] = deque()
        self._is_asked = False
        """Whether a wake-up was asked for and has not begun. No lock: a finalizer may run anywhere."""

    @staticmethod
    def here() -> LoopWaker:
        """Return the waker of the event loop that runs in this thread."""
        try:
            return _waker.get()
        except LookupError:
            waker = LoopWaker(call_soon_here())
            _waker.set(waker)
            return waker

    def set_soon(self, event: anyio.Event) -> None:
        """Have the loop set `event`. From any thread; no effect where the loop has ended."""
        self._events.append(event)
        if self._is_asked:
            return
        self._is_asked = True
        try:
            self._call_soon(self._set_all)
        except (
            RuntimeError
        ):  # asyncio's error for a closed loop; trio's RunFinishedError is a subclass
            self._is_asked = False
            self._events.clear()

    def _set_all(self) -> None:
        self._is_asked = False  # first: later events ask again
        while self._events:
            self._events.popleft().set()


def call_soon_here() -> Callable[[Callable[[], None]], object]:
    """Return what has the event loop that runs in this thread do something soon, from any thread."""
    loop: Any = current_token().native_token
    is_asyncio = hasattr(loop, "call_soon_threadsafe")
    call_soon: Callable[[Callable[[], None]], object] = (
        loop.call_soon_threadsafe if is_asyncio else loop.run_sync_soon
    )
    return call_soon


_waker: RunVar[LoopWaker] = RunVar("cbatch.waker")


def is_in_event_loop() -> bool:
    """Whether an event loop, of asyncio or trio, runs in this thread now."""
    try:
        current_token()
    except RuntimeError:
        return False
    return True


class Readers:
    """Threads and tasks that wait for something of one batch; `wake` is called after each change of the batch.

    Where the engine has no thread of its own, a reader does its steps instead of sleeping.
    """

    def __init__(
        self,
        pump: Callable[[], bool] | None,
        n_open: Callable[[], int],
        check_thread: Callable[[], object],
    ) -> None:
        """Make one without readers.

        Args:
            pump: as in `Mailbox`.
            n_open: returns how many items have not ended.
            check_thread: raises if the caller's thread would wait for itself.
        """
        self._pump, self._n_open, self._check_thread = pump, n_open, check_thread
        self._threads = Sleepers()
        self._tasks: deque[tuple[Callable[[], bool], LoopWaker, anyio.Event]] = deque()
        self._pid = os.getpid()

    @property
    def is_their_process(self) -> bool:
        """Whether this process runs the batch; in a child of it, a thread that is not there may hold locks."""
        return os.getpid() == self._pid

    def wake(self) -> None:
        """Have all readers look again. From any thread, after the change."""
        self._threads.wake()
        for task in [*self._tasks]:
            is_ready, waker, event = task
            if is_ready():
                with suppress(ValueError):  # another thread has woken it, or it has left
                    self._tasks.remove(task)
                    waker.set_soon(event)

    def wait(self, is_ready: Callable[[], bool], timeout: float | None = None) -> bool:
        """Return True when it is ready, or False after `timeout` seconds."""
        self._check_wait(is_ready)
        if self._pump is None:
            return self._threads.wait_for(is_ready, timeout)
        end_s = math.inf if timeout is None else time.perf_counter() + timeout
        while not is_ready():
            if time.perf_counter() > end_s:
                return False
            self._step(is_ready, self._pump)
        return True

    async def wait_async(self, is_ready: Callable[[], bool]) -> None:
        """Return when it is ready."""
        self._check_wait(is_ready)
        if is_ready():  # other tasks must run even if results always come before their reader
            await checkpoint()
        while not is_ready():
            if self._pump is not None:
                self._step(is_ready, self._pump)
                await checkpoint()
            else:
                await self._sleep(is_ready)

    async def _sleep(self, is_ready: Callable[[], bool]) -> None:
        event = anyio.Event()
        task = is_ready, LoopWaker.here(), event
        self._tasks.append(task)  # before it looks again: a change that comes later wakes it
        try:
            if not is_ready():
                await event.wait()
        finally:
            with suppress(ValueError):  # it was woken
                self._tasks.remove(task)

    def _check_wait(self, is_ready: Callable[[], bool]) -> None:
        if is_ready():
            return
        if self.is_their_process:
            self._check_thread()
        else:
            raise EngineClosedError(
                "this batch runs in the parent process: it can only be awaited there"
            )

    def _step(self, is_ready: Callable[[], bool], pump: Callable[[], bool]) -> None:
        try:
            has_worked = pump()
        except EngineClosedError:  # every item has ended then, and its result says why
            if is_ready():
                return
            raise
        if not has_worked and not is_ready():
            raise EngineError(
                f"{self._n_open()} requests have not ended, but the engine has no work left"
            )


async def do_to_end(work: Callable[[], object], hurry: Callable[[], object] | None = None) -> None:
    """Do `work` in a thread of its own, which is started before anything is awaited; return when it has ended.

    A shield holds off the cancelling of scopes, but not that of asyncio's own `Task.cancel`, which may come often: it
    is raised after the work, and `hurry` is called when it first comes. What the work raises is raised here, and is
    the cause of a cancellation where both are.
    """
    waker, has_ended, outcome = LoopWaker.here(), anyio.Event(), Future[None]()

    def do() -> None:
        try:
            work()
            outcome.set_result(None)
        except BaseException as error:
            outcome.set_exception(error)
        waker.set_soon(has_ended)

    start(threading.Thread(target=partial(copy_context().run, do), name="cbatch-to-end"))
    cancelled = await _wait_shielded(has_ended, hurry)
    if cancelled is not None:
        raise cancelled from outcome.exception()
    outcome.result()


async def _wait_shielded(
    event: anyio.Event, hurry: Callable[[], object] | None
) -> BaseException | None:
    """Wait for an event; return how the task was cancelled meanwhile, or None."""
    cancelled: BaseException | None = None
    with anyio.CancelScope(shield=True):
        while not event.is_set():
            try:
                await event.wait()
            except anyio.get_cancelled_exc_class() as error:  # noqa: PERF203
                if hurry is not None and cancelled is None:
                    hurry()
                cancelled = error
    return cancelled
