"""Parts of a sequence: its times, the scores of its prompt, and its moving window."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cbatch.core.plan import TokenLogprobs


@dataclass(eq=False, slots=True)
class RequestClock:
    """When a request was submitted, admitted and so on, in seconds of the engine's clock."""

    submitted_s: float
    admitted_s: float | None = None
    computed_s: float | None = None
    """When the prompt was computed; set only if nothing is sampled."""
    first_token_s: float | None = None
    last_token_s: float | None = None
    finished_s: float | None = None

    def after_s(self, when_s: float | None) -> float | None:
        """Return the seconds from submission to `when_s`; None if that is None."""
        return None if when_s is None else when_s - self.submitted_s


@dataclass(eq=False, slots=True)
class PromptScores:
    """Log-probabilities of a prompt's tokens, in order, as they are computed.

    # [first, n_scored) computed, with a score for the token after each   [n_scored, end) still to score
    """

    end: int
    """Index of the prompt's last token; no token after it needs a score."""
    first: int = 0
    """Index of the token before the first scored one."""
    found: list[TokenLogprobs] = field(default_factory=list)

    @property
    def n_scored(self) -> int:
        """Leading tokens of the prompt that no missing score depends on."""
        return self.first + len(self.found)

    @property
    def is_complete(self) -> bool:
        """Whether every wanted token has its score."""
        return self.n_scored >= self.end

    def n_targets(self, start: int, n_tokens: int) -> int:
        """Return for how many of the `n_tokens` tokens from `start` a step scores the next token: all, or none.

        If prompts are cut at fixed places, the whole chunk that contains `first` is scored.
        """
        if self.is_complete or start + n_tokens <= self.n_scored:
            return 0
        return max(0, min(n_tokens, self.end - start))

    def n_within(self, start: int, n_tokens: int, n_targets: int) -> int:
        """Return how many of the `n_tokens` tokens from `start` a step takes if it can score `n_targets`.

        Tokens that need no score are computed in chunks of their own, which end where scoring begins or continues.
        """
        if not self.is_complete and start < self.n_scored:
            return min(n_tokens, self.n_scored - start)
        return n_tokens if self.n_targets(start, n_tokens) <= n_targets else n_targets

    def take(self, start: int, scores: Sequence[TokenLogprobs]) -> bool:
        """Append the wanted ones of the scores of the tokens from `start + 1` on; return whether none is NaN."""
        wanted = scores[self.n_scored - start :]
        self.found += wanted
        return not any(math.isnan(score.logprob) for score in wanted)


@dataclass(eq=False, slots=True)
class MovingWindow:
    """How a full window moves: `n_discard` tokens after the first `n_keep` are removed at once."""

    n_keep: int
    n_discard: int
    prompt: tuple[int, ...] = ()
    """The whole prompt, including removed tokens."""
    n_shifts: int = 0
    n_early: int = 0
    """How many of these shifts came before anything was computed, because the prompt did not fit."""

    @property
    def n_left_out(self) -> int:
        """Tokens of the prompt that are never computed."""
        return self.n_early * self.n_discard

    @classmethod
    def of(
        cls, n_asked: int, n_discard: int, prompt: tuple[int, ...], n_window: int
    ) -> tuple[MovingWindow, list[str]]:
        """Return a window that keeps `n_asked` tokens, or the nearest possible, with warnings about the difference."""
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
