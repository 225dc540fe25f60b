"""Tools as OpenAI's API has them: definitions, choices and calls, checked.

A check raises `ConfigError`, which names the value and says what it may be.
"""

from __future__ import annotations

import hashlib
import json
import re
import string
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

from cbatch.errors import ConfigError
from cbatch.support.checks import check_depth, parsed, shown
from cbatch.support.plain import list_of, plain, plain_for_json, text_of
from cbatch.support.schemas import OPENS, closed, tool_of_function

Tool: TypeAlias = Mapping[str, Any]
ToolFunction: TypeAlias = Callable[..., Any]
ToolChoice: TypeAlias = str | Mapping[str, Any]

TEMPLATE_NAMES = frozenset(
    {"messages", "tools", "tool_choice", "functions", "function_call", "add_generation_prompt"}
    | {"bos_token", "eos_token", "raise_exception", "strftime_now"}
)
"""Variables that cbatch itself gives a chat template. Source: llama_cpp/llama_chat_format.py, Jinja2ChatFormatter."""

_OPENS = OPENS | {"not"}
"""Keys of a schema beside which a function's arguments are left as they are."""

_NAME = re.compile(r"[\w.:/-]{1,128}")
_CHOICES = {name: name for name in ("none", "auto", "required")} | {"any": "required"}
"""Tool choices that name no function, and what each is called here. Source of "any": Mistral's API, vLLM, LangChain."""
_MODES = ("auto", "required")
"""Modes of a choice of type "allowed_tools". Source: OpenAI's API reference, chat completions, `tool_choice`."""
MAX_TOOLS = 1024
"""Most functions that one request may offer. OpenAI takes 128; some work is done for each pair of functions."""

_ID_CHARACTERS = string.ascii_letters + string.digits


class Tools(tuple[Tool, ...]):
    """Checked tool definitions: plain JSON values, a copy of the caller's."""

    @cached_property
    def functions(self) -> Mapping[str, Mapping[str, Any]]:
        """The functions by their names."""
        return {tool["function"]["name"]: tool["function"] for tool in self}

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The functions' names."""
        return tuple(self.functions)

    def parameters(self, name: str) -> Mapping[str, Any]:
        """Return the JSON schema of a function's arguments; empty if the definition has none."""
        return self.functions.get(name, {}).get("parameters") or {}


class TemplateKwargs(dict[str, Any]):
    """Checked variables for the chat template: plain JSON values."""


def check_tools(value: object) -> Tools | None:
    """Return OpenAI's list of tools, or Python functions, as checked definitions; an empty list means no tools."""
    if value is None or isinstance(value, Tools):
        return value
    items = list_of(value)
    if items is None:
        raise ConfigError(
            f'tools must be a list of {{"type": "function", "function": {{…}}}}, not {shown(value)}'
        )
    if len(items) > MAX_TOOLS:
        raise ConfigError(f"tools has {len(items)} tools; at most {MAX_TOOLS} are allowed")
    check_depth("tools", items)
    tools: dict[str, Tool] = {}
    for i, given in enumerate(items):
        tool = _tool(f"tools[{i}]", given)
        if (name := tool["function"]["name"]) in tools:
            raise ConfigError(f"tools has two functions named {name!r}: names must be unique")
        tools[name] = tool
    return Tools(tools.values())


def _tool(place: str, given: object) -> Tool:
    tool = tool_of_function(place, given) if callable(given) else plain(given)
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(tool, dict) or tool.get("type") != "function":
        raise ConfigError(f'{place} must be {{"type": "function", "function": {{…}}}}')
    if not isinstance(function, dict):
        raise ConfigError(f"{place} needs function, a mapping with name and parameters")
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigError(
            f"{place} has the name {shown(name)}: a name has 1 … 128 letters, digits and _ - . : /"
        )
    if not isinstance(function.get("description"), str | None):
        raise ConfigError(f"{place} ({name}): description must be a string")
    if not isinstance(parameters, dict | None):
        raise ConfigError(f"{place} ({name}): parameters must be a JSON schema, a mapping")
    settled: Tool = _as_json(f"{place} ({name})", tool)
    if function.get("strict") is True and parameters is not None:
        inner = settled["function"]
        settled = {**settled, "function": {**inner, "parameters": closed(inner["parameters"])}}
    return settled


