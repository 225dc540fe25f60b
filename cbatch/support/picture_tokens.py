"""Ids that stand for rows of pictures and sounds in a sequence's tokens, so that what counts cells counts them too."""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import numpy as np
    from numpy.typing import NDArray

FIRST_PICTURE = 2**32
"""The least id that is not a token of a vocabulary."""

N_ROWS_MAX = 2**20
"""Ids that each picture or sound has: more than one has rows."""


class PromptMedium(Protocol):
    """A picture or a sound of a prompt."""

    @property
    def is_encoded(self) -> bool:
        """Whether its rows are there."""

    @property
    def is_slow(self) -> bool:
        """Whether decoding it takes long."""

    @property
    def key(self) -> str:
        """What tells it from all others, in any process."""

    def state(self) -> NDArray[np.uint8]:
        """Return its rows, once they are there: (n_bytes,) uint8."""

    def restore(self, data: NDArray[np.uint8]) -> None:
        """Take rows, as `state` returned them, in place of encoding.

        Raises:
            ValueError: they do not fit, or are not finite; the text ends a sentence about the rows.
        """


class PictureTokens(list[int]):
    """A prompt's tokens, with the pictures and sounds of which some are rows: these stay in memory as long as this."""

    def __init__(
        self, tokens: Iterable[int], pictures: Sequence[PromptMedium], n_sound_rows: int = 0
    ) -> None:
        """Take the tokens, what holds the rows, and how many are of sounds."""
        super().__init__(tokens)
        self.pictures, self.n_sound_rows = pictures, n_sound_rows

    @property
    def is_encoded(self) -> bool:
        """Whether all rows are there."""
        return all(picture.is_encoded for picture in self.pictures)

    @property
    def is_slow(self) -> bool:
        """Whether something is to be encoded that takes long to decode."""
        return any(p.is_slow and not p.is_encoded for p in self.pictures)

    @property
    def n_rows(self) -> int:
        """Rows of pictures and sounds among the tokens."""
        return sum(token >= FIRST_PICTURE for token in self)


def ids_of(number: int, n_rows: int) -> range:
    """Return the ids of the rows of picture or sound `number`: the same one has the same, so its cells are shared."""
    first = FIRST_PICTURE + number * N_ROWS_MAX
    return range(first, first + n_rows)


def place_of(token: int) -> tuple[int, int]:
    """Return the number of a picture or sound, and the row that an id stands for."""
    return divmod(token - FIRST_PICTURE, N_ROWS_MAX)


def edges_of(tokens: Sequence[int]) -> tuple[int, ...]:
    """Return where the pictures in tokens begin and end, in pairs; a picture may follow another one, or itself."""
    if max(tokens, default=0) < FIRST_PICTURE:
        return ()
    return tuple(_edges(tokens))


def _edges(tokens: Sequence[int]) -> Iterator[int]:
    before = 0
    for i, token in enumerate(tokens):
        is_first = token >= FIRST_PICTURE and token != before + 1
        if before >= FIRST_PICTURE and (is_first or token < FIRST_PICTURE):
            yield i
        if is_first:
            yield i
        before = token
    if before >= FIRST_PICTURE:
        yield len(tokens)


def n_rows_at(edges: Sequence[int], start: int) -> int:
    """Return how many rows of one picture follow each other from a place on; 0 if a token is there."""
    i = bisect_right(edges, start)
    return edges[i] - start if i % 2 else 0


def without_pictures(tokens: Sequence[int]) -> Sequence[int]:
    """Return the tokens that are of a vocabulary: the same object where all are."""
    if max(tokens, default=0) < FIRST_PICTURE:
        return tokens
    return [token for token in tokens if token < FIRST_PICTURE]
