"""Numbers in JSON schemas that llguidance cannot follow: it reads all of them as 64-bit floats."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cbatch.options import Grammar

_LEAST = -(2**63) + 1024
"""The next float below is -2^63: llguidance 1.9.1 overflows its stack by that one. Measured."""
_MOST = 2**63 - 1
"""Read as 2^63 and cut to what it was; any other number that is no float becomes another number."""

_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_NOTES = ("default", "examples", "example", "title", "description", "$comment")
"""Keys whose values say nothing about what is allowed, but for properties of such names, which are objects."""

_EMBEDDED = re.compile(r"%json\s*")


def find_bad_number(grammar: Grammar) -> str:
    """Return why a number in a grammar's schemas cannot be followed; empty where all can.

    Raises:
        ValueError, RecursionError: a schema is no JSON.
    """
    for schema in _schemas(grammar):
        for key, number in _numbers(schema):
            if not _is_exact(key, number):
                return (
                    f"the number {_shown(number)} ({key}) cannot be followed exactly: integers and bounds go from "
                    f"{_LEAST} to {_MOST}, and beyond 2^53 there are only those that a 64-bit float holds; "
                    "ask for a string with a pattern"
                )
    return ""


def _schemas(grammar: Grammar) -> Iterator[Any]:
    if grammar.kind == "json_schema":
        yield json.loads(grammar.text)
    elif grammar.kind in ("lark", "tool_choice"):
        for place in _EMBEDDED.finditer(grammar.text):
            with suppress(ValueError):  # in a text or a comment; else the compiler says so
                yield json.JSONDecoder().raw_decode(grammar.text, place.end())[0]


def _numbers(schema: Any) -> Iterator[tuple[str, int | float]]:
    """Yield numbers that say what is allowed, each with the key that it stands under."""
    todo: list[tuple[str, Any]] = [("schema", schema)]
    while todo:
        key, value = todo.pop()
        if isinstance(value, dict):
            todo += [(k, v) for k, v in value.items() if k not in _NOTES or isinstance(v, dict)]
        elif isinstance(value, list):
            todo += [(key, v) for v in value]
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield key, value


def _is_exact(key: str, number: float) -> bool:
    if isinstance(number, float) and key not in _BOUNDS:
        return True
    return number == _MOST or (_LEAST <= number <= _MOST and float(number) == number)


def _shown(number: float) -> str:
    text = str(number)
    return text if len(text) <= 40 else f"{text[:30]}… of {len(text)} digits"
