"""The program of a worker process: `python -m cbatch.worker`, driven by stdin and stdout."""

from __future__ import annotations

import os
import signal
from functools import partial

from cbatch.worker.service import load_and_serve


def main() -> None:
    """Serve the engine of this process to the one that started it, until stdin ends or it is asked to close."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is for who started this
    source, sink = os.dup(0), os.dup(1)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)  # what others print must not come between frames
    leave = partial(os._exit, 1)  # nobody hears what more there is to say
    with open(source, "rb") as lines:
        load_and_serve(lines, sink, leave)


if __name__ == "__main__":
    main()
