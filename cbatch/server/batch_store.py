"""Files and batches on disk: a folder with an index in SQLite, and the content of each file beside it.

Ids are made here and looked up in the index: no text of a client becomes a path. Content without a row gets one,
because the index may be older than the content, or new.
"""

from __future__ import annotations

import errno
import hashlib
import math
import os
import secrets
import shutil
import sqlite3
import stat
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import platformdirs

from cbatch.errors import ConfigError, words_of
from cbatch.server.batch_index import (
    BATCH,
    BATCH_OUTPUT,
    Kind,
    StoredBatch,
    StoredFile,
    batch_of,
    hide_bad_rows,
    open_index,
    storable_now,
)
from cbatch.server.files_folder import FilesFolder, is_full, limit_told
from cbatch.server.http_errors import NO_RETRY, HttpProblemError, draining
from cbatch.support.folders import room_for, sync_folder
from cbatch.support.logs import Log

_log = Log("cbatch.server")

_FILE = "id, name, purpose, bytes, created_at, expires_at"
_BATCH = "id, is_ended, fields"

_IS_SEEN = "(? IS NULL OR owner = ?)"
"""Condition for the rows that a viewer sees: the viewer's own, or all for None. Takes the viewer twice."""

_OBJECTS = {"files": "File", "batches": "Batch"}
"""What a row of each table is called."""

_N_REMOVED = 100
"""Expired files that are removed at a time, with one change of the index. Our choice: 0.2 s on a slow disk."""

_ANSWER = b'{"id": "batch_req_'
"""Prefixes of the names of files of answers."""


def default_folder(port: int, socket_path: Path | None) -> Path:
    """Return the folder of a server among the user's own state: each address has its own, which its clients know."""
    name = f"port-{port}"
    if socket_path is not None:
        path = os.fsencode(socket_path.absolute())
        name = f"socket-{hashlib.sha256(path).hexdigest()[:16]}"
    return Path(platformdirs.user_state_dir("cbatch", appauthor=False), "serve", name)


@dataclass(frozen=True, slots=True)
class Page:
    """A part of a list of batches, the newest first."""

    limit: int
    """Most batches."""
    after: str | None = None
    """Id of the batch that they follow."""
    before: str | None = None
    """Id of the batch that they precede; those next to it are returned."""


