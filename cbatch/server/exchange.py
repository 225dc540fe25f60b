"""One HTTP request and its answer, over plain ASGI."""

from __future__ import annotations

import json
import secrets
import time
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import parse_qs

import anyio
from anyio.lowlevel import RunVar

from cbatch.server.http_errors import DROP, HttpProblemError, bad_request, told, too_large
from cbatch.support.checks import (
    MAX_DEPTH,
    is_text_too_deep,
    json_weight,
    n_values_in,
    read_json,
    why_unread,
)
from cbatch.support.garbage import uncollected
from cbatch.support.lazy_json import listed, pieces_of

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Mapping

    from anyio.abc import TaskGroup
    from opentelemetry.trace import Span
    from starlette.types import Message, Receive, Scope, Send

    from cbatch.server.held_bodies import HeldBody
    from cbatch.server.server_settings import SizeLimit

T = TypeVar("T")

JSON = "application/json"
EVENTS = "text/event-stream"
_FORM = b"application/x-www-form-urlencoded"
"""What `curl -d` calls a body that has no type given. From others than browsers it is read as JSON."""

_COMPACT = (",", ":")
_ENCODER = json.JSONEncoder(separators=_COMPACT, allow_nan=False, default=listed)

_N_SMALL, _N_FEW = 2**16, 2**10
"""Bytes of a body, and quotes and lists in it, above which a thread parses it, and what else takes a millisecond."""

_N_DISCARDED, _DISCARD_S = 2**26, 5.0
"""Most bytes and seconds for reading the rest of a body that is too large, before the answer. Our choice."""

_N_QUERY = 64
"""Most fields of a query, which is read whoever else waits. Our choice: no endpoint has ten."""

N_PART = 2**14
"""Bytes of an answer's part, which takes a millisecond or so to make. Our choice."""


class Threads:
    """At most a number of threads in each event loop: further work of this kind waits, and no other kind does."""

    def __init__(self, name: str, n: int) -> None:
        """Make them; `n` is the most at once."""
        self._limiter: RunVar[anyio.CapacityLimiter] = RunVar(f"cbatch.server.{name}")
        self._n = n

    @property
    def limiter(self) -> anyio.CapacityLimiter:
        """What the event loop that runs here counts them by."""
        try:
            return self._limiter.get()
        except LookupError:
            limiter = anyio.CapacityLimiter(self._n)
            self._limiter.set(limiter)
            return limiter

    async def run(self, work: Callable[..., T], *args: Any, **named: Any) -> T:
        """Return what `work` returns; the wait for a thread can be cancelled, the work itself cannot."""
        return await anyio.to_thread.run_sync(partial(work, *args, **named), limiter=self.limiter)


_LARGE_BODIES = Threads("large_bodies", 1)
"""The thread that reads large bodies. More threads would be no faster: Python computes in one at a time."""

_LONG_ANSWERS = Threads("long_answers", 1)
"""The thread that makes the parts of long answers, in turn."""


class ClientGoneError(Exception):
    """The client has left: nobody reads an answer."""


OTHER = "other"
"""The route of a request for a path that is not there."""


@dataclass(eq=False, slots=True)
class CallRecord:
    """What is kept of one HTTP request for the log and the metrics: never a prompt, a key or an answer."""

    id: str = field(default_factory=lambda: f"req_{secrets.token_hex(12)}")
    route: str = OTHER
    """The path that an endpoint answers, without `/v1` and with names for what varies."""
    owner: str = ""
    """A hash of the API key, which owns files, batches and cells on disk; "" without a key."""
    status: int | None = None
    """The status that was sent, or 499 where the client has left before."""
    span: Span | None = None
    """Its span, where OpenTelemetry records it."""
    start_s: float = field(default_factory=time.perf_counter)

    @property
    def latency_ms(self) -> float:
        """Milliseconds since it came."""
        return round((time.perf_counter() - self.start_s) * 1e3, 3)


