"""A model that is reloaded while it is served."""

from __future__ import annotations

import json
import signal
import threading
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from cbatch import Engine
from cbatch.backend.fake import FakeBackend
from cbatch.errors import ModelLoadError
from cbatch.files.served_batch import ServedBatch
from cbatch.server import create_app
from cbatch.server.desk import Desk
from cbatch.server.front import Renewal, on_hangup
from tests.runtime.backends import PATIENCE_S, GatedBackend, in_thread
from tests.server.clients import CHAT, USER, call, error_of, fake_app, running, wait_until
from tests.server.kept import line, lines

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager
    from pathlib import Path

    from starlette.applications import Starlette

    from tests.server.clients import Running

LOAD = "/models/load"
SHORT = {"messages": USER, "max_tokens": 3, "temperature": 0}
LONG = {"messages": USER, "max_tokens": 200, "ignore_eos": True, "stream": True}


class Models:
    """Loads fake engines, each with another window, as a test wants it."""

    def __init__(self, **settings: Any) -> None:
        self.settings = settings
        self.error: Exception | None = None
        self.may_load = threading.Event()
        self.may_load.set()
        self.loaded: list[Engine] = []
        self.may_create = threading.Event()
        self.may_create.set()
        self.is_creating = threading.Event()
        self.renewal = Renewal(self._find, self._load, self._create)

    def _find(self) -> Any:
        assert self.may_load.wait(PATIENCE_S)
        if self.error is not None:
            raise self.error
        return FakeBackend(2, 512)

    def _load(self, backend: Any) -> Engine:
        self.loaded.append(Engine(backend))
        return self.loaded[-1]

    def _create(self, engine: Engine) -> Starlette:
        self.is_creating.set()
        assert self.may_create.wait(PATIENCE_S)
        if self.error is not None:
            raise self.error
        return create_app(engine, **{**self.settings, "files_dir": None})


def served(
    models: Models, backend: Any = None, *, grace_s: float = PATIENCE_S
) -> AbstractContextManager[Running]:
    app = create_app(Engine(backend or FakeBackend(2, 256)), **models.settings)
    return running(app, grace_s=grace_s, renewal=models.renewal)


def window(client: httpx.Client) -> int:
    n: int = client.get("/v1/models").json()["data"][0]["max_model_len"]
    return n


def until_done(client: httpx.Client) -> None:
    wait_until(lambda: "reload" not in client.get("/health").json())


def test_new_calls_get_the_new_model() -> None:
    models = Models()
    models.may_load.clear()
    with served(models) as server, server.client() as client:
        assert window(client) == 256
        named, kind = json.dumps({"model": "/etc/passwd"}).encode(), "application/json"
        for content in (named, iter([named])):  # the second is sent in chunks
            other = client.post(LOAD, content=content, headers={"content-type": kind})
            assert error_of(other, 404)["code"] == "model_not_found"
        told = client.post(LOAD, json={"model": "cbatch"}).json()
        assert told == {"success": True, "model": "cbatch"}
        assert client.get("/health").json()["reload"] == "loading"
        assert client.post(CHAT, json=SHORT).status_code == 200
        assert window(client) == 256
        assert client.post(LOAD).status_code == 409
        models.may_load.set()
        until_done(client)
        assert window(client) == 512
        assert client.post(CHAT, json=SHORT).status_code == 200
        assert server.app.state.desk.engine.outage is not None  # the old one is closed
    assert len(models.loaded) == 1


def test_old_call_ends_with_the_old_model() -> None:
    models, backend = Models(), GatedBackend(2, 256, hold_at=1)
    with served(models, backend) as server, server.client() as client:
        with client.stream("POST", CHAT, json=LONG) as answer:
            wait_until(lambda: server.app.state.desk.n_in_flight == 1)
            with server.client() as other:
                other.post(LOAD)
                wait_until(lambda: other.get("/health").json().get("reload") == "draining")
                assert other.post(CHAT, json=SHORT).status_code == 200
            backend.release()
            lines = [line for line in answer.iter_lines() if line]
        assert lines[-1] == "data: [DONE]"
        until_done(client)


