"""Answers as they come: what is given out of their parts, however they are cut, in every format."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cbatch.chat.answers import Answer, AnswerReader
from cbatch.chat.formats import CALL_FORMATS, RESPONSES, THINKING, AnswerFormat, answer_format
from cbatch.chat.marks import Marks
from cbatch.tools import Tools
from tests.backend.llama.test_templates import FOLDER, LLAMA_3
from tests.chat.answer_runs import CONTROLS, make_reader, n_thought_of, parts_of, shown
from tests.chat.test_call_parser import EXAMPLES, TEXT, TOOLS
from tests.profiles import examples

REAL = {path.stem: path.read_text(encoding="utf-8") for path in sorted(FOLDER.glob("*.jinja"))}
THINK = "<think></think>"
CHANNELS = "<|channel|><|message|>"
MADE = {
    **{form.name: f"{THINK} {' '.join(form.marks)}" for form in CALL_FORMATS},
    **{end: f"{begin}{end} <tool_call>" for begin, end in THINKING},
    **{mark: f"{THINK} {mark}" for mark, _ in RESPONSES},
    "channels": CHANNELS,
    "none": "",
}
TEMPLATES = {**REAL, "like Llama 3": LLAMA_3, **MADE}

CALL = '{"name": "get_time", "arguments": {}}'
HARMONY = [
    "<|channel|>", "analysis", "commentary", "final", "<|message|>", "<|end|>", "<|start|>assistant", "<|call|>",
    " to=functions.get_time", "<|constrain|>json",
]  # fmt: skip
PIECES = [
    *HARMONY, *"<>[]{}|=/:\",\\`;. a1", "\n", "\n\n", " \n", "é", "€", "```", "```json\n", CALL, f"[{CALL}]", TEXT,
    '{"a', "<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", ">>>", "all\n", "get_time\n", "<response>",
    "</response>", "<|START_RESPONSE|>", "<function=get_time>", "</function>", "<parameter=city>", "</parameter>",
    "<arg_key>city</arg_key>", "<arg_value>", "</arg_value>", "Well", "to", "just", "NaN", "12", "-1.", "1e5",
]  # fmt: skip


def pieces_of(format: AnswerFormat) -> list[str]:
    """What answers of a format are made of, and bits of it."""
    own = [*format.thinking] if format.thinking else []
    if format.calls is not None:
        example = EXAMPLES[format.calls.name]
        half = len(example) // 2
        own += [example, example[:half], example[half:], example[:-1], example[:12]]
        own += [*re.findall(r"<[^<>]*>|\[[A-Z_]+\]|\w+|[{}\[\]]", example)][:30]
    return own


@st.composite
def answers(draw: st.DrawFn) -> tuple[str, dict[str, Any], list[int], list[int]]:
    """A template, settings of a reader, an answer's tokens and where it is cut."""
    name = draw(st.sampled_from(sorted(TEMPLATES)))
    own = pieces_of(answer_format(TEMPLATES[name]))
    some = st.sampled_from([*own, *own, *own, *PIECES, *CONTROLS])
    tokens: list[int] = []
    for piece in draw(st.lists(some, max_size=24)):
        tokens += piece.encode() if isinstance(piece, str) else (piece,)
    settings = {
        "tools": draw(st.sampled_from([TOOLS, TOOLS, Tools()])),
        "splits": draw(st.sampled_from([True, True, False])),
        "opened": draw(st.sampled_from(["", "", "<think>so", "<think>so</think>far"])),
        "n_calls_max": draw(st.sampled_from([None, 1])),
    }
    tokens = tokens[: draw(st.integers(0, len(tokens)))] if draw(st.booleans()) else tokens
    cuts = draw(st.lists(st.integers(0, len(tokens)), max_size=12).map(sorted))
    return name, settings, tokens, draw(st.sampled_from([cuts, [*range(len(tokens))]]))


