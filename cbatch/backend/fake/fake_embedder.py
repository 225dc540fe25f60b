"""Vectors without a model: a function of a text's tokens alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from cbatch.backend.fake.fake_tokens import mix
from cbatch.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from cbatch.embedding import Pooling

N_EMBEDDING = 8


class FakeEmbedder:
    """Implements `Embedder`; what it computes is kept in `calls`."""

    n_shared = 0

    def __init__(self, pooling: Pooling, n_most: int, hold: Callable[[], object] = bool) -> None:
        self._pooling, self._hold = pooling, hold
        self.n_most, self.n_full, self.n_texts = n_most, 64, 16
        self.calls: list[list[tuple[int, ...]]] = []
        self.is_closed = False

    def prepare(self, texts: Sequence[Sequence[int]]) -> None:
        """Check the texts, note the call and hold."""
        n = sum(map(len, texts))
        if not 0 < len(texts) <= self.n_texts or (len(texts) > 1 and n > self.n_full):
            raise PlanError(f"too many texts or tokens in one call: {len(texts)} texts, {n} tokens")
        if not all(0 < len(text) <= self.n_most for text in texts):
            raise PlanError(f"a text must have 1 … {self.n_most} tokens")
        self.calls.append([*map(tuple, texts)])
        self._hold()

    def compute(
        self, texts: Sequence[Sequence[int]], take_turn: Callable[[], float] | None = None
    ) -> list[NDArray[np.float32] | None]:
        """Return the vectors; a text with token 255 has none, one with 254 a NaN. There is a turn before each text."""
        found = []
        for text in texts:
            if take_turn is not None:
                take_turn()
            found.append(self._vector(text))
        return found

    def hurry(self) -> None:
        """Do nothing: turns are taken all the time."""

    def _vector(self, text: Sequence[int]) -> NDArray[np.float32] | None:
        if 255 in text:
            return None
        if self._pooling == "none":
            return np.stack([fake_vector([token]) for token in text])
        found = fake_vector(text)
        if 254 in text:
            found[0] = np.nan
        return found[:1] if self._pooling == "rank" else found

    def close(self) -> None:
        """Note it."""
        self.is_closed = True


def fake_vector(tokens: Sequence[int]) -> NDArray[np.float32]:
    """Return (N_EMBEDDING,) float32 of some tokens, not normalised."""
    state = 1
    for token in tokens:
        state = mix(state, token)
    parts = [(mix(state, i) % 2001 - 1000) / 100 for i in range(N_EMBEDDING)]
    return np.array(parts, np.float32)
