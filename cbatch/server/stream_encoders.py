"""What makes the frames of streamed answers, in every dialect."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from cbatch.server.answer_events import Called, Ended, Event, Reasoning, Text
from cbatch.server.sse import COMMENT, frame

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from cbatch.response import BatchResult, ToolCall
    from cbatch.server.http_errors import HttpProblemError


class StreamEncoder(ABC):
    """Makes the frames of one streamed answer."""

    @abstractmethod
    def frames(self, events: Sequence[Event]) -> Iterator[bytes]:
        """Yield the frames of events, long ones in pieces; to be read to the end before the next call."""

    def last_frames(self, events: Sequence[Event]) -> Iterator[bytes]:
        """Yield the frames of the last events, and those behind them."""
        yield from self.frames(events)
        yield self.end()

    def progress(self, told: Mapping[str, Any]) -> Iterator[bytes]:
        """Yield the frames of how far the prompt is; a dialect without a place for it tells nothing."""
        yield from ()

    def end(self) -> bytes:
        """Return the last frames."""
        return b""

    def idle(self) -> bytes:
        """Return the frames of a silence."""
        return COMMENT

    def error(self, problem: HttpProblemError) -> bytes:
        """Return the frames of an error, behind which nothing comes: a client takes `[DONE]` for a whole answer."""
        return frame(problem.as_openai())


class BlockStream(StreamEncoder):
    """Encodes an answer as blocks, one after another: text, thinking, calls."""

    def __init__(self) -> None:
        self._has_begun = False

    @abstractmethod
    def beginning(self) -> bytes:
        """Return the frames before the first event."""

    @abstractmethod
    def said(self, text: str) -> Iterable[bytes]:
        """Return the frames of new text."""

    @abstractmethod
    def thought(self, text: str) -> Iterable[bytes]:
        """Return the frames of new thinking."""

    @abstractmethod
    def called(self, call: ToolCall) -> Iterable[bytes]:
        """Return the frames of a tool call."""

    @abstractmethod
    def ended(self, result: BatchResult) -> Iterable[bytes]:
        """Return the frames of the answer's end."""

    def begun(self) -> bytes:
        """Return the frames before the first event, once."""
        if self._has_begun:
            return b""
        self._has_begun = True
        return self.beginning()

    def frames(self, events: Sequence[Event]) -> Iterator[bytes]:
        """Yield the frames of events; the beginning comes before the first."""
        yield self.begun()
        for event in events:
            yield from self.frame(event)

    def frame(self, event: Event) -> Iterable[bytes]:
        """Return the frames of one event, in pieces."""
        if isinstance(event, Text):
            return self.said(event.text) if event.text else ()
        if isinstance(event, Reasoning):
            return self.thought(event.text)
        if isinstance(event, Called):
            return self.called(event.call)
        if isinstance(event, Ended):
            return self.ended(event.choice)
        raise TypeError(f"not an event of an answer: {event!r}")
