"""Threads, which the system may refuse to start: it limits those of a user, of a container and of a service."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

from cbatch.errors import NoThreadError
from cbatch.support.garbage import no_finalizers
from cbatch.support.interrupts import HeldBack, Latch

_LOOK_S = 0.05
"""Seconds between checks, while a thread is started, whether it has ended before it ran."""


def started(
    work: Callable[[], object], name: str, kind: type[threading.Thread] = threading.Thread
) -> threading.Thread:
    """Return a thread of some kind that does `work`, and ends with the process.

    Raises:
        NoThreadError: the system has no more threads.
    """
    thread = kind(target=work, name=name, daemon=True)
    start(thread)
    return thread


def start(thread: threading.Thread) -> None:
    """Start a new thread; return when it runs.

    Until then it is not known to be that thread, and its starter waits for it: a finalizer in the one or the other that
    waited for an engine could wait for ever. None runs in the new one, and `is_locked_here` in the other.

    Raises:
        NoThreadError: the system has no more threads, or no memory for one. The thread can never be started or joined.
    """
    runs, run = Latch(), thread.run

    def begin() -> None:
        del thread.run
        runs.open()
        run()

    inside: Any = thread
    inside.run, inside._started = begin, _Running(inside)
    with HeldBack(), no_finalizers():
        try:
            thread.start()
        except RuntimeError as error:
            raise NoThreadError from error
        while not runs.is_open and inside._started.is_alive():
            runs.wait(_LOOK_S)
    if not runs.is_open:
        raise NoThreadError


class _Running(threading.Event):
    """Set once a thread runs. A thread without memory may end before that, which ends all waiting, too."""

    def __init__(self, thread: Any) -> None:
        super().__init__()
        thread._bootstrap = bootstrap = _Bootstrap(thread, self)
        self._thread, self._bootstrap, self.has_ended = thread, weakref.ref(bootstrap), False

    def is_alive(self) -> bool:
        """Whether the thread runs, or is still to run."""
        return not self.has_ended and self._bootstrap() is not None

    def wait(self, timeout: float | None = None) -> bool:
        vars(self._thread).pop("_bootstrap", None)  # now only the new thread has it
        while not super().wait(_LOOK_S) and self.is_alive():
            pass
        return self.is_set()


class _Bootstrap:
    """What a new thread calls. Not a function: without memory for a frame, Python 3.11 keeps a function for ever."""

    def __init__(self, thread: Any, started: _Running) -> None:
        self._thread, self._started = thread, started

    def __call__(self) -> None:
        kind: Any = threading.Thread
        try:
            kind._bootstrap(self._thread)
        finally:
            self._started.has_ended = True  # which needs no memory


def is_lack_of_threads(error: BaseException) -> bool:
    """Whether a library could not start a thread. Source: CPython, Modules/_threadmodule.c."""
    return isinstance(error, RuntimeError) and str(error) == "can't start new thread"
