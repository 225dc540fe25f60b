"""How a run over a file is stopped from outside: once to finish what runs, twice at once."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from cbatch.files.summary import RunSummary

_SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
)


class Interrupted(KeyboardInterrupt):
    """A signal ended a run over a file; what is done is saved."""

    def __init__(self, summary: RunSummary) -> None:
        """Keep what was done."""
        self.summary = summary
        super().__init__(summary.resume_hint)


class Stopper:
    """Takes Ctrl-C, SIGTERM and SIGHUP while it is entered, in the main thread: the first asks, the next one ends.

    A signal that the program ignores, or handles in a way of its own, stays as it is.
    """

    def __init__(
        self, told: Callable[[str], object] | None = None, *, takes_all: bool = False
    ) -> None:
        """Make one.

        Args:
            told: called with what the first signal brings about, in the midst of anything.
            takes_all: take signals also where the program has a way of its own to handle them.
        """
        self.is_asked = False
        """Whether to begin nothing more."""
        self.is_now = False
        """Whether to end at once."""
        self.on_ask: Callable[[], object] | None = None
        """Called when it is asked for, in the midst of anything: must not wait."""
        self._told, self._takes_all = told or _to_stderr, takes_all
        self._is_guarded = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Stopper:
        """Take the signals."""
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                handler = signal.getsignal(number)
                is_free = handler in (signal.SIG_DFL, signal.default_int_handler)
                if is_free or (self._takes_all and handler != signal.SIG_IGN):
                    self._before[number] = signal.signal(number, self.press)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def press(self, number: int = signal.SIGINT, frame: object = None) -> None:
        """Do what a signal does now.

        Raises:
            KeyboardInterrupt: at the second one, but not where `guarded`: then behind it.
        """
        if not self.is_asked:
            self.is_asked = True
            self._told("finishing what runs; once more stops now")
            if self.on_ask is not None:
                self.on_ask()
            return
        self.is_now = True
        if not self._is_guarded:
            raise KeyboardInterrupt

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Keep the block whole: a signal to end at once is obeyed behind it."""
        if threading.current_thread() is not threading.main_thread():  # no signal comes here
            yield
            return
        was, self._is_guarded = self._is_guarded, True
        was_now = self.is_now
        try:
            yield
        finally:
            self._is_guarded = was
        if self.is_now and not (was or was_now):
            raise KeyboardInterrupt


def _to_stderr(words: str) -> None:
    # not by sys.stderr: what is interrupted may be writing there
    with suppress(OSError):
        os.write(2, f"\n{words}\n".encode())
