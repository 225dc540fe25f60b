"""Checks of the values that callers give.

Each check takes the value's name for errors, returns the value as a plain one (see `cbatch.support.plain`), and raises
`ConfigError` with the name, the value and what it may be. None is refused unless the check says otherwise.
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import field, fields
from functools import cache, lru_cache
from typing import Any, NoReturn

from cbatch.errors import CBatchError, ConfigError, UnsupportedOptionError, near_or_known, words_of
from cbatch.support.garbage import uncollected
from cbatch.support.interrupts import is_for_program
from cbatch.support.plain import (
    LEAVES,
    flag_of,
    int_of,
    list_of,
    number_of,
    plain_for_json,
    text_of,
    token_of,
)

MAX_INT = 2**31 - 1
"""The largest whole number of native code and of llama.cpp."""

MAX_TIME_S = 1e9
"""About thirty years: long enough for any wait, and a number that clocks can add."""

MAX_KEY_LENGTH = 1024
"""Characters of a cache key or an adapter's name: a name, not a prompt."""

MAX_GRAMMAR_LENGTH = 2**20
"""Characters of a schema, regex or grammar: our choice; grammars that compile are far shorter."""

MAX_DEPTH = 128
"""Nesting of lists and objects: our choice, far above any schema and far below Python's recursion limit."""

N_VALUE = 20
"""Bytes of text as which a value counts: an empty object takes 83 bytes, a call some four times its body."""

MAX_VALUES = 2_000_000
"""Values of a JSON text: our choice, twice the ids in a prompt of a million tokens. No other thread runs while Python
makes them, for about 0.3 s.
"""

MAX_NAMES = 2**18
"""Different names in a JSON text, each of which takes Python longer: our choice; requests have a few, many times."""

TOO_DEEP = f"{{}}: its values are nested more than {MAX_DEPTH} deep"
"""The error's text, to be formatted with the value's name."""

_LISTS = (list, tuple)
_CONTAINERS = (*_LISTS, dict, Mapping)

_AS_LISTS = bytes.maketrans(b"{}", b"[]")
_NO_BRACKETS = bytes(byte for byte in range(256) if byte not in b"[]{}")
_NO_MARKS = bytes(byte for byte in range(256) if byte not in b'"[]{},:')

_N_FEW = 2**14
"""Values of a JSON text that are made as any others: our choice."""

_N_SHOWN = 80


def shown(value: object) -> str:
    """Return a value as an error shows it: cut where it is long, by its type where `repr` fails."""
    if type(value) is str:
        value = value[: _N_SHOWN + 1]  # a text of megabytes is not copied
    try:
        text = repr(value)
    except Exception:  # thousands of digits, or the caller's own `__repr__`
        return f"this {type(value).__name__}"
    return text if len(text) <= _N_SHOWN else f"{text[:_N_SHOWN]}…"


def given_only(value: Any) -> str:
    """Return a dataclass's values as `repr` shows them: those that are not the default, cut where they are long."""
    found = ((f.name, f.default, getattr(value, f.name)) for f in fields(value) if f.repr)
    given = (
        f"{name}={shown(v)}"
        for name, default, v in found
        if v is not default and (default is None or v != default)
    )
    return f"{type(value).__name__}({', '.join(given)})"


def name_of(given: object) -> str:
    """Return the name of an option, or how an error shows what is not text."""
    name = text_of(given)
    return shown(given) if name is None else name


def is_too_deep(value: object) -> bool:
    """Return whether lists and mappings are nested more than `MAX_DEPTH` deep, without recursion."""
    level = [value] if isinstance(value, _CONTAINERS) else []
    for _ in range(MAX_DEPTH):
        if not level:
            return False
        # each object once: a list that holds itself twice would double the work at every level
        level = [
            *{
                id(inner): inner
                for outer in level
                for inner in (outer if isinstance(outer, _LISTS) else outer.values())
                if type(inner) not in LEAVES and isinstance(inner, _CONTAINERS)
            }.values()
        ]
    return bool(level)


def is_text_too_deep(text: str) -> bool:
    """Return whether JSON text has values that are nested more than `MAX_DEPTH` deep. Fast: it reads only the text."""
    if text.count("[") + text.count("{") <= MAX_DEPTH:
        return False
    outside_strings = b"".join(_marks_of(text).split(b'"')[::2])
    brackets = outside_strings.translate(_AS_LISTS, _NO_BRACKETS)
    return all((brackets := brackets.replace(b"[]", b"")) for _ in range(MAX_DEPTH))


