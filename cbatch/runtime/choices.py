"""Requests with several sequences and one result: one sequence for each answer, or for each text of `choice`."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from bisect import bisect_left
from dataclasses import replace
from typing import TYPE_CHECKING

from cbatch.errors import EngineError, RequestFailedError
from cbatch.response import DRAFT_COUNTS, BatchOutputChunk, BatchResult, Usage
from cbatch.runtime.output import Origin

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cbatch.core.request import Request
    from cbatch.options import RunOptions
    from cbatch.response import Timings, TokenLogprob
    from cbatch.runtime.interface import Target

_MARK = "\0"


def member_id(id: str, i_choice: int) -> str:
    """Return the id of one choice's sequence; no request can have it."""
    return f"{id}{_MARK}{i_choice}"


def request_id(inside: str) -> str:
    """Return the id of the request that a sequence belongs to."""
    return inside.partition(_MARK)[0]


def display_id(inside: str) -> str:
    """Return the id of a sequence as users read it: its request's id, or `a[1]` for the second choice of `a`."""
    id, mark, i_choice = inside.partition(_MARK)
    return f"{id}[{i_choice}]" if mark else id


class Members(ABC):
    """Stands between the loop and a batch's target for one request with several sequences, its members."""

    n_kept = 1
    """Answers that the target gets."""

    def __init__(self, target: Target, place: int, id: str, n_members: int) -> None:
        """Make one for the request `id` at `place` in its batch."""
        self.target, self.id = target, id
        self._place = place
        self._results: list[BatchResult | None] = [None] * n_members

    @property
    def member_ids(self) -> list[str]:
        """The ids of the sequences."""
        return [member_id(self.id, i) for i in range(len(self._results))]

    def expect_choices(self, n: int) -> None:  # noqa: B027 (of its members none has choices)
        """Do nothing: a member has no choices."""

    def ends_with(self, results: Sequence[tuple[int, BatchResult]]) -> bool:
        """Whether `results` are those of all members that have not ended yet."""
        return self._results.count(None) == len(results)

    @property
    def is_streamed(self) -> bool:
        """Whether chunks are wanted as they come."""
        return False

    @property
    def wants_tokens(self) -> bool:
        """Whether chunks come for each new token."""
        return self.target.wants_tokens

    @abstractmethod
    def deliver(
        self, chunks: Sequence[BatchOutputChunk], results: Sequence[tuple[int, BatchResult]]
    ) -> None:
        """Pass on chunks under the request's own id, and one result when the last member has ended. Owner thread."""


class Labels(Members):
    """The members of a request whose `choice_probs` are asked for: one for each text, scored behind the prompt."""

    def __init__(self, target: Target, place: int, id: str, options: RunOptions) -> None:
        self._texts, self._has_logprobs = tuple(options.choice or ()), bool(options.logprobs)
        super().__init__(target, place, id, len(self._texts))

    def deliver(
        self, chunks: Sequence[BatchOutputChunk], results: Sequence[tuple[int, BatchResult]]
    ) -> None:
        """Deliver the likeliest text when the last one has its score. Owner thread."""
        for i, result in results:
            self._results[i] = result
        if None not in self._results:
            result = self._joined([r for r in self._results if r is not None])
            self.target.deliver([result.as_chunk()], [(self._place, result)])

    def _joined(self, results: Sequence[BatchResult]) -> BatchResult:
        failed = [r for r in results if r.error or r.finish_reason in ("cancelled", "timeout")]
        scored = [tuple(filter(None, r.prompt_logprobs or ())) for r in results]
        totals = [math.fsum(token.logprob for token in tokens) for tokens in scored]
        most = max(totals)
        best = totals.index(most)
        n_prompt = results[best].usage.prompt_tokens - len(scored[best])
        common = replace(
            min(failed, key=lambda r: r.error is None) if failed else results[best],
            id=self.id,
            text="",
            token_ids=(),
            logprobs=() if self._has_logprobs else None,
            prompt_logprobs=None,
            usage=Usage(max(0, n_prompt), 0, _n_cached(results)),
            timings=_timings(results[best], results),
            origin=None,
        )
        if failed:
            return common
        if most == -math.inf:
            error = RequestFailedError("the model gives every text of choice the probability 0")
            return replace(common, finish_reason="error", error=error)
        weights = [math.exp(total - most) for total in totals]
        return replace(
            common,
            text=self._texts[best],
            token_ids=tuple(token.token_id for token in scored[best]),
            finish_reason="stop",
            logprobs=scored[best] if self._has_logprobs else None,
            usage=replace(common.usage, completion_tokens=len(scored[best])),
            choice_probs={t: w / sum(weights) for t, w in zip(self._texts, weights, strict=True)},
        )


