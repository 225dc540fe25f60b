"""The radix tree against a plain dictionary."""

from __future__ import annotations

import tracemalloc
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cbatch.core.plan import Slot
from cbatch.support.prefix_index import PrefixIndex, n_common
from tests.helpers import root_of
from tests.profiles import examples

TOKENS = st.lists(st.integers(0, 1), max_size=6)


def plain_common(a: list[int], b: list[int]) -> int:
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


def n_tokens_in(index: PrefixIndex) -> int:
    """Return how many tokens an index keeps."""
    todo, n = [root_of(index)], 0
    while todo:
        node = todo.pop()
        n += len(node.tokens)
        todo += node.children.values()
    return n


@given(
    st.lists(st.tuples(st.integers(0, 5), st.none() | TOKENS), min_size=10, max_size=40),
    TOKENS,
)
@settings(max_examples=examples(200))
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
    expected = {s: n for s, tokens in plain.items() if (n := plain_common(tokens, wanted))}
    found = index.find(wanted)
    assert found == expected
    assert [*found.values()] == sorted(found.values(), reverse=True)
    prefixes = {tuple(t[: i + 1]) for t in plain.values() for i in range(len(t))}
    assert n_tokens_in(index) == len(prefixes)  # a common beginning is kept once


@given(st.lists(st.integers(0, 1), max_size=900), st.integers(0, 900), st.integers(0, 5))
def test_common_tokens_are_counted_from_a_start(tokens: list[int], n: int, start: int) -> None:
    others = [7] * start + tokens[:n] + [8]
    assert n_common(tokens, others, start) == min(n, len(tokens))


def test_slot_that_is_put_again_is_found_by_its_new_tokens_alone() -> None:
    index = PrefixIndex()
    index.put(Slot(0), [1, 2, 3])
    index.put(Slot(0), [4, 5])
    assert index.find([1, 2, 3]) == {}
    assert index.find([4, 5, 6]) == {0: 2}


def test_slots_with_as_much_in_common_come_in_the_order_they_were_put() -> None:
    index = PrefixIndex()
    for slot in range(4):
        index.put(Slot(slot), [1, 2, slot % 2])
    index.put(Slot(0), [1, 3])
    assert [*index.find([1, 9])] == [1, 2, 3, 0]


def test_slot_that_ends_inside_another_stays_when_a_third_is_removed() -> None:
    index = PrefixIndex()
    for slot, tokens in enumerate([[1], [1, 2], [1, 3]]):
        index.put(Slot(slot), tokens)
    index.remove(Slot(2))
    assert index.find([1, 2]) == {1: 2, 0: 1}


def test_prompt_that_leaves_a_shared_prefix_midway_matches_up_to_there() -> None:
    index = PrefixIndex()
    index.put(Slot(0), [1, 2, 3])
    index.put(Slot(1), [1, 2, 4])
    assert index.find([1, 4]) == {0: 1, 1: 1}


def test_what_is_alone_again_is_one_node() -> None:
    index = PrefixIndex()
    index.put(Slot(0), [1, 2, 3, 4])
    for n in (1, 2, 3):
        index.put(Slot(1), [1, 2, 3][:n])
    index.remove(Slot(1))
    [node] = root_of(index).children.values()
    assert (node.tokens, node.children) == ([1, 2, 3, 4], {})


def test_branches_below_what_became_one_node_are_removed_without_a_trace() -> None:
    index = PrefixIndex()
    for slot, tokens in enumerate([[1, 9], [1, 2, 3], [1, 2, 4]]):
        index.put(Slot(slot), tokens)
    for slot in range(3):  # with the first gone, 1 and 2 are one node
        index.remove(Slot(slot))
    assert n_tokens_in(index) == 0


def test_removed_slots_leave_an_empty_tree() -> None:
    index = PrefixIndex()
    for i in range(4):
        index.put(Slot(i), [1, 2, *range(i)])
    for i in range(4):
        index.remove(Slot(i))
    assert n_tokens_in(index) == 0


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans(), TOKENS), max_size=40), TOKENS)
@settings(max_examples=examples(100))
def test_copy_and_original_change_on_their_own(
    changes: list[tuple[int, bool, list[int]]], wanted: list[int]
) -> None:
    index, both = PrefixIndex(), (PrefixIndex(), PrefixIndex())
    for slot, _, tokens in changes[:20]:
        index.put(Slot(slot), tokens)
        for plain in both:
            plain.put(Slot(slot), tokens)
    copied = index.copy()
    for slot, is_of_copy, tokens in changes[20:]:
        (copied if is_of_copy else index).put(Slot(slot), tokens)
        both[is_of_copy].put(Slot(slot), tokens)
    for each, plain in zip((index, copied), both, strict=True):
        assert [*each.find(wanted).items()] == [*plain.find(wanted).items()]
        assert n_tokens_in(each) == n_tokens_in(plain)


class Counted(list[int]):
    """Tokens that count how many of them were looked at."""

    n_seen = 0

    def __getitem__(self, key: Any) -> Any:
        found = super().__getitem__(key)
        self.n_seen += len(found) if isinstance(key, slice) else 1
        return found


@pytest.mark.parametrize("n_slots", [1, 250])
@pytest.mark.parametrize("n_tokens", [1_000, 8_000])
def test_lookup_looks_at_each_token_of_a_prompt_twice_at_most(n_slots: int, n_tokens: int) -> None:
    index, prompt = PrefixIndex(), Counted(i % 7 for i in range(n_tokens))
    for i in range(n_slots):  # each leaves the prompt at another place
        index.put(Slot(i), [*prompt[: n_tokens * (i + 1) // n_slots], 9])
    prompt.n_seen = 0
    assert max(index.find(prompt).values()) == n_tokens
    assert n_tokens <= prompt.n_seen <= 2 * n_tokens + 4 * n_slots


@pytest.mark.parametrize("n_tokens", [1_000, 4_000])
def test_memory_of_an_index_is_a_few_bytes_a_token(n_tokens: int) -> None:
    texts = [[(7 * i + slot) % 256 for i in range(n_tokens)] for slot in range(16)]
    tracemalloc.start()
    try:
        index = PrefixIndex()
        for slot, tokens in enumerate(texts):
            index.put(Slot(slot), tokens)
        n_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert n_tokens_in(index) == 16 * n_tokens
    assert n_bytes < 10 * n_tokens_in(index)


def test_index_after_many_changes_keeps_only_what_stands_in_its_slots() -> None:
    index, base = PrefixIndex(), [*range(100)]
    for i in range(2_000):
        index.put(Slot(i % 8), [*base[: i % 101], *range(1000 + i, 1050 + i)])
    assert n_tokens_in(index) <= 100 + 8 * 50
