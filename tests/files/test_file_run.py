"""Runs over files: a record for each item, going on, stopping, and what is wrong with an input or an output."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import cbatch
from cbatch.backend.fake import FakeBackend, FakeConstraint, FakeGrammars
from cbatch.engine import Engine
from cbatch.errors import (
    ConfigError,
    EngineClosedError,
    OutputError,
    RequestCancelledError,
    UnsupportedOptionError,
)
from cbatch.files.file_run import run_file, stream_file
from cbatch.files.outcome import Interrupted, Stopper
from cbatch.files.output.sorting import Sorted, sort_in_place
from cbatch.files.preview import check_file, estimate_file
from cbatch.progress import PlainView, SilentView, summary_lines
from tests import call_runs
from tests.files.runs import SHORT, answers, make_engine, records, write_requests
from tests.helpers import A_SECOND_A_STEP
from tests.places import can_all
from tests.runtime.backends import GatedBackend

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from cbatch.files.input.item import Item
    from cbatch.options import Grammar
    from cbatch.response import BatchResult


@pytest.fixture(params=[False, True], ids=["by hand", "threaded"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    with make_engine(threaded=request.param) as made:
        yield made


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_requests(tmp_path / "in.jsonl", 100)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out.jsonl"


class StopAfter:
    """Presses Ctrl-C `n_presses` times once `n` items have ended."""

    def __init__(self, n: int, n_presses: int = 1) -> None:
        self.stopper = Stopper(lambda words: None)
        self._n, self._n_presses = n, n_presses

    def __call__(self, item: Item, result: BatchResult | None) -> None:
        self._n -= 1
        if self._n == 0:
            for _ in range(self._n_presses):
                self.stopper.press()


def test_requests_that_pause_are_refused_for_nobody_resumes_them(
    engine: Engine, source: Path, out: Path
) -> None:
    with pytest.raises(ConfigError, match="pause_every=4 needs a program"):
        run_file(source, out, engine=engine, options={"pause_every": 4})
    assert not out.exists()
    line = json.dumps({"prompt": "a", "options": {"max_tokens": 2, "pause_every": 1}})
    source.write_text(f"{line}\n")
    assert run_file(source, out, engine=engine).n_failed == 1
    assert "pause_every=1 needs a program" in out.read_text()


def test_every_item_has_its_record_as_engine_run_answers_it(
    engine: Engine, source: Path, out: Path
) -> None:
    summary = run_file(source, out, engine=engine)
    assert (summary.ending, summary.n_items, summary.n_done, summary.n_left) == (
        "done",
        100,
        100,
        0,
    )
    assert summary.is_complete
    assert summary.resume_hint == ""
    texts = [r.text for r in engine.run([f"question {i}" for i in range(100)]).results()]
    assert answers(out) == {f"r{i}": (text, "length", None) for i, text in enumerate(texts)}
    before = out.read_bytes()
    summary = run_file(source, out, engine=engine)
    assert (summary.n_before, summary.n_done, summary.is_complete) == (100, 0, True)
    assert out.read_bytes() == before


@pytest.mark.parametrize(("n_presses", "ending"), [(1, "asked"), (2, "now")])
def test_ctrl_c_saves_what_is_done_and_the_next_run_goes_on(
    engine: Engine, source: Path, out: Path, tmp_path: Path, n_presses: int, ending: str
) -> None:
    stop = StopAfter(10, n_presses)
    with pytest.raises(Interrupted) as caught:
        run_file(source, out, engine=engine, on_result=stop, stop=stop.stopper)
    summary = caught.value.summary
    assert summary.ending == ending
    assert 10 <= summary.n_done <= 10 + 4 * 4
    assert len(records(out)) == summary.n_done
    assert "run the same command again" in summary.resume_hint
    rest = run_file(source, out, engine=engine)
    assert (rest.n_before, rest.n_done) == (summary.n_done, 100 - summary.n_done)
    run_file(source, tmp_path / "undisturbed.jsonl", engine=engine)
    assert answers(out) == answers(tmp_path / "undisturbed.jsonl")


def test_signal_before_a_run_takes_its_action_is_not_lost() -> None:
    stopper, done = Stopper(lambda _: None), list[str]()
    stopper.press()
    with stopper.asking(lambda: done.append("asked")):
        assert done == ["asked"]
    other = Stopper(lambda _: None)
    with other.asking(lambda: done.append("amid")):
        other.press()
    assert done == ["asked", "amid"]


def test_signals_are_taken_and_given_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    said: list[str] = []
    with Stopper(said.append) as stop:
        signal.raise_signal(signal.SIGTERM)
        assert (stop.is_asked, stop.is_now) == (True, False)
        guarded = stop.guarded()
        guarded.__enter__()
        signal.raise_signal(signal.SIGINT)
        said.append("whole")
        with pytest.raises(KeyboardInterrupt):
            guarded.__exit__(None, None, None)
    assert said == ["finishing the running items; a second signal stops at once", "whole"]
    assert signal.getsignal(signal.SIGTERM) is before


def test_ignored_signal_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Stopper(takes_all=True) as stop:
            signal.raise_signal(signal.SIGHUP)
            assert not stop.is_asked
    finally:
        signal.signal(signal.SIGHUP, before)


def make_set(settings: dict[str, str], **options: Any) -> Engine:
    backend = FakeBackend(4, 128, 64)
    backend.answer_settings = settings
    return Engine(backend, options={**SHORT, **options}, threaded=False)


@pytest.mark.parametrize(
    ("before", "now", "options", "words"),
    [
        ({"exact": "False"}, {"exact": "True"}, {}, "exact was False, is now True"),
        ({}, {"cache_type_v": "f16"}, {}, "cache_type_v was nothing, is now f16"),
        ({}, {}, {"max_tokens": 2}, r"max_tokens=3.*max_tokens=2"),
    ],
)
def test_settings_of_the_engine_that_answers_depend_on_are_refused_by_name(
    source: Path,
    out: Path,
    before: dict[str, str],
    now: dict[str, str],
    options: dict[str, int],
    words: str,
) -> None:
    with make_set(before) as engine:
        run_file(source, out, engine=engine, limit=50)
    with make_set(now, **options) as engine:
        with pytest.raises(ConfigError, match=words):
            run_file(source, out, engine=engine)
        assert len(records(out)) == 50
        forced = run_file(source, out, engine=engine, force=True)
        assert (forced.n_before, forced.n_done) == (0, 100)


def test_run_continues_where_an_option_is_written_as_a_whole_number(
    source: Path, out: Path
) -> None:
    for temperature in (0.0, 0):
        with make_set({}, temperature=temperature, logit_bias={1: 1}, timeout_s=60) as engine:
            run_file(source, out, engine=engine, limit=50)
    assert len(records(out)) == 100


def test_changed_line_alone_runs_again(engine: Engine, source: Path, out: Path) -> None:
    run_file(source, out, engine=engine)
    source.write_text(source.read_text().replace('question 7"', 'another question"'))
    summary = run_file(source, out, engine=engine)
    assert (summary.n_before, summary.n_done) == (99, 1)
    assert len(answers(out)) == 100


def test_wrong_lines_cost_themselves_and_are_tried_again_on_request(
    engine: Engine, source: Path, out: Path
) -> None:
    with source.open("a") as file:
        file.write('{bad\n{"id": "r3", "prompt": "twice"}\n{"id": "x", "prompt": ""}\n')
    told: list[str] = []
    summary = run_file(
        source, out, engine=engine, on_result=lambda i, r: told.append(i.id) if r is None else None
    )
    assert (summary.n_done, summary.n_failed, summary.n_errors) == (103, 3, 3)
    assert len(told) == 3
    codes = sorted(r["error"]["code"] for r in records(out) if r["error"])
    assert codes == ["duplicate_custom_id", "invalid_json_line", "invalid_request"]
    again = run_file(source, out, engine=engine)
    assert (again.n_before, again.n_failed_before, again.n_done) == (103, 3, 0)
    retried = run_file(source, out, engine=engine, retry_errors=True)
    assert (retried.n_done, retried.n_failed) == (3, 3)
    assert len(records(out)) == 103


@pytest.mark.parametrize("is_threaded", [False, True])
def test_lines_that_are_refused_are_written_and_told_in_groups(
    tmp_path: Path, out: Path, is_threaded: bool
) -> None:
    source, n = tmp_path / "in.jsonl", 6000
    source.write_text('{"id": "a", "prompt": "a"}\n' + "{bad\n" * n)
    n_written = []

    def note(item: Item, result: BatchResult | None) -> None:
        if result is None:
            n_written.append(out.read_bytes().count(b"\n"))

    with make_engine(threaded=is_threaded) as engine:
        summary = run_file(source, out, engine=engine, on_result=note)
        assert engine.stats().n_submitted == 1
    assert (summary.n_done, summary.n_failed, len(n_written)) == (n + 1, n, n)
    assert n_written[0] < n // 2  # others are not read before the first ones are told
    assert all(found > i - 64 for i, found in enumerate(n_written))


def test_finished_run_tells_its_errors_again(engine: Engine, source: Path, out: Path) -> None:
    wrong = [
        {"id": "none"},
        {"id": "long", "prompt": "a" * 999},
        {"id": "much", "prompt": "b" * 999},
    ]
    lines = source.read_text() + "".join(json.dumps(each) + "\n" for each in wrong)
    source.write_text(lines)
    first = run_file(source, out, engine=engine, limit=101)
    assert (first.ending, first.n_errors) == ("limit", 2)
    then = run_file(source, out, engine=engine)
    assert then.errors == {"PromptTooLongError": 1}
    assert then.errors_before == first.errors == {"PromptTooLongError": 1, "invalid_request": 1}
    again = run_file(source, out, engine=engine)
    assert again.errors == {}
    assert again.errors_before == {"PromptTooLongError": 2, "invalid_request": 1}
    assert again.first_error == first.first_error
    assert (
        "3 in earlier runs (2 PromptTooLongError, 1 invalid_request); the first: " in again.failures
    )


def test_row_that_has_gone_takes_its_record_with_it(engine: Engine, tmp_path: Path) -> None:
    table, out = tmp_path / "in.csv", tmp_path / "out.csv"
    for rows in ("abcd", "bcd", "xbcd", ""):
        table.write_text("prompt\n" + "".join(f"{row}\n" for row in rows or "q"))
        run_file(table, out, engine=engine)
        found = [line[0] for line in out.read_text().splitlines()[1:]]
        assert sorted(found) == sorted(rows or "q")


def test_wrong_line_that_was_mended_leaves_no_error_behind(
    engine: Engine, tmp_path: Path, out: Path
) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"id": "a", "prompt": "a"}\n{bad\n{"id": "a", "prompt": "c"}\n')
    assert run_file(source, out, engine=engine).n_failed == 2
    source.write_text("".join(f'{{"id": "{id}", "prompt": "{id}"}}\n' for id in "abc"))
    summary = run_file(source, out, engine=engine)
    assert (summary.n_before, summary.n_done) == (1, 2)
    assert sorted(answers(out)) == ["a", "b", "c"]


@pytest.mark.parametrize("wrong", ['{"id": "a", "prompt": "q"}', '{"id": "b"}', "{bad"])
def test_error_names_the_line_where_it_stands_now(
    engine: Engine, tmp_path: Path, out: Path, wrong: str
) -> None:
    source = tmp_path / "in.jsonl"
    good = ['{"id": "a", "prompt": "a"}\n', '{"id": "c", "prompt": "c"}\n', "\n", "\n"]
    for i_line, n_done in ((1, 3), (1, 0), (2, 1), (4, 1), (4, 0)):
        lines = [*good[:i_line], f"{wrong}\n", *good[i_line:]]
        source.write_text("".join(lines))
        summary = run_file(source, out, engine=engine)
        assert (summary.n_done, summary.n_errors) == (n_done, 1)
        [message] = [r["error"]["message"] for r in records(out) if r["error"]]
        assert f"in.jsonl, line {i_line + 1}: " in message
        assert len(records(out)) == 3


def test_id_that_looks_like_a_number_of_ours_is_no_double(engine: Engine, tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"id": "\\u00002", "prompt": "a"}\n{"prompt": "b"}\n')
    assert run_file(source, tmp_path / "out", engine=engine).n_failed == 0


def test_limit_counts_what_is_run_and_the_next_run_takes_the_next(
    engine: Engine, source: Path, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for n in (30, 60, 90):
        summary = run_file(source, out, engine=engine, limit=30, progress=True)
        assert (summary.ending, summary.n_done, summary.n_before) == ("limit", 30, n - 30)
        assert f"{n}/100 · " in capsys.readouterr().err
    assert run_file(source, out, engine=engine, limit=30).ending == "done"
    assert len(answers(out)) == 100


def test_shuffle_runs_all_in_another_order_that_its_seed_gives(
    source: Path, tmp_path: Path
) -> None:
    orders: list[list[str]] = []
    for seed in (1, 1, 2):
        out = tmp_path / f"{len(orders)}.jsonl"
        with make_engine() as engine:
            asked: dict[str, Any] = {"shuffle": True, "shuffle_seed": seed, "strict": True}
            assert run_file(source, out, engine=engine, window=1, **asked).is_complete
        orders.append(list(answers(out)))
    assert orders[0] == orders[1]
    assert orders[0] != orders[2]


def test_what_time_ends_is_left_but_not_what_ends_by_its_own(tmp_path: Path, out: Path) -> None:
    source = write_requests(tmp_path / "in.jsonl", 6, max_tokens=120, timeout_s=1e-6)
    with make_engine() as engine:
        summary = run_file(source, out, engine=engine)
    assert {r["finish_reason"] for r in records(out)} == {"timeout"}
    assert summary.n_done == 6
    out.unlink()
    source = write_requests(tmp_path / "in.jsonl", 6, max_tokens=120)
    with make_engine() as engine:
        summary = run_file(source, out, engine=engine, max_time_s=1e-6, force=True)
    assert (summary.ending, summary.n_done, out.read_bytes()) == ("time", 0, b"")


def test_choice_out_of_time_is_the_error_of_its_record_beside_the_others(
    tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = GatedBackend(1, 128, 64, cost=A_SECOND_A_STEP)
    monkeypatch.setattr("time.perf_counter", lambda: backend.now_s)
    source = tmp_path / "in.jsonl"
    asked = {"id": "r", "prompt": "a question", "options": {"n": 3, "timeout_s": 4.0}}
    source.write_text(json.dumps(asked) + "\n")
    with Engine(backend, options=SHORT, threaded=False) as engine:
        summary = run_file(source, out, engine=engine)
    [record] = records(out)
    assert (record["finish_reason"], record["error"]["type"]) == ("timeout", "DeadlineError")
    assert [bool(choice["text"]) for choice in record["choices"]] == [True, True, False]
    assert (summary.n_done, summary.n_failed) == (1, 1)


@pytest.mark.parametrize("kind", [EngineClosedError, LookupError])
def test_run_that_an_error_ends_leaves_what_was_written(
    source: Path, out: Path, kind: type[Exception]
) -> None:
    engine = make_engine()

    def end(item: Item, result: BatchResult | None) -> None:
        engine.close()
        if kind is LookupError:
            raise LookupError("mine")

    with pytest.raises(kind):
        run_file(source, out, engine=engine, on_result=end)
    n_before = len(records(out))
    assert n_before >= 1
    with make_engine() as again:
        assert run_file(source, out, engine=again).n_before == n_before
    assert len(answers(out)) == 100


def test_manifest_that_is_removed_meanwhile_is_told(
    engine: Engine, source: Path, out: Path
) -> None:
    manifest = out.with_name(f"{out.name}.manifest")
    with pytest.raises(OutputError, match="the manifest was removed or moved away while"):
        run_file(source, out, engine=engine, on_result=lambda *_: manifest.unlink(missing_ok=True))
    assert run_file(source, out, engine=engine, adopt=True).is_complete
    assert len(answers(out)) == 100


def cut_in_half(out: Path) -> None:
    os.truncate(out, out.stat().st_size // 2)


def add_to(out: Path) -> None:
    with out.open("a") as file:
        file.write("a line of somebody else, longer than what comes next\n" * 20)


def replace_it(out: Path) -> None:
    out.with_name("other").touch()
    out.with_name("other").replace(out)


def move_away(out: Path) -> None:
    out.rename(out.with_name("elsewhere"))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (Path.unlink, "was removed with its records while the run wrote there"),
        (replace_it, "was removed with its records while the run wrote there"),
        (move_away, "was moved away while the run wrote there"),
        (
            cut_in_half,
            r"was cut off while the run wrote there, and lost [\d,]+ bytes of records",
        ),
        (add_to, r"got [\d,]+ bytes from another program while the run wrote there"),
    ],
)
@pytest.mark.parametrize("n_before", [20, 100])
def test_output_changed_meanwhile_is_told_and_nothing_is_lost(
    source: Path, out: Path, change: Callable[[Path], None], words: str, n_before: int
) -> None:
    left = [n_before]

    def disturb(item: Item, result: BatchResult | None) -> None:
        left[0] -= 1
        if not left[0]:
            change(out)

    with make_engine() as engine:
        with pytest.raises(OutputError, match=words):
            run_file(source, out, engine=engine, on_result=disturb)
        assert run_file(source, out, engine=engine).is_complete
        undisturbed = out.with_name("undisturbed")
        run_file(source, undisturbed, engine=engine)
    assert answers(out) == answers(undisturbed)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"limit": 0}, "limit must be 1 … "),
        ({"window": 10**6}, "window must be 1 … 65536"),
        ({"max_time_s": -1}, "max_time_s"),
        ({"format": "xml"}, "format must be one of"),
        ({"parallel": 3}, "parallel: the engine is loaded already"),
        ({"tmplate": "{a}"}, "did you mean template"),
        ({"parralel": 3}, "parralel"),
        ({"tempature": 1}, r"tempature: .*options=\{'temperature': …\}"),
    ],
)
def test_wrong_settings_are_named(
    engine: Engine, source: Path, out: Path, settings: dict[str, Any], words: str
) -> None:
    with pytest.raises((ConfigError, UnsupportedOptionError), match=words):
        run_file(source, out, engine=engine, **settings)
    assert not out.exists()


def test_stream_gives_every_item_with_its_result(engine: Engine, source: Path) -> None:
    with source.open("a") as file:
        file.write("{bad\n")
    pairs = list(stream_file(source, engine))
    assert sorted(item.number for item, _ in pairs) == list(range(1, 102))
    for item, result in pairs:
        assert (result is None) == (item.error is not None)
        assert result is None or result.id == item.id
    with pytest.raises(ConfigError, match="force has no effect"):
        stream_file(source, engine, force=True)


def write_doubles(source: Path) -> Path:
    """Two of one id, of whom the second is wrong, and a line that is wrong in itself under an id of before."""
    lines = [{"id": "a", "prompt": "p"}, {"id": "a", "prompt": "q"}, {"id": "a", "prompt": ""}]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return source


def test_stream_and_run_tell_duplicates_with_their_error(engine: Engine, tmp_path: Path) -> None:
    source, report = write_doubles(tmp_path / "in.jsonl"), tmp_path / "r.html"
    told: list[Item] = []
    streamed = [item for item, result in stream_file(source, engine) if result is None]
    out = tmp_path / "out.jsonl"
    run_file(source, out, engine=engine, report=report, on_result=lambda item, _: told.append(item))
    for found in (streamed, [item for item in told if item.error]):
        codes = {item.number: item.error and item.error.code for item in found}
        assert codes == {2: "duplicate_custom_id", 3: "invalid_request"}
        assert [item.prompt for item in found] == [None, None]
    assert "2 failed" in report.read_text()
    assert "duplicate_custom_id" in report.read_text()


def test_output_of_an_unknown_model_is_continued_by_its_own_engine_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(*_: object) -> dict[str, str]:
        raise FileNotFoundError

    monkeypatch.setattr(FakeBackend, "fingerprint", gone)
    source, out = write_requests(tmp_path / "in.jsonl", 8), tmp_path / "out.jsonl"
    with make_engine() as first, make_engine() as second:
        assert first.fingerprint["model"].startswith("unknown")
        run_file(source, out, engine=first, limit=2)
        with pytest.raises(ConfigError, match=r"model was unknown .*, is now unknown "):
            run_file(source, out, engine=second)
        assert run_file(source, out, engine=first).n_done == 6


def test_duplicates_name_their_line_and_the_first_of_their_id(
    engine: Engine, tmp_path: Path
) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [{"id": "other", "prompt": "b"}, *[{"id": "a", "prompt": "a"}] * 7]
    source.write_text("\n\n".join(map(json.dumps, lines)))
    for n_failed in (6, 0):
        summary = run_file(source, out, engine=engine)
        assert (summary.n_errors, summary.n_failed) == (6, n_failed)
        if n_failed:
            assert summary.errors == {"duplicate_custom_id": 6}
            assert "line 5: the id 'a' occurs twice, first in request 2: " in summary.failures
    errors = [
        r["error"]["message"] for r in map(json.loads, out.read_text().splitlines()) if r["error"]
    ]
    assert [f"line {5 + 2 * i}: " in message for i, message in enumerate(errors)] == [True] * 6
    with pytest.raises(ConfigError, match=r"line 5: .*first in request 2"):
        run_file(source, tmp_path / "b.jsonl", engine=engine, strict=True)


def test_error_of_a_duplicate_names_the_first_item_after_it_moved(
    engine: Engine, tmp_path: Path
) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    for n_before in (1, 3, 2):
        ids = ["x", "y", "z", "v", "w"]
        ids.insert(n_before, "a")
        source.write_text("".join(f'{{"id": "{id}", "prompt": "{id}"}}\n' for id in [*ids, "a"]))
        run_file(source, out, engine=engine)
        errors = [r["error"] for r in map(json.loads, out.read_text().splitlines()) if r["error"]]
        assert [f"first in request {n_before + 1}:" in error["message"] for error in errors] == [
            True
        ]


def test_stream_tells_that_the_engine_was_closed(tmp_path: Path) -> None:
    source = write_requests(tmp_path / "in.jsonl", 100, max_tokens=60)  # not all are done before
    engine = make_engine(threaded=True)
    pairs = iter(stream_file(source, engine))
    next(pairs)
    engine.close()
    with pytest.raises(EngineClosedError):
        list(pairs)


@pytest.mark.parametrize("n", [4, 100], ids=["all are read", "more are to be read"])
def test_run_whose_items_are_cancelled_says_so_and_goes_on_later(
    tmp_path: Path, out: Path, n: int
) -> None:
    source, engine = write_requests(tmp_path / "in.jsonl", n, max_tokens=60), make_engine()
    has_cancelled = False

    def cancel(item: Item, result: BatchResult | None) -> None:
        nonlocal has_cancelled
        if not has_cancelled:
            has_cancelled = engine.cancel_all() > 0

    source.write_text(json.dumps({"id": "first", "prompt": "a"}) + "\n" + source.read_text())
    with pytest.raises(RequestCancelledError, match="cancel"):
        run_file(source, out, engine=engine, on_result=cancel)
    assert has_cancelled
    n_before = len(records(out))
    assert 1 <= n_before <= n
    assert run_file(source, out, engine=engine).n_before == n_before
    assert len(answers(out)) == n + 1
    engine.close()


def test_stream_gives_out_what_was_cancelled(
    engine: Engine, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    source = write_requests(tmp_path / "in.jsonl", 6, max_tokens=100)
    reasons: list[str] = []
    n_cancelled = 0
    for item, result in stream_file(source, engine):
        assert result is not None
        assert result.id == item.id
        reasons.append(result.finish_reason)
        n_cancelled += engine.cancel_all()
    assert len(reasons) == 6
    assert reasons.count("cancelled") == n_cancelled
    is_threaded = request.node.callspec.params["engine"]
    assert n_cancelled > 0 or is_threaded  # then the engine may be faster than its reader


def test_stream_gives_out_what_there_was_no_time_for(tmp_path: Path) -> None:
    source = write_requests(tmp_path / "in.jsonl", 6, max_tokens=100)
    with make_engine() as engine:
        pairs = list(stream_file(source, engine, max_time_s=1e-6))
        assert {result.finish_reason for _, result in pairs if result} == {"timeout"}
        assert len(pairs) == engine.stats().n_submitted > 0


def test_stream_tells_that_all_was_cancelled_behind_what_was_read(
    engine: Engine, source: Path
) -> None:
    given: list[str] = []

    def read() -> None:
        for item, result in stream_file(source, engine):
            assert result is not None
            given.append(item.id)
            engine.cancel_all()

    with pytest.raises(RequestCancelledError, match="before all prompts were read"):
        read()
    assert len(given) == engine.stats().n_submitted


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio", "trio"])
async def test_stream_is_read_in_an_event_loop(source: Path) -> None:
    with make_engine(threaded=True) as engine:
        ids = [item.id async for item, _ in stream_file(source, engine)]
        assert sorted(ids) == sorted(f"r{i}" for i in range(100))


def test_check_counts_tokens_and_names_what_is_wrong(engine: Engine, source: Path) -> None:
    with source.open("a") as file:
        file.write('{bad\n{"id": "r1", "prompt": "a"}\n' + json.dumps({"prompt": "x" * 500}) + "\n")
    found = check_file(source, engine=engine)
    assert found.n_by_code == {
        "invalid_json_line": 1,
        "duplicate_custom_id": 1,
        "prompt_too_long": 1,
    }
    assert (found.n_items, found.n_good) == (103, 100)
    assert (found.n_least, found.n_most) == (len("question 0"), len("question 10"))
    assert "line 103: the prompt has 500 tokens, but a slot holds 128" in "\n".join(found.lines())
    assert engine.stats().n_steps == 0


def test_estimate_knows_the_tokens_of_answers_that_are_alike(engine: Engine, source: Path) -> None:
    found = estimate_file(source, engine=engine, n_sample=20)
    assert 2**23 < (found.memory_bytes or 0) < 2**37  # of a whole Python, in bytes
    assert (found.n_items, found.n_sample, found.output_tokens) == (100, 20, 300)
    assert found.seconds is not None
    assert found.seconds[0] == found.seconds[1]
    assert found.seconds[0] > 0
    assert len(found.lines()) == 4
    assert "…" not in found.lines()[1]


@pytest.mark.parametrize(
    "ids", [["a", None, "line-2"], ["line-2", None], [None, "line-1", "line-3"]]
)
def test_id_that_a_line_without_one_has_is_an_error_of_the_second(
    engine: Engine, out: Path, ids: list[str | None]
) -> None:
    source = out.with_name("in.jsonl")
    source.write_text("".join(json.dumps({"id": id, "prompt": "p"}) + "\n" for id in ids))
    run_file(source, out, engine=engine)
    assert run_file(source, out, engine=engine).n_before == len(ids)
    errors = [r["error"] and r["error"]["code"] for r in records(out)]
    assert sorted(errors, key=str) == [None] * (len(ids) - 1) + ["duplicate_custom_id"]
    assert [result for _, result in stream_file(source, engine)].count(None) == 1
    assert check_file(source, engine=engine).n_by_code == {"duplicate_custom_id": 1}


@pytest.mark.parametrize("ids", [["a", "line-2"], ["a", None]])
def test_no_two_records_share_an_id_that_a_line_without_one_took_or_gave(
    engine: Engine, out: Path, ids: list[str | None]
) -> None:
    source = out.with_name("in.jsonl")
    for asked in (ids, ["a", None if ids[1] else "line-2"], ids):
        source.write_text("".join(json.dumps({"id": id, "prompt": "p"}) + "\n" for id in asked))
        run_file(source, out, engine=engine, limit=2)
        assert sorted(r["id"] for r in records(out)) == ["a", "line-2"]


def test_records_of_lines_that_are_gone_stay_and_are_named(
    engine: Engine, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = out.with_name("in.jsonl")
    for n in (7, 3, 7):
        run_file(write_requests(source, n), out, engine=engine, progress=True)
        assert len(records(out)) == 7
        said = (
            "4 records belong to items that are not in the input any more"
            in capsys.readouterr().err
        )
        assert said == (n == 3)


def test_parquet_is_in_order_also_when_lines_have_moved(engine: Engine, out: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    source, target = out.with_name("in.jsonl"), out.with_name("out.parquet")
    for ids in (["a", "b", "gone"], ["new", "b", "a"]):
        source.write_text("".join(json.dumps({"id": id, "prompt": "p"}) + "\n" for id in ids))
        run_file(source, target, engine=engine, output_format="parquet")
    assert parquet.read_table(target)["id"].to_pylist() == ["new", "b", "a", "gone"]
    assert sort_in_place(target) == {target: Sorted(4, 1)}


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"cache_key": "k", "save_cache": True}, None),
        ({"cache_key": "none"}, None),
        ({"cache_key": "none", "cache_required": True}, "CacheError"),
        ({"save_cache": True}, "ConfigError"),
        ({"cache_key": "k", "save_cache": True, "n": 2}, "ConfigError"),
        ({"prefill_only": True, "n": 2}, "ConfigError"),
        ({"prefill_only": True}, None),
        ({"n_discard": 16, "n_keep": 4, "max_tokens": 200}, None),
        ({"n": 3, "best_of": 8}, None),
        ({"adapter": "unknown"}, "ConfigError"),
        ({"max_tokens": 200}, None),
        ({"max_tokens": 200, "strict_max_tokens": True}, "PromptTooLongError"),
    ],
)
def test_every_option_of_a_line_works_or_is_a_typed_record(
    tmp_path: Path, options: dict[str, Any], error: str | None
) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text(json.dumps({"id": "a", "prompt": "question", "options": options}) + "\n")
    backend = FakeBackend(4, 128, 64, memory=can_all(512))
    with Engine(backend, options=SHORT, threaded=False, cache_dir=tmp_path / "cache") as engine:
        run_file(source, tmp_path / "out.jsonl", engine=engine)
    [record] = records(tmp_path / "out.jsonl")
    assert (record["error"] and record["error"]["type"]) == error
    assert (record["finish_reason"] == "error") == (error is not None)


def test_adapter_for_all_that_is_not_loaded_fails_at_once(
    source: Path, out: Path, tmp_path: Path
) -> None:
    backend = FakeBackend(4, 128, 64)
    backend.adapters = ("sql", "terse")
    options = {"adapter": "sqI"}
    with Engine(backend, options=SHORT, threaded=False) as engine:
        for call in (
            lambda: run_file(source, out, engine=engine, options=options),
            lambda: stream_file(source, engine, options=options),
            lambda: check_file(source, engine=engine, options=options),
            lambda: estimate_file(source, engine=engine, options=options),
            lambda: engine.run(iter(["a"]), options=options),
        ):
            with pytest.raises(ConfigError, match="'sqI' is not loaded; loaded are: sql, terse"):
                call()
    assert not out.exists()


class Notes(SilentView):
    """Keeps what is said."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, line: str) -> None:
        self.lines.append(line)


