"""Cells of sequences kept on disk under keys: files that outlive the process, each whole or absent.

The store knows no model: a fingerprint says what the cells depend on, and key and fingerprint together name a file.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import stat
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import platformdirs

from cbatch.cache.cell_file import (
    BadFileError,
    CachedCells,
    Fingerprint,
    digest_of,
    file_name,
    file_parts,
    opened_file,
)
from cbatch.errors import CacheError, ConfigError
from cbatch.support.folders import sync_folder
from cbatch.support.logs import Log

_log = Log("cbatch.store")

_LEFT_OVER_S = 3600.0

_FILE = re.compile(r"[0-9a-f]{32}-[0-9a-f]{32}\.cells")
_PART = re.compile(rf"\.{_FILE.pattern}\.[0-9a-f]{{16}}\.part")


@dataclass(frozen=True, slots=True)
class CacheFile:
    """One file, for listing. With a problem, key and fingerprint are empty, and `n_tokens` is 0."""

    key: str
    n_tokens: int
    n_bytes: int
    used_at: float
    """When the file was last written or read, in seconds of Unix time."""
    fingerprint: Fingerprint
    path: Path
    problem: str | None = None
    """Why the file cannot be read."""


class CacheStore:
    """A folder of cells on disk with a limit on its size.

    Any number of threads and processes may share a folder: a reader sees the former file or the new one, each whole,
    and a file that vanishes meanwhile is treated as one that was never there.
    """

    def __init__(
        self, folder: Path, n_bytes_max: int, *, clock: Callable[[], float] = time.time
    ) -> None:
        """Create nothing: the first write makes the folder, and only a write removes files over `n_bytes_max`."""
        self._folder = Path(folder)
        self._n_bytes_max = n_bytes_max
        self._clock = clock
        self._lock = threading.Lock()  # no thread removes what another has just written

    def write(self, key: str, cells: CachedCells, fingerprint: Fingerprint) -> None:
        """Write these cells under this key, in place of former ones; then remove the least recently used files.

        Raises:
            CacheError: the disk is full, the file alone exceeds the limit, or there is no permission. A former file of
                this key stays as it is.
        """
        parts = file_parts(key, cells, fingerprint)
        n_bytes = sum(map(len, parts))
        if n_bytes > self._n_bytes_max:
            raise CacheError(
                key,
                f"its file would have {n_bytes:,} bytes, more than the limit of {self._n_bytes_max:,} for all files: "
                "raise cache_mib",
            )
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._sweep()
            self._replace(file_name(key, fingerprint), parts)
        except OSError as error:
            raise CacheError(key, _unwritten(error), where=self._folder) from error

    def read(self, key: str, fingerprint: Fingerprint) -> CachedCells:
        """Return the cells kept under this key, and mark the file as used now.

        Raises:
            CacheError: there are none, only those of another fingerprint, or the file is damaged or not this user's.
        """
        path = self._folder / file_name(key, fingerprint)
        try:
            with opened_file(path) as reader:
                header, tokens = reader.head()
                data = reader.take(header.n_data)
                checkpoint = reader.take(header.n_checkpoint_data) if header.n_checkpoint else None
                reader.check()
                reader.mark(self._clock())
        except FileNotFoundError:
            raise self._missing(key, fingerprint) from None
        except BadFileError as error:
            raise CacheError(key, f"its file {error}", where=path) from error
        return CachedCells(tokens, header.n_prompt, data, header.n_checkpoint, checkpoint)

    def files(self, key: str | None = None) -> list[CacheFile]:
        """Return every file, or those of one key, the most recently used first; a bad file has a `problem`.

        Raises:
            CacheError: the folder cannot be listed.
        """
        try:
            found = [file for entry in self._found(_FILE, key) if (file := _listed(entry))]
        except OSError as error:
            raise CacheError(str(self._folder), f"cannot be listed: {error.strerror}") from error
        return sorted(found, key=lambda file: (-file.used_at, file.path.name))

    def remove(self, key: str) -> int:
        """Remove every file of this key, of any fingerprint; return how many there were.

        Raises:
            CacheError: some files cannot be removed; it names them, and the others are gone.
        """
        return self._remove(key, (_FILE,), key)

    def remove_all(self) -> int:
        """Remove every file and every part of an unfinished write; return how many there were of both.

        A write of another process that is not finished fails then.

        Raises:
            CacheError: some files cannot be removed; it names them, and the others are gone.
        """
        return self._remove(str(self._folder), (_PART, _FILE))

    def verify(self, file: CacheFile) -> str | None:
        """Read all of a file; return its problem, or None, also where the file has vanished."""
        try:
            with opened_file(file.path) as reader:
                header, _ = reader.head()
                reader.skip(header.n_data + header.n_checkpoint_data)
                reader.check()
        except BadFileError as error:
            return str(error)
        except FileNotFoundError:
            return None
        return None

    # ---- the folder ----

    def _found(self, pattern: re.Pattern[str], key: str | None = None) -> list[os.DirEntry[str]]:
        """Return the entries with such a name, of any kind; entries with other names are never touched."""
        start = "" if key is None else digest_of(key)
        try:
            with os.scandir(self._folder) as entries:
                return [
                    e for e in entries if pattern.fullmatch(e.name) and e.name.startswith(start)
                ]
        except FileNotFoundError:
            return []

    def _remove(
        self, said: str, patterns: tuple[re.Pattern[str], ...], key: str | None = None
    ) -> int:
        """Remove all entries with such a name that can be removed; return how many there were."""
        try:
            entries = [entry for pattern in patterns for entry in self._found(pattern, key)]
        except OSError as error:
            raise CacheError(said, _unremoved(self._folder, error)) from error
        stayed = [why for entry in entries if (why := _tried_to_remove(Path(entry)))]
        if stayed:
            what = "; ".join(_unremoved(self._folder, why) for why in stayed)
            raise CacheError(said, what) from stayed[0]
        return len(entries)

    def _replace(self, name: str, parts: Sequence[bytes | memoryview]) -> None:
        """Write a file under another name, and rename it when it is whole and on the disk."""
        path = self._folder / name
        part = self._folder / f".{name}.{secrets.token_hex(8)}.part"
        try:
            _write_part(part, parts, self._clock())
            with self._lock:
                part.replace(path)
                self._trim(name)
        finally:
            with suppress(OSError):
                part.unlink(missing_ok=True)
        with suppress(
            OSError
        ):  # not every file system can; the file is whole with its name or without
            sync_folder(self._folder)

    def _trim(self, kept: str) -> None:
        """Remove the least recently used files until the rest is small enough, as far as the folder can be listed."""
        try:
            files = [(s.st_mtime_ns, entry.name, s.st_size) for entry, s in self._regular(_FILE)]
        except OSError as error:
            _log.warn("%s cannot be listed: %s", self._folder, error.strerror)
            return
        n_bytes = sum(size for _, _, size in files)
        for _, name, size in sorted(files):
            if n_bytes <= self._n_bytes_max:
                return
            if name != kept and _is_gone(self._folder / name):
                n_bytes -= size

    def _sweep(self) -> None:
        """Remove what killed writes have left; a write in progress touches its file."""
        for entry, found in self._regular(_PART):
            if found.st_mtime < self._clock() - _LEFT_OVER_S:
                _is_gone(Path(entry))

    def _regular(
        self, pattern: re.Pattern[str]
    ) -> Iterator[tuple[os.DirEntry[str], os.stat_result]]:
        for entry in self._found(pattern):
            with suppress(FileNotFoundError):
                found = entry.stat(follow_symlinks=False)
                if stat.S_ISREG(found.st_mode):
                    yield entry, found

    def _missing(self, key: str, fingerprint: Fingerprint) -> CacheError:
        """Return the error for a key without a file of this fingerprint: how the nearest fingerprint differs."""
        differences = [
            differing
            for file in self.files(key)
            if file.problem is None and (differing := _differences(fingerprint, file.fingerprint))
        ]
        if not differences:
            what = "no cells are saved under this key"
            return CacheError(key, what, is_missing=True, where=self._folder)
        nearest = min(differences, key=len)
        return CacheError(key, "; ".join(nearest))


class NoStore:
    """Stands for the folder of a user without one: each use is an error that says so."""

    def __init__(self, why: str) -> None:
        self._why = why

    def read(self, key: str, *_: object) -> NoReturn:
        """Read nothing, and write nothing."""
        raise CacheError(key, self._why)

    write = read


def open_store(folder: Path | None, n_bytes_max: int) -> CacheStore | NoStore:
    """Return the store in a folder; None for the default folder.

    Raises:
        ConfigError: `CBATCH_CACHE_DIR` begins with the home of a user without one.
    """
    try:
        return CacheStore(folder or cells_folder(), n_bytes_max)
    except ConfigError as error:
        if os.environ.get("CBATCH_CACHE_DIR"):
            raise
        return NoStore(str(error))


def cells_folder(named: str | os.PathLike[str] | None = None) -> Path:
    """Return the folder for cells: `named`, or that of `CBATCH_CACHE_DIR`, or the one among the user's caches.

    Raises:
        ConfigError: the folder begins with the home of a user without one.
    """
    folder = named or os.environ.get("CBATCH_CACHE_DIR")
    try:
        default = Path(platformdirs.user_cache_dir("cbatch", appauthor=False), "cells")
        return Path(folder or default).expanduser().absolute()
    except RuntimeError as error:
        said = f"cache_dir={os.fspath(folder)!r}" if folder else "no default folder: give cache_dir"
        raise ConfigError(f"{said}: {error}") from None


# ---- what differs ----


def _differences(wanted: Fingerprint, saved: Fingerprint) -> list[str]:
    names = sorted({*wanted, *saved})
    return [
        f"{_printable(name)} is {_value(wanted, name)}, but was {_value(saved, name)} when the cells were saved"
        for name in names
        if wanted.get(name) != saved.get(name)
    ]


def _value(fingerprint: Fingerprint, name: str) -> str:
    return _printable(fingerprint[name]) if name in fingerprint else "nothing"


def _printable(text: str) -> str:
    """Return a text as it is, or as Python writes it where it holds control characters."""
    return text if text and text.isprintable() else repr(text)


# ---- writing ----


def _write_part(path: Path, parts: Sequence[bytes | memoryview], now_s: float) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)  # follows no link
    try:
        for part in parts:
            left = memoryview(part)
            while left:
                left = left[os.write(fd, left) :]
        os.utime(fd, (now_s, now_s))
        os.fsync(fd)
    finally:
        os.close(fd)


def _tried_to_remove(path: Path) -> OSError | None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        return error
    return None


def _is_gone(path: Path) -> bool:
    """Remove a file where that is permitted; return whether it is gone."""
    error = _tried_to_remove(path)
    if error is not None:
        _log.warn("%s cannot be removed: %s", path, error.strerror)
    return error is None


def _unwritten(error: OSError) -> str:
    words = f"cannot be written: {error.strerror}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return f"{words}: make room there, remove files with `cbatch cache rm`, or give another folder (cache_dir)"
    return words


def _unremoved(folder: Path, error: OSError) -> str:
    return f"{error.filename or folder} cannot be removed: {error.strerror}"


def _listed(entry: os.DirEntry[str]) -> CacheFile | None:
    """Return an entry of the folder; None where it has vanished."""
    path = Path(entry)
    try:
        found = entry.stat(follow_symlinks=False)
        size, used_at = found.st_size, found.st_mtime
        with opened_file(path) as reader:
            header, _ = reader.head()
    except FileNotFoundError:
        return None
    except BadFileError as error:
        return CacheFile("", 0, size, used_at, {}, path, str(error))
    return CacheFile(header.key, header.n_tokens, size, used_at, header.fingerprint, path)
