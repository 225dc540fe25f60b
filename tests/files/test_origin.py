"""Another input than that of the answers that are there: told apart from one that was edited, or has moved."""

from __future__ import annotations

import json
import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from cbatch.errors import ConfigError
from cbatch.files.file_run import run_file
from cbatch.files.input import item_stream as reading_module
from tests.files.runs import write_requests

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from cbatch.engine import Engine


def write_rows(path: Path, rows: str) -> Path:
    """A table, or lines without ids, of one prompt for each letter."""
    path.parent.mkdir(exist_ok=True)
    if path.suffix == ".csv":
        path.write_text("prompt\n" + "".join(f"{row}\n" for row in rows))
    else:
        path.write_text("".join(json.dumps({"prompt": row}) + "\n" for row in rows))
    return path


@contextmanager
def piped(path: Path) -> Iterator[None]:
    """Have stdin read from a pipe with what stands in a file."""
    from_fd, to_fd = os.pipe()
    os.write(to_fd, path.read_bytes())
    os.close(to_fd)
    with os.fdopen(from_fd) as stdin, pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.stdin", stdin)
        yield


def refuse(source: Any, out: Path, engine: Engine, words: str, **more: Any) -> None:
    """Check that nothing is changed, also not by the same command once more."""
    before = out.read_bytes()
    for _ in range(2):
        with pytest.raises(ConfigError, match=words):
            run_file(source, out, engine=engine, **more)
        assert out.read_bytes() == before


@pytest.fixture
def answered(tmp_path: Path) -> Path:
    return tmp_path / "answers"


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("a.jsonl", "b.jsonl"),
        ("a.csv", "b.csv"),
        ("d1/x.csv", "d2/x.csv"),
        ("d1/x.jsonl", "d2/x.jsonl"),
    ],
)
def test_other_input_in_the_place_of_the_first_is_refused(
    engine: Engine, tmp_path: Path, answered: Path, first: str, second: str
) -> None:
    one, other = write_rows(tmp_path / first, "abc"), write_rows(tmp_path / second, "xyz")
    run_file(one, answered, engine=engine)
    words = rf"has the answers of another input: first input was {first}, is now {second}.*--force"
    refuse(other, answered, engine, words)
    assert run_file(one, answered, engine=engine).n_before == 3
    assert run_file(other, answered, engine=engine, force=True).n_done == 3
    refuse(one, answered, engine, f"first input was {second}, is now {first}")


@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_other_pipe_in_the_place_of_the_first_is_refused(
    engine: Engine, tmp_path: Path, answered: Path, suffix: str
) -> None:
    said: dict[str, Any] = {"format": {"csv": "csv", "jsonl": "cbatch"}[suffix]}
    with piped(write_rows(tmp_path / f"a.{suffix}", "abc")):
        run_file("-", answered, engine=engine, limit=2, **said)
    before = answered.read_bytes()
    with (
        piped(write_rows(tmp_path / f"b.{suffix}", "xyz")),
        pytest.raises(
            ConfigError, match="first input was a pipe, is now a pipe, and its items differ"
        ),
    ):
        run_file("-", answered, engine=engine, **said)
    assert answered.read_bytes() == before
    with piped(write_rows(tmp_path / f"a.{suffix}", "abcde")):
        summary = run_file("-", answered, engine=engine, **said)
    assert (summary.n_before, summary.n_done) == (2, 3)
    with piped(write_rows(tmp_path / f"b.{suffix}", "xyz")):
        assert run_file("-", answered, engine=engine, force=True, **said).n_done == 3


@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
@pytest.mark.parametrize("shuffle", [False, True])
def test_input_that_was_edited_or_has_moved_is_the_same(
    engine: Engine, tmp_path: Path, suffix: str, shuffle: bool
) -> None:
    source, out = write_rows(tmp_path / "d" / f"a.{suffix}", "abc"), tmp_path / "d" / "out"
    run_file(source, out, engine=engine, shuffle=shuffle)
    for rows, n_before in (("abcdef", 3), ("xbcdef", 5), ("uvwxyz", 0), ("uv", 2), ("uvwxyz", 2)):
        summary = run_file(write_rows(source, rows), out, engine=engine, shuffle=shuffle)
        assert (summary.n_items, summary.n_before) == (len(rows), n_before)
    (tmp_path / "d").rename(tmp_path / "e")  # both together
    source, out = tmp_path / "e" / source.name, tmp_path / "e" / "out"
    assert run_file(source, out, engine=engine, shuffle=shuffle).n_before == 6
    source = source.rename(tmp_path / f"new.{suffix}")  # the input alone, and then a line is added
    write_rows(source, "uvwxyz!")
    assert run_file(source, out, engine=engine, shuffle=shuffle).n_before == 6
    with piped(source):
        said: dict[str, Any] = {"format": {"csv": "csv", "jsonl": "cbatch"}[suffix]}
        assert run_file("-", out, engine=engine, shuffle=shuffle, **said).n_before == 7


def test_moved_input_without_a_first_answer_is_known_by_its_first_item(
    engine: Engine, tmp_path: Path, answered: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading_module, "N_LOOKED_AHEAD", 2)
    rows = [
        {"prompt": letter, "options": {"max_tokens": n}}
        for letter, n in zip("abcd", (1, 1, 9, 9), strict=True)
    ]
    lines = [json.dumps(row) + "\n" for row in rows]
    source, moved = tmp_path / "in.jsonl", tmp_path / "moved.jsonl"
    source.write_text("".join(lines))
    assert run_file(source, answered, engine=engine, limit=2).n_done == 2  # the longest first
    moved.write_text("".join(reversed(lines)))
    refuse(moved, answered, engine, "and its items differ")
    source.rename(moved)
    assert run_file(moved, answered, engine=engine).n_before == 2


def test_files_behind_the_first_are_those_that_were(
    engine: Engine, tmp_path: Path, answered: Path
) -> None:
    a, b, c = (write_rows(tmp_path / f"{x}.csv", x * 3) for x in "abc")
    run_file(a, answered, engine=engine)
    assert run_file([a, b], answered, engine=engine).n_before == 3
    refuse([a, c], answered, engine, r"other inputs were b\.csv, are now c\.csv")
    refuse(a, answered, engine, r"other inputs were b\.csv, are now none")
    refuse([b, a], answered, engine, r"first input was a\.csv, is now b\.csv")
    assert run_file([a, b, c], answered, engine=engine).n_before == 6


def test_other_requests_under_the_same_ids_are_refused(
    engine: Engine, tmp_path: Path, answered: Path
) -> None:
    for name in "abc":
        lines = [json.dumps({"id": f"request-{i}", "prompt": f"{name} {i}"}) for i in range(9)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    run_file(tmp_path / "a.jsonl", answered, engine=engine)
    refuse(tmp_path / "b.jsonl", answered, engine, r"first input was a\.jsonl, is now b\.jsonl")
    lines[:2] = (tmp_path / "a.jsonl").read_text().splitlines()[:2]
    (tmp_path / "c.jsonl").write_text("\n".join(lines))
    refuse(tmp_path / "c.jsonl", answered, engine, r"first input was a\.jsonl, is now c\.jsonl")


def test_requests_with_ids_take_no_places_of_lines_without(
    engine: Engine, tmp_path: Path, answered: Path
) -> None:
    source = write_requests(tmp_path / "in.jsonl", 9)
    run_file(write_rows(tmp_path / "a.jsonl", "abc"), answered, engine=engine)
    refuse(source, answered, engine, r"first input was a\.jsonl, is now in\.jsonl")
