"""Where one batch's chunks and results wait for their reader. The owner thread puts, one reader takes."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from typing import TYPE_CHECKING

import anyio
from anyio.lowlevel import checkpoint

from cbatch.errors import EngineClosedError, EngineError
from cbatch.runtime.bell import Bell

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cbatch.response import BatchOutputChunk, BatchResult


class Mailbox:
    """Delivery of one batch of `n_items`. The owner never waits here; a reader may.

    Until somebody asks for chunks (`is_streamed`), an item is delivered once, when it has ended.
    """

    def __init__(
        self,
        n_items: int,
        cancel: Callable[[], int],
        pump: Callable[[], bool] | None,
        cancel_soon: Callable[[], object] | None = None,
    ) -> None:
        """Make an empty one.

        Args:
            n_items: results to expect.
            cancel: cancels the batch's items in flight, returns how many.
            pump: does one step of an engine without a thread; False where there is none to do.
            cancel_soon: the same as `cancel` but does not wait for it to be done.
        """
        self.is_streamed = False
        self._cancel, self._pump = cancel, pump
        self._cancel_soon = cancel_soon or cancel
        self._results: list[BatchResult | None] = [None] * n_items
        self._n_open = n_items
        self._chunks: deque[BatchOutputChunk] = deque()
        self._completed: deque[BatchResult] = deque()
        self._changed = threading.Condition()
        self._sleepers: list[tuple[Bell, anyio.Event]] = []
        self._pid = os.getpid()

    def deliver(
        self, chunks: Sequence[BatchOutputChunk], results: Sequence[tuple[int, BatchResult]]
    ) -> None:
        """Add what one step brought and wake the reader once. Owner thread.

        Args:
            chunks: in order; the last one of an item has a finish reason.
            results: (place in the batch, result) of the items that ended.
        """
        with self._changed:
            self._chunks.extend(chunks)
            for i, result in results:
                self._results[i] = result
                self._completed.append(result)
            self._n_open -= len(results)
            self._changed.notify_all()
            sleepers, self._sleepers = self._sleepers, []
        for bell, event in sleepers:
            bell.ring(event)

    def next_chunk(self) -> BatchOutputChunk | None:
        """Wait for the next chunk; None when every item has ended and been given out."""
        self.is_streamed = True
        self._wait(self._has_chunk)
        return self._chunks.popleft() if self._chunks else None

    async def next_chunk_async(self) -> BatchOutputChunk | None:
        """Do as `next_chunk` does, in an event loop."""
        self.is_streamed = True
        await self._wait_async(self._has_chunk)
        return self._chunks.popleft() if self._chunks else None

    def next_result(self) -> BatchResult | None:
        """Wait for the next result in order of completion; None after the last."""
        self._wait(self._has_result)
        return self._completed.popleft() if self._completed else None

    async def next_result_async(self) -> BatchResult | None:
        """Do as `next_result` does, in an event loop."""
        await self._wait_async(self._has_result)
        return self._completed.popleft() if self._completed else None

    def wait(self, timeout: float | None) -> list[BatchResult]:
        """Wait for every item and return the results in input order.

        Raises:
            TimeoutError: `timeout` seconds passed first.
        """
        self._wait(self._has_all, timeout)
        return [r for r in self._results if r is not None]

    async def wait_async(self) -> list[BatchResult]:
        """Do as `wait` does, in an event loop."""
        await self._wait_async(self._has_all)
        return [r for r in self._results if r is not None]

    def cancel(self) -> int:
        """Cancel the items that have not ended; return how many."""
        return self._cancel()

    def leave(self) -> None:
        """Cancel what has not ended without waiting for it: the slots are free before the next plan."""
        if self._n_open and os.getpid() == self._pid:
            self._cancel_soon()

    def _has_chunk(self) -> bool:
        return bool(self._chunks) or not self._n_open

    def _has_result(self) -> bool:
        return bool(self._completed) or not self._n_open

    def _has_all(self) -> bool:
        return not self._n_open

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
        event, bell = anyio.Event(), Bell.here()
        with self._changed:
            if is_ready():
                return
            self._sleepers.append((bell, event))
        await event.wait()

    def _check_process(self, is_ready: Callable[[], bool]) -> None:
        if os.getpid() != self._pid and not is_ready():
            raise EngineClosedError("this batch runs in the parent process: only there will it end")

    def _wait(self, is_ready: Callable[[], bool], timeout: float | None = None) -> None:
        self._check_process(is_ready)
        if self._pump is not None:
            self._step_until(is_ready, self._pump, timeout)
            return
        with self._changed:
            if not self._changed.wait_for(is_ready, timeout):
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
        return f"{self._n_open} of {len(self._results)} items had not ended after {timeout} s"
