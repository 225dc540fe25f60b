"""Threads for work that an event loop must not wait for, a number of them for each kind of work."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import anyio
from anyio.lowlevel import RunVar

T = TypeVar("T")


class Threads:
    """At most a number of threads in each event loop: further work of this kind waits, and no other kind does."""

    def __init__(self, name: str, n: int) -> None:
        """Make them; `n` is the most at once."""
        self._limiter: RunVar[anyio.CapacityLimiter] = RunVar(f"cbatch.server.{name}")
        self._n = n

    @property
    def limiter(self) -> anyio.CapacityLimiter:
        """What the event loop that runs here counts them by."""
        try:
            return self._limiter.get()
        except LookupError:
            limiter = anyio.CapacityLimiter(self._n)
            self._limiter.set(limiter)
            return limiter

    async def run(self, work: Callable[..., T], *args: Any, **named: Any) -> T:
        """Return what `work` returns; the wait for a thread can be cancelled, the work itself cannot."""
        return await anyio.to_thread.run_sync(partial(work, *args, **named), limiter=self.limiter)
