"""Threads, which the system may refuse to start: it limits those of a user, of a container and of a service."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from cbatch.errors import NoThreadError
from cbatch.support.garbage import no_finalizers
from cbatch.support.interrupts import HeldBack, Latch


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
        NoThreadError: the system has no more threads, or no memory for one. This one can never be started or joined.
    """
    runs, run, has_begun = Latch(), thread.run, False

    def begin() -> None:
        nonlocal has_begun
        del thread.run
        has_begun = True
        runs.open()
        run()

    def bootstrap() -> None:
        # without memory it ends before it has said that it runs, and its starter would wait for ever
        del inside._bootstrap
        try:
            inside._bootstrap()
        finally:
            inside._started.set()
            if not has_begun:
                runs.open()

    inside: Any = thread
    inside.run, inside._bootstrap = begin, bootstrap
    with HeldBack(), no_finalizers():
        try:
            thread.start()
        except RuntimeError as error:
            raise NoThreadError from error
        runs.wait()
    if not has_begun:
        raise NoThreadError


def is_lack_of_threads(error: BaseException) -> bool:
    """Whether a library could not start a thread. Source: CPython, Modules/_threadmodule.c."""
    return isinstance(error, RuntimeError) and str(error) == "can't start new thread"
