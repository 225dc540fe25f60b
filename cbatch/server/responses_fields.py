"""The fields of OpenAI's Responses, as a chat and options. Source: OpenAI's API reference, responses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from cbatch.messages import BatchPrompt
from cbatch.pictures import url_part
from cbatch.server.anthropic_fields import joined
from cbatch.server.http_errors import bad_request, refused
from cbatch.server.request_fields import (
    MAX_TOKENS,
    Dialect,
    Options,
    RequestFields,
    asked_of,
    effort_variables,
    field_errors,
)
from cbatch.server.typed_bodies import Filled, read_body, unknown_in
from cbatch.support.checks import shown

LOGPROBS = "message.output_text.logprobs"

_FUNCTION = dict.fromkeys(("description", "parameters", "strict"))
"""What a response says of a function where the request says nothing."""

_REPEATED: Mapping[str, Any] = {
    **dict.fromkeys(("instructions", "max_output_tokens", "max_tool_calls", "prompt_cache_key")),
    **dict.fromkeys(("safety_identifier", "user")),
    "metadata": {},
    "parallel_tool_calls": True,
    "tool_choice": "auto",
    "top_logprobs": 0,
    "truncation": "disabled",
}
"""What a response repeats of its request, and what it says where the request says nothing."""


class _InputText(Struct, tag="input_text"):
    text: str


class _OutputText(Struct, tag="output_text"):
    text: str


class _TextPart(Struct, tag="text"):
    text: str


class _Refusal(Struct, tag="refusal"):
    refusal: str


class _ImagePart(Struct, tag="input_image"):
    image_url: Filled | None = None

    def __post_init__(self) -> None:
        if self.image_url is None:
            raise ValueError("has no image_url: uploaded files cannot be used as pictures")


class _AudioPart(Struct, tag="input_audio"):
    input_audio: Any = None  # as in chats


_Part = _InputText | _OutputText | _TextPart | _Refusal | _ImagePart | _AudioPart
_Content = str | list[_Part]


class _MessageItem(Struct, tag="message"):
    role: Literal["user", "assistant", "system", "developer"]
    content: _Content


class _Thought(Struct):
    type: Literal["reasoning_text"]
    text: str


class _ReasoningItem(Struct, tag="reasoning"):
    content: list[_Thought] | None = None


class _CallItem(Struct, tag="function_call"):
    call_id: Filled
    name: Filled
    arguments: str


class _CallOutput(Struct, tag="function_call_output"):
    call_id: Filled
    output: _Content


_Item = _MessageItem | _ReasoningItem | _CallItem | _CallOutput


class _TextConfig(Struct, frozen=True):
    format: dict[str, Any] | None = None


class _ReasoningConfig(Struct, frozen=True):
    effort: str | None = None


class ResponsesBody(Struct):
    """A request, but for options by names of their own."""

    input: str | Annotated[list[_Item], Meta(min_length=1)]
    instructions: str | None = None
    max_output_tokens: Any = None
    tools: list[dict[str, Any]] = []
    tool_choice: Any = None
    text: _TextConfig = _TextConfig()
    reasoning: _ReasoningConfig = _ReasoningConfig()
    include: list[str] = []
    top_logprobs: Any = None
    background: bool = False


_STATELESS = "responses are not kept: send the whole conversation as input"

DIALECT = Dialect(
    own=ResponsesBody.__struct_fields__,
    ignored=frozenset(
        {"store", "metadata", "user", "service_tier", "prompt_cache_key", "prompt_cache_retention"}
        | {"prompt_cache_options", "safety_identifier", "truncation", "max_tool_calls"}
        | {"stream_options"}
    ),
    refused={
        "previous_response_id": _STATELESS,
        "conversation": _STATELESS,
        "prompt": "write it into instructions",
        "n": "a response is one answer",
        "best_of": "a response is one answer",
        "logprobs": "use include and top_logprobs",
        "reasoning_effort": "use reasoning.effort",
        **dict.fromkeys(MAX_TOKENS, "use max_output_tokens"),
    },
    is_openai=False,
)


def read_response(body: Mapping[str, Any], *, is_strict: bool) -> tuple[RequestFields, BatchPrompt]:
    """Return the fields of a body, and its chat. Raises a `HttpProblemError`."""
    items = body.get("input")
    if isinstance(items, list):
        body = {**body, "input": [*map(_with_type, items)]}
    said = read_body(ResponsesBody, body)
    if said.background:
        raise refused("background", "answers are not computed in the background")
    ignored: list[str] = []
    options = _tools(said, ignored) | _others(said)
    for name in ("text", "reasoning"):
        more = unknown_in(body.get(name) or {}, getattr(said, name))
        ignored += [f"{name}.{key}" for key in more]
    ignored += [f"include.{name}" for name in said.include if name != LOGPROBS]
    if said.top_logprobs is not None and LOGPROBS not in said.include:
        ignored.append("top_logprobs")
    effort = said.reasoning.effort
    variables = "reasoning", {} if effort is None else effort_variables(effort)
    asked = asked_of(
        body, DIALECT, options, variables=variables, ignored=ignored, is_strict=is_strict
    )
    return asked, _chat(said)


def _with_type(item: Any) -> Any:
    """Return an item of the input: a message need not say its type, and thinking may be empty in any way."""
    if not isinstance(item, dict):
        return item
    kind = item.get("type") or "message"
    content = (item.get("content") or None) if kind == "reasoning" else item.get("content")
    return {**item, "type": kind, "content": content}


def repeated(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a response repeats of its request, which was read."""
    given = {name: value for name, value in body.items() if value is not None}
    text, reasoning = given.get("text", {}), given.get("reasoning", {})
    return {
        **{name: given.get(name, usual) for name, usual in _REPEATED.items()},
        "reasoning": {"effort": reasoning.get("effort"), "summary": None},
        "text": {"format": text.get("format") or {"type": "text"}},
        "tools": [
            {**_FUNCTION, **tool} if tool.get("type") == "function" else tool
            for tool in given.get("tools", ())
        ],
    }


