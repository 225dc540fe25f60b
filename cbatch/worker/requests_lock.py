"""The lock on a client's requests: nothing is sent or delivered under it, and a finalizer may use it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

from cbatch.support.garbage import no_finalizers
from cbatch.support.interrupts import HeldBack

Work: TypeAlias = "Callable[[], Callable[[], object]]"
"""Changes what is known of requests, and returns what is to be done without the lock."""


class RequestsLock:
    """A lock that its thread may take again; after the outermost block, what was kept for then is done."""

    def __init__(self, after: Callable[[], object]) -> None:
        """Make one; `after` is called whenever a thread has let it go."""
        self._after, self._lock = after, threading.RLock()
        self._owner: int | None = None
        self._soon: deque[Work] = deque()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the lock in a block; handlers of signals and finalizers, which may want it, come after that."""
        if self._owner == threading.get_ident():
            yield
            return
        with HeldBack():
            with self._lock, no_finalizers():
                self._owner = threading.get_ident()
                try:
                    yield
                finally:
                    self._owner = None
            self._do_soon()

    def do_soon(self, work: Work) -> None:
        """Have work done under the lock, by this thread or the one that has it. Does not wait.

        A finalizer may call this in a thread that has the lock.
        """
        self._soon.append(work)
        self._do_soon()

    def _do_soon(self) -> None:
        if self._owner == threading.get_ident():
            return
        while self._soon:
            with HeldBack():
                if not self._lock.acquire(blocking=False):
                    break
                try:
                    with no_finalizers():
                        self._owner = threading.get_ident()
                        then = self._soon.popleft()() if self._soon else None
                finally:
                    self._owner = None
                    self._lock.release()
            if then is not None:
                then()
        self._after()
