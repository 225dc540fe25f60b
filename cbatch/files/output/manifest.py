"""The manifest beside an output: which records are there, where, and whose. An SQLite file, and the lock of the run.

What is committed here counts: bytes of an output that no row knows of are cut off, a row without its bytes is removed.
"""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cbatch.errors import ConfigError, OutputError
from cbatch.files.input.item import bytes_of
from cbatch.files.output import durable as disk
from cbatch.files.places import status_of

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Iterator, Mapping

GONE = 2**40
"""Added to the number of a record whose item is not in the input any more, so that it is behind all others."""

_VERSION = 1
_APPLICATION = 0x63626174  # "cbat"
_PAGE = 1024
"""Bytes of a page: ids come in any order, and each new one changes a page of the index, which is written whole."""
_CACHE_KIB = 4096
_CHECKPOINT = 1024
"""Pages of the log from which on it is folded: 1 MiB, which a disk that is nearly full has left."""

_ENDINGS = ("", "-wal", "-shm", "-journal")
"""Of a manifest's files: the manifest, and what SQLite keeps beside it."""

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


# A commit that Ctrl-C has cut off behind the manifest's own is repeated as a whole.
INSERT = "INSERT OR REPLACE INTO records VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"
"""Of the columns of a record; it takes the place of another under its key."""

NUMBERED = (b"\0", b"\0:")
"""Between these are the keys of items without an id; see `item_key`."""

_LONG_ID = 24
"""Bytes up to which an id is its own key: ids that are counted up then change pages of the index that lie together."""


class LostError(ConfigError):
    """There are records, and no manifest that fits them."""


class ManifestError(LostError):
    """The manifest is not one that this cbatch can go on with; it may be replaced."""

    def __init__(self, what: str, ways_out: str) -> None:
        """Keep what is wrong with it, in words."""
        self.what = what
        super().__init__(f"{what}: {ways_out}")


@dataclass(frozen=True, slots=True)
class FileRow:
    """What is known of an output; see the columns of `files`."""

    file: int
    path: Path
    header: bytes
    size: int | None = None
    synced: int = 0
    is_open: bool = True
    is_replaced: bool = False


@dataclass(frozen=True, slots=True)
class Count:
    """How many records a file has, how many of them are errors or of items that are gone, and their bytes together."""

    n_records: int = 0
    n_errors: int = 0
    n_bytes: int = 0
    n_gone: int = 0


