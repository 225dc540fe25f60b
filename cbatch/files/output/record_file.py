"""One file of records: what is committed of it, what is added to it, and whether it is still as it was written."""

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
"""Records that are read again before a run goes on, beside first and last: who moves lines moves some of them."""

CUT_OFF = "DELETE FROM records WHERE file = ? AND start + size > ?"
_BEHIND = "SELECT record, start, size, crc FROM records WHERE file = ? AND start + size > ?"
_SAMPLES = (
    "SELECT start, size, crc, number FROM records WHERE file = ? ORDER BY start LIMIT 1",
    "SELECT start, size, crc, number FROM records WHERE file = ? ORDER BY start DESC LIMIT 1",
    # A fixed choice that is spread evenly. Source: Knuth's multiplicative hashing.
    "SELECT start, size, crc, number FROM records WHERE file = ? "
    f"ORDER BY record * 2654435761 % 4294967291 LIMIT {_N_SAMPLES}",
)


class Output:
    """An open file of records.

    [0, size) is committed    [size, size + n_added) is added and nowhere but in memory yet
    """

    def __init__(self, row: FileRow, mode: int = disk.ANYBODY) -> None:
        """Open or create the file, and keep others from writing to it.

        Args:
            row: what is known of it.
            mode: bits of permission of a file that is new, but for those that the user's mask takes away.

        Raises:
            ConfigError: another run writes there.
            OutputError: it cannot be opened.
        """
        self.row = row
        self.n_added = 0
        self._added: list[bytes] = []
        self._is_ahead = False  # whether bytes behind `size` may be our own, not committed yet
        self._open(mode)

    def _open(self, mode: int = disk.ANYBODY) -> None:
        with told(self.path):
            self._fd = os.open(self.path, _FLAGS, mode)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._fd)
            raise ConfigError(
                f"{self.path}: another run writes there: wait for its end, or give another file"
            ) from error

    def reopen(self) -> None:
        """Go on with the file that has come in the place of this one."""
        os.close(self._fd)
        self._open()

    def close(self) -> None:
        """Let go of the file."""
        os.close(self._fd)

    @property
    def path(self) -> Path:
        """Where it is."""
        return self.row.path

    @property
    def part(self) -> Path:
        """Where its next version is written."""
        return part_of(self.path)

    @property
    def size(self) -> int:
        """Bytes that are committed."""
        return self.row.size or 0

    # ---- writing ----

    def begin(self) -> None:
        """Make it a file with its header alone, which the disk has."""
        with told(self.path):
            self.part.unlink(missing_ok=True)
            disk.truncate(self._fd, 0)
            disk.write_at(self._fd, self.row.header, 0)
            disk.sync(self._fd)
        n_bytes = len(self.row.header)
        self.row = replace(self.row, size=n_bytes, synced=n_bytes)

    def add(self, record: bytes) -> int:
        """Keep a record for the next `write`; return where it will start."""
        start = self.size + self.n_added
        self._added.append(record)
        self.n_added += len(record)
        return start

    def write(self) -> FileRow:
        """Write what was added; return what to commit. Where it fails, nothing of it counts and all of it is kept.

        Raises:
            OutputError: it cannot be written, or somebody else has changed the file.
        """
        if self._added:
            self._check_untouched()
            self._is_ahead = True
            with told(self.path):
                disk.write_at(self._fd, b"".join(self._added), self.size)
        return replace(self.row, size=self.size + self.n_added)

    def committed(self, row: FileRow) -> None:
        """Take as written what the manifest has now."""
        self.row = row
        self._added.clear()
        self.n_added, self._is_ahead = 0, False

    def sync(self) -> FileRow:
        """Let the disk have what is committed; return what to commit.

        Raises:
            OutputError: it cannot be written, or somebody else has changed the file.
        """
        self._check_untouched()
        if self.row.synced < self.size:
            with told(self.path):
                disk.sync(self._fd)
        return replace(self.row, synced=self.size)

    def _check_untouched(self) -> None:
        """Check that nobody else has removed the file, put another in its place, cut it off or added to it.

        Raises:
            OutputError: what has happened.
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
            problem = f"was written to by somebody else while the run wrote there, {n_more:,} bytes"
        else:
            return
        raise OutputError(
            self.path, f"{problem}. Run the same command again: what is there stays done"
        )

    def _is_at_its_place(self, status: os.stat_result) -> bool:
        try:
            return os.path.samestat(status, self.path.stat())
        except OSError:
            return False

    # ---- checking ----

    def grown(self) -> str | None:
        """Return what was added after a run had closed it; None: nothing."""
        n_more = os.fstat(self._fd).st_size - self.size
        return f"{n_more:,} bytes were added" if n_more > 0 and not self.row.is_open else None

    def drop_torn(self, manifest: Manifest) -> int:
        """Forget the records that are not whole, in a transaction of the caller; return how many."""
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
        """Return what somebody else has changed in it, as far as some of its records show; None: nothing."""
        return changed(self._fd, self.row, manifest)

    def cut(self) -> None:
        """Cut off what is not committed; without any record it is as it began."""
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
    """Return what is not as it was written in a file, as far as some of its records show; None: nothing."""
    n_header = len(row.header)
    if (row.size or 0) > n_header and os.pread(fd, n_header, 0) != row.header:
        return "its beginning is not as it was written"
    for statement in _SAMPLES:
        for start, size, crc, number in manifest.rows(statement, row.file):
            if not is_whole(fd, start, size, crc):
                return f"what stands at byte {start:,} is not the record of item {number % GONE:,}"
    return None


def is_whole(fd: int, start: int, size: int, crc: int) -> bool:
    """Whether this record stands here in a file."""
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
    """Return where the next version of a file is written."""
    return path.with_name(f".{path.name}.part")


def check_file(path: Path) -> None:
    """Check that a file of records can be at this place.

    Raises:
        ConfigError: a folder, a device, or nothing that can be written.
    """
    check_place(path)
    if path.exists() and not stat.S_ISREG(path.stat().st_mode):
        raise ConfigError(
            f"{path}: is not a regular file, so no run could go on with it: give a file, or - for stdout"
        )
    if not os.access(path.parent, os.W_OK):  # where the manifest is to be
        raise ConfigError(f"{path.parent}: no permission to write there")
