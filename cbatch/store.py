"""Cells of sequences kept on disk under keys: files that outlive the process, each whole or not there at all.

It knows no model and no llama.cpp: what the cells depend on comes in as a fingerprint, and a file is found by its key
and its fingerprint together. A file is data from outside: it is believed as far as its lengths and digests hold.

    magic, version, length of the header | header (JSON) | tokens (int32) | digest | cells | digest
                                           each digest: SHA-256 of all that stands before it
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import re
import secrets
import stat
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import platformdirs

from cbatch.errors import CacheError

if TYPE_CHECKING:
    from numpy.typing import NDArray

Fingerprint: TypeAlias = Mapping[str, str]
"""What the cells depend on, such as the model's digest and the types of keys and values; errors show the names."""

_logger = logging.getLogger("cbatch.store")

_MAGIC = b"\x93CBCELLS"  # the first byte is no text in any encoding that is common
_VERSION = 1
_PREFIX = struct.Struct("<8sII")  # magic, version, bytes of the header
_N_DIGEST = hashlib.sha256().digest_size
_MAX_COUNT = 2**63 - 1
_MAX_HEADER = 2**16
"""Bytes: a key of 1024 characters and a fingerprint of some twenty values need a tenth of it."""
_PIECE = 2**23
"""Bytes read and hashed at a time: few calls, and still in the processor's cache when hashed."""
_LEFT_OVER_S = 3600.0

_FILE = re.compile(r"[0-9a-f]{32}-[0-9a-f]{32}\.cells")
_PART = re.compile(rf"\.{_FILE.pattern}\.[0-9a-f]{{16}}\.part")

# A link or a FIFO in the place of a file is neither followed nor waited for.
_READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_WRITE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class CachedCells:
    """One sequence's cells.

    Args:
        tokens: (n_tokens,) int32, ≥ 0: the tokens that the cells stand for.
        n_prompt: how many of them were given, not sampled.
        data: (n_bytes,) uint8: the cells as llama.cpp wrote them.
    """

    tokens: NDArray[np.int32]
    n_prompt: int
    data: NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class CacheFile:
    """One file, for listing.

    Args:
        key: what it is kept under; empty where there is a problem, as are `n_tokens` and `fingerprint`.
        n_tokens: tokens that it holds cells of.
        n_bytes: size of the file.
        used_at: when it was last written or read, in seconds of Unix time.
        fingerprint: what its cells depend on.
        path: where it is.
        problem: why it cannot be read, or None.
    """

    key: str
    n_tokens: int
    n_bytes: int
    used_at: float
    fingerprint: Fingerprint
    path: Path
    problem: str | None = None


