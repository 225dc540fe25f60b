"""Messages of the commands to people and programs, on stderr; stdout is for answers."""

import json
import os
import re
import select
import sys
from contextlib import suppress
from typing import Any

import typer

N_LINE_MAX = 1000
"""Characters of a line of `say_at_once`: fewer bytes than any pipe with room takes whole. Source: pipe(7), PIPE_BUF."""

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


def say_at_once(line: str) -> bool:
    """Print at most `N_LINE_MAX` characters of a line, or nothing where that would wait for a reader of stderr.

    Characters other than printable ASCII are escaped.

    Returns:
        whether the line was printed, or stderr is closed.
    """
    can_write = select.poll()
    can_write.register(2, select.POLLOUT)
    if not can_write.poll(0):
        return False
    text = ascii(line)[1:-1][:N_LINE_MAX]
    with suppress(OSError):
        os.write(2, f"{text}\n".encode())
    return True


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
