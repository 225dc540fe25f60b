"""Where one batch's chunks and results wait for their reader. The owner thread puts, one reader takes."""

from __future__ import annotations

import math
import os
import threading
import time
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import anyio
from anyio.lowlevel import checkpoint

from cbatch.errors import EngineClosedError, EngineError
from cbatch.interrupts import HeldBack, Sleepers
from cbatch.progress import Counts
from cbatch.response import BatchOutputChunk, BatchResult, Timings, Usage
from cbatch.runtime.waker import LoopWaker

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cbatch.errors import CBatchError


def refused(
    id: str, place: int, error: CBatchError
) -> tuple[list[BatchOutputChunk], list[tuple[int, BatchResult]]]:
    """Return what is delivered of an item that was never queued."""
    timings = Timings(0.0, None, 0.0, None, None)
    result = BatchResult(id, "", (), "error", error, Usage(0, 0), timings, seed=0)
    return [BatchOutputChunk(id, "", (), finish_reason="error")], [(place, result)]


class Mailbox:
    """Delivery of one batch. The owner never waits here; a reader may.

    Until somebody asks for chunks (`is_streamed`), an item is delivered once, when it has ended. The batch is of
    `n_items`, or `is_fed` with one item after the other; see `cbatch.runtime.feed`.
    """

    def __init__(
        self,
        n_items: int,
        cancel: Callable[[Mailbox], int],
        pump: Callable[[], bool] | None,
        cancel_soon: Callable[[Mailbox], object] | None = None,
        *,
        n_ahead: int | None = None,
        cancel_waiting_soon: Callable[[Mailbox], object] | None = None,
        log: Callable[[Sequence[tuple[int, BatchResult]]], object] | None = None,
    ) -> None:
        """Make an empty one.

        Args:
            n_items: results to expect.
            cancel: cancels what this mailbox's batch has in flight, returns how many.
            pump: does one step of an engine without a thread; False where there is none to do.
            cancel_soon: the same as `cancel` but does not wait for it to be done.
            n_ahead: makes the batch a fed one, with at most so many items that were not given out yet.
            cancel_waiting_soon: the same as `cancel_soon` but spares what has begun.
            log: is told of the results, before a reader is.
        """
        self.is_streamed = False
        self.is_fed = n_ahead is not None
        self.source_error: BaseException | None = None
        self.ids: dict[int, str] = {}
        """Of a fed batch: by place, what `next_result` has not given out."""
        self.given: dict[str, Any] = {}
        """The same ids, to look them up."""
        self.feed: object | None = None  # which lives as long as somebody may read
        self._cancel, self._pump = cancel, pump
        self._cancel_soon = cancel_soon or cancel
        self._cancel_waiting_soon = cancel_waiting_soon or self._cancel_soon
        self._end_late: Callable[[Mailbox], object] | None = None
        self._log = log
        self._results: dict[int, BatchResult] = {}
        self._n_items = self._n_open = n_items
        self._n_failed = self._n_cancelled = 0
        self._n_ahead, self._n_given, self._is_gathered = n_ahead, 0, False
        self._n_more_ends = 0  # what ends once for each choice
        self._chunks: deque[BatchOutputChunk] = deque()
        self._completed: deque[int] = deque()  # places
        self._changed = threading.Condition()  # held briefly, and under no handler of a signal
        self._waiting = Sleepers()
        self._sleepers: deque[tuple[LoopWaker, anyio.Event]] = deque()
        self._pid = os.getpid()

    def deliver(
        self, chunks: Sequence[BatchOutputChunk], results: Sequence[tuple[int, BatchResult]]
    ) -> None:
        """Add what one step brought and wake the reader once. Owner thread.

        Args:
            chunks: in order; the last one of an item has a finish reason.
            results: (place in the batch, result) of the items that ended.
        """
        if self._log is not None:
            self._log(results)
        with HeldBack(), self._changed:
            self._chunks.extend(chunks)
            for i, result in results:
                self._results[i] = result
                self._completed.append(i)
                is_cancelled = result.finish_reason == "cancelled"
                self._n_cancelled += is_cancelled
                self._n_failed += result.error is not None and not is_cancelled
            self._n_open -= len(results)
            self._changed.notify_all()
        self._wake()

    def expect(self) -> int | None:
        """Count one more item and return its place; None where the feed has ended."""
        with HeldBack(), self._changed:
            if not self.is_fed:
                return None
            self._n_items += 1
            self._n_open += 1
            return self._n_items - 1

    def expect_choices(self, n: int) -> None:
        """Have one of the expected items end so often: once for each choice."""
        with HeldBack(), self._changed:
            self._n_more_ends += n - 1

    def end_feed(self, error: BaseException | None = None) -> None:
        """Expect no more items; `error` is what reading them raised. Twice is harmless. From any thread."""
        if not self.is_fed or not self._is_here():
            return
        with HeldBack(), self._changed:
            if not self.is_fed:
                return
            self.source_error, self.feed = error, None
            self.is_fed = False  # last: who sees it looks at the error
            self._changed.notify_all()
        self._wake()

    def break_off(self, error: BaseException | None = None) -> None:
        """End the feed for a batch whose items are all cancelled now; else as `end_feed`."""
        self._end_late = self._cancel_soon
        self.end_feed(error)

    def end_late(self) -> None:
        """Do to an item that came in as the feed ended what was done to the others: nothing, where they go on."""
        if self._end_late is not None:
            self._end_late(self)

    def has_room(self) -> bool:
        """Whether one more item may be fed: slots and reader have work for long enough otherwise."""
        n_ends = self._n_items + self._n_more_ends
        n_held = self._n_open if self._is_gathered else n_ends - self._n_given
        return self.is_fed and n_held < (self._n_ahead or 0)

    def wait_for_room(self) -> bool:
        """Wait until one more item may be fed; False when the feed has ended."""
        with self._changed:
            self._changed.wait_for(lambda: self.has_room() or not self.is_fed)
            return self.is_fed

    def counts(self) -> Counts:
        """Return how far the batch is. From any thread."""
        with HeldBack(), self._changed:
            n_total = None if self.is_fed else self._n_items
            n_done = self._n_items - self._n_open - self._n_cancelled
            return Counts(n_total, n_done, self._n_failed, self._n_cancelled)

    def next_chunk(self) -> BatchOutputChunk | None:
        """Wait for the next chunk; None when every item has ended and been given out."""
        self.is_streamed = True
        self._wait(self._has_chunk)
        return self._take_chunk()

    async def next_chunk_async(self) -> BatchOutputChunk | None:
        """Do as `next_chunk` does, in an event loop."""
        self.is_streamed = True
        await self._wait_async(self._has_chunk)
        return self._take_chunk()

    def next_result(self) -> BatchResult | None:
        """Wait for the next result in order of completion; None after the last."""
        self._wait(self._has_result)
        return self._take_result()

    async def next_result_async(self) -> BatchResult | None:
        """Do as `next_result` does, in an event loop."""
        await self._wait_async(self._has_result)
        return self._take_result()

    def wait(self, timeout: float | None, n_most: int | None = None) -> list[BatchResult]:
        """Wait for every item, or for one more than `n_most`, and return the results in input order.

        Raises:
            TimeoutError: `timeout` seconds passed first.
        """
        self._gather()
        n_enough = math.inf if n_most is None else n_most
        self._wait(lambda: self._n_items > n_enough or self._has_all(), timeout)
        return [self._results[i] for i in sorted(self._results)]

    async def wait_async(self) -> list[BatchResult]:
        """Do as `wait` does, in an event loop."""
        self._gather()
        await self._wait_async(self._has_all)
        return [self._results[i] for i in sorted(self._results)]

    def cancel(self) -> int:
        """Cancel the items that have not ended, read no more of them; return how many."""
        self.break_off()
        return self._cancel(self)

    def wind_down(self) -> None:
        """Cancel the items that have not begun, read no more of them; what runs goes on. Does not wait."""
        self._end_late = self._end_late or self._cancel_waiting_soon
        self.end_feed()
        if not self._has_all():
            self._cancel_waiting_soon(self)

    @property
    def n_unread(self) -> int:
        """Results that `next_result` returns without waiting."""
        return len(self._completed)

    def leave(self) -> None:
        """Cancel what has not ended without waiting for it: the slots are free before the next plan."""
        if self._is_here() and not self._has_all():
            self.break_off()
            self._cancel_soon(self)

    def _take_chunk(self) -> BatchOutputChunk | None:
        if not self._chunks:
            self._check_source()
            return None
        chunk = self._chunks.popleft()
        if chunk.finish_reason is not None:
            self._give_out()
        return chunk

    def _take_result(self) -> BatchResult | None:
        if not self._completed:
            self._check_source()
            return None
        i = self._completed.popleft()
        if self._n_ahead is None:
            return self._results[i]
        # a batch without end must not fill the memory
        result = self._results.pop(i)
        self.given.pop(self.ids.pop(i, ""), None)
        self._chunks.clear()
        self._give_out(len(result.choices) or 1)
        return result

    def _check_source(self) -> None:
        if self.source_error is not None:
            raise self.source_error

    def _give_out(self, n_ends: int = 1) -> None:
        self._n_given += n_ends
        if self.is_fed:
            with HeldBack(), self._changed:
                self._changed.notify_all()

    def _gather(self) -> None:
        """From now on somebody waits for all: what has ended holds up the feed no longer."""
        if not self.is_fed or not self._is_here():
            return
        with HeldBack(), self._changed:
            self._is_gathered = True
            self._changed.notify_all()

    def _wake(self) -> None:
        """Have readers look again, in threads and in event loops."""
        self._waiting.wake()
        with suppress(IndexError):
            while self._sleepers:
                bell, event = self._sleepers.popleft()
                bell.ring(event)

    def _has_chunk(self) -> bool:
        return bool(self._chunks) or self._has_all()

    def _has_result(self) -> bool:
        return bool(self._completed) or self._has_all()

    def _has_all(self) -> bool:
        return not self._n_open and not self.is_fed

    async def _wait_async(self, is_ready: Callable[[], bool]) -> None:
        self._check_process(is_ready)
        if is_ready():
            await checkpoint()  # a reader who is always late must still let others run
        while not is_ready():
            if self._pump is not None:
                self._pump_once(is_ready, self._pump)
                await checkpoint()
            else:
                await self._sleep(is_ready)

    async def _sleep(self, is_ready: Callable[[], bool]) -> None:
        event = anyio.Event()
        sleeper = LoopWaker.here(), event
        self._sleepers.append(sleeper)  # before it looks again: who wakes later wakes it
        try:
            if not is_ready():
                await event.wait()
        finally:
            with suppress(ValueError):  # it was woken
                self._sleepers.remove(sleeper)

    def _is_here(self) -> bool:
        """Whether this process runs the batch; in a child of it the lock may be held by a thread that is not there."""
        return os.getpid() == self._pid

    def _check_process(self, is_ready: Callable[[], bool]) -> None:
        if not self._is_here() and not is_ready():
            raise EngineClosedError("this batch runs in the parent process: only there will it end")

    def _wait(self, is_ready: Callable[[], bool], timeout: float | None = None) -> None:
        self._check_process(is_ready)
        if self._pump is not None:
            self._step_until(is_ready, self._pump, timeout)
            return
        if not self._waiting.wait_for(is_ready, timeout):
            raise TimeoutError(self._late(timeout))

    def _step_until(
        self, is_ready: Callable[[], bool], pump: Callable[[], bool], timeout: float | None
    ) -> None:
        end = None if timeout is None else time.perf_counter() + timeout
        while not is_ready():
            if end is not None and time.perf_counter() > end:
                raise TimeoutError(self._late(timeout))
            self._pump_once(is_ready, pump)

    def _pump_once(self, is_ready: Callable[[], bool], pump: Callable[[], bool]) -> None:
        try:
            has_worked = pump()
        except EngineClosedError:  # every item has ended then, and its result says why
            if is_ready():
                return
            raise
        if not has_worked and not is_ready():
            raise EngineError(f"{self._n_open} items are open but there is nothing to do")

    def _late(self, timeout: float | None) -> str:
        return f"{self._n_open} of {self._n_items} items had not ended after {timeout} s"
