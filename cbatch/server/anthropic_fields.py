"""The fields of Anthropic's requests, as a chat and options. Source: Anthropic's API reference, messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from cbatch.messages import BatchPrompt
from cbatch.pictures import url_part
from cbatch.server.http_errors import bad_request
from cbatch.server.request_fields import Dialect, Options, RequestFields, asked_of, field_errors
from cbatch.server.typed_bodies import Filled, read_body, unknown_in
from cbatch.support.checks import shown
from cbatch.support.plain import int_of

BILLING = "x-anthropic-billing-header:"
"""How a line of Claude Code's system prompt begins that differs in each request, so that no prefix would be shared."""

_EFFORTS = {"low": "low", "medium": "medium", "high": "high", "xhigh": "high", "max": "high"}
"""Efforts, and what chat templates call them."""


class _TextBlock(Struct, tag="text"):
    text: str


class _TextAlone(Struct):
    type: Literal["text"]
    text: str


class _PictureSource(Struct):
    type: Annotated[Literal["base64"], Meta(description="base64 (no picture is fetched)")]
    media_type: Filled
    data: Filled


class _ImageBlock(Struct, tag="image"):
    source: _PictureSource


class _ThinkingBlock(Struct, tag="thinking"):
    thinking: str


class _RedactedBlock(Struct, tag="redacted_thinking"):
    pass


class _ToolUse(Struct, tag="tool_use"):
    id: Filled
    name: Filled
    input: dict[str, Any]


class _ToolResult(Struct, tag="tool_result"):
    tool_use_id: Filled
    content: str | list[_TextAlone] | None = None
    is_error: bool | None = None


class _System(Struct, tag_field="role", tag="system"):
    content: str | list[_TextAlone]


class _User(Struct, tag_field="role", tag="user"):
    content: str | list[_TextBlock | _ImageBlock | _ToolResult]


class _Assistant(Struct, tag_field="role", tag="assistant"):
    content: str | list[_TextBlock | _ThinkingBlock | _RedactedBlock | _ToolUse]


_CUSTOM = Meta(description="custom (the server has no tools of its own)")


class _Tool(Struct):
    input_schema: dict[str, Any]
    type: Annotated[Literal["custom"], _CUSTOM] | None = None
    name: Any = None
    description: Any = None


class _ToolChoice(Struct):
    type: Literal["auto", "any", "tool", "none"]
    name: Any = None
    disable_parallel_tool_use: bool | None = None

    def __post_init__(self) -> None:
        if self.type == "tool" and not (isinstance(self.name, str) and self.name):
            words = "must name the tool to call: tool_choice.name is"
            raise ValueError(f"{words} {shown(self.name)}")


class _Enabled(Struct, tag="enabled"):
    budget_tokens: Annotated[int, Meta(ge=1)]


class _Disabled(Struct, tag="disabled"):
    pass


class _Adaptive(Struct, tag="adaptive"):
    pass


class _Format(Struct):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class _OutputConfig(Struct):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: _Format | None = None


class MessagesBody(Struct):
    """A request, but for options by names of their own."""

    messages: Annotated[list[_System | _User | _Assistant], Meta(min_length=1)]
    system: str | list[_TextAlone] | None = None
    max_tokens: Any = None
    stop_sequences: Any = None
    tools: list[_Tool] | None = None
    tool_choice: _ToolChoice | None = None
    thinking: _Enabled | _Disabled | _Adaptive | None = None
    output_config: _OutputConfig | None = None
    output_format: _Format | None = None


DIALECT = Dialect(
    own=MessagesBody.__struct_fields__,
    ignored=frozenset(
        {"cache_control", "metadata", "service_tier", "container", "context_management", "speed"}
        | {"inference_geo", "diagnostics", "user_profile_id", "workspace_id", "betas"}
        | {"anthropic_version"}
    ),
    refused={
        **dict.fromkeys(("n", "best_of"), "a request has one answer"),
        **dict.fromkeys(
            ("logprobs", "top_logprobs", "prompt_logprobs", "choice_probs", "n_probs", "echo"),
            "Anthropic's format has no place for it",
        ),
        **dict.fromkeys(("max_completion_tokens", "n_predict"), "use max_tokens"),
        "structured_outputs": "use output_config.format",
        "reasoning_effort": "use output_config.effort",
        "mcp_servers": "the server has no tools of its own",
        "prefill_only": "use a max_tokens of 0",
    },
    is_openai=False,
)


def read_messages(
    body: Mapping[str, Any], *, is_strict: bool, is_capped: bool
) -> tuple[RequestFields, BatchPrompt]:
    """Return fields and chat of a body, which if `is_capped` must have `max_tokens`. Raises a `HttpProblemError`."""
    if is_capped and body.get("max_tokens") is None:
        raise bad_request("max_tokens is missing", "max_tokens")
    config = body.get("output_config")
    if isinstance(config, dict) and config.get("format") is not None:
        body = {**body, "output_format": None}  # the older name of the same
    said = read_body(MessagesBody, body, has_dots=True)
    ignored = [
        f"tools.{name}" for tool in body.get("tools") or () for name in unknown_in(tool, _Tool)
    ]
    if said.thinking is not None:
        ignored += [f"thinking.{name}" for name in unknown_in(body["thinking"], said.thinking)]
    options, variables = _options(said), _variables(said)
    asked = asked_of(
        body, DIALECT, options, variables=variables, ignored=ignored, is_strict=is_strict
    )
    return asked, _chat(said)


# ---- options ----


