"""One place in a pool of workers: its worker is started, read from, and replaced when it dies."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Protocol

from cbatch.errors import CBatchError, words_of
from cbatch.logs import Log
from cbatch.worker.connection import Connection

if TYPE_CHECKING:
    from collections.abc import Callable

    from cbatch.worker.connection import Link

_log = Log("cbatch")

N_LAUNCHES_MAX = 3
"""Times in a row that a worker may fail to start before its place is given up. Our choice."""

BACK_OFF_S = (0.0, 0.1, 0.5, 2.0, 10.0, 30.0)
"""How long a place stays empty, by the deaths there since a worker last ended a request. Our choice."""


class Owner(Protocol):
    """Who a place tells of its workers, in the place's own thread."""

    def join(self, connection: Connection) -> None:
        """Take a worker that is ready."""

    def take(self, connection: Connection, frame: bytes) -> None:
        """Take a frame."""

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
        self._pool, self._launch = pool, launch
        self._link: Link | None = None
        self._is_over = threading.Event()
        self.thread = threading.Thread(target=self._run, name=f"cbatch-worker-{i}", daemon=True)

    def end(self) -> None:
        """Start no more workers."""
        self._is_over.set()

    def kill(self) -> None:
        """Start no more workers, and end the one that is being started or works, now."""
        self.end()
        if self._link is not None:
            self._link.kill()

    def _run(self) -> None:
        n_failed = 0
        while not self._is_over.wait(self._back_off_s()):
            try:
                self._link = self._launch()
                connection = Connection(self._link)
            except CBatchError as error:
                n_failed += 1
                if self.n_deaths == 0 or n_failed == N_LAUNCHES_MAX:
                    self._pool.give_up(self, error)
                    return
                self.n_deaths += 1
                continue
            n_failed = 0
            self._serve(connection)
            self.n_deaths += 1
            if not self._pool.leave(connection):
                return
            _log.warn("worker %d has died and is replaced: %s", self.i, connection.cause)

    def _back_off_s(self) -> float:
        return BACK_OFF_S[min(self.n_deaths, len(BACK_OFF_S)) - 1] if self.n_deaths else 0.0

    def _serve(self, connection: Connection) -> None:
        """Take what a worker sends until it is gone."""
        self.connection = connection
        self._pool.join(connection)
        try:
            for frame in connection.frames:
                self._pool.take(connection, frame)
        except Exception as error:
            connection.cause = f"it sent what cannot be read: {words_of(error)}"
            connection.link.kill()
            _log.fail("a frame of a worker could not be read")
        ended = connection.link.end()
        self.connection = None
        connection.lose("; ".join(filter(None, (connection.cause, ended))))
