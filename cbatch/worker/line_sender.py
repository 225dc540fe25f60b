"""Messages for a worker that may not read for a while: nobody waits until it does."""

from __future__ import annotations

import select
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from cbatch.support.thread_start import started

_LAST_S = 1.0


class LineSender:
    """Writes messages to a pipe or a socket; what does not fit in is kept, and written by a thread as there is room.

    So a worker that is stopped, or reads slowly, holds up neither its client nor the client's other workers. The thread
    is there from the beginning: later the system may have none.
    """

    def __init__(self, fd: int, write: Callable[[memoryview], int]) -> None:
        """Make one.

        Args:
            fd: the descriptor, to wait for room.
            write: writes what there is room for and returns how many bytes; a BlockingIOError where there is none.

        Raises:
            NoThreadError: the system has no more threads.
        """
        self._fd, self._write = fd, write
        self._changed = threading.Condition(threading.Lock())
        self._left: deque[memoryview] = deque()
        self._is_over = False
        self._error: OSError | None = None
        self._thread = started(self._run, "cbatch-worker-stdin")

    def send(self, message: bytes) -> None:
        """Send a message. Raises an OSError where the worker is known to be gone."""
        data = memoryview(message)
        with self._changed:
            if self._error is not None:
                raise self._error
            if not self._left:
                data = self._written(data)
            if data:
                self._left.append(data)
                self._changed.notify()

    def end(self) -> None:
        """Let go of the descriptor, whose reader is gone."""
        with self._changed:
            self._is_over = True
            self._changed.notify()
        self._thread.join(_LAST_S)

    def _written(self, data: memoryview) -> memoryview:
        """Write as much as there is room for; return the rest."""
        with suppress(BlockingIOError):
            while data:
                data = data[self._write(data) :]
        return data

    def _run(self) -> None:
        room = select.poll()
        room.register(self._fd, select.POLLOUT)
        while self._has_left():
            room.poll()
            with self._changed:
                try:
                    self._left[0] = self._written(self._left[0])
                except OSError as error:
                    self._error = error
                    self._left.clear()
                    return
                while self._left and not self._left[0]:
                    self._left.popleft()

    def _has_left(self) -> bool:
        """Wait until there is something to write; False where there will be nothing."""
        with self._changed:
            self._changed.wait_for(lambda: self._left or self._is_over)
            return len(self._left) > 0
