"""TLS: handshakes that stall or fail, and what a client gets over it."""

from __future__ import annotations

import asyncio
import importlib.util
import socket
import ssl
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from cbatch.bench.experiments.http_load import request
from cbatch.server.serving import DrainingServer, tls_of
from tests.server.clients import (
    CHAT,
    PATIENCE_S,
    USER,
    Running,
    call,
    certificate_files,
    fake_app,
    running,
    wait_until,
)

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.real, pytest.mark.usefixtures("loop")]
ASKED = {"messages": USER, "max_tokens": 2, "seed": 1}
HEALTH = b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"


@pytest.fixture(params=["uvloop", "asyncio"])
def loop(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The event loop of the server."""
    if request.param == "asyncio":
        monkeypatch.setattr(
            DrainingServer, "run", lambda self, sockets: asyncio.run(self.serve(sockets))
        )
    elif importlib.util.find_spec("uvloop") is None:
        pytest.skip("uvloop is not installed")


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> ssl.SSLContext:
    folder: Path = tmp_path_factory.mktemp("tls")
    found = tls_of(*certificate_files(folder, None))
    assert found is not None
    return found


def opened(server: Running) -> socket.socket:
    """A connection without a handshake."""
    url = httpx.URL(server.url)
    return socket.create_connection((url.host, url.port or 0), PATIENCE_S)


def secured(server: Running, version: ssl.TLSVersion | None = None) -> ssl.SSLSocket:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if version is not None:
        context.maximum_version = version
    return context.wrap_socket(opened(server))


def all_from(connection: socket.socket) -> bytes:
    data = b""
    with suppress(ConnectionResetError):
        while part := connection.recv(2**16):
            data += part
    return data


def connections_of(server: Running) -> set[Any]:
    return server.server.server_state.connections


def test_stalled_handshakes_above_the_limit_keep_nobody_out(tls: ssl.SSLContext) -> None:
    with fake_app() as app, running(app, n_max=4, tls=tls) as server, ExitStack() as stack:
        stalled = [stack.enter_context(opened(server)) for _ in range(4 + 64 + 32)]
        for one in stalled[4:]:
            assert all_from(one) == b""  # closed within a second, or at once
        wait_until(lambda: len(connections_of(server)) == 4)
        with server.client(verify=False) as client:
            assert client.get("/health").status_code == 200
            answer = client.post(CHAT, json=ASKED)
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "too_many_connections"


@pytest.mark.parametrize("sent", [b"", b"\x16\x03\x01\x02\x00\x01"])
def test_stalled_handshake_has_the_time_of_a_header(tls: ssl.SSLContext, sent: bytes) -> None:
    with (
        fake_app() as app,
        running(app, header_timeout_s=0.2, tls=tls) as server,
        opened(server) as stalled,
    ):
        stalled.sendall(sent)
        assert all_from(stalled) == b""
        wait_until(lambda: not connections_of(server))


@pytest.mark.parametrize("sent", [HEALTH, b""], ids=["plain HTTP", "nothing"])
def test_failed_handshake_is_closed_and_logs_nothing(
    tls: ssl.SSLContext, sent: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with fake_app() as app, running(app, tls=tls) as server:
        with opened(server) as one:
            one.sendall(sent)
            one.shutdown(socket.SHUT_WR)
            assert b"HTTP" not in all_from(one)
        wait_until(lambda: not connections_of(server))
    assert not [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")]


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_request_right_behind_the_handshake_is_answered(
    tls: ssl.SSLContext, version: ssl.TLSVersion
) -> None:
    with fake_app() as app, running(app, tls=tls) as server:
        with secured(server):
            wait_until(lambda: any(one.scheme == "https" for one in [*connections_of(server)]))
        for _ in range(20):
            with secured(server, version) as one:
                one.sendall(request(CHAT, ASKED))
                got = all_from(one)
            assert got.startswith(b"HTTP/1.1 200")
        with server.client(verify=False) as client:
            answer = client.post(CHAT, json=ASKED).json()
        assert answer["choices"] == call(app, CHAT, ASKED).json()["choices"]
        wait_until(lambda: not connections_of(server))


def test_server_ends_while_handshakes_stall(tls: ssl.SSLContext) -> None:
    with fake_app() as app, running(app, tls=tls) as server, ExitStack() as stack:
        for _ in range(8):
            stack.enter_context(opened(server))
        wait_until(lambda: len(connections_of(server)) == 8)
        server.ending.begin()
        wait_until(lambda: not connections_of(server))
