"""What all requests of a server share: the engine, the limits, who is in, and whether the engine gets on."""

from __future__ import annotations

import math
import time
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import anyio

from cbatch.errors import EngineClosedError, near
from cbatch.server.batch_room import BatchRoom
from cbatch.server.batch_store import BatchStore
from cbatch.server.batches import CLOSE_S, Batches
from cbatch.server.call import fingerprint_of
from cbatch.server.exchange import Exchange, Threads
from cbatch.server.exposition import Exposition
from cbatch.server.held_answers import HeldAnswer, HeldAnswers
from cbatch.server.held_bodies import HeldBodies, HeldBody
from cbatch.server.http_errors import (
    NO_WORKER,
    HttpProblemError,
    draining,
    no_worker,
    queue_full,
    whole_seconds,
    words_for_clients,
)
from cbatch.server.meters import Meters
from cbatch.server.pulse import EngineQuestion, Pulse
from cbatch.server.server_settings import MIB, ServerSettings
from cbatch.support.checks import shown
from cbatch.support.logs import Log
from cbatch.support.thread_start import is_lack_of_threads

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from cbatch.engine import Engine
    from cbatch.runtime.batch_response import BatchResponse
    from cbatch.runtime.step_record import SlotState
    from cbatch.server.front import Front
    from cbatch.server.request_fields import RequestFields
    from cbatch.support.model_facts import ModelFacts

    T = TypeVar("T")

_log = Log("cbatch.server")

_N_UNKNOWN = 100
"""Most unknown fields that the log names, so that clients cannot fill it. Our choice."""

_N_THREADS = 64
"""Most calls into the engine at once; each is short."""

_RETRY_S = 60
"""Most seconds that a client is told to wait: our choice; clients of OpenAI and Anthropic obey up to 120."""

_ASK_S = 5.0
"""Seconds between two questions about the engine's progress. Our choice."""

_CALLS = Threads("calls", _N_THREADS)

_FILES = Threads("files", 16)
"""Those that use the disk: calls do not wait for these, nor these for calls. Our choice."""

_LARGE_QUESTIONS = Threads("large_questions", 4)
"""Those that ask about large bodies, or go on with many questions.

A worker answers each question in one piece, so few are under way. Our choice.
"""

_TURN_S = 0.02
"""Seconds of many questions after which others of their kind have a turn. Our choice."""


@dataclass(eq=False)
class Visit:
    """A call that is being answered."""

    n_sequences: int
    since_s: float
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    problem: HttpProblemError | None = None
    """Why the call was ended, where it was not by its client."""
    n_prompt_tokens: int = 0
    """Tokens of all prompts, where they were counted."""
    response: BatchResponse | None = None
    """What the engine does for the call, once it has it."""
    held: HeldAnswer | None = None
    """What is held of its answer."""
    body: HeldBody | None = None
    """What is held of its body, while the engine works on it."""
    is_computed: bool = False
    """Whether the engine has nothing more to do for it."""
    n_reserved: int = 0
    """Sequences for which batches leave slots."""

    def end(self, problem: HttpProblemError) -> None:
        """End the call: its client gets `problem`. In the event loop."""
        self.problem, self.is_computed = problem, True
        self.scope.cancel()

    @property
    def n_open(self) -> int:
        """Sequences for the engine: none once it has answered all, however slowly they are read."""
        is_done = self.response is not None and not self.response.n_open
        return 0 if is_done or self.is_computed else self.n_sequences

    def n_waiting_tokens(self, n_before: int, n_slots: int) -> int:
        """Return the tokens of its prompts that have no slot, where `n_before` sequences come before its own."""
        n_waiting = min(self.n_open, max(0, n_before + self.n_open - n_slots))
        return self.n_prompt_tokens * n_waiting // self.n_sequences


@dataclass(frozen=True, slots=True)
class EngineSizes:
    """What the engine is."""

    n_slots: int
    n_window: int
    facts: ModelFacts
    fingerprint: str

    @classmethod
    def of(cls, engine: Engine) -> EngineSizes:
        """Ask an engine, which may take it a while."""
        return cls(engine.parallel, engine.n_window, engine.model_facts, fingerprint_of(engine))

    @property
    def can(self) -> list[str]:
        """What the model can do, in llama-server's words."""
        facts = self.facts
        able = {
            "completion": facts.can_generate,
            "embedding": facts.can_embed,
            "rerank": facts.can_rerank,
            "multimodal": facts.can_see or facts.can_hear,
        }
        return [name for name, can in able.items() if can]


