"""Connections of a server's socket: how many there are, how long a header may take, and who does not read."""

from __future__ import annotations

import asyncio
import fcntl
import math
import re
import struct
import sys
import termios
import time
from bisect import bisect
from collections import OrderedDict, deque
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from cbatch.server.exchange import JSON, dumps
from cbatch.server.http_errors import CROWDED, DROP, HttpProblemError, crowded
from cbatch.server.plain_requests import PlainRequestParser
from cbatch.support.logs import Log

if TYPE_CHECKING:
    import socket
    import ssl
    from collections.abc import Callable

_log = Log("cbatch.server")

_N_HEARD = 64
"""Connections above the limit whose request is read; those above these are told unheard. Our choice."""

_N_TOLD = 128
"""Connections above the limit that have time to read the answer; those above these are closed with it. Our choice."""

_SURPLUS_S = 1.0
"""Seconds for a header over a connection above the limit, so that a question for health finds room. Our choice."""

_N_FRAMING, _N_FRAMING_PER_BYTE = 2**17, 2
"""Bytes of framing allowed, and further ones per byte of body: chunks of three bytes on average. Our choice:
each chunk is looked at, whoever else waits."""

_N_LINES = 1000
"""Lines of a body in chunks that are read in a turn. Our choice: about two milliseconds."""

_N_AHEAD = 2**16
"""Bytes behind an unanswered request from which on a connection is read no further until the answer. Our choice."""

_N_HEADER_LINES, _N_HEADER_LINE = 256, 2**13
"""Most lines of a header, and bytes of one. Our choice, as others have it: thousands of connections may send such
headers at once, and a line takes half a microsecond, 100 characters of a path that are escaped 20.
"""

_SIZES = (2**12, 2**16)
"""Bytes above which a request waits with larger ones only. Our choice."""

_GET, _BEHIND = 0, len(_SIZES) + 2
"""Queues: of small requests without a body, such as questions for health, and of those that their clients sent before
the answer to another. Between them are those of requests by size.
"""

_N_A_ROUND = (8, 2)
"""Times that the queues of small requests are read in a round of the loop. Our choice: what they cause is done in
rounds too, in some milliseconds, and a round costs a tenth of what a small request does.
"""

_PAUSE_S = 0.03
"""Seconds of the loop's work between two reads of other queues while small requests wait. Our choice: one may cause
15 ms of work."""

_EMPTY_LINE = re.compile(rb"(?<![^\n])(?:\r?\n)+")
"""Ends a header."""

_CHUNK_SIZE = re.compile(rb"[0-9a-fA-F]+")

_WHY = {
    HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE: "its header is too large",
    HTTPStatus.METHOD_NOT_ALLOWED: "this server is not a proxy",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """How a server treats connections.

    Args:
        n_max: most connections; a request over a further one gets status 503, but for `/health`.
        n_header_bytes: most bytes of a request's header.
        header_timeout_s: seconds from the beginning of a connection, or of a header, to the header's end.
        send_timeout_s: seconds in which a client must take something of an answer that waits for it.
    """

    n_max: int = 4096
    n_header_bytes: int = 2**14
    header_timeout_s: float = 20.0
    send_timeout_s: float = 60.0


class _Waiting:
    """Reads that wait, the oldest first, but one of each client after the other."""

    def __init__(self) -> None:
        self._of_client: OrderedDict[str, deque[Callable[[], None]]] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self._of_client)

    def add(self, client: str, read: Callable[[], None]) -> None:
        self._of_client.setdefault(client, deque()).append(read)

    def take(self) -> Callable[[], None]:
        client, reads = self._of_client.popitem(last=False)
        read = reads.popleft()
        if reads:
            self._of_client[client] = reads
        return read


