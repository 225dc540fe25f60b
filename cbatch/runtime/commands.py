"""Commands and timers for the thread that owns the backend; if no thread does, the callers take turns as owner."""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

from cbatch.support.interrupts import HeldBack, Latch
from cbatch.support.logs import HeldLogs

T = TypeVar("T")


class Commands:
    """Commands that the owner does between two runs, in order, and timers. Any thread may `put`."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self._timers: list[tuple[float, int, Callable[[], object]]] = []
        self._numbers = count()

    def __len__(self) -> int:
        return self._queue.qsize()

    def put(self, command: Callable[[], object]) -> None:
        """Add a command. From any thread."""
        self._queue.put(command)

    def do_all(self) -> None:
        """Do every command that waits."""
        while True:
            try:
                command = self._queue.get_nowait()
            except Empty:
                return
            command()

    def wait(self, timeout: float | None) -> bool:
        """Wait for one command and do it; False after `timeout` seconds without one."""
        try:
            command = self._queue.get(timeout=timeout)
        except Empty:
            return False
        with HeldLogs():
            command()
        return True

    def set_timer(self, when_s: float, action: Callable[[], object]) -> None:
        """Have `do_due` do `action` when the owner's clock says `when_s`."""
        heapq.heappush(self._timers, (when_s, next(self._numbers), action))

    def do_due(self, now: float) -> None:
        """Do the actions whose time has come."""
        while self._timers and self._timers[0][0] <= now:
            heapq.heappop(self._timers)[2]()

    @property
    def next_s(self) -> float | None:
        """When the first timer is due, or None."""
        return self._timers[0][0] if self._timers else None


class Command(Generic[T]):
    """A command for whose result a thread waits; handlers of signals may be called in that thread meanwhile."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._work, self._done = work, Latch()
        self._result: list[T] = []
        self._error: BaseException | None = None

    def __call__(self) -> None:
        """Do the work. Owner thread."""
        try:
            self._result.append(self._work())
        except BaseException as error:
            self._error = error
        self._done.open()

    def wait(self) -> T:
        """Return what the work returned, or raise what it raised."""
        self._done.wait()
        error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # its frames would keep each other alive
        return self._result[0]


class FairLock:
    """A lock for one thread at a time, first come, first served; its owner may take it again.

    Two locks, so that a thread that takes it again and again lets the others in between.
    """

    def __init__(self) -> None:
        self._entrance, self._inside = threading.Lock(), threading.Lock()
        self._owner: int | None = None

    @property
    def is_mine(self) -> bool:
        """Whether the caller's thread has the lock."""
        return self._owner == threading.get_ident()

    @property
    def is_held(self) -> bool:
        """Whether a thread has the lock. It may change at any time."""
        return self._owner is not None

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the lock in a block.

        Handlers of signals are called after the block, for they may use the engine and must not find a step half done.
        """
        if self.is_mine:
            yield
            return
        with HeldBack():
            with self._entrance:
                self._inside.acquire()
            self._owner = threading.get_ident()
            try:
                yield
            finally:
                self._owner = None
                self._inside.release()
