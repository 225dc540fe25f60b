"""Texts that wait for their vectors, and the thread that has them computed: by the owner thread, between its steps,
where the model generates, too.

Texts of equal settings share micro-batches: the first one in the order of the queue, and those others that fill what
is left. Equal texts are computed once.
"""

from __future__ import annotations

import heapq
import math
import threading
import time
from bisect import bisect_right
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from itertools import count
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from cbatch.errors import (
    CBatchError,
    DeadlineError,
    EmbeddingError,
    EngineClosedError,
    PromptError,
    RequestCancelledError,
    TextTooLongError,
    failure_of,
)
from cbatch.response import BatchResult, FinishReason, Timings, Usage
from cbatch.runtime.commands import FairLock
from cbatch.runtime.sequences import check_in_vocab
from cbatch.runtime.work_thread import be_nice
from cbatch.support.interrupts import HeldBack
from cbatch.support.thread_start import started

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from numpy.typing import NDArray

    from cbatch.backend import Backend, Embedder
    from cbatch.embedding import Pooling, TextSettings, Truncate
    from cbatch.messages import BatchPrompt
    from cbatch.runtime.in_flight import Route
    from cbatch.stats import EngineStats

    Found = list[NDArray[np.float32] | None]
    DoBeside = Callable[
        [Callable[[Callable[[], float]], Found], Callable[[], object]], tuple[Found, float]
    ]

N_READY = 512
"""Texts that are made tokens ahead, of which micro-batches are put together. Our choice."""

N_TURN_TOKENS = 2**15
"""About the tokens that are made between two micro-batches: long texts would hold up others for seconds. Our choice:
some tens of milliseconds, and more than a micro-batch has."""

N_KEPT_BYTES = 2**24
"""Most bytes of vectors that are kept for equal texts. Our choice."""

PATIENCE_S = 600.0
"""Seconds for which texts of a batch let later ones go first: more than the texts of one batch wait for each other, so
that calls do not wait for them; but other work does not hold a batch up for ever. Our choice."""

_N_CHARACTERS = 4
"""Characters of a token, about, where a text has too many or is cut off."""

_N_CHARACTERS_MOST = 16
"""Characters of a token beyond which a part of a text is made tokens first: it may have too many. Our choice."""

_N_ENTRY_BYTES = 240
"""What a kept vector takes besides its numbers: its array, digest and place. Measured, CPython 3.11."""

_N_ENDED_MIN = 64

_NOT_COMPUTED = "the text could not be computed"

_IDLE_S = 0.05
"""Seconds without a text after which the thread ends: where it computes, its team of OpenMP's slows down others."""


class _UnwantedError(CBatchError):
    """Every text of a micro-batch has ended while it was computed."""


class TextKind(NamedTuple):
    """What texts of a micro-batch have in common."""

    pooling: Pooling
    prefix: str
    query: str | None
    instruction: str | None


@dataclass(eq=False, slots=True)
class WaitingText:
    """One text, until it has ended."""

    route: Route
    prompt: BatchPrompt
    settings: TextSettings
    kind: TextKind
    rank: tuple[float, int]
    """The lower, the earlier: when it came, or would have with its priority or patience, and its number."""
    submitted_s: float
    deadline_s: float
    tokens: tuple[int, ...] = ()
    digest: bytes = b""
    begun_s: float = math.inf
    has_ended: bool = False

    @property
    def n_characters(self) -> int:
        """Characters that tokens are made of."""
        parts = self.prompt.prompt, self.kind.prefix, self.kind.query, self.kind.instruction
        return sum(len(part) for part in parts if part)

    def __lt__(self, other: WaitingText) -> bool:
        return self.rank < other.rank


class KeptVectors:
    """The vectors of the last texts, by the digest of their tokens; bounded. One thread at a time."""

    def __init__(self, n_bytes: int) -> None:
        self._found: OrderedDict[bytes, NDArray[np.float32]] = OrderedDict()
        self._n_left = n_bytes

    def get(self, digest: bytes) -> NDArray[np.float32] | None:
        """Return a vector, or None."""
        found = self._found.get(digest)
        if found is not None:
            self._found.move_to_end(digest)
        return found

    def put(self, digest: bytes, vector: NDArray[np.float32]) -> None:
        """Keep a vector; forget the ones that were not asked for the longest."""
        if digest not in self._found:
            self._found[digest] = vector
            self._n_left -= vector.nbytes + _N_ENTRY_BYTES
        while self._n_left < 0:
            self._n_left += self._found.popitem(last=False)[1].nbytes + _N_ENTRY_BYTES


