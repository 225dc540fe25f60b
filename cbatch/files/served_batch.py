"""A batch file of OpenAI's requests whose bodies another room answers: checked, run, stopped and continued.

The other room says what a body asks and how an answer looks, so that a batch answers as that room does elsewhere. All
that makes a run durable is here: lines in bounded memory, the journal, the order of items.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import msgspec
from msgspec import Raw, Struct

from cbatch.chat.vector_calls import CALLS, EmbedCall
from cbatch.engine import run_options_of
from cbatch.errors import ConfigError, EngineClosedError
from cbatch.files.input.item import InputLineError, ItemError, Seen, bytes_of, item_key, rival_key
from cbatch.files.input.json_requests import OpenAIReader
from cbatch.files.input.raw_streams import is_packed
from cbatch.files.input.text_files import InputFile
from cbatch.files.judged_run import JudgingEngine
from cbatch.files.outcome import Stopper
from cbatch.files.output import durable
from cbatch.files.output.encoders import Encoder
from cbatch.files.output.journal import Journal
from cbatch.files.output.json_answers import line_of
from cbatch.files.output.manifest import LostError
from cbatch.files.output.opening import OutputSpec
from cbatch.files.settings import FileOptions
from cbatch.files.units import cut
from cbatch.files.vector_work import VectorEngine
from cbatch.files.work import OpenGate, RunContext, Work
from cbatch.support.checks import MAX_KEY_LENGTH, json_weight, n_values_in

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from io import BufferedReader
    from pathlib import Path

    from cbatch.engine import Engine
    from cbatch.files.input.item import Item
    from cbatch.files.input.json_requests import RequestEcho
    from cbatch.files.input.text_files import LongLine
    from cbatch.files.outcome import RunSummary
    from cbatch.files.work import RunGate
    from cbatch.messages import BatchPrompt
    from cbatch.response import BatchResult

_N_COMMIT = 256
"""Lines that never ran which are written together: our choice."""

_MANIFEST = {"format": "served"}


class FilesChangedError(ConfigError):
    """The files of a batch were changed or removed by somebody else."""


CHANGED = (FilesChangedError, LostError)
"""Errors that say so."""

_STAYS = (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError)
"""Errors of the system that do not pass by themselves; others do, such as a lack of file handles."""


@contextmanager
def _told_apart() -> Iterator[None]:
    """Raise the errors of files as `FilesChangedError`, or as the error of the system where that may pass."""
    try:
        yield
    except LostError:
        raise
    except ConfigError as error:
        cause = error.__cause__
        if isinstance(cause, OSError | sqlite3.OperationalError) and not isinstance(cause, _STAYS):
            raise cause from None
        raise FilesChangedError(str(error)) from error


@dataclass(frozen=True, slots=True)
class ServedReply:
    """What a request is answered."""

    status: int
    body: Mapping[str, Any]


class Question(Protocol):
    """What a body asks."""

    @property
    def prompt(self) -> BatchPrompt:
        """The prompt, with its options."""

    def reply(self, result: BatchResult) -> ServedReply:
        """Return the answer of a result, also of one with an error."""


Check: TypeAlias = Callable[[], object]
"""Called for each line, also a blank one; what it raises ends the work, which a later call does from there or anew."""

Ask: TypeAlias = Callable[[dict[str, Any]], Question | ServedReply]
"""Returns what a body asks, or the answer that refuses it; must not raise."""


@dataclass(frozen=True, slots=True)
class LineProblem:
    """Why a line is not a request of the batch."""

    line: int
    error: ItemError


@dataclass(frozen=True, slots=True)
class Checked:
    """What a file of requests holds.

    Args:
        n_items: lines that are not blank, as far as the file was read.
        model: the name that all lines give; "" where they give none.
        problems: of lines that are not requests.
        n_last_read: the line after which no more was read, because there were more problems; None where all was read.
    """

    n_items: int
    model: str
    problems: Sequence[LineProblem]
    n_last_read: int | None


@dataclass(frozen=True, slots=True)
class BatchPlaces:
    """The files of a batch: requests, answers, and answers that are errors."""

    requests: Path
    answers: Path
    errors: Path


def check_requests(
    path: Path, url: str, *, n_problems: int, max_line_bytes: int, check: Check = bool
) -> Checked:
    """Return what a file of requests holds, without looking into bodies.

    Args:
        url: that every line must have.
        n_problems: most problems to return, after which the rest of the file is not read.

    Raises:
        ConfigError: the file is none of lines, or not there.
        OSError: it cannot be read now.
    """
    reader = _ServedReader(url, lambda body: _NOT_ASKED)
    problems: list[LineProblem] = []
    n_items, n_last_read = 0, None
    opened = _RequestLines(path, reader, max_line_bytes, check, is_new=True)
    with closing(Seen()) as seen, closing(opened) as lines:
        for item in lines:
            n_items += 1
            error = None if isinstance(item.extra, ServedReply) else item.error
            if seen.add(item_key(item), item.number, rival_key(item)) is not None:
                error = error or _TWICE
            if len(item.id) > MAX_KEY_LENGTH:
                error = error or _LONG_ID
            if error is not None and len(problems) == n_problems:
                n_last_read = _line_number(item)
                break
            if error is not None:
                problems.append(LineProblem(_line_number(item), _for_clients(error)))
    return Checked(n_items, reader.model, problems, n_last_read)


_N_TOLD = 200
"""Characters of a problem's message and name. Our choice: a list of batches tells 100 problems of each batch."""

