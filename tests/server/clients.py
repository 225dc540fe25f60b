"""Applications on fake backends, and clients that call them: in one task, or over a socket."""

from __future__ import annotations

import json
import socket
import subprocess
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import anyio
import httpx

from cbatch.backend.fake import FakeBackend
from cbatch.engine import Engine
from cbatch.server import create_app
from cbatch.server.connections import ConnectionLimits
from cbatch.server.ending import Ending
from cbatch.server.front import Front
from cbatch.server.serving import DrainingServer, bound_socket, config_of

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from starlette.applications import Starlette

    from cbatch.server.front import Renewal

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES = "/v1/messages"
USER = [{"role": "user", "content": "Hi"}]
PATIENCE_S = 60.0

TYPES = {
    "context_length_exceeded": "exceed_context_size_error",
    "invalid_api_key": "authentication_error",
    "not_implemented": "not_supported_error",
}
"""Types of errors that llama-server's clients look for, by code."""


@contextmanager
def fake_app(*sizes: int, engine: Engine | None = None, **settings: Any) -> Iterator[Starlette]:
    """An application over a fake backend."""
    with engine or Engine(FakeBackend(*(sizes or (4, 256)))) as opened:
        yield create_app(opened, **settings)


def call(
    app: Starlette,
    path: str,
    body: Any = None,
    *,
    method: str | None = None,
    backend: str = "asyncio",
    client_host: str = "127.0.0.1",
    **more: Any,
) -> httpx.Response:
    """What one request is answered, in a loop of its own."""
    if body is not None and not isinstance(body, bytes):
        more["json"] = body
    elif body is not None:
        more["content"] = body
    method = method or ("GET" if body is None else "POST")

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(app, client=(client_host, 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.request(method, path, **more)

    return anyio.run(ask, backend=backend)


def leave_once(app: Starlette, path: str, body: Any, is_so: Callable[[], bool]) -> None:
    """Call, and leave as soon as it is so; return when the application is done with that."""

    async def leave() -> None:
        transport = httpx.ASGITransport(app)
        client = httpx.AsyncClient(transport=transport, base_url="http://test")
        async with client, anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: client.post(path, json=body))
            await anyio.to_thread.run_sync(wait_until, is_so)
            tasks.cancel_scope.cancel()

    anyio.run(leave)


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    """The events of a stream that ended as it should, without the comments of its silences."""
    assert response.status_code == 200, response.text
    *events, last, rest = response.text.split("\n\n")
    assert (last, rest) == ("data: [DONE]", "")
    return [json.loads(e.removeprefix("data: ")) for e in events if not e.startswith(":")]


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    """The error of an answer with this status."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert error.keys() >= {"message", "type", "param", "code"}
    usual = "invalid_request_error" if status < 500 else "server_error"
    assert error["type"] == TYPES.get(error["code"], usual)
    found: dict[str, Any] = error
    return found


def message_of(response: httpx.Response) -> dict[str, Any]:
    """The message of a stream in Anthropic's format, whose events come as they should."""
    assert response.status_code == 200, response.text
    *frames, rest = response.text.split("\n\n")
    assert rest == ""
    first, *events, ending, last = [_named(frame) for frame in frames if "event: ping" not in frame]
    assert first["type"] == "message_start"
    assert last == {"type": "message_stop"}
    message: dict[str, Any] = first["message"]
    n_input = message["usage"]["input_tokens"]
    for event in events:
        _add(message["content"], event)
    for block in message["content"]:
        assert block.pop("is_closed")
        if block["type"] == "tool_use":
            block["input"] = json.loads(block["input"])
    assert ending.keys() == {"type", "delta", "usage"}
    message |= {**ending["delta"], "usage": ending["usage"]}
    usage = message["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == n_input
    return message


def _named(frame: str) -> dict[str, Any]:
    name, data = frame.split("\n")
    value: dict[str, Any] = json.loads(data.removeprefix("data: "))
    assert name == f"event: {value['type']}"
    return value


def _add(content: list[dict[str, Any]], event: dict[str, Any]) -> None:
    """Add an event to the blocks so far."""
    if event["type"] == "content_block_start":
        assert event["index"] == len(content)
        assert all(block["is_closed"] for block in content)
        content.append({**event["content_block"], "is_closed": False})
        if content[-1]["type"] == "tool_use":
            assert content[-1]["input"] == {}
            content[-1]["input"] = ""
        return
    block = content[-1]
    assert event["index"] == len(content) - 1
    assert not block["is_closed"]
    if event["type"] == "content_block_stop":
        block["is_closed"] = True
        return
    assert event["type"] == "content_block_delta"
    kind = event["delta"]["type"]
    ((key, part),) = ((key, part) for key, part in event["delta"].items() if key != "type")
    keys = {"text": ["text"], "thinking": ["thinking", "signature"], "tool_use": ["partial_json"]}
    assert key in keys[block["type"]]
    named = {"partial_json": "input_json_delta"}
    assert kind == named.get(key, f"{key}_delta")
    block["input" if key == "partial_json" else key] += part


def certificate_files(folder: Path, password: str | None) -> tuple[str, str]:
    """Files of a certificate and its key, made by openssl."""
    certificate, key = str(folder / "cert.pem"), str(folder / "key.pem")
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-subj", "/CN=localhost"]
    lock = ["-nodes"] if password is None else ["-passout", f"pass:{password}"]
    made = [*command, *lock, "-keyout", key, "-out", certificate]
    subprocess.run(made, check=True, capture_output=True)
    return certificate, key


class Running:
    """A server on a loopback port, in a thread."""

    def __init__(self, app: Starlette, server: DrainingServer, ending: Ending, url: str) -> None:
        self.app, self.server, self.ending, self.url = app, server, ending, url

    def client(self, **more: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=PATIENCE_S, **more)


@contextmanager
def running(
    app: Starlette,
    *,
    grace_s: float = 0.0,
    port: int = 0,
    renewal: Renewal | None = None,
    tls: ssl.SSLContext | None = None,
    **limits: Any,
) -> Iterator[Running]:
    """Serve an application until the end of the block, with limits of connections."""
    is_ready = threading.Event()
    front = Front(app, renewal, grace_s)
    config = config_of(front, tls, ConnectionLimits(**limits))
    ending = Ending(grace_s)
    server = DrainingServer(config, front, ending, is_ready.set)

    def serve() -> None:
        with ending.serving(front.drain, bool):
            server.run(sockets=[address])

    with bound_socket("127.0.0.1", port) as address:
        thread = threading.Thread(target=serve)
        thread.start()
        assert is_ready.wait(PATIENCE_S)
        try:
            scheme = "https" if tls else "http"
            yield Running(app, server, ending, f"{scheme}://127.0.0.1:{address.getsockname()[1]}")
        finally:
            ending.begin()
            thread.join(PATIENCE_S)
            assert not thread.is_alive()


def connected(server: Running, sent: bytes = b"", n_buffer: int | None = None) -> socket.socket:
    """A socket to a server, over which bytes were sent."""
    found = socket.socket()
    found.settimeout(PATIENCE_S)
    if n_buffer is not None:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, n_buffer)
    found.connect(("127.0.0.1", httpx.URL(server.url).port or 0))
    found.sendall(sent)
    return found


def scope_of(path: str, method: str = "POST", **more: Any) -> dict[str, Any]:
    """The scope of a request with a body in JSON, for an application that is called by hand."""
    said = {"type": "http", "http_version": "1.1", "method": method, "scheme": "http"}
    where = {"path": path, "raw_path": path.encode(), "root_path": "", "query_string": b""}
    headers = [(b"content-type", b"application/json"), (b"host", b"localhost")]
    ends = {"server": ("127.0.0.1", 80), "client": None, "headers": headers}
    return {**said, **where, **ends, **more}


def wait_until(is_so: Callable[[], bool]) -> None:
    """Let other threads run until it is so; fails rather than hangs."""
    for _ in range(int(PATIENCE_S * 1000)):
        if is_so():
            return
        threading.Event().wait(0.001)
    raise AssertionError("it never was so")
