"""Text out of tokens: characters are whole, and stop strings are found across every edge."""

from __future__ import annotations

import math
import time
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cbatch.chat.text import StopMatcher, StopStrings, TextStream, stop_strings

if TYPE_CHECKING:
    from collections.abc import Sequence

ALPHABET = "abé€😀"
TEXTS = st.text(ALPHABET, max_size=30)
STOPS = st.lists(st.text(ALPHABET, min_size=1, max_size=4), min_size=1, max_size=3)
BYTES = st.lists(st.sampled_from([b"a", b"b", b"\xc3", b"\xa9", b"\xff"]), max_size=30).map(
    b"".join
)


def cut(data: bytes, cuts: Sequence[int]) -> list[bytes]:
    """Return `data` cut at the given places; empty pieces are kept, as control tokens give them."""
    edges = [0, *sorted(min(c, len(data)) for c in cuts), len(data)]
    return [data[i:j] for i, j in pairwise(edges)]


def stream(
    pieces: Sequence[bytes], stops: Sequence[str] = (), *, include_stop: bool = False
) -> TextStream:
    """Return the ended stream of these pieces, fed one at a time."""
    text = TextStream(pieces.__getitem__, stops, include_stop=include_stop)
    for i in range(len(pieces)):
        text.feed([i])
    text.flush()
    return text


def stopped(data: bytes, stops: Sequence[str], *, include_stop: bool = False) -> str:
    """Return what a reader sees of `data`, found by looking at every prefix."""
    for n in range(len(data) + 1):
        ended = [s.encode() for s in stops if data[:n].endswith(s.encode())]
        if ended:
            n_cut = 0 if include_stop else max(map(len, ended))
            return data[: n - n_cut].decode("utf-8", "replace")
    return data.decode("utf-8", "replace")


@given(TEXTS, st.lists(st.integers(0, 120)))
def test_character_cut_over_tokens_is_never_broken(text: str, cuts: list[int]) -> None:
    given_out = stream(cut(text.encode(), cuts))
    assert "".join(given_out.parts) == text
    assert all(given_out.parts)


@given(BYTES, st.lists(st.integers(0, 30)))
def test_broken_bytes_come_out_the_same_however_they_are_cut(data: bytes, cuts: list[int]) -> None:
    assert "".join(stream(cut(data, cuts)).parts) == data.decode("utf-8", "replace")


@given(TEXTS, st.lists(st.integers(0, 120)), STOPS, st.booleans())
def test_stopped_text_is_the_same_however_the_bytes_are_cut(
    text: str, cuts: list[int], stops: list[str], include_stop: bool
) -> None:
    pieces = cut(text.encode(), cuts)
    given_out = stream(pieces, stops, include_stop=include_stop)
    assert "".join(given_out.parts) == stopped(text.encode(), stops, include_stop=include_stop)
    assert (given_out.stop is not None) == any(s in text for s in stops)


@given(BYTES, st.lists(st.integers(0, 30)), st.lists(st.text("abé", min_size=1), min_size=1))
def test_stop_between_broken_bytes_is_found_however_they_are_cut(
    data: bytes, cuts: list[int], stops: list[str]
) -> None:
    assert "".join(stream(cut(data, cuts), stops).parts) == stopped(data, stops)


@given(TEXTS, STOPS)
def test_feeding_many_tokens_at_once_counts_up_to_the_stop(text: str, stops: list[str]) -> None:
    pieces = [bytes([b]) for b in text.encode()]
    slow = stream(pieces, stops)
    fast = TextStream(pieces.__getitem__, stops)
    fast.feed(range(len(pieces)))
    fast.flush()
    assert (fast.n_fed, fast.stop) == (slow.n_fed, slow.stop)
    assert "".join(fast.parts) == "".join(slow.parts)


def test_unfinished_character_waits_and_is_flushed() -> None:
    euro = "€".encode()
    text = TextStream([euro[:1], euro[1:2], euro[2:], euro[:2]].__getitem__)
    text.feed([0, 1])
    assert text.parts == []
    text.feed([2])
    assert text.parts == ["€"]
    text.feed([3])
    assert text.parts == ["€"]
    text.flush()
    assert text.parts == ["€", "\ufffd"]


