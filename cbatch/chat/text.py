"""Tokens to text, bit by bit: characters are never broken, and stop strings are found across the edges of tokens."""

from __future__ import annotations

import codecs
from array import array
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache


class StopStrings:
    """Stop strings as one automaton: a byte costs the same however many strings there are. Never changes.

    A state is the longest end of the bytes so far that begins a stop string; state 0 is the empty one.
    Source: Aho and Corasick, Efficient String Matching, 1975.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        self.next_states: dict[int, int] = {}
        """The state that a byte leads to, by state · 256 + byte; none where no string goes on with it."""
        self._shorter = array("i", [0])
        """The longest other state that ends each state."""
        self._ends = array("i", [0])
        """Bytes of the longest stop string that ends each state."""
        self.n_bytes = array("i", [0])
        """Bytes of each state."""
        self.n_characters = array("i", [0])
        """Characters that begin in each state."""
        for stop in stops:
            self._add(stop.encode())
        self._first = frozenset(key for key in self.next_states if key < 256)
        """Bytes that begin a stop string."""
        for key, state in sorted(self.next_states.items(), key=lambda item: self.n_bytes[item[1]]):
            before, byte = divmod(key, 256)
            shorter = self._after(self._shorter[before], byte) if before else 0
            self._shorter[state] = shorter
            self._ends[state] = self._ends[state] or self._ends[shorter]

    def _add(self, stop: bytes) -> None:
        state = 0
        for byte in stop:
            key = state << 8 | byte
            if key not in self.next_states:
                self.next_states[key] = len(self._ends)
                self._shorter.append(0)
                self._ends.append(0)
                self.n_bytes.append(self.n_bytes[state] + 1)
                self.n_characters.append(self.n_characters[state] + (byte & 0xC0 != 0x80))
            state = self.next_states[key]
        self._ends[state] = len(stop)

    def _after(self, state: int, byte: int) -> int:
        while (found := self.next_states.get(state << 8 | byte)) is None and state:
            state = self._shorter[state]
        return found or 0

    def read(self, state: int, data: bytes) -> tuple[int, int, int]:
        """Go on from a state; return the new one, the bytes read, and those of the stop string at their end, or 0."""
        if not state and self._first.isdisjoint(data):
            return 0, len(data), 0
        for i, byte in enumerate(data, 1):
            state = self._after(state, byte)
            if self._ends[state]:
                return state, i, self._ends[state]
        return state, len(data), 0


@lru_cache(maxsize=32)
def stop_strings(stops: tuple[str, ...]) -> StopStrings:
    """Return the automaton of stop strings, which requests with the same ones share."""
    return StopStrings(stops)


class StopMatcher:
    """Finds the first stop string in a stream of bytes and holds back what may become one.

    The match that is complete first wins, and of two that are complete together the longer one: so the result does
    not depend on how the bytes were cut.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._strings, self._state = stop_strings(tuple(stops)), 0
        self._held = b""

    def feed(self, piece: bytes) -> tuple[bytes, bytes | None]:
        """Return the bytes that are safe to show now, and the stop string that ended the stream, if one did."""
        self._state, n_read, n_stop = self._strings.read(self._state, piece)
        data = self._held + piece[:n_read]
        if n_stop:
            self._state, self._held = 0, b""
            return data[:-n_stop], data[-n_stop:]
        n_shown = len(data) - self._strings.n_bytes[self._state]
        self._held = data[n_shown:]
        return data[:n_shown], None

    @property
    def n_held(self) -> int:
        """Characters that begin in what is held back."""
        return self._strings.n_characters[self._state]

    def flush(self) -> bytes:
        """Return what was held back; nothing more will come."""
        self._state, held, self._held = 0, self._held, b""
        return held


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
