"""Steps of a journal on disk: each step before or after which a kill can come is one function."""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

from cbatch.support import folders
from cbatch.support.folders import ANYBODY as ANYBODY
from cbatch.support.folders import part_beside
from cbatch.support.folders import sync_folder as sync_folder

_PRIVATE = 0o600

_ACCESS_LIST = "system.posix_acl_access"
"""Source: Linux's acl(5); the group bits of the mode then limit the rights that the list gives."""

_AGAIN = ", then run the same command again: finished items are kept"


def told(path: Path) -> AbstractContextManager[None]:
    """Raise errors of the system as `OutputError`, with the file and the way out."""
    return folders.told(path, _AGAIN)


def refusal_of(error: Exception, *paths: Path) -> str:
    """Return why a library could not write files, with the way out."""
    found = folders.way_out(*paths) or f"cannot be written: {error}: see that the disk has space"
    return found + _AGAIN


def write_at(fd: int, data: bytes, start: int) -> None:
    """Write all bytes at a place."""
    left = memoryview(data)
    while left:
        n_written = os.pwrite(fd, left, start)
        left, start = left[n_written:], start + n_written


def truncate(fd: int, size: int) -> None:
    """Cut off or extend a file."""
    os.ftruncate(fd, size)


def is_locked(path: Path) -> bool:
    """Whether a run has this output open."""
    with suppress(OSError), path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
    return False


def sync(fd: int) -> None:
    """Wait until a file is on disk."""
    os.fsync(fd)


def replace(new: Path, old: Path) -> None:
    """Replace a file by another, on disk too."""
    new.replace(old)
    sync_folder(old.parent)


@contextmanager
def whole(path: Path, *, mode: int = ANYBODY) -> Iterator[Path]:
    """Lend a path beside a file; after the block the new file replaces the old one, after an error it is removed.

    The new file has the owner and the mode of the old one, and links to it stay. A device is written directly. What a
    killed process has left beside the file is removed.

    Args:
        mode: permission bits of a new file, before the user's mask.
    """
    path = Path(os.path.realpath(path))
    if path.exists() and not path.is_file():
        yield path
        return
    with part_beside(path, mode=_PRIVATE if path.exists() else mode) as part:
        yield part
        if path.exists():
            take_access(part, path)
        replace(part, path)


def write_whole(path: Path, text: str) -> None:
    """Write a text whole or not at all. Raises an `OutputError` where that fails."""
    with folders.told(path), whole(path) as part:
        part.write_text(text, encoding="utf-8")


def create(path: Path, mode: int = _PRIVATE) -> int:
    """Create and open a file; replace one that a killed run has left."""
    path.unlink(missing_ok=True)
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)


def mode_of(path: Path) -> int:
    """Return a file's permission bits, those of a new file where there is none."""
    try:
        return stat.S_IMODE(path.stat().st_mode) & ANYBODY
    except FileNotFoundError:
        return ANYBODY


def take_access(file: int | Path, model: Path) -> None:
    """Give a file the owner, group and mode of another, as far as the system permits.

    Without the other's group, the file has no rights for its group.
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
    """Restrict the rights on a file, if there is one, to those on another."""
    with suppress(FileNotFoundError, PermissionError):
        path.chmod(stat.S_IMODE(path.stat().st_mode) & stat.S_IMODE(model.stat().st_mode))


def _give(file: int | Path, wanted: os.stat_result) -> bool:
    """Change owner and group of a file, or the group at least; return whether the group was changed."""
    for owner in (wanted.st_uid, -1):
        with suppress(PermissionError):
            os.chown(file, owner, wanted.st_gid)
            return True
    return False
