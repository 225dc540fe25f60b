"""A `Runtime` whose engine is in other processes: one worker, or several with the same model."""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from msgspec import Raw

from cbatch.errors import EngineClosedError, InsideStepError, WorkerDiedError
from cbatch.options import NO_OPTIONS, RunOptions
from cbatch.runtime.ids import RequestId, is_meant, own_id
from cbatch.runtime.interface import Orders, Questions
from cbatch.runtime.validation import check_extension, origin_of
from cbatch.support.interrupts import Postponed
from cbatch.support.logs import must_not_wait
from cbatch.worker.connection import Connection, FrameThread
from cbatch.worker.pool import Launch, Pool, by_worker, id_parts
from cbatch.worker.protocol_commands import (
    COMMAND_OF,
    CancelCommand,
    ProtocolCommand,
    Stream,
    command_of,
    resume_of,
)
from cbatch.worker.requests import Asked
from cbatch.worker.timers import Timers
from cbatch.worker.wire import encode_call, reader, told_options

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence

    from cbatch.messages import BatchPrompt
    from cbatch.response import BatchResult
    from cbatch.runtime.crossings import Crossing
    from cbatch.runtime.interface import (
        BatchTarget,
        OnAdmit,
        OnEnd,
        Outage,
        Submission,
        Target,
    )
    from cbatch.runtime.row_comparison import RowComparison
    from cbatch.runtime.step_record import SlotState, StepRecord
    from cbatch.stats import EngineStats
    from cbatch.support.model_facts import ModelFacts


_Slot = TypeVar("_Slot", "SlotState", "RowComparison")


