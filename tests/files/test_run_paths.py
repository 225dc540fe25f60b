"""Files of a run in the wrong place: nothing that is there is lost."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from cbatch.errors import ConfigError
from cbatch.files.file_run import run_file
from cbatch.progress import SilentView
from tests.files.runs import make_engine, write_requests

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cbatch.engine import Engine


@pytest.fixture
def engine() -> Iterator[Engine]:
    with make_engine() as made:
        yield made


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_requests(tmp_path / "in.jsonl", 3)


@pytest.mark.parametrize("name", ["errors", "report", "trace"])
def test_file_beside_the_output_in_place_of_the_input_is_refused(
    engine: Engine, source: Path, name: str
) -> None:
    asked = source.read_bytes()
    more: dict[str, Any] = {name: source}
    with pytest.raises(ConfigError, match=r"in\.jsonl: is the input"):
        run_file(source, source.with_name("out"), engine=engine, **more)
    assert source.read_bytes() == asked


@pytest.fixture
def redirected(source: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The input, which stdin is redirected from."""
    with source.open() as file:
        monkeypatch.setattr("sys.stdin", file)
        yield source


@pytest.mark.parametrize(
    ("name", "force"), [("output", True), ("errors", False), ("report", True), ("trace", False)]
)
def test_file_that_stdin_is_redirected_from_is_not_written_over(
    engine: Engine, redirected: Path, name: str, force: bool
) -> None:
    asked = redirected.read_bytes()
    places: dict[str, Any] = {"output": redirected.with_name("out"), name: redirected}
    with pytest.raises(ConfigError, match=r"in\.jsonl: is the input"):
        run_file("-", engine=engine, force=force, format="cbatch", **places)
    assert redirected.read_bytes() == asked
    assert [path.name for path in redirected.parent.iterdir()] == ["in.jsonl"]


def test_file_that_stdin_is_redirected_from_is_not_read_twice(
    engine: Engine, redirected: Path, tmp_path: Path
) -> None:
    for other in (str(redirected), str(tmp_path / "*.jsonl")):
        for sources in (["-", other], [other, "-"]):
            with pytest.raises(ConfigError, match="is named twice"):
                run_file(sources, tmp_path / "out", engine=engine)


def test_redirected_stdin_is_read(engine: Engine, redirected: Path, tmp_path: Path) -> None:
    assert run_file("-", tmp_path / "out", engine=engine, format="cbatch").n_done == 3


