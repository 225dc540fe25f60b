"""A file of records: committed bytes, records to be written, and checks for changes by other programs."""

from __future__ import annotations

import fcntl
import os
import stat
import zlib
from dataclasses import replace
from typing import TYPE_CHECKING

from cbatch.errors import ConfigError, OutputError
from cbatch.files.output import durable as disk
from cbatch.files.output.durable import told
from cbatch.files.output.manifest import GONE
from cbatch.files.places import check_place

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from cbatch.files.output.manifest import FileRow, Manifest

_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
_PIECE = 2**20
_N_SAMPLES = 32
"""Records, besides the first and the last, that are read again before a run continues: an editor changes some."""

CUT_OFF = "DELETE FROM records WHERE file = ? AND start + size > ?"
_BEHIND = "SELECT record, start, size, crc FROM records WHERE file = ? AND start + size > ?"
_SAMPLES = (
    "SELECT start, size, crc, number FROM records WHERE file = ? ORDER BY start LIMIT 1",
    "SELECT start, size, crc, number FROM records WHERE file = ? ORDER BY start DESC LIMIT 1",
    # A fixed sample that is spread evenly. Source: Knuth's multiplicative hashing.
    "SELECT start, size, crc, number FROM records WHERE file = ? "
    f"ORDER BY record * 2654435761 % 4294967291 LIMIT {_N_SAMPLES}",
)


