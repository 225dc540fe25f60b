"""Runs over files whose items ask for embeddings or scores: what `Work` needs of an engine, over `embed` and `rerank`.

Texts go to the engine in groups, of which one is computed while the next one is read: the engine packs them by length,
and memory does not grow with the number of items.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any, Protocol

from cbatch.chat.vector_calls import EmbedCall, VectorCall, VectorPrompt, error_in, n_tokens_of
from cbatch.embedding import EmbedResult
from cbatch.errors import (
    CBatchError,
    ConfigError,
    RequestCancelledError,
    WorkerDiedError,
    words_of,
)
from cbatch.response import BatchResult, Timings, Usage
from cbatch.runtime.submit import RefusedPrompt

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence

    from cbatch.engine import Engine
    from cbatch.messages import BatchPrompt
    from cbatch.options import RunOptions
    from cbatch.stats import EngineStats

N_GROUP = 512
"""Texts that an engine gets together: our choice. Their lengths differ enough to fill its batches."""

N_GROUP_CHARS = 2**24
"""Characters of texts, or tokens, after which a group has no more: our choice, 32 Ki a text where there are as many."""

_N_AHEAD = 2  # groups in the engine at once
_N_PER_SLOT = 8  # items that `Work` reads ahead for each slot, see `N_WINDOW_PER_SLOT`


class VectorEngine:
    """Has the methods of `Engine` that a run over a file needs; a prompt is a call, or a text to embed."""

    parallel = N_GROUP // _N_PER_SLOT

    def __init__(
        self,
        engine: Engine,
        settings: Mapping[str, Any] | None = None,
        is_dry: Callable[[], bool] = bool,
        *,
        is_patient: bool = False,
    ) -> None:
        """Take an engine.

        Args:
            settings: of `Engine.embed`, for texts that are not calls.
            is_dry: whether reading the next prompt may wait: then no group waits for more.
            is_patient: of `Engine.embed` and `rerank`, for all calls.
        """
        self._more = {"is_patient": True} if is_patient else {}
        self.engine, self._settings, self.is_dry = engine, dict(settings or {}), is_dry

    def stats(self) -> EngineStats:
        """Return the engine's figures; EngineClosedError where it has ended."""
        return self.engine.stats()

    def run(
        self,
        prompts: Iterable[BatchPrompt],
        *,
        options: RunOptions,
        max_time_s: float | None,
        ask_again: bool,
        dedupe: bool,
    ) -> VectorResults:
        """Begin to compute; equal texts of a group are computed once by the engine itself."""
        return self.begun(prompts, options, max_time_s)

    def begun(
        self, prompts: Iterable[BatchPrompt], options: RunOptions, max_time_s: float | None
    ) -> VectorResults:
        """Return what computes the prompts."""
        return VectorRun(self, iter(prompts), max_time_s)

    def call_of(self, prompt: BatchPrompt) -> VectorCall:
        """Return the call of an item."""
        if isinstance(prompt, VectorPrompt) and prompt.call is not None:
            call: Any = prompt.call
            made: VectorCall = replace(call, settings={**call.settings, **self._more})
            return made
        return EmbedCall([text_or_prompt(prompt)], self._settings)


def text_or_prompt(prompt: BatchPrompt) -> str | BatchPrompt:
    """Return what `Engine.embed` and `Engine.rerank` get of a prompt: of one that is no text they say what is wrong."""
    return prompt.prompt or prompt