def check_tool_choice(value: object) -> ToolChoice | None:
    """Return a tool choice: "none", "auto", "required" (or "any"), one function by name, or the functions allowed."""
    check_depth("tool_choice", value)
    choice = plain(value)
    if choice is None:
        return None
    if isinstance(choice, str) and choice in _CHOICES:
        return _CHOICES[choice]
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        return _allowed(choice.get("allowed_tools"))
    if (called := _function_name(choice)) is not None:
        return _named(called)
    raise ConfigError(
        f"tool_choice must be one of {', '.join(_CHOICES)}, or "
        f'{{"type": "function", "function": {{"name": …}}}}, or {{"type": "allowed_tools", …}}, not {shown(value)}'
    )


def _function_name(choice: object) -> str | None:
    """Return the name in `{"type": "function", "function": {"name": …}}`; None for anything else."""
    if not isinstance(choice, dict) or choice.get("type") != "function":
        return None
    function = choice.get("function")
    called = function.get("name") if isinstance(function, dict) else None
    return called if isinstance(called, str) and called else None


def _named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def _allowed(value: object) -> ToolChoice:
    """Return a choice of type "allowed_tools" by its inner object."""
    mode, tools = (
        (value.get("mode"), value.get("tools")) if isinstance(value, dict) else (None,) * 2
    )
    names = [_function_name(tool) for tool in tools] if isinstance(tools, list) else []
    if mode not in _MODES or not names or None in names:
        raise ConfigError(
            'tool_choice of type "allowed_tools" needs {"allowed_tools": {"mode": "auto" or "required", "tools": '
            f'[{{"type": "function", "function": {{"name": …}}}}, …]}}}}, not {shown(value)}'
        )
    listed = [_named(str(name)) for name in dict.fromkeys(names)]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": listed}}


class Choice(NamedTuple):
    """What a checked tool choice asks for."""

    mode: str
    """`none`, `auto`, or `required` for an answer that must call a function."""
    names: tuple[str, ...] | None = None
    """The only functions that may be called; None for all."""
    is_one: bool = False
    """Whether it names the one function to call."""


def read_choice(choice: ToolChoice | None) -> Choice:
    """Return what a checked choice asks for."""
    if not isinstance(choice, Mapping):
        return Choice(choice or "auto")
    if choice["type"] == "function":
        return Choice("required", (choice["function"]["name"],), is_one=True)
    allowed = choice["allowed_tools"]
    return Choice(allowed["mode"], tuple(tool["function"]["name"] for tool in allowed["tools"]))


def template_choice(choice: ToolChoice | None) -> ToolChoice:
    """Return a choice as chat templates know it; for "allowed_tools", which alone are offered, this is the mode."""
    asked = read_choice(choice)
    return choice if asked.is_one and choice is not None else asked.mode


def check_calls(place: str, role: str, value: object) -> list[dict[str, Any]]:
    """Return a message's `tool_calls`, which are plain values, with arguments as mappings; empty if there are none.

    Errors name the message by its place. Arguments may be JSON text, as in OpenAI's API, or mappings.
    """
    if not value:
        return []
    if role != "assistant":
        raise ConfigError(f"{place} has tool_calls: only the assistant calls tools, not {role!r}")
    if not isinstance(value, list):
        raise ConfigError(f"{place} tool_calls must be a list of calls, not {shown(value)}")
    return [_message_call(f"{place} tool_calls[{i}]", call) for i, call in enumerate(value)]


def _message_call(place: str, call: object) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict):
        raise ConfigError(f"{place} must have a function with name and arguments")
    if call.get("type", "function") != "function":
        raise ConfigError(
            f"{place} has the type {shown(call['type'])}: only functions are supported"
        )
    name, id = function.get("name"), call.get("id")
    if not isinstance(name, str) or not name:
        raise ConfigError(f"{place} needs a name, a non-empty string")
    if id is not None and (not isinstance(id, str) or not id):
        raise ConfigError(f"{place} id must be a non-empty string, not {shown(id)}")
    arguments = _arguments(f"{place} ({name}) arguments", function.get("arguments"))
    settled = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return {"id": id, **settled} if id else settled


def _arguments(place: str, value: object) -> dict[str, Any]:
    if value is None or value == "":
        return {}
    if isinstance(value, str):
        value = parsed(place, value)
    if not isinstance(value, Mapping):
        raise ConfigError(f"{place} must be an object, not {shown(value)}")
    settled: dict[str, Any] = _as_json(place, value)
    return settled


