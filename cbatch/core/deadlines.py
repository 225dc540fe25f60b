"""When the time of those in flight is over."""

from __future__ import annotations

import heapq
import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cbatch.core.driver import SequenceDriver

_N_ENDED_MIN = 64


class Deadlines:
    """The sequences that have a deadline; those that end before it are thrown out now and then."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, SequenceDriver]] = []
        self._n_ended = 0

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, driver: SequenceDriver) -> None:
        """Watch a driver's deadline, if it has one."""
        deadline_s = driver.request.deadline_s
        if deadline_s < math.inf:
            heapq.heappush(self._heap, (deadline_s, driver.number, driver))

    def pop_due(self, now: float) -> SequenceDriver | None:
        """Return one whose time is over and who has not ended, or None."""
        while self._heap and self._heap[0][0] <= now:
            driver = heapq.heappop(self._heap)[2]
            if driver.finish_reason is None:
                return driver
        return None

    def note_end(self) -> None:
        """Take in that a driver ended; many dead ones are thrown out at once, so each costs the same."""
        self._n_ended += 1
        if self._n_ended > max(_N_ENDED_MIN, len(self._heap) // 2):
            self._heap = [e for e in self._heap if e[2].finish_reason is None]
            heapq.heapify(self._heap)
            self._n_ended = 0

    def next_s(self) -> float | None:
        """Return when the next one is over at the latest, or None."""
        return self._heap[0][0] if self._heap else None
