"""Submits the prompts of `Engine.run`: all at once, or one by one as they are read."""

from __future__ import annotations

import math
import threading
import weakref
from dataclasses import dataclass, field, fields, replace
from functools import partial
from itertools import count, repeat
from typing import TYPE_CHECKING, Any

from cbatch.errors import CBatchError, EngineClosedError, failure_of
from cbatch.messages import BatchPrompt, Prompt, as_id, as_prompt
from cbatch.runtime.async_source import AsyncSource
from cbatch.runtime.ids import Ids, RequestId, check_own, own_id
from cbatch.runtime.interface import Runtime, Submission
from cbatch.runtime.mailbox import Mailbox, refused
from cbatch.runtime.waking import is_in_event_loop
from cbatch.support.interrupts import HeldBack
from cbatch.support.thread_start import started

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterator, Sequence

    from cbatch.embedding import TextSettings
    from cbatch.options import RunOptions
    from cbatch.response import BatchResult


CLOSED_EARLY = "the engine was closed before all prompts were read"
CANCELLED_EARLY = "cancel_all() ended the batch before all prompts were read"


class Feed:
    """Reads a source of prompts while its mailbox has room, in a thread of its own or by `fill`."""

    def __init__(
        self, source: Iterator[object], mailbox: Mailbox, put: Callable[[object], None]
    ) -> None:
        """Make one that has read nothing yet; `source` may wait and use the engine, `put` submits one prompt."""
        self._source, self._mailbox, self._put = source, mailbox, put
        self.leave = source.leave if isinstance(source, AsyncSource) else _nothing
        """Have the source end while its next prompt is awaited, if it can. From any thread; does not wait."""
        self._is_reading = threading.Lock()

    def start(self) -> None:
        """Read in a thread until the source or the batch ends. Raises a NoThreadError."""
        started(self._run, "cbatch-feed")

    def fill(self) -> None:
        """Read while there is room. A source that waits for its own engine is not entered again."""
        if not self._is_reading.acquire(blocking=False):
            return
        try:
            while self._mailbox.items.has_room():
                error = self._read()
                if error is not None and not isinstance(error, Exception):
                    raise error  # Ctrl-C, as it is the reader's own thread
        finally:
            self._is_reading.release()

    def end(self, error: BaseException) -> None:
        """Read no more, for the items in hand are being ended; the batch's reader gets `error` after them."""
        self._mailbox.break_off(error)

    def _run(self) -> None:
        while self._mailbox.items.wait_for_room():
            self._read()
        self._source = iter(())  # a generator ends here, in its own thread

    def _read(self) -> BaseException | None:
        """Read one prompt; return the error that ended the source, which the batch's reader gets."""
        try:
            self._put(next(self._source))
        except StopIteration:
            self._mailbox.end_feed()
        except BaseException as error:
            self._mailbox.end_feed(error)
            return error
        return None


@dataclass(frozen=True, repr=False)
class RefusedPrompt(BatchPrompt):
    """Of a source: it is not computed, its result has an error at once."""

    error: CBatchError = field(default_factory=CBatchError)


@dataclass(frozen=True, repr=False)
class QueriedText(BatchPrompt):
    """Of a source of texts: a document that is compared with `query`."""

    query: str = ""

    @classmethod
    def of(cls, text: BatchPrompt, query: str) -> QueriedText:
        """Return a text with its query."""
        return cls(**{f.name: getattr(text, f.name) for f in fields(BatchPrompt)}, query=query)


@dataclass(frozen=True, slots=True)
class FeedReading:
    """What a source gives."""

    read: Callable[[Any], BatchPrompt] = as_prompt
    """Makes a prompt of it; what it raises ends that item alone."""
    texts: TextSettings | None = None
    """How the prompts are embedded, where they are texts for that."""
    names: Iterator[str | None] = field(default_factory=lambda: repeat(None))
    """The caller's ids, one an item."""

    def texts_of(self, prompt: BatchPrompt) -> TextSettings | None:
        """Return how a prompt is embedded or scored, if it is."""
        texts = self.texts
        if texts is None or not isinstance(prompt, QueriedText) or prompt.query == texts.query:
            return texts
        return replace(texts, query=prompt.query)


AS_PROMPTS = FeedReading()