class Choices(Members):
    """The members of a request with several choices.

    The `n` of `n_choices` answers with the highest mean log-probability are kept, the best first; where all are kept,
    they stay in order.
    """

    def __init__(self, target: Target, place: int, id: str, options: RunOptions) -> None:
        super().__init__(target, place, id, options.n_choices)
        self.n_kept = options.n or 1
        self._held: dict[int, BatchOutputChunk] = {}
        self._options = options
        self._echoed: tuple[TokenLogprob, ...] | None = None
        """How the first choice begins: the prompt's log-probabilities; None before its first chunk."""
        self._early: list[BatchOutputChunk] = []
        """Chunks of the others that came before it."""
        self._unread: list[BatchOutputChunk] = []
        """Chunks of choices that have ended, while nobody reads them as they come."""

    @property
    def is_streamed(self) -> bool:
        """Whether chunks are wanted as they come; never where only the end tells which choices are kept."""
        return self.target.is_streamed and self._keeps_all

    def deliver(
        self, chunks: Sequence[BatchOutputChunk], results: Sequence[tuple[int, BatchResult]]
    ) -> None:
        """Pass on chunks under the request's own id, and one result when the last choice has ended. Owner thread."""
        for i, result in results:
            self._results[i] = self._renamed(result)
        passed = [self._own(chunk) for chunk in chunks]
        if not self._keeps_all:  # then each has one chunk, its last
            self._held.update((chunk.index, chunk) for chunk in passed)
            passed = []
        elif self._options.echo and self._options.logprobs:
            passed = self._with_echo(passed)
        passed, self._unread = [*self._unread, *passed], []
        if None in self._results:
            if not self.target.is_streamed:  # with the result a worker need not tell them
                self._unread = passed
            elif passed:
                self.target.deliver(passed, [])
            return
        all_results = self._with_prompt([r for r in self._results if r is not None])
        order = [*range(len(all_results))]
        if not self._keeps_all:
            order = sorted(order, key=lambda i: self._rank(all_results[i]))[: self.n_kept]
            passed = [
                replace(self._held[i], index=place, logprobs=self._wanted(all_results[i].logprobs))
                for place, i in enumerate(order)
            ]
        kept = [all_results[i] for i in order]
        self.target.deliver(passed, [(self._place, self._joined(kept, all_results))])

    @property
    def _keeps_all(self) -> bool:
        return self.n_kept == len(self._results)

    def _wanted(self, found: tuple[TokenLogprob, ...] | None) -> tuple[TokenLogprob, ...] | None:
        """Return log-probabilities, unless they were only computed to rank by."""
        return found if self._options.logprobs else None

    def _with_echo(self, chunks: Sequence[BatchOutputChunk]) -> list[BatchOutputChunk]:
        """Return chunks with the echo's log-probabilities, which the first choice has; those before it wait for it."""
        if self._echoed is None:
            self._early += chunks
            first = next((chunk for chunk in self._early if chunk.index == 0), None)
            if first is None:
                return []
            others = [chunk for chunk in self._early if chunk is not first]
            self._echoed, chunks, self._early = first.logprobs or (), [first, *others], []
        return [_scored_chunk(chunk, self._echoed) for chunk in chunks]

    def _n_echoed(self, result: BatchResult) -> int:
        return result.usage.prompt_tokens if self._options.echo else 0

    def _with_prompt(self, results: Sequence[BatchResult]) -> list[BatchResult]:
        """Return the results, each with the prompt's log-probabilities, which only the first one has."""
        first, *others = results
        if self._options.n_prompt_logprobs is None:
            return [*results]
        return [first, *(self._scored(first, other) for other in others)]

    def _scored(self, first: BatchResult, other: BatchResult) -> BatchResult:
        found, n = first.prompt_logprobs, self._n_echoed(first)
        if not found:  # it never ran
            n_unknown = other.usage.prompt_tokens if _has_run(other) else 0
            return replace(other, prompt_logprobs=(None,) * n_unknown)
        echoed = (first.logprobs or ())[:n]
        logprobs = other.logprobs and (*echoed, *other.logprobs[n:])
        return replace(other, prompt_logprobs=found, logprobs=logprobs)

    def _rank(self, result: BatchResult) -> tuple[bool, float]:
        """Return a sort key: the highest mean log-probability first, failed answers last."""
        answer = (result.logprobs or ())[self._n_echoed(result) :]
        logprobs = [token.logprob for token in answer]
        mean = sum(logprobs) / len(logprobs) if logprobs else -math.inf
        return result.error is not None, -mean

    def _renamed(self, result: BatchResult) -> BatchResult:
        origin = result.origin
        if isinstance(origin, Origin):
            origin = replace(origin, request=self._as_asked(origin.request))
        return replace(result, id=self.id, origin=origin)

    def _as_asked(self, request: Request) -> Request:
        """Return the request of one choice as its caller made it, for `Engine.extend` from that choice alone."""
        # log-probabilities that the caller did not ask for were to rank by
        n_logprobs = request.n_logprobs if self._options.logprobs else None
        n_top = self._options.n_prompt_logprobs
        return replace(request, id=self.id, n_logprobs=n_logprobs, n_prompt_logprobs=n_top)

    def _own(self, chunk: BatchOutputChunk) -> BatchOutputChunk:
        index = int(chunk.id.rpartition(_MARK)[2])
        return replace(chunk, id=self.id, index=index, logprobs=self._wanted(chunk.logprobs))

    def _joined(
        self, kept: Sequence[BatchResult], all_results: Sequence[BatchResult]
    ) -> BatchResult:
        """Return one result with all kept choices in it: the first choice's, or that of one that failed."""
        if not self._options.logprobs:
            kept = [replace(r, logprobs=None) for r in kept]
        first = _leading(kept, all_results)
        usage = Usage(
            max(r.usage.prompt_tokens for r in all_results),
            sum(r.usage.completion_tokens for r in all_results),
            _n_cached(all_results),
            sum(r.usage.context_shifts for r in all_results),
            sum(r.usage.reasoning_tokens for r in all_results),
            max(r.usage.image_tokens for r in all_results),
            max(r.usage.audio_tokens for r in all_results),
        )
        timings = _timings(first, all_results)
        return replace(first, usage=usage, timings=timings, choices=tuple(kept), origin=None)


