"""From the prompts of `Engine.run` to sequences in the queue: all at once, or one by one as they are read."""

from __future__ import annotations

import math
import threading
import time
import weakref
from collections import ChainMap
from functools import lru_cache, partial
from itertools import count
from typing import TYPE_CHECKING, Any

from cbatch.errors import (
    CBatchError,
    ConfigError,
    EngineClosedError,
    GrammarError,
    QueueFullError,
    RequestFailedError,
    words_of,
)
from cbatch.messages import as_prompt
from cbatch.runtime.ids import Ids, check_own, own_id
from cbatch.runtime.mailbox import refused
from cbatch.runtime.sequences import SequenceMaker, extended
from cbatch.runtime.validation import check_extension, origin_of
from cbatch.runtime.waking import is_in_event_loop

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from cbatch.backend import Backend
    from cbatch.core.driver import SequenceDriver
    from cbatch.core.prompts import PromptPreparer
    from cbatch.engine_options import ScheduleOptions
    from cbatch.messages import BatchPrompt, Prompt
    from cbatch.options import DryBreakers, Grammar, RunOptions
    from cbatch.response import BatchResult
    from cbatch.runtime.ids import RequestId
    from cbatch.runtime.in_flight import InFlight
    from cbatch.runtime.loop import Loop
    from cbatch.runtime.mailbox import Mailbox


CLOSED_EARLY = "the engine was closed before all prompts were read"
CANCELLED_EARLY = "cancel_all() ended the batch before all prompts were read"

_N_CHECKED = 64
"""Structures for which the outcome of compiling is kept."""


class Feed:
    """Reads a source of prompts while its mailbox has room, in a thread of its own or by `fill`."""

    def __init__(
        self, source: Iterator[object], mailbox: Mailbox, put: Callable[[object], None]
    ) -> None:
        """Make one that has read nothing yet; `source` may wait and use the engine, `put` submits one prompt."""
        self._source, self._mailbox, self._put = source, mailbox, put
        self._is_reading = threading.Lock()

    def start(self) -> None:
        """Read in a thread until the source or the batch ends."""
        threading.Thread(target=self._run, name="cbatch-feed", daemon=True).start()

    def fill(self) -> None:
        """Read while there is room. A source that waits for its own engine is not entered again."""
        if not self._is_reading.acquire(blocking=False):
            return
        try:
            while self._mailbox.items.has_room():
                self._read()
        finally:
            self._is_reading.release()

    def end(self, error: BaseException) -> None:
        """Read no more, for the items in hand are being ended; the batch's reader gets `error` behind them."""
        self._mailbox.break_off(error)

    def _run(self) -> None:
        while self._mailbox.items.wait_for_room():
            self._read()

    def _read(self) -> None:
        try:
            self._put(next(self._source))
        except StopIteration:
            self._mailbox.end_feed()
        except BaseException as error:
            self._mailbox.end_feed(error)
            if not isinstance(error, Exception):  # Ctrl-C, where the reader's own thread reads here
                raise


