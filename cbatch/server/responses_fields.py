"""The fields of OpenAI's Responses, as a chat and options. Source: OpenAI's API reference, responses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cbatch.messages import BatchPrompt
from cbatch.pictures import url_part
from cbatch.server.anthropic_fields import joined
from cbatch.server.dialect_fields import DialectFields, mapping
from cbatch.server.http_errors import bad_request, refused
from cbatch.server.request_fields import MAX_TOKENS, field_errors
from cbatch.support.checks import shown

if TYPE_CHECKING:
    from collections.abc import Mapping

OWN = frozenset(
    {"input", "instructions", "max_output_tokens", "tools", "tool_choice", "text", "reasoning"}
    | {"include", "top_logprobs"}
)
IGNORED = frozenset(
    {"store", "metadata", "user", "service_tier", "prompt_cache_key", "prompt_cache_retention"}
    | {
        "prompt_cache_options",
        "safety_identifier",
        "truncation",
        "max_tool_calls",
        "stream_options",
    }
)
_STATELESS = "responses are not kept: send the whole conversation as input"
REFUSED: Mapping[str, str] = {
    "previous_response_id": _STATELESS,
    "conversation": _STATELESS,
    "prompt": "write it into instructions",
    "n": "a response is one answer",
    "best_of": "a response is one answer",
    "logprobs": "use include and top_logprobs",
    "reasoning_effort": "use reasoning.effort",
    **dict.fromkeys(MAX_TOKENS, "use max_output_tokens"),
}
LOGPROBS = "message.output_text.logprobs"
_FUNCTION = dict.fromkeys(("description", "parameters", "strict"))
"""What a response says of a function where the request says nothing."""
_TEXTS = ("input_text", "output_text", "text", "refusal")


class ResponsesFields(DialectFields):
    """What a body asks for."""

    OWN, IGNORED, REFUSED = OWN, IGNORED, REFUSED

    def __init__(self, body: Mapping[str, Any], *, is_strict: bool) -> None:
        """Sort the fields of a body. Raises a `HttpProblemError`."""
        super().__init__(body, is_strict=is_strict)
        if "max_output_tokens" in self.given:
            self.options["max_tokens"] = "max_output_tokens", self.given["max_output_tokens"]
        self._read_tools()
        self._read_text()
        self._read_reasoning()
        self._read_include()

    def sort(self, name: str, value: Any) -> None:
        """Sort one field. Raises a `HttpProblemError` where it is refused."""
        if name != "background":
            super().sort(name, value)
        elif value is not False:
            raise refused(name, "answers are not computed in the background")

    @property
    def prompt(self) -> BatchPrompt:
        """The chat. Raises a `HttpProblemError`."""
        chat: list[dict[str, Any]] = []
        instructions, said = self.given.get("instructions"), self.given.get("input")
        if instructions is not None:
            text = _string("instructions", instructions, "instructions")
            chat.append({"role": "system", "content": text})
        if isinstance(said, str):
            chat.append({"role": "user", "content": said})
        elif isinstance(said, list) and said:
            chat += [_item(f"input[{i}]", item) for i, item in enumerate(said)]
        else:
            raise bad_request(
                f"input must be a string or a list of items, not {shown(said)}", "input"
            )
        with field_errors("input"):
            return BatchPrompt(messages=joined(chat))

    @property
    def said(self) -> dict[str, Any]:
        """What a response repeats of its request."""
        given = self.given
        text, reasoning = given.get("text", {}), given.get("reasoning", {})
        return {
            "instructions": given.get("instructions"),
            "max_output_tokens": given.get("max_output_tokens"),
            "max_tool_calls": given.get("max_tool_calls"),
            "metadata": given.get("metadata", {}),
            "parallel_tool_calls": given.get("parallel_tool_calls", True),
            "prompt_cache_key": given.get("prompt_cache_key"),
            "reasoning": {"effort": reasoning.get("effort"), "summary": None},
            "safety_identifier": given.get("safety_identifier"),
            "text": {"format": text.get("format") or {"type": "text"}},
            "tool_choice": given.get("tool_choice", "auto"),
            "tools": [
                {**_FUNCTION, **tool} if tool.get("type") == "function" else tool
                for tool in given.get("tools", ())
            ],
            "top_logprobs": given.get("top_logprobs", 0),
            "truncation": given.get("truncation", "disabled"),
            "user": given.get("user"),
        }

    # ---- options ----

    def _read_tools(self) -> None:
        tools = self.given.get("tools")
        if tools is not None and not isinstance(tools, list):
            raise bad_request(f"tools must be a list, not {shown(tools)}", "tools")
        found = []
        for i, tool in enumerate(tools or ()):
            tool = mapping(f"tools[{i}]", tool, "tools")
            if tool.get("type") != "function":
                self.ignored.append(f"tools[{i}]")
                continue
            keys = ("name", "description", "parameters")
            self.ignored += [f"tools.{key}" for key in tool if key not in ("type", *keys)]
            said = {key: tool[key] for key in keys if tool.get(key) is not None}
            found.append({"type": "function", "function": said})
        if found:
            self.options["tools"] = "tools", found
        choice = self.given.get("tool_choice")
        if isinstance(choice, dict):
            choice = self._nested(choice)
        if choice is not None:
            self.options["tool_choice"] = "tool_choice", choice

    def _nested(self, choice: dict[str, Any]) -> dict[str, Any]:
        """Return a tool choice in the form of chats; allowed tools that are no functions are ignored by name."""
        if choice.get("type") == "function":
            return {"type": "function", "function": {"name": choice.get("name")}}
        tools = choice.get("tools")
        if choice.get("type") != "allowed_tools" or not isinstance(tools, list):
            raise bad_request(f"tool_choice cannot be {shown(choice)}", "tool_choice")
        found = []
        for i, tool in enumerate(tools):
            tool = mapping(f"tool_choice.tools[{i}]", tool, "tool_choice")
            if tool.get("type") == "function":
                found.append(self._nested(tool))
            else:
                self.ignored.append(f"tool_choice.tools[{i}]")
        return {
            "type": "allowed_tools",
            "allowed_tools": {"mode": choice.get("mode"), "tools": found},
        }

    def _read_text(self) -> None:
        text = mapping("text", self.given.get("text", {}), "text")
        self.ignored += [f"text.{key}" for key in text if key != "format"]
        if (format := text.get("format")) is None:
            return
        format = dict(mapping("text.format", format, "text"))
        if format.get("type") == "json_schema":
            format.pop("type")
            inner = {key: value for key, value in format.items() if value is not None}
            format = {"type": "json_schema", "json_schema": inner}
        self.options["response_format"] = "text", format

    def _read_reasoning(self) -> None:
        reasoning = mapping("reasoning", self.given.get("reasoning", {}), "reasoning")
        self.ignored += [f"reasoning.{key}" for key in reasoning if key != "effort"]
        if (effort := reasoning.get("effort")) is None:
            return
        text = _string("reasoning.effort", effort, "reasoning")
        said = {"enable_thinking": False} if text == "none" else {"reasoning_effort": text}
        self.add_template_variables("reasoning", said)

    def _read_include(self) -> None:
        include = self.given.get("include", [])
        if not isinstance(include, list) or not all(isinstance(name, str) for name in include):
            raise bad_request(f"include must be a list of names, not {shown(include)}", "include")
        self.ignored += [f"include.{name}" for name in include if name != LOGPROBS]
        if LOGPROBS in include:
            self.options["logprobs"] = "include", True
        if "top_logprobs" in self.given:
            if LOGPROBS in include:
                self.options["top_logprobs"] = "top_logprobs", self.given["top_logprobs"]
            else:
                self.ignored.append("top_logprobs")


def _string(place: str, value: Any, field: str, *, is_filled: bool = False) -> str:
    if not isinstance(value, str) or (is_filled and not value):
        raise bad_request(f"{place} must be a string, not {shown(value)}", field)
    return value


# ---- items ----


def _item(place: str, item: Any) -> dict[str, Any]:
    """Return the message that an item is, or a part of it."""
    item = mapping(place, item, "input")
    kind = item.get("type") or "message"
    if kind == "message":
        role = item.get("role")
        if role not in ("user", "assistant", "system", "developer"):
            words = f"{place}.role must be user, assistant, system or developer, not {shown(role)}"
            raise bad_request(words, "input")
        content = _content(f"{place}.content", item.get("content"))
        return {"role": "system" if role == "developer" else role, "content": content}
    if kind == "reasoning":
        parts = item.get("content") or []
        if not isinstance(parts, list):
            raise bad_request(f"{place}.content must be a list, not {shown(parts)}", "input")
        texts = [
            _part(f"{place}.content[{i}]", p, ("reasoning_text",)) for i, p in enumerate(parts)
        ]
        return {"role": "assistant", "content": "", "reasoning_content": "".join(texts)}
    if kind == "function_call":
        function = {
            "name": _string(f"{place}.name", item.get("name"), "input", is_filled=True),
            "arguments": _string(f"{place}.arguments", item.get("arguments"), "input"),
        }
        id = _string(f"{place}.call_id", item.get("call_id"), "input", is_filled=True)
        calls = [{"id": id, "type": "function", "function": function}]
        return {"role": "assistant", "content": "", "tool_calls": calls}
    if kind == "function_call_output":
        id = _string(f"{place}.call_id", item.get("call_id"), "input", is_filled=True)
        output = _content(f"{place}.output", item.get("output"))
        return {"role": "tool", "tool_call_id": id, "content": output}
    raise bad_request(f"{place} has the type {shown(kind)}, which is unknown", "input")


def _content(place: str, content: Any) -> str | list[dict[str, Any]]:
    """Return the texts of parts, joined; where there are pictures or sounds, the parts as chats have them."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad_request(
            f"{place} must be a string or a list of parts, not {shown(content)}", "input"
        )
    parts = [
        _medium(f"{place}[{i}]", part)
        if isinstance(part, dict) and part.get("type") in ("input_image", "input_audio")
        else {"type": "text", "text": _part(f"{place}[{i}]", part, _TEXTS)}
        for i, part in enumerate(content)
    ]
    if all(part["type"] == "text" for part in parts):
        return "\n".join(part["text"] for part in parts)
    return parts


def _medium(place: str, part: Mapping[str, Any]) -> dict[str, Any]:
    """Return a picture or a sound; what chats have is the same for sounds."""
    if part["type"] == "input_audio":
        return {"type": "input_audio", "input_audio": part.get("input_audio")}
    if part.get("image_url") is None:
        raise bad_request(f"{place} has no image_url: files are not kept as pictures", "input")
    return url_part(_string(f"{place}.image_url", part["image_url"], "input", is_filled=True))


def _part(place: str, part: Any, kinds: tuple[str, ...]) -> str:
    part = mapping(place, part, "input")
    kind = part.get("type")
    if kind not in kinds:
        raise bad_request(
            f"{place} has the type {shown(kind)}: it can be {' or '.join(kinds)}", "input"
        )
    key = "refusal" if kind == "refusal" else "text"
    return _string(f"{place}.{key}", part.get(key), "input")
