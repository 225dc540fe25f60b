"""Threads that compute: objects that a process has once, teams of OpenMP after a fork, and threads that end.

GNU's OpenMP keeps a team of workers for every thread that ever computed, until that thread ends or gives its team back:
`cbatch.backend.llama.openmp`. Once there are more workers than cores, those that wait sleep at once and do not spin:
a decode step of a small model takes several times as long. So only the team of an owner thread that computes may be
there: an owner that rests gives its own back, and everything else is computed in threads that end.
"""

from __future__ import annotations

import functools
import math
import os
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from cbatch.errors import EngineError, NoThreadError
from cbatch.support.interrupts import Latch, Postponed
from cbatch.support.thread_start import start, started

T = TypeVar("T")

_N_TRIED, _TRIED_S = 4, 0.1
"""Most threads started to test whether the system can start more; seconds for which a success counts. Our choice."""


def once(make: Callable[[], T]) -> Callable[[], T]:
    """Return a function that calls `make` once and always returns its result; other threads wait meanwhile."""
    making, made = threading.Lock(), list[T]()

    @functools.wraps(make)
    def get() -> T:
        if not made:
            with making:
                if not made:
                    made.append(make())
        return made[0]

    def renew() -> None:
        nonlocal making
        making = threading.Lock()

    os.register_at_fork(after_in_child=renew)
    return get


class Teams:
    """Notes which thread has a team of OpenMP's, in which process: a fork copies the thread without its team."""

    def __init__(self) -> None:
        self._of_thread = threading.local()
        self._tried_s = -math.inf
        """When the system was last seen to start threads."""

    def join(self) -> None:
        """Note that the calling thread computes with a team in this process.

        Raises:
            EngineError: it did so before the process was forked, so it would wait for its team for ever.
        """
        pid = os.getpid()
        if vars(self._of_thread).setdefault("pid", pid) != pid:
            raise EngineError(
                "this thread computed before the process was forked, and its helper threads do not exist in the "
                "child: load with threaded=True, or start the process with multiprocessing's 'spawn', or fork before "
                "anything is computed"
            )

    def n_affordable(self, n_threads: int) -> int:
        """Return with how many threads the calling thread may compute: `n_threads`, or 1 if the system starts no more.

        GNU's OpenMP ends the process if it cannot start a thread. It starts those that the last team did not have.
        """
        n_new = n_threads - vars(self._of_thread).get("n", 1)
        if n_new > 0 and time.monotonic() > self._tried_s + _TRIED_S:
            if _can_start(min(n_new, _N_TRIED)):
                self._tried_s = time.monotonic()
            else:
                n_threads = 1
        self._of_thread.n = n_threads
        return n_threads

    def leave(self) -> None:
        """Note that the calling thread no longer has a team."""
        self._of_thread.n = 1


def _can_start(n_threads: int) -> bool:
    """Whether the system can start `n_threads` threads now."""
    end, found = Latch(), list[threading.Thread]()
    try:
        for _ in range(n_threads):
            found.append(started(end.wait, "cbatch-try"))
    except NoThreadError:
        return False
    finally:
        end.open()
        for thread in found:
            thread.join()
    return True


@once
def teams() -> Teams:
    """Return the process's one list of teams."""
    return Teams()


_stacks = threading.RLock()
"""Held while the size of the next thread's stack is set, and over a fork, so that no child waits for it."""
os.register_at_fork(
    before=_stacks.acquire, after_in_parent=_stacks.release, after_in_child=_stacks.release
)


def run_in_fresh_thread(work: Callable[[], T], *, n_stack: int = 0) -> T:
    """Do `work` in a thread of its own, which has ended when this returns; return or raise what `work` does.

    A native call cannot be interrupted: Ctrl-C is raised when `work` has ended, and the program ends no earlier. Raises
    a NoThreadError where the system has no more threads, or no memory for a stack of `n_stack` bytes (0: the usual).
    """
    done: Future[T] = Future()
    ended = Latch()

    def settle() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)
        finally:
            ended.open()

    with Postponed():
        thread = threading.Thread(target=settle, name="cbatch-compute")
        _start(thread, n_stack)
        at_exit = weakref.finalize(done, _outlast, ended)
        ended.wait()
        thread.join()
        at_exit.detach()
    return done.result()


def _start(thread: threading.Thread, n_stack: int) -> None:
    with _stacks:
        before = threading.stack_size()
        threading.stack_size(n_stack or before)
        try:
            start(thread)
        finally:
            threading.stack_size(before)


def _outlast(ended: Latch) -> None:
    """Wait whatever happens: native code that runs while the process ends would crash it."""
    with Postponed():
        ended.wait()
