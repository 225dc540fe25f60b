"""Output of a batch: chunks while it runs, results when items end, and the response that gives out both."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, Literal, Protocol, TypeVar

from cbatch.checks import check_flag, check_wait
from cbatch.errors import CBatchError, ConfigError, words_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Generator, Sequence

T = TypeVar("T")

FinishReason = Literal["stop", "length", "window", "tool_calls", "cancelled", "timeout", "error"]
"""`stop`: end of generation, a stop string or a stop token; `length`: the cap; `window`: the slot's context is full;
`tool_calls`: as `stop`, and tools are called."""


@dataclass(frozen=True, slots=True)
class BatchOutputChunk:
    """New text of one item; only the item's last chunk has a `finish_reason`.

    An item's chunks joined are its result's text. Where tools are called or the template marks thinking, chunks have
    these parts too, which the result separates.
    """

    id: str
    text: str
    token_ids: tuple[int, ...]
    index: int = 0
    finish_reason: FinishReason | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one request: prompt, sampled (with the ending token), prompt tokens that were not computed again.

    `context_shifts` is how often tokens were taken out of the full window, with `n_discard`.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    context_shifts: int = 0


@dataclass(frozen=True, slots=True)
class Timings:
    """Times of one request in seconds, rates in tokens per second; None where nothing was timed.

    `ttft_s` and `last_token_s` count from submission, queue time included. `prompt_tps` counts each token that was
    computed before the first one was sampled, once; tokens from a cache do not count. `generation_tps` is
    (n − 1) / (last − first token), of the tokens that this request sampled itself.
    """

    queue_s: float
    ttft_s: float | None
    total_s: float
    prompt_tps: float | None
    generation_tps: float | None
    last_token_s: float | None = None


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call of a tool: `arguments` is JSON text of an object, not checked by the tool's schema."""

    id: str
    name: str
    arguments: str

    def as_dict(self) -> dict[str, Any]:
        """Return the call as OpenAI's API has it, for a message's `tool_calls`."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One token with its log-probability by the model's own logits; `top` are the likeliest at its place."""

    token_id: int
    data: bytes
    """The token's bytes of the text; a character may span several tokens."""
    logprob: float
    """NaN for a token without any before it, as the first one of an echoed prompt."""
    top: tuple[TokenLogprob, ...] = ()

    @property
    def text(self) -> str:
        """The token's part of the text; an incomplete character shows as U+FFFD."""
        return self.data.decode("utf-8", "replace")


@dataclass(frozen=True, slots=True)
class BatchResult:
    """One item's outcome: text, or `error` (`finish_reason` "error"; or "cancelled", "timeout" where it never ran)."""

    id: str
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    error: CBatchError | None
    usage: Usage
    timings: Timings
    seed: int
    warnings: tuple[str, ...] = ()
    tool_calls: tuple[ToolCall, ...] = ()
    reasoning: str = ""
    """The thinking before the answer, where the template marks it."""
    logprobs: tuple[TokenLogprob, ...] | None = None
    """One for each of `token_ids`, where they were asked for; NaN for the first token of an echoed prompt."""
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    """One for each token of the prompt, where they were asked for; None for the first token, and for tokens that were
    not reached."""
    stop_reason: str | int | None = None
    """The stop string, or the token of `stop_token_ids`, that ended the answer; None for the model's own end, and for
    every other finish reason."""
    choices: tuple[BatchResult, ...] = ()
    """All answers where several were asked for. This result is then the first answer, or a failed one: `error` is None
    only where no answer has an error. `usage` counts the tokens of all answers."""
    origin: object = field(default=None, repr=False, compare=False)
    """What `Engine.extend` continues from."""


