"""A file of records: committed bytes, records to be written, checks for changes by other programs, and rewriting.

A kill may come at any moment of a rewriting, and only the output and its manifest may be copied afterwards. The new
version is whole on disk, as a part beside the output, before the manifest notes that it replaces the output; until that
is done, the manifest has the old and the new start of each record. The next opening of the manifest finishes the
replacement, or keeps the old output if the part is gone.
"""

from __future__ import annotations

import os
import stat
import zlib
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing, suppress
from itertools import count
from pathlib import Path
from typing import Literal

from cbatch.errors import ConfigError, OutputError
from cbatch.files.output import durable as disk
from cbatch.files.output.durable import told
from cbatch.files.output.manifest import DELETE, GONE, Count, FileRow, LostError, Manifest
from cbatch.files.places import check_place, status_of
from cbatch.support.folders import lock

_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
_BUFFER = 2**20
_N_SAMPLES = 32
"""Records, besides the first and the last, that are read again before a run continues: an editor changes some."""

_LOCK_S = 0.2
"""Seconds to wait for a lock, because `durable.is_locked` holds one for a moment. Our choice."""

CUT_OFF = "DELETE FROM records WHERE file = ? AND start + size > ?"
_BEHIND = "SELECT record, start, size, crc FROM records WHERE file = ? AND start + size > ?"
_SAMPLES = tuple(
    f"SELECT start, size, crc, number FROM records WHERE file = ? ORDER BY {order}"
    for order in (
        "start LIMIT 1",
        "start DESC LIMIT 1",
        # A fixed sample that is spread evenly. Source: Knuth's multiplicative hashing.
        f"record * 2654435761 % 4294967291 LIMIT {_N_SAMPLES}",
    )
)
_NUMBERS = "SELECT number FROM records WHERE file = ? ORDER BY number, record"
_MOVED = (
    "SELECT moved.start, records.size, records.crc FROM moved JOIN records USING (record) "
    "WHERE records.file = ? AND moved.start != records.start"
)
_MOVE = (
    "UPDATE records SET start = (SELECT start FROM moved WHERE moved.record = records.record) "
    "WHERE file = ?"
)

Order = Literal["start", "number"]
"""That of the file, or that of the items."""


