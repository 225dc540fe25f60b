"""Chunks and results of one batch that wait for their reader: the owner thread adds them, one reader takes them."""

from __future__ import annotations

import math
import threading
from collections import deque
from itertools import count
from typing import TYPE_CHECKING, Any, TypeAlias

from cbatch.progress import Counts
from cbatch.response import BatchOutputChunk, BatchResult, Timings, Usage
from cbatch.runtime.output_size import size_of_chunk, size_of_result
from cbatch.runtime.waking import Readers
from cbatch.support.interrupts import HeldBack, note

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cbatch.errors import CBatchError
    from cbatch.messages import BatchPrompt
    from cbatch.options import RunOptions
    from cbatch.runtime.copies import Copies
    from cbatch.runtime.interface import BatchOrders
    from cbatch.runtime.submit import Feed


N_AHEAD_PER_SLOT = 4
"""Items in hand for each slot: running, waiting, and ended but not yet given out."""


N_COPIES_AHEAD = 1024
"""Items besides that wait for the answer of an equal one: our choice. Each takes about a kilobyte."""


Parcel: TypeAlias = tuple[list[BatchOutputChunk], list[tuple[int, BatchResult]]]
"""What is delivered at once: chunks, and results with their places in the batch."""


def refused(id: str, place: int, error: CBatchError) -> Parcel:
    """Return what is delivered of an item that was never queued."""
    timings = Timings(0.0, None, 0.0, None, None)
    result = BatchResult(id, "", (), "error", error, Usage(0, 0), timings, seed=0)
    return [BatchOutputChunk(id, "", (), finish_reason="error", error=error)], [(place, result)]


class ItemCounts:
    """Counts the items of a batch, and says whether one more may be read. From any thread."""

    def __init__(self, n_items: int, n_ahead: int | None) -> None:
        """Make one of `n_items`; with `n_ahead` more may come, at most `n_ahead` of them in hand."""
        self.n_all = self.n_open = n_items
        self.is_fed = n_ahead is not None
        """Whether more items may come."""
        self.error: BaseException | None = None
        """What reading the prompts raised."""
        self._n_ahead = n_ahead or 0
        self._n_failed = self._n_cancelled = self._n_given = self._n_aside = 0
        self._n_more_ends = 0
        """Ends to come besides one an item: a request with several choices ends once for each."""
        self._is_gathered = False
        self._lock = threading.RLock()  # held briefly; no signal handler runs meanwhile
        self._changed = threading.Condition(self._lock)

    @property
    def have_ended(self) -> bool:
        """Whether every item has ended and no more will come."""
        return not self.n_open and not self.is_fed

    def expect(self) -> int | None:
        """Count one more item and return its place; None where no more may come."""
        with HeldBack(), self._changed:
            if not self.is_fed:
                return None
            self.n_all += 1
            self.n_open += 1
            return self.n_all - 1

    def expect_choices(self, n: int) -> None:
        """Have one of the expected items end `n` times: once for each choice."""
        with HeldBack(), self._changed:
            self._n_more_ends += n - 1

    def end(self, results: Sequence[BatchResult]) -> None:
        """Count items that ended, after the keeping of their results."""
        with HeldBack(), self._changed:
            for result in results:
                is_cancelled = result.finish_reason == "cancelled"
                self._n_cancelled += is_cancelled
                self._n_failed += result.error is not None and not is_cancelled
            self.n_open -= len(results)
            self._changed.notify_all()

    def end_feed(self, error: BaseException | None) -> bool:
        """Expect no more items; `error` is what reading them raised. Return False where that was known."""
        with HeldBack(), self._changed:
            if not self.is_fed:
                return False
            self.error = error
            self.is_fed = False  # last: a reader that sees it looks at the error
            self._changed.notify_all()
        return True

    def give_out(self, n_ends: int) -> None:
        """Count ends that a reader has taken: they hold up the feed no longer."""
        self._n_given += n_ends
        if self.is_fed:
            with HeldBack(), self._changed:
                self._changed.notify_all()

    def gather(self) -> None:
        """Have items that ended hold up the feed no longer, for a reader waits for all of them."""
        with HeldBack(), self._changed:
            self._is_gathered = True
            self._changed.notify_all()

    def set_aside(self, n_copies: int) -> None:
        """Count items that wait for the answer of an equal one, which need no slot; fewer where it is negative."""
        with HeldBack(), self._changed:
            self._n_aside += n_copies

    def has_room(self) -> bool:
        """Whether one more item may be read: slots and reader have work for long enough otherwise.

        Copies that wait need no slot, but memory: only so many of them may be in hand besides.
        """
        n_ends = self.n_all + self._n_more_ends
        n_held = self.n_open if self._is_gathered else n_ends - self._n_given
        n_besides = min(self._n_aside, N_COPIES_AHEAD)
        return self.is_fed and n_held - n_besides < self._n_ahead

    def wait_for_room(self) -> bool:
        """Wait until one more item may be read; False when no more may come."""
        note(self._lock)
        with self._lock:
            self._changed.wait_for(lambda: self.has_room() or not self.is_fed)
            return self.is_fed

    def counts(self) -> Counts:
        """Return how many items there are, and how many have ended."""
        with HeldBack(), self._changed:
            n_total = None if self.is_fed else self.n_all
            n_done = self.n_all - self.n_open - self._n_cancelled
            return Counts(n_total, n_done, self._n_failed, self._n_cancelled)


