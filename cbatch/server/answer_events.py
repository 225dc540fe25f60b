"""What becomes of a call, as typed events: every dialect is an encoder of these."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias, cast

from cbatch.response import BatchError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from cbatch.errors import CBatchError
    from cbatch.response import BatchOutputChunk, BatchResult, TokenLogprob, ToolCall
    from cbatch.runtime.batch_response import BatchResponse


@dataclass(frozen=True, slots=True)
class Text:
    """New text of a choice; choices count through the call's prompts."""

    i_choice: int
    text: str
    token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Reasoning:
    """New thinking of a choice."""

    i_choice: int
    text: str


@dataclass(frozen=True, slots=True)
class Called:
    """A tool call, whole; calls of a choice count from 0."""

    i_choice: int
    i_call: int
    call: ToolCall


@dataclass(frozen=True, slots=True)
class Scored:
    """Log-probabilities of a choice's tokens."""

    i_choice: int
    tokens: tuple[TokenLogprob, ...]


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


Event: TypeAlias = Text | Reasoning | Called | Scored | Ended | Failed


class Events:
    """The events of one response, read once; leaving it early cancels the call."""

    def __init__(self, response: BatchResponse, n_choices: int) -> None:
        """Make one; each prompt has `n_choices`."""
        self._response = response
        self._places = {id: i * n_choices for i, id in enumerate(response.ids)}
        self._chunks, self._results = aiter(response), response.as_completed()
        self._has_ended = False

    async def next(self) -> list[Event]:
        """Return what has happened since the last call, at least one event; nothing after the end.

        Text that came meanwhile is one event a choice: a reader that lags behind has less to do, not more.
        """
        events: list[Event] = []
        while not events and not self._has_ended:
            chunk = await anext(self._chunks, None)
            self._has_ended = chunk is None
            chunks = [] if chunk is None else [chunk]
            while self._response.n_unread_chunks:
                chunks.append(next(self._chunks))  # which does not wait
            for part in chunks:
                events += self._of_chunk(part)
            events = _joined(events)
            while self._response.n_unread:
                events += self._of_result(next(self._results))
        return events

    def close(self) -> None:
        """Leave: what has not ended is cancelled before the next step. Twice is harmless."""
        self._chunks.close()
        self._results.close()

    def _of_chunk(self, chunk: BatchOutputChunk) -> Iterator[Event]:
        i_choice = self._places[chunk.id] + chunk.index
        if chunk.reasoning:
            yield Reasoning(i_choice, chunk.reasoning)
        if chunk.content or chunk.token_ids:
            yield Text(i_choice, chunk.content, chunk.token_ids)

    def _of_result(self, result: BatchResult) -> Iterator[Event]:
        if result.error is not None:
            yield Failed(result.error)
            return
        first, choices = self._places[result.id], choices_of(result)
        for i_choice, choice in enumerate(choices, first):
            for i_call, call in enumerate(choice.tool_calls):
                yield Called(i_choice, i_call, call)
            if choice.logprobs is not None:
                yield Scored(i_choice, choice.logprobs)
        for i_choice, choice in enumerate(choices, first):
            is_last = i_choice == first + len(choices) - 1
            yield Ended(i_choice, choice, result if is_last else None)


def _joined(events: Sequence[Event]) -> list[Event]:
    """Return events of which texts of a choice that follow each other, whatever others say between, are one."""
    if len(events) < 2:
        return [*events]
    joined: list[Event] = []
    last: dict[int, int] = {}
    for event in events:
        at = last.get(event.i_choice) if isinstance(event, Text | Reasoning) else None
        before = None if at is None else joined[at]
        if isinstance(event, Text) and isinstance(before, Text):
            tokens = (*before.token_ids, *event.token_ids)
            joined[cast("int", at)] = Text(event.i_choice, before.text + event.text, tokens)
        elif isinstance(event, Reasoning) and isinstance(before, Reasoning):
            joined[cast("int", at)] = Reasoning(event.i_choice, before.text + event.text)
        elif isinstance(event, Text | Reasoning):
            last[event.i_choice] = len(joined)
            joined.append(event)
    return joined


def choices_of(result: BatchResult) -> Sequence[BatchResult]:
    """Return a prompt's answers."""
    return result.choices or (result,)


async def results_of(response: BatchResponse) -> list[BatchResult]:
    """Wait for all results, in order of the prompts; the error of the first one that failed is raised."""
    try:
        return await response
    except BatchError as error:
        failed = next(result.error for result in error.results if result.error is not None)
        raise failed from None
