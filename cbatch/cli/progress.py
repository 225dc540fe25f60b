"""How far a run is: a live line on a terminal, plain lines elsewhere, a summary at the end.

One thread asks the engine for its books. Every question interrupts a run, so it asks seldom and sleeps in between.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from rich.console import Console
from rich.live import Live
from rich.text import Text

from cbatch.cli.main import say
from cbatch.errors import CBatchError

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from cbatch.core.stats import EngineStats
    from cbatch.engine import Engine

LIVE_INTERVAL_S = 0.5
PLAIN_INTERVAL_S = 5.0
_BAR_WIDTH = 20


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A run at one moment; rates are means since its start."""

    n_total: int
    n_done: int
    n_failed: int
    n_slots: int
    elapsed_s: float
    stats: EngineStats

    @property
    def prompt_tps(self) -> float:
        """Prompt tokens a second."""
        return self.stats.n_prompt_tokens / max(self.elapsed_s, 1e-9)

    @property
    def output_tps(self) -> float:
        """Output tokens a second."""
        return self.stats.n_output_tokens / max(self.elapsed_s, 1e-9)

    @property
    def left_s(self) -> float | None:
        """Seconds that the rest takes at this pace; None before the first result."""
        if not self.n_done:
            return None
        return self.elapsed_s * (self.n_total - self.n_done) / self.n_done

    @property
    def mean_slots(self) -> float:
        """Slots in use, on average over the steps."""
        return self.stats.n_active_steps / max(self.stats.n_steps, 1)


class View(Protocol):
    """Shows a run somewhere."""

    interval_s: float

    def say(self, line: str) -> None:
        """Tell something that stays."""

    def show(self, snapshot: Snapshot) -> None:
        """Show how far it is."""

    def finish(self, snapshot: Snapshot) -> None:
        """Show what was done."""


class PlainView:
    """A line now and then, for logs and pipes."""

    interval_s = PLAIN_INTERVAL_S

    def say(self, line: str) -> None:
        """Print the line."""
        say(line)

    def show(self, snapshot: Snapshot) -> None:
        """Print a line."""
        say(progress_line(snapshot))

    def finish(self, snapshot: Snapshot) -> None:
        """Print the summary."""
        say("\n".join(summary_lines(snapshot)))


class LiveView:
    """One line on a terminal, drawn again and again, gone at the end."""

    interval_s = LIVE_INTERVAL_S

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, auto_refresh=False, transient=True)

    def say(self, line: str) -> None:
        """Print the line."""
        say(line)

    def show(self, snapshot: Snapshot) -> None:
        """Draw the line."""
        text = Text(progress_line(snapshot))
        room = self._console.width - len("^C ")  # which the terminal echoes behind the line
        if room > _BAR_WIDTH + len(text):
            text = Text.assemble(_bar(snapshot), " ", text)
        text.truncate(room, overflow="ellipsis")
        self._live.start()
        self._live.update(text, refresh=True)

    def finish(self, snapshot: Snapshot) -> None:
        """Replace the line by the summary."""
        self._live.stop()
        say("\n".join(summary_lines(snapshot)))


class SilentView:
    """Shows nothing."""

    interval_s = threading.TIMEOUT_MAX

    def say(self, line: str) -> None:
        """Say nothing."""

    def show(self, snapshot: Snapshot) -> None:
        """Show nothing."""

    def finish(self, snapshot: Snapshot) -> None:
        """Show nothing."""


def choose_view(*, is_quiet: bool, has_free_terminal: bool) -> View:
    """Return the view for this place: none, a live line on a terminal of its own, or plain lines."""
    console = Console(stderr=True)
    if is_quiet:
        return SilentView()
    return LiveView(console) if has_free_terminal and console.is_terminal else PlainView()


class Progress:
    """Counts results and keeps a view up to date, in a thread of its own, while in its `with` block."""

    def __init__(
        self,
        engine: Engine,
        n_total: int,
        view: View,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.n_done = self.n_failed = 0
        self._engine, self._n_total, self._view, self._clock = engine, n_total, view, clock
        self._start_s = clock()
        self._stats = engine.stats()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="cbatch-progress", daemon=True)

    def __enter__(self) -> Progress:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._is_over.set()
        self._thread.join()
        self._view.finish(self.snapshot())

    def count(self, *, has_failed: bool) -> None:
        """Count one result."""
        self.n_done += 1
        self.n_failed += has_failed

    def snapshot(self) -> Snapshot:
        """Ask the engine how far it is; what it said last where it has stopped."""
        try:
            self._stats = self._engine.stats()
        except CBatchError:
            self._is_over.set()
        return Snapshot(
            n_total=self._n_total,
            n_done=self.n_done,
            n_failed=self.n_failed,
            n_slots=self._engine.parallel,
            elapsed_s=self._clock() - self._start_s,
            stats=self._stats,
        )

    def _watch(self) -> None:
        while not self._is_over.wait(self._view.interval_s):
            self._view.show(self.snapshot())


def progress_line(s: Snapshot) -> str:
    """Return how far a run is, in one line with the most important things first."""
    failed = f", {s.n_failed} failed" if s.n_failed else ""
    return (
        f"{s.n_done}/{s.n_total}{failed} · out {s.output_tps:,.0f}/s · in {s.prompt_tps:,.0f}/s · "
        f"slots {s.stats.n_running}/{s.n_slots} · {_left(s.left_s)} left"
    )


def summary_lines(s: Snapshot) -> list[str]:
    """Return what a run did: items, tokens, slots, time."""
    stats = s.stats
    return [
        f"items   {s.n_done} of {s.n_total}, {s.n_failed} failed",
        f"in      {stats.n_prompt_tokens:,} tokens, {s.prompt_tps:,.0f} tokens/s",
        f"out     {stats.n_output_tokens:,} tokens, {s.output_tps:,.0f} tokens/s",
        f"slots   {stats.n_active_max} of {s.n_slots} at most, {s.mean_slots:.1f} on average",
        f"time    {s.elapsed_s:.2f} s",
    ]


def _bar(s: Snapshot) -> str:
    n_full = _BAR_WIDTH * s.n_done // s.n_total
    return "━" * n_full + "╌" * (_BAR_WIDTH - n_full)


def _left(seconds: float | None) -> str:
    if seconds is None:
        return "?"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
