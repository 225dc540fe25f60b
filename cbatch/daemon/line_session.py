"""One client of the daemon, from its first line to its end."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue

from cbatch.daemon.line_machine import EngineMachine
from cbatch.daemon.lines import Lines
from cbatch.daemon.streams import FrameOutput, StreamWriter
from cbatch.errors import EngineClosedError
from cbatch.options import RunOptions
from cbatch.runtime.interface import Runtime
from cbatch.worker.host import SessionEnd

_LONGEST_WAIT_S = 1.0
"""Ctrl-C that comes just before a wait is noticed after it."""

_N_AHEAD = 256
"""Lines that may be read before they are done: our choice; a client that sends more waits."""


def serve_lines(
    runtime: Runtime,
    lines: Iterable[bytes],
    fd: int,
    text: StreamWriter | None,
    options: RunOptions,
    *,
    is_tagged: bool,
) -> SessionEnd:
    """Execute lines until they end and all requests have, or the reader of the frames has left.

    Args:
        runtime: nobody else gives it requests meanwhile; it stays open.
        lines: read in a thread of their own, which may outlive the session by one line.
        fd: where frames go; it stays open.
        text: where text goes; None for frames, which are tagged then.
        options: of every request.
        is_tagged: whether each number comes with the id of its request.
    """
    return _Session(runtime, fd, text, options, is_tagged=is_tagged).serve(lines)


class _Session:
    """Everything that happens comes as a call into one queue, and is done by one thread."""

    def __init__(
        self,
        runtime: Runtime,
        fd: int,
        text: StreamWriter | None,
        options: RunOptions,
        *,
        is_tagged: bool,
    ) -> None:
        self._runtime = runtime
        self._inbox: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self._ending = SessionEnd.DONE
        self._room = threading.Semaphore(_N_AHEAD)
        self._is_over = False
        self._frames = StreamWriter(fd, partial(self._inbox.put, self._leave))
        self._writers = [self._frames] if text is None else [self._frames, text]
        self._machine = EngineMachine(
            runtime,
            options,
            lambda *output: self._inbox.put(partial(self._lines.take_output, *output)),
        )
        output = FrameOutput(self._frames, text, is_tagged=is_tagged)
        self._lines = Lines(self._machine, output, is_tagged=is_tagged)

    def serve(self, lines: Iterable[bytes]) -> SessionEnd:
        self._runtime.listen(self._tell_end)
        try:
            self._check_engine()
            threading.Thread(
                target=self._read, args=(lines,), name="cbatch-lines", daemon=True
            ).start()
            while not self._lines.is_done:
                with suppress(Empty):
                    self._inbox.get(timeout=_LONGEST_WAIT_S)()
        finally:
            self._is_over = True
            self._room.release()
            self._runtime.listen(None)
            self._lines.leave()
            self._machine.settle()  # the next client may use the same ids
            self._frames.close()
        return self._ending

    # ---- in other threads ----

    def _read(self, lines: Iterable[bytes]) -> None:
        """Hand over line by line, no more than can be done soon."""
        end = self._lines.end_input
        try:
            for line in lines:
                for writer in self._writers:
                    writer.wait_for_room()
                self._room.acquire()
                if self._is_over:
                    return
                self._inbox.put(partial(self._take_line, line))
        except OSError:  # the other side is gone
            end = self._leave
        self._inbox.put(end)

    def _tell_end(self, error: EngineClosedError | None) -> None:
        if error is not None:
            self._inbox.put(partial(self._fail, error))

    # ---- in the session's ----

    def _check_engine(self) -> None:
        """Find out whether the engine has stopped before it could tell."""
        try:
            self._runtime.check_open()
        except EngineClosedError as error:
            self._fail(error)

    def _take_line(self, line: bytes) -> None:
        self._lines.take_line(line)
        self._room.release()

    def _leave(self) -> None:
        self._ending = SessionEnd.LEFT
        self._lines.leave()

    def _fail(self, error: EngineClosedError) -> None:
        self._ending = SessionEnd.FAILED
        self._lines.fail(error)
