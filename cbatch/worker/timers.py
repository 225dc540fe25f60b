"""Actions at their time, for the client of workers, which has no owner thread that looks at a clock."""

from __future__ import annotations

import heapq
import threading
import time
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, TypeAlias

from cbatch.support.interrupts import Contained, HeldBack, Sleepers
from cbatch.support.thread_start import started

if TYPE_CHECKING:
    from collections.abc import Callable

_Timer: TypeAlias = "tuple[float, int, Callable[[], object]]"


class Timers:
    """Does actions in one thread, which starts with the first of them. Every method from any thread."""

    def __init__(self) -> None:
        self._due: list[_Timer] = []
        self._numbers = count()
        self._changed = Sleepers()
        self._thread: threading.Thread | None = None
        self._starting = threading.RLock()  # reentrant: a signal handler may set a timer, too
        self._is_over = False

    def set(self, when_s: float, action: Callable[[], object]) -> None:
        """Have `action` done at `when_s` of `time.perf_counter`. Raises a `NoThreadError`; then it is not set."""
        with HeldBack(), self._starting:
            if self._thread is None:
                self._thread = started(self._run, "cbatch-timers")
            heapq.heappush(self._due, (when_s, next(self._numbers), action))
        self._changed.wake()

    def close(self) -> None:
        """Do nothing more. Does not wait."""
        self._is_over = True
        self._changed.wake()

    def _run(self) -> None:
        while not self._is_over:
            first = self._first()
            left_s = None if first is None else max(0.0, first[0] - time.perf_counter())
            self._changed.wait_for(partial(self._has_other, first), left_s)
            self._do_due()

    def _first(self) -> _Timer | None:
        return self._due[0] if self._due else None

    def _has_other(self, first: _Timer | None) -> bool:
        """Whether another timer is the first one now, or none is to come."""
        return self._is_over or self._first() is not first

    def _do_due(self) -> None:
        while (first := self._first()) and first[0] <= time.perf_counter() and not self._is_over:
            action = heapq.heappop(self._due)[2]
            with Contained():
                action()
            del action