class BatchError(CBatchError):
    """Some items of a batch failed, or its prompts could not be read to the end."""

    def __init__(
        self, results: Sequence[BatchResult], source_error: BaseException | None = None
    ) -> None:
        """Keep all results in input order; the message names the first failures and what reading the prompts raised."""
        self.results = list(results)
        failed = [r for r in self.results if r.error is not None]
        parts = []
        if source_error is not None:
            what = f"{type(source_error).__name__}: {words_of(source_error)}"
            parts.append(f"reading the prompts ended after {len(self.results)}: {what}")
        if failed or not parts:
            first = "; ".join(f"{r.id}: {r.error}" for r in failed[:3])
            more = f"; and {len(failed) - 3} more" if len(failed) > 3 else ""
            parts.append(f"{len(failed)} of {len(self.results)} items failed: {first}{more}")
        super().__init__("; ".join(parts))


class Inbox(Protocol):
    """Where a batch's chunks and results arrive; see `cbatch.runtime.mailbox`."""

    @property
    def source_error(self) -> BaseException | None:
        """What reading the prompts raised, where they are read one by one."""

    def next_chunk(self) -> BatchOutputChunk | None:
        """Wait for the next chunk; None when every item has ended and been given out."""

    async def next_chunk_async(self) -> BatchOutputChunk | None:
        """Do as `next_chunk` does, in an event loop."""

    def next_result(self) -> BatchResult | None:
        """Wait for the next result in order of completion; None after the last."""

    async def next_result_async(self) -> BatchResult | None:
        """Do as `next_result` does, in an event loop."""

    def wait(self, timeout: float | None, n_most: int | None = None) -> list[BatchResult]:
        """Wait for every item and return the results in input order; TimeoutError after `timeout` seconds.

        Where there are more than `n_most` items, it does not wait for them.
        """

    async def wait_async(self) -> list[BatchResult]:
        """Do as `wait` does, in an event loop."""

    def cancel(self) -> int:
        """Cancel the items that have not ended; return how many."""

    def wind_down(self) -> None:
        """Cancel the items that have not begun and read no more of them; does not wait."""

    @property
    def n_unread(self) -> int:
        """Results that `next_result` returns without waiting."""

    def leave(self) -> None:
        """Cancel what has not ended, without waiting for it."""

    def end_feed(self) -> None:
        """Read no more prompts; what was read goes on."""


class Display(Protocol):
    """Shows a batch's progress until it is closed; see `cbatch.progress`."""

    def close(self) -> None:
        """Show the end, unless it was shown."""


