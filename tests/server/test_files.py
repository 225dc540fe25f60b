"""Files of clients: taken as they come, listed, sent back, and kept within limits."""

from __future__ import annotations

import errno
import logging
import os
import stat
import threading
import tracemalloc
from typing import TYPE_CHECKING, Any

import pytest

from cbatch import Engine
from cbatch.backend.fake import FakeBackend
from cbatch.errors import ConfigError
from cbatch.runtime.waking import is_in_event_loop
from cbatch.server import batch_index, batch_store, create_app
from cbatch.server.batch_store import BatchStore
from cbatch.server.http_errors import HttpProblemError
from cbatch.server.multipart_upload import Upload
from tests.server.clients import CHAT, USER, Running, call, connected, error_of, running, wait_until
from tests.server.kept import begun_over, content, ended, kept_app, line, lines, upload

if TYPE_CHECKING:
    import socket
    import sqlite3
    from collections.abc import AsyncIterator
    from pathlib import Path

    from starlette.applications import Starlette

    from cbatch.server.files_folder import FilesFolder

BOUNDARY = b"----x"
TYPE = b"multipart/form-data; boundary=----x"


class Gathered(bytearray):
    """A sink in memory."""

    def write(self, data: bytes) -> None:
        self += data


def part(name: str, data: bytes, filename: str | None = None) -> bytes:
    file = "" if filename is None else f'; filename="{filename}"'
    head = f'Content-Disposition: form-data; name="{name}"{file}\r\n\r\n'
    return b"--" + BOUNDARY + b"\r\n" + head.encode() + data + b"\r\n"


END = b"--" + BOUNDARY + b"--\r\n"


@pytest.mark.parametrize("name", ["ünï \u202e.jsonl", "../../secret"])
@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_file_comes_back_as_it_was_sent(tmp_path: Path, name: str, backend: str) -> None:
    data = b"\r\n--x\0\xff" * 50_000
    form: dict[str, Any] = {"files": {"file": (name, data)}, "data": {"purpose": "batch"}}
    with kept_app(tmp_path) as app:
        file = call(app, "/v1/files", method="POST", backend=backend, **form).json()
        assert file["object"] == "file"
        assert (file["bytes"], file["purpose"], file["status"]) == (len(data), "batch", "processed")
        assert file["filename"] == name
        assert file["expires_at"] is None
        assert call(app, f"/v1/files/{file['id']}").json() == file
        answer = call(app, f"/files/{file['id']}/content", backend=backend)
        assert answer.content == data
        assert answer.headers["content-disposition"].isascii()
        gone = call(app, f"/v1/files/{file['id']}", method="DELETE").json()
        assert gone == {"id": file["id"], "object": "file", "deleted": True}
        for path, method in (("", "GET"), ("", "DELETE"), ("/content", "GET")):
            error_of(call(app, f"/v1/files/{file['id']}{path}", method=method), 404)
        assert [*(tmp_path / "kept" / "content").iterdir()] == []
        for id in ("..%2F..%2Fsecret", "../../secret", "%2e%2e%2fsecret", "a%00b", "'"):
            for path in (f"/v1/files/{id}", f"/v1/files/{id}/content"):
                assert call(app, path).status_code == 404


def test_pipe_in_place_of_a_file_is_not_waited_for(kept: Starlette, tmp_path: Path) -> None:
    id = upload(kept, b"x").json()["id"]
    place = tmp_path / "kept" / "content" / id
    place.unlink()
    os.mkfifo(place)
    error_of(call(kept, f"/v1/files/{id}/content"), 404)


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="the system lists no descriptors")
def test_transfer_that_rests_has_no_descriptor(kept: Starlette) -> None:
    data = b"".join(b"%d\n" % i for i in range(1000))
    store: BatchStore = kept.state.desk.batches.store

    def opened() -> set[str]:
        links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
        return {os.readlink(link) for link in links if os.path.exists(link)}

    before = opened()
    with store.arriving() as arriving:
        for i in range(0, len(data), 500):
            arriving.write(data[i : i + 500])
            assert opened() == before
        content = store.content_of(arriving.keep("a", "batch", None, ""))
    parts = [content.read(700), *content.readlines(700)]
    assert opened() == before
    while part := content.read(10**6):
        parts.append(part)
    assert b"".join(parts) == data


