"""What an answer must be where a tool has to be called: a grammar of calls, in the form that the template teaches.

The grammar is llguidance's Lark. A mark that is one token of the model's is named by its id; else it is text.

Source of the forms: the templates themselves, and llama.cpp, common/chat.cpp.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from cbatch.chat.call_formats import Call, find_calls
from cbatch.errors import UnsupportedOptionError
from cbatch.options import Grammar
from cbatch.tools import arguments_schema

if TYPE_CHECKING:
    from cbatch.chat.answers import AnswerFormat
    from cbatch.chat.call_formats import CallFormat
    from cbatch.tools import Tools

Named = Callable[[str], "int | None"]
"""Returns the token that stands for a mark alone and is no text; None where there is none."""

N_CALLS_MAX = 16
"""Calls of one answer where its form has room for several: a model that repeats itself would never end. Our choice."""

Thinking = Literal["may", "must end", "none"]
"""Whether an answer may begin with thinking, begins within it, or has none."""

_MARK = re.compile(r"(<[^<>\s]+>|\[/?[A-Z_]+\])")
_KEY = re.compile(r"[\w.-]+")
_JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_PLAIN_TYPES = ("integer", "number", "boolean", "array", "object", "null")
_OF_STRINGS = {"type", "description", "title", "default", "examples", "enum"}


@dataclass(frozen=True, slots=True)
class _Pair:
    """How one argument is written: `begin` key `middle` value `end`, and `before` the end where it is JSON."""

    begin: str
    middle: str
    end: str
    before: str = ""
    behind: str = "\n"


@dataclass(frozen=True, slots=True)
class CallForm:
    """How calls are written: `first`, then for each `begin` name `middle` arguments `end`, then `last`.

    Args:
        begin: before the function's name.
        middle: between name and arguments.
        end: behind the arguments.
        first: before the first call.
        last: behind the last one.
        between: from one call to the next; None where there is only one.
        pair: how one argument is written, where they are not one JSON object.
    """

    begin: str
    middle: str
    end: str
    first: str = ""
    last: str = ""
    between: str | None = None
    pair: _Pair | None = None


def _json_form(first: str = "", last: str = "", between: str | None = None) -> CallForm:
    return CallForm('{"name": "', '", "arguments": ', "}", first, last, between)


BARE = _json_form()
"""JSON and nothing else: read under every template."""

_LLAMA = CallForm('{"name": "', '", "parameters": ', "}")
_FORMS: tuple[tuple[str, str, CallForm], ...] = (
    ("functionary v3.2", "", CallForm("", "\n", "", between=">>>")),
    (
        "kimi",
        "",
        CallForm(
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.",
            ":0<|tool_call_argument_begin|>",
            "<|tool_call_end|><|tool_calls_section_end|>",
        ),
    ),
    (
        "deepseek",
        "```json",
        CallForm(
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
            "\n```json\n",
            "\n```<｜tool▁call▁end｜>",
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁calls▁end｜>",
            "\n",
        ),
    ),
    (
        "deepseek",
        "",
        CallForm(
            "<｜tool▁call▁begin｜>",
            "<｜tool▁sep｜>",
            "<｜tool▁call▁end｜>",
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁calls▁end｜>",
            "",
        ),
    ),
    (
        "glm",
        "",
        CallForm(
            "<tool_call>",
            "\n",
            "</tool_call>",
            between="\n",
            pair=_Pair("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>"),
        ),
    ),
    (
        "function tags",
        "<seed:tool_call>",
        CallForm(
            "<seed:tool_call>\n<function=",
            ">\n",
            "</function>\n</seed:tool_call>",
            between="\n",
            pair=_Pair("<parameter=", ">", "</parameter>"),
        ),
    ),
    (
        "function tags",
        "<parameter=",
        CallForm(
            "<tool_call>\n<function=",
            ">\n",
            "</function>\n</tool_call>",
            between="\n",
            pair=_Pair("<parameter=", ">\n", "</parameter>", "\n"),
        ),
    ),
    ("function tags", "", CallForm("<function=", ">", "</function>", between="\n")),
    (
        "dsml",
        "",
        CallForm(
            '<｜DSML｜invoke name="',
            '">\n',
            "</｜DSML｜invoke>\n",
            "<｜DSML｜function_calls>\n",
            "</｜DSML｜function_calls>",
            "",
        ),
    ),
    (
        "invoke tags",
        "<minimax:tool_call>",
        CallForm(
            '<invoke name="',
            '">\n',
            "</invoke>\n",
            "<minimax:tool_call>\n",
            "</minimax:tool_call>",
            "",
            _Pair('<parameter name="', '">', "</parameter>"),
        ),
    ),
    (
        "invoke tags",
        "",
        CallForm(
            '<invoke name="',
            '">\n',
            "</invoke>",
            between="\n",
            pair=_Pair('<parameter name="', '">', "</parameter>"),
        ),
    ),
    ("mistral", "[ARGS]", CallForm("[TOOL_CALLS]", "[ARGS]", "", between="")),
    ("mistral", "", _json_form("[TOOL_CALLS][", "]", ", ")),
    (
        "command r7b",
        "",
        CallForm(
            '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "',
            '", "parameters": ',
            "}\n]<|END_ACTION|>",
        ),
    ),
    ("granite", "", _json_form("<|tool_call|>[", "]", ", ")),
    ("tool_calls tags", "<tool_calls>[", _json_form("<tool_calls>[", "]</tool_calls>", ", ")),
    ("tool_calls tags", "", _json_form("<tool_calls>\n", "\n</tool_calls>", "\n")),
    ("nemotron v2", "", _json_form("<TOOLCALL>[", "]</TOOLCALL>", ", ")),
    ("gigachat", "", _json_form("<|function_call|>")),
    (
        "hermes",
        "",
        CallForm('<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>", between="\n"),
    ),
)
"""By the name of the format, and by a mark in the template that tells forms of one format apart."""


def call_form(template: str, format: CallFormat | None, tools: Tools) -> CallForm:
    """Return how this template's models write calls of these tools so that they are read as what they are."""
    known = (
        form for name, mark, form in _FORMS if format and name == format.name and mark in template
    )
    form = next(known, None)
    if form is None:
        return _LLAMA if '"parameters": ' in template and '"arguments": ' not in template else BARE
    if form.pair is not None and not all(_has_pairs(tools.parameters(n)) for n in tools.names):
        form = CallForm(
            form.begin, form.middle, "\n" + form.end, form.first, form.last, form.between
        )
    return form if all(_is_readable(form, format, name, tools) for name in tools.names) else BARE


