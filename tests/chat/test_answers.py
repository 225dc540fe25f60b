"""Answers taken apart: thinking, channels and calls; control tokens found but not shown."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cbatch.chat.answers import Answer
from cbatch.chat.call_parser import ParsedCall
from cbatch.chat.formats import THINKING, AnswerFormat, answer_format
from cbatch.tools import Tools
from tests.chat.answer_runs import CONTROLS, make_reader, parts_of
from tests.chat.test_call_parser import TOOLS

CUT = ("the answer ended while it was thinking",)
THINK = "Say {% if x %}<think>{% endif %} and </think>"
HERMES = "{{ '<tool_call>' }}"
CHANNELS = "<|start|>assistant<|channel|>final<|message|>"


def read(
    text: str,
    template: str,
    tools: Tools | None = None,
    *,
    tail: str = "",
    opened: str = "",
    splits: bool = True,
    n_calls_max: int | None = None,
) -> Answer:
    format = answer_format(template)
    reader = make_reader(format, tools, opened=opened, splits=splits, n_calls_max=n_calls_max)
    return parts_of(reader, [*text.encode()], tail=[*tail.encode()])[0]


def read_tokens(tokens: list[int], template: str, tools: Tools = TOOLS) -> Answer:
    return parts_of(make_reader(answer_format(template), tools), tokens)[0]


def test_template_without_marks_has_plain_answers() -> None:
    assert answer_format("") == answer_format("{{ messages[0].content }}") == AnswerFormat()
    assert AnswerFormat().is_plain
    assert not answer_format(THINK).is_plain


@pytest.mark.parametrize(("begin", "end"), THINKING)
def test_thinking_is_split_off_whatever_its_marks(begin: str, end: str) -> None:
    answer = read(f"{begin}\nwell\n{end}\n\nYes.", f"'{begin}'{end}")
    assert answer == Answer("Yes.", "well")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("\n<think>a</think>b", Answer("b", "a")),
        ("<think>\n\n</think>\n\nb", Answer("b")),
        ("<think>a", Answer("", "a", (), CUT)),
        ("<think>", Answer("")),
        ("<think>a</think>", Answer("", "a")),
        ("b", Answer("b")),
        ("  b ", Answer("  b ")),
        ("a</think>b", Answer("a</think>b")),
        ("a <think>b</think>", Answer("a <think>b</think>")),
        ("<think>a</think>b</think><think>", Answer("b</think><think>", "a")),
    ],
)
def test_thinking_is_split_off_where_the_answer_begins_with_it(text: str, expected: Answer) -> None:
    assert read(text, THINK) == expected


@pytest.mark.parametrize("tail", ["assistant\n<think>", "assistant\n<think>\n"])
def test_thinking_that_the_prompt_opened_is_split_off(tail: str) -> None:
    assert read("a</think>b", THINK, tail=tail) == Answer("b", "a")
    assert read("a", THINK, tail=tail) == Answer("", "a", (), CUT)


@pytest.mark.parametrize("tail", ["<think>\n</think>\n", "what is <think>?\nassistant\n", ""])
def test_thinking_that_the_prompt_did_not_open_is_not_there(tail: str) -> None:
    assert read("b", THINK, tail=tail) == Answer("b")


@pytest.mark.parametrize(
    ("opened", "expected"),
    [
        ("<think>so far", Answer("b", "a")),
        ("<think>so far</think>so", Answer("a</think>b")),
        ("so", Answer("a</think>b")),
    ],
)
def test_answer_that_goes_on_from_a_message_is_read_from_there(
    opened: str, expected: Answer
) -> None:
    assert read("a</think>b", THINK, tail="<think>", opened=opened) == expected


def test_thinking_stays_where_it_shall() -> None:
    assert read("<think>a</think>b", THINK, splits=False) == Answer("<think>a</think>b")


@given(st.text("ab<>/think \n"))
def test_every_letter_of_a_plain_answer_is_kept(text: str) -> None:
    answer = read(f"x{text}", THINK)
    assert answer == Answer(f"x{text}")


CALL = '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'


def test_calls_are_taken_out_of_the_text_behind_the_thinking() -> None:
    text = f"<think>I could {CALL}</think>\n\nWait.\n{CALL}\n{CALL}"
    answer = read(text, THINK + HERMES, TOOLS)
    assert (answer.text, len(answer.calls), answer.warnings) == ("Wait.", 2, ())
    assert answer.reasoning == f"I could {CALL}"


LEFT_OUT = ("parallel_tool_calls is False: the first call is kept, 1 more are left out",)


@pytest.mark.parametrize(
    ("template", "text", "said"),
    [
        (HERMES, f"Wait.\n{CALL}\n{CALL.replace('get_time', 'get_rich')}", "Wait."),
        ("", '[{"name": "get_time", "arguments": {}}, {"name": "get_time", "arguments": {}}]', ""),
        (
            CHANNELS,
            "<|channel|>commentary to=functions.get_time<|message|>{}<|call|>"
            "<|start|>assistant<|channel|>commentary to=functions.get_time<|message|>{}<|call|>",
            "",
        ),
    ],
)
def test_one_call_of_several_is_kept_and_the_others_are_no_text(
    template: str, text: str, said: str
) -> None:
    answer = read(text, template, TOOLS, n_calls_max=1)
    assert answer == Answer(said, "", (ParsedCall("get_time", "{}"),), LEFT_OUT)


def test_text_of_a_call_that_cannot_be_read_is_kept_with_a_warning() -> None:
    text = ' Well: <tool_call>{"name": </tool_call>'
    answer = read(text, HERMES, TOOLS)
    assert (answer.text, answer.calls) == (text, ())
    assert "malformed tool call" in answer.warnings[0]


def test_call_of_an_unknown_tool_is_given_out_with_a_warning() -> None:
    text = CALL.replace("get_time", "get_rich")
    answer = read(text, HERMES, TOOLS)
    assert answer.calls == (ParsedCall("get_rich", "{}"),)
    assert "'get_rich'" in answer.warnings[0]


def test_calls_are_text_where_there_are_no_tools() -> None:
    assert read(CALL, HERMES) == Answer(CALL)


def test_control_tokens_mark_calls_and_are_no_text() -> None:
    body = b'{"name": "get_time", "arguments": {}}'
    tokens = [*b"So ", 1002, *b"now: ", 1000, *body, 1001, 1002]
    answer = read_tokens(tokens, HERMES)
    assert answer == Answer("So now:", "", (ParsedCall("get_time", "{}"),))


def test_control_tokens_of_a_broken_call_are_no_text_either() -> None:
    answer = read_tokens([*b"So ", 1000, *b'{"na', 1001], HERMES)
    assert answer.text == 'So {"na'
    assert answer.warnings


def test_control_token_within_arguments_is_kept_out_of_nothing_but_text() -> None:
    tokens = [1003, *"é".encode(), *b"</think>", *"ü€".encode(), 1002, *b"!"]
    assert read_tokens(tokens, THINK) == Answer("ü€!", "é")


def test_stop_string_ends_the_text_as_readers_saw_it() -> None:
    tokens = [1003, *b"a</think>b STOP c"]
    reader = make_reader(answer_format(THINK))
    answer, _ = parts_of(reader, tokens, stops=("STOP",))
    assert answer == Answer("b ", "a")
    answer, _ = parts_of(reader, tokens, stops=("STOP",), include_stop=True)
    assert answer == Answer("b STOP", "a")


def harmony(text: str, tools: Tools = TOOLS, *, splits: bool = True) -> Answer:
    return read(text, CHANNELS, tools, splits=splits)


def test_channels_are_thinking_calls_and_text() -> None:
    answer = harmony(
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary<|message|>Wait.<|end|>"
        "<|start|>assistant<|channel|>commentary to=functions.get_time <|constrain|>json<|message|>{}"
    )
    assert answer == Answer("Wait.", "hm", (ParsedCall("get_time", "{}"),))


def test_recipient_may_stand_before_the_channel() -> None:
    text = ' to=functions.get_time<|channel|>commentary json<|message|>{"zone": 1}<|call|>'
    assert harmony(text) == Answer("", "", (ParsedCall("get_time", '{"zone": 1}'),))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<|channel|>final<|message|>Yes.<|return|>", Answer("Yes.")),
        ("<|channel|>analysis<|message|>hm", Answer("", "hm", (), CUT)),
        ("<|channel|>analysis<|message|>hm<|end|><|start|>assi", Answer("", "hm", (), CUT)),
        ("plain", Answer("plain")),
        ("", Answer("")),
    ],
)
def test_answer_in_channels_that_is_simple_or_cut(text: str, expected: Answer) -> None:
    assert harmony(text) == expected


def test_thinking_in_channels_stays_where_it_shall() -> None:
    text = (
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Yes."
    )
    assert harmony(text, splits=False).text == "hmYes."


def test_broken_call_in_a_channel_is_text_with_a_warning() -> None:
    answer = harmony("<|channel|>commentary to=functions.get_time<|message|>{<|call|>")
    assert (answer.text, answer.calls, len(answer.warnings)) == ("{", (), 1)


def test_wrapped_answer_is_unwrapped() -> None:
    template = THINK + "<response></response>"
    assert read("<think>a</think><response>b</response>", template) == Answer("b", "a")
    assert read("all\nHello", "'>>>all'") == Answer("Hello")


@given(st.lists(st.sampled_from([*b"ab<>{}", *CONTROLS]), max_size=40))
def test_no_tokens_raise_and_control_tokens_are_never_shown(tokens: list[int]) -> None:
    for template in (THINK + HERMES, CHANNELS, HERMES, ">>>all"):
        answer = read_tokens(tokens, template)
        assert not any("taken apart" in warning for warning in answer.warnings)
        assert len(answer.text) <= sum(t < 256 for t in tokens)


@given(st.lists(st.sampled_from(["a", "é", "€", "😀", *CONTROLS]), max_size=40))
def test_control_tokens_come_out_of_any_text(parts: list[str | int]) -> None:
    tokens = [t for p in parts for t in (p.encode() if isinstance(p, str) else (p,))]
    text = "x" + "".join(p for p in parts if isinstance(p, str))
    assert read_tokens([*b"x", *tokens], THINK) == Answer(text)
