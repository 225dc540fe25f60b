"""JSON in pieces: the text of `json.dumps`, whose lists are made as they are written."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cbatch.support.lazy_json import LazyList, listed, pieces_of

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


def lazy(value: Any) -> Any:
    """A value whose lists are lazy."""
    if isinstance(value, dict):
        return {name: lazy(inner) for name, inner in value.items()}
    return LazyList(lazy, value) if isinstance(value, list) else value


@given(VALUES)
def test_pieces_are_the_text_of_the_lists(value: Any) -> None:
    made = lazy(value)
    assert "".join(pieces_of(made)) == json.dumps(value)
    assert json.dumps(made, default=listed) == json.dumps(value)
    compact: Any = {"ensure_ascii": False, "separators": (",", ":")}
    assert "".join(pieces_of(made, **compact)) == json.dumps(value, **compact)


def test_items_are_made_as_pieces_are_taken() -> None:
    made: list[int] = []

    def make(n: int) -> str:
        made.append(n)
        return "x" * 9000

    pieces = pieces_of({"a": LazyList(make, range(100)), "b": 1})
    for n_taken in range(50):
        next(pieces)
        assert len(made) <= n_taken


def test_small_items_share_pieces() -> None:
    pieces = [*pieces_of(LazyList(int, range(100_000)))]
    assert len(pieces) < 400
    assert max(map(len, pieces)) < 20_000


def test_other_values_are_written_by_the_default() -> None:
    assert "".join(pieces_of([LazyList(str, [1]), 2j], default=str)) == '[["1"], "2j"]'
    with pytest.raises(TypeError, match="not JSON: complex"):
        [*pieces_of(2j)]
