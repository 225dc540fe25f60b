"""The batches of a server: each is checked, run beside the calls, and ends with files of its answers.

A batch has a thread only while it is worked on. How far it is, is on disk: the next server on the same folder goes on
with it.
"""

from __future__ import annotations

import json
import math
import sqlite3
import threading
import time
from collections import Counter
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from msgspec import structs

from cbatch.errors import (
    ConfigError,
    EngineError,
    ModelLoadError,
    NoThreadError,
    OutputError,
    RequestCancelledError,
)
from cbatch.files.served_batch import CHANGED, BatchPlaces, ServedBatch, check_requests
from cbatch.server.batch_index import Kind, StoredBatch, storable_now
from cbatch.server.batch_questions import asker, n_never_ran_in, usage_of
from cbatch.server.batch_room import BatchRoom, ItemGate
from cbatch.server.batch_store import BatchStore, Page, new_file_id
from cbatch.server.files_folder import is_full
from cbatch.server.http_errors import LATER, NO_RETRY, HttpProblemError, draining
from cbatch.server.time_slices import TimeSlices
from cbatch.support.checks import MAX_KEY_LENGTH
from cbatch.support.logs import Log
from cbatch.support.thread_start import start, started

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from cbatch.engine import Engine
    from cbatch.files.served_batch import Check
    from cbatch.response import BatchResult
    from cbatch.server.server_settings import ServerSettings

_log = Log("cbatch.server")

_N_SHARES = 8
"""Answers of lines that may be made at once in the memory of `max_answers_mib`. Our choice."""

_N_UNFINISHED = 256
"""Most batches of an owner that have not ended: our choice."""

_N_UNFINISHED_MAX = 4096
"""Most batches that have not ended: each takes some kilobytes of memory."""

_N_PROBLEMS = 100
"""Most lines that a batch tells as wrong; the lines after them are not checked. Our choice."""

CLOSE_S = 20.0
"""Seconds for lines that run to be given back at the end; a step of a large model may take some of them."""

_AGAIN_S = 15.0
"""Seconds until work is tried again that a full disk, a lack of threads, or `cancel_all` has ended."""

_LOOK_S = 60.0
"""Most seconds until expiry is looked at again: the system's clock may be set."""

_NEVER = math.inf
"""A batch rests until then that is left to the next server."""

_FULL = "the server's disk is full: the batch continues when there is room"
_OTHER_ENGINE = "the batch was begun with another model or other options, and continues when the server runs with them"
"""Reasons for which batches wait."""

_PASSING = (
    *(ModelLoadError, OutputError, OSError, RequestCancelledError, NoThreadError),
    sqlite3.OperationalError,
)
"""Errors that make a batch wait and may pass: a missing model file, a full disk, a lack of threads."""

_NEVER_RAN = {
    "expired": (
        "batch_expired",
        "This request could not be executed before the completion window expired.",
    ),
    "cancelled": ("batch_cancelled", "This request was not executed: the batch was cancelled."),
}
"""Code and message of lines without an answer, by the batch's last status. Source: OpenAI's batch guide."""


@dataclass(frozen=True, eq=False, slots=True)
class BatchLane:
    """Work of one kind.

    Args:
        n_shared: most batches at once, as long as an owner has more than one of them.
        n_max: most batches at once, of different owners.
    """

    n_shared: int
    n_max: int


CHECKING = BatchLane(16, 32)
"""Reading a whole file of requests, maybe for minutes of computing, in slices of time: our choice."""

FINISHING = BatchLane(16, 32)
"""Reading and writing whole files of answers, as `CHECKING`: our choice."""

RUNNING = BatchLane(4, 32)
"""Running lines, maybe for days: our choice; a small batch need not wait for a large one before it."""


class BatchTurns:
    """The batches at work: owners take turns, so that no owner's batches keep those of others waiting.

    For one thread at a time; never waits.
    """

    def __init__(self) -> None:
        self._n = Counter[BatchLane]()
        self._n_of = Counter[tuple[BatchLane, str]]()
        self._last: dict[tuple[BatchLane, str], int] = {}
        """The number of each owner's last turn: 1, 2, …"""
        self._n_turns = 0

    def may_begin(self, lane: BatchLane, owner: str) -> bool:
        """Whether there is room for one more batch of an owner."""
        n_most = lane.n_shared if self._n_of[lane, owner] else lane.n_max
        return self._n[lane] < n_most

    def rank(self, lane: BatchLane, owner: str) -> tuple[int, int]:
        """Return a value that is lower for owners who come first: few batches at work, the last turn long ago."""
        return self._n_of[lane, owner], self._last.get((lane, owner), 0)

    def begin(self, lane: BatchLane, owner: str) -> None:
        """Note that an owner's batch is at work."""
        self._n[lane] += 1
        self._n_of[lane, owner] += 1
        self._n_turns += 1
        self._last[lane, owner] = self._n_turns

    def end(self, lane: BatchLane, owner: str) -> None:
        """Note that an owner's batch is at work no more."""
        self._n[lane] -= 1
        self._n_of[lane, owner] -= 1


