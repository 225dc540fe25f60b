"""Outputs that are links, or were moved: the same command goes on, and what a link leads to stays where it is."""

from __future__ import annotations

import os
import shutil
from itertools import product
from typing import TYPE_CHECKING, Any

import pytest

from cbatch.errors import ConfigError
from cbatch.files.output.sorting import Sorted, sort_in_place
from tests.files.runs import answers, run_in, write_requests

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from cbatch.engine import Engine
    from cbatch.files.outcome import RunSummary

N_ITEMS = 9


@pytest.fixture
def folder(folder: Path) -> Path:
    """Add a link to an output in another folder, which is unknown yet."""
    (folder / "data").mkdir()
    (folder / "link").symlink_to("data/out")
    return folder


def run(engine: Engine, folder: Path, name: str = "link", **more: Any) -> RunSummary:
    return run_in(folder, engine, name, **more)


def point(link: Path, target: str) -> None:
    link.unlink()
    link.symlink_to(target)


def rename(folder: Path) -> None:
    (folder / "data/out").rename(folder / "data/other")
    point(folder / "link", "data/other")


def rename_with_manifest(folder: Path) -> None:
    rename(folder)
    (folder / "data/out.manifest").rename(folder / "data/other.manifest")


def move_alone(folder: Path) -> None:
    (folder / "big/deep").mkdir(parents=True)
    (folder / "data/out").rename(folder / "big/deep/out")
    point(folder / "link", str(folder / "big/deep/out"))


def move_folder(folder: Path) -> None:
    (folder / "data").rename(folder / "moved")
    point(folder / "link", "moved/out")


def copy(folder: Path) -> None:
    shutil.copy(folder / "data/out", folder / "copy")
    point(folder / "link", "copy")


def put_in_place_of_the_link(folder: Path) -> None:
    (folder / "data/out").replace(folder / "link")


def leave(folder: Path) -> None:
    pass


def link_to_the_link(folder: Path) -> None:
    (folder / "link").rename(folder / "second")
    (folder / "link").symlink_to(folder / "second")


CHANGES = [
    leave,
    rename,
    rename_with_manifest,
    move_alone,
    move_folder,
    copy,
    put_in_place_of_the_link,
    link_to_the_link,
]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("has_errors", [False, True])
def test_same_command_goes_on_where_the_link_leads_now(
    engine: Engine, folder: Path, change: Callable[[Path], None], has_errors: bool
) -> None:
    more: dict[str, Any] = {"errors": folder / "errors"} if has_errors else {}
    if has_errors:
        with (folder / "in.jsonl").open("a") as file:
            file.write('{"id": "wrong"}\n{"id": "r0", "prompt": "twice"}\n')
    for limit in (2, 4):
        assert run(engine, folder, limit=limit, **more).ending == "limit"
    n_before = len((folder / "link").read_text().splitlines())
    change(folder)
    summary = run(engine, folder, **more)
    assert summary.n_done == (N_ITEMS - 6 + (0 if not has_errors else 2))
    assert summary.is_complete
    assert n_before == 6
    assert answers(folder / "link").keys() == {f"r{i}" for i in range(N_ITEMS)}
    assert run(engine, folder, **more).n_before == summary.n_items
    out = (folder / "link").resolve()
    assert sort_in_place(folder / "link")[out] == Sorted(N_ITEMS)
    assert (out.parent / f"{out.name}.manifest").is_file()
    assert run(engine, folder, os.path.relpath(out, folder), **more).n_before == summary.n_items


def test_output_that_is_moved_and_leaves_a_link_goes_on(engine: Engine, folder: Path) -> None:
    run(engine, folder, "plain", limit=4)
    (folder / "plain").rename(folder / "data/plain")
    (folder / "plain").symlink_to("data/plain")
    assert run(engine, folder, "plain").n_done == N_ITEMS - 4
    assert (folder / "plain").is_symlink()
    assert (folder / "data/plain.manifest").is_file()
    assert run(engine, folder, "data/plain").n_before == N_ITEMS


def test_copied_link_leaves_the_copied_output_its_manifest(engine: Engine, folder: Path) -> None:
    run(engine, folder, limit=4)
    copy(folder)
    run(engine, folder)
    assert run(engine, folder, "data/out").n_before == 4


def test_link_that_leads_to_a_new_file_begins_there(engine: Engine, folder: Path) -> None:
    run(engine, folder, limit=4)
    for target in ("data/second", "data/third"):
        point(folder / "link", target)
        assert run(engine, folder, limit=5).n_before == 0
    for name, n in (("data/out", 4), ("data/second", 5), ("link", 5)):
        assert run(engine, folder, name).n_before == n


