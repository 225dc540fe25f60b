"""An engine with made-up embeddings and scores, for tests of what is around it."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import anyio
import numpy as np

from cbatch.backend.fake import FakeBackend
from cbatch.engine import Engine
from cbatch.errors import CBatchError, PromptError, PromptTooLongError, RequestCancelledError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Sequence

N_EMBEDDING, N_LIMIT = 8, 64


@dataclass(frozen=True)
class MadeUp:
    """A result of either kind."""

    id: str
    index: int
    n_tokens: int
    embedding: Any = None
    score: float = 0.0
    error: CBatchError | None = None


class MadeUpResponse:
    """Results that come, the last first, while nobody holds them."""

    def __init__(self, results: Sequence[MadeUp], engine: VectorEngine) -> None:
        self._results, self._engine = results, engine
        self.is_cancelled = False

    def __iter__(self) -> Iterator[MadeUp]:
        self._engine.may_go.wait()
        for result in reversed(self._results):
            error = RequestCancelledError("cancelled") if self.is_cancelled else result.error
            yield MadeUp(**{**vars(result), "error": error})

    async def gather(self, *, return_errors: bool = False) -> list[MadeUp]:
        assert return_errors
        return [result async for result in self]

    async def __aiter__(self) -> AsyncIterator[MadeUp]:
        await anyio.to_thread.run_sync(self._engine.may_go.wait, abandon_on_cancel=True)
        for result in reversed(self._results):
            yield result

    @property
    def n_unread(self) -> int:
        """Results that come without waiting: none while somebody holds them."""
        return len(self._results) if self._engine.may_go.is_set() else 0

    def cancel(self) -> None:
        """Cancel, as soon as nobody holds the results."""
        self._engine.may_go.wait()
        self.leave()

    def leave(self) -> None:
        """Cancel; does not wait."""
        self.is_cancelled = True
        self._engine.n_cancelled += 1


class VectorEngine(Engine):
    """See the module."""

    can_embed = can_rerank = can_generate = True
    judges = False
    n_embedding = N_EMBEDDING

    def __init__(self, adapters: tuple[str, ...] = (), **can: bool) -> None:
        backend = FakeBackend(4, 256)
        backend.adapters = adapters
        super().__init__(backend)
        for name, value in can.items():
            setattr(self, name, value)
        self.may_go = threading.Event()
        self.may_go.set()
        self.n_cancelled = 0
        self.asked: list[tuple[int, dict[str, Any]]] = []

    def embed(self, texts: Any, **settings: Any) -> Any:
        """Return vectors that are made of the texts' characters."""
        self.asked.append((len(texts), settings))
        n = settings.get("dimensions", N_EMBEDDING)
        return MadeUpResponse([self._vector(i, text, n) for i, text in enumerate(texts)], self)

    def _vector(self, i: int, text: Any, n: int) -> MadeUp:
        n_tokens = len(text)
        if not text:
            return MadeUp(str(i), i, 0, error=PromptError("the text is empty"))
        if n_tokens > N_LIMIT:
            return MadeUp(str(i), i, n_tokens, error=PromptTooLongError(n_tokens, N_LIMIT))
        return MadeUp(str(i), i, n_tokens, vector_of(text, n))

    def rerank(self, query: Any, documents: Any, **settings: Any) -> Any:
        """Return a score that is the share of the query's letters in a document."""
        self.asked.append((len(documents), settings))
        queries = [query] * len(documents) if isinstance(query, str) else query
        return MadeUpResponse(
            [
                MadeUp(
                    str(i),
                    i,
                    len(query) + len(text),
                    score=score_of(query, text),
                    error=None if text else PromptError("the text is empty"),
                )
                for i, (query, text) in enumerate(zip(queries, documents, strict=True))
            ],
            self,
        )


def vector_of(text: Any, n: int = N_EMBEDDING) -> Any:
    """Return the made-up embedding of a text or of tokens."""
    codes = [ord(c) for c in text] if isinstance(text, str) else list(text)
    found = np.zeros(n, np.float32)
    for i, code in enumerate(codes):
        found[(code + i) % n] += np.float32(code % 7 + 1)
    return found / np.linalg.norm(found)


def score_of(query: str, text: str) -> float:
    """Return the made-up score of a pair."""
    return len({*query} & {*text}) / len({*query})