def _marks_of(text: str) -> bytes:
    """Return the quotation marks around strings, and all brackets, commas and colons, of JSON text."""
    unescaped = text.encode("utf-8", "surrogatepass").replace(b"\\\\", b"").replace(b'\\"', b"")
    return unescaped.translate(None, _NO_MARKS)


def _n_marked(text: str | bytes, *marks: Any) -> int:
    return sum(map(text.count, marks))


def _n_names(text: str) -> int:
    """Return how many different names JSON text has, at most: it takes a string that begins with a colon for an end."""
    escaped = text.replace("\\\\", "\1").replace('\\"', "\2")  # which no string may have
    ends = re.sub(r'"[ \t\n\r]+:', '":', escaped).split('":')[:-1]
    return len({end[end.rfind('"') + 1 :] for end in ends})


class TooManyValuesError(ValueError):
    """A JSON text has more values or names than are read; the message says how many."""

    def __init__(self, n: int, what: str, n_most: int) -> None:
        super().__init__(f"it has {n:,} {what}; at most {n_most:,} are read")


def _check_n_values(text: str) -> bool:
    """Return whether JSON text may have many values. Raises a `TooManyValuesError`. Reads only the text."""
    n_values, n_names = _n_marked(text, ",", "[", "{"), text.count(":")
    if n_values > MAX_VALUES or n_names > MAX_NAMES:
        marks = _marks_of(text)
        n_strings = marks.count(b'"') // 2
        if n_strings > MAX_VALUES + MAX_NAMES:
            raise TooManyValuesError(n_strings, "strings", MAX_VALUES)
        outside_strings = b"".join(marks.split(b'"')[::2])
        n_values = _n_marked(outside_strings, b",", b"[", b"{")
        if n_values > MAX_VALUES:
            raise TooManyValuesError(n_values, "values", MAX_VALUES)
        if outside_strings.count(b":") > MAX_NAMES and (n_names := _n_names(text)) > MAX_NAMES:
            raise TooManyValuesError(n_names, "different names", MAX_NAMES)
    return n_values > _N_FEW


def n_values_in(text: bytes) -> int:
    """Return about how many values JSON text has, or more."""
    return _n_marked(text, b",", b"[", b"{")


def json_weight(n_bytes: int, n_values: int) -> int:
    """Return the length of JSON text of few values that takes as much memory as one with so many, once decoded."""
    return max(n_bytes, N_VALUE * min(n_values, MAX_VALUES))


def json_reader(decoder: json.JSONDecoder) -> Callable[[str], Any]:
    """Return a function that decodes JSON text in bounded time: no other thread runs while Python makes its values.

    It raises what `decoder.decode` raises, and a `TooManyValuesError`, which is a `ValueError`.
    """

    def read(text: str) -> Any:
        if len(text) <= _N_FEW or not _check_n_values(text):
            return decoder.decode(text)
        with uncollected():
            return decoder.decode(text)

    return read


def check_depth(name: str, value: object) -> None:
    """Refuse values nested so deep that walking them would exceed Python's recursion limit."""
    if is_too_deep(value):
        raise ConfigError(TOO_DEEP.format(name))


class reading:  # noqa: N801  # lower case, as context managers of the standard library
    """Turn any exception of a caller's own methods into a `ConfigError` that names the value; not signal handlers'."""

    __slots__ = ("_name",)

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if not isinstance(error, Exception) or isinstance(error, CBatchError):
            return
        if not is_for_program(error):
            raise ConfigError(f"{self._name} cannot be read: {words_of(error)}") from error


def checked(check: Callable[..., object], *limits: object, default: object = None) -> Any:
    """Declare a field of frozen options, for `check_fields` to check by `check(name, value, *limits)`."""
    return field(default=default, metadata={"check": check, "limits": limits})


def check_fields(options: Any) -> None:
    """Replace each value of frozen options by its checked one; None passes where it is the default."""
    for name, is_optional, check, limits in _checks_of(options.__class__):
        value = getattr(options, name)
        if value is None:
            if not is_optional:
                raise ConfigError(f"{name} must not be None")
        elif check is not None:
            with reading(name):
                object.__setattr__(options, name, check(name, value, *limits))


@cache
def _checks_of(kind: Any) -> list[tuple[str, bool, Callable[..., object] | None, Any]]:
    return [
        (f.name, f.default is None, f.metadata.get("check"), f.metadata.get("limits"))
        for f in fields(kind)
    ]