# ---- options ----


def _others(said: ResponsesBody) -> Options:
    """Return all options but those of tools."""
    found: Options = {}
    if said.max_output_tokens is not None:
        found["max_tokens"] = "max_output_tokens", said.max_output_tokens
    if (format := said.text.format) is not None:
        if format.get("type") == "json_schema":
            inner = {key: v for key, v in format.items() if v is not None and key != "type"}
            format = {"type": "json_schema", "json_schema": inner}
        found["response_format"] = "text", format
    if LOGPROBS in said.include:
        found["logprobs"] = "include", True
        if said.top_logprobs is not None:
            found["top_logprobs"] = "top_logprobs", said.top_logprobs
    return found


def _tools(said: ResponsesBody, ignored: list[str]) -> Options:
    """Return tools and their choice; those that are not functions are ignored."""
    found: Options = {}
    keys = ("name", "description", "parameters")
    functions = []
    for i, tool in enumerate(said.tools):
        if tool.get("type") != "function":
            ignored.append(f"tools[{i}]")
            continue
        ignored += [f"tools.{key}" for key in tool if key not in ("type", *keys)]
        function = {key: tool[key] for key in keys if tool.get(key) is not None}
        functions.append({"type": "function", "function": function})
    if functions:
        found["tools"] = "tools", functions
    choice = said.tool_choice
    if choice is not None:
        nested = _nested(choice, ignored) if isinstance(choice, dict) else choice
        found["tool_choice"] = "tool_choice", nested
    return found


def _nested(choice: dict[str, Any], ignored: list[str]) -> dict[str, Any]:
    """Return a tool choice in the form of chats; allowed tools that are not functions are ignored."""
    if choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    tools = choice.get("tools")
    is_list = isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)
    if choice.get("type") != "allowed_tools" or not is_list:
        raise bad_request(f"tool_choice cannot be {shown(choice)}", "tool_choice")
    found = []
    for i, tool in enumerate(choice["tools"]):
        if tool.get("type") == "function":
            found.append(_nested(tool, ignored))
        else:
            ignored.append(f"tool_choice.tools[{i}]")
    allowed = {"mode": choice.get("mode"), "tools": found}
    return {"type": "allowed_tools", "allowed_tools": allowed}


# ---- the chat ----


def _chat(said: ResponsesBody) -> BatchPrompt:
    chat: list[dict[str, Any]] = []
    if said.instructions is not None:
        chat.append({"role": "system", "content": said.instructions})
    if isinstance(said.input, str):
        chat.append({"role": "user", "content": said.input})
    else:
        chat += map(_turn, said.input)
    with field_errors("input"):
        return BatchPrompt(messages=joined(chat))


def _turn(item: _Item) -> dict[str, Any]:
    """Return the message that an item is, or a part of it."""
    if isinstance(item, _MessageItem):
        role = "system" if item.role == "developer" else item.role
        return {"role": role, "content": _parts(item.content)}
    if isinstance(item, _ReasoningItem):
        thinking = "".join(thought.text for thought in item.content or ())
        return {"role": "assistant", "content": "", "reasoning_content": thinking}
    if isinstance(item, _CallItem):
        function = {"name": item.name, "arguments": item.arguments}
        calls = [{"id": item.call_id, "type": "function", "function": function}]
        return {"role": "assistant", "content": "", "tool_calls": calls}
    return {"role": "tool", "tool_call_id": item.call_id, "content": _parts(item.output)}


def _parts(content: str | Sequence[Any]) -> str | list[dict[str, Any]]:
    """Return the texts of parts, joined; where there are pictures or sounds, the parts as chats have them."""
    if isinstance(content, str):
        return content
    parts = [*map(_part, content)]
    if all(part["type"] == "text" for part in parts):
        return "\n".join(part["text"] for part in parts)
    return parts


def _part(part: _Part) -> dict[str, Any]:
    if isinstance(part, _ImagePart):
        return url_part(part.image_url or "")
    if isinstance(part, _AudioPart):
        return {"type": "input_audio", "input_audio": part.input_audio}
    text = part.refusal if isinstance(part, _Refusal) else part.text
    return {"type": "text", "text": text}