@dataclass(eq=False, slots=True)
class _BatchJob:
    """A batch that has not ended."""

    batch: StoredBatch
    gate: ItemGate | None = None
    run: ServedBatch | None = None
    thread: threading.Thread | None = None
    """Works on it now."""
    is_counted: bool = True
    """Whether the batch has the counts of what an earlier server wrote."""
    rest_until: float = 0.0
    """Monotonic seconds before which it gets no turn."""
    wait: dict[str, Any] | None = None
    """Why the batch waits now, as one of its errors."""

    def stop(self) -> None:
        """Begin no more lines."""
        if self.run is not None:
            self.run.stop()
        if self.gate is not None:
            self.gate.close()


class _StoppedError(Exception):
    """The server ends: the batch goes on with the next one."""


_ENDS_LATER = (*_PASSING, EngineError, sqlite3.Error, _StoppedError)
"""Errors for which the end of a batch that is given up waits."""


class Batches:
    """All batches of one server. Every method from any thread; each may wait for the disk."""

    def __init__(
        self,
        engine: Engine,
        store: BatchStore,
        room: BatchRoom,
        settings: ServerSettings,
        model: str,
        clock: Callable[[], float] = storable_now,
    ) -> None:
        """Go on with the batches that have not ended."""
        self.store = store
        self.n_ended = Counter[str]()
        """Batches that have ended, by status."""
        self.n_items = Counter[str]()
        """Lines that have ended: completed, failed."""
        self._engine, self._room, self._settings, self._model = engine, room, settings, model
        self._clock = clock
        self._changed = threading.Condition()
        self._jobs: dict[str, _BatchJob] = {}
        """Batches that have not ended, the oldest first."""
        self._entering = Counter[str]()
        """Batches that are being made, by owner."""
        self._turns = BatchTurns()
        self._slices = {CHECKING: TimeSlices(), FINISHING: TimeSlices()}
        self._keeper: threading.Thread | None = None
        """Gives turns; begins with the first batch."""
        self.is_closed, self._closed = False, draining()
        """Whether all work is left to the next server."""
        self._leaving: list[threading.Thread] = []
        """Threads that may work once this is closed."""
        for batch in store.unfinished():
            self._jobs[batch.id] = _BatchJob(batch, is_counted=not batch.kept_engine)
        if self._jobs:
            try:
                self._start_keeper()
            except NoThreadError as error:
                _log.warn("batches wait until the next one is created: %s", error)

    # ---- what clients ask ----

    def create(
        self, requests: Path, window_s: int, kind: Kind = "batch", **fields: Any
    ) -> StoredBatch:
        """Begin a batch of the lines of a file; `fields` are those of `StoredBatch`.

        Raises:
            HttpProblemError: too many have not ended, the disk is full, the system has no more threads, or the server
                is being stopped.
        """
        owner = fields.get("kept_owner", "")
        with self._changed:
            if self.is_closed:
                raise replace(self._closed)
            self._check_few(owner)
            self._start_keeper()
            self._entering[owner] += 1
        try:
            # others need not wait for the disk
            batch = self.store.new_batch(requests, window_s, kind, **fields)
            with self._changed:
                self.store.enter(batch)
                self._jobs[batch.id] = _BatchJob(batch)
                return structs.replace(batch)
        finally:
            with self._changed:
                self._entering[owner] -= 1
                self._changed.notify_all()

    def _check_few(self, owner: str) -> None:
        """Refuse a batch more of an owner where there are too many."""
        unfinished = self._entering + Counter(job.batch.kept_owner for job in self._jobs.values())
        if unfinished[owner] >= _N_UNFINISHED or unfinished.total() >= _N_UNFINISHED_MAX:
            message = f"{unfinished[owner]} batches have not ended: try again later"
            if unfinished[owner] < _N_UNFINISHED:
                message = "too many batches of all API keys have not ended: try again later"
            raise HttpProblemError(429, message, "rate_limit_exceeded", headers=LATER)

    def get(self, id: str, viewer: str, kind: Kind = "batch") -> StoredBatch:
        """Return a copy of a batch. Raises a `HttpProblemError` if the viewer has none of this kind with this id."""
        with self._changed:
            return self._told(self.store.batch(id, viewer, kind))

    def newest(
        self, viewer: str, page: Page, kind: Kind = "batch"
    ) -> tuple[list[StoredBatch], bool]:
        """Return copies of batches as `BatchStore.batches` does, and whether there are more."""
        with self._changed:
            found, has_more = self.store.batches(viewer, page, kind)
            return [self._told(batch) for batch in found], has_more

    def cancel(self, id: str, viewer: str, kind: Kind = "batch") -> StoredBatch:
        """End a batch: its slots are free after the current step, and lines without an answer are left.

        Raises:
            HttpProblemError: there is none, or it has ended otherwise.
        """
        with self._changed:
            batch = self.store.batch(id, viewer, kind)
            job = self._jobs.get(id)
            batch = batch if job is None else job.batch
            if batch.status in ("cancelling", "cancelled"):
                return self._told(batch)
            if job is None or batch.status not in ("validating", "in_progress"):
                message = f"Cannot cancel a batch with status '{batch.status}'."
                raise HttpProblemError(409, message, None, headers=NO_RETRY)
            self._move(job, "cancelling", "cancelling_at")
            job.rest_until, job.wait = 0.0, None
            job.stop()
            self._changed.notify_all()
            told = self._told(batch)
        _cancel_all([job])
        return told

    def delete(self, id: str, viewer: str, kind: Kind) -> None:
        """Remove a batch and its answers.

        Raises:
            HttpProblemError: there is none, or it has not ended.
        """
        with self._changed:
            batch = self._told(self.store.batch(id, viewer, kind))
            if not batch.has_ended:
                message = "a batch that has not ended cannot be deleted: cancel it first"
                raise HttpProblemError(409, message, None, headers=NO_RETRY)
            self.store.delete_batch(batch)

    def _told(self, batch: StoredBatch) -> StoredBatch:
        """Return a copy of a batch as it is now."""
        job = self._jobs.get(batch.id)
        if job is not None:
            batch = job.batch
            if job.run is not None:
                batch.n_completed, batch.n_failed = job.run.n_done, job.run.n_failed
            if job.wait is not None:
                return structs.replace(batch, errors=[job.wait])
        return structs.replace(batch)

    # ---- the end ----

    def close(self, within_s: float = CLOSE_S, problem: HttpProblemError | None = None) -> bool:
        """End all work, to be continued by the next server on the same folder; calls that still come get `problem`.

        Waits until it is on disk; where the engine does not answer, only for a while: the next server does the rest.

        Returns:
            Whether the folder is free; else another call waits on.
        """
        with self._changed:
            if not self.is_closed:
                self._begin_end()
            self._closed = problem or draining()
        ends_s = time.monotonic() + within_s
        for thread in self._leaving:
            thread.join(max(0.0, ends_s - time.monotonic()))
        self._room.close()
        with self._changed:
            is_quiet = self._changed.wait_for(
                lambda: not self._entering.total(), max(0.0, ends_s - time.monotonic())
            )
        is_free = is_quiet and not any(thread.is_alive() for thread in self._leaving)
        if is_free:
            self.store.close(problem)
        return is_free

    def _begin_end(self) -> None:
        """Have all work end; within the lock."""
        self.is_closed, jobs = True, [*self._jobs.values()]
        for job in jobs:
            job.stop()
        found = [self._keeper, _cancel_all(jobs), *(job.thread for job in jobs)]
        self._leaving = [thread for thread in found if thread is not None]
        self._changed.notify_all()

    # ---- turns ----

    def _start_keeper(self) -> None:
        """Have turns given. Raises a NoThreadError."""
        if self._keeper is None:
            self._keeper = started(self._keep, "cbatch-batches")

    def _keep(self) -> None:
        """Give turns until the server ends."""
        with self._changed:
            while not self.is_closed:
                job = self._next()
                if job is None:
                    self._changed.wait(self._quiet_s())
                elif not self._begin(job):
                    self._changed.wait_for(lambda: self.is_closed, _AGAIN_S)

    def _next(self) -> _BatchJob | None:
        """Return the batch whose turn it is: an owner's oldest."""
        now_s = time.monotonic()
        found: list[tuple[tuple[int, int], int, _BatchJob]] = []
        for age, job in enumerate(self._jobs.values()):
            lane, owner = self._lane_of(job), job.batch.kept_owner
            is_free = job.thread is None and job.rest_until <= now_s
            if is_free and self._turns.may_begin(lane, owner):
                found.append((self._turns.rank(lane, owner), age, job))
        return min(found)[-1] if found else None

    def _quiet_s(self) -> float:
        """Return the seconds until a batch has rested, or has expired as it waits to run."""
        waiting = [job for job in self._jobs.values() if job.thread is None]
        now_s, now = time.monotonic(), self._clock()
        rests = (job.rest_until - now_s for job in waiting if job.rest_until > now_s)
        lives = (job.batch.expires_at - now for job in waiting if self._lane_of(job) is RUNNING)
        return max(0.0, min([_LOOK_S, *rests, *lives]))

    def _lane_of(self, job: _BatchJob) -> BatchLane:
        """Return the kind of work that is next; a batch whose time is over runs no more."""
        batch = job.batch
        if batch.status == "validating":
            return CHECKING
        may_run = batch.status == "in_progress" and job.is_counted
        return RUNNING if may_run and self._clock() < batch.expires_at else FINISHING

    def _begin(self, job: _BatchJob) -> bool:
        """Give a batch a turn; False where the system has no more threads."""
        lane, name = self._lane_of(job), f"cbatch-{job.batch.id}"
        thread = threading.Thread(target=self._work, args=[job, lane], name=name, daemon=True)
        try:
            start(thread)
        except NoThreadError as error:
            _log.warn("batches are tried again in %d s: %s", int(_AGAIN_S), error)
            return False
        job.thread, job.wait = thread, None
        self._turns.begin(lane, job.batch.kept_owner)
        return True

    # ---- one batch, in its thread ----

    def _work(self, job: _BatchJob, lane: BatchLane) -> None:
        """Take a batch a step on; what passes is tried again later, what does not is left to the next server."""
        rest_s = 0.0
        try:
            self._step(job, lane)
        except _StoppedError:
            pass
        except _PASSING as error:
            rest_s = _AGAIN_S
            if not self.is_closed:
                words = "batch %s is tried again in %d s: %s"
                _log.warn(words, job.batch.id, int(_AGAIN_S), error)
            if is_full(error):
                job.wait = _problem("insufficient_storage", _FULL)
        except EngineError as error:
            rest_s = _NEVER
            if not self.is_closed:
                _log.warn(
                    "batch %s waits for the next start of the server: %s", job.batch.id, error
                )
        except Exception as error:
            rest_s = self._give_up(job, error)
        finally:
            with self._changed:
                self._turns.end(lane, job.batch.kept_owner)
                job.thread = None
                if rest_s:
                    job.rest_until = time.monotonic() + rest_s
                if job.batch.has_ended:
                    del self._jobs[job.batch.id]
                self._changed.notify_all()

    def _step(self, job: _BatchJob, lane: BatchLane) -> None:
        batch = job.batch
        if self._lane_of(job) is not lane:  # it was cancelled meanwhile, or its time is over
            return
        if lane is RUNNING:
            self._run(job)
        elif lane is CHECKING:
            self._check(job)
        elif batch.status == "in_progress" and not job.is_counted:
            run = self._served(batch, ItemGate(self._room))
            with self._shared(FINISHING):
                run.recount()
            batch.n_completed, batch.n_failed, job.is_counted = run.n_done, run.n_failed, True
        else:
            with self._shared(FINISHING) as check:
                self._finish(job, check)

    def _give_up(self, job: _BatchJob, error: Exception) -> float:
        """Fail a batch, which keeps what was answered; return the seconds until this is tried again."""
        if isinstance(error, CHANGED):
            _log.warn(
                "batch %s has failed, because its files were changed: %s", job.batch.id, error
            )
            # without the message, which names paths of the server
            problem = _problem(
                "storage_changed", "the batch's files were changed or removed on the server"
            )
        else:
            _log.fail(f"batch {job.batch.id} has failed")
            problem = _problem("internal_error", "an internal error: the server's log has more")
        try:
            self._salvage(job.batch)
            self._fail(job, [problem])
        except _ENDS_LATER:
            return _AGAIN_S
        return _NEVER

    def _salvage(self, batch: StoredBatch) -> None:
        """Make files of what a batch has answered; where that fails, its folder is moved aside."""
        try:
            run = self._served(batch, ItemGate(self._room))
            with self._shared(FINISHING) as check:
                run.salvage(check)
                batch.n_completed, batch.n_failed = run.n_done, run.n_failed
                self._publish(batch, check)
        except _ENDS_LATER:
            raise
        except Exception:
            _log.fail(f"the answers of batch {batch.id} cannot be published")
            batch.output_file_id = batch.error_file_id = None
            self.store.set_work_aside(batch)

    def _check_open(self) -> None:
        if self.is_closed:
            raise _StoppedError

    @contextmanager
    def _shared(self, lane: BatchLane) -> Iterator[Check]:
        """Wait for a slice of time; yield a function to be called often, which waits for more or ends the work."""
        with self._slices[lane].share() as go_on:

            def check() -> None:
                self._check_open()
                go_on()

            yield check

    def _places(self, batch: StoredBatch) -> BatchPlaces:
        folder = self.store.folder_of(batch)
        names = ("requests.jsonl", "answers.jsonl", "errors.jsonl")
        return BatchPlaces(*(folder / name for name in names))

    def _check(self, job: _BatchJob) -> None:
        """Look through the requests; the batch fails where a line is none."""
        batch = job.batch

        def go_on() -> None:
            if batch.status == "cancelling":
                raise _StoppedError
            check()

        try:
            with self._shared(CHECKING) as check:
                found = check_requests(
                    self._places(batch).requests,
                    batch.endpoint,
                    n_problems=_N_PROBLEMS,
                    max_line_bytes=self._settings.body_limit.n_bytes,
                    check=go_on,
                )
        except ConfigError as error:
            words = str(error).rpartition("requests.jsonl: ")[2]
            self._fail(job, [_problem("invalid_file", words)])
            return
        except _PASSING:
            if self._left_s(batch) > 0:
                raise
            words = "the requests could not be read before the completion window expired"
            self._fail(job, [_problem("batch_expired", words)])
            return
        problems = [{**asdict(p.error), "line": p.line} for p in found.problems]
        if found.n_last_read is not None:
            words = f"more than {_N_PROBLEMS} lines are wrong: no line after line {found.n_last_read} was checked"
            problems.append(_problem("too_many_errors", words))
        if not found.n_items:
            problems.append(_problem("empty_file", "the file has no requests"))
        with self._changed:
            if batch.status == "validating":  # else it was cancelled meanwhile
                batch.n_total, batch.model = found.n_items, found.model[:MAX_KEY_LENGTH] or None
                batch.errors = problems
                status = "failed" if problems else "in_progress"
                self._move(job, status, f"{status}_at")

    def _run(self, job: _BatchJob) -> None:
        """Run the requests that have no answer yet."""
        left_s = self._left_s(job.batch)
        if left_s > 0 and self._is_our_engine(job):
            self._run_for(job, left_s)
            self._finalize(job)

    def _left_s(self, batch: StoredBatch) -> float:
        """Return the seconds until a batch expires: no more than its whole window, whatever the clock says."""
        return batch.expires_at - max(self._clock(), batch.created_at)

    def _finalize(self, job: _BatchJob) -> None:
        """Note how a batch ends that runs no more, unless it was cancelled."""
        batch = job.batch
        with self._changed:
            if batch.status == "in_progress":
                is_whole = batch.n_completed + batch.n_failed >= batch.n_total
                batch.kept_ending = "completed" if is_whole else "expired"
                self._move(job, "finalizing", "finalizing_at")

    def _is_our_engine(self, job: _BatchJob) -> bool:
        """Whether the engine is the one that gave the answers so far; else the batch rests until its time is over."""
        batch = job.batch
        options = self._engine.options
        said = {
            f.name: repr(value)
            for f in fields(options)
            if (value := getattr(options, f.name)) is not None
        }
        now = json.dumps([self._engine.fingerprint, said], sort_keys=True)
        with self._changed:
            if batch.kept_engine == "":
                batch.kept_engine = now
                self.store.save(batch)
            if batch.kept_engine == now:
                return True
            if batch.status == "in_progress":
                _log.warn("batch %s waits: %s", batch.id, _OTHER_ENGINE)
                job.wait = _problem("engine_changed", _OTHER_ENGINE)
                job.rest_until = time.monotonic() + self._left_s(batch)
        return False

    def _served(self, batch: StoredBatch, gate: ItemGate) -> ServedBatch:
        return ServedBatch(
            self._engine,
            self._places(batch),
            batch.endpoint,
            asker(batch, self._settings, self._model, self._engine),
            gate,
            f"{batch.id}-",
            self._settings.body_limit.n_bytes,
            self._settings.max_answers_mib / _N_SHARES,
            has_one_model=not batch.is_of_messages,
            n_done=batch.n_completed,
            n_failed=batch.n_failed,
        )

    def _run_for(self, job: _BatchJob, seconds: float) -> None:
        gate = ItemGate(self._room)
        run = self._served(job.batch, gate)
        with self._changed:
            job.run, job.gate = run, gate
            if self.is_closed or job.batch.status == "cancelling":
                run.stop()
        try:
            run.run(seconds, self._count)
        finally:
            gate.close()
            gate.clear()
            with self._changed:
                job.batch.n_completed, job.batch.n_failed = run.n_done, run.n_failed
        self._check_open()

    def _count(self, result: BatchResult | None) -> None:
        with self._changed:
            is_answer = result is not None and result.error is None
            self.n_items["completed" if is_answer else "failed"] += 1

    def _finish(self, job: _BatchJob, check: Check) -> None:
        """Make the files of a batch that runs no more, and end it; done again after a kill, it changes nothing."""
        self._finalize(job)
        batch = job.batch
        ending = "cancelled" if batch.status == "cancelling" else batch.kept_ending
        if batch.in_progress_at is not None and ending != "completed":
            run = job.run or self._served(batch, ItemGate(self._room))
            run.conclude(*_NEVER_RAN[ending], check)
            batch.n_completed, batch.n_failed = run.n_done, run.n_failed
            if batch.n_failed:
                batch.kept_n_never_ran = n_never_ran_in(self._places(batch).errors, check)
        self._publish(batch, check)
        with self._changed:
            self._move(job, ending, f"{ending}_at")

    def _publish(self, batch: StoredBatch, check: Check) -> None:
        """Make files of the answers and the errors that are there."""
        places = self._places(batch)
        made = [
            ("output", batch.n_completed, places.answers),
            ("error", batch.n_failed, places.errors),
        ]
        for kind, n, _ in made:
            name = f"{kind}_file_id"
            setattr(batch, name, (getattr(batch, name) or new_file_id()) if n else None)
        is_told = batch.n_completed and not batch.is_of_messages
        batch.usage = usage_of(places.answers, check) if is_told else None
        with self._changed:
            self.store.save(batch)  # the ids are known before there are files
        for kind, n, path in made:
            if n:
                name, id = f"{batch.id}_{kind}.jsonl", getattr(batch, f"{kind}_file_id")
                self.store.adopt_file(path, name, batch.kept_seconds, id, batch.kept_owner)

    def _fail(self, job: _BatchJob, errors: list[dict[str, Any]]) -> None:
        with self._changed:
            job.batch.errors = errors
            self._move(job, "failed", "failed_at")

    def _move(self, job: _BatchJob, status: str, stamp: str) -> None:
        """Give a batch another status, on disk too; within the lock."""
        batch = job.batch
        before = batch.status, getattr(batch, stamp)
        batch.status = status
        setattr(batch, stamp, int(self._clock()))
        try:
            self.store.save(batch)
        except BaseException:
            batch.status = before[0]
            setattr(batch, stamp, before[1])
            raise
        if batch.has_ended:
            self.n_ended[status] += 1
            _log.tell(
                "batch",
                batch_id=batch.id,
                endpoint=batch.endpoint,
                status=status,
                total=batch.n_total,
                completed=batch.n_completed,
                failed=batch.n_failed,
                elapsed_s=int(self._clock()) - batch.created_at,
            )


def _cancel_all(jobs: Sequence[_BatchJob]) -> threading.Thread | None:
    """Have the lines of jobs leave an engine that may not answer; None where lines are left to end by themselves."""

    def cancel() -> None:
        for job in jobs:
            if job.run is not None:
                job.run.cancel()

    try:
        return started(cancel, "cbatch-cancel")
    except NoThreadError:
        return None


def _problem(code: str, message: str) -> dict[str, Any]:
    return {"code": code, "message": message, "param": None, "line": None}