def check_int(name: str, value: object, low: int, high: int) -> int:
    """Return a whole number from `low` to `high`."""
    number = int_of(value)
    if number is None:
        raise ConfigError(f"{name} must be a whole number, not {shown(value)}")
    if not low <= number <= high:
        raise ConfigError(f"{name} must be {low} … {high}, not {shown(value)}")
    return number


def check_float(name: str, value: object, low: float, high: float) -> float:
    """Return a finite number from `low` to `high`, as a float."""
    number = number_of(value)
    if number is None or (isinstance(number, float) and not math.isfinite(number)):
        raise ConfigError(f"{name} must be a finite number, not {shown(value)}")
    if not low <= number <= high:
        raise ConfigError(f"{name} must be {low:g} … {high:g}, not {shown(value)}")
    return float(number)


def check_seconds(name: str, value: object) -> float:
    """Return a span of seconds, 0 or more; infinite for None."""
    if value is None or number_of(value) == math.inf:
        return math.inf
    return check_float(name, value, 0.0, MAX_TIME_S)


def check_wait(name: str, value: object) -> float | None:
    """Return how many seconds to wait, 0 for a negative number; None, which is no limit, for None too."""
    number = number_of(value)
    is_nan = isinstance(number, float) and math.isnan(number)
    if value is not None and (number is None or is_nan):
        raise ConfigError(f"{name} must be a number of seconds, not {shown(value)}")
    if number is None or number > MAX_TIME_S:
        return None
    return 0.0 if number < 0 else float(number)


def check_flag(name: str, value: object) -> bool:
    """Return a flag."""
    flag = flag_of(value)
    if flag is None:
        raise ConfigError(f"{name} must be True or False, not {shown(value)}")
    return flag


def check_choice(name: str, value: object, *choices: str) -> str:
    """Return text that is one of `choices`."""
    text = text_of(value)
    if text is None or text not in choices:
        raise ConfigError(f"{name} must be one of {', '.join(choices)}, not {shown(value)}")
    return text


def check_text(name: str, value: object, n_most: int) -> str:
    """Return text of 1 … `n_most` characters."""
    text = text_of(value)
    if text is None or not 0 < len(text) <= n_most:
        raise ConfigError(f"{name} must be a string of 1 … {n_most} characters, not {shown(value)}")
    check_whole(name, text)
    return text


def check_string(name: str, value: object) -> str | None:
    """Return text of any length; None for None."""
    text = text_of(value)
    if text is None and value is not None:
        raise ConfigError(f"{name} must be a string, not {shown(value)}")
    if text is not None:
        check_whole(name, text)
    return text


def strings_of(name: str, value: object) -> tuple[str, ...]:
    """Return the non-empty strings of `value`: an empty stop string would match everywhere."""
    text = text_of(value)
    items = list_of(value) if text is None else [text]
    texts = [text_of(item) for item in items or ()]
    if items is None or None in texts:
        raise ConfigError(f"{name} must be a string or a list of strings, not {shown(value)}")
    strings = tuple(text for text in texts if text)
    for text in strings:
        check_whole(name, text)
    return strings


def check_whole(name: str, text: str) -> None:
    """Refuse text that is not Unicode: `json.loads` and command lines that are not UTF-8 can give such strings."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"{name} has half of a surrogate pair, or bytes that are not UTF-8, at character {error.start + 1}: "
            f"{shown(text)}"
        ) from None


def readable(path: str | os.PathLike[str]) -> str:
    """Return a path as text that can be written anywhere: a byte that is not UTF-8 becomes `\\xff`."""
    name = os.fspath(path)
    with suppress(UnicodeEncodeError):  # the path does not come from the system
        return os.fsencode(name).decode("utf-8", "backslashreplace")
    return name.encode("utf-8", "backslashreplace").decode()


def check_path(name: str, value: object) -> str:
    """Return a path, with the home folder for `~`."""
    path = os.fspath(value) if isinstance(value, os.PathLike) else text_of(value)
    if not isinstance(path, str | bytes) or not _is_encodable(path):
        raise ConfigError(f"{name} must be a path, not {shown(value)}")
    return os.path.expanduser(os.fsdecode(path))


def _is_encodable(path: str | bytes) -> bool:
    """Whether a file system can have this path."""
    try:
        encoded = os.fsencode(path)
    except UnicodeEncodeError:
        return False
    return bool(encoded) and b"\0" not in encoded


def check_keys(name: str, mapping: Mapping[str, Any], known: Sequence[str]) -> None:
    """Check that a mapping has no keys but the known ones."""
    for key in mapping:
        if key not in known:
            others = near_or_known(str(key), known)
            raise ConfigError(f"{name} has the unknown key {key!r}; {others}")


def check_names(known: Collection[str], given: Iterable[str]) -> None:
    """Check that options have known names, with cbatch's own error. Raises an `UnsupportedOptionError`."""
    for name in given:
        if name not in known:
            raise UnsupportedOptionError(name, sorted(known))