def _is_readable(form: CallForm, format: CallFormat | None, name: str, tools: Tools) -> bool:
    """Whether a call without arguments is read as such: not every format takes every name."""
    call = f"{form.begin}{name}{form.middle}{'' if form.pair else '{}'}{form.end}"
    text = f"{form.first}{call}{form.last}"
    found = find_calls(text, 0, format, tools)
    return found.calls == [Call(name, "{}")] and found.spans == [(0, len(text))]


def _has_pairs(parameters: Mapping[str, Any]) -> bool:
    """Whether arguments can be written one by one, each after its own schema."""
    schema, properties = arguments_schema(parameters), parameters.get("properties") or {}
    is_closed = schema.get("additionalProperties") is False
    return (
        is_closed
        and '"$ref"' not in json.dumps(parameters)
        and set(schema)
        <= {"type", "properties", "required", "additionalProperties", "description", "title"}
        and all(_KEY.fullmatch(key) and _is_pair(value) for key, value in properties.items())
    )


def _is_pair(schema: object) -> bool:
    """Whether a value can be told from its text: a string of any kind or one of several, or what is no string."""
    if not isinstance(schema, Mapping):
        return False
    if schema.get("type") == "string":
        return set(schema) <= _OF_STRINGS and all(map(_is_line, schema.get("enum", ())))
    return schema.get("type") in _PLAIN_TYPES and not {"anyOf", "oneOf", "allOf"} & set(schema)


def _is_line(value: object) -> bool:
    return isinstance(value, str) and value.strip("\n") == value and "</" not in value


def call_grammar(
    format: AnswerFormat,
    template: str,
    tools: Tools,
    *,
    thinking: Thinking,
    is_one: bool,
    named: Named,
) -> Grammar:
    """Return what an answer must match that is calls of `tools` and nothing else.

    Args:
        format: of the answers under this template.
        template: the chat template's source.
        tools: that may be called.
        thinking: what may come first.
        is_one: whether it is one call and no more.
        named: knows the vocabulary's marks.

    Raises:
        UnsupportedOptionError: answers come in channels.
        ConfigError: arguments that are not an object.
    """
    if format.has_channels:
        raise UnsupportedOptionError(
            "tool_choice",
            reason="answers in channels, as this chat template has them (gpt-oss), cannot be held to calls yet; "
            'there is "auto" and "none"',
        )
    writer = _Writer(call_form(template, format.calls, tools), named)
    return Grammar("tool_choice", writer.write(tools, format.thinking, thinking, is_one=is_one))


