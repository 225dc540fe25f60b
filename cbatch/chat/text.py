"""Tokens to text, bit by bit: characters are never broken, and stop strings are found across the edges of tokens."""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class StopMatcher:
    """Finds the first stop string in a stream of bytes and holds back what may become one.

    The match that is complete first wins, and of two that are complete together the longer one: so the result does
    not depend on how the bytes were cut.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = sorted((s.encode() for s in stops), key=len, reverse=True)
        self._n_hold_max = max((len(s) for s in self._stops), default=0) - 1
        self._held = b""

    def feed(self, piece: bytes) -> tuple[bytes, bytes | None]:
        """Return the bytes that are safe to show now, and the stop string that ended the stream, if one did."""
        data = self._held + piece
        end, stop = self._first_match(data)
        if stop is not None:
            self._held = b""
            return data[: end - len(stop)], stop
        n_hold = self._n_hold(data)
        self._held = data[len(data) - n_hold :]
        return data[: len(data) - n_hold], None

    @property
    def n_held(self) -> int:
        """Characters that begin in what is held back."""
        return sum(byte & 0xC0 != 0x80 for byte in self._held)

    def flush(self) -> bytes:
        """Return what was held back; nothing more will come."""
        held, self._held = self._held, b""
        return held

    def _first_match(self, data: bytes) -> tuple[int, bytes | None]:
        found = [(i + len(s), s) for s in self._stops if (i := data.find(s)) >= 0]
        return min(found, key=lambda match: match[0], default=(0, None))

    def _n_hold(self, data: bytes) -> int:
        for n in range(min(self._n_hold_max, len(data)), 0, -1):
            tail = data[-n:]
            if any(s.startswith(tail) for s in self._stops):
                return n
        return 0


class TextStream:
    """The text of one sequence. `parts` only grows; an unfinished character waits inside until it is whole.

    A token costs nothing until it is fed, and any number of tokens can be fed at once.
    """

    def __init__(
        self,
        piece: Callable[[int], bytes],
        stops: Sequence[str] = (),
        *,
        include_stop: bool = False,
    ) -> None:
        self.piece = piece
        self._matcher = StopMatcher(stops) if stops else None
        self.has_stops = self._matcher is not None
        """Whether every token must be fed as soon as it is known."""
        self._include_stop = include_stop
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.parts: list[str] = []
        self.n_fed = 0
        self.stop: str | None = None
        """The stop string that ended the text, if one did."""

    def feed(self, tokens: Sequence[int]) -> None:
        """Add tokens. Ends at the token that completes a stop string: `n_fed` then counts up to that one."""
        if self._matcher is not None:
            self._feed_to_stop(tokens, self._matcher)
            return
        self.n_fed += len(tokens)
        if text := self._decoder.decode(b"".join(map(self.piece, tokens))):
            self.parts.append(text)

    def _feed_to_stop(self, tokens: Sequence[int], matcher: StopMatcher) -> None:
        for token in tokens:
            if self.stop is not None:
                return
            self.n_fed += 1
            shown, stop = matcher.feed(self.piece(token))
            if stop is not None:
                self.stop = stop.decode()
                shown += stop if self._include_stop else b""
            if text := self._decoder.decode(shown):
                self.parts.append(text)

    @property
    def n_held(self) -> int:
        """Characters that may become a stop string and wait for that."""
        return 0 if self._matcher is None else self._matcher.n_held

    def flush(self) -> None:
        """Give out what was waiting: a tail that might have become a stop string, a broken character as U+FFFD."""
        held = self._matcher.flush() if self._matcher is not None else b""
        if text := self._decoder.decode(held, final=True):
            self.parts.append(text)