def test_unfinished_character_before_a_stop_string_is_flushed() -> None:
    assert stream([b"a", b"\xe2\x82", b"END"], ["END"]).parts == ["a", "\ufffd"]


def test_tail_that_might_become_a_stop_waits_and_is_flushed() -> None:
    text = TextStream([b"ab", b"ST"].__getitem__, ["STOP"])
    text.feed([0, 1])
    assert text.parts == ["ab"]
    text.flush()
    assert text.parts == ["ab", "ST"]


def test_nothing_is_fed_after_a_stop() -> None:
    text = TextStream([b"a.", b"b"].__getitem__, ["."])
    text.feed([0, 1])
    text.feed([1])
    assert ("".join(text.parts), text.n_fed) == ("a", 1)


class SlowMatcher:
    """The rule of `StopMatcher` as it reads: every stop string is looked for in all bytes that are not shown yet."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops = sorted((s.encode() for s in stops), key=len, reverse=True)
        self.held = b""

    def feed(self, piece: bytes) -> tuple[bytes, bytes | None]:
        data, self.held = self.held + piece, b""
        found = [(i + len(s), s) for s in self.stops if (i := data.find(s)) >= 0]
        if found:
            end, stop = min(found, key=lambda match: match[0])
            return data[: end - len(stop)], stop
        beginnings = {s[:n] for s in self.stops for n in range(1, len(s))}
        n_held = max((n for n in range(1, len(data) + 1) if data[-n:] in beginnings), default=0)
        self.held = data[len(data) - n_held :]
        return data[: len(data) - n_held], None


@given(
    st.lists(st.text("abé€", max_size=8).map(str.encode) | BYTES, max_size=12),
    st.lists(st.text("abé€", min_size=1, max_size=8), min_size=1, max_size=12),
)
def test_matcher_gives_what_the_rule_says(pieces: list[bytes], stops: list[str]) -> None:
    matcher, slow = StopMatcher(stops), SlowMatcher(stops)
    for piece in pieces:
        assert matcher.feed(piece) == slow.feed(piece)
        assert matcher.n_held == sum(byte & 0xC0 != 0x80 for byte in slow.held)
    assert matcher.flush() == slow.held


def test_equal_stop_strings_are_compiled_once() -> None:
    assert stop_strings(("a", "bc")) is stop_strings(("a", "bc"))


def n_compared(stops: Sequence[str], pieces: Sequence[bytes]) -> int:
    """Return the steps of the automaton for these pieces, of which none is a stop string."""
    strings, state, n_steps = StopStrings(stops), 0, 0
    follow = strings.next_states.get

    class Counted(dict[int, int]):
        def get(self, key: int, default: Any = None) -> Any:
            nonlocal n_steps
            n_steps += 1
            return follow(key, default)

    strings.next_states = Counted()
    for piece in pieces:
        state, *_ = strings.read(state, piece)
    return n_steps


def test_byte_costs_the_same_however_many_stop_strings() -> None:
    pieces = [b"a story ", b"x", b"12", b"3 ", b"x1", b"."] * 10
    many = [f"x{i}." for i in range(100, 2000)]
    n_bytes = sum(map(len, pieces))
    assert n_compared(many, pieces) <= 2 * n_bytes
    assert n_compared(["a" * 1000 + "b"], [b"a" * 5000 + b"c"]) <= 2 * 5001


def seconds_per_token(n_tokens: int, stops: Sequence[str]) -> float:
    pieces = [b"word ", b"S", b"TO", "é".encode()[:1], "é".encode()[1:], b""]
    tokens, best = [i % len(pieces) for i in range(n_tokens)], math.inf
    for _ in range(3):
        text = TextStream(pieces.__getitem__, stops)
        start = time.process_time()
        for token in tokens:
            text.feed([token])
        text.flush()
        best = min(best, time.process_time() - start)
    return best / n_tokens


@pytest.mark.slow
@pytest.mark.parametrize("stops", [[], ["STOP", "\n\n"], ["x" * 1000]])
def test_token_costs_the_same_however_long_the_answer(stops: Sequence[str]) -> None:
    assert seconds_per_token(100_000, stops) < 5 * seconds_per_token(2_000, stops)
