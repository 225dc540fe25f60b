"""Large bodies wait for each other, and nobody else waits for them."""

from __future__ import annotations

import gc
import json
import threading
import weakref
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import anyio
import httpx
import pytest

from cbatch.engine import Engine
from cbatch.server import exchange, pulse
from tests.runtime.backends import PATIENCE_S
from tests.server.clients import (
    CHAT,
    COMPLETIONS,
    USER,
    call,
    error_of,
    fake_app,
    scope_of,
    wait_until,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from anyio.abc import TaskGroup
    from starlette.applications import Starlette

SMALL: dict[str, Any] = {"messages": USER, "max_tokens": 2}
LARGE: dict[str, Any] = {**SMALL, "user": "x" * 2**17}
MANY: dict[str, Any] = {**SMALL, "unknown": ["x"] * 2**10}


class Held:
    """Work on large bodies, which is held until it is let go."""

    def __init__(self) -> None:
        self.n_begun = self.n_at_once = self.n_most = 0
        self.go = threading.Event()
        self._lock = threading.Lock()

    def of(self, work: Callable[..., Any], *, is_held: Callable[..., bool]) -> Callable[..., Any]:
        """Return work that begins here when it is one that is to be held."""

        def held(*args: Any, **named: Any) -> Any:
            if is_held(*args):
                with self._lock:
                    self.n_begun += 1
                    self.n_at_once += 1
                    self.n_most = max(self.n_most, self.n_at_once)
                assert self.go.wait(PATIENCE_S)
                with self._lock:
                    self.n_at_once -= 1
            return work(*args, **named)

        return held


@contextmanager
def held_bodies(monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    """Reading of large bodies is held until the end of the block."""
    monkeypatch.setattr(pulse, "_PATIENCE_S", PATIENCE_S)
    held = Held()
    read = held.of(exchange.object_of, is_held=lambda data: len(data) > 2**12)
    monkeypatch.setattr(exchange, "object_of", read)
    try:
        yield held
    finally:
        held.go.set()


@pytest.mark.parametrize("body", [LARGE, MANY], ids=["bytes", "values"])
def test_health_and_small_requests_pass_large_bodies(
    body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    statuses: list[int] = []

    async def main(app: Starlette, held: Held) -> None:
        transport = httpx.ASGITransport(app)
        client = httpx.AsyncClient(transport=transport, base_url="http://t")

        async def post() -> None:
            statuses.append((await client.post(CHAT, json=body)).status_code)

        async with client, anyio.create_task_group() as tasks:
            for _ in range(6):
                tasks.start_soon(post)
            while not held.n_begun and not statuses:
                await anyio.lowlevel.checkpoint()
            assert not statuses
            assert (await client.get("/health")).json()["status"] == "ok"
            assert app.state.desk.pulse.answer is not None  # the engine was asked
            assert (await client.post(CHAT, json=SMALL)).status_code == 200
            assert not statuses
            held.go.set()
        assert statuses == [200] * 6

    with fake_app(4, 256) as app, held_bodies(monkeypatch) as held:
        anyio.run(main, app, held)
    assert (held.n_begun, held.n_most) == (6, 1)


class Client:
    """Sends one body to an application, and may leave."""

    def __init__(self, path: str, body: Any) -> None:
        self.path, self.data = path, json.dumps(body).encode()
        self.left, self.waits = anyio.Event(), anyio.Event()
        self.sent: list[Any] = []

    async def receive(self) -> dict[str, Any]:
        if self.data:
            data, self.data = self.data, b""
            return {"type": "http.request", "body": data}
        self.waits.set()
        if not self.left.is_set():  # as uvicorn's, which tells at once what it knows
            await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.sent.append(message)

    async def ask(self, app: Starlette) -> None:
        await app(scope_of(self.path), self.receive, self.send)


async def begun(tasks: TaskGroup, app: Starlette, held: Held, n: int, *asked: Any) -> list[Client]:
    """Return clients whose work has begun."""
    clients = [Client(*asked) for _ in range(n)]
    for client in clients:
        tasks.start_soon(client.ask, app)
    while held.n_begun < n:
        await anyio.lowlevel.checkpoint()
    return clients


def test_body_of_a_client_that_left_in_the_queue_or_before_is_never_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main(app: Starlette, held: Held) -> None:
        early = Client(CHAT, LARGE)
        early.left.set()
        await early.ask(app)
        async with anyio.create_task_group() as tasks:
            await begun(tasks, app, held, 1, CHAT, LARGE)
            late = Client(CHAT, LARGE)
            async with anyio.create_task_group() as waiting:
                waiting.start_soon(late.ask, app)
                await late.waits.wait()
                late.left.set()
            assert not early.sent
            assert not late.sent
            held.go.set()
        assert held.n_begun == 1

    with fake_app(4, 256) as app, held_bodies(monkeypatch) as held:
        anyio.run(main, app, held)


def test_large_body_is_read_without_looks_for_garbage(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []
    object_of = exchange.object_of

    def read(data: bytes) -> dict[str, Any]:
        def note(phase: str, info: dict[str, int]) -> None:
            if threading.get_ident() == reader:
                looks.append(info["generation"])

        reader = threading.get_ident()
        gc.callbacks.append(note)
        try:
            return object_of(data)
        finally:
            gc.callbacks.remove(note)

    monkeypatch.setattr(exchange, "object_of", read)
    with fake_app(4, 256) as app:
        assert call(app, CHAT, {**SMALL, "user": [[]] * 2**15}).status_code == 200
    assert not looks
    assert gc.isenabled()


def test_question_of_a_client_that_left_in_the_queue_is_never_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held = Held()
    work = held.of(Engine.tokenize, is_held=lambda _, text: len(text) > 2**16)
    monkeypatch.setattr(Engine, "tokenize", work)

    async def main(app: Starlette) -> None:
        async with anyio.create_task_group() as tasks:
            first = await begun(tasks, app, held, 4, "/tokenize", {"content": "x" * 2**17})
            late = Client("/tokenize", {"content": "x" * 2**17})
            small = Client("/tokenize", {"content": "x"})
            async with anyio.create_task_group() as waiting:
                waiting.start_soon(late.ask, app)
                await late.waits.wait()
                await small.ask(app)
                late.left.set()
            assert not late.sent
            held.go.set()
        assert [client.sent[0]["status"] for client in (*first, small)] == [200] * 5
        assert held.n_begun == 4

    with fake_app(4, 256) as app:
        try:
            anyio.run(main, app)
        finally:
            held.go.set()


TEXT, TOKENS = "x" * (2**20 + 1), [5] * (2**18 + 1)
CHATTED = {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 1}
TOOLS = [{"type": "function", "function": {"name": "f", "description": TEXT}}]
BEGINNING, MANY_TEXTS = "x" * 2**14, ["a"] * 2048


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/tokenize", {"content": TEXT}, "content"),
        ("/tokenize", CHATTED, "messages"),
        ("/apply-template", CHATTED, "messages"),
        ("/detokenize", {"tokens": TOKENS}, "tokens"),
        (CHAT, {"messages": USER * 2**18}, "messages"),
        (COMPLETIONS, {"prompt": ["a", TEXT], "max_tokens": 1}, "prompt"),
        (COMPLETIONS, {"prompt": [TOKENS, [1]], "max_tokens": 1}, "prompt"),
        ("/responses", {"input": TEXT}, "input"),
        ("/responses/input_tokens", {"input": TEXT}, "input"),
        (CHAT, {**SMALL, "logit_bias": {TEXT: 1}}, "logit_bias"),
        (CHAT, {**SMALL, "tools": TOOLS}, "tools"),
        (CHAT, {**SMALL, "chat_template_kwargs": {"x": {TEXT: 1}}}, "chat_template_kwargs"),
        (CHAT, {**SMALL, "chat_template_kwargs": {"x": [{}] * 60_000}}, "chat_template_kwargs"),
        ("/v1/chat/completions/input_tokens", {**SMALL, "tools": TOOLS}, "tools"),
        ("/v1/embeddings", {"input": ["a", TEXT]}, "input"),
        ("/v1/embeddings", {"input": [[1], TOKENS]}, "input"),
        ("/v1/embeddings", {"input": "a", "instruction": TEXT}, "instruction"),
        ("/v1/rerank", {"query": TEXT, "documents": ["a"]}, "query"),
        ("/v1/rerank", {"query": "a", "texts": [TEXT]}, "documents"),
        ("/v1/score", {"text_1": TEXT, "text_2": ["a"]}, "text_1"),
        ("/v1/messages", {"model": "m", **CHATTED}, None),
        ("/v1/messages/count_tokens", {"model": "m", **CHATTED}, None),
    ],
)
def test_prompt_far_beyond_the_window_is_refused(
    app: Starlette, path: str, body: Any, field: str | None
) -> None:
    answer = call(app, path, body)
    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    assert "at most 262,144 are read" in message or "at most 1,048,576 " in message
    if field is not None:  # Anthropic's errors name none
        error = error_of(answer, 400)
        assert (error["code"], error["param"]) == ("context_length_exceeded", field)
        assert message.startswith("This model's maximum context length is 256 tokens.")


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/embeddings", {"input": MANY_TEXTS, "instruction": BEGINNING}, "instruction"),
        ("/v1/rerank", {"query": BEGINNING, "documents": MANY_TEXTS}, "query"),
        ("/v1/score", {"text_1": BEGINNING, "text_2": MANY_TEXTS}, "text_1"),
    ],
)
def test_beginning_is_not_repeated_without_bound(
    app: Starlette, path: str, body: Any, field: str
) -> None:
    error = error_of(call(app, path, body), 400)
    assert (error["code"], error["param"]) == ("context_length_exceeded", field)
    assert "adds 33,538,048 characters; at most 16,777,216 are allowed" in error["message"]


