"""What a journal does to the disk: each step that a kill can fall before or behind is one function here."""

from __future__ import annotations

import errno
import os
import stat
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from cbatch.errors import OutputError

if TYPE_CHECKING:
    from collections.abc import Iterator

ANYBODY = 0o666
"""Bits of permission of a new file, of which the user's mask takes some away."""

_PRIVATE = 0o600

_ACCESS_LIST = "system.posix_acl_access"
"""Source: Linux's acl(5); where a file has one, the mode's bits of the group are the most that the list may give."""

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
def whole(path: Path, *, mode: int = ANYBODY) -> Iterator[Path]:
    """Lend a path beside a file: what is written there takes its place behind the block, or goes if that fails.

    A file that is replaced keeps its owner and its mode, and a link to it leads there still. What is no file, such as a
    device, stays and is written itself.

    Args:
        path: of the file.
        mode: bits of permission of a file that is new, but for those that the user's mask takes away.
    """
    path = Path(os.path.realpath(path))
    if path.exists() and not path.is_file():
        yield path
        return
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        fd = create(part, _PRIVATE if path.exists() else mode)
        try:
            yield part
            if path.exists():
                take_access(fd, path)
        finally:
            os.close(fd)
        replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def create(path: Path, mode: int = _PRIVATE) -> int:
    """Open a new file, in place of what a killed run has left there; others may read it where `mode` says so."""
    path.unlink(missing_ok=True)
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)


def mode_of(path: Path) -> int:
    """Return a file's bits of permission, those of a new one where there is none."""
    try:
        return stat.S_IMODE(path.stat().st_mode) & ANYBODY
    except FileNotFoundError:
        return ANYBODY


def take_access(file: int | Path, model: Path) -> None:
    """Let those read and write a file who may do so with another, as far as the system lets us: owner, group and mode.

    Where it cannot have the other's group, no group may read it.
    """
    wanted, found = model.stat(), os.stat(file)
    mode = stat.S_IMODE(wanted.st_mode)
    if (found.st_uid, found.st_gid) != (wanted.st_uid, wanted.st_gid) and not _give(file, wanted):
        mode &= ~stat.S_IRWXG
    with suppress(OSError, AttributeError):  # not every file, nor every system, has an access list
        os.setxattr(file, _ACCESS_LIST, os.getxattr(model, _ACCESS_LIST))
    with suppress(PermissionError):  # a file of somebody else stays as it is
        os.chmod(file, mode)


def tighten(path: Path, model: Path) -> None:
    """Let nobody read or write a file, if there is one, who may not do so with another."""
    with suppress(FileNotFoundError, PermissionError):
        path.chmod(stat.S_IMODE(path.stat().st_mode) & stat.S_IMODE(model.stat().st_mode))


def _give(file: int | Path, wanted: os.stat_result) -> bool:
    """Give a file to this owner and group, or to the group at least; return whether the group has it."""
    for owner in (wanted.st_uid, -1):
        with suppress(PermissionError):
            os.chown(file, owner, wanted.st_gid)
            return True
    return False


def sync_folder(folder: Path) -> None:
    """Return when the disk has the names in this folder."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
