"""One file of cells: its layout, and when it is trusted.

A file is trusted where it belongs to this user, nobody else may write to it, and its lengths and digests hold: then it
is what cbatch wrote. The cells are not parsed to find out.

    magic, version, length of the header | header (JSON) | tokens (int32) | digest | cells | checkpoint | digest
                                           each digest: SHA-256 of all bytes before it

A checkpoint is there where memory cannot be cut: the cells, or the state, of a beginning of the tokens. Such a file has
version 2, any other version 1.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import stat
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from cbatch.errors import CacheError

if TYPE_CHECKING:
    from io import BufferedReader
    from pathlib import Path

    from numpy.typing import NDArray

Fingerprint: TypeAlias = Mapping[str, str]
"""What the cells depend on, such as the model's digest and the types of keys and values; errors show the names."""

_MAGIC = b"\x93CBCELLS"  # the first byte is not text in any encoding that is common
_VERSION, _VERSION_WITH_CHECKPOINT = 1, 2
_PREFIX = struct.Struct("<8sII")  # magic, version, bytes of the header
_N_DIGEST = hashlib.sha256().digest_size
_MAX_COUNT = 2**63 - 1
_MAX_HEADER = 2**16
"""Bytes: a key of 1024 characters and a fingerprint of some twenty values need a tenth of it."""
_PIECE = 2**23
"""Bytes read and hashed at a time: few calls, and still in the processor's cache when hashed."""


@dataclass(frozen=True, slots=True)
class CachedCells:
    """The cells of one sequence.

    Args:
        tokens: whose cells these are.
        n_prompt: how many of the tokens were given, not sampled.
        data: (n_bytes,) uint8: the state as llama.cpp wrote it.
        n_checkpoint: how many tokens a checkpoint has: 0 for none.
        checkpoint: (n_bytes,) uint8: the state after so many tokens.
    """

    tokens: Sequence[int]
    n_prompt: int
    data: NDArray[np.uint8]
    n_checkpoint: int = 0
    checkpoint: NDArray[np.uint8] | None = None


# ---- names ----


def file_name(key: str, fingerprint: Fingerprint) -> str:
    """Return the name of a file, made of digests: a key may be any text, such as a path."""
    return f"{digest_of(key)}-{digest_of(_json(dict(fingerprint)))}.cells"


def digest_of(text: str) -> str:
    """Return the digest of a key, with which the names of its files begin."""
    return hashlib.sha256(_encoded(text)).hexdigest()[:32]


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, sort_keys=True)


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


# ---- writing ----


def file_parts(key: str, cells: CachedCells, fingerprint: Fingerprint) -> list[bytes | memoryview]:
    """Return a file as the bytes before the cells, the cells, which are not copied, and the last digest."""
    said: dict[str, object] = {
        "key": key,
        "fingerprint": dict(fingerprint),
        "n_tokens": len(cells.tokens),
        "n_prompt": cells.n_prompt,
        "n_data": cells.data.size,
    }
    states, version = [cells.data], _VERSION
    if cells.checkpoint is not None:
        said |= {"n_checkpoint": cells.n_checkpoint, "n_checkpoint_data": cells.checkpoint.size}
        states, version = [cells.data, cells.checkpoint], _VERSION_WITH_CHECKPOINT
    header = _encoded(_json(said))
    if len(header) > _MAX_HEADER:
        raise CacheError(
            key,
            f"key and fingerprint have more than {_MAX_HEADER:,} bytes together: shorten the key",
        )
    head = _PREFIX.pack(_MAGIC, version, len(header)) + header
    head += np.array(cells.tokens, "<i4").tobytes()
    head += hashlib.sha256(head).digest()
    digest = hashlib.sha256(head)
    parts: list[bytes | memoryview] = [head]
    for state in states:
        parts.append(np.ascontiguousarray(state).data)
        digest.update(parts[-1])
    return [*parts, digest.digest()]


# ---- reading ----


class BadFileError(Exception):
    """Why a file is not read, as the end of a sentence about the file."""


@dataclass(frozen=True, slots=True)
class FileHeader:
    """The header of a file."""

    key: str
    fingerprint: Fingerprint
    n_tokens: int
    n_prompt: int
    n_data: int
    n_checkpoint: int = 0
    n_checkpoint_data: int = 0


