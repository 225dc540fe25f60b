"""Values of every kind that somebody may give by mistake, for `tests.type_fuzz`."""

from __future__ import annotations

import array
import io
import math
from collections import OrderedDict, UserDict, UserList, deque, namedtuple
from datetime import datetime, timedelta, timezone
from decimal import Decimal
from enum import Enum, IntEnum, IntFlag
from fractions import Fraction
from pathlib import Path, PurePosixPath
from types import MappingProxyType, SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import MagicMock

import numpy as np
import pandas as pd
import pyarrow as pa

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from random import Random


class Planted(Exception):  # noqa: N818
    """Raised by values whose methods raise; its own text cannot be had either."""

    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __str__


def _raise(*_: object, **__: object) -> Any:
    raise Planted


class Raising:
    """Raises whatever is asked of it."""

    __str__ = __repr__ = __iter__ = __len__ = __index__ = __float__ = __int__ = __bool__ = _raise
    __getitem__ = __contains__ = __fspath__ = __next__ = __call__ = __getattr__ = _raise
    __eq__ = __hash__ = _raise


class Liar:
    """Does not tell its class."""

    __class__ = property(_raise)


class RaisingStr(str):
    """Text that raises whatever is asked of it."""

    __str__ = __repr__ = __len__ = __iter__ = __contains__ = __eq__ = __hash__ = _raise
    __format__ = encode = startswith = __getattr__ = _raise


class RaisingInt(int):
    """A number that raises whatever is asked of it."""

    __str__ = __repr__ = __index__ = __int__ = __float__ = __lt__ = __le__ = __eq__ = _raise
    __bool__ = __hash__ = __add__ = __getattr__ = _raise


class RaisingList(list[Any]):
    """A list that raises whatever is asked of it."""

    __iter__ = __len__ = __getitem__ = __repr__ = __eq__ = __bool__ = __getattr__ = _raise


class RaisingDict(dict[Any, Any]):
    """A mapping that raises whatever is asked of it."""

    __iter__ = __len__ = __getitem__ = __repr__ = __eq__ = keys = items = get = values = _raise


class RaisingPath(PurePosixPath):
    """A path that raises when it is wanted as text."""

    def __fspath__(self) -> str:
        raise Planted


class BytesPath:
    """A path of bytes."""

    def __fspath__(self) -> bytes:
        return b"name\xff"


class Word(str, Enum):
    """Words as many write them."""

    USER = "user"
    AUTO = "auto"
    MAX = "max_tokens"
    ROLE = "role"


class Kind(Enum):
    """Members whose values are of several kinds."""

    TEXT = "user"
    NUMBER = 3
    LIST = ("a", 1)
    NONE = None


class Number(IntEnum):
    """Numbers with names."""

    TWO = 2


class Flag(IntFlag):
    """Bits with names."""

    A = 1
    B = 2


Point = namedtuple("Point", "x y")


def nested(n: int) -> list[Any]:
    """Return lists in each other."""
    value: list[Any] = []
    for _ in range(n):
        value = [value]
    return value


def nested_dict(n: int) -> dict[str, Any]:
    """Return mappings in each other."""
    value: dict[str, Any] = {}
    for _ in range(n):
        value = {"a": value}
    return value


def own_list() -> list[Any]:
    """Return a list that holds itself twice."""
    value: list[Any] = ["a"]
    value += [value, value]
    return value


def own_dict() -> dict[str, Any]:
    """Return a mapping that holds itself."""
    value: dict[str, Any] = {"role": "user", "content": "a"}
    value["x"] = value
    return value


def raising_generator() -> Iterator[str]:
    """Yield one text, then raise."""
    yield "a"
    raise Planted


SCALARS: tuple[Any, ...] = (
    *(None, True, False, 0, 1, 2, 5, -1, 7, 64, 255, 2**31 - 1, 2**31, 2**63, 2**64, -(2**63)),
    *(10**400, -(10**5000), 0.0, -0.0, 0.5, 1.0, 1e308, 5e-324, math.nan, math.inf, -math.inf, 1j),
    *("", "a", "0", "5", "user", "auto", "\0", "a\0b", "\ud800", "x" * 10_000, "é" * 50, "９"),
    *(
        "-1",
        "1.5",
        "nan",
        "null",
        "{}",
        "[]",
        '{"type": "object"}',
        "(",
        "[a-c]{2}",
        "root ::= 'a'",
    ),
    *(
        "~",
        "~/x",
        "~nobody/x",
        "/",
        ".",
        "..",
        "[",
        "*",
        "no/such/file",
        "x" * 300,
        "x" * 252,
        "\udcff",
    ),
    *(b"", b"a", b"\xff\0", bytearray(b"a"), memoryview(b"ab"), Ellipsis, NotImplemented, int, str),
    *(Decimal("0.5"), Decimal("NaN"), Decimal("sNaN"), Decimal("1e999"), Fraction(1, 3)),
    *(Fraction(10**400), Path("x"), Path("name\udcff"), Path("a\0"), PurePosixPath("~/x")),
    *(
        datetime(2026, 1, 1, tzinfo=timezone.utc),
        timedelta(1),
        *Word,
        *Kind,
        *Number,
        Flag.A | Flag.B,
    ),
    *(np.int8(5), np.uint64(2**64 - 1), np.int64(-1), np.float16(0.5), np.float32("nan")),
    *(
        np.float64("inf"),
        np.longdouble(0.5),
        np.complex64(1),
        np.True_,
        np.str_("user"),
        np.bytes_(b"a"),
    ),
    *(np.datetime64("2026-01-01"), np.timedelta64(1, "s"), pd.NA, pd.NaT, pd.Timestamp(0)),
    *(pa.scalar(5), pa.scalar("a"), len, math, object(), BytesPath(), Exception("a"), Planted()),
    *(Point(1, 2), SimpleNamespace(a=1), range(3), slice(1), lambda: None, lambda *_: "a"),
)
"""What is the same each time."""

