"""The grammars of answers that have to call tools, as the chat template teaches, or whose thinking is limited.

Grammars are written in llguidance's Lark. A mark that is one token of the vocabulary is named by the token's id, any
other mark is text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from cbatch.chat.call_parser import CallSearch, ParsedCall
from cbatch.chat.formats import BARE, AnswerFormat, CallSyntax, Thinking
from cbatch.errors import UnsupportedOptionError
from cbatch.options import Grammar
from cbatch.tools import Tools, arguments_schema

NamedToken = Callable[[str], "int | None"]
"""Returns the token that is a mark and no text to a grammar; None where the vocabulary has none."""

N_CALLS_MAX = 16
"""The most calls of one answer, since a model that repeats itself would never end. Our choice."""

_N_BEFORE = 2
"""Most tokens before the opening mark: models may begin with line ends. Our choice."""

_ANY = "<[*]>*"

_MARK = re.compile(r"(<[^<>\s]+>|\[/?[A-Z_]+\])")
_KEY = re.compile(r"[\w.-]+")
_JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_TYPED = ("integer", "number", "boolean", "array", "object", "null")
_STRING_KEYS = {"type", "description", "title", "default", "examples", "enum"}
_OBJECT_KEYS = {"type", "properties", "required", "additionalProperties", "description", "title"}


def call_grammar(
    format: AnswerFormat,
    tools: Tools,
    *,
    thinking: Thinking,
    is_one: bool,
    named_token: NamedToken,
    n_thought: int | None = None,
) -> Grammar:
    """Return the grammar of an answer that is calls of `tools`, or exactly one call, and nothing but thinking before.

    Thinking has `n_thought` tokens at most, where that is a number.

    Raises:
        UnsupportedOptionError: answers come in channels, or thinking is to be limited whose marks are not tokens.
        ConfigError: the parameters of a tool are not the schema of an object.
    """
    if format.has_channels:
        raise UnsupportedOptionError(
            "tool_choice",
            reason="this chat template has answers in channels (gpt-oss), for which calls cannot be forced yet; "
            'use "auto" or "none"',
        )
    writer = _GrammarWriter(call_syntax(format, tools), named_token, n_thought)
    return Grammar("tool_choice", writer.write(tools, format.thinking, thinking, is_one=is_one))


def call_syntax(format: AnswerFormat, tools: Tools) -> CallSyntax:
    """Return a syntax of the template in which calls of these tools are parsed as what they are."""
    syntax = format.syntax
    if syntax.argument and not all(_can_be_tagged(n, tools.parameters(n)) for n in tools.names):
        call = syntax.call.replace("$arguments", "$arguments\n")
        syntax = replace(syntax, call=call, argument=None)
    return (
        syntax if all(_is_readable(syntax, format, name, tools) for name in tools.names) else BARE
    )


def _is_readable(syntax: CallSyntax, format: AnswerFormat, name: str, tools: Tools) -> bool:
    """Whether a call without arguments is parsed as such: not every format accepts every name."""
    text = syntax.write((name, "" if syntax.argument else "{}"))
    search = CallSearch(format.calls, tools, None)
    found, _ = search.advance(text, 0, is_end=True)
    spans = [(markup.start, markup.end) for markup in found]
    return search.calls == [ParsedCall(name, "{}")] and spans == [(0, len(text))]


def _can_be_tagged(name: str, parameters: Mapping[str, Any]) -> bool:
    """Whether arguments can be written one by one, each with its own schema."""
    schema, properties = arguments_schema(name, parameters), parameters.get("properties", {})
    return (
        schema.get("additionalProperties") is False
        and '"$ref"' not in json.dumps(parameters)
        and set(schema) <= _OBJECT_KEYS
        and all(_KEY.fullmatch(key) and _has_one_type(value) for key, value in properties.items())
    )


def _has_one_type(schema: object) -> bool:
    """Whether the text of a value tells the value: a string, free or one of several, or no string at all."""
    if not isinstance(schema, Mapping):
        return False
    if schema.get("type") == "string":
        return set(schema) <= _STRING_KEYS and all(map(_is_line, schema.get("enum", ())))
    return schema.get("type") in _TYPED and not {"anyOf", "oneOf", "allOf"} & set(schema)


def _is_line(value: object) -> bool:
    return isinstance(value, str) and value.strip("\n") == value and "</" not in value


@dataclass(slots=True)
class _GrammarWriter:
    syntax: CallSyntax
    named_token: NamedToken
    n_thought: int | None = None
    rules: dict[str, None] = field(default_factory=dict)
    """In order."""

    def write(
        self, tools: Tools, marks: tuple[str, str] | None, thinking: Thinking, *, is_one: bool
    ) -> str:
        """Return the grammar: thinking first, if there is any, then calls."""
        first, last = self.syntax.around_calls()
        thought = "" if marks is None or thinking == "none" else self._thought(*marks, thinking)
        between, more = None if is_one else self.syntax.between, ""
        if between is not None:
            more = f"({self._text(between)} call){{0,{N_CALLS_MAX - 1}}}"
        self._rule("start", _sequence(thought, self._text(first), "call", more, self._text(last)))
        self._rule("call", " | ".join(f"call_{i}" for i in range(len(tools))))
        for i, name in enumerate(tools.names):
            self._call(i, name, arguments_schema(name, tools.parameters(name)))
        return "\n".join(self.rules)

    def _rule(self, name: str, body: str) -> str:
        self.rules[f"{name}: {body}"] = None
        return name

    def _thought(self, begin: str, end: str, thinking: Thinking) -> str:
        if self.n_thought is None:
            thought = self._up_to("THOUGHT", end)
        else:
            thought = limited(mark_tokens((begin, end), self.named_token), self.n_thought)
        rest = f'{thought} ("\\n\\n" | "\\n")?'
        opened = self._text("\n" + begin)
        return rest if thinking == "must end" else f"(({opened} | {self._text(begin)}) {rest})?"

    def _call(self, i: int, name: str, schema: Mapping[str, Any]) -> None:
        head, tail = self.syntax.around_arguments(name)
        arguments = (
            self._tagged(i, schema) if self.syntax.argument else self._json(f"json_{i}", schema)
        )
        self._rule(f"call_{i}", _sequence(self._text(head), arguments, self._text(tail)))

    def _tagged(self, i: int, schema: Mapping[str, Any]) -> str:
        """Return the arguments one by one, in the schema's order."""
        required, names = frozenset(schema.get("required", ())), list[str]()
        for k, (key, inner) in enumerate(schema.get("properties", {}).items()):
            name = self._rule(f"pair_{i}_{k}", self._argument(f"{i}_{k}", key, inner))
            names.append(name if key in required else f"{name}?")
        return " ".join(names)

    def _argument(self, at: str, key: str, schema: Mapping[str, Any]) -> str:
        head, _, tail = (self.syntax.argument or "").partition("$value")
        end, before = tail.strip("\n"), self._text(head.replace("$key", key))
        if schema["type"] == "string" and "enum" not in schema:
            return _sequence(
                before,
                self._up_to("VALUE", end),
                self._text(tail.removeprefix("\n").removeprefix(end)),
            )
        if schema["type"] == "string":
            value = "(" + " | ".join(_quoted(text) for text in schema["enum"]) + ")"
        else:
            value = self._json(f"json_{at}", schema)
        return _sequence(before, value, self._text(tail))

    def _json(self, name: str, schema: Mapping[str, Any]) -> str:
        styled = {**schema, "x-guidance": _JSON_STYLE}
        return self._rule(name, f"%json {_escaped(json.dumps(styled, ensure_ascii=False))}")

    def _up_to(self, name: str, mark: str) -> str:
        """Return any text up to the first occurrence of a mark, the mark included."""
        end, token = re.escape(mark).replace("/", r"\/"), self.named_token(mark)
        behind = "+" if token is None else "*"
        all_of = f"(?s:.*){end}" if token is None else "(?s:.*)"
        rule = f"{name}: /{all_of}/ & ~/(?s:.*){end}(?s:.{behind})/"
        self.rules[rule] = None
        return name if token is None else f"{name} <[{token}]>"

    def _text(self, text: str) -> str:
        """Return a text: its marks as their tokens, the rest quoted."""
        parts, said = list[str](), ""
        for part in _MARK.split(text):
            token = self.named_token(part) if _MARK.fullmatch(part) else None
            if token is None:
                said += part
                continue
            parts += [_quoted(said)] if said else []
            parts.append(f"<[{token}]>")
            said = ""
        return " ".join([*parts, _quoted(said)] if said else parts)


