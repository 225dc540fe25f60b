"""Requests as their client keeps them until they end: enough to ask again when a worker dies."""

from __future__ import annotations

import math
import time
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from cbatch.core.request import Request
from cbatch.errors import WorkerDiedError
from cbatch.options import RunOptions
from cbatch.response import BatchOutputChunk, BatchResult, Timings, Usage
from cbatch.runtime.output import Origin
from cbatch.worker.wire import (
    chunk_of_json,
    extension_as_json,
    prompt_as_json,
    result_of_json,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from cbatch.messages import BatchPrompt
    from cbatch.runtime.ids import RequestId
    from cbatch.runtime.interface import Submission, Target
    from cbatch.worker.connection import Connection, Reply

N_ALONE_MAX = 3
"""Deaths of workers that a request is computed alone in; then it is at fault. Our choice."""

N_TOGETHER_MAX = 2
"""Deaths of workers among whose requests one is; then it is computed alone. Our choice."""


@dataclass(frozen=True, slots=True)
class SentOrigin(Origin):
    """Where a worker's result comes from; `number` has a meaning to that worker alone."""

    worker: Connection | None


@dataclass(eq=False, slots=True)
class Asked:
    """One request in flight."""

    id: RequestId
    prompt: BatchPrompt
    options: RunOptions
    """Of its run; the prompt's own come before them."""
    target: Target
    place: int
    name: str
    _: KW_ONLY
    submitted_s: float
    ends_s: float = math.inf
    is_fed: bool = False
    may_wait: bool = True
    asks_again: bool = False
    """Whether it is asked again where its worker dies."""
    extended: BatchResult | None = None
    """The result that it continues, by `n_more` tokens."""
    n_more: int = 0
    worker: Connection | None = None
    """Who has it; None while it waits for a worker."""
    has_begun: bool = False
    """Whether it is computed, as far as its worker has said."""
    n_deaths: int = 0
    n_deaths_alone: int = 0
    is_paused: bool = False
    is_awaited: bool = False
    """Whether its caller waits for what the worker says to it, and raises an error itself."""
    reply: Reply | None = None
    """What the worker says to it."""
    heard: list[BatchOutputChunk] = field(default_factory=list)
    """What its reader has got."""

    @classmethod
    def of(cls, submission: Submission) -> Iterator[Asked]:
        """Yield the requests of a submission."""
        now, s = time.perf_counter() - submission.age_s, submission
        for i, (prompt, id, name) in enumerate(zip(s.prompts, s.ids, s.names, strict=True)):
            place = s.first_place + i
            yield cls(
                id,
                prompt,
                s.options,
                s.target,
                place,
                name,
                ends_s=s.ends_s,
                submitted_s=now,
                is_fed=s.is_fed,
                may_wait=s.may_wait,
                asks_again=s.asks_again,
            )

    @classmethod
    def to_extend(cls, result: BatchResult, id: RequestId, n_more: int, target: Target) -> Asked:
        """Return the request that continues a result, which has an origin."""
        origin = result.origin
        assert isinstance(origin, Origin)
        request, now = origin.request, time.perf_counter()
        more = cls(id, request.prompt, request.options, target, 0, "", submitted_s=now)
        more.extended, more.n_more = result, n_more
        return more

    # ---- to a worker ----

    def item(self) -> dict[str, Any]:
        """Return the prompt as a worker takes it."""
        return prompt_as_json(self.prompt, self.id, self.name)

    def alike(self, now: float) -> tuple[object, ...]:
        """Return what requests have in common that can be sent in one message."""
        own = id(self) if self.extended else None
        message = self.message(now)
        return (own, id(self.options), *message.values())

    def message(self, now: float) -> dict[str, Any]:
        """Return the message that submits it; but for an extension, prompts and options are to be added."""
        if self.extended is not None:
            return {
                "op": "extend",
                **extension_as_json(self.extended, self._origin()),
                "n_tokens": self.n_more,
                "stream": self.target.is_streamed,
            }
        seconds = None if self.ends_s == math.inf else max(0.0, self.ends_s - now)
        return {
            "op": "run",
            "stream": self.target.is_streamed,
            "fed": self.is_fed,
            "may_wait": self.may_wait,
            "seconds": seconds,
            "age_s": round(now - self.submitted_s, 3),
        }

    def _origin(self) -> Origin:
        """Return what it continues from, without a number that its worker does not know."""
        assert self.extended is not None
        origin = self.extended.origin
        assert isinstance(origin, Origin)
        is_known = isinstance(origin, SentOrigin) and origin.worker is self.worker
        return origin if is_known else replace(origin, number=-1)

    @property
    def must_be_alone(self) -> bool:
        """Whether no other request may be in its worker: workers have died with it."""
        return self.n_deaths >= N_TOGETHER_MAX

    def leave_worker(self) -> None:
        """Be without a worker, as if it had not been sent."""
        self.worker, self.reply, self.has_begun = None, None, False

    def goes_on(self) -> bool:
        """Note that its worker died; return whether it is asked again: it had not begun, or its batch wants that.

        A request with which one worker after the other dies is not.
        """
        if not self.has_begun:
            return True
        self.n_deaths_alone += self.must_be_alone
        self.n_deaths += 1
        return self.asks_again and not self.heard and self.n_deaths_alone < N_ALONE_MAX

    # ---- from a worker ----

    def origin_of(self, result: BatchResult, number: int, owner: str) -> SentOrigin:
        """Return where a result comes from: this request, or one of its choices."""
        options = replace(
            RunOptions.of(self.prompt.options).over(self.options), n=None, best_of=None
        )
        request = Request(
            self.id,
            self.prompt,
            options,
            options.sampling({}, result.seed),
            n_logprobs=options.n_logprobs,
            n_prompt_logprobs=options.n_prompt_logprobs,
            owner=owner,
        )
        return SentOrigin(
            request, number, result.token_ids, result.finish_reason, result.usage, self.worker
        )

    def hear(self, said: Sequence[Any]) -> BatchOutputChunk:
        """Return a chunk that its worker sent."""
        chunk = chunk_of_json(said, self.id)
        self.heard.append(chunk)
        return chunk

    def ended(
        self, said: Mapping[str, Any], owner: str
    ) -> tuple[list[BatchOutputChunk], BatchResult]:
        """Return its result; and its only chunk, where none has come because nobody read them as they came."""
        result = result_of_json(said, self.id, partial(self.origin_of, owner=owner))
        if self.heard:
            return [], result
        reason = result.finish_reason
        return [BatchOutputChunk(self.id, result.text, result.token_ids, 0, reason)], result

    def died(self, cause: str) -> tuple[list[BatchOutputChunk], list[tuple[int, BatchResult]]]:
        """Return what is delivered of a request that ends with its worker: what its reader has, and the error."""
        first = [chunk for chunk in self.heard if not chunk.index]
        tokens = tuple(token for chunk in first for token in chunk.token_ids)
        times = Timings(0.0, None, time.perf_counter() - self.submitted_s, None, None)
        result = BatchResult(
            self.id,
            "".join(chunk.text for chunk in first),
            tokens,
            "error",
            WorkerDiedError(cause, self.n_deaths_alone),
            Usage(0, len(tokens)),
            times,
            seed=0,
        )
        return [BatchOutputChunk(self.id, "", (), finish_reason="error")], [(self.place, result)]
