"""Servers that keep files and batches, and what clients ask of them."""

from __future__ import annotations

import json
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from cbatch import Engine
from cbatch.backend.fake import FakeBackend
from cbatch.server import create_app
from cbatch.server.batch_index import ENDED
from tests.server.clients import CHAT, USER, call, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import httpx
    from starlette.applications import Starlette

    from cbatch.server.batch_store import BatchStore
    from tests.runtime.backends import GatedBackend

SHORT = {"max_tokens": 5, "temperature": 0, "ignore_eos": True, "seed": 1}


@contextmanager
def kept_app(folder: Path, engine: Engine | None = None, **settings: Any) -> Iterator[Starlette]:
    """An application over a fake backend that keeps files; at the end its batches are left to the next one."""
    with engine or Engine(FakeBackend(4, 256)) as opened:
        app = create_app(opened, files_dir=folder / "kept", **settings)
        try:
            yield app
        finally:
            app.state.desk.close()


def line(id: str, url: str = CHAT, **body: Any) -> dict[str, Any]:
    """A request of a batch; without a body a short chat."""
    return {
        "custom_id": id,
        "method": "POST",
        "url": url,
        "body": body or {"model": "m", "messages": USER, **SHORT},
    }


def lines(*requests: dict[str, Any]) -> bytes:
    return b"".join(json.dumps(request).encode() + b"\n" for request in requests)


def upload(
    app: Starlette,
    data: bytes,
    name: str = "in.jsonl",
    headers: Any = None,
    **fields: str,
) -> httpx.Response:
    said = {"purpose": "batch", **fields}
    files = {"file": (name, data)}
    return call(app, "/v1/files", method="POST", files=files, data=said, headers=headers)


def begun(app: Starlette, data: bytes, endpoint: str = CHAT, **more: Any) -> str:
    """The id of a new batch over a new file."""
    file = upload(app, data)
    assert file.status_code == 200, file.text
    return begun_over(app, file.json()["id"], endpoint, **more)


def begun_over(app: Starlette, file: str, endpoint: str = CHAT, **more: Any) -> str:
    asked = {"input_file_id": file, "endpoint": endpoint, "completion_window": "24h", **more}
    answer = call(app, "/v1/batches", asked)
    assert answer.status_code == 200, answer.text
    batch = answer.json()
    assert batch["status"] == "validating"
    id: str = batch["id"]
    return id


def begun_and_held(app: Starlette, backend: GatedBackend, data: bytes) -> tuple[str, Path]:
    """The id of a new batch and the file of its answers, of which there are some; more come when the app ends."""
    id = begun(app, data)
    backend.wait_until_held()
    store: BatchStore = app.state.desk.batches.store
    place = store.folder_of(store.batch(id, "")) / "answers.jsonl"
    wait_until(lambda: place.exists() and place.stat().st_size > 0)
    # what is still read of the batch hurries the engine too
    backend.release_when_asked(lambda: app.state.desk.batches.is_closed)
    return id, place


def batch_of(app: Starlette, id: str) -> dict[str, Any]:
    answer = call(app, f"/v1/batches/{id}")
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def ended(app: Starlette, id: str) -> dict[str, Any]:
    """A batch when it has ended."""
    wait_until(lambda: batch_of(app, id)["status"] in ENDED)
    return batch_of(app, id)


def content(app: Starlette, file: str | None) -> list[dict[str, Any]]:
    """The lines of a file; none where there is no file."""
    if file is None:
        return []
    answer = call(app, f"/v1/files/{file}/content")
    assert answer.status_code == 200, answer.text
    return [json.loads(one) for one in answer.content.splitlines()]


def answers(app: Starlette, batch: dict[str, Any]) -> dict[str, Any]:
    """The answers of a batch by id, each once, and errors as they are counted."""
    done, wrong = (content(app, batch[f"{name}_file_id"]) for name in ("output", "error"))
    counts = batch["request_counts"]
    assert (len(done), len(wrong)) == (counts["completed"], counts["failed"])
    assert all(each["response"]["status_code"] == 200 and each["error"] is None for each in done)
    found = {each["custom_id"]: each for each in (*done, *wrong)}
    assert len(found) == len(done) + len(wrong)
    return found
