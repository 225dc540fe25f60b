"""Lines in, frames out: cut, packed, and written by a thread."""

from __future__ import annotations

import io
import os
import struct
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from cbatch.daemon.line_commands import MAX_LINE
from cbatch.daemon.lines import END, MORE
from cbatch.daemon.streams import FrameOutput, StreamWriter, busy_frames, lines_of, without_mark
from tests.runtime.backends import PATIENCE_S, in_thread

if TYPE_CHECKING:
    from collections.abc import Iterator


class Pipe:
    """A writer on a pipe."""

    def __init__(self) -> None:
        self.source, self.sink = os.pipe()
        self.has_left = threading.Event()
        self.writer = StreamWriter(self.sink, self.has_left.set)

    def read_all(self) -> bytes:
        """Close the writer, and return what it has written."""
        self.writer.close()
        os.close(self.sink)
        self.sink = -1
        with open(self.source, "rb", closefd=False) as source:
            return source.read()


@contextmanager
def opened() -> Iterator[Pipe]:
    pipe = Pipe()
    yield pipe
    pipe.writer.close()
    for fd in (pipe.source, pipe.sink):
        if fd >= 0:
            os.close(fd)


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    with opened() as pipe:
        yield pipe


def test_long_line_is_cut_and_the_next_one_is_whole() -> None:
    data = b"a\n" + b"x" * (3 * MAX_LINE) + b"\nb\n" + b"y" * MAX_LINE + b"\n\nlast"
    found = [*lines_of(io.BytesIO(data))]
    assert [len(line) for line in found] == [2, MAX_LINE + 1, 2, MAX_LINE + 1, 1, 4]
    assert [line for line in found if len(line) < 9] == [b"a\n", b"b\n", b"\n", b"last"]


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (b"\xef\xbb\xbfa\nb", [b"a\n", b"b"]),
        (b"\xef\xbb\xbf", []),
        ("\uff41.bin 3\nb".encode(), ["\uff41.bin 3\n".encode(), b"b"]),  # begins as a mark does
        (b"\xef\na\n", [b"\xef\n", b"a\n"]),
        (b"\xef\xbb", [b"\xef\xbb"]),
        (b"\xef" + b"x" * (2 * MAX_LINE) + b"\nb", [b"\xef" + b"x" * MAX_LINE, b"b"]),
        (b"", []),
    ],
)
def test_mark_before_the_first_line_is_passed_over(data: bytes, found: list[bytes]) -> None:
    source = io.BytesIO(data)
    assert [*lines_of(source, without_mark(source))] == found


def test_line_as_long_as_may_be_is_not_too_long() -> None:
    [line, after] = lines_of(io.BytesIO(b"y" * MAX_LINE + b"\nz"))
    assert (line, after) == (b"y" * MAX_LINE + b"\n", b"z")


def test_all_is_written_in_order_however_much_it_is(pipe: Pipe) -> None:
    parts = [bytes([i]) * 10_000 for i in range(100)]
    for part in parts:
        pipe.writer.write(part)
    wait = in_thread(pipe.writer.close)
    with open(pipe.source, "rb", closefd=False) as source:
        assert source.read(1_000_000) == b"".join(parts)
    wait()


def test_descriptor_that_does_not_wait_is_waited_for(pipe: Pipe) -> None:
    os.set_blocking(pipe.sink, False)
    pipe.writer.write(b"x" * 300_000)
    with open(pipe.source, "rb", closefd=False) as source:
        assert source.read(300_000) == b"x" * 300_000


def test_reader_who_leaves_is_told_once_and_nothing_is_kept(pipe: Pipe) -> None:
    os.close(pipe.source)
    pipe.source = -1
    pipe.writer.write(b"x")
    assert pipe.has_left.wait(PATIENCE_S)
    pipe.writer.write(b"x" * 10**8)
    pipe.writer.wait_for_room()


def test_line_waits_for_a_reader_far_behind(pipe: Pipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cbatch.daemon.streams.N_BACKLOG_MAX", 100_000)
    pipe.writer.write(b"x" * 300_000)
    wait = in_thread(pipe.writer.wait_for_room)
    with open(pipe.source, "rb", closefd=False) as source:
        assert source.read(300_000) == b"x" * 300_000
    wait()


@pytest.mark.parametrize("is_tagged", [False, True])
def test_frames_are_numbers_of_four_bytes(pipe: Pipe, is_tagged: bool) -> None:
    output = FrameOutput(pipe.writer, pipe.writer, is_tagged=is_tagged)
    output.tokens(7, [5, 70_000])
    output.mark(7, MORE)
    found = [*struct.iter_unpack("<3i" if is_tagged else "<i", pipe.read_all())]
    values = [5, 70_000, MORE]
    assert found == [(-2, 7, v) if is_tagged else (v,) for v in values]


def test_text_among_frames_is_filled_up(pipe: Pipe) -> None:
    FrameOutput(pipe.writer, None, is_tagged=True).say("naïve\n", 7)
    data = pipe.read_all()
    assert data == struct.pack("<4i", -2, 7, -5, 8) + "naïve\\n".encode()
    assert len(data) % 4 == 0


def test_text_of_its_own_is_a_line_that_no_terminal_obeys(pipe: Pipe) -> None:
    output = FrameOutput(pipe.writer, pipe.writer, is_tagged=True)
    output.say("error: \x1b[31m\n\udcff", 7)
    output.say("SCHED_STEP: idle")
    assert pipe.read_all() == b"REQ 7 error: \\x1b[31m\\n\\udcff\nSCHED_STEP: idle\n"


def test_busy_client_gets_text_and_an_end() -> None:
    assert struct.unpack("<i", busy_frames(is_tagged=False)) == (END,)
    data = busy_frames(is_tagged=True)
    assert b"another client is connected" in data
    assert struct.unpack("<3i", data[-12:]) == (-2, 0, END)
