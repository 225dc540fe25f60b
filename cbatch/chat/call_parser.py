"""Find and parse the tool calls in the text of an answer, also in one that grows.

An answer that is nothing but JSON calls of known tools is parsed under every call format.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from cbatch.chat.marks import Marks
from cbatch.support.checks import refuse_constant

if TYPE_CHECKING:
    from cbatch.chat.formats import CallFormat
    from cbatch.tools import Tools

N_MALFORMED_MAX = 16
"""The search ends after this many malformed calls: each may cost a scan of the text after it."""

_N_BEHIND = 8
"""Characters after a call that tell whether a fence follows it: more than "```json" has."""
_N_UNREAD = 16
"""Characters from an error in JSON to the end of the text that tell an error from a value that is not whole: more than
the longest constant or mark between a name and its arguments has."""

_SPACE = re.compile(r"\s*")
_FENCE = re.compile(r"\s*(?:```(?:json)?\s*)?")
_MISTRAL_NAME = re.compile(r"([\w.:/-]+)(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*")
_BARE_HEAD = Marks(re.compile(r"\s*(?:<\|python_tag\|>\s*)?(?:```(?:json)?\s*)?(?=[\[{])"))
_GAP = re.compile(r"[\s;,]*")
_BARE_TAIL = Marks(re.compile(r"\s*(?:```)?\s*"))
_BARE_CALL = Marks(
    re.compile(
        r"\s*(?:<\|python_tag\|>\s*)?(?:```(?:json)?\s*)?[\[{][\[{\s]*"
        r'(?:"(?:tool_calls|tool_call|function_call|function)"\s*:\s*[\[{][\[{\s]*)?'
        r'(?:"type"\s*:\s*"function"\s*,\s*)?(?:"function"\s*:\s*\{\s*)?'
        r'"(?:name|tool_name|function)"\s*:\s*"'
    )
)
"""How a call in bare JSON begins, up to the name."""
_PYTHON = Marks(re.compile(r"<\|python_tag\|>"))
_WORD = re.compile(r"[\w.:/-]*\s*")
_FENCE_PARTS = frozenset({"", "`", "``", "```", "```j", "```js", "```jso", "j", "js", "jso"})
"""What is left of a fence behind a call where the text is cut off."""
_BROKEN = "\ufffd"
"""What stands at the end of a text for a character of which only the first bytes came."""


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """A call that a model wrote: the function's name and the arguments as JSON text."""

    name: str
    arguments: str


CallReader = Callable[[str, "re.Match[str]", "Tools"], tuple[list[ParsedCall], int]]
"""Parses the calls after the match of a call's beginning; returns them and where they end, or raises ValueError."""


class UnfinishedError(ValueError):
    """The text ends where more of it may make a call."""


@dataclass(frozen=True, slots=True)
class Markup:
    """A part of an answer that is not text: calls, or a mark around the text."""

    start: int
    end: int
    is_call: bool


