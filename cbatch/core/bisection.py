"""Who made a step fail: its sequences are tried in halves until the guilty one stands alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cbatch.core.status import Status

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cbatch.core.driver import SequenceDriver


class FaultBisection:
    """A stack of groups to compute apart from all others; a group is over when each of it is past the failure.

    So a passing failure does no harm, and n sequences with one guilty need about 2 log₂ n steps.
    """

    def __init__(self) -> None:
        self._groups: list[dict[SequenceDriver, int]] = []  # with the cells that clear of suspicion

    def group(self) -> list[SequenceDriver]:
        """Return those to compute next, and nobody beside them; empty where nobody is under suspicion."""
        while self._groups:
            suspects = {d: n for d, n in self._groups[-1].items() if _is_suspect(d, n)}
            if suspects:
                self._groups[-1] = suspects
                return list(suspects)
            self._groups.pop()
        return []

    def blame(self, n_past: Mapping[SequenceDriver, int]) -> None:
        """Suspect those of a failed step, two halves apart; each is clear once it has so many cells."""
        suspects = list(n_past.items())
        half = (len(suspects) + 1) // 2
        self._groups += [dict(part) for part in (suspects[half:], suspects[:half]) if part]

    def split(self, n_past: Mapping[SequenceDriver, int]) -> SequenceDriver | None:
        """Take in that the group failed: halve it, or return the one who was alone in it."""
        self._groups.pop()
        if len(n_past) == 1:
            return next(iter(n_past))
        self.blame(n_past)
        return None


def _is_suspect(driver: SequenceDriver, n_clear: int) -> bool:
    return driver.status is Status.RUNNING and driver.n_computed < n_clear
