"""What the owner of a key has is nobody else's: files, batches, cells on disk. No answer tells a path of the server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from cbatch import Engine, RunOptions
from cbatch.backend.fake import FakeBackend
from cbatch.cache.store import CacheStore
from cbatch.server.gate import owner_of
from tests.places import can_all
from tests.server.clients import (
    CHAT,
    COMPLETIONS,
    MESSAGES,
    USER,
    call,
    error_of,
    fake_app,
    wait_until,
)
from tests.server.kept import SHORT, kept_app, line, lines, upload

if TYPE_CHECKING:
    from pathlib import Path

    import httpx
    from starlette.applications import Starlette

KEYS: dict[str, Any] = {"api_keys": ["key-of-ada", "key-of-bob"]}
ADA, BOB = ({"x-api-key": key} for key in KEYS["api_keys"])
SAVED = {"prompt": "x" * 40, "max_tokens": 2, "cache_key": "k", "save_cache": True}
REQUIRED = {"prompt": "x" * 40 + "y", "max_tokens": 2, "cache_key": "k", "cache_required": True}


def uploaded(app: Starlette, headers: dict[str, str]) -> str:
    answer = upload(app, lines(line("a")), "a", headers)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["id"])


def begun(app: Starlette, file: str, headers: dict[str, str]) -> httpx.Response:
    asked = {"input_file_id": file, "endpoint": CHAT, "completion_window": "24h"}
    return call(app, "/v1/batches", asked, headers=headers)


def ids(app: Starlette, path: str, headers: dict[str, str]) -> list[str]:
    return [each["id"] for each in call(app, path, headers=headers).json()["data"]]


# ---- files and batches ----


def test_files_and_batches_of_a_key_are_not_there_for_another(tmp_path: Path) -> None:
    with kept_app(tmp_path, **KEYS) as app:
        file = uploaded(app, ADA)
        batch = begun(app, file, ADA).json()["id"]
        asked = {"requests": [{"custom_id": "a", "params": {"model": "m", "max_tokens": 2}}]}
        messages = call(app, f"{MESSAGES}/batches", asked, headers=ADA).json()["id"]
        of_messages = f"{MESSAGES}/batches/{messages}"

        def status() -> Any:
            return call(app, f"/v1/batches/{batch}", headers=ADA).json()

        wait_until(lambda: status()["status"] == "completed")
        output = status()["output_file_id"]
        path = f"{of_messages}/results"
        wait_until(lambda: call(app, path, headers=ADA).status_code == 200)
        for method, place in [
            *(("GET", f"/v1/files/{id}{end}") for id in (file, output) for end in ("", "/content")),
            ("DELETE", f"/v1/files/{file}"),
            ("GET", f"/v1/files?after={file}"),
            ("GET", f"/v1/batches/{batch}"),
            ("POST", f"/v1/batches/{batch}/cancel"),
            ("GET", f"/v1/batches?after={batch}"),
            ("GET", of_messages),
            ("GET", path),
            ("POST", f"{of_messages}/cancel"),
            ("DELETE", of_messages),
            ("GET", f"{MESSAGES}/batches?after_id={messages}"),
        ]:
            answer = call(app, place, method=method, headers=BOB)
            assert answer.status_code == 404, (method, place, answer.text)
        error_of(begun(app, file, BOB), 404)
        for place in ("/v1/files", "/v1/batches", f"{MESSAGES}/batches"):
            assert ids(app, place, BOB) == []
        assert {file, output} <= {*ids(app, "/v1/files", ADA)}
        assert ids(app, "/v1/batches", ADA) == [batch]
        assert ids(app, f"{MESSAGES}/batches", ADA) == [messages]


def test_next_server_knows_the_owner_and_no_key_is_on_disk(
    tmp_path: Path,
) -> None:
    with kept_app(tmp_path, **KEYS) as app:
        file = uploaded(app, ADA)
    for settings, headers, found in [(KEYS, ADA, [file]), (KEYS, BOB, []), ({}, {}, [])]:
        with kept_app(tmp_path, **settings) as app:
            assert ids(app, "/v1/files", headers) == found
    kept = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert owner_of(b"key-of-ada").encode() in kept
    assert b"key-of-ada" not in kept


def test_files_made_without_a_key_are_those_of_a_server_without_keys(tmp_path: Path) -> None:
    with kept_app(tmp_path) as app:
        file = uploaded(app, {})
        batch = begun(app, file, {}).json()["id"]
    with kept_app(tmp_path, **KEYS) as app:
        assert ids(app, "/v1/files", ADA) == ids(app, "/v1/batches", ADA) == []
    with kept_app(tmp_path) as app:
        assert file in ids(app, "/v1/files", {})
        assert ids(app, "/v1/batches", {}) == [batch]


# ---- cells on disk ----


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/v1/responses", MESSAGES])
@pytest.mark.parametrize("name", ["cache_key", "save_cache", "cache_required"])
def test_cells_on_disk_are_refused_unless_the_server_allows_them(
    app: Starlette, path: str, name: str
) -> None:
    chat: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
    body: dict[str, Any] = {COMPLETIONS: {"prompt": "a"}, "/v1/responses": {"input": "a"}}.get(
        path, chat
    )
    said: dict[str, Any] = {name: "k" if name == "cache_key" else True}
    answer = call(app, path, {**body, **said})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert name in error["message"]
    assert "--allow-cache-keys" in error["message"]
    assert error.get("param", name) == name
    assert call(app, path, {**body, "save_cache": False}).status_code == 200


def test_line_of_a_batch_cannot_keep_cells_either(tmp_path: Path) -> None:
    body: dict[str, Any] = {"model": "m", "messages": USER, **SHORT}
    with kept_app(tmp_path) as app:
        data = lines(line("a", **body, cache_key="k", save_cache=True))
        form: dict[str, Any] = {"files": {"file": ("a", data)}, "data": {"purpose": "batch"}}
        file = call(app, "/v1/files", method="POST", **form).json()["id"]
        batch = begun(app, file, {}).json()["id"]
        wait_until(lambda: call(app, f"/v1/batches/{batch}").json()["status"] == "completed")
        errors = call(app, f"/v1/batches/{batch}").json()["error_file_id"]
        assert "--allow-cache-keys" in call(app, f"/v1/files/{errors}/content").text


def test_cells_of_a_key_are_not_read_known_or_replaced_by_another(
    tmp_path: Path,
) -> None:
    engine = Engine(FakeBackend(memory=can_all(1024)), cache_dir=tmp_path / "cells")
    with fake_app(engine=engine, allow_cache_keys=True, **KEYS) as app:

        def asked(body: dict[str, Any], headers: dict[str, str]) -> httpx.Response:
            return call(app, COMPLETIONS, body, headers=headers)

        assert asked(SAVED, ADA).status_code == 200
        unknown = error_of(asked(REQUIRED, BOB), 400)
        assert unknown["message"] == "cache_key: no cells are saved under this key"
        assert (unknown["param"], unknown["code"]) == ("cache_key", "cache_unusable")
        never = error_of(asked({**REQUIRED, "cache_key": "never"}, BOB), 400)
        assert {**never, "message": unknown["message"]} == unknown
        read = {**SAVED, "save_cache": False}
        (warning,) = asked(read, BOB).json()["cbatch"]["warnings"]
        assert warning == "cache_key: no cells are saved under this key"
        assert asked({**SAVED, "prompt": "z" * 30}, BOB).status_code == 200
        assert asked(REQUIRED, ADA).status_code == 200
    keys = sorted(file.key for file in CacheStore(tmp_path / "cells", 2**30).files())
    assert keys == sorted(f"{owner_of(key.encode())}/k" for key in KEYS["api_keys"])


def test_cells_need_a_key_of_the_request_with_room_for_its_space() -> None:
    options = RunOptions(cache_key="of-the-operator")
    with fake_app(
        engine=Engine(FakeBackend(4, 256), options=options), allow_cache_keys=True
    ) as app:
        body = {"prompt": "a", "max_tokens": 1, "save_cache": True}
        error = error_of(call(app, COMPLETIONS, body), 400)
        assert error["message"] == "save_cache needs a cache_key in the same request"
        error = error_of(call(app, COMPLETIONS, {**body, "cache_key": "k" * 1024}), 400)
        assert "cache_key must be a string of 1 … 1016 characters" in error["message"]


def test_prompts_of_a_key_share_cells_with_each_other_alone() -> None:
    engine = Engine(FakeBackend(4, 256))
    with fake_app(engine=engine, **KEYS) as app:

        def n_cached(headers: dict[str, str], **more: Any) -> int:
            body = {"prompt": "x" * 100, "max_tokens": 1, **more}
            usage = call(app, COMPLETIONS, body, headers=headers).json()["usage"]
            n_cached: int = usage["prompt_tokens_details"]["cached_tokens"]
            return n_cached

        assert n_cached(ADA) == 0
        assert n_cached(BOB) == 0
        assert n_cached(ADA) > 90
        assert n_cached(BOB, cache_salt="of one client") == 0
        assert n_cached(BOB) > 90
        assert n_cached(BOB, cache_salt="of one client") > 90
        answer = call(app, COMPLETIONS, {"prompt": "a", "cache_salt": "s" * 1020}, headers=ADA)
        assert "cache_salt must be a string of 1 … " in error_of(answer, 400)["message"]
