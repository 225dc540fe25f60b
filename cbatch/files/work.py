"""The work of a run over a file: items become prompts for the engine, results become records."""

from __future__ import annotations

import math
import threading
import time
from contextlib import closing
from copy import copy
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

from cbatch.chat.vector_calls import VectorPrompt
from cbatch.errors import ConfigError, EngineError, RequestCancelledError, RequestError
from cbatch.files.input.item import ItemError, duplicate, in_own_words, item_key, label, rival_key
from cbatch.files.outcome import RunSummary
from cbatch.files.vector_work import VectorEngine
from cbatch.files.window import Entry, ItemWindow, length, n_held
from cbatch.options import RunOptions
from cbatch.progress import Counts
from cbatch.runtime.output_size import size_of_result
from cbatch.runtime.sequences import OptionsMerger
from cbatch.runtime.submit import RefusedPrompt

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import TypeAlias

    from cbatch.engine import Engine
    from cbatch.files.input.item import Item
    from cbatch.files.outcome import Stopper
    from cbatch.files.output.encoders import Encoder
    from cbatch.files.output.journal import Journal
    from cbatch.files.output.target import PipedOutput
    from cbatch.files.settings import FileOptions
    from cbatch.files.vector_work import VectorResults
    from cbatch.messages import BatchPrompt
    from cbatch.progress import Ending
    from cbatch.response import BatchResult
    from cbatch.runtime.batch_response import BatchResponse

    Ledger: TypeAlias = "Journal | PipedOutput"
    """Takes records, and knows which items have one."""

    Ended: TypeAlias = "tuple[Item, BatchResult | None]"
    """An item that ended, and its result; None where the item has an error."""

    OnEnded: TypeAlias = "Callable[[Item, BatchResult | None], object]"
    """Called with each item that ended; the result is None where the item has an error."""

    Digest: TypeAlias = "Callable[[Item], bytes]"
    """Returns 16 bytes that are the same as long as an item asks the same."""

N_WINDOW_PER_SLOT = 8
"""Items read ahead for each slot, besides the four a slot that the engine reads itself."""

N_COMMIT = 64  # most records that are written together, where several results or refused items are ready at once


class Items(Protocol):
    """The items of a run, each once."""

    def __next__(self) -> Item:
        """Return the next item."""

    def is_dry(self) -> bool:
        """Return whether reading the next item would wait."""

    @property
    def n_items(self) -> int | None:
        """The number of items; None where it is not known."""

    def about(self) -> int | None:
        """Estimate the number of items; None where nothing tells."""


class RunGate(Protocol):
    """Says when an item may go to the engine, for a run that shares the engine with others."""

    def enter(self, id: str, n_sequences: int) -> bool:
        """Wait until the item, of so many sequences, may go; False where no more items begin."""

    def leave(self, id: str) -> None:
        """Note that the item has ended."""


class OpenGate:
    """Lets every item go at once."""

    def enter(self, id: str, n_sequences: int) -> bool:
        """Do not wait."""
        return True

    def leave(self, id: str) -> None:
        """Note nothing."""


@dataclass(frozen=True, slots=True)
class RunContext:
    """What all items of a run share."""

    ledger: Ledger
    encoder: Encoder
    digests: Digest
    options: RunOptions  # that an item leaves out, the engine's own included
    model: str  # its name, for records
    prefix: str = ""  # of the items' ids in the engine
    gate: RunGate = field(default_factory=OpenGate)
    n_answer_mib: float = math.inf  # of memory: a record is made whole


@dataclass(eq=False, slots=True)
class RunTally:
    """The counts of a run so far, by the names of `RunSummary`."""

    n_items: int = 0
    n_done: int = 0
    n_failed: int = 0
    n_before: int = 0
    n_failed_before: int = 0
    errors: dict[str, int] = field(default_factory=dict)
    first_error: str = ""
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0

    def fail(self, kind: str, message: str) -> None:
        """Count an error of this run."""
        self.n_failed += 1
        self.errors[kind] = self.errors.get(kind, 0) + 1
        self.first_error = self.first_error or message


