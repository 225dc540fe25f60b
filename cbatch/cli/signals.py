"""Signals that end a command which has something to remove first."""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from cbatch.cli.terminal import say

_AGAIN_S = 0.05


def put_off(number: int, frame: FrameType | None) -> threading.Timer | None:
    """Put a signal off that arrived amid an import: `import numpy.random` drops exceptions.

    If so, the handler must return: the timer calls it again after a moment. A block that handles the signal and ends
    before that cancels the timer, and does what the handler does.
    """
    while frame is not None and not frame.f_code.co_filename.startswith("<frozen importlib"):
        frame = frame.f_back
    if frame is None:
        return None
    timer = threading.Timer(_AGAIN_S, os.kill, (os.getpid(), number))
    timer.daemon = True
    timer.start()
    return timer


@contextmanager
def ended_softly() -> Iterator[None]:
    """Have SIGTERM and SIGHUP end the block as Ctrl-C does, so that what is around it can clean up."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    struck: list[int] = []
    later: dict[int, threading.Timer] = {}

    def end(number: int, frame: FrameType | None) -> None:
        if timer := put_off(number, frame):
            later[number] = timer
            return
        struck.append(number)
        sys.exit(128 + number)

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    ours = {number for number, handler in before.items() if handler is not signal.SIG_IGN}
    for number in ours:
        signal.signal(number, end)
    try:
        yield
        if later and not struck:
            end(next(iter(later)), None)
    finally:
        for timer in later.values():
            timer.cancel()
        for number in ours:
            signal.signal(number, before[number])
        if struck:
            say(f"cbatch: ended by {signal.Signals(struck[0]).name}")
