"""Blocks and waits that Ctrl-C does not break off, and checks of locks for finalizers."""

from __future__ import annotations

# not `signal`, whose functions make the text of every handler for an error that they drop (Python 3.11): 30 µs each
import _signal  # type: ignore[import-not-found]
import math
import signal
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, TypeVar

T = TypeVar("T")

_NOT_PROGRAMS = (
    "SIGILL",
    "SIGTRAP",
    "SIGABRT",
    "SIGBUS",
    "SIGFPE",
    "SIGSEGV",
    "SIGSYS",
    "SIGKILL",
    "SIGSTOP",
)
_OTHERS = signal.valid_signals() - {
    getattr(signal, name, None) for name in (*_NOT_PROGRAMS, "SIGINT")
}
_NUMBERS = (
    *(int(n) for n in sorted(_OTHERS) if n < getattr(signal, "SIGRTMIN", math.inf)),
    int(signal.SIGINT),
)
"""The signals that programs have handlers for: all but faults and real-time signals."""

_LONGEST_WAIT_S = 1.0
_LOOK_S = 0.05

_N_LOCKS = 8
"""More locks than a thread ever nests."""


class _ThreadHolds(threading.local):
    """State of one thread."""

    n_held_back = 0
    """How many `HeldBack` blocks the thread is in."""
    locks: tuple[Any, ...] = ()
    """The last few locks that the thread was about to take."""


_here = _ThreadHolds()


def note(lock: threading.RLock) -> None:
    """Note that this thread is about to take a lock, for `is_locked_here`."""
    if lock not in _here.locks:
        _here.locks = (lock, *_here.locks[: _N_LOCKS - 1])


def is_locked_here() -> bool:
    """Whether this thread is in a `HeldBack` block, or has a lock that it told to `note`.

    For finalizers, which the garbage collector may run anywhere: where this is true, a finalizer must not wait for
    another thread, which may want the lock.
    """
    return _here.n_held_back > 0 or any(lock._is_owned() for lock in _here.locks)


def is_for_program(error: BaseException) -> bool:
    """Whether a callback's error is the program's: in the main thread, from a signal handler or not an `Exception`."""
    in_main = threading.current_thread() is threading.main_thread()
    return in_main and (not isinstance(error, Exception) or _is_of_handler(error))


def _is_of_handler(error: BaseException) -> bool:
    """Whether a signal handler has raised the error."""
    handlers = [getattr(h, "func", h) for h in map(_signal.getsignal, _NUMBERS) if callable(h)]
    codes = {getattr(h, "__code__", getattr(h.__call__, "__code__", None)) for h in handlers}
    return any(frame.f_code in codes for frame, _ in traceback.walk_tb(error.__traceback__))


class Contained:
    """A block whose errors are dropped, except those that are the program's."""

    __slots__ = ()

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        return error is not None and not is_for_program(error)


class Postponed:
    """A block in which signal handlers are called at once, and the first exception of one is raised at the end.

    Only Python's main thread calls handlers: in any other thread this is an ordinary block.
    """

    __slots__ = ("_before", "_error")

    def __init__(self) -> None:
        self._before: dict[int, Callable[[int, FrameType | None], object]] = {}
        self._error: BaseException | None = None

    @property
    def has_struck(self) -> bool:
        """Whether a handler has raised, so that the block should end soon. From any thread."""
        return self._error is not None

    def __enter__(self) -> Postponed:
        if threading.current_thread() is threading.main_thread():
            try:
                for number in _NUMBERS:
                    before = _signal.getsignal(number)
                    if callable(before):
                        self._before[number] = before
                        _signal.signal(number, self._handle)
            except BaseException as error:  # of a handler that was not replaced yet
                self._error = self._error or error
                self.__exit__()
        return self

    def _handle(self, number: int, frame: FrameType | None) -> None:
        try:
            self._before[number](number, frame)
        except BaseException as error:
            self._error = self._error or error

    def __exit__(self, *error: object) -> None:
        self._give_back()
        self._raise()

    def _give_back(self) -> None:
        """Restore all handlers from before the block, also where one that is restored is called and raises."""
        left = [*reversed(self._before)]
        while left:
            try:
                while left:
                    number = left[-1]
                    if _signal.getsignal(number) == self._handle:  # else another was set meanwhile
                        _signal.signal(number, self._before[number])
                    left.pop()
            except BaseException as error:  # noqa: PERF203
                self._error = self._error or error

    def _raise(self) -> None:
        struck, self._error = self._error, None
        if struck is not None:
            try:
                raise struck.with_traceback(None)  # its frames would keep objects alive
            finally:
                del struck


