"""Where a body in chunks ends. Source: RFC 9112, 7.1."""

from __future__ import annotations

import re

_SIZE = re.compile(rb"[0-9a-fA-F]+")


class Chunks:
    """Follows a body in chunks, which a parser reads and checks."""

    def __init__(self) -> None:
        self._n_left = 0  # bytes of the chunk, with its line end
        self._line = b""  # the beginning of a line
        self._is_last = self.has_ended = False

    def end(self, data: bytearray) -> int:
        """Return how many of the next bytes belong to the body; all where it does not end in them, or is broken."""
        at = 0
        while at < len(data):
            if self._n_left:
                n_bytes = min(self._n_left, len(data) - at)
                self._n_left -= n_bytes
                at += n_bytes
                continue
            i_end = data.find(b"\n", at)
            if i_end < 0:
                self._line += data[at:]
                break
            line, self._line = self._line + data[at:i_end], b""
            at = i_end + 1
            if self._is_last:
                if not line.strip():
                    self.has_ended = True
                    return at
            elif size := _SIZE.match(line):
                n_bytes = int(size[0], 16)
                self._n_left = n_bytes + len(b"\r\n") if n_bytes else 0
                self._is_last = not n_bytes
            else:
                break
        return len(data)
