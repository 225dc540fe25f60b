"""One request: what was asked and when it passed its stations; scores of its prompt, and a window that moves."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cbatch.errors import PromptError, PromptTooLongError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cbatch.core.plan import TokenLogprobs
    from cbatch.messages import BatchPrompt
    from cbatch.options import AdapterSet, DryBreakers, Grammar, RunOptions, Sampling
    from cbatch.response import TokenLogprob


MAX_OUTPUT = 2**31 - 1
"""Stands for an output without end, where the window moves on."""


@dataclass(frozen=True, slots=True)
class Request:
    """What was asked: the options are merged and the seed is drawn."""

    id: str
    prompt: BatchPrompt
    options: RunOptions
    sampling: Sampling
    stop_tokens: tuple[int, ...] = ()
    deadline_s: float = math.inf
    """When it ends at the latest, in seconds of the engine's clock."""
    adapters: AdapterSet = ()
    n_logprobs: int | None = None
    """Alternatives to report for each sampled token; None where no log-probabilities are asked for."""
    n_prompt_logprobs: int | None = None
    """Alternatives to report for each token of the prompt; None where it is not scored."""
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    """Log-probabilities of the prompt, where an earlier request found them."""
    owner: str = ""
    """The mark of the engine that it was submitted to."""
    output: tuple[int, ...] = ()
    """Output to go on from: tokens that an earlier request with this prompt sampled."""
    output_logprobs: tuple[TokenLogprob, ...] = ()
    """Log-probabilities of `output`, where they are asked for."""
    continues: int | None = None
    """The number of the earlier request's sequence."""
    grammar: Grammar | None = None
    """What the output must match."""
    dry_breakers: DryBreakers | None = None
    """Strings past which DRY looks for no repetition."""

    def cap(self, n_prompt: int, n_window: int) -> tuple[int, list[str]]:
        """Return the most tokens of output for a prompt of `n_prompt` tokens, with a warning where more are asked for.

        Raises:
            RequestFailedError: the prompt has no token.
            PromptTooLongError: the prompt does not fit the window, or not with all of a strict cap.
        """
        if not n_prompt:
            raise PromptError("the prompt is empty: it has no token")
        cap = 0 if self.options.prefill_only else self.options.max_tokens
        n_least = self._n_least(cap)
        if n_prompt + n_least > n_window:
            raise PromptTooLongError(n_prompt, n_window, n_least)
        n_most = MAX_OUTPUT if self.options.n_discard else n_window - n_prompt
        if cap is None or cap <= n_most:
            return n_most if cap is None else cap, []
        why = f"the prompt has {n_prompt} and the window {n_window}"
        return n_most, [f"max_tokens is {n_most}, not {cap}: {why}"]

    def _n_least(self, cap: int | None) -> int:
        """Return how much output there must be room for: all of a strict cap, or one token more than there is."""
        n_next = 1
        if not self.options.n_discard:
            n_next += len(self.output)
            if self.options.strict_max_tokens and cap is not None:
                return cap
        return n_next if cap is None else min(cap, n_next)


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
    """Log-probabilities of the `n_wanted` tokens behind the prompt's first, in order, as they are computed.

    # tokens [0, len(found)) of the prompt were computed with a score for the token behind each
    """

    n_wanted: int
    found: list[TokenLogprobs] = field(default_factory=list)

    @property
    def is_complete(self) -> bool:
        """Whether every wanted token has its score."""
        return len(self.found) >= self.n_wanted

    def n_targets(self, start: int, n_tokens: int) -> int:
        """Return how many of `n_tokens` tokens from `start` are followed by a token to score."""
        if start < len(self.found):
            return 0
        return max(0, min(n_tokens, self.n_wanted - start))

    def n_within(self, start: int, n_tokens: int, n_targets: int) -> int:
        """Return how many of `n_tokens` tokens from `start` a step takes that can score `n_targets`.

        Tokens with scores that are computed again are not scored again: their chunk ends where scoring goes on.
        """
        if not self.is_complete and start < len(self.found):
            return min(n_tokens, len(self.found) - start)
        return n_tokens if self.n_targets(start, n_tokens) <= n_targets else n_targets

    def take(self, scores: Sequence[TokenLogprobs]) -> bool:
        """Append the scores of a run; return whether none of them is NaN."""
        self.found += scores
        return not any(math.isnan(score.logprob) for score in scores)


@dataclass(eq=False, slots=True)
class MovingWindow:
    """How a full window goes on: `n_discard` tokens behind the first `n_keep` are taken out at once."""

    n_keep: int
    n_discard: int
    prompt: tuple[int, ...] = ()
    """All of the prompt, also when some was taken out."""
    n_shifts: int = 0

    @classmethod
    def of(
        cls, n_asked: int, n_discard: int, prompt: tuple[int, ...], n_window: int
    ) -> tuple[MovingWindow, list[str]]:
        """Return the window that keeps `n_asked` tokens, all of the prompt where negative, and what could not be."""
        n_prompt = len(prompt)
        n_asked = n_prompt if n_asked < 0 else n_asked
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