class Reader(Generic[T]):
    """Iterates over a batch, with `for` or `async for`; gives out each chunk or result once.

    Leaving before the end cancels the items that have not ended: by `break`, an exception in the loop's body, a
    cancelled task, `close`, or by dropping the reader.
    """

    def __init__(
        self,
        take: Callable[[], T | None],
        take_async: Callable[[], Awaitable[T | None]],
        leave: Callable[[], None],
        end: Callable[[], None],
    ) -> None:
        """Make one; `leave` is called when it is left early, and `end` then or after the last."""
        self._take, self._take_async = take, take_async
        self._leave, self._end = leave, end
        self._has_ended = False

    def __iter__(self) -> Reader[T]:
        return self

    def __aiter__(self) -> Reader[T]:
        return self

    def __next__(self) -> T:
        try:
            taken = None if self._has_ended else self._take()
        except BaseException:
            self.close()
            raise
        if taken is None:
            self._finish()
            raise StopIteration
        return taken

    async def __anext__(self) -> T:
        try:
            taken = None if self._has_ended else await self._take_async()
        except BaseException:
            self.close()
            raise
        if taken is None:
            self._finish()
            raise StopAsyncIteration
        return taken

    def close(self) -> None:
        """Leave. Twice is harmless, and so is leaving after the end."""
        if not self._has_ended:
            self._leave()
            self._finish()

    async def aclose(self) -> None:
        """Leave, for `contextlib.aclosing`."""
        self.close()

    def __del__(self) -> None:
        if not self._has_ended:
            self._leave()  # but not `end`, which may wait, and this may run in any thread

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
        self, ids: Collection[str], mailbox: Inbox, display: Display | None = None
    ) -> None:
        """Make one.

        Args:
            ids: of the items, in input order; borrowed.
            mailbox: where the output arrives.
            display: is closed when a reader is done.
        """
        self._ids, self._mailbox, self._display = ids, mailbox, display

    def __del__(self) -> None:
        if hasattr(self, "_mailbox"):  # else Ctrl-C struck as it was made
            self._mailbox.end_feed()

    def __repr__(self) -> str:
        return f"<BatchResponse of {len(self._ids)} items>"

    @property
    def ids(self) -> list[str]:
        """The items' ids, in input order."""
        return list(self._ids)

    def __iter__(self) -> Reader[BatchOutputChunk]:
        return self._chunks()

    def __aiter__(self) -> Reader[BatchOutputChunk]:
        return self._chunks()

    def __await__(self) -> Generator[Any, None, list[BatchResult]]:
        """Wait for every item, as `results()` does. A task that is cancelled here cancels the batch."""
        return self._gather().__await__()

    def as_completed(self) -> Reader[BatchResult]:
        """Return an iterator, for `for` or `async for`, over the results in order of completion, failed ones too.

        A generator's results are forgotten as they are given out, so that memory does not grow.
        """
        box = self._mailbox
        return Reader(box.next_result, box.next_result_async, box.leave, self._close_display)

    def results(
        self, *, timeout: float | None = None, return_errors: bool = False
    ) -> list[BatchResult]:
        """Wait for every item and return the results in input order.

        Ctrl-C cancels this batch and leaves the engine usable.

        Args:
            timeout: most seconds to wait; the batch goes on after a TimeoutError.
            return_errors: return failed items in place instead of raising.

        Raises:
            BatchError: an item failed, or reading the prompts did; all results are attached.
            TimeoutError: not every item ended in time.
        """
        returns_errors = check_flag("return_errors", return_errors)
        return self._checked(self._wait(timeout), return_errors=returns_errors)

    def result(self, *, timeout: float | None = None) -> BatchResult:
        """Wait for the item of a batch of one; the item's own error is raised, not a BatchError.

        Raises:
            ConfigError: the batch has more than one item.
            TimeoutError: it did not end in time.
        """
        results = self._wait(timeout, n_most=1)
        if len(self._ids) <= 1:
            results = self._checked(results, return_errors=True)
        if len(self._ids) != 1 or len(results) != 1:  # a generator's may have been given out
            raise ConfigError(
                f"result() is for a batch of one; this one has {len(self._ids)}: use results()"
            )
        if results[0].error is not None:
            raise results[0].error
        return results[0]

    def cancel(self) -> int:
        """Cancel every item of this batch that has not ended; return how many.

        A generator's prompts are not read on: the batch ends behind those that were read.
        """
        return self._mailbox.cancel()

    def wind_down(self) -> None:
        """Cancel every item of this batch that never had a slot, and read no more. Does not wait."""
        self._mailbox.wind_down()

    @property
    def n_unread(self) -> int:
        """Results that `as_completed` gives out without waiting."""
        return self._mailbox.n_unread

    def _wait(self, timeout: float | None, n_most: int | None = None) -> list[BatchResult]:
        try:
            return self._mailbox.wait(check_wait("timeout", timeout), n_most)
        except KeyboardInterrupt:
            self._mailbox.cancel()
            self._close_display()
            raise

    def _chunks(self) -> Reader[BatchOutputChunk]:
        box = self._mailbox
        return Reader(box.next_chunk, box.next_chunk_async, box.leave, self._close_display)

    async def _gather(self) -> list[BatchResult]:
        try:
            results = await self._mailbox.wait_async()
        except BaseException:
            self._mailbox.leave()
            self._close_display()
            raise
        return self._checked(results)

    def _checked(
        self, results: list[BatchResult], *, return_errors: bool = False
    ) -> list[BatchResult]:
        self._close_display()
        error = self._mailbox.source_error
        if error is not None or (not return_errors and any(r.error for r in results)):
            raise BatchError(results, error) from error
        return results

    def _close_display(self) -> None:
        if self._display is not None:
            self._display.close()
