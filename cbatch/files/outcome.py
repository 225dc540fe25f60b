"""How a run over a file is stopped from outside, and the summary of a run."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

from cbatch.files.units import cut
from cbatch.progress import ENDINGS, Ending

_N_MESSAGE = 300  # characters of the first error in a message: our choice
_N_NOTED = 2000  # characters of it that are kept for later runs: our choice

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True, slots=True)
class RunSummary:
    """The result of a run over a file, in numbers.

    Args:
        ending: why it ended.
        n_items: items that were read, blank lines not counted.
        n_done: records that this run has written, errors included.
        n_failed: of these, errors.
        n_before: items that had a record before.
        n_failed_before: of these, errors.
        n_left: items that were read and have no record.
        errors: the errors of this run by kind: the code of an item that could not run, else the error's type.
        errors_before: the errors of `n_failed_before` by kind; empty if they are not known.
        first_error: the place and the message of the first of all these errors; empty where there is none.
        prompt_tokens: of the items that ended.
        output_tokens: of the items that ended.
        cached_tokens: prompt tokens that came from cache.
        elapsed_s: from the first item to the last record.
    """

    ending: Ending
    n_items: int = 0
    n_done: int = 0
    n_failed: int = 0
    n_before: int = 0
    n_failed_before: int = 0
    n_left: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    elapsed_s: float = 0.0
    errors: Mapping[str, int] = field(default_factory=dict)
    first_error: str = ""
    errors_before: Mapping[str, int] = field(default_factory=dict)

    @property
    def is_complete(self) -> bool:
        """Whether every item of the input has its record."""
        return self.ending == "done" and not self.n_left

    @property
    def n_errors(self) -> int:
        """Items of the input whose record is an error, of this run or an earlier one."""
        return self.n_failed + self.n_failed_before

    @property
    def failures(self) -> str:
        """How many items failed, of which kinds, and the first error; empty where none failed."""
        if not self.n_errors:
            return ""
        said = _by_kind(self.errors)
        if self.n_failed_before:
            kinds = ", ".join(_by_kind(self.errors_before))
            said.append(f"{self.n_failed_before:,} in earlier runs{f' ({kinds})' if kinds else ''}")
        lines = [f"{self.n_errors:,} of {self.n_items:,} items failed: {', '.join(said)}"]
        if self.first_error:
            lines.append(f"the first: {cut(' '.join(self.first_error.split()), _N_MESSAGE)}")
        return "; ".join(lines)

    def after(self, noted: str) -> RunSummary:
        """Return this with the errors of earlier runs that `noted` tells, if it tells of all that the input has."""
        before = json.loads(noted)
        kinds = before.get("kinds", {})
        if not self.n_failed_before or sum(kinds.values()) != self.n_failed_before:
            return self
        return replace(self, errors_before=kinds, first_error=before["first"])

    @property
    def noted_errors(self) -> str:
        """The errors of this run and earlier ones, for `after` in a later run."""
        kinds = Counter(self.errors) + Counter(self.errors_before)
        first = self.first_error[:_N_NOTED].encode(errors="replace").decode()
        return json.dumps({"kinds": kinds, "first": first})

    @property
    def resume_hint(self) -> str:
        """How to run the remaining items; empty where none remain."""
        if self.is_complete:
            return ""
        return f"{ENDINGS[self.ending]}: run the same command again to continue; finished items are kept"


def _by_kind(errors: Mapping[str, int]) -> list[str]:
    return [f"{n:,} {kind}" for kind, n in sorted(errors.items(), key=lambda pair: -pair[1])]


class Interrupted(KeyboardInterrupt):
    """A signal ended a run over a file; the records of ended items are written."""

    def __init__(self, summary: RunSummary) -> None:
        self.summary = summary
        super().__init__(summary.resume_hint)


class Stopper:
    """Handles Ctrl-C, SIGTERM and SIGHUP within its block, in the main thread: the first stops new items, the next all.

    A signal that the program ignores or handles itself keeps its handler.
    """

    def __init__(
        self, told: Callable[[str], object] | None = None, *, takes_all: bool = False
    ) -> None:
        """Handle nothing yet.

        Args:
            told: called at the first signal with a message; it may interrupt any code.
            takes_all: replace handlers of the program too.
        """
        self.is_asked = False
        """Whether to begin no more items."""
        self.is_now = False
        """Whether to end at once."""
        self._on_ask: Callable[[], object] | None = None
        self._told, self._takes_all = told or _to_stderr, takes_all
        self._is_guarded = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Stopper:
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
        """Act as a signal does.

        Raises:
            KeyboardInterrupt: at the second signal; within `guarded`, after that block.
        """
        if not self.is_asked:
            self.is_asked = True
            again = "Ctrl-C again" if number == signal.SIGINT else "a second signal"
            self._told(f"finishing the running items; {again} stops at once")
            if self._on_ask is not None:
                self._on_ask()
            return
        self.is_now = True
        if not self._is_guarded:
            raise KeyboardInterrupt

    @contextmanager
    def asking(self, action: Callable[[], object]) -> Iterator[None]:
        """Have `action` called at the first signal amid the block, at once where that has come.

        It may interrupt any code, must not wait, and may be called twice.
        """
        self._on_ask = action
        try:
            if self.is_asked:
                action()
            yield
        finally:
            self._on_ask = None

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Complete the block: the second signal takes effect after it."""
        if threading.current_thread() is not threading.main_thread():  # which gets no signals
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
    # not by sys.stderr: the interrupted code may be writing to it
    with suppress(OSError):
        os.write(2, f"\n{words}\n".encode())