def token_ids(name: str, value: object) -> tuple[int, ...]:
    """Return a list, or an array, of token ids as a tuple."""
    items = list_of(value)
    tokens = tuple(t for t in map(token_of, items or ()) if t is not None)
    if items is None or len(tokens) != len(items):
        raise ConfigError(f"{name} must be a list of token ids (0 and above), not {shown(value)}")
    return tokens


def json_object(name: str, value: object) -> str:
    """Return a mapping, or the text of a JSON object, as `json_text` writes it."""
    if (text := text_of(value)) is not None:
        return _json_object_of_text(name, check_text(name, text, MAX_GRAMMAR_LENGTH))
    if not isinstance(value, Mapping):
        raise ConfigError(f"{name} must be a mapping or JSON text, not {type(value).__name__}")
    return json_text(name, value)


@lru_cache(maxsize=64)  # a batch's options are merged anew for each of its items
def _json_object_of_text(name: str, text: str) -> str:
    value = parsed(name, text)
    if not isinstance(value, dict):
        raise ConfigError(f"{name} must be a JSON object, not {type(value).__name__}")
    return json_text(name, value)


class _LongIntegerError(ValueError):
    """An integer with more digits than Python reads."""


def parsed(name: str, text: str) -> object:
    """Return the value of a JSON text.

    Raises:
        ConfigError: it is none, or is nested too deep; the message calls it `name`.
    """
    try:
        value = read_json(text)
    except RecursionError:
        raise ConfigError(TOO_DEEP.format(name)) from None
    except ValueError as error:
        raise ConfigError(f"{name}: {why_unread(error, text)}") from None
    if is_text_too_deep(text):
        raise ConfigError(TOO_DEEP.format(name))
    return value


def why_unread(error: ValueError, text: str) -> str:
    """Return why JSON text could not be read; an integer that is too long is shown, with the limit."""
    if isinstance(error, TooManyValuesError):
        return str(error)
    if isinstance(error, json.JSONDecodeError):
        whole = text.rstrip()
        if "\n" in whole:
            return f"not JSON: {error}"
        # a line that breaks off is wrong at its end, not in the line below
        return f"not JSON: {error.msg} at column {min(error.pos, len(whole)) + 1}"
    try:
        json_reader(json.JSONDecoder(parse_int=_read_integer))(text)
    except _LongIntegerError as long:
        return str(long)
    except (ValueError, RecursionError):  # another mistake comes first
        pass
    return f"not JSON: {error}"


def _read_integer(digits: str) -> int:
    try:
        return int(digits)
    except ValueError:
        n_most = sys.get_int_max_str_digits()
        raise _LongIntegerError(
            f"the integer {digits[:20]}… has {len(digits.lstrip('-')):,} digits; at most {n_most:,} are allowed"
        ) from None


def refuse_constant(name: str) -> NoReturn:
    """Refuse `NaN` and `Infinity`, for `json.loads(…, parse_constant=…)`."""
    raise ValueError(f"{name} is not a JSON number")


def finite(digits: str) -> float:
    """Return a float; refuse one that is out of range. For `json.loads(…, parse_float=…)`."""
    number = float(digits)
    if math.isinf(number):
        raise ValueError(f"the number {digits[:20]} is too large for a float (at most 1.79e308)")
    return number


read_json = json_reader(json.JSONDecoder(parse_constant=refuse_constant, parse_float=finite))
"""Decodes JSON as a `json_reader`. `NaN`, `Infinity` and 1e999, which cannot be written as JSON again, raise
`ValueError`, too."""


def json_text(name: str, value: Mapping[str, Any]) -> str:
    """Return a mapping as compact JSON text, its keys in their own order."""
    check_depth(name, value)
    try:
        text = json.dumps(
            value,
            ensure_ascii=False,
            allow_nan=False,
            separators=(",", ":"),
            default=plain_for_json,
        )
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{name} cannot be written as JSON: {error}") from None
    return check_text(name, text, MAX_GRAMMAR_LENGTH)