_NOT_ASKED = ServedReply(0, {})
_TWICE = ItemError(
    "duplicate_custom_id", "an earlier line has this custom_id: each must be unique", "custom_id"
)
_LONG_ID = ItemError(
    "invalid_custom_id",
    f"this custom_id is too long: at most {MAX_KEY_LENGTH:,} characters are allowed",
    "custom_id",
)


def _for_clients(error: ItemError) -> ItemError:
    """Return an error as a batch tells it: no way out that only the server's operator has, long values cut."""
    message = error.message
    if error.code == "line_too_long":
        message = message.partition(":")[0]
    return replace(
        error, message=cut(message, _N_TOLD), param=error.param and cut(error.param, _N_TOLD)
    )


def _line_number(item: Item) -> int:
    return int(item.place.rpartition(" ")[2])


class _ServedReader(OpenAIReader):
    """Reads requests; an item's `extra` is what its body asks, or the answer that refuses it."""

    def __init__(self, url: str, ask: Ask, *, has_one_model: bool = True) -> None:
        """Read nothing yet; `url` is that of every line."""
        self.urls = (url,)
        super().__init__(url)
        self._ask, self._has_one_model = ask, has_one_model
        self._asked: Question | ServedReply | None = None

    @property
    def model(self) -> str:
        """The name that the lines so far give the model."""
        return self._model or ""

    def _check_url(self, url: object) -> None:
        if url != self._url:
            message = f"url {url!r} differs from that of the batch: {self._url}"
            raise InputLineError("url_mismatch", message, "url")

    def _model_of(self, body: dict[str, Any]) -> str:
        return super()._model_of(body) if self._has_one_model else ""

    def _item(self, number: int, place: str, line: bytes | LongLine) -> Item:
        self._asked = None
        item = super()._item(number, place, line)
        if self._asked is None:
            return item
        weight = json_weight(len(line), n_values_in(line)) if isinstance(line, bytes) else 0
        return replace(item, extra=self._asked, weight=weight)

    def _prompt(self, call: RequestEcho, body: dict[str, Any]) -> BatchPrompt:
        if call.model:
            body["model"] = call.model
        self._asked = asked = self._ask(body)
        if isinstance(asked, ServedReply):
            raise InputLineError("invalid_request", "the body was refused")
        return asked.prompt


