"""Input files of lines: which files there are, their lines in bounded memory, and formats of one item a line."""

from __future__ import annotations

import glob
import os
import stat
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from zlib import crc32

from cbatch.errors import ConfigError
from cbatch.files.input.item import InputLineError
from cbatch.files.input.raw_streams import (
    BUFFER_BYTES,
    Pipe,
    decompressed,
    is_too_much,
    open_raw,
    read_errors,
)
from cbatch.files.places import is_dash, status_of
from cbatch.support.checks import readable

if TYPE_CHECKING:
    import io
    from collections.abc import Collection, Iterable, Iterator

MAX_LINE_BYTES = 16 * 2**20
"""Our choice: four times the text that a window of a million tokens holds."""

N_PAST_BYTES = 2**30
"""Bytes of a line without an end after which no more is read: a device, or no file of lines. Our choice."""

_BOM = b"\xef\xbb\xbf"
_UTF16_BOMS = (b"\xff\xfe", b"\xfe\xff")


@dataclass(frozen=True, slots=True)
class LongLine:
    """A line over the limit, whose bytes were not kept.

    After an odd number of quotation marks (`n_quotes`) a row of CSV continues on the next line.
    """

    n_bytes: int
    n_quotes: int
    n_most: int

    @property
    def error(self) -> InputLineError:
        """The error of the line."""
        return InputLineError(
            "line_too_long",
            f"the line has {self.n_bytes} bytes, but at most {self.n_most} are allowed: "
            "shorten it, or raise max_line_bytes",
        )


