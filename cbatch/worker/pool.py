"""The workers of a client: which request is where, what comes back, and what becomes of it when its worker dies."""

from __future__ import annotations

import math
import threading
import time
from collections import OrderedDict
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import accumulate, groupby
from typing import TYPE_CHECKING, Any, TypeAlias

from cbatch.errors import (
    CBatchError,
    ConfigError,
    DeadlineError,
    EngineClosedError,
    EngineError,
    ModelLoadError,
    NoThreadError,
    WorkerDiedError,
    words_of,
)
from cbatch.runtime.ids import check_own
from cbatch.runtime.interface import Outage
from cbatch.runtime.mailbox import refused
from cbatch.runtime.submit import as_failure
from cbatch.runtime.validation import check_slot
from cbatch.stats import EngineStats
from cbatch.support.interrupts import Sleepers
from cbatch.support.logs import Log, must_not_wait
from cbatch.support.thread_start import start
from cbatch.worker.connection import FrameThread
from cbatch.worker.protocol_commands import CancelCommand, Close, RecordSteps, TakeBack, resume_of
from cbatch.worker.replica import Replica
from cbatch.worker.requests import N_MESSAGE_BYTES, SentOrigin, in_messages
from cbatch.worker.requests_lock import RequestsLock
from cbatch.worker.routing import Routing, beginnings
from cbatch.worker.wire import reader

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Iterator, Sequence

    from msgspec import Raw

    from cbatch.response import BatchOutputChunk, BatchResult
    from cbatch.runtime.interface import Target
    from cbatch.runtime.mailbox import Parcel
    from cbatch.runtime.step_record import StepRecord
    from cbatch.worker.connection import Connection, Link, Reply
    from cbatch.worker.protocol_commands import ProtocolCommand
    from cbatch.worker.requests import Asked
    from cbatch.worker.requests_lock import Work
    from cbatch.worker.wire import Frame

_log = Log("cbatch")

read_texts = reader(list[str])

Launch: TypeAlias = "Callable[[], Link]"
"""Starts a worker, or reaches one that is there."""

_N_ID_BYTES = 5
"""Most bytes of an id in a message beside its characters: msgpack's length of a text."""

N_FAILED_MAX = 6
"""Failed starts in a row per worker, after which requests that wait for a worker end. Starts are still retried.

Our choice: with the pauses of `BACK_OFF_S`, about 4 seconds and the time of the starts.
"""

N_USELESS_MAX = 10
"""Workers that die of requests while none has ever answered one, after which the pool ends. Our choice.

With the pauses of `BACK_OFF_S`, about a minute and the time of the starts: longer than a passing lack of memory.
"""

N_ENTERING_MAX = 64
"""Sequences of requests that a worker has not answered, from which on others wait here: what is asked of it stands
behind these. Our choice: about ten milliseconds of its time."""

_N_PORTION = 1024
"""Requests of one call that are given to workers at once, in about 20 ms; the lock is free between. Our choice."""

N_ASKED_MAX = 3
"""Workers that a question is put to, where one after the other dies of it. Our choice."""

_LAST_S = 60.0
"""Seconds that a worker has to end by itself: to finish its step and write cells to disk. Our choice."""

_LOOK_S = 1.0
"""How often the pool looks after its workers. Our choice."""

_GLANCE_S = 0.05
"""How often a load looks whether it is to stop."""