class _ServedEncoder(Encoder):
    """Writes OpenAI's lines; each has the reply of the question that its line asked."""

    def result(
        self, item: Item, result: BatchResult, *, digest: bytes, created: int, model: str
    ) -> bytes:
        question: Any = item.extra
        reply: ServedReply = question.reply(result)
        return line_of(item, reply.status, reply.body, digest.hex())

    def error(self, item: Item, error: ItemError) -> bytes:
        """Return the line of an item that could not run: it was refused, or never asked."""
        if isinstance(item.extra, ServedReply):
            return line_of(item, item.extra.status, item.extra.body, _digest(item).hex())
        said = {"code": error.code, "message": error.message}
        return line_of(item, None, said, _digest(item).hex())


class _CheckedFile(InputFile):
    def __init__(self, path: str, max_line_bytes: int, check: Check, *, is_new: bool) -> None:
        super().__init__(path, max_line_bytes)
        self._check, self._is_new = check, is_new

    def _content(self, raw: BufferedReader) -> BufferedReader:
        """ConfigError where a new file is compressed: a few bytes may stand for gigabytes, or need them."""
        if self._is_new and is_packed(raw):
            raise ConfigError(f"{self.name}: is compressed: upload the lines as they are")
        return super()._content(raw)

    def _readline(self, n_most: int) -> bytes:
        if line := super()._readline(n_most):
            self._check()
        return line


class _LeftError(Exception):
    """Raised by a check of lines if no more lines are wanted."""


class _RequestLines:
    n_items = None
    """Not needed here: the lines were counted before."""

    def __init__(
        self,
        path: Path,
        reader: OpenAIReader,
        max_line_bytes: int,
        check: Check = bool,
        *,
        is_new: bool = False,
    ) -> None:
        """Read a file; one that `is_new` must not be compressed."""
        self._file = _CheckedFile(str(path), max_line_bytes, check, is_new=is_new)
        if path.exists() and not self._file.is_regular:  # a pipe's end may never come
            raise FilesChangedError(f"{path}: is not a regular file")
        self._items = reader.items(self._file, 0)

    def __iter__(self) -> Iterator[Item]:
        return self

    def __next__(self) -> Item:
        with _told_apart(), suppress(_LeftError):
            return next(self._items)
        raise StopIteration

    def is_dry(self) -> bool:
        return False

    def about(self) -> None:
        """Estimate nothing."""

    def close(self) -> None:
        self._file.close()


def _digest(item: Item) -> bytes:
    """Return 16 bytes: the file of a batch never changes, so its ids tell its questions apart."""
    return blake2b(bytes_of(item.id), digest_size=16).digest()


