"""The progress of a batch: a live line on a terminal, plain lines elsewhere, a summary at the end.

One thread asks the engine for its statistics. Every question interrupts a run, so the thread asks seldom.
"""

from __future__ import annotations

import atexit
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias, cast

from cbatch.errors import CBatchError, ConfigError
from cbatch.support.checks import check_wait, reading, shown
from cbatch.support.logs import Log
from cbatch.support.plain import flag_of
from cbatch.support.thread_start import started

if TYPE_CHECKING:
    from rich.console import Console

LIVE_INTERVAL_S = 0.5
PLAIN_INTERVAL_S = 5.0
_log = Log("cbatch")

_SEPARATOR = " · "
_LEAST_BAR, _MOST_BAR, _BAR_STEP = 8, 20, 4
"""Widths of the bar in columns: few, so that the bar does not flicker when the digits after it change."""

_LEAST_FIRST = ("queue", "cached", "in", "slots", "bar", "out", "left")
"""Parts that a narrow line leaves out, in this order; the number of items is always there."""


Ending: TypeAlias = Literal["done", "limit", "time", "asked", "now"]
"""Why a run over a file ended: every item has its record; `limit`; `max_time_s`; the first signal; the second."""

ENDINGS: Mapping[Ending, str] = MappingProxyType(
    {
        "done": "some items have no record",
        "limit": "stopped at the limit",
        "time": "stopped at the time limit",
        "asked": "interrupted, running items were finished",
        "now": "interrupted",
    }
)
"""Words for users, by ending, if items are left."""


@dataclass(frozen=True, slots=True)
class Counts:
    """Items of a batch: all (None while prompts are still read), done, failed ones of these, and cancelled ones."""

    n_total: int | None
    n_done: int
    n_failed: int
    n_cancelled: int = 0
    n_about: int | None = None
    """An estimate of the number of items, where the number is unknown."""
    n_before: int = 0
    """Items of `n_done` that an earlier run has done."""
    ending: Ending | None = None
    """Why a run over a file ended; None while the run goes on, and for other batches."""
    is_counted: bool = False
    """Whether `n_about` was counted; the input may still change."""
    n_goal: int | None = None
    """Items that are done when a run over a file reaches its limit; None without one."""

    @property
    def share(self) -> float | None:
        """Share of the run's items that is done; None where their number is unknown."""
        n_goal = self.n_to_do
        return min(1.0, self.n_done / n_goal) if n_goal else None

    @property
    def n_to_do(self) -> int | None:
        """Items that are done when the run ends; None where that is unknown."""
        n_total = self.n_total or self.n_about
        return n_total if n_total is None or self.n_goal is None else min(n_total, self.n_goal)

    @property
    def is_over(self) -> bool:
        """Whether every item has ended."""
        return self.n_done + self.n_cancelled == self.n_total


class WorkDone(Protocol):
    """What an engine has done so far; see `cbatch.EngineStats`."""

    n_running: int
    n_waiting: int
    n_held: int
    n_active_max: int
    n_prompt_tokens: int
    n_output_tokens: int
    n_cached_tokens: int
    n_steps: int
    n_active_steps: int
    n_text_tokens: int


@dataclass(frozen=True, slots=True)
class BatchSnapshot:
    """A batch at one moment: work is the engine's since the batch began, rates are means over that time."""

    counts: Counts
    n_slots: int
    n_running: int
    n_active_max: int
    n_prompt_tokens: int
    """Those of texts to embed, too."""
    n_output_tokens: int
    n_steps: int
    n_active_steps: int
    elapsed_s: float
    n_cached_tokens: int = 0
    n_waiting: int = 0

    @property
    def has_texts_alone(self) -> bool:
        """Whether texts were embedded and nothing was generated: there are no slots and no output."""
        return self.n_prompt_tokens > 0 and not self.n_steps

    @property
    def prompt_tps(self) -> float:
        """Prompt tokens a second."""
        return self.n_prompt_tokens / max(self.elapsed_s, 1e-9)

    @property
    def output_tps(self) -> float:
        """Output tokens a second."""
        return self.n_output_tokens / max(self.elapsed_s, 1e-9)

    @property
    def left_s(self) -> float | None:
        """Seconds that the remaining items take at this rate; None before the first result or without a known total."""
        counts = self.counts
        n_total, n_new = counts.n_to_do, counts.n_done - counts.n_before
        if n_new < 1 or n_total is None:
            return None
        return self.elapsed_s * max(0, n_total - counts.n_done) / n_new

    @property
    def cached_share(self) -> float:
        """Share of the prompts' tokens that were found in the cache."""
        return self.n_cached_tokens / max(self.n_cached_tokens + self.n_prompt_tokens, 1)

    @property
    def mean_slots(self) -> float:
        """Slots in use, on average over the steps."""
        return self.n_active_steps / max(self.n_steps, 1)


