"""Texts of an exact number of tokens, for any vocabulary."""

from __future__ import annotations

import string
from typing import TYPE_CHECKING

from cbatch.errors import ConfigError

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Sequence

WORDS = """
time year people way day man thing woman life child world school state family student group country problem hand part
place case week company system program question work government number night point home water room mother area money
story fact month lot right study book eye job word business issue side kind head house
""".split()  # noqa: SIM905  # seventy lines say no more

_ENDS = (*string.ascii_letters, *string.digits, *".,;:!?")
"""What fills up the last tokens where no word does."""

_N_NEXT = 2
"""Words that must be able to follow a text without a change of its tokens. Our choice."""

_N_TRIES = 64
"""Attempts for one text. Our choice: one or two suffice for the vocabularies of the common families."""


class ExactText:
    """Writes random words until a tokenizer counts as many tokens as are wanted."""

    def __init__(self, tokenize: Callable[[str], Sequence[int]]) -> None:
        self._tokenize = tokenize
        self._n_a_word = max(0.1, len(tokenize(" ".join(WORDS))) / len(WORDS))

    def after(self, start: str, n_tokens: int, chance: random.Random) -> str:
        """Return `start` and words, `n_tokens` tokens together; the tokens of `start` are the first of them.

        Words may follow the text without another change of its tokens.

        Raises:
            ConfigError: no such text was found, as where `start` alone has more tokens.
        """
        first = tuple(self._tokenize(start)) if start else ()
        before = WORDS[0] if start else ""  # stands for the start, which may be long
        n_before = len(self._tokenize(before)) if start else 0
        for _ in range(_N_TRIES):
            own = self._filled(before, n_before, n_before + n_tokens - len(first), chance)
            text = None if own is None else start + own[len(before) :]
            if text is not None and self._is_good(text, n_tokens, first, chance):
                return text
        raise ConfigError(
            f"found no text of {n_tokens} tokens after {len(first)} common ones for this vocabulary: give other sizes"
        )

    def _is_good(
        self, text: str, n_tokens: int, first: tuple[int, ...], chance: random.Random
    ) -> bool:
        """Whether a text has its tokens, those of its start first, and goes on with words as it is."""
        tokens = tuple(self._tokenize(text))
        if len(tokens) != n_tokens:
            return False
        longer = (self._tokenize(f"{text} {word}") for word in chance.sample(WORDS, _N_NEXT))
        return tokens[: len(first)] == first and all(
            tuple(more[: len(tokens)]) == tokens for more in longer
        )

    def _filled(self, text: str, n: int, n_tokens: int, chance: random.Random) -> str | None:
        """Return a text of `n` tokens with words behind it, or None where this attempt failed."""
        if n >= n_tokens:
            return None
        while n < n_tokens:
            grown = self._grown(text, n, n_tokens, chance)
            if grown is None:
                return None
            text, n = grown
        return text

    def _grown(
        self, text: str, n: int, n_tokens: int, chance: random.Random
    ) -> tuple[str, int] | None:
        """Return the text with as many words as fit, at last a single letter, and its tokens."""
        n_words = max(1, int((n_tokens - n) / self._n_a_word))
        while n_words:
            words = " ".join(chance.choice(WORDS) for _ in range(n_words))
            grown = f"{text} {words}" if text else words
            n_grown = len(self._tokenize(grown))
            if n < n_grown <= n_tokens:
                return grown, n_grown
            n_words -= max(1, n_words // 8)
        for end in chance.sample(_ENDS, len(_ENDS)):
            grown = f"{text} {end}" if text else end
            n_grown = len(self._tokenize(grown))
            if n < n_grown <= n_tokens:
                return grown, n_grown
        return None