@pytest.mark.parametrize("is_loading", [True, False])
def test_hangups_amid_a_reload_are_followed_by_one_more(is_loading: bool) -> None:
    models, backend = Models(), GatedBackend(2, 256, hold_at=1)
    with served(models, backend) as server, server.client() as client:
        asked = in_thread(lambda: httpx.post(server.url + CHAT, json=LONG, timeout=60))
        backend.wait_until_held()
        if is_loading:
            models.may_load.clear()
        client.post(LOAD)
        phase = "loading" if is_loading else "draining"
        wait_until(lambda: client.get("/health").json().get("reload") == phase)
        front = server.app.state.desk.front
        assert [front.ask_again() for _ in range(3)] == [True] * 3
        assert client.get("/health").json()["reload"] == phase
        assert client.post(LOAD).status_code == 409
        models.may_load.set()
        backend.release()
        asked()
        wait_until(lambda: len(models.loaded) == 2)
        until_done(client)
    assert len(models.loaded) == 2


@pytest.mark.parametrize("is_streamed", [True, False])
def test_old_call_that_outlasts_the_grace_is_told_why_it_ends(is_streamed: bool) -> None:
    models, backend = Models(), GatedBackend(2, 256, hold_at=1)
    with served(models, backend, grace_s=0.0) as server, server.client() as client:
        asked = in_thread(
            lambda: httpx.post(server.url + CHAT, json={**LONG, "stream": is_streamed}, timeout=60)
        )
        backend.wait_until_held()
        client.post(LOAD)
        answer = asked()
        last = answer.text.split("data: ")[-1] if is_streamed else answer.text
        assert json.loads(last)["error"]["code"] == "model_reloading"
        assert answer.status_code == 503 or is_streamed
        backend.release()
        until_done(client)


def test_load_that_fails_keeps_the_old_model() -> None:
    models = Models()
    models.error = ModelLoadError("/secret/model.gguf: no such file")
    with served(models) as server, server.client() as client:
        client.post(LOAD)
        wait_until(lambda: client.get("/health").json().get("reload") == "failed")
        assert "secret" not in client.get("/health").text
        assert client.post(CHAT, json=SHORT).status_code == 200
        models.error = None
        assert client.post(LOAD).status_code == 200
        until_done(client)
        assert window(client) == 512