class Exchange:
    """A request that is read, and an answer that is sent, whole or in parts."""

    def __init__(
        self, scope: Scope, receive: Receive, send: Send, held: HeldBody | None = None
    ) -> None:
        """Make one; `held` is what is held of the body, where it is read."""
        self.scope, self.held = scope, held
        self._receive, self._send = receive, send
        self.headers = {name.lower(): value for name, value in scope["headers"]}
        self.status: int | None = None
        """The status of the answer, once it is sent."""
        self.record: CallRecord = scope["state"]["record"]
        """What is kept of the request; the application's gate has made it."""
        self.is_small = False
        """Whether its body was read, and handling it in the event loop holds up nobody."""
        self._is_watched = False
        """Whether somebody waits for the client to leave."""

    @property
    def id(self) -> str:
        """The request's id, as the header `x-request-id` has it."""
        return self.record.id

    @property
    def owner(self) -> str:
        """A hash of the request's API key; "" without a key."""
        return self.record.owner

    # ---- the request ----

    async def _body(self, limit: SizeLimit, seconds: float) -> list[bytes]:
        """Return the parts of a body that is held as a whole. Raises as `parts`, and where others have its room."""
        found: list[bytes] = []
        n_bytes = n_values = 0
        with anyio.move_on_after(seconds):
            if self.held is not None and self._n_told > _N_SMALL:
                self.held.expect(self._n_told)
            async for part in self.parts(limit, seconds):
                n_bytes += len(part)
                n_values += n_values_in(part)
                weight = json_weight(n_bytes, n_values)
                if self.held is not None and weight > _N_SMALL:
                    self.held.grow(weight)
                found.append(part)
            return found
        raise _too_slow()

    async def parts(self, limit: SizeLimit, seconds: float) -> AsyncGenerator[bytes, None]:
        """Yield the parts of a body of at most `limit`, each within `seconds`.

        Raises:
            HttpProblemError: it is longer, or does not arrive in time.
            ClientGoneError: the client has left.
        """
        if self._n_told > limit.n_bytes:
            await self._discard(has_more=True)
            raise _too_large(limit)
        n_bytes, has_more = 0, True
        while has_more:
            message: Message | None = None
            with anyio.move_on_after(seconds):
                message = await self._receive()
            if message is None:
                raise _too_slow()
            _check_stays(message)
            data = message.get("body", b"")
            n_bytes += len(data)
            has_more = message.get("more_body", False)
            if n_bytes > limit.n_bytes:
                await self._discard(has_more=has_more)
                raise _too_large(limit)
            yield data

    async def _discard(self, *, has_more: bool) -> None:
        """Read the rest of a body, up to a limit: many clients read no answer before they have sent the whole body."""
        if b"expect" in self.headers or self._n_told > _N_DISCARDED:
            return
        n_bytes = 0
        with anyio.move_on_after(_DISCARD_S):
            while has_more and n_bytes <= _N_DISCARDED:
                message = await self._receive()
                _check_stays(message)
                n_bytes += len(message.get("body", b""))
                has_more = message.get("more_body", False)

    @property
    def _n_told(self) -> int:
        """The body's bytes by its header; 0 where that does not say."""
        said = self.headers.get(b"content-length", b"")
        return int(said[:20]) if said.isdigit() else 0

    async def json(
        self, limit: SizeLimit, seconds: float, made: Callable[[dict[str, Any]], T]
    ) -> T:
        """Return what `made` makes of the body's JSON object, which takes several times the memory of its text.

        Raises:
            HttpProblemError: there is none, it is too long or too slow, or its room is taken.
            ClientGoneError: the client has left; other errors are those of `made`.
        """
        kind = self.headers.get(b"content-type", b"").split(b";")[0].strip().lower()
        is_json = kind == JSON.encode() or kind.endswith(b"+json")
        if not is_json and (kind != _FORM or self._is_from_browser):
            message = f"the header content-type must be {JSON}"
            raise HttpProblemError(415, message, "unsupported_media_type")
        parts = await self._body(limit, seconds)
        self.is_small = (
            sum(map(len, parts)) <= _N_SMALL
            and sum(part.count(b'"') + part.count(b"[") for part in parts) <= _N_FEW
        )
        return await self.aside(lambda: made(object_of(b"".join(parts))))

    @property
    def query(self) -> dict[str, list[str]]:
        """The fields behind the question mark. Raises a `HttpProblemError` where there are too many."""
        said = self.scope["query_string"].decode("latin-1")
        try:
            return parse_qs(said, max_num_fields=_N_QUERY)
        except ValueError:
            raise bad_request(f"the query has more than {_N_QUERY} fields") from None

    @property
    def _is_from_browser(self) -> bool:
        """Whether a browser has sent the request: a web page can have it send a form to any server, but not JSON.

        Each browser tells its origin or has a `User-Agent` that begins with these words, neither of which a page can
        change in such a request. Source: Fetch, "append a request Origin header", "request-no-cors" guard.
        """
        agent = self.headers.get(b"user-agent", b"").lower()
        marks = (b"origin", b"referer", b"sec-fetch-site", b"sec-fetch-mode")
        return agent.startswith((b"mozilla", b"opera")) or any(
            name in self.headers for name in marks
        )

    async def aside(self, work: Callable[..., T], *args: Any, **named: Any) -> T:
        """Return what `work` makes of the body: in a thread, so that other clients go on, unless the body is small.

        Raises:
            ClientGoneError: the client has left before a thread was free; other errors are those of `work`.
        """
        if self.is_small:
            return work(*args, **named)
        return await self.in_turn(_LARGE_BODIES, _uncollected, work, *args, **named)

    async def in_turn(
        self, threads: Threads, work: Callable[..., T], *args: Any, **named: Any
    ) -> T:
        """Return what `work` returns, done in one of `threads`. Raises as `aside`. The body has been read."""
        limiter, borrower = threads.limiter, object()
        try:
            await self._wait_for_turn(limiter, borrower)
            await self._check_stays()
            alone = anyio.CapacityLimiter(1)  # not that of all threads: it has its turn
            return await anyio.to_thread.run_sync(partial(work, *args, **named), limiter=alone)
        finally:
            with suppress(RuntimeError):  # it was cancelled before its turn
                limiter.release_on_behalf_of(borrower)

    async def _wait_for_turn(self, limiter: anyio.CapacityLimiter, borrower: object) -> None:
        if self._is_watched or limiter.available_tokens:  # whoever watches cancels this
            await limiter.acquire_on_behalf_of(borrower)
            return
        await self.while_client_stays(lambda tasks: limiter.acquire_on_behalf_of(borrower))

    async def while_client_stays(self, work: Callable[[TaskGroup], Awaitable[T]]) -> T:
        """Return what `work` returns; its tasks end with it. The body has been read.

        Raises:
            ClientGoneError: the client has left before it was done; other errors are those of `work`.
        """
        problem: Exception | None = None
        has_left = False
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._cancel_once_left, tasks.cancel_scope)
            try:
                found = await work(tasks)
            except Exception as error:  # not in a group of exceptions
                problem = error
            else:
                tasks.cancel_scope.cancel()
                return found
            has_left = tasks.cancel_scope.cancel_called
            tasks.cancel_scope.cancel()
        if problem is None or has_left:
            raise ClientGoneError
        raise problem

    async def _check_stays(self) -> None:
        """Raise a `ClientGoneError` if the client is known to have left. Does not wait."""
        if self._is_watched:  # whoever watches cancels this
            return
        with anyio.move_on_after(0):
            await self.wait_until_left()
            raise ClientGoneError

    async def _cancel_once_left(self, scope: anyio.CancelScope) -> None:
        await self.wait_until_left()
        scope.cancel()

    async def wait_until_left(self) -> None:
        """Return when the client has left. The body has been read."""
        self._is_watched = True
        try:
            while (await self._receive())["type"] != "http.disconnect":
                pass
        finally:
            self._is_watched = False

    # ---- the answer ----

    @property
    def can_cut(self) -> bool:
        """Whether `cut` works: the server lets requests end their connection."""
        return DROP in self.scope.get("state", {})

    async def cut(self) -> None:
        """End the connection within an answer, which its client would take for a whole one else."""
        self.scope["state"][DROP]()
        await self.wait_until_left()

    async def respond(
        self,
        status: int,
        content: bytes,
        headers: Mapping[str, str] | None = None,
        *,
        media_type: str = JSON,
    ) -> None:
        """Send a whole answer."""
        more = {"content-length": str(len(content))}
        await self.begin(status, {**more, **(headers or {})}, media_type=media_type)
        await self._send({"type": "http.response.body", "body": content})

    async def respond_json(
        self, value: object, status: int = 200, headers: Mapping[str, str] | None = None
    ) -> None:
        """Send a whole answer in JSON."""
        await self.respond(status, dumps(value), headers)

    async def respond_long(self, value: object, headers: Mapping[str, str] | None = None) -> None:
        """Send a whole answer in JSON that may be long: its parts are made as the client takes them.

        Raises:
            ClientGoneError: the client has left before the last part.
        """
        parts = joined_parts(json_pieces(value))
        part = await self.aside(next, parts)
        if len(part) < N_PART:
            await self.respond(200, part, headers)
            return
        await self.begin(200, headers or {}, media_type=JSON)
        while len(part) >= N_PART:
            await self.put(part)
            part = await self.next_part(parts)
        await self.finish(part)

    async def next_part(self, parts: Iterator[bytes]) -> bytes:
        """Return the next part of a long answer, made in a thread. Raises as `respond_long`."""
        return await self.in_turn(_LONG_ANSWERS, next, parts)

    async def respond_problem(self, problem: HttpProblemError) -> None:
        """Send an error, in the format of the path."""
        status, body = told(problem, self.scope)
        await self.respond_json(body, status, problem.headers)

    async def begin(
        self, status: int, headers: Mapping[str, str], *, media_type: str = EVENTS
    ) -> None:
        """Send status and headers; the body's parts follow."""
        self.status = status
        pairs = {"content-type": media_type, **headers}.items()
        listed = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in pairs]
        await self._send({"type": "http.response.start", "status": status, "headers": listed})

    async def put(self, data: bytes) -> None:
        """Send a part of the body; waits while the client does not read."""
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def finish(self, data: bytes = b"") -> None:
        """Send the body's last part."""
        await self._send({"type": "http.response.body", "body": data})


