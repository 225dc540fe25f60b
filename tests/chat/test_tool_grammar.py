"""Grammars of calls, followed byte by byte: what they take is what templates teach, and is read as calls."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from cbatch.chat.formats import BARE, AnswerFormat, answer_format
from cbatch.chat.tool_grammar import N_CALLS_MAX, call_grammar, call_syntax
from cbatch.errors import ConfigError, UnsupportedOptionError
from cbatch.tools import Tools, check_tools
from tests import call_runs
from tests.backend.llama.test_templates import (
    ANSWERS,
    ASKS,
    ENDS,
    USER,
    WEATHER,
    WITH_TOOLS,
    source,
    template,
)
from tests.chat.answer_runs import make_reader, parts_of

if TYPE_CHECKING:
    from cbatch.chat.formats import Thinking
    from cbatch.chat.tool_grammar import NamedToken

MARKS = {"<think>": 1, "</think>": 2, "<tool_call>": 3, "</tool_call>": 4, "</arg_value>": 5}
"""Tokens that stand for marks, of those of a vocabulary of bytes that no text here has."""

HERMES = "<tool_call> <think></think>"
PAIRS = "<tool_call> <function= <parameter="
GLM = "<tool_call> <arg_key> <arg_value>"
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20).filter(
    lambda t: "</" not in t
)


def tools(*functions: dict[str, Any]) -> Tools:
    return check_tools([{"type": "function", "function": f} for f in functions]) or Tools()


WEATHERS = check_tools([WEATHER]) or Tools()


def function(name: str, **properties: Any) -> dict[str, Any]:
    return {"name": name, "parameters": {"type": "object", "properties": properties}}


def no_token(mark: str) -> int | None:
    return None


class Follower:
    """Follows the grammar of a template's calls."""

    def __init__(
        self,
        text: str,
        offered: Tools = WEATHERS,
        *,
        thinking: Thinking = "none",
        is_one: bool = False,
        named_token: NamedToken = no_token,
    ) -> None:
        grammar = call_grammar(
            answer_format(text), offered, thinking=thinking, is_one=is_one, named_token=named_token
        )
        assert grammar.kind == "tool_choice"
        self.matcher = LLMatcher(
            LLTokenizer("byte"), LLMatcher.grammar_from_lark(grammar.text), log_level=0
        )
        assert not self.matcher.is_error(), self.matcher.get_error()

    def takes(self, *parts: str | int) -> bool:
        """Whether a whole answer is these texts and tokens."""
        tokens = [t for p in parts for t in (p.encode() if isinstance(p, str) else [p])]
        matcher = self.matcher.deep_copy()
        is_taken = matcher.validate_tokens(tokens) == len(tokens) and matcher.consume_tokens(tokens)
        return bool(is_taken and matcher.is_accepting())


def written(name: str) -> tuple[str, str]:
    """Return a prompt, and the call behind it as the template writes it of an earlier message."""
    chat, variables = template(name), {"tools": [WEATHER]}
    prompt = chat.render([USER], variables)
    after = chat.render([USER, ASKS, ANSWERS], variables)
    n_same = next(i for i, (a, b) in enumerate(zip(prompt + "\0", after, strict=False)) if a != b)
    call = after[n_same:]
    return prompt, call[: min(i for end in ENDS if (i := call.find(end)) >= 0)]


@pytest.mark.real  # a template runs in a process of its own
@pytest.mark.parametrize("name", [n for n in WITH_TOOLS if n != "openai-gpt-oss-120b"])
def test_call_as_the_template_writes_it_is_taken_and_prose_is_not(name: str) -> None:
    prompt, call = written(name)
    thinking = answer_format(source(name)).thinking_after("", prompt)
    follower = Follower(source(name), thinking=thinking)
    assert follower.takes(call.replace(', "id": "abcdefghi"', ""))
    assert not follower.takes("It is sunny. " + call)
    assert not follower.takes(call.replace("get_weather", "get_time"))
    assert not follower.takes(call.replace("days", "weeks"))


