"""Find and parse the tool calls in the text of an answer.

An answer that is nothing but JSON calls of known tools is parsed under every call format.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from cbatch.checks import refuse_constant

if TYPE_CHECKING:
    from cbatch.chat.formats import CallFormat
    from cbatch.tools import Tools

N_MALFORMED_MAX = 16
"""The search ends after this many malformed calls: each may cost a scan of the text behind it."""

_SPACE = re.compile(r"\s*")
_FENCE = re.compile(r"\s*(?:```(?:json)?\s*)?")
_MISTRAL_NAME = re.compile(r"([\w.:/-]+)(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*")
_BARE_HEAD = re.compile(r"\s*(?:<\|python_tag\|>\s*)?(?:```(?:json)?\s*)?(?=[\[{])")
_GAP = re.compile(r"[\s;,]*")
_BARE_TAIL = re.compile(r"\s*(?:```)?\s*")


@dataclass(frozen=True, slots=True)
class Call:
    """A call that a model wrote: the function's name and the arguments as JSON text."""

    name: str
    arguments: str


CallReader = Callable[[str, "re.Match[str]", "Tools"], tuple[list[Call], int]]
"""Parses the calls behind the match of a call's beginning; returns them and where they end, or raises ValueError."""


@dataclass(slots=True)
class FoundCalls:
    """The calls in a text, the spans of text that they take, and how many calls could not be parsed."""

    calls: list[Call] = field(default_factory=list)
    spans: list[tuple[int, int]] = field(default_factory=list)
    n_malformed: int = 0


def find_calls(text: str, start: int, format: CallFormat | None, tools: Tools) -> FoundCalls:
    """Return the calls in `text[start:]`, without a format those in bare JSON; the time grows with the length."""
    found = FoundCalls()
    if format is not None:
        _find_marked(text, start, format, tools, found)
    if not found.calls and not found.n_malformed:
        found.calls = _read_bare(text[start:], tools)
        found.spans = [(start, len(text))] if found.calls else []
        found.n_malformed = int(not found.calls and "<|python_tag|>" in text[start:])
    return found


def _find_marked(text: str, at: int, format: CallFormat, tools: Tools, found: FoundCalls) -> None:
    while found.n_malformed < N_MALFORMED_MAX and (head := format.head.search(text, at)):
        try:
            calls, end = format.read(text, head, tools)
        except (ValueError, RecursionError):
            found.n_malformed += 1
            at = head.end()
            continue
        at = _end(format.tail, text, end)
        found.calls += calls
        found.spans.append((head.start(), at))


def _read_bare(text: str, tools: Tools) -> list[Call]:
    """Return the calls of a text that is nothing but JSON calls of known tools; none otherwise."""
    head = _BARE_HEAD.match(text)
    if head is None:
        return []
    calls, at = list[Call](), head.end()
    try:
        while at < len(text) and text[at] in "[{":
            value, at = _read_json(text, at)
            calls += _calls_in(value, needs_arguments=True)
            at = _end(_GAP, text, at)
    except (ValueError, RecursionError):
        return []
    is_whole = _end(_BARE_TAIL, text, at) == len(text)
    return calls if is_whole and all(c.name in tools.names for c in calls) else []


def read_json_calls(text: str, head: re.Match[str], _: Tools) -> tuple[list[Call], int]:
    """Parse calls in JSON: objects with a name and arguments, or a list of such objects. A `CallReader`."""
    calls, at = list[Call](), _end(_FENCE, text, head.end())
    while not calls or text[at : at + 1] in ("{", "["):
        value, end = _read_json(text, at)
        calls += _calls_in(value)
        at = _end(_GAP, text, end)
    return calls, _end(_FENCE, text, at)


def read_arguments(text: str, head: re.Match[str], _: Tools) -> tuple[list[Call], int]:
    """Parse the arguments behind a function's name, one JSON object. A `CallReader`."""
    value, end = _read_json(text, _end(_FENCE, text, head.end()))
    return [_call(head["name"], value)], _end(_FENCE, text, end)


def read_call(name: str, text: str) -> Call | None:
    """Return the call of a function with all of `text` as its arguments; None where the text is malformed."""
    try:
        value, end = _read_json(text)
        return _call(name, value) if not text[end:].strip() else None
    except (ValueError, RecursionError):
        return None


def read_mistral_calls(text: str, head: re.Match[str], _: Tools) -> tuple[list[Call], int]:
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

    def __call__(self, text: str, head: re.Match[str], tools: Tools) -> tuple[list[Call], int]:
        """Parse the calls behind `head`."""
        at = _end(_SPACE, text, head.end())
        if text[at : at + 1] == "{":
            return read_arguments(text, head, tools)
        properties, values = tools.parameters(head["name"]).get("properties"), dict[str, Any]()
        types = properties if isinstance(properties, Mapping) else {}
        begins = re.compile(rf"\s*{self.begin}")
        while begin := begins.match(text, at):
            end = text.find(self.end, begin.end())
            if end < 0:
                raise ValueError("a value without an end")
            value = text[begin.end() : end].removeprefix("\n").removesuffix("\n")
            values[begin["key"]] = _typed(value, types.get(begin["key"]))
            at = _end(_SPACE, text, end + len(self.end))
        if not text.startswith(self.close, at):
            raise ValueError("arguments without an end")
        return [_call(head["name"], values)], at


def _typed(value: str, schema: object) -> Any:
    """Return a value that was written without quotes: text if its schema is of type string, otherwise JSON if valid."""
    if isinstance(schema, Mapping) and schema.get("type") == "string":
        return value
    try:
        typed, end = _read_json(value)
    except (ValueError, RecursionError):
        return value
    return typed if not value[end:].strip() else value


def _calls_in(value: Any, *, needs_arguments: bool = False) -> list[Call]:
    """Return the calls in a JSON value, under any of the names that templates use."""
    if isinstance(value, list):
        return [call for item in value for call in _calls_in(item, needs_arguments=needs_arguments)]
    if not isinstance(value, dict):
        raise ValueError("a call is an object")
    for wrapper in ("tool_calls", "tool_call", "function_call", "function"):
        if isinstance(value.get(wrapper), dict | list):
            return _calls_in(value[wrapper], needs_arguments=needs_arguments)
    name = _first(value, ("name", "tool_name", "function"))
    arguments = _first(value, ("arguments", "parameters", "args"))
    if arguments is None and needs_arguments:
        raise ValueError("a call has arguments")
    return [_call(name, {} if arguments is None else arguments)]


def _first(value: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    return next((value[name] for name in names if value.get(name) is not None), None)


def _call(name: object, arguments: Any) -> Call:
    if isinstance(arguments, str):  # JSON text within JSON
        arguments, _ = _read_json(arguments)
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        raise ValueError("a call has a name and an object of arguments")
    name.encode()  # half of a surrogate pair is no name: UnicodeEncodeError is a ValueError
    text = json.dumps(arguments, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which JSON can spell and UTF-8 cannot
        text = json.dumps(arguments)
    return Call(name, text)


def _read_json(text: str, at: int = 0) -> tuple[Any, int]:
    """Return the JSON value behind any space, and its end; a string may have line breaks, as models write them."""
    decoder = json.JSONDecoder(strict=False, parse_constant=refuse_constant)
    value, end = decoder.raw_decode(text, _end(_SPACE, text, at))
    return value, end


def _end(pattern: re.Pattern[str], text: str, at: int) -> int:
    match = pattern.match(text, at)
    return match.end() if match else at