_n_jobs = count(1)


class Mailbox:
    """Delivery of one batch. The owner never waits here; a reader may.

    Until a reader asks for chunks (`is_streamed`), an item is delivered once, when it has ended. The batch has
    `n_items`, or is fed with one item after the other; see `Feed`.
    """

    def __init__(
        self,
        n_items: int,
        orders: BatchOrders,
        pump: Callable[[], bool] | None,
        *,
        n_ahead: int | None = None,
        log: Callable[[Sequence[tuple[int, BatchResult]]], object] | None = None,
        engine: object = None,
    ) -> None:
        """Make an empty one; `n_ahead` makes it that of a fed batch, with at most this number of items in hand.

        `pump` does a step of an engine without a thread, and returns False where there is none to do; `log` is told of
        results before a reader is; `engine` is kept alive.
        """
        self.job = next(_n_jobs)
        """The number of the call."""
        self.is_streamed = self.wants_tokens = False
        self.asks_again = False
        """Whether its items are asked again where their worker process dies."""
        self.copies: Copies | None = None
        """Items that equal others, where those are computed once."""
        self.items = items = ItemCounts(n_items, n_ahead)
        self.ids: dict[int, str] = {}
        """The items' ids by place; of a fed batch, ids of items that `take_result` has not given out."""
        self.given: dict[str, Any] = {}
        """Of a fed batch the same ids, to look them up."""
        self.feed: Feed | None = None  # kept alive while results may be read
        self._orders, self._log, self._engine = orders, log, engine
        self._is_fed = n_ahead is not None
        self._end_late: Callable[[Mailbox], object] | None = None
        self._weigh: Callable[[int], object] | None = None
        self._results: dict[int, BatchResult] = {}
        self._chunks: deque[BatchOutputChunk] = deque()
        self._completed: deque[int] = deque()  # places
        # not through self: a batch without a reader is freed at once, and its engine with it
        self.readers = Readers(pump, lambda: items.n_open, orders.check_wait)

    def expect_choices(self, n: int) -> None:
        """Have one of the expected items end `n` times: once for each choice."""
        self.items.expect_choices(n)

    def deliver(
        self, chunks: Sequence[BatchOutputChunk], results: Sequence[tuple[int, BatchResult]]
    ) -> None:
        """Add new chunks, and results with their places in the batch; wake the reader once. Owner thread."""
        if self.copies is not None and results:
            more_chunks, more = self.copies.of_ended(results)
            chunks, results = [*chunks, *more_chunks], [*results, *more]
            self.items.set_aside(-len(more))
        if self._log is not None:
            self._log(results)
        with HeldBack():
            self._chunks.extend(chunks)
            for i, result in results:
                self._results[i] = result.at(i)
                self._completed.append(i)
            if results:  # at last: a reader that finds no item open takes what is there
                self.items.end([result for _, result in results])
        if self._weigh is not None:
            self._weigh(self._size_of(chunks, [result for _, result in results]))
        self.readers.wake()

    def weigh(self, into: Callable[[int], object]) -> None:
        """Have `into` called with about the bytes of what has come, and of all that comes; from any thread."""
        self._weigh = into
        into(self._size_of([*self._chunks], [*self._results.values()]))

    def _size_of(self, chunks: Sequence[BatchOutputChunk], results: Sequence[BatchResult]) -> int:
        is_streamed = self.is_streamed  # else a chunk is its result once more
        own = sum(map(size_of_chunk, chunks)) if is_streamed else 0
        return own + sum(size_of_result(r, is_streamed=is_streamed) for r in results)

    def is_copy(self, prompt: BatchPrompt, options: RunOptions, place: int, id: str) -> bool:
        """Whether an item need not be computed, for it equals another: it gets that one's answer."""
        found = None if self.copies is None else self.copies.join(prompt, options, place, id)
        if found is None:
            return False
        if found[1]:
            self.deliver(*found)
        else:
            self.items.set_aside(1)
        return True

    # ---- for readers; see `BatchResponse` ----

    def wait(self, timeout: float | None, n_most: int | None = None) -> list[BatchResult]:
        """Wait for every item, or for one more than `n_most`, and return the results in input order.

        Raises:
            TimeoutError: `timeout` seconds passed first.
        """
        self._gather()
        items, n_enough = self.items, math.inf if n_most is None else n_most
        if not self.readers.wait(lambda: items.n_all > n_enough or items.have_ended, timeout):
            raise TimeoutError(
                f"{items.n_open} of {items.n_all} items had not ended after {timeout} s"
            )
        return [self._results[i] for i in sorted(self._results)]

    async def wait_async(self) -> list[BatchResult]:
        """Do as `wait` does, in an event loop."""
        self._gather()
        await self.readers.wait_async(lambda: self.items.have_ended)
        return [self._results[i] for i in sorted(self._results)]

    @property
    def n_unread(self) -> int:
        """Results that `take_result` returns without waiting."""
        return len(self._completed)

    @property
    def n_unread_chunks(self) -> int:
        """Chunks that `take_chunk` returns without waiting."""
        return len(self._chunks)

    def cancel(self) -> int:
        """Cancel the items that have not ended, read no more of them; return how many."""
        self.break_off()
        return self._orders.cancel_batch(self)

    def wind_down(self) -> None:
        """Cancel the items that have not begun, read no more of them; running ones go on. Does not wait."""
        self._end_late = self._end_late or self._orders.cancel_waiting_soon
        self.end_feed()
        if not self.items.have_ended:
            self._orders.cancel_waiting_soon(self)

    def leave(self) -> None:
        """Cancel the items that have not ended. Does not wait: their slots are free before the next plan."""
        if self.readers.is_their_process and not self.items.have_ended:
            self.break_off()
            self._orders.cancel_batch_soon(self)

    # ---- the end of a feed ----

    def end_feed(self, error: BaseException | None = None) -> None:
        """Expect no more items; `error` is what reading them raised. Twice is harmless. From any thread."""
        if self.items.is_fed and self.readers.is_their_process and self.items.end_feed(error):
            feed, self.feed = self.feed, None
            if feed is not None:
                feed.leave()
            self.readers.wake()

    def break_off(self, error: BaseException | None = None) -> None:
        """End the feed of a batch whose items are all cancelled now; else as `end_feed`."""
        self._end_late = self._orders.cancel_batch_soon
        self.end_feed(error)

    def end_late(self) -> None:
        """Cancel an item that arrived while its batch was being cancelled; where the batch goes on, nothing happens."""
        if self._end_late is not None:
            self._end_late(self)

    def _gather(self) -> None:
        if self.items.is_fed and self.readers.is_their_process:
            self.items.gather()

    # ---- what is given out ----

    def has_chunk(self) -> bool:
        """Whether `take_chunk` need not be waited for. From the first call on, chunks are delivered as they come."""
        if not self.is_streamed and self.readers.is_their_process:
            self.is_streamed = True
            self._orders.watch(self)
        return bool(self._chunks) or self.items.have_ended

    def has_result(self) -> bool:
        """Whether `take_result` need not be waited for."""
        return bool(self._completed) or self.items.have_ended

    def take_chunk(self) -> BatchOutputChunk | None:
        """Return the next chunk; None where every item has ended and been given out."""
        if not self._chunks:
            self._check_source()
            return None
        chunk = self._chunks.popleft()
        if chunk.finish_reason is not None:
            self.items.give_out(1)
        return chunk

    def take_result(self) -> BatchResult | None:
        """Return the next result in order of completion; None after the last."""
        if not self._completed:
            self._check_source()
            return None
        i = self._completed.popleft()
        if not self._is_fed:
            return self._results[i]
        # a batch without end must not fill the memory
        result = self._results.pop(i)
        self.given.pop(self.ids.pop(i, ""), None)
        self._chunks.clear()
        self.items.give_out(len(result.choices) or 1)
        return result

    def _check_source(self) -> None:
        if self.items.error is not None:
            raise self.items.error
