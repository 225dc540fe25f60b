"""Tools, choices and calls as a caller gives them: what is taken, and what is refused by which name."""

from __future__ import annotations

import json
import pickle
from typing import Any

import pytest

from cbatch.errors import ConfigError
from cbatch.messages import BatchPrompt
from cbatch.options import RunOptions
from cbatch.tools import arguments_schema

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Tells the weather.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
TIME: dict[str, Any] = {"type": "function", "function": {"name": "get_time"}}
USER = {"role": "user", "content": "How is it in Paris?"}
NAMED = {"type": "function", "function": {"name": "get_time"}}


def call(arguments: object = '{"city": "Paris"}', **more: object) -> dict[str, Any]:
    function = {"name": "get_weather", "arguments": arguments}
    return {"id": "abcdefghi", "type": "function", "function": function, **more}


def test_tools_are_taken_as_plain_values_of_their_own() -> None:
    given = json.loads(json.dumps([WEATHER, TIME]))
    options = RunOptions(tools=given)
    given[0]["function"]["name"] = "changed"
    assert options.tools == (WEATHER, TIME)
    assert options.offered_tools.names == ("get_weather", "get_time")


def test_merged_options_keep_tools_without_checking_them_again() -> None:
    options = RunOptions(tools=[WEATHER], chat_template_kwargs={"enable_thinking": False})
    merged = RunOptions(max_tokens=3).over(options)
    assert merged.tools is options.tools
    assert merged.chat_template_kwargs is options.chat_template_kwargs
    assert pickle.loads(pickle.dumps(merged)) == merged


def test_template_variables_of_a_request_come_before_the_defaults_by_name() -> None:
    defaults = RunOptions(chat_template_kwargs={"enable_thinking": False, "lang": "en"})
    merged = RunOptions(chat_template_kwargs={"enable_thinking": True}).over(defaults)
    assert merged.template_variables == {"enable_thinking": True, "lang": "en"}
    assert defaults.template_variables == {"enable_thinking": False, "lang": "en"}
    assert RunOptions(chat_template_kwargs={}).over(defaults).template_variables == {}


@pytest.mark.parametrize(
    ("tools", "words"),
    [
        ("get_weather", "list"),
        (WEATHER, "list"),
        ([{"function": {"name": "f"}}], r"tools\[0\]"),
        ([WEATHER, {"type": "function"}], r"tools\[1\] needs function"),
        ([{"type": "retrieval"}], r"tools\[0\]"),
        ([{"type": "function", "function": {}}], "name None"),
        ([{"type": "function", "function": {"name": "two words"}}], "two words"),
        ([{"type": "function", "function": {"name": "f" * 129}}], "128"),
        ([{"type": "function", "function": {"name": "f", "description": 3}}], "description"),
        ([{"type": "function", "function": {"name": "f", "parameters": []}}], "parameters"),
        ([{"type": "function", "function": {"name": "f", "parameters": {"x": {1}}}}], "not JSON"),
        ([{"type": "function", "function": {"name": "f", "x": float("nan")}}], "not JSON"),
        ([TIME, TIME], "get_time.*unique"),
        ([TIME] * 1025, "tools has 1025 tools; at most 1024 are allowed"),
    ],
)
def test_malformed_tools_are_refused_where_they_stand(tools: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        RunOptions(tools=tools)


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


@pytest.mark.parametrize(
    "choice",
    [
        *(True, {}, {"type": "function"}, {"name": "f"}, {"type": "allowed_tools"}),
        *(allowed("none", "get_time"), allowed("auto"), {**allowed("auto"), "allowed_tools": []}),
    ],
)
def test_unknown_choice_is_refused(choice: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"tool_choice (must be one of none, auto, required|of type)"
    ):
        RunOptions(tool_choice=choice)


@pytest.mark.parametrize(
    ("tools", "choice", "offered", "demanded", "told"),
    [
        ([TIME], None, [TIME], [], None),
        ([TIME], "auto", [TIME], [], None),
        ([TIME], "none", [], [], None),
        ([], "auto", [], [], None),
        ([], None, [], [], None),
        ([WEATHER, TIME], "required", [WEATHER, TIME], [WEATHER, TIME], "required"),
        ([WEATHER, TIME], "any", [WEATHER, TIME], [WEATHER, TIME], "required"),
        ([WEATHER, TIME], NAMED, [WEATHER, TIME], [TIME], NAMED),
        ([WEATHER, TIME], allowed("auto", "get_time", "get_time"), [TIME], [], None),
        ([WEATHER, TIME], allowed("required", "get_time"), [TIME], [TIME], "required"),
    ],
)
def test_choice_tells_which_tools_are_offered_and_demanded(
    tools: Any, choice: Any, offered: Any, demanded: Any, told: Any
) -> None:
    options = RunOptions(tools=tools, tool_choice=choice)
    assert (options.offered_tools, options.demanded_tools) == (tuple(offered), tuple(demanded))
    variables = {"tools": offered, "tool_choice": told}
    assert options.template_variables == {name: v for name, v in variables.items() if v}
    assert options == RunOptions.of({"tools": options.tools, "tool_choice": options.tool_choice})


def test_structure_beside_demanded_allowed_tools_is_refused() -> None:
    RunOptions(tools=[TIME], tool_choice=allowed("auto", "get_time"), regex="a")
    with pytest.raises(ConfigError, match="give one of them"):
        RunOptions(tools=[TIME], tool_choice=allowed("required", "get_time"), regex="a")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("json_schema", {}),
        ("response_format", {"type": "json_object"}),
        ("regex", "a"),
        ("grammar", 'start: "a"'),
    ],
)
@pytest.mark.parametrize("choice", ["required", NAMED])
def test_demanded_call_beside_another_structure_is_refused_naming_both(
    choice: Any, name: str, value: Any
) -> None:
    with pytest.raises(ConfigError, match=f"{name} and tool_choice=") as caught:
        RunOptions(tools=[TIME], tool_choice=choice, **{name: value})
    assert "give one of them" in str(caught.value)
    assert RunOptions(tools=[TIME], tool_choice="auto", **{name: value}).structure is not None


