"""The manifest beside an output: item and place of each record. An SQLite file, and the lock of the run.

The manifest decides: bytes of an output that belong to no row are cut off, a row without its bytes is removed.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from cbatch.errors import ConfigError, OutputError
from cbatch.files.input.item import bytes_of
from cbatch.files.output import durable as disk
from cbatch.files.places import status_of
from cbatch.support.folders import room_for, system_error_of

GONE = 2**40
"""Added to the number of a record whose item is not in the input any more, which orders it after all others."""

_VERSION = 1
_APPLICATION = 0x63626174  # "cbat"
_PAGE = 1024
"""Bytes of a page: each new id changes a page of the index anywhere, and pages are written whole."""
_CACHE_KIB = 4096
_CHECKPOINT = 1024
"""Pages of the log at which SQLite folds it: 1 MiB, for which a nearly full disk has room."""

_ENDINGS = ("", "-wal", "-shm", "-journal")
"""Of the names of a manifest's files: itself, and SQLite's files beside it."""

_TABLES = (
    "CREATE TABLE settings (name TEXT PRIMARY KEY, value TEXT NOT NULL)",
    """CREATE TABLE files (
        file INTEGER PRIMARY KEY,      -- 0: the output, 1: that of errors
        path TEXT NOT NULL,            -- from the manifest's folder
        header BLOB NOT NULL,
        size INTEGER,                  -- bytes that are committed; NULL: not begun
        synced INTEGER NOT NULL,       -- bytes that the disk is known to have
        is_open INTEGER NOT NULL,      -- whether bytes behind `size` may be those of a commit that was cut short
        is_replaced INTEGER NOT NULL   -- whether the part beside it takes its place
    )""",
    """CREATE TABLE records (
        record INTEGER PRIMARY KEY,    -- 1, 2, … in order of commit
        key BLOB NOT NULL,             -- of the item's id
        digest BLOB NOT NULL,          -- of what was asked
        number INTEGER NOT NULL,       -- place of the item in the input; from `GONE` on: it was there
        file INTEGER NOT NULL,
        start INTEGER NOT NULL,        -- bytes [start, start + size) of the file
        size INTEGER NOT NULL,
        crc INTEGER NOT NULL,
        is_error INTEGER NOT NULL
    )""",
    "CREATE UNIQUE INDEX records_by_key ON records (key)",
)
_SCHEMA = (
    f"PRAGMA application_id = {_APPLICATION}",
    f"PRAGMA user_version = {_VERSION}",
    *_TABLES,
)

_PRAGMAS = (
    "PRAGMA journal_mode = WAL",
    "PRAGMA synchronous = NORMAL",
    f"PRAGMA cache_size = -{_CACHE_KIB}",
    f"PRAGMA wal_autocheckpoint = {_CHECKPOINT}",
    f"PRAGMA journal_size_limit = {_CHECKPOINT * _PAGE}",
)

# OR REPLACE: where Ctrl-C strikes right after the commit, the same records are inserted again.
INSERT = "INSERT OR REPLACE INTO records VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"
"""Insert a record, in place of one with the same key."""

DELETE = "DELETE FROM records WHERE record = ?"

_FILES = "SELECT file, path, header, size, synced, is_open, is_replaced FROM files WHERE size IS NOT NULL"
_PUT_FILE = "INSERT OR REPLACE INTO files VALUES (?, ?, ?, ?, ?, ?, ?)"
_COUNT = "SELECT count(*), sum(is_error), sum(size), sum(number >= ?) FROM records WHERE file = ?"

NUMBERED = (b"\0", b"\0:")
"""The range of the keys of items without an id; see `item_key`."""

_LONG_ID = 24
"""Most bytes of an id that is its own key: ids that count up then change neighbouring pages of the index."""


class LostError(ConfigError):
    """There is no manifest that fits the records: it may be made again, or replaced together with them."""

    def __init__(self, what: str, ways_out: str) -> None:
        self.what = what
        super().__init__(f"{what}: {ways_out}")


@dataclass(slots=True)
class FileRow:
    """A row of `files`; see its columns."""

    file: int
    path: Path
    header: bytes
    size: int = 0
    synced: int = 0
    is_open: bool = True
    is_replaced: bool = False


@dataclass(frozen=True, slots=True)
class Count:
    """The records of a file, of these the errors, their bytes, and the records of items that are gone."""

    n_records: int
    n_errors: int
    n_bytes: int
    n_gone: int


class Manifest:
    """An open manifest, locked until it is closed."""

    def __init__(self, path: Path, output: Path, *, home: Path | None = None) -> None:
        """Open or create a manifest; its readers are those of the output.

        Args:
            home: for a copy, the place of the original: errors name it, and paths are relative to it.

        Raises:
            ConfigError: another run has it open, or it cannot be opened.
            LostError: it is damaged, of a newer version, or no manifest.
        """
        self.path, self._output, self._home = path, output, home or path
        self.is_new = False
        with self._refused(), ExitStack() as stack:
            self._create()
            self._db = sqlite3.connect(
                path, timeout=0, isolation_level=None, check_same_thread=False
            )
            stack.callback(self._db.close)
            self._prepare()
            stack.pop_all()
        self._status = status_of(path)

    def _create(self) -> None:
        """Create a missing file with the output's access; restrict an existing one to the output's access."""
        has_output = self._output.exists()
        try:
            os.close(os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, disk.ANYBODY))
        except FileExistsError:
            for path in files_of_manifest(self.path) if has_output else ():
                disk.tighten(path, self._output)
        else:
            if has_output:
                disk.take_access(self.path, self._output)

    def _prepare(self) -> None:
        # The first transaction fixes the page size, even an empty one. Exclusive from the first statement on: of two
        # processes that begin at once one gets the lock.
        for statement in (
            f"PRAGMA page_size = {_PAGE}",
            "PRAGMA locking_mode = EXCLUSIVE",
            "BEGIN EXCLUSIVE",
        ):
            self._db.execute(statement)
        self.is_new = self._check()
        self._db.execute("COMMIT")
        for statement in _PRAGMAS:
            self._db.execute(statement)
        if self.is_new:
            with self.transaction():
                for statement in _SCHEMA:
                    self._db.execute(statement)
        self.fold()

    def _check(self) -> bool:
        """Return whether the file is empty; refuse files of other programs, and a page that is damaged."""
        [application], [version] = (
            self._db.execute(f"PRAGMA {name}").fetchone()
            for name in ("application_id", "user_version")
        )
        found = {sql for [sql] in self._db.execute("SELECT sql FROM sqlite_master")}
        if application != _APPLICATION and found:
            raise ConfigError(
                f"{self._home}: is an SQLite file of another program at the place of cbatch's manifest: move it away, "
                "or give another output"
            )
        if application != _APPLICATION:
            return True
        if version > _VERSION:
            raise LostError(
                f"{self._home}: has version {version}, but this cbatch knows {_VERSION}",
                "update cbatch, give another output, or replace it (--force)",
            )
        [problems] = self._db.execute("PRAGMA integrity_check(1)").fetchone()
        if problems != "ok":
            raise _damaged(self._home, problems.splitlines()[-1])
        if not found.issuperset(_TABLES):
            raise _damaged(self._home, "a table was changed")
        return False

    @contextmanager
    def _refused(self) -> Iterator[None]:
        try:
            yield
        except (OSError, sqlite3.OperationalError) as error:
            if "locked" in str(error):
                raise ConfigError(
                    f"{self._output}: another run is writing to it: wait for its end, or give another output"
                ) from error
            cause = self._cause_of(error)
            if way_out := room_for(cause):
                raise ConfigError(
                    f"{self._home}: the manifest cannot be opened: {way_out}"
                ) from cause
            reason = getattr(cause, "strerror", None) or cause
            raise ConfigError(
                f"{self._home}: the manifest cannot be opened: {reason}: give an output in a folder where "
                "files can be written and locked"
            ) from cause
        except sqlite3.DatabaseError as error:
            raise _damaged(self._home, error) from error

    def check_there(self) -> None:
        """Check that the file is at its place.

        Raises:
            OutputError: it was removed, moved away or replaced.
        """
        now = status_of(self.path)
        if now is None or self._status is None or not os.path.samestat(now, self._status):
            raise OutputError(
                self.path,
                "the manifest was removed or moved away while the run wrote there: put it back, or give another "
                "output; --adopt rebuilds it from an output in the format openai or cbatch",
            )

    def execute(self, statement: str, *values: object) -> sqlite3.Cursor:
        """Run one statement.

        Raises:
            OutputError: it cannot be written.
            LostError: it is damaged.
        """
        try:
            return self._db.execute(statement, values)
        except sqlite3.DatabaseError as error:
            raise self._failed(error) from self._cause_of(error)

    def rows(self, statement: str, *values: object) -> Generator[Any]:
        """Yield the rows of one statement one by one; errors as of `execute`.

        A generator that is not read to its end is to be closed before the manifest, which stays locked else.
        """
        try:
            yield from self.execute(statement, *values)
        except sqlite3.DatabaseError as error:
            raise self._failed(error) from self._cause_of(error)

    def execute_many(self, statement: str, rows: Iterable[tuple[Any, ...]]) -> None:
        """Run one statement for each row; errors as of `execute`."""
        try:
            self._db.executemany(statement, rows)
        except sqlite3.DatabaseError as error:
            raise self._failed(error) from self._cause_of(error)

    @contextmanager
    def transaction(self, *, is_durable: bool = False) -> Iterator[None]:
        """Commit all statements of the block, or none; if `is_durable`, wait until they are on disk."""
        if is_durable:
            self.execute("PRAGMA synchronous = FULL")
        self.execute("BEGIN IMMEDIATE")
        try:
            yield
            self.commit()
        except BaseException as error:
            with suppress(sqlite3.Error):  # some errors have rolled back already
                self._db.execute("ROLLBACK")
            if isinstance(error, OutputError):  # the log may have grown in vain on a full disk
                self.fold()
            raise
        finally:
            if is_durable:
                with suppress(sqlite3.Error):
                    self._db.execute("PRAGMA synchronous = NORMAL")

    def commit(self) -> None:
        """End a transaction."""
        self.execute("COMMIT")

    def copy(self, place: Path) -> None:
        """Copy the manifest to another place; replace the file there."""
        part = place.with_name(f".{place.name}.part")
        os.close(disk.create(part))
        with closing(sqlite3.connect(part, isolation_level=None)) as copy:
            self._db.backup(copy)
            for row in self.files().values():
                path = _relative(row.path, place.parent)
                copy.execute("UPDATE files SET path = ? WHERE file = ?", (path, row.file))
        disk.take_access(part, self._output)
        disk.replace(part, place)

    def fold(self) -> None:
        """Move the log into the manifest itself, for copies of the manifest alone; the log stays if that fails."""
        with suppress(sqlite3.OperationalError):
            self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    def close(self) -> None:
        """Close the file and release the lock."""
        self._db.close()

    def _failed(self, error: sqlite3.DatabaseError) -> OutputError | ConfigError:
        if isinstance(error, sqlite3.OperationalError):
            return OutputError(self.path, disk.refusal_of(error, *files_of_manifest(self.path)))
        return _damaged(self._home, error)

    def _cause_of(self, error: Exception) -> Exception:
        return system_error_of(error, *files_of_manifest(self.path))

    # ---- settings, files, records ----

    def settings(self) -> dict[str, str]:
        """Return the settings of the runs that wrote here."""
        found = self.rows("SELECT name, value FROM settings")
        return {name: os.fsdecode(value) for name, value in found}

    def set_settings(self, settings: Mapping[str, str]) -> None:
        """Replace all settings."""
        self.execute("DELETE FROM settings")
        rows = [(name, _stored(value)) for name, value in settings.items()]
        self.execute_many("INSERT INTO settings VALUES (?, ?)", rows)

    def note(self, name: str, value: str) -> None:
        """Replace one setting, and wait until the change is on disk."""
        with self.transaction(is_durable=True):
            self.execute("INSERT OR REPLACE INTO settings VALUES (?, ?)", name, _stored(value))

    def files(self) -> dict[int, FileRow]:
        """Return the outputs by number."""
        folder = self._home.parent
        return {
            file: FileRow(file, Path(os.path.normpath(folder / os.fsdecode(path))), *rest)
            for file, path, *rest in self.rows(_FILES)
        }

    def put_file(self, row: FileRow) -> None:
        """Insert or replace an output."""
        path = _relative(row.path, self._home.parent)
        rest = row.header, row.size, row.synced, row.is_open, row.is_replaced
        self.execute(_PUT_FILE, row.file, path, *rest)

    def save(self, *rows: FileRow) -> None:
        """Insert or replace outputs, and wait until that is on disk."""
        with self.transaction(is_durable=True):
            for row in rows:
                self.put_file(row)

    def forget(self, file: int) -> None:
        """Forget a file and its records."""
        self.execute("DELETE FROM files WHERE file = ?", file)
        self.execute("DELETE FROM records WHERE file = ?", file)

    def count(self, file: int) -> Count:
        """Return the counts of a file."""
        return Count(*(n or 0 for n in self.execute(_COUNT, GONE, file).fetchone()))

    def last_record(self) -> int:
        """Return the largest number of a record, 0 without records."""
        return self.execute("SELECT max(record) FROM records").fetchone()[0] or 0


def record_key(id: str) -> bytes:
    """Return the key of an id: its bytes where they are few, else a digest after 0xFF, which is in no UTF-8."""
    text = bytes_of(id)
    return text if len(text) <= _LONG_ID else b"\xff" + blake2b(text, digest_size=11).digest()


def manifest_of(output: Path) -> Path:
    """Return the place of the manifest beside a file."""
    return output.with_name(f"{output.name}.manifest")


def files_of_manifest(path: Path) -> list[Path]:
    """Return the places of a manifest and of SQLite's files beside it."""
    return [Path(f"{path}{ending}") for ending in _ENDINGS]


def remove_manifest(path: Path) -> None:
    """Remove all files of a manifest."""
    for file in files_of_manifest(path):
        file.unlink(missing_ok=True)


def _relative(path: Path, folder: Path) -> str | bytes:
    """Return a path relative to a folder, so that both may be moved together."""
    return _stored(os.path.relpath(path, folder))


def _stored(text: str) -> str | bytes:
    """Return text for the manifest; a name that is not UTF-8 as its bytes."""
    with suppress(UnicodeEncodeError):
        text.encode()
        return text
    return os.fsencode(text)


def _damaged(path: Path, problem: object) -> LostError:
    return LostError(
        f"{path}: is damaged, or is not a manifest of cbatch ({problem})",
        "put it back, give another output, or replace it and its output (--force); for JSON lines it can be rebuilt "
        "(--adopt)",
    )
