"""The order of sequences without a slot, by policy; and when the time of a request is over."""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, insort
from collections import OrderedDict
from itertools import count
from typing import TYPE_CHECKING, TypeAlias

from cbatch.core.lifecycle import Status

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

    from cbatch.core.driver import SequenceDriver
    from cbatch.core.plan import Slot
    from cbatch.engine_options import ScheduleOptions

DEFAULT_AGEING_S = 10.0
"""Seconds of waiting worth one point of priority: our choice; ten points are passed by in less than two minutes."""

BY_PROMPT = ("shortest",)
"""Policies that look at the tokens of a prompt: it becomes tokens before its sequence is queued."""

_N_ENDED_MIN = 64


Rank: TypeAlias = "tuple[float, int]"
"""Places in one order: the lowest comes first."""


class FifoPolicy:
    """Waiting sequences, first come, first served; one that is added again goes to the end."""

    def __init__(self, stamps: Iterator[int]) -> None:
        self._stamps = stamps
        self._drivers: OrderedDict[int, tuple[int, SequenceDriver]] = OrderedDict()  # by number

    def __len__(self) -> int:
        return len(self._drivers)

    def __iter__(self) -> Iterator[tuple[Rank, SequenceDriver]]:
        return (((stamp, 0), driver) for stamp, driver in self._drivers.values())

    def add(self, drivers: Iterable[SequenceDriver]) -> None:
        """Put them at the end."""
        self._drivers.update(
            (d.number, (stamp, d)) for d, stamp in zip(drivers, self._stamps, strict=False)
        )

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

    def __iter__(self) -> Iterator[tuple[Rank, SequenceDriver]]:
        return (((-key, -number), driver) for key, number, driver in reversed(self._entries))

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


def make_policy(options: ScheduleOptions, stamps: Iterator[int]) -> Policy:
    """Return an empty queue for a policy; queues with the same stamps have one order."""
    if options.policy == "priority":
        ageing_s = options.ageing_s or DEFAULT_AGEING_S
        return SortedPolicy(lambda d: virtual_arrival_s(d, ageing_s))
    if options.policy == "shortest":
        return SortedPolicy(length_and_age)
    return FifoPolicy(stamps)


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


class _Line:
    """Returning sequences, the oldest first, then the others as the policy has them."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._returning: list[tuple[int, SequenceDriver]] = []

    def __len__(self) -> int:
        return len(self._policy) + len(self._returning)

    def __iter__(self) -> Iterator[tuple[Rank, SequenceDriver]]:
        for number, driver in self._returning:
            yield (-math.inf, number), driver
        yield from self._policy

    def add(self, drivers: Iterable[SequenceDriver]) -> None:
        self._policy.add(drivers)

    def put_back(self, driver: SequenceDriver) -> None:
        insort(self._returning, (driver.number, driver))

    def remove(self, driver: SequenceDriver) -> None:
        i = bisect_left(self._returning, driver.number, key=lambda entry: entry[0])
        if i < len(self._returning) and self._returning[i][1] is driver:
            del self._returning[i]
        else:
            self._policy.remove(driver)


class AdmissionQueue:
    """Sequences that could take a slot: returning ones, the oldest first, then the others as the policy has them.

    Those that chose their slot stand in a line of their own for each slot, so they hold up nobody else; all lines
    together have one order.
    """

    def __init__(self, options: ScheduleOptions) -> None:
        self._options, self._stamps = options, count()
        self._others = self._new_line()
        self._chosen: dict[Slot, _Line] = {}
        self._n = 0

    def __len__(self) -> int:
        """Return how many there are. From any thread."""
        return self._n

    @property
    def n_chosen(self) -> int:
        """How many wait for a slot that they chose."""
        return self._n - len(self._others)

    @property
    def chosen_slots(self) -> Collection[Slot]:
        """The slots that sequences wait for and no other."""
        return self._chosen.keys()

    def candidates(
        self, running: Sequence[SequenceDriver | None], ending: Collection[SequenceDriver] = ()
    ) -> Iterator[SequenceDriver]:
        """Yield in order those that could have one of the slots; for each slot, the first of those that chose it.

        Args:
            running: the sequence in each slot; a paused one gives it up where another can enter.
            ending: running sequences that are about to leave.
        """
        entries = iter(self._others)
        if self._chosen:
            firsts = [
                next(iter(line))
                for slot, line in self._chosen.items()
                if _is_to_be_had(running[slot], ending)
            ]
            entries = heapq.merge(entries, sorted(firsts, key=_rank), key=_rank)
        return (driver for _, driver in entries)

    def add(self, drivers: Iterable[SequenceDriver]) -> None:
        """Put newcomers where the policy has them."""
        drivers = [*drivers]
        self._n += len(drivers)
        if all(d.chosen_slot is None for d in drivers):
            self._others.add(drivers)  # at once, for they may be many
            return
        for driver in drivers:
            self._line_of(driver).add([driver])

    def put_back(self, driver: SequenceDriver) -> None:
        """Put a sequence that had its turn before, or was held, among the first."""
        self._n += 1
        self._line_of(driver).put_back(driver)

    def remove(self, driver: SequenceDriver) -> None:
        """Remove a sequence; it must be there."""
        line, slot = self._line_of(driver), driver.chosen_slot
        line.remove(driver)
        self._n -= 1
        if slot is not None and not line:
            del self._chosen[slot]

    def _line_of(self, driver: SequenceDriver) -> _Line:
        slot = driver.chosen_slot
        if slot is None:
            return self._others
        if slot not in self._chosen:
            self._chosen[slot] = self._new_line()
        return self._chosen[slot]

    def _new_line(self) -> _Line:
        return _Line(make_policy(self._options, self._stamps))


def _rank(entry: tuple[Rank, SequenceDriver]) -> Rank:
    return entry[0]


def _is_to_be_had(holder: SequenceDriver | None, ending: Collection[SequenceDriver]) -> bool:
    return holder is None or holder.status is Status.PAUSED or holder in ending


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
