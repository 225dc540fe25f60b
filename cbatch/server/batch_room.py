"""Which slots the items of batches may have: those that no call needs, so that calls need not wait for batches."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from cbatch.errors import CBatchError
from cbatch.support.thread_start import started

if TYPE_CHECKING:
    from collections.abc import Callable

    from cbatch.engine import Engine

_AGAIN_S = 0.05
"""Seconds until an item is paused or resumed that could not be: it is just being queued, or its worker has ended."""


class BatchRoom:
    """Lets items of batches begin in slots that are free of calls, and pauses items where calls come.

    Of n slots, calls take one for each of their c sequences. Items run, the oldest first, whose sequences fit the other
    n − c slots together; the others are paused and give up their slots. An item with more sequences than slots runs
    alone, and only without calls. Every method from any thread; none but `enter` waits.
    """

    def __init__(self, engine: Engine) -> None:
        """Begin without calls and items; a thread that pauses and resumes begins with the first item."""
        self._engine = engine
        self._changed = threading.Condition()
        self._n_calls = 0
        self._n_slots = 0
        self._waiting: dict[str, int] = {}
        """Sequences of each item in `enter`, the first that came first."""
        self._items: dict[str, int] = {}
        """Sequences of each item in the engine, the oldest first."""
        self._paused: set[str] = set()
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def set_calls(self, n: int) -> None:
        """Note how many sequences the calls in flight have."""
        with self._changed:
            is_needed = self._n_calls != n and bool(self._waiting or self._items)
            self._n_calls = n
            if is_needed:
                self._changed.notify_all()

    def enter(self, id: str, n_sequences: int, is_stopped: Callable[[], bool]) -> bool:
        """Wait until an item may go to the engine; False where it is stopped before. See `wake`.

        Items go in the order in which they came; one that even a room without items could not take now is passed.

        Raises:
            NoThreadError: the system has no more threads.
        """
        n_slots = self._engine.parallel
        with self._changed:
            self._n_slots = n_slots
            self._waiting[id] = n_sequences
            try:
                self._changed.wait_for(lambda: is_stopped() or self._may_enter(id))
            finally:
                del self._waiting[id]
                self._changed.notify_all()
            if is_stopped():
                return False
            if self._thread is None and not self._is_closed:
                self._thread = started(self._keep, "cbatch-batch-room")
            self._items[id] = n_sequences
            return True

    def leave(self, id: str) -> None:
        """Note that an item has ended."""
        with self._changed:
            self._paused.discard(id)
            if self._items.pop(id, None) is not None:
                self._changed.notify_all()

    def wake(self) -> None:
        """Have those that wait in `enter` look again whether they are stopped."""
        with self._changed:
            self._changed.notify_all()

    def close(self) -> None:
        """End the thread."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _fits(self, n_sequences: int, n_before: int) -> bool:
        """Whether an item may run beside items with `n_before` sequences."""
        if n_before + n_sequences <= self._n_slots - self._n_calls:
            return True
        return not (n_before or self._n_calls)

    def _may_enter(self, id: str) -> bool:
        """Whether an item that waits is the next to go, and may run at once."""
        for other, n_sequences in self._waiting.items():
            if other == id:
                n_before = sum(self._items[running] for running in self._to_run())
                return self._fits(n_sequences, n_before)
            if self._fits(n_sequences, 0):
                return False
        return False

    def _to_run(self) -> list[str]:
        """Return the items that are not to be paused, the oldest first."""
        found: list[str] = []
        n_before = 0
        for id, n_sequences in self._items.items():
            if self._fits(n_sequences, n_before):
                found.append(id)
                n_before += n_sequences
        return found

    def _next(self) -> tuple[str, bool] | None:
        """Return an item that is to be paused (True) or resumed (False)."""
        to_run = {*self._to_run()}
        wanted = ((id, id not in to_run) for id in self._items)
        return next((pair for pair in wanted if (pair[0] in self._paused) is not pair[1]), None)

    def _keep(self) -> None:
        """Pause and resume, until closed."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed or self._next() is not None)
                found = self._next()
                if self._is_closed or found is None:
                    return
            id, is_paused = found
            try:
                is_done = self._engine.pause(id) if is_paused else self._engine.resume(id)
            except CBatchError:  # its worker has ended, and maybe another takes the item over
                is_done = False
            with self._changed:
                if is_done and id in self._items:
                    note = self._paused.add if is_paused else self._paused.discard
                    note(id)
                elif not is_done:
                    self._changed.wait(_AGAIN_S)


class ItemGate:
    """The way of one batch's items into the room."""

    def __init__(self, room: BatchRoom) -> None:
        self._room = room
        self._ids: set[str] = set()
        self._is_closed = False

    def enter(self, id: str, n_sequences: int) -> bool:
        """Wait until the item may go; False once the gate is closed."""
        may_go = self._room.enter(id, n_sequences, lambda: self._is_closed)
        if may_go:
            self._ids.add(id)
        return may_go

    def leave(self, id: str) -> None:
        """Note that the item has ended."""
        self._ids.discard(id)
        self._room.leave(id)

    def close(self) -> None:
        """Let no more items in."""
        self._is_closed = True
        self._room.wake()

    def clear(self) -> None:
        """Forget the items of a run that has ended."""
        for id in [*self._ids]:
            self.leave(id)
