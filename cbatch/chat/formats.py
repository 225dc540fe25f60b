"""The formats of the model families: how answers, thinking and tool calls are written and parsed.

The marks in the source of a chat template tell the family. A new family is one entry of `CALL_FORMATS`; a family with
marks of its own around thinking, or around the answer, is also an entry of `THINKING` or `RESPONSES`.

Source: llama.cpp, common/chat.cpp, common/chat-diff-analyzer.cpp and docs/function-calling.md, and the templates.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from cbatch.chat.call_parser import (
    CallReader,
    TaggedArguments,
    read_arguments,
    read_json_calls,
    read_mistral_calls,
)
from cbatch.chat.marks import Marks

Thinking = Literal["may", "must end", "none"]
"""Whether an answer may begin with thinking, begins within thinking, or has none."""


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """How a model writes calls that are demanded of it.

    Args:
        call: one call, with `$name` and `$arguments` in their places.
        answer: what encloses all calls, with `$calls` in their place.
        between: what separates two calls; None where an answer has room for one call.
        argument: one argument, with `$key` and `$value`; None where the arguments are one JSON object.
    """

    call: str
    answer: str = "$calls"
    between: str | None = None
    argument: str | None = None

    def around_arguments(self, name: str) -> tuple[str, str]:
        """Return what precedes and what follows the arguments in a call of the function `name`."""
        head, _, tail = self.call.partition("$arguments")
        return head.replace("$name", name), tail

    def around_calls(self) -> tuple[str, str]:
        """Return what precedes the first call and what follows the last one."""
        first, _, last = self.answer.partition("$calls")
        return first, last

    def write(self, *calls: tuple[str, str]) -> str:
        """Return an answer with these calls, each a function's name and its arguments as they are written."""
        written = [arguments.join(self.around_arguments(name)) for name, arguments in calls]
        return (self.between or "").join(written).join(self.around_calls())


_JSON = '{"name": "$name", "arguments": $arguments}'

BARE = CallSyntax(_JSON)
"""JSON and nothing else: every answer is searched for it."""