def test_answers_in_channels_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedOptionError, match="gpt-oss") as caught:
        Follower(source("openai-gpt-oss-120b"))
    assert caught.value.option == "tool_choice"


@pytest.mark.real
@pytest.mark.parametrize("name", call_runs.MARKS)
def test_form_is_read_as_the_calls_that_it_writes(name: str) -> None:
    text = call_runs.template(name)
    offered = tools(*call_runs.TOOLS)
    syntax = call_syntax(answer_format(text), offered)
    assert (syntax is BARE) == (name in ("bare", "glm"))
    follower = Follower(text, offered)
    calls = [("label", '{"text": "a"}'), ("stop", "{}")]
    assert follower.takes(syntax.write(calls[0]))
    assert follower.takes(syntax.write(*calls)) == (syntax.between is not None)


def test_no_more_calls_than_the_limit() -> None:
    follower = Follower(HERMES)
    assert follower.takes("\n".join([CALL] * N_CALLS_MAX))
    assert not follower.takes("\n".join([CALL] * (N_CALLS_MAX + 1)))
    one = Follower(HERMES, is_one=True)
    assert one.takes(CALL)
    assert not one.takes(f"{CALL}\n{CALL}")


def test_thinking_comes_first_where_it_may() -> None:
    may = Follower(HERMES, thinking="may")
    for thought in (
        "",
        "<think>hm</think>",
        "\n<think>\n</thin < é\n</think>\n\n",
        "<think></think>",
    ):
        assert may.takes(thought + CALL)
    assert not may.takes("hm</think>" + CALL)
    assert not may.takes("<think>hm" + CALL)
    assert not may.takes("<think>hm</think>hm" + CALL)
    assert not may.takes("<think>hm</think><think>hm</think>" + CALL)


def test_thinking_that_the_prompt_opened_is_closed_before_the_call() -> None:
    opened = Follower(HERMES, thinking="must end")
    assert opened.takes(f"hm {CALL} hm</think>\n\n{CALL}")
    assert opened.takes(f"</think>{CALL}")
    assert not opened.takes(CALL)
    assert not Follower(HERMES, thinking="none").takes("<think>hm</think>" + CALL)


def test_marks_that_are_tokens_are_taken_as_tokens_alone() -> None:
    begin, body, end = 3, CALL[len("<tool_call>") : -len("</tool_call>")], 4
    follower = Follower(HERMES, thinking="may", named_token=MARKS.get)
    assert follower.takes(begin, body, end)
    assert follower.takes(begin, body, end, "\n", begin, body, end)
    assert follower.takes(1, "hm < </ think", 2, "\n\n", begin, body, end)
    assert follower.takes(1, 2, begin, body, end)
    assert not follower.takes(CALL)
    assert not follower.takes(1, "hm</think>", 2, begin, body, end)
    assert Follower(HERMES, thinking="must end", named_token=MARKS.get).takes(
        "hm", 2, begin, body, end
    )


@pytest.mark.parametrize(
    ("opened", "tail", "expected"),
    [
        ("", "…<|im_start|>assistant\n", "may"),
        ("", "assistant\n<think>\n", "must end"),
        ("", "assistant\n<think>\n\n</think>\n\n", "none"),
        ("Well, ", "", "none"),
        ("<think>Well, ", "", "must end"),
        ("<think>Well</think>So", "", "none"),
    ],
)
def test_prompt_tells_whether_an_answer_may_think(opened: str, tail: str, expected: str) -> None:
    assert AnswerFormat(("<think>", "</think>")).thinking_after(opened, tail) == expected
    assert AnswerFormat().thinking_after(opened, tail) == "none"


def arguments(text: str, call: str, offered: Tools) -> Any:
    answer, _ = parts_of(make_reader(answer_format(text), offered), [*call.encode()])
    assert (answer.text, answer.warnings) == ("", ())
    [found] = answer.calls
    return json.loads(found.arguments)


