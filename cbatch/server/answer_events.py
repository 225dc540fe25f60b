"""What becomes of a call, as typed events: every dialect is an encoder of these."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from cbatch.response import BatchError, BatchOutputChunk, BatchResult, TokenLogprob, ToolCall

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from cbatch.errors import CBatchError
    from cbatch.runtime.batch_response import BatchResponse


@dataclass(frozen=True, slots=True)
class Said:
    """What is new of a choice, with the tokens that came; choices count through the call's prompts."""

    i_choice: int
    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = None
    """One for each token, where they are asked for."""


class Text(Said):
    """New text."""

    __slots__ = ()


class Reasoning(Said):
    """New thinking."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Called:
    """A tool call, whole; calls of a choice count from 0."""

    i_choice: int
    i_call: int
    call: ToolCall


@dataclass(frozen=True, slots=True)
class Ended:
    """A choice is complete; `whole` is its prompt's result, at the last choice of the prompt."""

    i_choice: int
    choice: BatchResult
    whole: BatchResult | None


@dataclass(frozen=True, slots=True)
class Failed:
    """The call cannot be answered; nothing follows."""

    error: CBatchError


Event: TypeAlias = Said | Called | Ended | Failed


class Events:
    """The events of one response, read once; leaving it early cancels the call."""

    def __init__(self, response: BatchResponse, n_choices: int) -> None:
        """Make one; each prompt has `n_choices`."""
        self._response = response
        self._places = {id: i * n_choices for i, id in enumerate(response.ids)}
        self._chunks, self._results = aiter(response), response.as_completed()
        self._n_left = len(response.ids)

    @property
    def have_ended(self) -> bool:
        """Whether `next` has given out the last one."""
        return not self._n_left

    async def next(self) -> list[Event]:
        """Return what has happened since the last call, at least one event; nothing after the end.

        Text that came meanwhile is one event a choice: a reader that lags behind has less to do, not more.
        """
        events: list[Event] = []
        while not events and self._n_left:
            chunk = await anext(self._chunks, None)
            n_results = self._response.n_unread  # first: then all of their chunks are there
            chunks = [] if chunk is None else [chunk]
            while self._response.n_unread_chunks:
                chunks.append(next(self._chunks))  # which does not wait
            for part in chunks:
                events += chunk_events(part, self._places[part.id] + part.index)
            events = joined_events(events)
            for _ in range(n_results):
                events += self._of_result(next(self._results))
            self._n_left -= n_results
        return events

    def close(self) -> None:
        """Leave: what has not ended is cancelled before the next step. Twice is harmless."""
        self._chunks.close()
        self._results.close()

    def _of_result(self, result: BatchResult) -> Iterator[Event]:
        if result.error is not None:
            yield Failed(result.error)
            return
        first, choices = self._places[result.id], choices_of(result)
        for i_choice, choice in enumerate(choices, first):
            for i_call, call in enumerate(choice.tool_calls):
                yield Called(i_choice, i_call, call)
        for i_choice, choice in enumerate(choices, first):
            is_last = i_choice == first + len(choices) - 1
            yield Ended(i_choice, choice, result if is_last else None)


def chunk_events(chunk: BatchOutputChunk, i_choice: int) -> Iterator[Said]:
    """Yield what is new in a chunk; its tokens belong to the text, or to thinking that comes alone."""
    tokens = chunk.token_ids, chunk.logprobs
    if chunk.reasoning:
        yield Reasoning(i_choice, chunk.reasoning, *(() if chunk.content else tokens))
    if chunk.content or (chunk.token_ids and not chunk.reasoning):
        yield Text(i_choice, chunk.content, *tokens)


def joined_events(events: Sequence[Event]) -> list[Event]:
    """Return events of which texts of a choice that follow each other, whatever others say between, are one."""
    if len(events) < 2:
        return [*events]
    joined: list[Event | _JoinedText] = []
    last: dict[int, _JoinedText] = {}
    for event in events:
        if not isinstance(event, Said):
            joined.append(event)
            continue
        parts = last.get(event.i_choice)
        if parts is None or not parts.take(event):
            parts = last[event.i_choice] = _JoinedText(event)
            joined.append(parts)
    return [event.whole() if isinstance(event, _JoinedText) else event for event in joined]


class _JoinedText:
    """Parts of a choice that follow each other."""

    __slots__ = ("_has_text", "_kind", "_parts")

    def __init__(self, first: Said) -> None:
        self._kind, self._parts, self._has_text = type(first), [first], bool(first.text)

    def take(self, part: Said) -> bool:
        """Add a part; False for text behind thinking, and thinking behind text."""
        kind = type(part) if part.text else self._kind
        if self._has_text and kind is not self._kind:
            return False
        self._kind, self._has_text = kind, self._has_text or bool(part.text)
        self._parts.append(part)
        return True

    def whole(self) -> Said:
        first, last = self._parts[0], self._parts[-1]
        if first is last:
            return first
        text = "".join([part.text for part in self._parts])
        tokens = tuple([token for part in self._parts for token in part.token_ids])
        scores = tuple([score for part in self._parts for score in part.logprobs or ()])
        return self._kind(first.i_choice, text, tokens, None if last.logprobs is None else scores)


def choices_of(result: BatchResult) -> Sequence[BatchResult]:
    """Return a prompt's answers."""
    return result.choices or (result,)


async def results_of(response: BatchResponse) -> list[BatchResult]:
    """Wait for all results, in order of the prompts; the error of the first one that failed is raised."""
    try:
        return await response
    except BatchError as error:
        failed = next(result.error for result in error.results if result.error is not None)
    raise failed  # not within the block, so that its cause stays