def test_report_of_a_later_part_counts_the_earlier_and_stays_without_work(
    engine: Engine, tmp_path: Path, out: Path
) -> None:
    source = write_requests(tmp_path / "in.jsonl", 9)
    places: dict[str, Any] = {"report": out.with_name("r.html"), "trace": out.with_name("t.json")}
    run_file(source, out, engine=engine, limit=5, **places)
    run_file(source, out, engine=engine, **places)
    assert "none failed; 5 in earlier runs" in places["report"].read_text()
    names = {event.get("name") for event in json.loads(places["trace"].read_text())}
    assert {"run", "deliver"} <= names
    before = [path.read_bytes() for path in places.values()]
    assert run_file(source, out, engine=engine, **places).n_before == 9
    assert [path.read_bytes() for path in places.values()] == before


@pytest.fixture
def lost(tmp_path: Path) -> Path:
    """A report whose folder is gone when it is to be written."""
    (tmp_path / "there").mkdir()
    return tmp_path / "there" / "report.html"


def test_report_that_cannot_be_written_costs_no_answer(
    engine: Engine, tmp_path: Path, lost: Path
) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    source, out = tmp_path / "in.csv", tmp_path / "out.parquet"
    source.write_text("prompt\na\nb\nc\n")
    said: dict[str, Any] = {"engine": engine, "output_format": "parquet"}
    run_file(source, out, **said)

    def remove(item: Item, result: BatchResult | None) -> None:
        lost.parent.rmdir()

    source.write_text("prompt\nx\nb\n")
    with pytest.raises(ConfigError, match="the report cannot be written to "):
        run_file(source, out, report=lost, on_result=remove, **said)
    assert parquet.read_table(out)["prompt"].to_pylist() == ["x", "b"]