class Manifest:
    """One open manifest; nobody else opens it before it is closed."""

    def __init__(self, path: Path, output: Path, *, home: Path | None = None) -> None:
        """Open or create it; those may read it who may read the output.

        Args:
            path: where it is.
            output: whose manifest it is.
            home: of which manifest it is a copy: by that it is named, and from there files are found; None: of none.

        Raises:
            ConfigError: another run has it open, or it cannot be opened.
            ManifestError: it is damaged, of a newer version, or no manifest.
        """
        self.path, self._output, self._home = path, output, home or path
        self.is_new = False
        self._read = set[sqlite3.Cursor]()
        with self._refused():
            self._create()
            self._db = sqlite3.connect(
                path, timeout=0, isolation_level=None, check_same_thread=False
            )
            try:
                self._prepare()
            except BaseException:
                self._db.close()
                raise
        self._status = status_of(path)

    def _create(self) -> None:
        """Create it where it is not, with the output's access; else let nobody read it who may not read the output."""
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
        # The size of pages is settled by the first transaction, also by an empty one. Exclusive from the first
        # statement on: where two begin at once, one of them has it.
        for statement in (
            f"PRAGMA page_size = {_PAGE}",
            "PRAGMA locking_mode = EXCLUSIVE",
            "BEGIN EXCLUSIVE",
        ):
            self._db.execute(statement)
        self.is_new = self._check()
        self._db.execute("COMMIT")
        for name, value in (
            ("journal_mode", "WAL"),
            ("synchronous", "NORMAL"),
            ("cache_size", -_CACHE_KIB),
            ("wal_autocheckpoint", _CHECKPOINT),
            ("journal_size_limit", _CHECKPOINT * _PAGE),
        ):
            self._db.execute(f"PRAGMA {name} = {value}")
        if self.is_new:
            with self.transaction():
                for statement in _SCHEMA:
                    self._db.execute(statement)
        self.fold()

    def _check(self) -> bool:
        """Return whether it is empty; refuse what is not ours."""
        application, version = self._pragma("application_id"), self._pragma("user_version")
        if application == _APPLICATION:
            if version > _VERSION:
                raise ManifestError(
                    f"{self._home}: is of version {version}, and this cbatch knows {_VERSION}",
                    "update cbatch, give another output, or replace it (--force)",
                )
            self._check_whole()
            return False
        if self._db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
            raise ConfigError(
                f"{self._home}: is an SQLite file of another program, where cbatch keeps its manifest: move it away, "
                "or give another output"
            )
        return True

    def _check_whole(self) -> None:
        """Look through all of it: what is damaged would else be found in the midst of a run, or never."""
        [problems] = self._db.execute("PRAGMA integrity_check(1)").fetchone()
        if problems != "ok":
            raise _damaged(self._home, problems.splitlines()[-1])
        found = {sql for [sql] in self._db.execute("SELECT sql FROM sqlite_master")}
        if not found.issuperset(_TABLES):
            raise _damaged(self._home, "a table is not as it was made")

    def _pragma(self, name: str) -> int:
        return int(self._db.execute(f"PRAGMA {name}").fetchone()[0])

    @contextmanager
    def _refused(self) -> Iterator[None]:
        """Tell why a manifest cannot be opened."""
        try:
            yield
        except (OSError, sqlite3.OperationalError) as error:
            if "locked" in str(error):
                raise ConfigError(
                    f"{self._output}: another run writes there: wait for its end, or give another output"
                ) from error
            raise ConfigError(
                f"{self._home}: the manifest cannot be opened: {_reason(error)}: give an output in a folder where "
                "files can be written and locked"
            ) from error
        except sqlite3.DatabaseError as error:
            raise _damaged(self._home, error) from error

    def check_there(self) -> None:
        """Check that it is where it was opened.

        Raises:
            OutputError: somebody has removed it, moved it away or put another file in its place.
        """
        now = status_of(self.path)
        if now is None or self._status is None or not os.path.samestat(now, self._status):
            raise OutputError(
                self.path,
                "the manifest was removed or moved away while the run wrote there: put it back, or give another "
                "output; of openai's and cbatch's lines --adopt makes it again",
            )

    def execute(self, statement: str, *values: object) -> sqlite3.Cursor:
        """Run one statement.

        Raises:
            OutputError: it cannot be written.
            ManifestError: it is damaged.
        """
        try:
            return self._db.execute(statement, values)
        except sqlite3.DatabaseError as error:
            raise self._failed(error) from error

    def rows(self, statement: str, *values: object) -> Generator[Any]:
        """Yield the rows of one statement as they are found, up to `close` at most; errors as of `execute`."""
        cursor = self.execute(statement, *values)
        self._read.add(cursor)
        try:
            for row in cursor:  # noqa: UP028  # who left that early would close the cursor of a closed manifest
                yield row
        except sqlite3.DatabaseError as error:
            raise self._failed(error) from error
        finally:
            self._read.discard(cursor)

    def execute_many(self, statement: str, rows: Iterable[tuple[Any, ...]]) -> None:
        """Run one statement for each of these rows; errors as of `execute`."""
        try:
            self._db.executemany(statement, rows)
        except sqlite3.DatabaseError as error:
            raise self._failed(error) from error

    @contextmanager
    def transaction(self, *, is_durable: bool = False) -> Iterator[None]:
        """Commit all that happens in the block, or nothing; where `is_durable`, the disk has it afterwards."""
        if is_durable:
            self.execute("PRAGMA synchronous = FULL")
        self.execute("BEGIN IMMEDIATE")
        try:
            yield
            self.commit()
        except BaseException as error:
            with suppress(sqlite3.Error):  # some errors have rolled back already
                self._db.execute("ROLLBACK")
            if isinstance(
                error, OutputError
            ):  # the log may have grown for nothing, and there is no space
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
        """Make a manifest of all that is in this one at another place, in place of what is there."""
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
        """Move what the log has into the manifest itself, where who copies the manifest alone finds it.

        Where that cannot be, the log keeps it.
        """
        with suppress(sqlite3.OperationalError):
            self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    def close(self) -> None:
        """Let go of the file and of the lock, also where somebody has not read all rows."""
        for cursor in self._read:
            cursor.close()
        self._db.close()

    def _failed(self, error: sqlite3.DatabaseError) -> OutputError | ConfigError:
        if isinstance(error, sqlite3.OperationalError):
            return OutputError(
                self.path,
                f"cannot be written: {error}: see that the disk has space, then run the same command again: what is "
                "done stays done",
            )
        return _damaged(self._home, error)

    # ---- what is in it ----

    def settings(self) -> dict[str, str]:
        """Return the settings of the runs that wrote here."""
        found = self.rows("SELECT name, value FROM settings")
        return {name: os.fsdecode(value) for name, value in found}

    def set_settings(self, settings: Mapping[str, str]) -> None:
        """Keep these settings alone."""
        self.execute("DELETE FROM settings")
        rows = [(name, _stored(value)) for name, value in settings.items()]
        self.execute_many("INSERT INTO settings VALUES (?, ?)", rows)

    def files(self) -> dict[int, FileRow]:
        """Return what is known of the outputs."""
        found = self.rows(
            "SELECT file, path, header, size, synced, is_open, is_replaced FROM files"
        )
        return {
            file: FileRow(file, self._absolute(path), *rest[:3], *map(bool, rest[3:]))
            for file, path, *rest in found
        }

    def _absolute(self, path: str | bytes) -> Path:
        return Path(os.path.normpath(self._home.parent / os.fsdecode(path)))

    def put_file(self, row: FileRow) -> None:
        """Keep this of an output, in place of what was known of it."""
        self.execute(
            "INSERT OR REPLACE INTO files VALUES (?, ?, ?, ?, ?, ?, ?)",
            row.file,
            _relative(row.path, self._home.parent),
            row.header,
            row.size,
            row.synced,
            row.is_open,
            row.is_replaced,
        )

    def forget(self, file: int) -> None:
        """Forget a file and its records."""
        self.execute("DELETE FROM files WHERE file = ?", file)
        self.execute("DELETE FROM records WHERE file = ?", file)

    def count(self, file: int) -> Count:
        """Return how many records a file has."""
        found = self.execute(
            "SELECT count(*), sum(is_error), sum(size), sum(number >= ?) FROM records WHERE file = ?",
            GONE,
            file,
        ).fetchone()
        return Count(*(n or 0 for n in found))

    def last_record(self) -> int:
        """Return the largest number of a record, 0 where there is none."""
        return int(self.execute("SELECT coalesce(max(record), 0) FROM records").fetchone()[0])


