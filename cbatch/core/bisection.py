"""Which sequence makes a step fail: the suspects are computed in halves until the culprit stands alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cbatch.core.driver import Status

if TYPE_CHECKING:
    from collections.abc import Container, Mapping

    from cbatch.core.driver import SequenceDriver


class FaultBisection:
    """A stack of groups of suspects; each group is computed apart from all other sequences.

    A suspect is cleared when it has cells past the place of the failure, so a failure that does not come back ends no
    sequence. To find one culprit among n sequences takes about 2 log₂ n steps.
    """

    def __init__(self) -> None:
        self._groups: list[dict[SequenceDriver, int]] = []  # with the cells that clear a suspect

    def suspects(self, leaving: Container[SequenceDriver] = ()) -> list[SequenceDriver]:
        """Return the group to compute next, without any other sequence; empty where there is no suspect.

        Args:
            leaving: sequences that lose their slots before that.
        """
        for group in reversed(self._groups):
            if suspects := [d for d, n in group.items() if _is_suspect(d, n) and d not in leaving]:
                return suspects
        return []

    def clear(self) -> None:
        """Forget the suspects that are past their failure or have left, whatever becomes of their cells later."""
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
        """Halve the group that failed again; return the culprit instead where the group is one sequence."""
        self.clear()
        self._groups.pop()
        if len(n_clear) == 1:
            return next(iter(n_clear))
        self.suspect(n_clear)
        return None


def _is_suspect(driver: SequenceDriver, n_clear: int) -> bool:
    return driver.status is Status.RUNNING and driver.n_computed < n_clear