class CacheStore:
    """A folder of cells on disk, and how large it may grow.

    Any number of threads and processes may share a folder: a reader sees a file before or after it was written anew,
    never between, and a file that vanishes meanwhile is as one that was never there.
    """

    def __init__(
        self, folder: Path, n_bytes_max: int, *, clock: Callable[[], float] = time.time
    ) -> None:
        """Create nothing: the folder is made at the first write.

        Args:
            folder: where the files are.
            n_bytes_max: bytes that the finished files may have together; only writing looks at it.
            clock: Unix time in seconds.
        """
        self._folder = Path(folder)
        self._n_bytes_max = n_bytes_max
        self._clock = clock
        self._lock = threading.Lock()  # what one thread has just written, another does not trim

    def write(self, key: str, cells: CachedCells, fingerprint: Fingerprint) -> None:
        """Keep these cells under this key, in place of former ones; then remove what was not used for longest.

        Raises:
            CacheError: the disk is full, the file would be larger than all may be together, no permission, or tokens
                that are none. A former file of this key is as it was.
        """
        head = _pack(key, cells, fingerprint)
        n_bytes = len(head) + cells.data.size + 2 * _N_DIGEST
        if n_bytes > self._n_bytes_max:
            raise CacheError(
                key,
                f"{n_bytes:,} bytes are more than the {self._n_bytes_max:,} that all files may have together: "
                "raise cache_mib",
            )
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._sweep(older_than_s=_LEFT_OVER_S)
            self._replace(_name(key, fingerprint), _parts(head, cells.data))
        except OSError as error:
            raise CacheError(key, _unwritten(self._folder, error)) from error

    def read(self, key: str, fingerprint: Fingerprint) -> CachedCells:
        """Return the cells kept under this key, and mark them as used now.

        Raises:
            CacheError: there are none, only those of another fingerprint, or the file is damaged.
        """
        path = self._path(key, fingerprint)
        with _told(key, path):
            try:
                with _opened(path) as reader:
                    header, tokens = reader.head()
                    data = reader.take(header.n_data)
                    reader.check()
                    reader.mark(self._clock())
            except FileNotFoundError:
                raise self._missing(key, fingerprint) from None
        return CachedCells(tokens, header.n_prompt, data)

    def files(self, key: str | None = None) -> list[CacheFile]:
        """Return every file, or those of one key, the most recently used first; bad ones have a problem.

        Raises:
            CacheError: the folder cannot be listed.
        """
        try:
            found = [file for entry in self._found(_FILE, key) if (file := _listed(entry))]
        except OSError as error:
            raise CacheError(str(self._folder), f"cannot be listed: {error.strerror}") from error
        return sorted(found, key=lambda file: (-file.used_at, file.path.name))

    def remove(self, key: str) -> int:
        """Remove every file of this key, whatever its fingerprint; return how many there were.

        Raises:
            CacheError: one cannot be removed.
        """
        try:
            return sum(_is_removed(Path(entry)) for entry in self._found(_FILE, key))
        except OSError as error:
            raise CacheError(key, _unremoved(self._folder, error)) from error

    def remove_all(self) -> int:
        """Remove every file, and what unfinished writes have left; return how many files there were.

        A write that another process has not finished fails then.

        Raises:
            CacheError: one cannot be removed.
        """
        try:
            for entry in self._found(_PART):
                _is_removed(Path(entry))
            return sum(_is_removed(Path(entry)) for entry in self._found(_FILE))
        except OSError as error:
            raise CacheError(str(self._folder), _unremoved(self._folder, error)) from error

    def verify(self, file: CacheFile) -> str | None:
        """Read all of a file; return what is wrong, or None, also where it has vanished meanwhile."""
        try:
            with _opened(file.path) as reader:
                header, _ = reader.head()
                reader.skip(header.n_data)
                reader.check()
        except _BadFileError as error:
            return str(error)
        except FileNotFoundError:
            return None
        return None

    # ---- the folder ----

    def _path(self, key: str, fingerprint: Fingerprint) -> Path:
        return self._folder / _name(key, fingerprint)

    def _found(self, pattern: re.Pattern[str], key: str | None = None) -> list[os.DirEntry[str]]:
        """Return the entries with such a name, whatever they are; what is not ours is never touched."""
        start = "" if key is None else _digest(key)
        try:
            with os.scandir(self._folder) as entries:
                return [
                    e for e in entries if pattern.fullmatch(e.name) and e.name.startswith(start)
                ]
        except FileNotFoundError:
            return []

    def _replace(self, name: str, parts: Iterator[bytes | memoryview]) -> None:
        """Write a file beside its place and put it there when it is whole and on the disk."""
        path = self._folder / name
        part = self._folder / f".{name}.{secrets.token_hex(8)}.part"
        try:
            _write_part(part, parts, self._clock())
            with self._lock:
                part.replace(path)
                self._try_to_trim(name)
        finally:
            with suppress(OSError):
                part.unlink(missing_ok=True)
        _sync_folder(self._folder)

    def _try_to_trim(self, kept: str) -> None:
        """Make the folder smaller, if that can be: what was written is there in any case."""
        try:
            self._trim(kept)
        except OSError as error:
            _logger.warning("%s cannot be listed: %s", self._folder, error.strerror)

    def _trim(self, kept: str) -> None:
        """Remove the least recently used files until the rest is small enough."""
        files = [(s.st_mtime_ns, entry.name, s.st_size) for entry, s in self._regular(_FILE)]
        n_bytes = sum(size for _, _, size in files)
        for _, name, size in sorted(files):
            if n_bytes <= self._n_bytes_max:
                return
            if name != kept and _is_gone(self._folder / name):
                n_bytes -= size

    def _sweep(self, older_than_s: float) -> None:
        """Remove what writes have left that were killed; a write that goes on touches its file."""
        for entry, found in self._regular(_PART):
            if found.st_mtime < self._clock() - older_than_s:
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
        """Return the error for a key without a file of this fingerprint: in what the nearest one differs."""
        differences = [
            differing
            for file in self.files(key)
            if file.problem is None and (differing := _differences(fingerprint, file.fingerprint))
        ]
        if not differences:
            what = f"nothing is kept under this key in {self._folder}"
            return CacheError(key, what, is_missing=True)
        nearest = min(differences, key=len)
        return CacheError(key, "; ".join(nearest))


