"""An ended answer taken apart: what was thought, what is said, which tools are called.

A chat template tells by marks of its own how its model writes these; see `answer_format`. Control tokens that mark the
parts are no text; they are written out to find the parts, and are in none of them.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cbatch.chat.call_formats import (
    Call,
    CallFormat,
    FoundCalls,
    call_format,
    find_calls,
    read_call,
)
from cbatch.core.text import TextStream

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from cbatch.tools import Tools

    Span = tuple[int, int]

N_TAIL = 16
"""Tokens at a prompt's end among which a template opens the thinking that the answer goes on with."""

THINKING = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<seed:think>", "</seed:think>"),
    ("<|inner_prefix|>", "<|inner_suffix|>"),
)
"""What models put around their thinking: DeepSeek, Qwen and most others; Magistral; Command R7B; Seed; Apertus.

Source: llama.cpp, common/chat.cpp and common/chat-diff-analyzer.cpp, and the templates themselves.
"""

_WRAPPERS = (
    (">>>all", r"(?:\A|>>>)all\n"),
    ("<response></response>", r"</?response>\s*"),
    ("<|START_RESPONSE|>", r"<\|(?:START|END)_RESPONSE\|>"),
)
"""By a mark in the template: what models put around what they say."""

_CHANNEL_MARK = re.compile(r"<\|(start|channel|message|end|call|return)\|>")
_CUT_THINKING = "the answer ended while it was thinking"
_RECIPIENT = re.compile(r"to=functions\.([\w.:/-]+)")
"""Source: gpt-oss's template, and OpenAI's description of the harmony format."""


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """How a chat template has answers written.

    Args:
        thinking: what stands before and behind what was thought, if it has that.
        calls: how calls are written; None for bare JSON.
        wrapper: what is put around what is said, and is no part of it.
        has_channels: whether an answer is messages in channels, as gpt-oss's.
    """

    thinking: tuple[str, str] | None = None
    calls: CallFormat | None = None
    wrapper: re.Pattern[str] | None = None
    has_channels: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether an answer without calls is text and nothing else."""
        return self.thinking is None and self.wrapper is None and not self.has_channels


def answer_format(template: str) -> AnswerFormat:
    """Return how this template has answers written, by the marks in its source."""
    if "<|channel|>" in template and "<|message|>" in template:
        return AnswerFormat(has_channels=True)
    wrapper = next((re.compile(p) for mark, p in _WRAPPERS if mark in template), None)
    thinking = next((marks for marks in THINKING if marks[1] in template), None)
    return AnswerFormat(thinking, call_format(template), wrapper)


@dataclass(frozen=True, slots=True)
class Answer:
    """The parts of an ended answer, and what was odd about it."""

    text: str
    reasoning: str = ""
    calls: tuple[Call, ...] = ()
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Pieces:
    """A vocabulary as text is made of it: `shown` writes control tokens out, `plain` leaves them out."""

    plain: Callable[[int], bytes]
    shown: Callable[[int], bytes]
    controls: frozenset[int] = frozenset()


@dataclass(slots=True)
class _Written:
    """An answer's text with control tokens written out; `removed`, ascending, are these and what else is no part."""

    text: str
    removed: list[Span]

    def without(self, start: int, end: int) -> str:
        """Return a stretch of the text without what was removed."""
        return "".join(self._kept(start, end))

    def _kept(self, at: int, end: int) -> Iterator[str]:
        for i in range(bisect_left(self.removed, (at,)), len(self.removed)):
            first, last = self.removed[i]
            if first >= end:
                break
            if last > at:
                yield self.text[at:first]
                at = max(at, last)
        if at < end:
            yield self.text[at:end]

    def remove(self, spans: Iterable[Span]) -> None:
        """Take out more."""
        self.removed = sorted((*self.removed, *spans))