def test_link_that_leads_to_a_file_of_somebody_else_is_refused(
    engine: Engine, folder: Path
) -> None:
    run(engine, folder, limit=4)
    (folder / "mine").write_text("mine\n")
    point(folder / "link", "mine")
    with pytest.raises(ConfigError, match=r"mine: exists, and no manifest"):
        run(engine, folder)
    assert (folder / "mine").read_text() == "mine\n"
    assert run(engine, folder, "data/out").n_before == 4


def test_file_in_place_of_a_link_leaves_the_other_manifest_alone(
    engine: Engine, folder: Path
) -> None:
    run(engine, folder, limit=4)
    (folder / "link").unlink()
    assert run(engine, folder, limit=5).n_before == 0
    assert run(engine, folder, "data/out").n_before == 4
    assert run(engine, folder).n_before == 5


@pytest.mark.parametrize("is_moved", [False, True])
def test_links_in_the_path_of_a_folder_go_on(engine: Engine, folder: Path, is_moved: bool) -> None:
    (folder / "where").symlink_to("data")
    run(engine, folder, "where/out", limit=4)
    if is_moved:
        (folder / "data").rename(folder / "moved")
        point(folder / "where", "moved")
    assert run(engine, folder, "where/out").n_before == 4


@pytest.mark.parametrize("is_copied", [False, True])
def test_errors_behind_a_link_that_were_moved_go_on(
    engine: Engine, folder: Path, is_copied: bool
) -> None:
    with (folder / "in.jsonl").open("a") as file:
        file.write('{"id": "wrong"}\n')
    (folder / "errors").symlink_to("data/errors")
    run(engine, folder, errors=folder / "errors")
    wrong = (folder / "errors").read_text()
    (shutil.copy if is_copied else shutil.move)(folder / "data/errors", folder / "elsewhere")
    point(folder / "errors", "elsewhere")
    summary = run(engine, folder, errors=folder / "errors")
    assert (summary.n_done, summary.n_before) == (0, N_ITEMS + 1)
    assert (folder / "elsewhere").read_text() == wrong
    assert (folder / "errors").is_symlink()
    sort_in_place(folder / "link")
    away = (folder / "elsewhere").rename(folder / "away")
    with pytest.raises(ConfigError, match=r"is missing, but holds records of .*/out"):
        sort_in_place(folder / "link")
    away.rename(folder / "elsewhere")
    assert Sorted(1) in sort_in_place(folder / "link").values()


@pytest.mark.parametrize(
    ("change", "n_kept"),
    [*product((leave, move_folder), (0, 4)), (rename, 0), (move_alone, 0)],  # 0: all of it
)
def test_table_of_columns_behind_a_link_goes_on(
    engine: Engine, tmp_path: Path, change: Callable[[Path], None], n_kept: int
) -> None:
    pq = pytest.importorskip("pyarrow.parquet")
    write_requests(tmp_path / "in.jsonl", N_ITEMS)
    (tmp_path / "data").mkdir()
    (tmp_path / "link").symlink_to("data/out")
    said: dict[str, Any] = {"output_format": "parquet"}
    run(engine, tmp_path, limit=n_kept or None, **said)
    assert (tmp_path / "data/out").is_file() == (not n_kept)
    change(tmp_path)
    summary = run(engine, tmp_path, **said)
    assert summary.n_before == (n_kept or N_ITEMS)
    assert (tmp_path / "link").is_symlink()
    table = pq.read_table(tmp_path / "link")
    assert table.column("id").to_pylist() == [f"r{i}" for i in range(N_ITEMS)]
    assert run(engine, tmp_path, **said).n_before == N_ITEMS


def test_report_behind_a_link_stays_behind_it(engine: Engine, folder: Path) -> None:
    (folder / "report").symlink_to("data/page.html")
    for _ in range(2):
        run(engine, folder, report=folder / "report")
        assert (folder / "report").is_symlink()
        assert (folder / "data/page.html").read_text().startswith("<!doctype html>")


def test_file_beside_what_a_link_leads_to_is_not_taken_twice(engine: Engine, folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"is needed for .*link already: give another file"):
        run(engine, folder, report=folder / "data/out.manifest")


def test_empty_file_that_was_made_private_is_begun(engine: Engine, folder: Path) -> None:
    (folder / "data/out").touch(0o600)
    assert run(engine, folder).is_complete
    assert (folder / "data/out.manifest").stat().st_mode & 0o777 == 0o600
