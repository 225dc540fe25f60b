"""Where prompts are cut into chunks: at every multiple, or wherever a step has room for a chunk."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cbatch.core.plan import Slot
from cbatch.core.span import ANYWHERE, N_TARGETS_MAX, PromptCuts, Span

if TYPE_CHECKING:
    from collections.abc import Sequence

EVERY, FREE = PromptCuts.every(4), PromptCuts(4, 12, least=3)
IN_ROWS = PromptCuts(4, 12, least=3, ends_in_row=True)


@pytest.mark.parametrize(("start", "n"), [(0, 4), (3, 1), (4, 2)])
def test_every_chunk_ends_at_the_next_multiple_and_with_the_prompt(start: int, n: int) -> None:
    assert EVERY.n_chunk(start, 6, 100) == n
    assert EVERY.n_chunk(start, 6, n) == n
    assert EVERY.n_chunk(start, 6, n - 1) == 0


@pytest.mark.parametrize(
    ("start", "n_prompt", "room", "n"),
    [
        (0, 2, 100, 2),
        (0, 12, 100, 12),
        (0, 13, 100, 8),  # 12 would leave one token
        (0, 15, 100, 12),
        (4, 15, 100, 11),
        (0, 12, 11, 8),
        (0, 12, 3, 0),
        (0, 6, 5, 0),  # 4 would leave two
        (0, 6, 6, 6),
        (0, 7, 6, 4),
        (3, 15, 100, 1),
    ],
)
def test_chunk_is_as_long_as_there_is_room_and_leaves_enough_for_the_last(
    start: int, n_prompt: int, room: int, n: int
) -> None:
    assert FREE.n_chunk(start, n_prompt, room) == n


@given(
    st.integers(1, 9).flatmap(
        lambda n: st.builds(PromptCuts, st.just(n), st.integers(2 * n, 40), st.integers(1, n + 1))
    ),
    st.integers(1, 200),
    st.data(),
)
def test_prompt_is_computed_in_steps_that_have_room_for_one_chunk(
    cuts: PromptCuts, n_prompt: int, data: st.DataObject
) -> None:
    start = 0
    while start < n_prompt:
        room = data.draw(st.integers(cuts.n_room, 60))
        n = cuts.n_chunk(start, n_prompt, room)
        assert 0 < n <= min(room, cuts.most)
        least = cuts.least if start + n == n_prompt else cuts.multiple
        assert n >= min(least, n_prompt)
        assert start % cuts.multiple == 0
        start += n
    assert start == n_prompt


@pytest.mark.parametrize(("n_prompt", "n"), [(1, 0), (2, 1), (4, 4), (7, 6), (8, 8)])
def test_prompt_ends_in_a_row_unless_it_ends_at_a_multiple(n_prompt: int, n: int) -> None:
    assert IN_ROWS.n_before_row(n_prompt) == n
    assert FREE.n_before_row(n_prompt) == EVERY.n_before_row(n_prompt) == n_prompt


def test_end_of_a_prompt_is_split_where_it_is_a_row_that_is_sampled() -> None:
    def chunk(n: int, *, has_output: bool = True, targets: Sequence[int] = ()) -> Span:
        return Span(Slot(1), 4, [*range(n)], has_output, targets)

    before, row = Span(Slot(1), 4, [0, 1], has_output=False), Span(Slot(1), 6, [2], True)
    assert IN_ROWS.parts(chunk(3)) == (before, row)
    for whole in (
        chunk(1),
        chunk(4),
        chunk(3, has_output=False),
        chunk(3, targets=[1]),
    ):
        assert IN_ROWS.parts(whole) == (whole,)
    assert FREE.parts(chunk(3)) == EVERY.parts(chunk(3)) == ANYWHERE.parts(chunk(3)) == (chunk(3),)


def test_scored_prompts_are_cut_as_their_targets_need_it() -> None:
    assert PromptCuts.every(512).when_scored == PromptCuts.every(N_TARGETS_MAX)
    assert PromptCuts(64, 512, 8).when_scored == PromptCuts.every(N_TARGETS_MAX)
    assert PromptCuts.every(8).when_scored == PromptCuts.every(8)
    assert not ANYWHERE.when_scored


def test_cuts_say_what_bits_depend_on() -> None:
    assert [str(cuts) for cuts in (EVERY, FREE)] == ["4", "any multiple of 4"]
    assert [bool(cuts) for cuts in (EVERY, FREE, ANYWHERE)] == [True, True, False]
