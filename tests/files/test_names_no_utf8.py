"""Names of files that are no UTF-8: read, written, gone on with, sorted, and told in words that anybody can read."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import cbatch
from cbatch.errors import ConfigError
from cbatch.files.file_run import run_file
from cbatch.files.output.sorting import sort_in_place, sort_to
from cbatch.files.preview import check_file
from tests.files.runs import records, write_requests

if TYPE_CHECKING:
    from cbatch.engine import Engine

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs names of any bytes")

CLI = Path(str(cbatch.__file__)).parent.parent


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder whose name is no UTF-8 either."""
    made = tmp_path / os.fsdecode(b"f\xfflder")
    made.mkdir()
    return made


def named(folder: Path, name: bytes) -> Path:
    return folder / os.fsdecode(name)


def lines_of(path: Path) -> list[dict[str, Any]]:
    """Return the records of a file, which is UTF-8 and holds no half of a surrogate pair."""
    text = path.read_bytes().decode("utf-8")
    json.dumps(json.loads(f"[{','.join(text.splitlines())}]"), ensure_ascii=False).encode("utf-8")
    return records(path)


def test_every_file_of_a_run_may_have_such_a_name(engine: Engine, folder: Path) -> None:
    source = write_requests(named(folder, b"in\xfe.jsonl"), 5)
    with source.open("a") as file:
        file.write("{broken\n")
    out, errors = named(folder, b"out\xff.jsonl"), named(folder, b"err\xfc.jsonl")
    more: dict[str, Any] = {
        "errors": errors,
        "report": named(folder, b"rep\xfdort.html"),
        "trace": named(folder, b"tr\xfdace.json"),
    }
    for limit in (2, 2, None):
        summary = run_file(source, out, engine=engine, limit=limit, **more)
    assert (summary.n_items, summary.n_errors) == (6, 1)
    assert len(lines_of(out)) == 5
    [error] = lines_of(errors)
    assert "in\\xfe.jsonl, line 6: not JSON" in error["error"]["message"]
    assert more["report"].read_bytes().decode("utf-8").startswith("<!doctype html>")
    assert more["trace"].read_bytes().decode("utf-8").endswith("\n]\n")
    assert [counts.n_records for counts in sort_in_place(out).values()] == [5, 1]
    assert sort_to(out, named(folder, b"s\xff.jsonl")).n_records == 5
    moved = folder.with_name(os.fsdecode(b"m\xffved"))
    shutil.move(folder, moved)
    again = moved / source.name
    more = {name: moved / path.name for name, path in more.items()}
    assert (
        run_file(again, moved / out.name, engine=engine, **more).n_before == 5
    )  # and where the wrong one stands


@pytest.mark.parametrize("suffix", ["csv", "parquet", "arrow", "txt"])
def test_tables_may_have_such_names(engine: Engine, folder: Path, suffix: str) -> None:
    source = named(folder, b"t\xff." + suffix.encode())
    target = named(folder, b"out\xff." + (b"jsonl" if suffix == "txt" else suffix.encode()))
    if suffix in ("parquet", "arrow"):
        pyarrow = pytest.importorskip("pyarrow")
        parquet = pytest.importorskip("pyarrow.parquet")
        table = pyarrow.table({"prompt": ["a", ""]})
        with source.open("wb") as file:
            if suffix == "parquet":
                parquet.write_table(table, file)
            else:
                with pyarrow.ipc.new_file(file, table.schema) as writer:
                    writer.write_table(table)
    else:
        source.write_text("prompt\na\n" if suffix == "csv" else "a\nb\n")
    for n_before in (0, 2 if suffix != "csv" else 1):
        assert run_file(source, target, engine=engine).n_before == n_before
    assert target.stat().st_size > 0
    other = named(folder, b"u\xff." + suffix.encode())
    source.rename(other)
    assert run_file(other, target, engine=engine).is_complete
    if suffix == "csv":
        source.write_text("prompt\nb\n")
        with pytest.raises(ConfigError, match=r"first input was u\\xff\.csv, is now t\\xff\.csv"):
            run_file(source, target, engine=engine)
    assert run_file(other, target, engine=engine, force=True).is_complete


