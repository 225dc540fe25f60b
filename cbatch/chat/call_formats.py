"""Tool calls in the text of an answer, as chat templates teach models to write them.

A format is a row of `FORMATS`: by which marks a template is known to teach it, how a call begins, how it is read, how
it ends. An answer that is nothing but JSON calls of known tools is read under every format.

Source of the formats: llama.cpp, common/chat.cpp and docs/function-calling.md, and the templates themselves.
"""

from __future__ import annotations

import hashlib
import json
import re
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cbatch.tools import Tools

N_MALFORMED_MAX = 16
"""Broken calls after which no more are looked for: each may cost a look at all that follows."""

_DIGITS = string.ascii_letters + string.digits
_SPACE = re.compile(r"\s*")
_FENCE = re.compile(r"\s*(?:```(?:json)?\s*)?")
_MISTRAL_NAME = re.compile(r"([\w.:/-]+)(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*")
_BARE_HEAD = re.compile(r"\s*(?:<\|python_tag\|>\s*)?(?:```(?:json)?\s*)?(?=[\[{])")
_GAP = re.compile(r"[\s;,]*")
_BARE_TAIL = re.compile(r"\s*(?:```)?\s*")


@dataclass(frozen=True, slots=True)
class Call:
    """A call as it was written: the function's name, and its arguments as JSON text."""

    name: str
    arguments: str


Read = Callable[[str, "re.Match[str]", "Tools"], tuple[list[Call], int]]
"""Reads what follows a call's beginning: returns its calls and where they end, or raises ValueError."""


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How one family of templates has calls written.

    Args:
        name: for people.
        marks: what such a template contains, all of them.
        head: how a call begins, with a group `name` where the function's name is part of that.
        read: reads what comes next.
        tail: what closes a call; matches nothing too, for models forget it.
    """

    name: str
    marks: tuple[str, ...]
    head: re.Pattern[str]
    read: Read
    tail: re.Pattern[str]


@dataclass(slots=True)
class FoundCalls:
    """Calls in a text, the spans that they take, and how many more began that could not be read."""

    calls: list[Call] = field(default_factory=list)
    spans: list[tuple[int, int]] = field(default_factory=list)
    n_malformed: int = 0


def find_calls(text: str, start: int, format: CallFormat | None, tools: Tools) -> FoundCalls:
    """Return the calls in `text[start:]`. Takes time in proportion to the text, whatever it holds."""
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
        tail = format.tail.match(text, end)
        at = tail.end() if tail else end
        found.calls += calls
        found.spans.append((head.start(), at))


def _read_bare(text: str, tools: Tools) -> list[Call]:
    """Return the calls of a text that is JSON and nothing else, all of tools that there are."""
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
    """Read calls as JSON: objects with name and arguments, or a list of them."""
    calls, at = list[Call](), _end(_FENCE, text, head.end())
    while not calls or text[at : at + 1] in ("{", "["):
        value, end = _read_json(text, at)
        calls += _calls_in(value)
        at = _end(_GAP, text, end)
    return calls, _end(_FENCE, text, at)


def read_arguments(text: str, head: re.Match[str], _: Tools) -> tuple[list[Call], int]:
    """Read arguments as a JSON object, behind the function's name."""
    value, end = _read_json(text, _end(_FENCE, text, head.end()))
    return [_call(head["name"], value)], _end(_FENCE, text, end)


def read_call(name: str, text: str) -> Call | None:
    """Return the call of a function whose arguments are all of this text; None where they cannot be read."""
    try:
        value, end = _read_json(text, _end(_SPACE, text, 0))
        return _call(name, value) if not text[end:].strip() else None
    except (ValueError, RecursionError):
        return None


def _read_mistral(text: str, head: re.Match[str], _: Tools) -> tuple[list[Call], int]:
    """Read a JSON list of calls, or a name and a JSON object."""
    named = _MISTRAL_NAME.match(text, head.end())
    value, end = _read_json(text, named.end() if named else head.end())
    return ([_call(named[1], value)] if named else _calls_in(value)), end


