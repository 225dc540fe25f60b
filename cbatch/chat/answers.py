"""Take an ended answer apart: thinking, text and tool calls.

The chat template tells how its model marks the parts; see `formats`. The reader writes control tokens out to find the
parts, and leaves them out of each.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

from cbatch.chat.call_parser import Call, FoundCalls, find_calls, read_call
from cbatch.chat.text import TextStream

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from cbatch.chat.formats import AnswerFormat
    from cbatch.tools import Tools

    Span = tuple[int, int]

N_TAIL = 16
"""Tokens at a prompt's end in which a template may open the thinking that the answer continues."""

_CHANNEL_MARK = re.compile(r"<\|(start|channel|message|end|call|return)\|>")
_CUT_THINKING = "the answer ended while it was thinking"
_RECIPIENT = re.compile(r"to=functions\.([\w.:/-]+)")
"""Source: gpt-oss's template, and OpenAI's description of the harmony format."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The parts of an ended answer, with warnings about it."""

    text: str
    reasoning: str = ""
    calls: tuple[Call, ...] = ()
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Pieces:
    """The bytes of a vocabulary's tokens: `shown` writes control tokens out, `plain` leaves them out."""

    plain: Callable[[int], bytes]
    shown: Callable[[int], bytes]
    controls: frozenset[int] = frozenset()


@dataclass(slots=True)
class _Written:
    """An answer's text with control tokens written out; `removed` are the spans of no part, ascending."""

    text: str
    removed: list[Span]

    def without(self, start: int, end: int) -> str:
        """Return `text[start:end]` without the removed spans."""
        kept, at = list[str](), start
        for first, last in self.removed[bisect_left(self.removed, (start,)) :]:
            if first >= end:
                break
            kept.append(self.text[at:first])
            at = max(at, last)
        return "".join((*kept, self.text[at:end]))

    def remove(self, spans: Iterable[Span]) -> None:
        """Remove more spans."""
        self.removed = sorted((*self.removed, *spans))