class CallSearch:
    """Finds calls, and the marks around the text of an answer, in a text that grows.

    What it finds does not depend on how the text was cut.
    """

    def __init__(self, format: CallFormat | None, tools: Tools, response: Marks | None) -> None:
        """Make one; without tools there are no calls, and without `response` no marks."""
        self.calls, self.n_malformed = list[ParsedCall](), 0
        self.n_unfinished, self.is_cut = 0, False
        """Calls that the end of the text cut off; whether something else than the model ends the text."""
        self._format, self._tools, self._response = format, tools, response
        self._heads = format.head if format is not None and tools else None
        self._marks = [m for m in (self._heads, response, _PYTHON if tools else None) if m]
        self._may_be_bare, self._has_python = bool(tools), False

    def advance(self, text: str, at: int, *, is_end: bool) -> tuple[list[Markup], int]:
        """Return the markup in `text[at:]`, and up to where that is final: from there the next call goes on.

        A later text may leave out what is final, but not all of it: the answer begins at 0 and nowhere else.
        """
        if not (is_end and self.is_cut):
            return self._advance(text, at, is_end=is_end)
        known = text.removesuffix(_BROKEN)
        found, _ = self._advance(known, at, is_end=True)
        if found and found[-1].end == len(known):
            found[-1] = replace(found[-1], end=len(text))
        return found, len(text)

    def _advance(self, text: str, at: int, *, is_end: bool) -> tuple[list[Markup], int]:
        if self._may_be_bare:
            try:
                self.calls += _read_bare(text, at, self._tools, is_end=is_end and not self.is_cut)
            except UnfinishedError:
                if not is_end:
                    return [], at
                self._read_cut_bare(text, at)
            self._may_be_bare = False
            if self.calls or self.n_unfinished:
                return [Markup(at, len(text), is_call=True)], len(text)
        found, end = self._find(text, at, is_end=is_end) if self._marks else ([], len(text))
        if is_end and self._has_python and not self.calls:
            self.n_malformed = max(1, self.n_malformed)
        return found, end

    def _read_cut_bare(self, text: str, at: int) -> None:
        """Read a text that was cut off where it may become calls in bare JSON."""
        self.calls += _read_bare(text, at, self._tools, is_end=True)
        if not self.calls and _begins_bare_call(text, at, self._tools.names):
            self.n_unfinished = 1

    def _find(self, text: str, at: int, *, is_end: bool) -> tuple[list[Markup], int]:
        found, ahead, open_at = list[Markup](), dict[Marks, "re.Match[str] | None"](), -1
        while True:
            if open_at < at:
                open_at = self._open_at(text, at, is_end=is_end)
            marks, match = _first_match(self._marks, text, at, ahead)
            if match is None or match.start() >= open_at:
                if is_end and open_at < len(text):
                    found.append(Markup(open_at, len(text), is_call=False))
                    open_at = len(text)
                return found, open_at
            at = match.end()
            if marks is self._response:
                found.append(Markup(*match.span(), is_call=False))
            elif marks is _PYTHON:
                self._has_python = True
            else:
                n_before = len(self.calls) + self.n_unfinished
                try:
                    end = self._read(text, match, is_end=is_end)
                except UnfinishedError:
                    return found, match.start()
                if len(self.calls) + self.n_unfinished > n_before:
                    found.append(Markup(match.start(), end, is_call=True))
                at = end

    def _open_at(self, text: str, at: int, *, is_end: bool) -> int:
        """Return the place from `at` on from which the text is the beginning of a mark, or may be; its end if none."""
        if not is_end:
            return min(m.open_at(text, at) for m in self._marks)
        if not self.is_cut:
            return len(text)
        open_at = min(m.open_at(text, at) for m in self._marks)
        if open_at >= len(text) or not self._is_mark(text[open_at:].rstrip()):
            return len(text)
        self.n_unfinished += self._heads is not None and self._heads.open_at(text, at) == open_at
        return open_at

    def _is_mark(self, text: str) -> bool:
        """Whether what may become a mark is one already, and no word that stands where functions are named."""
        if self._format is None or not self._format.begins_with_name or not _WORD.fullmatch(text):
            return True
        return any(name.startswith(text) for name in self._tools.names)

    def _read(self, text: str, head: re.Match[str], *, is_end: bool) -> int:
        """Add the calls after a head; return where they end, or where the head does if they are malformed.

        Where the text is cut off, a call that is not whole takes the rest of it.
        """
        assert self._format is not None
        tail = self._format.tail
        try:
            calls, end = self._format.read(text, head, self._tools)
            if not is_end and (_may_go_on(text, end) or tail.may_match(text, end)):
                raise UnfinishedError
        except (ValueError, RecursionError) as error:
            if isinstance(error, UnfinishedError):
                if not is_end:
                    raise
                if self.is_cut:
                    self.n_unfinished += 1
                    return len(text)
            self.n_malformed += 1
            if self.n_malformed >= N_MALFORMED_MAX:
                self._marks = [m for m in self._marks if m is not self._heads]
            return head.end()
        self.calls += calls
        if self.is_cut and (tail.may_match(text, end) or text[end:] in _FENCE_PARTS):
            return len(text)
        return _end(tail.pattern, text, end)