def default_folder() -> Path:
    """Return the folder for cells that `CBATCH_CACHE_DIR` names, or the one among the user's caches."""
    if named := os.environ.get("CBATCH_CACHE_DIR"):
        return Path(named)
    return Path(platformdirs.user_cache_dir("cbatch", appauthor=False), "cells")


# ---- names ----


def _name(key: str, fingerprint: Fingerprint) -> str:
    """Return a file's name: of digests, for a key may be any text, also that of a path."""
    return f"{_digest(key)}-{_digest(_json(dict(fingerprint)))}.cells"


def _digest(text: str) -> str:
    return hashlib.sha256(_encoded(text)).hexdigest()[:32]


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, sort_keys=True)


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _differences(wanted: Fingerprint, saved: Fingerprint) -> list[str]:
    names = sorted({*wanted, *saved})
    return [
        f"{_printable(name)} is {_value(wanted, name)}, was saved with {_value(saved, name)}"
        for name in names
        if wanted.get(name) != saved.get(name)
    ]


def _value(fingerprint: Fingerprint, name: str) -> str:
    return _printable(fingerprint[name]) if name in fingerprint else "nothing"


def _printable(text: str) -> str:
    """Return a text as it is, or as Python writes it where a terminal would obey it."""
    return text if text and text.isprintable() else repr(text)


# ---- writing ----


def _pack(key: str, cells: CachedCells, fingerprint: Fingerprint) -> bytes:
    """Return a file up to its first digest."""
    n_tokens = _checked(key, cells)
    header = _encoded(
        _json(
            {
                "key": key,
                "fingerprint": dict(fingerprint),
                "n_tokens": n_tokens,
                "n_prompt": cells.n_prompt,
                "n_data": cells.data.size,
            }
        )
    )
    if len(header) > _MAX_HEADER:
        raise CacheError(key, f"key and fingerprint have more than {_MAX_HEADER:,} bytes")
    prefix = _PREFIX.pack(_MAGIC, _VERSION, len(header))
    return prefix + header + cells.tokens.astype("<i4", copy=False).tobytes()


def _checked(key: str, cells: CachedCells) -> int:
    """Return how many tokens there are, where they and the cells are what `CachedCells` says."""
    tokens, data = cells.tokens, cells.data
    if (str(tokens.dtype), tokens.ndim, str(data.dtype), data.ndim) != ("int32", 1, "uint8", 1):
        raise CacheError(key, "tokens must be one row of int32 and cells one of uint8")
    if _is_negative(tokens):
        raise CacheError(key, f"there is no token {tokens.min()}")
    if not 0 <= cells.n_prompt <= tokens.size:
        raise CacheError(key, f"of {tokens.size} tokens {cells.n_prompt} cannot be given")
    return tokens.size


