"""A run over a file in worker processes: its records are the same, whatever becomes of the workers."""

from __future__ import annotations

import os
import signal
import sys
from typing import TYPE_CHECKING, Any

import pytest

from cbatch.backend.fake import FakeBackend
from cbatch.engine import Engine
from cbatch.errors import ConfigError
from cbatch.files.file_run import run_file, stream_file
from cbatch.files.settings import FileOptions
from tests.files.kill_runs import children_of
from tests.files.runs import SHORT, answers, make_engine, records, run_in, write_requests
from tests.worker.links import Launches, MortalBackend

if TYPE_CHECKING:
    from pathlib import Path

SMALL: dict[str, Any] = {"parallel": 4, "ctx_per_seq": 128, "exact": True}
FOUR_TOKENS = {"max_tokens": 4, "temperature": 0}
needs_signals = pytest.mark.skipif(sys.platform == "win32", reason="needs signals")


def test_items_of_a_worker_that_died_have_their_answers(tmp_path: Path) -> None:
    write_requests(tmp_path / "in.jsonl", 40)
    with make_engine(threaded=True) as engine:
        run_in(tmp_path, engine, "whole.jsonl")
    launches = Launches(lambda: MortalBackend(4, 128, 64, die_at=None if launches.links else 9))
    with launches.engine(options=SHORT) as engine:
        summary = run_in(tmp_path, engine, "out.jsonl")
    assert len(launches.links) == 2
    assert (summary.n_done, summary.n_failed) == (40, 0)
    assert answers(tmp_path / "out.jsonl") == answers(tmp_path / "whole.jsonl")


def test_poison_has_a_record_of_its_error_and_all_others_answers(tmp_path: Path) -> None:
    write_requests(tmp_path / "in.jsonl", 12)
    launches = Launches(lambda: MortalBackend(4, 128, 64, poison_text="question 7"))
    with launches.engine(options=SHORT) as engine:
        summary = run_in(tmp_path, engine, "out.jsonl")
    assert (summary.n_done, summary.n_failed) == (12, 1)
    [failed] = [r for r in records(tmp_path / "out.jsonl") if r["error"]]
    assert failed["id"] == "r7"
    assert failed["error"]["type"] == "WorkerDiedError"
    assert "each of 3 workers that computed this request alone died" in failed["error"]["message"]


@pytest.mark.parametrize(
    ("given", "n", "n_by_default"),
    [
        ({}, None, 1),
        ({"isolate": True}, 1, 1),
        ({"isolate": False}, None, None),
        ({"replicas": 2, "isolate": True}, 2, 2),
        ({"replicas": "auto"}, "auto", "auto"),
    ],
)
def test_options_say_how_many_workers_there_are(
    given: dict[str, Any], n: object, n_by_default: object
) -> None:
    assert FileOptions(**given).n_workers() == n
    assert FileOptions(**given).n_workers(isolates=True) == n_by_default


@pytest.mark.parametrize(
    "given",
    [{"replicas": 0}, {"replicas": "many"}, {"replicas": 2, "isolate": False}, {"isolate": 1},
     {"replicas": "auto", "isolate": True}],
)  # fmt: skip
def test_wrong_numbers_of_workers_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        FileOptions(**given)


@pytest.mark.parametrize("given", [{"isolate": True}, {"isolate": False}, {"replicas": 2}])
def test_workers_are_refused_for_an_engine_that_is_loaded(
    tmp_path: Path, given: dict[str, Any]
) -> None:
    source = write_requests(tmp_path / "in.jsonl", 1)
    with Engine(FakeBackend()) as engine:
        with pytest.raises(ConfigError, match=next(iter(given))):
            run_file(source, tmp_path / "out.jsonl", engine=engine, **given)
        with pytest.raises(ConfigError, match=next(iter(given))):
            stream_file(source, engine, **given)
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.real
@needs_signals
def test_isolated_run_goes_on_with_a_run_that_was_not(tmp_path: Path, test_model: Path) -> None:
    source = write_requests(tmp_path / "in.jsonl", 30)
    given: dict[str, Any] = {"model": test_model, "options": FOUR_TOKENS, **SMALL}
    run_file(source, tmp_path / "whole.jsonl", **given)
    runs: list[dict[str, Any]] = [{"limit": 10}, {"limit": 10, "isolate": True}, {"replicas": 2}]
    for more in runs:
        run_file(source, tmp_path / "out.jsonl", **given, **more)
    assert answers(tmp_path / "out.jsonl") == answers(tmp_path / "whole.jsonl")
    assert len(records(tmp_path / "out.jsonl")) == 30


@pytest.mark.real
@needs_signals
def test_report_and_trace_have_the_steps_of_workers(tmp_path: Path, test_model: Path) -> None:
    source = write_requests(tmp_path / "in.jsonl", 12)
    report, trace = tmp_path / "page.html", tmp_path / "steps.json"
    files: dict[str, Any] = {"report": report, "trace": trace, "replicas": 2}
    run_file(
        source, tmp_path / "out.jsonl", model=test_model, options=FOUR_TOKENS, **files, **SMALL
    )
    assert "</html>" in report.read_text()
    assert trace.read_text().count('"ph"') > 12


@pytest.mark.real
@needs_signals
def test_worker_killed_during_a_run_loses_and_doubles_nothing(
    tmp_path: Path, test_model: Path
) -> None:
    source = write_requests(tmp_path / "in.jsonl", 60)
    n_ended = 0

    def kill_now_and_then(*_: object) -> None:
        nonlocal n_ended
        n_ended += 1
        if n_ended in (5, 30):
            for pid in children_of(os.getpid()):
                os.kill(pid, signal.SIGKILL)

    given: dict[str, Any] = {"model": test_model, "options": FOUR_TOKENS, **SMALL}
    run_file(source, tmp_path / "whole.jsonl", **given)
    summary = run_file(
        source, tmp_path / "out.jsonl", isolate=True, on_result=kill_now_and_then, **given
    )
    assert (summary.n_done, summary.n_failed) == (60, 0)
    assert answers(tmp_path / "out.jsonl") == answers(tmp_path / "whole.jsonl")
