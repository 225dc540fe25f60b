"""JSON of long values in pieces: lists whose items are made only as they are written."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

_N_PIECE = 2**12
"""Characters of a piece that small items fill together. Our choice: some tens of microseconds of work."""

_MARK = secrets.token_hex(16)
"""Stands for a lazy list in a text; no client can know it."""


@dataclass(frozen=True, eq=False, slots=True)
class LazyList:
    """A list in JSON, of what `make` returns for each of `items`."""

    make: Callable[[Any], Any]
    items: Sequence[Any]

    def __iter__(self) -> Iterator[Any]:
        return map(self.make, self.items)


def pieces_of(
    value: object, *, default: Callable[[Any], Any] | None = None, **how: Any
) -> Iterator[str]:
    """Yield a value as JSON in pieces of any length; long lists in it are `LazyList`s.

    Args:
        value: has no infinities and NaNs.
        default: as for `json.dumps`, for values other than `LazyList`s.
        how: further arguments of `json.JSONEncoder`.
    """
    yield from _PieceEncoder(default or listed, how).pieces(value)


def listed(value: object) -> list[Any]:
    """Return the list of a `LazyList`: the argument `default` of `json.dumps`."""
    if not isinstance(value, LazyList):
        raise TypeError(f"not JSON: {type(value).__name__}")
    return [*value]


class _PieceEncoder:
    """Encodes values around the lazy lists in them."""

    def __init__(self, default: Callable[[Any], Any], how: Mapping[str, Any]) -> None:
        self._default = default
        self._found: list[LazyList] = []
        """Lazy lists of the newest text, in order."""
        encoder = json.JSONEncoder(default=self._stand_in, allow_nan=False, **how)
        self._encode, self._comma = encoder.encode, encoder.item_separator

    def _stand_in(self, value: object) -> Any:
        if not isinstance(value, LazyList):
            return self._default(value)
        self._found.append(value)
        return _MARK

    def pieces(self, value: object) -> Iterator[str]:
        """Yield the pieces of a value."""
        yield from self._parted(self._encode(value))

    def _parted(self, text: str) -> Iterator[str]:
        """Yield a new text, with the lazy lists in their places."""
        lists, self._found = self._found, []
        if not lists:
            yield text
            return
        before, *others = text.split(f'"{_MARK}"')
        for lazy, after in zip(lists, others, strict=True):
            yield before + "["
            yield from self._items(iter(lazy))
            before = "]" + after
        yield before

    def _items(self, items: Iterator[Any]) -> Iterator[str]:
        """Yield the items of a list; small ones are encoded together, which is faster."""
        n_items, before = 1, ""
        while some := [*islice(items, n_items)]:
            text = self._encode(some)[1:-1]
            n_items = n_items * 2 if len(text) < _N_PIECE else max(1, n_items // 2)
            yield before
            yield from self._parted(text)
            before = self._comma
