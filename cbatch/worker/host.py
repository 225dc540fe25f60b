"""The worker's side of the border: commands come in as messages, and drive the engine of this process."""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from enum import Enum
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, cast

from msgspec import Struct

from cbatch.embedding import TextSettings
from cbatch.errors import (
    ConfigError,
    DuplicateIdError,
    EngineClosedError,
    NoThreadError,
    failure_of,
)
from cbatch.messages import BatchPrompt
from cbatch.options import RunOptions
from cbatch.response import BatchOutputChunk, BatchResult, Timings
from cbatch.runtime.choices import request_id
from cbatch.runtime.ids import Ids, check_own
from cbatch.runtime.interface import Submission
from cbatch.runtime.output import Origin
from cbatch.support.checks import MAX_INT, check_int, shown
from cbatch.support.interrupts import Sleepers
from cbatch.support.logs import FIELDS
from cbatch.support.plain import are_same
from cbatch.support.thread_start import start
from cbatch.worker.framing import N_LINE_MAX
from cbatch.worker.protocol_commands import (
    ANY_COMMAND,
    ASIDES,
    COMMAND,
    COMMANDS,
    CROSSINGS,
    MAX_JOB,
    ORDERS,
    Abort,
    CancelCommand,
    Close,
    Credit,
    Extend,
    ProtocolCommand,
    RecordSteps,
    RunCommand,
    Stream,
    TakeBack,
    made_tokens,
)
from cbatch.worker.wire import Frames, LogLine, WireItem, decode, heard_options, reader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from cbatch.runtime.crossings import Crossing
    from cbatch.runtime.local import LocalRuntime
    from cbatch.worker.outbox import Outbox

DEBUG = "CBATCH_DEBUG"
"""The environment variable that is 1 where the command `abort` is known, for tests."""

N_CANCELLED_MAX = 128
"""Most requests of a cancel for which the next commands wait: more may take many steps to end. Our choice."""

N_LATER_MAX = 1000
"""Commands that may wait for room in the queue, or compute for long, at once: each has a thread. Our choice."""

N_LATER_BYTES_MAX = 4 * N_LINE_MAX
"""Most bytes of the lines of these commands together. Our choice."""

_LOOK_S = 0.05
"""How often requests are cancelled that were on their way into the queue."""


_n_hosts = count(1)


class SessionEnd(Enum):
    """Why a client's time with a worker is over, in either dialect."""

    DONE = "the input has ended, or the client asked for the end, and all is done"
    LEFT = "the reader has left"
    FAILED = "the engine has stopped"


class _HostBatch:
    """The `Target` of the requests of one command."""

    def __init__(self, host: Host, *, is_streamed: bool, wants_tokens: bool) -> None:
        self.is_streamed, self.wants_tokens = is_streamed, wants_tokens
        self.ids: dict[int, str] = {}
        self._host = host

    def deliver(
        self, chunks: Sequence[BatchOutputChunk], results: Sequence[tuple[int, BatchResult]]
    ) -> None:
        """Hand output to the thread that writes: of an answer that nobody reads as it comes, the result says it all."""
        if not self.is_streamed:
            ended = {result.id: result for _, result in results}
            chunks = [chunk for chunk in chunks if not _is_whole(chunk, ended.get(chunk.id))]
        self._host.deliver(self, chunks, results)

    def expect_choices(self, n: int) -> None:
        """Do nothing: a result has all its choices."""