class Pool:
    """Sends requests to workers and delivers what comes back. Every method from any thread.

    Each worker's frames are taken by the thread of its `Replica`. A request is at one worker, or held here until one
    takes it.
    """

    def __init__(
        self,
        launches: Sequence[Launch],
        *,
        can_replace: bool,
        owner: str,
        is_stopped: Callable[[], bool] = bool,
    ) -> None:
        """Start the workers and wait until all are ready.

        Args:
            launches: one for each worker; called again to replace one that died.
            can_replace: whether it may be.
            owner: the mark of the engine, by which its results are known.
            is_stopped: looked at now and then; once it is true, the workers are ended.

        Raises:
            CBatchError: a worker could not be started; none is left then.
        """
        self.on_end: Callable[[EngineClosedError | None], object] | None = None
        self.on_admit: Callable[[Sequence[str]], object] | None = None
        self.requests: dict[str, Asked] = {}
        """Those in flight, by id."""
        self.lost = EngineStats()
        """The figures of workers that are gone, as they were when somebody last asked."""
        self.error: CBatchError | None = None
        """What has ended the pool."""
        self.is_closing = False
        self.recorder: Callable[[StepRecord], object] | None = None
        self._owner, self._can_replace = owner, can_replace
        self.held: dict[Asked, None] = {}
        """Requests that wait for a worker, the oldest first."""
        self.late: OrderedDict[Asked, None] = OrderedDict()
        """Those that wait until workers have answered others, the oldest first: ended here, they cost these nothing."""
        self._lock = RequestsLock(self._flush)
        self.routing = Routing()
        self._changed = Sleepers()
        """Threads that wait for a worker."""
        self._entrance = Sleepers()
        """Feeds that wait until workers have answered others."""
        self._is_loaded = False
        self._weights = ""
        """Those of all workers, as `Connection.weights`."""
        self._n_failed = 0
        """Starts that have failed since a worker last ran, for whatever reason."""
        self._has_answered = False
        """Whether a worker has ever answered a request."""
        self._n_useless = 0
        """Workers that have died of requests before one was answered."""
        self._refusal: ModelLoadError | None = None
        """The error of requests that wait for a worker, once starts have failed often enough."""
        self._replicas = [Replica(self, i, launch) for i, launch in enumerate(launches)]
        self._is_over = threading.Event()
        self._watch = threading.Thread(target=self._look_on, name="cbatch-watch", daemon=True)
        try:
            for thread in (*(replica.thread for replica in self._replicas), self._watch):
                start(thread)
        except NoThreadError as error:
            self.error = error
        self._await_all(is_stopped)

    def _await_all(self, is_stopped: Callable[[], bool]) -> None:
        """Wait until all workers are ready; raise where one cannot be started, or where that is to stop."""
        n_all = len(self._replicas)
        while len(self.ready) < n_all and self.error is None:
            if is_stopped():
                self.error = EngineClosedError("loading was cancelled")
            self._changed.wait_for(lambda: len(self.ready) == n_all or self.error, _GLANCE_S)
        if self.error is not None:
            self.is_closing = True
            for replica in self._replicas:
                replica.kill()
            self._join(_LAST_S)
            raise self.error
        self._is_loaded = True

    def _look_on(self) -> None:
        while not self._is_over.wait(_LOOK_S):
            self.look()

    def look(self) -> None:
        """Find workers that a signal has stopped; kill those that stay stopped; end held requests past their time."""
        were_stopped = [replica for replica in self._replicas if replica.is_stopped]
        for replica in self._replicas:
            replica.look()
        if any(not replica.is_stopped for replica in were_stopped):
            with self.lock():
                self._send_held()
        now = time.perf_counter()
        with self.lock():
            late = [a for a in (*self.held, *self.late) if a.deadline_s <= now]
        for asked in late:
            self._cut_off(asked, DeadlineError(now - asked.submitted_s))

    # ---- the workers ----

    @property
    def outage(self) -> Outage | None:
        """Why no worker is running; None if one is. See `Runtime`."""
        if self.ready:
            return None
        first = min(self._replicas, key=lambda replica: replica.starts_s)
        retry_s = max(0.0, first.starts_s - time.perf_counter())
        if first.problem:
            return Outage(f"no worker can be started: {first.problem}", retry_s)
        return Outage("a worker died and is being replaced", retry_s, has_failed=False)

    @property
    def n_slots(self) -> int:
        """Requests that run at once, in all workers together."""
        return sum(replica.n_slots for replica in self._replicas)

    @property
    def ready(self) -> list[Connection]:
        """The workers that are there."""
        return [r.connection for r in self._replicas if r.connection is not None]

    @property
    def _awake(self) -> list[Connection]:
        """The workers that are there, and that no signal has stopped."""
        return [
            r.connection for r in self._replicas if r.connection is not None and not r.is_stopped
        ]

    def first_slot(self, connection: Connection) -> int:
        """Return the number of a worker's first slot among those of all workers."""
        found = (self._slots_of(r).start for r in self._replicas if r.connection is connection)
        return next(found, 0)

    def _slots_of(self, replica: Replica) -> range:
        """Return the numbers of a place's slots among those of all places."""
        first = sum(other.n_slots for other in self._replicas[: replica.i])
        return range(first, first + replica.n_slots)

    def ask(self, command: ProtocolCommand, read: Callable[[Raw], Any]) -> Any:
        """Put a question to some worker, and to another where it dies; return the answer, or raise its error.

        `read` makes it of what the worker says; see `Reply`.

        Raises:
            EngineClosedError: the engine is closed.
            ModelLoadError: no worker can be started.
            WorkerDiedError: one worker after the other died.
        """
        for n_left in reversed(range(N_ASKED_MAX)):
            connection = self._some_worker()
            try:
                return connection.call(command, read).wait()
            except WorkerDiedError:
                if not n_left:
                    raise
        raise AssertionError

    def ask_all(
        self, command: ProtocolCommand, read: Callable[[Raw], Any] | None = None
    ) -> list[tuple[Connection, Any]]:
        """Put a question to every worker; return the answers of workers that live. See `ask`."""
        calls = [(connection, connection.call(command, read)) for connection in self.ready]
        found = []
        for connection, call in calls:
            with suppress(WorkerDiedError):
                found.append((connection, call.wait()))
        return found

    def total(self, found: Iterable[tuple[Connection, EngineStats]]) -> EngineStats:
        """Return the figures of all workers together, of which `found` has those of the workers that are there."""
        total = self.lost.copy()
        for connection, stats in found:
            connection.stats = stats
            total.add(stats)
        most = total.n_active_max - self.lost.n_active_max
        total.n_active_max = max(most, self.lost.n_active_max)
        total.n_waiting += len(self.held) + len(self.late)
        return total

    def forget_stats(self) -> None:
        """Forget the figures of workers."""
        self.lost = EngineStats()
        for connection in self.ready:
            connection.stats = None

    def record_steps(self, into: Callable[[StepRecord], object] | None) -> None:
        """Have `into` called after each run of steps of each worker. None ends that."""
        with self.lock():
            self.recorder = into
        self.ask_all(RecordSteps(on=into is not None))

    def _some_worker(self) -> Connection:
        """Wait for a worker, and return the one with the least to do."""
        while True:
            self.check_open()
            ready = self._awake or self.ready
            if ready:
                return min(ready, key=lambda c: len(c.requests))
            if self._refusal is not None:
                raise self._refusal
            self._changed.wait_for(lambda: self.ready or self.is_closing or self._refusal)

    def check_open(self) -> None:
        """Raise an `EngineClosedError` where the pool is closed or has failed."""
        if self.is_closing:
            raise EngineClosedError("the engine is closed") from self.error

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the lock on the requests; what is posted to workers meanwhile is sent after it."""
        with self._lock.held():
            yield

    def do_soon(self, work: Work) -> None:
        """Have work done with the lock, and what it returns without. Does not wait; a finalizer may call it."""
        self._lock.do_soon(work)

    def _flush(self) -> None:
        for connection in self.ready:
            connection.flush()

    def add(self, new: Sequence[Asked], *, is_awaited: bool) -> None:
        """Send requests, or hold them until there is a worker.

        Args:
            new: one that a worker refuses ends with its error.
            is_awaited: that error is raised instead, and none of them is queued.
        """
        with self._forgotten_if_it_raises(new):
            self._enter(new, is_awaited=is_awaited)
            if is_awaited:
                self._await(new)

    def wait_for_entry(self) -> None:
        """Wait, as a feed, while every worker has many requests to enter: other calls get turns between."""
        self._entrance.wait_for(self._has_entry)

    def _has_entry(self) -> bool:
        ready = self.ready
        return self.is_closing or not ready or any(c.n_entering < N_ENTERING_MAX for c in ready)

    def enter(self, new: Sequence[Asked]) -> Callable[[], None]:
        """Send requests; return what waits for the words of workers, and raises their error."""
        with self._forgotten_if_it_raises(new):
            self._enter(new, is_awaited=True)

        def wait() -> None:
            with self._forgotten_if_it_raises(new):
                self._await(new)

        return wait

    @contextmanager
    def _forgotten_if_it_raises(self, new: Sequence[Asked]) -> Iterator[None]:
        try:
            yield
        except BaseException:  # refused, or Ctrl-C
            self._forget(new)
            raise

    def _enter(self, new: Sequence[Asked], *, is_awaited: bool) -> None:
        refusals = {a: error for a in new if (error := self._wrong_slot(a)) is not None}
        for asked, error in refusals.items():
            if not (asked.call.is_part and asked.has_own_slot):
                raise error
        new = [asked for asked in new if asked not in refusals]
        for asked in new:
            if asked.n_ends > 1:
                asked.call.target.expect_choices(asked.n_ends)
        for i in range(0, len(new), _N_PORTION):
            some = new[i : i + _N_PORTION]
            if i:
                time.sleep(0)  # what workers say of other requests is delivered between
            with self.lock():
                check_own([asked.id for asked in some], self.requests)
                self.requests.update((asked.id, asked) for asked in some)
                (self.held if is_awaited else self.late).update(dict.fromkeys(some))
                for asked in some:
                    asked.is_awaited = is_awaited
                self._send_held()
        for asked, error in refusals.items():
            asked.call.target.deliver(*refused(asked.id, asked.place, error))

    def check_slot(self, slot: int | None) -> None:
        """Raise a ConfigError for a slot that no worker has."""
        check_slot(slot, self.n_slots)

    def _wrong_slot(self, asked: Asked) -> ConfigError | None:
        """Return the error of a request for a slot that no worker has."""
        try:
            self.check_slot(asked.slot)
        except ConfigError as error:
            return ConfigError(f"{asked.name or f'request {asked.id!r}'}: {error}")
        return None

    def _await(self, new: Sequence[Asked]) -> None:
        """Wait for what workers say to requests that were sent."""
        seen: dict[Reply, None] = {}
        while more := self._unseen(new, seen):
            for reply in more:
                self._check(reply)
            seen.update(more)
        self.check_open()  # closed meanwhile, it is as if they had not been submitted

    def _unseen(self, new: Sequence[Asked], seen: Container[Reply]) -> dict[Reply, None]:
        """Return replies that are still to be waited for; where there is none, nobody waits any more."""
        with self.lock():
            replies = dict.fromkeys(a.reply for a in new if a.reply and a.reply not in seen)
            for asked in new:
                asked.is_awaited = bool(replies)
        return replies

    def _check(self, reply: Reply) -> None:
        """Raise what a worker said to requests; where it died, they go the way of all that it had."""
        try:
            reply.wait()
        except WorkerDiedError:
            self.check_open()

    def _forget(self, gone: Sequence[Asked]) -> None:
        """Drop requests whose submission is taken back; workers end the requests that they have."""
        calls = []
        with self.lock():
            for asked in gone:
                self._drop(asked)
            has = [asked for asked in gone if not asked.is_refused]
            for connection, ids in id_parts(has):
                calls.append(connection.ask(CancelCommand(ids=ids)))
        for asked in gone:
            asked.count_ends(1)
        for call in calls:  # their ids may be used again at once
            with suppress(CBatchError):
                call.wait()

    def drop_held(self, asked: Asked) -> bool:
        """Take out a request that waits for a worker; False for another."""
        with self.lock():
            if asked.worker is not None or self.requests.get(asked.id) is not asked:
                return False
            self._drop(asked)
        return True

    def _drop(self, asked: Asked) -> None:
        """Forget a request. With the lock."""
        if self.requests.get(asked.id) is asked:
            del self.requests[asked.id]
        if asked.worker is not None:
            asked.worker.requests.pop(asked.id, None)
        self.held.pop(asked, None)
        self.late.pop(asked, None)

    # ---- to the workers ----

    def _send_held(self) -> None:
        """Send the requests that wait to workers that take them. With the lock."""
        n_late = N_ENTERING_MAX
        while self.late and n_late > 0 and self._has_entry():
            asked, _ = self.late.popitem(last=False)
            n_late -= asked.n_sequences
            self.held[asked] = None
        if not self.held:
            return
        waiting, self.held = self.held, {}
        given: dict[Connection, list[Asked]] = {}
        kept: list[Connection] = []  # workers that become empty for a request that is to be alone
        for asked in sorted(waiting, key=lambda a: not a.must_be_alone):
            connection = self._worker_for(asked, kept)
            if connection is None:
                self.held[asked] = None
                if asked.must_be_alone:
                    kept += _least([c for c in self.ready if c not in kept])
                continue
            asked.worker = connection
            if asked.slot is not None:
                asked.first_slot = self.first_slot(connection)
            connection.requests[asked.id] = asked
            given.setdefault(connection, []).append(asked)
        for connection, some in given.items():
            self._send(connection, some)

    def _worker_for(self, asked: Asked, kept: Sequence[Connection]) -> Connection | None:
        """Return the worker for a request, but not one that is kept for others; None where none takes it now."""
        places = [
            None if r.is_stopped or asked.slot not in (None, *self._slots_of(r)) else r.connection
            for r in self._replicas
        ]
        loads = [math.inf if c is None or c in kept else _load(c, asked) for c in places]
        taker, asked.taker = asked.taker, None
        if min(loads, default=math.inf) == math.inf:
            return None
        if len(places) == 1:
            return places[0]
        origin = asked.extended and asked.extended.origin
        cells_at = origin.worker if isinstance(origin, SentOrigin) else None
        for connection, load in zip(places, loads, strict=True):
            if connection is not None and connection.key == cells_at:
                return connection if load < math.inf else None
            if connection is not None and connection is taker and load < 1:
                return connection
        return places[self.routing.choose([*beginnings(asked.prompt, asked.call.options)], loads)]

    def _send(self, connection: Connection, some: Sequence[Asked]) -> None:
        """Send requests to the worker that they are given to, alike ones together. With the lock."""
        for group, message in in_messages(some, time.perf_counter()):
            connection.n_entering += sum(asked.n_sequences for asked in group)
            reply = connection.ask(message, then=partial(self._entered, connection, group))
            for asked in group:
                asked.reply = reply
        for asked in some:
            if asked.n_resumed is not None:
                connection.post(resume_of(asked.id, asked.n_resumed))

    def _entered(self, connection: Connection, group: Sequence[Asked], reply: Reply) -> None:
        """End requests that a worker has refused, where nobody waits for its answer."""
        with self.lock():
            connection.n_entering -= sum(asked.n_sequences for asked in group)
            has_entry = connection.n_entering <= N_ENTERING_MAX // 2
            if has_entry and self.late:
                self._send_held()
        if has_entry:
            self._entrance.wake()
        error = reply.error
        if error is None or isinstance(error, WorkerDiedError):
            return

        def end() -> None:
            for asked in group:
                if not asked.is_awaited:
                    self.end(asked, *refused(asked.id, asked.place, as_failure(error)))

        # a message that is too long is refused where it is sent: with the lock
        self.do_soon(lambda: end)

    def end(
        self,
        asked: Asked,
        chunks: Sequence[BatchOutputChunk],
        results: Sequence[tuple[int, BatchResult]],
    ) -> None:
        """Deliver the end of a request, unless it has ended."""
        with self.lock():
            if self.requests.get(asked.id) is not asked:
                return
            self._drop(asked)
        asked.deliver(chunks, results)

    # ---- from the workers, in the threads of their replicas ----

    def check_weights(self, connection: Connection) -> None:
        """Raise a ModelLoadError unless a new worker has loaded the files that the others have, or had."""
        with self.lock():
            self._weights = self._weights or connection.weights
            if connection.weights == self._weights:
                return
        path = connection.facts.path if connection.facts else ""
        raise ModelLoadError(
            f"the file of the model, of an adapter or of mmproj was replaced while the engine ran (model: {path}): "
            "load the engine again, or put the former file back"
        )

    def join(self, connection: Connection) -> None:
        """Take a worker that is ready."""
        self._n_failed, self._refusal = 0, None
        with self.lock():
            if self.recorder is not None:
                connection.post(RecordSteps(on=True))
            if self.is_closing:
                connection.post(Close())
            self._send_held()
            self.take_over(connection)
        self._changed.wake()

    def take(self, connection: Connection, said: Frame) -> None:
        """Deliver what a frame has."""
        parcels: dict[Target, Parcel] = {}
        if said.admitted and self.on_admit is not None:
            self.on_admit(said.admitted)
        with self.lock():
            # all is read before a request changes: what cannot be read ends the worker
            heard, ended = self._read(connection, said)
            for id in said.admitted:
                if (known := connection.requests.get(id)) is not None:
                    known.has_begun = True
            for asked, chunk in heard:
                parcels.setdefault(asked.call.target, ([], []))[0].extend(asked.hear(chunk))
            for asked in ended:
                self._drop(asked)
        for asked, said_result in ended.items():
            result = asked.shared(said_result)
            chunks, results = parcels.setdefault(asked.call.target, ([], []))
            last = asked.last_chunks(result)
            asked.count_ends(len(last))
            chunks += last
            results.append((asked.place, result))
        for target, (chunks, results) in parcels.items():
            target.deliver(chunks, results)
        self._take_events(connection, said)
        if ended:
            self._has_answered = self._has_answered or any(r.error is None for r in ended.values())
            self._after_ends(connection)

    def _read(
        self, connection: Connection, said: Frame
    ) -> tuple[list[tuple[Asked, BatchOutputChunk]], dict[Asked, BatchResult]]:
        """Return the chunks and results that a frame has of requests of this worker."""
        requests = connection.requests
        for part in said.parts:
            if (asked := requests.get(part.id)) is not None:
                asked.parts.append(part)
        heard = [
            (asked, asked.read_chunk(chunk))
            for chunk in said.chunks
            if (asked := requests.get(chunk.id)) is not None
        ]
        ended = {
            asked: asked.read_result(result, self._owner)
            for result in said.results
            if (asked := requests.get(result.id)) is not None
        }
        return heard, ended

    def _take_events(self, connection: Connection, said: Frame) -> None:
        """Take what a frame has besides output; answers to calls last, for they come after it."""
        for line in said.logs:
            Log(line.logger).pass_on(line.level, line.text, line.values)
        for error in (*said.errors, *said.died):
            connection.cause = words_of(error)
        first = self.first_slot(connection) if said.steps else 0
        for record in said.steps:
            rows = tuple(replace(row, slot=row.slot + first) for row in record.rows)
            self._tell_recorder(replace(record, rows=rows))
        for answer in said.replies:
            connection.settle(answer)

    def _tell_recorder(self, record: StepRecord) -> None:
        """Call the recorder; one that raises is called no more, and requests are not affected."""
        try:
            if self.recorder is not None:
                self.recorder(record)
        except BaseException:  # never the program's: this is not its main thread
            self.recorder = None
            _log.fail(
                "the function given to record_steps raised an error and is not called any more"
            )

    def _after_ends(self, connection: Connection) -> None:
        """Once requests have ended: send what waits for that, and take over from a worker where others wait."""
        for replica in self._replicas:
            if replica.connection is connection:
                replica.n_deaths = 0
        with self.lock():
            self._send_held()
            self.take_over(connection)

    def take_over(self, taker: Connection) -> None:
        """Have the worker with the most waiting requests give some to one that has slots free. With the lock."""
        n_free = taker.n_slots - len(taker.requests)
        ready = [c for c in self._awake if c is not taker and not c.is_giving]
        donor = max(ready, key=lambda c: c.n_waiting, default=None)
        if n_free <= 0 or donor is None or donor.n_waiting <= 0:
            return
        n = min(n_free, (donor.n_waiting + 1) // 2)
        ids = [str(a.id) for a in reversed(donor.requests.values()) if a.can_move][:n]
        if ids:
            donor.is_giving = True
            donor.ask(TakeBack(ids=ids), read_texts, partial(self.taken_back, donor, taker))

    def taken_back(self, donor: Connection, taker: Connection, reply: Reply) -> None:
        """Send requests that a worker has given back to the one that has room for them, or else to others."""
        with self.lock():
            donor.is_giving = False
            given = {*(reply.value or ())}
            back = [asked for asked in donor.requests.values() if asked.id in given]
            gone = [asked for asked in back if asked.is_given_up]
            for asked in back:
                asked.taker, asked.is_cut_off = taker, asked in gone
            self._hold([asked for asked in back if asked not in gone])
            self._send_held()
            for other in self.ready if back else ():  # the donor could not be asked meanwhile
                self.take_over(other)
        for asked in gone:
            self._cut_off(asked, None)

    def _hold(self, back: Sequence[Asked]) -> None:
        """Have requests wait for another worker, before later requests. With the lock."""
        for asked in back:
            if asked.worker is not None:
                asked.worker.requests.pop(asked.id, None)
            asked.leave_worker()
        self.held = {**dict.fromkeys(back), **self.held}

    def leave(self, connection: Connection) -> bool:
        """Do without a worker that is gone; return whether it is to be replaced."""
        with self.lock():
            self._n_useless += bool(connection.requests)
            is_useless = not self._has_answered and self._n_useless >= N_USELESS_MAX
            is_over = self.is_closing or not self._can_replace or is_useless
            self._keep_figures(connection)
            if is_over:
                self._hold([a for a in connection.requests.values() if not a.has_begun])
            ended = self._part(connection)
        cause = connection.cause
        for asked in ended:
            is_cancelled = self.is_closing or asked.is_given_up
            error = None if is_cancelled else WorkerDiedError(cause, asked.n_deaths_alone)
            self._cut_off(asked, error)
        if is_useless:
            words = f"{self._n_useless} workers died before one had answered a request: {cause}"
            self.fail(EngineError(words))
        elif is_over:
            self.fail(WorkerDiedError(cause))
        else:
            with self.lock():
                self._send_held()
        self._changed.wake()
        return not is_over

    def _part(self, connection: Connection) -> list[Asked]:
        """Have the requests of a worker that is gone wait for another; return those that are to end. With the lock."""
        had = [*connection.requests.values()]
        is_suspect = not any(asked.has_begun for asked in had)
        again: list[Asked] = []
        ended: list[Asked] = []
        for asked in had:
            is_left = self.is_closing or asked.is_given_up
            asked.is_cut_off = asked.is_given_up
            goes_on = not is_left and asked.goes_on(is_suspect=is_suspect)
            (again if goes_on else ended).append(asked)
        if any(asked.is_poison for asked in ended):
            for other in self.requests.values():
                other.absolve()
        self._hold(again)
        return ended

    def _cut_off(self, asked: Asked, error: CBatchError | None) -> None:
        """End a request whose worker cannot; without an error it is cancelled."""
        chunks, results = asked.cancelled() if error is None else asked.cut_off(error)
        self.end(asked, chunks, results)

    def _keep_figures(self, connection: Connection) -> None:
        """Keep what is known of the work of a worker that is gone."""
        if (stats := connection.stats) is not None:
            stats.n_waiting = stats.n_running = stats.n_paused = stats.n_held = 0
            stats.n_cells = stats.n_pool = stats.n_threads = stats.n_checkpoints = (
                stats.n_checkpoint_bytes
            ) = 0
            most = max(self.lost.n_active_max, stats.n_active_max)
            self.lost.add(stats)
            self.lost.n_active_max = most  # the workers did not work at the same time

    def miss(self, error: CBatchError) -> bool:
        """Note a worker that could not be started; return whether to try again.

        If starts have failed often while no worker ran, requests and commands that wait for one get the error.
        """
        if not self._is_loaded:
            self.fail(error)
            return False
        self._n_failed = 0 if self.ready else self._n_failed + 1
        if self._n_failed >= N_FAILED_MAX * len(self._replicas):
            self._refusal = ModelLoadError(f"no worker can be started: {words_of(error)}")
            self._refusal.__cause__ = error
            for asked in [*self.held, *self.late]:
                self._cut_off(asked, self._refusal)
        self._changed.wake()
        return True

    def fail(self, error: CBatchError) -> None:
        """End the pool by an error, unless it is closing."""
        if self.is_closing:
            return
        self.error = self.error or error
        self._changed.wake()
        if not self._is_loaded:
            return
        self.is_closing = True
        self._entrance.wake()
        cause = EngineClosedError(f"the engine stopped: {error}")
        cause.__cause__ = error
        if self.on_end is not None:
            self.on_end(cause)
        for asked in [*self.requests.values()]:
            self._cut_off(asked, cause)
        for replica in self._replicas:
            replica.end()

    # ---- the end ----

    def close(self, within_s: float | None = None) -> None:
        """End every request and the workers; wait until they are gone, except where others may wait for this thread.

        A worker that does not end in `within_s`, such as a stopped one, is killed. Threads that receive
        frames do not wait: functions given to `record_steps` may call this in several of them.
        """
        with self.lock():
            is_first, self.is_closing = not self.is_closing, True
            ready = self.ready
        if is_first and self.on_end is not None:
            self.on_end(None)
        for replica in self._replicas:
            replica.end()
        for connection in ready:
            connection.tell(Close())
        self._changed.wake()
        self._entrance.wake()
        if must_not_wait() or isinstance(threading.current_thread(), FrameThread):
            self._is_over.set()
        else:
            self._join(_LAST_S if within_s is None else within_s)
        for asked in [*self.requests.values()]:
            self._cut_off(asked, None)

    def _join(self, within_s: float) -> None:
        """Wait until the workers are gone; kill those that do not end by themselves."""
        until_s = time.perf_counter() + within_s
        for replica in self._replicas:
            if replica.thread.is_alive():
                replica.thread.join(max(0.0, until_s - time.perf_counter()))
            if replica.thread.is_alive():
                replica.kill()
                replica.thread.join(_LAST_S)  # a function given to `record_steps` may never return
        self._is_over.set()
        if self._watch.is_alive() and self._watch is not threading.current_thread():
            self._watch.join()


def _least(ready: Sequence[Connection]) -> Sequence[Connection]:
    """Return the worker with the fewest requests, if there is one."""
    return sorted(ready, key=lambda c: len(c.requests))[:1]


def _load(connection: Connection, asked: Asked) -> float:
    """Return how many requests a worker has for each slot; infinite where it does not take this one."""
    if _is_reserved(connection, asked):
        return math.inf
    return len(connection.requests) / connection.n_slots


def _is_reserved(connection: Connection, asked: Asked) -> bool:
    """Whether a worker takes no further request now, or not this one: one of them is to be alone."""
    others = connection.requests
    if not others:
        return False
    # one that is to be alone is the only one
    return asked.must_be_alone or next(iter(others.values())).must_be_alone


def by_worker(some: Iterable[Asked]) -> dict[Connection, list[str]]:
    """Return the ids of requests by the worker that has them; held ones are left out."""
    found: dict[Connection, list[str]] = {}
    for asked in some:
        if asked.worker is not None:
            found.setdefault(asked.worker, []).append(asked.id)
    return found


def id_parts(some: Iterable[Asked]) -> Iterator[tuple[Connection, list[str]]]:
    """Yield the ids of requests as `by_worker`, a worker's in parts, for one message may not be long."""
    for connection, ids in by_worker(some).items():
        ends = [*accumulate(_N_ID_BYTES + len(id) for id in ids)]
        for _, part in groupby(zip(ends, ids, strict=True), key=_part_of):
            yield connection, [id for _, id in part]


def _part_of(found: tuple[int, str]) -> int:
    """Return the number of the message to which an id belongs, by the bytes up to its end."""
    return found[0] // N_MESSAGE_BYTES