def test_larger_window_reads_more() -> None:
    with fake_app(1, 2**17) as app:
        assert call(app, "/detokenize", {"tokens": TOKENS}).status_code == 200
        assert len(call(app, "/tokenize", {"content": TEXT}).json()["tokens"]) == len(TEXT)


REFUSED = [
    (CHAT, CHATTED),
    (CHAT, {**LARGE, "temperature": -1}),
    (CHAT, {**LARGE, "grammar": "root ::= ("}),
    ("/responses", {"input": "x" * 4000, "user": "x" * 2**17}),
]


@pytest.mark.parametrize(("path", "body"), REFUSED)
def test_body_that_was_refused_is_garbage_without_a_look(path: str, body: Any) -> None:
    async def main(app: Starlette) -> None:
        client = Client(path, body)
        await client.ask(app)
        assert client.sent[0]["status"] == 400

    with fake_app(4, 256) as app, pytest.MonkeyPatch.context() as patch:
        held = watched_bodies(patch)
        gc.disable()
        try:
            anyio.run(main, app)
            wait_until(
                lambda: [body() for body in held] == [None]
            )  # a thread may have it a moment longer
        finally:
            gc.enable()


class _Body(dict[str, Any]):
    """A body that can be watched."""


def watched_bodies(patch: pytest.MonkeyPatch) -> list[weakref.ref[Any]]:
    """Return a list that gets the bodies that are read from now on."""
    bodies: list[weakref.ref[Any]] = []
    read = exchange.object_of

    def noted(data: bytes) -> dict[str, Any]:
        body = _Body(read(data))
        bodies.append(weakref.ref(body))
        return body

    patch.setattr(exchange, "object_of", noted)
    return bodies
