"""What the commands say to people and programs, on stderr; stdout is for answers."""

import json
import os
import re
from contextlib import suppress
from typing import Any

import typer

_NO_CHARACTER = re.compile("[\ud800-\udfff]")  # halves of surrogate pairs


def printable(text: str) -> str:
    """Return a text as it is, or as Python writes it where a terminal would obey it."""
    return text if text.isprintable() else repr(text)


def say(line: str) -> None:
    """Print a line for the person at the terminal, who may have left.

    What a terminal would obey is written as Python writes it: paths and names in errors may come from anybody.
    """
    with suppress(OSError):
        harmless = (c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in line)
        typer.echo("".join(harmless), err=True)


def event_line(kind: str, **values: Any) -> str:
    """Return an event as one line of JSON in ASCII; what is no character, as in names that are no UTF-8, is U+FFFD."""
    text = json.dumps({"event": kind, **values}, ensure_ascii=False, default=str)
    return json.dumps(json.loads(_NO_CHARACTER.sub("\ufffd", text)))


def tell(kind: str, **values: Any) -> None:
    """Print an event, for programs."""
    say(event_line(kind, **values))


def tell_at_once(kind: str, **values: Any) -> None:
    """Do the same in the midst of anything, what is being printed too."""
    with suppress(OSError):
        os.write(2, f"{event_line(kind, **values)}\n".encode())
