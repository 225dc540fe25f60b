"""The fields of Anthropic's requests, as a chat and options. Source: Anthropic's API reference, messages."""

from __future__ import annotations

from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from cbatch.messages import BatchPrompt
from cbatch.pictures import url_part
from cbatch.server.dialect_fields import DialectFields, mapping
from cbatch.server.http_errors import bad_request
from cbatch.server.request_fields import field_errors
from cbatch.support.checks import check_flag, shown
from cbatch.support.plain import int_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

OWN = frozenset(
    {"messages", "system", "max_tokens", "stop_sequences", "tools", "tool_choice", "thinking"}
    | {"output_config", "output_format"}
)
"""Names that this dialect reads itself."""

IGNORED = frozenset(
    {"cache_control", "metadata", "service_tier", "container", "context_management", "speed"}
    | {"inference_geo", "diagnostics", "user_profile_id", "workspace_id", "betas"}
    | {"anthropic_version"}
)
"""Names that do not change the answer."""

_ONE = "an answer is one message"
_NO_PLACE = "the format has no place for it"

REFUSED: Mapping[str, str] = {
    **dict.fromkeys(("n", "best_of"), _ONE),
    **dict.fromkeys(("logprobs", "top_logprobs", "prompt_logprobs", "n_probs", "echo"), _NO_PLACE),
    **dict.fromkeys(("max_completion_tokens", "n_predict"), "use max_tokens"),
    **dict.fromkeys(("structured_outputs", "guided_choice"), "use output_config.format"),
    "reasoning_effort": "use output_config.effort",
    "mcp_servers": "there are no server tools",
    "prefill_only": "use a max_tokens of 0",
}
"""Names that would change the answer, with what to do instead."""

BILLING = "x-anthropic-billing-header:"
"""How a line of Claude Code's system prompt begins that differs in each request, so that no prefix would be shared."""

_EFFORTS = {"low": "low", "medium": "medium", "high": "high", "xhigh": "high", "max": "high"}
"""Efforts, and what chat templates call them."""

_TOOL_KEYS = ("type", "name", "description", "input_schema")

