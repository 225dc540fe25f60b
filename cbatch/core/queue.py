"""Who comes next: the order of those that wait for a slot."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from itertools import islice
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from cbatch.core.driver import SequenceDriver
    from cbatch.engine_options import ScheduleOptions

DEFAULT_AGEING_S = 10.0
"""Seconds of waiting worth one point of priority: our choice; ten points are passed by in less than two minutes."""


class Queue(Protocol):
    """Waiting sequences in the order of their turns. Nothing here looks at more than it is asked for."""

    def __len__(self) -> int:
        """How many wait."""

    def add(self, drivers: Iterable[SequenceDriver]) -> None:
        """Put them in their places."""

    def remove(self, driver: SequenceDriver) -> None:
        """Take one out; it must be there."""

    def first(self, n: int) -> list[SequenceDriver]:
        """Return the next `n`, in order."""


class FifoQueue:
    """First come, first served; who is added again goes to the end."""

    def __init__(self) -> None:
        self._drivers: OrderedDict[int, SequenceDriver] = OrderedDict()  # by number

    def __len__(self) -> int:
        return len(self._drivers)

    def add(self, drivers: Iterable[SequenceDriver]) -> None:
        """Put them at the end."""
        self._drivers.update((d.number, d) for d in drivers)

    def remove(self, driver: SequenceDriver) -> None:
        """Take one out."""
        del self._drivers[driver.number]

    def first(self, n: int) -> list[SequenceDriver]:
        """Return the next `n`."""
        return list(islice(self._drivers.values(), n))


class SortedQueue:
    """The lowest key first, equals in order of submission. A key must not change while its sequence waits."""

    def __init__(self, key: Callable[[SequenceDriver], float]) -> None:
        self._key = key
        self._entries: list[
            tuple[float, int, SequenceDriver]
        ] = []  # descending: the next one is the last

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, drivers: Iterable[SequenceDriver]) -> None:
        """Put each in its place; many at once cost one pass over the queue."""
        new = [self._entry(d) for d in drivers]
        if len(new) == 1:
            insort(self._entries, new[0])
        else:
            self._entries += new
            self._entries.sort()

    def remove(self, driver: SequenceDriver) -> None:
        """Take one out."""
        del self._entries[bisect_left(self._entries, self._entry(driver))]

    def first(self, n: int) -> list[SequenceDriver]:
        """Return the next `n`."""
        return [driver for *_, driver in self._entries[: -n - 1 : -1]]

    def _entry(self, driver: SequenceDriver) -> tuple[float, int, SequenceDriver]:
        return -self._key(driver), -driver.number, driver


def make_queue(options: ScheduleOptions) -> Queue:
    """Return an empty queue for a policy."""
    if options.policy == "priority":
        ageing_s = options.ageing_s or DEFAULT_AGEING_S
        return SortedQueue(lambda d: virtual_arrival_s(d, ageing_s))
    if options.policy == "shortest":
        return SortedQueue(length_and_age)
    return FifoQueue()


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
