"""The work of a run over a file: items in, prompts to the engine, results out as records."""

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
    """An item that ended, and its result; None where the item itself is wrong."""

    OnEnded: TypeAlias = "Callable[[Item, BatchResult | None], object]"
    """Called with each item that ended; without a result where the item itself is wrong."""

N_COMMIT = 64
"""Records that are written together at most, where they come faster than one by one."""


class Ledger(Protocol):
    """What takes records and knows which are there; see `Journal`."""

    n_done: int
    n_failed: int
    notes: tuple[str, ...]

    def claim(
        self, id: str, digest: bytes, number: int, rival: str | None = None, *, place: str = ""
    ) -> Claim:
        """Say what is to be done with an item."""

    def add(self, number: int, id: str, digest: bytes, record: bytes, *, is_error: bool) -> None:
        """Keep a record for the next `commit`."""

    def commit(self) -> None:
        """Write what was added."""

    def drop_unclaimed(self, *, is_by_number: bool = False) -> int:
        """Take out what was not claimed; return how many records there were."""

    def set_unclaimed_aside(self) -> int:
        """Put what was not claimed behind all others; return how many records there are."""


@dataclass(frozen=True, slots=True)
class Way:
    """How items become records.

    Args:
        ledger: takes them.
        encoder: writes them.
        digests: of what items ask.
        options: that hold where an item says nothing, the engine's own among them.
        model: its name, for records.
    """

    ledger: Ledger
    encoder: Encoder
    digests: Digests
    options: RunOptions
    model: str


@dataclass(eq=False, slots=True)
class Tally:
    """What a run has done so far; see `RunSummary`."""

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
        """Items that have their record."""
        return self.n_done + self.n_before


class Work:
    """One run over a file: reads items as the engine takes them, writes results as they come.

    `prompts` may be read in another thread than the one that takes the results.
    """

    def __init__(
        self,
        items: Iterator[Item],
        way: Way,
        window: Window,
        stop: Stopper,
        *,
        limit: int | None = None,
        prefix: str = "",
        is_dry: Callable[[], bool] = lambda: False,
    ) -> None:
        """Make one that has read nothing.

        Args:
            items: of the input.
            way: how they become records.
            window: what orders them.
            stop: says when to read no more.
            limit: most items to run.
            prefix: of the ids by which the engine knows them.
            is_dry: says whether the next item may be long in coming: then the window is left as full as it is.
        """
        self.tally = Tally()
        self.has_read_all = False
        self._items, self._way, self._window, self._stop = items, way, window, stop
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
        """Yield what the engine is to run, in the order of the window."""
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
        """Whether there is another item, which stays where it is: a limit that leaves nothing has stopped nothing."""
        item = next(self._items, None)
        if item is not None:
            self._items = chain((item,), self._items)
        return item is not None

    def _take_in(self, item: Item) -> None:
        tally, way = self.tally, self._way
        tally.n_items += 1
        digest = way.digests(item)
        key, rival = item_key(item), rival_key(item)
        claim = way.ledger.claim(key, digest, item.number, rival, place=item.place)
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
        assert item.error is not None  # for it has no prompt
        self._add(item, digest, self._way.encoder.error(item, item.error), is_error=True)
        self._refused.append(item)

    # ---- out ----

    def start(self, engine: Engine, max_time_s: float | None = None) -> BatchResponse:
        """Have the engine begin; results are for `take`."""
        self._start_s = time.perf_counter()
        self._ends_s = math.inf if max_time_s is None else self._start_s + max_time_s
        return engine.run(self.prompts(), options=self._way.options, max_time_s=max_time_s)

    def run(
        self, engine: Engine, max_time_s: float | None = None, on_ended: OnEnded | None = None
    ) -> RunSummary:
        """Run all items; return when each has its record, or when it is stopped.

        Args:
            engine: what runs them.
            max_time_s: seconds for all; what is not done then has no record.
            on_ended: is told of each item that ended.

        Raises:
            EngineError: the engine cannot go on.
            RequestCancelledError: somebody has cancelled items, or all, by the engine.
            CBatchError, OSError: the input cannot be read on, or a record cannot be written.
        """
        response = self.start(engine, max_time_s)
        self._stop.on_ask = response.wind_down
        ending: Ending | None = None
        try:
            with closing(response.as_completed()) as results:
                self._take_all(response, results, on_ended or _tell_nobody)
            if self.is_cut_off:
                engine.stats()  # raises where it was closed
                n_left = self.tally.n_given_back
                raise RequestCancelledError(
                    f"{n_left:,} items were cancelled and have no record: run it again to go on"
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
        """Whether somebody has cancelled items, or closed the engine: asked when all results were taken."""
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
        """Add the record of a result; return what has ended since the last call, wrong items among it.

        Args:
            result: of one item.
            gives_left: return it also where it is left for another run; else such items are counted alone.

        Raises:
            EngineError: the engine has stopped: nothing is wrong with the item.
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
            way, is_error = self._way, result.error is not None
            record = way.encoder.result(
                entry.item, result, digest=entry.digest, created=self._created, model=way.model
            )
            self._add(entry.item, entry.digest, record, is_error=is_error)
        if self._n_added >= N_COMMIT:
            self.commit()
        return [*ended, _named(entry, result)]

    def take_refused(self) -> list[Item]:
        """Return the items that turned out to be wrong since the last call."""
        with self._lock:  # another thread may be reading
            refused, self._refused = self._refused, []
        return refused

    def _is_left(self, entry: Entry, result: BatchResult) -> bool:
        """Whether it is for the next run: cancelled, or out of the run's time, not out of its own."""
        reasons = {result.finish_reason, *(choice.finish_reason for choice in result.choices)}
        if "cancelled" in reasons:
            return True
        if "timeout" not in reasons or time.perf_counter() < self._ends_s:
            return False
        own = RunOptions.of(entry.prompt.options).over(self._way.options).timeout_s
        return own is None or result.timings.total_s < own

    def _count(self, result: BatchResult) -> None:
        usage, tally = result.usage, self.tally
        tally.prompt_tokens += usage.prompt_tokens
        tally.output_tokens += usage.completion_tokens
        tally.cached_tokens += usage.cached_tokens

    def _add(self, item: Item, digest: bytes, record: bytes, *, is_error: bool) -> None:
        self._way.ledger.add(item.number, item_key(item), digest, record, is_error=is_error)
        self._n_added += 1
        self.tally.n_done += 1
        self.tally.n_failed += is_error

    def commit(self) -> None:
        """Have what was added written."""
        with self._lock:
            self._n_added = 0
            self._way.ledger.commit()

    # ---- how far ----

    def counts(self, n_about: int | None) -> Counts:
        """Return how far it is; `n_about` is how many items there may be."""
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
        """Return what it has done, and why it ended."""
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
    """Return an item with its result, which has the item's id."""
    return entry.item, replace(result, id=entry.item.id)


def _tell_nobody(item: Item, result: BatchResult | None) -> None:
    """Do nothing."""