@pytest.mark.parametrize("kind", [LookupError, Interrupted])
def test_report_that_cannot_be_written_hides_no_other_end(
    engine: Engine, source: Path, out: Path, lost: Path, kind: type[BaseException]
) -> None:
    stopper, view = Stopper(lambda words: None), Notes()

    def end(item: Item, result: BatchResult | None) -> None:
        if lost.parent.exists():
            lost.parent.rmdir()
        if kind is LookupError:
            raise LookupError("mine")
        stopper.press()

    with pytest.raises(kind):
        run_file(
            source, out, engine=engine, report=lost, on_result=end, stop=stopper, progress=view
        )
    assert [line for line in view.lines if "the report cannot be written" in line]


def test_report_and_trace_name_the_model_and_items_by_number_and_id(
    engine: Engine, out: Path
) -> None:
    report, trace = out.with_name("r.html"), out.with_name("t.json")
    ids: list[str | None] = ["a\n<b>\u202e", "x" * 100, None]
    source = out.with_name("in.jsonl")
    source.write_text("".join(json.dumps({"id": id, "prompt": "p"}) + "\n" for id in ids))
    engine.model_name = "mine"
    run_file(source, out, engine=engine, report=report, trace=trace)
    names = {e["name"] for e in json.loads(trace.read_text()) if e.get("cat") == "request"}
    seen = {name.split("-", 1)[1] for name in names}  # without what tells runs of one engine apart
    assert seen == {r"1 'a\n<b>\u202e'", f"2 '{'x' * 39}…'", "3"}
    assert r"1 &#39;a\n&lt;b&gt;\u202e&#39;" in report.read_text()
    assert "mine, " in report.read_text()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "the prompt has 200 tokens, but a slot holds 128"),
        (
            {"max_tokens": 100, "strict_max_tokens": True},
            "the prompt has 40 tokens and its answer needs 100 more, but a slot holds",
        ),
        ({"tool_choice": "required"}, "tool_choice='required' needs tools"),
    ],
    ids=str,
)
@pytest.mark.parametrize("is_shuffled", [False, True])
def test_what_the_engine_would_refuse_ends_a_strict_run_before_it_begins(
    engine: Engine,
    tmp_path: Path,
    out: Path,
    options: dict[str, Any],
    words: str,
    is_shuffled: bool,
) -> None:
    source = write_requests(tmp_path / "in.jsonl", 20)
    wrong = {"id": "wrong", "tokens": [5] * (40 if options else 200), "options": options}
    with source.open("a") as file:
        file.write(f"{json.dumps(wrong)}\n{json.dumps({'tokens': [5] * 300})}\n")
    asked: dict[str, Any] = {"engine": engine, "shuffle": is_shuffled}
    with pytest.raises(ConfigError, match=rf"in\.jsonl, line 21: .*{words}"):
        run_file(source, out, strict=True, **asked)
    assert not out.exists()
    found = check_file(source, engine=engine)
    assert [line.split(": ")[0] for line in found.first] == [
        f"{source}, line {n}" for n in (21, 22)
    ]
    assert words in found.first[0]
    assert run_file(source, out, **asked).n_failed == 2
    [record] = [r for r in records(out) if r["id"] == "wrong"]
    assert record["error"]["message"].startswith(words.partition(",")[0])  # without an id


