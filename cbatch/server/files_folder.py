"""The folder of a server's files and batches: who made it, and which names in it are the server's.

Only files with these names are removed, and never by the word of the index alone. All other files stay where they
are, or are moved to a folder below this one.
"""

from __future__ import annotations

import errno
import os
import re
import shlex
import sqlite3
import threading
import time
import weakref
from collections import Counter
from collections.abc import Container, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from cbatch.errors import ConfigError, OutputError
from cbatch.support.folders import lock, sync_folder, system_error_of
from cbatch.support.logs import Log

_log = Log("cbatch.server")

_MARKER = "CBATCH_FILES"
_ABOUT = b"cbatch serve keeps files and batches in this folder. Without this file it refuses the folder.\n"

_NOBODYS = frozenset({"lost+found"})
"""Names that an empty folder may hold: a new file system has them."""

FILE_ID, BATCH_ID = "file-[0-9a-f]{24}", "(batch|msgbatch)_[0-9a-f]{24}"
"""Patterns of ids, which are names of files and folders."""
_PART = re.compile(rf"{FILE_ID}\.part")
_OF_BATCH = re.compile(
    r"\.?(requests|answers|errors)\.jsonl(\.\w+)*(-(wal|shm|journal))?", re.ASCII
)
"""The files of a batch that runs: requests, answers, errors, their manifests, and parts of all of these."""

_PRIVATE = 0o700
_N_RESERVE = 2**20
"""Bytes reserved for changes of the index on a full disk. Our choice: removing a file writes some 20 KiB."""
_N_NAMED = 5
"""Most names in a warning. Our choice."""


def is_full(error: BaseException | None) -> bool:
    """Whether an error, or one of its causes, means that the disk is full, or a file as large as it may be."""
    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    if isinstance(error, sqlite3.OperationalError):
        return "full" in str(error)
    return isinstance(error, OutputError) and is_full(error.__cause__)


@contextmanager
def limit_told(database: Path) -> Iterator[None]:
    """Raise SQLite's error of a file that may not grow (`ulimit -f`) as the system has it."""
    try:
        yield
    except sqlite3.OperationalError as error:
        places = (database.with_name(database.name + ending) for ending in ("", "-wal", "-journal"))
        found = system_error_of(error, *places)
        if found is error:
            raise
        raise found from error