def _sequence(*parts: str) -> str:
    return " ".join(filter(None, parts))


def _quoted(text: str) -> str:
    return _escaped(json.dumps(text, ensure_ascii=False))


def _escaped(text: str) -> str:
    """Return JSON text in which nothing reads as the id of a token."""
    return text.replace("<[", "\\u003c[")


# ---- limits of thinking: any tokens, but so many between the marks at most ----


def budget_grammar(
    marks: tuple[str, str], n_tokens: int, *, thinking: Thinking, named_token: NamedToken
) -> Grammar:
    """Return the grammar of any answer whose thinking has at most `n_tokens` tokens between its marks.

    Raises:
        UnsupportedOptionError: a mark is not a token.
    """
    begin, _ = tokens = mark_tokens(marks, named_token)
    thought = limited(tokens, n_tokens)
    if thinking == "must end":
        return Grammar("thinking_budget", f"start: {thought} {_ANY}")
    other = f"<[^{begin}]>"
    starts = (
        f"{other}{{0,{_N_BEFORE}}} (<[{begin}]> {thought} {_ANY})?",
        f"{other}{{{_N_BEFORE + 1}}} {_ANY}",
    )
    return Grammar("thinking_budget", f"start: {' | '.join(starts)}")


def limited(marks: tuple[int, int], n_tokens: int) -> str:
    """Return the rest of a thinking with at most `n_tokens` tokens, its closing mark included."""
    _, end = marks
    inner = f"<[^{end}]>{{0,{n_tokens}}} " if n_tokens else ""
    return f"{inner}<[{end}]>"


def mark_tokens(marks: tuple[str, str], named_token: NamedToken) -> tuple[int, int]:
    """Return the tokens of the marks. Raises an `UnsupportedOptionError` where one is not a token."""
    begin, end = map(named_token, marks)
    if begin is None or end is None:
        words = f"this chat template marks thinking by {' and '.join(marks)}, which are not one token each"
        raise UnsupportedOptionError("thinking_budget", reason=words)
    return begin, end