@dataclass(frozen=True, slots=True)
class AnswerReader:
    """Takes one request's answer apart, once it has ended.

    Args:
        format: of the chat's template.
        pieces: of the vocabulary.
        tools: that may be called; without any, no calls are looked for.
        splits_reasoning: whether what was thought is no part of the text.
        opened: the last message, where it is the assistant's and the answer goes on from it.
        n_calls_max: most calls to return: those behind them are taken out of the text, with a warning.
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
        """Return the parts of an answer; it raises nothing: what cannot be read stays text, with a warning.

        Args:
            text: the answer as readers saw it.
            tokens: the answer's.
            tail: the prompt's last tokens.
            stops: that it was read with, where one of them ended it.
            include_stop: whether that one is in the text.
        """
        try:
            if self.pieces.controls.isdisjoint(tokens):
                return self._take_apart(_Written(text, []), tail)
            return self._take_apart(self._written(tokens, stops, include_stop=include_stop), tail)
        except Exception as error:  # whatever a model writes, its request has its text
            return Answer(text, warnings=(f"the answer could not be taken apart: {error!r}",))

    def _written(
        self, tokens: Sequence[int], stops: Sequence[str], *, include_stop: bool
    ) -> _Written:
        """Return the text with control tokens in their places."""
        stream, removed = TextStream(self.pieces.plain, stops, include_stop=include_stop), []
        n_chars = n_parts = start = 0
        parts = list[str]()
        for i, token in enumerate(tokens):
            if token not in self.pieces.controls:
                continue
            stream.feed(tokens[start:i])
            name = self.pieces.shown(token).decode(errors="replace")
            parts += (*stream.parts[n_parts:], name)
            n_chars += sum(map(len, stream.parts[n_parts:])) + len(name)
            removed.append((n_chars - len(name), n_chars))
            start, n_parts = i + 1, len(stream.parts)
        stream.feed(tokens[start:])
        stream.flush()
        return _Written("".join((*parts, *stream.parts[n_parts:])), removed)

    def _take_apart(self, written: _Written, tail: Sequence[int]) -> Answer:
        if self.format.has_channels:
            return self._read_channels(written)
        thought = self._thought(written.text, tail)
        reasoning, start, warnings = self._split_reasoning(written, thought)
        if self.format.wrapper is not None:
            written.remove(m.span() for m in self.format.wrapper.finditer(written.text, start))
        found = FoundCalls()
        if self.tools:
            at = thought[1] if thought else 0
            found = find_calls(written.text, at, self.format.calls, self.tools)
            written.remove(found.spans)
        text = written.without(start, len(written.text))
        if found.calls:
            text = text.strip()
        elif start:
            text = text.lstrip()
        return Answer(text, reasoning, self._allowed(found), (*warnings, *self._odd(found)))

    def _split_reasoning(
        self, written: _Written, thought: tuple[Span, int] | None
    ) -> tuple[str, int, tuple[str, ...]]:
        """Return what was thought, where the answer goes on behind it, and what is odd about that."""
        if thought is None or not self.splits_reasoning:
            return "", 0, ()
        (first, last), start = thought
        reasoning = written.without(first, last).strip()
        is_cut = bool(reasoning) and last == len(written.text)
        return reasoning, start, (_CUT_THINKING,) if is_cut else ()

    def _thought(self, text: str, tail: Sequence[int]) -> tuple[Span, int] | None:
        """Return where in the text was thought, and where the answer goes on behind that; None for nowhere."""
        if self.format.thinking is None:
            return None
        begin, end = self.format.thinking
        first = len(text) - len(text.lstrip())
        if text.startswith(begin, first):
            first += len(begin)
        elif self._is_opened(begin, end, tail):
            first = 0
        else:
            return None
        last = text.find(end, first)
        return ((first, len(text)), len(text)) if last < 0 else ((first, last), last + len(end))

    def _is_opened(self, begin: str, end: str, tail: Sequence[int]) -> bool:
        """Whether the prompt ends within thinking."""
        if self.opened:
            return self.opened.rfind(begin) > self.opened.rfind(end)
        shown = b"".join(map(self.pieces.shown, tail)).decode(errors="replace")
        return shown.rstrip().endswith(begin)

    def _read_channels(self, written: _Written) -> Answer:
        """Return the parts of an answer in channels: analysis is thought, commentary to a function is a call."""
        calls, thoughts, said, found = list[Call](), list[str](), list[str](), FoundCalls()
        for head, span in _channel_messages(written.text):
            recipient, call = _RECIPIENT.search(head), None
            if recipient and self.tools:
                call = read_call(recipient[1], written.text[slice(*span)])
                found.n_malformed += call is None
            if call is not None:
                calls.append(call)
            elif "<|channel|>analysis" in head and self.splits_reasoning:
                thoughts.append(written.without(*span).strip())
            else:
                said.append(written.without(*span))
        found.calls = calls
        warnings = list(self._odd(found))
        if thoughts and not said and not calls:
            warnings.append(_CUT_THINKING)
        return Answer("".join(said), "\n".join(thoughts), self._allowed(found), tuple(warnings))

    def _allowed(self, found: FoundCalls) -> tuple[Call, ...]:
        """Return as many of the calls as may be made."""
        return tuple(found.calls[: self.n_calls_max])

    def _odd(self, found: FoundCalls) -> Iterator[str]:
        """Yield what is odd about the calls, those included that are left out."""
        if found.n_malformed:
            yield "what begins as a tool call could not be read as one: it is left in the text"
        for name in dict.fromkeys(call.name for call in self._allowed(found)):
            if name not in self.tools.names:
                yield f"the tool {name!r} is called, which is not among those of the request"
        if n_left := len(found.calls) - len(self._allowed(found)):
            yield f"parallel_tool_calls is False: the first call is kept, {n_left} behind it left out"


def _channel_messages(text: str) -> Iterator[tuple[str, Span]]:
    """Yield each message's head, with its channel and recipient, and where its body stands."""
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
