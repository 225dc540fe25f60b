"""What a run over a file has done, and what is left."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from cbatch.progress import ENDINGS

if TYPE_CHECKING:
    from cbatch.progress import Ending


@dataclass(frozen=True, slots=True)
class RunSummary:
    """What a run over a file has done.

    Args:
        ending: why it ended.
        n_items: items that were read, blank lines not counted.
        n_done: records that this run has written, errors included.
        n_failed: of these, errors.
        n_before: items that had their record already.
        n_failed_before: of these, errors.
        n_left: items that were read and have no record.
        prompt_tokens: of the items that ended.
        output_tokens: of the items that ended.
        cached_tokens: prompt tokens that were not computed again.
        elapsed_s: from the first item to the last record.
    """

    ending: Ending
    n_items: int = 0
    n_done: int = 0
    n_failed: int = 0
    n_before: int = 0
    n_failed_before: int = 0
    n_left: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    elapsed_s: float = 0.0

    @property
    def is_complete(self) -> bool:
        """Whether every item of the input has its record."""
        return self.ending == "done" and not self.n_left

    @property
    def n_errors(self) -> int:
        """Items of the input whose record is an error, whichever run has written it."""
        return self.n_failed + self.n_failed_before

    @property
    def resume_hint(self) -> str:
        """What to do for the rest; empty where there is none."""
        if self.is_complete:
            return ""
        return (
            f"{ENDINGS[self.ending]}: run the same command again to go on; what is done stays done"
        )