class Turns:
    """Has connections read what has come, some in each round of the loop: streams and other work go between.

    What costs more has queues of its own, and so has what comes behind other requests of its connection: these are read
    in turn, seldom while small requests wait. In each queue, clients take turns.
    """

    def __init__(self, clock: Callable[[], float] = time.thread_time) -> None:
        self._clock, self._last_s = clock, -math.inf
        self._queues = tuple(_Waiting() for _ in range(_BEHIND + 1))
        self._small = self._queues[: len(_N_A_ROUND)]
        self._others = deque(self._queues[len(_N_A_ROUND) :])
        """Those read one at a time, the one first that was not read for the longest."""
        self._is_due = False

    def ask(self, read: Callable[[], None], queue: int, client: str) -> None:
        """Have something called in its turn of a queue, in the event loop that runs; `client` is an address."""
        self._queues[queue].add(client, read)
        self._go_on_soon()

    def _go_on_soon(self) -> None:
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._go_on)

    def _go_on(self) -> None:
        self._is_due = False
        try:
            for queue, n_most in zip(self._small, _N_A_ROUND, strict=True):
                for _ in range(n_most):
                    if queue:
                        queue.take()()
            now_s = self._clock()
            if now_s >= self._last_s + _PAUSE_S or not any(self._small):
                self._last_s = now_s
                self._read_other()
        finally:
            if any(self._queues):
                self._go_on_soon()

    def _read_other(self) -> None:
        for _ in range(len(self._others)):
            self._others.rotate(-1)
            if queue := self._others[-1]:
                queue.take()()
                return


class _Flow(FlowControl):
    """Has the transport read only while less than `_N_AHEAD` bytes wait for an answer before them."""

    def __init__(self, transport: asyncio.Transport, ahead: bytearray) -> None:
        super().__init__(transport)
        self._ahead = ahead

    def resume_reading(self) -> None:
        """Read on, if there is room for it."""
        if len(self._ahead) < _N_AHEAD:
            super().resume_reading()


class Chunks:
    """Follows a body in chunks, which a parser reads and checks, to its end. Source: RFC 9112, 7.1."""

    def __init__(self) -> None:
        self._n_left = 0  # bytes of the chunk, with its line end
        self._line = b""  # the beginning of a line
        self._is_last = self.has_ended = False
        self.n_framing = 0
        """Bytes of framing, less those that the body allows."""

    def end(self, data: bytearray) -> int:
        """Return how many bytes to read of the body, up to its end; all where it is broken."""
        at, n_lines = 0, 0
        while at < len(data) and n_lines < _N_LINES:
            if self._n_left:
                n_bytes = min(self._n_left, len(data) - at)
                self._n_left -= n_bytes
                self.n_framing -= _N_FRAMING_PER_BYTE * n_bytes
                at += n_bytes
                continue
            n_lines += 1
            i_end = data.find(b"\n", at)
            if i_end < 0:
                self.n_framing += len(data) - at
                self._line += data[at:]
                return len(data)
            line, self._line = self._line + data[at:i_end], b""
            self.n_framing += i_end + 1 - at
            at = i_end + 1
            if self._is_last:
                if not line.strip():
                    self.has_ended = True
                    return at
            elif size := _CHUNK_SIZE.match(line):
                n_bytes = int(size[0], 16)
                self._is_last = not n_bytes
                if n_bytes:
                    self._n_left = n_bytes + len(b"\r\n")
                    self.n_framing += (1 + _N_FRAMING_PER_BYTE) * len(b"\r\n")  # no body either
            else:
                return len(data)
        return at


