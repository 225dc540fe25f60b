"""An answer as server-sent events: its status held back until the first, comments while it is silent."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain

import anyio

from cbatch.server.exchange import N_PART, Exchange, dumps, joined_parts, json_pieces

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