@dataclass(frozen=True, slots=True)
class AnswerReader:
    """Takes the answer to one request apart, after its end.

    Args:
        format: of the answers under the chat template.
        pieces: of the vocabulary.
        tools: that may be called; an answer without tools has no calls.
        splits_reasoning: whether thinking is removed from the text.
        opened: the text of the last message, where it is the assistant's and the answer continues it.
        n_calls_max: the most calls to return; further calls are removed from the text, with a warning.
    """

    format: AnswerFormat
    pieces: Pieces
    tools: Tools
    splits_reasoning: bool = True
    opened: str = ""
    n_calls_max: int | None = None

    def read(
        self,
        text: str,
        tokens: Sequence[int],
        tail: Sequence[int],
        *,
        stops: Sequence[str] = (),
        include_stop: bool = False,
    ) -> Answer:
        """Return the parts of an answer. Never raises: a part that cannot be parsed stays text, with a warning.

        Args:
            text: the answer as its chunks had it.
            tokens: of the answer.
            tail: the last tokens of the prompt.
            stops: the stop strings, where one of them ended the answer.
            include_stop: whether the text includes that stop string.
        """
        try:
            if self.pieces.controls.isdisjoint(tokens):
                return self._take_apart(_Written(text, []), tail)
            return self._take_apart(self._written(tokens, stops, include_stop=include_stop), tail)
        except Exception as error:  # a request gets its text, whatever the model wrote
            return Answer(text, warnings=(f"the answer could not be taken apart: {error!r}",))

    def _written(
        self, tokens: Sequence[int], stops: Sequence[str], *, include_stop: bool
    ) -> _Written:
        """Return the text with control tokens written out."""
        stream = TextStream(self.pieces.plain, stops, include_stop=include_stop)
        start, i_controls = 0, list[int]()
        for i, token in enumerate(tokens):
            if token in self.pieces.controls:
                stream.feed(tokens[start:i])
                i_controls.append(len(stream.parts))
                stream.parts.append(self.pieces.shown(token).decode(errors="replace"))
                start = i + 1
        stream.feed(tokens[start:])
        stream.flush()
        ends = [0, *accumulate(map(len, stream.parts))]
        return _Written("".join(stream.parts), [(ends[i], ends[i + 1]) for i in i_controls])

    def _take_apart(self, written: _Written, tail: Sequence[int]) -> Answer:
        if self.format.has_channels:
            return self._read_channels(written)
        first, last, behind = self._thought(written.text, tail)
        reasoning, start, warnings = "", 0, list[str]()
        if self.splits_reasoning:
            reasoning, start = written.without(first, last).strip(), behind
            warnings += [_CUT_THINKING] if reasoning and last == len(written.text) else []
        if (marks := self.format.response) is not None:
            written.remove(mark.span() for mark in marks.finditer(written.text, start))
        found = FoundCalls()
        if self.tools:
            found = find_calls(written.text, behind, self.format.calls, self.tools)
            written.remove(found.spans)
        text = written.without(start, len(written.text))
        if found.calls:
            text = text.strip()
        elif start:
            text = text.lstrip()
        warnings += self._warnings_about(found)
        return Answer(text, reasoning, self._allowed(found), tuple(warnings))

    def _thought(self, text: str, tail: Sequence[int]) -> tuple[int, int, int]:
        """Return where thinking starts and ends, and where the answer continues; all 0 without thinking."""
        if self.format.thinking is None:
            return 0, 0, 0
        begin, end = self.format.thinking
        first = len(text) - len(text.lstrip())
        if text.startswith(begin, first):
            first += len(begin)
        elif self._is_opened(tail):
            first = 0
        else:
            return 0, 0, 0
        last = text.find(end, first)
        return (first, len(text), len(text)) if last < 0 else (first, last, last + len(end))

    def _is_opened(self, tail: Sequence[int]) -> bool:
        """Whether the prompt ends within thinking."""
        shown = b"".join(map(self.pieces.shown, tail)).decode(errors="replace")
        return self.format.thinking_after(self.opened, shown) == "must end"

    def _read_channels(self, written: _Written) -> Answer:
        """Return the parts of an answer in channels: analysis is thinking, commentary to a function is a call."""
        thoughts, said, found = list[str](), list[str](), FoundCalls()
        for head, span in _channel_messages(written.text):
            recipient, call = _RECIPIENT.search(head), None
            if recipient and self.tools:
                call = read_call(recipient[1], written.text[slice(*span)])
                found.n_malformed += call is None
            if call is not None:
                found.calls.append(call)
            elif "<|channel|>analysis" in head and self.splits_reasoning:
                thoughts.append(written.without(*span).strip())
            else:
                said.append(written.without(*span))
        warnings = list(self._warnings_about(found))
        if thoughts and not said and not found.calls:
            warnings.append(_CUT_THINKING)
        return Answer("".join(said), "\n".join(thoughts), self._allowed(found), tuple(warnings))

    def _allowed(self, found: FoundCalls) -> tuple[Call, ...]:
        """Return the first calls, as many as the request allows."""
        return tuple(found.calls[: self.n_calls_max])

    def _warnings_about(self, found: FoundCalls) -> Iterator[str]:
        """Yield warnings about the calls."""
        if found.n_malformed:
            yield "what begins as a tool call could not be read as one: it is left in the text"
        for name in dict.fromkeys(call.name for call in self._allowed(found)):
            if name not in self.tools.names:
                yield f"the tool {name!r} is called, which is not among those of the request"
        if n_left := len(found.calls) - len(self._allowed(found)):
            yield f"parallel_tool_calls is False: the first call is kept, {n_left} behind it left out"


def _channel_messages(text: str) -> Iterator[tuple[str, Span]]:
    """Yield the head of each message, with channel and recipient, and the span of its body."""
    marks = list(_CHANNEL_MARK.finditer(text))
    before = text[: marks[0].start()] if marks else text
    if before.strip() and not _RECIPIENT.search(before):
        yield "", (0, len(before))
    head, body = 0, None
    for mark in marks:
        if mark[1] == "message":
            body = body or mark
        elif body is not None:
            yield text[head : body.start()], (body.end(), mark.start())
            head, body = mark.start(), None
    if body is not None:
        yield text[head : body.start()], (body.end(), len(text))