class GuardedProtocol(HttpToolsProtocol):
    """A connection that uvicorn reads, within limits; what is not HTTP is told in JSON.

    It reads one request at a time: bytes behind a request wait, unread, until that one is answered.
    It begins TLS itself: where the event loop does, a connection counts only after its handshake.
    """

    def __init__(
        self,
        limits: ConnectionLimits,
        turns: Turns,
        tls: ssl.SSLContext | None = None,
        **given: Any,
    ) -> None:
        """Make one of limits, of turns, of a certificate for TLS, and of what uvicorn gives to its own."""
        super().__init__(**given)
        self.parser = PlainRequestParser(self)
        self._limits, self._turns = limits, turns
        self._has_turn = False
        """Whether what has come will be read."""
        self._tls = tls
        self._handshake: asyncio.Task[None] | None = None
        """Set until TLS has begun."""
        self._header_s = limits.header_timeout_s
        self._is_unheard = False
        """Whether the answer is sent already, and what comes is dropped."""
        self._ahead = bytearray()
        """What has come and is not read yet."""
        self._n_read = 0
        """Bytes read of the request that is not answered yet."""
        self._n_header_bytes = self._n_header_lines = self._n_line = self._n_unsent = 0
        self._n_body_left = 0
        """Bytes to come of a body whose length was told."""
        self._chunks: Chunks | None = None
        """Set from the header to the end of a body in chunks."""
        self._n_framing = 0
        """Framing bytes of the newest request, less those that its body allows."""
        self._header_timer: asyncio.TimerHandle | None = None
        self._send_timer: asyncio.TimerHandle | None = None

    @property
    def _is_between(self) -> bool:
        """Whether no request is being answered."""
        return self.cycle is None or self.cycle.response_complete

    @property
    def _is_whole(self) -> bool:
        """Whether all of a request came that is not answered yet."""
        return not self._is_between and not self.cycle.more_body

    @property
    def _is_left_over(self) -> bool:
        """Whether a request was answered before all of its body came."""
        return self.cycle is not None and self.cycle.response_complete and self.cycle.more_body

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for a request, and with TLS for its handshake; called again after that."""
        super().connection_made(transport)
        self.flow = _Flow(transport, self._ahead)
        if self._handshake is not None:
            self._handshake = None
            return
        self.app_state = {**self.app_state, DROP: self.drop}
        n_above = len(self.connections) - self._limits.n_max
        if n_above > 0:
            self.app_state = {**self.app_state, CROWDED: True}
            self._header_s = min(self._header_s, _SURPLUS_S)
        if n_above > _N_HEARD:
            self._dismiss(may_read=n_above <= _N_TOLD)
        elif self._tls is not None:
            self._begin_tls(transport, self._tls)
        self._await_header()

    def _begin_tls(self, plain: asyncio.Transport, context: ssl.SSLContext) -> None:
        """Go on with TLS, over a transport of its own: no loop then reads what belongs to the handshake."""
        try:
            sock = plain.get_extra_info("socket").dup()
        except OSError:  # no file is left
            plain.abort()
            return
        plain.set_protocol(asyncio.Protocol())
        plain.abort()  # `sock` keeps the connection
        self._handshake = self.loop.create_task(self._shake_hands(sock, context))
        self._handshake.add_done_callback(lambda _: self._end_handshake(sock))

    async def _shake_hands(self, sock: socket.socket, context: ssl.SSLContext) -> None:
        """Have the loop call `connection_made` once TLS has begun."""
        with suppress(OSError):
            await self.loop.connect_accepted_socket(
                lambda: self, sock, ssl=context, ssl_handshake_timeout=self._header_s
            )

    def _end_handshake(self, sock: socket.socket) -> None:
        if self._handshake is not None:  # it failed, and the loop calls no `connection_lost`
            self._handshake = None
            sock.close()
            self.connection_lost(None)

    def _dismiss(self, *, may_read: bool) -> None:
        """Send the answer to any request before one comes.

        A client `may_read` it before the connection is closed: closing while a request arrives may discard the answer.
        """
        self._is_unheard = True
        if self._tls is not None:  # no answer without a handshake
            self.transport.abort()
            return
        self.transport.write(_whole(crowded()))
        if may_read and self.transport.can_write_eof():
            with suppress(OSError):  # the client has left
                self.transport.write_eof()
        else:
            self.transport.close()

    def shutdown(self) -> None:
        """End the connection behind the answer that it waits for."""
        if self._handshake is not None:
            self.drop()
        else:
            super().shutdown()

    def drop(self) -> None:
        """End the connection at once."""
        if self._handshake is not None:
            self._handshake.cancel()
        elif self.transport is not None:
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """End all waiting."""
        self._forget_header()
        self._forget_reader()
        self._ahead.clear()
        super().connection_lost(exc)

    # ---- what comes in ----

    def data_received(self, data: bytes) -> None:
        """Read on in turn, up to the end of a request; a header that is too long or takes too long is refused."""
        if self._is_unheard:
            return
        self._ahead += data
        if len(self._ahead) >= _N_AHEAD:
            self.flow.pause_reading()
        i_size = bisect(_SIZES, self._n_read + len(self._ahead))
        is_get = not i_size and self._ahead.startswith(b"GET ")
        self._await_turn(_GET if is_get else 1 + i_size)

    def _await_turn(self, queue: int) -> None:
        if not self._has_turn:
            self._has_turn = True
            self._turns.ask(self._take_turn, queue, self.client[0] if self.client else "")

    def _take_turn(self) -> None:
        """Read what has come, as long as no whole request waits for its answer."""
        self._has_turn = False
        while self._ahead and not self._is_whole and not self.transport.is_closing():
            n_bytes = self._n_readable()
            data = bytes(self._ahead[:n_bytes])
            del self._ahead[:n_bytes]
            self._read(data)
            if self._chunks is not None and self._ahead:  # many chunks take long
                self._await_turn(1 + len(_SIZES))
                break
        if self.transport.is_closing():
            self._ahead.clear()
        elif len(self._ahead) >= _N_AHEAD:
            self.flow.pause_reading()
        elif self._is_between or self._is_whole or not self.cycle.body:
            self.flow.resume_reading()  # else nobody would see its client leave, or the body go on

    def _n_readable(self) -> int:
        """Return how many bytes hold no beginning of a request behind the end of another."""
        if self._n_body_left:
            return self._n_body_left
        if self._chunks is not None:
            n_bytes = self._chunks.end(self._ahead)
            self._n_framing = self._chunks.n_framing
            if self._chunks.has_ended:
                self._chunks = None
            return n_bytes
        n_most = len(self._ahead)
        if self._is_between and not self._is_left_over:
            n_most = min(n_most, self._limits.n_header_bytes - self._n_header_bytes)
        end = _EMPTY_LINE.search(self._ahead, 0, n_most)
        return n_most if end is None else end.end()

    def _read(self, data: bytes) -> None:
        self._n_read += len(data)
        before, is_left_over = self.cycle, self._is_left_over
        is_header = self._is_between and not is_left_over
        if is_header and (why := self._why_too_large(data)):
            self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, why)
            return
        super().data_received(data)
        if (cycle := self.cycle) is not before:
            told = dict(cycle.scope["headers"])
            is_chunked = b"transfer-encoding" in told
            self._chunks = Chunks() if is_chunked else None
            self._n_body_left = 0 if is_chunked else int(told.get(b"content-length", 0))
            self._n_framing = 0
        elif cycle is not None:
            self._n_body_left -= min(len(data), self._n_body_left)
            if self._n_framing > _N_FRAMING and not is_header:
                self._refuse(HTTPStatus.BAD_REQUEST, "chunk extensions and trailers are too large")
                return
        if not self._is_between:
            self._forget_header()
            return
        self._await_header()
        if not is_left_over:
            self._n_header_bytes += len(data)
            if (
                self._n_header_bytes >= self._limits.n_header_bytes
                and not self.transport.is_closing()
            ):
                status = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
                self._refuse(status, _WHY[status])

    def _why_too_large(self, data: bytes) -> str:
        """Return why a header with these further bytes is not parsed; "" where it is."""
        first, *others = map(len, data.split(b"\n"))
        lengths = [self._n_line + first, *others]
        self._n_header_lines += len(others)
        self._n_line = lengths[-1]
        if self._n_header_lines > _N_HEADER_LINES:
            return f"its header has more than {_N_HEADER_LINES} lines"
        if max(lengths) > _N_HEADER_LINE:
            return f"a line of its header has more than {_N_HEADER_LINE:,} bytes"
        return ""

    def on_headers_complete(self) -> None:
        """Begin a request. The parser adds trailers to the headers later: these are dropped."""
        if self.parser.should_upgrade():  # it is parsed again, as a plain one
            return
        super().on_headers_complete()
        self.headers = []

    def on_message_complete(self) -> None:
        """End the body of a request."""
        if not self.parser.should_upgrade():
            super().on_message_complete()
            self.cycle.more_body = False  # also where it was answered before

    def send_400_response(self, msg: str) -> None:
        """Refuse what is not HTTP; uvicorn calls this while it handles its parser's error, which may show a key."""
        hint = getattr(sys.exc_info()[1], "error_status_hint", HTTPStatus.BAD_REQUEST)
        self._refuse(HTTPStatus(hint), _WHY.get(hint, "it is not HTTP"))

    def _await_header(self) -> None:
        if self._header_timer is None:
            self._header_timer = self.loop.call_later(self._header_s, self._end_header)

    def _forget_header(self) -> None:
        self._n_header_bytes = self._n_header_lines = self._n_line = 0
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _end_header(self) -> None:
        """End a connection whose client has begun a header, or nothing, and not gone on."""
        self._header_timer = None
        if self._handshake is not None:
            self.drop()
            return
        if not self._is_between or self.transport.is_closing():
            return
        if self._has_turn:  # the server is late, not the client
            self._await_header()
        elif self._n_header_bytes:
            self._refuse(HTTPStatus.REQUEST_TIMEOUT, "its header did not arrive in time")
        else:
            self.transport.close()

    def _refuse(self, status: HTTPStatus, why: str) -> None:
        """End the connection; its client is told why, unless an answer is on its way."""
        has_begun = self.cycle is not None and self.cycle.response_started
        if not has_begun or (self._is_between and not self._is_left_over):
            problem = HttpProblemError(
                status, f"this is not a valid request: {why}", "invalid_http"
            )
            self.transport.write(_whole(problem))
        _log.tell("broken http", status=status.value, why=why)
        self.transport.close()

    # ---- what goes out ----

    def pause_writing(self) -> None:
        """Have the answer wait for its client, but not for one that takes nothing."""
        super().pause_writing()
        self._watch_reader()

    def resume_writing(self) -> None:
        """Let the answer go on."""
        self._forget_reader()
        super().resume_writing()
        self._watch_rest()

    def on_response_complete(self) -> None:
        """Go on to the next request; the last bytes wait for their client as all others."""
        super().on_response_complete()
        self._n_read = 0
        if self._ahead:
            self._await_turn(_BEHIND)
        self._watch_rest()

    def _watch_rest(self) -> None:
        """Watch the reader of an answer's last bytes: nothing else is written that could wait."""
        if self._is_between and self._send_timer is None and self.transport.get_write_buffer_size():
            self._watch_reader()

    def _watch_reader(self) -> None:
        self._n_unsent = self._count_unsent()
        seconds = self._limits.send_timeout_s
        self._send_timer = self.loop.call_later(seconds, self._check_reader)

    def _forget_reader(self) -> None:
        if self._send_timer is not None:
            self._send_timer.cancel()
            self._send_timer = None

    def _check_reader(self) -> None:
        """Drop a client that has taken nothing since the last look."""
        self._send_timer = None
        n_unsent = self._count_unsent()
        if n_unsent and n_unsent >= self._n_unsent:
            _log.tell("client does not read", n_bytes=n_unsent)
            self.transport.abort()
        elif n_unsent:
            self._watch_reader()

    def _count_unsent(self) -> int:
        """Return bytes that the client has not taken, those in the system's buffer too."""
        n_unsent = int(self.transport.get_write_buffer_size())
        with suppress(OSError):  # a system that does not tell
            sock = self.transport.get_extra_info("socket")
            (n_queued,) = struct.unpack("i", fcntl.ioctl(sock, termios.TIOCOUTQ, bytes(4)))
            n_unsent += n_queued
        return n_unsent


def _whole(problem: HttpProblemError) -> bytes:
    """Return an answer behind which the connection is closed."""
    content, status = dumps(problem.as_openai()), HTTPStatus(problem.status)
    headers = {"content-type": JSON, "content-length": str(len(content)), "connection": "close"}
    lines = [f"{name}: {value}\r\n" for name, value in {**headers, **problem.headers}.items()]
    head = f"HTTP/1.1 {status.value} {status.phrase}\r\n{''.join(lines)}\r\n"
    return head.encode() + content