def run_async(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in an event loop of asyncio; what a signal's handler raises cancels it, and is raised here.

    Raised amid the loop, it can come just before a task is woken, which then never ends, nor does `asyncio.run`.
    """
    import asyncio  # slow to import

    async def until_struck() -> T:
        task = asyncio.ensure_future(work)
        while not (await asyncio.wait({task}, timeout=_LOOK_S))[0]:
            if signals.has_struck:
                task.cancel()
        return await task

    with Postponed() as signals:
        return asyncio.run(until_struck())


class HeldBack(Postponed):
    """A block in which no signal handler is called: each is called at the end of the block.

    For work that must not be half done when a handler uses the engine. For finalizers see `is_locked_here`.
    """

    __slots__ = ("_n_before", "_struck")

    def __init__(self) -> None:
        super().__init__()
        self._n_before = _here.n_held_back
        self._struck: list[tuple[int, FrameType | None]] = []

    def __enter__(self) -> HeldBack:
        super().__enter__()
        _here.n_held_back = self._n_before + 1
        return self

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._struck.append((number, frame))

    def __exit__(self, *error: object) -> None:
        _here.n_held_back = self._n_before
        self._give_back()
        if self._struck:
            with Postponed():  # all handlers are called, also after one that raises
                for number, frame in self._struck:
                    super()._handle(number, frame)
                self._struck.clear()
        self._raise()


class Uses:
    """Counts the uses of a thing that must not be freed amid one. From any thread.

    An exception of a signal's handler leaves no use counted and no lock taken.
    """

    __slots__ = ("changed", "n")

    def __init__(self) -> None:
        self.changed = threading.Condition()
        """Guards the thing, and is notified at the end of each use."""
        self.n = 0

    @contextmanager
    def one(self, check: Callable[[], object]) -> Iterator[None]:
        """Use the thing in a block; first `check` is called with the lock, and may refuse by an exception."""
        is_counted = False
        try:
            with HeldBack(), self.changed:
                check()
                self.n += 1
                is_counted = True
            yield
        finally:
            if is_counted:
                with HeldBack(), self.changed:
                    self.n -= 1
                    self.changed.notify_all()


class Latch:
    """Opens once and stays open; a wait may be interrupted and begun again.

    An interrupted `Thread.join` marks the thread as ended (Python 3.11), and an interrupted `Event.wait` may keep its
    lock.
    """

    __slots__ = ("_lock", "is_open")

    def __init__(self) -> None:
        self.is_open = False
        self._lock = threading.Lock()
        self._lock.acquire()

    def open(self) -> None:
        """Let every waiting thread through. Call it once."""
        self.is_open = True
        self._lock.release()

    def wait(self, most_s: float = math.inf) -> None:
        """Return when it is open, or after `most_s` seconds; a second or more is no limit."""
        if most_s < _LONGEST_WAIT_S:
            if not self.is_open and self._lock.acquire(timeout=most_s):
                self._lock.release()
            return
        while not self.is_open:
            # Ctrl-C between the two lines keeps the lock: other threads look at `is_open` again
            if self._lock.acquire(timeout=_LONGEST_WAIT_S):
                self._lock.release()


class Sleepers:
    """Threads that wait until a condition holds; `wake` is called after each change of it.

    No lock is held while the condition is evaluated. With a `threading.Condition`, a signal handler called there that
    asks something of the waking thread would wait for ever.
    """

    __slots__ = ("_locks",)

    def __init__(self) -> None:
        self._locks: deque[threading.Lock] = deque()

    def __len__(self) -> int:
        return len(self._locks)

    def wait_for(self, is_ready: Callable[[], object], timeout: float | None = None) -> bool:
        """Wait until `is_ready()` is true or `timeout` seconds have passed; return whether it is true."""
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
        self._locks.append(lock)  # before the last look: a later `wake` releases it
        try:
            if not is_ready():
                lock.acquire(timeout=timeout)
        finally:
            with suppress(ValueError):  # `wake` has removed it
                self._locks.remove(lock)

    def wake(self) -> None:
        """Make all waiting threads evaluate their conditions again. From any thread, after the change."""
        while self._locks:
            with suppress(IndexError):  # another thread has taken the last one
                self._locks.popleft().release()
