"""Take an answer apart as it comes: thinking, text and tool calls.

The chat template tells how its model marks the parts; see `formats`. The parts of an ended answer are made by the same
code, so what was given out before the end is their beginning, however the answer was cut.
"""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from cbatch.chat.channels import ChannelSplitter
from cbatch.chat.split_text import MarkSplitter, Parts, Written

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from cbatch.chat.call_parser import ParsedCall
    from cbatch.chat.formats import AnswerFormat
    from cbatch.chat.text import TextStream
    from cbatch.tools import Tools

Splitter: TypeAlias = ChannelSplitter | MarkSplitter
"""Splits an answer into `Parts`."""

N_TAIL = 16
"""Tokens at a prompt's end in which a template may open the thinking that the answer continues."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The parts of an ended answer, with warnings about it."""

    text: str
    reasoning: str = ""
    calls: tuple[ParsedCall, ...] = ()
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class AnswerReader:
    """Tells how the answer to one request is taken apart.

    Args:
        format: of the answers under the chat template.
        shown: the bytes of a token; control tokens are written out.
        controls: the tokens that are marks and no text.
        tools: that may be called; an answer without tools has no calls.
        splits_reasoning: whether thinking is removed from the text.
        opened: the text of the last message, where it is the assistant's and the answer continues it.
        n_calls_max: the most calls to return; further calls are removed from the text, with a warning.
    """

    format: AnswerFormat
    shown: Callable[[int], bytes]
    controls: frozenset[int]
    tools: Tools
    splits_reasoning: bool = True
    opened: str = ""
    n_calls_max: int | None = None

    def splitter(self, parts: Parts, tail: Sequence[int]) -> Splitter:
        """Return what splits an answer into `parts`; `tail` are the last tokens of its prompt."""
        format, splits = self.format, self.splits_reasoning
        if format.has_channels:
            return ChannelSplitter(parts, self.tools, splits_reasoning=splits)
        shown_tail = b"".join(map(self.shown, tail)).decode(errors="replace")
        is_opened = format.thinking_after(self.opened, shown_tail) == "must end"
        return MarkSplitter(format, parts, self.tools, is_opened=is_opened, splits_reasoning=splits)

    def answer(self, parts: Parts) -> Answer:
        """Return an answer from its parts, with as many calls as the request allows."""
        calls = tuple(parts.calls[: self.n_calls_max])
        warnings = (*parts.warnings, *self._warnings_about(parts, calls))
        return Answer("".join(parts.text), "".join(parts.reasoning), calls, warnings)

    def _warnings_about(self, parts: Parts, calls: Sequence[ParsedCall]) -> Iterator[str]:
        if parts.n_malformed:
            yield "the answer has a malformed tool call: it is left in the text"
        if parts.n_unfinished:
            yield "the answer ends in the middle of a tool call: that call is left out"
        for name in dict.fromkeys(call.name for call in calls):
            if name not in self.tools.functions:
                yield f"the model called the tool {name!r}, which the request does not offer"
        if n_left := len(parts.calls) - len(calls):
            yield f"parallel_tool_calls is False: the first call is kept, {n_left} more are left out"


