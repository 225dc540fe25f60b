"""The work of a run over a file: items become prompts for the engine, results become records."""

from __future__ import annotations

import math
import threading
import time
from contextlib import closing
from copy import copy
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Protocol

from cbatch.errors import EngineError, RequestCancelledError
from cbatch.files.input.item import duplicate, in_own_words, item_key, label, rival_key
from cbatch.files.outcome import RunSummary
from cbatch.files.output.identity import placed
from cbatch.files.window import Entry, Window, length
from cbatch.options import RunOptions
from cbatch.progress import Counts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import TypeAlias

    from cbatch.engine import Engine
    from cbatch.files.input.item import Item
    from cbatch.files.outcome import Stopper
    from cbatch.files.output.encoders import Encoder
    from cbatch.files.output.identity import Digests
    from cbatch.files.output.journal import Claim
    from cbatch.messages import BatchPrompt
    from cbatch.progress import Ending
    from cbatch.response import BatchResponse, BatchResult, Reader

    Ended: TypeAlias = "tuple[Item, BatchResult | None]"
    """An item that ended, and its result; None where the item has an error."""

    OnEnded: TypeAlias = "Callable[[Item, BatchResult | None], object]"
    """Called with each item that ended; the result is None where the item has an error."""

N_COMMIT = 64
"""Most records that are written together, where several results are ready at once."""


class Ledger(Protocol):
    """Takes records and knows which items have one; see `Journal`."""

    n_done: int
    n_failed: int
    notes: tuple[str, ...]

    def claim(
        self, id: str, digest: bytes, number: int, rival: str | None = None, *, place: str = ""
    ) -> Claim:
        """Return what to do with an item."""

    def add(self, number: int, id: str, digest: bytes, record: bytes, *, is_error: bool) -> None:
        """Keep a record for the next `commit`."""

    def commit(self) -> None:
        """Write the records that were added."""

    def drop_unclaimed(self, *, is_by_number: bool = False) -> int:
        """Remove records that were not claimed; return their number."""

    def set_unclaimed_aside(self) -> int:
        """Order records that were not claimed behind all others; return their number."""


@dataclass(frozen=True, slots=True)
class RunContext:
    """What all items of a run share.

    Args:
        ledger: takes records.
        encoder: of records.
        digests: of items.
        options: that an item leaves out, the engine's own included.
        model: its name, for records.
    """

    ledger: Ledger
    encoder: Encoder
    digests: Digests
    options: RunOptions
    model: str


@dataclass(eq=False, slots=True)
class Tally:
    """The counts of a run so far; see `RunSummary`."""

    n_items: int = 0
    n_started: int = 0
    n_done: int = 0
    n_failed: int = 0
    n_before: int = 0
    n_failed_before: int = 0
    n_given_back: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0

    @property
    def n_settled(self) -> int:
        """Items that have a record."""
        return self.n_done + self.n_before


