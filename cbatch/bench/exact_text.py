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

_N_TRIES = 64
"""Attempts for one text. Our choice: one or two suffice for the vocabularies of the common families."""


class ExactText:
    """Writes random words until a tokenizer counts as many tokens as are wanted."""

    def __init__(self, tokenize: Callable[[str], Sequence[int]]) -> None:
        self._tokenize = tokenize

    def after(self, start: str, n_tokens: int, chance: random.Random) -> str:
        """Return `start` and words, `n_tokens` tokens together; the tokens of `start` are the first of them.

        Raises:
            ConfigError: no such text was found, as where `start` alone has more tokens.
        """
        first = tuple(self._tokenize(start)) if start else ()
        for _ in range(_N_TRIES):
            text = self._filled(start, n_tokens, chance)
            if text is not None and tuple(self._tokenize(text))[: len(first)] == first:
                return text
        raise ConfigError(
            f"no text of {n_tokens} tokens after {len(first)} was found for this vocabulary: give other sizes"
        )

    def _filled(self, start: str, n_tokens: int, chance: random.Random) -> str | None:
        """Return one attempt, or None."""
        text, n_words = start, 0
        while True:
            n_left = n_tokens - len(self._tokenize(text))
            if n_left == 0 and n_words:
                return text
            if n_left <= 0:
                return None
            grown = self._grown(text, n_left, chance)
            if grown is None:
                return None
            text, n_words = grown, n_words + 1

    def _grown(self, text: str, n_left: int, chance: random.Random) -> str | None:
        """Return the text with words of at most `n_left` tokens more: as many as fit, at last a single end."""
        n_before, n_words = len(self._tokenize(text)), n_left
        while n_words:
            words = " ".join(chance.choice(WORDS) for _ in range(n_words))
            grown = f"{text} {words}" if text else words
            if 0 < len(self._tokenize(grown)) - n_before <= n_left:
                return grown
            n_words //= 2
        ends = (f"{text} {end}" for end in chance.sample(_ENDS, len(_ENDS)))
        return next(
            (end for end in ends if 0 < len(self._tokenize(end)) - n_before <= n_left), None
        )
