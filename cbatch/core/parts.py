"""Parts of a sequence: its times; and what a plain one does not have, scores of its prompt and a window that moves."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cbatch.core.plan import TokenLogprobs


@dataclass(eq=False, slots=True)
class RequestClock:
    """When one request passed its stations, in seconds of the engine's clock."""

    submitted_s: float
    admitted_s: float | None = None
    computed_s: float | None = None
    """When the prompt was computed, where nothing is sampled."""
    first_token_s: float | None = None
    last_token_s: float | None = None
    finished_s: float | None = None

    def after_s(self, when_s: float | None) -> float | None:
        """Return how long after submission a station was passed; None where it was not."""
        return None if when_s is None else when_s - self.submitted_s


@dataclass(eq=False, slots=True)
class PromptScores:
    """Log-probabilities of a prompt's tokens, in order, as they are computed.

    # tokens [first, n_scored) of the prompt were computed with a score for the token after each
    # tokens [n_scored, end) are to be
    """

    end: int
    """The last token of the prompt: nothing is behind it to score."""
    first: int = 0
    """The token before the first one that is scored."""
    found: list[TokenLogprobs] = field(default_factory=list)

    @property
    def n_scored(self) -> int:
        """Tokens from the prompt's first on that need not be computed for a score (any more)."""
        return self.first + len(self.found)

    @property
    def is_complete(self) -> bool:
        """Whether every wanted token has its score."""
        return self.n_scored >= self.end

    def n_targets(self, start: int, n_tokens: int) -> int:
        """Return how many of `n_tokens` tokens from `start` a step scores the next token of: all, or none.

        Where prompts are cut at fixed places, those before `first` in the chunk that has `first` are scored, too.
        """
        if self.is_complete or start + n_tokens <= self.n_scored:
            return 0
        return max(0, min(n_tokens, self.end - start))

    def n_within(self, start: int, n_tokens: int, n_targets: int) -> int:
        """Return how many of `n_tokens` tokens from `start` a step takes that can score `n_targets`.

        Tokens that need no score are computed in chunks of their own: these end where scoring begins or goes on.
        """
        if not self.is_complete and start < self.n_scored:
            return min(n_tokens, self.n_scored - start)
        return n_tokens if self.n_targets(start, n_tokens) <= n_targets else n_targets

    def take(self, start: int, scores: Sequence[TokenLogprobs]) -> bool:
        """Append the wanted scores of a run, of the tokens after those from `start`; return whether none is NaN."""
        wanted = scores[self.n_scored - start :]
        self.found += wanted
        return not any(math.isnan(score.logprob) for score in wanted)


@dataclass(eq=False, slots=True)
class MovingWindow:
    """How a full window goes on: `n_discard` tokens after the first `n_keep` are taken out at once."""

    n_keep: int
    n_discard: int
    prompt: tuple[int, ...] = ()
    """All of the prompt, also when some was taken out."""
    n_shifts: int = 0
    n_early: int = 0
    """Shifts, of these, before anything was computed: the prompt did not fit."""

    @property
    def n_left_out(self) -> int:
        """Tokens of the prompt that are never computed."""
        return self.n_early * self.n_discard

    @classmethod
    def of(
        cls, n_asked: int, n_discard: int, prompt: tuple[int, ...], n_window: int
    ) -> tuple[MovingWindow, list[str]]:
        """Return the window that keeps `n_asked` tokens, and what could not be."""
        n_prompt = len(prompt)
        n_keep = min(n_asked, n_prompt, n_window - 2)
        window, warnings = cls(n_keep, min(n_discard, n_window - n_keep - 1), prompt), []
        if n_keep < n_asked:
            why = f"prompt has {n_prompt}" if n_keep == n_prompt else f"window has {n_window}"
            warnings.append(f"n_keep is {n_keep}, not {n_asked}: the {why}")
        if window.n_discard < n_discard:
            warnings.append(
                f"n_discard is {window.n_discard}, not {n_discard}: the window has {n_window} and {n_keep} are kept"
            )
        return window, warnings