@dataclass(eq=False)
class _TextGroup:
    """Calls that the engine has got together."""

    calls: list[tuple[str, VectorCall]] = field(default_factory=list)
    """With the ids of their items."""
    responses: list[Any] = field(default_factory=list)
    parts: list[list[tuple[int, range | None]]] = field(default_factory=list)
    """Of each call: its responses, and its texts in there; None for all."""
    callers: list[list[int] | int] = field(default_factory=list)
    """Of each response: the number of its call, or of each text's call."""
    start_s: float = field(default_factory=time.perf_counter)
    n_read: int = 0
    """The response that is read."""
    is_left: bool = False

    def begin(self, engine: Engine) -> None:
        """Begin the calls; none more once the group is left."""
        for settings, some in groupby((call for _, call in self.calls), _settings_of):
            if settings is not None:
                self._begin_together(some, settings, engine)
                continue
            for call in some:
                self._begin_alone(call, engine)
        if self.is_left:  # by another thread, maybe while a call was begun
            self.leave()

    def _begin_alone(self, call: VectorCall, engine: Engine) -> None:
        first, begun = len(self.responses), self._begun(call, engine)
        self.callers += [len(self.parts)] * len(begun)
        self.parts.append([(first + i, None) for i in range(len(begun))])
        self.responses += begun

    def _begin_together(
        self, calls: Iterable[VectorCall], settings: dict[str, Any], engine: Engine
    ) -> None:
        together: list[Any] = []
        callers: list[int] = []
        for call in calls:
            callers += [len(self.parts)] * len(call.texts)
            self.parts.append([(len(self.responses), range(len(together), len(callers)))])
            together += call.texts
        self.callers.append(callers)
        self.responses += self._begun(EmbedCall(together, settings), engine)

    def _begun(self, call: VectorCall, engine: Engine) -> list[Any]:
        return [] if self.is_left else begun_or_failed(call, engine)

    @property
    def n_unread(self) -> int:
        """Results of texts that are there, of the response that is read."""
        of = self.responses[self.n_read]
        return 0 if isinstance(of, list) else int(of.n_unread)

    def results(self) -> Iterator[tuple[str, VectorCall, list[list[Any]]]]:
        """Yield each item's id and call, and the results of its texts in their order, once all of them are there."""
        found: list[dict[int, Any]] = [{} for _ in self.responses]
        n_left = [
            sum(1 if texts is None else len(texts) for _, texts in parts) for parts in self.parts
        ]
        for i, response in enumerate(self.responses):
            self.n_read = i
            callers = self.callers[i]
            for result in response:
                found[i][result.index] = result
                if not isinstance(callers, int):
                    n_left[n := callers[result.index]] -= 1
                    if not n_left[n]:
                        yield self._item(n, found)
            if isinstance(callers, int):
                n_left[callers] -= 1
                if not n_left[callers]:
                    yield self._item(callers, found)

    def _item(
        self, n: int, found: Sequence[Mapping[int, Any]]
    ) -> tuple[str, VectorCall, list[list[Any]]]:
        return (
            *self.calls[n],
            [
                [found[i][j] for j in (sorted(found[i]) if texts is None else texts)]
                for i, texts in self.parts[n]
            ],
        )

    def leave(self) -> None:
        """Cancel the texts that have not ended. From any thread, and does not wait."""
        self.is_left = True
        for response in [*self.responses]:
            if not isinstance(response, list):  # of texts that were refused
                response.leave()


def _settings_of(call: VectorCall) -> dict[str, Any] | None:
    """Return the settings with which a call's texts are embedded; None for another call."""
    return call.settings if isinstance(call, EmbedCall) else None


def begun_or_failed(call: VectorCall, engine: Engine) -> list[Any]:
    """Have an engine begin a call; return its responses, or where it refuses the call, a list of failed results."""
    try:
        return call.begun(engine)
    except ConfigError as error:
        return [[EmbedResult(str(i), i, None, 0, error) for i in range(len(call.texts))]]


def in_order(response: Any) -> list[Any]:
    """Return the results of a response in the order of its texts, those with an error too."""
    return sorted(response, key=lambda result: result.index)


class VectorResults(Protocol):
    """The methods of `BatchResponse` that `Work` needs."""

    @property
    def n_unread(self) -> int:
        """Results that are there."""

    def wind_down(self) -> None:
        """Begin no more, and leave what has not begun. Does not wait."""

    def cancel(self) -> None:
        """End all texts. From any thread."""

    def as_completed(self) -> Generator[BatchResult, None, None]:
        """Yield results; leaving early ends the other texts."""