class RecordFile:
    """An open file of records.

    [0, size) is committed    [size, size + n_added) is added, in memory only
    """

    def __init__(self, row: FileRow, mode: int = disk.ANYBODY) -> None:
        """Open or create the file, and lock it.

        Args:
            row: the file in the manifest.
            mode: permission bits of a new file, before the user's mask.

        Raises:
            ConfigError: another run has it open.
            OutputError: it cannot be opened.
        """
        self.row = row
        self.n_added = 0
        self._added: list[bytes] = []
        self._is_ahead = False  # whether bytes behind `size` may be ours, not committed yet
        self._open(mode)

    def _open(self, mode: int = disk.ANYBODY) -> None:
        with told(self.path):
            self._fd = os.open(self.path, _FLAGS, mode)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._fd)
            raise ConfigError(
                f"{self.path}: another run is writing to it: wait for its end, or give another file"
            ) from error

    def reopen(self) -> None:
        """Open the file that has replaced this one."""
        os.close(self._fd)
        self._open()

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)

    @property
    def path(self) -> Path:
        """Of the file."""
        return self.row.path

    @property
    def part(self) -> Path:
        """Of the file's next version."""
        return part_of(self.path)

    @property
    def size(self) -> int:
        """Committed bytes."""
        return self.row.size or 0

    # ---- writing ----

    def begin(self) -> None:
        """Make it a file of its header alone, on disk."""
        with told(self.path):
            self.part.unlink(missing_ok=True)
            disk.truncate(self._fd, 0)
            disk.write_at(self._fd, self.row.header, 0)
            disk.sync(self._fd)
        n_bytes = len(self.row.header)
        self.row = replace(self.row, size=n_bytes, synced=n_bytes)

    def add(self, record: bytes) -> int:
        """Keep a record for the next `write`; return its start."""
        start = self.size + self.n_added
        self._added.append(record)
        self.n_added += len(record)
        return start

    def write(self) -> FileRow:
        """Write the records that were added; return the row to commit. After an error all records are kept.

        Raises:
            OutputError: it cannot be written, or another program has changed the file.
        """
        if self._added:
            self._check_untouched()
            self._is_ahead = True
            with told(self.path):
                disk.write_at(self._fd, b"".join(self._added), self.size)
        return replace(self.row, size=self.size + self.n_added)

    def committed(self, row: FileRow) -> None:
        """Note that the manifest has this row now."""
        self.row = row
        self._added.clear()
        self.n_added, self._is_ahead = 0, False

    def sync(self) -> FileRow:
        """Wait until the committed bytes are on disk; return the row to commit.

        Raises:
            OutputError: it cannot be written, or another program has changed the file.
        """
        self._check_untouched()
        if self.row.synced < self.size:
            with told(self.path):
                disk.sync(self._fd)
        return replace(self.row, synced=self.size)

    def _check_untouched(self) -> None:
        """Check that no other program has removed the file, replaced it, cut it off or added to it.

        Raises:
            OutputError: one has.
        """
        status = os.fstat(self._fd)
        n_more = status.st_size - self.size
        if not status.st_nlink:
            problem = "was removed while the run wrote there, and its records with it"
        elif not self._is_at_its_place(status):
            problem = "was moved away while the run wrote there: put it back"
        elif n_more < 0:
            problem = (
                f"was cut off while the run wrote there, {-n_more:,} bytes of its records with it"
            )
        elif n_more > 0 and not self._is_ahead:
            problem = (
                f"was written to by another program while the run wrote there, {n_more:,} bytes"
            )
        else:
            return
        raise OutputError(self.path, f"{problem}. Run the same command again: whole records stay")

    def _is_at_its_place(self, status: os.stat_result) -> bool:
        try:
            return os.path.samestat(status, self.path.stat())
        except OSError:
            return False

    # ---- checking ----

    def grown(self) -> str | None:
        """Return a description of bytes that were added after a run had closed the file, or None."""
        n_more = os.fstat(self._fd).st_size - self.size
        return f"{n_more:,} bytes were added" if n_more > 0 and not self.row.is_open else None

    def drop_torn(self, manifest: Manifest) -> int:
        """Forget the records that are not whole, in a transaction of the caller; return their number."""
        n_cut = manifest.execute(CUT_OFF, self.row.file, os.fstat(self._fd).st_size).rowcount
        behind = manifest.rows(_BEHIND, self.row.file, self.row.synced)
        torn = [(record,) for record, *place in behind if not is_whole(self._fd, *place)]
        manifest.execute_many("DELETE FROM records WHERE record = ?", torn)
        [end] = manifest.execute(
            "SELECT max(start + size) FROM records WHERE file = ?", self.row.file
        ).fetchone()
        size = max(end or 0, len(self.row.header))
        self.row = replace(self.row, size=size, synced=min(size, self.row.synced), is_open=True)
        return n_cut + len(torn)

    def changed(self, manifest: Manifest) -> str | None:
        """Return a description of a change by another program, as far as a sample of records shows one, or None."""
        return changed(self._fd, self.row, manifest)

    def cut(self) -> None:
        """Cut off bytes that are not committed; without records, begin again."""
        n_bytes = os.fstat(self._fd).st_size
        if self.size == len(self.row.header) != n_bytes:
            self.begin()
        elif n_bytes != self.size:
            with told(self.path):
                disk.truncate(self._fd, self.size)

    def pieces(self, start: int, size: int) -> Iterator[bytes]:
        """Yield these bytes piece by piece."""
        return _pieces(self._fd, start, size)


def changed(fd: int, row: FileRow, manifest: Manifest) -> str | None:
    """Return a description of a change in a file, as far as a sample of records shows one, or None."""
    n_header = len(row.header)
    if (row.size or 0) > n_header and os.pread(fd, n_header, 0) != row.header:
        return "its beginning is not as it was written"
    for statement in _SAMPLES:
        for start, size, crc, number in manifest.rows(statement, row.file):
            if not is_whole(fd, start, size, crc):
                return f"the bytes from {start:,} on are not the record of item {number % GONE:,}"
    return None


def is_whole(fd: int, start: int, size: int, crc: int) -> bool:
    """Whether a file has this record at this place."""
    found, n_read = 0, 0
    for piece in _pieces(fd, start, size):
        found, n_read = zlib.crc32(piece, found), n_read + len(piece)
    return (n_read, found) == (size, crc)


def _pieces(fd: int, start: int, size: int) -> Iterator[bytes]:
    end = start + size
    while start < end and (piece := os.pread(fd, min(_PIECE, end - start), start)):
        yield piece
        start += len(piece)


def part_of(path: Path) -> Path:
    """Return the place of the next version of a file."""
    return path.with_name(f".{path.name}.part")


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