def find_files(paths: Iterable[str | os.PathLike[str]], without: Collection[str] = ()) -> list[str]:
    """Return the files of names and patterns, those of a pattern in order of their names; `-` is stdin.

    Patterns leave out the files with the real paths `without`. ConfigError for a file that is not there, or twice.
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
    found = [file for file in found if os.path.realpath(file) not in without]
    if not found:
        raise ConfigError(f"{readable(name)}: no file matches this pattern")
    return [f for f in found if not Path(f).is_dir()] or found


def _identity(name: str) -> object:
    if is_dash(name):
        stdin = status_of(name)
        is_file = stdin is not None and stat.S_ISREG(stdin.st_mode)
        return (stdin.st_dev, stdin.st_ino) if stdin and is_file else name
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
    """One input file: its lines, of which the first can be read ahead, and the number of bytes read."""

    def __init__(self, path: str, max_line_bytes: int = MAX_LINE_BYTES) -> None:
        self.path, self.name = path, "<stdin>" if is_dash(path) else readable(path)
        self.max_line_bytes = max_line_bytes
        self._ahead: deque[bytes | LongLine] = deque()
        self._raw: io.BufferedReader | None = None
        self._text: io.BufferedReader | None = None
        self._n_lines = self._n_bytes = self._crc = 0
        self._before: os.stat_result | None = None
        """Status of the regular file when it was opened, also if stdin is redirected from one; None for others."""
        self._start = 0
        """Position in the file of the first byte that is read."""
        self.is_regular = not is_dash(path) and os.path.isfile(path)
        self.n_bytes = os.path.getsize(path) if self.is_regular else None

    def open(self) -> None:
        """Open the file, if it is not open; ConfigError where it cannot be read, or stdin is closed."""
        if self._raw is not None:
            return
        try:
            self._raw = open_raw(self.path, is_regular=self.is_regular)
            self._before, self._start = _begun(self._raw)
            self._text = self._content(self._raw)
        except OSError as error:
            self.close()
            raise ConfigError(f"{self.name}: cannot be read: {error.strerror or error}") from error
        except ConfigError:
            self.close()
            raise

    def _content(self, raw: io.BufferedReader) -> io.BufferedReader:
        """Return what is read of an opened file. Raises as `decompressed`."""
        return decompressed(raw, self.name)

    @property
    def is_compressed(self) -> bool:
        """Whether its bytes are compressed."""
        self.open()
        return self._text is not self._raw

    @property
    def n_bytes_read(self) -> int:
        """Bytes read so far; of a compressed file, compressed bytes."""
        if self._raw is None or self._raw is self._text or not self.is_regular:
            return self._n_bytes
        return self._raw.tell()

    def tell_share(self, share: float) -> None:
        """Note how much is read, for a format that does not read it by lines."""
        self._n_bytes = int(share * (self.n_bytes or 0))

    def lines(self) -> Iterator[bytes | LongLine]:
        """Yield every line with its ending, without the file's BOM; lines read ahead come again.

        ConfigError, which says how much was read, where the file cannot be read to its end, is shorter than it was, or
        is not what was read; one to which lines were added is.
        """
        while self._ahead:
            yield self._ahead.popleft()
        yield from self._rest()
        if self._raw is None or self._before is None:
            return
        n_due = self._before.st_size - self._start if self.n_bytes is None else self.n_bytes
        # compressed data may have been cut off between two streams of it, and be whole
        is_plain = self._raw is self._text
        n_now = self._n_bytes if is_plain else os.fstat(self._raw.fileno()).st_size - self._start
        self.check_size(n_now, n_due)
        if is_plain and self._is_rewritten():
            # a line may be of one version in part, and in part of another
            raise rewritten(self.name)

    def check_size(self, n_bytes: int, n_due: int | None = None) -> None:
        """Raise ConfigError where a file has fewer bytes than it had: what is missing was not removed."""
        n_due = self.n_bytes if n_due is None else n_due
        if n_due is not None and n_bytes < n_due:
            raise ConfigError(
                f"{self.name}: was cut off or replaced while it was read: it had {n_due:,} bytes and now has "
                f"{n_bytes:,}: run the same command again when it is complete"
            )

    def ahead(self) -> Iterator[bytes | LongLine]:
        """Yield lines that `lines` will yield again; call `rewind` afterwards."""
        yield from tuple(self._ahead)
        for line in self._rest():
            self._ahead.append(line)
            yield line

    def rewind(self) -> None:
        """Return to the state before `ahead`; a regular file is closed until it is read."""
        if self.is_regular:
            self.close()

    def stop(self) -> None:
        """End the reading of a pipe, also where another thread waits for it."""
        pipe = getattr(self._raw, "raw", None)
        if isinstance(pipe, Pipe):
            pipe.stop()

    def close(self) -> None:
        """Close the file, but not stdin."""
        self._ahead.clear()
        self._n_lines = self._n_bytes = self._crc = 0
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
                if line.startswith(_UTF16_BOMS):
                    raise ConfigError(f"{self.name}: is UTF-16: save it as UTF-8")
                line = line.removeprefix(_BOM)
            if len(line) > most and not line.endswith(b"\n"):
                yield self._past(line)
            else:
                yield line

    def _readline(self, n_most: int) -> bytes:
        """Read a line, at most `n_most` bytes of it; translate errors."""
        try:
            line = self._text.readline(n_most) if self._text else b""
        except read_errors() as error:
            raise ConfigError(self._broken(error)) from error
        self._n_bytes += len(line)
        self._crc = crc32(line, self._crc)
        return line

    def _is_rewritten(self) -> bool:
        """Whether the file does not begin with what was read of it; it is read again only if it was written to."""
        if self._raw is None or self._before is None:
            return False
        fd, found, start = self._raw.fileno(), 0, 0
        if os.fstat(fd).st_mtime_ns == self._before.st_mtime_ns:
            return False
        while piece := os.pread(fd, min(BUFFER_BYTES, self._n_bytes - start), self._start + start):
            found, start = crc32(piece, found), start + len(piece)
        return (found, start) != (self._crc, self._n_bytes)

    def _past(self, piece: bytes) -> LongLine:
        """Read to the end of the line that begins with this piece."""
        n_bytes = n_quotes = 0
        while piece:
            n_bytes += len(piece)
            n_quotes += piece.count(b'"')
            if n_bytes > (n_most := max(N_PAST_BYTES, 2 * self.max_line_bytes)):
                raise ConfigError(
                    f"{self.name}: line {self._n_lines} has more than {n_most:,} bytes, but at most "
                    f"{self.max_line_bytes:,} are allowed: give a file of lines"
                )
            piece = b"" if piece.endswith(b"\n") else self._readline(BUFFER_BYTES)
        return LongLine(n_bytes, n_quotes, self.max_line_bytes)

    def _broken(self, error: Exception) -> str:
        read = f"{self._n_lines} lines ({self._n_bytes} bytes) were read before"
        if isinstance(error, EOFError):
            return (
                f"{self.name}: ends in the middle of its compressed data; {read}: "
                "is it still being written, or was it copied in part?"
            )
        if isinstance(error, OSError) and error.strerror:
            return f"{self.name}: cannot be read further: {error.strerror}; {read}"
        if is_too_much(error):
            return f"{self.name}: unpacking it needs too much memory; {read}: unpack it with its own tool"
        return f"{self.name}: its compressed data is damaged: {error}; {read}"


def _begun(raw: io.BufferedReader) -> tuple[os.stat_result | None, int]:
    """Return the status of an opened file, None unless it is a regular one, and the position of the next byte."""
    try:
        status, place = os.fstat(raw.fileno()), raw.raw.tell()
    except (OSError, AttributeError):  # a stdin without a file descriptor
        return None, 0
    return (status if stat.S_ISREG(status.st_mode) else None), place


def rewritten(name: str) -> ConfigError:
    """Return the error of a file whose bytes are not those that were read."""
    return ConfigError(
        f"{name}: was rewritten while it was read: run the same command again when it is complete"
    )


def not_utf8(error: UnicodeDecodeError, n_before: int = 0) -> InputLineError:
    """Return the error of bytes that are not UTF-8; `n_before` bytes of the item are before them."""
    return InputLineError(
        "invalid_utf8", f"not UTF-8: {error.reason} at byte {n_before + error.start}"
    )


def numbered(
    file: InputFile, lines: Iterable[bytes | LongLine]
) -> Iterator[tuple[str, bytes | LongLine]]:
    """Yield the place and the content of every line that is not blank."""
    prefix = f"{file.name}, line "
    for i, line in enumerate(lines, 1):
        if isinstance(line, LongLine) or line.strip():
            yield f"{prefix}{i}", line
