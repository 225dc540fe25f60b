"""Values of other libraries as plain Python values: numbers and arrays of numpy and torch, enum members, subclasses.

Callers' values are made plain once, at the entrance. So no template writes `Role.USER`, no comparison calls a caller's
`__eq__`, and the thread that computes runs no code of callers.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

_NUMBER = re.compile(r"(?:^|\.)(?:u?int|b?float)\d")
"""The start of the name of a number's `dtype`: `int64` in numpy, `torch.bfloat16` in torch."""

LEAVES = frozenset({str, int, float, bool, type(None)})
"""Types of plain values that contain no other values."""

_AS_LIST = ("tolist", "to_pylist", "to_list")
"""Methods that make a list of an array: of numpy, torch, pandas and Python; of pyarrow; of polars."""


def is_a(value: object, kind: Any) -> bool:
    """Whether a value is an instance of `kind`; False where its class cannot be determined."""
    try:
        return isinstance(value, kind)
    except Exception:  # the caller's own `__class__`
        return False


def text_of(value: Any) -> str | None:
    """Return text as a plain string, also of subclasses and enum members; None for any other value."""
    if type(value) in LEAVES:
        return value if type(value) is str else None
    if is_a(value, str):
        return str.__str__(value)
    return text_of(value.value) if is_a(value, Enum) else None


def int_of(value: Any) -> int | None:
    """Return a whole number, also of numpy or an enum; None for any other value, and for True and False."""
    if is_a(value, int):
        return None if is_a(value, bool) else int.__index__(value)
    if is_a(value, Enum):
        return int_of(value.value)
    try:
        return operator.index(value) if _is_scalar(value, "__index__") else None
    except Exception:  # a fraction of numpy's, or the caller's own method
        return None


def token_of(value: Any) -> int | None:
    """Return a token id, a whole number ≥ 0; None for any other value."""
    number = value if type(value) is int else int_of(value)
    return None if number is None or number < 0 else number


def number_of(value: Any) -> float | None:
    """Return a number, whole ones as int, possibly infinite or NaN; None for any other value."""
    if is_a(value, float):
        return float.__float__(value)
    whole = int_of(value)
    if whole is not None or is_a(value, bool | str):
        return whole
    if is_a(value, Enum):
        return number_of(value.value)
    try:
        return float(value) if _is_scalar(value, "__float__") else None
    except Exception:  # a signalling NaN, or the caller's own method
        return None


def flag_of(value: Any) -> bool | None:
    """Return True or False, also of numpy and torch; None for any other value."""
    if is_a(value, bool):
        return bool(value)
    try:
        is_flag = getattr(value, "shape", None) == () and _dtype(value) in ("bool", "torch.bool")
        return bool(value) if is_flag else None
    except Exception:  # the caller's own method
        return None


def list_of(value: Any) -> list[object] | None:
    """Return the items of a sequence or an array; None for any other value: text, bytes, sets and tables too."""
    if type(value) is list:
        return list(value)
    if is_a(value, str | bytes | bytearray | memoryview | Mapping | Enum) or is_table(value):
        return None
    for name in _AS_LIST:
        if callable(method := getattr(value, name, None)):
            items = method()  # an array without dimensions gives its number
            return items if is_a(items, list) else None
    return list(value) if is_a(value, Sequence) else None


def is_table(value: object) -> bool:
    """Whether a value is a table with named columns, of any library."""
    return any(hasattr(type(value), name) for name in ("columns", "column_names"))


def plain(value: Any) -> object:
    """Return a copy of nested values with plain text, lists, dicts and numbers; other values stay as they are."""
    kind = type(value)
    if kind in LEAVES:
        return value
    if kind is dict:
        return {plain(key): plain(inner) for key, inner in value.items()}
    if kind is list:
        return [plain(item) for item in value]
    text = text_of(value)
    if text is not None:
        return text
    if is_a(value, Mapping):
        return {plain(key): plain(inner) for key, inner in value.items()}
    if is_a(value, bytes | bytearray | memoryview):
        return value
    items = list_of(value)
    if items is not None:
        return [plain(item) for item in items]
    number = number_of(value) if hasattr(value, "dtype") else int_of(value)
    return value if number is None else number


def are_same(value: object, other: object) -> bool:
    """Whether plain values are the same in type and order, too: 1, 1.0 and True differ, and so do 0.0 and −0.0."""
    kind = type(value)
    if value is other or kind is not type(other):
        return value is other
    if isinstance(value, dict) and isinstance(other, dict):
        return are_same([*value], [*other]) and are_same([*value.values()], [*other.values()])
    if isinstance(value, list | tuple) and isinstance(other, list | tuple):
        return len(value) == len(other) and all(map(are_same, value, other))
    return repr(value) == repr(other) if kind is float else kind in LEAVES and value == other


def text_of_plain(value: object) -> str | None:
    """Return a text that no other value has, as `are_same` tells them apart; None where a value in it is not plain."""
    try:
        return repr(value) if _is_plain(value) else None
    except Exception:  # an integer with too many digits, or the caller's own code
        return None


def _is_plain(value: Any) -> bool:
    kind: Any = type(value)
    if kind.__repr__ is dict.__repr__:
        return _is_plain([*value]) and _is_plain([*value.values()])
    if kind.__repr__ in (list.__repr__, tuple.__repr__):
        return LEAVES.issuperset(map(type, value)) or all(map(_is_plain, value))
    return kind in LEAVES


def plain_for_json(value: Any) -> object:
    """Return the plain value that JSON can write, for `json.dumps(…, default=…)`; a TypeError where there is none."""
    if is_a(value, Mapping):
        return dict(value)
    for found in (list_of(value), text_of(value), flag_of(value), number_of(value)):
        if found is not None:
            return found
    raise TypeError(f"{type(value).__name__} is not a JSON type")


def _is_scalar(value: object, method: str) -> bool:
    """Whether a value has this method and, if it has a dtype and shape, is a single number."""
    dtype = _dtype(value) if hasattr(value, method) else "none"
    return getattr(value, "shape", ()) == () and (dtype == "" or bool(_NUMBER.search(dtype)))


def _dtype(value: object) -> str:
    dtype = getattr(value, "dtype", "")
    return str(getattr(dtype, "name", dtype))
