"""Settings and results of embeddings and of reranking."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from cbatch.errors import CBatchError, ConfigError, PromptError, UnsupportedTaskError, words_of
from cbatch.messages import BatchPrompt
from cbatch.support.checks import (
    MAX_INT,
    check_choice,
    check_flag,
    check_int,
    check_string,
    reading,
    shown,
    token_ids,
)
from cbatch.support.plain import list_of, text_of

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from cbatch.response import BatchResult
    from cbatch.support.model_facts import ModelFacts

Pooling: TypeAlias = Literal["none", "mean", "cls", "last", "rank"]
"""How a text's vector is made of its tokens' vectors: of all (`none`), their mean, the first (`cls`), the last, or the
scores of a classifier (`rank`)."""

POOLINGS: tuple[Pooling, ...] = ("none", "mean", "cls", "last", "rank")

Truncate: TypeAlias = Literal["end", "start"]
"""Where tokens of a text that is too long are left out."""


@dataclass(frozen=True, slots=True)
class TextSettings:
    """How the vectors of some texts are made; the arguments of `Engine.embed` and `Engine.rerank`."""

    pooling: Pooling | None = None
    """None for the pooling that the model's file names."""
    normalize: bool = True
    dimensions: int | None = None
    prefix: str = ""
    """Text that is put before each text."""
    truncate: Truncate | None = None
    query: str | None = None
    """For reranking: each text is a document that is paired with this query."""
    instruction: str | None = None
    """The criterion for judging documents, if the model's template has a place for one."""
    is_patient: bool = False
    """Whether texts of other calls go first, even if they came later."""

    @classmethod
    def of(cls, **given: Any) -> TextSettings:
        """Return settings made of arguments of `Engine.embed` or `Engine.rerank`.

        Raises:
            ConfigError: an argument is wrong.
        """
        pooling, truncate = given.get("pooling"), given.get("truncate")
        dimensions = given.get("dimensions")
        return cls(
            pooling=None if pooling is None else _one_of("pooling", pooling, POOLINGS),
            normalize=check_flag("normalize", given.get("normalize", True)),
            dimensions=None
            if dimensions is None
            else check_int("dimensions", dimensions, 1, MAX_INT),
            prefix=check_string("prefix", given.get("prefix")) or "",
            truncate=None if truncate is None else _one_of("truncate", truncate, ("end", "start")),
            query=check_string("query", given.get("query")),
            instruction=check_string("instruction", given.get("instruction")),
            is_patient=check_flag("is_patient", given.get("is_patient", False)),
        )

    def check(self, facts: ModelFacts) -> None:
        """Check that a model can do what these settings ask for.

        Raises:
            UnsupportedTaskError: the model cannot do it.
            ConfigError: `dimensions` is more than the model's vectors have.
        """
        is_reranker = facts.pooling == "rank"
        if not is_reranker and (self.query is not None or self.pooling == "rank"):
            raise UnsupportedTaskError("rerank", "it has no classifier of documents")
        if not facts.pooling:
            raise UnsupportedTaskError("embed", "its architecture has no embeddings of text")
        if is_reranker and self.pooling is None and self.query is None:
            why = "it is a reranker: call rerank(), or give pooling for the vectors below its classifier"
            raise UnsupportedTaskError("embed", why)
        if self.dimensions is not None and self.dimensions > facts.n_embedding:
            raise ConfigError(
                f"dimensions={self.dimensions} is more than the {facts.n_embedding} numbers of the model's vectors"
            )


def _one_of(name: str, value: object, known: tuple[Any, ...]) -> Any:
    return check_choice(name, value, *known)


@dataclass(frozen=True, slots=True)
class EmbedResult:
    """The embedding of one text, or why there is none."""

    id: str
    index: int
    """The text's place in the call, from 0."""
    embedding: NDArray[np.float32] | None
    """(dimension,) float32; (n_tokens, dimension) with `pooling="none"`; None if there is an error."""
    n_tokens: int = 0
    """Number of computed tokens, including those of an instruction."""
    error: CBatchError | None = field(default=None, compare=False)

    def __repr__(self) -> str:
        if self.error is not None:
            return f"<EmbedResult {self.id!r}: {type(self.error).__name__}: {words_of(self.error)}>"
        shape = getattr(self.embedding, "shape", ())
        return f"<EmbedResult {self.id!r}: {' × '.join(map(str, shape))}, {self.n_tokens} tokens>"


@dataclass(frozen=True, slots=True)
class RerankResult:
    """How well one document fits the query, or why that is not known."""

    id: str
    index: int
    """The document's place in the call, from 0."""
    score: float
    """A probability, 0 … 1; with `raw_scores`, the logit; NaN if there is an error."""
    n_tokens: int = 0
    """Number of tokens of query, document and template together."""
    error: CBatchError | None = field(default=None, compare=False)

    def __repr__(self) -> str:
        if self.error is not None:
            return (
                f"<RerankResult {self.id!r}: {type(self.error).__name__}: {words_of(self.error)}>"
            )
        return f"<RerankResult {self.id!r}: {self.score:.6g}, {self.n_tokens} tokens>"


def as_text(value: Any) -> BatchPrompt:
    """Return a text, or the token ids of one, as a request.

    Raises:
        PromptError: the text is empty.
        ConfigError: it is something else.
    """
    with reading("the text"):
        if isinstance(value, BatchPrompt):
            if value.messages is not None:
                raise ConfigError(
                    "a text to embed must be a string or a list of token ids, not a chat"
                )
            return value
        text, listed = text_of(value), list_of(value)
        if text is None and listed is None:
            raise ConfigError(f"a text must be a string or a list of token ids, not {shown(value)}")
        if not text and not listed:
            raise PromptError("the text is empty")
        if text is not None:
            return BatchPrompt(prompt=text)
        return BatchPrompt(tokens=token_ids("the text", listed))


def embed_result(result: BatchResult, *, is_by_token: bool = False) -> EmbedResult:
    """Return what a request for an embedding gave; with `is_by_token`, it is a vector for each token."""
    found, error = result.embedding, result.error
    n = result.usage.prompt_tokens
    if error is not None or found is None:
        error = error or PromptError(f"the request ended without a vector: {result.finish_reason}")
        return EmbedResult(result.id, result.i_item, None, n, error)
    return EmbedResult(result.id, result.i_item, _array(found, n if is_by_token else 0), n)


def _array(data: bytes, n_rows: int) -> NDArray[np.float32]:
    import numpy as np  # slow to import

    found = np.frombuffer(data, "<f4").astype(np.float32)  # a copy, which the caller may change
    return found.reshape(n_rows, -1) if n_rows else found


def sigmoid(logit: float) -> float:
    """Return 1 / (1 + exp(−logit))."""
    if logit >= 0:
        return 1 / (1 + math.exp(-logit))
    e = math.exp(logit)
    return e / (1 + e)


def logit(p: float) -> float:
    """Return the logit of a probability; ±infinity at its ends."""
    if p <= 0:
        return -math.inf
    return math.inf if p >= 1 else math.log(p) - math.log1p(-p)
