"""Answers in memory, until their clients have taken them: bounded in sum, however slowly they are read."""

from __future__ import annotations

import threading
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING

from cbatch.runtime.waking import call_soon_here
from cbatch.server.http_errors import answers_full, too_much_held

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from cbatch.server.http_errors import HttpProblemError


class HeldAnswer:
    """What is held of the answer of one call."""

    def __init__(self, of_all: HeldAnswers, end: Callable[[HttpProblemError], None]) -> None:
        """Make one in the event loop, in which `end` ends the call."""
        self.n_bytes = 0
        self._of_all, self._end, self._call_soon = of_all, end, call_soon_here()

    def add(self, n_bytes: int) -> None:
        """Count more bytes, about. From any thread."""
        self._of_all.add(self, n_bytes)

    def end_soon(self, problem: HttpProblemError) -> None:
        """End the call. From any thread; no effect where its event loop has ended."""
        with suppress(RuntimeError):
            self._call_soon(partial(self._end, problem))


class HeldAnswers:
    """The answers of all calls. From half of the limit on, new calls are refused; above it, the largest one ends."""

    def __init__(self, n_mib: int) -> None:
        self._n_mib, self._n_most = n_mib, n_mib * 2**20
        self.n_bytes = 0
        self._held: dict[HeldAnswer, None] = {}
        """Those that have not ended, in order of their calls."""
        self._lock = threading.Lock()

    def check(self, seconds: int) -> None:
        """Raise a `HttpProblemError` where answers take so much that no new call is to begin for some seconds."""
        if 2 * self.n_bytes > self._n_most:
            raise answers_full(self._n_mib, seconds)

    @contextmanager
    def held(self, end: Callable[[HttpProblemError], None]) -> Iterator[HeldAnswer]:
        """Hold an answer for the block; `end` is called in this event loop where there is no room for it."""
        answer = HeldAnswer(self, end)
        with self._lock:
            self._held[answer] = None
        try:
            yield answer
        finally:
            with self._lock:
                self._drop(answer)

    def add(self, answer: HeldAnswer, n_bytes: int) -> None:
        """Count more bytes of an answer, and end the largest ones while there is no room. From any thread."""
        ended: list[HeldAnswer] = []
        with self._lock:
            if answer not in self._held:
                return
            answer.n_bytes += n_bytes
            self.n_bytes += n_bytes
            while self.n_bytes > self._n_most:
                ended.append(max(self._held, key=lambda held: held.n_bytes))
                self._drop(ended[-1])
        for one in ended:
            one.end_soon(too_much_held(self._n_mib))

    def _drop(self, answer: HeldAnswer) -> None:
        if answer in self._held:
            del self._held[answer]
            self.n_bytes -= answer.n_bytes
