"""Checks of the values that callers give.

Each takes the name that an error gives the value, and raises `ConfigError` with the name, the value and what it may be.
None says nothing and passes, where it is not told otherwise.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NoReturn, TypeGuard

from cbatch.errors import ConfigError

MAX_INT = 2**31 - 1
"""The largest whole number of native code and of llama.cpp."""

MAX_TIME_S = 1e9
"""Some thirty years: for ever, and yet a number that clocks can add."""

MAX_KEY_LENGTH = 1024
"""Characters of a cache key or an adapter's name: a name, not a prompt."""

MAX_GRAMMAR_LENGTH = 2**20
"""Characters of a schema, regex or grammar: our choice; what compiles is far shorter."""

MAX_DEPTH = 128
"""Lists and objects in each other: our choice, far above what a schema has, far below what Python can walk."""

TOO_DEEP = f"{{}}: its values are nested more than {MAX_DEPTH} deep"
"""What is said then, of a name."""

_CONTAINERS = (dict, list, tuple, Mapping)

_N_SHOWN = 80


def shown(value: object) -> str:
    """Return a value as an error shows it: cut where it is long, its type where Python cannot write it."""
    try:
        text = repr(value)
    except Exception:  # thousands of digits, or a `__repr__` of somebody else's
        return f"this {type(value).__name__}"
    return text if len(text) <= _N_SHOWN else f"{text[:_N_SHOWN]}…"


def is_too_deep(value: object) -> bool:
    """Return whether lists and mappings are nested more than `MAX_DEPTH` deep; no recursion finds it out."""
    level = [value] if isinstance(value, _CONTAINERS) else []
    for _ in range(MAX_DEPTH):
        if not level:
            return False
        # each once: a list that holds itself twice would double what there is to look at
        level = [*{id(inner): inner for outer in level for inner in _within(outer)}.values()]
    return bool(level)


def _within(value: Any) -> list[Any]:
    values = value.values() if isinstance(value, Mapping) else value
    return [inner for inner in values if isinstance(inner, _CONTAINERS)]


def check_depth(name: str, value: object) -> None:
    """Check that what walks a value does not come to the end of Python's stack."""
    if is_too_deep(value):
        raise ConfigError(TOO_DEEP.format(name))


def is_int(value: object) -> TypeGuard[int]:
    """Return whether a value is a whole number; True is none."""
    return isinstance(value, int) and not isinstance(value, bool)


def check_int(name: str, value: object, low: int, high: int) -> None:
    """Check a whole number from `low` to `high`."""
    if value is None:
        return
    if not is_int(value):
        raise ConfigError(f"{name} must be a whole number, not {shown(value)}")
    if not low <= value <= high:
        raise ConfigError(f"{name} must be {low} … {high}, not {shown(value)}")


def check_float(name: str, value: object, low: float, high: float) -> None:
    """Check a finite number from `low` to `high`."""
    if value is None:
        return
    if not (is_int(value) or (isinstance(value, float) and math.isfinite(value))):
        raise ConfigError(f"{name} must be a finite number, not {shown(value)}")
    if not low <= value <= high:
        raise ConfigError(f"{name} must be {low:g} … {high:g}, not {shown(value)}")


def check_seconds(name: str, value: float | None) -> float:
    """Return a span of seconds; endless where None.

    Raises:
        ConfigError: not a number, or below 0.
    """
    check_float(name, value, 0.0, MAX_TIME_S)
    return math.inf if value is None else value


def check_bool(name: str, value: object) -> None:
    """Check a flag."""
    if value is not None and not isinstance(value, bool):
        raise ConfigError(f"{name} must be True or False, not {shown(value)}")


def check_choice(name: str, value: object, choices: Sequence[str | None]) -> None:
    """Check that a value is one of these; None only if it is among them."""
    if value not in choices:
        known = ", ".join(c for c in choices if c is not None)
        raise ConfigError(f"{name} must be one of {known}, not {shown(value)}")


def check_text(name: str, value: object, n_most: int) -> None:
    """Check text of 1 … `n_most` characters."""
    if value is None:
        return
    if not isinstance(value, str) or not 0 < len(value) <= n_most:
        raise ConfigError(f"{name} must be a string of 1 … {n_most} characters, not {shown(value)}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{name} holds half of a surrogate pair: {value[:80]!r}") from None


def strings_of(name: str, value: object) -> tuple[str, ...] | None:
    """Return the non-empty strings of `value`; an empty stop string would match everywhere and is left out."""
    if value is None:
        return None
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, Sequence) or not all(isinstance(s, str) for s in items):
        raise ConfigError(f"{name} must be a string or a list of strings, not {shown(value)}")
    try:
        "".join(items).encode()
    except UnicodeEncodeError:  # json.loads gives such strings; no text of a model can hold one
        raise ConfigError(f"{name} holds half of a surrogate pair: {shown(value)}") from None
    return tuple(s for s in items if s)


def check_path(name: str, value: object) -> None:
    """Check that a value can be a path; None is refused."""
    if not (isinstance(value, str | os.PathLike) and _is_encodable(os.fspath(value))):
        raise ConfigError(f"{name} must be a path, not {shown(value)}")


def _is_encodable(path: str | bytes) -> bool:
    """Whether a system could have such a path."""
    try:
        encoded = os.fsencode(path)
    except UnicodeEncodeError:
        return False
    return bool(encoded) and b"\0" not in encoded


def check_keys(name: str, said: Mapping[str, Any], known: Sequence[str]) -> None:
    """Check that a mapping has no other keys than these."""
    for key in said:
        if key not in known:
            raise ConfigError(f"{name} has {key!r}, known are {', '.join(known)}")


def token_ids(name: str, value: object) -> tuple[int, ...] | None:
    """Return a list of token ids as a tuple."""
    if value is None:
        return None
    if (
        isinstance(value, str)
        or not isinstance(value, Sequence)
        or not all(is_int(t) and t >= 0 for t in value)
    ):
        raise ConfigError(f"{name} must be a list of token ids (0 and above), not {shown(value)}")
    return tuple(value)


def json_object(name: str, value: object) -> str | None:
    """Return a mapping, or the text of a JSON object, as `json_text`."""
    if value is None:
        return None
    if isinstance(value, str):
        return _json_object_of_text(name, value)
    if not isinstance(value, Mapping):
        raise ConfigError(f"{name} must be a mapping or JSON text, not {type(value).__name__}")
    return json_text(name, value)


@lru_cache(maxsize=64)  # a batch's options are merged anew for each of its items
def _json_object_of_text(name: str, text: str) -> str:
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        raise ConfigError(TOO_DEEP.format(name)) from None
    except ValueError as error:
        raise ConfigError(f"{name} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{name} must be a JSON object, not {type(value).__name__}")
    return json_text(name, value)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def json_text(name: str, value: Mapping[str, Any]) -> str:
    """Return a mapping as JSON text, in one way of writing: order of keys kept, no superfluous space."""
    check_depth(name, value)
    try:
        text = json.dumps(
            value, ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=_plain
        )
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{name} cannot be written as JSON: {error}") from None
    check_text(name, text, MAX_GRAMMAR_LENGTH)
    return text


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} is no type of JSON")