def _first_match(
    several: list[Marks], text: str, at: int, ahead: dict[Marks, re.Match[str] | None]
) -> tuple[Marks | None, re.Match[str] | None]:
    """Return the first match of marks from `at` on, and whose it is.

    Each part of the text is searched once: `ahead` keeps the next match of each.
    """
    first: tuple[Marks | None, re.Match[str] | None] = None, None
    for marks in several:
        match = ahead.get(marks)
        if marks not in ahead or (match is not None and match.start() < at):
            match = ahead[marks] = marks.pattern.search(text, at)
        if match is not None and (first[1] is None or match.start() < first[1].start()):
            first = marks, match
    return first


def _may_go_on(text: str, end: int) -> bool:
    """Whether calls that end here may be longer in a longer text: others, or a fence, may follow."""
    return len(text) - end < _N_BEHIND and text[end : end + 1] in ("", "`", "j")


def _read_bare(text: str, start: int, tools: Tools, *, is_end: bool) -> list[ParsedCall]:
    """Return the calls of a text that is nothing but JSON calls of known tools from `start` on; none otherwise.

    Raises:
        UnfinishedError: the text has not ended, and may become such calls.
    """
    head = _BARE_HEAD.pattern.match(text, start)
    if head is None:
        if not is_end and _BARE_HEAD.may_match(text, start):
            raise UnfinishedError
        return []
    calls, at = list[ParsedCall](), head.end()
    try:
        while at < len(text) and text[at] in "[{":
            value, at = _read_json(text, at)
            calls += _calls_in(value, needs_arguments=True)
            if not all(call.name in tools.functions for call in calls):
                return []
            at = _end(_GAP, text, at)
    except (ValueError, RecursionError) as error:
        if isinstance(error, UnfinishedError) and not is_end:
            raise
        return []
    is_whole = _end(_BARE_TAIL.pattern, text, at) == len(text) or _BARE_TAIL.may_match(text, at)
    if not is_end and is_whole:
        raise UnfinishedError
    return calls if is_whole else []


def _begins_bare_call(text: str, at: int, names: Sequence[str]) -> bool:
    """Whether a text that was cut off begins as a call of a known tool in bare JSON."""
    begun = _BARE_CALL.pattern.match(text, at)
    if begun is None:
        is_json = _BARE_HEAD.pattern.match(text, at) is not None
        return is_json and _BARE_CALL.may_match(text, at)
    name, quote, _ = text[begun.end() :].partition('"')
    return name in names if quote else any(known.startswith(name) for known in names)


def read_json_calls(text: str, head: re.Match[str], _: Tools) -> tuple[list[ParsedCall], int]:
    """Parse calls in JSON: objects with a name and arguments, or a list of such objects. A `CallReader`."""
    calls, at = list[ParsedCall](), _end(_FENCE, text, head.end())
    while not calls or text[at : at + 1] in ("{", "["):
        value, end = _read_json(text, at)
        calls += _calls_in(value)
        at = _end(_GAP, text, end)
    return calls, _end(_FENCE, text, at)


def read_arguments(text: str, head: re.Match[str], _: Tools) -> tuple[list[ParsedCall], int]:
    """Parse the arguments after a function's name, one JSON object. A `CallReader`."""
    value, end = _read_json(text, _end(_FENCE, text, head.end()))
    return [_call(head["name"], value)], _end(_FENCE, text, end)


def read_call(name: str, text: str) -> ParsedCall | None:
    """Return the call of a function with all of `text` as its arguments; None where the text is malformed."""
    try:
        value, end = _decode(text)
        return _call(name, value) if not text[end:].strip() else None
    except (ValueError, RecursionError):
        return None


def read_mistral_calls(text: str, head: re.Match[str], _: Tools) -> tuple[list[ParsedCall], int]:
    """Parse a JSON list of calls, or a name and a JSON object of arguments. A `CallReader`."""
    named = _MISTRAL_NAME.match(text, head.end())
    value, end = _read_json(text, named.end() if named else head.end())
    return ([_call(named[1], value)] if named else _calls_in(value)), end


