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
    shares = split_budget(wanted, wanted, budget)
    assert len(shares) == len(wanted)
    assert all(0 <= share <= want for share, want in zip(shares, wanted, strict=True))
    assert sum(shares) == min(budget, sum(wanted))


@given(st.lists(st.integers(1, 50), min_size=1, max_size=8), st.integers(1, 100))
def test_split_budget_serves_the_first_whole_before_the_next(
    wanted: list[int], budget: int
) -> None:
    shares = split_budget(wanted, wanted, budget)
    for i, (one, other) in enumerate(pairwise(shares)):
        assert one == wanted[i] or other == 0


@pytest.mark.parametrize(
    ("wanted", "left", "n_enough", "shares"),
    [
        ([400, 400, 400], [400, 400, 400], 300, [400, 0, 0]),
        ([400, 400, 400], [400, 400, 400], 500, [400, 200, 0]),
        ([200, 50, 30], [200, 50, 900], 200, [200, 50, 0]),
        ([600, 50], [900, 50], 300, [600, 0]),
        ([100, 20, 300], [100, 20, 300], 120, [100, 20, 300]),
        ([100, 20, 500], [100, 20, 500], 120, [100, 20, 0]),
    ],
)
def test_part_of_a_prompt_waits_once_there_is_enough(
    wanted: list[int], left: list[int], n_enough: int, shares: list[int]
) -> None:
    assert split_budget(wanted, left, 600, n_enough) == shares


@pytest.mark.parametrize(
    ("budget", "shares"), [(12, [4, 4, 4]), (11, [4, 4, 0]), (7, [4, 0, 3]), (3, [0, 0, 3])]
)
def test_chunk_is_computed_whole_or_not_at_all(budget: int, shares: list[int]) -> None:
    assert whole_chunks([4, 4, shares[2] or 4], budget) == shares


def test_split_budget_gives_only_what_can_be_computed() -> None:
    by_fours = [lambda n: n - n % 4] * 3
    assert split_budget([9, 9, 9], [9, 9, 9], 15, n_whole=by_fours) == [8, 4, 0]
