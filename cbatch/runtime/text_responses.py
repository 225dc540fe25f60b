"""The responses of `Engine.embed` and `Engine.rerank`: results one by one as they end, or all together."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from cbatch.embedding import EmbedResult, RerankResult, embed_result
from cbatch.errors import CBatchError, ConfigError
from cbatch.response import BatchError, BatchResult
from cbatch.support.checks import check_flag

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from cbatch.runtime.batch_response import BatchResponse, Reader

R = TypeVar("R", bound=EmbedResult | RerankResult)


class TextResponse(ABC, Generic[R]):
    """Results that are being computed: iterate over them as they end, call `results()`, or `await` this object.

    One reader at a time. Leaving an iteration early cancels the texts that have not ended, as does dropping this
    object and its readers.
    """

    def __init__(self, response: BatchResponse) -> None:
        self._response = response

    def __del__(self) -> None:
        if hasattr(self, "_response"):  # else Ctrl-C struck as it was made
            self._response.leave()

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self._response!r}>"

    @property
    def ids(self) -> list[str]:
        """The ids of the texts that were read, in input order."""
        return self._response.ids

    @property
    def n_unread(self) -> int:
        """Results that an iteration gives out without waiting."""
        return self._response.n_unread

    def __iter__(self) -> Reader[R]:
        return self._response.completed_as(self._made)

    def __aiter__(self) -> Reader[R]:
        return self._response.completed_as(self._made)

    def __await__(self) -> Generator[Any, None, list[R]]:
        """Wait in an event loop, as `results()` does. A task that is cancelled here cancels the texts."""
        return self.gather().__await__()

    async def gather(self, *, return_errors: bool = False) -> list[R]:
        """Do as `results` in an event loop."""
        returns_errors = check_flag("return_errors", return_errors)
        with self._made_anew():
            found = await self._response.gather(return_errors=True)
        return self._told(self._all(found, returns_errors=returns_errors))

    def results(self, *, return_errors: bool = False) -> list[R]:
        """Wait for all texts and return the results in input order.

        Args:
            return_errors: return failed texts in place instead of raising.

        Raises:
            BatchError: a text failed, or the texts could not be read to the end; it has all results, in input order.
        """
        return self._told(self._in_order(returns_errors=check_flag("return_errors", return_errors)))

    def cancel(self) -> int:
        """Cancel the texts that have not ended, and read no more; return how many."""
        return self._response.cancel()

    def leave(self) -> None:
        """Cancel the texts that have not ended, and read no more. Does not wait."""
        self._response.leave()

    def _in_order(self, *, returns_errors: bool) -> list[R]:
        with self._made_anew():
            found = self._response.results(return_errors=True)
        return self._all(found, returns_errors=returns_errors)

    def _all(self, found: Sequence[BatchResult], *, returns_errors: bool) -> list[R]:
        results = [*map(self._made, found)]
        if not returns_errors and any(result.error is not None for result in results):
            raise BatchError(results)
        return results

    @contextmanager
    def _made_anew(self) -> Iterator[None]:
        """Make the results anew that an error has: reading the texts raised it."""
        try:
            yield
        except BatchError as failed:
            made = [self._made(result) for result in failed.results]
            raise BatchError(made, failed.__cause__) from failed.__cause__

    @abstractmethod
    def _made(self, result: BatchResult) -> R:
        """Return the result of a text."""

    def _told(self, results: list[R]) -> list[R]:
        """Return results in the order in which they are told."""
        return results


class EmbedResponse(TextResponse[EmbedResult]):
    """Embeddings that are being computed; `array()` returns all in one array. See `TextResponse`."""

    def __init__(self, response: BatchResponse, *, is_by_token: bool) -> None:
        """Wrap the response of a batch of texts; `is_by_token`: each result has a vector for each token."""
        super().__init__(response)
        self._is_by_token = is_by_token

    def array(self) -> NDArray[np.float32]:
        """Wait for all texts and return (n, dimension) float32, in input order. Raises as `results`.

        Raises:
            ConfigError: each text has several vectors, because of `pooling="none"`.
        """
        import numpy as np  # slow to import

        if self._is_by_token:
            raise ConfigError("with pooling='none' a text has several vectors: use results()")
        vectors = [result.embedding for result in self.results() if result.embedding is not None]
        return np.stack(vectors) if vectors else np.empty((0, 0), np.float32)

    def _made(self, result: BatchResult) -> EmbedResult:
        return embed_result(result, is_by_token=self._is_by_token)


class RerankResponse(TextResponse[RerankResult]):
    """Scores of documents that are being computed. See `TextResponse`; but `results()` has the best first, errors last.

    With `top_n`, `results()` has only that many of the best; `scores()` has all scores in input order.
    """

    def __init__(
        self,
        response: BatchResponse,
        score: Callable[[BatchResult], float],
        top_n: int | None = None,
    ) -> None:
        """Wrap the response of a batch of documents; `score` reads the score from a result without an error."""
        super().__init__(response)
        self._score, self._top_n = score, top_n

    def scores(self) -> NDArray[np.float32]:
        """Wait for all documents and return (n,) float32 in input order. Raises as `results`."""
        import numpy as np  # slow to import

        return np.array([r.score for r in self._in_order(returns_errors=False)], np.float32)

    def _told(self, results: list[RerankResult]) -> list[RerankResult]:
        ordered = sorted(results, key=lambda r: math.inf if r.error else -r.score)
        return ordered[: self._top_n]

    def _made(self, result: BatchResult) -> RerankResult:
        n, score, error = result.usage.prompt_tokens, math.nan, result.error
        if error is None:
            try:
                score = self._score(result)
            except CBatchError as wrong:
                error = wrong
        return RerankResult(result.id, result.i_item, score, n, error)
