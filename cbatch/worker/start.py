"""Starting workers for a model, or reaching one that is there."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import fields
from functools import partial
from typing import Any

from cbatch.engine import Engine
from cbatch.engine_options import DEFAULT_PARALLEL, EngineOptions
from cbatch.errors import ConfigError, EngineError, NoThreadError, words_of
from cbatch.messages import LookAhead
from cbatch.options import RunOptions
from cbatch.runtime.interface import Questions
from cbatch.support.checks import check_path, reading, shown
from cbatch.support.processes import current_folder
from cbatch.support.taken_cores import my_cores
from cbatch.worker.client import Workers
from cbatch.worker.framing import read_frames
from cbatch.worker.line_sender import LineSender
from cbatch.worker.placement import divide, divide_cores, nodes_of
from cbatch.worker.process import ProcessLink
from cbatch.worker.protocol_commands import Hello, first_line
from cbatch.worker.service import hello_of
from cbatch.worker.wire import VERSION

_SHARED = (
    "parallel",
    "n_ctx",
    "memory_mib",
    "swap_mib",
    "checkpoint_mib",
    "max_queue",
    "n_threads",
)
"""Settings of a pool of which each worker gets its share."""


def open_workers(
    model: Any,
    options: EngineOptions,
    look_ahead: LookAhead | None,
    is_stopped: Callable[[], bool],
    *,
    n: int,
    n_sharing: int = 1,
) -> Workers:
    """Load a model into `n` processes, which share cores, slots and memory.

    Args:
        model: a path; None for the model that ships inside.
        options: of all processes together.
        n_sharing: engines that share the free memory; the processes are one of them.

    Raises:
        ConfigError: more processes than slots, or a model that is an object of this process.
        CBatchError: see `cbatch.load`.
    """
    launches = [
        partial(
            ProcessLink,
            hello_of(path_of(model), settings, look_ahead, cores=cores, n_sharing=n * n_sharing),
            current_folder(),
        )
        for settings, cores in zip(settings_of(options, n), cores_of(options, n), strict=True)
    ]
    workers = Workers(launches, can_replace=True, is_stopped=is_stopped)
    if n > 1:
        _check_alike(workers, is_exact=options.exact)
    return workers


def _check_alike(workers: Workers, *, is_exact: bool) -> None:
    """Raise an `EngineError`, and close the workers, if they would answer differently: with `is_exact` by a bit."""
    found = [said for _, said in workers.ask_each(Questions.fingerprint)]
    how = sorted({said["exact"] for said in found}) if is_exact else []
    factors = {said.get("rope factors", "") for said in found}
    if len(how) > 1:
        why = (
            f"exact=True is impossible with {len(found)} replicas that compute differently "
            f"({' | '.join(how)}): leave replicas out"
        )
    elif len(factors) > 1:
        why = (
            "the windows of the replicas differ, and this model has other rope factors for the longer ones, so that "
            "answers would depend on the replica: give ctx_per_seq, or a parallel and n_ctx that they can share evenly"
        )
    else:
        return
    workers.close()
    raise EngineError(why)


def path_of(model: Any) -> str | None:
    """Return a model's path for another process; None for the model that ships inside."""
    if model is None:
        return None
    with reading("model"):
        if isinstance(model, str | os.PathLike):
            return os.path.abspath(check_path("model", model))
    raise ConfigError(
        f"worker processes need the model's path, not {type(model).__name__}: give its file, or leave replicas out"
    )


def divisible(options: EngineOptions, n: int) -> int:
    """Return `n`, or so many workers as can each have some of what options give them together."""
    shared: list[int | None] = [getattr(options, name) for name in _SHARED]
    return min([n, *filter(None, shared)])


def settings_of(options: EngineOptions, n: int) -> list[dict[str, Any]]:
    """Return the settings of each of `n` workers, by name: settings that differ from the default.

    Raises:
        ConfigError: there are not enough slots, cells, MiB or places in the queue for each to have one.
    """
    default = EngineOptions()
    names = [f.name for f in fields(options)]
    given = {
        name: value for name in names if (value := getattr(options, name)) != getattr(default, name)
    }
    if n == 1:
        return [given]
    shared = {name: getattr(options, name) for name in _SHARED}
    if (
        options.parallel is None
    ):  # each has the default number, where cells in total do not say otherwise
        shared["parallel"] = (
            DEFAULT_PARALLEL * n if options.n_ctx is None else max(DEFAULT_PARALLEL, n)
        )
    for name, value in shared.items():
        if value is not None and 0 < value < n:
            raise ConfigError(f"{name}={value} cannot be divided among {n} replicas: raise it")
    if options.exact:
        given["exact_slots"] = options.exact_slots or shared["parallel"]
    shares = {name: divide(value, n) for name, value in shared.items()}
    return [
        {**given, **{name: part[i] for name, part in shares.items() if part[i] is not None}}
        for i in range(n)
    ]