class Host:
    """Does what messages say with an engine, and reports through an outbox. See docs/operate/processes.md.

    A message has `op` and that command's fields; with `n`, a number or text, it is answered by a reply
    `[n, value]` or `[n, null, error]`. What is wrong with another one is said among a frame's `errors`.
    """

    def __init__(
        self,
        runtime: LocalRuntime,
        outbox: Outbox,
        options: RunOptions | None = None,
        frames: Frames = "lines",
    ) -> None:
        """Make one; it closes neither of them. `options` are defaults for every request."""
        self._runtime, self._outbox, self._frames = runtime, outbox, frames
        can_abort = os.environ.get(DEBUG) == "1"
        self._read = reader(ANY_COMMAND if can_abort else COMMAND, frames)
        self._batches: dict[str, _HostBatch] = {}
        """The target of each request in flight, by id. Changed under `_renaming`."""
        self._renaming = threading.Lock()
        self._first_job = MAX_JOB * next(_n_hosts)
        """Added to its client's numbers of jobs: other clients have the same ones."""
        self._ids, self._options = Ids(), _LastOptions(options or RunOptions())
        self._later: dict[threading.Thread, int] = {}
        """Threads of commands that wait or compute, and the bytes of each one's line."""
        self._n_message = 0
        """Bytes of the current message."""
        self._ending: SessionEnd | None = None
        self.problem: ConfigError | None = None
        """What ended the client's messages: no more of them can be read."""
        self._closing: list[object] = []
        """The number of `close`, once it was asked for."""
        self._changed = Sleepers()
        runtime.listen(self._end, self._admit)

    # ---- one client's time ----

    def read(self, lines: Iterable[bytes | None]) -> None:
        """Do what each line says, until there are no more, or `close`; None stands for one that was too long."""
        try:
            for line in lines:
                self._outbox.wait_for_room()
                if self._ending is not None:
                    return
                if line is None:
                    self._outbox.fail(ConfigError("a line is too long: it was left out"))
                elif line.strip() and self._do(line):
                    break
        except ConfigError as error:
            self.problem = error
            self._outbox.fail(error)
        except (OSError, ValueError):  # the other side is gone; a closed file raises a ValueError
            self.end(SessionEnd.LEFT)
        self.end(SessionEnd.DONE)

    def end(self, ending: SessionEnd) -> None:
        """Have the client's time be over; what comes first counts."""
        self._ending = self._ending or ending
        self._changed.wake()

    def leave(self) -> None:
        """Note that the reader has left, also where its lines have ended before."""
        self._ending = SessionEnd.LEFT
        self._changed.wake()

    def wait(self) -> SessionEnd:
        """Return why the client's time is over, when it is."""
        self._changed.wait_for(lambda: self._ending is not None)
        return cast("SessionEnd", self._ending)

    def finish(self, *, is_patient: bool) -> SessionEnd:
        """Return when every request has ended and every command was answered, with why the client's time is over.

        Requests are cancelled, unless `is_patient` and only the lines have ended; then paused ones go on, for nobody
        else can resume them.
        """
        if is_patient and not self._closing:
            self._run_on()
        while not self._is_idle and self._ending is not SessionEnd.FAILED:
            with suppress(EngineClosedError):
                self._runtime.cancel_all()
            self._changed.wait_for(lambda: self._is_idle, _LOOK_S)
        self._runtime.listen(None)
        for number in self._closing:
            self._tell(number, None)
        return self.wait()

    def _run_on(self) -> None:
        """Return when every request has ended by itself, or nobody waits for that any more; none stays paused."""
        while not self._is_over:
            n_later = len(self._later)  # each of these may still queue requests
            with suppress(EngineClosedError):
                self._runtime.orders.run_on_soon([*self._batches])

            def has_changed(n_before: int = n_later) -> bool:
                return self._is_over or len(self._later) < n_before

            self._changed.wait_for(has_changed)

    @property
    def _is_over(self) -> bool:
        """Whether nobody waits any more for requests to end."""
        return self._is_idle or self._ending is not SessionEnd.DONE

    @property
    def _is_idle(self) -> bool:
        return not self._batches and not self._later

    # ---- output ----

    def deliver(
        self,
        batch: _HostBatch,
        chunks: Sequence[BatchOutputChunk],
        results: Sequence[tuple[int, BatchResult]],
    ) -> None:
        """Hand output of a batch to the thread that writes. Owner thread."""
        # a client whose engine has failed knows what becomes of its requests
        if self._ending is not SessionEnd.FAILED:
            self._outbox.deliver(chunks, [result for _, result in results])
        if results:
            self._forget([result.id for _, result in results], batch)

    def _end(self, cause: EngineClosedError | None) -> None:
        """Tell why the engine has stopped, where nobody has closed it; requests in flight get no results then."""
        if cause is not None:
            self._outbox.put("died", cause)
            self.end(SessionEnd.FAILED)

    def _admit(self, ids: Sequence[str]) -> None:
        """Tell which requests are computed from now on, before that can end the process. Owner thread."""
        self._outbox.put_at_once("admitted", [*dict.fromkeys(map(request_id, ids))])

    # ---- commands ----

    def _do(self, message: bytes) -> bool:
        """Do what a message says; return whether it is `close`."""
        command, self._n_message = None, len(message)
        try:
            command = self._read(message)
            if isinstance(command, Close):
                self._closing = [command.n]
                return True
            crossing = CROSSINGS.get(type(command))
            if crossing is None:
                found = self._commands[type(command)](self, command)
            else:
                found = self._answer(crossing, command)
            if isinstance(found, _Later):
                self._do_later(command.n, found)
            else:
                self._tell(command.n, found, may_pass=crossing in ASIDES)
        except Exception as error:
            if command is None:
                self._tell(*self._answer_to_wrong(message, error))
            else:
                self._tell(command.n, None, error)
        return False

    def _answer_to_wrong(self, message: bytes, error: Exception) -> tuple[Any, None, Exception]:
        """Return the number of a message that cannot be read, as far as it has one, and what is wrong with it."""
        try:
            said = decode(message, _WrongCommand, self._frames)
        except ConfigError:
            return None, None, error
        words = f"{said.op}: {error}"
        if not isinstance(said.op, str) or said.op not in COMMANDS:
            words = f"op must be one of {', '.join(COMMANDS)}; not {shown(said.op)}"
        return said.number, None, ConfigError(words)

    def _answer(self, crossing: Crossing, command: ProtocolCommand) -> object:
        """Call a method that is declared in `runtime/interface.py`."""
        arguments = {
            name: self._settled(kind, getattr(command, name))
            for name, (kind, _) in crossing.parameters.items()
        }
        engine = self._runtime.orders if crossing in ORDERS else self._runtime
        work = partial(getattr(engine, crossing.name), **arguments)
        if not crossing.waits:
            return work()
        self._check_later()
        return _Later(work, may_pass=crossing in ASIDES)

    def _settled(self, kind: object, said: Any) -> object:
        """Return an argument of a type as it was sent."""
        if kind is RunOptions:
            return self._options.of(said)
        return said.made() if kind is BatchPrompt else said

    def _do_later(self, number: object, rest: _Later) -> None:
        """Do the rest of a command in a thread of its own, and answer it."""

        def answer() -> None:
            try:
                self._tell(number, rest.work(), may_pass=rest.may_pass)
            except Exception as error:
                self._tell(number, None, error)
            self._later.pop(thread, None)
            self._changed.wake()

        thread = threading.Thread(target=answer, name="cbatch-command", daemon=True)
        self._later[thread] = self._n_message
        try:
            start(thread)
        except NoThreadError:
            self._later.pop(thread, None)
            rest.undo()
            raise

    def _check_later(self) -> None:
        """Refuse a command that may take long while too many do."""
        if len(self._later) >= N_LATER_MAX:
            raise ConfigError(f"{N_LATER_MAX} commands wait or compute already: try again later")
        n_bytes = sum([*self._later.values()])  # a copy: threads that end change it
        if n_bytes and n_bytes + self._n_message > N_LATER_BYTES_MAX:
            raise ConfigError(
                f"pending commands have {n_bytes:,} bytes, and this one has {self._n_message:,}; "
                f"at most {N_LATER_BYTES_MAX:,} are allowed together: try again later"
            )

    def _tell(
        self,
        number: object,
        value: object,
        error: Exception | None = None,
        *,
        may_pass: bool = False,
    ) -> None:
        if error is not None:
            error = failure_of("a bug of cbatch", error)
        if error is not None and number is None:
            self._outbox.fail(error)
        elif error is not None:
            self._outbox.put("replies", (number, None, error))
        elif number is not None:
            self._outbox.put("replies", (number, value), may_pass=may_pass)

    # ---- requests ----

    def _run(self, command: RunCommand) -> object:
        """Queue requests: all or none. Return their ids."""
        if self._runtime.has_limit:
            self._check_later()
        prompts = [_at(i, item) for i, item in enumerate(command.items)]
        ids = self._ids.of_batch([prompt.id for prompt in prompts], self._runtime.ids)
        self._check_free(ids)
        batch = self._batch(command)
        seconds = math.inf if command.seconds is None else command.seconds
        submission = Submission(
            prompts,
            ids,
            [item.name for item in command.items],
            self._options.of(command.options),
            time.perf_counter() + seconds,
            batch,
            range(len(ids)),
            age_s=command.age_s,
            is_paused=command.paused,
            is_fed=command.fed,
            may_wait=command.may_wait,
            is_checked=command.checked,
            is_part=command.part,
            job=command.job and self._first_job + command.job,
            texts=None if command.texts is None else TextSettings.of(**asdict(command.texts)),
        )
        batch.ids.update(enumerate(ids))
        self._know(ids, batch)
        with self._forgotten_if_it_raises(ids, batch):
            queue = self._runtime.enter(submission)

        def finish() -> object:
            with self._forgotten_if_it_raises(ids, batch):
                queue()
            return ids

        if not self._runtime.has_limit:
            return finish()
        return _Later(finish, partial(self._undo, ids, batch))

    def _undo(self, ids: Sequence[str], batch: _HostBatch) -> None:
        self._runtime.orders.take_back(ids)
        self._forget(ids, batch)

    def _batch(self, command: RunCommand | Extend) -> _HostBatch:
        return _HostBatch(self, is_streamed=command.stream, wants_tokens=command.by_token)

    def _check_free(self, ids: Sequence[str]) -> None:
        """Refuse an id whose last result is not written yet: the new request's output might come before it."""
        for id in ids:
            if self._outbox.holds_result_of(id):
                raise DuplicateIdError(id)

    @contextmanager
    def _forgotten_if_it_raises(self, ids: Sequence[str], batch: _HostBatch) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._forget(ids, batch)
            raise

    def _know(self, ids: Sequence[str], batch: _HostBatch) -> None:
        with self._renaming:
            for id in ids:
                self._batches.pop(id, None)  # an earlier request's id is equal, and means that one
                self._batches[id] = batch

    def _forget(self, ids: Iterable[str], batch: _HostBatch) -> None:
        """Forget requests of a batch; each id may be that of another request by now."""
        with self._renaming:
            for id in ids:
                if self._batches.get(id) is batch:
                    del self._batches[id]
        if self._ending is not None:  # else nobody waits for that
            self._changed.wake()

    def _extend(self, command: Extend) -> object:
        """Queue a request that continues a result; return its id."""
        batch, result = self._batch(command), self._extended(command)
        check_own((result.id,), self._runtime.ids)
        self._check_free((result.id,))
        if result.token_ids:
            tokens = BatchPrompt(tokens=result.token_ids)
            self._runtime.n_tokens_of(tokens, RunOptions())  # all are in the vocabulary
        batch.ids[0] = result.id
        self._know([result.id], batch)
        with self._forgotten_if_it_raises([result.id], batch):
            return self._runtime.extend(result, command.n_tokens, batch, is_paused=command.paused)

    def _extended(self, command: Extend) -> BatchResult:
        """Return the result to go on from, as far as going on needs it."""
        prompt, said = command.prompt.made(), command.result
        if prompt.id is None:
            raise ConfigError("the prompt of extend must have the id of its result")
        merged = RunOptions.of(prompt.options).over(self._options.of(command.options))
        # the result is one of the choices
        merged = replace(merged, seed=said.seed, n=None, best_of=None)
        request = self._runtime.request_of(replace(prompt, options=None), prompt.id, merged)
        for name, value in asdict(said.usage).items():
            check_int(name, value, 0, MAX_INT)
        number = -1 if said.origin is None else said.origin
        tokens, usage = tuple(said.token_ids), said.usage
        return BatchResult(
            request.id,
            "",
            tokens,
            said.finish_reason,
            None,
            usage,
            Timings(0.0, None, 0.0, None, None),
            said.seed,
            logprobs=made_tokens(said.logprobs),
            prompt_logprobs=made_tokens(said.prompt_logprobs),
            origin=Origin(request, number, tokens, said.finish_reason, usage),
        )

    def _stream(self, command: Stream) -> object:
        """Have chunks come from now on."""
        found = map(self._batches.get, command.ids)
        for batch in dict.fromkeys(batch for batch in found if batch is not None):
            batch.is_streamed = True
            self._runtime.orders.watch(batch)
        return None

    def _cancel(self, command: CancelCommand) -> object:
        """End requests; with `waiting`, only those that never had a slot. Return how many were in flight."""
        orders = self._runtime.orders
        if command.n is not None:
            work = partial(orders.cancel, command.ids, is_for_waiting=command.waiting)
            return work() if len(command.ids) <= N_CANCELLED_MAX else _Later(work)
        # does not wait: many clients may leave at once, and each would cost a step
        orders.cancel_soon(command.ids, is_for_waiting=command.waiting)
        return None

    def _take_back(self, command: TakeBack) -> object:
        """Take out requests that never had a slot, without a result; return their ids."""
        ids = self._runtime.orders.take_back(command.ids)
        for id in ids:
            if (batch := self._batches.get(id)) is not None:
                self._forget([id], batch)
        return ids

    def _record_steps(self, command: RecordSteps) -> object:
        """Tell of each run of steps, or, with `on` false, no more."""
        self._runtime.record_steps(partial(self._outbox.put, "steps") if command.on else None)
        return None

    def _credit(self, command: Credit) -> object:
        """Allow the writing of so many more bytes."""
        self._outbox.grant(command.bytes)
        return None

    def _abort(self, _: Abort) -> object:
        """Have llama.cpp end this process."""
        from cbatch.backend.abort import trip_assertion

        trip_assertion()
        return None

    _commands: Mapping[type[ProtocolCommand], Callable[[Host, Any], object]] = {
        RunCommand: _run,
        Extend: _extend,
        Stream: _stream,
        CancelCommand: _cancel,
        TakeBack: _take_back,
        RecordSteps: _record_steps,
        Credit: _credit,
        Abort: _abort,
    }


