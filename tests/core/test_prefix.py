"""The radix tree against a plain dictionary."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cbatch.core.plan import Slot
from cbatch.core.prefix import PrefixIndex, n_common

TOKENS = st.lists(st.integers(0, 2), max_size=9)


def plain_common(a: list[int], b: list[int]) -> int:
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


@given(
    st.lists(st.tuples(st.integers(0, 4), st.none() | TOKENS), max_size=25),
    TOKENS,
)
def test_matches_are_those_of_a_dictionary(
    changes: list[tuple[int, list[int] | None]], wanted: list[int]
) -> None:
    index, plain = PrefixIndex(), dict[Slot, list[int]]()
    for slot, tokens in changes:
        if tokens is None:
            index.remove(Slot(slot))
            plain.pop(Slot(slot), None)
        else:
            index.put(Slot(slot), tokens)
            plain[Slot(slot)] = tokens
    found = list(index.matches(wanted))
    expected = {(n, s) for s, tokens in plain.items() if (n := plain_common(tokens, wanted))}
    assert set(found) == expected
    assert len(found) == len(expected)
    assert [n for n, _ in found] == sorted((n for n, _ in found), reverse=True)
    prefixes = {tuple(t[: i + 1]) for t in plain.values() for i in range(len(t))}
    assert index.n_tokens() == len(prefixes)  # a common beginning is kept once


@given(st.lists(st.integers(0, 1), max_size=300), st.integers(0, 300), st.integers(0, 5))
def test_common_tokens_are_counted_from_a_start(tokens: list[int], n: int, start: int) -> None:
    others = [7] * start + tokens[:n] + [8]
    assert n_common(tokens, others, start) == min(n, len(tokens))


def test_slot_that_is_put_again_is_found_by_its_new_tokens_alone() -> None:
    index = PrefixIndex()
    index.put(Slot(0), [1, 2, 3])
    index.put(Slot(0), [4, 5])
    assert list(index.matches([1, 2, 3])) == []
    assert list(index.matches([4, 5, 6])) == [(2, 0)]


def test_removed_slots_leave_an_empty_tree() -> None:
    index = PrefixIndex()
    for i in range(4):
        index.put(Slot(i), [1, 2, *range(i)])
    for i in range(4):
        index.remove(Slot(i))
    assert index.n_tokens() == 0