class FilesFolder:
    """One folder, open in one server at a time."""

    def __init__(self, path: Path) -> None:
        """Open the folder, or make it: private to the user, as all folders below it.

        Raises:
            ConfigError: another server has it open, or cbatch did not make it.
            OSError: it cannot be written.
        """
        self.path = path
        self.notes: list[str] = []
        """Problems found, for the operator of the server."""
        self.index, self.content, self.work = (
            path / name for name in ("index.sqlite3", "content", "work")
        )
        self._reserve = path / ".cbatch-reserve"
        self._has_reserve, self._reserving = self._reserve.is_file(), threading.Lock()
        path.mkdir(_PRIVATE, parents=True, exist_ok=True)
        self._claim()
        try:
            self._lock()
            for place in (self.content, self.work):
                if place.is_file():
                    self.set_aside("a file where a folder should be", place)
                place.mkdir(_PRIVATE, exist_ok=True)
            self.take_reserve()
        except BaseException:
            self.close()
            raise

    def _claim(self) -> None:
        """Mark an empty folder; refuse others without a marker."""
        marker = self.path / _MARKER
        if not marker.exists() and not _NOBODYS.issuperset(os.listdir(self.path)):
            raise ConfigError(
                f"files_dir={self.path}: the folder is not empty and lacks the file {_MARKER}, which marks folders of "
                "cbatch serve: give a new or empty folder; if cbatch serve made this one, run: touch "
                + shlex.quote(str(marker))
            )
        # without a wait for the reader of a pipe of that name
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
        self._marker = os.open(marker, flags, 0o600)
        self._watched = {marker: os.fstat(self._marker)}
        # also without `close`, as in an app never ended
        self._closing = weakref.finalize(self, os.close, self._marker)
        with suppress(OSError):  # the file's name is enough
            if not os.fstat(self._marker).st_size:
                os.write(self._marker, _ABOUT)

    def _lock(self) -> None:
        try:
            lock(self._marker)
        except BlockingIOError:
            raise ConfigError(
                f"files_dir={self.path}: another server uses it: give another folder"
            ) from None
        except OSError:
            pass  # not every file system has locks; that of the index is left

    def watch(self, place: Path) -> None:
        """Have `check` notice if a file is removed or replaced."""
        self._watched[place] = place.stat()

    def check(self) -> None:
        """Raise an OSError if the folder or its index was removed or replaced: what is written would be lost."""
        for place, status in self._watched.items():
            with suppress(FileNotFoundError):
                if os.path.samestat(place.stat(), status):
                    continue
            why = "removed or replaced while the server ran; restart the server"
            raise FileNotFoundError(errno.ENOENT, why, str(place))

    def close(self) -> None:
        """Let other servers open the folder. Twice is harmless."""
        self._closing()

    def note(self, text: str, names: Iterable[str] = ()) -> None:
        """Note a problem, with the first of some names."""
        said = sorted(names)
        more = f" and {len(said) - _N_NAMED:,} more" if len(said) > _N_NAMED else ""
        listed = f": {', '.join(said[:_N_NAMED])}{more}" if said else ""
        self.notes.append(f"files_dir={self.path}: {text}{listed}")
        _log.warn("%s", self.notes[-1])

    # ---- the reserve ----

    def take_reserve(self) -> bool:
        """Reserve some bytes of the disk; return whether there was room."""
        with self._reserving:
            if self._has_reserve:
                return True
            try:
                with open(self._reserve, "xb", opener=_private) as file:
                    # random, so that no file system compresses it
                    file.write(os.urandom(_N_RESERVE))
                    file.flush()
                    os.fsync(file.fileno())
            except OSError as error:
                self._drop_reserve()
                return not is_full(error)
            self._has_reserve = True
            return True

    def give_reserve(self) -> None:
        """Free the reserved bytes for changes of the index."""
        with self._reserving:
            self._drop_reserve()

    def _drop_reserve(self) -> None:
        self._has_reserve = False
        with suppress(OSError):
            self._reserve.unlink()

    # ---- contents ----

    def contents(self) -> dict[str, os.stat_result]:
        """Return the contents of files by id; remove parts of uploads that a kill broke off."""
        files = [e for e in os.scandir(self.content) if e.is_file(follow_symlinks=False)]
        for entry in files:
            if _PART.fullmatch(entry.name):
                os.unlink(entry)
        found = {e.name: e.stat() for e in files if re.fullmatch(FILE_ID, e.name)}
        self._note_strangers(self.content, found)
        return found

    def worked_on(self) -> set[str]:
        """Return the ids of batches that have a folder."""
        folders = [e.name for e in os.scandir(self.work) if e.is_dir(follow_symlinks=False)]
        found = {name for name in folders if re.fullmatch(BATCH_ID, name)}
        self._note_strangers(self.work, found)
        return found

    def _note_strangers(self, folder: Path, known: Container[str]) -> None:
        if strangers := [name for name in os.listdir(folder) if name not in known]:
            places = [f"{folder.name}/{name}" for name in strangers]
            self.note("not made by cbatch, left alone", places)

    def n_bytes_worked_on(self) -> int:
        """Return the bytes of requests that have no other place than the folders of batches."""
        n_places: Counter[tuple[int, int, int]] = Counter()
        for folder in os.listdir(self.work):
            with suppress(OSError):
                found = os.lstat(self.work / folder / "requests.jsonl")
                n_places[found.st_ino, found.st_nlink, found.st_size] += 1
        return sum(size for (_, n_links, size), n in n_places.items() if n == n_links)

    def remove_work(self, id: str) -> None:
        """Remove the files of a batch that has run, and its folder if nothing else is in it."""
        folder = self.work / id
        with suppress(OSError):
            names = [] if folder.is_symlink() else os.listdir(folder)
            for name in filter(_OF_BATCH.fullmatch, names):
                (folder / name).unlink()
            folder.rmdir()

    def set_aside(self, why: str, *places: Path) -> None:
        """Move unusable files to a new folder below `aside`.

        Raises:
            OSError: they cannot be moved.
        """
        aside, now = self.path / "aside", time.strftime("%Y-%m-%d")
        aside.mkdir(_PRIVATE, exist_ok=True)
        taken = set(os.listdir(aside))
        new = aside / next(
            name for i in range(1, len(taken) + 2) if (name := f"{now}-{i}") not in taken
        )
        new.mkdir(_PRIVATE)
        for place in places:
            place.rename(new / place.name)
        sync_folder(new)
        self.note(f"{why}; moved to {new.relative_to(self.path)}", [place.name for place in places])


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC, 0o600)
