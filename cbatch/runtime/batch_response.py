"""The response of a batch in flight: its chunks as they come, and its results."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from cbatch.errors import ConfigError
from cbatch.response import BatchError, BatchOutputChunk, BatchResult
from cbatch.support.checks import check_flag, check_wait

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from cbatch.progress import Progress
    from cbatch.runtime.mailbox import Mailbox

T = TypeVar("T")


class Reader(Generic[T]):
    """Iterates over a batch, with `for` or `async for`; gives out each chunk or result once.

    Leaving before the end cancels the items that have not ended: by `break`, an exception in the loop's body, a
    cancelled task, `close`, or by dropping the reader.
    """

    def __init__(
        self,
        mailbox: Mailbox,
        has_next: Callable[[], bool],
        take: Callable[[], T | None],
        end: Callable[[], None],
    ) -> None:
        """Read by `take`, which returns None after the last one; `end` is called then, or when the reader is left."""
        self._mailbox, self._has_next, self._take, self._end = mailbox, has_next, take, end
        self._has_ended = False

    def __iter__(self) -> Reader[T]:
        return self

    def __aiter__(self) -> Reader[T]:
        return self

    def __next__(self) -> T:
        try:
            if not self._has_ended:
                self._mailbox.readers.wait(self._has_next)
            taken = self._taken()
        except BaseException:
            self.close()
            raise
        if taken is None:
            raise StopIteration
        return taken

    async def __anext__(self) -> T:
        try:
            if not self._has_ended:
                await self._mailbox.readers.wait_async(self._has_next)
            taken = self._taken()
        except BaseException:
            self.close()
            raise
        if taken is None:
            raise StopAsyncIteration
        return taken

    def _taken(self) -> T | None:
        taken = None if self._has_ended else self._take()
        if taken is None:
            self._finish()
        return taken

    def close(self) -> None:
        """Leave: cancel the items that have not ended. No effect after the end or a second time."""
        if not self._has_ended:
            self._mailbox.leave()
            self._finish()

    async def aclose(self) -> None:
        """Leave, for `contextlib.aclosing`."""
        self.close()

    def __del__(self) -> None:
        if not self._has_ended:
            self._mailbox.leave()  # but not `end`, which may wait, and this may run in any thread

    def _finish(self) -> None:
        if not self._has_ended:
            self._has_ended = True
            self._end()


class BatchResponse:
    """A batch in flight. `ids` are known at once, in input order; each means its own request only, see `Engine.cancel`.

    Ids of a generator's prompts are known as these are read, and forgotten as `as_completed` gives out results.

    Iterate for chunks as they come (`for`, `async for`), call `results()`, or `await` it. One reader at a time; a
    chunk is given out once. Leaving an iteration early cancels the batch; see `Reader`. A generator's prompts are not
    read on once this object and its readers are dropped.
    """

    def __init__(
        self, mailbox: Mailbox, display: Progress | None = None, *, engine: object = None
    ) -> None:
        """Make one; `display` is closed when a reader is done; `engine` is kept alive."""
        self._mailbox, self._display, self._engine = mailbox, display, engine

    def __del__(self) -> None:
        if hasattr(self, "_mailbox"):  # else Ctrl-C struck as it was made
            self._mailbox.end_feed()

    def __repr__(self) -> str:
        counts = self._mailbox.items.counts()
        n_all = "? (reading)" if counts.n_total is None else f"{counts.n_total:,}"
        n_ended = counts.n_done + counts.n_cancelled
        failed = f", {counts.n_failed:,} failed" if counts.n_failed else ""
        return f"<BatchResponse: {n_ended:,} of {n_all} items ended{failed}>"

    @property
    def ids(self) -> list[str]:
        """The items' ids, in input order."""
        return list(self._mailbox.ids.values())

    def __iter__(self) -> Reader[BatchOutputChunk]:
        return self._chunks()

    def __aiter__(self) -> Reader[BatchOutputChunk]:
        return self._chunks()

    def __await__(self) -> Generator[Any, None, list[BatchResult]]:
        """Wait for every item, as `results()` does. A task that is cancelled here cancels the batch."""
        return self.gather().__await__()

    def as_completed(self) -> Reader[BatchResult]:
        """Return an iterator, for `for` or `async for`, over the results in order of completion, failed ones too.

        A generator's results are forgotten as they are given out, so that memory does not grow.
        """
        return self.completed_as(lambda result: result)

    def completed_as(self, made: Callable[[BatchResult], T]) -> Reader[T]:
        """Do as `as_completed`, with what `made` returns for each result."""
        box = self._mailbox

        def take() -> T | None:
            result = box.take_result()
            return None if result is None else made(result)

        return Reader(box, box.has_result, take, self._close_display)

    def results(
        self, *, timeout: float | None = None, return_errors: bool = False
    ) -> list[BatchResult]:
        """Wait for every item and return the results in input order.

        Ctrl-C cancels this batch and leaves the engine usable.

        Args:
            timeout: most seconds to wait; the batch goes on after a TimeoutError.
            return_errors: return failed items in place instead of raising.

        Raises:
            BatchError: an item failed, or the prompts could not be read to the end; all results are attached.
            TimeoutError: not every item ended in time.
        """
        returns_errors = check_flag("return_errors", return_errors)
        return self._checked(self._wait(timeout), return_errors=returns_errors)

    def result(self, *, timeout: float | None = None) -> BatchResult:
        """Wait for the item of a batch of one; the item's own error is raised, not a BatchError.

        Raises:
            ConfigError: the batch has more than one item.
            TimeoutError: the item did not end in time.
        """
        results = self._wait(timeout, n_most=1)
        n_items = len(self._mailbox.ids)
        if n_items <= 1:
            results = self._checked(results, return_errors=True)
        if n_items != 1 or len(results) != 1:  # a generator's may have been given out
            raise ConfigError(
                f"result() is for a batch of one; this one has {n_items}: use results()"
            )
        if results[0].error is not None:
            raise results[0].error
        return results[0]

    def cancel(self) -> int:
        """Cancel every item of this batch that has not ended; return how many.

        A generator's prompts are not read on: the batch ends after the prompts that were read.
        """
        return self._mailbox.cancel()

    def leave(self) -> None:
        """Cancel every item of this batch that has not ended, and read no more. Does not wait."""
        self._mailbox.leave()

    def wind_down(self) -> None:
        """Cancel every item of this batch that never had a slot, and read no more. Does not wait."""
        self._mailbox.wind_down()

    @property
    def n_open(self) -> int:
        """Items that have not ended."""
        return self._mailbox.items.n_open

    @property
    def n_unread(self) -> int:
        """Results that `as_completed` gives out without waiting."""
        return self._mailbox.n_unread

    @property
    def n_unread_chunks(self) -> int:
        """Chunks that an iteration gives out without waiting."""
        return self._mailbox.n_unread_chunks

    def weigh(self, into: Callable[[int], object]) -> None:
        """Have `into` called with about the bytes of output that has come, and of all that comes, from any thread.

        What was given out counts too: it is kept until the item has ended, and its result until the end.
        """
        self._mailbox.weigh(into)

    def _wait(self, timeout: float | None, n_most: int | None = None) -> list[BatchResult]:
        try:
            return self._mailbox.wait(check_wait("timeout", timeout), n_most)
        except KeyboardInterrupt:
            self._mailbox.cancel()
            self._close_display()
            raise

    def _chunks(self) -> Reader[BatchOutputChunk]:
        box = self._mailbox
        return Reader(box, box.has_chunk, box.take_chunk, self._close_display)

    async def gather(self, *, return_errors: bool = False) -> list[BatchResult]:
        """Do as `results` in an event loop. A task that is cancelled here cancels the batch."""
        returns_errors = check_flag("return_errors", return_errors)
        return self._checked(await self._awaited(), return_errors=returns_errors)

    async def _awaited(self) -> list[BatchResult]:
        try:
            return await self._mailbox.wait_async()
        except BaseException:
            self._mailbox.leave()
            self._close_display()
            raise

    async def only(self) -> BatchResult:
        """Wait for the item of a batch of one, as `result` does. A task that is cancelled here cancels it."""
        [result] = self._checked(await self._awaited(), return_errors=True)
        if result.error is not None:
            raise result.error
        return result

    def _checked(
        self, results: list[BatchResult], *, return_errors: bool = False
    ) -> list[BatchResult]:
        self._close_display()
        error = self._mailbox.items.error
        if error is not None or (not return_errors and any(r.error for r in results)):
            raise BatchError(results, error) from error
        return results

    def _close_display(self) -> None:
        if self._display is not None:
            self._display.close()


_FIELDS = frozenset(f.name for f in fields(BatchResult))


class OneAnswer:
    """The answer of `Engine.chat` or `generate`, with the fields of its `BatchResult`, such as `text`.

    In an event loop, `await` it first, which returns the `BatchResult` or raises the request's error.
    """

    def __init__(self, response: BatchResponse) -> None:
        self._response = response
        self._result: BatchResult | None = None

    def wait(self) -> None:
        """Wait for the answer; raise the request's error."""
        self._result = self._response.result()

    @property
    def result(self) -> BatchResult:
        """The whole result.

        Raises:
            ConfigError: in an event loop, the answer was not awaited.
        """
        if self._result is None:
            raise ConfigError("the answer has not come yet: await it first")
        return self._result

    def __await__(self) -> Generator[Any, None, BatchResult]:
        """Wait for the answer in an event loop, and return its result."""
        return self._finish().__await__()

    async def _finish(self) -> BatchResult:
        if self._result is None:
            self._result = await self._response.only()
        return self._result

    def __getattr__(self, name: str) -> Any:
        if name not in _FIELDS:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.result, name)

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *_FIELDS]

    def __repr__(self) -> str:
        return "<OneAnswer, not awaited>" if self._result is None else repr(self._result)
