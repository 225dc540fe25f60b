"""Connections over a socket: half requests, broken ones, too many, and clients that vanish or do not read."""

from __future__ import annotations

import asyncio
import json
import os
import re
import resource
import socket
import threading
from contextlib import closing, suppress
from functools import partial
from http.client import HTTPConnection
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from cbatch import Engine
from cbatch.backend.fake import FakeBackend
from cbatch.bench.experiments.http_faults import MOMENTS, vanish_all
from cbatch.bench.experiments.http_load import heard, request
from cbatch.bench.server_process import n_open_files
from cbatch.errors import ConfigError
from cbatch.server import create_app
from cbatch.server.connections import Turns
from cbatch.server.serving import limits_for
from tests.runtime.backends import GatedBackend
from tests.server.clients import (
    CHAT,
    USER,
    Running,
    call,
    connected,
    fake_app,
    running,
    wait_until,
)
from tests.server.kept import begun, ended, kept_app, line, lines

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from cbatch.bench.experiments.http_load import Heard

ASKED = {"messages": USER, "max_tokens": 2, "seed": 1}
LONG = {**ASKED, "max_tokens": 3000, "ignore_eos": True, "logprobs": True, "top_logprobs": 5}
"""Whose answer is more than the buffers between server and client hold."""

HEADER_S = 1.0
"""A limit within which a client that is in no hurry sends what it has; waited for where nothing more comes."""


def rest_of(connection: socket.socket) -> Heard:
    """All that comes until the server closes the connection."""
    data = b""
    while part := connection.recv(2**16):
        data += part
    return heard(data)


KEPT_OPEN = request(CHAT, ASKED).replace(b"connection: close\r\n", b"")


def answer_on(connection: socket.socket) -> bytes:
    """An answer in JSON on a connection that is kept open."""
    data = b""
    while not data.endswith(b"}"):
        data += connection.recv(2**16)
    return data


def error_in(got: Heard) -> dict[str, Any]:
    head, _, body = got.data.partition(b"\r\n\r\n")
    assert b"content-type: application/json" in head
    assert b"connection: close" in head.lower()
    error: dict[str, Any] = json.loads(body)["error"]
    assert error["type"] == ("invalid_request_error" if (got.status or 0) < 500 else "server_error")
    return error


# ---- half requests and broken ones ----


@pytest.mark.real
@pytest.mark.parametrize("is_behind", [False, True])
def test_half_header_is_told_also_behind_an_answer(is_behind: bool) -> None:
    with (
        fake_app() as app,
        running(app, header_timeout_s=HEADER_S) as server,
        connected(server, KEPT_OPEN if is_behind else b"") as one,
    ):
        if is_behind:
            assert heard(answer_on(one)).status == 200
        one.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost: ")
        got = rest_of(one)
    assert got.status == 408
    assert error_in(got)["code"] == "invalid_http"


@pytest.mark.real
def test_answer_that_takes_longer_than_a_header_may_is_given() -> None:
    backend = GatedBackend(1, 256, hold_at=0)
    with (
        Engine(backend) as engine,
        running(create_app(engine), header_timeout_s=HEADER_S) as server,
        connected(server, request(CHAT, ASKED)) as one,
    ):
        backend.wait_until_held()
        with connected(server) as idle:
            assert rest_of(idle).data == b""  # the time is over
        backend.release()
        assert rest_of(one).status == 200


POST = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
HEAD = POST + b"transfer-encoding: chunked\r\n"
BROKEN = {
    "no HTTP": b"nonsense\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(200)),
    "bad length": POST + b"content-length: x\r\n\r\n",
    "two lengths": POST + b"content-length: 1\r\ncontent-length: 2\r\n\r\n",
    "bad header": b"GET / HTTP/1.1\r\nhost: localhost\r\nauthorization : secret\r\n\r\n",
    "bad chunk": HEAD + b"\r\nxyz\r\n",
}


