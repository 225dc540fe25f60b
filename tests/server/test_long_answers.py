"""Long answers are made in parts, in a thread, as their clients take them."""

from __future__ import annotations

import json
import threading
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from cbatch import Engine
from cbatch.backend.fake import FakeBackend
from cbatch.bench.experiments.http_load import request
from cbatch.server.exchange import N_PART
from cbatch.server.http_errors import HttpProblemError, draining
from cbatch.support.lazy_json import LazyList
from tests.server.clients import (
    CHAT,
    COMPLETIONS,
    USER,
    connected,
    fake_app,
    running,
    wait_until,
)
from tests.server.test_large_bodies import Client

if TYPE_CHECKING:
    from collections.abc import Iterator

    from starlette.applications import Starlette

SCORED = {"max_tokens": 90, "ignore_eos": True, "seed": 1}
TOPS: dict[str, Any] = {**SCORED, "logprobs": True, "top_logprobs": 20}
RESPONSE = {
    "input": "ab",
    "max_output_tokens": 190,
    "top_logprobs": 20,
    "include": ["message.output_text.logprobs"],
    "ignore_eos": True,
}
LONG = [
    (CHAT, {**TOPS, "messages": USER, "n": 8}),
    (CHAT, {**TOPS, "messages": USER, "n": 8, "best_of": 8, "stream": True}),
    (COMPLETIONS, {**SCORED, "logprobs": 20, "prompt": ["ab"] * 8}),
    (COMPLETIONS, {"prompt": ["ab" * 50] * 8, "max_tokens": 1, "prompt_logprobs": 20}),
    ("/completion", {"prompt": ["ab"] * 8, "n_predict": 90, "n_probs": 20, "ignore_eos": True}),
    ("/completion", {"prompt": ["ab"] * 200, "n_predict": 1}),
    ("/v1/responses", RESPONSE),
    ("/v1/responses", {**RESPONSE, "stream": True}),
    ("/v1/embeddings", {"input": ["ab"] * 800}),
    ("/v1/rerank", {"query": "a", "documents": ["ab" * 20] * 600, "return_documents": True}),
    ("/tokenize", {"content": "ab" * 9000, "with_pieces": True}),
]


class Made:
    """How many items of lazy lists were made, and how many of them in the event loop's thread."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.n = self.n_in_loop = 0
        self.loop: int | None = None
        items_of = LazyList.__iter__

        def counted(lazy: LazyList) -> Iterator[Any]:
            for item in items_of(lazy):
                self.n += 1
                self.n_in_loop += threading.get_ident() == self.loop
                yield item

        patch.setattr(LazyList, "__iter__", counted)


class SlowClient(Client):
    """Takes the first part of an answer, and then notes how much of it is made."""

    def __init__(self, path: str, body: Any, made: Made) -> None:
        super().__init__(path, body)
        self._made = made
        self.n_at_first: int | None = None

    async def send(self, message: Any) -> None:
        if self.n_at_first is None and len(message.get("body", b"")) >= N_PART:
            await anyio.sleep(0.01)
            self.n_at_first = self._made.n
        await super().send(message)


@pytest.mark.parametrize(("path", "body"), LONG)
def test_long_answer_is_made_in_parts_as_it_is_taken(
    path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Made(monkeypatch)
    client: SlowClient | None = None

    async def main(app: Starlette) -> None:
        nonlocal client
        made.loop = threading.get_ident()
        client = SlowClient(path, body, made)
        await client.ask(app)

    backend = FakeBackend(4, 256)
    backend.pooling = "rank" if "rerank" in path else "mean"
    with fake_app(engine=Engine(backend)) as app:
        anyio.run(main, app)
    assert client is not None
    first, *parts = client.sent
    assert first["status"] == 200
    assert b"content-length" not in dict(first["headers"])
    sizes = [len(part["body"]) for part in parts]
    assert max(sizes) < 4 * N_PART
    assert sum(sizes) > 4 * N_PART
    assert client.n_at_first is not None
    assert client.n_at_first < made.n / 2
    assert made.n_in_loop < made.n / 2
    data = b"".join(part["body"] for part in parts)
    if not body.get("stream"):
        json.loads(data)


def test_error_within_a_long_event_is_no_event() -> None:
    """The server ends while a client takes an event: what follows would be read as a part of it."""
    sent: list[bytes] = []

    async def main(app: Starlette) -> None:
        class Leaving(Client):
            async def send(self, message: Any) -> None:
                sent.append(message.get("body", b""))
                if len(sent[-1]) >= N_PART:
                    app.state.desk.end_visits(draining())
                    await anyio.sleep_forever()

        with pytest.raises(HttpProblemError, match="shutting down"):
            await Leaving("/v1/responses", {**RESPONSE, "stream": True}).ask(app)

    with fake_app() as app:
        anyio.run(main, app)
    assert not sent[-1].endswith(b"\n\n")


@pytest.mark.parametrize("stream", [True, False])
def test_end_within_a_long_answer_that_nobody_reads_is_one_line(
    caplog: pytest.LogCaptureFixture, *, stream: bool
) -> None:
    body = {**RESPONSE, "max_output_tokens": 8000, "stream": stream}
    with fake_app(1, 8192) as app:
        with running(app) as server, connected(server, request("/v1/responses", body), 4096):
            connections = server.server.server_state.connections
            wait_until(lambda: any(c.transport.get_write_buffer_size() for c in [*connections]))
            server.ending.begin()
            wait_until(lambda: not server.server.server_state.tasks)
        told = [record.getMessage() for record in caplog.records]
    assert [line.partition(": ")[2] for line in told] == [
        "the answer was cut off: the server is shutting down"
    ]