def _scored_chunk(chunk: BatchOutputChunk, echoed: tuple[TokenLogprob, ...]) -> BatchOutputChunk:
    """Return a chunk with the numbers of the tokens that it echoes: sampled ones have their own, no NaN."""
    own = chunk.logprobs or ()
    if not (chunk.index and own and math.isnan(own[0].logprob)):
        return chunk
    n = bisect_left(own, True, key=lambda token: not math.isnan(token.logprob))
    return replace(chunk, logprobs=(*echoed[:n], *own[len(echoed[:n]) :]))


def _leading(kept: Sequence[BatchResult], all_results: Sequence[BatchResult]) -> BatchResult:
    """Return the first kept result, or one that failed, with the warnings and the end of all choices.

    A request is cancelled, or runs out of time, with all its choices: where one of them was, the request was.
    """
    first = min(kept, key=lambda r: (r.error is None, r.finish_reason != "error"))
    if first.error is not None:
        return first
    failed = [r.error for r in all_results if r.error is not None]
    if failed:
        n, cause = len(all_results), failed[0]
        said = (
            f"{len(failed)} of {n} answers failed and were left out; the first failed with: {cause}"
        )
        first = replace(first, warnings=(*first.warnings, said))
    for result in all_results:
        if isinstance(result.error, EngineError):
            return replace(first, finish_reason="error", error=result.error, stop_reason=None)
        if result.finish_reason in ("cancelled", "timeout"):
            first = replace(first, finish_reason=result.finish_reason, stop_reason=None)
    return first


def _has_run(result: BatchResult) -> bool:
    """Whether a choice ever had a slot, or failed."""
    return result.error is None or result.finish_reason == "error"


def _timings(first: BatchResult, results: Sequence[BatchResult]) -> Timings:
    """Return the first choice's times up to the last end, with the rate of the choice that computed most."""
    last_s = [s for r in results if (s := r.timings.last_token_s) is not None]
    computed = [r for r in results if r.timings.prompt_tps is not None]
    most = min(computed, key=lambda r: r.usage.cached_tokens, default=first)
    return replace(
        first.timings,
        total_s=max(r.timings.total_s for r in results),
        prompt_tps=most.timings.prompt_tps,
        last_token_s=max(last_s, default=None),
        **{name: sum(getattr(r.timings, name) for r in results) for name in DRAFT_COUNTS},
    )


def _n_cached(results: Sequence[BatchResult]) -> int:
    """Return the prompt tokens that none of several choices computed."""
    return min((r.usage.cached_tokens for r in results if _has_run(r)), default=0)
