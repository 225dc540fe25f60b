"""Ids that stand for the rows of pictures in a sequence's tokens, so that all that counts cells counts them too."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

FIRST_PICTURE = 2**32
"""The least id that is no token of a vocabulary."""

N_ROWS_MAX = 2**20
"""Ids that each picture has: more than a picture has rows."""


class PictureTokens(list[int]):
    """A prompt's tokens, with the pictures of which some are rows: these stay in memory as long as this is held."""

    def __init__(self, tokens: Iterable[int], pictures: Sequence[object]) -> None:
        """Take the tokens, and what holds the rows."""
        super().__init__(tokens)
        self.pictures = pictures

    @property
    def n_rows(self) -> int:
        """Rows of pictures among the tokens."""
        return sum(token >= FIRST_PICTURE for token in self)


def ids_of(number: int, n_rows: int) -> range:
    """Return the ids of the rows of picture `number`: the same picture has the same number, so its cells are shared."""
    first = FIRST_PICTURE + number * N_ROWS_MAX
    return range(first, first + n_rows)


def place_of(token: int) -> tuple[int, int]:
    """Return the number of a picture and the row that an id stands for."""
    return divmod(token - FIRST_PICTURE, N_ROWS_MAX)


def whole_pictures(tokens: Sequence[int], n: int) -> int:
    """Return `n`, or where the picture begins of which the first `n` tokens have only some rows."""
    if n >= len(tokens) or tokens[n] < FIRST_PICTURE:
        return n
    return n - place_of(tokens[n])[1]


def n_rows_at(tokens: Sequence[int], start: int) -> int:
    """Return how many rows of one picture follow each other from a place on; 0 if a token is there."""
    if start == len(tokens) or tokens[start] < FIRST_PICTURE:
        return 0
    end = start + 1
    while end < len(tokens) and tokens[end] == tokens[end - 1] + 1:
        end += 1
    return end - start


def without_pictures(tokens: Sequence[int]) -> Sequence[int]:
    """Return the tokens that are of a vocabulary: the same object where all are."""
    if max(tokens, default=0) < FIRST_PICTURE:
        return tokens
    return [token for token in tokens if token < FIRST_PICTURE]