def _threads_for(exchange: Exchange) -> Threads:
    """Return the threads that ask about what a client has sent."""
    return _CALLS if exchange.is_small else _LARGE_QUESTIONS


def _go_on(answers: Iterator[T], found: list[T]) -> bool:
    """Take answers for one turn; return whether there may be more."""
    end_s = time.perf_counter() + _TURN_S
    for answer in answers:
        found.append(answer)
        if time.perf_counter() >= end_s:
            return True
    return False


async def keep_asking(newest: Callable[[], Desk]) -> None:
    """Ask the engine for its progress now and then, so that `health` knows for how long it has been silent."""
    while True:
        await anyio.sleep(_ASK_S)
        try:
            await newest().pulse.ask()
        except RuntimeError as error:
            if not is_lack_of_threads(error):
                raise


class Desk:
    """The state of one application."""

    def __init__(
        self, engine: Engine, settings: ServerSettings, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.engine, self.settings, self.clock = engine, settings, clock
        self.model_name = settings.model_name or engine.model_name or "cbatch"
        self.created = int(time.time())
        self.is_draining = False
        """Whether new calls are refused."""
        self._ended: HttpProblemError | None = None
        """Told to calls that ask for the engine from now on; None while it answers."""
        self.front: Front | None = None
        """Reloads the model; None unless `cbatch.server.serving` serves the application."""
        self._visits: dict[int, Visit] = {}
        self.n_in_flight = 0
        """Sequences of all calls that are being answered."""
        self._n_reserved = 0
        """Sequences of these for which batches leave slots."""
        self._n_questions = 0
        """Number of clients' questions that the engine has not answered."""
        self._sizes: EngineSizes | None = None
        self._unknown: set[str] = set()
        """Unknown fields that the log has named, as it shows them."""
        self.pulse = Pulse(engine, clock, lambda: self.n_open)
        self.slots: EngineQuestion[list[SlotState]] = EngineQuestion(engine.slots, clock)
        self.meters = Meters()
        self.bodies = HeldBodies(settings)
        self.answers = HeldAnswers(settings.max_answers_mib)
        self.room = BatchRoom(engine)
        self.batches: Batches | None = None
        self.exposition = Exposition(self.pulse, self.meters, self.model_name)
        self.files_dir = settings.files_dir
        """Folder of files and batches; None where the server keeps none."""
        self.open_files()

    @property
    def lacks_files(self) -> bool:
        """Whether the folder of files and batches is not open yet."""
        return self.files_dir is not None and self.batches is None

    def open_files(self) -> None:
        """Open the folder of files, if there is one and it is not open; its batches that have not ended go on.

        Raises:
            ConfigError: it cannot be used now.
        """
        if self.files_dir is None or self.batches is not None:
            return
        store = BatchStore(Path(self.files_dir), self.settings.max_stored_mib * MIB)
        with ExitStack() as opened:
            opened.callback(store.close)
            batches = Batches(self.engine, store, self.room, self.settings, self.model_name)
            opened.pop_all()
        self.batches = self.exposition.batches = batches

    def close(self, within_s: float = CLOSE_S) -> None:
        """Leave the batches to the next server on the same folder; waits until what they have done is on disk."""
        self.drain()
        self.leave_batches(within_s)

    def leave_batches(
        self, within_s: float = CLOSE_S, problem: HttpProblemError | None = None
    ) -> bool:
        """Leave the batches to the next server, as `close` does; their calls get `problem`, all others continue.

        Returns:
            Whether the next server can open the folder; else another call waits on.
        """
        return self.batches is None or self.batches.close(within_s, problem)

    def warn_of_unknown(self, asked: RequestFields) -> None:
        """Log a warning for each unknown field of a call, once for each name."""
        for name in asked.unknown[:_N_UNKNOWN]:
            if len(self._unknown) >= _N_UNKNOWN:
                return
            if (told := shown(name)) not in self._unknown:
                self._unknown.add(told)
                words = f"ignored the unknown field {told}"
                others = near(name, asked.names)
                _log.warn("%s", f"{words}; {others}" if others else words)

    def drain(self) -> None:
        """Refuse new calls from now on. From any thread or signal handler."""
        self.is_draining = True

    async def ask(
        self, exchange: Exchange, question: Callable[..., T], *args: Any, **named: Any
    ) -> T:
        """Ask the engine about what a client has sent, in a thread; questions about large bodies wait for each other.

        Raises:
            HttpProblemError: no worker can be started.
            ClientGoneError: the client has left before its turn.
        """
        with self._question():
            return await exchange.in_turn(_threads_for(exchange), question, *args, **named)

    async def ask_each(self, exchange: Exchange, answers: Iterator[T]) -> list[T]:
        """Return the answers to a client's questions, each of which is put when its answer is taken. Raises as `ask`.

        However many they are, others have turns between them, and none is put once the client has left.
        """
        found: list[T] = []
        threads = _threads_for(exchange)
        with self._question():
            while await exchange.in_turn(threads, _go_on, answers, found):
                threads = _LARGE_QUESTIONS
        return found

    @contextmanager
    def _question(self) -> Iterator[None]:
        """Count a client's question for the block."""
        self._check_engine()
        self._n_questions += 1
        try:
            yield
        finally:
            self._n_questions -= 1

    def _check_engine(self) -> None:
        """Raise a `HttpProblemError` if the engine is gone or starting a worker has failed; calls wait for a start."""
        if self._ended is not None:
            raise replace(self._ended)
        outage = self.engine.outage
        if outage is not None and outage.retry_s is not None and outage.has_failed:
            raise no_worker(outage.retry_s)

    async def in_thread(self, work: Callable[..., T], *args: Any, **named: Any) -> T:
        """Return what `work` returns, done in a thread: it may wait for the engine."""
        return await _CALLS.run(work, *args, **named)

    async def on_disk(self, work: Callable[..., T], *args: Any, **named: Any) -> T:
        """Return what `work` returns, done in a thread: it uses files or their index."""
        return await _FILES.run(work, *args, **named)

    @asynccontextmanager
    async def opened(
        self, open_: Callable[..., AbstractContextManager[T]], *args: Any
    ) -> AsyncIterator[T]:
        """Enter what `open_` returns for the block, and leave it without the block's error; both as `on_disk`."""
        opened = ExitStack()
        try:
            yield await self.on_disk(lambda: opened.enter_context(open_(*args)))
        finally:
            with anyio.CancelScope(shield=True):
                await self.on_disk(opened.close)

    async def sizes(self) -> EngineSizes:
        """Return what the engine is, asked once."""
        if self._sizes is None:
            with self._question():
                self._sizes = await self.in_thread(EngineSizes.of, self.engine)
        return self._sizes

    # ---- who is in ----

    @property
    def is_idle(self) -> bool:
        """Whether no client waits for the engine."""
        return not (self.n_in_flight or self._n_questions)

    @property
    def n_visits(self) -> int:
        """Calls that are being answered."""
        return len(self._visits)

    @property
    def n_open(self) -> int:
        """Sequences of all calls that the engine has not ended. From any thread."""
        return sum(visit.n_open for visit in [*self._visits.values()])

    @contextmanager
    def visit(
        self, n_sequences: int, n_slots: int, body: HeldBody | None = None
    ) -> Iterator[Visit]:
        """Count a call for the block; its answer begins with what is held of its body.

        Raises:
            HttpProblemError: the queue has no room, or answers have none; no worker can be started, or the server is
                being stopped.
        """
        if self.is_draining:
            raise draining()
        self._check_engine()
        if self.settings.max_queue is not None:
            self._check_queue(n_sequences, n_slots, self.settings.max_queue)
        self.answers.check(self._wait_s(1, n_slots))
        visit = Visit(n_sequences, self.clock(), body=body)
        self._visits[id(visit)] = visit
        self.n_in_flight += n_sequences
        self._reserve(visit, n_sequences)
        try:
            free = partial(self._free, visit)
            with self.answers.held(visit.end, lambda: not visit.n_open, free) as visit.held:
                yield visit
        finally:
            visit.response = visit.held = None  # what is held refers to the visit
            del self._visits[id(visit)]
            self.n_in_flight -= n_sequences
            self._reserve(visit, 0)

    async def respond_held(self, exchange: Exchange, value: object, n_bytes: int) -> None:
        """Send a long answer of some bytes in memory, for which there was no visit; see `Exchange.respond_long`.

        Raises:
            HttpProblemError: answers that clients read slowly leave no room for it.
        """
        visit = Visit(0, self.clock(), is_computed=True)
        with visit.scope, self.answers.held(visit.end, lambda: True) as held:
            held.add(n_bytes)
            await exchange.respond_long(value)
        if visit.problem is not None:
            raise visit.problem

    def _reserve(self, visit: Visit, n_sequences: int) -> None:
        """Have batches leave slots for so many sequences of a call."""
        self._n_reserved += n_sequences - visit.n_reserved
        visit.n_reserved = n_sequences
        self.room.set_calls(self._n_reserved)

    def _free(self, visit: Visit) -> None:
        """Let others have the slots and the body's room of a call that is computed, however slowly it is read."""
        if visit.n_reserved:
            self._reserve(visit, 0)
            if visit.held is not None and visit.body is not None:
                visit.held.add(visit.body.release())

    def _check_queue(self, n_sequences: int, n_slots: int, n_limit: int) -> None:
        """Raise a `HttpProblemError` where so many sequences more would make the queue too long."""
        n_before = self.n_open
        if n_before and n_before + n_sequences - n_slots > n_limit:
            n_ends = n_before + n_sequences - n_slots - n_limit
            words = f"{max(0, n_before - n_slots)} requests"
            raise queue_full(words, n_sequences, n_limit, self._wait_s(n_ends, n_slots))

    def has_queue(self, n_slots: int) -> bool:
        """Return whether the engine has more sequences than slots. The oldest calls are looked at, and no more."""
        n_open = 0
        for visit in self._visits.values() if self.n_in_flight > n_slots else ():
            n_open += visit.n_open
            if n_open > n_slots:
                return True
        return False

    def n_queued_tokens(self, n_slots: int) -> int:
        """Return the prompt tokens of calls that wait, as far as they were counted; the oldest calls have the slots."""
        n_before = n_queued = 0
        for visit in self._visits.values():
            n_queued += visit.n_waiting_tokens(n_before, n_slots)
            n_before += visit.n_open
        return n_queued

    def count_tokens(self, visit: Visit, n_tokens: int, n_slots: int) -> None:
        """Note the prompt tokens of a call before the engine gets it.

        Raises:
            HttpProblemError: it would wait, with more than the queue has room for.
        """
        n_limit = self.settings.max_queue_tokens
        if n_limit is None:
            return
        n_open, n_queued = self.n_open, self.n_queued_tokens(n_slots)
        visit.n_prompt_tokens = n_tokens
        # behind the others, for they were counted before
        n_with = n_queued + visit.n_waiting_tokens(n_open - visit.n_open, n_slots)
        if n_open > visit.n_open and n_with > max(n_limit, n_queued):
            visit.n_prompt_tokens = 0
            # this many waiting calls are too many, if their prompts are alike
            n_ends = (n_open - n_slots) * (n_with - n_limit) / n_with
            words = f"{n_queued} prompt tokens"
            raise queue_full(words, n_tokens, n_limit, self._wait_s(n_ends, n_slots))

    def _wait_s(self, n_ends: float, n_slots: int) -> int:
        """Return whole seconds until about so many answers have ended, by how long the last ones had their slots."""
        each_s = self.meters.slot_s
        if each_s is None:  # none has ended: as long again as the oldest call has taken
            oldest = next(iter(self._visits.values()), None)
            each_s = 0.0 if oldest is None else self.clock() - oldest.since_s
        return min(_RETRY_S, max(1, math.ceil(n_ends * each_s / n_slots)))

    def end_visits(self, problem: HttpProblemError) -> None:
        """End every call that is being answered, and those whose bodies are still being read: clients get `problem`."""
        self._ended = problem
        for visit in self._visits.values():
            visit.end(problem)

    # ---- health ----

    async def health(self) -> Health:
        """Return the engine's state."""
        if self.is_draining:
            return Health("stopping", "the server is shutting down")
        outage = self.engine.outage
        if outage is not None and outage.retry_s is not None:
            problem = NO_WORKER if outage.has_failed else outage.cause
            return Health("replacing", problem, whole_seconds(outage.retry_s))
        if outage is not None:
            told = words_for_clients(EngineClosedError(outage.cause))
            return Health("failed", f"{told}: the server's log says why")
        await self.pulse.ask()
        if (words := self.pulse.problem) is not None:
            return Health("failed", words)
        silent_s = self.pulse.silent_s
        if silent_s > self.settings.stall_s:
            return Health("stalled", f"the engine has made no progress for {silent_s:.0f} s")
        return Health("busy" if self.pulse.is_asking else "ok")


@dataclass(frozen=True, slots=True)
class Health:
    """The answer of `/health`."""

    status: Literal["ok", "busy", "replacing", "stalled", "failed", "stopping"]
    problem: str = ""
    """Why the engine cannot serve now; "" if it can."""
    retry_s: int = 1
    """Seconds after which a client may ask again."""
