"""Bytes in and out of the daemon: lines from a descriptor, frames to one by a thread of their own."""

from __future__ import annotations

import struct
import threading
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import BinaryIO

from cbatch.daemon.line_commands import MAX_LINE
from cbatch.daemon.lines import END
from cbatch.support.thread_start import started
from cbatch.worker.framing import STALL_S, FrameSink

N_BACKLOG_MAX = 2**24
"""Bytes that may wait for a reader before no more lines are taken: our choice, over a million frames."""

FRAME = -2
"""The first number of a tagged frame. Source: system 002's daemon, as `lines.MORE` and `lines.END`."""

TEXT = -5
"""A frame's value before text, of which the length and the bytes follow: our own."""


def without_mark(source: BinaryIO) -> bytes:
    """Take the byte order mark that a source may begin with; return the bytes that were taken and are none."""
    taken = b""
    with suppress(OSError):  # the client has left
        while taken != BOM_UTF8 and BOM_UTF8.startswith(taken) and (byte := source.read(1)):
            taken += byte
    return b"" if taken == BOM_UTF8 else taken


def lines_of(source: BinaryIO, head: bytes = b"") -> Iterator[bytes]:
    """Yield lines as they come; one that is longer than `MAX_LINE` is cut to one byte more than that.

    Args:
        head: bytes that were taken from there; none but the last is the end of a line.
    """
    if head and not head.endswith(b"\n"):
        head += source.readline(MAX_LINE + 1 - len(head))
    while line := head or source.readline(MAX_LINE + 1):
        head, rest = b"", line
        while len(rest) > MAX_LINE and not rest.endswith(b"\n"):
            rest = source.readline(MAX_LINE + 1)
        yield line


class StreamWriter:
    """Writes to a descriptor in a thread of its own; the thread that gives it bytes never waits for the reader."""

    def __init__(self, fd: int, on_left: Callable[[], object]) -> None:
        """Start to write.

        Args:
            fd: stays open.
            on_left: called once by the thread, where the reader has left; from then on bytes are dropped.

        Raises:
            NoThreadError: the system has no more threads.
        """
        self._sink, self._on_left = FrameSink(fd), on_left
        self._changed = threading.Condition()
        self._parts: list[bytes] = []
        self._n_waiting = 0
        self._is_closed = self._has_left = False
        self._thread = started(self._run, "cbatch-writer")

    def write(self, data: bytes) -> None:
        """Have bytes written."""
        with self._changed:
            if not self._has_left:
                self._parts.append(data)
                self._n_waiting += len(data)
                self._changed.notify_all()

    def wait_for_room(self) -> None:
        """Return when no more than `N_BACKLOG_MAX` bytes wait, or nobody reads them."""
        with self._changed:
            self._changed.wait_for(lambda: self._n_waiting <= N_BACKLOG_MAX or self._is_closed)

    def close(
        self, hang_up: Callable[[], object] | None = None, patience_s: float = STALL_S
    ) -> None:
        """Return when all is written, or the reader has left.

        `hang_up` has one leave that takes nothing for `patience_s` seconds.
        """
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._sink.wait_for(self._thread, None if hang_up is None else patience_s)
        if hang_up is not None and self._thread.is_alive():
            with suppress(OSError):  # the other side is gone
                hang_up()
        self._thread.join()

    def _run(self) -> None:
        try:
            while parts := self._take():
                self._sink.write_bytes(b"".join(parts))
        except OSError:
            with self._changed:
                self._has_left, self._parts, self._n_waiting = True, [], 0
                self._changed.notify_all()
            self._on_left()

    def _take(self) -> list[bytes]:
        """Wait for bytes; return them, or nothing at the end."""
        with self._changed:
            self._n_waiting = sum(map(len, self._parts))
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._parts or self._is_closed)
            parts, self._parts = self._parts, []
            return parts


def frame(id: int, value: int, *, is_tagged: bool) -> bytes:
    """Return one frame: the value, after the id where frames are tagged."""
    return _PACK_FRAME(FRAME, id, value) if is_tagged else _PACK_VALUE(value)


def text_frame(id: int, text: str) -> bytes:
    """Return a frame with text, its bytes filled up to whole numbers."""
    data = text.encode(errors="backslashreplace")
    return _PACK_FRAME(FRAME, id, TEXT) + _PACK_VALUE(len(data)) + data + b"\0" * (-len(data) % 4)


def busy_frames(*, is_tagged: bool) -> bytes:
    """Return what a client is told that comes while another one is served."""
    text = (
        text_frame(0, "error: another client is connected: try again later") if is_tagged else b""
    )
    return text + frame(0, END, is_tagged=is_tagged)


_PACK_FRAME = struct.Struct("<3i").pack
_PACK_VALUE = struct.Struct("<i").pack


class FrameOutput:
    """The frames of the daemon's lines, and their text: as lines, or as frames too. See docs/operate/processes.md."""

    def __init__(self, frames: StreamWriter, text: StreamWriter | None, *, is_tagged: bool) -> None:
        """Write to these; without a place of its own, text goes among the frames, which are tagged then."""
        self._frames, self._text, self._is_tagged = frames, text, is_tagged

    def tokens(self, id: int, tokens: Sequence[int]) -> None:
        """Write a frame for each token."""
        self._frames.write(b"".join(frame(id, t, is_tagged=self._is_tagged) for t in tokens))

    def mark(self, id: int, value: int) -> None:
        """Write a frame that is not a token."""
        self._frames.write(frame(id, value, is_tagged=self._is_tagged))

    def say(self, text: str, id: int = 0) -> None:
        """Write a line of text; characters that control a terminal are escaped."""
        escaped = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
        if self._text is None:
            self._frames.write(text_frame(id, escaped))
        else:
            name = f"REQ {id} " if id else ""
            self._text.write(f"{name}{escaped}\n".encode(errors="backslashreplace"))
