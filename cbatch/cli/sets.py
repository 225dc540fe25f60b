"""`--set name=value`: any option of a request, its value parsed by the option's type."""

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import fields
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from cbatch.errors import ConfigError, near_or_known
from cbatch.options import RunOptions
from cbatch.support.checks import shown

FROM_FILE = ("json_schema", "response_format", "grammar", "tools", "chat_template_kwargs")
"""Options whose values are often long: `@FILE` gives the content of a file."""

_FLAGS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
_DIGITS = {"1": True, "0": False}
_WORDS: Mapping[type, str] = MappingProxyType(
    {
        bool: "true or false",
        int: "a whole number",
        float: "a number",
        list: "a JSON list",
        dict: "a JSON object",
    }
)


def set_options(given: Collection[str], taken: Collection[str]) -> dict[str, Any]:
    """Return options by name, each given as `name=value`; `taken` are names that flags of the command line give."""
    found: dict[str, Any] = {}
    for text in given:
        name, equals, value = text.partition("=")
        name = name.strip().replace("-", "_")
        if not equals:
            raise ConfigError(f"--set {text}: give a name and a value: --set temperature=0.5")
        _check_name(name, taken, found)
        found[name] = value_of(name, value, f"--set {name}")
    return found


def _check_name(name: str, taken: Collection[str], found: Collection[str]) -> None:
    known = _kinds()
    if name not in known:
        raise ConfigError(f"--set {name}: unknown option; {near_or_known(name, sorted(known))}")
    if name in taken:
        raise ConfigError(
            f"--set {name}: --{name.replace('_', '-')} gives this option too: leave one of them out"
        )
    if name in found:
        raise ConfigError(f"--set {name}: occurs twice: give it once")


def value_of(name: str, text: str, place: str) -> Any:
    """Return the value of an option, parsed by its type; errors call it by its `place`."""
    kinds = _kinds()[name]
    if text.startswith("@") and name in FROM_FILE:
        text = read_text(place, text[1:])
    for kind, read in ((bool, _flag), (int, _whole), (float, _number), (list, _json)):
        wanted = kinds & {list, dict} if kind is list else kinds & {kind}
        if wanted and (value := read(text, kinds)) is not None:
            return value
    if str in kinds:
        return text
    what = " or ".join(_WORDS[kind] for kind in _WORDS if kind in kinds)
    raise ConfigError(f"{place}: must be {what}, not {shown(text)}")


def _flag(text: str, kinds: Collection[type]) -> bool | None:
    known = _FLAGS if int in kinds else _FLAGS | _DIGITS
    return known.get(text.lower())


def _whole(text: str, kinds: Collection[type]) -> int | None:
    return int(text) if re.fullmatch(r"[+-]?[0-9]{1,99}", text) else None


def _number(text: str, kinds: Collection[type]) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _json(text: str, kinds: Collection[type]) -> Any:
    """Return a list or an object, if that is among `kinds`; else None."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if type(value) in kinds and isinstance(value, list | dict) else None


def read_text(place: str, path: str) -> str:
    """Return the text of a file; a ConfigError calls the option by its `place`."""
    try:
        return Path(path).expanduser().read_text(encoding="utf-8").removeprefix("\ufeff")
    except (OSError, ValueError, RuntimeError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        if isinstance(error, UnicodeDecodeError):
            raise ConfigError(f"{place}: {path}: not UTF-8: {error.reason}") from error
        raise ConfigError(f"{place}: {path}: cannot be read: {why}") from error


@cache
def _kinds() -> dict[str, frozenset[type]]:
    hints = get_type_hints(RunOptions)
    names = [f.name for f in fields(RunOptions)]
    return {name: frozenset(map(_kind_of, get_args(hints[name]))) for name in names}


def _kind_of(hint: Any) -> type:
    origin = get_origin(hint)
    if origin is Literal:
        return str
    if hint in (bool, int, float, str) or origin is None:
        return hint if isinstance(hint, type) else str
    return dict if issubclass(origin, Mapping) else list