@dataclass(frozen=True, slots=True)
class _Pairs:
    """Reads arguments that are written one by one, or as JSON where the text has that instead."""

    begin: re.Pattern[str]
    """Up to a value; with a group `key`."""
    end: str
    """Behind a value."""
    close: str
    """Behind the last one: without it the call was cut off."""

    def __call__(self, text: str, head: re.Match[str], tools: Tools) -> tuple[list[Call], int]:
        """See `Read`."""
        at = _end(_SPACE, text, head.end())
        if text[at : at + 1] == "{":
            return read_arguments(text, head, tools)
        types, values = _types(tools, head["name"]), dict[str, Any]()
        while begin := self.begin.match(text, at):
            end = text.find(self.end, begin.end())
            if end < 0:
                raise ValueError("a value without an end")
            value = text[begin.end() : end].removeprefix("\n").removesuffix("\n")
            values[begin["key"]] = _typed(value, types.get(begin["key"]))
            at = _end(_SPACE, text, end + len(self.end))
        if not text.startswith(self.close, at):
            raise ValueError("arguments without an end")
        return [_call(head["name"], values)], at


def _types(tools: Tools, name: str) -> Mapping[str, Any]:
    properties = tools.parameters(name).get("properties")
    return properties if isinstance(properties, Mapping) else {}


def _typed(value: str, schema: object) -> Any:
    """Return a value that was written without quotes: text where the schema says so, else JSON if it is any."""
    if isinstance(schema, Mapping) and schema.get("type") == "string":
        return value
    try:
        typed, end = _read_json(value, _end(_SPACE, value, 0))
    except (ValueError, RecursionError):
        return value
    return typed if not value[end:].strip() else value


def _calls_in(value: Any, *, needs_arguments: bool = False) -> list[Call]:
    """Return the calls that a JSON value stands for, by any of the names that templates use."""
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
        arguments, _ = _read_json(arguments, _end(_SPACE, arguments, 0))
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        raise ValueError("a call has a name and an object of arguments")
    name.encode()  # half of a surrogate pair is no name: UnicodeEncodeError is a ValueError
    return Call(name, _as_text(arguments))


