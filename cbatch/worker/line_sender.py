"""Messages for a worker that may not read for a while: nobody waits until it does."""

from __future__ import annotations

import select
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue

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
        # no lock, for a finalizer that runs amid a write may send to the worker, too
        self._left: SimpleQueue[memoryview | None] = SimpleQueue()
        self._n_kept = self._n_written = 0
        """Messages that were kept, and those of them that are written."""
        self._error: OSError | None = None
        self._thread = started(self._run, "cbatch-worker-stdin")

    def send(self, message: bytes) -> None:
        """Send a message, in one thread at a time. Raises an OSError where the worker is known to be gone."""
        if self._error is not None:
            raise self._error
        data = memoryview(message)
        if self._n_kept == self._n_written:
            data = self._rest(data)
        if data:
            self._n_kept += 1
            self._left.put(data)

    def end(self) -> None:
        """Let go of the descriptor, whose reader is gone."""
        self._left.put(None)
        self._thread.join(_LAST_S)

    def _rest(self, data: memoryview) -> memoryview:
        """Write as much as there is room for; return the rest."""
        with suppress(BlockingIOError):
            while data:
                data = data[self._write(data) :]
        return data

    def _run(self) -> None:
        room = select.poll()
        room.register(self._fd, select.POLLOUT)
        while (data := self._left.get()) is not None:
            try:
                while data:
                    room.poll()
                    data = self._rest(data)
            except OSError as error:
                self._error = error
                return
            self._n_written += 1