def test_old_model_that_cannot_be_closed_ends_no_reloads(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    models, close, n_closes = Models(), Engine.close, [0]

    def failing(engine: Engine, **how: Any) -> None:
        close(engine, **how)
        n_closes[0] += 1
        if n_closes[0] == 1:
            raise RuntimeError("can't start new thread")

    monkeypatch.setattr(Engine, "close", failing)
    with served(models) as server, server.client() as client:
        for _ in range(2):
            assert client.post(LOAD).status_code == 200
            until_done(client)
    assert "the old model could not be closed: can't start new thread" in caplog.messages
    assert len(models.loaded) == 2


def test_calls_wait_while_applications_change_and_health_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cbatch.server.front._FILES_S", PATIENCE_S)
    opened, is_opening, may_open = Desk.open_files, threading.Event(), threading.Event()

    def held(desk: Desk) -> None:
        if desk.files_dir is not None:
            is_opening.set()
            assert may_open.wait(PATIENCE_S)
        opened(desk)

    models = Models(files_dir=tmp_path / "kept")
    with served(models) as server, server.client() as client:
        monkeypatch.setattr(Desk, "open_files", held)
        client.post(LOAD)
        assert is_opening.wait(PATIENCE_S)
        asked = in_thread(lambda: window(client))
        assert httpx.get(server.url + "/health").json()["reload"] == "loading"
        may_open.set()
        assert asked() == 512
        until_done(client)


def test_application_that_cannot_be_made_leaves_the_old_one(tmp_path: Path) -> None:
    models = Models(files_dir=tmp_path / "kept")
    models.may_create.clear()
    with served(models) as server, server.client() as client:
        client.post(LOAD)
        assert models.is_creating.wait(PATIENCE_S)
        models.error = RuntimeError("no")
        models.may_create.set()
        wait_until(lambda: client.get("/health").json().get("reload") == "failed")
        assert window(client) == 256
        assert client.get("/v1/files").status_code == 200
        assert models.loaded[0].outage is not None  # closed


def test_server_that_ends_while_it_loads_waits_for_no_load() -> None:
    models = Models()
    models.may_load.clear()
    with served(models) as server, server.client() as client:
        client.post(LOAD)
        server.ending.begin()
        models.may_load.set()
    assert not models.loaded or models.loaded[0].outage is not None


def test_batches_go_on_with_the_new_model(tmp_path: Path) -> None:
    body = {**SHORT, "max_tokens": 50, "ignore_eos": True}
    asked = {"custom_id": "a", "method": "POST", "url": CHAT, "body": body}
    form: dict[str, Any] = {
        "files": {"file": ("a", json.dumps(asked).encode())},
        "data": {"purpose": "batch"},
    }
    models, backend = Models(files_dir=str(tmp_path / "kept")), GatedBackend(2, 256, hold_at=1)
    with served(models, backend) as server, server.client() as client:
        backend.release_when_asked(lambda: server.app.state.desk.batches.is_closed)
        file = client.post("/v1/files", **form).json()
        batch = {"endpoint": CHAT, "completion_window": "24h", "input_file_id": file["id"]}
        id = client.post("/v1/batches", json=batch).json()["id"]
        backend.wait_until_held()
        client.post(LOAD)
        until_done(client)
        assert client.get("/v1/files").json()["data"][-1] == file
        wait_until(lambda: client.get(f"/v1/batches/{id}").json()["status"] == "completed")
        counts = client.get(f"/v1/batches/{id}").json()["request_counts"]
        assert counts == {"total": 1, "completed": 1, "failed": 0}
        assert models.loaded[0].stats().n_steps > 0


def batch_in(client: httpx.Client, *requests: dict[str, Any]) -> str:
    """The id of a new batch."""
    file = client.post(
        "/v1/files", files={"file": ("a", lines(*requests))}, data={"purpose": "batch"}
    )
    asked = {"endpoint": CHAT, "completion_window": "24h", "input_file_id": file.json()["id"]}
    id: str = client.post("/v1/batches", json=asked).json()["id"]
    return id


@pytest.mark.parametrize("n_reloads", [1, 2])
def test_batch_that_does_not_stop_holds_up_files_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, n_reloads: int
) -> None:
    monkeypatch.setattr("cbatch.server.front._FILES_S", 0.01)
    concluded, is_concluding, may_conclude = (
        ServedBatch.conclude,
        threading.Event(),
        threading.Event(),
    )

    def slowly(*args: Any) -> None:
        is_concluding.set()
        assert may_conclude.wait(PATIENCE_S)
        concluded(*args)

    monkeypatch.setattr(ServedBatch, "conclude", slowly)
    models, backend = Models(files_dir=tmp_path / "kept"), GatedBackend(2, 256, hold_at=1)
    with served(models, backend) as server, server.client() as client:
        id = batch_in(client, line("a"), line("b"))
        backend.wait_until_held()
        client.post(f"/v1/batches/{id}/cancel")
        backend.release()
        assert is_concluding.wait(PATIENCE_S)
        for _ in range(n_reloads):
            client.post(LOAD)
            until_done(client)
        assert window(client) == 512
        assert client.post(CHAT, json=SHORT).status_code == 200
        assert client.get("/health").json()["files"] == "not open"
        answer = client.get(f"/v1/batches/{id}")
        assert error_of(answer, 503)["code"] == "files_not_open"
        assert answer.headers["retry-after"]
        may_conclude.set()
        wait_until(lambda: "files" not in client.get("/health").json())
        wait_until(lambda: client.get(f"/v1/batches/{id}").json()["status"] == "cancelled")
        counts = client.get(f"/v1/batches/{id}").json()["request_counts"]
        assert (counts["total"], counts["completed"] + counts["failed"]) == (2, 2)