class Work:
    """One run over a file: reads items as the engine takes prompts, writes results as they arrive.

    `prompts` may be iterated in another thread than the one that takes results.
    """

    def __init__(
        self,
        items: Iterator[Item],
        context: RunContext,
        window: Window,
        stop: Stopper,
        *,
        limit: int | None = None,
        prefix: str = "",
        is_dry: Callable[[], bool] = lambda: False,
    ) -> None:
        """Read nothing yet.

        Args:
            items: of the input.
            context: turns items into records.
            window: orders the items.
            stop: whether to read no more items.
            limit: most items to run.
            prefix: of the ids that the engine uses.
            is_dry: returns whether reading the next item would wait: then the window is not filled.
        """
        self.tally = Tally()
        self.has_read_all = False
        self._items, self._context, self._window, self._stop = items, context, window, stop
        self._limit = math.inf if limit is None else limit
        self._prefix, self._is_dry = prefix, is_dry
        self._running: dict[str, Entry] = {}
        self._refused: list[Item] = []
        self._n_added = 0
        self._start_s, self._ends_s = 0.0, math.inf
        self._ended: Ending | None = None
        self._is_at_limit = False
        self._lock = threading.Lock()
        self._created = int(time.time())

    # ---- in ----

    def prompts(self) -> Iterator[BatchPrompt]:
        """Yield the prompts for the engine, in the order of the window."""
        while not self._stop.is_asked:
            self._fill()
            if not len(self._window):
                return
            yield self._hand_out()

    def _hand_out(self) -> BatchPrompt:
        entry = self._window.take()
        prompt = copy(entry.prompt)
        object.__setattr__(prompt, "id", self._prefix + label(entry.item))
        self._running[str(prompt.id)] = entry
        return prompt

    def _fill(self) -> None:
        while self._window.has_room and not self.has_read_all and not self._stop.is_asked:
            is_dry = self._is_dry()
            if self.tally.n_started >= self._limit:
                self._is_at_limit = self._is_at_limit or is_dry or self._has_more()
            if self._is_at_limit:
                self._window.end()
                return
            if len(self._window) and is_dry:
                return
            item = next(self._items, None)
            if item is None:
                self.has_read_all = True
                self._window.end()
            else:
                with self._stop.guarded(), self._lock:
                    self._take_in(item)

    def _has_more(self) -> bool:
        """Whether the input has another item, which stays in it: a limit that leaves no item is no reason to end."""
        item = next(self._items, None)
        if item is not None:
            self._items = chain((item,), self._items)
        return item is not None

    def _take_in(self, item: Item) -> None:
        tally, context = self.tally, self._context
        tally.n_items += 1
        digest = context.digests(item)
        key, rival = item_key(item), rival_key(item)
        claim = context.ledger.claim(key, digest, item.number, rival, place=item.place)
        if claim == "duplicate":
            self._refuse(duplicate(item), placed(digest, item.place))
        elif claim in ("done", "failed"):
            tally.n_before += 1
            tally.n_failed_before += claim == "failed"
        elif item.prompt is None:
            self._refuse(item, digest)
        else:
            tally.n_started += 1
            options = RunOptions.of(item.prompt.options)
            n_chars = length(item.prompt, options)
            self._window.add(Entry(item, item.prompt, digest, n_chars))

    def _refuse(self, item: Item, digest: bytes) -> None:
        assert item.error is not None  # an item without a prompt has an error
        self._add(item, digest, self._context.encoder.error(item, item.error), is_error=True)
        self._refused.append(item)

    # ---- out ----

    def start(self, engine: Engine, max_time_s: float | None = None) -> BatchResponse:
        """Let the engine begin; give its results to `take`."""
        self._start_s = time.perf_counter()
        self._ends_s = math.inf if max_time_s is None else self._start_s + max_time_s
        return engine.run(self.prompts(), options=self._context.options, max_time_s=max_time_s)

    def run(
        self, engine: Engine, max_time_s: float | None = None, on_ended: OnEnded | None = None
    ) -> RunSummary:
        """Run all items; return when each has its record, or when the run is stopped.

        Args:
            engine: runs the items.
            max_time_s: seconds for all items; others get no record.
            on_ended: called with each item that ended.

        Raises:
            EngineError: the engine failed.
            RequestCancelledError: items were cancelled through the engine.
            CBatchError, OSError: the input cannot be read, or a record cannot be written.
        """
        response = self.start(engine, max_time_s)
        self._stop.on_ask = response.wind_down
        ending: Ending | None = None
        try:
            with closing(response.as_completed()) as results:
                self._take_all(response, results, on_ended or _tell_nobody)
            if self.is_cut_off:
                engine.stats()  # raises if the engine was closed
                n_left = self.tally.n_given_back
                raise RequestCancelledError(
                    f"{n_left:,} items were cancelled and have no record: run it again to continue"
                )
        except KeyboardInterrupt:
            if not self._stop.is_now:
                raise
            ending = "now"
        finally:
            self._stop.on_ask = None
            with self._stop.guarded():
                self.commit()
        summary = self.summary(ending)
        self._ended = summary.ending
        return summary

    @property
    def is_cut_off(self) -> bool:
        """Whether items were cancelled or the engine was closed; to be used after the last result."""
        is_all = self.has_read_all and self.tally.n_items == self.tally.n_settled
        return self._ending() == "done" and not is_all

    def _take_all(
        self, response: BatchResponse, results: Reader[BatchResult], on_ended: OnEnded
    ) -> None:
        while True:
            if not response.n_unread:
                self.commit()
            result = next(results, None)
            if result is None:
                break
            with self._stop.guarded():
                ended = self.take(result)
            for pair in ended:
                on_ended(*pair)
        for item in self.take_refused():
            on_ended(item, None)

    def take(self, result: BatchResult, *, gives_left: bool = False) -> list[Ended]:
        """Add the record of a result; return the items that ended since the last call, those with an error too.

        Args:
            result: of one item.
            gives_left: whether to return an item that is left for a later run.

        Raises:
            EngineError: the engine failed, not the item.
        """
        ended: list[Ended] = [(i, None) for i in self.take_refused()]
        with self._lock:
            entry = self._running.pop(result.id)
            if isinstance(result.error, EngineError):
                raise result.error
            if self._is_left(entry, result):
                self.tally.n_given_back += 1
                return [*ended, _named(entry, result)] if gives_left else ended
            self._count(result)
            if result.error is not None:
                result = replace(result, error=in_own_words(result.error, result.id))
            context, is_error = self._context, result.error is not None
            record = context.encoder.result(
                entry.item, result, digest=entry.digest, created=self._created, model=context.model
            )
            self._add(entry.item, entry.digest, record, is_error=is_error)
        if self._n_added >= N_COMMIT:
            self.commit()
        return [*ended, _named(entry, result)]

    def take_refused(self) -> list[Item]:
        """Return the items with an error since the last call."""
        with self._lock:  # another thread may be reading
            refused, self._refused = self._refused, []
        return refused

    def _is_left(self, entry: Entry, result: BatchResult) -> bool:
        """Whether an item is left for a later run: it was cancelled, or the time of the run was over, not its own."""
        reasons = {result.finish_reason, *(choice.finish_reason for choice in result.choices)}
        if "cancelled" in reasons:
            return True
        if "timeout" not in reasons or time.perf_counter() < self._ends_s:
            return False
        own = RunOptions.of(entry.prompt.options).over(self._context.options).timeout_s
        return own is None or result.timings.total_s < own

    def _count(self, result: BatchResult) -> None:
        usage, tally = result.usage, self.tally
        tally.prompt_tokens += usage.prompt_tokens
        tally.output_tokens += usage.completion_tokens
        tally.cached_tokens += usage.cached_tokens

    def _add(self, item: Item, digest: bytes, record: bytes, *, is_error: bool) -> None:
        self._context.ledger.add(item.number, item_key(item), digest, record, is_error=is_error)
        self._n_added += 1
        self.tally.n_done += 1
        self.tally.n_failed += is_error

    def commit(self) -> None:
        """Write the records that were added."""
        with self._lock:
            self._n_added = 0
            self._context.ledger.commit()

    # ---- how far ----

    def counts(self, n_about: int | None) -> Counts:
        """Return the progress; `n_about` is the estimated number of items."""
        tally = self.tally
        if n_about is not None and self._limit < math.inf:
            n_about = min(n_about, tally.n_before + int(self._limit))
        return Counts(
            tally.n_items if self.has_read_all else None,
            tally.n_settled,
            tally.n_failed + tally.n_failed_before,
            tally.n_given_back,
            n_about,
            tally.n_before,
            self._ended,
        )

    def _ending(self) -> Ending:
        if self._stop.is_asked:
            return "asked"
        if time.perf_counter() >= self._ends_s and (
            self.tally.n_given_back or not self.has_read_all
        ):
            return "time"
        return "limit" if self.tally.n_started >= self._limit and not self.has_read_all else "done"

    def summary(self, ending: Ending | None = None) -> RunSummary:
        """Return the counts, and why the run ended."""
        tally = self.tally
        return RunSummary(
            ending or self._ending(),
            n_items=tally.n_items,
            n_done=tally.n_done,
            n_failed=tally.n_failed,
            n_before=tally.n_before,
            n_failed_before=tally.n_failed_before,
            n_left=tally.n_items - tally.n_settled,
            prompt_tokens=tally.prompt_tokens,
            output_tokens=tally.output_tokens,
            cached_tokens=tally.cached_tokens,
            elapsed_s=time.perf_counter() - self._start_s,
        )


def _named(entry: Entry, result: BatchResult) -> Ended:
    """Return an item and its result, with the item's id."""
    return entry.item, replace(result, id=entry.item.id)


def _tell_nobody(item: Item, result: BatchResult | None) -> None:
    """Do nothing."""
