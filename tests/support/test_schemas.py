"""Schemas of pydantic classes and functions, and closed objects."""

from __future__ import annotations

import json
from functools import partial
from typing import Any, Literal

import pydantic
import pytest

from cbatch import ConfigError, RunOptions
from cbatch.support.schemas import closed, tool_of_function

NOWHERE: list[float] = []
STRING = {"type": "string"}


class Inner(pydantic.BaseModel):
    """A part."""

    at: int


class Outer(pydantic.BaseModel):
    """The whole."""

    name: str
    parts: list[Inner]
    more: dict[str, int] = {}


class Loose(pydantic.BaseModel, extra="allow"):
    """Takes anything."""

    name: str


def schema_in(options: RunOptions) -> Any:
    assert options.structure is not None
    return json.loads(options.structure.text)


@pytest.mark.parametrize("name", ["json_schema", "response_format"])
def test_pydantic_class_is_its_schema_with_closed_objects(name: str) -> None:
    schema = schema_in(RunOptions.of({name: Outer}))
    assert schema["properties"]["name"]["type"] == "string"
    assert schema["additionalProperties"] is False
    assert schema["$defs"]["Inner"]["additionalProperties"] is False
    assert schema["properties"]["more"]["additionalProperties"] == {"type": "integer"}
    assert schema_in(RunOptions.of({name: Loose}))["additionalProperties"] is True


@pytest.mark.parametrize("wrong", [Outer(name="a", parts=[]), int, RunOptions])
def test_what_has_no_schema_is_refused(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="json_schema must be a mapping or JSON text"):
        RunOptions(json_schema=wrong)


@pytest.mark.parametrize(("strict", "is_closed"), [(True, True), (False, False), (None, False)])
def test_strict_closes_objects(strict: bool | None, is_closed: bool) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "object", "properties": {"b": STRING}}},
    }
    inner = {"name": "x", "schema": schema, "strict": strict}
    found = schema_in(RunOptions(response_format={"type": "json_schema", "json_schema": inner}))
    assert ("additionalProperties" in found) == is_closed
    assert ("additionalProperties" in found["properties"]["a"]) == is_closed
    function = {"name": "f", "parameters": schema, "strict": strict}
    options = RunOptions(tools=[{"type": "function", "function": function}])
    parameters = options.offered_tools.parameters("f")
    assert ("additionalProperties" in parameters["properties"]["a"]) == is_closed


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        {"type": "object", "properties": {"a": STRING}, "additionalProperties": True},
        {"properties": {"a": STRING}, "patternProperties": {"x": STRING}},
        {"properties": {"a": STRING}, "allOf": [{"properties": {"b": STRING}}]},
        {"properties": {"a": STRING}, "$ref": "#/$defs/b"},
        {"type": "string"},
        {"enum": [{"properties": {}}]},
        {"const": {"properties": {}}},
    ],
)
def test_schema_that_says_what_else_there_may_be_stays_as_it_is(schema: dict[str, Any]) -> None:
    assert closed(schema) == schema


def get_weather(
    city: str, *, unit: Literal["C", "F"] = "C", days: int | None = None, at: list[float] = NOWHERE
) -> str:
    """Tell the weather of a city.

    Args:
        city: its name,
            in English.
        unit (str): of the temperature.

    Returns:
        The weather.
    """
    return city


def test_function_is_a_tool_by_its_signature_and_docstring() -> None:
    [tool] = RunOptions(tools=[get_weather]).offered_tools
    assert tool == {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Tell the weather of a city.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {**STRING, "description": "its name, in English."},
                    "unit": {"enum": ["C", "F"], "description": "of the temperature."},
                    "days": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
                    "at": {"type": "array", "items": {"type": "number"}},
                },
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    }


def no_type(a) -> None:  # type: ignore[no-untyped-def]  # noqa: ANN001
    """Nothing."""


def of_bytes(a: bytes) -> None:
    """Nothing."""


def of_lists(a: list[set[int]]) -> None:
    """Nothing."""


def of_rest(*a: int) -> None:
    """Nothing."""


def by_place(a: int, /) -> None:
    """Nothing."""


def of_unknown(a: Missing) -> None:  # type: ignore[name-defined]  # noqa: F821
    """Nothing."""


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (no_type, r"tools\[0\], the function no_type: a has no type"),
        (of_bytes, "of_bytes: a has the type bytes: use str"),
        (of_lists, r"of_lists: a has the type set\[int\]"),
        (of_rest, r"of_rest: a cannot be given by name"),
        (by_place, "by_place: a cannot be given by name"),
        (of_unknown, "of_unknown: its types cannot be read: name 'Missing'"),
        (Outer, "must be a tool or a function"),
        (partial(get_weather, "Paris"), "must be a tool or a function"),
        (lambda: None, "has the name '<lambda>'"),
    ],
)
def test_function_that_has_no_schema_is_refused_by_name(function: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        RunOptions(tools=[function])


def test_method_is_a_tool_without_its_object() -> None:
    class Shop:
        def buy(self, n: int) -> None:
            """Buy."""

    tool = tool_of_function("tools[0]", Shop().buy)
    assert tool["function"]["parameters"]["properties"] == {"n": {"type": "integer"}}
