"""Positions of a sequence's cells, where the rows of a picture share positions (M-RoPE).

llama.cpp counts a picture as fewer positions than it has rows: all rows have the position at which it begins, and what
follows is as many further on as the picture is wide or high. So a cell behind a picture has a position below its index.
Source: llama.cpp, tools/mtmd/mtmd.cpp, mtmd_image_tokens_get_decoder_pos and mtmd_image_tokens_get_n_pos.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias


class FlatPicture(NamedTuple):
    """A picture whose rows share one position, in a sequence."""

    start: int
    """The index of its first row."""
    n_rows: int
    n_positions: int
    """How many positions further on the sequence goes on behind it."""

    @property
    def end(self) -> int:
        """The index behind its last row."""
        return self.start + self.n_rows


FlatPictures: TypeAlias = "Sequence[FlatPicture]"
"""Of one sequence, ascending."""


def position_of(pictures: FlatPictures, i: int) -> int:
    """Return the position of the cell at index `i`."""
    n_less = 0
    for picture in pictures:
        if i < picture.end:
            return min(i, picture.start) - n_less
        n_less += picture.n_rows - picture.n_positions
    return i - n_less


def n_positions(pictures: FlatPictures, n_cells: int) -> int:
    """Return what llama.cpp counts for the first `n_cells` cells: their last position + 1."""
    return position_of(pictures, n_cells - 1) + 1 if n_cells else 0


def first_pictures(pictures: FlatPictures, n_cells: int) -> FlatPictures:
    """Return the pictures that are whole in the first `n_cells` cells."""
    return [picture for picture in pictures if picture.end <= n_cells]


def cuts_picture(pictures: FlatPictures, n_cells: int) -> bool:
    """Whether the first `n_cells` cells have only some rows of a picture: llama.cpp cannot cut there."""
    return any(picture.start < n_cells < picture.end for picture in pictures)
