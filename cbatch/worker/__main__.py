"""The program of a worker process: `python -m cbatch.worker`, driven by stdin and stdout."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import partial

GRACE_S = 2.0
"""Seconds that a worker has to end after its client is gone. Our choice."""


_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15
_NAME = b"cbatch worker"
"""What `top`, `pgrep` and `ps -o comm` call the process: at most 15 bytes."""


def main() -> None:
    """Serve the engine of this process to its client, until stdin ends or the client asks for the end."""
    _tell_system()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is for the client
    # nobody reads Python's warnings, and the client would take them for the reason of a death
    warnings.simplefilter("ignore")
    from cbatch.worker.service import load_and_serve  # takes long: a client may go meanwhile

    source, sink = os.dup(0), os.dup(1)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)  # what others print must not come between frames
    leave = partial(os._exit, 1)  # nobody hears what more there is to say
    watch = threading.Thread(target=_outlive, args=(source, leave), daemon=True)
    watch.start()
    with open(source, "rb") as lines:
        load_and_serve(lines, sink, leave)


def _tell_system() -> None:
    """Name this process; have the system kill it when its client is gone, even if it is stopped or stuck. Linux only.

    The signal comes when the thread that started this process ends; that thread outlives the process.
    Source: man 2 PR_SET_PDEATHSIG, PR_SET_NAME.
    """
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            prctl = ctypes.CDLL(None).prctl
            prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            prctl(_PR_SET_NAME, _NAME, 0, 0, 0)


def _outlive(source: int, leave: Callable[[], object]) -> None:
    """Leave soon after the client is gone: while a model loads, or a long step computes, nobody reads `source`."""
    client, hung_up = os.getppid(), select.poll()
    hung_up.register(source, 0)
    while not hung_up.poll(1000) and os.getppid() == client:
        pass
    time.sleep(GRACE_S)
    leave()


if __name__ == "__main__":
    main()
