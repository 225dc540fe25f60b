"""Messages for a worker that may not read for a while: nobody waits until it does."""

from __future__ import annotations

import select
import threading
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_LAST_S = 1.0


class LineSender:
    """Writes messages to a pipe or a socket; what does not fit in is kept, and written by a thread as there is room.

    So a worker that is stopped, or reads slowly, holds up neither its client nor the client's other workers.
    """

    def __init__(self, fd: int, write: Callable[[memoryview], int]) -> None:
        """Make one.

        Args:
            fd: the descriptor, to wait for room.
            write: writes what there is room for and returns how many bytes; a BlockingIOError where there is none.
        """
        self._fd, self._write = fd, write
        self._lock = threading.Lock()
        self._left: deque[memoryview] = deque()
        self._thread: threading.Thread | None = None
        self._error: OSError | None = None

    def send(self, message: bytes) -> None:
        """Send a message. Raises an OSError where the worker is known to be gone."""
        data = memoryview(message)
        with self._lock:
            if self._error is not None:
                raise self._error
            if self._thread is None:
                data = self._written(data)
            if data:
                self._left.append(data)
            if self._left and self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="cbatch-worker-stdin", daemon=True
                )
                self._thread.start()

    def end(self) -> None:
        """Let go of the descriptor, whose reader is gone."""
        thread = self._thread
        if thread is not None:
            thread.join(_LAST_S)

    def _written(self, data: memoryview) -> memoryview:
        """Write as much as there is room for; return the rest."""
        with suppress(BlockingIOError):
            while data:
                data = data[self._write(data) :]
        return data

    def _run(self) -> None:
        room = select.poll()
        room.register(self._fd, select.POLLOUT)
        while True:
            room.poll()
            with self._lock:
                try:
                    self._left[0] = self._written(self._left[0])
                except OSError as error:
                    self._error = error
                    self._left.clear()
                    return
                while self._left and not self._left[0]:
                    self._left.popleft()
                if not self._left:
                    self._thread = None
                    return
