"""Parts of a sequence: its reply; and what a plain request does not have, scores of its prompt, a window that moves."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cbatch.chat.answers import AnswerParts
from cbatch.chat.text import TextStream

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cbatch.chat.answers import AnswerReader
    from cbatch.core.plan import TokenLogprobs
    from cbatch.core.request import Request


@dataclass(eq=False, slots=True)
class Reply:
    """What the reader of a sequence gets: the output as text, its parts, and what was given out."""

    request: Request
    text: TextStream
    parts: AnswerParts | None
    """The answer taken apart, where it is more than text."""
    is_watched: bool = False
    """Whether somebody reads the output as it comes, or may: before the first delivery that is not known."""
    delivered: tuple[int, int] | None = None
    """Parts of the text and tokens that were given out; None before the first chunk."""

    @classmethod
    def of(
        cls, request: Request, piece: Callable[[int], bytes], reader: AnswerReader | None
    ) -> Reply:
        """Return an empty reply; `piece` gives the bytes of a token."""
        options = request.options
        stops = tuple(options.stop or ())
        text = TextStream(piece, stops, include_stop=bool(options.include_stop))
        return cls(request, text, None if reader is None else AnswerParts(reader, text))

    def feed(self, output: list[int]) -> None:
        """Feed the tokens of the output that are new since the last time to the text."""
        text = self.text
        if text.n_fed < len(output) and text.stop is None:
            has_stop = output[-1] in self.request.stop_tokens
            is_cut = has_stop and not self.request.options.include_stop
            (self.parts or text).feed(output[text.n_fed : -1 if is_cut else None])


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
    n_shifts: int = 0
    prompt: tuple[int, ...] = ()
    """The whole prompt, once tokens were taken out."""

    @classmethod
    def of(
        cls, n_asked: int, n_discard: int, n_prompt: int, n_window: int
    ) -> tuple[MovingWindow, list[str]]:
        """Return the window that keeps `n_asked` tokens, all of the prompt where negative, and what could not be."""
        n_asked = n_prompt if n_asked < 0 else n_asked
        n_keep = min(n_asked, n_prompt, n_window - 2)
        window, warnings = cls(n_keep, min(n_discard, n_window - n_keep - 1)), []
        if n_keep < n_asked:
            why = f"prompt has {n_prompt}" if n_keep == n_prompt else f"window has {n_window}"
            warnings.append(f"n_keep is {n_keep}, not {n_asked}: the {why}")
        if window.n_discard < n_discard:
            warnings.append(
                f"n_discard is {window.n_discard}, not {n_discard}: the window has {n_window} and {n_keep} are kept"
            )
        return window, warnings

    def shift(self, tokens: list[int], n_prompt: int) -> tuple[int, int]:
        """Take tokens out of `tokens`, the first `n_prompt` a prompt's; return how many are kept and taken out."""
        if not self.n_shifts:
            self.prompt = tuple(tokens[:n_prompt])
        del tokens[self.n_keep : self.n_keep + self.n_discard]
        self.n_shifts += 1
        return self.n_keep, self.n_discard
