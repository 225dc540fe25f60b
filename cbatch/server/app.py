"""The application: routes, keys, and errors that no endpoint has made."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.routing import Route

from cbatch.errors import CBatchError
from cbatch.logs import Log
from cbatch.server import small_endpoints as small
from cbatch.server.anthropic_messages import MessagesCall, count_tokens
from cbatch.server.call import Answering
from cbatch.server.desk import Desk
from cbatch.server.exchange import JSON, ClientGoneError, Exchange, dumps
from cbatch.server.http_errors import HttpProblemError, problem_of, told
from cbatch.server.openai_chat import ChatCall
from cbatch.server.openai_completions import CompletionCall
from cbatch.server.server_settings import ServerSettings

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from starlette.requests import Request
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from cbatch.engine import Engine
    from cbatch.server.call import Call

    Handle = Callable[[Desk, Exchange], Awaitable[None]]

_log = Log("cbatch.server")

CLIENT_GONE = 499
"""The log's status of a call whose client has left. Source: nginx."""

_OPEN_PATHS = ("/health", "/v1/health")
"""What needs no key."""


def create_app(engine: Engine, **settings: Any) -> Starlette:
    """Return an ASGI application that answers by `engine`, which it neither loads nor closes.

    Args:
        engine: an engine, in this process or in workers.
        settings: fields of `cbatch.server.server_settings.ServerSettings` by name, which explains them.

    Raises:
        ConfigError: a wrong setting.
    """
    desk = Desk(engine, ServerSettings(**settings))
    app = Starlette(
        routes=_routes(desk),
        middleware=_middleware(desk.settings),
        exception_handlers={HTTPException: _not_routed, Exception: _unexpected},
    )
    app.router.redirect_slashes = False
    app.state.desk = desk
    return app


def _routes(desk: Desk) -> list[Route]:
    """Return all routes, each with `/v1` before it and without."""
    handles: list[tuple[str, str, Handle]] = [
        ("POST", "/chat/completions", partial(_answer, ChatCall.of)),
        ("POST", "/completions", partial(_answer, CompletionCall.of)),
        ("POST", "/messages", partial(_answer, MessagesCall.of)),
        ("POST", "/messages/count_tokens", count_tokens),
        ("GET", "/models", small.models),
        ("GET", "/models/{name:path}", small.model),
        ("GET", "/health", small.health),
        ("GET", "/props", small.props),
        ("GET", "/tokenizer_info", small.tokenizer_info),
        ("POST", "/tokenize", small.tokenize),
        ("POST", "/detokenize", small.detokenize),
        ("POST", "/apply-template", small.apply_template),
    ]
    return [
        Route(prefix + path, Endpoint(desk, handle), methods=[method])
        for method, path, handle in handles
        for prefix in ("/v1", "")
    ]


async def _answer(call_of: Callable[..., Call], desk: Desk, exchange: Exchange) -> None:
    """Answer a call of some dialect."""
    body = await small.body_of(desk, exchange)
    call = call_of(body, is_strict=desk.settings.strict_fields)
    await Answering(desk, exchange, call).run()


class Endpoint:
    """Runs one kind of call as plain ASGI, and tells what went wrong with it."""

    def __init__(self, desk: Desk, handle: Handle) -> None:
        self._desk, self._handle = desk, handle

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        exchange = Exchange(scope, receive, send)
        start_s = time.perf_counter()
        status: int | None = None
        try:
            await self._handle(self._desk, exchange)
        except ClientGoneError:
            status = CLIENT_GONE
        except (HttpProblemError, CBatchError) as error:
            if exchange.status is not None:
                raise
            await exchange.respond_problem(problem_of(error))
        finally:
            if _log.has_info:
                _tell(exchange, status or exchange.status, time.perf_counter() - start_s)


def _tell(exchange: Exchange, status: int | None, seconds: float) -> None:
    """Log how a request was answered; never what it says."""
    _log.tell(
        "http",
        request_id=exchange.id,
        method=exchange.scope["method"],
        path=exchange.scope["path"],
        status=status,
        latency_ms=round(seconds * 1e3, 3),
    )


# ---- around all endpoints ----


def _middleware(settings: ServerSettings) -> list[Middleware]:
    gate = Middleware(Gate, keys=settings.api_keys)
    if not settings.cors_origins:
        return [gate]
    cors = Middleware(
        CORSMiddleware,
        allow_origins=[*settings.cors_origins],
        allow_methods=["*"],
        allow_headers=["*"],
        expose_headers=["x-request-id", "request-id", "x-ignored-fields"],
    )
    return [cors, gate]  # CORS outermost: a refusal has its headers too


class Gate:
    """Gives each request its id, and lets none in without a key, where keys are set."""

    def __init__(self, app: ASGIApp, keys: Sequence[str] = ()) -> None:
        self._app = app
        self._digests = [_digest(key.encode()) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it before its body is read."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        id = f"req_{secrets.token_hex(12)}"
        scope["state"] = {**scope.get("state", {}), "request_id": id}

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                named = [(name, id.encode()) for name in (b"x-request-id", b"request-id")]
                message["headers"] = [*message["headers"], *named]
            await send(message)

        if self._digests and not self._may_enter(scope):
            problem = HttpProblemError(401, "a valid API key is needed", "invalid_api_key")
            exchange = Exchange(scope, receive, send_with_id)
            await exchange.respond_problem(problem, {"www-authenticate": "Bearer"})
            return
        await self._app(scope, receive, send_with_id)

    def _may_enter(self, scope: Scope) -> bool:
        path = scope["path"].removeprefix(scope.get("root_path", ""))  # of another application
        if scope["method"] == "OPTIONS" or path in _OPEN_PATHS:
            return True
        given = [_digest(key) for key in _keys_in(scope)]
        # every pair is compared, so that time says nothing
        same = [hmac.compare_digest(a, b) for a in given for b in self._digests]
        return any(same)


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


async def _not_routed(request: Request, error: Exception) -> Response:
    """Answer a path or a method that is not there."""
    status = getattr(error, "status_code", 500)
    messages = {
        404: f"there is no {request.url.path}",
        405: f"{request.method} is not a method of {request.url.path}",
    }
    codes = {404: "unknown_url", 405: "method_not_allowed"}
    message = messages.get(status, str(getattr(error, "detail", error)))
    problem = HttpProblemError(status, message, codes.get(status))
    headers = dict(getattr(error, "headers", None) or {})
    status, body = told(problem, request.scope)
    return Response(dumps(body), status, headers, media_type=JSON)


async def _unexpected(request: Request, error: Exception) -> Response:
    """Answer where an endpoint has failed; the error itself goes to the log of the server above."""
    problem = problem_of(error)
    status, body = told(problem, request.scope)
    return Response(dumps(body), status, dict(problem.headers), media_type=JSON)