class Submitter:
    """Gives requests their ids and submits them to a runtime. Every method from any thread."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._ids = Ids()
        self._naming = threading.RLock()  # reentrant: a finalizer may submit, too
        self._n_feeds = count()
        # weak, for a feed lives as long as its thread or its batch; a dict, for the order
        self._feeds: weakref.WeakValueDictionary[int, Feed] = weakref.WeakValueDictionary()
        runtime.listen(self._end_with_runtime)

    def queue(
        self,
        prompts: Sequence[BatchPrompt],
        options: RunOptions,
        ends_s: float,
        mailbox: Mailbox,
        *,
        is_soon: bool = False,
        may_wait: bool = True,
    ) -> None:
        """Submit a batch; nothing is queued where it raises.

        See `Engine.run`, `run_soon` for `is_soon`, and `run_late` for `may_wait`.
        """
        with HeldBack(), self._naming:
            ids = self._ids.of_batch([prompt.id for prompt in prompts], self._runtime.ids)
        mailbox.ids.update(enumerate(ids))
        places: Sequence[int] = range(len(prompts))
        if mailbox.copies is not None:
            places = [i for i in places if not mailbox.is_copy(prompts[i], options, i, ids[i])]
            prompts, ids = [prompts[i] for i in places], [ids[i] for i in places]
        self._enter(
            Submission(
                prompts,
                ids,
                ["" if p.id else f"prompts[{i}]" for i, p in zip(places, prompts, strict=True)],
                options,
                ends_s,
                mailbox,
                places,
                may_wait=may_wait and not is_soon and not is_in_event_loop(),
                asks_again=mailbox.asks_again,
                is_checked=is_soon,
                is_awaited=not is_soon,
                job=mailbox.job,
            )
        )

    def _enter(self, submission: Submission) -> None:
        self._runtime.add(submission)

    def extend(self, result: BatchResult, n_tokens: int, mailbox: Mailbox) -> None:
        """Submit a request that continues a result. See `Engine.extend`."""
        mailbox.ids[0] = self._runtime.extend(result, n_tokens, mailbox)

    def feed(
        self,
        source: Iterator[Prompt],
        options: RunOptions,
        ends_s: float,
        mailbox: Mailbox,
        reading: FeedReading = AS_PROMPTS,
    ) -> None:
        """Submit prompts as they are read from `source`, until the source or the batch ends.

        `reading` tells what the source gives.
        """
        if ends_s < math.inf:
            self._runtime.call_at(ends_s, partial(_end_feed, weakref.ref(mailbox)))
        feed = mailbox.feed = Feed(
            source, mailbox, partial(self._put, mailbox, options, ends_s, reading)
        )
        self._feeds[next(self._n_feeds)] = feed
        self._runtime.check_open()  # it may have ended before it knew of this feed
        if self._runtime.is_threaded:
            feed.start()

    def _put(
        self,
        mailbox: Mailbox,
        options: RunOptions,
        ends_s: float,
        reading: FeedReading,
        item: Any,
    ) -> None:
        """Queue one prompt that was read; a refused one ends at once, with its error.

        One whose reading raises what ends the program, such as Ctrl-C, ends too.
        """
        place: int | None = None
        try:
            with HeldBack():  # an item that is counted has a place
                place = mailbox.items.expect()
            if place is None:  # the batch was ended while this prompt was read
                return
            prompt, id = self._named(mailbox, reading, item, place)
            if isinstance(prompt, RefusedPrompt):
                raise prompt.error
            if mailbox.is_copy(prompt, options, place, id):
                return
            self._enter(
                Submission(
                    [prompt],
                    [id],
                    [""],
                    options,
                    ends_s,
                    mailbox,
                    [place],
                    is_fed=True,
                    asks_again=mailbox.asks_again,
                    job=mailbox.job,
                    texts=reading.texts_of(prompt),
                )
            )
        except BaseException as error:
            is_refused = isinstance(error, Exception)
            given = "" if place is None else mailbox.ids.get(place, "")
            # Ctrl-C may come when it is queued already
            if place is not None and (is_refused or given not in self._runtime.ids):
                mailbox.deliver(*refused(given, place, as_failure(error)))
            if not is_refused:
                raise
            if isinstance(error, EngineClosedError):
                mailbox.end_feed(error)
        # the batch may have been ended meanwhile, too early for this item to be cancelled with the others
        mailbox.end_late()

    def _named(
        self, mailbox: Mailbox, reading: FeedReading, item: Any, place: int
    ) -> tuple[BatchPrompt, RequestId]:
        """Return what was read as a prompt, with its id; the mailbox has an id also where this raises."""
        in_flight = self._runtime.ids
        with HeldBack(), self._naming:
            id = self._ids.automatic(mailbox.given, in_flight)
            mailbox.ids[place], mailbox.given[id] = id, None
        # what the caller's objects and a judge's prompt do may take long, and use the engine
        if (name := next(reading.names, None)) is not None:
            id = self._renamed(mailbox, place, as_id(name))
        prompt = reading.read(item)
        if prompt.id is not None:
            id = self._renamed(mailbox, place, prompt.id, in_flight)
        return prompt, id

    def _renamed(
        self, mailbox: Mailbox, place: int, name: str, in_flight: Container[str] = ()
    ) -> RequestId:
        """Give an item the caller's id, and return that; a DuplicateIdError where another has it."""
        with HeldBack(), self._naming:
            id = mailbox.ids[place]
            del mailbox.given[id]
            try:
                check_own((name,), mailbox.given)
                check_own((name,), in_flight)
                id = own = own_id(name)
            finally:
                mailbox.ids[place], mailbox.given[id] = id, None
        return own

    def fill(self) -> None:
        """Read prompts while there is room, where no thread does."""
        for feed in list(self._feeds.values()):
            feed.fill()

    def end(self, error: CBatchError) -> None:
        """End every feed, for the items in hand are being ended; readers get `error` after these."""
        for feed in list(self._feeds.values()):
            feed.end(error)

    def _end_with_runtime(self, cause: EngineClosedError | None) -> None:
        self.end(cause or EngineClosedError(CLOSED_EARLY))


def as_failure(error: BaseException) -> CBatchError:
    """Return the error of a refused prompt as one for its result."""
    return failure_of("the prompt could not be read", error)


def _nothing() -> None:
    """A generator's thread cannot be broken off."""


def _end_feed(mailbox: weakref.ref[Mailbox]) -> None:
    alive = mailbox()
    if alive is not None:
        alive.end_feed()