def record_key(id: str) -> bytes:
    """Return what stands for an id: its own bytes where they are few, else a digest; 0xFF is in no text."""
    text = bytes_of(id)
    return text if len(text) <= _LONG_ID else b"\xff" + blake2b(text, digest_size=11).digest()


def manifest_of(output: Path) -> Path:
    """Return where the manifest of an output is."""
    return output.with_name(f"{output.name}.manifest")


def files_of_manifest(path: Path) -> list[Path]:
    """Return the places of a manifest and of what SQLite keeps beside it."""
    return [Path(f"{path}{ending}") for ending in _ENDINGS]


def remove_manifest(path: Path) -> None:
    """Remove a manifest, with all of its files."""
    for file in files_of_manifest(path):
        file.unlink(missing_ok=True)


def _relative(path: Path, folder: Path) -> str | bytes:
    """Return a path as seen from a folder, so that both may be moved together."""
    return _stored(os.path.relpath(path, folder))


def _stored(text: str) -> str | bytes:
    """Return text as a manifest keeps it; a name that is no UTF-8 as the bytes that it is."""
    with suppress(UnicodeEncodeError):
        text.encode()
        return text
    return os.fsencode(text)


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def _damaged(path: Path, problem: object) -> ManifestError:
    return ManifestError(
        f"{path}: is damaged, or no manifest of cbatch ({problem})",
        "put it back, have it made again of JSON lines (--adopt), give another output, or replace it with its output "
        "(--force)",
    )