@dataclass(eq=False)
class ServedBatch:
    """The run of one batch over an engine that others use too. `stop`, `cancel` and the counts are for any thread.

    Args:
        places: of the files; a run continues what another has written there.
        url: that every line has.
        ask: says what bodies ask.
        gate: says when an item may go to the engine.
        prefix: of the items' ids in the engine.
        n_answer_mib: most mebibytes of memory of an answer.
        has_one_model: whether all lines name the same model.
        n_done: answers on disk.
        n_failed: errors on disk.
    """

    engine: Engine
    places: BatchPlaces
    url: str
    ask: Ask
    gate: RunGate
    prefix: str
    max_line_bytes: int
    n_answer_mib: float
    has_one_model: bool = True
    n_done: int = 0
    n_failed: int = 0
    _stop: Stopper = field(default_factory=lambda: Stopper(lambda words: None), init=False)
    _work: Work | None = field(default=None, init=False)

    def run(
        self, max_time_s: float | None, on_ended: Callable[[BatchResult | None], object]
    ) -> RunSummary:
        """Run every line without an answer until all have one, the time is over, or the run is stopped.

        Args:
            max_time_s: seconds for the run; lines that are not answered then are left.
            on_ended: called for each line that ended; None for one that was refused.

        Raises:
            EngineError, RequestCancelledError: the engine failed, was closed, or its `cancel_all` was called.
            OutputError: the disk is full; what was written stays.
            FilesChangedError, LostError: the files were changed by somebody else; see `CHANGED`.
            OSError, sqlite3.OperationalError: they cannot be used now.
        """
        asked, options = FileOptions(max_time_s=max_time_s), run_options_of(self.engine, None)
        with self._lines(self.ask, self._check_stop) as lines, self._journal() as journal:
            gate = OpenGate() if self.url in CALLS else self.gate  # texts need no slots
            engine = self._runner()
            encoder, n_mib = _ServedEncoder(), self.n_answer_mib
            context = RunContext(journal, encoder, _digest, options, "", self.prefix, gate, n_mib)
            self._work = work = Work(lines, context, engine, asked, self._stop)

            def note(item: Item, result: BatchResult | None) -> None:
                self._count(journal)
                on_ended(result)

            self._count(journal)
            try:
                return work.run(note)
            finally:
                self._count(journal)

    def _runner(self) -> Engine | VectorEngine | JudgingEngine:
        kind = CALLS.get(self.url)
        if kind is None:
            return self.engine
        if kind is not EmbedCall and self.engine.judges:
            return JudgingEngine(self.engine, self.gate)
        return VectorEngine(self.engine, is_patient=True)

    def _check_stop(self) -> None:
        if self._stop.is_asked:
            raise _LeftError

    def stop(self) -> None:
        """Begin no more lines; lines that run are finished. Also before `run`, and twice."""
        if not self._stop.is_asked:
            self._stop.press()

    def cancel(self) -> None:
        """Begin no more lines, and leave the lines that run."""
        self.stop()
        if self._work is not None:
            with suppress(EngineClosedError):  # which has ended them
                self._work.cancel()

    def recount(self) -> None:
        """Count what an earlier run has written. Raises as `run`."""
        with self._journal() as journal:
            self._count(journal)

    def salvage(self, check: Check = bool) -> None:
        """Count what is there for the last time; without a manifest that fits, whole lines are kept.

        Raises:
            OutputError, OSError, sqlite3.OperationalError: the files cannot be used now.
        """
        try:
            self.recount()
        except CHANGED:
            places = self.places.answers, self.places.errors
            self.n_done, self.n_failed = (_keep_whole_lines(path, check) for path in places)

    def conclude(self, code: str, message: str, check: Check = bool) -> None:
        """Write for each line without an answer that it never ran. Raises as `run`."""
        error = ItemError(code, message)
        with self._lines(lambda body: _NOT_ASKED, check) as lines, self._journal() as journal:
            for n, item in enumerate(lines, 1):
                rival = rival_key(item)
                claim = journal.claim(item_key(item), _digest(item), item.number, rival)
                if claim in ("new", "duplicate"):
                    line = _ServedEncoder().error(replace(item, extra=None), error)
                    journal.add(item.number, line, is_error=True)
                if n % _N_COMMIT == 0:
                    journal.commit()
            journal.commit()
            self._count(journal)

    def _count(self, journal: Journal) -> None:
        self.n_done, self.n_failed = journal.n_done, journal.n_failed

    def _lines(self, ask: Ask, check: Check = bool) -> closing[_RequestLines]:
        reader = _ServedReader(self.url, ask, has_one_model=self.has_one_model)
        return closing(_RequestLines(self.places.requests, reader, self.max_line_bytes, check))

    def _journal(self) -> Journal:
        with _told_apart():
            return Journal(OutputSpec(self.places.answers, _MANIFEST, self.places.errors))


class _Named(Struct):
    """What is read of a line of answers or errors: all else may be long, and is passed over."""

    custom_id: Raw


_id_of = msgspec.json.Decoder(_Named).decode


def _keep_whole_lines(path: Path, check: Check) -> int:
    """Remove what is not a line of ours from a file of answers or errors; return the lines that stay."""
    n_lines = 0
    if path.is_file():
        with path.open("rb") as lines, durable.whole(path) as part, part.open("wb") as kept:
            for line in filter(_is_ours, lines):
                check()
                kept.write(line)
                n_lines += 1
    return n_lines


def _is_ours(line: bytes) -> bool:
    with suppress(msgspec.MsgspecError):
        _id_of(line)
        return line.endswith(b"\n")
    return False
