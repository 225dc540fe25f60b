"""A socket served by uvicorn, until it is told to end: then no new calls, and time for those in flight."""

from __future__ import annotations

import socket
import time
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING

import uvicorn

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from starlette.applications import Starlette

    from cbatch.server.desk import Desk

_IDLE_S = 75
"""Seconds after which an idle connection is closed: longer than clients keep theirs, or they meet resets."""

_LAST_S = 5
"""Seconds for the last bytes of ended calls."""

_MAX_HEADER_BYTES = 2**16


@dataclass(frozen=True, slots=True)
class Tls:
    """Files of a certificate and its key."""

    certificate: str | None = None
    key: str | None = None


def bound_socket(host: str, port: int) -> socket.socket:
    """Return a socket of an address; it does not listen yet.

    Raises:
        OSError: the address is not there, or in use.
    """
    family, kind, number, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    found = socket.socket(family, kind, number)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(address)
    except OSError:
        found.close()
        raise
    return found


def serve(
    app: Starlette,
    address: socket.socket,
    *,
    grace_s: float,
    tls: Tls | None = None,
    on_ready: Callable[[], object] = lambda: None,
) -> None:
    """Serve until SIGTERM or Ctrl-C: calls in flight have `grace_s` seconds then; a second signal ends them at once.

    Batches are left to the next server on the same folder. `on_ready` is called when connections are accepted.
    """
    tls = tls or Tls()
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        lifespan="off",
        ws="none",
        server_header=False,
        timeout_keep_alive=_IDLE_S,
        timeout_graceful_shutdown=_LAST_S,
        h11_max_incomplete_event_size=_MAX_HEADER_BYTES,
        ssl_certfile=tls.certificate,
        ssl_keyfile=tls.key,
    )
    desk: Desk = app.state.desk
    with closing(desk):
        DrainingServer(config, desk, grace_s, on_ready).run(sockets=[address])


class DrainingServer(uvicorn.Server):
    """Refuses new calls at the first signal, while it still answers `/health`; ends when no call is left."""

    def __init__(
        self, config: uvicorn.Config, desk: Desk, grace_s: float, on_ready: Callable[[], object]
    ) -> None:
        super().__init__(config)
        self._desk, self._grace_s, self._on_ready = desk, grace_s, on_ready
        self._ends_s: float | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept connections."""
        await super().startup(sockets)
        self._on_ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to end; from a handler of a signal."""
        self._desk.is_draining = True
        now = time.monotonic()
        self._ends_s = now + self._grace_s if self._ends_s is None else now

    async def on_tick(self, counter: int) -> bool:
        """Return whether to end now; called some ten times a second."""
        if self._ends_s is not None:
            is_over = time.monotonic() >= self._ends_s
            if is_over:
                self._desk.end_visits()
            self.should_exit = is_over or not self._desk.n_in_flight
        return await super().on_tick(counter)