CALL = {
    "type": "function",
    "function": {"name": "f", "parameters": {"properties": {"a": {"type": "strin"}}}},
}


@pytest.mark.real
def test_structure_that_cannot_compile_is_told_by_check_strict_and_run(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "A"}]
    good = {"messages": chat, "options": {"regex": "[ab]"}}
    with cbatch.load(
        parallel=2, ctx_per_seq=1024, chat_template=call_runs.template("hermes")
    ) as real:
        for wrong in (
            {"grammar": "((("},
            {"regex": "("},
            {"json_schema": {"type": "strin"}},
            {"tools": [CALL], "tool_choice": "required"},
        ):
            name = next(iter(wrong))
            source, out = tmp_path / f"{name}.jsonl", tmp_path / f"{name}.out.jsonl"
            lines = [json.dumps(line) for line in (good, {"messages": chat, "options": wrong})]
            source.write_text("\n".join(lines))
            n_steps = real.stats().n_steps
            found = check_file(source, engine=real)
            assert real.stats().n_steps == n_steps
            with pytest.raises(ConfigError) as refused:
                run_file(source, out, engine=real, strict=True)
            assert not out.exists()
            run_file(source, out, engine=real)
            [error] = [r["error"] for r in records(out) if r["error"]]
            assert error["type"] == "GrammarError"
            assert (found.n_items, found.n_by_code) == (2, {"refused": 1})
            assert f"line 2: {error['message']}" in found.first[0]
            assert error["message"] in str(refused.value)