def _is_negative(tokens: NDArray[np.int32]) -> bool:
    return bool(tokens.size and tokens.min() < 0)


def _parts(head: bytes, data: NDArray[np.uint8]) -> Iterator[bytes | memoryview]:
    """Yield a file part by part, the cells where they are."""
    hashed, cells = hashlib.sha256(head), np.ascontiguousarray(data).data
    first = hashed.digest()
    yield head
    yield first
    hashed.update(first)
    hashed.update(cells)
    yield cells
    yield hashed.digest()


def _write_part(path: Path, parts: Iterator[bytes | memoryview], now_s: float) -> None:
    fd = os.open(path, _WRITE_FLAGS, 0o600)
    try:
        for part in parts:
            left = memoryview(part)
            while left:
                left = left[os.write(fd, left) :]
        _set_used(fd, now_s)
        os.fsync(fd)
    finally:
        os.close(fd)


def _sync_folder(folder: Path) -> None:
    """Put a new name on the disk; some file systems cannot, and the file is whole with its name or without."""
    with suppress(OSError):
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def _set_used(fd: int, now_s: float) -> None:
    now_ns = int(now_s * 1e9)
    os.utime(fd, ns=(now_ns, now_ns))


def _is_removed(path: Path) -> bool:
    """Remove a file; tell whether there was one."""
    try:
        path.unlink()
    except FileNotFoundError:
        return False
    return True


def _is_gone(path: Path) -> bool:
    """Remove a file where that is permitted; tell whether there is none now."""
    try:
        _is_removed(path)
    except OSError as error:
        _logger.warning("%s cannot be removed: %s", path, error.strerror)
        return False
    return True


def _unwritten(folder: Path, error: OSError) -> str:
    words = f"cannot be written to {folder}: {error.strerror}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return f"{words}: make room there, remove files with `cbatch cache rm`, or give another folder (cache_dir)"
    return words


def _unremoved(folder: Path, error: OSError) -> str:
    return f"{error.filename or folder} cannot be removed: {error.strerror}"


# ---- reading ----


class _BadFileError(Exception):
    """What is wrong with a file, as the end of a sentence about it."""


@dataclass(frozen=True, slots=True)
class _Header:
    """What a file says that it holds."""

    key: str
    fingerprint: Fingerprint
    n_tokens: int
    n_prompt: int
    n_data: int


