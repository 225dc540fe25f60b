"""What a worker has to say, until a thread has written it: a slow reader stops neither the engine nor other readers."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from cbatch.worker.wire import (
    chunk_as_json,
    dumps,
    error_as_json,
    result_as_json,
    step_as_json,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cbatch.response import BatchOutputChunk, BatchResult


class Outbox:
    """Collects output, replies and events; one frame has all that came since the last. Every method from any thread.

    A frame is a JSON object of lists by kind, which a reader takes in this order: `admitted`, `chunks`, `results`,
    `steps`, `logs`, `replies`, `errors`, `died`.
    """

    def __init__(
        self,
        write: Callable[[bytes], object],
        on_left: Callable[[], object],
        credit: int | None = None,
    ) -> None:
        """Start to write.

        Args:
            write: takes one frame and may wait.
            on_left: called once, where `write` raises: the reader has left, and nothing more is kept.
            credit: the bytes that may be written before `grant`; None for any number.
        """
        self._write, self._on_left, self._has_left = write, on_left, False
        self._changed = threading.Condition()
        self._waiting: dict[str, list[Any]] = {}
        self._credit, self._is_closed, self._is_writing = credit, False, False
        self._writing = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="cbatch-outbox", daemon=True)
        self._thread.start()

    # ---- what there is to say ----

    def deliver(
        self, chunks: Sequence[BatchOutputChunk], results: Sequence[tuple[int, BatchResult]]
    ) -> None:
        """Take new output; what was given must not be changed afterwards."""
        with self._changed:
            if chunks:
                self._waiting.setdefault("chunks", []).extend(chunks)
            if results:
                self._waiting.setdefault("results", []).extend(result for _, result in results)
            self._changed.notify()

    def put(self, kind: str, value: object) -> None:
        """Add one value of another kind."""
        with self._changed:
            self._waiting.setdefault(kind, []).append(value)
            self._changed.notify()

    def fail(self, error: BaseException) -> None:
        """Tell an error that belongs to no call."""
        self.put("errors", error_as_json(error))

    def put_now(self, kind: str, values: Sequence[object]) -> None:
        """Write values before this returns, where the reader reads; the process may end without another word."""
        if self._writing.acquire(timeout=_SOON_S):
            try:
                self._send({kind: [*values]})
            finally:
                self._writing.release()
            return
        # behind a frame that the reader does not take, nothing can be told in time
        with self._changed:
            self._waiting.setdefault(kind, []).extend(values)
            self._changed.notify()

    def grant(self, n_bytes: int) -> None:
        """Allow the writing of so many more bytes."""
        with self._changed:
            if self._credit is not None:
                self._credit += n_bytes
            self._changed.notify()

    def close(self) -> None:
        """Write what waits, credit or not, and end."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join()

    # ---- the thread ----

    def _run(self) -> None:
        while (waiting := self._take()) is not None:
            with self._writing:
                self._send(waiting)

    def _take(self) -> dict[str, list[Any]] | None:
        with self._changed:
            self._changed.wait_for(self._has_work)
            waiting, self._waiting = self._waiting, {}
        return waiting or None

    def _has_work(self) -> bool:
        may_write = self._credit is None or self._credit > 0
        return self._is_closed or (bool(self._waiting) and may_write)

    def _send(self, frame: dict[str, list[Any]]) -> None:
        if self._has_left:
            return
        try:
            line = dumps(_encoded(frame))
            self._write(line)
        except Exception as error:  # whatever it is, a reader that waits must not wait for ever
            self._has_left = True
            self._on_left()
            if isinstance(error, OSError | ValueError):  # a closed file raises a ValueError
                return
            raise
        with self._changed:
            if self._credit is not None:
                self._credit -= len(line)


_SOON_S = 0.01
_KINDS = ("admitted", "chunks", "results", "steps", "logs", "replies", "errors", "died")
_ENCODERS: dict[str, Callable[[Any], object]] = {
    "chunks": chunk_as_json,
    "results": result_as_json,
    "steps": step_as_json,
}


def _encoded(frame: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """Return a frame as JSON has it, its kinds in order."""
    kinds = [kind for kind in _KINDS if kind in frame]
    return {
        kind: [*map(_ENCODERS[kind], frame[kind])] if kind in _ENCODERS else frame[kind]
        for kind in kinds
    }
