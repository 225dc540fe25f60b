"""How a step's room is shared among prompts."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cbatch.core.budget import (
    split_budget,
    whole_chunks,
)


@given(st.lists(st.integers(1, 50), max_size=8), st.integers(0, 100))
def test_split_budget_gives_what_there_is_and_wastes_nothing(
    wanted: list[int], budget: int
) -> None:
    shares = split_budget(wanted, budget)
    assert len(shares) == len(wanted)
    assert all(0 <= share <= want for share, want in zip(shares, wanted, strict=True))
    assert sum(shares) == min(budget, sum(wanted))


@given(st.lists(st.integers(1, 50), min_size=1, max_size=8), st.integers(1, 100))
def test_split_budget_gives_the_oldest_half_or_all_it_wants(wanted: list[int], budget: int) -> None:
    assert split_budget(wanted, budget)[0] >= min(wanted[0], (budget + 1) // 2)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=8), st.integers(1, 100))
def test_split_budget_serves_the_shorter_whole_before_the_longer(
    wanted: list[int], budget: int
) -> None:
    shares = split_budget(wanted, budget)
    by_size = sorted(range(1, len(wanted)), key=lambda i: wanted[i])
    for shorter, longer in pairwise(by_size):
        assert shares[shorter] == wanted[shorter] or shares[longer] == 0


@pytest.mark.parametrize(
    ("wanted", "budget", "shares"),
    [
        ([], 8, []),
        ([9], 8, [8]),
        ([9, 9], 8, [4, 4]),
        ([4, 4], 7, [4, 3]),
        ([9, 9, 9], 8, [4, 4, 0]),
        ([9, 3, 2], 8, [4, 2, 2]),
        ([9, 1, 9], 8, [4, 1, 3]),
        ([1, 9, 1], 8, [1, 6, 1]),
        ([9, 1, 1], 8, [6, 1, 1]),
        ([2, 9, 9, 9], 4, [2, 2, 0, 0]),
        ([9, 9], 0, [0, 0]),
    ],
)
def test_split_budget_by_eye(wanted: list[int], budget: int, shares: list[int]) -> None:
    assert split_budget(wanted, budget) == shares


@pytest.mark.parametrize(
    ("budget", "shares"), [(12, [4, 4, 4]), (11, [4, 4, 0]), (7, [4, 0, 3]), (3, [0, 0, 3])]
)
def test_chunk_is_computed_whole_or_not_at_all(budget: int, shares: list[int]) -> None:
    assert whole_chunks([4, 4, shares[2] or 4], budget) == shares
