"""`cbatch status`: how far an output is, without a model and without touching anything."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from cbatch.errors import ConfigError
from cbatch.files.file_run import run_file
from cbatch.files.file_status import RunStatus, status_of
from tests.cli.conftest import invoke, parse, start
from tests.files.runs import make_engine, write_requests

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from cbatch.engine import Engine


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with make_engine() as engine:
        yield engine


def files_in(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {p.name: (p.read_bytes(), p.stat().st_mtime_ns) for p in folder.iterdir()}


def test_done_failed_and_left_are_counted(engine: Engine, tmp_path: Path) -> None:
    source, out = write_requests(tmp_path / "in.jsonl", 10), tmp_path / "out.jsonl"
    text = source.read_text() + '{broken\n\n{"id": "r1", "prompt": "again"}\n'
    source.write_text(text)
    run_file(source, out, engine=engine, limit=4)
    assert status_of(out) == RunStatus(4, 0, 0, 12, 8)
    run_file(source, out, engine=engine)
    before = files_in(tmp_path)
    assert status_of(out) == RunStatus(10, 2, 0, 12, 0)
    assert files_in(tmp_path) == before
    source.write_text(text.replace('"r3"', '"new"'))
    assert status_of(out) == RunStatus(10, 2, 0, 12, 1)
    run_file(source, out, engine=engine)
    assert status_of(out) == RunStatus(11, 2, 1, 12, 0)


def test_the_home_is_meant_by_a_tilde(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    run_file(write_requests(tmp_path / "in.jsonl", 3), "~/out.jsonl", engine=engine)
    assert status_of("~/out.jsonl") == RunStatus(3, 0, 0, 3, 0)


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "parquet", "txt"])
def test_tables_are_counted_by_their_rows(engine: Engine, tmp_path: Path, suffix: str) -> None:
    source, out = tmp_path / f"in.{suffix}", tmp_path / f"out.{suffix}"
    said: dict[str, Any] = {"template": "{q}", "engine": engine}
    if suffix == "csv":
        source.write_text("q\na\nb\nc\n")
    elif suffix == "jsonl":
        source.write_text("".join(json.dumps({"q": q}) + "\n" for q in "abc"))
    elif suffix == "txt":
        source.write_text("a\nb\nc\n")
        out, said["template"] = out.with_suffix(".jsonl"), "{line}"
    else:
        pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pyarrow.table({"q": list("abc")}), source)
    for limit, done in ((2, 2), (None, 3)):
        run_file(source, out, limit=limit, **said)
        assert status_of(out) == RunStatus(done, 0, 0, 3, 3 - done)


def test_input_may_have_moved_or_be_a_pipe(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "a"
    folder.mkdir()
    out = folder / "out.jsonl"
    parts = [write_requests(folder / f"{i}.jsonl", 3) for i in "12"]
    parts[1].write_text(parts[1].read_text().replace('"r', '"s'))
    run_file(parts, out, engine=engine, limit=5)
    folder = folder.rename(tmp_path / "b")
    out = folder / out.name
    assert status_of(out) == RunStatus(5, 0, 0, 6, 1)
    monkeypatch.chdir(tmp_path)
    assert status_of(Path("b/out.jsonl")).n_left == 1
    (folder / "2.jsonl").rename(tmp_path / "elsewhere.jsonl")
    found = status_of(out)
    assert (found.n_left, found.n_done) == (None, 5)
    assert "2.jsonl: cannot be read: No such file" in found.lines()[2]
    assert status_of(out, [folder / "1.jsonl", tmp_path / "elsewhere.jsonl"]).n_left == 1
    with pytest.raises(ConfigError, match=r"none\.jsonl: cannot be read"):
        status_of(out, [tmp_path / "none.jsonl"])

    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDWR)
    os.write(reader, b'{"prompt": "a"}\n')
    run_file(pipe, tmp_path / "piped.jsonl", engine=engine, limit=1)
    os.close(reader)
    found = status_of(tmp_path / "piped.jsonl")
    assert found == RunStatus(1, 0, problem="the input was a pipe")


@pytest.mark.parametrize("seed", range(4))
def test_duplicates_of_a_shuffled_run_are_not_left(
    engine: Engine, tmp_path: Path, seed: int
) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    ids = ['"id": "a", ', '"id": "line-4", ', '"id": "a", ', "", '"id": "b", ', '"id": "b", ']
    source.write_text("".join(f'{{{id}"prompt": "x"}}\n' for id in ids))
    for limit in (3, None):
        run_file(source, out, engine=engine, limit=limit, shuffle=True, shuffle_seed=seed)
        found = status_of(out)
        assert found.n_left == len(ids) - found.n_done - found.n_failed
    assert found.n_left == 0


@pytest.mark.parametrize(("damage", "n_lost"), [("gone", 6), ("empty", 6), ("cut", 1)])
def test_records_that_are_not_in_the_file_any_more_are_lost(
    engine: Engine, tmp_path: Path, damage: str, n_lost: int
) -> None:
    source, out = write_requests(tmp_path / "in.jsonl", 6), tmp_path / "out.jsonl"
    run_file(source, out, engine=engine)
    if damage == "gone":
        out.unlink()
    else:
        os.truncate(out, 0 if damage == "empty" else out.stat().st_size - 1)
    before = files_in(tmp_path)
    found = status_of(out)
    assert found == RunStatus(6 - n_lost, 0, 0, 6, n_lost, n_lost=n_lost)
    assert f"lost    {n_lost}, not in the file any more" in found.lines()
    assert files_in(tmp_path) == before
    assert run_file(source, out, engine=engine).n_done == n_lost
    assert status_of(out) == RunStatus(6, 0, 0, 6, 0)


def test_errors_are_looked_for_in_their_own_file(engine: Engine, tmp_path: Path) -> None:
    source, out = write_requests(tmp_path / "in.jsonl", 3), tmp_path / "out.jsonl"
    source.write_text(source.read_text() + "{broken\n")
    (tmp_path / "wrong").mkdir()
    errors = tmp_path / "wrong" / "errors.jsonl"
    run_file(source, out, engine=engine, errors=errors)
    assert status_of(out) == RunStatus(3, 1, 0, 4, 0)
    errors.unlink()
    assert status_of(out) == RunStatus(3, 0, 0, 4, 1, n_lost=1)


def test_damaged_manifest_is_named_where_it_is(tmp_path: Path) -> None:
    out, manifest = tmp_path / "out.jsonl", tmp_path / "out.jsonl.manifest"
    manifest.write_bytes(b"no database")
    with pytest.raises(ConfigError) as caught:
        status_of(out)
    assert str(caught.value).startswith(f"{manifest}: is damaged")
    for folder in (tmp_path, Path(), Path("/")):
        with pytest.raises(ConfigError, match="is a directory: give a file"):
            status_of(folder)


def test_command_tells_people_and_programs(engine: Engine, tmp_path: Path) -> None:
    source, out = write_requests(tmp_path / "in.jsonl", 3), tmp_path / "out.jsonl"
    run_file(source, out, engine=engine, limit=1)
    done = invoke("status", out)
    assert (done.exit_code, done.stdout) == (0, "done    1\nfailed  0\nleft    2 of 3\n")
    [found] = parse(invoke("status", out, "--json").stdout)
    assert (found["n_done"], found["n_failed"], found["n_left"]) == (1, 0, 2)
    assert invoke("status", out, source).stdout == done.stdout
    none = invoke("status", tmp_path / "none.jsonl")
    assert (none.exit_code, none.stdout) == (2, "")
    assert "there is no manifest beside it" in none.stderr
    assert parse(invoke("status", tmp_path / "none.jsonl", "--json").stderr)[0]["event"] == "error"


def test_run_that_is_going_on_is_told_and_not_disturbed(
    write_input: Callable[..., Path], tmp_path: Path, test_model: Path
) -> None:
    out = tmp_path / "out.jsonl"
    short, endless = {"prompt": "a", "options": {"max_tokens": 2}}, {"ignore_eos": True}
    source = write_input(*[short] * 50, *[{"prompt": "b", "options": endless}] * 50)
    asked = ("--parallel", 2, "--threads", 1, "--ctx-per-seq", 30_000, "--quiet")
    with start("run", source, "-o", out, "-m", test_model, *asked) as process:
        while process.poll() is None and not (out.exists() and out.stat().st_size):
            time.sleep(0.01)
        while not (found := status_of(out)).n_done and process.poll() is None:
            time.sleep(0.01)  # the first bytes are there, and not committed yet
        assert process.poll() is None
        for number in (signal.SIGINT, signal.SIGINT):
            process.send_signal(number)
            time.sleep(0.1)
        process.communicate()
    assert process.returncode in (130, -signal.SIGINT)  # to a shell both are 130
    assert found.is_running
    assert found.n_items == 100
    assert 0 < found.n_done <= 50
    assert found.n_left == 100 - found.n_done
    assert found.lines()[-1] == "a run is writing to it now"
    after = status_of(out)
    assert not after.is_running
    assert after.n_done >= found.n_done
