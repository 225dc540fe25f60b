"""An answer as server-sent events: its status held back until the first, comments while it is silent; and encoders."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import anyio

from cbatch.server.answer_events import Called, Ended, Event, Reasoning, Text
from cbatch.server.exchange import N_PART, Exchange, dumps, joined_parts, json_pieces

if TYPE_CHECKING:
    from cbatch.response import BatchResult, ToolCall
    from cbatch.server.http_errors import HttpProblemError

DONE = b"data: [DONE]\n\n"
COMMENT = b":\n\n"

HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
"""The second keeps nginx from gathering events."""


def frame(value: object) -> bytes:
    """Return an event without a name; ASCII alone, with LF, as every client reads it."""
    return b"data: " + dumps(value) + b"\n\n"


def frame_pieces(value: object) -> Iterator[bytes]:
    """Yield the pieces of such an event."""
    return chain((b"data: ",), json_pieces(value), (b"\n\n",))


def frame_around(value: object, mark: str) -> tuple[bytes, bytes]:
    """Return what stands before and behind a text in an event; `value` is the event with `mark` in its place."""
    before, _, after = frame(value).partition(dumps(mark))
    return before, after


def named_frame(value: Mapping[str, object]) -> bytes:
    """Return an event with its `type` as its name, as Anthropic's clients read it."""
    return f"event: {value['type']}\n".encode() + frame(value)


def named_pieces(value: Mapping[str, object]) -> Iterator[bytes]:
    """Yield the pieces of such an event."""
    return chain((f"event: {value['type']}\n".encode(),), frame_pieces(value))


class EventStream:
    """Sends events of one answer; what sends waits for a slow reader, and nobody else does."""

    def __init__(
        self, exchange: Exchange, headers: Mapping[str, str], clock: Callable[[], float]
    ) -> None:
        """Make one whose status is not sent yet."""
        self._exchange, self._headers, self._clock = exchange, {**HEADERS, **headers}, clock
        self._sending = anyio.Lock(fast_acquire=True)
        self._last_s = clock()
        self.is_cut = False
        """Whether an event has begun to be sent and may lack its end."""

    @property
    def has_begun(self) -> bool:
        """Whether the status is sent: an error is an event then."""
        return self._exchange.status is not None

    async def send(self, pieces: Iterable[bytes]) -> None:
        """Send events, the status before the first; long ones are made as the client takes them."""
        async with self._sending:
            if last := await self._send_parts(pieces):
                await self._put(last)

    async def _send_parts(self, pieces: Iterable[bytes]) -> bytes:
        """Send the parts of events but for the last, short one, and return that."""
        parts = joined_parts(pieces)
        part = next(parts)
        while len(part) >= N_PART:
            self.is_cut = True
            await self._put(part)
            part = await self._exchange.next_part(parts)
        self.is_cut = False
        return part

    async def _put(self, part: bytes) -> None:
        await self._begin()
        await self._exchange.put(part)
        self._last_s = self._clock()

    async def _begin(self) -> None:
        if not self.has_begun:
            await self._exchange.begin(200, self._headers)

    async def keep_alive(
        self, status_after_s: float, silence_s: float, idle: Callable[[], bytes]
    ) -> None:
        """Send `idle` after each silence, until cancelled; the first, with the status, after `status_after_s`.

        In a stream that begins earlier, silences count from its beginning.
        """
        while True:
            after_s = silence_s if self.has_begun else status_after_s
            left_s = after_s - (self._clock() - self._last_s)
            if left_s <= 0 and not self._sending.statistics().locked:
                await self.send([idle()])
                left_s = silence_s
            await anyio.sleep(min(max(left_s, silence_s / 10), silence_s))

    async def finish(self, pieces: Iterable[bytes] = ()) -> None:
        """Send the last events and end the answer."""
        async with self._sending:
            last = await self._send_parts(pieces)
            await self._begin()
            await self._exchange.finish(last)


# ---- what makes the frames of streamed answers, in every dialect ----


class StreamEncoder(ABC):
    """Makes the frames of one streamed answer."""

    def __init__(self) -> None:
        self._has_begun = False

    def beginning(self) -> bytes:
        """Return the frames before the first event."""
        return b""

    def begun(self) -> bytes:
        """Return the frames before the first event, once."""
        if self._has_begun:
            return b""
        self._has_begun = True
        return self.beginning()

    def frames(self, events: Sequence[Event]) -> Iterator[bytes]:
        """Yield the frames of events, long ones in pieces; to be read to the end before the next call."""
        if not self._has_begun:
            yield self.begun()
        for event in events:
            yield from self.frame(event)

    @abstractmethod
    def frame(self, event: Event) -> Iterable[bytes]:
        """Return the frames of one event, in pieces."""

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
