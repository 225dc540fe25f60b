"""A socket for one client at a time: others are told so, and closed."""

from __future__ import annotations

import errno
import os
import socket
import stat
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue

from cbatch.errors import ConfigError, NoThreadError
from cbatch.support.checks import readable
from cbatch.support.folders import lock
from cbatch.support.thread_start import started

_LOOPBACK = "127.0.0.1"
"""The one address that is listened on: whoever may connect may use the engine."""

_N_PENDING = 16

_N_UNREAD = 2**16

_LONGEST_WAIT_S = 1.0

_LEAVING_S = 1.0
"""How long a client that comes waits for the one before it, which may be leaving."""

_N_WAITING = 32
"""Clients that are told to wait at once; more are accepted when one of these is told. Our choice."""

_PASSING = {
    getattr(errno, name)
    for name in ("EMFILE", "ENFILE", "ENOBUFS", "ENOMEM", "ECONNABORTED", "EPROTO", "EINTR")
}
"""Errors of one connection, or of a system that is short of something. Source: accept(2)."""

_PAUSE_S = 0.1
"""Seconds until the next try after such an error. Our choice."""

_SOON_S = 1.0
"""A client that sends no line within this time is taken for one that knows no JSON; one that takes none gets none."""


class Listener:
    """Listens on a path or a port of this machine until `close`."""

    def __init__(self, place: Path | int, busy: Callable[[bytes], bytes]) -> None:
        """Listen.

        Args:
            place: a path, or a port.
            busy: returns what a client is told that comes while another is served, by its first line; b"" where it
                sends none soon.

        Raises:
            ConfigError: the place is in use, or cannot be used.
        """
        self._busy = busy
        self._path = None if isinstance(place, int) else place
        self._socket = _at_port(place) if isinstance(place, int) else socket_at(place)
        self._name = None if isinstance(place, int) else place.lstat()
        self._clients: SimpleQueue[socket.socket | OSError] = SimpleQueue()
        self._is_serving = threading.Lock()
        self._room = threading.Semaphore(_N_WAITING)
        self._closed = threading.Event()
        self._thread = started(self._accept, "cbatch-listener")

    @property
    def name(self) -> str:
        """Where it listens."""
        if self._path is not None:
            return readable(self._path)
        host, port = self._socket.getsockname()
        return f"{host}:{port}"

    def clients(self) -> Generator[socket.socket, None, None]:
        """Yield one client after the other; each is closed when the next one is asked for."""
        while True:
            client = self._next()
            if isinstance(client, OSError):
                raise client
            try:
                yield client
            finally:
                hang_up(client)
                self._is_serving.release()

    def _next(self) -> socket.socket | OSError:
        while True:
            with suppress(Empty):
                # Ctrl-C that comes just before a wait is noticed after it
                return self._clients.get(timeout=_LONGEST_WAIT_S)

    def close(self) -> None:
        """Stop listening."""
        self._closed.set()
        self._room.release()  # for the thread that may wait for it
        hang_up(self._socket)
        self._thread.join(_SOON_S)  # where nothing wakes it, it ends with the process
        while not self._clients.empty():
            client = self._clients.get()
            if not isinstance(client, OSError):
                hang_up(client)
        if self._path is not None and self._name is not None:
            remove_socket(self._path, self._name)

    def _accept(self) -> None:
        """Hand over clients until `close`; an error that passes is waited for."""
        while self._room.acquire() and not self._closed.is_set():
            try:
                client, _ = self._socket.accept()
            except OSError as error:
                self._room.release()
                if error.errno in _PASSING:
                    self._closed.wait(_PAUSE_S)
                    continue
                if not self._closed.is_set():
                    self._clients.put(error)
                return
            if self._is_serving.acquire(blocking=False):
                self._clients.put(client)
                self._room.release()
                continue
            try:
                started(partial(self._wait, client), "cbatch-client")
            except NoThreadError:
                hang_up(client)
                self._room.release()

    def _wait(self, client: socket.socket) -> None:
        """Have a client served if the one before it leaves soon, else refuse it."""
        if not self._is_serving.acquire(timeout=_LEAVING_S):
            self._refuse(client)
        else:
            self._clients.put(client)
            if self._closed.is_set():  # nobody takes it then
                hang_up(client)
        self._room.release()

    def _refuse(self, client: socket.socket) -> None:
        first = b""
        with suppress(OSError):
            client.settimeout(_SOON_S)
            with suppress(TimeoutError):
                first = client.recv(_N_UNREAD)
            client.sendall(self._busy(first))
            client.shutdown(socket.SHUT_WR)
            client.recv(_N_UNREAD)  # closed before that, it may lose what it was told
        hang_up(client)


def hang_up(opened: socket.socket) -> None:
    """Close a socket; whoever waits for it wakes up."""
    with suppress(OSError):  # the other side is gone
        opened.shutdown(socket.SHUT_RDWR)
    opened.close()


def _at_port(port: int) -> socket.socket:
    try:
        return socket.create_server((_LOOPBACK, port), backlog=_N_PENDING)
    except OSError as error:
        raise ConfigError(f"port {port}: {error.strerror}") from error


def socket_at(path: Path) -> socket.socket:
    """Return a socket that listens at a path, to which only this user may connect.

    Raises:
        ConfigError: another process listens there, or the path cannot be used.
    """
    opened = socket.socket(socket.AF_UNIX)
    try:
        # a socket that is not listened on yet looks like one left behind
        with _alone_in(path.parent):
            _bind(opened, path)
            opened.listen(_N_PENDING)
    except OSError as error:
        opened.close()
        # Python's own error, such as that of a path that is too long, has no number
        raise ConfigError(f"{readable(path)}: {error.strerror or error}") from error
    except BaseException:
        opened.close()
        raise
    return opened


def remove_socket(path: Path, name: os.stat_result) -> None:
    """Remove a socket's file if it is still the same one, not another server's socket or another file."""
    with suppress(OSError):
        if os.path.samestat(path.lstat(), name):
            path.unlink()


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Wait until no other process makes a socket in a folder, for a second at most, and keep others waiting."""
    fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with suppress(OSError):  # not every file system has locks
            lock(fd, _LONGEST_WAIT_S)
        yield
    finally:
        os.close(fd)


def _bind(opened: socket.socket, path: Path) -> None:
    before = os.umask(0o177)
    try:
        opened.bind(os.fspath(path))
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        _remove_left(path)
        opened.bind(os.fspath(path))
    finally:
        os.umask(before)


def _remove_left(path: Path) -> None:
    """Remove a socket that a process has left behind."""
    if not stat.S_ISSOCK(path.lstat().st_mode):
        raise ConfigError(f"{readable(path)}: exists and is not a socket: give another path")
    with socket.socket(socket.AF_UNIX) as asking:
        try:
            asking.connect(os.fspath(path))
        except ConnectionRefusedError:
            path.unlink()
            return
    raise ConfigError(f"{readable(path)}: another process listens there: give another path")
