"""The worker's side of the border: commands come in as lines of JSON, and drive the engine of this process."""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from cbatch.checks import MAX_INT, check_flag, check_int, check_seconds, shown, token_ids
from cbatch.errors import (
    CBatchError,
    ConfigError,
    DuplicateIdError,
    EngineClosedError,
    RequestFailedError,
    words_of,
)
from cbatch.interrupts import Sleepers
from cbatch.logs import FIELDS
from cbatch.messages import BatchPrompt, as_id
from cbatch.options import RunOptions
from cbatch.runtime.choices import display_id, request_id
from cbatch.runtime.ids import Ids, check_own
from cbatch.runtime.interface import Submission
from cbatch.worker.framing import N_LINE_MAX
from cbatch.worker.wire import (
    comparison_as_json,
    error_as_json,
    extension_of_json,
    loads,
    options_of_json,
    plain_json,
    prompt_of_json,
    stats_as_json,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from cbatch.response import BatchOutputChunk, BatchResult
    from cbatch.runtime.local import LocalRuntime
    from cbatch.worker.outbox import Outbox

DEBUG = "CBATCH_DEBUG"
"""The environment variable that is 1 where the command `abort` is known, for tests."""

Message: TypeAlias = "Mapping[str, Any]"

_Command: TypeAlias = "tuple[Callable[[Host, Message], object] | None, Sequence[str]]"
"""What does a command, None for `close`; and the fields that it may have."""


N_LATER_MAX = 1000
"""Commands that may wait for room in the queue, or compute for long, at once: each has a thread. Our choice."""

N_LATER_BYTES_MAX = 4 * N_LINE_MAX
"""Most bytes of the lines of these commands together. Our choice."""

_LOOK_S = 0.05
"""How often requests are cancelled that were on their way into the queue."""


class SessionEnd(Enum):
    """Why a client's time with a worker is over, in either dialect."""

    DONE = "the input has ended, or the client asked for the end, and all is done"
    LEFT = "the reader has left"
    FAILED = "the engine has stopped"


class _Batch:
    """The `Target` of the requests of one command."""

    def __init__(self, host: Host, *, is_streamed: bool, wants_tokens: bool) -> None:
        self.is_streamed, self.wants_tokens = is_streamed, wants_tokens
        self.ids: dict[int, str] = {}
        self._host = host

    def deliver(
        self, chunks: Sequence[BatchOutputChunk], results: Sequence[tuple[int, BatchResult]]
    ) -> None:
        """Hand output to the thread that writes: of an answer that nobody reads as it comes, the result says it all."""
        if not self.is_streamed and len(chunks) == len(results):
            pairs = zip(chunks, results, strict=True)
            chunks = [chunk for chunk, (_, result) in pairs if not _is_whole(chunk, result)]
        self._host.deliver(chunks, results)

    def expect_choices(self, n: int) -> None:
        """Do nothing: a result has all its choices."""


class Host:
    """Does what lines of JSON say with an engine, and tells what came of it through an outbox. See docs/protocol.md.

    A line is an object with `op` and that command's fields; with `n`, a number or text, it is answered by a reply
    `[n, value]` or `[n, null, error]`. What is wrong with another line is said among a frame's `errors`.
    """

    def __init__(
        self, runtime: LocalRuntime, outbox: Outbox, options: RunOptions | None = None
    ) -> None:
        """Make one; it closes neither of them. `options` are defaults for every request."""
        self._runtime, self._outbox = runtime, outbox
        self._batches: dict[str, _Batch] = {}
        """The target of each request in flight, by id."""
        self._ids, self._options = Ids(), _LastOptions(options or RunOptions())
        self._later: dict[threading.Thread, int] = {}
        """Threads of commands that wait or compute, and the bytes of each one's line."""
        self._n_line = 0
        """Bytes of the current line."""
        self._ending: SessionEnd | None = None
        self._closing: list[object] = []
        """The number of `close`, once it was asked for."""
        self._changed = Sleepers()
        runtime.on_end = self._end
        runtime.on_admit = self._admit

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
            with suppress(EngineClosedError):
                for id in [*self._batches]:
                    self._runtime.orders.resume(id)
            self._changed.wait_for(lambda: self._is_idle or self._ending is not SessionEnd.DONE)
        while not self._is_idle and self._ending is not SessionEnd.FAILED:
            with suppress(EngineClosedError):
                self._runtime.cancel_all()
            self._changed.wait_for(lambda: self._is_idle, _LOOK_S)
        self._runtime.on_end = self._runtime.on_admit = None
        for number in self._closing:
            self._tell(number, None)
        return self.wait()

    @property
    def _is_idle(self) -> bool:
        return not self._batches and not self._later

    # ---- output ----

    def deliver(
        self, chunks: Sequence[BatchOutputChunk], results: Sequence[tuple[int, BatchResult]]
    ) -> None:
        """Hand output to the thread that writes. Owner thread."""
        # a client whose engine has failed knows what becomes of its requests
        if self._ending is not SessionEnd.FAILED:
            self._outbox.deliver(chunks, [result for _, result in results])
        for _, result in results:
            self._batches.pop(result.id, None)
        if results and self._ending is not None:  # else nobody waits for that
            self._changed.wake()

    def _end(self, cause: EngineClosedError | None) -> None:
        """Tell why the engine has stopped, where nobody has closed it; requests in flight get no results then."""
        if cause is not None:
            self._outbox.put("died", error_as_json(cause))
            self.end(SessionEnd.FAILED)

    def _admit(self, ids: Sequence[str]) -> None:
        """Tell which requests are computed from now on, before that can end the process. Owner thread."""
        self._outbox.put_at_once("admitted", [*dict.fromkeys(map(request_id, ids))])

    # ---- lines ----

    def _do(self, line: bytes) -> bool:
        """Do what a line says; return whether it is `close`."""
        number, self._n_line = None, len(line)
        try:
            message = loads(line)
            number = _number_of(message)
            command, fields = self._command(message.get("op"))
            _check_fields(message, fields)
            if command is None:
                self._closing = [number]
                return True
            found = command(self, message)
            if isinstance(found, _Later):
                self._do_later(number, found)
            else:
                self._tell(number, found)
        except Exception as error:
            self._tell(number, None, error)
        return False

    def _command(self, op: object) -> _Command:
        found = self._commands.get(op) if isinstance(op, str) else None
        if op == "abort" and os.environ.get(DEBUG) == "1":
            found = Host._abort, ()
        if found is None:
            raise ConfigError(f"op must be one of {', '.join(self._commands)}; not {shown(op)}")
        return found

    def _do_later(self, number: object, rest: _Later) -> None:
        """Do the rest of a command in a thread of its own, and answer it."""

        def answer() -> None:
            try:
                self._tell(number, rest.work())
            except Exception as error:
                self._tell(number, None, error)
            self._later.pop(thread, None)
            self._changed.wake()

        thread = threading.Thread(target=answer, name="cbatch-command", daemon=True)
        self._later[thread] = self._n_line
        try:
            thread.start()
        except RuntimeError:  # the system has no more of them
            self._later.pop(thread, None)
            rest.undo()
            raise

    def _check_later(self) -> None:
        """Refuse a command that may take long while too many do."""
        if len(self._later) >= N_LATER_MAX:
            raise ConfigError(f"{N_LATER_MAX} commands wait or compute already: try again later")
        n_bytes = sum([*self._later.values()])  # a copy: threads that end change it
        if n_bytes and n_bytes + self._n_line > N_LATER_BYTES_MAX:
            raise ConfigError(
                f"commands of {n_bytes:,} bytes wait or compute already, and this one has {self._n_line:,}; "
                f"the limit is {N_LATER_BYTES_MAX:,} together: try again later"
            )

    def _tell(self, number: object, value: object, error: Exception | None = None) -> None:
        if error is not None and not isinstance(error, CBatchError):
            cause, error = error, RequestFailedError(f"a bug of cbatch: {words_of(error)}")
            error.__cause__ = cause
        if error is not None and number is None:
            self._outbox.fail(error)
        elif error is not None:
            self._outbox.put("replies", (number, None, error_as_json(error)))
        elif number is not None:
            self._outbox.put("replies", (number, value))

    # ---- requests ----

    def _run(self, message: Message) -> object:
        """Queue requests: all or none. Return their ids."""
        items = message.get("items")
        if not isinstance(items, list) or not items:
            raise ConfigError(f"items is a list of prompts, not {shown(items)}")
        if self._runtime.has_limit:
            self._check_later()
        prompts = [_at(i, item) for i, item in enumerate(items)]
        ids = self._ids.of_batch([prompt.id for prompt in prompts], self._runtime.ids)
        self._check_free(ids)
        batch = self._batch(message)
        submission = Submission(
            prompts,
            ids,
            [str(item.get("name") or "") for item in items],
            self._options.of(message.get("options")),
            time.perf_counter() + _seconds(message, "seconds", math.inf),
            batch,
            age_s=_seconds(message, "age_s", 0.0),
            is_paused=_flag(message, "paused"),
            is_fed=_flag(message, "fed"),
            may_wait=_flag(message, "may_wait", default=True),
            is_checked=_flag(message, "checked"),
            is_part=_flag(message, "part"),
        )
        batch.ids.update(enumerate(ids))
        self._batches.update(dict.fromkeys(ids, batch))
        with self._forgotten_if_it_raises(ids):
            queue = self._runtime.enter(submission)

        def finish() -> object:
            with self._forgotten_if_it_raises(ids):
                queue()
            return ids

        if not self._runtime.has_limit:
            return finish()
        return _Later(finish, partial(self._runtime.orders.take_back, ids))

    def _batch(self, message: Message) -> _Batch:
        is_streamed, by_token = _flag(message, "stream"), _flag(message, "by_token")
        return _Batch(self, is_streamed=is_streamed, wants_tokens=by_token)

    def _check_free(self, ids: Sequence[str]) -> None:
        """Refuse an id whose last result is not written yet: the new request's output might come before it."""
        for id in ids:
            if self._outbox.holds_result_of(id):
                raise DuplicateIdError(id)

    @contextmanager
    def _forgotten_if_it_raises(self, ids: Sequence[str]) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._forget(ids)
            raise

    def _forget(self, ids: Iterable[str]) -> None:
        for id in ids:
            self._batches.pop(id, None)
        self._changed.wake()

    def _extend(self, message: Message) -> object:
        """Queue a request that continues a result; return its id."""
        batch = self._batch(message)
        n_tokens = check_int("n_tokens", message.get("n_tokens"), 1, MAX_INT)
        options = message.get("options")
        result = extension_of_json(
            message.get("item"),
            self._options.of(options),
            message.get("result"),
            self._runtime.request_of,
        )
        check_own((result.id,), self._runtime.ids)
        self._check_free((result.id,))
        if result.token_ids:
            tokens = BatchPrompt(tokens=result.token_ids)
            self._runtime.n_tokens_of(tokens, RunOptions())  # all are in the vocabulary
        batch.ids[0] = result.id
        self._batches[result.id] = batch
        with self._forgotten_if_it_raises([result.id]):
            return self._runtime.extend(result, n_tokens, batch, is_paused=_flag(message, "paused"))

    def _stream(self, message: Message) -> object:
        """Have chunks come from now on."""
        for id in _ids(message):
            if (batch := self._batches.get(id)) is not None:
                batch.is_streamed = True
                self._runtime.orders.watch(batch)
        return None

    def _cancel(self, message: Message) -> object:
        """End requests; with `waiting`, only those that never had a slot. Return how many were in flight."""
        ids, orders = _ids(message), self._runtime.orders
        is_for_waiting = _flag(message, "waiting")
        if _number_of(message) is not None:
            return orders.cancel(ids, is_for_waiting=is_for_waiting)
        # does not wait: many clients may leave at once, and each would cost a step
        orders.cancel_soon(ids, is_for_waiting=is_for_waiting)
        return None

    def _cancel_all(self, _: Message) -> object:
        return self._runtime.cancel_all()

    def _take_back(self, message: Message) -> object:
        """Take out requests that never had a slot, without a result; return their ids."""
        ids = self._runtime.orders.take_back(_ids(message))
        self._forget(ids)
        return ids

    def _pause(self, message: Message) -> object:
        return self._runtime.orders.pause(_id(message.get("id")))

    def _resume(self, message: Message) -> object:
        n_tokens = message.get("n_tokens")
        if n_tokens is not None:
            n_tokens = check_int("n_tokens", n_tokens, 1, MAX_INT)
        return self._runtime.orders.resume(_id(message.get("id")), n_tokens)

    # ---- questions ----

    def _compare_rows(self, message: Message) -> object:
        """Return the comparisons of requests' next rows, of all where `ids` is left out."""
        ids = None if message.get("ids") is None else _ids(message)
        return [*map(comparison_as_json, self._runtime.orders.compare_rows(ids))]

    def _count(self, message: Message) -> object:
        """Return how many tokens a prompt has."""
        return self._about_prompt(self._runtime.n_tokens_of, message)

    def _about_prompt(
        self, ask: Callable[[BatchPrompt, RunOptions], object], message: Message
    ) -> _Later:
        """Return a question about a prompt, which may be long."""
        options = self._options.of(message.get("options"))
        prompt = prompt_of_json(message.get("item"))
        self._check_later()
        return _Later(partial(ask, prompt, options))

    def _tokens(self, message: Message) -> object:
        """Return a prompt's tokens."""
        return self._about_prompt(self._listed_tokens, message)

    def _listed_tokens(self, prompt: BatchPrompt, options: RunOptions) -> list[int]:
        return [*self._runtime.tokens_of(prompt, options)]

    def _text(self, message: Message) -> object:
        """Return a chat as the model sees it."""
        return self._about_prompt(self._runtime.text_of, message)

    def _pieces(self, message: Message) -> object:
        """Return the bytes of tokens, each as Latin-1 text."""
        tokens = token_ids("tokens", message.get("tokens"))
        return [piece.decode("latin-1") for piece in self._runtime.pieces_of(tokens)]

    def _model_facts(self, _: Message) -> object:
        return asdict(self._runtime.model_facts())

    def _check(self, message: Message) -> object:
        """Return how many tokens a prompt has; raise what it would end with before it runs."""
        return self._about_prompt(self._runtime.checked, message)

    def _check_options(self, message: Message) -> object:
        self._runtime.check_options(self._options.of(message.get("options")))
        return None

    def _slots(self, _: Message) -> object:
        """Return what each slot holds, by name."""
        return [asdict(slot) for slot in self._runtime.slots()]

    def _stats(self, _: Message) -> object:
        return stats_as_json(self._runtime.stats())

    def _reset_stats(self, _: Message) -> object:
        self._runtime.reset_stats()
        return None

    def _record_steps(self, message: Message) -> object:
        """Tell of each run of steps, or, with `on` false, no more."""
        is_on = _flag(message, "on")
        self._runtime.record_steps(partial(self._outbox.put, "steps") if is_on else None)
        return None

    def _exactness(self, _: Message) -> object:
        self._check_later()
        return _Later(self._runtime.exactness)

    def _fingerprint(self, _: Message) -> object:
        return self._runtime.fingerprint()

    def _abort(self, _: Message) -> object:
        """Have llama.cpp end this process."""
        from cbatch.backend.abort import trip_assertion

        trip_assertion()
        return None

    def _credit(self, message: Message) -> object:
        """Allow the writing of so many more bytes."""
        self._outbox.grant(check_int("bytes", message.get("bytes"), 1, MAX_INT))
        return None

    _commands: Mapping[str, _Command] = {
        "run": (
            _run,
            (
                *("items", "options", "stream", "by_token", "seconds", "age_s"),
                *("fed", "may_wait", "paused", "checked", "part"),
            ),
        ),
        "extend": (
            _extend,
            ("item", "options", "result", "n_tokens", "stream", "by_token", "paused"),
        ),
        "stream": (_stream, ("ids",)),
        "cancel": (_cancel, ("ids", "waiting")),
        "cancel_all": (_cancel_all, ()),
        "take_back": (_take_back, ("ids",)),
        "pause": (_pause, ("id",)),
        "resume": (_resume, ("id", "n_tokens")),
        "compare_rows": (_compare_rows, ("ids",)),
        "count": (_count, ("item", "options")),
        "tokens": (_tokens, ("item", "options")),
        "text": (_text, ("item", "options")),
        "pieces": (_pieces, ("tokens",)),
        "model_facts": (_model_facts, ()),
        "check": (_check, ("item", "options")),
        "check_options": (_check_options, ("options",)),
        "slots": (_slots, ()),
        "stats": (_stats, ()),
        "reset_stats": (_reset_stats, ()),
        "record_steps": (_record_steps, ("on",)),
        "exactness": (_exactness, ()),
        "fingerprint": (_fingerprint, ()),
        "credit": (_credit, ("bytes",)),
        "close": (None, ()),
    }


@dataclass(frozen=True, slots=True)
class _Later:
    """The rest of a command that may take seconds, or wait for room: those after it do not wait."""

    work: Callable[[], object]
    undo: Callable[[], object] = bool
    """Called where it cannot be done."""


def _is_whole(chunk: BatchOutputChunk, result: BatchResult) -> bool:
    """Whether a last chunk is all of its result's text, so that a client can make it from the result."""
    return (
        not result.choices
        and chunk.id == result.id
        and chunk.text == result.text
        and chunk.token_ids == result.token_ids
    )


class _LastOptions:
    """Options of messages; equal ones that follow each other are one object, which the engine has merged already."""

    def __init__(self, default: RunOptions) -> None:
        self._default = self._options = default
        self._said: object = None

    def of(self, said: object) -> RunOptions:
        """Return options over the default ones. Raises a ConfigError where one is unknown or wrong."""
        if said != self._said:
            self._options = options_of_json(said).over(self._default)
            self._said = said
        return self._options


def _at(i: int, item: object) -> BatchPrompt:
    try:
        return prompt_of_json(item)
    except ConfigError as error:
        raise ConfigError(f"items[{i}]: {error}") from None


def _number_of(message: Message) -> object:
    number = message.get("n")
    if number is not None and type(number) not in (int, str):
        raise ConfigError(f"n is a whole number or text, not {shown(number)}")
    return number


def _check_fields(message: Message, known: Sequence[str]) -> None:
    for key in message:
        if key not in ("op", "n", *known):
            may = ", ".join(known) or "none but op and n"
            raise ConfigError(f"{message['op']} has no field {shown(key)}; its fields are: {may}")


def _id(value: object) -> str:
    id = as_id(value)
    if display_id(id) != id:  # that of one choice's sequence
        raise ConfigError(f"no request has the id {shown(id)}")
    return id


def _ids(message: Message) -> list[str]:
    ids = message.get("ids")
    if not isinstance(ids, list):
        raise ConfigError(f"ids is a list of texts, not {shown(ids)}")
    return [*map(_id, ids)]


def _flag(message: Message, name: str, *, default: bool = False) -> bool:
    return check_flag(name, message.get(name, default))


def _seconds(message: Message, name: str, default: float) -> float:
    value = message.get(name)
    return default if value is None else check_seconds(name, value)


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
        values = {name: _plain(value) for name, value in getattr(record, FIELDS, {}).items()}
        self._outbox.put("logs", (record.name, record.levelno, text, values))


def _plain(value: object) -> object:
    return plain_json(value) if isinstance(value, int | float | str | None) else str(value)
