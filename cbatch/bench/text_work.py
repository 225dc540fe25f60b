"""What a measurement of embeddings or rerank asks: calls of some texts, whose sizes are tokens, nearly."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from cbatch.bench.synthetic_vocabulary import words as english_words
from cbatch.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    Tokenize = Callable[[str], Sequence[object]]

_N_SAMPLE = 500
"""Words by which the tokens of a word are counted. Our choice."""


@dataclass(frozen=True, slots=True)
class TextCall:
    """Texts to embed, or documents to rerank under a query."""

    texts: list[str]
    query: str | None = None


@dataclass(frozen=True, slots=True)
class VectorWorkload:
    """A kind of calls. Sizes are tokens; two of them are the least and the most.

    Args:
        told: one line about it.
        n_texts: texts, or documents, of a call.
        own: of each text.
        n_query: of the query; 0 for embeddings.
    """

    name: str
    told: str
    n_texts: int
    own: tuple[int, int]
    n_query: int = 0

    @property
    def n_longest(self) -> int:
        """Tokens of the longest text with its query."""
        return self.n_query + self.own[1]

    @property
    def sizes(self) -> str:
        """The sizes in words."""
        low, high = self.own
        under = f" with a query of {self.n_query}" if self.n_query else ""
        return f"{self.n_texts} texts of {low}–{high} a call{under}"

    def calls(self, tokenize: Tokenize, n: int, seed: str) -> list[TextCall]:
        """Return `n` calls, whose texts all differ; equal for equal seeds."""
        chance, words = random.Random(f"{self.name} {seed}"), english_words()
        n_marks = len(tokenize(""))
        sample = " ".join(chance.choices(words, k=_N_SAMPLE))
        n_a_word = max(0.1, (len(tokenize(sample)) - n_marks) / _N_SAMPLE)

        def text(n_tokens: int) -> str:
            return " ".join(chance.choices(words, k=max(1, round((n_tokens - n_marks) / n_a_word))))

        return [
            TextCall(
                [text(chance.randint(*self.own)) for _ in range(self.n_texts)],
                text(self.n_query) if self.n_query else None,
            )
            for _ in range(n)
        ]


VECTOR_WORKLOADS: Mapping[str, VectorWorkload] = {
    workload.name: workload
    for workload in (
        VectorWorkload("embed", "embeddings of texts of all lengths", 16, (5, 400)),
        VectorWorkload("rerank", "scores of documents for a query", 32, (20, 100), 300),
    )
}


def vector_workload(
    name: str, *, own: tuple[int, int] | None, n_common: int | None
) -> VectorWorkload:
    """Return a workload by name, with other sizes where they are given.

    Args:
        own: tokens of each text.
        n_common: tokens of the query.

    Raises:
        ConfigError: a size is wrong, or embeddings have no query.
    """
    made = VECTOR_WORKLOADS[name]
    if n_common is not None and not made.n_query:
        raise ConfigError(f"texts of {name} have no common tokens: leave --common-tokens out")
    made = replace(
        made,
        own=made.own if own is None else own,
        n_query=made.n_query if n_common is None else n_common,
    )
    low, high = made.own
    if not 1 <= low <= high:
        raise ConfigError(
            f"tokens of texts must be 1 or more, with the smaller number first, not {low}-{high}"
        )
    if n_common is not None and n_common < 1:
        raise ConfigError(f"tokens of the query must be at least 1, not {n_common}")
    return made
