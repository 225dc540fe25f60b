"""When a server must end, and what ends it if it does not end by itself."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from cbatch.support.interrupts import Sleepers

_LAST_S = 1.5
"""Seconds from the end of the grace period to the end of the process, whatever still runs. Our choice."""

_LEAST_S = 0.5
"""Seconds that each part of the server has to end, even if no grace is left. Our choice."""

_THREADS_S = 0.2
"""Seconds for threads to end once all else has, such as idle ones that are told to. Our choice."""


class Ending:
    """The end of a server: a signal begins it; the end of the grace period, or a second signal, is its last moment.

    At the last moment running work is given up, and the process ends soon after.
    """

    def __init__(
        self,
        grace_s: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        leave: Callable[[int], object] = os._exit,
    ) -> None:
        """Make one. `leave` ends the process if nothing else does."""
        self._grace_s, self._clock, self._leave = grace_s, clock, leave
        self._ends_s: float | None = None
        self._number = int(signal.SIGTERM)
        self._code = 0
        """Exit code, the same if the end is forced: it does not depend on the machine's speed."""
        self._is_serving = False
        self._is_done = False
        self._on_begin: Callable[[], object] = bool
        self._on_over: Callable[[], object] = bool
        self._changed = Sleepers()

    # ---- for the server ----

    @property
    def has_begun(self) -> bool:
        """Whether the server refuses new calls and ends."""
        return self._ends_s is not None

    @property
    def is_over(self) -> bool:
        """Whether calls have no more time."""
        return self._ends_s is not None and self._clock() >= self._ends_s

    def left_s(self, most_s: float) -> float:
        """Return the seconds that a part of the server has to end: the rest of the grace period, at most `most_s`."""
        left_s = 0.0 if self._ends_s is None else self._ends_s - self._clock()
        return most_s if self._ends_s is None else min(most_s, max(_LEAST_S, left_s))

    def begin(self, number: int = signal.SIGTERM, frame: FrameType | None = None) -> None:
        """Begin the end; if it has begun, end at once. Also a signal handler.

        Raises:
            KeyboardInterrupt, SystemExit: no calls are served yet, so no grace period is needed.
        """
        now, is_first = self._clock(), self._ends_s is None
        has_grace = is_first and self._is_serving
        self._number, self._ends_s = number, now + self._grace_s if has_grace else now
        self._on_begin()
        self._changed.wake()
        if is_first and not self._is_serving:
            if number == signal.SIGINT:
                self._code = 128 + number
                raise KeyboardInterrupt
            raise SystemExit(0)

    # ---- around the server ----

    @contextmanager
    def on_signals(self) -> Iterator[Ending]:
        """Let SIGTERM, Ctrl-C and SIGHUP (of a closed terminal) begin the end, except a signal that is ignored.

        Once the end has begun, the process must end after the block: it is ended by force if it does not in time, and
        a second signal takes its time.
        """
        before = {number: signal.getsignal(number) for number in _NUMBERS}
        for number, handler in before.items():
            if handler is not signal.SIG_IGN:
                signal.signal(number, self.begin)
        threading.Thread(target=self._watch, name="cbatch-ending", daemon=True).start()
        try:
            yield self
        finally:
            if not self.has_begun:
                self._is_done = True
                self._changed.wake()
                for number, handler in before.items():
                    signal.signal(number, handler)

    def leave_threads(self, code: int) -> None:
        """End the process with this exit code if its end has begun and threads still run; Python would wait for them.

        From then on, further signals are ignored.
        Such a thread computes for a client that has left, or was told that the server ends.
        """
        if not self.has_begun:
            return
        for number in _NUMBERS:  # Python restores the default of a handler before it ends
            signal.signal(number, signal.SIG_IGN)
        here, until_s = threading.current_thread(), time.monotonic() + _THREADS_S
        others = [t for t in threading.enumerate() if t is not here and not t.daemon]
        for thread in others:
            thread.join(max(0.0, until_s - time.monotonic()))
        if not any(thread.is_alive() for thread in others):
            return
        logging.shutdown()
        for file in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError, AttributeError):  # closed, or none
                file.flush()
        self._leave(code)

    @contextmanager
    def serving(
        self, on_begin: Callable[[], object], on_over: Callable[[], object]
    ) -> Iterator[None]:
        """Give calls in the block, and the work after it, the grace period.

        Args:
            on_begin: called when the end begins, in a signal handler.
            on_over: called when the grace period is over, in a thread of its own.
        """
        self._on_begin, self._on_over, self._is_serving = on_begin, on_over, True
        yield

    def _watch(self) -> None:
        """At the last moment, give up running work; then end the process if it still runs, even behind the block."""
        self._changed.wait_for(lambda: self._is_done or self.has_begun)
        while not (self._is_done or self.is_over):
            self._changed.wait_for(lambda: self._is_done or self.is_over, self._until(0.0))
        if self._is_done:
            return
        threading.Thread(target=self._on_over, name="cbatch-over", daemon=True).start()
        time.sleep(self._until(_LAST_S))  # less where this thread was late, as on a busy machine
        told = threading.Thread(target=self._tell, name="cbatch-told", daemon=True)
        told.start()
        told.join(_THREADS_S)  # no longer: nobody may read stderr
        self._leave(self._code)

    def _until(self, after_s: float) -> float:
        """Return the seconds until so many seconds after the last moment; the end has begun."""
        return max(0.0, (self._ends_s or 0.0) + after_s - self._clock())

    def _tell(self) -> None:
        name = signal.Signals(self._number).name
        with suppress(OSError, ValueError, AttributeError):
            sys.stderr.write(f"cbatch: ended by force after {name}, because something still ran\n")
            sys.stderr.flush()


_NUMBERS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
