"""The application: its routes, and errors outside of endpoints."""

from __future__ import annotations

from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.routing import Route

from cbatch.chat.vector_calls import EmbedCall, RerankCall, ScoreCall
from cbatch.errors import CBatchError, EngineClosedError, NoThreadError
from cbatch.server import batch_endpoints as kept
from cbatch.server import message_batches
from cbatch.server import small_endpoints as small
from cbatch.server.anthropic_messages import MessagesCall
from cbatch.server.call import Answering, Call
from cbatch.server.desk import Desk, keep_asking
from cbatch.server.exchange import JSON, ClientGoneError, Exchange, dumps
from cbatch.server.gate import Gate
from cbatch.server.http_errors import HttpProblemError, problem_of, told
from cbatch.server.infill import InfillCall
from cbatch.server.llama_completions import LlamaCall
from cbatch.server.openai_chat import ChatCall
from cbatch.server.openai_completions import CompletionCall
from cbatch.server.responses_api import ResponsesCall
from cbatch.server.server_settings import ServerSettings
from cbatch.server.telemetry import find_tracer
from cbatch.server.vector_endpoints import answer_vectors
from cbatch.server.web_page import page_files
from cbatch.support.garbage import drop_frames
from cbatch.support.logs import Log
from cbatch.support.thread_start import is_lack_of_threads

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from starlette.requests import Request
    from starlette.types import Receive, Scope, Send

    from cbatch.engine import Engine

    Handle = Callable[[Desk, Exchange], Awaitable[None]]

_log = Log("cbatch.server")

CLIENT_GONE = 499
"""The log's status of a call whose client has left. Source: nginx."""


def create_app(engine: Engine, **settings: Any) -> Starlette:
    """Return an ASGI application that answers by `engine`, which it neither loads nor closes.

    Args:
        engine: an engine, in this process or in workers.
        settings: fields of `cbatch.server.server_settings.ServerSettings` by name, which explains them.

    Raises:
        ConfigError: a wrong setting, also one of OpenTelemetry's.
    """
    find_tracer()  # loads OpenTelemetry, before a client waits for it
    desk = Desk(engine, ServerSettings(**settings))
    app = Starlette(
        routes=_routes(desk),
        middleware=_middleware(desk),
        exception_handlers={HTTPException: _not_routed, Exception: _unexpected},
        lifespan=partial(_lifespan, desk),
    )
    app.router.redirect_slashes = False
    app.state.desk = desk
    return app


@asynccontextmanager
async def _lifespan(desk: Desk, app: Starlette) -> AsyncIterator[None]:
    """Watch the engine while the application runs; at its end, leave batches to the next server.

    Raises an `EngineClosedError` where the engine has ended, or is that of the parent process: the host tells its user.
    """
    outage = desk.engine.outage
    if outage is not None and outage.retry_s is None:
        raise EngineClosedError(outage.cause)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(keep_asking, lambda: desk)
        try:
            yield
        finally:
            tasks.cancel_scope.cancel()
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(desk.close)


def _routes(desk: Desk) -> list[Route]:
    """Return all routes, each with `/v1` before it and without, but for those of the page."""
    routes = [
        Route(prefix + path, Endpoint(desk, path, handle), methods=[method])
        for method, path, handle in _HANDLES
        for prefix in ("/v1", "")
    ]
    if desk.settings.page:
        routes += [
            Route(file.path, Endpoint(desk, file.path, file.answer), methods=["GET"])
            for file in page_files()
        ]
    return routes


async def _answer(call_of: Callable[..., Call], desk: Desk, exchange: Exchange) -> None:
    made = partial(call_of, is_strict=desk.settings.strict_fields)
    call = await small.body_of(desk, exchange, made)
    await Answering(desk, exchange, call).run()


_UNCAPPED = partial(MessagesCall.of, is_capped=False)
_NO_CELLS = "slots cannot be saved, restored or erased: name a cache_key in the request"
_NO_SCALES = (
    "scales cannot be set for all requests: name an adapter as model or adapter in each request"
)
_OF_INPUT = {"object": "response.input_tokens"}

