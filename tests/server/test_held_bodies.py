"""Large bodies are bounded in sum: further ones are refused at once, small ones never."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import anyio
import httpx
import pytest

from cbatch import ConfigError, Engine
from cbatch.backend.fake import FakeBackend
from cbatch.server.http_errors import HttpProblemError
from cbatch.server.server_settings import ServerSettings
from tests.runtime.backends import PATIENCE_S
from tests.server.clients import (
    CHAT,
    COMPLETIONS,
    USER,
    connected,
    error_of,
    fake_app,
    running,
    scope_of,
    wait_until,
)
from tests.server.test_held_answers import Deaf, until
from tests.server.test_large_bodies import Client, watched_bodies

if TYPE_CHECKING:
    from starlette.applications import Starlette

KIB, MIB = 2**10, 2**20
SMALL: dict[str, Any] = {"messages": USER, "max_tokens": 2}
LARGE: dict[str, Any] = {**SMALL, "user": "x" * (500 * KIB)}


class SlowClient(Client):
    """Sends a body but for its end."""

    async def receive(self) -> dict[str, Any]:
        if self.data:
            data, self.data = self.data[:-1], b""
            return {"type": "http.request", "body": data, "more_body": True}
        return await super().receive()


def held(app: Starlette) -> int:
    found: int = app.state.desk.bodies.n_bytes
    return found


def test_body_of_many_values_counts_for_the_memory_that_they_take() -> None:
    async def main(app: Starlette) -> None:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://t") as client:
            for value, status in (("x" * 200 * KIB, 200), ([{}] * 60_000, 429)):
                asked = {**SMALL, "metadata": {"x": value}}
                answer = await client.post(CHAT, json=asked)
                assert (answer.status_code == 429) == (status == 429), answer.text

    with fake_app(max_body_mib=1, max_bodies_mib=1) as app:
        anyio.run(main, app)


def test_large_bodies_are_refused_while_others_have_the_room() -> None:
    async def main(app: Starlette) -> list[int]:
        transport = httpx.ASGITransport(app)
        client = httpx.AsyncClient(transport=transport, base_url="http://t")
        slow = [SlowClient(CHAT, LARGE) for _ in range(2)]
        async with client, anyio.create_task_group() as tasks:
            for one in slow:
                tasks.start_soon(one.ask, app)
            await until(lambda: held(app) > 900 * KIB)
            refused = await client.post(CHAT, json=LARGE)
            error = error_of(refused, 429)
            assert "--max-bodies-mib 1" in error["message"]
            assert refused.headers["retry-after"] == "1"
            statuses = [(await client.post(CHAT, json=SMALL)).status_code]
            slow[0].left.set()
            await until(lambda: held(app) < MIB / 2)
            statuses.append((await client.post(CHAT, json=LARGE)).status_code)
            slow[1].left.set()
        assert not held(app)
        return statuses

    with fake_app(max_body_mib=1, max_bodies_mib=1) as app:
        assert anyio.run(main, app) == [200, 200]


def test_client_that_is_refused_may_go_on_over_its_connection() -> None:
    """Closing a connection while a body comes would discard the answer."""
    data = json.dumps({**SMALL, "user": "x" * 900 * KIB}).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    head += f"content-length: {len(data)}\r\n\r\n"
    with fake_app(max_body_mib=1, max_bodies_mib=1) as app, running(app) as server:
        with connected(server, head.encode() + data[:-1]), server.client() as client:
            wait_until(lambda: held(app) == len(data) - 1)
            refused = client.post(CHAT, content=data, headers={"content-type": "application/json"})
            assert (refused.status_code, client.post(CHAT, json=SMALL).status_code) == (429, 200)
        wait_until(lambda: not held(app))


def test_body_whose_end_makes_it_too_long_is_refused_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main(app: Starlette) -> None:
        client = Client(CHAT, {**SMALL, "user": "x" * MIB})
        with anyio.fail_after(PATIENCE_S):  # it waits for no more of the body
            await client.ask(app)
        assert client.sent[0]["status"] == 413

    monkeypatch.setattr("cbatch.server.exchange._DISCARD_S", math.inf)
    with fake_app(max_body_mib=1) as app:
        anyio.run(main, app)


def test_body_that_stops_gives_its_room_back() -> None:
    async def main(app: Starlette) -> None:
        slow = SlowClient(CHAT, LARGE)
        await slow.ask(app)
        assert slow.sent[0]["status"] == 408

    with fake_app(max_body_mib=1, max_bodies_mib=1, body_timeout_s=0.01) as app:
        anyio.run(main, app)
        assert not held(app)


def test_body_is_refused_by_its_length_before_it_is_read() -> None:
    async def main(app: Starlette) -> None:
        slow, late = SlowClient(CHAT, LARGE), Client(CHAT, LARGE)
        scope = scope_of(CHAT)
        scope["headers"].append((b"content-length", str(900 * KIB).encode()))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(slow.ask, app)
            await until(lambda: held(app) > 0)
            await app(scope, late.receive, late.send)
            slow.left.set()
        assert late.sent[0]["status"] == 429
        assert late.data

    with fake_app(max_body_mib=1, max_bodies_mib=1) as app:
        anyio.run(main, app)


def test_body_of_a_computed_answer_counts_as_a_part_of_it() -> None:
    async def main(app: Starlette) -> None:
        desk, deaf = app.state.desk, Deaf(CHAT, LARGE)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(deaf.ask, app)
            await until(lambda: len(deaf.sent) > 1)
            await until(lambda: not held(app))
            assert desk.answers.n_bytes > 500 * KIB
            tasks.cancel_scope.cancel()
        assert not desk.answers.n_bytes

    with fake_app(max_body_mib=1, max_bodies_mib=1) as app:
        anyio.run(main, app)


PATHS: list[tuple[str, dict[str, Any]]] = [
    (CHAT, SMALL),
    (CHAT, {**SMALL, "stream": True}),
    (COMPLETIONS, {"prompt": ["ab", "a"], "max_tokens": 1}),
    ("/v1/embeddings", {"input": ["ab"]}),
    ("/tokenize", {"content": "ab"}),
    ("/tokenize", {"messages": USER}),
    ("/detokenize", {"tokens": [5]}),
    ("/apply-template", {"messages": USER}),
    ("/v1/chat/completions/input_tokens", SMALL),
]


@pytest.mark.parametrize(("path", "body"), PATHS)
def test_body_is_let_go_once_it_was_read(
    path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What JSON makes of a text takes several times its memory: no call keeps that until its answer."""
    found = watched_bodies(monkeypatch)

    async def main(app: Starlette) -> None:
        deaf = Deaf(path, {**body, "unknown": "x" * 100 * KIB})
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(deaf.ask, app)
            await until(lambda: len(deaf.sent) > 1)
            assert deaf.status == 200
            assert [one() for one in found] == [None]
            tasks.cancel_scope.cancel()

    backend = FakeBackend(4, 256)
    backend.pooling = "mean" if "embed" in path else backend.pooling
    with fake_app(engine=Engine(backend)) as app:
        anyio.run(main, app)


def test_room_for_bodies_has_room_for_the_largest() -> None:
    with pytest.raises(ConfigError, match="max_bodies_mib is 8, and max_body_mib 32"):
        ServerSettings(max_bodies_mib=8)
    with fake_app(max_body_mib=1024) as app:
        app.state.desk.bodies.check(2048 * MIB)
        with pytest.raises(HttpProblemError):
            app.state.desk.bodies.check(2**60)
