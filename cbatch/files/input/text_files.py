"""Input files: which there are, and their lines in bounded memory, compressed or not."""

from __future__ import annotations

import glob
import io
import os
import re
import select
import stat
import zlib
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, cast

from cbatch.checks import readable
from cbatch.errors import ConfigError
from cbatch.files.input.packed import PackedStreams
from cbatch.files.places import is_dash, status_of, stdin

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

MAX_LINE_BYTES = 16 * 2**20
"""Our choice: four times the text that a window of a million tokens holds."""

_BUFFER_BYTES = 2**18
_BOM = b"\xef\xbb\xbf"
_UTF16_BOMS = (b"\xff\xfe", b"\xfe\xff")
COMPRESSED = (".gz", ".zst", ".bz2", ".xz")
UNREAD = (".zip", ".7z", ".lz4", ".lz", ".lzma", ".z", ".br")
"""Endings of names of what is packed in a way that is not read here."""

_PACKED = {
    re.compile(rb"\x1f\x8b"): "gzip",
    re.compile(rb"\x28\xb5\x2f\xfd"): "zstd",
    re.compile(rb"\xfd7zXZ\0"): "lzma",
    # a header, and a block behind it or none: its first bytes alone may be text. Source: bzip2's decompress.c
    re.compile(rb"BZh[1-9](1AY&SY|\x17rE8P\x90)"): "bz2",
}
"""What a compressed file begins with, and the module that reads it."""

_DECOMPRESSORS = {"lzma": "LZMADecompressor", "bz2": "BZ2Decompressor"}
"""Of the modules whose own files stop without an error where a stream is followed by what is none."""

_UNREAD = {
    b"PK\x03\x04": "a zip archive",
    b"7z\xbc\xaf\x27\x1c": "a 7z archive",
    b"\x04\x22\x4d\x18": "compressed by lz4",
    b"LZIP": "compressed by lzip",
    b"\x1f\x9d": "compressed by compress",
}
"""What packed files that are not read here begin with."""

_N_START = 10
"""Bytes of a file that tell how it is compressed."""


@dataclass(frozen=True, slots=True)
class LongLine:
    """A line over the limit, which was read past and not kept.

    `n_quotes` is how many quotation marks are in it: a row of CSV goes on behind an odd number.
    """

    n_bytes: int
    n_quotes: int


def find_files(paths: Iterable[str | os.PathLike[str]], without: Collection[str] = ()) -> list[str]:
    """Return the files of these names and patterns, those of a pattern in order of names; `-` is stdin.

    Args:
        paths: names and patterns.
        without: real paths of what no pattern is to find.

    Raises:
        ConfigError: nothing there, a directory, or a file that is named twice.
    """
    found = [file for path in paths for file in _expanded(os.fspath(path), without)]
    if not found:
        raise ConfigError("no input: give a batch file, a pattern, or - for stdin")
    seen: dict[object, str] = {}
    for name in found:
        key = _identity(name)
        if key in seen:
            also = f" (as {readable(seen[key])})" if seen[key] != name else ""
            raise ConfigError(
                f"{readable(name)}: is named twice{also}: its requests would run twice"
            )
        seen[key] = name
    return found


def _expanded(name: str, without: Collection[str]) -> list[str]:
    if is_dash(name) or os.path.lexists(name) or not glob.has_magic(name):
        return [name]
    found = sorted(glob.glob(name, recursive=True))
    if without:
        found = [file for file in found if os.path.realpath(file) not in without]
    if not found:
        raise ConfigError(f"{readable(name)}: no file has a name of this pattern")
    return [f for f in found if not Path(f).is_dir()] or found


def _identity(name: str) -> object:
    if is_dash(name):
        known = status_of(name)
        is_file = known is not None and stat.S_ISREG(known.st_mode)
        return (known.st_dev, known.st_ino) if known and is_file else name
    try:
        status = os.stat(name)
    except OSError as error:
        raise ConfigError(f"{readable(name)}: cannot be read: {error.strerror}") from error
    if stat.S_ISDIR(status.st_mode):
        raise ConfigError(
            f"{readable(name)}: is a directory: give files, or a pattern such as {readable(name)}/*"
        )
    return status.st_dev, status.st_ino


