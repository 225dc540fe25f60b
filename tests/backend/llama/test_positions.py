"""Positions of cells behind pictures whose rows share a position."""

from __future__ import annotations

import random

from cbatch.backend.llama.positions import (
    FlatPicture,
    cuts_picture,
    first_pictures,
    n_positions,
    position_of,
)


def test_positions_behind_pictures_are_below_indexes() -> None:
    # two tokens, six rows of two positions, a token, four rows of three positions, a token
    pictures = [FlatPicture(2, 6, 2), FlatPicture(9, 4, 3)]
    found = [position_of(pictures, i) for i in range(14)]
    assert found == [0, 1, *[2] * 6, 4, *[5] * 4, 8]
    assert [n_positions(pictures, n) for n in (0, 2, 8, 9, 13, 14)] == [0, 2, 3, 5, 6, 9]
    assert position_of((), 7) == 7


def test_picture_is_kept_whole_or_not_at_all() -> None:
    pictures = [FlatPicture(2, 6, 2), FlatPicture(9, 4, 3)]
    assert first_pictures(pictures, 12) == pictures[:1]
    assert first_pictures(pictures, 13) == pictures
    assert [n for n in range(15) if cuts_picture(pictures, n)] == [3, 4, 5, 6, 7, 10, 11, 12]


def test_positions_of_any_sequence_ascend() -> None:
    for seed in range(200):
        draw, pictures, end = random.Random(seed), list[FlatPicture](), 0
        while len(pictures) < 4:
            n_wide, n_high = draw.randrange(1, 5), draw.randrange(1, 5)
            start = end + draw.randrange(3)
            pictures.append(FlatPicture(start, n_wide * n_high, max(n_wide, n_high)))
            end = pictures[-1].end
        found = [position_of(pictures, i) for i in range(end + 3)]
        assert found == sorted(found), seed
        for picture in pictures:
            assert position_of(pictures, picture.end) == found[picture.start] + picture.n_positions
