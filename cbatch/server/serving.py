"""A socket served by uvicorn, until it is told to end: then no new calls, and time for those in flight."""

from __future__ import annotations

import asyncio
import math
import resource
import socket
import ssl
import time
from contextlib import contextmanager, suppress
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, cast

import anyio.lowlevel
import uvicorn

from cbatch.errors import CBatchError, ConfigError, EngineClosedError
from cbatch.server.batches import CLOSE_S
from cbatch.server.connections import ConnectionLimits, GuardedProtocol, Turns
from cbatch.server.desk import keep_asking
from cbatch.server.http_errors import HttpProblemError
from cbatch.support.checks import readable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from cbatch.server.ending import Ending
    from cbatch.server.front import Front

_IDLE_S = 75
"""Seconds after which an idle connection is closed: longer than clients keep theirs, or they meet resets."""

_LAST_S = 5
"""Most seconds for sending the last bytes of ended calls. Our choice."""

_WORKERS_S = 60.0
"""Most seconds for the workers of a reloaded model to end. Our choice."""

_TOLD_S = 0.2
"""Seconds for sending errors to calls when the grace period is over, before the engine is closed. Our choice."""

_N_OTHER_FILES = 256
"""Files that are open beside connections: those of workers, of the log, of answers to surplus connections."""

_N_FILES = 64
"""Open files without which no server is started: with one replica it has 22, and each client needs one. Our choice."""

_N_LISTENERS = 32
"""Connections that are let in at once. Our choice."""

_N_HOST = 253
"""Most characters of a host name. Source: RFC 1123 with RFC 1035."""

_PEER_S = (60, 15, 4)
"""Seconds of silence after which the system asks whether a client is there, seconds between that, and how often."""


def tls_of(certificate: str | None, key: str | None = None) -> ssl.SSLContext | None:
    """Return what the files of a certificate and its key hold; None without a certificate.

    Raises:
        ConfigError: they cannot be used.
    """
    if key and not certificate:
        raise ConfigError("--tls-key needs --tls-cert")
    if certificate is None:
        return None
    files = f"the certificate {certificate}" + (f" with {key}" if key else "")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(certificate, key, password=_no_password)
    except ssl.SSLError as error:
        why = error.reason or "it cannot be read"
        raise ConfigError(f"{files}: {why.lower().replace('_', ' ')}") from None
    except OSError as error:
        raise ConfigError(f"{files}: {error.strerror or error}") from None
    return context


def _no_password() -> str:
    raise ConfigError("the key of --tls-cert is encrypted: give one that needs no password")


def bound_socket(host: str, port: int) -> socket.socket:
    """Return a socket of an address; it does not listen yet.

    Raises:
        ConfigError: the address is not there, or in use.
    """
    said = readable(host if len(host) <= _N_HOST else f"{host[:_N_HOST]}…")
    try:
        places = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        family, kind, number, _, address = places[0]
        found = socket.socket(family, kind, number)
    except OSError as error:
        raise ConfigError(f"--host {said}: {error.strerror or error}") from None
    except ValueError:  # Python cannot encode the name
        raise ConfigError(
            f"--host {said}: is not a host name: each part between dots must have 1 … 63 letters, digits or hyphens: "
            "give a host name or an IP address, such as 127.0.0.1"
        ) from None
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        _ask_for_peers(found)
        found.bind(address)
    except OSError as error:
        found.close()
        raise ConfigError(f"--host {said} --port {port}: {error.strerror or error}") from None
    return found


def _ask_for_peers(opened: socket.socket) -> None:
    """Have the system find clients that are gone without a word, on all connections of a socket."""
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    names = ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT")  # which Linux has
    for name, value in zip(names, _PEER_S, strict=True):
        if hasattr(socket, name):
            opened.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def limits_for(n_connections: int | None) -> ConnectionLimits:
    """Return limits with so many connections, for which this process may have files from now on.

    Args:
        n_connections: None for the default, or as many as the system allows.

    Raises:
        ConfigError: the system does not allow so many, or too few files for any server.
    """
    n_max = ConnectionLimits().n_max if n_connections is None else n_connections
    n_soft, n_hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    n_needed = n_max + _N_OTHER_FILES
    if n_hard != resource.RLIM_INFINITY and n_hard < _N_FILES:
        raise ConfigError(
            f"the system allows {n_hard} open files, but a server needs {_N_FILES}: raise the limit (ulimit -n)"
        )
    if n_hard != resource.RLIM_INFINITY and n_needed > n_hard:
        if n_connections is not None:
            raise ConfigError(
                f"--max-connections {n_max} needs {n_needed} open files, but the system allows {n_hard}: "
                "lower it, or raise the limit (ulimit -n)"
            )
        n_needed = n_hard
        n_max = max(1, n_hard - _N_OTHER_FILES)
    if n_soft != resource.RLIM_INFINITY and n_soft < n_needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (n_needed, n_hard))
    return ConnectionLimits(n_max=n_max)


