"""The index of a server's files and batches, in SQLite: opened, repaired if damaged, and read row by row.

A row that cannot be read, such as one of a later version, stays in the index and is not listed.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from cbatch.server.files_folder import BATCH_ID, FILE_ID, FilesFolder
from cbatch.support.typed import known

T = TypeVar("T")

Kind = Literal["batch", "msgbatch"]
"""Prefixes of batch ids: of batches over a file (OpenAI's format), and of message batches (Anthropic's)."""

MESSAGES = "/v1/messages"
"""The endpoint of message batches."""

_SCHEMA = """
    CREATE TABLE IF NOT EXISTS files (
        place INTEGER PRIMARY KEY AUTOINCREMENT,  -- 1, 2, … in order of arrival
        id TEXT UNIQUE NOT NULL,
        name TEXT NOT NULL,
        purpose TEXT NOT NULL,
        bytes INTEGER NOT NULL,
        created_at INTEGER NOT NULL,
        expires_at INTEGER,
        owner TEXT NOT NULL DEFAULT ''            -- the only owner who sees it: '' without a key
    );
    CREATE TABLE IF NOT EXISTS batches (
        place INTEGER PRIMARY KEY AUTOINCREMENT,
        id TEXT UNIQUE NOT NULL,
        is_ended INTEGER NOT NULL,
        fields TEXT NOT NULL,                     -- of `StoredBatch`, as JSON
        owner TEXT NOT NULL DEFAULT ''
    );
    CREATE INDEX IF NOT EXISTS unfinished ON batches (is_ended) WHERE NOT is_ended;
    CREATE INDEX IF NOT EXISTS owned ON batches (owner);
    CREATE INDEX IF NOT EXISTS expiring ON files (expires_at) WHERE expires_at IS NOT NULL;
"""
_COLUMNS = {
    "files": ("place", "id", "name", "purpose", "bytes", "created_at", "expires_at", "owner"),
    "batches": ("place", "id", "is_ended", "fields", "owner"),
}

_SHOWN = """
    PRAGMA temp_store = MEMORY;
    CREATE TEMP TABLE hidden_files (place INTEGER PRIMARY KEY);
    CREATE TEMP TABLE hidden_batches (place INTEGER PRIMARY KEY);
    CREATE TEMP VIEW shown_files AS SELECT * FROM files WHERE place NOT IN hidden_files;
    CREATE TEMP VIEW shown_batches AS SELECT * FROM batches WHERE place NOT IN hidden_batches;
"""

_ENDINGS = ("", "-wal", "-shm", "-journal")
"""Suffixes of SQLite's files."""

_DAMAGE = (sqlite3.DatabaseError, UnicodeDecodeError, IsADirectoryError)
"""Errors of a file that is not an index; the second comes when SQLite quotes its text."""

_NOT_DAMAGED = ("locked", "full", "I/O", "unable to open")
"""Words of SQLite's errors that do not mean a damaged file."""

BATCH, BATCH_OUTPUT = "batch", "batch_output"
"""Purposes of files."""

ENDED = ("completed", "failed", "expired", "cancelled")
"""Final statuses of batches."""

_Time = Annotated[int, Meta(ge=0, le=253_402_300_799)]
"""Seconds since 1970, at most to the end of the year 9999: the latest time that an answer can have."""
_Count = Annotated[int, Meta(ge=0)]
_Status = Annotated[
    str, Meta(pattern=rf"^(validating|in_progress|finalizing|cancelling|{'|'.join(ENDED)})\Z")
]
_Ending = Annotated[str, Meta(pattern=rf"^({'|'.join(ENDED)})?\Z")]
_FileId = Annotated[str, Meta(pattern=rf"^{FILE_ID}\Z")]
_BatchId = Annotated[str, Meta(pattern=rf"^{BATCH_ID}\Z")]


class StoredFile(Struct, frozen=True):
    """A file, with the field names of OpenAI's API."""

    id: _FileId
    name: str
    purpose: str
    bytes: _Count
    created_at: _Time
    expires_at: _Time | None = None

    def as_json(self) -> dict[str, Any]:
        """Return the file object."""
        said = msgspec.structs.asdict(self)
        about = {"object": "file", "status": "processed", "status_details": None}
        return {"filename": said.pop("name"), **said, **about}