@dataclass(slots=True)
class _Writer:
    """Writes a grammar of calls."""

    form: CallForm
    named: Named
    rules: list[str] = field(default_factory=list)

    def write(
        self, tools: Tools, marks: tuple[str, str] | None, thinking: Thinking, *, is_one: bool
    ) -> str:
        """Return the grammar: thinking first, if there is any, then calls."""
        form = self.form
        more = (
            ""
            if is_one or form.between is None
            else f"({self._text(form.between)} call){{0,{N_CALLS_MAX - 1}}}"
        )
        thought = "" if marks is None or thinking == "none" else self._thought(*marks, thinking)
        parts = (thought, self._text(form.first), "call", more, self._text(form.last))
        self._rule("start", " ".join(filter(None, parts)))
        self._rule("call", " | ".join(f"call_{i}" for i in range(len(tools))))
        for i, name in enumerate(tools.names):
            self._call(i, name, tools.parameters(name))
        return "\n".join(self.rules)

    def _rule(self, name: str, body: str) -> str:
        self.rules.append(f"{name}: {body}")
        return name

    def _thought(self, begin: str, end: str, thinking: Thinking) -> str:
        rest = f'{self._up_to("THOUGHT", end)} ("\\n\\n" | "\\n")?'
        opened = self._text("\n" + begin)
        return rest if thinking == "must end" else f"(({opened} | {self._text(begin)}) {rest})?"

    def _call(self, i: int, name: str, parameters: Mapping[str, Any]) -> None:
        form, schema = self.form, arguments_schema(parameters)
        pairs = self._pairs(i, form.pair, schema) if form.pair else ""
        arguments = pairs if form.pair else self._json(f"json_{i}", schema)
        parts = (self._text(form.begin + name + form.middle), arguments, self._text(form.end))
        self._rule(f"call_{i}", " ".join(filter(None, parts)))

    def _pairs(self, i: int, pair: _Pair, schema: Mapping[str, Any]) -> str:
        """Return what stands for arguments one by one, in the schema's order."""
        required, names = schema.get("required", ()), list[str]()
        for k, (key, inner) in enumerate((schema.get("properties") or {}).items()):
            name = self._rule(f"pair_{i}_{k}", self._pair(f"{i}_{k}", pair, key, inner))
            names.append(name if key in required else f"{name}?")
        return " ".join(names)

    def _pair(self, at: str, pair: _Pair, key: str, schema: Mapping[str, Any]) -> str:
        head, behind = self._text(pair.begin + key + pair.middle), self._text(pair.behind)
        if schema["type"] == "string" and "enum" not in schema:
            return f"{head} {self._up_to('VALUE', pair.end)} {behind}"
        if schema["type"] == "string":
            value = "(" + " | ".join(_quoted(text) for text in schema["enum"]) + ")"
        else:
            value = self._json(f"json_{at}", schema)
        return f"{head} {value} {self._text(pair.before + pair.end)} {behind}"

    def _json(self, name: str, schema: Mapping[str, Any]) -> str:
        styled = {**schema, "x-guidance": _JSON_STYLE}
        return self._rule(name, f"%json {_escaped(json.dumps(styled, ensure_ascii=False))}")

    def _up_to(self, name: str, mark: str) -> str:
        """Return what stands for any text up to a mark's first place, the mark included."""
        end, token = re.escape(mark).replace("/", r"\/"), self.named(mark)
        behind = "+" if token is None else "*"
        all_of = f"(?s:.*){end}" if token is None else "(?s:.*)"
        rule = f"{name}: /{all_of}/ & ~/(?s:.*){end}(?s:.{behind})/"
        if rule not in self.rules:
            self.rules.append(rule)
        return name if token is None else f"{name} <[{token}]>"

    def _text(self, text: str) -> str:
        """Return what stands for a text: marks by their tokens, the rest as it is."""
        parts, said = list[str](), ""
        for part in _MARK.split(text):
            token = self.named(part) if _MARK.fullmatch(part) else None
            if token is None:
                said += part
                continue
            parts += [_quoted(said)] if said else []
            parts.append(f"<[{token}]>")
            said = ""
        return " ".join([*parts, _quoted(said)] if said else parts)


def _quoted(text: str) -> str:
    return _escaped(json.dumps(text, ensure_ascii=False))


def _escaped(text: str) -> str:
    """Return JSON text without what reads as a token's id."""
    return text.replace("<[", "\\u003c[")


def thinking_of(format: AnswerFormat, opened: str, shown_tail: str) -> Thinking:
    """Return whether an answer may think, by what it goes on from.

    Args:
        format: of the answers.
        opened: the last message, where it is the assistant's.
        shown_tail: the prompt's end, control tokens written out.
    """
    if format.thinking is None:
        return "none"
    begin, end = format.thinking
    if opened:
        return "must end" if opened.rfind(begin) > opened.rfind(end) else "none"
    tail = shown_tail.rstrip()
    return "must end" if tail.endswith(begin) else "none" if tail.endswith(end) else "may"
