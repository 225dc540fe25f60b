"""The order of sequences without a slot, by policy; and when the time of a request is over."""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, insort
from collections import OrderedDict
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from cbatch.core.driver import SequenceDriver
    from cbatch.engine_options import ScheduleOptions

DEFAULT_AGEING_S = 10.0
"""Seconds of waiting worth one point of priority: our choice; ten points are passed by in less than two minutes."""

BY_PROMPT = ("shortest",)
"""Policies that look at the tokens of a prompt: it becomes tokens before its sequence is queued."""

_N_ENDED_MIN = 64


class FifoPolicy:
    """Waiting sequences, first come, first served; one that is added again goes to the end."""

    def __init__(self) -> None:
        self._drivers: OrderedDict[int, SequenceDriver] = OrderedDict()  # by number

    def __len__(self) -> int:
        return len(self._drivers)

    def __iter__(self) -> Iterator[SequenceDriver]:
        return iter(self._drivers.values())

    def add(self, drivers: Iterable[SequenceDriver]) -> None:
        """Put them at the end."""
        self._drivers.update((d.number, d) for d in drivers)

    def remove(self, driver: SequenceDriver) -> None:
        """Remove one."""
        del self._drivers[driver.number]


class SortedPolicy:
    """Waiting sequences, the lowest key first, equals in order of submission. A key must not change meanwhile."""

    def __init__(self, key: Callable[[SequenceDriver], float]) -> None:
        self._key = key
        # descending: the next one is the last
        self._entries: list[tuple[float, int, SequenceDriver]] = []

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[SequenceDriver]:
        return (driver for *_, driver in reversed(self._entries))

    def add(self, drivers: Iterable[SequenceDriver]) -> None:
        """Put each in its place; many at once cost one pass over the queue."""
        new = [self._entry(d) for d in drivers]
        if len(new) == 1:
            insort(self._entries, new[0])
        else:
            self._entries += new
            self._entries.sort()

    def remove(self, driver: SequenceDriver) -> None:
        """Remove one."""
        del self._entries[bisect_left(self._entries, self._entry(driver))]

    def _entry(self, driver: SequenceDriver) -> tuple[float, int, SequenceDriver]:
        return -self._key(driver), -driver.number, driver


Policy: TypeAlias = FifoPolicy | SortedPolicy
"""The order of turns. Nothing here looks at more sequences than it is asked for."""


def make_policy(options: ScheduleOptions) -> Policy:
    """Return an empty queue for a policy."""
    if options.policy == "priority":
        ageing_s = options.ageing_s or DEFAULT_AGEING_S
        return SortedPolicy(lambda d: virtual_arrival_s(d, ageing_s))
    if options.policy == "shortest":
        return SortedPolicy(length_and_age)
    return FifoPolicy()


def length_and_age(driver: SequenceDriver) -> float:
    """Return a key for the fewest prompt tokens first: every later submission counts as one token more.

    So a sequence is overtaken by at most as many later ones as its prompt has tokens.
    """
    return driver.n_prompt + driver.number


def virtual_arrival_s(driver: SequenceDriver, ageing_s: float) -> float:
    """Return when a sequence would have come had it no priority: a key that ages without being touched.

    Nobody waits behind a sequence that came more than `ageing_s` × (difference of priority) later.
    """
    return driver.clock.submitted_s - ageing_s * (driver.request.options.priority or 0)


class AdmissionQueue:
    """Sequences that could take a slot: returning ones, the oldest first, then the others as the policy has them."""

    def __init__(self, options: ScheduleOptions) -> None:
        self._policy = make_policy(options)
        self._returning: list[tuple[int, SequenceDriver]] = []

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._policy) + len(self._returning)

    def __iter__(self) -> Iterator[SequenceDriver]:
        """Yield them in order."""
        for _, driver in self._returning:
            yield driver
        yield from self._policy

    def add(self, drivers: Iterable[SequenceDriver]) -> None:
        """Put newcomers where the policy has them."""
        self._policy.add(drivers)

    def put_back(self, driver: SequenceDriver) -> None:
        """Put a sequence that had its turn before, or was held, among the first."""
        insort(self._returning, (driver.number, driver))

    def remove(self, driver: SequenceDriver) -> None:
        """Remove a sequence; it must be there."""
        i = bisect_left(self._returning, driver.number, key=lambda entry: entry[0])
        if i < len(self._returning) and self._returning[i][1] is driver:
            del self._returning[i]
        else:
            self._policy.remove(driver)


class Deadlines:
    """The sequences that have a deadline; those that end before it are thrown out now and then."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, SequenceDriver]] = []
        self._n_ended = 0

    def add(self, driver: SequenceDriver) -> None:
        """Watch a driver's deadline, if it has one."""
        deadline_s = driver.request.deadline_s
        if deadline_s < math.inf:
            heapq.heappush(self._heap, (deadline_s, driver.number, driver))

    def pop_due(self, now: float) -> SequenceDriver | None:
        """Return a sequence whose time is over and that has not ended, or None."""
        while self._heap and self._heap[0][0] <= now:
            driver = heapq.heappop(self._heap)[2]
            if driver.finish_reason is None:
                return driver
        return None

    def note_end(self) -> None:
        """Count a sequence that ended; many dead entries are thrown out at once, so each costs the same."""
        self._n_ended += 1
        if self._n_ended > max(_N_ENDED_MIN, len(self._heap) // 2):
            self._heap = [e for e in self._heap if e[2].finish_reason is None]
            heapq.heapify(self._heap)
            self._n_ended = 0

    def next_s(self) -> float | None:
        """Return when the next one is over at the latest, or None."""
        return self._heap[0][0] if self._heap else None
