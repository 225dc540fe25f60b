"""A manifest made again of the records: what answers what is asked still is kept, all else runs again."""

from __future__ import annotations

import json
import shutil
import threading
from typing import TYPE_CHECKING, Any

import pytest

from cbatch.errors import ConfigError
from cbatch.files.file_run import run_file, stream_file
from cbatch.files.output.manifest import remove_manifest
from cbatch.files.output.sorting import sort_in_place
from cbatch.progress import SilentView
from tests.files.runs import SHORT, answers, records, run_in
from tests.runtime.backends import PATIENCE_S, in_thread

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from cbatch.engine import Engine
    from cbatch.files.outcome import RunSummary

N_ITEMS = 11


@pytest.fixture
def folder(folder: Path) -> Path:
    """Add a line without an id and one that is wrong to the input."""
    with (folder / "in.jsonl").open("a") as file:
        file.write('{"prompt": "no id"}\n{"id": "wrong"}\n')
    return folder


class Listener(SilentView):
    def __init__(self, said: list[str]) -> None:
        self._said = said

    def say(self, line: str) -> None:
        self._said.append(line)


def run(engine: Engine, folder: Path, **more: Any) -> RunSummary:
    return run_in(folder, engine, "out.jsonl", **more)


def adopt(engine: Engine, folder: Path, **more: Any) -> tuple[RunSummary, list[str]]:
    said: list[str] = []
    return run(engine, folder, adopt=True, progress=Listener(said), **more), said


def lose(folder: Path) -> None:
    (folder / "out.jsonl.manifest").unlink()


def damage(folder: Path) -> None:
    path = folder / "out.jsonl.manifest"
    path.write_bytes(path.read_bytes()[:1024] + bytes(path.stat().st_size - 1024))


def sort_by_hand(folder: Path) -> None:
    lines = (folder / "out.jsonl").read_text().splitlines(keepends=True)
    (folder / "out.jsonl").write_text("".join(sorted(lines)))


def put_an_old_one(folder: Path) -> None:
    shutil.copy(folder / "old", folder / "out.jsonl.manifest")


@pytest.mark.parametrize("change", [lose, damage, sort_by_hand, put_an_old_one])
def test_records_without_their_manifest_are_adopted(
    engine: Engine, folder: Path, change: Callable[[Path], None]
) -> None:
    run(engine, folder, limit=3)
    shutil.copy(folder / "out.jsonl.manifest", folder / "old")
    run(engine, folder, limit=5)
    text = (folder / "out.jsonl").read_text()
    change(folder)
    with pytest.raises(ConfigError, match=r"--adopt"):
        run(engine, folder)
    summary, said = adopt(engine, folder)
    assert (summary.n_before, summary.n_done, summary.is_complete) == (8, 3, True)
    assert said[0] == f"{folder}/out.jsonl: 8 records are adopted"
    assert set(text.splitlines()) < set((folder / "out.jsonl").read_text().splitlines())
    assert len(answers(folder / "out.jsonl")) == N_ITEMS
    for more in ({}, {"adopt": True}):
        assert run(engine, folder, **more).n_before == N_ITEMS
    sort_in_place(folder / "out.jsonl")
    assert [r["id"] for r in records(folder / "out.jsonl")][:2] == ["r0", "r1"]


def test_answer_to_another_question_is_not_adopted_for_this_one(
    engine: Engine, folder: Path
) -> None:
    assert adopt(engine, folder)[1] == []  # there is nothing yet
    lose(folder)
    asked = (folder / "in.jsonl").read_text().replace("question 3", "question x")
    (folder / "in.jsonl").write_text(asked)
    summary, _ = adopt(engine, folder)
    assert (summary.n_done, summary.n_before) == (2, N_ITEMS - 2)  # r3, and the wrong one
    run_file(folder / "in.jsonl", folder / "anew.jsonl", engine=engine)
    assert answers(folder / "out.jsonl") == answers(folder / "anew.jsonl")
    lose(folder)
    summary, _ = adopt(engine, folder, options={**SHORT, "max_tokens": 2})
    assert summary.n_done == N_ITEMS
    usages = [r["usage"] for r in records(folder / "out.jsonl") if "usage" in r]
    assert {usage["completion_tokens"] for usage in usages} == {2}


