"""What a run shows of itself."""

from __future__ import annotations

import io
import threading
from dataclasses import replace

import pytest
from rich.console import Console

from cbatch.backend.fake import FakeBackend
from cbatch.engine import Engine
from cbatch.errors import EngineClosedError
from cbatch.progress import (
    BatchSnapshot,
    Counts,
    LiveView,
    PlainView,
    Progress,
    SilentView,
    choose_view,
    closing_line,
    fitted_line,
    progress_line,
    summary_lines,
)
from cbatch.stats import EngineStats
from tests.runtime.backends import PATIENCE_S

STATS = EngineStats(
    n_steps=10,
    n_active_steps=75,
    n_active_max=8,
    n_prompt_tokens=4000,
    n_output_tokens=1000,
    n_running=7,
)


def snapshot(
    n_done: int = 10, n_failed: int = 2, n_total: int | None = 40, elapsed_s: float = 20.0
) -> BatchSnapshot:
    return BatchSnapshot(
        counts=Counts(n_total, n_done, n_failed),
        n_slots=8,
        n_running=7,
        n_active_max=8,
        n_prompt_tokens=4000,
        n_output_tokens=1000,
        n_steps=10,
        n_active_steps=75,
        elapsed_s=elapsed_s,
    )


class Source:
    """Stands for a batch and its engine: counts who asks for its stats, and may have stopped."""

    def __init__(self) -> None:
        self.n_asked = 0
        self.is_closed = False
        self.counts = Counts(3, 0, 0)

    def stats(self) -> EngineStats:
        self.n_asked += 1
        if self.is_closed:
            raise EngineClosedError("the engine is closed")
        return replace(STATS, n_output_tokens=2000)


class Recorder(SilentView):
    """Keeps what it is shown."""

    def __init__(self, interval_s: float = threading.TIMEOUT_MAX) -> None:
        self.interval_s = interval_s
        self.shown: list[BatchSnapshot] = []
        self.finished: list[BatchSnapshot] = []
        self.has_shown, self.has_finished = threading.Event(), threading.Event()

    def show(self, snapshot: BatchSnapshot) -> None:
        self.shown.append(snapshot)
        self.has_shown.set()

    def finish(self, snapshot: BatchSnapshot) -> None:
        self.finished.append(snapshot)
        self.has_finished.set()


def progress_over(source: Source, view: Recorder) -> Progress:
    return Progress(view, lambda: source.counts, source.stats, STATS, 8)


def test_progress_line_has_everything() -> None:
    assert progress_line(snapshot()) == (
        "10/40, 2 failed · out 50/s · in 200/s · slots 7/8 · 1:00 left"
    )


def test_progress_line_without_results_or_total_knows_no_time_left() -> None:
    assert progress_line(snapshot(0, 0)).startswith("0/40 · ")
    assert progress_line(snapshot(0)).endswith("? left")
    assert progress_line(snapshot(n_total=None)).startswith("10/?, 2 failed · ")
    assert progress_line(snapshot(n_total=None)).endswith("? left")
    assert progress_line(snapshot(elapsed_s=3000.0)).endswith("2:30:00 left")


def test_summary_has_items_rates_slots_and_time() -> None:
    assert summary_lines(snapshot()).splitlines() == [
        "items   10 of 40, 2 failed",
        "in      4,000 tokens, 200 tokens/s",
        "out     1,000 tokens, 50 tokens/s",
        "slots   8 of 8 at most, 7.5 on average",
        "time    20.00 s",
    ]
    assert closing_line(snapshot()) == (
        "10/40, 2 failed · out 1,000 tokens, 50/s · in 4,000 tokens, 200/s · 20.00 s"
    )


def test_texts_that_are_embedded_have_no_output_and_no_slots() -> None:
    embedded = replace(snapshot(), n_output_tokens=0, n_steps=0, n_active_steps=0)
    assert summary_lines(embedded).splitlines() == [
        "items   10 of 40, 2 failed",
        "in      4,000 tokens, 200 tokens/s",
        "time    20.00 s",
    ]
    assert closing_line(embedded) == "10/40, 2 failed · in 4,000 tokens, 200/s · 20.00 s"
    assert progress_line(embedded) == "10/40, 2 failed · in 200/s · 1:00 left"


def test_cancelled_items_are_neither_done_nor_failed() -> None:
    left = replace(snapshot(), counts=Counts(40, 10, 2, n_cancelled=30))
    assert left.counts.is_over
    assert summary_lines(left).startswith("items   10 of 40, 2 failed, 30 cancelled")
    assert closing_line(left).startswith("10/40, 2 failed, 30 cancelled · ")


def test_share_of_a_run_with_a_limit_is_that_of_the_limit() -> None:
    counts = Counts(None, 7, 0, n_about=300, n_before=5, is_counted=True, n_goal=10)
    limited = replace(snapshot(), counts=counts)
    assert counts.share == 0.7
    assert limited.left_s == pytest.approx(limited.elapsed_s * 3 / 2)
    assert summary_lines(limited).startswith("items   7 of 300, 0 failed\n")