class StoredBatch(Struct, forbid_unknown_fields=True):
    """A batch, with the field names of OpenAI's API; fields that begin with `kept_` are the server's own."""

    id: _BatchId
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: _Time
    expires_at: _Time
    metadata: dict[str, str] | None = None
    status: _Status = "validating"
    model: str | None = None
    errors: list[dict[str, Any]] = []
    usage: dict[str, Any] | None = None
    output_file_id: _FileId | None = None
    error_file_id: _FileId | None = None
    n_total: _Count = 0
    n_completed: _Count = 0
    n_failed: _Count = 0
    in_progress_at: _Time | None = None
    finalizing_at: _Time | None = None
    completed_at: _Time | None = None
    failed_at: _Time | None = None
    expired_at: _Time | None = None
    cancelling_at: _Time | None = None
    cancelled_at: _Time | None = None
    kept_owner: str = ""
    """The owner: a hash of the key that made it; "" without a key."""
    kept_ending: _Ending = ""
    """The status of the batch once its files are made."""
    kept_seconds: _Count | None = None
    """Seconds after which its files expire."""
    kept_engine: str = ""
    """What its answers depend on besides the requests; set before the first answer."""
    kept_n_never_ran: _Count = 0
    """Failed requests that never ran, once the batch has ended."""

    @property
    def has_ended(self) -> bool:
        """Whether nothing will change any more."""
        return self.status in ENDED

    @property
    def is_of_messages(self) -> bool:
        """Whether its format is Anthropic's."""
        return self.endpoint == MESSAGES

    def as_json(self) -> dict[str, Any]:
        """Return the batch object."""
        said = msgspec.structs.asdict(self)
        fields = {name: value for name, value in said.items() if not name.startswith("kept_")}
        counts = {name: fields.pop(f"n_{name}") for name in ("total", "completed", "failed")}
        fields["errors"] = {"object": "list", "data": self.errors} if self.errors else None
        return {**fields, "object": "batch", "request_counts": counts}


# ---- rows ----


def storable_now() -> float:
    """Return seconds since 1970, which an index can have: 0 while the system's clock is set to a time before."""
    return max(time.time(), 0.0)


def file_of(row: tuple[Any, ...]) -> StoredFile:
    """Return the file of a row without its place. Raises a `ValueError` if the row is none."""
    names = StoredFile.__struct_fields__
    return _read(lambda: msgspec.convert(dict(zip(names, row, strict=True)), known(StoredFile)))


def batch_of(row: tuple[Any, ...]) -> StoredBatch:
    """Return the batch of a row: id, `is_ended` and fields. Raises a `ValueError` if the row is none."""
    id, is_ended, text = row
    batch = _read(lambda: msgspec.json.decode(text, type=known(StoredBatch)))
    if batch.id != id or is_ended != batch.has_ended:
        raise ValueError("fields that do not fit together")
    return batch


def _read(made: Callable[[], T]) -> T:
    try:
        return made()
    except (msgspec.MsgspecError, TypeError, RecursionError, UnicodeError) as error:
        raise ValueError(str(error)) from None


def hide_bad_rows(db: sqlite3.Connection, folder: FilesFolder, sizes: Mapping[str, int]) -> None:
    """Make the views `shown_files` and `shown_batches` of the rows that can be served; note the others.

    Args:
        folder: takes the notes.
        sizes: bytes of contents, by file id.
    """
    db.executescript(_SHOWN)
    bad: dict[str, list[str]] = {}
    for table, (place, id, *row, _) in _rows(db):
        try:
            if table == "batches":
                batch_of((id, *row))
                continue
            file = file_of((id, *row))
            if (size := sizes.get(file.id)) == file.bytes:
                continue
            why = "no content" if size is None else "content of another size than the index says"
        except ValueError:
            why = "an unreadable row in the index"
        db.execute(f"INSERT INTO hidden_{table} VALUES (?)", (place,))
        bad.setdefault(why, []).append(str(id))
    for why, ids in bad.items():
        folder.note(f"not listed, because they have {why}", ids)


