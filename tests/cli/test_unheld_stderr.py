"""A stderr that nobody waits for."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, BinaryIO, cast

import pytest

from cbatch.cli.terminal import UnheldStderr

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

LINE = "x" * 99 + "\n"

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's sizes of pipes")


@contextmanager
def stderr_on(fd: int) -> Iterator[io.TextIOWrapper]:
    """A file whose lines go to this descriptor, as the process's stderr."""
    kept = os.dup(2)
    os.dup2(fd, 2)
    try:
        raw = cast("BinaryIO", UnheldStderr("({} left out)".format))
        yield io.TextIOWrapper(raw, "utf-8", write_through=True)
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def small_pipe() -> tuple[int, int]:
    source, sink = os.pipe()
    fcntl.fcntl(sink, fcntl.F_SETPIPE_SZ, 4096)
    return source, sink


def socket_pair() -> tuple[int, int]:
    source, sink = socket.socketpair()
    return source.detach(), sink.detach()


@pytest.mark.parametrize("make", [small_pipe, socket_pair, pty.openpty])
def test_line_without_room_is_left_out_and_counted(make: Callable[[], tuple[int, int]]) -> None:
    source, sink = make()
    with stderr_on(sink) as file:
        raw: Any = file.buffer
        while raw.n_lost < 3:
            file.write(LINE)
        assert os.get_blocking(sink)
        said = b""
        while raw.n_lost:
            said += os.read(source, 2**16)
            file.write("é\n")
    os.close(sink)
    text = (said + rest_of(source)).decode().replace("\r", "")
    *whole, note, last = text.splitlines()
    assert set(whole) == {LINE.strip()}
    assert re.fullmatch(r"\([3-9] left out\)", note)
    assert last == "é"
    os.close(source)


def rest_of(source: int) -> bytes:
    """What can still be read from a file whose other end is closed."""
    said = b""
    with suppress(OSError):  # how a terminal ends
        while more := os.read(source, 2**16):
            said += more
    return said


def test_long_line_is_never_torn_by_the_next() -> None:
    source, sink = small_pipe()
    with stderr_on(sink) as file:
        file.write("a" * 5000 + "\n")
        file.write("lost\n")
        said = os.read(source, 2**20)
        file.write("b")
        file.write("c\n")
        said += os.read(source, 2**20)
    assert said.decode().splitlines() == ["a" * 5000, "(1 left out)", "bc"]
    os.close(source)
    os.close(sink)


def test_reader_that_has_left_and_full_disk_cost_the_lines() -> None:
    source, sink = small_pipe()
    os.close(source)
    for fd in (sink, os.open("/dev/full", os.O_WRONLY)):
        with stderr_on(fd) as file:
            assert [file.write(LINE) for _ in range(3)] == [len(LINE)] * 3
            file.flush()
        os.close(fd)


def test_threads_write_whole_lines() -> None:
    source, sink = os.pipe()
    with stderr_on(sink) as file:
        threads = [
            threading.Thread(target=lambda c=c: [file.write(c * 50 + "\n") for _ in range(50)])
            for c in "abcd"
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        lines = os.read(source, 2**20).decode().splitlines()
    assert sorted(lines) == sorted(c * 50 for c in "abcd" for _ in range(50))
    os.close(source)
    os.close(sink)


@pytest.mark.real
def test_signal_ends_a_program_whose_stderr_nobody_reads() -> None:
    source, sink = small_pipe()
    os.write(sink, b"x" * 4096)
    program = "from cbatch.__main__ import _leave; _leave(15, None)"
    done = subprocess.run([sys.executable, "-c", program], stderr=sink, timeout=60, check=False)
    assert done.returncode == 143
    os.close(source)
    os.close(sink)
