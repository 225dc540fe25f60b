"""One client of the daemon, from its first line to its end."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from cbatch.daemon.lines import Lines
from cbatch.daemon.streams import FrameOutput, StreamWriter
from cbatch.errors import EngineClosedError
from cbatch.messages import BatchPrompt
from cbatch.options import RunOptions
from cbatch.runtime.ids import own_id
from cbatch.runtime.interface import Runtime, Submission
from cbatch.support.thread_start import started
from cbatch.worker.framing import ENDED_S, STALL_S
from cbatch.worker.host import SessionEnd

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cbatch.response import BatchOutputChunk, BatchResult
    from cbatch.runtime.row_comparison import RowComparison

    Take = Callable[[Sequence[BatchOutputChunk], Sequence[tuple[int, BatchResult]]], object]

_LONGEST_WAIT_S = 1.0
"""Ctrl-C that comes just before a wait is noticed after it."""

_N_AHEAD = 256
"""Lines that may be read before they are done: our choice; a client that sends more waits."""


class LineSession:
    """One client, whose lines are executed: all that happens is a call in one queue, done by one thread."""

    def __init__(
        self,
        runtime: Runtime,
        fd: int,
        text: StreamWriter | None,
        options: RunOptions,
        *,
        is_tagged: bool,
        hang_up: Callable[[], object] | None = None,
    ) -> None:
        """Make one.

        Args:
            runtime: nobody else gives it requests meanwhile; it stays open.
            fd: where frames go; it stays open.
            text: where text goes; None for frames, which are tagged then.
            options: of every request.
            is_tagged: whether each number comes with the id of its request.
            hang_up: ends `fd` where its reader takes nothing for a while at the end; None to wait for the reader.
        """
        self._runtime, self._hang_up = runtime, hang_up
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
        """Execute lines until they end and all requests have, or the reader of the frames has left.

        They are read in a thread of their own, which may outlive the session by one line.

        Raises:
            NoThreadError: the system has no more threads.
        """
        self._runtime.listen(self._tell_end)
        patience_s = ENDED_S
        try:
            self._check_engine()
            started(partial(self._read, lines), "cbatch-lines")
            while not self._lines.is_done:
                with suppress(Empty):
                    self._inbox.get(timeout=_LONGEST_WAIT_S)()
            patience_s = STALL_S
        finally:
            self._is_over = True
            self._room.release()
            self._runtime.listen(None)
            self._lines.leave()
            self._machine.settle()  # the next client may use the same ids
            self._frames.close(self._hang_up, patience_s)
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


class EngineMachine:
    """A `Machine` of one runtime, and the `Target` of its requests. Orders take effect in the order they are given."""

    is_streamed = wants_tokens = True

    def __init__(self, runtime: Runtime, options: RunOptions, take: Take) -> None:
        """Make one; `options` are those of every request, `take` is called with output in a thread of the runtime."""
        self._runtime, self._options, self._take = runtime, options, take
        self.n_slots, self.n_window = runtime.n_slots, runtime.n_window
        self.n_vocab = runtime.model_facts().n_vocab

    def deliver(
        self, chunks: Sequence[BatchOutputChunk], results: Sequence[tuple[int, BatchResult]]
    ) -> None:
        """Hand output on."""
        self._take(chunks, results)

    def expect_choices(self, n: int) -> None:
        """Do nothing: each request has one answer."""

    def start(
        self, key: str, tokens: Sequence[int], n_total: int, n_quantum: int | None, slot: int
    ) -> None:
        """Queue a request for a slot; the request pauses after each quantum."""
        own = RunOptions(
            max_tokens=n_total, strict_max_tokens=True, slot=slot, pause_every=n_quantum
        )
        prompts, options = [BatchPrompt(tokens=tokens)], own.over(self._options)
        self._runtime.add(Submission(prompts, [own_id(key)], [""], options, math.inf, self))

    def resume(self, turns: Sequence[tuple[str, int]]) -> None:
        """Let paused requests go on, all before the next step."""
        self._runtime.orders.resume_soon(turns)

    def extend(self, result: BatchResult, n_tokens: int) -> str:
        """Queue a request that continues a result in its slot."""
        return self._runtime.extend(result, n_tokens, self)

    def cancel(self, keys: Sequence[str]) -> None:
        """End requests before the next step."""
        self._runtime.orders.cancel_soon(keys)

    def compare(self, keys: Sequence[str]) -> Sequence[RowComparison]:
        """Compare the next rows of paused requests in one step and alone; waits for it."""
        return self._runtime.orders.compare_rows(keys)

    def settle(self) -> None:
        """Return when all orders are done and no request is left, or the engine has stopped."""
        with suppress(EngineClosedError):
            self._runtime.cancel_all()
