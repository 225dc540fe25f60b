"""Tool calls in text, in each format that templates teach; and text that only looks like one."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cbatch.chat.call_parser import N_MALFORMED_MAX, CallSearch, ParsedCall
from cbatch.chat.formats import CALL_FORMATS, CallFormat, answer_format
from cbatch.tools import Tools, call_id, check_tools

CITY = {"city": "Paris", "days": 3}
PROPERTIES = {"city": {"type": "string"}, "days": {"type": "integer"}}
TEXT = '{"city": "Paris", "days": 3}'


def tools(*names: str) -> Tools:
    parameters = {"type": "object", "properties": PROPERTIES}
    given = ({"name": name, "parameters": parameters} for name in names)
    return check_tools([{"type": "function", "function": f} for f in given]) or Tools()


TOOLS = tools("get_weather", "get_time")

EXAMPLES = {
    "functionary v3.2": f"get_weather\n{TEXT}>>>get_weather\n{TEXT}",
    "kimi": "<|tool_calls_section_begin|>"
    + "".join(
        f"<|tool_call_begin|>functions.get_weather:{i}<|tool_call_argument_begin|>{TEXT}<|tool_call_end|>"
        for i in range(2)
    )
    + "<|tool_calls_section_end|>",
    "deepseek": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
    + TEXT
    + "\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>"
    + TEXT
    + "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "glm": "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>" * 2,
    "function tags": f"<function=get_weather>{TEXT}</function>"
    "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n"
    "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>",
    "dsml": '<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n'
    '<｜DSML｜parameter name="city" string="true">Paris</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n'
    "</｜DSML｜invoke>\n</｜DSML｜function_calls>" * 2,
    "invoke tags": '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Paris'
    '</parameter>\n<parameter name="days">3</parameter>\n</invoke>\n</minimax:tool_call>' * 2,
    "mistral": '[TOOL_CALLS][{"name": "get_weather", "arguments": ' + TEXT + ', "id": "abcdefghi"}]'
    f"[TOOL_CALLS]get_weather[ARGS]{TEXT}",
    "firefunction": " functools["
    + ", ".join([f'{{"name": "get_weather", "arguments": {TEXT}}}'] * 2)
    + "]",
    "command r7b": "<|START_ACTION|>["
    + ", ".join(
        f'{{"tool_call_id": "{i}", "tool_name": "get_weather", "parameters": {TEXT}}}'
        for i in range(2)
    )
    + "]<|END_ACTION|>",
    "granite": f'<|tool_call|>[{{"name": "get_weather", "arguments": {TEXT}}}, '
    f'{{"name": "get_weather", "arguments": {TEXT}}}]',
    "tool_calls tags": "<tool_calls>\n"
    + f'{{"name": "get_weather", "arguments": {TEXT}}}\n' * 2
    + "</tool_calls>",
    "nemotron v2": "<TOOLCALL>["
    + ", ".join([f'{{"name": "get_weather", "arguments": {TEXT}}}'] * 2)
    + "]</TOOLCALL>",
    "gigachat": f'<|function_call|>{{"name": "get_weather", "arguments": {TEXT}}}' * 2,
    "hermes": f'<tool_call>\n{{"name": "get_weather", "arguments": {TEXT}}}\n</tool_call>\n' * 2,
}
"""Two calls in each format."""


def form(name: str) -> CallFormat:
    return next(f for f in CALL_FORMATS if f.name == name)


@dataclass
class Found:
    """The calls in a text, the spans of text that they take, and how many calls could not be parsed."""

    calls: list[ParsedCall]
    spans: list[tuple[int, int]]
    n_malformed: int


def find_calls(text: str, format: CallFormat | None, tools: Tools) -> Found:
    search = CallSearch(format, tools, None)
    found, _ = search.advance(text, 0, is_end=True)
    return Found(search.calls, [(m.start, m.end) for m in found], search.n_malformed)


def found(text: str, name: str | None = "hermes", given: Tools = TOOLS) -> list[tuple[str, Any]]:
    calls = find_calls(text, form(name) if name else None, given).calls
    return [(call.name, json.loads(call.arguments)) for call in calls]


def test_every_format_has_an_example() -> None:
    assert list(EXAMPLES) == [f.name for f in CALL_FORMATS]


@pytest.mark.parametrize("name", EXAMPLES)
def test_calls_are_found_and_nothing_of_them_is_left(name: str) -> None:
    result = find_calls(EXAMPLES[name], form(name), TOOLS)
    assert [(c.name, json.loads(c.arguments)) for c in result.calls] == [("get_weather", CITY)] * 2
    rest = EXAMPLES[name]
    for start, end in reversed(result.spans):
        rest = rest[:start] + rest[end:]
    assert not rest.strip()


@pytest.mark.parametrize("name", EXAMPLES)
def test_format_is_known_by_its_marks_in_the_template(name: str) -> None:
    known = answer_format("".join(form(name).marks)).calls
    assert known is not None
    assert known.name == name


@pytest.mark.parametrize("name", EXAMPLES)
@given(parts=st.lists(st.sampled_from([*'<>[]{}|=/:",\\n', *EXAMPLES.values(), "tool_call"])))
def test_no_text_raises(name: str, parts: list[str]) -> None:
    text = "".join(parts)
    result = find_calls(text, form(name), TOOLS)
    assert result.spans == sorted(result.spans)
    for start, end in result.spans:
        assert 0 <= start < end <= len(text)


ARGUMENTS = st.dictionaries(
    st.text(st.characters(exclude_categories=["Cs"]), min_size=1),
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers()
        | st.text(st.characters(exclude_categories=["Cs"])),
        lambda inner: st.lists(inner) | st.dictionaries(st.text("ab<>"), inner),
        max_leaves=5,
    ),
)


@pytest.mark.parametrize("name", ["hermes", "mistral", "command r7b", "granite", "nemotron v2"])
@given(arguments=ARGUMENTS)
def test_any_arguments_come_back(name: str, arguments: dict[str, Any]) -> None:
    example = EXAMPLES[name].replace(TEXT, "{}")
    text = example.replace("{}", json.dumps(arguments, ensure_ascii=False))
    assert found(text, name) == [("get_weather", arguments)] * 2


@pytest.mark.parametrize(
    "text",
    [
        f'{{"name": "get_weather", "parameters": {TEXT}}}',
        f'<|python_tag|>{{"name": "get_weather", "parameters": {TEXT}}}',
        f' ```json\n{{"name": "get_weather", "arguments": {TEXT}}}\n``` ',
        f'[{{"name": "get_weather", "arguments": {TEXT}}}]',
        f'{{"tool_calls": [{{"name": "get_weather", "arguments": {TEXT}}}]}}',
        f'{{"type": "function", "function": {{"name": "get_weather", "arguments": {TEXT}}}}}',
        f'{{"name": "get_weather", "arguments": {json.dumps(TEXT)}}}',
    ],
)
@pytest.mark.parametrize("name", [None, "hermes", "mistral"])
def test_answer_that_is_a_call_in_json_is_one_under_every_template(
    text: str, name: str | None
) -> None:
    assert found(text, name) == [("get_weather", CITY)]


def test_several_bare_calls_follow_each_other() -> None:
    one = '{"name": "get_time", "parameters": {}}'
    assert found(f"{one}; {one}\n{one}", None) == [("get_time", {})] * 3


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "Ada", "arguments": {}}',  # of no tool
        '{"name": "get_time"}',
        '{"name": "get_time", "arguments": {}} and more',
        'So: {"name": "get_time", "arguments": {}}',
        "[]",
        "{}",
        "[1, 2]",
        "",
        "{" * 100_000,
        "[" * 100_000,
    ],
)
def test_json_that_is_no_call_stays_text(text: str) -> None:
    result = find_calls(text, None, TOOLS)
    assert (result.calls, result.spans, result.n_malformed) == ([], [], 0)


@pytest.mark.parametrize(
    "body",
    [
        '{"name": "get_time", "arguments": {}',
        '{"name": "get_time", "arguments": []}',
        '{"name": "get_time", "arguments": "{"}',
        '{"name": "", "arguments": {}}',
        '{"name": 3, "arguments": {}}',
        '{"name": "\\ud800", "arguments": {}}',
        '{"arguments": {}}',
        '{"name": "get_time", "arguments": {"x": NaN}}',
        "get_time()",
        "[" * 100_000,
        "",
    ],
)
def test_malformed_call_is_counted_and_the_next_one_found(body: str) -> None:
    good = '<tool_call>{"name": "get_time", "arguments": {}}</tool_call>'
    result = find_calls(f"<tool_call>{body}</tool_call>{good}", form("hermes"), TOOLS)
    assert [c.name for c in result.calls] == ["get_time"]
    assert result.n_malformed == 1


def test_python_for_the_interpreter_is_no_call_but_noticed() -> None:
    assert find_calls("<|python_tag|>print(1)", None, TOOLS).n_malformed == 1


def test_call_without_arguments_has_none() -> None:
    assert found('<tool_call>{"name": "get_time"}</tool_call>') == [("get_time", {})]
    assert found("<function=get_time></function>", "function tags") == [("get_time", {})]
    assert found("<tool_call>get_time</tool_call>", "glm") == [("get_time", {})]


@pytest.mark.parametrize(
    ("digits", "value"),
    [
        ("-0.5e3", -500.0),
        ("12345678901234567890123", 12345678901234567890123),
        ("482E564", sys.float_info.max),
        ("-1e999", -sys.float_info.max),
        ("9" * 5000, sys.float_info.max),
    ],
)
def test_number_that_a_grammar_allows_is_taken(digits: str, value: float) -> None:
    text = f'<tool_call>{{"name": "get_time", "arguments": {{"x": {digits}}}}}</tool_call>'
    [(_, arguments)] = found(text)
    assert arguments == {"x": value}
    assert type(arguments["x"]) is type(value)


def test_line_breaks_within_strings_are_taken() -> None:
    text = '<tool_call>{"name": "get_time", "arguments": {"zone": "a\nb"}}</tool_call>'
    assert found(text) == [("get_time", {"zone": "a\nb"})]


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("<parameter=city>\n12\n</parameter>", {"city": "12"}),
        ("<parameter=days>\n12\n</parameter>", {"days": 12}),
        ("<parameter=days>twelve</parameter>", {"days": "twelve"}),
        ('<parameter=other>{"a": [1]}</parameter>', {"other": {"a": [1]}}),
        ("<parameter=other>1 2</parameter>", {"other": "1 2"}),
        ("<parameter=city>\n a\n\n</parameter>", {"city": " a\n"}),
        ("<parameter=city></parameter>", {"city": ""}),
    ],
)
def test_value_without_quotes_has_the_type_of_its_schema(written: str, value: object) -> None:
    text = f"<function=get_weather>\n{written}\n</function>"
    assert found(text, "function tags") == [("get_weather", value)]


def test_half_a_surrogate_pair_stays_spelled_out() -> None:
    text = '<tool_call>{"name": "get_time", "arguments": {"x": "\\ud800"}}</tool_call>'
    [call] = find_calls(text, form("hermes"), TOOLS).calls
    assert call.arguments == '{"x": "\\ud800"}'


def test_ids_are_nine_letters_and_digits_and_differ() -> None:
    ids = {call_id("engine", number, i) for number in range(1000) for i in range(3)}
    assert len(ids) == 3000
    assert all(len(id) == 9 and id.isascii() and id.isalnum() for id in ids)


HEADS = [
    "<tool_call>", '<tool_call>{"name": "', "<tool_call>[", "<function=a>", "<function=a><parameter=b>", ">>>a\n{",
    "[TOOL_CALLS]", "[TOOL_CALLS]a[ARGS]{", "<|tool_call|>", "<arg_key>", " ", "\n", "{", "[", "a", "<", "```", "\\",
]  # fmt: skip


def seconds(text: str, format: CallFormat) -> float:
    start = time.process_time()
    find_calls(text, format, TOOLS)
    return time.process_time() - start


@pytest.mark.slow
@pytest.mark.parametrize("format", CALL_FORMATS, ids=lambda f: f.name)
def test_no_text_takes_more_than_its_length(format: CallFormat) -> None:
    for head in [*HEADS, EXAMPLES[format.name][:-20]]:
        text = head * (400_000 // len(head))
        assert seconds(text, format) < 1.0, head
    assert N_MALFORMED_MAX < 100
