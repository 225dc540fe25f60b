"""The order of sequences that wait for a slot, by policy, and the deadlines of requests."""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, insort
from collections import defaultdict, deque
from itertools import count
from typing import TYPE_CHECKING, TypeAlias

from cbatch.core.driver import SequenceDriver, Status
from cbatch.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

    from cbatch.core.plan import Slot
    from cbatch.engine_options import ScheduleOptions
    from cbatch.options import RunOptions

DEFAULT_AGEING_S = 10.0
"""Seconds of waiting worth one point of priority: our choice; two minutes of waiting outweigh ten points."""

BY_PROMPT = ("shortest",)
"""Policies that depend on a prompt's tokens: the prompt is tokenized before its sequence is queued."""

_N_ENDED_MIN = 64

Rank: TypeAlias = "tuple[float, int]"
"""A place in the order, never the same for two sequences: the lowest comes first."""

_Entry: TypeAlias = "tuple[float, int, SequenceDriver]"
"""A sequence with its negated rank."""

_Line: TypeAlias = "deque[_Entry]"
"""Ascending: new sequences mostly join at the beginning, and the next one leaves at the end."""


def make_policy(options: ScheduleOptions) -> Callable[[SequenceDriver], Rank]:
    """Return the function that gives a new sequence its rank, which must not change while it waits.

    Raises:
        ConfigError: no rank is known for the policy.
    """
    match options.policy:
        case "fcfs" | "round_robin":
            stamps = count()
            return lambda _: (next(stamps), 0)
        case "priority":
            return lambda driver: (virtual_arrival_s(driver, options), driver.number)
        case "shortest":
            return lambda driver: (length_and_age(driver), driver.number)
    raise ConfigError(f"policy {options.policy!r} gives the queue no order")


def length_and_age(driver: SequenceDriver) -> float:
    """Return the number of prompt tokens plus the number in the order of submission; the lowest comes first.

    So a sequence is overtaken by at most as many later ones as its prompt has tokens.
    """
    return driver.n_prompt + driver.number


def virtual_arrival_s(driver: SequenceDriver, schedule: ScheduleOptions) -> float:
    """Return the submission time minus `ageing_s` seconds for each point of priority.

    So no sequence waits for one that was submitted more than `ageing_s` × (difference of priority) later.
    """
    return driver.clock.submitted_s - head_start_s(driver.request.options, schedule)


def head_start_s(options: RunOptions, schedule: ScheduleOptions) -> float:
    """Return how many seconds of waiting a request's priority is worth."""
    return (schedule.ageing_s or DEFAULT_AGEING_S) * (options.priority or 0)


