"""What a step computes of a sequence: a span of its tokens. Where prompts are cut into spans, and which are scored."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from cbatch.support.picture_tokens import FIRST_PICTURE, n_rows_at

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cbatch.core.driver import SequenceDriver
    from cbatch.core.plan import Slot, TokenLogprobs

N_TARGETS_MAX = 64
"""Most targets of all spans of one step: with a vocabulary of 256,000 their logits take 64 MB. Our choice."""


@dataclass(slots=True)
class Span:
    """What a step computes of one sequence: `inputs` at positions `start`, `start + 1`, …

    A decode step has one input and an output. A chunk of a prompt has no output, or one for its last input. In a scored
    chunk, inputs have targets.

    Never changed after construction. The class is not frozen, because a step makes one for each row, and construction
    of a frozen one takes four times as long.
    """

    slot: Slot
    start: int
    inputs: Sequence[int]
    """Tokens; ids beyond every vocabulary are rows of pictures and sounds."""
    has_output: bool
    """Whether the logits of the last input are sampled; it is the sequence's last pending token then."""
    targets: Sequence[int] = ()
    """Tokens to score by the logits of the first `len(targets)` inputs: the token that follows each. An input with an
    output has no target."""

    @property
    def is_lone_token(self) -> bool:
        """Whether it is one token, which is computed beside those of other slots."""
        return len(self.inputs) == 1 and self.inputs[0] < FIRST_PICTURE

    @property
    def begins_in_picture(self) -> bool:
        """Whether the first input is a row of a picture."""
        return self.inputs[0] >= FIRST_PICTURE

    def part(self, first: int, end: int) -> Span:
        """Return the inputs `first` to `end`, with their targets; the last input has the output."""
        return Span(
            self.slot,
            self.start + first,
            self.inputs[first:end],
            self.has_output and end == len(self.inputs),
            self.targets[first:end],
        )

    def split(self) -> tuple[Span, Span]:
        """Split off the last input, which has the output, into a second span."""
        last = len(self.inputs) - 1
        return self.part(0, last), self.part(last, last + 1)


@dataclass(frozen=True, slots=True)
class PromptCuts:
    """Where prompts are cut into chunks, so that results do not depend on other requests in the batch.

    If `most` is greater than `multiple`, cuts at any multiples give identical bits, and a chunk may be as long as a
    step has room for. Otherwise a prompt is cut at every multiple. If `multiple` is not 0, a prompt is also cut where
    its pictures begin and end, and a picture after every `multiple` of its rows.
    """

    multiple: int = 0
    """Chunks begin at multiples of this; 0 for anywhere."""
    most: int = 0
    """Most tokens of a chunk."""
    least: int = 1
    """Fewest tokens of a prompt's last chunk, unless it is the only one."""
    ends_in_row: bool = False
    """Whether the last token of a prompt is computed as a row beside decoding rows, if its next token is sampled and
    the prompt does not end at a multiple. Cells before that token can be shared."""
    has_whole_pictures: bool = False
    """Whether pictures are not cut: see `KvCapabilities`, from which the scheduler takes it."""

    @classmethod
    def every(cls, n: int) -> PromptCuts:
        """Return cuts at every multiple of `n`; 0 for anywhere."""
        return cls(n, n)

    def __bool__(self) -> bool:
        return self.multiple > 0

    def __str__(self) -> str:
        return str(self.multiple) if self.is_every else f"any multiple of {self.multiple}"

    @property
    def is_every(self) -> bool:
        """Whether a prompt is cut at every multiple."""
        return self.most == self.multiple

    @property
    def n_room(self) -> int:
        """Tokens that a step must have room for, so that every prompt can continue."""
        return self.most if self.is_every else self.multiple + self.least - 1

    @property
    def when_scored(self) -> PromptCuts:
        """These cuts, adapted to a scored prompt."""
        return PromptCuts.every(min(self.multiple, N_TARGETS_MAX))

    def whole(self, n: int) -> int:
        """Return the last position up to `n` at which a chunk of a prompt without pictures may begin."""
        return n - n % self.multiple if self.multiple else n

    def n_whole(self, n: int, n_prompt: int, edges: Sequence[int]) -> int:
        """Return how many of a prompt's first `n` tokens can be reused from a request whose prompt has the same ones.

        Cells must not depend on the tokens after the common ones, so a picture is only reused as a whole, and text up
        to a multiple.

        Args:
            n: below `n_prompt`.
            n_prompt: the length of the prompt.
            edges: where its pictures begin and end, in pairs.
        """
        i = bisect_right(edges, n)
        if i % 2:
            i -= 1
            n = edges[i]
        start, end = edges[i - 1] if i else 0, edges[i] if i < len(edges) else n_prompt
        if n < end or self.whole(n) < n:
            n = self.whole(min(n, end - self.least))
        return max(start, n)

    def n_before_row(self, n_prompt: int) -> int:
        """Return how many tokens of a prompt are computed in chunks: all, or all before its final row."""
        return n_prompt - bool(self.ends_in_row and n_prompt % self.multiple)

    def parts(self, span: Span) -> Sequence[Span]:
        """Return the parts in which a span is computed: a final row of its prompt is separate, see `ends_in_row`."""
        end = span.start + len(span.inputs)
        is_end = span.has_output and not span.targets and len(span.inputs) > 1
        return span.split() if is_end and self.n_before_row(end) < end else (span,)

    def n_chunk(
        self, start: int, n_prompt: int, room: int, edges: Sequence[int] = (), n_apart: int = 0
    ) -> int:
        """Return the length of a prompt's chunk from `start` if `room` tokens fit; 0 if no chunk does.

        Pictures, which begin and end at `edges`, and the texts between them are chunks of their own. The last `n_apart`
        tokens are left to later steps; no other cut changes.
        """
        i = bisect_right(edges, start)
        if i % 2:
            n_rows = n_left = edges[i] - start
            if not self.has_whole_pictures:
                n_rows = min(n_left, self.multiple - (start - edges[i - 1]) % self.multiple)
            return n_rows if n_rows <= room else 0
        if i < len(edges):
            n_prompt, n_apart = edges[i], 0
        n_left = n_prompt - n_apart - start
        n_next = min(n_left, self.multiple - start % self.multiple)
        if self.is_every or start % self.multiple:
            return n_next if n_next <= room else 0
        if n_left <= min(room, self.most):
            return n_left
        return max(
            0, self.whole(min(start + room, start + self.most, n_prompt - self.least)) - start
        )