class VectorRun:
    """Computes texts in groups; see `VectorResults`."""

    def __init__(
        self, runner: VectorEngine, prompts: Iterator[BatchPrompt], max_time_s: float | None
    ) -> None:
        self._runner, self._prompts = runner, prompts
        self._ends_s = None if max_time_s is None else time.perf_counter() + max_time_s
        self._groups: deque[_TextGroup] = deque()
        self._has_ended = self._is_cancelled = False

    @property
    def n_unread(self) -> int:
        """Results that are there."""
        return self._groups[0].n_unread if self._groups else 0

    def wind_down(self) -> None:
        """End all texts: those of a group take long on a slow machine, and a later run computes them."""
        self.cancel()

    def cancel(self) -> None:
        """End all texts. From any thread, and does not wait."""
        self._is_cancelled = True
        for group in [*self._groups]:
            group.leave()

    def as_completed(self) -> Generator[BatchResult, None, None]:
        """Yield results; leaving early ends the other texts."""
        try:
            while True:
                yield from self._begin_groups()
                if not self._groups:
                    return
                group = self._groups[0]
                for found in group.results():
                    yield self._result(group, *found)
                self._groups.popleft()
        finally:
            for group in self._groups:
                group.leave()

    def _begin_groups(self) -> Iterator[BatchResult]:
        """Begin groups; yield a result for each `RefusedPrompt`."""
        while not self._has_ended and len(self._groups) < _N_AHEAD:
            if self._groups and self._runner.is_dry():
                return
            if self._is_cancelled or self._is_late:
                self._has_ended = True
                return
            group = yield from self._next_group()
            if group.calls:
                self._groups.append(group)
                if self._is_cancelled:  # while it was read
                    group.leave()
                group.begin(self._runner.engine)

    @property
    def _is_late(self) -> bool:
        return self._ends_s is not None and time.perf_counter() >= self._ends_s

    def _next_group(self) -> Generator[BatchResult, None, _TextGroup]:
        group = _TextGroup()
        n_texts = n_chars = 0
        while max(n_texts / N_GROUP, n_chars / N_GROUP_CHARS) < 1:
            if group.calls and self._runner.is_dry():
                break
            prompt = next(self._prompts, None)
            if prompt is None:
                self._has_ended = True
                break
            if isinstance(prompt, RefusedPrompt):
                yield result_of(str(prompt.id), [], 0.0)
                continue
            call = self._runner.call_of(prompt)
            group.calls.append((str(prompt.id), call))
            n_texts += len(call.texts)
            n_chars += len(prompt.prompt or prompt.tokens or ())
        return group

    def _result(
        self, group: _TextGroup, id: str, call: VectorCall, found: list[list[Any]]
    ) -> BatchResult:
        wrong = error_in(found)
        if wrong is not None and isinstance(wrong[1], WorkerDiedError):  # once more, alone
            again = begun_or_failed(call, self._runner.engine)
            found = [in_order(response) for response in again]
            wrong = error_in(found)
        result = result_of(id, found, time.perf_counter() - group.start_s)
        if wrong is not None and len(call.texts) > 1:
            return replace(result, error=_placed(wrong[1], call.place_of_result(wrong[0])))
        return result


def _placed(error: CBatchError, place: str) -> CBatchError:
    """Return a copy of an error that says of which text it is; equal texts share the error itself."""
    found = error.__class__.__new__(error.__class__)
    found.__dict__.update(error.__dict__)
    found.args = (f"{place}: {words_of(error)}",)
    found.__cause__ = error.__cause__
    return found


def result_of(id: str, found: Sequence[Sequence[Any]], seconds: float) -> BatchResult:
    """Return the results of a call as that of an item; they are its `origin`."""
    wrong = error_in(found)
    error = None if wrong is None else wrong[1]
    is_cancelled = isinstance(error, RequestCancelledError)
    return BatchResult(
        id=id,
        text="",
        token_ids=(),
        finish_reason="cancelled" if is_cancelled else "stop" if error is None else "error",
        error=error,
        usage=Usage(n_tokens_of(found), 0),
        timings=Timings(0.0, None, seconds, None, None),
        seed=0,
        origin=found,
    )