class CountingGrammars(FakeGrammars):
    """Knows what was compiled, and by which threads."""

    def __init__(self) -> None:
        self.compiled: list[str] = []
        self.threads: set[str] = set()

    def compile(self, grammar: Grammar) -> FakeConstraint:
        self.compiled.append(grammar.text)
        self.threads.add(threading.current_thread().name)
        return super().compile(grammar)


@pytest.mark.parametrize("threaded", [False, True])
def test_check_compiles_each_structure_once_where_the_run_does(
    tmp_path: Path, *, threaded: bool
) -> None:
    source, backend = tmp_path / "in.jsonl", FakeBackend(4, 128, 64)
    backend.grammars = grammars = CountingGrammars()
    said = [{"prompt": "p", "options": {"regex": r}} for r in ("1", "(", "0", "(", "1") * 5]
    source.write_text("".join(json.dumps(line) + "\n" for line in said))
    with Engine(backend, options=SHORT, threaded=threaded) as engine:
        found = check_file(source, engine=engine)
    assert grammars.compiled == ["1", "(", "0"]
    assert grammars.threads == {"cbatch-compiler" if threaded else threading.current_thread().name}
    assert (found.n_good, found.n_by_code) == (15, {"refused": 10})
    assert "line 2: regex: must be numbers PARITY:LAST:BAD" in found.first[0]