class InputFile:
    """One input file: its lines, some of them ahead of time, and how far it is read."""

    def __init__(self, path: str, max_line_bytes: int = MAX_LINE_BYTES) -> None:
        """Make one that is opened when it is read; `path` may be `-`.

        Raises:
            ConfigError: there is no such file.
        """
        self.path, self.name = path, "<stdin>" if is_dash(path) else readable(path)
        self.max_line_bytes = max_line_bytes
        self._ahead: deque[bytes | LongLine] = deque()
        self._raw: io.BufferedReader | None = None
        self._text: io.BufferedReader | None = None
        self._n_lines = self._n_bytes = 0
        size = self._size()
        self.is_regular, self.n_bytes = size is not None, size

    def open(self) -> None:
        """Open it, where it is not.

        Raises:
            ConfigError: it cannot be read, or stdin is closed.
        """
        if self._raw is not None:
            return
        try:
            self._raw = _open(self.path, is_regular=self.is_regular)
            self._text = _decompressed(self._raw, self.name)
        except (OSError, ConfigError) as error:
            self.close()
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"{self.name}: cannot be read: {error.strerror or error}") from error

    def _size(self) -> int | None:
        """Return the size of a regular file, None for a pipe or a device."""
        try:
            status = None if is_dash(self.path) else os.stat(self.path)
        except OSError as error:
            raise ConfigError(f"{self.name}: cannot be read: {error.strerror}") from error
        return status.st_size if status and stat.S_ISREG(status.st_mode) else None

    @property
    def is_compressed(self) -> bool:
        """Whether its bytes are compressed."""
        self.open()
        return self._text is not self._raw

    @property
    def n_bytes_read(self) -> int:
        """Bytes read so far, compressed ones as they stand in the file."""
        if self._raw is None or self._raw is self._text or not self.is_regular:
            return self._n_bytes
        return self._raw.tell()

    def tell_share(self, share: float) -> None:
        """Say how far it is read, for a format that reads it by other means."""
        self._n_bytes = int(share * (self.n_bytes or 0))

    def lines(self) -> Iterator[bytes | LongLine]:
        """Yield every line with its ending, without the file's BOM; those looked at before come again.

        Raises:
            ConfigError: it cannot be read to its end, or is shorter than it was; the message says how far it was.
        """
        while self._ahead:
            yield self._ahead.popleft()
        yield from self._rest()
        self._check_whole()

    def _check_whole(self) -> None:
        """Check that what was read is no less than there was at first: what lacks is not to count as gone."""
        is_plain = self.n_bytes is not None and self._raw is self._text
        if is_plain and self._n_bytes < (self.n_bytes or 0):
            raise ConfigError(
                f"{self.name}: was cut off or replaced while it was read: it has {self._n_bytes:,} bytes and had "
                f"{self.n_bytes:,}: run the same command again when it is whole"
            )

    def ahead(self) -> Iterator[bytes | LongLine]:
        """Yield lines that `lines` will yield again; `rewind` when enough were seen."""
        yield from tuple(self._ahead)
        for line in self._rest():
            self._ahead.append(line)
            yield line

    def rewind(self) -> None:
        """Be as before `ahead`; a regular file is closed until it is read."""
        if self.is_regular:
            self.close()

    def stop(self) -> None:
        """End the reading of a pipe, also where another thread waits there."""
        pipe = getattr(self._raw, "raw", None)
        if isinstance(pipe, _Pipe):
            pipe.stop()

    def close(self) -> None:
        """Close the file, but not stdin."""
        self._ahead.clear()
        self._n_lines = self._n_bytes = 0
        files, self._raw, self._text = (self._text, self._raw), None, None
        if not is_dash(self.path):
            for file in filter(None, files):
                with suppress(OSError):
                    file.close()

    def _rest(self) -> Iterator[bytes | LongLine]:
        self.open()
        readline, most = self._readline, self.max_line_bytes
        while line := readline(most + 1):
            self._n_lines += 1
            if self._n_lines == 1:
                line = self._without_bom(line)
            if len(line) > most and not line.endswith(b"\n"):
                yield self._past(line)
            else:
                yield line

    def _readline(self, n_most: int) -> bytes:
        """Read a line, or so many bytes of it; translate what goes wrong."""
        try:
            line = self._text.readline(n_most) if self._text else b""
        except _broken_errors() as error:
            raise ConfigError(self._broken(error)) from error
        self._n_bytes += len(line)
        return line

    def _past(self, piece: bytes) -> LongLine:
        """Read to the end of the line that begins with this piece."""
        n_bytes = n_quotes = 0
        while piece:
            n_bytes += len(piece)
            n_quotes += piece.count(b'"')
            piece = b"" if piece.endswith(b"\n") else self._readline(_BUFFER_BYTES)
        return LongLine(n_bytes, n_quotes)

    def _without_bom(self, line: bytes) -> bytes:
        if line.startswith(_UTF16_BOMS):
            raise ConfigError(f"{self.name}: is UTF-16: save it as UTF-8")
        return line.removeprefix(_BOM)

    def _broken(self, error: Exception) -> str:
        read = f"{self._n_lines} lines ({self._n_bytes} bytes) were read before"
        if isinstance(error, EOFError):
            return (
                f"{self.name}: ends in the middle of its compressed data; {read}: "
                "is it still being written, or was it copied in part?"
            )
        if isinstance(error, OSError) and error.strerror:
            return f"{self.name}: cannot be read on: {error.strerror}; {read}"
        return f"{self.name}: its compressed data is damaged: {error}; {read}"


