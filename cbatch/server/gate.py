"""Who may call: who has a key; without keys, who names the server rightly and is no page from elsewhere."""

from __future__ import annotations

import hashlib
import hmac
from contextlib import suppress
from ipaddress import ip_address
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from cbatch.checks import shown
from cbatch.logs import Log
from cbatch.server.call_record import CallRecord
from cbatch.server.exchange import Exchange
from cbatch.server.http_errors import CROWDED, HttpProblemError, crowded
from cbatch.server.telemetry import begun_span, end_span

if TYPE_CHECKING:
    from collections.abc import Set as AbstractSet

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from cbatch.server.meters import Meters
    from cbatch.server.server_settings import ServerSettings

_log = Log("cbatch.server")

_POLL, _POLLED = b"x-cbatch-poll", ("/slots", "/metrics")
"""The header of the page's questions of each second, and their routes: they are no request that somebody made."""

_OPEN_PATHS = ("/health", "/v1/health")
"""What needs no key, and is answered over any connection."""

_READING = ("GET", "HEAD")
"""Methods that change nothing: a page from elsewhere cannot read their answers either."""


class Gate:
    """Gives each request its id, logs and counts it, and lets in who may call."""

    def __init__(
        self, app: ASGIApp, settings: ServerSettings, keyless: AbstractSet[str], meters: Meters
    ) -> None:
        self._app, self._settings, self._keyless, self._meters = app, settings, keyless, meters
        keys = [key.encode() for key in settings.api_keys]
        self._owners = [(_digest(key), owner_of(key)) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it before its body is read."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = CallRecord()
        record.span = begun_span(scope, record.id)
        mine = {"request_id": record.id, "record": record}
        scope["state"] = {**scope.get("state", {}), **mine}

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                named = [(name, record.id.encode()) for name in (b"x-request-id", b"request-id")]
                message["headers"] = [*message["headers"], *named]
            await send(message)

        try:
            problem = self._refusal(scope, record)
            if problem is None:
                await self._app(scope, receive, send_with_id)
            else:
                await Exchange(scope, receive, send_with_id).respond_problem(problem)
        finally:
            self._note(scope, record)

    def _note(self, scope: Scope, record: CallRecord) -> None:
        """Log and count a request that has ended; an error without an answer is a 500, sent further out.

        A poll of the page is not counted, and logged where the level is DEBUG.
        """
        status = record.status or 500
        is_poll = record.route in _POLLED and any(name == _POLL for name, _ in scope["headers"])
        if not is_poll:
            self._meters.n_http[record.route, status] += 1
            if record.span is not None:
                end_span(record.span, scope["method"], record.route, status)
        if _log.has_debug if is_poll else _log.has_info:
            _log.tell(
                "http",
                request_id=record.id,
                method=scope["method"],
                path=scope["path"],
                status=status,
                latency_ms=record.latency_ms,
            )

    def _refusal(self, scope: Scope, record: CallRecord) -> HttpProblemError | None:
        """Return why a request may not enter; note the owner of one that may."""
        if (why := _unclear(scope)) is not None:
            headers = {"connection": "close"}
            return HttpProblemError(
                400, f"this is no request: {why}", "invalid_http", headers=headers
            )
        path = _path_in(scope)
        if scope["method"] == "OPTIONS" or path in _OPEN_PATHS:
            return None
        if CROWDED in scope["state"]:
            return crowded()
        if not self._owners:
            return _misled(scope, self._settings)
        owner = self._owner(scope)
        if owner is None and path not in self._keyless:
            headers = {"www-authenticate": "Bearer"}
            message = "a valid API key is needed"
            return HttpProblemError(401, message, "invalid_api_key", headers=headers)
        record.owner = owner or ""
        return None

    def _owner(self, scope: Scope) -> str | None:
        """Return the owner that a request's key stands for; None without a valid key."""
        given = [_digest(key) for key in _keys_in(scope)]
        # every pair is compared, so that time says nothing
        found = [owner for a in given for b, owner in self._owners if hmac.compare_digest(a, b)]
        return found[0] if found else None


def _path_in(scope: Scope) -> str:
    """Return the path as this application knows it: it may be mounted in another one."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


def owner_of(key: bytes) -> str:
    """Return what stands for a key's owner, on disk too: nobody gets the key from it."""
    return hashlib.sha256(b"cbatch: owner of files and cells\0" + key).hexdigest()[:32]


def _keys_in(scope: Scope) -> list[bytes]:
    """Return the keys that a request gives, by any of the headers that clients use."""
    found = []
    for name, value in scope["headers"]:
        if name in (b"x-api-key", b"api-key"):
            found.append(value.strip())
        elif name == b"authorization" and value[:7].lower() == b"bearer ":
            found.append(value[7:].strip())
    return found


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


# ---- requests that a proxy may have read otherwise ----


def _unclear(scope: Scope) -> str | None:
    """Return why the length or the host of a request is not clear; parsers differ in what they let pass.

    Source: RFC 9112, 3.2 and 6.1.
    """
    n_hosts, n_lengths, codings = 0, 0, []
    for name, value in scope["headers"]:
        n_hosts += name == b"host"
        n_lengths += name == b"content-length"
        if name == b"transfer-encoding":
            codings.append(value.strip().lower())
    if n_hosts > 1:
        return "it has more than one Host"
    if codings and codings != [b"chunked"]:
        return "its transfer-encoding is not supported"
    if n_lengths + len(codings) > 1:
        return "it tells its length more than once"
    return None


# ---- browsers ----


def _misled(scope: Scope, settings: ServerSettings) -> HttpProblemError | None:
    """Return why a request that needs no key may be one that a web page from elsewhere has made.

    Such a page reaches what its reader's browser reaches: by a name of its own that is bound to the server's address
    anew, which the header `Host` tells, or by a request whose answer it cannot read, but which is done.
    """
    headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
    host = headers.get(b"host")
    if host is not None and not _is_ours(host, scope, settings):
        name = _name_in(host)
        message = (
            f"without API keys, this server is called by an IP address, localhost or an allowed host, not "
            f"{shown(host)}: start it with --allowed-host {name or 'NAME'} (allowed_hosts), or with keys"
        )
        return HttpProblemError(403, message, "host_not_allowed")
    if scope["method"] not in _READING and _is_foreign(headers, settings):
        origin = headers.get(b"origin")
        pages = "other origins" if origin is None else shown(origin)
        message = (
            f"without API keys, web pages of {pages} may not write here: "
            "start the server with --cors-origin (cors_origins) for them, or with keys"
        )
        return HttpProblemError(403, message, "origin_not_allowed")
    return None


def _is_ours(host: str, scope: Scope, settings: ServerSettings) -> bool:
    """Whether a `Host` names this server; over what is no network, any does."""
    server = scope.get("server")
    if server is None or not _is_address(str(server[0])):
        return True
    name = _name_in(host)
    is_local = name == "localhost" or name.endswith(".localhost")
    allowed = {allowed.lower() for allowed in settings.allowed_hosts}
    return is_local or _is_address(name) or "*" in allowed or name in allowed


def _is_foreign(headers: dict[bytes, str], settings: ServerSettings) -> bool:
    """Whether a web page of another origin asks, and none that may."""
    origin, site = headers.get(b"origin"), headers.get(b"sec-fetch-site")
    if "*" in settings.cors_origins or origin in settings.cors_origins:
        return False
    if site is not None:  # which only a browser says
        return site not in ("same-origin", "none")
    return origin is not None and origin.partition("://")[2] != headers.get(b"host")


def _name_in(host: str) -> str:
    """Return the name in a `Host`, without its port; empty where there is none."""
    with suppress(ValueError):
        return (urlsplit(f"//{host}").hostname or "").rstrip(".")
    return ""


def _is_address(name: str) -> bool:
    with suppress(ValueError):
        ip_address(name.partition("%")[0])
        return True
    return False