class RecordFile:
    """An open file of records, locked until it is closed.

    [0, row.size) is committed    [row.size, row.size + len(added)) is added, in memory only

    Attributes:
        row: the file in the manifest.
    """

    def __init__(self, manifest: Manifest, row: FileRow, mode: int = disk.ANYBODY) -> None:
        """Open or create the file, with the permission bits `mode` before the user's mask, and lock it.

        Raises:
            ConfigError: another run has it open.
            OutputError: it cannot be opened.
        """
        self.row, self.path, self._manifest = row, row.path, manifest
        self._added = bytearray()
        self._is_ahead = False  # whether bytes after the committed ones may be ours
        self._fd = open_locked(self.path, mode)

    def close(self) -> None:
        """Close the file, after cutting off bytes that this run has written but not committed."""
        if self._is_ahead:
            with suppress(OSError):
                disk.truncate(self._fd, self.row.size)
        os.close(self._fd)

    def count(self) -> Count:
        """Return the counts of the committed records."""
        return self._manifest.count(self.row.file)

    # ---- writing ----

    def add(self, record: bytes) -> int:
        """Keep a record for the next `write`; return its start."""
        start = self.row.size + len(self._added)
        self._added += record
        return start

    def write(self) -> None:
        """Write the records that were added; they are kept until `committed`.

        Raises:
            OutputError: the file cannot be written, or another program has changed it.
        """
        if self._added:
            self._check_untouched()
            self._is_ahead = True
            with told(self.path):
                disk.write_at(self._fd, bytes(self._added), self.row.size)

    def committed(self) -> None:
        """Note that the manifest has the records that were written."""
        self.row.size += len(self._added)
        self._added.clear()
        self._is_ahead = False

    def sync(self) -> bool:
        """Wait until the committed bytes are on disk; return whether `row` has changed by that.

        Raises:
            OutputError: the file cannot be written, or another program has changed it.
        """
        self._check_untouched()
        if self.row.synced == self.row.size:
            return False
        with told(self.path):
            disk.sync(self._fd)
        self.row.synced = self.row.size
        return True

    def _check_untouched(self) -> None:
        """Check that no other program has removed the file, replaced it, cut it off or added to it.

        Raises:
            OutputError: one has.
        """
        status, there = os.fstat(self._fd), status_of(self.path)
        n_more = status.st_size - self.row.size
        if not status.st_nlink:
            problem = "was removed with its records while the run wrote there"
        elif there is None or not os.path.samestat(status, there):
            problem = "was moved away while the run wrote there: put it back"
        elif n_more < 0:
            problem = (
                f"was cut off while the run wrote there, and lost {-n_more:,} bytes of records"
            )
        elif n_more > 0 and not self._is_ahead:
            problem = f"got {n_more:,} bytes from another program while the run wrote there"
        else:
            return
        raise OutputError(
            self.path, f"{problem}. Run the same command again: complete records are kept"
        )

    # ---- checking ----

    def check(self) -> int:
        """Forget records that are not whole, in a transaction of the caller; return their number.

        Raises:
            LostError: another program has changed the file, as far as a sample of records shows.
        """
        row, manifest = self.row, self._manifest
        n_bytes = os.fstat(self._fd).st_size
        if n_bytes > row.size and not row.is_open:
            raise _changed_error(self.path, f"{n_bytes - row.size:,} bytes were added")
        n_cut = manifest.execute(CUT_OFF, row.file, n_bytes).rowcount
        behind = manifest.rows(_BEHIND, row.file, row.synced)
        torn = [(record,) for record, *place in behind if not _is_whole(self._fd, *place)]
        manifest.execute_many(DELETE, torn)
        [end] = manifest.execute(
            "SELECT max(start + size) FROM records WHERE file = ?", row.file
        ).fetchone()
        if not end and n_bytes < row.synced and self._is_of_another():
            raise _changed_error(self.path, "all of its records are missing")
        row.size = end or len(row.header)
        row.synced = min(row.size, row.synced)
        row.is_open = True
        if end and (problem := _change(self._fd, row, manifest)):
            raise _changed_error(self.path, problem)
        manifest.put_file(row)
        return n_cut + len(torn)

    def _is_of_another(self) -> bool:
        """Whether a file without a whole record has more than the header and a part of a line."""
        found, header = os.pread(self._fd, _BUFFER, 0), self.row.header
        return not header.startswith(found[: len(header)]) or b"\n" in found[len(header) :]

    def repair(self) -> Path | None:
        """Move uncommitted bytes to another file, remove superseded records, and write a missing header.

        Returns:
            The other file, or None without such bytes. A killed run or another program has written them.
        """
        n_bytes, header, aside = os.fstat(self._fd).st_size, self.row.header, None
        with told(self.path):
            begin = os.pread(self._fd, len(header), 0)
            end = self.row.size if begin == header else 0
            if n_bytes > end:
                if n_bytes > len(begin) or not header.startswith(begin):
                    aside = self._set_aside(end, n_bytes)
                disk.truncate(self._fd, end)
            if begin != header:
                disk.write_at(self._fd, header, 0)
                disk.sync(self._fd)
                self.row.synced = len(header)
        self.compact()
        return aside

    def _set_aside(self, start: int, end: int) -> Path:
        """Copy the bytes from `start` to `end` to a new file; return its path."""
        path = next(path for path in _places_aside(self.path) if not path.exists())
        part = part_of(path)
        fd = disk.create(part)
        try:
            disk.take_access(fd, self.path)
            write_all(fd, _pieces(self._fd, start, end - start))
        finally:
            os.close(fd)
        disk.replace(part, path)
        return path

    # ---- rewriting ----

    def compact(self) -> None:
        """Rewrite the file if it has superseded records."""
        if len(self.row.header) + self.count().n_bytes != self.row.size:
            self.rewrite("start")

    def rewrite(self, order: Order) -> None:
        """Rewrite the file without superseded records, the others in an order."""
        part = part_of(self.path)
        with told(part):
            try:
                self._write_part(part, order)
            except OSError:
                part.unlink(missing_ok=True)
                raise
        self.row.is_replaced = True
        self._manifest.save(self.row)
        self._manifest.fold()
        finish(self._manifest, self.row)
        before, self._fd = self._fd, open_locked(self.path)
        os.close(before)

    def _write_part(self, part: Path, order: Order) -> None:
        with self._manifest.transaction():
            self._manifest.execute("DROP TABLE IF EXISTS moved")
            self._manifest.execute(
                "CREATE TABLE moved (record INTEGER PRIMARY KEY, start INTEGER NOT NULL)"
            )
            self._manifest.execute(
                f"INSERT INTO moved SELECT record, ? + sum(size) OVER (ORDER BY {order}, record) - size "
                "FROM records WHERE file = ?",
                len(self.row.header),
                self.row.file,
            )
        fd = disk.create(part)
        try:
            disk.take_access(fd, self.path)
            with closing(self.pieces(order)) as pieces:
                write_all(fd, pieces)
        finally:
            os.close(fd)

    def _records(self, order: Order) -> Generator[tuple[int, int, int]]:
        """Yield number, start and size of every record; SQLite sorts them, on disk where they are many."""
        return self._manifest.rows(
            f"SELECT record, start, size FROM records WHERE file = ? ORDER BY {order}, record",
            self.row.file,
        )

    def numbers(self) -> Generator[int]:
        """Yield the number of the item of each record of a file in the order of the items."""
        for (number,) in self._manifest.rows(_NUMBERS, self.row.file):
            yield number

    def is_sorted(self) -> bool:
        """Whether the records are in the order of their items."""
        last = -1
        for _, start, _ in self._records("number"):
            if start < last:
                return False
            last = start
        return True

    def pieces(self, order: Order) -> Generator[bytes]:
        """Yield the header and the records in an order, adjacent records in one piece."""
        yield self.row.header
        begin = end = 0
        for _, start, size in self._records(order):
            if start != end or end - begin > _BUFFER:
                yield from _pieces(self._fd, begin, end - begin)
                begin = start
            end = start + size
        yield from _pieces(self._fd, begin, end - begin)