def dumps(value: object) -> bytes:
    """Return a value as compact JSON in ASCII: raw line ends of Unicode would cut an event in two."""
    return _ENCODER.encode(value).encode()


def json_pieces(value: object) -> Iterator[bytes]:
    """Yield a value as `dumps` has it, in pieces; each `LazyList` in it becomes several."""
    return map(str.encode, pieces_of(value, separators=_COMPACT))


def joined_parts(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Yield pieces joined to parts of `N_PART` bytes or more; the last one is shorter, and may be empty."""
    waiting: list[bytes] = []
    n_bytes = 0
    for piece in pieces:
        waiting.append(piece)
        n_bytes += len(piece)
        if n_bytes >= N_PART:
            yield b"".join(waiting)
            waiting, n_bytes = [], 0
    yield b"".join(waiting)


def object_of(data: bytes) -> dict[str, Any]:
    """Return the object of a JSON text.

    Raises:
        HttpProblemError: no JSON object, nested too deeply, or with text that is not Unicode.
    """
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise _no_json(f"not UTF-8: {error.reason} at byte {error.start}") from None
    try:
        value = read_json(text)
    except RecursionError:
        raise _too_deep() from None
    except ValueError as error:
        raise _no_json(why_unread(error, text)) from None
    if not isinstance(value, dict):
        raise _no_json(f"a JSON object is needed, not {type(value).__name__}")
    if is_text_too_deep(text):
        raise _too_deep()
    if "\\ud" in text or "\\uD" in text:
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise _no_json("a string in it holds half of a surrogate pair") from None
    return value


def _uncollected(work: Callable[..., T], *args: Any, **named: Any) -> T:
    """Call `work` on a large body, whose many objects have no cycles: nothing else could run while they are visited."""
    with uncollected():
        return work(*args, **named)


def _check_stays(message: Message) -> None:
    if message["type"] == "http.disconnect":
        raise ClientGoneError


def _too_large(limit: SizeLimit) -> HttpProblemError:
    return too_large("the request's body", limit, headers={"connection": "close"})


def _too_slow() -> HttpProblemError:
    return HttpProblemError(408, "the request's body did not arrive in time", "body_timeout")


def _no_json(why: str) -> HttpProblemError:
    return bad_request(f"the body cannot be read: {why}", code="invalid_json")


def _too_deep() -> HttpProblemError:
    return _no_json(f"its values are nested more than {MAX_DEPTH} deep")
