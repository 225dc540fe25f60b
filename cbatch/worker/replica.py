"""One place in a pool of workers: its worker is started, read from, and replaced when it dies."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Protocol

from cbatch.errors import CBatchError, EngineError, words_of
from cbatch.logs import Log
from cbatch.worker.connection import Connection, FrameThread

if TYPE_CHECKING:
    from collections.abc import Callable

    from cbatch.worker.connection import Link

_log = Log("cbatch")

N_LAUNCHES_MAX = 3
"""Times in a row that a worker may fail to start before its place is given up. Our choice."""

BACK_OFF_S = (0.0, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
"""How long a place stays empty, by the deaths there since a worker last ended a request. Our choice."""

N_STOPPED_MAX = 10
"""Looks in a row, one a second, at which a worker is stopped before it is killed. Our choice."""


class Owner(Protocol):
    """Who a place tells of its workers, in the place's own thread."""

    def join(self, connection: Connection) -> None:
        """Take a worker that is ready."""

    def take(self, connection: Connection, said: dict[str, Any]) -> None:
        """Take what a frame holds."""

    def leave(self, connection: Connection) -> bool:
        """Do without a worker that is gone; return whether it is to be replaced."""

    def give_up(self, replica: Replica, error: CBatchError) -> None:
        """Do without this place: no worker could be started there."""


class Replica:
    """Keeps one worker of a pool alive, in a thread of its own."""

    def __init__(self, pool: Owner, i: int, launch: Callable[[], Link]) -> None:
        self.i = i
        self.connection: Connection | None = None
        """The worker, while there is one."""
        self.n_deaths = 0
        """Since a worker here last ended a request."""
        self.n_slots = 0
        """Of the last worker here."""
        self._n_looks_stopped = 0
        self._pool, self._launch = pool, launch
        self._link: Link | None = None
        self._is_over, self._linking = threading.Event(), threading.Lock()
        self.thread = FrameThread(target=self._run, name=f"cbatch-worker-{i}", daemon=True)

    def end(self) -> None:
        """Start no more workers, and end one that is not ready yet."""
        with self._linking:
            self._is_over.set()
            if self._link is not None and self.connection is None:
                self._link.kill()

    def kill(self) -> None:
        """Start no more workers, and end the one that is being started or works, now."""
        with self._linking:
            self._is_over.set()
            if self._link is not None:
                self._link.kill()

    @property
    def is_stopped(self) -> bool:
        """Whether a signal had stopped the worker when `look` was last called."""
        return self._n_looks_stopped > 0

    def look(self) -> None:
        """Find out whether a signal has stopped the worker; kill a worker that is stopped for long."""
        with self._linking:
            is_stopped = self._link is not None and self._link.is_stopped()
            self._n_looks_stopped = self._n_looks_stopped + 1 if is_stopped else 0
            if self._link is not None and self._n_looks_stopped == N_STOPPED_MAX:
                if self.connection is not None:
                    self.connection.cause = "a signal has stopped it, so it was killed"
                self._link.kill()

    def _run(self) -> None:
        try:
            self._keep_alive()
        except Exception as error:  # a bug, of which readers would not be told otherwise
            _log.fail("a place for workers is given up")
            self._pool.give_up(self, EngineError(f"a bug of cbatch: {words_of(error)}"))

    def _keep_alive(self) -> None:
        n_failed = 0
        while not self._is_over.wait(self._back_off_s()):
            try:
                connection = self._connected()
            except CBatchError as error:
                n_failed += 1
                if self._is_over.is_set():
                    return
                if not self.n_deaths or n_failed == N_LAUNCHES_MAX:
                    self._pool.give_up(self, error)
                    return
                self.n_deaths += 1
                _log.warn("worker %d could not be started: %s", self.i, error)
                continue
            n_failed = 0
            self._serve(connection)
            self.n_deaths += 1
            if not self._pool.leave(connection):
                return

    def _connected(self) -> Connection:
        """Return a worker that is ready. Raises a CBatchError where none can be started."""
        try:
            link = self._launch()
        except Exception as error:
            if isinstance(error, CBatchError):
                raise
            raise EngineError(f"no worker can be started: {words_of(error)}") from error
        with self._linking:
            self._link, self._n_looks_stopped = link, 0
            if self._is_over.is_set():
                link.kill()
        try:
            return Connection(link)
        except BaseException:
            with self._linking:
                self._link = None
            raise

    def _back_off_s(self) -> float:
        return BACK_OFF_S[min(self.n_deaths, len(BACK_OFF_S)) - 1] if self.n_deaths else 0.0

    def _serve(self, connection: Connection) -> None:
        """Take what a worker sends until it is gone."""
        self.connection = self.thread.connection = connection
        self.n_slots = connection.n_slots
        try:
            self._pool.join(connection)
            for said in connection.messages():
                self._pool.take(connection, said)
        except Exception as error:
            connection.cause = f"it sent what cannot be read: {words_of(error)}"
            connection.link.kill()
            _log.fail("a frame of a worker could not be read")
        ended = connection.end()
        self.thread.connection = None
        with self._linking:
            self.connection = self._link = None
        connection.lose("; ".join(filter(None, (connection.cause, ended))))
