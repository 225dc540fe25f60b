"""Where prompts are cut into chunks: at every multiple, or wherever a step has room for a chunk."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cbatch.core.plan import ANYWHERE, N_TARGETS_MAX, PromptCuts

EVERY, FREE = PromptCuts.every(4), PromptCuts(4, 12, least=3)


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
        lambda n: st.builds(PromptCuts, st.just(n), st.integers(2 * n, 40), st.integers(1, n))
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
        assert n >= min(cuts.least, n_prompt)
        assert start % cuts.multiple == 0
        start += n
    assert start == n_prompt


def test_scored_prompts_are_cut_as_their_targets_need_it() -> None:
    assert PromptCuts.every(512).when_scored == PromptCuts.every(N_TARGETS_MAX)
    assert PromptCuts(64, 512, 8).when_scored == PromptCuts.every(N_TARGETS_MAX)
    assert PromptCuts.every(8).when_scored == PromptCuts.every(8)
    assert not ANYWHERE.when_scored


def test_cuts_say_what_bits_depend_on() -> None:
    assert [str(cuts) for cuts in (EVERY, FREE)] == ["4", "any multiple of 4"]
    assert [bool(cuts) for cuts in (EVERY, FREE, ANYWHERE)] == [True, True, False]