class Submitter:
    """Makes sequences from prompts and submits them. Every method from any thread."""

    def __init__(
        self,
        backend: Backend,
        prompts: PromptPreparer,
        loop: Loop,
        in_flight: InFlight,
        schedule: ScheduleOptions,
        *,
        is_threaded: bool,
    ) -> None:
        self._loop, self._in_flight = loop, in_flight
        self._schedule, self._is_threaded = schedule, is_threaded
        self.sequences = SequenceMaker(backend, prompts, schedule)
        self._ids = Ids()
        self._submitting = threading.RLock()  # a handler of a signal may submit, too
        self._n_feeds = count()
        # weak, for a feed lives as long as its thread or its batch; a dict, for the order
        self._feeds: weakref.WeakValueDictionary[int, Feed] = weakref.WeakValueDictionary()
        self._wrong_with = lru_cache(_N_CHECKED)(self._compile)
        loop.on_end = self._end_with_loop

    def checked(self, item: BatchPrompt, run_options: RunOptions) -> int:
        """Return how many tokens a prompt has. Raises the errors with which it would end before it runs."""
        with self._submitting:
            driver = self.sequences.checked(item, run_options)
        for want in driver.lacks:
            if (wrong := self._wrong_with(want)) is not None:
                raise GrammarError(*wrong)
        return driver.n_given

    def _compile(self, want: Grammar | DryBreakers) -> tuple[str, str] | None:
        """Compile a structure; return None, or the option and the compiler's words where that fails."""
        found = self._loop.compiled(want)
        return (found.kind, found.reason) if isinstance(found, GrammarError) else None

    def queue(
        self,
        prompts: Sequence[BatchPrompt],
        options: RunOptions,
        ends_s: float,
        mailbox: Mailbox,
    ) -> None:
        """Submit a batch; nothing is queued where it raises. See `Engine.run`."""
        now = time.perf_counter()
        with self._in_flight.undone_if_it_raises() as routes:
            with self._submitting:
                ids = self._ids.of_batch([prompt.id for prompt in prompts], self._in_flight.routes)
                items = [
                    self.sequences.of_prompt(
                        prompt, id, options, now, ends_s, name="" if prompt.id else f"prompts[{i}]"
                    )
                    for i, (prompt, id) in enumerate(zip(prompts, ids, strict=True))
                ]
                self._in_flight.add(routes, mailbox, ids, items)
            self._submit([driver for item in items for driver in item], is_fed=False)

    def extend(self, result: BatchResult, n_tokens: int, mailbox: Mailbox) -> None:
        """Submit a request that continues a result. See `Engine.extend`."""
        origin = origin_of(result, self.sequences.owner)
        n_tokens = check_extension(result, n_tokens)
        now, id = time.perf_counter(), own_id(origin.request.id)
        with self._in_flight.undone_if_it_raises() as routes:
            with self._submitting:
                check_own((id,), self._in_flight.routes)
                request = extended(origin, id, result, n_tokens, now)
                driver = self.sequences.of_request(request, now)
                self._in_flight.add(routes, mailbox, [id], [[driver]])
            self._submit([driver], is_fed=False)

    def feed(
        self,
        source: Iterator[Prompt],
        options: RunOptions,
        ends_s: float,
        mailbox: Mailbox,
    ) -> None:
        """Submit prompts as they are read from `source`, until the source or the batch ends."""
        if ends_s < math.inf:
            self._loop.call_at(ends_s, partial(_end_feed, weakref.ref(mailbox)))
        feed = mailbox.feed = Feed(source, mailbox, partial(self._put, mailbox, options, ends_s))
        self._feeds[next(self._n_feeds)] = feed
        self._loop.check_open()  # the loop may have ended before it knew of this feed
        if self._is_threaded:
            feed.start()

    def _put(self, mailbox: Mailbox, options: RunOptions, ends_s: float, item: Any) -> None:
        """Queue one prompt that was read; a refused one ends at once, with its error."""
        place = mailbox.items.expect()
        if place is None:  # the batch was ended while this prompt was read
            return
        try:
            with self._in_flight.undone_if_it_raises() as routes:
                with self._submitting:
                    prompt, id = self._named(mailbox, item, place)
                    drivers = self.sequences.of_prompt(
                        prompt, id, options, time.perf_counter(), ends_s
                    )
                    self._in_flight.add(routes, mailbox, [id], [drivers], place)
                self._submit(drivers, is_fed=True)
        except Exception as error:
            mailbox.deliver(*refused(mailbox.ids[place], place, _as_failure(error)))
            if isinstance(error, EngineClosedError):
                mailbox.end_feed(error)
        # the batch may have been ended meanwhile, too early for this item to be cancelled with the others
        mailbox.end_late()

    def _named(self, mailbox: Mailbox, item: Any, place: int) -> tuple[BatchPrompt, RequestId]:
        """Return what was read as a prompt, with its id; the mailbox has an id also where this raises."""
        taken = ChainMap(mailbox.given, self._in_flight.routes)
        id = self._ids.automatic(taken)
        try:
            prompt = as_prompt(item)
            if prompt.id is not None:
                check_own((prompt.id,), taken)
                id = own_id(prompt.id)
            return prompt, id
        finally:
            mailbox.ids[place], mailbox.given[id] = id, None

    def _submit(self, drivers: Sequence[SequenceDriver], *, is_fed: bool) -> None:
        """Submit sequences whose routes are set; may wait for room in the queue, so not under a lock."""
        n_limit = self._schedule.max_queue
        if n_limit is None:
            self._in_flight.submit(drivers)
        elif is_fed:
            self._in_flight.submit_as_room_comes(drivers, n_limit)
        elif self._schedule.when_full == "reject":
            self._in_flight.submit_within(drivers, n_limit)
        elif self._is_threaded and is_in_event_loop():
            self._submit_in_event_loop(drivers, n_limit)
        else:
            self._in_flight.submit_as_room_comes(drivers, n_limit)

    def _submit_in_event_loop(self, drivers: Sequence[SequenceDriver], n_limit: int) -> None:
        try:
            self._in_flight.submit_within(drivers, n_limit)
        except QueueFullError as error:
            raise ConfigError(
                f"no room for {len(drivers)} more (max_queue={n_limit}), and run() must not wait in an event loop: "
                "call it by anyio.to_thread.run_sync or asyncio.to_thread, or choose when_full='reject'"
            ) from error

    def fill(self) -> None:
        """Read prompts while there is room, where no thread does."""
        for feed in list(self._feeds.values()):
            feed.fill()

    def end(self, error: CBatchError) -> None:
        """End every feed, for the items in hand are being ended; readers get `error` behind these."""
        for feed in list(self._feeds.values()):
            feed.end(error)

    def _end_with_loop(self, cause: EngineClosedError | None) -> None:
        self.end(cause or EngineClosedError(CLOSED_EARLY))


def _as_failure(error: Exception) -> CBatchError:
    """Return the error of a refused prompt as one for its result."""
    if isinstance(error, CBatchError):
        return error
    failure = RequestFailedError(f"the prompt could not be read: {words_of(error)}")
    failure.__cause__ = error
    return failure


def _end_feed(mailbox: weakref.ref[Mailbox]) -> None:
    alive = mailbox()
    if alive is not None:
        alive.end_feed()