def test_torn_lines_run_again(engine: Engine, folder: Path) -> None:
    run(engine, folder)
    whole = answers(folder / "out.jsonl")
    lines = (folder / "out.jsonl").read_bytes().splitlines(keepends=True)
    lines[2] = lines[2][:40] + b"\n"
    lines[-1] = lines[-1][:-9]
    (folder / "out.jsonl").write_bytes(b"".join([*lines[:5], b"\0" * 3000 + b"\n", *lines[5:]]))
    lose(folder)
    summary, said = adopt(engine, folder)
    assert said[0].endswith(
        "8 records are adopted; 4 lines are removed, which are incomplete or never ran"
    )
    assert summary.n_done == 3
    assert answers(folder / "out.jsonl") == whole


def test_later_record_of_an_item_is_adopted(engine: Engine, folder: Path) -> None:
    run(engine, folder)
    before = (folder / "out.jsonl").read_bytes()
    asked = (folder / "in.jsonl").read_text()
    (folder / "in.jsonl").write_text(asked.replace("question", "riddle"))
    run(engine, folder)
    (folder / "out.jsonl").write_bytes(before + (folder / "out.jsonl").read_bytes())
    lose(folder)
    summary, _ = adopt(engine, folder)
    assert summary.n_before == N_ITEMS - 1
    assert len(answers(folder / "out.jsonl")) == N_ITEMS


def test_errors_in_a_file_of_their_own_are_adopted(engine: Engine, folder: Path) -> None:
    with (folder / "in.jsonl").open("a") as file:
        file.write(json.dumps({"id": "long", "prompt": "x " * 4000}) + "\n")
    errors = folder / "errors.jsonl"
    run(engine, folder, errors=errors)
    assert len(records(errors)) == 2
    lose(folder)
    summary, _ = adopt(engine, folder, errors=errors)
    assert (summary.n_done, summary.n_failed_before) == (1, 1)
    assert {r["id"] for r in records(errors)} == {"long", "wrong"}


def test_openai_answers_are_adopted(engine: Engine, tmp_path: Path) -> None:
    with (tmp_path / "in.jsonl").open("w") as file:
        for i in range(4):
            body = {"model": "m", "prompt": f"say {i}" if i < 3 else ""}
            line = {"custom_id": f"c{i}", "method": "POST", "url": "/v1/completions", "body": body}
            file.write(json.dumps(line) + "\n")
        file.write('{"custom_id": "wrong"}\n')
    run(engine, tmp_path)
    text = sorted((tmp_path / "out.jsonl").read_text().splitlines())
    lose(tmp_path)
    summary, _ = adopt(engine, tmp_path)
    n_asked = sum(
        r["response"] is not None and r["response"]["status_code"] == 200
        for r in records(tmp_path / "out.jsonl")
    )
    assert (summary.n_before, summary.n_items) == (n_asked, 5)
    assert n_asked >= 3
    assert sorted((tmp_path / "out.jsonl").read_text().splitlines()) == text