class FileReader:
    """Reads a file from its beginning, each byte once, and hashes the bytes."""

    def __init__(self, file: BufferedReader, name: str) -> None:
        self._file, self._name = file, name
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise BadFileError("is not a regular file")
        if found.st_uid != os.geteuid():
            raise BadFileError("belongs to another user: remove it, or name a folder of your own")
        if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise BadFileError(
                "is writable by others: remove it, or run chmod go-w if you trust it"
            )
        self._n_bytes = self._n_left = found.st_size
        self._hash = hashlib.sha256()

    def head(self) -> tuple[FileHeader, list[int]]:
        """Read and check everything up to the cells; return the header and the tokens."""
        header = self._header()
        tokens: list[int] = self.take(4 * header.n_tokens).view("<i4").tolist()
        self.check()
        if file_name(header.key, header.fingerprint) != self._name:
            raise BadFileError("has the name of another key or fingerprint")
        return header, tokens

    def _header(self) -> FileHeader:
        if self._n_left < _PREFIX.size:
            raise BadFileError("is not a file of cells")
        magic, version, n_header = _PREFIX.unpack(self.take(_PREFIX.size).tobytes())
        if magic != _MAGIC:
            raise BadFileError("is not a file of cells")
        if version not in (_VERSION, _VERSION_WITH_CHECKPOINT):
            known = f"{_VERSION} and {_VERSION_WITH_CHECKPOINT}"
            raise BadFileError(f"is of version {version}, but this cbatch reads versions {known}")
        if n_header > _MAX_HEADER:
            raise BadFileError("has a damaged header")
        has_checkpoint = version == _VERSION_WITH_CHECKPOINT
        header = _parsed(self.take(n_header).tobytes(), has_checkpoint=has_checkpoint)
        n_states = header.n_data + header.n_checkpoint_data
        n_said = _PREFIX.size + n_header + 4 * header.n_tokens + n_states + 2 * _N_DIGEST
        if n_said != self._n_bytes:
            raise BadFileError(f"has {self._n_bytes:,} bytes, but should have {n_said:,}")
        return header

    def take(self, n_bytes: int) -> NDArray[np.uint8]:
        """Return the next bytes, in an array no larger than the file."""
        if n_bytes > self._n_left:
            raise BadFileError("is cut off")
        self._n_left -= n_bytes
        taken = np.empty(n_bytes, np.uint8)
        for start in range(0, n_bytes, _PIECE):
            piece = taken[start : start + _PIECE].data
            if self._file.readinto(piece) < len(piece):
                raise BadFileError("was cut off while it was read")
            self._hash.update(piece)
        return taken

    def skip(self, n_bytes: int) -> None:
        """Read and hash the next bytes without keeping them."""
        for start in range(0, n_bytes, _PIECE):
            self.take(min(_PIECE, n_bytes - start))

    def check(self) -> None:
        """Read a digest and compare it with that of all bytes before."""
        digest = self._hash.digest()
        if self.take(_N_DIGEST).tobytes() != digest:
            raise BadFileError("is damaged: its digest does not match its content")

    def mark(self, now_s: float) -> None:
        """Mark the file as used now, where that is permitted."""
        with suppress(OSError):
            os.utime(self._file.fileno(), (now_s, now_s))


def _parsed(header: bytes, *, has_checkpoint: bool) -> FileHeader:
    try:
        said = json.loads(header.decode("utf-8", "surrogatepass"))
    except (ValueError, RecursionError):
        raise BadFileError("has a damaged header") from None
    match said:
        case {
            "key": str(key),
            "fingerprint": dict(fingerprint),
            "n_tokens": int(n_tokens),
            "n_prompt": int(n_prompt),
            "n_data": int(n_data),
        } if 0 <= n_prompt <= n_tokens <= _MAX_COUNT and 0 <= n_data <= _MAX_COUNT:
            n, n_bytes = _parsed_checkpoint(said, n_tokens) if has_checkpoint else (0, 0)
            if all(isinstance(value, str) for value in fingerprint.values()):
                return FileHeader(key, fingerprint, n_tokens, n_prompt, n_data, n, n_bytes)
    raise BadFileError("has a damaged header")


def _parsed_checkpoint(said: Mapping[str, object], n_tokens: int) -> tuple[int, int]:
    match said:
        case {"n_checkpoint": int(n), "n_checkpoint_data": int(n_bytes)}:
            if 0 < n <= n_tokens and 0 <= n_bytes <= _MAX_COUNT:
                return n, n_bytes
    raise BadFileError("has a damaged header")


@contextmanager
def opened_file(path: Path) -> Iterator[FileReader]:
    """Open a file to be read once.

    Raises:
        FileNotFoundError: there is no file.
        BadFileError: anything else is wrong with the file, also inside the block.
    """
    try:
        with open(path, "rb", opener=_opened) as file:
            yield FileReader(file, path.name)
    except FileNotFoundError:
        raise
    except OSError as error:
        words = {errno.ELOOP: "is a symbolic link"}
        words |= dict.fromkeys((errno.ENXIO, errno.EISDIR), "is not a regular file")
        reason = words.get(error.errno or 0, f"cannot be read: {error.strerror}")
        raise BadFileError(reason) from error
    except MemoryError as error:
        raise BadFileError("is larger than the free memory") from error


def _opened(path: str, flags: int) -> int:
    """Open a file; a link or a FIFO in its place is neither followed nor waited for."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)