@dataclass(eq=False, slots=True)
class _TextQueue:
    """The texts that wait to be computed. Under the lock of `Texts`."""

    waiting: dict[str, WaitingText] = field(default_factory=dict)
    """All waiting texts, by id."""
    by_rank: list[WaitingText] = field(default_factory=list)
    """A heap of the texts that are not ready; some have ended."""
    ready: list[WaitingText] = field(default_factory=list)
    """The other texts, in order of rank; some have ended."""
    by_deadline: list[tuple[float, int, WaitingText]] = field(default_factory=list)
    """A heap of the texts with a deadline; some have ended."""
    n_ended: int = 0
    """Texts that have ended since the heaps were cleared of them, at most."""

    def note_end(self) -> None:
        """Count an ended text. Ended ones leave the heaps many at once, at constant cost for each."""
        self.n_ended += 1
        if self.n_ended > max(_N_ENDED_MIN, len(self.waiting)):
            self.by_rank = [text for text in self.by_rank if not text.has_ended]
            self.by_deadline = [e for e in self.by_deadline if not e[2].has_ended]
            heapq.heapify(self.by_rank)
            heapq.heapify(self.by_deadline)
            self.n_ended = 0


class Texts:
    """Computes vectors of texts. Every method from any thread, unless it says otherwise."""

    def __init__(
        self,
        backend: Backend,
        routes: dict[str, Route],
        stats: EngineStats,
        *,
        is_threaded: bool,
        do_beside: DoBeside | None = None,
    ) -> None:
        """Make a room without a thread; the first text starts one.

        Args:
            backend: makes embedders; it is closed by others, after `close`.
            routes: where the output of each request in flight goes, by id. Texts that end are taken out.
            stats: counts of texts are added to it.
            is_threaded: compute in a thread; without, by `pump`.
            do_beside: has work done by the thread that computes steps; without, texts are computed by this thread.
        """
        self.on_admit: Callable[[Sequence[str]], object] | None = None
        """Called with the ids of texts before they are computed."""
        self._backend, self._routes, self._stats = backend, routes, stats
        self._is_threaded, self._do_beside = is_threaded, do_beside
        self._facts = backend.model_facts
        self._embedders: dict[Pooling, Embedder] = {}
        self._kept = KeptVectors(N_KEPT_BYTES)
        self._queue = _TextQueue()
        self._numbers = count()
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._turns = FairLock()
        self._thread: threading.Thread | None = None
        self._is_closed = False

    # ---- what comes in ----

    def check(self, settings: TextSettings) -> None:
        """Raise the error of settings that the model cannot serve; see `TextSettings.check`."""
        settings.check(self._facts)

    def kind_of(self, settings: TextSettings) -> TextKind:
        """Return which texts may be computed together."""
        pooling = settings.pooling or self._facts.pooling
        return TextKind(pooling, settings.prefix, settings.query, settings.instruction)  # type: ignore[arg-type]

    def text(
        self,
        route: Route,
        prompt: BatchPrompt,
        settings: TextSettings,
        *,
        head_start_s: float,
        submitted_s: float,
        deadline_s: float,
    ) -> WaitingText:
        """Return a text for `put`, which goes before those that were submitted less than `head_start_s` earlier."""
        behind_s = PATIENCE_S if settings.is_patient else 0.0
        rank = submitted_s - head_start_s + behind_s, next(self._numbers)
        kind = self.kind_of(settings)
        return WaitingText(route, prompt, settings, kind, rank, submitted_s, deadline_s)

    def put(self, texts: Sequence[WaitingText]) -> None:
        """Queue texts whose routes are set. Does not wait.

        Raises:
            EngineClosedError: it is closed.
            NoThreadError: the system has no more threads; nothing was queued.
        """
        with HeldBack(), self._lock:
            if self._is_closed:
                raise EngineClosedError("the engine is closed")
            if self._is_threaded and self._thread is None:
                self._thread = started(self._run, "cbatch-texts")
            queue = self._queue
            for text in texts:
                queue.waiting[text.route.id] = text
                heapq.heappush(queue.by_rank, text)
                if text.deadline_s < math.inf:
                    heapq.heappush(queue.by_deadline, (text.deadline_s, text.rank[1], text))
            self._stats.n_submitted += len(texts)
            if self._is_threaded:
                self._changed.notify_all()

    def __contains__(self, id: object) -> bool:
        """Whether a request in flight is one of these texts."""
        return id in self._queue.waiting

    def has_begun(self, id: str) -> bool:
        """Whether a text is being computed."""
        text = self._queue.waiting.get(id)
        return text is not None and text.begun_s < math.inf

    @property
    def n_waiting(self) -> int:
        """Texts that have not ended."""
        return len(self._queue.waiting)

    # ---- orders ----

    def cancel(self, route: Route) -> bool:
        """End a text now; False where it is not in flight."""
        text = self._of(route)
        if text is None or not self._take(text):
            return False
        self._end(text, "cancelled", RequestCancelledError("cancelled before it was computed"))
        return True

    def take_out(self, route: Route) -> bool:
        """Take out a text that has not begun, as if it had not been submitted; False for another."""
        with HeldBack(), self._lock:
            text = self._of(route)
            if text is None or text.begun_s < math.inf:
                return False
            self._stats.n_submitted -= 1
            return self._take(text)

    def _of(self, route: Route) -> WaitingText | None:
        """Return the text in flight with this route; a later one may have an equal id."""
        text = self._queue.waiting.get(route.id)
        return text if text is not None and text.route is route else None

    def _take(self, text: WaitingText) -> bool:
        """Take a text out of the queue; False where it has ended. The lists leave it out later."""
        with HeldBack(), self._lock:
            if text.has_ended:
                return False
            text.has_ended = True
            del self._queue.waiting[text.route.id]
            self._queue.note_end()
            return True

    # ---- the thread ----

    @property
    def is_current_thread(self) -> bool:
        """Whether the caller's thread computes texts."""
        return self._thread is threading.current_thread()

    def pump(self, *, may_wait: bool) -> bool:
        """Compute one micro-batch in the caller's thread, where there is no other; False where none waits.

        While another thread does, wait for it, or return False where the caller may not wait.
        """
        if self._is_threaded or (self._turns.is_held and not may_wait):
            return False
        with self._turns.held():
            return self._work()

    def _run(self) -> None:
        if self._facts.can_generate:
            be_nice()
        while True:
            try:
                with self._turns.held():
                    while self._work():
                        pass
            except EngineClosedError as error:
                self._end_all(None if error.__cause__ is None else error)
            except BaseException as error:  # a bug: nobody may wait for ever
                self._end_all(failure_of(_NOT_COMPUTED, error))
            with self._lock:
                if not self._is_closed and not self._queue.waiting:
                    self._changed.wait(_IDLE_S)
                if self._is_closed or not self._queue.waiting:
                    self._thread = None
                    self._changed.notify_all()
                    return

    def _work(self) -> bool:
        """Compute one micro-batch, or end what cannot be computed; False where no text waits."""
        now = time.perf_counter()
        self._end_late(now)
        self._get_ready()
        group = self._group(now)
        if not group:
            return bool(self._queue.waiting) and not self._is_closed
        if self.on_admit is not None:
            self.on_admit([text.route.id for text in group])
        with suppress(_UnwantedError):
            self._finish(group, self._computed(group))
        return True

    def _end_late(self, now: float) -> None:
        """End texts whose time is over."""
        late: list[WaitingText] = []
        with HeldBack(), self._lock:
            queue = self._queue.by_deadline
            while queue and (queue[0][0] <= now or queue[0][2].has_ended):
                late.append(heapq.heappop(queue)[2])
        for text in late:
            if self._take(text):
                self._end(text, "timeout", DeadlineError(now - text.submitted_s))

    def _get_ready(self) -> None:
        """Make tokens of the texts that come next, of some of them. Texts that cannot be computed end."""
        n_left = N_TURN_TOKENS
        while n_left > 0 and (text := self._next_unready()) is not None:
            try:
                text.tokens = self._tokens_of(text)
            except Exception as error:
                self._drop(text, error)
                continue
            finally:
                n_left -= max(len(text.tokens), text.n_characters // _N_CHARACTERS)
            data = np.asarray(text.tokens, np.int32).tobytes()
            text.digest = blake2b(data, digest_size=16, key=text.kind.pooling.encode()).digest()
            found = self._kept.get(text.digest)
            if found is not None and self._take(text):
                self._end(text, "stop", None, found)
                continue
            with HeldBack(), self._lock:
                ready = self._queue.ready
                ready.insert(bisect_right(ready, text.rank, key=lambda t: t.rank), text)

    def _next_unready(self) -> WaitingText | None:
        """Return the next text to make tokens of; None where enough are ready."""
        with HeldBack(), self._lock:
            queue, ready = self._queue.by_rank, self._queue.ready
            while queue and queue[0].has_ended:
                heapq.heappop(queue)
            if not queue or (len(ready) >= N_READY and ready[N_READY - 1] < queue[0]):
                return None
            return heapq.heappop(queue)

    def _group(self, now: float) -> list[WaitingText]:
        """Take the texts of the next micro-batch, which begin now: the first ready one and what fits beside it."""
        with HeldBack(), self._lock:
            ready = self._queue.ready = [t for t in self._queue.ready if not t.has_ended]
        if not ready:
            return []
        first = ready[0]
        try:
            embedder = self._embedder(first.kind.pooling)
        except Exception as error:
            self._drop(first, error)
            return []
        alike = [t for t in ready[1:] if t.kind == first.kind]
        found = [first, *_beside(first, alike, embedder)]
        digests = {text.digest for text in found}
        found += [t for t in alike if t.digest in digests and t not in found]
        chosen = set(map(id, found))
        with HeldBack(), self._lock:
            self._queue.ready = [t for t in self._queue.ready if id(t) not in chosen]
            found = [t for t in found if not t.has_ended]
            for text in found:
                text.begun_s = now
        return found

    def _embedder(self, pooling: Pooling) -> Embedder:
        found = self._embedders.get(pooling)
        if found is None:
            found = self._embedders[pooling] = self._backend.make_embedder(pooling)
        return found

    def _computed(
        self, group: Sequence[WaitingText]
    ) -> dict[bytes, NDArray[np.float32] | CBatchError]:
        """Return the vector of each digest, or the error of its text. What fails in company is tried alone."""
        own = {text.digest: text for text in group}
        embedder = self._embedder(group[0].kind.pooling)
        try:
            vectors, took_s = self._vectors(embedder, group, [*own.values()])
        except (EngineClosedError, _UnwantedError):
            raise
        except Exception as error:
            if len(own) > 1:
                return self._each_alone(own.values())
            return dict.fromkeys(own, failure_of(_NOT_COMPUTED, error))
        self._stats.embed_s += took_s
        self._stats.n_text_tokens += sum(len(text.tokens) for text in own.values())
        checked = dict(zip(own, map(_checked, vectors), strict=True))
        if len(own) > 1:
            failed = [own[d] for d, vector in checked.items() if isinstance(vector, CBatchError)]
            checked |= self._each_alone(failed)
        return checked

    def _each_alone(
        self, texts: Iterable[WaitingText]
    ) -> dict[bytes, NDArray[np.float32] | CBatchError]:
        return {digest: v for text in texts for digest, v in self._computed([text]).items()}

    def _vectors(
        self, embedder: Embedder, group: Sequence[WaitingText], own: Sequence[WaitingText]
    ) -> tuple[Found, float]:
        """Return the vector of each of `own`, which are the different ones of a group, and the seconds that it took."""
        texts = [text.tokens for text in own]
        embedder.prepare(texts)
        if self._do_beside is not None:
            return self._do_beside(
                lambda take_turn: embedder.compute(texts, partial(self._turn, group, take_turn)),
                embedder.hurry,
            )
        start_s = time.perf_counter()
        return embedder.compute(texts), time.perf_counter() - start_s

    def _turn(self, group: Sequence[WaitingText], take_turn: Callable[[], float]) -> float:
        """Take a turn amid the computing of a group; raise an `_UnwantedError` where nobody waits for it any more."""
        seconds = take_turn()
        self._end_late(time.perf_counter())
        if all(text.has_ended for text in group):
            raise _UnwantedError
        return seconds

    def _finish(
        self,
        group: Sequence[WaitingText],
        found: dict[bytes, NDArray[np.float32] | CBatchError],
    ) -> None:
        for text in group:
            vector = found[text.digest]
            if not self._take(text):
                continue  # it was cancelled meanwhile
            if isinstance(vector, CBatchError):
                self._end(text, "error", vector)
                continue
            if text.kind.pooling != "none":
                self._kept.put(text.digest, vector)
            self._end(text, "stop", None, vector)

    def _drop(self, text: WaitingText, error: BaseException) -> None:
        if self._take(text):
            self._end(text, "error", failure_of(_NOT_COMPUTED, error))

    # ---- tokens ----

    def _tokens_of(self, text: WaitingText) -> tuple[int, ...]:
        """Return a text's tokens, cut off where that is asked for.

        Raises:
            TextTooLongError: there are too many.
            CBatchError: it cannot be made tokens.
        """
        n_most, settings = self._facts.n_embed_max, text.settings
        if settings.query is not None:
            return self._pair(text, settings.query, n_most)
        vocab, prompt = self._backend.vocab, text.prompt
        if prompt.tokens is not None:
            if settings.prefix:
                raise PromptError("instruction needs a text as a string, not as token ids")
            check_in_vocab(prompt.tokens, vocab)
            tokens, added = tuple(prompt.tokens), (0, 0)
        else:
            self._check_beside(settings.prefix)
            own = self._part_of(prompt.prompt or "", settings.truncate)
            tokens = tuple(vocab.tokenize(settings.prefix + own))
            added = vocab.n_added
        if len(tokens) <= n_most:
            return tokens
        if settings.truncate is None:
            is_least = text.n_characters > _N_CHARACTERS_MOST * n_most
            raise TextTooLongError(len(tokens), n_most, is_least=is_least)
        if settings.prefix:
            prefix = vocab.tokenize(settings.prefix)
            prefix = prefix[: len(prefix) - added[1]]
            added = _n_equal(tokens, prefix), added[1]
        if n_most <= sum(added):
            raise TextTooLongError(len(tokens), n_most, is_cut=True)
        return _cut(tokens, n_most, added, is_end=settings.truncate == "end")

    def _pair(self, text: WaitingText, query: str, n_most: int) -> tuple[int, ...]:
        vocab, settings = self._backend.vocab, text.settings
        document = text.prompt.prompt
        if document is None:
            raise PromptError("a document to rerank must be a string, not token ids")
        self._check_beside(query)
        self._check_beside(settings.instruction or "")
        document = self._part_of(document, settings.truncate)
        tokens = vocab.tokenize_pair(query, document, settings.instruction)
        if len(tokens) > n_most and settings.truncate is None:
            is_least = text.n_characters > _N_CHARACTERS_MOST * n_most
            raise TextTooLongError(len(tokens), n_most, is_least=is_least)
        own = vocab.tokenize(document)[vocab.n_added[0] :] if len(tokens) > n_most else []
        own = own[: len(own) - vocab.n_added[1]]
        n_left = len(own)
        while len(tokens) > n_most:
            n_left -= len(tokens) - n_most
            if n_left <= 0:
                raise TextTooLongError(len(tokens), n_most, is_cut=True)
            some = own[:n_left] if settings.truncate == "end" else own[-n_left:]
            document = b"".join(map(vocab.shown_piece, some)).decode("utf-8", "ignore")
            tokens = vocab.tokenize_pair(query, document, settings.instruction)
        return tuple(tokens)

    def _part_of(self, text: str, truncate: Truncate | None) -> str:
        """Return a text, or of a long one the beginning or the end if that has more tokens than can be computed.

        So a text of megabytes, which would take seconds to become tokens, holds up no other.
        """
        n_most = self._facts.n_embed_max
        n = _N_CHARACTERS_MOST * n_most
        if len(text) <= n:
            return text
        part = text[-n:] if truncate == "start" else text[:n]
        return part if len(self._backend.vocab.tokenize(part)) > 2 * n_most else text

    def _check_beside(self, text: str) -> None:
        """Raise a `TextTooLongError` where an instruction or a query leaves no room for a text."""
        if len(self._part_of(text, None)) < len(text):
            n_most = self._facts.n_embed_max
            raise TextTooLongError(2 * n_most, n_most, is_cut=True, is_least=True)

    # ---- what goes out ----

    def _end(
        self,
        text: WaitingText,
        reason: FinishReason,
        error: CBatchError | None,
        vector: NDArray[np.float32] | None = None,
    ) -> None:
        """Deliver the result of a text that was taken out of the queue."""
        target, place, id = text.route
        if self._routes.get(id) is text.route:
            del self._routes[id]
        now = time.perf_counter()
        queue_s = min(text.begun_s, now) - text.submitted_s
        data = None if vector is None else _as_asked(vector, text)
        result = BatchResult(
            id,
            "",
            (),
            reason,
            error,
            Usage(len(text.tokens), 0),
            Timings(queue_s, None, now - text.submitted_s, None, None),
            seed=0,
            embedding=data,
        )
        self._stats.count_end(reason, queue_s, None)
        self._stats.n_texts += vector is not None
        target.deliver([result.as_chunk()], [(place, result)])

    def _end_all(self, error: CBatchError | None) -> None:
        """End every text: by an error, or cancelled."""
        for text in [*self._queue.waiting.values()]:
            if error is None:
                self.cancel(text.route)
            elif self._take(text):
                self._end(text, "error", error)

    def close(self, error: CBatchError | None = None) -> None:
        """End every text, wait for the micro-batch in flight, and free what computes. Twice is harmless."""
        with HeldBack(), self._lock:
            self._is_closed = True
            self._changed.notify_all()
        self._end_all(error)
        if self.is_current_thread:
            return
        thread = self._thread
        if thread is not None:
            thread.join()
        with self._turns.held():
            for embedder in self._embedders.values():
                embedder.close()
            self._embedders.clear()


def _beside(
    first: WaitingText, others: Sequence[WaitingText], embedder: Embedder
) -> list[WaitingText]:
    """Return the texts that share a micro-batch with the first: the longest that fits, and so on."""
    n_shared = _n_shared(first, others, embedder.n_shared)
    beginning = first.tokens[:n_shared]
    n_left, n_more = embedder.n_full - len(first.tokens) + n_shared, embedder.n_texts - 1
    fitting: dict[bytes, WaitingText] = {}
    for text in others:
        if len(text.tokens) - n_shared <= n_left and text.tokens[:n_shared] == beginning:
            fitting.setdefault(text.digest, text)
    fitting.pop(first.digest, None)
    by_length = sorted(fitting.values(), key=lambda t: len(t.tokens))
    found: list[WaitingText] = []
    while by_length and len(found) < n_more:
        i = bisect_right(by_length, n_left + n_shared, key=lambda t: len(t.tokens)) - 1
        if i < 0:
            break
        found.append(by_length.pop(i))
        n_left -= len(found[-1].tokens) - n_shared
    return found


def _n_shared(first: WaitingText, others: Sequence[WaitingText], n_least: int) -> int:
    """Return how many tokens texts of the same kind begin with in common, as far as the first two tell; 0 for few."""
    if not n_least or not others:
        return 0
    n = _n_equal(first.tokens[:-1], others[0].tokens[:-1])
    return n if n >= n_least else 0


def _n_equal(a: Sequence[int], b: Sequence[int]) -> int:
    """Return how many tokens two texts begin with in common."""
    n_room = min(len(a), len(b))
    return next((i for i in range(n_room) if a[i] != b[i]), n_room)


def _cut(
    tokens: tuple[int, ...], n_most: int, added: tuple[int, int], *, is_end: bool
) -> tuple[int, ...]:
    """Return the first or the last tokens of a text; what was added around it stays: special ones, an instruction."""
    n_before, n_behind = added
    own = tokens[n_before : len(tokens) - n_behind]
    n_own = n_most - n_before - n_behind
    own = own[:n_own] if is_end else own[-n_own:]
    return tokens[:n_before] + own + tokens[len(tokens) - n_behind :]


def _checked(vector: NDArray[np.float32] | None) -> NDArray[np.float32] | CBatchError:
    if vector is None:
        return EmbeddingError("llama.cpp gave no vector for this text")
    if not np.isfinite(vector).all():
        return EmbeddingError(
            "the vector of this text has NaN or infinity: the model cannot compute it"
        )
    return vector


def _as_asked(vector: NDArray[np.float32], text: WaitingText) -> bytes:
    """Return the bytes of a vector, cut and normalised as its settings say."""
    settings = text.settings
    if text.kind.pooling == "rank":
        return vector.astype("<f4").tobytes()
    if settings.dimensions is not None:
        vector = vector[..., : settings.dimensions]
    if settings.normalize:
        length = np.linalg.norm(vector.astype(np.float64), axis=-1, keepdims=True)
        vector = np.asarray(vector / np.where(length > 0, length, 1), np.float32)
    return vector.astype("<f4").tobytes()