def test_check_whose_engine_is_closed_blames_no_item(tmp_path: Path) -> None:
    class ClosingGrammars(FakeGrammars):
        def compile(self, grammar: Grammar) -> FakeConstraint:
            closing.close()
            return super().compile(grammar)

    source, backend = tmp_path / "in.jsonl", FakeBackend(4, 128, 64)
    backend.grammars = ClosingGrammars()
    said = [{"prompt": "p", "options": {"regex": r}} for r in "10"]
    source.write_text("".join(json.dumps(line) + "\n" for line in said))
    with (
        Engine(backend, options=SHORT, threaded=False) as closing,
        pytest.raises(EngineClosedError),
    ):
        check_file(source, engine=closing)


@pytest.mark.parametrize(("limit", "ending"), [(99, "limit"), (100, "done"), (101, "done")])
def test_limit_that_leaves_nothing_has_stopped_nothing(
    engine: Engine, source: Path, out: Path, limit: int, ending: str
) -> None:
    summary = run_file(source, out, engine=engine, limit=limit)
    assert (summary.ending, summary.n_done) == (ending, min(limit, 100))
    assert len(answers(out)) == min(limit, 100)
    assert run_file(source, out, engine=engine).n_done == 100 - min(limit, 100)


def test_report_and_summary_say_the_same_of_the_slots(
    engine: Engine, tmp_path: Path, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, report = write_requests(tmp_path / "in.jsonl", 5), tmp_path / "report.html"
    with source.open("a") as file:
        file.write(json.dumps({"prompt": "long", "options": {"max_tokens": 90}}) + "\n")
    view = PlainView(summary_lines)
    run_file(source, out, engine=engine, report=report, progress=view)
    said = re.search(r"slots .* at most, ([\d.]+) on average", capsys.readouterr().err)
    shown = re.search(r"Slots in use</dt><dd class=\"value\">([\d.]+)<", report.read_text())
    curve = re.search(r"Slots in use over time: mean ([\d.]+),", report.read_text())
    found = [float(match[1]) for match in (said, shown, curve) if match]
    assert found == [found[0]] * 3