class _Reader:
    """Reads a file from its beginning, each byte once, and hashes what it reads."""

    def __init__(self, fd: int, name: str) -> None:
        self._fd, self._name = fd, name
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise _BadFileError("is not a regular file")
        self._n_bytes = self._n_left = found.st_size
        self._hash = hashlib.sha256()

    def head(self) -> tuple[_Header, NDArray[np.int32]]:
        """Read and check everything up to the cells: the header, and (n_tokens,) int32."""
        header = self._header()
        tokens = self.take(4 * header.n_tokens).view("<i4").astype(np.int32, copy=False)
        self.check()
        if _is_negative(tokens):
            raise _BadFileError("holds tokens that are none")
        if _name(header.key, header.fingerprint) != self._name:
            raise _BadFileError("is the file of another key or fingerprint")
        return header, tokens

    def _header(self) -> _Header:
        if self._n_left < _PREFIX.size:
            raise _BadFileError("is no file of cells")
        magic, version, n_header = _PREFIX.unpack(self.take(_PREFIX.size).tobytes())
        if magic != _MAGIC:
            raise _BadFileError("is no file of cells")
        if version != _VERSION:
            raise _BadFileError(f"is of version {version}, and this cbatch reads {_VERSION}")
        if n_header > _MAX_HEADER:
            raise _BadFileError("has a damaged header")
        header = _parsed(self.take(n_header).tobytes())
        n_said = _PREFIX.size + n_header + 4 * header.n_tokens + header.n_data + 2 * _N_DIGEST
        if n_said != self._n_bytes:
            raise _BadFileError(f"has {self._n_bytes:,} bytes where {n_said:,} should be")
        return header

    def take(self, n_bytes: int) -> NDArray[np.uint8]:
        """Return the next bytes, in an array no larger than the file."""
        if n_bytes > self._n_left:
            raise _BadFileError("is cut off")
        taken = np.empty(n_bytes, np.uint8)
        self._fill(taken.data)
        return taken

    def skip(self, n_bytes: int) -> None:
        """Read and hash the next bytes, and keep none."""
        piece = np.empty(min(n_bytes, _PIECE), np.uint8).data
        for start in range(0, n_bytes, _PIECE):
            self._fill(piece[: n_bytes - start])

    def _fill(self, left: memoryview) -> None:
        self._n_left -= len(left)
        while left:
            n_read = os.readv(self._fd, [left[:_PIECE]])
            if not n_read:
                raise _BadFileError("was cut off meanwhile")
            self._hash.update(left[:n_read])
            left = left[n_read:]

    def check(self) -> None:
        """Read a digest and compare it with that of everything before."""
        digest = self._hash.digest()
        if self.take(_N_DIGEST).tobytes() != digest:
            raise _BadFileError("is damaged: its digest is not that of what it holds")

    def mark(self, now_s: float) -> None:
        """Say that it was used now, where that is permitted."""
        with suppress(OSError):
            _set_used(self._fd, now_s)


def _parsed(header: bytes) -> _Header:
    try:
        said = json.loads(header.decode("utf-8", "surrogatepass"))
    except (ValueError, RecursionError):
        raise _BadFileError("has a damaged header") from None
    match said:
        case {
            "key": str(key),
            "fingerprint": dict(fingerprint),
            "n_tokens": int(n_tokens),
            "n_prompt": int(n_prompt),
            "n_data": int(n_data),
        } if 0 <= n_prompt <= n_tokens <= _MAX_COUNT and 0 <= n_data <= _MAX_COUNT:
            if all(isinstance(value, str) for value in fingerprint.values()):
                return _Header(key, fingerprint, n_tokens, n_prompt, n_data)
    raise _BadFileError("has a damaged header")


@contextmanager
def _opened(path: Path) -> Iterator[_Reader]:
    """Open a file to be read once.

    Raises:
        FileNotFoundError: there is none.
        _BadFileError: whatever else is wrong with it, also inside the block.
    """
    try:
        fd = os.open(path, _READ_FLAGS)
        try:
            yield _Reader(fd, path.name)
        finally:
            os.close(fd)
    except FileNotFoundError:
        raise
    except OSError as error:
        words = {errno.ELOOP: "is a symbolic link", errno.ENXIO: "is not a regular file"}
        reason = words.get(error.errno or 0, f"cannot be read: {error.strerror}")
        raise _BadFileError(reason) from error
    except MemoryError as error:
        raise _BadFileError("is larger than the memory there is") from error


@contextmanager
def _told(key: str, path: Path) -> Iterator[None]:
    """Tell of a bad file in the caller's words."""
    try:
        yield
    except _BadFileError as error:
        raise CacheError(key, f"{path} {error}") from error


def _listed(entry: os.DirEntry[str]) -> CacheFile | None:
    """Return what an entry of the folder is; None where it has vanished."""
    path = Path(entry)
    try:
        found = entry.stat(follow_symlinks=False)
        size, used_at = found.st_size, found.st_mtime
        with _opened(path) as reader:
            header, _ = reader.head()
    except FileNotFoundError:
        return None
    except _BadFileError as error:
        return CacheFile("", 0, size, used_at, {}, path, str(error))
    return CacheFile(header.key, header.n_tokens, size, used_at, header.fingerprint, path)
