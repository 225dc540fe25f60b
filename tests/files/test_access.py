"""Who may read answers: what is private stays so, whatever is written anew beside it or in its place."""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING

import pytest

from cbatch.files.file_run import run_file
from cbatch.files.output import durable as disk
from cbatch.files.output.sorting import sort_in_place, sort_to
from tests.files.journals import open_journal, run_pass
from tests.files.runs import make_engine, write_requests

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

IS_ROOT = hasattr(os, "geteuid") and os.geteuid() == 0


@pytest.fixture(autouse=True)
def _mask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def make_private(folder: Path, *names: str, bits: int = 0o600) -> None:
    for name in names:
        (folder / name).chmod(bits)


@pytest.mark.parametrize("bits", [0o600, 0o640, 0o664])
def test_compacted_and_sorted_files_keep_their_modes(tmp_path: Path, bits: int) -> None:
    run_pass(tmp_path, 0)
    make_private(tmp_path, "out", bits=bits)
    make_private(tmp_path, "errors")
    run_pass(tmp_path, 1)  # supersedes records of both
    assert (mode(tmp_path / "out"), mode(tmp_path / "errors")) == (bits, 0o600)
    inode = (tmp_path / "out").stat().st_ino
    sort_in_place(tmp_path / "out")
    assert (tmp_path / "out").stat().st_ino != inode
    assert (mode(tmp_path / "out"), mode(tmp_path / "errors")) == (bits, 0o600)


@pytest.mark.skipif(not IS_ROOT, reason="gives files to others")
def test_compacted_and_sorted_files_keep_their_owners(tmp_path: Path) -> None:
    run_pass(tmp_path, 0)
    for name in ("out", "errors"):
        os.chown(tmp_path / name, 12345, 54321)
    run_pass(tmp_path, 1)
    sort_in_place(tmp_path / "out")
    for name in ("out", "errors"):
        found = (tmp_path / name).stat()
        assert (found.st_uid, found.st_gid) == (12345, 54321)


@pytest.mark.skipif(not IS_ROOT, reason="gives files to others")
def test_group_that_a_file_cannot_keep_is_not_replaced_by_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object) -> None:
        raise PermissionError

    run_pass(tmp_path, 0)
    os.chown(tmp_path / "out", 12345, 54321)
    make_private(tmp_path, "out", bits=0o660)
    monkeypatch.setattr(os, "chown", refuse)
    run_pass(tmp_path, 1)
    assert mode(tmp_path / "out") == 0o600


def test_nothing_that_is_written_on_the_way_is_read_by_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "out").touch(0o600)
    seen = dict[str, int]()
    really_write = disk.write_at

    def write(fd: int, data: bytes, start: int) -> None:
        really_write(fd, data, start)
        seen.update({path.name: mode(path) for path in tmp_path.iterdir()})

    monkeypatch.setattr(disk, "write_at", write)
    run_pass(tmp_path, 0)
    run_pass(tmp_path, 1)
    sort_in_place(tmp_path / "out")
    sort_to(tmp_path / "out", tmp_path / "sorted")
    assert {
        "out.manifest",
        "out.manifest-wal",
        ".out.cbatch-part",
        ".errors.cbatch-part",
    } <= seen.keys()
    assert set(seen.values()) == {0o600}
    assert {mode(path) for path in tmp_path.iterdir()} == {0o600}


def test_manifest_of_an_output_made_private_later_is_made_so_too(tmp_path: Path) -> None:
    run_pass(tmp_path, 0)
    assert mode(tmp_path / "out.manifest") == 0o644
    make_private(tmp_path, "out")
    with open_journal(tmp_path):
        assert mode(tmp_path / "out.manifest") == 0o600
        assert mode(tmp_path / "out.manifest-wal") == 0o600


def test_file_that_replaces_another_keeps_its_mode(tmp_path: Path) -> None:
    run_pass(tmp_path, 0)
    (tmp_path / "sorted").touch(0o640)
    make_private(tmp_path, "out")
    sort_to(tmp_path / "out", tmp_path / "sorted", force=True)
    sort_to(tmp_path / "out", tmp_path / "new")
    assert (mode(tmp_path / "sorted"), mode(tmp_path / "new")) == (0o640, 0o600)


def test_report_keeps_its_mode(tmp_path: Path) -> None:
    source, report = write_requests(tmp_path / "in.jsonl", 3), tmp_path / "report.html"
    report.touch(0o600)
    with make_engine() as engine:
        run_file(source, tmp_path / "out", engine=engine, report=report)
    assert report.read_text().startswith("<!doctype html>")
    assert mode(report) == 0o600


def test_private_table_of_columns_has_private_records(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    source, out = tmp_path / "in.csv", tmp_path / "out.parquet"
    source.write_text("prompt\na\nb\n")
    with make_engine() as engine:
        for force in (False, True):
            run_file(source, out, engine=engine, output_format="parquet", force=force)
            if not force:  # the first of two was anybody's
                for path in tmp_path.glob("out*.records*"):
                    path.unlink()
                out.chmod(0o600)
    assert {path.name: mode(path) for path in tmp_path.glob("out*")} == {
        "out.parquet": 0o600,
        "out.parquet.records": 0o600,
        "out.parquet.records.manifest": 0o600,
    }


def test_table_of_private_records_is_private(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    source, out = tmp_path / "in.csv", tmp_path / "out.parquet"
    source.write_text("prompt\na\nb\n")
    with make_engine() as engine:
        run_file(source, out, engine=engine, output_format="parquet")
        out.unlink()
        make_private(tmp_path, "out.parquet.records")
        run_file(source, out, engine=engine, output_format="parquet")
    assert mode(out) == 0o600
