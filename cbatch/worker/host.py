"""The worker's side of the border: commands come in as lines of JSON, and drive the engine of this process."""

from __future__ import annotations

import logging
import math
import threading
import time
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from cbatch.checks import MAX_INT, check_flag, check_int, check_seconds, shown, token_ids
from cbatch.errors import CBatchError, ConfigError, RequestFailedError, words_of
from cbatch.interrupts import Sleepers
from cbatch.logs import FIELDS
from cbatch.messages import as_id
from cbatch.runtime.choices import request_id
from cbatch.runtime.ids import Ids, check_own
from cbatch.runtime.interface import Submission
from cbatch.worker.wire import (
    comparison_as_json,
    error_as_json,
    extension_of_json,
    loads,
    options_of_json,
    prompt_of_json,
    stats_as_json,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from cbatch.errors import EngineClosedError
    from cbatch.messages import BatchPrompt
    from cbatch.options import RunOptions
    from cbatch.response import BatchOutputChunk, BatchResult
    from cbatch.runtime.interface import Runtime
    from cbatch.worker.outbox import Outbox

Message: TypeAlias = "Mapping[str, Any]"


class _Batch:
    """The `Target` of the requests of one command."""

    wants_tokens = False

    def __init__(self, host: Host, *, is_streamed: bool) -> None:
        self.is_streamed = is_streamed
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
    """Does what lines of JSON say with a `Runtime`, and tells what came of it through an outbox.

    A line is an object with `op` and that command's fields; with `n`, a number, it is answered by a reply `[n, value]`
    or `[n, null, error]`. What is wrong with a line is said in its reply, or else among a frame's `errors`.
    """

    def __init__(self, runtime: Runtime, outbox: Outbox, leave: Callable[[], object]) -> None:
        """Make one; it closes neither of them. `leave` is called when the engine has failed and the client knows."""
        self._runtime, self._outbox, self._leave = runtime, outbox, leave
        self._batches: dict[str, _Batch] = {}
        """The target of each request in flight, by id."""
        self._ids, self._options = Ids(), _LastOptions()
        self._has_failed = False
        self._ended = Sleepers()
        runtime.on_end = self._end
        runtime.on_admit = self._admit

    def serve(self, lines: Iterable[bytes | None]) -> bool:
        """Do what each line says; None stands for a line that was too long. Return whether `close` was asked for."""
        for line in lines:
            if line is None:
                self._outbox.fail(ConfigError("a line is too long: it was left out"))
            elif line.strip() and self._do(line):
                return True
        return False

    def finish(self) -> None:
        """Return when every request has ended; paused ones go on, for nobody else can resume them."""
        for id in [*self._batches]:
            self._runtime.orders.resume(id)
        self._ended.wait_for(lambda: not self._batches)

    def deliver(
        self, chunks: Sequence[BatchOutputChunk], results: Sequence[tuple[int, BatchResult]]
    ) -> None:
        """Hand output to the thread that writes. Owner thread."""
        for _, result in results:
            self._batches.pop(result.id, None)
        if not self._batches:
            self._ended.wake()
        if not self._has_failed:  # else the client knows what becomes of requests in flight
            self._outbox.deliver(chunks, results)

    def _do(self, line: bytes) -> bool:
        """Do what a line says; return whether it is `close`."""
        number = None
        try:
            message = loads(line)
            number = message.get("n")
            op = message.get("op")
            if op == "close":
                return True
            command = self._commands.get(op) if isinstance(op, str) else None
            if command is None:
                raise ConfigError(
                    f"op must be one of {', '.join(sorted(self._commands))}, close; not {shown(op)}"
                )
            found = command(self, message)
            if isinstance(found, _Later):
                answer = partial(self._answer, number, found.work)
                threading.Thread(target=answer, name=f"cbatch-{op}", daemon=True).start()
            elif number is not None:
                self._tell(number, found)
        except Exception as error:
            self._tell(number, None, error)
        return False

    def _answer(self, number: object, work: Callable[[], object]) -> None:
        try:
            value = work()
        except Exception as error:
            self._tell(number, None, error)
        else:
            if number is not None:
                self._tell(number, value)

    def _tell(self, number: object, value: object, error: Exception | None = None) -> None:
        if error is not None and not isinstance(error, CBatchError):
            cause, error = error, RequestFailedError(f"a bug of cbatch: {words_of(error)}")
            error.__cause__ = cause
        if number is None and error is not None:
            self._outbox.fail(error)
        elif error is not None:
            self._outbox.put("replies", (number, None, error_as_json(error)))
        else:
            self._outbox.put("replies", (number, value))

    def _end(self, cause: EngineClosedError | None) -> None:
        """Tell why the engine has stopped, where nobody has closed it; requests in flight get no results then."""
        if cause is not None:
            self._has_failed = True
            self._outbox.put("died", error_as_json(cause))
            self._outbox.close()  # behind the results of requests that have ended
            self._leave()

    def _admit(self, ids: Sequence[str]) -> None:
        """Tell which requests are computed from now on, before that can end the process. Owner thread."""
        self._outbox.put_now("admitted", [*dict.fromkeys(map(request_id, ids))])

    # ---- requests ----

    def _run(self, message: Message) -> object:
        """Queue requests: all or none. Return their ids."""
        _check_keys(message, "items", "options", "stream", "seconds", "age_s", "fed", "may_wait")
        items = message.get("items")
        if not isinstance(items, list) or not items:
            raise ConfigError(f"items is a list of prompts, not {shown(items)}")
        prompts = [_at(i, item) for i, item in enumerate(items)]
        ids = self._ids.of_batch([prompt.id for prompt in prompts], self._runtime.ids)
        batch = _Batch(self, is_streamed=_flag(message, "stream"))
        submission = Submission(
            prompts,
            ids,
            [str(item.get("name") or "") for item in items],
            self._options.of(message.get("options")),
            time.perf_counter() + _number(message, "seconds", math.inf),
            batch,
            age_s=_number(message, "age_s", 0.0),
            is_fed=_flag(message, "fed"),
            may_wait=_flag(message, "may_wait", default=True),
        )
        self._batches.update(dict.fromkeys(ids, batch))
        with self._forgotten_if_it_raises(ids):
            queue = self._runtime.add(submission)

        def finish() -> object:
            with self._forgotten_if_it_raises(ids):
                queue()
            return ids

        return _Later(finish) if self._runtime.has_limit else finish()

    @contextmanager
    def _forgotten_if_it_raises(self, ids: Sequence[str]) -> Iterator[None]:
        try:
            yield
        except BaseException:
            for id in ids:
                self._batches.pop(id, None)
            raise

    def _extend(self, message: Message) -> object:
        """Queue a request that continues a result; return its id."""
        batch = _Batch(self, is_streamed=_flag(message, "stream"))
        n_tokens = check_int("n_tokens", message.get("n_tokens"), 1, MAX_INT)
        try:
            result = extension_of_json(message, self._runtime.request_of)
        except (KeyError, TypeError, ValueError) as error:
            if isinstance(error, CBatchError):
                raise
            raise ConfigError(f"extend needs a result as it came: {words_of(error)}") from None
        check_own((result.id,), self._runtime.ids)
        self._batches[result.id] = batch
        return self._runtime.extend(result, n_tokens, batch)

    def _stream(self, message: Message) -> object:
        """Have chunks come from now on."""
        for id in _ids(message):
            if (batch := self._batches.get(id)) is not None:
                batch.is_streamed = True
        return None

    def _cancel(self, message: Message) -> object:
        """End requests; with `waiting`, only those that never had a slot. Return how many were in flight."""
        ids, orders = _ids(message), self._runtime.orders
        return orders.cancel(ids, is_for_waiting=_flag(message, "waiting"))

    def _cancel_all(self, _: Message) -> object:
        return self._runtime.cancel_all()

    def _take_back(self, message: Message) -> object:
        """Take out requests that never had a slot, without a result; return their ids."""
        ids = self._runtime.orders.take_back(_ids(message))
        for id in ids:
            self._batches.pop(id, None)
        return ids

    def _pause(self, message: Message) -> object:
        return self._runtime.orders.pause(as_id(message.get("id")))

    def _resume(self, message: Message) -> object:
        n_tokens = message.get("n_tokens")
        if n_tokens is not None:
            n_tokens = check_int("n_tokens", n_tokens, 1, MAX_INT)
        return self._runtime.orders.resume(as_id(message.get("id")), n_tokens)

    # ---- questions ----

    def _compare_rows(self, message: Message) -> object:
        """Return the comparisons of requests' next rows, of all where `ids` is left out."""
        ids = None if message.get("ids") is None else _ids(message)
        return [*map(comparison_as_json, self._runtime.orders.compare_rows(ids))]

    def _count(self, message: Message) -> object:
        """Return how many tokens a prompt has."""
        options = self._options.of(message.get("options"))
        return self._runtime.n_tokens_of(prompt_of_json(message.get("item")), options)

    def _tokens(self, message: Message) -> object:
        """Return a prompt's tokens."""
        options = self._options.of(message.get("options"))
        return [*self._runtime.tokens_of(prompt_of_json(message.get("item")), options)]

    def _text(self, message: Message) -> object:
        """Return a chat as the model sees it."""
        options = self._options.of(message.get("options"))
        return self._runtime.text_of(prompt_of_json(message.get("item")), options)

    def _pieces(self, message: Message) -> object:
        """Return the bytes of tokens, each as Latin-1 text."""
        tokens = token_ids("tokens", message.get("tokens"))
        return [piece.decode("latin-1") for piece in self._runtime.pieces_of(tokens)]

    def _model_facts(self, _: Message) -> object:
        return asdict(self._runtime.model_facts())

    def _check(self, message: Message) -> object:
        """Return how many tokens a prompt has; raise what it would end with before it runs."""
        options = self._options.of(message.get("options"))
        prompt = prompt_of_json(message.get("item"))
        return _Later(partial(self._runtime.checked, prompt, options))

    def _check_options(self, message: Message) -> object:
        self._runtime.check_options(self._options.of(message.get("options")))
        return None

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
        return _Later(self._runtime.exactness)

    def _fingerprint(self, _: Message) -> object:
        return self._runtime.fingerprint()

    def _credit(self, message: Message) -> object:
        """Allow the writing of so many more bytes."""
        self._outbox.grant(check_int("bytes", message.get("bytes"), 1, MAX_INT))
        return None

    _commands: Mapping[str, Callable[[Host, Message], object]] = {
        "run": _run,
        "extend": _extend,
        "stream": _stream,
        "cancel": _cancel,
        "cancel_all": _cancel_all,
        "take_back": _take_back,
        "pause": _pause,
        "resume": _resume,
        "compare_rows": _compare_rows,
        "count": _count,
        "tokens": _tokens,
        "text": _text,
        "pieces": _pieces,
        "model_facts": _model_facts,
        "check": _check,
        "check_options": _check_options,
        "stats": _stats,
        "reset_stats": _reset_stats,
        "record_steps": _record_steps,
        "exactness": _exactness,
        "fingerprint": _fingerprint,
        "credit": _credit,
    }


@dataclass(frozen=True, slots=True)
class _Later:
    """The rest of a command that may take seconds, or wait for room: those behind it do not wait."""

    work: Callable[[], object]


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

    def __init__(self) -> None:
        self._said: object = None
        self._options = options_of_json(None)

    def of(self, said: object) -> RunOptions:
        if said != self._said:
            self._options = options_of_json(said)
            self._said = said
        return self._options


def _at(i: int, item: object) -> BatchPrompt:
    try:
        return prompt_of_json(item)
    except ConfigError as error:
        raise ConfigError(f"items[{i}]: {error}") from None


def _check_keys(message: Message, *known: str) -> None:
    for key in message:
        if key not in ("op", "n", *known):
            raise ConfigError(f"{message['op']} has {shown(key)}; it may have {', '.join(known)}")


def _ids(message: Message) -> list[str]:
    ids = message.get("ids")
    if not isinstance(ids, list):
        raise ConfigError(f"ids is a list of texts, not {shown(ids)}")
    return [as_id(id) for id in ids]


def _flag(message: Message, name: str, *, default: bool = False) -> bool:
    return check_flag(name, message.get(name, default))


def _number(message: Message, name: str, default: float) -> float:
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
    return value if isinstance(value, int | float | str | None) else str(value)