def _options(said: MessagesBody) -> Options:
    found: Options = {}
    if int_of(said.max_tokens) == 0:
        found["prefill_only"] = "max_tokens", True
    elif said.max_tokens is not None:
        found["max_tokens"] = "max_tokens", said.max_tokens
    if said.stop_sequences is not None:
        found["stop"] = "stop_sequences", said.stop_sequences
    if said.tools is not None:
        found["tools"] = "tools", [*map(_tool, said.tools)]
    if (choice := said.tool_choice) is not None:
        named = {"type": "function", "function": {"name": choice.name}}
        words: dict[str, Any] = {"any": "required", "tool": named}
        found["tool_choice"] = "tool_choice", words.get(choice.type, choice.type)
        if choice.disable_parallel_tool_use:
            found["parallel_tool_calls"] = "tool_choice", False
    if isinstance(said.thinking, _Enabled):
        found["thinking_budget"] = "thinking", said.thinking.budget_tokens
    if said.output_config is not None and said.output_config.format is not None:
        found["json_schema"] = "output_config", said.output_config.format.schema
    elif said.output_format is not None:
        found["json_schema"] = "output_format", said.output_format.schema
    return found


def _tool(tool: _Tool) -> dict[str, Any]:
    function = {"name": tool.name, "parameters": tool.input_schema}
    if tool.description is not None:
        function["description"] = tool.description
    return {"type": "function", "function": function}


def _variables(said: MessagesBody) -> tuple[str, dict[str, Any]]:
    variables: dict[str, Any] = {}
    if isinstance(said.thinking, _Enabled | _Disabled):
        variables["enable_thinking"] = isinstance(said.thinking, _Enabled)
    if said.output_config is not None and said.output_config.effort is not None:
        variables["reasoning_effort"] = _EFFORTS[said.output_config.effort]
    return "chat_template_kwargs", variables


# ---- the chat ----


def _chat(said: MessagesBody) -> BatchPrompt:
    lines = _text_of(said.system or "").splitlines(keepends=True)
    system = "".join(line for line in lines if not line.startswith(BILLING))
    chat: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    for message in said.messages:
        chat += _messages_of(message)
    if "tool_calls" in chat[-1]:
        place = f"messages.{len(said.messages) - 1}"
        raise bad_request(f"{place} calls tools and is the last: add a tool_result", "messages")
    with field_errors("messages"):
        return BatchPrompt(messages=joined(chat))


def _messages_of(message: _System | _User | _Assistant) -> list[dict[str, Any]]:
    """Return what a message is in OpenAI's form: what tools have answered is one for each."""
    blocks = _blocks(message.content)
    if isinstance(message, _Assistant):
        return [_assistant(blocks)]
    answers = [_tool_answer(block) for block in blocks if isinstance(block, _ToolResult)]
    content = _shown(blocks)
    if answers and not content:
        return answers
    role = "user" if isinstance(message, _User) else "system"
    return [*answers, {"role": role, "content": content}]


def _blocks(content: str | Sequence[Any]) -> Sequence[Any]:
    return [_TextBlock(content)] if isinstance(content, str) else content


def _text_of(content: str | Sequence[_TextBlock | _TextAlone]) -> str:
    """Return the text of what may have text alone, a line for each block."""
    return "\n".join(filter(None, (block.text for block in _blocks(content))))


def _shown(blocks: Sequence[Any]) -> str | list[dict[str, Any]]:
    """Return the texts of blocks, joined; where there are pictures, the parts in OpenAI's form."""
    shown = [block for block in blocks if not isinstance(block, _ToolResult)]
    if not any(isinstance(block, _ImageBlock) for block in shown):
        return _text_of(shown)
    return [_part(block) for block in shown if isinstance(block, _ImageBlock) or block.text]


def _part(block: _TextBlock | _ImageBlock) -> dict[str, Any]:
    if isinstance(block, _ImageBlock):
        return url_part(f"data:{block.source.media_type};base64,{block.source.data}")
    return {"type": "text", "text": block.text}


def _assistant(blocks: Sequence[Any]) -> dict[str, Any]:
    """Return what the assistant has said: its text as it wrote it, thinking and calls beside it."""
    text = "".join(block.text for block in blocks if isinstance(block, _TextBlock))
    thinking = "".join(block.thinking for block in blocks if isinstance(block, _ThinkingBlock))
    calls = [_call(block) for block in blocks if isinstance(block, _ToolUse)]
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if thinking:
        message["reasoning_content"] = thinking
    if calls:
        message |= {"content": text or None, "tool_calls": calls}
    return message


def _call(block: _ToolUse) -> dict[str, Any]:
    function = {"name": block.name, "arguments": block.input}
    return {"id": block.id, "type": "function", "function": function}


def _tool_answer(block: _ToolResult) -> dict[str, Any]:
    """Return what a tool has answered; a failure is marked in its text, as templates have no place for it."""
    text = _text_of(block.content or "")
    content = f"Error: {text}" if block.is_error else text
    return {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}


def joined(chat: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a chat in which messages of one role that follow each other are one; answers of tools stay apart."""
    joined: list[dict[str, Any]] = []
    for role, run in groupby(chat, key=itemgetter("role")):
        messages = [*run]
        is_one = role != "tool" and len(messages) > 1
        joined += [_one_of(messages)] if is_one else messages
    return joined


def _parts(contents: Sequence[str | list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return contents one after another, as parts."""
    texts = ([{"type": "text", "text": c}] if isinstance(c, str) else c for c in contents)
    return [part for parts in texts for part in parts]


def _one_of(messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return messages as one. Their texts are joined at once, so that the time grows with their length only."""
    one: dict[str, Any] = {}
    for message in messages:
        one.update(message)
    for key in ("content", "reasoning_content"):
        if key in one:
            given = [*filter(None, (message.get(key) for message in messages))]
            one[key] = "\n".join(given) if all(isinstance(t, str) for t in given) else _parts(given)
    if calls := [call for message in messages for call in message.get("tool_calls", ())]:
        one["tool_calls"] = calls
    return one
