"""Folders of files that are somebody else's, lost, damaged, of another version, or on a full disk."""

from __future__ import annotations

import gc
import json
import os
import resource
import shutil
import sqlite3
from contextlib import closing, contextmanager, suppress
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any

import pytest

from cbatch import Engine
from cbatch.backend.fake import FakeBackend
from cbatch.errors import ConfigError, OutputError
from cbatch.files.output.manifest import Manifest
from cbatch.server import create_app
from cbatch.server.batch_index import BATCH
from cbatch.server.batch_store import BatchStore, Page
from cbatch.server.files_folder import is_full
from tests.profiles import examples
from tests.runtime.backends import GatedBackend
from tests.server import test_message_batches as messages
from tests.server.clients import CHAT, call, wait_until
from tests.server.kept import (
    batch_of,
    begun,
    begun_and_held,
    ended,
    kept_app,
    line,
    lines,
    upload,
)
from tests.server.test_message_batches import BATCHES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from starlette.applications import Starlette


MARKER, INDEX, RESERVE = "CBATCH_FILES", "index.sqlite3", ".cbatch-reserve"
OWN = {RESERVE, MARKER, *(INDEX + end for end in ("", "-wal", "-shm", "-journal"))}
STRAY = "0" * 24
TWO = lines(line("a"), line("b"))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder `kept` with three files, a batch that has ended, one of messages, and one that has not."""
    folder = tmp_path_factory.mktemp("made")
    backend = GatedBackend(2, 256, hold_at=60)
    with kept_app(folder, Engine(backend)) as app:
        upload(app, b"first")
        ended(app, begun(app, TWO))
        messages.ended(app, messages.created(app, messages.request("a"))["id"])
        begun_and_held(app, backend, lines(*(line(f"r{i}") for i in range(40))))
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    """A copy of it, in which one more server may work."""
    shutil.copytree(made / "kept", tmp_path / "kept")
    return tmp_path / "kept"


def tree(folder: Path) -> dict[str, bytes]:
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def served(folder: Path) -> dict[str, Any]:
    """What a server over a folder lists, and the contents of its files; nothing of it may be an error."""
    with kept_app(folder.parent) as app:
        found: dict[str, Any] = {"notes": [*app.state.desk.batches.store.notes]}
        for path in ("/v1/files", "/v1/batches", BATCHES):
            answer = call(app, path)
            assert answer.status_code == 200, answer.text
            found[path] = {each["id"]: each for each in answer.json()["data"]}
        for id in found["/v1/batches"]:
            found["/v1/batches"][id] = ended(app, id)
        for id in found[BATCHES]:
            messages.ended(app, id)
        for id in [each["id"] for each in call(app, "/v1/files").json()["data"]]:
            data = call(app, f"/v1/files/{id}/content")
            assert data.status_code == 200, data.text
            found[id] = data.content
    return found


def in_index(folder: Path, query: str, *values: object) -> list[Any]:
    with closing(sqlite3.connect(folder / INDEX)) as db, db:
        return db.execute(query, values).fetchall()


# ---- whose folder ----


def with_files(folder: Path) -> None:
    for name in ("content/letter.txt", "work/project/plan.txt", "notes.txt"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)


def with_database(folder: Path) -> None:
    with closing(sqlite3.connect(folder / INDEX)) as db, db:
        db.execute("CREATE TABLE files (id TEXT)")


@pytest.mark.parametrize("fill", [with_files, with_database])
def test_folder_of_others_is_refused_and_left_as_it_is(
    tmp_path: Path, fill: Callable[[Path], None]
) -> None:
    fill(tmp_path)
    before = tree(tmp_path)
    with pytest.raises(ConfigError, match=f"not empty.* touch {tmp_path}/{MARKER}"):
        BatchStore(tmp_path, 100)
    assert tree(tmp_path) == before
    (tmp_path / MARKER).touch()
    BatchStore(tmp_path, 100).close()
    before.pop(INDEX, None)  # which is set aside
    assert before.items() <= tree(tmp_path).items()


def test_marker_that_is_a_pipe_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / MARKER)
    with pytest.raises(ConfigError, match="CBATCH_FILES: No such device"):
        BatchStore(tmp_path, 1)


def test_new_file_system_is_an_empty_folder(tmp_path: Path) -> None:
    (tmp_path / "lost+found").mkdir()
    BatchStore(tmp_path, 100).close()
    assert (tmp_path / MARKER).is_file()


def test_app_that_was_never_ended_lets_go_of_its_folder(tmp_path: Path) -> None:
    with Engine(FakeBackend(1, 64)) as engine:
        app = create_app(engine, files_dir=tmp_path)
        del app
        gc.collect()  # a ResourceWarning is an error
        create_app(engine, files_dir=tmp_path).state.desk.close()


# ---- what is not in the index ----


def test_names_that_are_not_ours_stay_and_parts_of_uploads_do_not(
    folder: Path, tmp_path: Path
) -> None:
    (other := tmp_path / "other").mkdir()
    (other / "answers.jsonl").write_text("mine")
    (part := folder / "content" / f"file-{STRAY}.part").write_bytes(b"to")  # a kill broke it off
    [id] = os.listdir(folder / "work")
    strangers = [
        *(
            "notes.txt",
            "content/notes.txt",
            "content/file-1/a.txt",
            f"content/file-{'1' * 24}.part/a",
        ),
        *("work/notes.txt", "work/project/a.txt", f"work/{id}/mine.txt", f"work/{id}/requests/a"),
        *("content/FILE-" + STRAY, f"content/file-{STRAY}.jsonl", "aside/mine.txt"),
    ]
    for name in strangers:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    (folder / "work" / f"batch_{STRAY}").symlink_to(other)
    found = served(folder)
    assert [(folder / name).read_text() for name in strangers] == strangers
    assert (other / "answers.jsonl").read_text() == "mine"
    assert not part.exists()
    assert found["/v1/batches"][id]["status"] == "completed"
    assert any("work/project" in note for note in found["notes"])


@pytest.mark.parametrize("what", ["gone", "empty", "new"])
def test_files_of_a_lost_index_are_entered_again(folder: Path, tmp_path: Path, what: str) -> None:
    before = tree(folder)
    [id] = os.listdir(folder / "work")
    purposes = dict(in_index(folder, "SELECT id, purpose FROM files"))
    (folder / INDEX).unlink()
    if what == "empty":
        (folder / INDEX).touch()
    elif what == "new":
        BatchStore(tmp_path / "fresh", 100).close()
        shutil.copy(tmp_path / "fresh" / INDEX, folder)
    found = served(folder)
    contents = {name[8:]: data for name, data in before.items() if name.startswith("content/")}
    assert len(contents) == 5
    assert {file: found[file] for file in contents} == contents
    assert {file: found["/v1/files"][file]["purpose"] for file in contents} == purposes
    (aside,) = (folder / "aside").iterdir()
    for name, data in before.items():
        if name.startswith("work/"):
            assert (aside / name.removeprefix("work/")).read_bytes() == data
    assert any(id in note and "aside/" in note for note in found["notes"])
    assert served(folder)["notes"] == []


def test_index_from_a_backup_costs_no_file(tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    with kept_app(tmp_path) as app:
        early, removed = (upload(app, data).json()["id"] for data in (b"early", b"removed"))
    backup = (folder / INDEX).read_bytes()
    with kept_app(tmp_path) as app:
        call(app, f"/v1/files/{removed}", method="DELETE")
        late = ended(app, begun(app, TWO))
    (folder / INDEX).write_bytes(backup)
    found = served(folder)
    assert set(found["/v1/files"]) == {early, late["input_file_id"], late["output_file_id"]}
    assert any(removed in note for note in found["notes"])
    assert len(found[late["output_file_id"]].splitlines()) == 2


# ---- a bad index ----


BAD_FIELDS: dict[str, Any] = {
    "no JSON": "{",
    "no object": "[1]",
    "no text": b"\xff\x00",
    "a number": 7,
    "deep": "[" * 100_000,
    "missing fields": "{}",
    "a later version": {"priority": 3},
    "a later status": {"status": "paused"},
    "no end": {"status": "in_progress"},
    "wrong type": {"n_total": "2"},
    "beyond the calendar": {"created_at": 10**15},
    "infinite": {"usage": {"a": float("inf")}},
    "a path": {"output_file_id": "../../secret"},
    "another id": {"id": f"batch_{STRAY}"},
}


@pytest.mark.parametrize("what", BAD_FIELDS)
def test_bad_row_of_a_batch_is_not_shown_and_kept(folder: Path, what: str) -> None:
    [(id, text)] = in_index(folder, "SELECT id, fields FROM batches WHERE place = 1")
    bad = BAD_FIELDS[what]
    said = json.dumps({**json.loads(text), **bad}) if isinstance(bad, dict) else bad
    in_index(folder, "UPDATE batches SET fields = ? WHERE place = 1", said)
    row = in_index(folder, "SELECT * FROM batches WHERE place = 1")
    found = served(folder)
    assert id not in found["/v1/batches"]
    assert {batch["status"] for batch in found["/v1/batches"].values()} == {"completed"}
    assert (len(found["/v1/batches"]), len(found[BATCHES])) == (1, 1)
    assert any(row[0][1] in note and "an unreadable row" in note for note in found["notes"])
    assert in_index(folder, "SELECT * FROM batches WHERE place = 1") == row


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("bytes", "many"),
        ("bytes", 10**18),
        ("id", "../x"),
        ("name", b"\xff"),
        ("expires_at", "soon"),
    ],
)
def test_bad_row_of_a_file_is_not_shown_and_kept(folder: Path, column: str, value: object) -> None:
    [(id,)] = in_index(folder, "SELECT id FROM files WHERE place = 1")
    in_index(folder, f"UPDATE files SET {column} = ? WHERE place = 1", value)
    row = in_index(folder, "SELECT * FROM files WHERE place = 1")
    found = served(folder)
    if column == "id":
        assert found[id] == b"first"  # under its own id again
    else:
        assert id not in found["/v1/files"]
        assert (folder / "content" / id).read_bytes() == b"first"
    assert in_index(folder, "SELECT * FROM files WHERE place = 1") == row
    assert found["notes"]


@pytest.mark.parametrize(("data", "why"), [(None, "no content"), (b"fir", "another size")])
def test_file_whose_content_is_not_what_it_was_is_not_shown(
    folder: Path, data: bytes | None, why: str
) -> None:
    [(id,)] = in_index(folder, "SELECT id FROM files WHERE place = 1")
    place = folder / "content" / id
    place.unlink() if data is None else place.write_bytes(data)
    found = served(folder)
    assert id not in found["/v1/files"]
    assert any(id in note and why in note for note in found["notes"])
    place.write_bytes(b"first")
    assert served(folder)[id] == b"first"


def test_rows_that_can_be_read_of_a_damaged_index_are_served(tmp_path: Path) -> None:
    folder, n = tmp_path / "kept", 300
    with closing(BatchStore(folder, 10**6)) as store:
        for i in range(n):
            with store.arriving() as arriving:
                arriving.write(b"x" * i)
                arriving.keep(f"name of {i}", BATCH, None, "")
    with (folder / INDEX).open("r+b") as file:  # one leaf of the table
        file.seek(file.read().index(b"name of 150") // 4096 * 4096)
        file.write(b"\xff" * 4096)
    with closing(BatchStore(folder, 10**6)) as store:
        files, _ = store.files("", None, 999, is_newest_first=False, purpose=None)
        assert {file.bytes for file in files} == {*range(n)}
        named = [file.name for file in files if file.name.startswith("name of")]
        assert 200 < len(named) < n
        assert named == [f"name of {file.bytes}" for file in files if file.name in named]


@pytest.mark.parametrize(
    "more", ["ALTER TABLE files ADD more TEXT", "ALTER TABLE batches RENAME fields TO data"]
)
def test_index_of_another_version_is_set_aside_and_read(folder: Path, more: str) -> None:
    names = dict(in_index(folder, "SELECT id, name FROM files"))
    in_index(folder, more)
    before = (folder / INDEX).read_bytes()
    found = served(folder)
    assert {id: found["/v1/files"][id]["filename"] for id in names} == names
    assert len(found["/v1/batches"]) == (2 if "files" in more else 0)
    assert before in tree(folder / "aside").values()


def test_kill_as_an_index_is_replaced_costs_nothing(folder: Path) -> None:
    (folder / INDEX).rename(folder / f"{INDEX}.new")
    found = served(folder)
    assert (len(found["/v1/batches"]), found["notes"]) == (2, [])


# ---- full disks ----


@pytest.fixture
def full(folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, bool]:
    """While `is_full`, the index takes nothing but, unless `has_none`, in the room of the reserve."""
    disk = {"is_full": False, "has_none": False}

    class Connection(sqlite3.Connection):
        def execute(self, query: str, *values: Any) -> sqlite3.Cursor:
            is_write = query.split()[0] in ("INSERT", "UPDATE", "DELETE")
            has_room = not (disk["has_none"] or (folder / RESERVE).exists())
            if is_write and " INTO hidden_" not in query and disk["is_full"] and not has_room:
                raise sqlite3.OperationalError("database or disk is full")
            return super().execute(query, *values)

    connect = sqlite3.connect
    monkeypatch.setattr(sqlite3, "connect", partial(connect, factory=Connection))
    return disk


@pytest.mark.parametrize("has_none", [False, True])
def test_files_and_batches_of_a_full_disk_can_be_deleted(
    folder: Path, full: dict[str, bool], *, has_none: bool
) -> None:
    with kept_app(folder.parent) as app:
        for id in (each["id"] for each in call(app, "/v1/batches").json()["data"]):
            ended(app, id)
        full.update(is_full=True, has_none=has_none)
        for id in (each["id"] for each in call(app, BATCHES).json()["data"]):
            assert call(app, f"{BATCHES}/{id}", method="DELETE").status_code == 200
        for id in (each["id"] for each in call(app, "/v1/files").json()["data"]):
            assert call(app, f"/v1/files/{id}", method="DELETE").status_code == 200
        assert os.listdir(folder / "content") == []
        for path in ("/v1/files", BATCHES):
            assert call(app, path).json()["data"] == []
        full.update(is_full=False)
        assert upload(app, b"x").status_code == 200
    assert len(served(folder)["/v1/files"]) == 1


def test_batch_on_a_full_disk_says_why_it_waits_and_can_be_cancelled(
    folder: Path, full: dict[str, bool]
) -> None:
    [id] = os.listdir(folder / "work")
    full.update(is_full=True, has_none=True)
    with kept_app(folder.parent) as app:
        wait_until(lambda: batch_of(app, id)["errors"] is not None)
        batch = batch_of(app, id)
        assert batch["status"] in ("in_progress", "finalizing")
        assert batch["errors"]["data"][0]["code"] == "insufficient_storage"
        full.update(has_none=False)
        if batch["status"] == "in_progress":
            assert call(app, f"/v1/batches/{id}/cancel", method="POST").status_code == 200


def test_first_start_on_a_full_disk_names_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(folder: object) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr("cbatch.server.batch_store.open_index", refused)
    with pytest.raises(ConfigError, match="cannot be used: the disk is full: free some space"):
        BatchStore(tmp_path / "new", 2**20)


@contextmanager
def files_of_at_most(n_bytes: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_index_that_may_not_grow_is_a_full_disk(folder: Path) -> None:
    with kept_app(folder.parent) as app:
        with files_of_at_most(4096):
            refused = upload(app, b"x")
        assert upload(app, b"x").status_code == 200
    assert (refused.status_code, refused.json()["error"]["code"]) == (507, "insufficient_storage")


def test_manifest_that_may_not_grow_is_a_full_disk(tmp_path: Path) -> None:
    manifest = Manifest(tmp_path / "m", tmp_path / "out.jsonl")
    with closing(manifest), files_of_at_most(4096), pytest.raises(OutputError) as told:
        manifest.set_settings({str(i): "x" * 4096 for i in range(99)})
    assert is_full(told.value)
    assert "ulimit -f" in str(told.value)
    with files_of_at_most(4096), pytest.raises(OutputError) as unmade:
        Manifest(tmp_path / "n", tmp_path / "out.jsonl")
    assert is_full(unmade.value)


# ---- any damage ----


def cut(path: Path, random: Random) -> None:
    os.truncate(path, random.randint(0, path.stat().st_size))


def flip(path: Path, random: Random) -> None:
    data = bytearray(path.read_bytes())
    for _ in range(random.randint(1, 20) if data else 0):
        data[random.randrange(len(data))] ^= 1 << random.randrange(8)
    path.write_bytes(data)


def remove(path: Path, random: Random) -> None:
    path.unlink()


def add(path: Path, random: Random) -> None:
    place = path.with_name(f"mine-{random.randrange(10**6)}")
    place.write_text("mine") if random.random() < 0.5 else place.mkdir()


def make_folder(path: Path, random: Random) -> None:
    path.unlink()
    path.mkdir()
    (path / "mine").write_text("mine")


DAMAGE = (cut, flip, flip, remove, add, make_folder)


@pytest.mark.parametrize("seed", range(examples(60)))
def test_any_damage_costs_only_what_is_damaged(folder: Path, seed: int) -> None:
    random = Random(seed)
    with closing(BatchStore(folder, 10**6)) as store:
        files, _ = store.files("", None, 99, is_newest_first=False, purpose=None)
        batches = [*store.batches("", Page(99))[0], *store.batches("", Page(99), "msgbatch")[0]]
    contents = {file.id: store.path_of(file).read_bytes() for file in files}
    index = (folder / INDEX).read_bytes()
    for _ in range(random.randint(1, 3)):
        places = [path for path in sorted(folder.rglob("*")) if path.is_file()]
        some = [path for path in places if path.name.startswith(INDEX)] or places
        random.choice(DAMAGE)(random.choice(random.choice((places, some))), random)
    index_at, marker = folder / INDEX, folder / MARKER
    is_whole = index_at.is_file() and index_at.read_bytes() == index
    before = {name: data for name, data in tree(folder).items() if name not in OWN}
    if not marker.is_file():
        with suppress(ConfigError):  # where it says so, it is not touched
            BatchStore(folder, 10**6).close()
        assert set(before.values()) <= {*tree(folder).values()}
        return
    with closing(BatchStore(folder, 10**6)) as store:
        after = [*tree(folder).values()]
        for data in before.values():
            assert data in after
            after.remove(data)
        shown, _ = store.files("", None, 99, is_newest_first=False, purpose=None)
        said, ids = " ".join(store.notes), {file.id for file in shown}
        for id, data in contents.items():
            place = folder / "content" / id
            if place.is_file() and place.read_bytes() == data:
                assert id in ids or (id in said and not is_whole)
        found = [*store.batches("", Page(99))[0], *store.batches("", Page(99), "msgbatch")[0]]
        if is_whole:
            assert found == batches
        assert len(found) == len(batches) or "index" in said
        assert all(store.path_of(file).stat().st_size == file.bytes for file in shown)
        for id in ids:
            store.delete_file(id, "")
        left = tree(folder).values()
        assert all(data in left for name, data in before.items() if "/mine" in name)


# ---- a folder that is removed while the server runs ----


def made_again(kept: Path) -> None:
    shutil.rmtree(kept)
    BatchStore(kept, 2**20).close()


def emptied(index: Path) -> None:
    index.unlink()
    index.touch()


REMOVALS: dict[str, Callable[[Path], object]] = {
    "folder": shutil.rmtree,
    "folder and a new one": made_again,
    "index": lambda kept: (kept / INDEX).unlink(),
    "index and a new one": lambda kept: emptied(kept / INDEX),
}


@pytest.mark.parametrize("what", REMOVALS)
def test_what_is_removed_under_the_server_is_told_and_nothing_taken(
    tmp_path: Path, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    with kept_app(tmp_path) as app:
        file = upload(app, TWO).json()["id"]
        REMOVALS[what](tmp_path / "kept")
        asked = {"input_file_id": file, "endpoint": CHAT, "completion_window": "24h"}
        told = [
            upload(app, b"x"),
            call(app, "/v1/batches", asked),
            call(app, BATCHES, {"requests": [messages.request("a")]}),
        ]
        if "folder" in what:
            told += [call(app, f"/v1/files/{file}/content")]
            told += [call(app, f"/v1/files/{file}", method="DELETE")]
        for answer in told:
            assert answer.status_code == 500
            assert "folder of files cannot be used" in answer.json()["error"]["message"]
            assert str(tmp_path) not in answer.text
        warnings = [record for record in caplog.records if record.levelname != "INFO"]
        assert len(warnings) == len(told)
        for warning in warnings:
            assert "removed or replaced while the server ran; restart" in warning.getMessage()
            assert "\n" not in warning.getMessage()
            assert warning.exc_info is None
    if "folder" in what:
        with kept_app(tmp_path) as app:
            assert upload(app, b"x").status_code == 200


def test_file_in_place_of_the_contents_is_told(
    kept: Starlette, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = upload(kept, TWO).json()["id"]
    shutil.rmtree(tmp_path / "kept" / "content")
    (tmp_path / "kept" / "content").touch()
    told = call(kept, f"/v1/files/{file}/content")
    assert told.status_code == 500
    assert "folder of files cannot be used" in told.json()["error"]["message"]
    assert [r.exc_info for r in caplog.records if r.levelname != "INFO"] == [None]
