"""The bytes of an input: of a file, a pipe or stdin, decompressed where they are compressed."""

from __future__ import annotations

import io
import os
import re
import select
import threading
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache, partial
from importlib import import_module
from pathlib import PurePath
from typing import Any, cast

from cbatch.errors import ConfigError
from cbatch.files.places import is_dash, stdin

COMPRESSED = (".gz", ".zst", ".bz2", ".xz")  # endings of the names of files that are decompressed

UNREAD = (".zip", ".7z", ".lz4", ".lz", ".lzma", ".z", ".br")
"""Endings of the names of files that are packed in a way that is not supported."""

BUFFER_BYTES = 2**18
_CHUNK_BYTES = 2**16
_N_START = 10  # bytes of a file that tell how it is compressed
_ZSTD = ("compression.zstd", "backports.zstd")  # Python's own from 3.14 on

_PACKED = {
    re.compile(rb"\x1f\x8b"): ("gzip",),
    # or a frame to skip, with which pzstd begins. Source: RFC 8878, 3.1.2
    re.compile(rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18"): _ZSTD,
    re.compile(rb"\xfd7zXZ\0"): ("lzma",),
    # a header and the mark of a block or of the end: the first three bytes may be text. Source: bzip2's decompress.c
    re.compile(rb"BZh[1-9](1AY&SY|\x17rE8P\x90)"): ("bz2",),
}
"""First bytes of a compressed file, and the modules that read it."""

_UNREAD = {
    b"PK\x03\x04": "a zip archive",
    b"7z\xbc\xaf\x27\x1c": "a 7z archive",
    b"\x04\x22\x4d\x18": "compressed by lz4",
    b"LZIP": "compressed by lzip",
    b"\x1f\x9d": "compressed by compress",
}
"""First bytes of packed files that are not supported."""

_MEMORY_BYTES = 2**27 + 2**26
"""Most memory for unpacking xz, a few bytes of which can ask for 4 GiB; `xz -9` needs 65 MiB. Our choice, by zstd's own
limit of 128 MiB.
"""

_DECOMPRESSORS: dict[str, tuple[str, dict[str, int]]] = {
    "lzma": ("LZMADecompressor", {"memlimit": _MEMORY_BYTES}),
    "bz2": ("BZ2Decompressor", {}),
}
"""Of the modules whose own file objects end silently where other bytes follow a stream, and their options."""


def open_raw(path: str, *, is_regular: bool) -> io.BufferedReader:
    """Open a file, a pipe, or stdin for `-`, without decompression; ConfigError where stdin is closed."""
    if is_regular:
        return io.BufferedReader(io.FileIO(path), BUFFER_BYTES)
    if not is_dash(path):
        flags = os.O_RDONLY | os.O_CLOEXEC
        return io.BufferedReader(Pipe(os.open(path, flags), is_own=True), BUFFER_BYTES)
    file: Any = stdin()
    if isinstance(file, io.BufferedReader):
        with suppress(OSError):  # raised by a stdin without a file descriptor
            return io.BufferedReader(Pipe.of(file), BUFFER_BYTES)
    return cast("io.BufferedReader", file if hasattr(file, "peek") else io.BufferedReader(file))


class Pipe(io.RawIOBase):
    """A pipe, a terminal or a device; another thread can end a read that waits."""

    def __init__(self, fd: int, ahead: bytes = b"", *, is_own: bool = False) -> None:
        """Read `ahead`, then from `fd`; closing this closes `fd` if `is_own`."""
        self._fd, self._ahead, self._is_own = fd, ahead, is_own
        self._is_stopped = False
        self._closing = threading.RLock()
        """Held where descriptors are closed: `stop` writes to none that another file may have by then."""
        self._waked, self._waker = os.pipe()
        self._poll = select.poll()
        for waited in (fd, self._waked):
            self._poll.register(waited, select.POLLIN)

    @classmethod
    def of(cls, file: io.BufferedReader) -> Pipe:
        """Take over a file and the content of its buffer; wait for content where the buffer is empty."""
        return cls(file.fileno(), file.read(len(file.peek(1))))

    def readable(self) -> bool:
        """Return True."""
        return True

    def fileno(self) -> int:
        """Return the file descriptor."""
        return self._fd

    def tell(self) -> int:
        """Return the position of the next byte. Raises OSError for a pipe or terminal."""
        return os.lseek(self._fd, 0, os.SEEK_CUR) - len(self._ahead)

    def readinto(self, buffer: Any) -> int:
        """Read the bytes that are there, none after `stop`; wait where there are none."""
        if not self._ahead:
            self._poll.poll()
            return 0 if self._is_stopped else os.readv(self._fd, [buffer])
        piece, self._ahead = self._ahead[: len(buffer)], self._ahead[len(buffer) :]
        buffer[: len(piece)] = piece
        return len(piece)

    def stop(self) -> None:
        """End reading, also where another thread waits, or has closed this."""
        self._is_stopped = True
        with self._closing:
            if not self.closed:
                os.write(self._waker, b"\0")

    def close(self) -> None:
        """Close the descriptors. Twice is harmless."""
        with self._closing:
            if not self.closed:
                for fd in (self._waked, self._waker, *([self._fd] if self._is_own else [])):
                    os.close(fd)
            super().close()


# ---- compression ----


def decompressed(raw: io.BufferedReader, name: str) -> io.BufferedReader:
    """Return the file's text: `raw` itself where its first bytes are not those of a compressed file.

    ConfigError where it is packed in a way that is not supported, or a module is missing.
    """
    start = raw.peek(_N_START)[:_N_START]
    unread = next((what for magic, what in _UNREAD.items() if start.startswith(magic)), None)
    if unread or PurePath(name).suffix.lower() in UNREAD:
        raise ConfigError(
            f"{name}: is {unread or 'packed'}, which is not supported: unpack it, or compress it with gzip, bzip2, xz "
            "or zstd"
        )
    modules = _modules_for(start)
    if modules is None:
        return raw
    packer = _import_first(modules)
    if packer is None:
        why = f"this Python was built without {modules[0]}: unpack it"
        if modules == _ZSTD:
            why = "reading .zst needs a package: pip install backports.zstd"
        raise ConfigError(f"{name}: {why}")
    kind, options = _DECOMPRESSORS.get(modules[0], ("", {}))
    make = getattr(packer, kind, None)
    text = packer.open(raw) if make is None else _PackedStreams(raw, partial(make, **options))
    return io.BufferedReader(text, BUFFER_BYTES)


def is_packed(raw: io.BufferedReader) -> bool:
    """Return whether a file's first bytes are those of a packed one, supported or not."""
    start = raw.peek(_N_START)[:_N_START]
    return start.startswith(tuple(_UNREAD)) or _modules_for(start) is not None


def is_too_much(error: Exception) -> bool:
    """Return whether unpacking needs more memory than is given to it."""
    return "memory" in str(error).lower()  # as lzma and zstd say it


def _modules_for(start: bytes) -> tuple[str, ...] | None:
    return next((modules for magic, modules in _PACKED.items() if magic.match(start)), None)


class _PackedStreams(io.RawIOBase):
    """The text of streams one after the other, with or without zeros between them, to the last byte of the file.

    The file objects of `bz2` and `lzma` take other bytes after a stream for the end, and the streams after those
    bytes are lost.
    """

    def __init__(self, file: io.BufferedReader, make: Callable[[], Any]) -> None:
        """Read from `file`, which stays open; `make` returns a decompressor of one stream."""
        self._file, self._make = file, make
        self._stream, self._ahead = make(), b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """Read the next bytes; EOFError, OSError or LZMAError where the file is cut off or damaged."""
        while not self._stream.eof or self._begins_another():
            given = self._more() if self._stream.needs_input else b""
            if piece := self._stream.decompress(given, len(buffer)):
                buffer[: len(piece)] = piece
                return len(piece)
        return 0

    def _more(self) -> bytes:
        given, self._ahead = self._ahead or self._file.read1(_CHUNK_BYTES), b""
        if not given:
            raise EOFError("the file ends in the middle of a stream")
        return given

    def _begins_another(self) -> bool:
        """Begin the next stream if other bytes than zeros follow; return whether they do."""
        found = self._stream.unused_data
        while not (found := found.lstrip(b"\0")):
            if not (found := self._file.read1(_CHUNK_BYTES)):
                return False
        self._stream, self._ahead = self._make(), found
        return True


def _import_first(modules: Sequence[str]) -> Any:
    for module in modules:
        with suppress(ImportError):
            return import_module(module)
    return None


@cache
def read_errors() -> tuple[type[Exception], ...]:
    """Return the errors of reading a file that is damaged, cut off or not readable."""
    zstd, lzma = _import_first(_ZSTD), _import_first(("lzma",))
    own = [*((zstd.ZstdError,) if zstd else ()), *((lzma.LZMAError,) if lzma else ())]
    return EOFError, OSError, zlib.error, *own
