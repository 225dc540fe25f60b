"""A run over calls for scores of documents that a model for chats judges, each by a request that needs a slot.

The requests of all calls are one run of the engine, and each enters by the gate of the run.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from cbatch.embedding import RerankResult, as_text
from cbatch.engine import Engine, judge_of
from cbatch.errors import CBatchError, RequestCancelledError
from cbatch.files.input.item import in_own_words
from cbatch.files.vector_work import VectorEngine, VectorResults, result_of
from cbatch.options import RunOptions
from cbatch.runtime.reranking import judged
from cbatch.runtime.submit import RefusedPrompt

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Iterator, Mapping

    from cbatch.chat.vector_calls import RerankCall, ScoreCall
    from cbatch.files.work import RunGate
    from cbatch.messages import BatchPrompt
    from cbatch.response import BatchResult

_OF_JUDGE = ("instruction", "truncate")
_OF_REQUEST = ("priority", "timeout_s")


@dataclass(eq=False)
class _JudgedCall:
    id: str
    call: RerankCall | ScoreCall
    found: list[list[Any]]
    """The results of each query's documents, in their order."""
    n_open: int
    """Documents without a result."""
    start_s: float = field(default_factory=time.perf_counter)

    @classmethod
    def of(cls, id: str, call: RerankCall | ScoreCall) -> _JudgedCall:
        found: list[list[Any]] = [[None] * len(documents) for _, documents in call.queries]
        return cls(id, call, found, sum(map(len, found)))


def judge_prompts(
    call: RerankCall | ScoreCall, engine: Engine
) -> Iterator[tuple[int, int, BatchPrompt | CBatchError]]:
    """Yield the request of each document, or why there is none, with the numbers of query and document."""
    told = {name: call.settings[name] for name in _OF_JUDGE if name in call.settings}
    more = {name: call.settings[name] for name in _OF_REQUEST if name in call.settings}
    for i, (query, documents) in enumerate(call.queries):
        for j, document in enumerate(documents):
            yield i, j, _prompt_or_error(engine, query, document, told, more)


def _prompt_or_error(
    engine: Engine, query: str, document: str, told: Mapping[str, Any], more: Mapping[str, Any]
) -> BatchPrompt | CBatchError:
    try:
        made = judge_of(engine, query, **told).prompt(as_text(document))
    except CBatchError as error:
        return error
    return replace(made, options=RunOptions.of(made.options).over(RunOptions(**more)))


class JudgedRun:
    """Judges the documents of all calls in one run of the engine; see `VectorResults`."""

    def __init__(
        self,
        engine: Engine,
        calls: Iterator[tuple[str, Any] | RefusedPrompt],
        gate: RunGate,
        options: RunOptions,
        max_time_s: float | None,
    ) -> None:
        """Begin to judge the documents of calls, which have the ids of their items."""
        self._engine, self._calls, self._gate = engine, calls, gate
        self._ends_s = None if max_time_s is None else time.perf_counter() + max_time_s
        self._open: dict[str, tuple[_JudgedCall, int, int]] = {}
        """The documents in the engine, by id."""
        self._ready = deque[_JudgedCall]()
        self._lock = threading.Lock()
        self._response = engine.run(
            self._documents(), options=options, max_time_s=max_time_s, ask_again=True
        )

    @property
    def n_unread(self) -> int:
        """Results that are there."""
        return len(self._ready) + self._response.n_unread

    def wind_down(self) -> None:
        """Cancel the documents that never had a slot, and read no more."""
        self._response.wind_down()

    def cancel(self) -> None:
        """End all documents. From any thread."""
        self._response.cancel()

    def as_completed(self) -> Generator[BatchResult, None, None]:
        """Yield the results of calls as they end; leaving early ends the other documents."""
        with closing(self._response.as_completed()) as results:
            for result in results:
                if (document := self._open.pop(result.id, None)) is None:  # of a `RefusedPrompt`
                    yield result
                else:
                    self._gate.leave(result.id)
                    call, i, j = document
                    self._take(call, i, j, self._score(call, j, result))
                yield from self._ended()
        yield from self._ended()

    def _ended(self) -> Iterator[BatchResult]:
        while self._ready:
            call = self._ready.popleft()
            yield result_of(call.id, call.found, time.perf_counter() - call.start_s)

    def _documents(self) -> Iterator[BatchPrompt]:
        """Yield the requests; read in another thread than the one that takes results."""
        for found in self._calls:
            if isinstance(found, RefusedPrompt):
                yield found
                continue
            id, asked = found
            call = _JudgedCall.of(id, asked)
            for n, (i, j, made) in enumerate(judge_prompts(asked, self._engine)):
                name = f"{id}.{n}"
                if isinstance(made, CBatchError):
                    failed = RerankResult(name, j, float("nan"), 0, made)
                    if self._take(call, i, j, failed):  # the reader may wait for documents alone
                        yield RefusedPrompt(prompt="-", id=f"{id}.ended", error=made)
                    continue
                if not self._gate.enter(name, RunOptions.of(made.options).n_sequences):
                    return
                self._open[name] = call, i, j
                yield replace(made, id=name)

    def _take(self, call: _JudgedCall, i: int, j: int, found: RerankResult) -> bool:
        """Keep the result of a document; return whether its call has ended with that."""
        with self._lock:
            call.found[i][j] = found
            call.n_open -= 1
            if not call.n_open:
                self._ready.append(call)
            return not call.n_open

    def _score(self, call: _JudgedCall, j: int, result: BatchResult) -> RerankResult:
        score, error = float("nan"), result.error
        is_late = self._ends_s is not None and time.perf_counter() >= self._ends_s
        if result.finish_reason == "cancelled" or (result.finish_reason == "timeout" and is_late):
            error = RequestCancelledError("the run ended before the document was judged")
        if error is None:
            try:
                score = judged(result, is_raw=bool(call.call.settings.get("raw_scores")))
            except CBatchError as wrong:
                error = wrong
        if error is not None:
            error = in_own_words(error, result.id)
        return RerankResult(result.id, j, score, result.usage.prompt_tokens, error)


class JudgingEngine(VectorEngine):
    """As `VectorEngine`, for calls whose documents need slots."""

    def __init__(self, engine: Engine, gate: RunGate) -> None:
        """Take an engine that `judges`, and what says when a document may go to it."""
        super().__init__(engine)
        self._gate = gate

    def begun(
        self, prompts: Iterable[BatchPrompt], options: RunOptions, max_time_s: float | None
    ) -> VectorResults:
        """Return what computes the prompts."""
        calls = (
            prompt if isinstance(prompt, RefusedPrompt) else (str(prompt.id), self.call_of(prompt))
            for prompt in prompts
        )
        return JudgedRun(self.engine, calls, self._gate, options, max_time_s)