def serve(
    front: Front,
    address: socket.socket,
    *,
    ending: Ending,
    tls: ssl.SSLContext | None = None,
    limits: ConnectionLimits | None = None,
    on_ready: Callable[[], object] = lambda: None,
) -> None:
    """Serve until `ending` begins; calls in flight then have its grace period, and get an error at its end.

    Batches are left to the next server on the same folder. `on_ready` is called when connections are accepted.

    Raises:
        EngineClosedError: the engine has failed; calls got its error.
    """
    config = config_of(front, tls, limits or ConnectionLimits())
    server = DrainingServer(config, front, ending, on_ready)
    with ending.serving(front.drain, partial(_give_up, front)):
        try:
            server.run(sockets=[address])
        finally:
            front.close_desks(ending.left_s(CLOSE_S))
            front.close_own_engines(ending.left_s(_WORKERS_S))
    if server.problem:
        raise EngineClosedError(f"the engine stopped: {server.problem}")


def _listeners(address: socket.socket) -> list[socket.socket]:
    """Return a socket and copies of it, as far as there are files for them: each lets in a connection at a time.

    uvloop lets in one a round of its loop: behind many clients that ask all the time, new ones waited for 18 s. asyncio
    lets in all that wait, and where no file is left it logs that for each of them.
    Source: libuv 1.46, uv__server_io; Python 3.11, asyncio/selector_events.py.
    """
    n_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    has_few = n_files < _N_OTHER_FILES or find_spec("uvloop") is None
    n = 1 if has_few else _N_LISTENERS
    return [address, *(address.dup() for _ in range(n - 1))]


def _give_up(front: Front) -> None:
    """Leave the batches to the next server, and close the engines with all requests, so that no call waits."""
    time.sleep(_TOLD_S)
    front.close_desks(0.0)
    front.close_engines(0.0)


def config_of(app: Front, tls: ssl.SSLContext | None, limits: ConnectionLimits) -> uvicorn.Config:
    """Return what uvicorn is told."""
    guarded: Any = partial(GuardedProtocol, limits, Turns(), tls)
    return uvicorn.Config(
        app,
        http=guarded,
        log_config=None,
        log_level="error",  # what clients do wrong is in cbatch's own log
        access_log=False,
        proxy_headers=False,
        lifespan="off",
        ws="none",
        server_header=False,
        timeout_keep_alive=_IDLE_S,
    )


class DrainingServer(uvicorn.Server):
    """Refuses new calls, except `/health`, once its ending begins; ends when no call is left."""

    def __init__(
        self, config: uvicorn.Config, front: Front, ending: Ending, on_ready: Callable[[], object]
    ) -> None:
        super().__init__(config)
        self.problem = ""
        """Why the engine has ended; "" if it has not."""
        self._front, self._ending, self._on_ready = front, ending, on_ready
        self._asking: asyncio.Task[None] | None = None

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to `ending`, which also handles them before and after the server runs."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept connections."""
        # has anyio load what it is made of, before a client waits for it
        await anyio.lowlevel.checkpoint()
        with suppress(CBatchError, HttpProblemError):  # the first call gets this error, too
            await self._front.desk.sizes()
        self._asking = asyncio.create_task(keep_asking(lambda: self._front.desk))
        await super().startup([one for each in sockets or () for one in _listeners(each)])
        self._on_ready()

    async def on_tick(self, counter: int) -> bool:
        """Return whether to end now; called some ten times a second."""
        outage = self._front.desk.engine.outage
        if outage is not None and outage.retry_s is None and not self._ending.has_begun:
            self.problem = outage.cause
            self._ending.begin()
        if self._ending.has_begun:
            if self._ending.is_over:
                self._front.end_visits()
            self.should_exit = self._ending.is_over or self._front.is_idle
        else:
            self._front.look()
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close connections; those that still send or read get some seconds, at most those that are left."""
        if self._asking is not None:
            self._asking.cancel()
        self._front.cancel()
        wait_s = self._ending.left_s(_LAST_S)
        asyncio.get_running_loop().call_later(wait_s, self._drop)
        self.config.timeout_graceful_shutdown = math.ceil(wait_s) + 1
        await super().shutdown(sockets)

    def _drop(self) -> None:
        for connection in [*self.server_state.connections]:
            cast("GuardedProtocol", connection).drop()
