"""Who may call: which names and which web pages reach a server without keys, and which requests are not clear."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anyio
import pytest

from cbatch.errors import ConfigError
from cbatch.server.server_settings import ServerSettings
from tests.server.clients import CHAT, MESSAGES, USER, call, error_of, fake_app, scope_of
from tests.server.kept import kept_app

if TYPE_CHECKING:
    from pathlib import Path

    import httpx
    from starlette.applications import Starlette
    from starlette.types import Message

LOOPBACK = "http://127.0.0.1:8080"
ASKED = {"messages": USER, "max_tokens": 2}
SAME = {"origin": LOOPBACK, "sec-fetch-site": "same-origin"}
EVIL = "http://evil.example"


def asked(headers: dict[str, str], address: str = LOOPBACK, **settings: Any) -> httpx.Response:
    """What a chat is answered by a server at an address."""
    with fake_app(**settings) as app:
        return call(app, f"{address}{CHAT}", ASKED, headers=headers)


# ---- names ----


HOSTS = ["127.0.0.1:8080", "LOCALHOST", "app.localhost", "[::1]:8080", "192.0.2.7"]
OTHERS = ["evil.example:8080", "127.0.0.1.evil.example", "localhost.evil", "", "127.0.0.1%2e5"]


def test_address_or_localhost_alone_is_a_name_of_a_server_without_keys(app: Starlette) -> None:
    for host in HOSTS:
        answer = call(app, LOOPBACK + CHAT, ASKED, headers={"host": host})
        assert answer.status_code == 200, host
    for host in OTHERS:
        for address in (LOOPBACK, "http://192.0.2.7", "http://[::1]:80"):
            error = error_of(call(app, address + CHAT, ASKED, headers={"host": host}), 403)
            assert error["code"] == "host_not_allowed"
            assert "--allowed-host" in error["message"]
    assert call(app, f"http://app{CHAT}", ASKED, headers={"host": "any"}).status_code == 200


def test_other_name_may_not_read_either_but_ask_for_health(app: Starlette) -> None:
    for path in ("/", "/slots", "/v1/models", "/props"):
        error_of(call(app, LOOPBACK + path, headers={"host": "evil.example"}), 403)
    assert call(app, f"{LOOPBACK}/health", headers={"host": "evil.example"}).status_code == 200


@pytest.mark.parametrize(
    "settings", [{"allowed_hosts": ["Evil.example"]}, {"allowed_hosts": "*"}, {"api_keys": "k"}]
)
def test_name_that_is_allowed_or_any_with_keys_is_answered(settings: dict[str, Any]) -> None:
    answer = asked({"host": "evil.example:99", "x-api-key": "k"}, **settings)
    assert answer.status_code == 200


# ---- web pages ----


FOREIGN: list[dict[str, str]] = [
    *({"origin": origin} for origin in (EVIL, "null", "http://127.0.0.1:3000")),
    *({"sec-fetch-site": site} for site in ("cross-site", "same-site")),
    {"origin": EVIL, "sec-fetch-site": "cross-site"},
]


def test_page_of_another_origin_cannot_write_without_keys(tmp_path: Path) -> None:
    form: dict[str, Any] = {"files": {"file": ("a", b"{}")}, "data": {"purpose": "batch"}}
    path = f"{LOOPBACK}/v1/files"
    with kept_app(tmp_path) as app:
        for headers in FOREIGN:
            error = error_of(call(app, LOOPBACK + CHAT, ASKED, headers=headers), 403)
            assert error["code"] == "origin_not_allowed"
            error_of(call(app, path, method="POST", headers=headers, **form), 403)
            plain = {**headers, "content-type": "text/plain"}
            error_of(call(app, LOOPBACK + CHAT, b"{}", headers=plain), 403)
            error_of(call(app, f"{path}/x", method="DELETE", headers=headers), 403)
            said = call(app, LOOPBACK + MESSAGES, ASKED, headers=headers).json()
            assert said["error"]["type"] == "permission_error"
        assert call(app, path).json()["data"] == []


@pytest.mark.parametrize(
    ("headers", "settings"),
    [
        ({}, {}),
        (SAME, {}),
        ({"origin": LOOPBACK}, {}),
        ({"sec-fetch-site": "none"}, {}),
        ({"origin": EVIL, "sec-fetch-site": "cross-site"}, {"cors_origins": EVIL}),
        ({"origin": EVIL}, {"cors_origins": "*"}),
        ({"origin": EVIL, "sec-fetch-site": "cross-site", "x-api-key": "k"}, {"api_keys": "k"}),
    ],
)
def test_own_page_and_page_that_may_call_can_write(
    headers: dict[str, str], settings: dict[str, Any]
) -> None:
    assert asked(headers, **settings).status_code == 200


def test_page_of_another_origin_may_link_to_the_page(app: Starlette) -> None:
    headers = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}
    assert call(app, f"{LOOPBACK}/", headers=headers).status_code == 200


# ---- keys ----


@pytest.mark.parametrize("keys", ["", " ", [""], ["good", "\t"]])
def test_blank_key_is_refused(keys: Any) -> None:
    with pytest.raises(ConfigError, match="api_keys has a blank key"):
        ServerSettings(api_keys=keys)


def test_key_counts_without_the_white_space_around_it() -> None:
    with fake_app(api_keys=[" k\n"]) as app:
        assert call(app, CHAT, ASKED, headers={"x-api-key": "k"}).status_code == 200
        assert call(app, CHAT, ASKED, headers={"authorization": "Bearer "}).status_code == 401


# ---- requests that are not clear ----


NOT_CLEAR = [
    [("host", "127.0.0.1"), ("host", "evil.example")],
    [("transfer-encoding", "chunked"), ("content-length", "3")],
    [("transfer-encoding", "identity"), ("transfer-encoding", "chunked")],
    [("transfer-encoding", "gzip, chunked")],
    [("content-length", "3"), ("content-length", "3")],
]
NO_HOSTS = [
    *("localhost#x", "localhost/x", "localhost?x", "evil@localhost", "localhost:80:80"),
    *("localhost:x", "[", "[::1", "::1", "[::1]x", "[x]", "local host", "localhost\\"),
    *("localhost%2", "ä"),
]


@pytest.mark.parametrize("settings", [{}, {"api_keys": "k"}, {"allowed_hosts": "*"}])
def test_request_whose_host_or_length_is_not_clear_is_refused(settings: dict[str, Any]) -> None:
    odd: list[list[tuple[Any, Any]]] = [*NOT_CLEAR]
    odd += [[(b"host", host.encode("latin-1"))] for host in NO_HOSTS]
    with fake_app(**settings) as app:
        for headers in odd:
            key = [("x-api-key", "k")] if isinstance(headers[0][0], str) else [(b"x-api-key", b"k")]
            for path in ("/health", CHAT):
                answer = call(app, LOOPBACK + path, method="POST", headers=[*key, *headers])
                assert error_of(answer, 400)["code"] == "invalid_http"
                assert answer.headers["connection"] == "close"


@pytest.mark.parametrize(("version", "status"), [("1.0", 200), ("1.1", 400), ("2", 200)])
def test_request_of_http_1_1_needs_a_host(app: Starlette, version: str, status: int) -> None:
    sent: list[Message] = []

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Message) -> None:
        sent.append(message)

    scope = scope_of("/health", "GET", http_version=version, headers=[])
    anyio.run(app, scope, receive, send)
    assert sent[0]["status"] == status


# ---- pages of this machine ----


MINE = ["http://localhost", "http://localhost:3000", "https://localhost:8443"]
MINE += ["http://127.0.0.1:5173", "http://[::1]:3000"]
NOT_MINE = [
    *("http://localhost.evil.example", "http://evil.example:3000", "null", "", "file://localhost"),
    *("http://localhost:3000.evil.example", "http://127.0.0.1.evil.example"),
    *("http://evil.example/http://localhost:3000", "http://localhost:3000@evil.example"),
    "http://app.localhost:3000",
]


def test_localhost_stands_for_pages_of_this_machine_alone_at_any_port(app: Starlette) -> None:
    with fake_app(cors_origins="localhost") as local:
        for origin in (*MINE, *NOT_MINE):
            headers = {"origin": origin, "sec-fetch-site": "cross-site"}
            answer = call(local, LOOPBACK + CHAT, ASKED, headers=headers)
            if origin in MINE:
                assert answer.status_code == 200
                assert answer.headers["access-control-allow-origin"] == origin
            else:
                assert error_of(answer, 403)["code"] == "origin_not_allowed"
                assert "access-control-allow-origin" not in answer.headers
            error_of(call(app, LOOPBACK + CHAT, ASKED, headers=headers), 403)