_LLAMA = CallSyntax('{"name": "$name", "parameters": $arguments}')


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How one family of models writes tool calls.

    Args:
        name: for people.
        marks: what the family's templates contain, all of them.
        head: how a call begins, with a group `name` where the function's name is part of its beginning.
        read: parses what follows the beginning.
        tail: what may close a call.
        syntaxes: how calls are written where they are demanded, by a further mark in the template; "" is in every one.
        begins_with_name: whether an answer may begin with a function's name and no mark before it.
    """

    name: str
    marks: tuple[str, ...]
    head: Marks
    read: CallReader
    tail: Marks
    syntaxes: Mapping[str, CallSyntax]
    begins_with_name: bool = False


def _format(
    name: str,
    *marks: str,
    head: str,
    read: CallReader,
    tail: str = "",
    written: CallSyntax | Mapping[str, CallSyntax],
    begins_with_name: bool = False,
) -> CallFormat:
    syntaxes = {"": written} if isinstance(written, CallSyntax) else written
    begins, ends = Marks(re.compile(head)), Marks(re.compile(f"(?:{tail})?"))
    return CallFormat(name, marks, begins, read, ends, syntaxes, begins_with_name)


def _json_format(
    name: str, begin: str, end: str, written: CallSyntax | Mapping[str, CallSyntax]
) -> CallFormat:
    """Return the format of calls in JSON between two marks."""
    head, tail = rf"{re.escape(begin)}\s*", rf"\s*{re.escape(end)}" if end else ""
    return _format(name, begin, head=head, read=read_json_calls, tail=tail, written=written)


CALL_FORMATS = (
    _format(
        "functionary v3.2",
        ">>>all",
        head=r"(?:\A|>>>)(?P<name>[\w.-]+)\n(?=\{)",
        read=read_arguments,
        written=CallSyntax("$name\n$arguments", between=">>>"),
        begins_with_name=True,
    ),
    _format(
        "kimi",
        "<|tool_call_argument_begin|>",
        head=r"(?:<\|tool_calls_section_begin\|>\s*)?<\|tool_call_begin\|>\s*(?:functions\.)?"
        r"(?P<name>[\w.-]+)(?::\d+)?\s*<\|tool_call_argument_begin\|>",
        read=read_arguments,
        tail=r"\s*<\|tool_call_end\|>(?:\s*<\|tool_calls_section_end\|>)?",
        written=CallSyntax(
            "<|tool_call_begin|>functions.$name:0<|tool_call_argument_begin|>$arguments<|tool_call_end|>",
            "<|tool_calls_section_begin|>$calls<|tool_calls_section_end|>",
        ),
    ),
    _format(
        "deepseek",
        "<｜tool▁call▁begin｜>",
        head=r"(?:<｜tool▁calls▁begin｜>\s*)?<｜tool▁call▁begin｜>\s*(?:function<｜tool▁sep｜>)?"
        r"(?P<name>[\w.:/-]+)\s*(?:<｜tool▁sep｜>)?",
        read=read_arguments,
        tail=r"\s*<｜tool▁call▁end｜>(?:\s*<｜tool▁calls▁end｜>)?",
        written={
            "```json": CallSyntax(
                "<｜tool▁call▁begin｜>function<｜tool▁sep｜>$name\n```json\n$arguments\n```<｜tool▁call▁end｜>",
                "<｜tool▁calls▁begin｜>$calls<｜tool▁calls▁end｜>",
                between="\n",
            ),
            "": CallSyntax(
                "<｜tool▁call▁begin｜>$name<｜tool▁sep｜>$arguments<｜tool▁call▁end｜>",
                "<｜tool▁calls▁begin｜>$calls<｜tool▁calls▁end｜>",
                between="",
            ),
        },
    ),
    _format(
        "glm",
        "<tool_call>",
        "<arg_key>",
        head=r"<tool_call>\s*(?P<name>[\w.:/-]+)\s*(?=<arg_key>|</tool_call>)",
        read=TaggedArguments(
            r"<arg_key>(?P<key>[^<]*)</arg_key>\s*<arg_value>", "</arg_value>", "</tool_call>"
        ),
        tail=r"\s*</tool_call>",
        written=CallSyntax(
            "<tool_call>$name\n$arguments</tool_call>",
            between="\n",
            argument="<arg_key>$key</arg_key>\n<arg_value>$value</arg_value>\n",
        ),
    ),
    _format(
        "function tags",  # JSON: Llama 3.1 in functionary's format; tagged: Qwen3-Coder, Nemotron 3
        "<function=",
        head=r"(?:<(?:seed:)?tool_call>\s*)?<function=(?P<name>[\w.:/-]+)>",
        read=TaggedArguments(r"<parameter=(?P<key>[^>]*)>", "</parameter>", "</function>"),
        tail=r"\s*</function>(?:\s*</(?:seed:)?tool_call>)?",
        written={
            "<seed:tool_call>": CallSyntax(
                "<seed:tool_call>\n<function=$name>\n$arguments</function>\n</seed:tool_call>",
                between="\n",
                argument="<parameter=$key>$value</parameter>\n",
            ),
            "<parameter=": CallSyntax(
                "<tool_call>\n<function=$name>\n$arguments</function>\n</tool_call>",
                between="\n",
                argument="<parameter=$key>\n$value\n</parameter>\n",
            ),
            "": CallSyntax("<function=$name>$arguments</function>", between="\n"),
        },
    ),
    _format(
        "dsml",
        "DSML",
        "invoke name=",
        head=r'(?:<｜DSML｜\w+>\s*)?<｜DSML｜invoke name="(?P<name>[^"]+)">',
        read=TaggedArguments(
            r'<｜DSML｜parameter name="(?P<key>[^"]*)"(?: string="\w+")?>',
            "</｜DSML｜parameter>",
            "</｜DSML｜invoke>",
        ),
        tail=r"\s*</｜DSML｜invoke>(?:\s*</｜DSML｜\w+>)?",
        written=CallSyntax(
            '<｜DSML｜invoke name="$name">\n$arguments</｜DSML｜invoke>\n',
            "<｜DSML｜function_calls>\n$calls</｜DSML｜function_calls>",
            between="",
        ),
    ),
    _format(
        "invoke tags",
        "<invoke name=",
        head=r'(?:<minimax:tool_call>\s*)?<invoke name="(?P<name>[^"]+)">',
        read=TaggedArguments(r'<parameter name="(?P<key>[^"]*)">', "</parameter>", "</invoke>"),
        tail=r"\s*</invoke>(?:\s*</minimax:tool_call>)?",
        written={
            "<minimax:tool_call>": CallSyntax(
                '<invoke name="$name">\n$arguments</invoke>\n',
                "<minimax:tool_call>\n$calls</minimax:tool_call>",
                between="",
                argument='<parameter name="$key">$value</parameter>\n',
            ),
            "": CallSyntax(
                '<invoke name="$name">\n$arguments</invoke>',
                between="\n",
                argument='<parameter name="$key">$value</parameter>\n',
            ),
        },
    ),
    _format(
        "mistral",
        "[TOOL_CALLS]",
        head=r"\[TOOL_CALLS\]\s*",
        read=read_mistral_calls,
        written={
            "[ARGS]": CallSyntax("[TOOL_CALLS]$name[ARGS]$arguments", between=""),
            "": CallSyntax(_JSON, "[TOOL_CALLS][$calls]", between=", "),
        },
    ),
    _format(
        "firefunction",
        " functools[",
        head=r"(?:\A| )functools(?=\[)",
        read=read_json_calls,
        written=CallSyntax(_JSON, " functools[$calls]", between=", "),
    ),
    _json_format(
        "command r7b",
        "<|START_ACTION|>",
        "<|END_ACTION|>",
        CallSyntax(
            '{"tool_call_id": "0", "tool_name": "$name", "parameters": $arguments}',
            "<|START_ACTION|>[\n    $calls\n]<|END_ACTION|>",
        ),
    ),
    _json_format(
        "granite", "<|tool_call|>", "", CallSyntax(_JSON, "<|tool_call|>[$calls]", between=", ")
    ),
    _json_format(
        "tool_calls tags",
        "<tool_calls>",
        "</tool_calls>",
        {
            "<tool_calls>[": CallSyntax(_JSON, "<tool_calls>[$calls]</tool_calls>", between=", "),
            "": CallSyntax(_JSON, "<tool_calls>\n$calls\n</tool_calls>", between="\n"),
        },
    ),
    _json_format(
        "nemotron v2",
        "<TOOLCALL>",
        "</TOOLCALL>",
        CallSyntax(_JSON, "<TOOLCALL>[$calls]</TOOLCALL>", between=", "),
    ),
    _json_format("gigachat", "<|function_call|>", "", CallSyntax(_JSON, "<|function_call|>$calls")),
    _json_format(
        "hermes",
        "<tool_call>",
        "</tool_call>",
        CallSyntax(f"<tool_call>\n{_JSON}\n</tool_call>", between="\n"),
    ),
)
"""The first format with all its marks in the template applies: the more specific formats come first."""

THINKING = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<seed:think>", "</seed:think>"),
    ("<|inner_prefix|>", "<|inner_suffix|>"),
)
"""Marks around thinking: of DeepSeek, Qwen and most others; of Magistral; of Command R7B; of Seed; of Apertus."""

RESPONSES = (
    (">>>all", r"(?:\A|>>>)all\n"),
    ("<response></response>", r"</?response>\s*"),
    ("<|START_RESPONSE|>", r"<\|(?:START|END)_RESPONSE\|>"),
)
"""By a mark in the template: marks around the text of an answer."""


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """How the answers under one chat template are written.

    Args:
        thinking: the marks around thinking, if the template has them.
        calls: how calls are parsed; None for bare JSON alone.
        syntax: how calls are written where they are demanded.
        response: the marks around the text of an answer, which are not part of it.
        has_channels: whether an answer is messages in channels, as in gpt-oss.
    """

    thinking: tuple[str, str] | None = None
    calls: CallFormat | None = None
    syntax: CallSyntax = BARE
    response: Marks | None = None
    has_channels: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether an answer without calls is text and nothing else."""
        return self.thinking is None and self.response is None and not self.has_channels

    def thinking_after(self, opened: str, shown_tail: str) -> Thinking:
        """Return whether an answer has thinking, by what it continues.

        Args:
            opened: the text of the last message, where it is the assistant's.
            shown_tail: the end of the prompt, control tokens written out; not needed with `opened`.
        """
        if self.thinking is None:
            return "none"
        begin, end = self.thinking
        if opened:
            return "must end" if opened.rfind(begin) > opened.rfind(end) else "none"
        tail = shown_tail.rstrip()
        return "must end" if tail.endswith(begin) else "none" if tail.endswith(end) else "may"


def answer_format(template: str) -> AnswerFormat:
    """Return the format of the answers under a chat template, by the marks in its source."""
    if "<|channel|>" in template and "<|message|>" in template:
        return AnswerFormat(has_channels=True)
    patterns = (re.compile(pattern) for mark, pattern in RESPONSES if mark in template)
    response = next(map(Marks, patterns), None)
    thinking = next((marks for marks in THINKING if marks[1] in template), None)
    calls = next((f for f in CALL_FORMATS if all(mark in template for mark in f.marks)), None)
    if calls is not None:
        syntax = next(syntax for mark, syntax in calls.syntaxes.items() if mark in template)
    else:
        is_llama = '"parameters": ' in template and '"arguments": ' not in template
        syntax = _LLAMA if is_llama else BARE
    return AnswerFormat(thinking, calls, syntax, response)