Summary = Callable[[BatchSnapshot], str]
"""Returns the text at the end."""


class View(Protocol):
    """Shows a batch somewhere."""

    interval_s: float

    def say(self, line: str) -> None:
        """Show a line that stays."""

    def show(self, snapshot: BatchSnapshot) -> None:
        """Show the progress."""

    def finish(self, snapshot: BatchSnapshot) -> None:
        """Show the summary."""


class PlainView:
    """A line now and then, for logs and pipes."""

    interval_s = PLAIN_INTERVAL_S

    def __init__(self, summary: Summary) -> None:
        self._summary = summary

    def say(self, line: str) -> None:
        """Print the line."""
        _say(line)

    def show(self, snapshot: BatchSnapshot) -> None:
        """Print a line."""
        _say(progress_line(snapshot))

    def finish(self, snapshot: BatchSnapshot) -> None:
        """Print the summary."""
        _say(self._summary(snapshot))


class LiveView:
    """One line on a terminal, drawn again and again, gone at the end."""

    interval_s = LIVE_INTERVAL_S

    def __init__(self, summary: Summary, console: Console) -> None:
        from rich.live import Live  # slow to import

        self._summary, self._console = summary, console
        self._live = Live(console=console, auto_refresh=False, transient=True)

    def say(self, line: str) -> None:
        """Print the line."""
        _say(line)

    def show(self, snapshot: BatchSnapshot) -> None:
        """Draw the line."""
        from rich.text import Text

        room = self._console.width - len("^C ")  # the terminal echoes it after the line
        text = Text(fitted_line(snapshot, room))
        text.truncate(room, overflow="ellipsis")
        self._live.start()
        # a process that is stopped or killed here leaves a terminal with its cursor
        self._console.show_cursor()
        self._live.update(text, refresh=True)

    def finish(self, snapshot: BatchSnapshot) -> None:
        """Replace the line by the summary."""
        self._live.stop()
        _say(self._summary(snapshot))


class SilentView:
    """Shows nothing."""

    interval_s = threading.TIMEOUT_MAX

    def say(self, line: str) -> None:
        """Say nothing."""

    def show(self, snapshot: BatchSnapshot) -> None:
        """Show nothing."""

    def finish(self, snapshot: BatchSnapshot) -> None:
        """Show nothing."""


def choose_view(
    summary: Summary, *, is_quiet: bool = False, has_free_terminal: bool = True
) -> View:
    """Return the view that suits stderr: none, a live line on a terminal, or plain lines."""
    if is_quiet:
        return SilentView()
    from rich.console import Console  # slow to import

    console = Console(stderr=True)
    is_live = has_free_terminal and console.is_terminal
    return LiveView(summary, console) if is_live else PlainView(summary)


def check_view(progress: object) -> bool | View:
    """Return the view that a caller asks for: True for the usual one, False for none."""
    with reading("progress"):
        if progress is None or flag_of(progress) is not None:
            return bool(progress)
        if all(callable(getattr(progress, name, None)) for name in ("say", "show", "finish")):
            check_wait("interval_s", getattr(progress, "interval_s", None))
            return cast("View", progress)
    raise ConfigError(f"progress must be True, False or a View, not {shown(progress)}")


