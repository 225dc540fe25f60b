"""Messages of the commands to people and programs, on stderr; stdout is for answers."""

import io
import json
import os
import re
import select
import socket
import stat
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, BinaryIO, cast

import typer

_STDERR = 2

_N_PIPE = 512
"""Bytes that any pipe with room takes at once. Source: POSIX, limits.h: the least PIPE_BUF."""

_NO_CHARACTER = re.compile("[\ud800-\udfff]")  # halves of surrogate pairs


def printable(text: str) -> str:
    """Return a text as it is, or its `repr` where it has characters that control a terminal."""
    return text if text.isprintable() else repr(text)


def say(line: str) -> None:
    """Print a line for a person, if the terminal is still there.

    Control characters are escaped: paths and names in errors may come from anywhere.
    """
    escaped = (c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in line)
    with suppress(OSError):
        typer.echo("".join(escaped), err=True)


@contextmanager
def busy(text: str) -> Iterator[None]:
    """Show on stderr, where it is a terminal, what goes on until the end of the block."""
    from rich.console import Console  # slow to import
    from rich.markup import escape

    console = Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    with console.status(escape(printable(text))):
        console.show_cursor()  # a process that is stopped leaves the terminal with its cursor
        yield


@contextmanager
def bar(
    *, of_bytes: bool = False, is_quiet: bool = False
) -> Iterator[Callable[[int, int], object]]:
    """Lend a function that draws how much of all is done, where stderr is a terminal."""
    from rich import progress as rich  # slow to import
    from rich.console import Console

    console = Console(stderr=True)
    amount = rich.DownloadColumn() if of_bytes else rich.MofNCompleteColumn()
    columns = (rich.BarColumn(None), amount, rich.TimeRemainingColumn())
    is_off = is_quiet or not console.is_terminal
    with rich.Progress(*columns, console=console, transient=True, disable=is_off) as progress:
        task = progress.add_task("", total=None)
        yield lambda n_done, n_all: progress.update(task, completed=n_done, total=n_all)


class UnheldStderr(io.RawIOBase):
    """A file whose `write` puts lines on stderr and never waits: where stderr has no room, they are left out.

    The next line that has room follows a line that says how many were left out. Where the reader has left, or the
    disk is full, lines are dropped.
    """

    def __init__(self, left_out: Callable[[int], str]) -> None:
        """Make one. `left_out` returns the words for a number of lines that were left out."""
        self._left_out = left_out
        self._lock = threading.RLock()  # a signal handler may write, too
        self._begun = b""
        """The line whose end has not come yet."""
        self._rest = b""
        """The end of a line that stderr has in part."""
        self.n_lost = 0
        """Lines left out since the last one that had room."""

    def fileno(self) -> int:
        """Return the descriptor of stderr."""
        return _STDERR

    def isatty(self) -> bool:
        """Whether stderr is a terminal."""
        return os.isatty(_STDERR)

    def writable(self) -> bool:
        """Whether it is a file to write to: always."""
        return True

    def write(self, data: Any) -> int:
        """Write the whole lines now, if there is room; the rest once its line ends."""
        with self._lock:
            lines, end, self._begun = (self._begun + bytes(data)).rpartition(b"\n")
            if end:
                self._write_lines(lines + end)
        return len(data)

    def _write_lines(self, lines: bytes) -> None:
        note = f"{self._left_out(self.n_lost)}\n".encode() if self.n_lost else b""
        before = len(self._rest)
        data = self._rest + note + lines
        try:
            n_written = _write_at_once(data)
        except OSError:  # the reader has left, or the disk is full
            self._rest = b""
            return
        if n_written > before:
            self._rest, self.n_lost = data[n_written:], 0
        else:
            self._rest = self._rest[n_written:]
            self.n_lost += lines.count(b"\n")


def never_wait_for_stderr(left_out: Callable[[int], str]) -> None:
    """Have nothing in this process wait for the reader of stderr from now on: logs, errors, tracebacks, `say`.

    A program that replaced `sys.stderr` keeps its own.

    Args:
        left_out: returns the words for a number of lines that were left out.
    """
    before = sys.__stderr__
    if before is None or sys.stderr is not before:
        return
    before.flush()
    raw = cast("BinaryIO", UnheldStderr(left_out))
    sys.stderr = io.TextIOWrapper(
        raw, before.encoding, errors="backslashreplace", write_through=True
    )


def _write_at_once(data: bytes) -> int:
    """Write what stderr takes without a wait; return how many bytes."""
    kind = os.fstat(_STDERR).st_mode
    try:
        if stat.S_ISSOCK(kind):
            with socket.socket(fileno=os.dup(_STDERR)) as own:
                return own.send(data, socket.MSG_DONTWAIT)
        if stat.S_ISREG(kind):
            return os.write(_STDERR, data)
        # opened anew: `O_NONBLOCK` on the descriptor itself would hold for other processes that have it
        own_fd = os.open(f"/proc/self/fd/{_STDERR}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
    except BlockingIOError:
        return 0
    except (PermissionError, FileNotFoundError):  # another user's terminal, or no such folder
        return _write_if_ready(data)
    try:
        return os.write(own_fd, data)
    except BlockingIOError:
        return 0
    finally:
        os.close(own_fd)


def _write_if_ready(data: bytes) -> int:
    can_write = select.poll()
    can_write.register(_STDERR, select.POLLOUT)
    return os.write(_STDERR, data[:_N_PIPE]) if can_write.poll(0) else 0


def settle_stderr() -> None:
    """Discard messages that could not be written: Python would try once more at the end, and exit with 120."""
    try:
        if sys.stderr is not None:
            sys.stderr.flush()
    except OSError:
        discard(2)


def discard(fd: int) -> None:
    """Discard what is still to be written to a file: what Python's buffer holds would fail again at the end.

    Source: Python's docs, note on SIGPIPE in `signal`.
    """
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, fd)
    os.close(null)


def event_line(kind: str, **values: Any) -> str:
    """Return an event as one line of ASCII JSON; half a surrogate pair, as in names that are not UTF-8, is U+FFFD."""
    text = json.dumps({"event": kind, **values}, ensure_ascii=False, default=str)
    return json.dumps(json.loads(_NO_CHARACTER.sub("\ufffd", text)))


def tell(kind: str, **values: Any) -> None:
    """Print an event for programs."""
    say(event_line(kind, **values))


def note_at_once(words: str) -> None:
    """Print a note as an event from a signal handler, even in the middle of other output."""
    with suppress(OSError):
        os.write(2, f"{event_line('note', text=words)}\n".encode())
