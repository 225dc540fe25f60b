"""Answers taken apart at once, or as they come in chunks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cbatch.chat.answers import Answer, AnswerParts, AnswerReader
from cbatch.chat.text import TextStream
from cbatch.tools import Tools

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from cbatch.chat.formats import AnswerFormat

CONTROLS = {
    1000: b"<tool_call>",
    1001: b"</tool_call>",
    1002: b"<|im_end|>",
    1003: b"<think>",
    1004: b"</think>",
}


def plain(token: int) -> bytes:
    return bytes([token]) if token < 256 else b""


def shown(token: int) -> bytes:
    return CONTROLS.get(token) or plain(token)


def make_reader(
    format: AnswerFormat,
    tools: Tools | None = None,
    *,
    splits: bool = True,
    opened: str = "",
    n_calls_max: int | None = None,
) -> AnswerReader:
    controls = frozenset(CONTROLS)
    return AnswerReader(format, shown, controls, tools or Tools(), splits, opened, n_calls_max)


def parts_of(
    reader: AnswerReader,
    tokens: Sequence[int],
    *,
    tail: Sequence[int] = (),
    stops: Sequence[str] = (),
    include_stop: bool = False,
    cuts: Sequence[int] = (),
    is_cut: bool = False,
) -> tuple[Answer, list[tuple[str, str]]]:
    """Return an answer, and what was given out of its text and thinking after each cut and at the end."""
    stream = TextStream(plain, stops, include_stop=include_stop)
    parts, given = AnswerParts(reader, stream), list[tuple[str, str]]()
    parts.tail = tail
    for chunk in chunked(tokens, cuts):
        if stream.stop is None:
            given.append(parts.take())
            parts.feed(chunk)
    stream.flush()
    answer = parts.end(is_cut=is_cut)
    assert (parts.n_thought(tokens[: stream.n_fed]) > 0) == bool(answer.reasoning)
    return answer, [*given, parts.take()]


def n_thought_of(reader: AnswerReader, tokens: Sequence[int], tail: Sequence[int] = ()) -> int:
    """Return how many tokens of an answer are thinking."""
    parts = AnswerParts(reader, TextStream(plain))
    parts.tail = tail
    parts.feed(tokens)
    parts.end()
    return parts.n_thought(tokens)


def chunked(tokens: Sequence[int], cuts: Sequence[int]) -> Iterator[Sequence[int]]:
    """Yield the tokens between cuts."""
    start = 0
    for cut in [*cuts, len(tokens)]:
        yield tokens[start:cut]
        start = cut
