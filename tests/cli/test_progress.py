"""What a run shows of itself."""

from __future__ import annotations

import io
import threading
from typing import TYPE_CHECKING, Any, cast

from rich.console import Console

from cbatch.cli.progress import (
    LiveView,
    PlainView,
    Progress,
    SilentView,
    Snapshot,
    choose_view,
    progress_line,
    summary_lines,
)
from cbatch.core.stats import EngineStats
from cbatch.errors import EngineClosedError

if TYPE_CHECKING:
    import pytest

    from cbatch.engine import Engine

STATS = EngineStats(
    n_steps=10,
    n_active_steps=75,
    n_active_max=8,
    n_prompt_tokens=4000,
    n_output_tokens=1000,
    n_running=7,
)


def snapshot(**changes: Any) -> Snapshot:
    values = {"n_total": 40, "n_done": 10, "n_failed": 2, "n_slots": 8, "elapsed_s": 20.0}
    return Snapshot(**{**values, "stats": STATS, **changes})


class Books:
    """Stands for an engine: counts who asks for its stats, and may have stopped."""

    parallel = 8

    def __init__(self) -> None:
        self.n_asked = 0
        self.is_closed = False

    def stats(self) -> EngineStats:
        self.n_asked += 1
        if self.is_closed:
            raise EngineClosedError("the engine is closed")
        return STATS


class Recorder(SilentView):
    """Keeps what it is shown."""

    def __init__(self, interval_s: float) -> None:
        self.interval_s = interval_s
        self.shown: list[Snapshot] = []
        self.finished: list[Snapshot] = []
        self.has_shown = threading.Event()

    def show(self, snapshot: Snapshot) -> None:
        self.shown.append(snapshot)
        self.has_shown.set()

    def finish(self, snapshot: Snapshot) -> None:
        self.finished.append(snapshot)


def progress_over(books: Books, view: Recorder) -> Progress:
    return Progress(cast("Engine", books), 3, view)


def test_progress_line_has_everything() -> None:
    assert progress_line(snapshot()) == (
        "10/40, 2 failed · out 50/s · in 200/s · slots 7/8 · 1:00 left"
    )


def test_progress_line_without_results_knows_no_time_left() -> None:
    assert progress_line(snapshot(n_done=0, n_failed=0)).startswith("0/40 · ")
    assert progress_line(snapshot(n_done=0)).endswith("? left")
    assert progress_line(snapshot(elapsed_s=3000.0)).endswith("2:30:00 left")


def test_summary_has_items_rates_slots_and_time() -> None:
    assert summary_lines(snapshot()) == [
        "items   10 of 40, 2 failed",
        "in      4,000 tokens, 200 tokens/s",
        "out     1,000 tokens, 50 tokens/s",
        "slots   8 of 8 at most, 7.5 on average",
        "time    20.00 s",
    ]


def test_progress_counts_and_finishes_with_the_last_figures() -> None:
    books, view = Books(), Recorder(threading.TIMEOUT_MAX)
    with progress_over(books, view) as progress:
        progress.count(has_failed=False)
        progress.count(has_failed=True)
    assert [(s.n_done, s.n_failed, s.n_total) for s in view.finished] == [(2, 1, 3)]
    assert books.n_asked == 2  # at the start and at the end: nobody polls for a silent view


def test_progress_asks_again_and_again_while_the_run_lasts() -> None:
    view = Recorder(0.001)
    with progress_over(Books(), view):
        view.has_shown.wait()
    assert view.shown[0].n_slots == 8


def test_progress_of_an_engine_that_stopped_keeps_its_last_figures() -> None:
    books, view = Books(), Recorder(threading.TIMEOUT_MAX)
    with progress_over(books, view):
        books.is_closed = True
    assert view.finished[0].stats is STATS


def test_live_line_fits_its_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    for width in (30, 100):
        drawn = io.StringIO()
        view = LiveView(Console(file=drawn, width=width, force_terminal=True))
        view.show(snapshot())
        [line] = [part for part in drawn.getvalue().splitlines() if "10/40" in part]
        assert ("━━━━━╌" in line, "…" in line) == (width == 100, width == 30)
        view.finish(snapshot())
        assert "items   10 of 40" in capsys.readouterr().err


def test_view_is_plain_where_there_is_no_terminal() -> None:
    assert isinstance(choose_view(is_quiet=False, has_free_terminal=True), PlainView)
    assert isinstance(choose_view(is_quiet=True, has_free_terminal=True), SilentView)


def test_view_is_live_on_a_terminal_that_answers_do_not_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes it for a terminal then
    assert isinstance(choose_view(is_quiet=False, has_free_terminal=True), LiveView)
    assert isinstance(choose_view(is_quiet=False, has_free_terminal=False), PlainView)