ANYWHERE = PromptCuts()


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
        """Return how many targets a span of `n_tokens` tokens from `start` has: one for each before `end`, or none.

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


class Pending(NamedTuple):
    """What a step may compute of a sequence: the tokens without a cell after the plan's changes of slots.

    One pending token is a decode step; more are a prompt, a sequence that goes on after it lost cells, or both.
    """

    driver: SequenceDriver
    slot: Slot
    start: int

    @property
    def n(self) -> int:
        """Number of pending tokens, which are all computed before the next output."""
        return len(self.driver.tokens) - self.start

    @property
    def n_fitting(self) -> int:
        """Number of pending tokens that are computed before the window is full."""
        return min(len(self.driver.tokens), self.driver.n_window) - self.start

    def n_whole(self, n: int) -> int:
        """Return how many of the next `n` tokens can be computed without a part of a picture."""
        return max(0, self.driver.n_whole(ANYWHERE, self.start + n) - self.start)

    @property
    def place(self) -> tuple[Slot, SequenceDriver, int]:
        """The slot, the sequence, and where in it the step starts."""
        return self.slot, self.driver, self.start

    @property
    def n_rows(self) -> int:
        """Rows of the picture that is next, which are computed together; 0 if none is next."""
        return n_rows_at(self.driver.picture_edges, self.start)

    def n_chunk(self, cuts: PromptCuts, room: int) -> int:
        """Return the length of the next chunk if prompts are cut as `cuts` says and `room` tokens fit.

        Tokens that were computed as rows (output, and the end of a prompt) are recomputed one at a time.
        """
        driver, start, cuts = self.driver, self.start, self.driver.own_cuts(cuts)
        if start >= driver.n_prompt:
            return min(1, room)
        n_before_row = cuts.n_before_row(driver.n_prompt)
        n_apart = driver.n_prompt - n_before_row if driver.output and start < n_before_row else 0
        return cuts.n_chunk(start, driver.n_prompt, room, driver.picture_edges, n_apart)


def limit_targets(prefills: Sequence[Pending], wanted: list[int], *, has_cuts: bool) -> None:
    """Lower `wanted` to what a step can score, in order; chunks that cannot be cut are whole or left out."""
    n_left = N_TARGETS_MAX
    for i, (driver, _, start) in enumerate(prefills):
        if (scores := driver.scores) is not None:
            if not has_cuts:
                wanted[i] = scores.n_within(start, wanted[i], n_left)
            elif scores.n_targets(start, wanted[i]) > n_left:
                wanted[i] = 0
            n_left -= scores.n_targets(start, wanted[i])