MAKERS: tuple[Callable[[], Any], ...] = (
    *(
        Raising,
        RaisingInt,
        lambda: RaisingStr("user"),
        lambda: RaisingList(["a"]),
        MagicMock,
        own_list,
    ),
    *(lambda: RaisingDict(a=1), lambda: RaisingPath("x"), own_dict, raising_generator),
    *(lambda: nested(100), lambda: nested(5000), lambda: nested_dict(5000), lambda: [1] * 10_000),
    *(
        lambda: ["a"] * 300,
        lambda: iter(["a", "b"]),
        lambda: (c for c in "ab"),
        lambda: map(int, "12"),
    ),
    *(
        lambda: map(int, "ab"),
        lambda: zip("ab", "cd", strict=True),
        lambda: {"a", "b"},
        lambda: frozenset("ab"),
    ),
    *(lambda: {"a": 1}.keys(), lambda: {"a": "b"}.values(), lambda: {"a": "b"}.items()),
    *(
        lambda: {5: 3},
        lambda: {None: 1},
        lambda: {("a",): 1},
        lambda: {Word.MAX: 3},
        lambda: {"5": 1},
    ),
    *(
        lambda: {math.nan: 1},
        lambda: {b"a": 1},
        lambda: {"max_tokens": 2},
        lambda: {"a": nested(200)},
    ),
    *(
        lambda: UserDict(max_tokens=2),
        lambda: UserList(["a"]),
        lambda: deque(["a", 1]),
        OrderedDict,
    ),
    *(lambda: MappingProxyType({"max_tokens": 2}), lambda: array.array("i", [5, 6])),
    *(
        lambda: np.array(5),
        lambda: np.array([5, 6]),
        lambda: np.array([[5], [6]]),
        lambda: np.array([]),
    ),
    *(lambda: np.array(["a", "b"]), lambda: np.array(["a", None, 3], dtype=object)),
    *(lambda: np.zeros(2, dtype="i4,U3"), lambda: np.array([0.5]), lambda: np.array([True])),
    *(
        lambda: np.array("a"),
        lambda: np.array([], dtype=np.int64),
        lambda: np.arange(6, dtype="u1"),
    ),
    *(lambda: pd.Series(["a", "b"]), lambda: pd.Series([1, 2]), lambda: pd.Series(["a", None])),
    *(
        lambda: pd.DataFrame({"prompt": ["a"]}),
        lambda: pd.DataFrame(),
        lambda: pd.DataFrame([[1, 2]]),
    ),
    *(lambda: pd.DataFrame([["a", "b"]], columns=["prompt", "prompt"]), lambda: pd.Index(["a"])),
    *(lambda: pd.DataFrame({5: ["a"], "text": [np.array([1])]}), lambda: pa.array(["a"])),
    *(lambda: pa.table({"prompt": ["a", None]}), lambda: pa.table({"messages": [[{"role": 3}]]})),
    *(
        lambda: pa.table({"prompt": [b"\xff"]}),
        lambda: pa.chunked_array([["a"]]),
        lambda: pa.table({}),
    ),
    *(
        lambda: io.StringIO("a\nb"),
        lambda: io.BytesIO(b"a\nb"),
        lambda: memoryview(array.array("i", [1])),
    ),
)
"""What is used up, changed or made anew each time."""

MESSAGE: tuple[Any, ...] = (
    "role",
    "content",
    "name",
    "tool_calls",
    "tool_call_id",
    "x",
    Word.ROLE,
    5,
)
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
GOOD: tuple[Callable[[], Any], ...] = (
    lambda: "some text",
    lambda: [{"role": "user", "content": "hi"}],
    lambda: [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
    lambda: [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "tool_calls": [CALL]},
        {"role": "tool", "content": "3", "tool_call_id": "a"},
    ],
    lambda: [300, 301],
    lambda: [TOOL],
    lambda: {"type": "function", "function": {"name": "f"}},
    lambda: {"type": "json_schema", "json_schema": {"schema": {"type": "integer"}}},
    lambda: {"type": "object", "properties": {"a": {"type": "integer"}}},
    lambda: {300: 1.0, "301": -math.inf},
)
"""What somebody may mean, to be changed in one place."""


def odd(rng: Random, depth: int = 0) -> Any:
    """Return a value of some kind: alone, in a list or a mapping, or in the place of a part of a good one."""
    kind = rng.random()
    if depth > 3 or kind < 0.4:
        return rng.choice(SCALARS)
    if kind < 0.7:
        return rng.choice(MAKERS)()
    if kind < 0.8:
        return changed(rng, rng.choice(GOOD)(), depth)
    if kind < 0.9:
        return [odd(rng, depth + 1) for _ in range(rng.randrange(4))]
    keys = [k for k in (rng.choice(SCALARS), *rng.sample(MESSAGE, 2)) if _is_key(k)]
    return {key: odd(rng, depth + 1) for key in keys}


def changed(rng: Random, value: Any, depth: int = 0) -> Any:
    """Return a value with something else in one place of it."""
    if rng.random() < 0.2 or depth > 6 or not isinstance(value, list | dict) or not value:
        return odd(rng, depth + 1)
    if isinstance(value, list):
        i = rng.randrange(len(value))
        return [*value[:i], changed(rng, value[i], depth + 1), *value[i + 1 :]]
    key = rng.choice(list(value))
    return {**value, key: changed(rng, value[key], depth + 1)}


def _is_key(value: object) -> bool:
    try:
        hash(value)
    except Exception:
        return False
    return True