@pytest.mark.parametrize(
    ("counts", "said"),
    [
        (Counts(None, 48, 0), "48/? · "),
        (Counts(None, 48, 0, n_about=3023), "48/about 3000 · "),
        (Counts(None, 48, 0, n_about=3023, is_counted=True), "48/3023 · "),
        (Counts(3000, 48, 0, n_about=3023), "48/3000 · "),
        (Counts(None, 2, 0, n_about=7), "2/about 7 · "),
        (Counts(None, 2, 0, n_about=1_265_432), "2/about 1300000 · "),
    ],
    ids=str,
)
def test_number_of_items_is_as_exact_as_it_is_known(counts: Counts, said: str) -> None:
    assert progress_line(replace(snapshot(), counts=counts)).startswith(said)


def test_progress_closed_twice_finishes_once_with_the_work_since_it_began() -> None:
    source, view = Source(), Recorder()
    progress = progress_over(source, view)
    source.counts = Counts(3, 2, 1)
    progress.close()
    progress.close()
    [last] = view.finished
    assert (last.counts, last.n_output_tokens, last.n_prompt_tokens) == (Counts(3, 2, 1), 1000, 0)
    assert source.n_asked == 1  # at the end: nobody polls for a silent view


def test_progress_asks_again_and_again_while_the_batch_lasts() -> None:
    view = Recorder(0.001)
    progress = progress_over(Source(), view)
    assert view.has_shown.wait(PATIENCE_S)
    progress.close()
    assert view.shown[0].n_slots == 8


def test_progress_of_a_batch_that_nobody_reads_ends_with_it() -> None:
    source, view = Source(), Recorder(0.001)
    progress_over(source, view)
    source.counts = Counts(3, 3, 0)
    assert view.has_finished.wait(PATIENCE_S)


def test_progress_of_an_engine_that_stopped_keeps_its_last_figures() -> None:
    source, view = Source(), Recorder()
    progress = progress_over(source, view)
    source.is_closed = True
    progress.close()
    assert view.finished[0].n_active_max == STATS.n_active_max


def test_live_line_fits_its_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    for width in (30, 100):
        drawn = io.StringIO()
        view = LiveView(summary_lines, Console(file=drawn, width=width, force_terminal=True))
        view.show(snapshot())
        [line] = [part for part in drawn.getvalue().splitlines() if "10/40" in part]
        assert ("━━━━━╌" in line, "1:00 left" in line) == (width == 100, width == 100)
        view.finish(snapshot())
        assert "items   10 of 40" in capsys.readouterr().err


def test_line_leaves_out_what_matters_least() -> None:
    full = replace(snapshot(), n_waiting=9, n_cached_tokens=4000)
    rest = "out 50/s · in 200/s · slots 7/8"
    for n_columns, line in {
        200: f"━━━━━╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌ 10/40, 2 failed · {rest} · queue 9 · cached 50% · 1:00 left",
        97: f"━━━╌╌╌╌╌╌╌╌╌ 10/40, 2 failed · {rest} · queue 9 · cached 50% · 1:00 left",
        91: f"━━━━╌╌╌╌╌╌╌╌╌╌╌╌ 10/40, 2 failed · {rest} · cached 50% · 1:00 left",
        72: f"━━╌╌╌╌╌╌ 10/40, 2 failed · {rest} · 1:00 left",
        50: "━━╌╌╌╌╌╌ 10/40, 2 failed · out 50/s · 1:00 left",
        40: "10/40, 2 failed · out 50/s · 1:00 left",
        37: "10/40, 2 failed · 1:00 left",
        20: "10/40, 2 failed",
    }.items():
        assert fitted_line(full, n_columns) == line


def test_line_without_a_total_has_no_bar() -> None:
    assert fitted_line(snapshot(n_total=None), 200) == progress_line(snapshot(n_total=None))


def test_view_is_plain_where_there_is_no_terminal() -> None:
    assert isinstance(choose_view(summary_lines, is_quiet=False, has_free_terminal=True), PlainView)
    assert isinstance(choose_view(summary_lines, is_quiet=True, has_free_terminal=True), SilentView)


def test_view_is_live_on_a_terminal_that_answers_do_not_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes it for a terminal then
    assert isinstance(choose_view(summary_lines, is_quiet=False, has_free_terminal=True), LiveView)
    assert isinstance(
        choose_view(summary_lines, is_quiet=False, has_free_terminal=False), PlainView
    )


def test_view_of_a_run_that_nobody_reads_ends_with_its_engine_by_hand() -> None:
    engine, view = Engine(FakeBackend(), threaded=False), Recorder(0.001)
    engine.run(["a", "b"], progress=view)
    assert view.has_shown.wait(PATIENCE_S)
    del engine
    assert view.has_finished.wait(PATIENCE_S)
    assert view.finished[0].counts == Counts(2, 0, 0, 2)