def test_stdout_that_goes_to_the_input_is_refused(
    engine: Engine, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = source.read_bytes()
    with source.open("a") as file:
        monkeypatch.setattr("sys.stdout", file)
        with pytest.raises(ConfigError, match="stdout is redirected to the input"):
            run_file(source, "-", engine=engine)
    assert source.read_bytes() == asked


@pytest.mark.parametrize("name", ["report", "trace"])
@pytest.mark.parametrize("content", ["precious", "<!doctype html>\n<p>mine", "[\n", '[{"a": 1}]'])
def test_report_and_trace_replace_nothing_foreign_unless_forced(
    engine: Engine, source: Path, name: str, content: str
) -> None:
    place = source.with_name("place")
    place.write_text(content)
    more: dict[str, Any] = {"engine": engine, name: place}
    with pytest.raises(
        ConfigError, match=f"place: exists and is not a {name} of cbatch: .*--force"
    ):
        run_file(source, source.with_name("out"), **more)
    assert place.read_text() == content
    assert not source.with_name("out").exists()
    run_file(source, source.with_name("out"), force=True, **more)
    assert place.read_text() != content


def test_report_and_trace_replace_those_of_an_earlier_run(engine: Engine, source: Path) -> None:
    more: dict[str, Any] = {name: source.with_name(name) for name in ("report", "trace")}
    for place in more.values():
        place.touch()
    for _ in range(2):
        assert run_file(source, source.with_name("out"), engine=engine, **more).is_complete
    more["report"], more["trace"] = more["trace"], more["report"]
    with pytest.raises(ConfigError, match="is not a report of cbatch"):
        run_file(source, source.with_name("out"), engine=engine, **more)


def test_adapter_is_not_written_over(source: Path) -> None:
    adapter = source.with_name("adapter.gguf")
    adapter.write_bytes(b"weights")
    more: dict[str, Any] = {"adapters": {"a": adapter}, "force": True, "report": adapter}
    with pytest.raises(ConfigError, match=r"adapter\.gguf: is the input"):
        run_file(source, source.with_name("out"), **more)
    assert adapter.read_bytes() == b"weights"


def test_later_part_of_a_split_model_is_not_written_over(source: Path) -> None:
    first, second = (source.with_name(f"m-0000{i}-of-00002.gguf") for i in (1, 2))
    for part in (first, second):
        part.write_bytes(b"weights")
    with pytest.raises(ConfigError, match=r"00002\.gguf: is the input"):
        run_file(source, source.with_name("out"), model=first, force=True, report=second)
    assert second.read_bytes() == b"weights"


@pytest.mark.parametrize(
    ("name", "taken"),
    [
        *(("errors", "out"), ("report", "link"), ("trace", "hard"), ("errors", "out.manifest")),
        *(("report", "out.manifest-wal"), ("trace", ".out.cbatch-part")),
    ],
)
def test_file_beside_the_output_in_its_place_is_refused(
    engine: Engine, source: Path, name: str, taken: str
) -> None:
    out = source.with_name("out")
    run_file(source, out, engine=engine)
    source.with_name("link").symlink_to("out")
    source.with_name("hard").hardlink_to(out)
    before = out.read_bytes()
    more: dict[str, Any] = {name: source.with_name(taken)}
    with pytest.raises(ConfigError, match=r"is needed for .*out already: give another file"):
        run_file(source, out, engine=engine, **more)
    assert out.read_bytes() == before


def test_one_file_for_report_and_trace_is_refused(engine: Engine, source: Path) -> None:
    both: dict[str, Any] = {name: source.with_name("both") for name in ("report", "trace")}
    with pytest.raises(ConfigError, match=r"both: is needed for .*both"):
        run_file(source, source.with_name("out"), engine=engine, **both)


@pytest.mark.parametrize("name", ["x.manifest", ".x.cbatch-part", "x.records"])
def test_input_where_the_run_keeps_its_own_files_is_refused(
    engine: Engine, tmp_path: Path, name: str
) -> None:
    source = write_requests(tmp_path / name, 3)
    asked = source.read_bytes()
    with pytest.raises(ConfigError, match="is the input"):
        run_file(source, tmp_path / "x", engine=engine, format="cbatch", force=True)
    assert source.read_bytes() == asked


@pytest.mark.parametrize("name", ["errors", "report", "trace"])
def test_stdout_is_for_answers_alone(
    engine: Engine, source: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(source.parent)
    more: dict[str, Any] = {name: "-"}
    with pytest.raises(ConfigError, match="-: stdout is only for answers"):
        run_file(source, "out", engine=engine, **more)
    assert [path.name for path in source.parent.iterdir()] == ["in.jsonl"]


def test_errors_beside_a_pipe_replace_no_file_unless_forced(engine: Engine, source: Path) -> None:
    errors = source.with_name("errors")
    errors.write_text("precious")
    with pytest.raises(ConfigError, match="errors: exists already"):
        run_file(source, "/dev/null", engine=engine, errors=errors)
    assert errors.read_text() == "precious"
    run_file(source, "/dev/null", engine=engine, errors=errors, force=True)
    assert errors.read_text() == ""


def test_table_of_columns_has_no_file_of_errors(engine: Engine, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    source = tmp_path / "in.csv"
    source.write_text("prompt\na\n")
    said: dict[str, Any] = {"errors": tmp_path / "errors", "output_format": "parquet"}
    with pytest.raises(ConfigError, match="errors: failed rows are written into the parquet file"):
        run_file(source, tmp_path / "out.parquet", engine=engine, **said)


def test_pattern_finds_no_files_of_the_run_itself(engine: Engine, tmp_path: Path) -> None:
    write_requests(tmp_path / "a.jsonl", 3)
    more: dict[str, Any] = {"errors": tmp_path / "errors.jsonl", "trace": tmp_path / "trace.jsonl"}
    for n_before in (0, 3):
        summary = run_file(tmp_path / "*", tmp_path / "out.jsonl", engine=engine, **more)
        assert (summary.n_items, summary.n_before) == (3, n_before)


def test_report_to_a_pipe_leaves_it_a_pipe(engine: Engine, source: Path) -> None:
    report = source.with_name("report")
    os.mkfifo(report)
    reader = os.open(report, os.O_RDONLY | os.O_NONBLOCK)
    run_file(source, source.with_name("out"), engine=engine, report=report)
    assert stat.S_ISFIFO(report.stat().st_mode)
    assert os.read(reader, 15) == b"<!doctype html>"
    os.close(reader)


@pytest.mark.skipif(not Path("/dev/full").is_char_device(), reason="needs /dev/full")
def test_trace_on_a_full_disk_ends_early_and_says_so(
    engine: Engine, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    view = SilentView()
    monkeypatch.setattr(view, "say", said.append)
    more: dict[str, Any] = {"trace": Path("/dev/full"), "progress": view}
    assert run_file(source, source.with_name("out"), engine=engine, **more).is_complete
    assert said == ["/dev/full: the trace ends early: No space left on device"]
