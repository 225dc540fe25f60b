"""Ctrl-C where it must not tear anything: what a signal raises, raised when a block ends; and waits that survive it."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType, TracebackType

_NAMES = (
    *("SIGHUP", "SIGQUIT", "SIGTERM", "SIGALRM", "SIGUSR1", "SIGUSR2", "SIGCHLD", "SIGBREAK"),
    "SIGINT",
)
_NUMBERS = tuple(int(getattr(signal, name)) for name in _NAMES if hasattr(signal, name))
"""Signals that programs have handlers for: Ctrl-C, those that end a program or a wait, those that tell something."""

_LONGEST_WAIT_S = 1.0


class Postponed:
    """A block that nothing breaks off: handlers of signals are called at once, and what they raise is raised behind it.

    Only Python's main thread calls handlers, so in any other the block is an ordinary one.
    """

    __slots__ = ("_before", "_error")

    def __init__(self) -> None:
        self._before: dict[int, Callable[[int, FrameType | None], object]] = {}
        self._error: BaseException | None = None

    @property
    def has_struck(self) -> bool:
        """Whether a handler has raised; whoever works in the block should end soon. From any thread."""
        return self._error is not None

    def __enter__(self) -> Postponed:
        if threading.current_thread() is threading.main_thread():
            for number in _NUMBERS:
                before = signal.getsignal(number)
                if callable(before):
                    self._before[number] = before
                    signal.signal(number, self._handle)
        return self

    def _handle(self, number: int, frame: FrameType | None) -> None:
        try:
            self._before[number](number, frame)
        except BaseException as error:
            self._error = self._error or error

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._give_back()
        self._raise()

    def _give_back(self) -> None:
        """Set the handlers that were there before."""
        for number, before in self._before.items():
            found = signal.signal(number, before)
            if found != self._handle:  # somebody has set another meanwhile
                signal.signal(number, found)

    def _raise(self) -> None:
        struck, self._error = self._error, None
        if struck is not None:
            try:
                raise struck.with_traceback(None)  # its frames would keep alive what is given up
            finally:
                del struck


class HeldBack(Postponed):
    """A block in which no handler of a signal is called: each is called behind it, where it may do what it likes.

    For work that a handler, which may use the engine, must not find half done.
    """

    __slots__ = ("_struck",)

    def __init__(self) -> None:
        super().__init__()
        self._struck: list[tuple[int, FrameType | None]] = []

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._struck.append((number, frame))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._give_back()
        if self._struck:
            with Postponed():  # one that raises keeps no other from being called
                for number, frame in self._struck:
                    super()._handle(number, frame)
                self._struck.clear()
        self._raise()


class Latch:
    """Opens once, for good; whoever waits may be broken off and wait again.

    `Thread.join` takes a thread for ended when it is broken off (Python 3.11), and an `Event` may keep its lock.
    """

    __slots__ = ("_lock", "is_open")

    def __init__(self) -> None:
        self.is_open = False
        self._lock = threading.Lock()
        self._lock.acquire()

    def open(self) -> None:
        """Let everybody through. Once."""
        self.is_open = True
        self._lock.release()

    def wait(self) -> None:
        """Return when it is open."""
        while not self.is_open:
            # if Ctrl-C strikes between the two, others wait in vain for the lock, but look again
            if self._lock.acquire(timeout=_LONGEST_WAIT_S):
                self._lock.release()


class Sleepers:
    """Threads that wait until something holds; whoever changes it calls `wake`.

    A `Condition` is held while its thread looks whether to wait: a handler of a signal that is called there, and asks
    something of the thread that would wake, waits for ever. Here nothing is held.
    """

    __slots__ = ("_locks",)

    def __init__(self) -> None:
        self._locks: deque[threading.Lock] = deque()

    def __len__(self) -> int:
        return len(self._locks)

    def wait_for(self, is_ready: Callable[[], object], timeout: float | None = None) -> bool:
        """Return when it is ready, or after `timeout` seconds; whether it is."""
        end_s = math.inf if timeout is None else time.perf_counter() + timeout
        while not is_ready():
            left_s = min(end_s - time.perf_counter(), threading.TIMEOUT_MAX)
            if left_s <= 0:
                return False
            self._sleep(is_ready, left_s)
        return True

    def _sleep(self, is_ready: Callable[[], object], timeout: float) -> None:
        lock = threading.Lock()
        lock.acquire()
        self._locks.append(lock)  # before it looks again: who wakes later wakes it
        try:
            if not is_ready():
                lock.acquire(timeout=timeout)
        finally:
            with suppress(ValueError):  # it was woken
                self._locks.remove(lock)

    def wake(self) -> None:
        """Have all that wait look again. From any thread, behind the change."""
        while self._locks:
            with suppress(IndexError):  # another thread has taken the last one
                self._locks.popleft().release()