_HANDLES: list[tuple[str, str, Handle]] = [
    ("POST", "/chat/completions", partial(_answer, ChatCall.of)),
    ("POST", "/chat/completions/input_tokens", partial(small.count_tokens, ChatCall.of, _OF_INPUT)),
    ("POST", "/completions", partial(_answer, CompletionCall.of)),
    ("POST", "/completion", partial(_answer, LlamaCall.of)),
    ("POST", "/infill", partial(_answer, InfillCall.of)),
    ("POST", "/responses", partial(_answer, ResponsesCall.of)),
    ("POST", "/responses/input_tokens", partial(small.count_tokens, ResponsesCall.of, _OF_INPUT)),
    ("POST", "/messages", partial(_answer, MessagesCall.of)),
    ("POST", "/messages/count_tokens", partial(small.count_tokens, _UNCAPPED, {})),
    ("POST", "/embeddings", partial(answer_vectors, EmbedCall)),
    ("POST", "/rerank", partial(answer_vectors, RerankCall)),
    ("POST", "/reranking", partial(answer_vectors, RerankCall)),
    ("POST", "/score", partial(answer_vectors, ScoreCall)),
    ("GET", "/models", small.models),
    ("GET", "/models/{name:path}", small.model),
    ("POST", "/models/load", small.load_model),
    ("GET", "/health", small.health),
    ("GET", "/metrics", small.metrics),
    ("GET", "/slots", small.slots),
    ("POST", "/slots/{id}", partial(small.refuse, _NO_CELLS)),
    ("GET", "/lora-adapters", small.adapters),
    ("POST", "/lora-adapters", partial(small.refuse, _NO_SCALES)),
    ("GET", "/props", small.props),
    ("GET", "/tokenizer_info", small.tokenizer_info),
    ("POST", "/tokenize", small.tokenize),
    ("POST", "/detokenize", small.detokenize),
    ("POST", "/apply-template", small.apply_template),
    ("POST", "/files", kept.create_file),
    ("GET", "/files", kept.list_files),
    ("GET", "/files/{id}", kept.get_file),
    ("DELETE", "/files/{id}", kept.delete_file),
    ("GET", "/files/{id}/content", kept.file_content),
    ("POST", "/batches", kept.create_batch),
    ("GET", "/batches", kept.list_batches),
    ("GET", "/batches/{id}", kept.get_batch),
    ("POST", "/batches/{id}/cancel", kept.cancel_batch),
    ("POST", "/messages/batches", message_batches.create_batch),
    ("GET", "/messages/batches", message_batches.list_batches),
    ("GET", "/messages/batches/{id}", message_batches.get_batch),
    ("DELETE", "/messages/batches/{id}", message_batches.delete_batch),
    ("POST", "/messages/batches/{id}/cancel", message_batches.cancel_batch),
    ("GET", "/messages/batches/{id}/results", message_batches.batch_results),
]


class Endpoint:
    """Runs one kind of call as plain ASGI, and tells what went wrong with it."""

    def __init__(self, desk: Desk, route: str, handle: Handle) -> None:
        self._desk, self._route, self._handle = desk, route, handle

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        with self._desk.bodies.held() as held:
            await self._answer(Exchange(scope, receive, send, held))

    async def _answer(self, exchange: Exchange) -> None:
        exchange.record.route = self._route
        try:
            await self._handle(self._desk, exchange)
        except ClientGoneError as error:
            exchange.record.status = CLIENT_GONE
            drop_frames(error)
        except (HttpProblemError, CBatchError, RuntimeError) as error:
            lacks_threads = is_lack_of_threads(error)
            is_known = lacks_threads or isinstance(error, HttpProblemError | CBatchError)
            if not is_known or (exchange.status is not None and not exchange.can_cut):
                raise
            problem = problem_of(NoThreadError() if lacks_threads else error)
            if exchange.status is None:
                await exchange.respond_problem(problem)
            else:
                _log.warn("%s: the answer was cut off: %s", exchange.id, problem)
                await exchange.cut()
            drop_frames(error)


# ---- around all endpoints ----


def _middleware(desk: Desk) -> list[Middleware]:
    settings = desk.settings
    keyless = {file.path for file in page_files()} if settings.page else set()
    gate = Middleware(Gate, settings=settings, keyless=keyless, meters=desk.meters)
    if not settings.cors_origins:
        return [gate]
    cors = Middleware(
        CORSMiddleware,
        allow_origins=[*settings.cors_origins],
        allow_origin_regex=settings.cors_pattern,
        allow_methods=["*"],
        allow_headers=["*"],
        expose_headers=["x-request-id", "request-id", "x-ignored-fields"],
    )
    return [cors, gate]  # CORS outermost: a refusal has its headers too


async def _not_routed(request: Request, error: Exception) -> Response:
    """Answer a path or a method that is not there."""
    status = getattr(error, "status_code", 500)
    path = request.scope["path"]  # not `request.url`, which cannot be made of every host
    messages = {404: f"there is no {path}", 405: f"{request.method} is not a method of {path}"}
    codes = {404: "unknown_url", 405: "method_not_allowed"}
    message = messages.get(status, str(getattr(error, "detail", error)))
    headers = getattr(error, "headers", None) or {}
    return _response(request, HttpProblemError(status, message, codes.get(status), headers=headers))


async def _unexpected(request: Request, error: Exception) -> Response:
    """Answer where an endpoint has failed; the error itself goes to the log of the server above."""
    return _response(request, problem_of(error))


def _response(request: Request, problem: HttpProblemError) -> Response:
    status, body = told(problem, request.scope)
    return Response(dumps(body), status, dict(problem.headers), media_type=JSON)
