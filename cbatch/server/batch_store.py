"""Files and batches on disk: a folder with an index in SQLite, and the content of each file beside it.

Ids come from here and are looked up in the index: no text of a client becomes a path.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import secrets
import shutil
import sqlite3
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import platformdirs

from cbatch.errors import ConfigError
from cbatch.folders import sync_folder
from cbatch.server.http_errors import NO_RETRY, HttpProblemError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Kind = Literal["batch", "msgbatch"]
"""What ids of batches begin with: those over a file, in OpenAI's format, and those of messages, in Anthropic's."""

MESSAGES = "/v1/messages"
"""The endpoint of batches of messages."""

_PRIVATE = 0o700
_SCHEMA = """
    CREATE TABLE IF NOT EXISTS files (
        place INTEGER PRIMARY KEY AUTOINCREMENT,  -- 1, 2, … in order of arrival
        id TEXT UNIQUE NOT NULL,
        name TEXT NOT NULL,
        purpose TEXT NOT NULL,
        bytes INTEGER NOT NULL,
        created_at INTEGER NOT NULL,
        expires_at INTEGER
    );
    CREATE TABLE IF NOT EXISTS batches (
        place INTEGER PRIMARY KEY AUTOINCREMENT,
        id TEXT UNIQUE NOT NULL,
        is_ended INTEGER NOT NULL,
        fields TEXT NOT NULL                      -- of `Batch`, as JSON
    );
    CREATE INDEX IF NOT EXISTS unfinished ON batches (is_ended) WHERE NOT is_ended;
"""
_FILE = "id, name, purpose, bytes, created_at, expires_at"

BATCH, BATCH_OUTPUT = "batch", "batch_output"
"""Purposes of files."""

ENDED = ("completed", "failed", "expired", "cancelled")
"""Statuses of batches that change no more."""


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file, by the names of OpenAI's API."""

    id: str
    name: str
    purpose: str
    bytes: int
    created_at: int
    expires_at: int | None = None

    def as_json(self) -> dict[str, Any]:
        """Return the file object."""
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.bytes,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            "filename": self.name,
            "purpose": self.purpose,
            "status": "processed",
            "status_details": None,
        }


@dataclass(slots=True)
class Batch:
    """A batch, by the names of OpenAI's API; what begins with `kept_` is the server's own."""

    id: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    metadata: dict[str, str] | None = None
    status: str = "validating"
    model: str | None = None
    errors: list[dict[str, Any]] = field(default_factory=list)
    usage: dict[str, Any] | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    n_total: int = 0
    n_completed: int = 0
    n_failed: int = 0
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    kept_ending: str = ""
    """The status that a batch will have whose files are being made."""
    kept_seconds: int | None = None
    """Seconds after which its files expire."""
    kept_engine: str = ""
    """What its answers depend on besides their requests, once there may be some."""
    kept_n_never_ran: int = 0
    """Requests among the failed that never ran, once the batch has ended."""

    @property
    def has_ended(self) -> bool:
        """Whether nothing will change any more."""
        return self.status in ENDED

    @property
    def is_of_messages(self) -> bool:
        """Whether it was asked for, and is told, in Anthropic's format."""
        return self.endpoint == MESSAGES

    def as_json(self) -> dict[str, Any]:
        """Return the batch object."""
        fields = {
            name: value for name, value in asdict(self).items() if not name.startswith("kept_")
        }
        counts = {name: fields.pop(f"n_{name}") for name in ("total", "completed", "failed")}
        fields["errors"] = {"object": "list", "data": self.errors} if self.errors else None
        return {**fields, "object": "batch", "request_counts": counts}


def default_folder(port: int, socket_path: Path | None) -> Path:
    """Return the folder of a server among the user's own state: each address has its own, which its clients know."""
    name = f"port-{port}"
    if socket_path is not None:
        path = os.fsencode(socket_path.absolute())
        name = f"socket-{hashlib.sha256(path).hexdigest()[:16]}"
    return Path(platformdirs.user_state_dir("cbatch", appauthor=False), "serve", name)