def test_upload_is_never_whole_in_memory(tmp_path: Path) -> None:
    n, size = 60, 2**20

    async def parts() -> AsyncIterator[bytes]:
        yield part("purpose", b"batch") + part("file", b"", "a")[:-2]
        for _ in range(n):
            yield b"x" * size
        yield b"\r\n" + END

    with kept_app(tmp_path) as app:
        tracemalloc.start()
        try:
            asked: dict[str, Any] = {"content": parts(), "headers": {"content-type": TYPE.decode()}}
            file = call(app, "/v1/files", method="POST", **asked).json()
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert file["bytes"] == n * size
    assert peak < 20 * size


@pytest.fixture
def of_loop(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the functions by which an event loop has used the disk."""
    found: list[str] = []

    def watch(name: str) -> None:
        work = getattr(os, name)

        def watched(*args: Any, **named: Any) -> Any:
            if is_in_event_loop():
                found.append(name)
            return work(*args, **named)

        monkeypatch.setattr(os, name, watched)

    for name in ("open", "write", "fsync", "rename", "unlink", "close"):
        watch(name)
    return found


def test_event_loop_does_not_use_the_disk(tmp_path: Path, of_loop: list[str]) -> None:
    with kept_app(tmp_path) as app:
        file = upload(app, lines(line("a"))).json()["id"]
        error_of(upload(app, b""), 400)
        error_of(upload(app, b"x", purpose="other"), 400)
        batch = begun_over(app, file)
        done = ended(app, batch)["output_file_id"]
        assert len(content(app, done)) == 1
        messages = {"requests": [{"custom_id": "a", "params": {"model": "m", "messages": USER}}]}
        id = call(app, "/v1/messages/batches", messages).json()["id"]
        place = f"/v1/messages/batches/{id}"
        wait_until(lambda: call(app, place).json()["processing_status"] == "ended")
        assert call(app, f"{place}/results").status_code == 200
        for path in (f"/v1/files/{file}", place):
            assert call(app, path, method="DELETE").status_code == 200
        assert not of_loop


def half_sent(server: Running) -> socket.socket:
    """A connection with the first half of an upload."""
    head = (
        b"POST /v1/files HTTP/1.1\r\nhost: localhost\r\ncontent-length: 99999\r\ncontent-type: "
        + TYPE
    )
    return connected(server, head + b"\r\n\r\n" + part("file", b"x" * 999, "a"))


def test_client_that_leaves_amid_its_upload_leaves_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "kept" / "content"
    with kept_app(tmp_path) as app, running(app) as server:
        with half_sent(server):
            wait_until(lambda: any(folder.iterdir()))
        wait_until(lambda: not any(folder.iterdir()))
        wait_until(lambda: app.state.desk.meters.n_http["/files", 499] == 1)


def test_upload_that_stops_is_told(tmp_path: Path) -> None:
    with kept_app(tmp_path, body_timeout_s=0.05) as app, running(app) as server:
        with half_sent(server) as connection:
            assert b" 408 " in connection.recv(4096)
        assert not any((tmp_path / "kept" / "content").iterdir())


def test_files_are_listed_by_pages(kept: Starlette) -> None:
    ids = [upload(kept, b"x").json()["id"] for _ in range(5)]
    whole = call(kept, "/v1/files").json()
    assert [each["id"] for each in whole["data"]] == ids[::-1]
    forward = call(kept, "/v1/files?order=asc&limit=2").json()
    rest = call(kept, f"/v1/files?order=asc&after={forward['last_id']}").json()
    assert [each["id"] for each in (*forward["data"], *rest["data"])] == ids
    assert (forward["has_more"], rest["has_more"]) == (True, False)
    assert call(kept, "/v1/files?purpose=batch_output").json()["data"] == []
    assert error_of(call(kept, "/v1/files?order=up"), 400)["param"] == "order"
    error_of(call(kept, "/v1/files?after=nobody"), 404)
    assert call(kept, "/v1/files?" + "a=b&" * 63).status_code == 200
    assert "64 fields" in error_of(call(kept, "/v1/files?" + "a=b&" * 64), 400)["message"]


ANCHOR, SECONDS = "expires_after[anchor]", "expires_after[seconds]"
WRONG: list[tuple[dict[str, str], str]] = [
    *(({"purpose": purpose}, "purpose") for purpose in ("fine-tune", "x" * 5000)),
    *(({field: "3600"}, "expires_after") for field in (ANCHOR, SECONDS)),
    *(({ANCHOR: "x", SECONDS: n}, "expires_after") for n in ("3600", "3.5e3")),
    ({ANCHOR: "created_at", SECONDS: "3.5e3"}, "expires_after"),
]


def test_wrong_field_of_an_upload_is_refused_by_name(kept: Starlette, tmp_path: Path) -> None:
    for fields, param in WRONG:
        assert error_of(upload(kept, b"x", **fields), 400)["param"] == param
    assert call(kept, "/v1/files").json()["data"] == []
    assert [*(tmp_path / "kept" / "content").iterdir()] == []


def test_what_is_no_upload_is_refused(tmp_path: Path) -> None:
    whole = part("purpose", b"batch") + part("file", b"x", "a") + END
    form = {"content-type": TYPE.decode()}
    cases: list[tuple[bytes, dict[str, str], int]] = [
        (whole, {"content-type": "application/json"}, 415),
        (whole, {"content-type": "multipart/form-data"}, 415),
        (whole, {}, 415),
        (whole, {"content-type": "multipart/form-data; boundary=" + "b" * 9999}, 400),
        (whole[:-10], form, 400),
        (b"", form, 400),
        (b"\0" * 99, form, 400),
        (part("purpose", b"batch") + END, form, 400),
        (part("file", b"x", "a") + END, form, 400),
        (part("file", b"x", "a") + part("file", b"y", "b") + END, form, 400),
        (part("purpose", b"batch") + part("file", b"", "a") + END, form, 400),
        (b"".join(part(f"f{i}", b"") for i in range(99)) + END, form, 400),
        (b"--" + BOUNDARY + b"\r\nX: 1\r\n\r\ny\r\n" + END, form, 400),
        (b"--" + BOUNDARY + b"\r\nX: " + b"1" * 9999 + b"\r\n\r\ny\r\n" + END, form, 400),
    ]
    with kept_app(tmp_path) as app:
        for data, headers, status in cases:
            answer = call(app, "/v1/files", data, method="POST", headers=headers)
            error_of(answer, status)
        assert call(app, "/v1/files").json()["data"] == []
        assert [*(tmp_path / "kept" / "content").iterdir()] == []
        assert call(app, "/v1/files", whole, method="POST", headers=form).status_code == 200


@pytest.mark.parametrize("n", [1, 2, 3, 7, 64])
def test_form_means_the_same_however_it_is_cut(n: int) -> None:
    data = b"a\r\n--\r\n----x\r\n\r\n"
    body = part("purpose", b"batch") + part("file", data, "n") + END
    sink = Gathered()
    form = Upload(TYPE, sink.write)
    for i in range(0, len(body), n):
        form.feed(body[i : i + n])
    form.finish()
    assert (form.fields, form.name, bytes(sink)) == ({"purpose": "batch"}, "n", data)


def test_broken_form_writes_nothing_to_stderr(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(logging.root, "handlers", [])
    headers = {"content-type": "multipart/form-data; boundary=b"}
    with kept_app(tmp_path) as app:
        answer = call(app, "/v1/files", b"--x", headers=headers)
    assert error_of(answer, 400)["code"] == "invalid_form"
    assert capsys.readouterr().err == ""


def test_limits_of_files_hold(tmp_path: Path) -> None:
    mib = 2**20
    with kept_app(tmp_path, max_file_mib=1, max_stored_mib=2) as app:
        for n_bytes in (mib + 1, 3 * mib):
            assert "--max-file-mib 1" in error_of(upload(app, b"x" * n_bytes), 413)["message"]
        for _ in range(2):
            assert upload(app, b"x" * mib).status_code == 200
        answer = upload(app, b"x")
        assert error_of(answer, 507)["code"] == "insufficient_storage"
        assert answer.headers["x-should-retry"] == "false"
        (first, _) = call(app, "/v1/files").json()["data"]
        call(app, f"/v1/files/{first['id']}", method="DELETE")
        assert upload(app, b"x" * mib).status_code == 200


def test_deleted_file_counts_until_its_batches_have_ended(tmp_path: Path) -> None:
    data = lines(line("a", messages=USER, max_tokens=1, user="x" * 700_000))
    with kept_app(tmp_path, max_file_mib=1, max_stored_mib=1) as app:
        app.state.desk.room.set_calls(4)  # which leaves no slot
        file = upload(app, data).json()["id"]
        asked = {"input_file_id": file, "endpoint": CHAT, "completion_window": "24h"}
        ids = [call(app, "/v1/batches", asked).json()["id"] for _ in range(2)]
        call(app, f"/v1/files/{file}", method="DELETE")
        assert error_of(upload(app, data), 507)["code"] == "insufficient_storage"
        for id in ids:
            call(app, f"/v1/batches/{id}/cancel", method="POST")
            ended(app, id)
        assert upload(app, data).status_code == 200


def test_long_list_is_made_in_parts_and_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    makers: list[int] = []
    form = batch_index.StoredFile.as_json

    def noted(file: batch_index.StoredFile) -> dict[str, Any]:
        makers.append(threading.get_ident())
        return form(file)

    with kept_app(tmp_path) as app:
        for _ in range(60):
            assert upload(app, b"x", "x" * 500).status_code == 200
        monkeypatch.setattr(batch_index.StoredFile, "as_json", noted)
        assert len(call(app, "/v1/files").json()["data"]) == 60
    assert len(makers) == 60
    assert makers.count(threading.get_ident()) < 60  # the event loop made the first part alone


def test_full_disk_is_told_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: object, data: bytes) -> None:
        with batch_store.disk_problems():
            raise OSError(errno.ENOSPC, "No space left on device")

    with kept_app(tmp_path) as app:
        with monkeypatch.context() as patch:
            patch.setattr(batch_store.Arriving, "write", refuse)
            assert error_of(upload(app, b"x"), 507)["code"] == "insufficient_storage"
        assert [*(tmp_path / "kept" / "content").iterdir()] == []
        assert upload(app, b"x").status_code == 200


def test_file_that_has_expired_is_gone_and_makes_room(tmp_path: Path) -> None:
    now = [1000.0]
    store = BatchStore(tmp_path / "kept", 10, lambda: now[0])
    with store.arriving() as arriving:
        arriving.write(b"x" * 10)
        file = arriving.keep("a", "batch", 3600, "")
    now[0] += 3599
    assert store.file(file.id, "") == file
    now[0] += 1
    with pytest.raises(HttpProblemError):
        store.file(file.id, "")
    assert store.files("", None, 9, is_newest_first=True, purpose=None) == ([], False)
    with store.arriving() as arriving:
        arriving.write(b"y" * 10)
        arriving.keep("b", "batch", None, "")
    assert not store.path_of(file).exists()
    store.close()


def test_many_files_that_have_expired_go_some_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, synced = [1000.0], [0]
    folder = tmp_path / "kept"
    store = BatchStore(folder, 1000, lambda: now[0])
    for i in range(250):
        id = f"file-{i:024x}"
        (folder / "content" / id).write_bytes(b"x")
        store.put_file(id, "a", "batch", 1, None if i % 5 == 0 else i, "")
    now[0] += 3600

    def sync(_: Path) -> None:
        synced[0] += 1
        if synced[0] == 1:
            store.close()

    monkeypatch.setattr("cbatch.server.batch_store._N_REMOVED", 40)
    monkeypatch.setattr("cbatch.server.batch_store.sync_folder", sync)
    with pytest.raises(HttpProblemError, match="shutting down"):  # between two portions
        store.reserve(1)
    assert len([*(folder / "content").iterdir()]) == 210
    store = BatchStore(folder, 100, lambda: now[0])
    assert len([*(folder / "content").iterdir()]) == 170
    store.reserve(10)  # as much room as is needed
    assert len([*(folder / "content").iterdir()]) == 50 + 40
    with pytest.raises(HttpProblemError, match="have 50 of at most 100 bytes"):
        store.reserve(41)
    assert synced[0] == 5


def test_batch_over_a_file_that_has_just_been_deleted_is_not_made(tmp_path: Path) -> None:
    store = BatchStore(tmp_path / "kept", 100)
    with pytest.raises(HttpProblemError, match="No such File object: file-1") as told:
        store.new_batch(
            tmp_path / "file-1",
            60,
            endpoint=CHAT,
            input_file_id="file-1",
            completion_window="60s",
        )
    assert told.value.status == 404
    assert [*(tmp_path / "kept" / "work").iterdir()] == []
    store.close()


def test_sum_of_the_files_is_kept_and_not_asked_of_the_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An upload takes no longer for the files that are there."""
    now, asked, open_index = [1000.0], list[str](), batch_index.open_index

    def opened(folder: FilesFolder) -> sqlite3.Connection:
        db = open_index(folder)
        db.set_trace_callback(asked.append)
        return db

    monkeypatch.setattr(batch_store, "open_index", opened)

    def check(store: BatchStore, n_bytes: int) -> None:
        with pytest.raises(HttpProblemError, match=f"have {n_bytes} of at most 100 bytes"):
            store.reserve(101)

    for n_before in (0, 10):  # the second server counts what is there
        store = BatchStore(tmp_path / "kept", 100, lambda: now[0])
        check(store, n_before)
        kept = []
        for seconds in (None, 3600):
            with store.arriving() as arriving:
                asked.clear()
                arriving.write(b"x" * 10)
                assert asked == []
                kept += [arriving.keep("a", "batch", seconds, "")]
        store.put_file(kept[0].id, "a", "batch", 10, None, "")  # which changes nothing
        check(store, n_before + 20)
        now[0] += 3600
        check(store, n_before + 10)
        if n_before:
            store.delete_file(kept[0].id, "")
            check(store, n_before)
        store.close()


def test_folder_is_private_and_has_one_server(tmp_path: Path) -> None:
    with kept_app(tmp_path) as app:
        upload(app, b"x")
        folder = tmp_path / "kept"
        for place in (folder, *folder.iterdir()):
            allowed = 0o700 if place.is_dir() else 0o600
            assert stat.S_IMODE(place.stat().st_mode) & ~allowed == 0, place
        with pytest.raises(ConfigError, match="another server uses it"):
            create_app(app.state.desk.engine, files_dir=folder)
    with kept_app(tmp_path) as app:
        assert len(call(app, "/v1/files").json()["data"]) == 1


@pytest.mark.parametrize(
    "settings",
    [{"files_dir": 3}, {"max_file_mib": 0}, {"max_stored_mib": "x"}, {"files_dir": "/dev/null/x"}],
)
def test_wrong_settings_of_files_are_refused(settings: dict[str, Any]) -> None:
    with Engine(FakeBackend(1, 64)) as engine, pytest.raises(ConfigError):
        create_app(engine, **settings)