BARE = f'{{"name": "get_weather", "arguments": {TEXT}}}'
CALLING = {
    **{name: (MADE[name], "Well.\n", example) for name, example in EXAMPLES.items()},
    "functionary v3.2": (MADE["functionary v3.2"], "all\nWell.\n>>>", EXAMPLES["functionary v3.2"]),
    "bare": ("", "", BARE),
    "bare, as Llama 3 has it": (LLAMA_3, "", BARE.replace("arguments", "parameters")),
    "bare, typed": ("", "", BARE.replace('{"name', '{"type": "function", "name', 1)),
    "bare, in a list": ("", "", f"[{BARE}]"),
    "bare, nested": ("", "", f'{{"type": "function", "function": {BARE}}}'),
    "bare, wrapped": ("", "", f'{{"tool_calls": [{BARE}]}}'),
    "channels": (CHANNELS, "", f"<|channel|>commentary to=functions.get_weather<|message|>{TEXT}"),
}
"""By format: a template, an answer's text as it is written, and calls behind it."""


@pytest.mark.parametrize("name", CALLING)
def test_call_that_is_cut_off_anywhere_leaves_nothing_in_the_text(name: str) -> None:
    template, said, calls = CALLING[name]
    reader = make_reader(answer_format(template), TOOLS)
    for text in dict.fromkeys([calls, said + calls]):
        tokens, n_said = [*text.encode()], len(text) - len(calls)
        for n in range(n_said, len(tokens) + 1):
            whole, _ = parts_of(reader, tokens[:n], is_cut=True)
            answer, given = parts_of(reader, tokens[:n], cuts=[*range(n % 5, n, 9)], is_cut=True)
            assert answer == whole
            assert "".join(said for said, _ in given) == whole.text
            assert whole.text.rstrip() == ("Well." if n_said else ""), n
            assert all(call.arguments == TEXT for call in whole.calls)
            assert not any("malformed tool call" in warning for warning in whole.warnings)
        assert len(whole.calls) == len(parts_of(reader, tokens)[0].calls) > 0


@pytest.mark.parametrize("n", range(len(BARE)))
def test_bare_json_of_no_tool_that_is_cut_off_stays_text(n: int) -> None:
    said = BARE.replace("get_weather", "Ada")[:n]
    answer, _ = parts_of(make_reader(AnswerFormat(), TOOLS), [*said.encode()], is_cut=True)
    assert answer.text == ("" if n <= BARE.index("get_weather") else said)
    assert len(answer.warnings) == (0 < n <= BARE.index("get_weather"))


@pytest.mark.parametrize("text", ["Hello", "all is well", "get_up", "Yes >", "get_weather"])
def test_cut_off_words_stay_text_where_calls_begin_with_a_name(text: str) -> None:
    reader = make_reader(answer_format(MADE["functionary v3.2"]), TOOLS)
    answer, _ = parts_of(reader, [*text.encode()], is_cut=True)
    left_out = {"Yes >": "Yes", "get_weather": ""}
    assert answer.text == left_out.get(text, text)


def test_call_that_the_model_left_unfinished_is_text() -> None:
    reader = make_reader(answer_format(MADE["hermes"]), TOOLS)
    text = '<tool_call>{"name": "get_time", "argum'
    assert parts_of(reader, [*text.encode()])[0].text == text


STOPS = st.sampled_from([{}, {}, {"stops": ["Well", "}}", "</", "\n\n"]}])
TAILS = st.sampled_from([b"", b"", b"<think>\n", b"<think></think>"])


@settings(max_examples=examples(1500))
@given(answers(), STOPS, st.booleans(), TAILS, st.booleans())
def test_parts_as_they_come_are_those_of_the_whole_answer(
    case: tuple[str, dict[str, Any], list[int], list[int]],
    stops: dict[str, Any],
    include_stop: bool,
    tail: bytes,
    is_cut: bool,
) -> None:
    name, said, tokens, cuts = case
    reader = make_reader(answer_format(TEMPLATES[name]), **said)
    more = {**stops, "include_stop": include_stop, "tail": [*tail], "is_cut": is_cut}
    whole, _ = parts_of(reader, tokens, **more)
    answer, given = parts_of(reader, tokens, cuts=cuts, **more)
    assert answer == whole
    assert "".join(text for text, _ in given) == whole.text
    assert "".join(thought for _, thought in given) == whole.reasoning
    assert not any("taken apart" in warning for warning in whole.warnings)


ANALYSIS = b"<|channel|>analysis<|message|>h\xc3\xa4"
FINAL = b"<|end|><|start|>assistant<|channel|>final<|message|>so"