def cores_of(options: EngineOptions, n: int) -> list[list[int] | None]:
    """Return the cores of each of `n` workers; None for a single one, which has those of this process."""
    if n == 1:
        return [None]
    return [*divide_cores(nodes_of(my_cores()), n)]


# ---- a worker that is there ----


class SocketLink:
    """A worker at a socket, such as `cbatch daemon --socket`. See `Link`."""

    def __init__(self, address: str) -> None:
        """Reach the worker.

        Raises:
            EngineError: there is none.
            NoThreadError: the system has no more threads.
        """
        self._address = address
        try:
            self._socket = _connected(address)
        except (OSError, ValueError, OverflowError) as error:  # an invalid host name or port
            raise EngineError(f"no worker answers at {address}: {words_of(error)}") from None
        self._output = self._socket.makefile("rb")
        try:
            self._lines = LineSender(
                self._socket.fileno(), lambda data: self._socket.send(data, socket.MSG_DONTWAIT)
            )
        except NoThreadError:
            self._output.close()
            self._socket.close()
            raise
        self.send(first_line(Hello(cbatch=VERSION, frames="msgpack", parts=True)))

    def send(self, message: bytes) -> None:
        """Send a message; where the worker does not read, behind the caller's back."""
        self._lines.send(message)

    def frames(self) -> Iterator[bytes]:
        """Yield the worker's frames as they come, until it is gone."""
        with suppress(ConnectionError):  # the worker is gone
            yield from read_frames(self._output)

    def is_stopped(self) -> bool:
        """Tell nothing: the worker may be on another machine."""
        return False

    def kill(self, why: str = "") -> None:
        """Leave the worker."""
        with suppress(OSError):  # the worker has left
            self._socket.shutdown(socket.SHUT_RDWR)

    def end(self) -> str:
        """Leave the worker; return that it has hung up."""
        self.kill()
        self._lines.end()
        self._output.close()
        self._socket.close()
        return f"the worker at {self._address} has hung up"


def _connected(address: str) -> socket.socket:
    host, colon, port = address.rpartition(":")
    if colon and port.isascii() and port.isdigit() and os.sep not in address:
        return socket.create_connection((host or "localhost", int(port)))
    found = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        found.connect(address)
    except BaseException:
        found.close()
        raise
    return found


def connect(
    address: str | None = None,
    *,
    model: Any = None,
    options: RunOptions | Mapping[str, Any] | None = None,
    **settings: Any,
) -> Engine:
    """Return the face of an engine that is in another process: a daemon at a socket, or one that is started here.

    Closing it ends its requests; a process that was started here ends, and is replaced where it dies before. A daemon
    at a socket goes on, and is not replaced.

    Args:
        address: the path of a Unix socket, or "host:port"; see `cbatch daemon`. Without one, a process is started.
        model: of a process that is started here, as for `cbatch.load`.
        options: defaults for every request.
        settings: of a process that is started here, as for `cbatch.load`.

    Raises:
        ConfigError: a wrong setting, or a model for a daemon, which has its own.
        EngineError: no worker answers there, it has a client already, or the model cannot be loaded.
    """
    if address is not None and (model is not None or settings):
        names = ", ".join(settings) or "model"
        raise ConfigError(
            f"{names}: the worker at {shown(address)} has loaded its model already; leave it out"
        )
    if address is None:
        path_of(model)
        opener = partial(open_workers, model, EngineOptions.of(settings), None, n=1)
    elif isinstance(address, str) and address:
        opener = partial(_reach, address)
    else:
        raise ConfigError(
            f"address must be the path of a socket or 'host:port', not {shown(address)}"
        )
    engine = Engine(options=options, opener=opener, model_name=address or "")
    try:
        engine.open()
    except BaseException:
        engine.close()
        raise
    return engine


def _reach(address: str, is_stopped: Callable[[], bool]) -> Workers:
    return Workers([partial(SocketLink, address)], can_replace=False, is_stopped=is_stopped)