def test_answers_to_rows_as_lines_are_adopted(engine: Engine, tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("one\ntwo\nthree\n")
    more: dict[str, Any] = {"engine": engine}
    run_file(tmp_path / "in.txt", tmp_path / "out.jsonl", **more)
    lose(tmp_path)
    (tmp_path / "in.txt").write_text("one\n2\nthree\nfour\n")
    summary = run_file(tmp_path / "in.txt", tmp_path / "out.jsonl", adopt=True, **more)
    assert (summary.n_before, summary.n_done) == (2, 2)
    assert answers(tmp_path / "out.jsonl").keys() == {"1", "2", "3", "4"}


@pytest.mark.parametrize(
    "text",
    [
        '{"id": "a", "prompt": "mine"}\n',
        '{"mine": 1}\n',
        "mine\n",
        '{"id": ' + "[" * 500 + "]" * 500 + "}\n",
        "no line",
        '{"custom_id": "a", "id": "batch_req_1", "response": {"request_id": "req_1"}}\n',
    ],
)
@pytest.mark.parametrize("name", ["out.jsonl", "errors.jsonl"])
def test_file_of_somebody_else_is_not_adopted(
    engine: Engine, folder: Path, text: str, name: str
) -> None:
    (folder / name).write_text(text)
    with pytest.raises(ConfigError, match=r"so nothing is adopted"):
        adopt(engine, folder, errors=folder / "errors.jsonl")
    assert (folder / name).read_text() == text
    assert not (folder / "out.jsonl.manifest").exists()


@pytest.mark.parametrize("format", ["csv", "jsonl"])
def test_formats_that_do_not_tell_what_they_answer_are_refused(
    engine: Engine, tmp_path: Path, format: str
) -> None:
    (tmp_path / "in.csv").write_text("prompt\na\n")
    with pytest.raises(
        ConfigError, match=rf"needs an output in the format openai or cbatch, not {format}"
    ):
        run_file(
            tmp_path / "in.csv", tmp_path / "out", engine=engine, output_format=format, adopt=True
        )


@pytest.mark.parametrize("has_output", [True, False])
@pytest.mark.parametrize("i_removed", [0, 1], ids=["begin", "end"])
def test_adopting_run_locks_the_output_until_its_manifest_is_there(
    engine: Engine, folder: Path, monkeypatch: pytest.MonkeyPatch, i_removed: int, has_output: bool
) -> None:
    errors = folder / "errors.jsonl"
    run(engine, folder, errors=errors)
    if not has_output:
        (folder / "out.jsonl").unlink()
    lose(folder)
    if not has_output:
        (folder / "out.jsonl.manifest").write_bytes(b"damaged")
    before = {path: path.read_bytes() for path in folder.glob("*.jsonl")}
    is_there, may_go = threading.Event(), threading.Event()
    removed: list[Path] = []

    def remove(path: Path) -> None:
        removed.append(path)
        if len(removed) == i_removed + 1:
            is_there.set()
            assert may_go.wait(PATIENCE_S)
        remove_manifest(path)

    monkeypatch.setattr("cbatch.files.adopt.remove_manifest", remove)
    waiting = in_thread(lambda: adopt(engine, folder, errors=errors))
    assert is_there.wait(PATIENCE_S)
    for more in ({"adopt": True}, {}, {"force": True}):
        with pytest.raises(ConfigError, match=r"another run is writing to it|--adopt"):
            run(engine, folder, errors=errors, **more)
    assert {path: path.read_bytes() for path in before} == before
    may_go.set()
    summary, _ = waiting()
    assert summary.is_complete
    assert len(answers(folder / "out.jsonl")) + len(records(errors)) == N_ITEMS


def test_adopt_is_refused_where_it_could_do_nothing(engine: Engine, folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"give one of them"):
        run(engine, folder, adopt=True, force=True)
    with pytest.raises(ConfigError, match=r"leave --adopt out"):
        run_file(folder / "in.jsonl", "/dev/null", engine=engine, adopt=True)
    for name, may_adopt in (("a.csv", False), ("a.jsonl", True)):
        (folder / name).write_text("of another program")
        with pytest.raises(ConfigError, match=r"exists already.*give another file") as told:
            run_file(folder / "in.jsonl", folder / name, engine=engine)
        assert ("--adopt" in str(told.value)) is may_adopt
    with pytest.raises(ConfigError, match=r"adopt has no effect with a loaded engine"):
        stream_file(folder / "in.jsonl", engine, adopt=True)
