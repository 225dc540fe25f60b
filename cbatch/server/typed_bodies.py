"""Bodies of requests as msgspec structs: what is wrong with one is told in words of our own, in one place."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import UNSET, Meta, Struct, inspect

from cbatch.server.http_errors import HttpProblemError, bad_request
from cbatch.support.checks import shown
from cbatch.support.typed import known

T = TypeVar("T", bound=Struct)

Filled = Annotated[str, Meta(min_length=1)]

_MISSING = re.compile(r"Object missing required field `(\w+)`")
_PLACE = re.compile(r" - at `(key` in `)?\$\.?([^`]*)`$")
_STEP = re.compile(r"\.\.\.|[^.\[\]]+")
"""In a place such as `messages[0].content` or `metadata[...]`."""


def read_body(kind: type[T], body: Mapping[str, Any], *, has_dots: bool = False) -> T:
    """Return a body as a struct; null means that a field is not given.

    Args:
        kind: the struct. A `ValueError` of its `__post_init__` says the rest of a sentence that begins with the place.
        body: an object of JSON.
        has_dots: whether places are written as `messages.0.role`, not as `messages[0].role`.

    Raises:
        HttpProblemError: a value is missing or wrong; it names the field, the place, the value and what it may be.
    """
    given = {name: value for name, value in body.items() if value is not None}
    try:
        return msgspec.convert(given, known(kind))
    except msgspec.ValidationError as error:
        raise _problem(error, kind, given, has_dots=has_dots) from None


def unknown_in(value: Mapping[str, Any], kind: Struct | type[Struct]) -> list[str]:
    """Return the given names of an object that its struct does not read."""
    known = (*kind.__struct_fields__, kind.__struct_config__.tag_field)
    return [name for name, inner in value.items() if inner is not None and name not in known]


def _problem(
    error: msgspec.ValidationError, kind: Any, value: Any, *, has_dots: bool
) -> HttpProblemError:
    words = str(error)
    at = _PLACE.search(words)
    place = at[2] if at else ""
    if missing := _MISSING.match(words):
        place += f".{missing[1]}" if place else missing[1]
    steps, of = _STEP.findall(place), inspect.type_info(kind)
    for step in steps:
        of, value = _inside(of, value, step)
    place = place.removesuffix("[...]")
    told = re.sub(r"\[(\d+)\]", r".\1", place) if has_dots else place
    if isinstance(error.__cause__, ValueError):
        said = f"{told} {error.__cause__}"
    elif at and at[1] and isinstance(of, inspect.DictType):
        said = f"each name in {told} must be {_words(of.key_type)}"
    elif steps[-1] == "...":
        said = f"each value in {told} must be {_words(of)}"
    elif value is UNSET or (value is None and not steps[-1].isdigit()):
        said = f"{told} is missing: it must be {_words(of)}"
    else:
        is_count = value and isinstance(value, list | dict) and "of length" in words
        said = f"{told} must be {_words(of)}, not {len(value) if is_count else shown(value)}"
    return bad_request(said, steps[0])


def _inside(kind: inspect.Type, value: Any, step: str) -> tuple[inspect.Type, Any]:
    """Return the type and the value at a step into a value."""
    kinds = [*_alternatives(kind)]
    for each in kinds:
        if isinstance(each, inspect.ListType) and step.isdigit():
            return each.item_type, value[int(step)]
        if isinstance(each, inspect.DictType) and step == "...":
            return each.value_type, value
    structs = [each for each in kinds if isinstance(each, inspect.StructType)]
    inner = value.get(step, UNSET)
    if step == (tag_field := structs[0].tag_field):
        return inspect.LiteralType(tuple(str(struct.tag) for struct in structs)), inner
    of = next(s for s in structs if len(structs) == 1 or s.tag == value[tag_field])
    return next(field.type for field in of.fields if field.name == step), inner


def _alternatives(kind: inspect.Type) -> Iterator[inspect.Type]:
    if isinstance(kind, inspect.UnionType):
        for each in kind.types:
            yield from _alternatives(each)
    else:
        yield kind


def _words(kind: inspect.Type) -> str:
    """Return what a value may be."""
    words: list[str] = []
    for each in _alternatives(kind):
        if isinstance(each, inspect.Metadata):
            words.append(str((each.extra_json_schema or {})["description"]))
        elif isinstance(each, inspect.LiteralType):
            words += map(str, each.values)
        elif isinstance(each, inspect.StrType):
            words.append("a string" + _span(each.min_length, each.max_length, "characters"))
        elif isinstance(each, inspect.ListType):
            words.append("a list" + _span(each.min_length, each.max_length, "items"))
        elif isinstance(each, inspect.DictType):
            words.append("an object" + _span(each.min_length, each.max_length, "names"))
        elif isinstance(each, inspect.IntType):
            words.append("a whole number" + _span(each.ge, each.le))
        elif isinstance(each, inspect.BoolType):
            words.append("true or false")
        elif isinstance(each, inspect.StructType):
            words.append("an object")
    words = [*dict.fromkeys(words)]
    return " or ".join(filter(None, (", ".join(words[:-1]), *words[-1:])))


def _span(low: int | None, high: int | None, unit: str = "") -> str:
    if low == 1 and high is None and unit:
        return " that is not empty"
    if low is None and high is None:
        return ""
    many = f"at least {low}" if high is None else f"{low} … {high}" if low else f"at most {high}"
    return f" of {many} {unit}".rstrip()
