"""The tokens of a bound sequence, in step with what is computed of it; native/edit.cpp does the same."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cbatch.core.plan import Chunk


class History:
    """What a sequence was bound with, and every token that is computed behind it.

    What is pending when a sequence is bound is in its history already: so nothing is new up to the first output.
    """

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens = list(tokens)
        self._end: int | None = None

    def feed(self, chunk: Chunk) -> None:
        """Take the tokens of a chunk as far as they are new; a chunk that is computed again has none."""
        end = chunk.start + len(chunk.tokens)
        if self._end is None:
            self._end = end if chunk.has_output else None
        elif end > self._end:
            self.tokens += chunk.tokens[max(0, self._end - chunk.start) :]
            self._end = end
