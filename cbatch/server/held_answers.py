"""Answers in memory, until their clients have taken them: bounded in sum, however slowly they are read."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING

from cbatch.runtime.waking import call_soon_here
from cbatch.server.http_errors import answers_full, too_much_held

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from cbatch.server.http_errors import HttpProblemError

_READ_S = 1.0
"""Seconds that any client may take to read its answer: only those beyond count against it. Our choice."""


class HeldAnswer:
    """What is held of the answer of one call."""

    def __init__(
        self,
        of_all: HeldAnswers,
        end: Callable[[HttpProblemError], None],
        is_computed: Callable[[], bool],
        on_computed: Callable[[], None],
    ) -> None:
        """Make one in the event loop, in which `end` ends the call; see `HeldAnswers.held`."""
        self.n_bytes, self.added_s = 0, 0.0
        self.is_computed = is_computed
        self._of_all, self._end, self._on_computed = of_all, end, on_computed
        self._call_soon = call_soon_here()

    def add(self, n_bytes: int) -> None:
        """Count more bytes, about. From any thread."""
        self._of_all.add(self, n_bytes)
        if self.is_computed():
            self._do_soon(self._on_computed)

    def end_soon(self, problem: HttpProblemError) -> None:
        """End the call. From any thread."""
        self._do_soon(partial(self._end, problem))

    def _do_soon(self, work: Callable[[], None]) -> None:
        """Have work done in the event loop; no effect where that has ended."""
        with suppress(RuntimeError):
            self._call_soon(work)


class HeldAnswers:
    """The answers of all calls. Where those being computed have half of the limit, new calls are refused.

    Above the limit, answers end, the one first that takes the most bytes and waits for its client the longest: so a
    slow reader holds up nobody.
    """

    def __init__(self, n_mib: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._n_mib, self._n_most, self._clock = n_mib, n_mib * 2**20, clock
        self.n_bytes = 0
        self._held: dict[HeldAnswer, None] = {}
        """Those that have not ended, in order of their calls."""
        self._lock = threading.Lock()

    def check(self, seconds: int) -> None:
        """Raise a `HttpProblemError` where answers being computed leave no room for a new call for some seconds."""
        if 2 * self.n_bytes > self._n_most:
            with self._lock:
                n_growing = sum(held.n_bytes for held in self._held if not held.is_computed())
            if 2 * n_growing > self._n_most:
                raise answers_full(self._n_mib, seconds)

    @contextmanager
    def held(
        self,
        end: Callable[[HttpProblemError], None],
        is_computed: Callable[[], bool],
        on_computed: Callable[[], None] = lambda: None,
    ) -> Iterator[HeldAnswer]:
        """Hold an answer for the block.

        Args:
            end: called in this event loop where there is no room for the answer.
            is_computed: whether nothing more comes; called from any thread.
            on_computed: called in this event loop soon after the last bytes, however slowly they are read.
        """
        answer = HeldAnswer(self, end, is_computed, on_computed)
        with self._lock:
            self._held[answer] = None
        try:
            yield answer
        finally:
            with self._lock:
                self._drop(answer)

    def add(self, answer: HeldAnswer, n_bytes: int) -> None:
        """Count more bytes of an answer, and end others, or it, while there is no room. From any thread."""
        ended: list[HeldAnswer] = []
        with self._lock:
            if answer not in self._held:
                return
            now = answer.added_s = self._clock()
            answer.n_bytes += n_bytes
            self.n_bytes += n_bytes
            while self.n_bytes > self._n_most:
                ended.append(max(self._held, key=lambda held: _cost(held, now)))
                self._drop(ended[-1])
        for one in ended:
            one.end_soon(too_much_held(self._n_mib))

    def _drop(self, answer: HeldAnswer) -> None:
        if answer in self._held:
            del self._held[answer]
            self.n_bytes -= answer.n_bytes


def _cost(held: HeldAnswer, now: float) -> float:
    """Return by what answers are compared where one is to end: bytes, times the seconds for which they did not grow."""
    waits_s = now - held.added_s if held.is_computed() else 0.0
    return held.n_bytes * max(_READ_S, waits_s)
