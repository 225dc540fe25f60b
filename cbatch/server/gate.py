"""Who may call: clients with a key; without keys, requests with an allowed `Host` and no foreign origin."""

from __future__ import annotations

import hashlib
import re
from contextlib import suppress
from ipaddress import ip_address
from typing import TYPE_CHECKING

from cbatch.server.exchange import CallRecord, Exchange
from cbatch.server.http_errors import CROWDED, HttpProblemError, crowded
from cbatch.server.telemetry import begun_span, end_span
from cbatch.support.checks import shown
from cbatch.support.logs import Log

if TYPE_CHECKING:
    from collections.abc import Set as AbstractSet

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from cbatch.server.meters import Meters
    from cbatch.server.server_settings import ServerSettings

_log = Log("cbatch.server")

_POLL, _POLLED = b"x-cbatch-poll", ("/slots", "/metrics")
"""The header of the page's polls, one a second, and their routes. Polls are not counted as requests."""

OPEN_PATHS = ("/health", "/v1/health")
"""Paths that need no key and are answered over any connection."""

_READING = ("GET", "HEAD")
"""Methods that change nothing. Browsers hide their answers from pages of other origins."""

_HOST = re.compile(
    r"(\[[0-9A-Fa-f:.]+(?:%[\w.~-]+)?\]|(?:[\w.~!$&'()*+,;=-]|%[0-9A-Fa-f]{2})*)(?::\d*)?", re.ASCII
)
"""A `Host`: a name or an address, and a port. Source: RFC 9110, 7.2; RFC 3986, 3.2.2; RFC 6874 for zones."""


class Gate:
    """Gives each request its id, logs and counts it, and admits or refuses it."""

    def __init__(
        self, app: ASGIApp, settings: ServerSettings, keyless: AbstractSet[str], meters: Meters
    ) -> None:
        self._app, self._settings, self._keyless, self._meters = app, settings, keyless, meters
        keys = [key.encode() for key in settings.api_keys]
        # looked up by a digest, so that the time reveals nothing of a key
        self._owners = {_digest(key): owner_of(key) for key in keys}

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
        """Log and count a request that has ended. An error without an answer counts as 500, which an outer layer sends.

        A poll of the page is not counted, and is logged at DEBUG.
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
        """Return why a request is refused, or None; note the owner of an admitted one."""
        if (why := _unclear(scope)) is not None:
            headers = {"connection": "close"}
            return HttpProblemError(
                400, f"the HTTP request is invalid: {why}", "invalid_http", headers=headers
            )
        path = scope["path"].removeprefix(scope.get("root_path", ""))  # where it is mounted
        if scope["method"] == "OPTIONS" or path in OPEN_PATHS:
            return None
        if CROWDED in scope["state"]:
            return crowded()
        if not self._owners:
            return _misled(scope, self._settings)
        owner = self._owner(scope)
        if owner is None and path not in self._keyless:
            headers = {"www-authenticate": "Bearer"}
            message = (
                "a valid API key is required: send it as Authorization: Bearer KEY or x-api-key"
            )
            return HttpProblemError(401, message, "invalid_api_key", headers=headers)
        record.owner = owner or ""
        return None

    def _owner(self, scope: Scope) -> str | None:
        """Return the owner that a request's key stands for; None without a valid key."""
        found = (self._owners.get(_digest(key)) for key in _keys_in(scope))
        return next(filter(None, found), None)


def owner_of(key: bytes) -> str:
    """Return the name of a key's owner, also on disk: a hash, from which nobody gets the key."""
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


# ---- requests that a proxy may read differently ----


def _unclear(scope: Scope) -> str | None:
    """Return why the length or host of a request is ambiguous, or None; parsers differ in what they accept.

    Source: RFC 9112, 3.2 and 6.1.
    """
    hosts: list[bytes] = []
    n_lengths, codings = 0, []
    for name, value in scope["headers"]:
        if name == b"host":
            hosts.append(value)
        n_lengths += name == b"content-length"
        if name == b"transfer-encoding":
            codings.append(value.strip().lower())
    if (why := _bad_host(hosts, scope)) is not None:
        return why
    if codings and codings != [b"chunked"]:
        return "its transfer-encoding is not supported"
    if n_lengths + len(codings) > 1:
        return "it gives its length more than once"
    return None


def _bad_host(hosts: list[bytes], scope: Scope) -> str | None:
    """Return why the `Host` headers of a request are not those of its version of HTTP, or None."""
    if len(hosts) > 1:
        return "it has more than one Host header"
    if not hosts and scope.get("http_version") == "1.1":
        return "it has no Host header"
    if hosts and _HOST.fullmatch(hosts[0].decode("latin-1").strip(" \t")) is None:
        return "its Host header is not a name or address, with or without a port"
    return None


# ---- browsers ----


def _misled(scope: Scope, settings: ServerSettings) -> HttpProblemError | None:
    """Return why a request without a key may come from a web page of another origin, or None.

    Such a page reaches every server that its reader's browser reaches. It may rebind a name of its own to the server's
    address, which `Host` shows; or it may send a request whose answer it cannot read but which is carried out.
    """
    headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
    host = headers.get(b"host")
    if host is not None and not _is_ours(host, scope, settings):
        name = _name_in(host)
        message = (
            f"without API keys, the Host header must be an IP address, localhost or an allowed host, not "
            f"{shown(host)}: start the server with --allowed-host {name or 'NAME'} (allowed_hosts), or with keys"
        )
        return HttpProblemError(403, message, "host_not_allowed")
    if scope["method"] not in _READING and _is_foreign(headers, settings):
        origin = headers.get(b"origin")
        pages = "other origins" if origin is None else shown(origin)
        message = (
            f"without API keys, web pages of {pages} may not send this request: "
            "allow the origin with --cors-origin (cors_origins), or start the server with keys"
        )
        return HttpProblemError(403, message, "origin_not_allowed")
    return None


def _is_ours(host: str, scope: Scope, settings: ServerSettings) -> bool:
    """Whether a `Host` names this server. Over a Unix socket any name does."""
    server = scope.get("server")
    if server is None or not _is_address(str(server[0])):
        return True
    name = _name_in(host)
    is_local = name == "localhost" or name.endswith(".localhost")
    allowed = {allowed.lower() for allowed in settings.allowed_hosts}
    return is_local or _is_address(name) or "*" in allowed or name in allowed


def _is_foreign(headers: dict[bytes, str], settings: ServerSettings) -> bool:
    """Whether the request comes from a web page of an origin that is not allowed."""
    origin, site = headers.get(b"origin"), headers.get(b"sec-fetch-site")
    if settings.is_allowed_origin(origin or ""):
        return False
    if site is not None:  # only browsers send it
        return site not in ("same-origin", "none")
    return origin is not None and origin.partition("://")[2] != headers.get(b"host")


def _name_in(host: str) -> str:
    """Return the name in a `Host` without its port and brackets, in lower case."""
    found = _HOST.fullmatch(host.strip(" \t"))
    return "" if found is None else found[1].strip("[]").lower().removesuffix(".")


def _is_address(name: str) -> bool:
    with suppress(ValueError):
        ip_address(name)
        return True
    return False