class AnswerParts:
    """The parts of one answer as it comes. Nothing raises: what cannot be taken apart is text, with a warning."""

    def __init__(self, reader: AnswerReader, stream: TextStream) -> None:
        """Make one for the text of `stream`, which gets its tokens through `feed`."""
        self.tail: Sequence[int] = ()
        """The last tokens of the prompt; set before the answer begins."""
        self.answer: Answer | None = None
        self._reader, self._stream = reader, stream
        self._controls: deque[tuple[int, int]] = deque()
        """Control tokens that were not read yet: how many characters of the text are before each, and its id."""
        self._parts, self._written = Parts(), Written()
        self._splitter: Splitter | None = None
        self._n_counted = self._n_characters = 0
        """Parts of the text that were counted, and their characters."""
        self._n_read = self._n_characters_read = 0
        self._unread = "", 0
        """Text that was read last, and how much of it was written out."""
        self._given = 0, 0
        self._is_broken = False

    def feed(self, tokens: Sequence[int]) -> None:
        """Add tokens to the text; the time that it takes apart is spent when parts are asked for."""
        stream, controls = self._stream, self._reader.controls
        if controls.isdisjoint(tokens):
            stream.feed(tokens)
            return
        start = 0
        for i, token in enumerate(tokens, 1):
            if token in controls:
                stream.feed(tokens[start:i])  # a control token adds no text
                start = i
                if stream.stop is not None:
                    return
                self._controls.append((self._n_written(), token))
        stream.feed(tokens[start:])

    def _n_written(self) -> int:
        """Return how many characters were fed so far."""
        parts = self._stream.parts
        self._n_characters += sum(map(len, parts[self._n_counted :]))
        self._n_counted = len(parts)
        return self._n_characters + self._stream.n_held

    def take(self) -> tuple[str, str]:
        """Return the text and the thinking that are new since the last time."""
        if self.answer is None:
            self._advance(is_end=False)
        text, reasoning = self._parts.text, self._parts.reasoning
        (n_text, n_reasoning), self._given = self._given, (len(text), len(reasoning))
        return "".join(text[n_text:]), "".join(reasoning[n_reasoning:])

    def n_thought(self, tokens: Sequence[int]) -> int:
        """Return how many of an ended answer's tokens begin within its thinking, or in the marks around it."""
        if self.answer is None or not self.answer.reasoning:
            return 0
        spans, decoder = deque(self._parts.thoughts), getincrementaldecoder("utf-8")("replace")
        n_thought = at = 0
        for token in tokens:
            while spans and at >= spans[0][1]:
                spans.popleft()
            if not spans:
                break
            n_thought += at >= spans[0][0]
            is_control = token in self._reader.controls
            at += len(
                self._reader.shown(token).decode(errors="replace")
                if is_control
                else decoder.decode(self._stream.piece(token))
            )
        return n_thought

    def end(self, *, is_cut: bool = False) -> Answer:
        """Return the whole answer, which has ended.

        Args:
            is_cut: whether something else than the model ended it, so that a call at its end may be unfinished.
        """
        self._parts.is_cut = is_cut
        self._advance(is_end=True)
        self.answer = self._reader.answer(self._parts)
        return self.answer

    def _advance(self, *, is_end: bool) -> None:
        try:
            if not self._is_broken:
                self._read(is_end=is_end)
                if is_end or self._written.is_worthwhile:
                    self._written.join()
                    if self._splitter is None:
                        self._splitter = self._reader.splitter(self._parts, self.tail)
                    self._splitter.advance(self._written, is_end=is_end)
        except Exception as error:  # a request gets its text, whatever the model wrote
            self._is_broken = True
            self._parts.warnings.append(
                f"the answer could not be split into text, thinking and calls: {error!r}"
            )
            if self._splitter is not None:
                self._splitter.hand_over()
            unread, at = self._unread
            self._parts.text += (self._written.rest(), unread[at:])
        if self._is_broken:
            self._parts.text += self._stream.parts[self._n_read :]
            self._n_read = len(self._stream.parts)

    def _read(self, *, is_end: bool) -> None:
        """Write out what is new, control tokens at their places."""
        written, controls, texts = self._written, self._controls, self._stream.parts
        new, n_before = "".join(texts[self._n_read :]), self._n_characters_read
        self._unread, at = (new, 0), 0
        self._n_read = len(texts)
        self._n_characters_read += len(new)
        while controls and (is_end or controls[0][0] <= self._n_characters_read):
            place, token = controls.popleft()
            start, at = at, max(at, min(len(new), place - n_before))
            if start < at:
                written.add(new[start:at])
                self._unread = new, at
            written.add(self._reader.shown(token).decode(errors="replace"), is_control=True)
        if at < len(new):
            written.add(new[at:])
        self._unread = "", 0