def test_folder_that_is_not_usable_amid_a_reload_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("_FILES_S", "_AGAIN_S"):
        monkeypatch.setattr(f"cbatch.server.front.{name}", 0.01)
    models, marker = Models(files_dir=tmp_path / "kept"), tmp_path / "kept" / "CBATCH_FILES"
    with served(models) as server, server.client() as client:
        id = batch_in(client, line("a"))
        wait_until(lambda: client.get(f"/v1/batches/{id}").json()["status"] == "completed")
        moved = marker.rename(tmp_path / "marker")
        client.post(LOAD)
        until_done(client)
        assert client.get("/health").json()["files"] == "not open"
        moved.rename(marker)
        wait_until(lambda: client.get("/v1/files").status_code == 200)
        assert client.get(f"/v1/batches/{id}").json()["status"] == "completed"
        assert "files" not in client.get("/health").json()
    [said] = [record for record in caplog.messages if "until this is solved" in record]
    assert "CBATCH_FILES" in said
    assert "files and batches are available again" in caplog.messages


FORM = (
    b'--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n{}\r\n--x--\r\n'
)
MESSAGE = json.dumps(
    {"requests": [{"custom_id": "a", "params": {"model": "m", "max_tokens": 3, "messages": USER}}]}
).encode()


@pytest.mark.parametrize(
    ("path", "body", "kind"),
    [
        ("/v1/files", FORM, "multipart/form-data; boundary=x"),
        ("/v1/messages/batches", MESSAGE, "application/json"),
        (CHAT, json.dumps(SHORT).encode(), "application/json"),
    ],
)
def test_body_that_ends_behind_a_reload_is_told_so_and_holds_up_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, body: bytes, kind: str
) -> None:
    monkeypatch.setattr("cbatch.server.front._LAST_S", 0.05)
    models, may_end = Models(files_dir=str(tmp_path / "kept")), threading.Event()

    def slowly() -> Iterator[bytes]:
        yield body[:-5]
        assert may_end.wait(PATIENCE_S)
        yield body[-5:]

    with served(models, grace_s=0.0) as server, server.client() as client:
        headers = {"content-type": kind, "content-length": str(len(body))}
        asked = in_thread(
            lambda: httpx.post(server.url + path, content=slowly(), headers=headers, timeout=60)
        )
        wait_until(lambda: server.app.state.desk.front.n_calls == 1)
        client.post(LOAD)
        until_done(client)
        assert window(client) == 512
        may_end.set()
        answer = asked()
        assert "model_reloading" in answer.text or "was reloaded" in answer.text
        assert answer.status_code in (503, 529)  # the second is Anthropic's
        assert answer.headers["retry-after"]
        assert client.get("/v1/files").json()["data"] == []


# ---- who may ---


def test_strangers_need_a_key() -> None:
    def load(app: Any, host: str, **headers: str) -> int:
        return call(app, LOAD, method="POST", client_host=host, headers=headers).status_code

    with fake_app() as app:
        assert load(app, "192.0.2.1") == 403
        assert load(app, "127.0.0.1") == 501  # nobody reloads this application
    with fake_app(api_keys=["k"]) as app:
        assert load(app, "127.0.0.1") == 401
        assert load(app, "192.0.2.1", authorization="Bearer k") == 501


# ---- SIGHUP ----


@pytest.mark.parametrize(
    ("before", "has_terminal", "is_taken"),
    [(signal.SIG_DFL, False, True), (signal.SIG_IGN, False, False), (signal.SIG_DFL, True, False)],
)
def test_hangup_reloads_without_a_terminal_unless_it_is_ignored(
    before: signal.Handlers, has_terminal: bool, is_taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cbatch.server.front._has_terminal", lambda: has_terminal)
    own = signal.signal(signal.SIGHUP, before)
    told: list[int] = []
    try:
        with on_hangup(lambda: told.append(1)):
            assert (signal.getsignal(signal.SIGHUP) is not before) is is_taken
            if is_taken:
                signal.raise_signal(signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is before
    finally:
        signal.signal(signal.SIGHUP, own)
    assert told == [1] * is_taken
