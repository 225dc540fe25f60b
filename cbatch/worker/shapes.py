"""What came as JSON, checked to be what it should be: another process may send anything."""

from __future__ import annotations

from dataclasses import fields
from functools import cache
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, cast, get_args

from cbatch.checks import shown
from cbatch.errors import ConfigError
from cbatch.response import FinishReason

if TYPE_CHECKING:
    from collections.abc import Hashable

T = TypeVar("T")

_REASONS = frozenset(get_args(FinishReason))

_TYPES: dict[str, tuple[type, ...]] = {
    "bool": (bool,),
    "int": (int,),
    "float": (int, float),
    "str": (str,),
    "dict": (dict,),
    "list": (list,),
    "tuple": (list,),
    "None": (type(None),),
}
"""The types of JSON's values, by the first word of an annotation."""


def as_text(value: object) -> str:
    """Return text."""
    return value if type(value) is str else _refuse(value, "text")


def as_count(value: object) -> int:
    """Return a whole number."""
    return value if type(value) is int else _refuse(value, "a whole number")


def as_flag(value: object) -> bool:
    """Return a flag."""
    return value if type(value) is bool else _refuse(value, "a flag")


def as_list(value: object) -> list[Any]:
    """Return a list."""
    return value if type(value) is list else _refuse(value, "a list")


def as_object(value: object) -> dict[str, Any]:
    """Return a JSON object."""
    return value if type(value) is dict else _refuse(value, "an object")


def as_texts(value: object) -> tuple[str, ...]:
    """Return a list of texts."""
    found = as_list(value)
    return tuple(found) if {str}.issuperset(map(type, found)) else _refuse(value, "texts")


def as_tokens(value: object) -> tuple[int, ...]:
    """Return a list of whole numbers."""
    found = as_list(value)
    return tuple(found) if {int}.issuperset(map(type, found)) else _refuse(value, "tokens")


def as_reason(value: object) -> FinishReason:
    """Return a finish reason."""
    if as_text(value) not in _REASONS:
        _refuse(value, "a finish reason")
    return cast("FinishReason", value)


def as_fields(kind: type[T], value: object) -> T:
    """Return a dataclass of plain fields from its values by name; lists are not looked into.

    Raises:
        ConfigError: a field is missing, unknown, or of another type.
    """
    said, types = as_object(value), _types_of(cast("Hashable", kind))
    for name, inner in said.items():
        if name not in types or type(inner) not in types[name]:
            _refuse({name: inner}, f"a field of {kind.__name__}")
    try:
        return kind(**said)
    except TypeError as error:  # one is missing
        raise ConfigError(f"{kind.__name__}: {error}") from None


@cache
def _types_of(kind: Any) -> dict[str, tuple[type, ...]]:
    """Return the types that the fields of a dataclass may have as JSON, by name; none for what is no plain value."""
    found = {}
    for field in fields(kind):
        words = str(field.type).replace(" ", "").split("|")
        found[field.name] = tuple(t for w in words for t in _TYPES.get(w.partition("[")[0], ()))
    return found


def _refuse(value: object, what: str) -> NoReturn:
    raise ConfigError(f"{shown(value)} is not {what}")
