"""Folders on disk: names in them that last, and files that appear in them whole or not at all."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import resource
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from cbatch.errors import OutputError

ANYBODY = 0o666
"""Permission bits of a new file, before the user's mask."""

_WAYS_OUT = {
    errno.ENOSPC: "the disk is full: free some space",
    errno.EDQUOT: "the disk quota is used up: free some space",
    errno.EFBIG: "the file would be larger than is allowed here (ulimit -f): raise the limit",
}

_N_BLOCK = 2**13
"""Most bytes that SQLite writes at once: where a write fails, a file is at most this much below the limit."""

_N_MARK = 4

_LOCK_PAUSE_S = 0.01


@contextmanager
def told(path: Path, more: str = "") -> Iterator[None]:
    """Raise errors of the system as `OutputError`, with the file and the way out, behind which comes `more`."""
    try:
        yield
    except OSError as error:
        way_out = _WAYS_OUT.get(error.errno or 0)
        reason = f"cannot be written: {error.strerror or error}"
        raise OutputError(path, reason if way_out is None else way_out + more) from error


def way_out(*paths: Path) -> str:
    """Return the way out if one of the files is as large as this process may write (`ulimit -f`); else ""."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    sizes = [path.stat().st_size for path in paths if path.exists()]
    is_at_limit = limit != resource.RLIM_INFINITY and max(sizes, default=0) + _N_BLOCK > limit
    return _WAYS_OUT[errno.EFBIG] if is_at_limit else ""


def room_for(error: Exception) -> str:
    """Return the way out of an error of the system or of SQLite that says that there is no room; else ""."""
    number = errno.ENOSPC if "disk is full" in str(error) else getattr(error, "errno", None)
    return _WAYS_OUT.get(number or 0, "")


def system_error_of(error: Exception, *paths: Path) -> Exception:
    """Return an error of SQLite as the system has it if one of its files may not grow: SQLite has no word for that."""
    if "I/O" not in str(error) or not way_out(*paths):
        return error
    found = OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(paths[0]))
    found.__cause__ = error
    return found


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on disk: files last as long as their names."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextmanager
def part_beside(path: Path, *, suffix: str = ".part", mode: int = ANYBODY) -> Iterator[Path]:
    """Lend a new, empty file beside another, which is gone after the block unless it was renamed.

    It is locked, so that processes tell it from one whose writer was killed: all of these that belong to `path` are
    removed first. Write to it in place.

    Args:
        path: of the other file, which need not be there; its folder is.
        suffix: the end of the name: `.part` or, where several are lent at once, `.WORD.part`.
        mode: permission bits, before the user's mask.
    """
    _remove_left(path)
    part, fd = _locked(path, suffix, mode)
    try:
        yield part
    finally:
        part.unlink(missing_ok=True)
        os.close(fd)


def _locked(path: Path, suffix: str, mode: int) -> tuple[Path, int]:
    """Return a new file and its open descriptor, which has the lock."""
    while True:
        part = path.with_name(f".{path.name}.{secrets.token_hex(_N_MARK)}{suffix}")
        fd = os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        with suppress(OSError):  # not every file system has locks; nothing is removed there
            fcntl.flock(fd, fcntl.LOCK_EX)
        if part.exists():
            return part, fd
        os.close(fd)  # it was removed by another process before it had the lock


def lock(fd: int, within_s: float = 0.0) -> None:
    """Lock an open file or folder until it is closed.

    Raises:
        BlockingIOError: another has it for so long.
        OSError: the file system has no locks.
    """
    end_s = time.monotonic() + within_s
    while not _has_locked(fd):
        if time.monotonic() >= end_s:
            raise BlockingIOError(errno.EWOULDBLOCK, os.strerror(errno.EWOULDBLOCK))
        time.sleep(_LOCK_PAUSE_S)


def _has_locked(fd: int) -> bool:
    with suppress(BlockingIOError):
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


def _remove_left(path: Path) -> None:
    """Remove what killed writers of a file have left."""
    pattern = re.compile(rf"\.{re.escape(path.name)}\.[0-9a-f]{{{2 * _N_MARK}}}(\.\w+)?\.part")
    with suppress(OSError):  # a folder in which names can be made but not listed
        for name in filter(pattern.fullmatch, os.listdir(path.parent)):
            with suppress(OSError):  # somebody else's, or just removed
                _remove_unlocked(path.with_name(name))


def _remove_unlocked(path: Path) -> None:
    fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink()
    finally:
        os.close(fd)