_BLOCKS = {
    "user": ("text", "image", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
    "system": ("text",),
}
"""Types of blocks by the role that may say them."""


class Fields(DialectFields):
    """What a body asks for."""

    OWN, IGNORED, REFUSED = OWN, IGNORED, REFUSED

    def __init__(self, body: Mapping[str, Any], *, is_strict: bool, is_capped: bool) -> None:
        """Sort the fields of a body; with `is_capped` it must have `max_tokens`. Raises a `HttpProblemError`."""
        super().__init__(body, is_strict=is_strict)
        self._read_cap(is_needed=is_capped)
        if "stop_sequences" in self.given:
            self.options["stop"] = "stop_sequences", self.given["stop_sequences"]
        self._read_tools()
        self._read_template_variables()
        self._read_format()

    @property
    def prompt(self) -> BatchPrompt:
        """The chat. Raises a `HttpProblemError`."""
        chat = _system(self.given.get("system"))
        messages = self.given.get("messages")
        if messages is None:
            raise bad_request("messages is missing", "messages")
        if not isinstance(messages, list) or not messages:
            raise bad_request(
                f"messages must be a list of messages, not {shown(messages)}", "messages"
            )
        for i, message in enumerate(messages):
            chat += _messages_of(f"messages.{i}", message)
        if "tool_calls" in chat[-1]:
            raise bad_request(
                f"messages.{len(messages) - 1} calls tools and is the last: add a tool_result",
                "messages",
            )
        with field_errors("messages"):
            return BatchPrompt(messages=joined(chat))

    # ---- options ----

    def _read_cap(self, *, is_needed: bool) -> None:
        cap = self.given.get("max_tokens")
        if cap is None:
            if is_needed:
                raise bad_request("max_tokens is missing", "max_tokens")
        elif int_of(cap) == 0:
            self.options["prefill_only"] = "max_tokens", True
        else:
            self.options["max_tokens"] = "max_tokens", cap

    def _read_tools(self) -> None:
        tools = self.given.get("tools")
        if isinstance(tools, list):
            tools = [self._tool(f"tools.{i}", tool) for i, tool in enumerate(tools)]
        if tools is not None:
            self.options["tools"] = "tools", tools
        if "tool_choice" not in self.given:
            return
        choice = _object("tool_choice", self.given["tool_choice"], "tool_choice")
        kind, name = choice.get("type"), choice.get("name")
        named = {"type": "function", "function": {"name": name}}
        found = {"auto": "auto", "any": "required", "none": "none", "tool": named}
        if not isinstance(kind, str) or kind not in found:
            raise bad_request(
                f"tool_choice.type must be auto, any, tool or none, not {shown(kind)}",
                "tool_choice",
            )
        if kind == "tool" and (not isinstance(name, str) or not name):
            raise bad_request(
                f"tool_choice.name must be a tool's name, not {shown(name)}", "tool_choice"
            )
        self.options["tool_choice"] = "tool_choice", found[kind]
        is_one = choice.get("disable_parallel_tool_use")
        with field_errors("tool_choice"):
            is_one = is_one is not None and check_flag("disable_parallel_tool_use", is_one)
        if is_one:
            self.options["parallel_tool_calls"] = "tool_choice", False

    def _tool(self, place: str, tool: Any) -> dict[str, Any]:
        tool = _object(place, tool, "tools")
        if tool.get("type", "custom") != "custom":
            words = f"{place} has the type {shown(tool['type'])}: there are no tools of the server"
            raise bad_request(words, "tools", "unsupported_parameter")
        schema = mapping(f"{place}.input_schema", tool.get("input_schema"), "tools")
        said = {"name": tool.get("name"), "parameters": schema}
        if "description" in tool:
            said["description"] = tool["description"]
        self.ignored += [f"tools.{key}" for key in tool if key not in _TOOL_KEYS]
        return {"type": "function", "function": said}

    def _read_template_variables(self) -> None:
        """Read what becomes variables of the chat template; those that are given come first."""
        variables: dict[str, Any] = {}
        if "thinking" in self.given:
            thinking = _object("thinking", self.given["thinking"], "thinking")
            kind = thinking.get("type")
            if kind not in ("enabled", "disabled", "adaptive"):
                words = f"thinking.type must be enabled, disabled or adaptive, not {shown(kind)}"
                raise bad_request(words, "thinking")
            if kind != "adaptive":
                variables["enable_thinking"] = kind == "enabled"
            known = {"type"}
            if kind == "enabled":
                self._read_budget(thinking.get("budget_tokens"))
                known.add("budget_tokens")
            self.ignored += [f"thinking.{key}" for key in thinking if key not in known]
        effort = self._output.get("effort")
        if effort is not None:
            if not isinstance(effort, str) or effort not in _EFFORTS:
                words = f"output_config.effort must be one of {', '.join(_EFFORTS)}"
                raise bad_request(f"{words}, not {shown(effort)}", "output_config")
            variables["reasoning_effort"] = _EFFORTS[effort]
        if variables:
            self.add_template_variables("chat_template_kwargs", variables)

    def _read_budget(self, budget: Any) -> None:
        number = int_of(budget) or 0
        if number < 1:
            raise bad_request("thinking.budget_tokens must be a number above 0", "thinking")
        self.options["thinking_budget"] = "thinking", number

    @property
    def _output(self) -> Mapping[str, Any]:
        return _object("output_config", self.given.get("output_config", {}), "output_config")

    def _read_format(self) -> None:
        name, format = "output_config", self._output.get("format")
        if format is None:
            name, format = "output_format", self.given.get("output_format")
        if format is None:
            return
        format = _object(f"{name}.format", format, name)
        if format.get("type") != "json_schema":
            words = f"{name}: a format's type must be json_schema, not {shown(format.get('type'))}"
            raise bad_request(words, name)
        schema = mapping(f"{name}: a format's schema", format.get("schema"), name)
        self.options["json_schema"] = name, schema


def _object(place: str, value: Any, field: str) -> dict[str, Any]:
    """Return an object without nulls. Raises a `HttpProblemError`."""
    given = mapping(place, value, field)
    return {key: each for key, each in given.items() if each is not None}


# ---- messages ----


def _system(system: Any) -> list[dict[str, Any]]:
    """Return the system's message, if there is any, without what Claude Code tells of its bill."""
    if system is None:
        return []
    text = _text_of("system", system, "system", "system")
    kept = [line for line in text.splitlines(keepends=True) if not line.startswith(BILLING)]
    text = "".join(kept)
    return [{"role": "system", "content": text}] if text else []


def _messages_of(place: str, message: Any) -> list[dict[str, Any]]:
    """Return what a message is in OpenAI's form: what tools have answered is one for each."""
    message = _object(place, message, "messages")
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or role not in _BLOCKS:
        words = f"{place}.role must be user, assistant or system, not {shown(role)}"
        raise bad_request(words, "messages")
    place = f"{place}.content"
    blocks = _blocks(place, content, role, "messages")
    if role == "assistant":
        return [_assistant(blocks)]
    answers = [_tool_answer(at, block) for at, block in blocks if block["type"] == "tool_result"]
    content = _shown(blocks)
    if answers and not content:
        return answers
    return [*answers, {"role": role, "content": content}]


def _shown(blocks: Sequence[tuple[str, dict[str, Any]]]) -> str | list[dict[str, Any]]:
    """Return the texts of blocks, joined; where there are pictures, the parts in OpenAI's form."""
    parts: list[dict[str, Any]] = []
    for at, block in blocks:
        if block["type"] == "image":
            parts.append(_picture(at, block))
        elif block["type"] == "text" and (text := _string(at, block, "text")):
            parts.append({"type": "text", "text": text})
    if any(part["type"] == "image_url" for part in parts):
        return parts
    return "\n".join(part["text"] for part in parts)


def _picture(place: str, block: Mapping[str, Any]) -> dict[str, Any]:
    source = _object(f"{place}.source", block.get("source"), "messages")
    if source.get("type") != "base64":
        raise bad_request(
            f"{place}.source.type must be 'base64', not {shown(source.get('type'))}: no picture is fetched",
            "messages",
        )
    kind = _string(f"{place}.source", source, "media_type", is_filled=True)
    data = _string(f"{place}.source", source, "data", is_filled=True)
    return url_part(f"data:{kind};base64,{data}")


def _assistant(blocks: Sequence[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    """Return what the assistant has said: its text as it wrote it, thinking and calls beside it."""
    kinds: dict[str, list[Any]] = {"text": [], "thinking": [], "tool_use": []}
    for place, block in blocks:
        kind = block["type"]
        if kind == "tool_use":
            kinds[kind].append(_call(place, block))
        elif kind != "redacted_thinking":
            kinds[kind].append(_string(place, block, kind))
    text, calls = "".join(kinds["text"]), kinds["tool_use"]
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if thinking := "".join(kinds["thinking"]):
        message["reasoning_content"] = thinking
    if calls:
        message |= {"content": text or None, "tool_calls": calls}
    return message


def _call(place: str, block: Mapping[str, Any]) -> dict[str, Any]:
    arguments = mapping(f"{place}.input", block.get("input"), "messages")
    function = {"name": _string(place, block, "name", is_filled=True), "arguments": arguments}
    id = _string(place, block, "id", is_filled=True)
    return {"id": id, "type": "function", "function": function}


def _tool_answer(place: str, block: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a tool has answered; a failure is marked in its text, as templates have no place for it."""
    id = _string(place, block, "tool_use_id", is_filled=True)
    text = _text_of(f"{place}.content", block.get("content", ""), "system", "messages")
    with field_errors("messages"):
        is_error = check_flag(f"{place}.is_error", block.get("is_error", False))
    return {
        "role": "tool",
        "tool_call_id": id,
        "content": f"Error: {text}" if is_error else text,
    }


def _text_of(place: str, content: Any, role: str, field: str) -> str:
    """Return the text of what may have text alone, a line for each block."""
    blocks = _blocks(place, content, role, field)
    return "\n".join(filter(None, (_string(at, block, "text", field) for at, block in blocks)))


def _blocks(place: str, content: Any, role: str, field: str) -> list[tuple[str, dict[str, Any]]]:
    """Return the blocks of a content, each with its place. Raises a `HttpProblemError`."""
    if isinstance(content, str):
        return [(place, {"type": "text", "text": content})]
    if not isinstance(content, list):
        raise bad_request(
            f"{place} must be a string or a list of blocks, not {shown(content)}", field
        )
    found = []
    for i, each in enumerate(content):
        at = f"{place}.{i}"
        block = _object(at, each, field)
        if block.get("type") not in _BLOCKS[role]:
            words = f"{at} has the type {shown(block.get('type'))}: here it can be {' or '.join(_BLOCKS[role])}"
            raise bad_request(words, field, "unsupported_parameter")
        found.append((at, block))
    return found


def _string(
    place: str,
    block: Mapping[str, Any],
    key: str,
    field: str = "messages",
    *,
    is_filled: bool = False,
) -> str:
    value = block.get(key)
    if not isinstance(value, str) or (is_filled and not value):
        raise bad_request(f"{place}.{key} must be a string, not {shown(value)}", field)
    return value


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