def test_words_on_such_files_can_be_read(engine: Engine, folder: Path) -> None:
    source = named(folder, b"in\xfe.jsonl")
    with pytest.raises(ConfigError) as raised:
        check_file(source, engine=engine)
    assert "in\\xfe.jsonl: cannot be read" in str(raised.value)
    source.write_text("{broken\n")
    [first] = check_file(source, engine=engine).first
    assert "in\\xfe.jsonl, line 1" in first
    first.encode("utf-8")


@pytest.mark.parametrize("name", ["template", "system"])
def test_text_that_is_no_utf8_is_refused_at_once(engine: Engine, tmp_path: Path, name: str) -> None:
    source, out = tmp_path / "in.csv", tmp_path / "out.csv"
    source.write_text("prompt\na\n")
    asked: dict[str, Any] = {"template": "{prompt}", name: os.fsdecode(b"{prompt} \xff")}
    with pytest.raises(ConfigError, match=rf"{name} .*not UTF-8, at character 10"):
        run_file(source, out, engine=engine, **asked)
    assert not out.exists()


def command(folder: Path, *args: object) -> subprocess.CompletedProcess[bytes]:
    """Run a command as a shell does: its words are bytes."""
    return subprocess.run(
        [sys.executable, "-m", "cbatch.cli", *(os.fsencode(str(arg)) for arg in args)],
        capture_output=True,
        cwd=folder,
        env={**os.environ, "PYTHONWARNINGS": "error"},
        check=False,
    )


def test_commands_take_such_names_and_say_them_to_people_and_programs(
    folder: Path, test_model: Path
) -> None:
    source = write_requests(named(folder, b"in\xfe.jsonl"), 2, max_tokens=2)
    with source.open("a") as file:
        file.write("{broken\n")
    model, out = named(folder, b"m\xff.gguf"), named(folder, b"out\xff.jsonl")
    model.symlink_to(test_model)
    asked = ("run", source, "-o", out, "-m", model, "--threads", 1)
    done = command(folder, "--log-level", "info", *asked, "--output-format", "openai", "--json")
    assert done.returncode == 1, done.stderr
    for line in done.stderr.decode("utf-8").splitlines():
        json.dumps(json.loads(line), ensure_ascii=False).encode("utf-8")
    found = lines_of(out)
    assert {r["response"]["body"]["model"] for r in found if r["response"]} == {"m\\xff"}
    for args in (asked, ("run", named(folder, b"n\xff.jsonl"), "-o", out), ("sort", out)):
        said = command(folder, *args).stderr.decode("utf-8")
        assert "Traceback" not in said
        assert "UnicodeEncodeError" not in said
    assert command(folder, "info", model).returncode == 0
    assert command(folder, "ask", "Hi", "-m", model, "--max-tokens", 2).returncode == 0


@pytest.mark.real
@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("run", "in.csv", "-o", "out.csv", "--system", b"\xff"), "system "),
        (("run", "in.csv", "-o", "out.csv", "--chat-template", b"\xff"), "chat_template "),
        (("run", "in.csv", "-o", "out.csv", "--set", b"cache_key=\xff"), "cache_key "),
        (("run", "in.csv", "-o", "out.csv", "--adapter", b"\xff=x.gguf"), "an adapter's name"),
        (("ask", b"\xff"), "the question "),
    ],
    ids=str,
)
def test_words_that_are_no_text_are_refused_by_name(
    tmp_path: Path, args: tuple[str | bytes, ...], words: str
) -> None:
    (tmp_path / "in.csv").write_text("prompt\na\n")
    done = command(tmp_path, *(os.fsdecode(arg) for arg in args))
    assert done.returncode == 2
    said = done.stderr.decode("utf-8")
    assert said.startswith(f"cbatch: {words}"), said
    assert said.count("\n") == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in.csv"]
