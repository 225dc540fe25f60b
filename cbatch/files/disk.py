"""What a journal does to the disk: each step that a kill can fall before or behind is one function here."""

from __future__ import annotations

import errno
import os
from contextlib import contextmanager
from typing import TYPE_CHECKING

from cbatch.errors import OutputError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_AGAIN = "then run the same command again: what is done stays done"

_WAYS_OUT = {
    errno.ENOSPC: f"the disk is full: free some space, {_AGAIN}",
    errno.EDQUOT: f"the disk quota is used up: free some space, {_AGAIN}",
    errno.EFBIG: f"the file would be larger than is allowed here (ulimit -f): raise the limit, {_AGAIN}",
}


@contextmanager
def told(path: Path) -> Iterator[None]:
    """Tell of a failure of the system with the name of the file and the way out."""
    try:
        yield
    except OSError as error:
        reason = f"cannot be written: {error.strerror or error}"
        raise OutputError(path, _WAYS_OUT.get(error.errno or 0, reason)) from error


def write_at(fd: int, data: bytes, start: int) -> None:
    """Write all of it at this place."""
    left = memoryview(data)
    while left:
        n_written = os.pwrite(fd, left, start)
        left, start = left[n_written:], start + n_written


def truncate(fd: int, size: int) -> None:
    """Cut the file off."""
    os.ftruncate(fd, size)


def sync(fd: int) -> None:
    """Return when the disk has the file."""
    os.fsync(fd)


def replace(new: Path, old: Path) -> None:
    """Put a file in the place of another, on the disk too."""
    new.replace(old)
    sync_folder(old.parent)


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Lend a path beside a file: what is written there takes its place behind the block, or goes if that fails.

    What is no file, such as a device, stays and is written itself.
    """
    if path.exists() and not path.is_file():
        yield path
        return
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield part
        replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Return when the disk has the names in this folder."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