class BatchStore:
    """The files and batches of one server, which keeps others out. Every method from any thread."""

    def __init__(
        self, folder: Path, n_bytes_max: int, clock: Callable[[], float] = storable_now
    ) -> None:
        """Open a folder, or make it; remove what a killed server has left behind.

        Args:
            folder: private to the user where it is new; so are all folders below it.
            n_bytes_max: of all files together; what batches write may exceed it, and then no more files are taken.

        Raises:
            ConfigError: another server has it open, cbatch did not make it, or it cannot be written.
        """
        self._n_bytes_max, self._clock = n_bytes_max, clock
        self._lock = threading.RLock()
        self._closed: HttpProblemError | None = None
        """Told to calls that come after the folder was closed; None while it is open."""
        self._n_arriving, self._counting = 0, threading.Lock()
        self._n_stored = 0
        """Bytes of all files that are listed."""
        self._n_worked_on, self._is_counted = 0, False
        """Bytes of requests whose file is gone, and whether nothing has changed since they were counted."""
        self._first_expiry = math.inf
        """No file expires before."""
        try:
            self._folder = FilesFolder(folder)
            with ExitStack() as opened:
                opened.callback(self._folder.close)
                with limit_told(self._folder.index):
                    self._db = open_index(self._folder)
                opened.callback(self._db.close)
                self._folder.watch(self._folder.index)
                self._tidy()
                opened.pop_all()
        except (OSError, sqlite3.DatabaseError) as error:
            is_locked = isinstance(error, sqlite3.OperationalError) and "locked" in str(error)
            why = (
                "another server uses it: give another folder"
                if is_locked
                else f"cannot be used: {room_for(error) or words_of(error)}"
            )
            raise ConfigError(f"files_dir={folder}: {why}") from error

    def close(self, problem: HttpProblemError | None = None) -> None:
        """Let other servers in; calls that still come get `problem`. Twice is harmless."""
        with self._lock:
            self._closed = self._closed or problem or draining()
            self._db.close()
            self._folder.close()

    @property
    def notes(self) -> Sequence[str]:
        """Problems of the folder, found when it was opened."""
        return self._folder.notes

    def _tidy(self) -> None:
        """List contents that have no row; remove some expired files and the work of ended batches."""
        contents = self._folder.contents()
        hide_bad_rows(self._db, self._folder, {id: s.st_size for id, s in contents.items()})
        self._n_stored = self._n_bytes_of("shown_files")
        self._first_expiry = self._find_first_expiry()
        unfinished = self.unfinished()
        known = {id for (id,) in self._rows("SELECT id FROM files")}
        known.update(str(id) for b in unfinished for id in (b.output_file_id, b.error_file_id))
        self._enter({id: s for id, s in contents.items() if id not in known})
        self._sweep()
        batches = {id for (id,) in self._rows("SELECT id FROM batches")}
        ended = {id for (id,) in self._rows("SELECT id FROM shown_batches WHERE is_ended")}
        found = self._folder.worked_on()
        for id in found & ended:
            self._folder.remove_work(id)
        if lost := [self._folder.work / id for id in found - batches]:
            with self._told("some batches missing from the index stay in work/"):
                self._folder.set_aside("batches missing from the index", *lost)

    def _enter(self, contents: Mapping[str, os.stat_result]) -> None:
        """Give contents rows, the oldest first."""
        if not contents:
            return
        self._folder.note("files missing from the index are listed again by their ids", contents)
        with self._told("some of them are not listed"):
            for id, found in sorted(contents.items(), key=lambda each: each[1].st_mtime):
                with (self._folder.content / id).open("rb") as file:
                    is_output = file.read(len(_ANSWER)) == _ANSWER
                purpose = BATCH_OUTPUT if is_output else BATCH
                at = max(0, int(found.st_mtime))
                self._insert_file(id, f"{id}.jsonl", purpose, found.st_size, at, None, "")

    @contextmanager
    def _told(self, what: str) -> Iterator[None]:
        """Note it if the block fails as the server starts."""
        try:
            yield
        except (OSError, sqlite3.OperationalError) as error:
            self._folder.note(f"{what}: {error}")

    # ---- files ----

    def path_of(self, file: StoredFile) -> Path:
        """Return the place of a file's content."""
        return self._folder.content / file.id

    def content_of(self, file: StoredFile) -> StoredContent:
        """Return a file's content. Raises a `HttpProblemError` if the file or the folder was removed meanwhile."""
        self._opened(file).close()
        return StoredContent(partial(self._opened, file))

    def _opened(self, file: StoredFile) -> BinaryIO:
        with disk_problems():
            try:
                return open(self.path_of(file), "rb", opener=_regular)
            except FileNotFoundError:
                self._folder.check()
        raise not_there("File", file.id)

    def file(self, id: str, viewer: str | None) -> StoredFile:
        """Return a file. Raises a `HttpProblemError` if the viewer has no file with this id."""
        found = StoredFile(*self._seen("files", _FILE, id, viewer))
        if found.expires_at is not None and found.expires_at <= self._clock():
            raise not_there("File", id)
        return found

    def files(
        self,
        viewer: str,
        after: str | None,
        limit: int,
        *,
        is_newest_first: bool,
        purpose: str | None,
    ) -> tuple[list[StoredFile], bool]:
        """Return a viewer's files that follow the file `after`, and whether there are more."""
        place = self._place("files", after, viewer)
        order, compare = ("DESC", "<") if is_newest_first else ("ASC", ">")
        now = int(self._clock())
        rows = self._rows(
            f"SELECT {_FILE} FROM shown_files WHERE (expires_at IS NULL OR expires_at > ?) "
            f"AND (? IS NULL OR purpose = ?) AND (? IS NULL OR place {compare} ?) AND owner = ? "
            f"ORDER BY place {order} LIMIT ?",
            *(now, purpose, purpose, place, place, viewer, limit + 1),
        )
        found = [StoredFile(*row) for row in rows]
        return found[:limit], len(found) > limit

    @contextmanager
    def arriving(self) -> Iterator[Arriving]:
        """Lend a place for a file that is being written; unless it is kept, it is removed."""
        self._check_open()
        self._folder.check()
        if not self._folder.take_reserve():
            raise disk_full()
        arriving = Arriving(self, self._folder.content / _new_id("file"))
        try:
            yield arriving
        finally:
            arriving.close()

    def reserve(self, n_bytes: int) -> None:
        """Count bytes that are about to be written. Raises a `HttpProblemError` where there is no room."""
        while True:
            has_swept = self._sweep()
            with self._lock:
                self._check_open()
                n_stored = self._n_stored + self._count_worked_on()
                if n_stored + self._n_arriving + n_bytes <= self._n_bytes_max:
                    self.release(-n_bytes)
                    return
            if not has_swept:
                message = (
                    f"the stored files have {n_stored:,} of at most {self._n_bytes_max:,} bytes"
                )
                raise no_room(f"{message}: delete some, or wait for batches to end")

    def _count_worked_on(self) -> int:
        """Return the bytes of deleted files that batches still read."""
        if not self._is_counted:
            self._is_counted = True  # before: what changes meanwhile is counted the next time
            self._n_worked_on = self._folder.n_bytes_worked_on()
        return self._n_worked_on

    def count_again(self) -> None:
        """Count what batches read before the next file is taken: a file or a batch has gone. Does not wait."""
        self._is_counted = False

    def release(self, n_bytes: int) -> None:
        """Count bytes no more that were about to be written: they were, or will not be. Does not wait."""
        with self._counting:
            self._n_arriving -= n_bytes

    def put_file(
        self, id: str, name: str, purpose: str, n_bytes: int, seconds: int | None, owner: str
    ) -> StoredFile:
        """Enter a file whose content is there; one that is entered already is returned as it is."""
        now = int(self._clock())
        expires_at = None if seconds is None else now + seconds
        self._insert_file(id, name, purpose, n_bytes, now, expires_at, owner)
        return self.file(id, owner)

    def _insert_file(self, *row: Any) -> None:
        query = f"INSERT OR IGNORE INTO files ({_FILE}, owner) VALUES (?, ?, ?, ?, ?, ?, ?)"
        file = StoredFile(*row[:-1])
        with self._lock:
            if self._write(query, *row):
                self._n_stored += file.bytes
                if file.expires_at is not None:
                    self._first_expiry = min(self._first_expiry, file.expires_at)

    def adopt_file(
        self, source: Path, name: str, seconds: int | None, id: str, owner: str
    ) -> StoredFile:
        """Enter the answers of a batch as a file of this id; the same call again changes nothing."""
        place = self._folder.content / id
        if self._row("SELECT id FROM files WHERE id = ?", id) is None:
            place.unlink(missing_ok=True)  # an older copy, with fewer answers
        _link(source, place)
        sync_folder(self._folder.content)
        return self.put_file(id, name, BATCH_OUTPUT, place.stat().st_size, seconds, owner)

    def delete_file(self, id: str, viewer: str | None) -> None:
        """Remove a file, even if the disk is full. Raises a `HttpProblemError` if the viewer has no such file."""
        self._remove(self.file(id, viewer))
        self._folder.take_reserve()

    def _remove(self, *files: StoredFile) -> None:
        """Remove the content, then the row: a full disk then has room for the change, and a kill leaves no content."""
        for file in files:
            self.path_of(file).unlink(missing_ok=True)
        with suppress(OSError):  # not every file system can do this
            sync_folder(self._folder.content)
        ids = [file.id for file in files]
        with self._lock:
            n_bytes = self._n_bytes_of(f"shown_files WHERE {_is_one_of(ids)}", *ids)
            self._drop("files", *ids)
            self._n_stored -= n_bytes
            self.count_again()

    def _n_bytes_of(self, files: str, *values: object) -> int:
        [[n_bytes]] = self._rows(f"SELECT coalesce(sum(bytes), 0) FROM {files}", *values)
        return int(n_bytes)

    def _sweep(self) -> bool:
        """Remove some of the files that have expired; return whether there were any."""
        now = int(self._clock())
        if now < self._first_expiry:
            return False
        query = f"SELECT {_FILE} FROM shown_files WHERE expires_at <= ? LIMIT {_N_REMOVED}"
        if rows := self._rows(query, now):  # else another thread has removed them
            self._remove(*(StoredFile(*row) for row in rows))
        with self._lock:
            self._first_expiry = self._find_first_expiry()
        return bool(rows)

    def _find_first_expiry(self) -> float:
        query = "SELECT expires_at FROM shown_files WHERE expires_at IS NOT NULL ORDER BY expires_at LIMIT 1"
        found = self._row(query)
        return math.inf if found is None else float(found[0])

    # ---- batches ----

    def new_batch(
        self, requests: Path, window_s: int, kind: Kind = "batch", **fields: Any
    ) -> StoredBatch:
        """Make a batch of the lines of a file, which stay for it though the file be removed; `enter` follows."""
        self._folder.check()
        now = int(self._clock())
        id = _new_id(kind, "_")
        begun = now if fields.get("status") == "in_progress" else None
        fields |= {"created_at": now, "expires_at": now + window_s, "in_progress_at": begun}
        batch = StoredBatch(id=id, **fields)
        folder = self.folder_of(batch)
        folder.mkdir(0o700)
        try:
            self._link_requests(requests, folder / "requests.jsonl")
            for place in (folder, self._folder.work):
                sync_folder(place)
            self.count_again()  # some file systems have no links: then it is a copy
        except BaseException:
            self._remove_work(batch)
            raise
        return batch

    def _link_requests(self, requests: Path, place: Path) -> None:
        try:
            _link(requests, place)
        except FileNotFoundError:
            self._folder.check()
            raise not_there("File", requests.name) from None

    def enter(self, batch: StoredBatch) -> None:
        """Have a batch that was made listed; where that fails, nothing of it stays."""
        query = "INSERT INTO batches (id, is_ended, fields, owner) VALUES (?, 0, ?, ?)"
        try:
            self._write(query, batch.id, _as_text(batch), batch.kept_owner)
        except BaseException:
            self._remove_work(batch)
            raise

    def _remove_work(self, batch: StoredBatch) -> None:
        self._folder.remove_work(batch.id)
        self.count_again()

    def folder_of(self, batch: StoredBatch) -> Path:
        """Return the place where a batch that has not ended is worked on."""
        return self._folder.work / batch.id

    def save(self, batch: StoredBatch) -> None:
        """Write what has changed of a batch; the working folder of one that has ended is removed."""
        query = "UPDATE batches SET is_ended = ?, fields = ? WHERE id = ?"
        self._write(query, batch.has_ended, _as_text(batch), batch.id)
        if batch.has_ended:
            self._remove_work(batch)
            self._folder.take_reserve()

    def set_work_aside(self, batch: StoredBatch) -> None:
        """Move the folder of a batch to where nothing is removed. Raises an `OSError` if it cannot be moved."""
        folder = self.folder_of(batch)
        if folder.is_dir():
            self._folder.set_aside("the answers of a batch that has failed", folder)
            self.count_again()

    def batch(self, id: str, viewer: str, kind: Kind = "batch") -> StoredBatch:
        """Return a batch. Raises a `HttpProblemError` if the viewer has none of this kind with this id."""
        row = self._seen("batches", _BATCH, id, viewer)
        if not id.startswith(f"{kind}_"):
            raise not_there("Batch", id)
        return batch_of(row)

    def batches(
        self, viewer: str, page: Page, kind: Kind = "batch"
    ) -> tuple[list[StoredBatch], bool]:
        """Return a page of the viewer's own batches, and whether there are more."""
        ends = page.after, page.before
        older, newer = (self._place("batches", id, viewer) for id in ends)
        order = "DESC" if newer is None else "ASC"
        rows = self._rows(
            f"SELECT {_BATCH} FROM shown_batches WHERE (? IS NULL OR place < ?) "
            "AND (? IS NULL OR place > ?) "
            f"AND id GLOB ? AND owner = ? ORDER BY place {order} LIMIT ?",
            *(older, older, newer, newer, f"{kind}_*", viewer, page.limit + 1),
        )
        found = [batch_of(row) for row in rows[: page.limit]]
        return found if newer is None else found[::-1], len(rows) > page.limit

    def delete_batch(self, batch: StoredBatch) -> None:
        """Remove a batch that has ended, and the files of its answers."""
        for id in filter(None, (batch.output_file_id, batch.error_file_id)):
            with suppress(HttpProblemError):  # a client has deleted it
                self.delete_file(id, None)
        self._drop("batches", batch.id)

    def unfinished(self) -> list[StoredBatch]:
        """Return the batches that have not ended, the oldest first."""
        query = f"SELECT {_BATCH} FROM shown_batches WHERE NOT is_ended ORDER BY place"
        return [batch_of(row) for row in self._rows(query)]

    # ---- the index ----

    def _row(self, query: str, *values: object) -> tuple[Any, ...] | None:
        found = self._rows(query, *values)
        return found[0] if found else None

    def _rows(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        with self._lock:
            self._check_open()
            return self._db.execute(query, values).fetchall()

    @contextmanager
    def staying_open(self) -> Iterator[None]:
        """Keep the folder open for the block. Raises a `HttpProblemError` if it was closed: its files may be gone."""
        with self._lock:
            self._check_open()
            yield

    def _check_open(self) -> None:
        if self._closed is not None:
            raise replace(self._closed)

    def _write(self, query: str, *values: object) -> int:
        """Change the index; return the number of rows. On a full disk, free the reserve and the room of its log."""
        with self._lock:
            self._check_open()
            self._folder.check()
            try:
                return self._execute(query, *values)
            except (OSError, sqlite3.OperationalError) as error:
                if not is_full(error):
                    raise
                self._folder.give_reserve()
                with suppress(sqlite3.OperationalError):
                    self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
                return self._execute(query, *values)

    def _execute(self, query: str, *values: object) -> int:
        with limit_told(self._folder.index):
            return self._db.execute(query, values).rowcount

    def _drop(self, table: str, *ids: str) -> None:
        """Remove rows. If the disk has no room even for that, hide them until the next start."""
        where = _is_one_of(ids)
        try:
            self._write(f"DELETE FROM {table} WHERE {where}", *ids)
        except (OSError, sqlite3.OperationalError) as error:
            if not is_full(error):
                raise
            with self._lock:
                query = (
                    f"INSERT OR IGNORE INTO hidden_{table} SELECT place FROM {table} WHERE {where}"
                )
                self._db.execute(query, ids)

    def _place(self, table: str, id: str | None, viewer: str) -> int | None:
        """Return the place of the row with an id; None for None. Raises if the viewer has no such row."""
        return None if id is None else int(self._seen(table, "place", id, viewer)[0])

    def _seen(self, table: str, columns: str, id: str, viewer: str | None) -> tuple[Any, ...]:
        """Return the row with an id. Raises a `HttpProblemError` if the viewer has no such row."""
        query = f"SELECT {columns} FROM shown_{table} WHERE id = ? AND {_IS_SEEN}"
        row = self._row(query, id, viewer, viewer)
        if row is None:
            raise not_there(_OBJECTS[table], id)
        return row


class StoredContent:
    """Reads a stored file in parts; between them it is not open, for clients may read slowly, or nothing for long."""

    def __init__(self, open_: Callable[[], BinaryIO]) -> None:
        """Begin at the file's start; `open_` opens it, or raises a `HttpProblemError` where it was removed."""
        self._open, self._place = open_, 0

    def read(self, n_bytes: int) -> bytes:
        """Return the next bytes; none at the end."""
        with self._at_place() as file:
            return file.read(n_bytes)

    def readlines(self, n_bytes: int) -> list[bytes]:
        """Return the next lines, of about so many bytes; none at the end."""
        with self._at_place() as file:
            return file.readlines(n_bytes)

    @contextmanager
    def _at_place(self) -> Iterator[BinaryIO]:
        with self._open() as file:
            file.seek(self._place)
            yield file
            self._place = file.tell()


class Arriving:
    """A file being written, under a name that marks it as incomplete; between its parts it is not open."""

    def __init__(self, store: BatchStore, path: Path) -> None:
        self._store, self._whole = store, path
        self._path = path.with_name(f"{path.name}.part")
        with self._opened(os.O_CREAT | os.O_EXCL):
            pass
        self.n_bytes = 0
        self._is_kept = False

    def write(self, data: bytes) -> None:
        """Write more of it. Raises a `HttpProblemError` where there is no room."""
        self._store.reserve(len(data))
        self.n_bytes += len(data)
        with disk_problems(), self._opened() as fd:
            left = memoryview(data)
            while left:
                left = left[os.write(fd, left) :]

    @contextmanager
    def _opened(self, flags: int = 0) -> Iterator[int]:
        try:
            fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | flags, 0o600)
        except FileNotFoundError:
            with self._store.staying_open():  # which tells it if the folder was closed
                raise
        try:
            yield fd
        finally:
            os.close(fd)

    def keep(self, name: str, purpose: str, seconds: int | None, owner: str) -> StoredFile:
        """Enter the file, which is whole."""
        with disk_problems():
            self._sync()
            with self._store.staying_open():
                self._path = self._path.rename(self._whole)
                sync_folder(self._path.parent)
                id = self._path.name
                file = self._store.put_file(id, name, purpose, self.n_bytes, seconds, owner)
        self._is_kept = True
        return file

    def written(self) -> Path:
        """Return the place of what was written, which is on disk; it is removed at the end."""
        with disk_problems(), self._store.staying_open():
            self._sync()
        return self._path

    def _sync(self) -> None:
        with self._opened() as fd:
            os.fsync(fd)

    def close(self) -> None:
        """Remove the file unless it is kept."""
        self._store.release(self.n_bytes)
        if not self._is_kept:
            self._path.unlink(missing_ok=True)
            self._store.count_again()


