"""What bzip2 and xz have compressed: one stream or several, to the last byte of the file."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

_CHUNK_BYTES = 2**16


class PackedStreams(io.RawIOBase):
    """The text of streams that stand one behind the other, with or without zeros between them.

    Python's own files take whatever else is behind a stream for the end, and the streams behind that are lost.
    """

    def __init__(self, file: io.BufferedReader, make: Callable[[], Any]) -> None:
        """Read from `file`, which stays open; `make` returns a decompressor of one stream."""
        self._file, self._make = file, make
        self._stream, self._ahead = make(), b""

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read what comes next.

        Raises:
            EOFError: the file ends in the middle of a stream.
            OSError, LZMAError: it cannot be read on, or is damaged.
        """
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
        """Whether there is anything but zeros behind the stream that has ended: it is to be the next one."""
        found = self._stream.unused_data
        while not (found := found.lstrip(b"\0")):
            if not (found := self._file.read1(_CHUNK_BYTES)):
                return False
        self._stream, self._ahead = self._make(), found
        return True
