"""Which batch is worked on next: owners take turns, so that no owner's batches keep those of others waiting."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass


@dataclass(frozen=True, eq=False, slots=True)
class BatchLane:
    """Work of one kind.

    Args:
        n_shared: most batches at once, as long as an owner has more than one of them.
        n_max: most batches at once, of different owners.
    """

    n_shared: int
    n_max: int


READING = BatchLane(1, 2)
"""Reading whole files, which keeps a core busy for seconds: our choice."""

RUNNING = BatchLane(4, 32)
"""Running lines, maybe for days: our choice; a small batch need not wait for a large one before it."""


class BatchTurns:
    """The batches at work. For one thread at a time; never waits."""

    def __init__(self) -> None:
        self._n = Counter[BatchLane]()
        self._n_of = Counter[tuple[BatchLane, str]]()
        self._last: dict[tuple[BatchLane, str], int] = {}
        """The number of each owner's last turn: 1, 2, …"""
        self._n_turns = 0

    def may_begin(self, lane: BatchLane, owner: str) -> bool:
        """Whether there is room for one more batch of an owner."""
        n_most = lane.n_shared if self._n_of[lane, owner] else lane.n_max
        return self._n[lane] < n_most

    def rank(self, lane: BatchLane, owner: str) -> tuple[int, int]:
        """Return a value that is lower for owners who come first: few batches at work, the last turn long ago."""
        return self._n_of[lane, owner], self._last.get((lane, owner), 0)

    def begin(self, lane: BatchLane, owner: str) -> None:
        """Note that an owner's batch is at work."""
        self._n[lane] += 1
        self._n_of[lane, owner] += 1
        self._n_turns += 1
        self._last[lane, owner] = self._n_turns

    def end(self, lane: BatchLane, owner: str) -> None:
        """Note that an owner's batch is at work no more."""
        self._n[lane] -= 1
        self._n_of[lane, owner] -= 1