@pytest.mark.real
def test_broken_http_is_told_in_json_and_disturbs_nobody(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"), fake_app() as app, running(app) as server:
        for name, sent in BROKEN.items():
            with connected(server, sent) as broken:
                got = rest_of(broken)
            assert got.status == 400, name
            assert error_in(got)["code"] == "invalid_http"
            assert b"secret" not in got.data
        with server.client() as client:
            answer = client.post(CHAT, json=ASKED).json()
        assert answer["choices"] == call(app, CHAT, ASKED).json()["choices"]
        wait_until(lambda: app.state.desk.n_in_flight == 0)
    assert "secret" not in caplog.text


@pytest.mark.real
@pytest.mark.parametrize(
    "data",
    [
        HEAD + b"\r\n1;" + b"a" * 2**20,
        HEAD + b"\r\n" + (b"1;" + b"a" * 1000 + b"\r\n \r\n") * 1000,
        HEAD + b"\r\n2\r\n{}\r\n0\r\n" + b"x-a: b\r\n" * 2**17,
        HEAD + b"\r\n" + b"1\r\n \r\n" * 2**17,
    ],
    ids=["one extension", "extensions", "trailers", "chunks of one byte"],
)
@pytest.mark.parametrize("api_keys", [(), "k"])
def test_body_that_is_mostly_framing_is_refused(data: bytes, api_keys: Any) -> None:
    with (
        fake_app(api_keys=api_keys) as app,
        running(app, header_timeout_s=600.0) as server,
        connected(server) as connection,
    ):
        with suppress(OSError):  # it is closed before all is sent
            connection.sendall(data)
        with suppress(ConnectionResetError):
            got = rest_of(connection)
            assert got.status == 401 if api_keys else error_in(got)["code"] == "invalid_http"
        wait_until(lambda: not server.server.server_state.connections)


@pytest.mark.real
def test_body_in_small_chunks_is_read() -> None:
    body = json.dumps({"prompt": "a" * 2**15, "max_tokens": 1}).encode()
    chunks = b"".join(b"1\r\n" + bytes([byte]) + b"\r\n" for byte in body)
    with fake_app(2, 2**16) as app, running(app) as server, connected(server) as connection:
        connection.sendall(HEAD + b"connection: close\r\n\r\n" + chunks + b"0\r\n\r\n")
        assert rest_of(connection).status == 200


UPGRADES = {
    "h2c": "connection: Upgrade, HTTP2-Settings, close\r\nhttp2-settings: AAEA\r\nupgrade: h2c",
    "websocket": "connection: close\r\nconnection: upgrade\r\nupgrade: websocket",
}


@pytest.mark.real
@pytest.mark.parametrize(
    ("name", "is_chunked", "is_cut"),
    [
        ("h2c", False, True),
        ("h2c", True, False),
        ("websocket", False, False),
        ("websocket", True, True),
    ],
)
def test_request_for_an_upgrade_is_answered_as_any_other(
    name: str, is_chunked: bool, is_cut: bool
) -> None:
    asked = request(CHAT, ASKED).replace(b"connection: close", UPGRADES[name].encode())
    head, _, body = asked.partition(b"\r\n\r\n")
    if is_chunked:
        head = re.sub(rb"content-length: \d+", b"transfer-encoding: chunked", head)
        body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    with fake_app() as app, running(app) as server, connected(server) as one:
        one.sendall(head + b"\r\n\r\n" + (b"" if is_cut else body))
        if is_cut:
            opened: set[Any] = server.server.server_state.connections
            wait_until(lambda: any(connection.cycle is not None for connection in [*opened]))
            one.sendall(body)
        got = rest_of(one)
        expected = call(app, CHAT, ASKED).json()["choices"]
    assert got.status == 200
    assert json.loads(got.data.partition(b"\r\n\r\n")[2])["choices"] == expected


INNER = b"GET /slots HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"


@pytest.mark.real
def test_request_inside_the_body_of_one_for_an_upgrade_is_not_served() -> None:
    head = POST + b"content-length: %d\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n" % len(INNER)
    last = INNER.replace(b"/slots", b"/health")
    with fake_app() as app, running(app) as server, connected(server, head + INNER + last) as one:
        got = rest_of(one).data
    assert got.count(b"HTTP/1.1 ") == 2
    assert got.startswith(b"HTTP/1.1 400")
    assert b"invalid_json" in got
    assert b'"status":"ok"' in got
    assert b"is_processing" not in got


@pytest.mark.real
def test_many_requests_for_an_upgrade_in_one_packet_are_each_answered() -> None:
    asked = (
        b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n"
    )
    with fake_app() as app, running(app) as server, connected(server, asked * 300 + INNER) as one:
        got = rest_of(one).data
    assert got.count(b"HTTP/1.1 200") == 301


PIPELINED = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"


def opened_at(server: Running) -> list[Any]:
    """The connections of a server, as its own objects."""
    return list(server.server.server_state.connections)


def n_kept_by(server: Running) -> int:
    """The bytes of requests, read or not, that wait in a server behind other requests."""
    return sum(
        len(getattr(one, "_ahead", b"")) + len(PIPELINED) * len(one.pipeline)
        for one in opened_at(server)
    )


@pytest.mark.real
def test_request_behind_another_is_read_when_that_one_is_answered() -> None:
    n_behind, backend = 500, GatedBackend(1, 256, hold_at=0)
    chunked = HEAD + b"\r\n5\r\n\r\n\r\n{\r\n1;a=b\r\n}\r\n0\r\nx-a: b\r\n\r\n"
    sent = KEPT_OPEN + PIPELINED * n_behind + chunked + INNER
    with (
        Engine(backend) as engine,
        running(create_app(engine)) as server,
        connected(server, sent) as one,
    ):
        backend.wait_until_held()
        assert not any(one.pipeline for one in opened_at(server))
        assert server.server.server_state.total_requests == 0
        backend.release()
        got = rest_of(one).data
    assert got.count(b"HTTP/1.1 200") == 1 + n_behind + 1
    assert got.index(b"chat.completion") < got.index(b'"status":"ok"') < got.index(b"HTTP/1.1 400")
    assert got.index(b"HTTP/1.1 400") < got.index(b"is_processing")


@pytest.mark.real
def test_requests_that_come_faster_than_they_are_answered_are_not_kept() -> None:
    n_most = 2**16 + 2 * 2**18  # the limit, and what one read brings over it, by the parser too
    with fake_app() as app, running(app) as server, connected(server) as one:
        one.setblocking(False)
        data, most, n_answered = memoryview(PIPELINED * 200_000), 0, 0
        while n_answered < 1000:
            with suppress(BlockingIOError):
                data = data[one.send(data[: 2**18]) :]
            with suppress(BlockingIOError):
                n_answered += one.recv(2**16).count(b"HTTP/1.1 200")
            most = max(most, n_kept_by(server))
    assert 0 < most <= n_most


@pytest.mark.real
@pytest.mark.parametrize("is_streamed", [True, False])
def test_client_that_leaves_with_requests_behind_each_other_gives_up_all(
    is_streamed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    asked = request(CHAT, {**ASKED, "stream": is_streamed}).replace(b"connection: close\r\n", b"")
    backend = GatedBackend(1, 256, hold_at=0)
    with Engine(backend) as engine, running(app := create_app(engine)) as server:
        with connected(server, asked * 2):
            backend.wait_until_held()
        wait_until(lambda: not app.state.desk.n_in_flight)
        backend.release()
        with server.client() as client:
            assert client.post(CHAT, json=ASKED).status_code == 200
        assert engine.stats().n_finished == {"cancelled": 1, "length": 1}
    assert not [r for r in caplog.records if r.levelname == "ERROR"]


TOO_LARGE = request(CHAT, {"user": "x" * 2**18}).replace(b"connection: close\r\n", b"")


@pytest.mark.real
def test_header_behind_a_request_that_was_refused_early_has_the_same_limit() -> None:
    with (
        fake_app(api_keys="k") as app,
        running(app, n_header_bytes=4096) as server,
        connected(server, TOO_LARGE) as one,
    ):
        answer_on(one)
        one.sendall(b"GET /health HTTP/1.1\r\nx-large: " + b"x" * 9999)
        assert rest_of(one).status == 431


BODY = b"\r\n2\r\n{}\r\n0\r\n"
CONNECT = b"CONNECT localhost:80 HTTP/1.1\r\nhost: localhost\r\n\r\n"
REFUSED: dict[str, tuple[bytes, set[int], str]] = {
    "length told twice": (HEAD + HEAD[-28:] + BODY + b"\r\n", {400, 501}, "invalid_http"),
    "no coding": (
        HEAD + b"transfer-encoding: identity\r\n" + BODY + b"\r\n",
        {400, 501},
        "invalid_http",
    ),
    "two lengths": (HEAD + b"content-length: 2\r\n" + BODY + b"\r\n", {400, 501}, "invalid_http"),
    "key in a trailer": (HEAD + BODY + b"x-api-key: k\r\n\r\n", {401}, "invalid_api_key"),
    "tunnel": (CONNECT + INNER, {405}, "this is not a valid request: this server is not a proxy"),
}
"""What is sent; the statuses, as the parser has them; and words of the answer."""


@pytest.mark.real
def test_request_of_another_meaning_to_others_is_refused() -> None:
    for name, (sent, statuses, words) in REFUSED.items():
        data = sent.replace(b"host: localhost\r\n", b"host: localhost\r\nconnection: close\r\n", 1)
        with (
            fake_app(api_keys="k") as app,
            running(app) as server,
            connected(server, data) as one,
        ):
            got = rest_of(one)
        assert got.status in statuses, name
        assert words.encode() in got.data, name
        assert b"is_processing" not in got.data


@pytest.mark.real
@pytest.mark.parametrize("is_ended", [True, False])
def test_large_header_is_refused(is_ended: bool) -> None:
    with fake_app() as app, running(app, n_header_bytes=4096) as server:
        sent = request(CHAT, ASKED, f"x-large: {'x' * 9999}")
        with connected(server, sent if is_ended else sent[:9000]) as large:
            got = rest_of(large)
    assert got.status == 431
    assert "too large" in error_in(got)["message"]


def test_a_round_of_the_loop_reads_a_few_small_requests_and_seldom_another() -> None:
    now, rounds = 0.0, [list[str]()]
    turns = Turns(lambda: now)

    def read(name: str) -> None:
        rounds[-1].append(name)
        if name == "a":  # there is more to read
            turns.ask(partial(read, "z"), 0, "")
        if name == "broken":
            raise RuntimeError(name)

    async def main() -> None:
        nonlocal now
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)
        for queue, names in enumerate(("abcdefghijklmnopqrs", "ABCDE", "123", "56", "89")):
            for name in names:
                turns.ask(partial(read, name), queue, "")
        turns.ask(partial(read, "broken"), 1, "")
        for seconds in (0.01, 0.03, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0):
            await asyncio.sleep(0)
            rounds.append([])
            now += seconds

    asyncio.run(main())
    wanted = ["abcdefghAB1", "ijklmnopCD", "qrszEbroken", "5", "8", "2", "6", "9", "3"]
    assert [*map("".join, rounds)] == wanted


def test_clients_take_turns() -> None:
    turns, done = Turns(), list[str]()

    async def main() -> None:
        for name in ("a1", "a2", "a3", "a4", "b1", "c1", "b2"):
            turns.ask(partial(done.append, name), 0, name[0])
        await asyncio.sleep(0)

    asyncio.run(main())
    assert done == ["a1", "b1", "c1", "a2", "b2", "a3", "a4"]


@pytest.fixture
def queues(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The queues in which what came over connections has waited."""
    queues, ask = list[int](), Turns.ask

    def recorded(turns: Turns, read: Callable[[], None], queue: int, client: str) -> None:
        assert client == "127.0.0.1"
        queues.append(queue)
        ask(turns, read, queue, client)

    monkeypatch.setattr(Turns, "ask", recorded)
    return queues


@pytest.mark.real
def test_request_behind_another_waits_with_such_requests_only(queues: list[int]) -> None:
    sent = PIPELINED * 5 + INNER
    with fake_app() as app, running(app) as server, connected(server, sent) as one:
        assert rest_of(one).data.count(b"HTTP/1.1 200") == 6
    assert queues == [0] + [4] * 5


@pytest.mark.real
def test_end_of_a_large_request_waits_with_large_ones(queues: list[int]) -> None:
    sent = request(CHAT, {**ASKED, "user": "x" * 5000})
    with fake_app() as app, running(app) as server, connected(server, KEPT_OPEN) as one:
        assert heard(answer_on(one)).status == 200
        one.sendall(sent[:-1])
        wait_until(lambda: len(queues) > 1)
        one.sendall(sent[-1:])
        assert rest_of(one).status == 200
    assert queues[0] == 1
    assert queues[-1] == 2


@pytest.mark.real
def test_header_that_waits_for_the_server_is_not_late(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting, ask = list[Any](), Turns.ask
    monkeypatch.setattr(Turns, "ask", lambda _, read, *__: waiting.append(read))
    with (
        fake_app() as app,
        running(app, header_timeout_s=HEADER_S / 10) as server,
        connected(server, PIPELINED + INNER) as one,
        connected(server) as idle,
    ):
        assert rest_of(idle).data == b""
        monkeypatch.setattr(Turns, "ask", ask)
        (protocol,) = opened_at(server)
        protocol.loop.call_soon_threadsafe(waiting.pop())
        assert rest_of(one).data.count(b"HTTP/1.1 200") == 2


HEADERS = (
    ("\r\n".join(["a: b"] * 200), 200, ""),
    ("\r\n".join(["a: b"] * 300), 431, "its header has more than 256 lines"),
    (f"a: {'x' * 8000}", 200, ""),
    (f"a: {'x' * 9000}", 431, "a line of its header has more than 8,192 bytes"),
)


@pytest.mark.real
def test_header_of_many_or_long_lines_is_refused() -> None:
    with fake_app() as app, running(app) as server:
        for header, status, why in HEADERS:
            sent = request(CHAT, ASKED, header)
            with connected(server, sent[:400]) as one:
                one.sendall(sent[400:])
                got = rest_of(one)
            assert got.status == status
            if status == 431:
                assert why in error_in(got)["message"]


@pytest.mark.real
@pytest.mark.parametrize(
    ("n_files", "loop", "n_listeners"),
    [(4096, "uvloop", 32), (64, "uvloop", 1), (4096, None, 1)],
)
def test_many_connections_are_let_in_at_once(
    monkeypatch: pytest.MonkeyPatch, n_files: int, loop: str | None, n_listeners: int
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (n_files, n_files))
    monkeypatch.setattr("cbatch.server.serving.find_spec", lambda _: loop)
    with (
        fake_app() as app,
        running(app) as server,
        connected(server, request(CHAT, ASKED)) as one,
    ):
        assert len(server.server.servers) == n_listeners
        assert rest_of(one).status == 200


@pytest.mark.real
def test_client_hears_a_refusal_though_it_still_sends_its_body() -> None:
    large = {**ASKED, "user": "x" * 2**23}
    with fake_app(max_body_mib=1) as app, running(app) as server, server.client() as client:
        assert client.post(CHAT, json=large).status_code == 413
        assert client.post(CHAT, json=ASKED).status_code == 200
    with fake_app(api_keys="k") as app, running(app) as server, server.client() as client:
        assert client.post(CHAT, json=large).status_code == 401
        assert client.get("/health").status_code == 200


@pytest.mark.real
@pytest.mark.parametrize("is_chunked", [False, True])
def test_client_that_sends_a_large_body_whole_hears_why_it_is_refused(*, is_chunked: bool) -> None:
    body = json.dumps({**ASKED, "user": "x" * 2**25}).encode()
    headers = {"content-type": "application/json"}
    if is_chunked:
        headers["transfer-encoding"] = "chunked"
    said = iter([body[: 2**24], body[2**24 :]]) if is_chunked else body
    with fake_app(max_body_mib=1) as app, running(app) as server:
        client = HTTPConnection("127.0.0.1", httpx.URL(server.url).port)
        with closing(client):
            client.request("POST", CHAT, said, headers, encode_chunked=is_chunked)
            assert client.getresponse().status == 413


@pytest.mark.real
def test_request_that_arrives_with_the_rest_of_a_refused_body_is_answered() -> None:
    head, rest = TOO_LARGE[:1000], TOO_LARGE[1000:] + INNER.replace(b"/slots", b"/health")
    with fake_app(api_keys="k") as app, running(app) as server, connected(server, head) as one:
        assert heard(answer_on(one)).status == 401
        protocol = next(iter(server.server.server_state.connections))
        loop = server.server.servers[0].get_loop()
        loop.call_soon_threadsafe(protocol.data_received, rest)
        assert rest_of(one).status == 200


@pytest.mark.real
def test_body_goes_on_behind_much_framing_that_came_at_once() -> None:
    with (
        fake_app() as app,
        running(app) as server,
        connected(server, HEAD + b"\r\n") as one,
    ):
        connections: set[Any] = server.server.server_state.connections
        wait_until(lambda: any(each.cycle is not None for each in connections))
        protocol, has_come = next(iter(connections)), threading.Event()

        def come() -> None:
            protocol.data_received(b"2;" + b"x" * 100_000)
            loop.call_soon(has_come.set)

        loop = server.server.servers[0].get_loop()
        loop.call_soon_threadsafe(come)
        wait_until(has_come.is_set)
        one.sendall(b"\r\n{}\r\n0\r\n\r\n")
        got = heard(answer_on(one))
        assert (got.status, b"prompt is missing" in got.data) == (400, True)


# ---- too many, and clients that do not read ----


@pytest.mark.real
def test_connection_above_the_limit_is_told_and_may_ask_for_health() -> None:
    with fake_app() as app, running(app, n_max=1) as server:
        n_connections = server.server.server_state.connections
        with connected(server) as first:
            wait_until(lambda: len(n_connections) == 1)
            with connected(server, request(CHAT, ASKED)) as second:
                got = rest_of(second)
            assert got.status == 503
            assert error_in(got)["code"] == "too_many_connections"
            assert b"retry-after: 1" in got.data
            assert httpx.get(f"{server.url}/health").status_code == 200
            first.close()
        wait_until(lambda: not n_connections)
        with server.client() as client:
            assert client.post(CHAT, json=ASKED).status_code == 200


@pytest.mark.real
def test_connections_far_above_the_limit_are_told_unheard() -> None:
    with fake_app() as app, running(app, n_max=1) as server:
        opened = [connected(server) for _ in range(64 + 1)]
        opened += [connected(server, request(CHAT, ASKED)) for _ in range(64)]
        opened += [connected(server) for _ in range(64)]
        for one in opened[1 + 64 :]:
            got = rest_of(one)
            assert got.status == 503
            assert error_in(got)["code"] == "too_many_connections"
            assert b"retry-after: 1" in got.data
        for one in opened:
            one.close()
        with server.client() as client:
            wait_until(lambda: not server.server.server_state.connections)
            assert client.post(CHAT, json=ASKED).status_code == 200


def test_limit_of_open_files_is_raised_or_lowers_the_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits = [(256, 10_000)]
    chosen: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, pair: chosen.append(pair))
    assert limits_for(1000).n_max == 1000
    ((n_files, n_hard),) = chosen
    assert n_files > 1000
    assert n_hard == 10_000
    limits.append((256, 512))
    assert 100 < limits_for(None).n_max < 512
    assert chosen[-1] == (512, 512)
    with pytest.raises(ConfigError, match=r"--max-connections 1000 needs .* allows 512"):
        limits_for(1000)
    limits.append((16, 20))
    with pytest.raises(ConfigError, match=r"allows 20 open files, but a server needs 64: .*ulimit"):
        limits_for(None)


def with_small_buffers(server: Running) -> None:
    """Have the system keep little of what is sent over connections to come."""
    for listening in server.server.servers:
        for sock in listening.sockets:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)


@pytest.mark.real
@pytest.mark.parametrize("is_streamed", [True, False])
def test_client_that_never_reads_is_dropped(is_streamed: bool) -> None:
    with fake_app(2, 4096) as app, running(app, send_timeout_s=0.1) as server:
        with_small_buffers(server)
        sent = request(CHAT, {**LONG, "stream": is_streamed})
        with connected(server, sent, 4096):
            wait_until(lambda: sum(app.state.desk.engine.stats().n_finished.values()) == 1)
            wait_until(lambda: not server.server.server_state.connections)
            wait_until(lambda: not app.state.desk.n_in_flight)
        with server.client() as client:
            assert client.post(CHAT, json=ASKED).status_code == 200


@pytest.mark.real
def test_slow_reader_takes_no_place_in_the_queue() -> None:
    body = {**LONG, "stream": True}
    with fake_app(1, 4096, max_queue=0) as app, running(app) as server:
        with_small_buffers(server)
        desk = app.state.desk
        with connected(server, request(CHAT, body), 4096):
            wait_until(lambda: desk.n_in_flight == 1 and desk.n_open == 0)
            with server.client() as client:
                assert client.post(CHAT, json=ASKED).status_code == 200
            wait_until(lambda: desk.n_in_flight == 1)  # the slow one is still there


@pytest.mark.real
def test_slow_reader_holds_up_no_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cbatch.server.desk._ASK_S", 1000.0)  # nobody looks again
    asked = request(CHAT, {**LONG, "stream": True})
    with kept_app(tmp_path, Engine(FakeBackend(1, 4096))) as app, running(app) as server:
        with_small_buffers(server)
        desk = app.state.desk
        with connected(server, asked, 4096):
            wait_until(lambda: desk.n_in_flight == 1 and desk.n_open == 0)
            assert ended(app, begun(app, lines(line("a"))))["status"] == "completed"
            assert desk.n_in_flight == 1


@pytest.mark.real
def test_surplus_connection_that_asks_nothing_makes_room_soon() -> None:
    with fake_app() as app, running(app, n_max=1) as server, connected(server):
        wait_until(lambda: len(server.server.server_state.connections) == 1)
        with connected(server) as surplus:
            assert rest_of(surplus).data == b""
        assert httpx.get(f"{server.url}/health").status_code == 200


# ---- clients that vanish ----


@pytest.mark.real
def test_client_that_closes_its_side_of_the_connection_has_left() -> None:
    backend = GatedBackend(1, 256, hold_at=0)
    with Engine(backend) as engine, running(app := create_app(engine)) as server:
        with connected(server, request(CHAT, ASKED)) as one:
            backend.wait_until_held()
            one.shutdown(socket.SHUT_WR)
            assert rest_of(one).data == b""
        wait_until(lambda: not app.state.desk.n_in_flight)
        backend.release()


@pytest.mark.real
def test_clients_that_vanish_leave_no_slot_task_or_file() -> None:
    with fake_app(8, 512) as app, running(app) as server, server.client() as client:
        before = client.post(CHAT, json=ASKED).json()
        loop = server.server.servers[0].get_loop()
        wait_until(lambda: not app.state.desk.n_in_flight)
        tasks, n_files = asyncio.all_tasks(loop), n_open_files(os.getpid())
        port = httpx.URL(server.url).port or 0
        moments = asyncio.run(vanish_all(port, seed=1, n=300, n_at_once=100, n_tokens=60))
        assert set(moments) == {*MOMENTS}
        wait_until(lambda: not app.state.desk.n_in_flight)
        wait_until(lambda: len(server.server.server_state.connections) == 1)  # the good client's
        wait_until(lambda: len(asyncio.all_tasks(loop)) <= len(tasks))
        assert n_open_files(os.getpid()) <= n_files
        stats = app.state.desk.engine.stats()
        assert stats.n_running == stats.n_waiting == stats.n_paused == stats.n_held == 0
        assert {slot["is_processing"] for slot in client.get("/slots").json()} == {False}
        assert client.post(CHAT, json=ASKED).json()["choices"] == before["choices"]