def _rows(db: sqlite3.Connection) -> Iterator[tuple[str, tuple[Any, ...]]]:
    for table, columns in _COLUMNS.items():
        for row in db.execute(f"SELECT {', '.join(columns)} FROM {table}"):
            yield table, row


# ---- the file of the index ----


def open_index(folder: FilesFolder) -> sqlite3.Connection:
    """Open a folder's index, or make it. An index that is damaged or of another version is replaced and set aside.

    Raises:
        sqlite3.Error, OSError: another server has it open, or there is no room for a new one.
    """
    path = folder.index
    new = path.with_name(f"{path.name}.new")
    if new.exists() and not path.exists():  # the server was killed just before this
        new.rename(path)
    try:
        return _opened(path)
    except _DAMAGE as error:
        if not _is_damage(error):
            raise
        why = str(error)
    folder.give_reserve()
    n_rows = _write_anew(new, path)
    folder.set_aside(
        f"the index could not be used ({why}); {n_rows:,} of its rows were saved",
        *(place for ending in _ENDINGS if (place := path.with_name(path.name + ending)).exists()),
    )
    new.rename(path)
    folder.take_reserve()
    return _opened(path)


def _is_damage(error: Exception) -> bool:
    is_other = isinstance(error, sqlite3.OperationalError)
    return not (is_other and any(word in str(error) for word in _NOT_DAMAGED))


def _connected(path: Path | str) -> sqlite3.Connection:
    db = sqlite3.connect(
        path,
        timeout=0,
        isolation_level=None,
        check_same_thread=False,
        uri=str(path).startswith("file:"),
    )
    db.text_factory = lambda data: data.decode(errors="replace")
    return db


def _opened(path: Path) -> sqlite3.Connection:
    log = path.with_name(f"{path.name}-wal")
    if log.exists() and log.stat().st_size and not (path.exists() and path.stat().st_size):
        raise sqlite3.DatabaseError("the index is missing, but its log exists")
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    db = _connected(path)
    try:
        db.execute("PRAGMA locking_mode = EXCLUSIVE")
        db.execute("PRAGMA synchronous = FULL")
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("BEGIN EXCLUSIVE")
        db.execute("COMMIT")
        db.executescript(_SCHEMA)
        [[found]] = db.execute("PRAGMA integrity_check(1)")
        if found != "ok":
            raise sqlite3.DatabaseError(found.strip().replace("\n", " "))
        with closing(_connected(":memory:")) as usual:
            usual.executescript(_SCHEMA)
            if _form(db) != _form(usual):
                raise sqlite3.DatabaseError("another version of cbatch made it")
    except BaseException:
        db.close()
        raise
    return db


def _form(db: sqlite3.Connection) -> dict[str, dict[str, tuple[Any, ...]]]:
    """Return the columns of each table by name."""
    return {
        table: {name: tuple(more) for _, name, *more in db.execute(f"PRAGMA table_info({table})")}
        for table in _COLUMNS
    }


def _write_anew(new: Path, old: Path) -> int:
    """Make an index of the readable rows of another one; return their number."""
    new.unlink(missing_ok=True)
    os.close(os.open(new, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    n_rows = 0
    with closing(_connected(new)) as db:
        db.executescript(_SCHEMA)
        db.execute("BEGIN")
        for table, names, row in _salvaged(old):
            query = f"INSERT OR IGNORE INTO {table} ({names}) VALUES ({', '.join('?' * len(row))})"
            n_rows += db.execute(query, row).rowcount
        db.execute("COMMIT")
    return n_rows


def _salvaged(path: Path) -> Iterator[tuple[str, str, tuple[Any, ...]]]:
    """Yield the readable rows of an index, from both ends of each table: table, columns, values."""
    if not path.is_file() or not path.stat().st_size:
        return  # SQLite would remove its log
    with suppress(*_DAMAGE), closing(_connected(f"{path.absolute().as_uri()}?mode=ro")) as db:
        for table, columns in _COLUMNS.items():
            names, seen = ", ".join(columns), set[Any]()
            for order in ("ASC", "DESC"):
                with suppress(*_DAMAGE):
                    for row in db.execute(f"SELECT {names} FROM {table} ORDER BY place {order}"):
                        if row[0] in seen:
                            break
                        seen.add(row[0])
                        yield table, names, row
