"""Which slots the items of batches may have: those that no call needs, so that calls need not wait for batches."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from cbatch.errors import CBatchError

if TYPE_CHECKING:
    from collections.abc import Callable

    from cbatch.engine import Engine

_AGAIN_S = 0.05
"""Seconds until an item is paused or resumed that the engine did not know yet: it is just being queued."""


class BatchRoom:
    """Lets items of batches begin in slots that are free of calls, and pauses items where calls come.

    Of n slots and c calls, the oldest n − c items run; the others are paused and give up their slots. Every method from
    any thread; none but `enter` waits.
    """

    def __init__(self, engine: Engine) -> None:
        """Begin without calls and items; a thread that pauses and resumes begins with the first item."""
        self._engine = engine
        self._changed = threading.Condition()
        self._n_calls = 0
        self._n_slots = 0
        self._items: dict[str, bool] = {}
        """Items in the engine, the oldest first, and whether each was paused."""
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def set_calls(self, n: int) -> None:
        """Note how many answers the calls in flight want."""
        with self._changed:
            is_needed = self._n_calls != n and bool(self._items or self._thread)
            self._n_calls = n
            if is_needed:
                self._changed.notify_all()

    def enter(self, id: str, is_stopped: Callable[[], bool]) -> bool:
        """Wait until an item may go to the engine; False where it is stopped before. See `wake`."""
        n_slots = self._engine.parallel
        with self._changed:
            self._n_slots = n_slots
            self._changed.wait_for(lambda: is_stopped() or len(self._items) < self._n_allowed)
            if is_stopped():
                return False
            self._items[id] = False
            if self._thread is None and not self._is_closed:
                name = "cbatch-batch-room"
                self._thread = threading.Thread(target=self._keep, name=name, daemon=True)
                self._thread.start()
            return True

    def leave(self, id: str) -> None:
        """Note that an item has ended."""
        with self._changed:
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

    @property
    def _n_allowed(self) -> int:
        return max(0, self._n_slots - self._n_calls)

    def _next(self) -> tuple[str, bool] | None:
        """Return an item that is to be paused (True) or resumed (False)."""
        n_allowed = self._n_allowed
        wanted = ((id, i >= n_allowed) for i, id in enumerate(self._items))
        return next((pair for pair in wanted if self._items[pair[0]] is not pair[1]), None)

    def _keep(self) -> None:
        """Pause and resume, until closed or the engine ends."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed or self._next() is not None)
                found = self._next()
                if self._is_closed or found is None:
                    return
            id, is_paused = found
            try:
                is_done = self._engine.pause(id) if is_paused else self._engine.resume(id)
            except CBatchError:  # the engine has ended, and with it all items
                return
            with self._changed:
                if is_done and id in self._items:
                    self._items[id] = is_paused
                elif not is_done:
                    self._changed.wait(_AGAIN_S)


class ItemGate:
    """The way of one batch's items into the room."""

    def __init__(self, room: BatchRoom) -> None:
        self._room = room
        self._ids: set[str] = set()
        self._is_closed = False

    def enter(self, id: str) -> bool:
        """Wait until the item may go; False once the gate is closed."""
        may_go = self._room.enter(id, lambda: self._is_closed)
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