def test_demanded_call_beside_the_format_of_text_is_taken() -> None:
    options = RunOptions(tools=[TIME], tool_choice="required", response_format={"type": "text"})
    assert options.demanded_tools.names == ("get_time",)


def test_choice_without_its_tool_is_refused() -> None:
    with pytest.raises(ConfigError, match="needs tools"):
        _ = RunOptions(tool_choice="required").offered_tools
    with pytest.raises(ConfigError, match="'get_time', which is not among the tools: get_weather"):
        _ = RunOptions(tools=[WEATHER], tool_choice=NAMED).offered_tools
    with pytest.raises(ConfigError, match="'get_time', which is not among the tools: get_weather"):
        _ = RunOptions(tools=[WEATHER], tool_choice=allowed("auto", "get_time")).offered_tools


@pytest.mark.parametrize(
    "kwargs", [["enable_thinking"], {"": 1}, {"two words": 1}, {3: 1}, {"messages": []}, {"x": {1}}]
)
def test_malformed_template_variables_are_refused(kwargs: Any) -> None:
    with pytest.raises(ConfigError, match="chat_template_kwargs"):
        RunOptions(chat_template_kwargs=kwargs)


@pytest.mark.parametrize("content", [None, "Let me see."])
@pytest.mark.parametrize("arguments", ['{"city": "Paris"}', {"city": "Paris"}])
def test_message_with_calls_is_taken(content: str | None, arguments: object) -> None:
    asks = {"role": "assistant", "content": content, "tool_calls": [call(arguments)]}
    answers = {"role": "tool", "tool_call_id": "abcdefghi", "content": "sunny"}
    messages = BatchPrompt([USER, asks, answers]).messages or ()
    assert messages[1] == {**asks, "tool_calls": [call({"city": "Paris"})]}
    assert messages[2] == answers


@pytest.mark.parametrize("none", [None, []])
def test_message_that_says_it_has_no_calls_has_none(none: Any) -> None:
    [message] = BatchPrompt([{**USER, "tool_calls": none}]).messages or ()
    assert "tool_calls" not in message


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"role": "user", "content": "x", "tool_calls": [call()]}, "only the assistant"),
        ({"role": "assistant", "tool_calls": "x"}, "list of calls"),
        ({"role": "assistant", "tool_calls": [{}]}, r"tool_calls\[0\] must have a function"),
        ({"role": "assistant", "tool_calls": [call(type="x")]}, "only functions"),
        ({"role": "assistant", "tool_calls": [call(id=3)]}, "id must be"),
        ({"role": "assistant", "tool_calls": [call("{")]}, "not JSON: Expecting"),
        ({"role": "assistant", "tool_calls": [call("[]")]}, "must be an object"),
        ({"role": "assistant", "tool_calls": [call(3)]}, "must be an object"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": ""}}]}, "needs a name"),
        ({"role": "assistant", "content": None}, "no content"),
        ({"role": "tool", "content": None}, "no content"),
        ({"role": "tool", "content": "x", "tool_call_id": 3}, "tool_call_id must be"),
        ({"role": "tool", "content": "x", "name": ""}, "name must be"),
    ],
)
def test_malformed_message_is_refused_where_it_stands(message: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=rf"messages\[1\].*{words}"):
        BatchPrompt([USER, message, USER])


def test_chat_that_ends_with_a_call_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"messages\[1\] calls tools and is the last"):
        BatchPrompt([USER, {"role": "assistant", "content": None, "tool_calls": [call()]}])


@pytest.mark.parametrize(
    "parameters", [{}, {"type": "object"}, {"type": "object", "properties": {}}]
)
def test_function_without_parameters_takes_none(parameters: Any) -> None:
    assert arguments_schema("f", parameters) == {
        "type": "object",
        "properties": {},
        "additionalProperties": False,
    }


def test_arguments_are_an_object_of_what_is_listed() -> None:
    listed = {"properties": {"a": {"type": "integer"}}, "required": ["a"]}
    assert arguments_schema("f", listed) == {
        **listed,
        "type": "object",
        "additionalProperties": False,
    }
    assert arguments_schema("f", {**listed, "type": ["object", "null"]})["type"] == "object"


@pytest.mark.parametrize(
    "more",
    [
        {"additionalProperties": True},
        {"patternProperties": {"^x": {}}},
        {"required": ["b"]},
        {"anyOf": [{"required": ["a"]}]},
    ],
)
def test_schema_that_says_more_of_its_properties_stays_as_it_is(more: Any) -> None:
    schema = {"type": "object", "properties": {"a": {}}, **more}
    assert arguments_schema("f", schema) == schema


def test_parameters_that_are_no_object_are_refused() -> None:
    with pytest.raises(ConfigError, match="type object, not 'string'"):
        arguments_schema("f", {"type": "string"})
