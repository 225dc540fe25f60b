"""How messages are told from each other on a pipe or a socket: lines of JSON, or msgpack with its length before it."""

from __future__ import annotations

import os
import select
import struct
from typing import TYPE_CHECKING, BinaryIO

from cbatch.errors import ConfigError

if TYPE_CHECKING:
    import threading
    from collections.abc import Iterator

    from cbatch.worker.wire import Frames

N_LINE_MAX = 64 * 2**20
"""Bytes of the longest line that a worker takes: a prompt of a million tokens has some 10 MB. Our choice."""

N_FRAME_MAX = 2**30
"""Bytes of the longest frame that a client takes: all log-probabilities of a long batch in one. Our choice."""

STALL_S = 30.0
"""A client of a socket that takes nothing of its last output for so long is left, for others wait. Our choice."""

ENDED_S = 1.0
"""The same where the process ends, by a signal or an error. Our choice."""

_LENGTH = struct.Struct("<I")
_HEAD = struct.Struct("<Ic")
"""A length, and the first byte of the frame."""

_MAPS = frozenset(bytes([0x80 + n]) for n in range(16))
"""First bytes of a map with few fields, as every frame is. Source: msgpack's specification, fixmap."""

_N_PIECE = 2**16
"""Bytes of one write. Source: Linux's manual, pipe(7): the capacity of a pipe."""

_N_AT_ONCE = 4096
"""Bytes that a descriptor takes which is ready for some. Source: Linux's manual, pipe(7), `PIPE_BUF`."""


def read_lines(source: BinaryIO, n_max: int = N_LINE_MAX) -> Iterator[bytes | None]:
    """Yield each line as it comes; None for one of more than `n_max` bytes, which is passed over."""
    while line := source.readline(n_max + 1):
        if len(line) <= n_max:
            yield line
            continue
        while line and not line.endswith(b"\n"):
            line = source.readline(n_max)
        yield None


def read_messages(source: BinaryIO, frames: Frames) -> Iterator[bytes | None]:
    """Yield each message to a worker as it comes; None for a line that is too long.

    Raises:
        ConfigError: as `read_frames`; also where the last frame is cut off.
    """
    if frames == "lines":
        return read_lines(source)
    return read_frames(source, N_LINE_MAX, is_whole=True)


class FrameSink:
    """Writes frames to a descriptor, which stays open. One thread at a time."""

    def __init__(self, fd: int, frames: Frames = "lines") -> None:
        self._fd, self.frames = fd, frames
        self.n_written = 0
        """Bytes that were taken so far."""

    def write(self, frame: bytes) -> None:
        """Write one frame; return when all of it is taken. Raises an OSError where the reader is gone."""
        self.write_bytes(framed(frame, self.frames))

    def write_bytes(self, data: bytes) -> None:
        """Write frames with what tells them from each other, as `write` does."""
        left = memoryview(data)
        while left:
            n_taken = _write_some(self._fd, left[:_N_PIECE])
            self.n_written += n_taken
            left = left[n_taken:]

    def wait_for(self, writer: threading.Thread, patience_s: float | None) -> None:
        """Return when the thread that writes here has ended, or nothing was taken for `patience_s` seconds."""
        n_before = -1
        while writer.is_alive() and self.n_written != n_before:
            n_before = self.n_written
            writer.join(patience_s)

    def write_at_once(self, frame: bytes) -> bool:
        """Write a frame where that need not wait for the reader; else return False, and write nothing."""
        data = framed(frame, self.frames)
        if len(data) > _N_AT_ONCE or not self.is_ready():
            return False
        self.write(frame)
        return True

    def is_ready(self) -> bool:
        """Whether some bytes can be written without waiting; always true on systems that do not tell."""
        if not hasattr(select, "poll"):
            return True
        poll = select.poll()
        poll.register(self._fd, select.POLLOUT)
        return bool(poll.poll(0))


def framed(frame: bytes, frames: Frames) -> bytes:
    """Return a frame with what tells it from the next one."""
    return frame + b"\n" if frames == "lines" else _LENGTH.pack(len(frame)) + frame


def _write_some(fd: int, data: memoryview) -> int:
    """Write what a descriptor takes, some or all; return how many bytes. Raises an OSError where the reader is gone."""
    try:
        return os.write(fd, data)
    except BlockingIOError:  # a descriptor that does not wait
        select.select([], [fd], [])
        return 0


def read_frames(
    source: BinaryIO, n_max: int = N_FRAME_MAX, *, is_whole: bool = False
) -> Iterator[bytes]:
    """Yield each frame with a length before it, as it comes.

    Args:
        is_whole: whether a last frame that is cut off is an error; else it is left out.

    Raises:
        ConfigError: a frame of more than `n_max` bytes, or what is not a frame, whose length may never come.
    """
    while head := source.read(_HEAD.size):
        if len(head) == _HEAD.size:
            n_bytes, first = _HEAD.unpack(head)
            if first not in _MAPS or not n_bytes:
                raise ConfigError(
                    f"not a frame of msgpack (four bytes of length, then a map): {head!r}"
                )
            if n_bytes > n_max:
                raise ConfigError(
                    f"a frame has {n_bytes:,} bytes, but at most {n_max:,} are accepted"
                )
            rest = source.read(n_bytes - 1)
            if len(rest) == n_bytes - 1:
                yield first + rest
                continue
        if is_whole:
            raise ConfigError("the last frame is cut off")
        return
