"""DRY's sequence breakers: strings as the sequences of tokens in which they can stand.

Source: llama.cpp src/llama-sampler.cpp, get_overlapping_token_sequences and llama_sampler_init_dry.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

_N_TAIL_MAX = 20
"""Tokens of a sequence behind its first. Source: llama_sampler_init_dry, MAX_SEQ_LEN."""

_N_KEPT = 64
"""Sets of strings whose sequences are kept."""

Sequences = tuple[tuple[int, ...], ...]


class BreakerTable:
    """Finds breakers in a vocabulary; from any thread. The words are read once."""

    def __init__(
        self, words: Callable[[], list[bytes]], tokenize: Callable[[bytes], list[int]]
    ) -> None:
        """Take what reads every token's text, special ones included, and what tokenizes plain text."""
        self._read_words, self._tokenize = words, tokenize
        self._words: list[bytes] | None = None
        self._known: dict[tuple[str, ...], Sequences] = {}
        self._reading = threading.Lock()

    def find(self, strings: Sequence[str]) -> Sequences:
        """Return all sequences of tokens for these strings, ascending; the same object for the same strings."""
        key = tuple(strings)
        with self._reading:
            if key not in self._known:
                while len(self._known) >= _N_KEPT:
                    del self._known[next(iter(self._known))]
                found = (sequence for text in key if text for sequence in self._of(text.encode()))
                self._known[key] = tuple(sorted(set(found)))
            return self._known[key]

    def _of(self, text: bytes) -> Iterator[tuple[int, ...]]:
        """Yield tokens that hold the text, and those that end with a part of it, with the tokens of what is left."""
        if self._words is None:
            self._words = self._read_words()
        tails = {
            text[:i]: tuple(self._tokenize(text[i:])[:_N_TAIL_MAX]) for i in range(1, len(text))
        }
        for token, word in enumerate(self._words):
            if text in word:
                yield (token,)
            else:
                yield from ((token, *tail) for part, tail in tails.items() if word.endswith(part))