class Work:
    """One run over a file: reads items as the engine takes prompts, writes results as they arrive.

    `prompts` may be iterated in another thread than the one that takes results.
    """

    def __init__(
        self,
        stream: Items,
        context: RunContext,
        engine: Engine | VectorEngine,
        asked: FileOptions,
        stop: Stopper,
    ) -> None:
        self.tally = RunTally()
        self.has_read_all = False
        self._stream, self._context, self._engine, self._stop = stream, context, engine, stop
        self._window = ItemWindow(asked.window or N_WINDOW_PER_SLOT * engine.parallel)
        self._limit, self._max_time_s = asked.limit or math.inf, asked.max_time_s
        self._is_deduped = asked.dedupe
        self._running: dict[str, Entry] = {}
        self._refused: list[Ended] = []
        self._n_untold = 0
        """Refused items since the last `RefusedPrompt`."""
        self._n_started = self._n_given_back = self._n_added = 0
        self._start_s, self._ends_s = 0.0, math.inf
        self._ended: Ending | None = None
        self._response: BatchResponse | VectorResults | None = None
        self._is_cancelled = False
        self._settled = OptionsMerger()
        self._is_reading = True
        self._lock = threading.Lock()
        self._created = int(time.time())

    # ---- in ----

    def prompts(self) -> Iterator[BatchPrompt]:
        """Yield the prompts for the engine, in the order of the window, and a `RefusedPrompt` after refused items."""
        while not self._stop.is_asked:
            self._fill()
            if self._n_untold >= N_COMMIT or (self._n_untold and not len(self._window)):
                yield self._refused_prompt()
                continue
            if not len(self._window):
                return
            entry = self._window.take()
            prompt, id = copy(entry.prompt), self._context.prefix + label(entry.item)
            object.__setattr__(prompt, "id", id)
            options = self._settled.over(RunOptions.of(prompt.options), self._context.options)
            if not self._context.gate.enter(id, options.n_sequences):
                return
            self._running[id] = entry
            yield prompt

    def _refused_prompt(self) -> RefusedPrompt:
        """Return what has the engine give a result, at which the refused items so far are taken."""
        self._n_untold = 0
        id = f"{self._context.prefix}refused until {self.tally.n_items}"
        error = RequestError("items that cannot run were read")
        return RefusedPrompt(prompt="-", id=id, error=error)

    def _fill(self) -> None:
        """Read items until the window is full, or until an item would have to wait for the next."""
        while self._has_room and self._is_reading and not self._stop.is_asked:
            is_dry = self._stream.is_dry()
            if self._n_started >= self._limit:  # which is no reason to end where no item is left
                self._end_reading(has_read_all=not is_dry and next(self._stream, None) is None)
            elif is_dry and (len(self._window) or self._n_untold):
                return
            elif (item := next(self._stream, None)) is None:
                self._end_reading(has_read_all=True)
            else:
                with self._stop.guarded(), self._lock:
                    self._claim(item)

    @property
    def _has_room(self) -> bool:
        return self._window.has_room and self._n_untold < N_COMMIT

    def _end_reading(self, *, has_read_all: bool) -> None:
        self.has_read_all, self._is_reading = has_read_all, False
        self._window.end()

    def _claim(self, item: Item) -> None:
        tally, context = self.tally, self._context
        tally.n_items += 1
        digest = context.digests(item)
        key, rival = item_key(item), rival_key(item)
        claim = context.ledger.claim(key, digest, item.number, rival, place=item.place)
        if claim == "duplicate":
            self._refuse(duplicate(item, context.ledger.first))
        elif claim in ("done", "failed"):
            tally.n_before += 1
            tally.n_failed_before += claim == "failed"
        elif item.prompt is None:
            self._refuse(item)
        elif isinstance(item.prompt, VectorPrompt) and not isinstance(self._engine, VectorEngine):
            message = "a line for embeddings or scores cannot be answered by this run: use run_file"
            self._refuse(replace(item, error=ItemError("invalid_url", message, "url")))
        else:
            self._n_started += 1
            options = RunOptions.of(item.prompt.options)
            n_chars = length(item.prompt, options)
            self._window.add(Entry(item, item.prompt, digest, n_chars, n_held(item)))

    def _refuse(self, item: Item) -> None:
        assert item.error is not None  # an item without a prompt has an error
        self.tally.fail(item.error.code, f"{item.place}: {item.error.message}")
        self._add(item, self._context.encoder.error(item, item.error), is_error=True)
        self._refused.append((item, None))
        self._n_untold += 1

    # ---- out ----

    def start(self) -> BatchResponse | VectorResults:
        """Let the engine begin; give its results to `take`."""
        seconds, options = self._max_time_s, self._context.options
        self._start_s = time.perf_counter()
        self._ends_s = math.inf if seconds is None else self._start_s + seconds
        self._response = self._engine.run(
            self.prompts(),
            options=options,
            max_time_s=seconds,
            ask_again=True,
            dedupe=self._is_deduped,
        )
        if self._is_cancelled:
            self._response.cancel()
        return self._response

    def cancel(self) -> None:
        """Leave all items that run for a later run; the run's `Stopper` must have been asked before."""
        self._is_cancelled = True
        if self._response is not None:
            self._response.cancel()

    def run(self, on_ended: OnEnded) -> RunSummary:
        """Run all items until each has its record, or the run is stopped; errors are those of `run_file`."""
        response = self.start()
        ending: Ending | None = None
        try:
            with (
                self._stop.asking(response.wind_down),
                closing(response.as_completed()) as results,
            ):
                self._take_all(response, results, on_ended)
            self.check_engine()
            if self._is_cut_off:
                raise RequestCancelledError(
                    f"{self._n_given_back:,} items were cancelled and have no record: run it again to continue"
                )
        except KeyboardInterrupt:
            if not self._stop.is_now:
                raise
            ending = "now"
        finally:
            with self._stop.guarded():
                self.commit()
        summary = RunSummary(
            ending or self._ending(),
            **asdict(self.tally),
            n_left=self.tally.n_items - self._n_settled,
            elapsed_s=time.perf_counter() - self._start_s,
        )
        self._ended = summary.ending
        return summary

    def check_engine(self) -> None:
        """Raise EngineClosedError where items are left, after the last result, because the engine was closed."""
        if self._is_cut_off:
            self._engine.stats()

    @property
    def _is_cut_off(self) -> bool:
        """Whether items were cancelled or the engine was closed."""
        return self._ending() == "done" and not self._is_whole

    def _take_all(
        self,
        response: BatchResponse | VectorResults,
        results: Iterator[BatchResult],
        on_ended: OnEnded,
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
        for pair in self.take_refused():
            on_ended(*pair)

    def take(self, result: BatchResult, *, gives_left: bool = False) -> list[Ended]:
        """Add the record of a result; return the items that ended since the last call, those with an error too.

        An item that is left for a later run is one of them where `gives_left`. The engine's own failure is raised.
        """
        ended = self.take_refused()
        entry = self._running.pop(result.id, None)
        if entry is not None:
            ended += self._taken(entry, result, gives_left=gives_left)
        if self._n_added >= N_COMMIT:
            self.commit()
        return ended

    def _taken(self, entry: Entry, result: BatchResult, *, gives_left: bool) -> list[Ended]:
        """Add the record of an item; return the item with its result, unless it is left."""
        with self._lock:
            self._context.gate.leave(result.id)
            if isinstance(result.error, EngineError):
                raise result.error
            if self._is_left(entry, result):
                self._n_given_back += 1
                return [_named(entry, result)] if gives_left else []
            self.tally.prompt_tokens += result.usage.prompt_tokens
            self.tally.output_tokens += result.usage.completion_tokens
            self.tally.cached_tokens += result.usage.cached_tokens
            if result.error is None and self._is_too_large(result):
                message = (
                    f"the answer takes more than {self._context.n_answer_mib:g} MiB of memory: ask for fewer choices, "
                    "tokens or log-probabilities"
                )
                result = replace(result, error=ConfigError(message))
            if result.error is not None:
                result = replace(result, error=in_own_words(result.error, result.id))
                place = entry.item.place
                self.tally.fail(type(result.error).__name__, f"{place}: {result.error}")
            context, is_error = self._context, result.error is not None
            record = context.encoder.result(
                entry.item, result, digest=entry.digest, created=self._created, model=context.model
            )
            self._add(entry.item, record, is_error=is_error)
        return [_named(entry, result)]

    def take_refused(self) -> list[Ended]:
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

    def _is_too_large(self, result: BatchResult) -> bool:
        return size_of_result(result, is_streamed=False) > self._context.n_answer_mib * 2**20

    def _add(self, item: Item, record: bytes, *, is_error: bool) -> None:
        self._context.ledger.add(item.number, record, is_error=is_error)
        self._n_added += 1
        self.tally.n_done += 1

    def commit(self) -> None:
        """Write the records that were added."""
        with self._lock:
            self._n_added = 0
            self._context.ledger.commit()

    # ---- how far ----

    def counts(self) -> Counts:
        """Return the progress."""
        tally = self.tally
        n_total = tally.n_items if self.has_read_all else None
        n_about, is_counted = (n_total, True) if self.has_read_all else self._about()
        return Counts(
            n_total,
            self._n_settled,
            tally.n_failed + tally.n_failed_before,
            n_about=n_about,
            n_before=tally.n_before,
            ending=self._ended,
            is_counted=is_counted,
            n_goal=None if self._limit == math.inf else int(tally.n_before + self._limit),
        )

    def _about(self) -> tuple[int | None, bool]:
        """Return the counted or estimated number of items, and whether it was counted."""
        n_items = self._stream.n_items
        return (self._stream.about(), False) if n_items is None else (n_items, True)

    def _ending(self) -> Ending:
        if self._stop.is_asked:
            return "asked"
        if time.perf_counter() >= self._ends_s and not self._is_whole:
            return "time"
        return "limit" if self._n_started >= self._limit and not self.has_read_all else "done"

    @property
    def _is_whole(self) -> bool:
        return self.has_read_all and self.tally.n_items == self._n_settled

    @property
    def _n_settled(self) -> int:
        return self.tally.n_done + self.tally.n_before


def _named(entry: Entry, result: BatchResult) -> Ended:
    return entry.item, replace(result, id=entry.item.id)