class _WrongCommand(Struct):
    """What is read of a command that is wrong."""

    op: Any = None
    n: Any = None

    @property
    def number(self) -> int | str | None:
        """What the answer is told by; None where it is not a number of a command."""
        return self.n if type(self.n) in (int, str) else None


@dataclass(frozen=True, slots=True)
class _Later:
    """The rest of a command that may take seconds, or wait for room: those after it do not wait."""

    work: Callable[[], object]
    undo: Callable[[], object] = bool
    """Called where it cannot be done."""
    may_pass: bool = False
    """Whether its reply may come between the parts of a large result."""


def _is_whole(chunk: BatchOutputChunk, result: BatchResult | None) -> bool:
    """Whether a last chunk is all of its answer's text, so that a client can make it from the result."""
    if result is None:
        return False
    answer = result.choices[chunk.index] if result.choices else result
    return chunk.text == answer.text and chunk.token_ids == answer.token_ids


class _LastOptions:
    """Options of messages; equal ones that follow each other are one object, which the engine has merged already."""

    def __init__(self, default: RunOptions) -> None:
        self._default = self._options = default
        self._said: dict[str, Any] | None = None

    def of(self, said: dict[str, Any] | None) -> RunOptions:
        """Return options over the default ones. Raises a ConfigError where one is unknown or wrong."""
        if not are_same(said, self._said):
            self._options = heard_options(said or {}).over(self._default)
            self._said = said
        return self._options


def _at(i: int, item: WireItem) -> BatchPrompt:
    try:
        return item.made()
    except ConfigError as error:
        raise ConfigError(f"items[{i}]: {error}") from None


class LogToOutbox(logging.Handler):
    """Sends lines of the log over the border."""

    def __init__(self, outbox: Outbox) -> None:
        super().__init__()
        self._outbox = outbox

    def emit(self, record: logging.LogRecord) -> None:
        """Send one line, with its values by name."""
        text = record.getMessage()
        if record.exc_info:
            text += "\n" + logging.Formatter().formatException(record.exc_info)
        values = getattr(record, FIELDS, {})
        self._outbox.put("logs", LogLine(record.name, record.levelno, text, values))
