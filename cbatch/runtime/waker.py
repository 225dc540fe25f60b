"""Waking readers in event loops: one call into a loop for all who wait there, asyncio or trio."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from anyio.lowlevel import RunVar, current_token

if TYPE_CHECKING:
    from collections.abc import Callable

    from anyio import Event


class LoopWaker:
    """Sets events of one event loop from other threads; `LoopWaker.here()` is the running loop's only one."""

    def __init__(self, call_soon: Callable[[Callable[[], None]], object]) -> None:
        """Make one for the loop that does what is given to `call_soon`, which any thread may call."""
        self._call_soon = call_soon
        self._lock = threading.RLock()  # a handler of a signal may ring, too
        self._rung: list[Event] = []

    @staticmethod
    def here() -> LoopWaker:
        """Return the bell of the event loop that runs in this thread."""
        try:
            return _bell.get()
        except LookupError:
            bell = LoopWaker(_call_soon())
            _bell.set(bell)
            return bell

    def ring(self, event: Event) -> None:
        """Have the loop set `event`. From any thread; a loop that has ended has nobody left to wake."""
        with self._lock:
            is_first = not self._rung
            self._rung.append(event)
        if is_first:
            try:
                self._call_soon(self._set_all)
            except RuntimeError:  # asyncio says so of a closed loop; trio's RunFinishedError is one
                self._take_rung()

    def _set_all(self) -> None:
        for event in self._take_rung():
            event.set()

    def _take_rung(self) -> list[Event]:
        with self._lock:
            events, self._rung = self._rung, []
        return events


def _call_soon() -> Callable[[Callable[[], None]], object]:
    loop: Any = current_token().native_token
    is_asyncio = hasattr(loop, "call_soon_threadsafe")
    call_soon: Callable[[Callable[[], None]], object] = (
        loop.call_soon_threadsafe if is_asyncio else loop.run_sync_soon
    )
    return call_soon


_bell: RunVar[LoopWaker] = RunVar("cbatch.bell")
