"""Slices of time for threads that compute: one computes, and the others wait for their slice."""

from __future__ import annotations

import threading
import time
from collections import deque
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_SLICE_S = 0.03
"""Seconds of a slice: 32 threads come round within a second. Our choice."""


class TimeSlices:
    """Lets threads compute one at a time, a slice each, in turn. From any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._changed = threading.Condition()
        self._queue: deque[object] = deque()
        """A value for each thread; that of the thread that computes is the first."""

    @contextmanager
    def share(self) -> Iterator[Callable[[], None]]:
        """Wait for a slice; yield a function to be called often, which waits for the next slice where one is over."""
        me = object()
        with self._changed:
            self._queue.append(me)
            self._wait(me)
        ends_s = self._clock() + _SLICE_S

        def go_on() -> None:
            nonlocal ends_s
            if self._clock() < ends_s:
                return
            with self._changed:
                self._queue.rotate(-1)
                self._changed.notify_all()
                self._wait(me)
            ends_s = self._clock() + _SLICE_S

        try:
            yield go_on
        finally:
            with self._changed:
                self._queue.remove(me)
                self._changed.notify_all()

    def _wait(self, me: object) -> None:
        self._changed.wait_for(lambda: self._queue[0] is me)