def check_template_kwargs(value: object) -> TemplateKwargs | None:
    """Return variables for the chat template: a mapping of names that cbatch does not set itself to JSON values."""
    if value is None or isinstance(value, TemplateKwargs):
        return value
    if not isinstance(value, Mapping):
        raise ConfigError(f"chat_template_kwargs must be a mapping of names, not {shown(value)}")
    check_depth("chat_template_kwargs", value)
    for key in value:
        name = text_of(key)
        if name is None or not name.isidentifier():
            raise ConfigError(
                f"chat_template_kwargs has {shown(key)}, which is not a valid variable name"
            )
        if name in TEMPLATE_NAMES:
            raise ConfigError(
                f"chat_template_kwargs must not have {name!r}: cbatch sets this variable itself"
            )
    return TemplateKwargs(_as_json("chat_template_kwargs", plain(value)))


def _as_json(name: str, value: object) -> Any:
    """Return a copy of `value` as plain JSON values; its depth must have been checked."""
    try:
        return json.loads(json.dumps(value, allow_nan=False, default=plain_for_json))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{name} is not JSON: {error}") from None


def offered(tools: Tools | None, choice: ToolChoice | None) -> Tools:
    """Return the tools that the prompt of a request shows to the model.

    Raises:
        ConfigError: the choice needs tools and there are none, or it names an unknown tool.
    """
    tools, asked = tools or Tools(), read_choice(choice)
    if asked.mode == "none":
        return Tools()
    if asked == Choice("auto"):
        return tools
    if not tools:
        raise ConfigError(f"tool_choice={choice!r} needs tools")
    for name in asked.names or ():
        if name not in tools.functions:
            known = ", ".join(tools.names)
            raise ConfigError(f"tool_choice names {name!r}, which is not among the tools: {known}")
    return tools if asked.is_one else _listed(tools, asked.names)


def demanded(tools: Tools, choice: ToolChoice | None) -> Tools:
    """Return the offered tools of which the answer must call one; none if calls are optional."""
    asked = read_choice(choice)
    return _listed(tools, asked.names) if asked.mode == "required" else Tools()


def _listed(tools: Tools, names: tuple[str, ...] | None) -> Tools:
    """Return the tools with these names; all for None."""
    if names is None:
        return tools
    listed = frozenset(names)
    return Tools(tool for tool in tools if tool["function"]["name"] in listed)


def arguments_schema(name: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the JSON schema of a call's arguments: an object with nothing but the properties of `parameters`.

    Raises:
        ConfigError: `parameters`, the schema of the function `name`, is not the schema of an object.
    """
    _check_parameters(f"tools ({name}): parameters", parameters)
    schema = {**parameters, "type": "object"}
    if parameters.keys() <= {"type"}:
        schema["properties"] = {}
    listed = schema.get("properties")
    has_all = listed is not None and set(schema.get("required", ())) <= set(listed)
    if has_all and not set(schema) & _OPENS:
        schema["additionalProperties"] = False
    return schema


def _check_parameters(place: str, schema: Mapping[str, Any]) -> None:
    """Raise the `ConfigError` of a schema in which what calls are written by is not JSON schema."""
    types, required = schema.get("type", "object"), schema.get("required", [])
    if "object" not in (types if isinstance(types, list) else [types]):
        raise ConfigError(f"{place} must have the type object, not {shown(types)}")
    if not isinstance(required, list) or not all(isinstance(key, str) for key in required):
        raise ConfigError(f"{place}.required must be a list of names, not {shown(required)}")
    properties = schema.get("properties", {})
    if not isinstance(properties, Mapping):
        raise ConfigError(f"{place}.properties must be an object, not {shown(properties)}")
    for key, inner in properties.items():
        values = inner.get("enum", [None]) if isinstance(inner, Mapping) else [None]
        if not isinstance(values, list) or not values:
            said = f"must be a list of at least one value, not {shown(values)}"
            raise ConfigError(f"{place}.properties.{key}.enum {said}")


def call_id(owner: str, number: int, i_call: int) -> str:
    """Return the id of an answer's call: nine letters and digits, the only length that Mistral's templates accept.

    It is a hash of the engine's mark, the sequence's number in the engine and the call's place in the answer.
    """
    digest = hashlib.blake2b(f"{owner}/{number}/{i_call}".encode(), digest_size=9).digest()
    return "".join(_ID_CHARACTERS[byte % len(_ID_CHARACTERS)] for byte in digest)
