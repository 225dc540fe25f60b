"""Ids: none that is automatic comes twice, and each that is handed out means one request."""

from __future__ import annotations

import copy
import json
import pickle
from enum import Enum
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cbatch.errors import DuplicateIdError
from cbatch.runtime.ids import Ids, RequestId, own_id

if TYPE_CHECKING:
    from collections.abc import Callable


def test_ids_count_up_by_place_and_never_begin_anew() -> None:
    ids = Ids()
    assert ids.of_batch([None, None, None], {}) == ["0", "1", "2"]
    assert ids.of_batch([None, "b", None], {}) == ["3", "b", "5"]
    assert ids.automatic() == "6"


def test_number_that_is_in_flight_or_was_given_by_hand_is_passed() -> None:
    assert Ids().of_batch([None, None], {"0": 1, "2": 1}) == ["1", "3"]
    assert Ids().of_batch([None, "0", "2", None], {}) == ["1", "0", "2", "4"]


NAMES = st.sampled_from(["0", "1", "2", "3", "x"])


@given(st.lists(st.lists(st.one_of(st.none(), NAMES), max_size=6), max_size=4), st.sets(NAMES))
def test_automatic_ids_are_unique_for_ever_and_own_ones_stay(
    batches: list[list[str | None]], taken: set[str]
) -> None:
    ids, automatic = Ids(), list[str]()
    for own in batches:
        given = [name for name in own if name is not None]
        if len(given) != len(set(given)) or taken & set(given):
            with pytest.raises(DuplicateIdError):
                ids.of_batch(own, taken)
            continue
        found = ids.of_batch(own, taken)
        assert len(set(found)) == len(found) == len(own)
        assert [id for id, name in zip(found, own, strict=True) if name is not None] == given
        automatic += [id for id, name in zip(found, own, strict=True) if name is None]
    assert len(set(automatic)) == len(automatic)
    assert not taken & set(automatic)


# ---- as text ----


def test_id_is_text_like_any_other() -> None:
    id = RequestId("b")
    assert (id, hash(id), f"{id}", str(id), repr(id)) == ("b", hash("b"), "b", "b", "'b'")
    values: dict[str, int] = {id: 1}
    assert values["b"] == {"b": 1}[id] == 1
    assert sorted([RequestId("c"), "d", id]) == ["b", "c", "d"]
    assert json.loads(json.dumps({id: [id]})) == {"b": ["b"]}
    assert not hasattr(id, "__dict__")


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_copy_means_the_same_request(copied: Callable[[list[str]], list[str]]) -> None:
    ids: list[str] = [RequestId("b")]
    assert copied(ids)[0] is ids[0]


def test_pickled_id_is_text_alone() -> None:
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        read = pickle.loads(pickle.dumps(RequestId("b"), protocol))
        assert (read, type(read)) == ("b", str)


def test_own_id_is_the_text_that_it_is_equal_to() -> None:
    class Names(str, Enum):
        FIRST = "first"

    for text in ("first", Names.FIRST, own_id("first")):
        id = own_id(text)
        assert (id, type(id), id is text) == ("first", RequestId, False)
