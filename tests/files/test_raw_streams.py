"""Pipes that one thread reads and closes, and another stops."""

from __future__ import annotations

import os
import threading
from contextlib import ExitStack
from unittest.mock import patch

from cbatch.files.input.raw_streams import Pipe


def test_stop_while_the_reader_closes_touches_no_descriptor() -> None:
    read_end, write_end = os.pipe()
    pipe = Pipe(read_end, is_own=True)
    close, n_closed = os.close, 0
    errors: list[OSError] = []
    began = threading.Event()

    def stop() -> None:
        began.set()
        try:
            pipe.stop()
        except OSError as error:
            errors.append(error)

    stopper = threading.Thread(target=stop)

    def close_and_stop(fd: int) -> None:
        nonlocal n_closed
        close(fd)
        n_closed += 1
        if n_closed == 2:  # what `stop` writes to is closed
            stopper.start()
            began.wait()
            stopper.join(0.1)  # it ends here where nothing holds it back

    with ExitStack() as stack:
        stack.callback(close, write_end)
        stack.enter_context(patch("os.close", close_and_stop))
        pipe.close()
    stopper.join()
    assert not errors
    assert n_closed == 3


def test_stop_after_close_does_nothing() -> None:
    read_end, write_end = os.pipe()
    pipe = Pipe(read_end, is_own=True)
    pipe.close()
    pipe.stop()
    os.close(write_end)