@given(TEXTS, st.lists(st.integers(), max_size=3))
def test_arguments_one_by_one_are_taken_and_read_back(city: str, days: list[int]) -> None:
    offered = tools(
        function(
            "go", city={"type": "string"}, days={"type": "array", "items": {"type": "integer"}}
        )
    )
    coder = (
        f"<tool_call>\n<function=go>\n<parameter=city>\n{city}\n</parameter>\n<parameter=days>\n{days}\n</parameter>\n"
        "</function>\n</tool_call>"
    )
    assert Follower(PAIRS, offered).takes(coder)
    assert arguments(PAIRS, coder, offered) == {"city": city, "days": days}
    glm = (
        f"<tool_call>go\n<arg_key>city</arg_key>\n<arg_value>\n{city}\n</arg_value>\n<arg_key>days</arg_key>\n"
        f"<arg_value>{days}</arg_value>\n</tool_call>"
    )
    assert Follower(GLM, offered).takes(glm)
    assert arguments(GLM, glm, offered) == {"city": city, "days": days}


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "maxLength": 3},
        {"type": "string", "pattern": "a+"},
        {"type": ["string", "null"]},
        {"enum": ["1", 2]},
        {"anyOf": [{"type": "string"}]},
        {"type": "object", "properties": {"a": {"$ref": "#/properties/b"}}},
        True,
    ],
)
def test_what_one_by_one_cannot_tell_is_written_as_json(schema: Any) -> None:
    offered = tools(function("go", a=schema, b={"type": "string"}))
    syntax = call_syntax(answer_format(PAIRS), offered)
    assert syntax.argument is None
    assert syntax.call.startswith("<tool_call>\n<function=$name>")
    assert Follower(PAIRS, offered).takes(syntax.write(("go", '{"b": "x"}')))
    assert call_syntax(answer_format(GLM), offered) is BARE


def test_function_that_its_form_cannot_name_is_called_in_bare_json() -> None:
    text = "[TOOL_CALLS] [ARGS]"
    assert call_syntax(answer_format(text), tools(function("a.b/c:d"))) is not BARE
    functionary = ">>>all"
    assert call_syntax(answer_format(functionary), tools(function("a/b"))) is BARE


def test_references_hold_within_a_functions_own_parameters() -> None:
    parameters = {
        "type": "object",
        "properties": {"at": {"$ref": "#/$defs/place"}},
        "$defs": {"place": {"enum": ["here", "<[1]>"]}},
    }
    offered = tools({"name": "stop"}, {"name": "go", "parameters": parameters})
    follower = Follower("", offered)
    assert follower.takes('{"name": "go", "arguments": {"at": "here"}}')
    assert follower.takes('{"name": "go", "arguments": {"at": "<[1]>"}}')
    assert not follower.takes('{"name": "go", "arguments": {"at": "there"}}')
    assert not follower.takes('{"name": "stop", "arguments": {"at": "here"}}')


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        ({"type": "string"}, " must have the type object, not 'string'"),
        ({"type": 5}, " must have the type object, not 5"),
        ({"type": None}, " must have the type object"),
        ({"type": {}}, " must have the type object"),
        ({"properties": [1]}, ".properties must be an object"),
        ({"properties": [], "additionalProperties": False}, ".properties must be an object"),
        ({"required": None, "properties": {}}, ".required must be a list of names"),
        ({"required": 5, "properties": {}}, ".required must be a list of names, not 5"),
        ({"required": [{}], "properties": {}}, ".required must be a list of names"),
        ({"properties": {"a": {"type": "string", "enum": 5}}}, ".properties.a.enum must be a list"),
        ({"properties": {"a": {"enum": None}}}, ".properties.a.enum must be a list"),
        ({"properties": {"a": {"enum": []}}}, ".properties.a.enum must be a list of at least one"),
    ],
)
@pytest.mark.parametrize("template", [HERMES, PAIRS, GLM])
def test_wrong_parameters_are_refused_by_tool_and_place(
    parameters: Any, said: str, template: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"tools (go): parameters{said}")):
        Follower(template, tools({"name": "go", "parameters": parameters}))
