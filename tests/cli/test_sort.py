"""`cbatch sort`: what a user types, and what comes of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.cli.conftest import invoke, start
from tests.files.journals import run_pass
from tests.files.test_sorting import fill, numbers_in, requests, write_lines

if TYPE_CHECKING:
    from pathlib import Path


def test_sort_in_place_says_what_it_has_sorted(tmp_path: Path) -> None:
    out = fill(tmp_path, [3, 10, 1, 2])
    done = invoke("sort", out)
    assert (done.exit_code, done.stdout) == (0, "")
    assert done.stderr.splitlines() == [
        f"{out}: 3 records in the order of the requests",
        f"{tmp_path / 'errors'}: 1 records in the order of the requests",
    ]
    assert numbers_in(out) == [1, 2, 3]


def test_sort_names_records_of_requests_that_are_gone(tmp_path: Path) -> None:
    out = requests(tmp_path / "out", "gone", "a")
    by = requests(tmp_path / "in.jsonl", "a")
    done = invoke("sort", out, "--by", by, "-o", tmp_path / "sorted")
    assert "2 records in the order of the requests; the last 1 belong to" in done.stderr


@pytest.mark.parametrize(
    ("names", "words"),
    [([], "writes it at its end"), (["out.parquet"], "there is nothing to sort")],
)
def test_sort_of_parquet_says_that_it_is_in_order(
    tmp_path: Path, names: list[str], words: str
) -> None:
    for name in names:
        (tmp_path / name).touch()
    done = invoke("sort", tmp_path / "out.parquet")
    assert (done.exit_code, words in done.stderr) == (2, True)


def test_sort_to_a_file_or_stdout_leaves_the_output(tmp_path: Path) -> None:
    out = fill(tmp_path, [3, 1, 2])
    assert invoke("sort", out, "-o", tmp_path / "sorted").exit_code == 0
    assert numbers_in(tmp_path / "sorted") == [1, 2, 3]
    assert invoke("sort", out, "-o", "-").stdout == (tmp_path / "sorted").read_text("utf-8")
    assert numbers_in(out) == [3, 1, 2]


@pytest.mark.real
def test_reader_of_stdout_who_leaves_ends_it(tmp_path: Path) -> None:
    run_pass(tmp_path, 0, 10_000)
    with start("sort", tmp_path / "out", "-o", "-") as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read(6) == b"header"
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["no-such-file"], "No such file or directory"),
        (["-"], "stdin has no manifest"),
        (["out"], "no manifest beside it"),
        (["out", "-o", "-"], "--by INPUT"),
        (["out", "--by", "in.jsonl"], "--by needs another file to write to: give -o SORTED"),
        (["out", "--by", "in.jsonl", "-o", "in.jsonl"], "is the input"),
        (["out", "--by", "in.jsonl", "-o", "no/sorted"], "the folder no does not exist"),
        (["out", "--by", "nothing.jsonl", "-o", "-"], "nothing.jsonl"),
    ],
)
def test_wrong_arguments_end_with_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, args: list[str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write_lines(tmp_path / "out", {"id": "a"})
    requests(tmp_path / "in.jsonl", "a")
    done = invoke("sort", *args)
    assert (done.exit_code, done.stdout) == (2, "")
    [line] = done.stderr.splitlines()
    assert line.startswith("cbatch: ")
    assert said in line