@pytest.mark.parametrize(
    ("template", "said", "tail", "n_tokens"),
    [
        (THINK, [1003, *"hä".encode(), 1004, *b" so"], b"", 5),
        (THINK, [*b"\n<think>", *b"hm</think>", *b"so"], b"", 18),
        (THINK, [*b"hm", 1004, *b"so"], b"<think>\n", 3),
        (THINK, [1003, *b"hm"], b"", 3),
        (THINK, [1003, *b"\n", 1004, *b"so"], b"", 0),
        (THINK, [*b"so"], b"", 0),
        (CHANNELS, [*ANALYSIS, *FINAL], b"", len(ANALYSIS)),
        (CHANNELS, [*ANALYSIS, *FINAL[:17], *ANALYSIS], b"", 2 * len(ANALYSIS) + 17),
    ],
)
def test_tokens_of_thinking_are_counted_with_its_marks(
    template: str, said: list[int], tail: bytes, n_tokens: int
) -> None:
    format = answer_format(template)
    assert n_thought_of(make_reader(format), said, [*tail]) == n_tokens
    assert n_thought_of(make_reader(format, splits=False), said, [*tail]) == 0


BEHIND = [
    "",
    "Done.",
    "\n```json\n",
    "```js",
    "``",
    "just so",
    ", {",
    "; [1]",
    " </tool_ca",
    "\n\n  ",
]


@pytest.mark.parametrize("behind", BEHIND)
@pytest.mark.parametrize("name", EXAMPLES)
def test_what_follows_calls_is_theirs_or_text_however_it_is_cut(name: str, behind: str) -> None:
    reader = make_reader(answer_format(MADE[name]), TOOLS)
    for text in (f"Well. {EXAMPLES[name]}{behind}", f"<think>So</think>\n{EXAMPLES[name]}{behind}"):
        tokens = [*text.encode()]
        whole, _ = parts_of(reader, tokens)
        answer, given = parts_of(reader, tokens, cuts=[*range(len(tokens))])
        assert answer == whole
        assert "".join(text for text, _ in given) == whole.text


def held(reader: AnswerReader, text: str, *, tail: str = "") -> tuple[str, str]:
    """Return what of a text is given out before more is known."""
    tokens = [*text.encode()]
    _, given = parts_of(reader, tokens, cuts=[len(tokens)], tail=[*tail.encode()])
    return "".join(t for t, _ in given[:-1]), "".join(r for _, r in given[:-1])


@pytest.mark.parametrize("name", TEMPLATES)
def test_plain_answer_streams_at_once_in_every_format(name: str) -> None:
    format = answer_format(TEMPLATES[name])
    for end in range(7, 26):
        text = "Hello, it is seven o'clock"[:end]
        assert held(make_reader(format), text) == (text, "")
        may_call = not format.has_channels  # there, a call is never behind text of the same message
        said = text.rstrip() if may_call else text
        assert held(make_reader(format, TOOLS), text) == (said, "")


@pytest.mark.parametrize(
    ("text", "tools", "said", "thought"),
    [
        ("Hm <", None, "Hm <", ""),
        ("Hm \n", None, "Hm \n", ""),
        ("Hm \n", TOOLS, "Hm", ""),
        ("Hm \nso", TOOLS, "Hm \nso", ""),
        ("Hm <tool", TOOLS, "Hm", ""),
        ("Hm <tool_bar>", TOOLS, "Hm <tool_bar>", ""),
        ("Hm <tool_call> of which I speak", TOOLS, "Hm <tool_call> of which I speak", ""),
        (f"Hm <tool_call>{CALL}</tool_call>", TOOLS, "Hm", ""),
        (f"Hm <tool_call>{CALL}</tool_call>\nand", TOOLS, "Hm \nand", ""),
        ("  <thi", None, "", ""),
        ("  <this>", None, "  <this>", ""),
        ("<think>\nSo \n", None, "", "So"),
        ("<think>So</th", None, "", "So"),
        ("<think>So</this", None, "", "So</this"),
        ("<think>So\n</think>\n\n", None, "", "So"),
        ("<think>So\n</think>\n\nHm ", None, "Hm ", "So"),
        ('{"name": "get_time", "arg', TOOLS, "", ""),
        ('{"name": "Ada", "arguments": {}', TOOLS, "", ""),
        ('{"name": "Ada", "arguments": {}}', TOOLS, '{"name": "Ada", "arguments": {}}', ""),
        ("[1] says so", TOOLS, "[1] says so", ""),
        ("```python\n", TOOLS, "```python", ""),
    ],
)
def test_nothing_is_held_back_but_what_may_be_left_out(
    text: str, tools: Tools | None, said: str, thought: str
) -> None:
    reader = make_reader(answer_format(f"{THINK} <tool_call>"), tools)
    assert held(reader, text) == (said, thought)


