"""A thread for slow work, so that neither the owner thread nor a caller waits for it."""

from __future__ import annotations

import os
import sys
import threading
from contextlib import suppress
from itertools import count
from queue import PriorityQueue
from typing import TYPE_CHECKING

from cbatch.errors import NoThreadError
from cbatch.support.interrupts import HeldBack
from cbatch.support.taken_cores import my_cores
from cbatch.support.thread_start import started

if TYPE_CHECKING:
    from collections.abc import Callable

_LAST = 1_000

_NICENESS, _ON_ONE_CORE = 13, 1
"""How much less of a core a thread gets that gives way to the owner thread; Linux alone has it.

Source: `cbatch.bench.experiments.side_job`, pictures beside 15 streams: with less of it their p99 gap is half as long
again or longer; with more, a picture waits many times as long for a gap that hardly shrinks. On a single core, such as
that of a worker, the owner thread never waits for other threads of a team, and 13 left 5 % of the time to pictures.
"""


def be_nice() -> None:
    """Have the calling thread, and the threads that it starts to compute, give way to others."""
    if sys.platform == "linux":
        niceness = _NICENESS if len(my_cores()) > 1 else _ON_ONE_CORE
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)


class WorkThread:
    """A thread that starts with its first work and does lower ranks first. Any thread may give work.

    Without a thread, and where none can be started, work is done at once by the thread that gives it.
    """

    def __init__(self, name: str, *, is_threaded: bool, is_nice: bool = False) -> None:
        """Make one; with `is_nice` it gives way to the owner thread."""
        self._name, self._is_threaded, self._is_nice = name, is_threaded, is_nice
        self._work: PriorityQueue[tuple[int, int, Callable[[], object] | None]] = PriorityQueue()
        self._numbers = count()
        self._thread: threading.Thread | None = None
        self._starting = threading.RLock()  # reentrant: a signal handler may give work, too

    @property
    def is_current(self) -> bool:
        """Whether the caller's thread is this one."""
        return self._thread is threading.current_thread()

    def do(self, work: Callable[[], object], rank: int = 0) -> None:
        """Have work done; what it raises is lost where there is a thread."""
        if self._is_threaded and self._thread is None:
            with (
                HeldBack(),
                self._starting,
            ):  # a thread that is started is known, so that it can be ended
                if self._thread is None:
                    self._start()
        if self._is_threaded:
            self._work.put((rank, next(self._numbers), work))
        else:
            work()

    def close(self) -> None:
        """Return when all work is done; none may be given afterwards."""
        if self._thread is not None:
            self._work.put((_LAST, next(self._numbers), None))
            self._thread.join()

    def _start(self) -> None:
        try:
            self._thread = started(self._run, self._name)
        except NoThreadError:
            self._is_threaded = False

    def _run(self) -> None:
        if self._is_nice:
            be_nice()
        while (work := self._work.get()[2]) is not None:
            with suppress(Exception):  # the owner thread has been told
                work()