def _as_text(arguments: Mapping[str, Any]) -> str:
    text = json.dumps(arguments, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which JSON can spell and UTF-8 cannot
        return json.dumps(arguments)
    return text


def _read_json(text: str, at: int) -> tuple[Any, int]:
    value, end = _decoder().raw_decode(text, at)
    return value, end


def _decoder() -> json.JSONDecoder:
    """Return a decoder that takes line breaks within strings, as models write them, and no NaN."""
    return json.JSONDecoder(strict=False, parse_constant=_refuse_constant)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _end(pattern: re.Pattern[str], text: str, at: int) -> int:
    match = pattern.match(text, at)
    return match.end() if match else at


def _format(name: str, marks: tuple[str, ...], head: str, read: Read, tail: str) -> CallFormat:
    return CallFormat(name, marks, re.compile(head), read, re.compile(f"(?:{tail})?"))


FORMATS = (
    _format(
        "functionary v3.2", (">>>all",), r"(?:\A|>>>)(?P<name>[\w.-]+)\n(?=\{)", read_arguments, ""
    ),
    _format(
        "kimi",
        ("<|tool_call_argument_begin|>",),
        r"(?:<\|tool_calls_section_begin\|>\s*)?<\|tool_call_begin\|>\s*(?:functions\.)?"
        r"(?P<name>[\w.-]+)(?::\d+)?\s*<\|tool_call_argument_begin\|>",
        read_arguments,
        r"\s*<\|tool_call_end\|>(?:\s*<\|tool_calls_section_end\|>)?",
    ),
    _format(
        "deepseek",
        ("<｜tool▁call▁begin｜>",),
        r"(?:<｜tool▁calls▁begin｜>\s*)?<｜tool▁call▁begin｜>\s*(?:function<｜tool▁sep｜>)?"
        r"(?P<name>[\w.:/-]+)\s*(?:<｜tool▁sep｜>)?",
        read_arguments,
        r"\s*<｜tool▁call▁end｜>(?:\s*<｜tool▁calls▁end｜>)?",
    ),
    _format(
        "glm",
        ("<tool_call>", "<arg_key>"),
        r"<tool_call>\s*(?P<name>[\w.:/-]+)\s*(?=<arg_key>|</tool_call>)",
        _Pairs(
            re.compile(r"\s*<arg_key>(?P<key>[^<]*)</arg_key>\s*<arg_value>"),
            "</arg_value>",
            "</tool_call>",
        ),
        r"\s*</tool_call>",
    ),
    _format(
        "function tags",  # with JSON: Llama 3.1 as functionary has it; one by one: Qwen3-Coder, Nemotron 3
        ("<function=",),
        r"(?:<(?:seed:)?tool_call>\s*)?<function=(?P<name>[\w.:/-]+)>",
        _Pairs(re.compile(r"\s*<parameter=(?P<key>[^>]*)>"), "</parameter>", "</function>"),
        r"\s*</function>(?:\s*</(?:seed:)?tool_call>)?",
    ),
    _format(
        "dsml",
        ("DSML", "invoke name="),
        r'(?:<｜DSML｜\w+>\s*)?<｜DSML｜invoke name="(?P<name>[^"]+)">',
        _Pairs(
            re.compile(r'\s*<｜DSML｜parameter name="(?P<key>[^"]*)"(?: string="\w+")?>'),
            "</｜DSML｜parameter>",
            "</｜DSML｜invoke>",
        ),
        r"\s*</｜DSML｜invoke>(?:\s*</｜DSML｜\w+>)?",
    ),
    _format(
        "invoke tags",
        ("<invoke name=",),
        r'(?:<minimax:tool_call>\s*)?<invoke name="(?P<name>[^"]+)">',
        _Pairs(re.compile(r'\s*<parameter name="(?P<key>[^"]*)">'), "</parameter>", "</invoke>"),
        r"\s*</invoke>(?:\s*</minimax:tool_call>)?",
    ),
    _format("mistral", ("[TOOL_CALLS]",), r"\[TOOL_CALLS\]\s*", _read_mistral, ""),
    _format(
        "command r7b",
        ("<|START_ACTION|>",),
        r"<\|START_ACTION\|>\s*",
        read_json_calls,
        r"\s*<\|END_ACTION\|>",
    ),
    _format("granite", ("<|tool_call|>",), r"<\|tool_call\|>\s*", read_json_calls, ""),
    _format(
        "tool_calls tags",
        ("<tool_calls>",),
        r"<tool_calls>\s*",
        read_json_calls,
        r"\s*</tool_calls>",
    ),
    _format("nemotron v2", ("<TOOLCALL>",), r"<TOOLCALL>\s*", read_json_calls, r"\s*</TOOLCALL>"),
    _format("gigachat", ("<|function_call|>",), r"<\|function_call\|>\s*", read_json_calls, ""),
    _format("hermes", ("<tool_call>",), r"<tool_call>\s*", read_json_calls, r"\s*</tool_call>"),
)
"""In the order in which a template is tried: what is said more closely comes first."""


def call_id(owner: str, number: int, i_call: int) -> str:
    """Return a name for a call, of nine letters and digits: Mistral's templates take no other.

    Args:
        owner: the mark of an engine.
        number: of the sequence in it.
        i_call: of the call in the answer.
    """
    digest = hashlib.blake2b(f"{owner}/{number}/{i_call}".encode(), digest_size=8).digest()
    value, name = int.from_bytes(digest, "big"), ""
    for _ in range(9):
        value, digit = divmod(value, len(_DIGITS))
        name += _DIGITS[digit]
    return name


def call_format(template: str) -> CallFormat | None:
    """Return how this chat template has calls written; None where no mark is known: then as bare JSON."""
    return next((f for f in FORMATS if all(mark in template for mark in f.marks)), None)