class AdmissionQueue:
    """Sequences that wait for a slot: returning ones, the oldest first, then new ones in the policy's order.

    Each chosen slot has its own line, so a sequence that waits for a certain slot blocks no other. One order holds
    across all lines.
    """

    def __init__(self, options: ScheduleOptions) -> None:
        self._rank = make_policy(options)
        self._ranks: dict[SequenceDriver, Rank] = {}
        self._lines: defaultdict[Slot | None, _Line] = defaultdict(deque, {None: deque()})
        """By chosen slot; None for sequences that accept any."""

    def __len__(self) -> int:
        """Return the number of sequences in the queue. Callable from any thread."""
        return len(self._ranks)

    @property
    def n_chosen(self) -> int:
        """Number of sequences that wait for a chosen slot."""
        return len(self._ranks) - len(self._lines[None])

    @property
    def chosen_slots(self) -> Collection[Slot]:
        """The slots that sequences chose."""
        return [slot for slot, line in self._lines.items() if slot is not None and line]

    def candidates(
        self, holders: Sequence[SequenceDriver | None], ending: Collection[SequenceDriver] = ()
    ) -> Iterator[SequenceDriver]:
        """Yield in order the sequences that may get a slot; for each chosen slot, only the first sequence.

        Args:
            ending: holders that are about to leave.
        """
        slots = [slot for slot in self.chosen_slots if is_to_be_had(holders[slot], ending)]
        entries: Iterable[_Entry] = reversed(self._lines[None])
        if slots:
            firsts = sorted([self._lines[slot][-1] for slot in slots], reverse=True)
            entries = heapq.merge(entries, firsts, reverse=True)
        return (driver for _, _, driver in entries)

    def add(self, drivers: Iterable[SequenceDriver]) -> None:
        """Insert new sequences; many at once cost one pass over the queue."""
        new: defaultdict[Slot | None, list[_Entry]] = defaultdict(list)
        for driver in drivers:
            self._ranks[driver] = self._rank(driver)
            new[driver.chosen_slot].append(self._entry(driver))
        for slot, entries in new.items():
            line = self._lines[slot]
            if len(entries) > 1:
                self._lines[slot] = deque(sorted([*line, *entries]))
            elif line and line[0] < entries[0]:
                insort(line, entries[0])
            else:  # the last in the order, as always in `fcfs`
                line.appendleft(entries[0])

    def put_back(self, driver: SequenceDriver) -> None:
        """Insert a returning sequence: at the place where it was paused, or before all new ones.

        Use `add` for a sequence whose turn has ended.
        """
        self._ranks[driver] = driver.kept_rank or (-math.inf, driver.number)
        driver.kept_rank = None
        insort(self._lines[driver.chosen_slot], self._entry(driver))

    def remove(self, driver: SequenceDriver) -> None:
        """Remove a sequence; it must be there."""
        line = self._lines[driver.chosen_slot]
        del line[bisect_left(line, self._entry(driver))]
        del self._ranks[driver]

    def set_aside(self, driver: SequenceDriver) -> None:
        """Remove a sequence, which must be there; `put_back` gives it its place again."""
        driver.kept_rank = self._ranks[driver]
        self.remove(driver)

    def remove_all(self, drivers: Iterable[SequenceDriver]) -> None:
        """Remove sequences, which must be there; many at once cost one pass over the queue."""
        slots: dict[Slot | None, None] = {}
        for driver in drivers:
            del self._ranks[driver]
            slots[driver.chosen_slot] = None
        for slot in slots:
            self._lines[slot] = deque([e for e in self._lines[slot] if e[2] in self._ranks])

    def _entry(self, driver: SequenceDriver) -> _Entry:
        key, number = self._ranks[driver]
        return -key, -number, driver


def is_to_be_had(holder: SequenceDriver | None, ending: Collection[SequenceDriver] = ()) -> bool:
    """Whether a slot with this holder can be given to another sequence: if it is free, paused or about to be left."""
    return holder is None or holder.status is Status.PAUSED or holder in ending


class Deadlines:
    """Sequences with a deadline. Ended ones are removed from time to time."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, SequenceDriver]] = []
        self._numbers = count()
        self._n_ended = 0

    def add(self, driver: SequenceDriver) -> None:
        """Watch a sequence's deadline, if it has one."""
        deadline_s = driver.request.deadline_s
        if deadline_s < math.inf:
            heapq.heappush(self._heap, (deadline_s, next(self._numbers), driver))

    def pop_due(self, now: float) -> SequenceDriver | None:
        """Remove and return a sequence that is past its deadline and has not ended, or None."""
        while self._heap and self._heap[0][0] <= now:
            driver = heapq.heappop(self._heap)[2]
            if driver.finish_reason is None:
                return driver
        return None

    def note_end(self) -> None:
        """Count an ended sequence. Ended entries are removed many at a time, so each costs a constant on average."""
        self._n_ended += 1
        if self._n_ended > max(_N_ENDED_MIN, len(self._heap) // 2):
            self._heap = [e for e in self._heap if e[2].finish_reason is None]
            heapq.heapify(self._heap)
            self._n_ended = 0

    def next_s(self) -> float | None:
        """Return a time before which no deadline passes; None without deadlines."""
        return self._heap[0][0] if self._heap else None