def _open(path: str, *, is_regular: bool) -> io.BufferedReader:
    if is_regular:
        return io.BufferedReader(io.FileIO(path), _BUFFER_BYTES)
    if not is_dash(path):
        flags = os.O_RDONLY | os.O_CLOEXEC
        return io.BufferedReader(_Pipe(os.open(path, flags), is_own=True), _BUFFER_BYTES)
    file: Any = stdin()
    if isinstance(file, io.BufferedReader):
        with suppress(OSError):  # where it is no file of the system's
            return io.BufferedReader(_Pipe.of(file), _BUFFER_BYTES)
    return cast("io.BufferedReader", file if hasattr(file, "peek") else io.BufferedReader(file))


class _Pipe(io.RawIOBase):
    """A pipe, a terminal or a device; whoever waits there can be told by another thread to stop."""

    def __init__(self, fd: int, ahead: bytes = b"", *, is_own: bool = False) -> None:
        """Read `ahead`, then from `fd`, which is closed at the end if it is our own."""
        self._fd, self._ahead, self._is_own = fd, ahead, is_own
        self._is_stopped = False
        self._waked, self._waker = os.pipe()
        self._poll = select.poll()
        for waited in (fd, self._waked):
            self._poll.register(waited, select.POLLIN)

    @classmethod
    def of(cls, file: io.BufferedReader) -> _Pipe:
        """Take over a file and what its buffer holds; where that is nothing, wait for something."""
        return cls(file.fileno(), file.read(len(file.peek(1))))

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read what there is; nothing more once it is stopped."""
        if not self._ahead:
            self._poll.poll()
            return 0 if self._is_stopped else os.readv(self._fd, [buffer])
        piece, self._ahead = self._ahead[: len(buffer)], self._ahead[len(buffer) :]
        buffer[: len(piece)] = piece
        return len(piece)

    def stop(self) -> None:
        """End the reading, that of a thread which waits there too."""
        self._is_stopped = True
        os.write(self._waker, b"\0")

    def close(self) -> None:
        """Let go of it. Twice is harmless."""
        if not self.closed:
            for fd in (self._waked, self._waker, *([self._fd] if self._is_own else [])):
                os.close(fd)
        super().close()


def _decompressed(raw: io.BufferedReader, name: str) -> io.BufferedReader:
    """Return the file's text; its first bytes tell what it is, so that a pipe may be compressed too."""
    start = raw.peek(_N_START)[:_N_START]
    unread = next((what for magic, what in _UNREAD.items() if start.startswith(magic)), None)
    if unread or PurePath(name).suffix.lower() in UNREAD:
        raise ConfigError(
            f"{name}: is {unread or 'packed'}, which is not read here: unpack it, or compress it by gzip, bzip2, xz or "
            "zstd"
        )
    module = next((module for magic, module in _PACKED.items() if magic.match(start)), None)
    if module is None:
        return raw
    packer = _import_packer(module, name)
    make = getattr(packer, _DECOMPRESSORS.get(module, ""), None)
    text = packer.open(raw) if make is None else PackedStreams(raw, make)
    return io.BufferedReader(text, _BUFFER_BYTES)


def _import_packer(module: str, name: str) -> Any:
    """Return the module that reads a compressed file."""
    if module == "zstd":
        if (zstd := _import_zstd()) is None:
            raise ConfigError(f'{name}: reading .zst needs a package: pip install "cbatch[zstd]"')
        return zstd
    try:
        return import_module(module)
    except ImportError as error:
        raise ConfigError(f"{name}: this Python was built without {module}: unpack it") from error


@cache
def _import_zstd() -> Any:
    """Return the module for Zstandard, Python's own from 3.14 on; None where there is none."""
    for name in ("compression.zstd", "backports.zstd"):
        with suppress(ImportError):
            return import_module(name)
    return None


@cache
def _broken_errors() -> tuple[type[Exception], ...]:
    zstd = _import_zstd()
    found = [EOFError, OSError, zlib.error, *((zstd.ZstdError,) if zstd else ())]
    with suppress(ImportError):
        found.append(import_module("lzma").LZMAError)
    return tuple(found)