def _is_one_of(ids: Sequence[str]) -> str:
    """Return the condition for the rows with these ids, which it takes."""
    return f"id IN ({', '.join('?' * len(ids))})"


def not_there(what: str, id: str) -> HttpProblemError:
    """Return the problem of an id that nobody has."""
    return HttpProblemError(404, f"No such {what} object: {id[:100]}", None, "id")


def no_room(message: str) -> HttpProblemError:
    """Return the problem of a disk, or a quota, that is full."""
    return HttpProblemError(507, message, "insufficient_storage", headers=NO_RETRY)


def disk_full() -> HttpProblemError:
    """Return the problem of a disk that is full."""
    return no_room("the server's disk is full: delete files")


@contextmanager
def disk_problems() -> Iterator[None]:
    """Turn errors of the disk into errors for a client. The log says why a folder cannot be used."""
    try:
        yield
    except (OSError, sqlite3.OperationalError) as error:
        if is_full(error):
            raise disk_full() from error
        _log.warn("the folder of files cannot be used: %s", words_of(error))
        message = "the server's folder of files cannot be used: the server's log says why"
        raise HttpProblemError(500, message, "storage_unusable", headers=NO_RETRY) from error


def _regular(path: str, flags: int) -> int:
    """Open a regular file; another, such as a pipe that nobody writes to, counts as none. Does not wait."""
    fd = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise FileNotFoundError(errno.ENOENT, "not a regular file", path)
    return fd


def _new_id(prefix: str, dash: str = "-") -> str:
    return f"{prefix}{dash}{secrets.token_hex(12)}"


def new_file_id() -> str:
    """Return an id for a file that will be made."""
    return _new_id("file")


def _as_text(batch: StoredBatch) -> str:
    return msgspec.json.encode(batch).decode()


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
