"""How messages are told from each other on a pipe or a socket: lines, or a length before each."""

from __future__ import annotations

import os
import struct
from typing import TYPE_CHECKING, Literal, TypeAlias

from cbatch.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import BinaryIO

Frames: TypeAlias = Literal["lines", "length"]
"""A frame is a line of JSON; or four bytes, its length in little-endian, and then JSON without an end of line."""

N_LINE_MAX = 64 * 2**20
"""Bytes of the longest line that a worker takes: a prompt of a million tokens has some 10 MB. Our choice."""

N_FRAME_MAX = 2**30
"""Bytes of the longest frame that a client takes: all log-probabilities of a long batch in one. Our choice."""

_LENGTH = struct.Struct("<I")


def read_lines(source: BinaryIO, n_max: int = N_LINE_MAX) -> Iterator[bytes | None]:
    """Yield each line as it comes; None for one of more than `n_max` bytes, which is passed over."""
    while line := source.readline(n_max + 1):
        if len(line) <= n_max:
            yield line
            continue
        while line and not line.endswith(b"\n"):
            line = source.readline(n_max)
        yield None


def frame_writer(fd: int, frames: Frames) -> Callable[[bytes], None]:
    """Return a function that writes one frame to a descriptor and returns when all of it is written."""

    def write(frame: bytes) -> None:
        data = memoryview(frame + b"\n" if frames == "lines" else _LENGTH.pack(len(frame)) + frame)
        while data:
            data = data[os.write(fd, data) :]

    return write


def read_frames(source: BinaryIO, n_max: int = N_FRAME_MAX) -> Iterator[bytes]:
    """Yield each frame with a length before it, as it comes; a frame that is cut off ends them.

    Raises:
        ConfigError: a frame of more than `n_max` bytes.
    """
    while len(head := source.read(_LENGTH.size)) == _LENGTH.size:
        (n_bytes,) = _LENGTH.unpack(head)
        if n_bytes > n_max:
            raise ConfigError(f"a frame of {n_bytes} bytes; at most {n_max} are taken")
        frame = source.read(n_bytes)
        if len(frame) < n_bytes:
            return
        yield frame