def test_thinking_that_the_prompt_opened_comes_at_once() -> None:
    reader = make_reader(answer_format(THINK))
    assert held(reader, "So it", tail="<think>\n") == ("", "So it")
    assert held(make_reader(answer_format(THINK), opened="<think>well"), "So it") == ("", "So it")
    assert held(make_reader(answer_format(THINK), opened="well"), "So it") == ("So it", "")


@pytest.mark.parametrize(
    ("text", "said", "thought"),
    [
        ("Hm", "Hm", ""),
        ("<|channel|>analysis", "", ""),
        ("<|channel|>analysis<|message|>So it", "", "So it"),
        ("<|channel|>analysis<|message|>So<|en", "", "So"),
        ("<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>analysis<|message|>b", "", "a\nb"),
        ("<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final<|message|> Yes ", " Yes ", "a"),
        ("<|channel|>commentary to=functions.get_time<|message|>{", "", ""),
        (" to=functions.get_time", "", ""),
        (" to=fun and games", " to=fun and games", ""),
    ],
)  # fmt: skip
def test_channels_come_apart_as_they_are_written(text: str, said: str, thought: str) -> None:
    assert held(make_reader(answer_format(CHANNELS), TOOLS), text) == (said, thought)


def test_what_fails_within_gives_out_all_that_was_held_back() -> None:
    def broken(token: int) -> bytes:
        if token == 1002:
            raise LookupError("gone")
        return shown(token)

    reader = AnswerReader(answer_format(f"{THINK} <tool_call>"), broken, frozenset(CONTROLS), TOOLS)
    tokens = [*b"a <tool_call> {", 1002, *b"b"]
    answer, given = parts_of(reader, tokens, cuts=[*range(len(tokens))])
    assert "".join(text for text, _ in given) == answer.text == "a <tool_call> {b"
    assert "gone" in answer.warnings[0]


def test_stop_string_that_did_not_come_stands_before_the_mark_behind_it() -> None:
    reader = make_reader(answer_format(THINK))
    for cuts in ((), range(9)):
        answer, _ = parts_of(reader, [1003, *b"a}", 1004, *b"b"], stops=["}}"], cuts=[*cuts])
        assert answer == Answer("b", "a}")


@pytest.mark.parametrize(
    ("pattern", "text", "at"),
    [
        (r"ab", "xa", 1),
        (r"ab", "xab", 3),
        (r"ab\s*", "xab ", 1),
        (r"ab\s*c", "xab d", 5),
        (r"(?:a(?P<n>[\w]+))?;", "xabc", 1),
        (r"\Aab", "xa", 2),
        (r"a(?=b)", "a", 0),
        (r"(?:ab|cd)?", "c", 0),
    ],
)
def test_end_of_a_text_that_may_become_a_mark_is_found(pattern: str, text: str, at: int) -> None:
    assert Marks(re.compile(pattern)).open_at(text, 0) == at


UNITS = [
    "word ",
    "\n",
    "<tool_call>\n",
    "<tool_call>{",
    "<",
    '{"a": [',
    "<think>",
    "<|message|>",
    "[TOOL_CALLS]",
    "}}",
]


def seconds(template: str, tokens: list[int]) -> float:
    start = time.process_time()
    parts_of(make_reader(answer_format(template), TOOLS), tokens, cuts=[*range(0, len(tokens), 4)])
    return time.process_time() - start


@pytest.mark.slow
@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("template", [f"{THINK} <tool_call>", CHANNELS, "[TOOL_CALLS]", ">>>all"])
def test_cost_of_chunks_is_in_proportion_to_the_answer(template: str, unit: str) -> None:
    for begin in (
        "",
        "<think>",
        "<tool_call>",
        '<tool_call>{"',
        '{"a": "',
        "<|channel|>final<|message|>",
    ):
        tokens = [*(begin + unit * (16_000 // len(unit))).encode()]
        assert seconds(template, tokens) < 1.0, begin