class Workers(Questions):
    """Computes requests in other processes; see `Runtime` and `Orders`: this is both.

    A question that has no method here is put to one of the workers.
    """

    is_threaded = True

    def __init__(
        self,
        launches: Sequence[Launch],
        *,
        can_replace: bool,
        is_stopped: Callable[[], bool] = bool,
    ) -> None:
        """Start the workers and wait until all are ready; see `Pool` for arguments and errors."""
        self._owner, self._pid = os.urandom(8).hex(), os.getpid()
        self._encoded, self._timers = _Encoded(), Timers()
        self.pool = Pool(
            launches, can_replace=can_replace, owner=self._owner, is_stopped=is_stopped
        )
        ready = self.pool.ready
        self.n_window = min(connection.n_window for connection in ready)
        self.has_limit = any(connection.has_limit for connection in ready)
        self._facts = next((c.facts for c in ready if c.facts is not None), None)
        self.is_apart = not self.has_limit
        self.orders = self

    # ---- state ----

    @property
    def n_slots(self) -> int:
        """Requests that run at once, in all workers together."""
        return self.pool.n_slots

    def listen(self, on_end: OnEnd | None, on_admit: OnAdmit | None = None) -> None:
        """Have a listener told of the end and of admissions; see `Runtime`."""
        self.pool.on_end, self.pool.on_admit = on_end, on_admit

    @property
    def ready(self) -> list[Connection]:
        """The workers that are there."""
        return self.pool.ready

    @property
    def ids(self) -> Container[str]:
        """The ids in flight."""
        return self.pool.requests

    def check_open(self) -> None:
        """Raise an `EngineClosedError` where the engine is closed, has failed, or belongs to the parent process."""
        if os.getpid() != self._pid:
            raise EngineClosedError(
                "this engine belongs to the parent process: load another one after the fork"
            )
        self.pool.check_open()

    @property
    def outage(self) -> Outage | None:
        """Why no worker is running now; None if one is."""
        return self.pool.outage

    def close(self, within_s: float | None = None) -> None:
        """End every request and every worker; kill workers that do not end in time. Twice is harmless."""
        if os.getpid() == self._pid:
            self._timers.close()
            with Postponed():
                self.pool.close(within_s)

    # ---- requests ----

    def add(self, submission: Submission) -> None:
        """Send requests to workers. See `Runtime`."""
        self.check_open()
        if submission.is_fed and not self.has_limit:
            self.pool.wait_for_entry()
        given = self._encoded.of(submission.options)
        # a feed goes on at once, but where a worker has it wait for room
        is_awaited = submission.is_awaited and (self.has_limit or not submission.is_fed)
        self.pool.add([*Asked.of(submission, given)], is_awaited=is_awaited)

    def enter(self, submission: Submission) -> Callable[[], None]:
        """Send requests to workers; return what waits for their answers."""
        self.check_open()
        given = self._encoded.of(submission.options)
        return self.pool.enter([*Asked.of(submission, given)])

    def extend(
        self, result: BatchResult, n_tokens: int, target: Target, *, is_paused: bool = False
    ) -> RequestId:
        """Send a request that continues a result, to the worker that has its cells; return its id."""
        self.check_open()
        origin = origin_of(result, self._owner)
        n_tokens = check_extension(result, n_tokens)
        asked = Asked.to_extend(result, own_id(origin.request.id), n_tokens, target)
        asked.is_paused = is_paused
        self.pool.add([asked], is_awaited=True)
        return asked.id

    # ---- orders ----

    def check_wait(self) -> None:
        """Raise an `InsideStepError` in a thread that reads messages of workers, or that others may wait for."""
        if isinstance(threading.current_thread(), FrameThread) or must_not_wait():
            raise InsideStepError

    def cancel(self, ids: Iterable[str], *, is_for_waiting: bool = False) -> int:
        """End requests, or those alone that never had a slot; return how many. Waits for the current step."""
        self.check_open()
        return self._cancel(self._meant(ids), is_for_waiting=is_for_waiting)

    def cancel_all(self) -> int:
        """End every request in flight; return how many there were."""
        self.check_open()
        return self._cancel([*self.pool.requests.values()])

    def cancel_batch(self, target: BatchTarget) -> int:
        """End a batch's requests in flight; return how many there were."""
        self.check_open()
        return self._cancel(self._of(target))

    def cancel_soon(self, ids: Iterable[str], *, is_for_waiting: bool = False) -> None:
        """End requests before the next plan. Does not wait."""
        self._cancel_soon(partial(self._meant, [*ids]), waiting=is_for_waiting)

    def cancel_batch_soon(self, target: BatchTarget) -> None:
        """End a batch's requests in flight before the next plan. Does not wait."""
        self._cancel_soon(partial(self._of, target))

    def cancel_waiting_soon(self, target: BatchTarget) -> None:
        """End a batch's requests that never had a slot. Does not wait."""
        self._cancel_soon(partial(self._of, target), waiting=True)

    def watch(self, target: BatchTarget) -> None:
        """Have a batch's chunks sent as they come."""
        with self.pool.lock():
            for connection, ids in id_parts(self._of(target)):
                connection.post(Stream(ids=ids))

    def pause(self, id: str) -> bool:
        """Stop a request where it is; False where it is not in flight or paused already."""
        return self._order(partial(command_of, Orders.pause), id, Asked.pause)

    def resume(self, id: str, n_tokens: int | None = None) -> bool:
        """Let a paused request go on, for `n_tokens` where given; False where it is not in flight or not paused."""
        command = partial(resume_of, n_tokens=n_tokens)
        return self._order(command, id, partial(Asked.resume, n_tokens=n_tokens))

    def resume_soon(self, turns: Iterable[tuple[str, int]]) -> None:
        """Resume paused requests, each for its number of tokens. Does not wait."""
        with self.pool.lock():
            for id, n_tokens in turns:
                for asked in self._meant([id]):
                    asked.resume(n_tokens)
                    if asked.worker is not None:
                        asked.worker.post(resume_of(asked.id, n_tokens))

    def compare_rows(self, ids: Iterable[str] | None = None) -> list[RowComparison]:
        """Compare the next rows of requests in a shared step and alone, in each worker."""
        self.check_open()
        if ids is None:
            return [*self._numbered(self.ask_each(Orders.compare_rows, None))]
        read = _reader_of(Orders.compare_rows)
        calls = [
            (connection, connection.call(command_of(Orders.compare_rows, some), read))
            for connection, some in by_worker(self._meant(ids)).items()
        ]
        return [*self._numbered((connection, call.wait()) for connection, call in calls)]

    def _numbered(self, found: Iterable[tuple[Connection, Sequence[_Slot]]]) -> Iterator[_Slot]:
        """Yield what is said of slots, each numbered among those of all workers."""
        for connection, slots in found:
            first = self.pool.first_slot(connection)
            yield from (replace(slot, slot=slot.slot + first) for slot in slots)

    def _order(
        self, command: Callable[[str], ProtocolCommand], id: str, note: Callable[[Asked], bool]
    ) -> bool:
        self.check_open()
        for asked in self._meant([id]):
            with self.pool.lock():
                is_new, worker = note(asked), asked.worker
                if worker is None:
                    return is_new
                call = worker.ask(command(asked.id), _READ_FLAG)
            if must_not_wait():  # a worker's message may need the lock
                return is_new
            with suppress(WorkerDiedError):
                if call.wait() or asked.worker is worker:
                    return bool(call.value)
            return is_new  # its worker has died, or given it back meanwhile
        return False

    def _meant(self, ids: Iterable[str]) -> list[Asked]:
        """Return the requests that a caller means and that are in flight."""
        found = ((id, self.pool.requests.get(id)) for id in ids)
        return [asked for id, asked in found if asked is not None and is_meant(id, asked.id)]

    def _left(self, some: Iterable[Asked]) -> list[Asked]:
        """Return those of some requests that have not ended."""
        return [asked for asked in some if self.pool.requests.get(asked.id) is asked]

    def _of(self, target: BatchTarget) -> list[Asked]:
        """Return the requests of a batch that are in flight."""
        return self._meant([*target.ids.values()])

    def _cancel(self, some: Sequence[Asked], *, is_for_waiting: bool = False) -> int:
        """End requests; return how many were in flight. Those that a worker gives back now, or loses, end here."""
        with self.pool.lock():
            for asked in some:
                asked.give_up(is_for_waiting=is_for_waiting)
            held = [asked for asked in some if self.pool.drop_held(asked)]
            sent = self._left(some)
            calls = [
                (connection.ask(CancelCommand(ids=ids, waiting=is_for_waiting), _READ_COUNT), ids)
                for connection, ids in id_parts(sent)
            ]
        _tell_cancelled(held)
        if must_not_wait():  # a worker's message may need the lock
            return len(held) + len(sent)
        n_ended, lost = len(held), set[str]()
        for call, ids in calls:
            lost.update(ids)
            with suppress(WorkerDiedError):
                n_ended += call.wait()
                lost.difference_update(ids)
        with self.pool.lock():
            ending = {a for a in self._left(sent) if a.id in lost and a.is_given_up}
            return n_ended + sum(a.is_cut_off or a in ending for a in sent)

    def _cancel_soon(self, find: Callable[[], list[Asked]], *, waiting: bool = False) -> None:
        def cancel() -> Callable[[], None]:
            some = find()
            for asked in some:
                asked.give_up(is_for_waiting=waiting)
            held = [asked for asked in some if self.pool.drop_held(asked)]
            for connection, ids in id_parts(some):
                connection.post(CancelCommand(ids=ids, waiting=waiting))
            return partial(_tell_cancelled, held)

        self.pool.do_soon(cancel)

    def call_at(self, when_s: float, action: Callable[[], object]) -> None:
        """Have `action` done at `when_s` of `time.perf_counter`, in a thread for that."""
        self._timers.set(when_s, action)

    # ---- questions ----

    def put(self, crossing: Crossing, arguments: Mapping[str, Any]) -> Any:
        """Put a question to one of the workers."""
        self.check_open()
        return self.pool.ask(COMMAND_OF[crossing].of(arguments), reader(crossing.result))

    def ask_each(self, method: Any, *arguments: object) -> list[tuple[Connection, Any]]:
        """Put a question to every worker; return the answers of workers that live."""
        self.check_open()
        return self.pool.ask_all(command_of(method, *arguments), _reader_of(method))

    def model_facts(self) -> ModelFacts:
        """Return what the model is, as a worker's first frame told it; one that did not tell it is asked."""
        self.check_open()
        return super().model_facts() if self._facts is None else self._facts

    def check_options(self, options: RunOptions) -> None:
        """Raise a `ConfigError` for options of a run that name an adapter which is not loaded."""
        if options.adapter:
            super().check_options(options)

    def checked(self, prompt: BatchPrompt, options: RunOptions) -> int:
        """Return how many tokens a prompt has. Raises the errors with which it would end before it runs."""
        own = RunOptions.of(prompt.options)
        self.pool.check_slot(own.slot if own.slot is not None else options.slot)
        prompt = replace(prompt, options=replace(own, slot=None))
        # a worker has a number of its own for the slot
        return super().checked(prompt, replace(options, slot=None))

    def slots(self) -> list[SlotState]:
        """Return what each slot of each worker holds now."""
        return [*self._numbered(self.ask_each(Questions.slots))]

    def stats(self) -> EngineStats:
        """Return a snapshot of the work that all workers have done; the last one where the caller must not wait."""
        if must_not_wait():
            self.check_open()
            return self.pool.total([(c, c.stats) for c in self.pool.ready if c.stats is not None])
        return self.pool.total(self.ask_each(Questions.stats))

    def reset_stats(self) -> None:
        """Set the statistics to zero."""
        self.pool.forget_stats()
        self.ask_each(Questions.reset_stats)

    def record_steps(self, into: Callable[[StepRecord], object] | None) -> None:
        """Have `into` called after each run of steps of each worker, in a thread of its own. None ends that."""
        self.check_open()
        self.pool.record_steps(into)

    def pump(self) -> bool:
        """Do nothing: the workers work by themselves."""
        return False


class _Encoded:
    """Options as they are sent; those of the last request are kept, for most have the same object."""

    def __init__(self) -> None:
        self._last = NO_OPTIONS, Raw(encode_call({}))

    def of(self, options: RunOptions) -> Raw:
        last, said = self._last
        if last is not options:
            said = Raw(encode_call(told_options(options)))
            self._last = options, said
        return said


def _reader_of(method: Any) -> Callable[[Raw], Any]:
    return reader(method.crossing.result)


_READ_FLAG, _READ_COUNT = reader(bool), reader(int)


def _tell_cancelled(gone: Sequence[Asked]) -> None:
    """Tell the readers of requests that no worker had that they are cancelled."""
    for asked in gone:
        asked.deliver(*asked.cancelled())