def open_locked(path: Path, mode: int = disk.ANYBODY) -> int:
    """Open or create a file, locked until it is closed; see `RecordFile`."""
    with told(path):
        fd = os.open(path, _FLAGS, mode)
    try:
        lock(fd, _LOCK_S)
    except OSError as error:
        os.close(fd)
        raise _locked_error(path) from error
    return fd


def check_unlocked(path: Path) -> None:
    """Raise ConfigError if another run has the file open."""
    if disk.is_locked(path):
        raise _locked_error(path)


def _locked_error(path: Path) -> ConfigError:
    return ConfigError(
        f"{path}: another run is writing to it: wait for its end, or give another file"
    )


def finish(manifest: Manifest, row: FileRow) -> None:
    """Finish a `rewrite` whose part is whole; else remove the part."""
    part = part_of(row.path)
    with told(row.path):
        if not row.is_replaced:
            part.unlink(missing_ok=True)
            return
        if part.exists():
            disk.replace(part, row.path)
        is_done = _is_as_moved(manifest, row, row.path)
    row.is_replaced = False
    if is_done:
        row.size = row.synced = len(row.header) + manifest.count(row.file).n_bytes
    with manifest.transaction(is_durable=True):
        if is_done:
            manifest.execute(_MOVE, row.file)
        manifest.execute("DROP TABLE moved")
        manifest.put_file(row)
    manifest.fold()


def fits(manifest: Manifest, row: FileRow, path: Path) -> bool:
    """Whether a file has the records of a row, as far as a sample shows."""
    if not manifest.count(row.file).n_records or not path.is_file():
        return False
    with path.open("rb") as file:
        is_as_before = _change(file.fileno(), row, manifest) is None
    return is_as_before or (row.is_replaced and _is_as_moved(manifest, row, path))


def _is_as_moved(manifest: Manifest, row: FileRow, path: Path) -> bool:
    """Whether a file is the new version: a copy without the part is the old version."""
    if not path.exists():
        return False
    with path.open("rb") as file:
        return all(_is_whole(file.fileno(), *place) for place in manifest.rows(_MOVED, row.file))


def _change(fd: int, row: FileRow, manifest: Manifest) -> str | None:
    """Return a description of a change in a file with records, as far as a sample of them shows one, or None."""
    if os.pread(fd, len(row.header), 0) != row.header:
        return "its beginning has changed"
    for statement in _SAMPLES:
        for start, size, crc, number in manifest.rows(statement, row.file):
            if not _is_whole(fd, start, size, crc):
                return f"the record of item {number % GONE:,}, from byte {start:,} on, has changed"
    return None


def _changed_error(path: Path, problem: str) -> LostError:
    return LostError(
        f"{path}: was changed since cbatch wrote it: {problem}",
        "put it back as it was, give another output, or start again (--force); JSON lines can be adopted as they are "
        "(--adopt); to sort an output, use `cbatch sort`",
    )


def _is_whole(fd: int, start: int, size: int, crc: int) -> bool:
    found, n_read = 0, 0
    for piece in _pieces(fd, start, size):
        found, n_read = zlib.crc32(piece, found), n_read + len(piece)
    return (n_read, found) == (size, crc)


def _pieces(fd: int, start: int, size: int) -> Iterator[bytes]:
    end = start + size
    while start < end and (piece := os.pread(fd, min(_BUFFER, end - start), start)):
        yield piece
        start += len(piece)


def write_all(fd: int, pieces: Iterable[bytes]) -> None:
    """Write pieces to an empty file, and sync it."""
    block, start = bytearray(), 0
    for piece in pieces:
        block += piece
        if len(block) >= _BUFFER:
            disk.write_at(fd, bytes(block), start)
            start += len(block)
            block.clear()
    disk.write_at(fd, bytes(block), start)
    disk.sync(fd)


def part_of(path: Path) -> Path:
    """Return the place of the next version of a file, by a name that nobody else gives to a file."""
    return path.with_name(f".{path.name}.cbatch-part")


def _places_aside(path: Path) -> Iterator[Path]:
    return (path.with_name(f"{path.name}.cut-off{n or ''}") for n in count())


def check_file(path: Path) -> None:
    """Check that a file of records can be at this place.

    Raises:
        ConfigError: a folder, a device, or a place without permission.
    """
    check_place(path)
    if path.exists() and not stat.S_ISREG(path.stat().st_mode):
        raise ConfigError(
            f"{path}: is not a regular file, so no later run could continue it: give a file, or - for stdout"
        )
    if not os.access(path.parent, os.W_OK):  # where the manifest is to be
        raise ConfigError(f"{path.parent}: no permission to write there")
