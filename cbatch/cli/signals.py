"""Signals that end a command which has something to remove first."""

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from cbatch.cli.terminal import say


@contextmanager
def ended_softly() -> Iterator[None]:
    """Have SIGTERM and SIGHUP end the block as Ctrl-C does, so that what is around it can clean up."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    struck: list[int] = []

    def end(number: int, frame: FrameType | None) -> NoReturn:
        struck.append(number)
        sys.exit(128 + number)

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    ours = {number for number, handler in before.items() if handler is not signal.SIG_IGN}
    for number in ours:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, before[number])
        if struck:
            say(f"cbatch: ended by {signal.Signals(struck[0]).name}")