@dataclass(frozen=True, slots=True)
class TaggedArguments:
    """Parses arguments that are written one by one in tags, or as one JSON object. A `CallReader`."""

    begin: str
    """A pattern of what precedes a value, with a group `key`."""
    end: str
    close: str
    """What follows the last argument; a call without it was cut off."""

    def __call__(
        self, text: str, head: re.Match[str], tools: Tools
    ) -> tuple[list[ParsedCall], int]:
        """Parse the calls after `head`."""
        at = _end(_SPACE, text, head.end())
        if text[at : at + 1] == "{":
            return read_arguments(text, head, tools)
        properties, values = tools.parameters(head["name"]).get("properties"), dict[str, Any]()
        types = properties if isinstance(properties, Mapping) else {}
        begins = re.compile(rf"\s*{self.begin}")
        while begin := begins.match(text, at):
            end = text.find(self.end, begin.end())
            if end < 0:
                raise UnfinishedError("a value has no end")
            value = text[begin.end() : end].removeprefix("\n").removesuffix("\n")
            values[begin["key"]] = _typed(value, types.get(begin["key"]))
            at = _end(_SPACE, text, end + len(self.end))
        if not text.startswith(self.close, at):
            begins_with = self.begin.partition("(")[0]
            is_cut = any(_begin_alike(text, at, mark) for mark in (self.close, begins_with))
            raise (UnfinishedError if is_cut else ValueError)("the arguments have no end")
        return [_call(head["name"], values)], at


def _begin_alike(text: str, at: int, mark: str) -> bool:
    """Whether a text from `at` on begins with a mark, or is the beginning of one."""
    return mark.startswith(text[at : at + len(mark)])


def _typed(value: str, schema: object) -> Any:
    """Return a value that was written without quotes: text if its schema is of type string, otherwise JSON if valid."""
    if isinstance(schema, Mapping) and schema.get("type") == "string":
        return value
    try:
        typed, end = _decode(value)
    except (ValueError, RecursionError):
        return value
    return typed if not value[end:].strip() else value


def _calls_in(value: Any, *, needs_arguments: bool = False) -> list[ParsedCall]:
    """Return the calls in a JSON value, under any of the names that templates use."""
    if isinstance(value, list):
        return [call for item in value for call in _calls_in(item, needs_arguments=needs_arguments)]
    if not isinstance(value, dict):
        raise ValueError("a call must be an object")
    for wrapper in ("tool_calls", "tool_call", "function_call", "function"):
        if isinstance(value.get(wrapper), dict | list):
            return _calls_in(value[wrapper], needs_arguments=needs_arguments)
    name = _first(value, ("name", "tool_name", "function"))
    arguments = _first(value, ("arguments", "parameters", "args"))
    if arguments is None and needs_arguments:
        raise ValueError("a call must have arguments")
    return [_call(name, {} if arguments is None else arguments)]


def _first(value: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    return next((value[name] for name in names if value.get(name) is not None), None)


def _call(name: object, arguments: Any) -> ParsedCall:
    if isinstance(arguments, str):  # JSON text within JSON
        arguments, _ = _decode(arguments)
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        raise ValueError("a call has a name and an object of arguments")
    name.encode()  # half of a surrogate pair is not a name: UnicodeEncodeError is a ValueError
    text = json.dumps(arguments, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which JSON can spell and UTF-8 cannot
        text = json.dumps(arguments)
    return ParsedCall(name, text)


def _read_json(text: str, at: int) -> tuple[Any, int]:
    """Return as `_decode`.

    Raises:
        UnfinishedError: more text may make it a value.
        ValueError: nothing can make it one.
    """
    try:
        return _decode(text, at)
    except json.JSONDecodeError as error:
        is_open = error.msg.startswith("Unterminated") or len(text) - error.pos < _N_UNREAD
        if is_open:
            raise UnfinishedError(error.msg) from None
        raise


def _decode(text: str, at: int = 0) -> tuple[Any, int]:
    """Return the JSON value after any space, and its end; a string may have line breaks, as models write them."""
    decoder = json.JSONDecoder(
        strict=False, parse_constant=refuse_constant, parse_float=_number, parse_int=_number
    )
    value, end = decoder.raw_decode(text, _end(_SPACE, text, at))
    return value, end


def _number(digits: str) -> float:
    """Return a number; one too large for Python becomes the largest float, because grammars allow any number."""
    with suppress(ValueError):  # a fraction, or more digits than Python reads as an integer
        return int(digits)
    return max(-sys.float_info.max, min(float(digits), sys.float_info.max))


def _end(pattern: re.Pattern[str], text: str, at: int) -> int:
    match = pattern.match(text, at)
    return match.end() if match else at
