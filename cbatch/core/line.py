"""Who has no slot: those that come back, the queue behind them, and those that are kept from their turn."""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import TYPE_CHECKING

from cbatch.core.queue import make_queue

if TYPE_CHECKING:
    from collections.abc import Iterable

    from cbatch.core.driver import SequenceDriver
    from cbatch.engine_options import ScheduleOptions


class AdmissionQueue:
    """Sequences without a slot. Who comes back goes before the queue, the oldest first; who is held is passed."""

    def __init__(self, options: ScheduleOptions) -> None:
        self._queue = make_queue(options)
        self._returning: list[tuple[int, SequenceDriver]] = []
        self._held: dict[int, SequenceDriver] = {}  # by number

    def __len__(self) -> int:
        """How many could take a slot."""
        return len(self._queue) + len(self._returning)

    @property
    def n_held(self) -> int:
        """How many could not."""
        return len(self._held)

    def is_held(self, driver: SequenceDriver) -> bool:
        """Whether one is kept from its turn."""
        return driver.number in self._held

    def add(self, drivers: Iterable[SequenceDriver]) -> None:
        """Put newcomers where the policy has them."""
        self._queue.add(drivers)

    def first(self, n: int) -> list[SequenceDriver]:
        """Return the next `n`."""
        first = [driver for _, driver in self._returning[:n]]
        return first + self._queue.first(n - len(first))

    def put_back(self, driver: SequenceDriver) -> None:
        """Let one that had its turn before, or was held from it, come among the first."""
        self._held.pop(driver.number, None)
        insort(self._returning, (driver.number, driver))

    def hold(self, driver: SequenceDriver) -> None:
        """Keep one that stands nowhere else from its turn."""
        self._held[driver.number] = driver

    def let_go(self, driver: SequenceDriver) -> bool:
        """Forget one that was held; False where it was not."""
        return self._held.pop(driver.number, None) is not None

    def remove(self, driver: SequenceDriver) -> None:
        """Take out one that could take a slot; it must be there."""
        i = bisect_left(self._returning, driver.number, key=lambda entry: entry[0])
        if i < len(self._returning) and self._returning[i][1] is driver:
            del self._returning[i]
        else:
            self._queue.remove(driver)