class BatchStore:
    """The files and batches of one server, which keeps others out. Every method from any thread."""

    def __init__(
        self, folder: Path, n_bytes_max: int, clock: Callable[[], float] = time.time
    ) -> None:
        """Open a folder, or make it; remove what a killed server has left behind.

        Args:
            folder: private to the user where it is new; so are all folders below it.
            n_bytes_max: of all files together; what batches write may exceed it, and then no more files are taken.
            clock: seconds since 1970.

        Raises:
            ConfigError: another server has it open, or it cannot be written.
        """
        self._folder, self._n_bytes_max, self._clock = folder, n_bytes_max, clock
        self._lock = threading.RLock()
        self._n_arriving, self._counting = 0, threading.Lock()
        try:
            for place in (folder, self._files, self._work):
                place.mkdir(_PRIVATE, parents=True, exist_ok=True)
            self._db = self._opened()
            self._clean()
        except sqlite3.OperationalError as error:
            why = "another server uses it" if "locked" in str(error) else f"cannot be used: {error}"
            raise ConfigError(f"files_dir={folder}: {why}") from error
        except (OSError, sqlite3.DatabaseError) as error:
            raise ConfigError(f"files_dir={folder}: cannot be used: {error}") from error

    def _opened(self) -> sqlite3.Connection:
        path = self._folder / "index.sqlite3"
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        db = sqlite3.connect(path, timeout=0, isolation_level=None, check_same_thread=False)
        try:
            db.execute("PRAGMA locking_mode = EXCLUSIVE")
            db.execute("PRAGMA synchronous = FULL")
            db.execute("PRAGMA journal_mode = WAL")
            db.execute("BEGIN EXCLUSIVE")
            db.execute("COMMIT")
            db.executescript(_SCHEMA)
        except BaseException:
            db.close()
            raise
        return db

    def close(self) -> None:
        """Let other servers in. Twice is harmless."""
        with self._lock:
            self._db.close()

    @property
    def _files(self) -> Path:
        return self._folder / "content"

    @property
    def _work(self) -> Path:
        return self._folder / "work"

    def _clean(self) -> None:
        """Remove files that have expired, contents without a file, and working folders of batches that have ended."""
        self._sweep()
        known = {id for (id,) in self._db.execute("SELECT id FROM files")}
        for path in self._files.iterdir():
            if path.name not in known:
                path.unlink()
        unfinished = {batch.id for batch in self.unfinished()}
        for path in self._work.iterdir():
            if path.name not in unfinished:
                shutil.rmtree(path)

    # ---- files ----

    def path_of(self, file: StoredFile) -> Path:
        """Return the place of a file's content."""
        return self._files / file.id

    def file(self, id: str) -> StoredFile:
        """Return a file. Raises a `HttpProblemError` where there is none."""
        row = self._row(f"SELECT {_FILE} FROM files WHERE id = ?", id)
        if row is None or self._has_expired(found := StoredFile(*row)):
            raise not_there("File", id)
        return found

    def files(
        self, after: str | None, limit: int, *, is_newest_first: bool, purpose: str | None
    ) -> tuple[list[StoredFile], bool]:
        """Return files behind the one with the id `after`, and whether there are more."""
        place = self._place("files", "File", after)
        order, compare = ("DESC", "<") if is_newest_first else ("ASC", ">")
        now = int(self._clock())
        rows = self._rows(
            f"SELECT {_FILE} FROM files WHERE (expires_at IS NULL OR expires_at > ?) "
            f"AND (? IS NULL OR purpose = ?) AND (? IS NULL OR place {compare} ?) "
            f"ORDER BY place {order} LIMIT ?",
            *(now, purpose, purpose, place, place, limit + 1),
        )
        found = [StoredFile(*row) for row in rows]
        return found[:limit], len(found) > limit

    @contextmanager
    def arriving(self) -> Iterator[Arriving]:
        """Lend a place for a file that is being written; unless it is kept, it is removed."""
        arriving = Arriving(self, self._files / _new_id("file"))
        try:
            yield arriving
        finally:
            arriving.close()

    def reserve(self, n_bytes: int) -> None:
        """Count bytes that are about to be written. Raises a `HttpProblemError` where there is no room."""
        with self._lock:
            self._sweep()
            (used,) = self._row("SELECT coalesce(sum(bytes), 0) FROM files") or (0,)
            if used + self._n_arriving + n_bytes > self._n_bytes_max:
                message = f"the files here have {used:,} bytes, of at most {self._n_bytes_max:,}"
                raise no_room(f"{message}: delete some")
            self.release(-n_bytes)

    def release(self, n_bytes: int) -> None:
        """Count bytes no more that were about to be written: they were, or will not be. Does not wait."""
        with self._counting:
            self._n_arriving -= n_bytes

    def put_file(
        self, id: str, name: str, purpose: str, n_bytes: int, seconds: int | None
    ) -> StoredFile:
        """Enter a file whose content is there; one that is entered already is returned as it is."""
        now = int(self._clock())
        expires_at = None if seconds is None else now + seconds
        with self._lock:
            self._db.execute(
                f"INSERT OR IGNORE INTO files ({_FILE}) VALUES (?, ?, ?, ?, ?, ?)",
                (id, name, purpose, n_bytes, now, expires_at),
            )
        return self.file(id)

    def adopt_file(self, source: Path, name: str, seconds: int | None, id: str) -> StoredFile:
        """Enter the answers of a batch as a file of this id; the same call again changes nothing."""
        place = self._files / id
        _link(source, place)
        sync_folder(self._files)
        return self.put_file(id, name, BATCH_OUTPUT, place.stat().st_size, seconds)

    def delete_file(self, id: str) -> None:
        """Remove a file. Raises a `HttpProblemError` where there is none."""
        file = self.file(id)
        with self._lock:
            self._db.execute("DELETE FROM files WHERE id = ?", (id,))
        self.path_of(file).unlink(missing_ok=True)

    def _has_expired(self, file: StoredFile) -> bool:
        return file.expires_at is not None and file.expires_at <= self._clock()

    def _sweep(self) -> None:
        """Remove files that have expired."""
        query = f"SELECT {_FILE} FROM files WHERE expires_at <= ?"
        for row in self._rows(query, int(self._clock())):
            file = StoredFile(*row)
            self._db.execute("DELETE FROM files WHERE id = ?", (file.id,))
            self.path_of(file).unlink(missing_ok=True)

    # ---- batches ----

    def new_batch(self, file: StoredFile, window_s: int, **fields: Any) -> Batch:
        """Enter a batch over a file, whose content stays for it though the file be deleted."""
        return self._entered("batch", self.path_of(file), window_s, input_file_id=file.id, **fields)

    def new_message_batch(self, requests: Path, n_total: int, window: str, window_s: int) -> Batch:
        """Enter a batch of messages whose requests were checked; their file may be removed then."""
        return self._entered(
            "msgbatch",
            requests,
            window_s,
            input_file_id="",
            endpoint=MESSAGES,
            completion_window=window,
            status="in_progress",
            in_progress_at=int(self._clock()),
            n_total=n_total,
        )

    def _entered(self, kind: Kind, requests: Path, window_s: int, **fields: Any) -> Batch:
        now = int(self._clock())
        id = _new_id(kind, "_")
        batch = Batch(id=id, created_at=now, expires_at=now + window_s, **fields)
        folder = self.folder_of(batch)
        folder.mkdir(_PRIVATE)
        try:
            _link(requests, folder / "requests.jsonl")
            for place in (folder, self._work):
                sync_folder(place)
            with self._lock:
                query = "INSERT INTO batches (id, is_ended, fields) VALUES (?, 0, ?)"
                self._db.execute(query, (batch.id, _as_text(batch)))
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        return batch

    def folder_of(self, batch: Batch) -> Path:
        """Return the place where a batch that has not ended is worked on."""
        return self._work / batch.id

    def save(self, batch: Batch) -> None:
        """Write what has changed of a batch; the working folder of one that has ended is removed."""
        with self._lock:
            query = "UPDATE batches SET is_ended = ?, fields = ? WHERE id = ?"
            self._db.execute(query, (batch.has_ended, _as_text(batch), batch.id))
        if batch.has_ended:
            shutil.rmtree(self.folder_of(batch), ignore_errors=True)

    def batch(self, id: str, kind: Kind = "batch") -> Batch:
        """Return a batch. Raises a `HttpProblemError` where there is none of this kind."""
        row = self._row("SELECT fields FROM batches WHERE id = ?", id)
        if row is None or not id.startswith(f"{kind}_"):
            raise not_there("Batch", id)
        return Batch(**json.loads(row[0]))

    def batches(
        self, after: str | None, limit: int, kind: Kind = "batch", before: str | None = None
    ) -> tuple[list[Batch], bool]:
        """Return batches, the newest first, and whether there are more.

        Args:
            after: the id of the one that they follow.
            limit: most batches.
            kind: of batches.
            before: the id of the one that they precede; those next to it are returned.
        """
        older, newer = (self._place("batches", "Batch", id) for id in (after, before))
        order = "DESC" if newer is None else "ASC"
        rows = self._rows(
            "SELECT fields FROM batches WHERE (? IS NULL OR place < ?) AND (? IS NULL OR place > ?) "
            f"AND id GLOB ? ORDER BY place {order} LIMIT ?",
            *(older, older, newer, newer, f"{kind}_*", limit + 1),
        )
        found = [Batch(**json.loads(fields)) for (fields,) in rows[:limit]]
        return found if newer is None else found[::-1], len(rows) > limit

    def delete_batch(self, batch: Batch) -> None:
        """Remove a batch that has ended, and the files of its answers."""
        for id in filter(None, (batch.output_file_id, batch.error_file_id)):
            with suppress(HttpProblemError):  # a client has deleted it
                self.delete_file(id)
        with self._lock:
            self._db.execute("DELETE FROM batches WHERE id = ?", (batch.id,))

    def unfinished(self) -> list[Batch]:
        """Return the batches that have not ended, the oldest first."""
        rows = self._rows("SELECT fields FROM batches WHERE NOT is_ended ORDER BY place")
        return [Batch(**json.loads(fields)) for (fields,) in rows]

    # ---- the index ----

    def _row(self, query: str, *values: object) -> tuple[Any, ...] | None:
        found = self._rows(query, *values)
        return found[0] if found else None

    def _rows(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        with self._lock:
            return self._db.execute(query, values).fetchall()

    def _place(self, table: str, what: str, id: str | None) -> int | None:
        """Return where the row with an id is; None for None."""
        if id is None:
            return None
        row = self._row(f"SELECT place FROM {table} WHERE id = ?", id)
        if row is None:
            raise not_there(what, id)
        return int(row[0])


class Arriving:
    """A file that is being written."""

    def __init__(self, store: BatchStore, path: Path) -> None:
        self._store, self._path = store, path
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self.n_bytes = 0
        self._is_kept = False

    def write(self, data: bytes) -> None:
        """Write more of it. Raises a `HttpProblemError` where there is no room."""
        self._store.reserve(len(data))
        self.n_bytes += len(data)
        with disk_problems():
            left = memoryview(data)
            while left:
                left = left[os.write(self._fd, left) :]

    def keep(self, name: str, purpose: str, seconds: int | None) -> StoredFile:
        """Enter the file, which is whole."""
        with disk_problems():
            os.fsync(self._fd)
            sync_folder(self._path.parent)
            file = self._store.put_file(self._path.name, name, purpose, self.n_bytes, seconds)
        self._is_kept = True
        return file

    def written(self) -> Path:
        """Return the place of what was written, which is on disk; it is removed at the end."""
        with disk_problems():
            os.fsync(self._fd)
        return self._path

    def close(self) -> None:
        """Remove the file unless it is kept."""
        os.close(self._fd)
        self._store.release(self.n_bytes)
        if not self._is_kept:
            self._path.unlink(missing_ok=True)


def not_there(what: str, id: str) -> HttpProblemError:
    """Return the problem of an id that nobody has."""
    return HttpProblemError(404, f"No such {what} object: {id[:100]}", None, "id")


def no_room(message: str) -> HttpProblemError:
    """Return the problem of a disk, or a quota, that is full."""
    return HttpProblemError(507, message, "insufficient_storage", headers=NO_RETRY)


@contextmanager
def disk_problems() -> Iterator[None]:
    """Tell a client of a disk that is full."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise no_room("the server's disk is full") from error
    except sqlite3.OperationalError as error:
        if "full" not in str(error):
            raise
        raise no_room("the server's disk is full") from error


def _new_id(prefix: str, dash: str = "-") -> str:
    return f"{prefix}{dash}{secrets.token_hex(12)}"


def new_file_id() -> str:
    """Return an id for a file that will be made."""
    return _new_id("file")


def _as_text(batch: Batch) -> str:
    return json.dumps(asdict(batch))


def _link(source: Path, place: Path) -> None:
    """Give a file's content another name; copy it where the file system has no links."""
    with suppress(FileExistsError):
        try:
            os.link(source, place)
        except OSError as error:
            if isinstance(error, FileExistsError | FileNotFoundError):
                raise
            part = place.with_name(f"{place.name}.part")
            shutil.copyfile(source, part)
            part.rename(place)