class Progress:
    """Keeps a view up to date, in a thread of its own, from now until `close` or the end of the batch."""

    def __init__(
        self,
        view: View,
        counts: Callable[[], Counts],
        stats: Callable[[], WorkDone],
        before: WorkDone,
        n_slots: int,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Begin; `stats` returns the engine's work, `before` is that before the batch. Raises a `NoThreadError`."""
        self._view, self._counts, self._ask, self._n_slots = view, counts, stats, n_slots
        self._clock, self._start_s = clock, clock()
        self._first = self._last = before
        self._is_over = threading.Event()
        self._thread = started(self._watch, "cbatch-progress")
        atexit.register(self.close)  # a live line would be in the way of later output

    def close(self) -> None:
        """Show the end, once, and return when it is shown."""
        atexit.unregister(self.close)
        self._is_over.set()
        self._thread.join()

    def snapshot(self) -> BatchSnapshot:
        """Return the batch's progress now."""
        first, last = self._first, self._latest()
        return BatchSnapshot(
            counts=self._counts(),
            n_slots=self._n_slots,
            n_running=last.n_running,
            n_active_max=last.n_active_max,
            n_prompt_tokens=last.n_prompt_tokens
            + last.n_text_tokens
            - first.n_prompt_tokens
            - first.n_text_tokens,
            n_output_tokens=last.n_output_tokens - first.n_output_tokens,
            n_steps=last.n_steps - first.n_steps,
            n_active_steps=last.n_active_steps - first.n_active_steps,
            elapsed_s=self._clock() - self._start_s,
            n_cached_tokens=last.n_cached_tokens - first.n_cached_tokens,
            n_waiting=last.n_waiting + last.n_held,
        )

    def _latest(self) -> WorkDone:
        """Return the engine's statistics; the last ones where it has stopped."""
        with suppress(CBatchError):
            self._last = self._ask()
        return self._last

    def _watch(self) -> None:
        try:
            self._show()
        except Exception:  # a view may be the caller's
            _log.fail("a progress view raised an error and is not shown any more")

    def _show(self) -> None:
        while not self._is_over.wait(check_wait("interval_s", self._view.interval_s)):
            snapshot = self.snapshot()
            if snapshot.counts.is_over:
                break  # the batch is over, whether or not a reader comes to its end
            self._view.show(snapshot)
        self._view.finish(self.snapshot())


def progress_line(s: BatchSnapshot) -> str:
    """Return a batch's progress in one line."""
    return _SEPARATOR.join(_parts(s).values())


def fitted_line(s: BatchSnapshot, room: int) -> str:
    """Return a batch's progress in at most `room` columns, with a bar where the total is known."""
    parts, share = _parts(s), s.counts.share
    n_bar = 0 if share is None else _LEAST_BAR
    line = _SEPARATOR.join(parts.values())
    for name in _LEAST_FIRST:
        if n_bar + len(line) < room:
            break
        if name == "bar":
            n_bar = 0
        parts.pop(name, None)
        line = _SEPARATOR.join(parts.values())
    if share is None or not n_bar:
        return line
    return f"{_bar(share, room - len(line) - 1)} {line}"


def closing_line(s: BatchSnapshot) -> str:
    """Return a batch's summary in one line."""
    out = f"out {s.n_output_tokens:,} tokens, {s.output_tps:,.0f}/s · "
    return (
        f"{_items(s.counts)} · {'' if s.has_texts_alone else out}"
        f"in {s.n_prompt_tokens:,} tokens, {s.prompt_tps:,.0f}/s · {s.elapsed_s:.2f} s"
    )


def summary_lines(s: BatchSnapshot) -> str:
    """Return a batch's summary in lines: items, tokens, slots, time."""
    counts = s.counts
    generated = [
        f"out     {s.n_output_tokens:,} tokens, {s.output_tps:,.0f} tokens/s",
        f"slots   {s.n_active_max} of {s.n_slots} at most, {s.mean_slots:.1f} on average",
    ]
    lines = [
        f"items   {counts.n_done} of {_total(counts)}, {counts.n_failed} failed{_cancelled(counts)}",
        f"in      {s.n_prompt_tokens:,} tokens, {s.prompt_tps:,.0f} tokens/s{_cached(s)}",
        *([] if s.has_texts_alone else generated),
        f"time    {s.elapsed_s:.2f} s",
        *([f"ended   {ENDINGS[counts.ending]}"] if counts.ending not in (None, "done") else []),
    ]
    return "\n".join(lines)


def _say(line: str) -> None:
    """Print to stderr, which may be closed."""
    # a program without a terminal may have no stderr at all
    with suppress(OSError, AttributeError):
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()


def _items(counts: Counts) -> str:
    failed = f", {counts.n_failed} failed" if counts.n_failed else ""
    return f"{counts.n_done}/{_total(counts)}{failed}{_cancelled(counts)}"


def _cancelled(counts: Counts) -> str:
    return f", {counts.n_cancelled} cancelled" if counts.n_cancelled else ""


def _cached(s: BatchSnapshot) -> str:
    more = f"; {s.n_cached_tokens:,} more were cached, {s.cached_share:.0%}"
    return more if s.n_cached_tokens else ""


def _parts(s: BatchSnapshot) -> dict[str, str]:
    is_generating = not s.has_texts_alone
    parts = {
        "items": _items(s.counts),
        "out": f"out {s.output_tps:,.0f}/s" if is_generating else "",
        "in": f"in {s.prompt_tps:,.0f}/s",
        "slots": f"slots {s.n_running}/{s.n_slots}" if is_generating else "",
        "queue": f"queue {s.n_waiting}" if s.n_waiting else "",
        "cached": f"cached {s.cached_share:.0%}" if s.n_cached_tokens else "",
        "left": f"{_left(s.left_s)} left",
    }
    return {name: text for name, text in parts.items() if text}


def _total(counts: Counts) -> str:
    if counts.n_total is not None:
        return str(counts.n_total)
    if counts.n_about is None:
        return "?"
    return (
        str(counts.n_about) if counts.is_counted else f"about {float(f'{counts.n_about:.1e}'):.0f}"
    )


def _bar(share: float, room: int) -> str:
    width = min(_MOST_BAR, room // _BAR_STEP * _BAR_STEP)
    n_full = round(width * share)
    return "━" * n_full + "╌" * (width - n_full)


def _left(seconds: float | None) -> str:
    if seconds is None:
        return "?"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
