"""Finds the sequence that makes a step fail, by computing the suspects in halves."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cbatch.core.driver import Status

if TYPE_CHECKING:
    from collections.abc import Container, Mapping

    from cbatch.core.driver import SequenceDriver


class FaultBisection:
    """A stack of groups of suspects. Each group is computed without any other sequence.

    A suspect is cleared when it has cells past the place of the failure, so a failure that does not recur ends no
    sequence. Finding one culprit among n sequences takes about 2 log₂ n steps.
    """

    def __init__(self) -> None:
        self._groups: list[dict[SequenceDriver, int]] = []  # with the cells that clear a suspect

    def suspects(self, leaving: Container[SequenceDriver] = ()) -> list[SequenceDriver]:
        """Return the group to compute next, without any other sequence; empty if there is no suspect.

        Args:
            leaving: sequences that lose their slots first.
        """
        for group in reversed(self._groups):
            if suspects := [d for d, n in group.items() if _is_suspect(d, n) and d not in leaving]:
                return suspects
        return []

    def clear(self) -> None:
        """Clear the suspects that are past the failure or have left. They stay cleared if they lose cells later."""
        while self._groups:
            group = self._groups.pop()
            if suspects := {d: n for d, n in group.items() if _is_suspect(d, n)}:
                self._groups.append(suspects)
                return

    def suspect(self, n_clear: Mapping[SequenceDriver, int]) -> None:
        """Add the sequences of a failed step in two halves; `n_clear` cells clear each."""
        suspects = list(n_clear.items())
        half = (len(suspects) + 1) // 2
        self._groups += [dict(part) for part in (suspects[half:], suspects[:half]) if part]

    def split(self, n_clear: Mapping[SequenceDriver, int]) -> SequenceDriver | None:
        """Halve the group that failed again; if it is a single sequence, return it as the culprit."""
        self.clear()
        self._groups.pop()
        if len(n_clear) == 1:
            return next(iter(n_clear))
        self.suspect(n_clear)
        return None


def _is_suspect(driver: SequenceDriver, n_clear: int) -> bool:
    return driver.status is Status.RUNNING and driver.n_computed < n_clear
