"""JSON schemas of Python's own: of pydantic classes and of functions; and schemas whose objects are closed."""

from __future__ import annotations

import inspect
import re
import types
from collections.abc import Callable, Mapping
from typing import Any, Literal, Protocol, Union, get_args, get_origin, get_type_hints

from cbatch.errors import ConfigError

_PLAIN: Mapping[Any, str] = types.MappingProxyType(
    {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}
)
OPENS = frozenset({"additionalProperties", "patternProperties", "unevaluatedProperties"}) | {
    *("$ref", "anyOf", "oneOf", "allOf", "if", "dependentSchemas", "propertyNames")
}
"""Keys beside `properties` that may allow an object more."""
_ONE = ("items", "additionalProperties", "contains")
_LISTS = ("anyOf", "oneOf", "prefixItems")
_NAMED = ("properties", "patternProperties", "$defs", "definitions")
_ARGUMENT = re.compile(r"\s*(\w+)\s*(?:\([^)]*\))?:\s*(.*)")


class SchemaClass(Protocol):
    """A class that tells its JSON schema, such as pydantic's models."""

    def model_json_schema(self) -> dict[str, Any]:
        """Return the schema."""
        ...


def schema_of_class(value: object) -> dict[str, Any] | None:
    """Return the closed schema of a class that tells it, such as a pydantic model; None for any other value."""
    if not isinstance(value, type) or not callable(getattr(value, "model_json_schema", None)):
        return None
    schema: dict[str, Any] = closed(value.model_json_schema())  # type: ignore[attr-defined]
    return schema


def closed(schema: Any) -> Any:
    """Return a schema in which objects have no other properties than those listed.

    An object stays open where it lists none, where it says what others may be, and where it is combined with other
    schemas (`allOf`, `anyOf`, `$ref`, …) that may list more.
    """
    if not isinstance(schema, Mapping):
        return schema
    found = dict(schema)
    for key in _ONE:
        if key in found:
            found[key] = closed(found[key])
    for key in _LISTS:
        if isinstance(found.get(key), list):
            found[key] = [closed(inner) for inner in found[key]]
    for key in _NAMED:
        if isinstance(found.get(key), Mapping):
            found[key] = {name: closed(inner) for name, inner in found[key].items()}
    if isinstance(found.get("properties"), Mapping) and not found.keys() & OPENS:
        found["additionalProperties"] = False
    return found


def tool_of_function(place: str, function: Callable[..., Any]) -> dict[str, Any]:
    """Return the tool that a Python function is: name, docstring, and a schema of its parameters.

    Parameters have the types str, int, float, bool, Literal, list, dict and unions of these. Descriptions come from
    the docstring: its beginning, and its section "Args:".

    Raises:
        ConfigError: a parameter has no type, another type, or cannot be given by name; `place` is what errors call it.
    """
    name = getattr(function, "__name__", None)
    if name is None or isinstance(function, type):
        raise ConfigError(f"{place} must be a tool or a function, not {function!r}")
    where = f"{place}, the function {name}"
    try:
        hints = get_type_hints(function)
        parameters = inspect.signature(function).parameters.values()
    except (NameError, TypeError, ValueError) as error:
        raise ConfigError(f"{where}: its types cannot be read: {error}") from None
    text, described = _described(inspect.getdoc(function) or "")
    properties, required = dict[str, Any](), list[str]()
    for parameter in parameters:
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ConfigError(f"{where}: {parameter.name} cannot be given by name")
        if parameter.name not in hints:
            raise ConfigError(f"{where}: {parameter.name} has no type")
        schema = _schema(f"{where}: {parameter.name}", hints[parameter.name])
        if parameter.name in described:
            schema["description"] = described[parameter.name]
        if parameter.default is parameter.empty:
            required.append(parameter.name)
        properties[parameter.name] = schema
    inner = {"type": "object", "properties": properties, "required": required}
    said = {"description": text} if text else {}
    schema = {**inner, "additionalProperties": False}
    return {"type": "function", "function": {"name": name, **said, "parameters": schema}}


def _schema(where: str, hint: Any) -> dict[str, Any]:
    """Return the schema of a type; errors begin with `where`."""
    if hint in _PLAIN:
        return {"type": _PLAIN[hint]}
    origin, inner = get_origin(hint) or hint, get_args(hint)
    if origin is Literal and all(type(value) in _PLAIN for value in inner):
        return {"enum": [*inner]}
    if origin in (Union, types.UnionType):
        return {"anyOf": [_schema(where, member) for member in inner]}
    if origin is list:
        return {"type": "array", **({"items": _schema(where, inner[0])} if inner else {})}
    if origin is dict and (not inner or inner[0] is str):
        return {
            "type": "object",
            **({"additionalProperties": _schema(where, inner[1])} if inner else {}),
        }
    shown = getattr(hint, "__name__", str(hint)) if not inner else str(hint)
    raise ConfigError(
        f"{where} has the type {shown}: use str, int, float, bool, Literal, list or dict, or give the tool as a mapping"
    )


def _described(doc: str) -> tuple[str, dict[str, str]]:
    """Return the first paragraphs of a docstring, and the texts of its section "Args:"."""
    text, _, rest = doc.partition("\nArgs:\n")
    found, last = dict[str, str](), ""
    indent = len(rest) - len(rest.lstrip())
    for line in rest.splitlines():
        if line.strip() and not line.startswith(" "):
            break
        is_new = len(line) - len(line.lstrip()) == indent
        if is_new and (argument := _ARGUMENT.match(line)):
            last, found[argument[1]] = argument[1], argument[2]
        elif last and line.strip():
            found[last] += f" {line.strip()}"
    return re.split(r"\n(?:Returns|Raises|Yields|Examples?):\n", text)[0].strip(), found
