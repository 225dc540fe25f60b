"""One place in a pool of workers: its worker is started, read from, and replaced when it dies."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from cbatch.errors import CBatchError, EngineError, ModelLoadError, words_of
from cbatch.support.logs import Log
from cbatch.worker.connection import Connection, FrameThread, Link

if TYPE_CHECKING:
    from collections.abc import Callable

    from cbatch.worker.pool import Pool

_log = Log("cbatch.worker")

BACK_OFF_S = (0.0, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
"""Seconds before the next start, by the number of deaths and failed starts since a worker here last ended a request.

Our choice; the last value holds for all higher numbers.
"""

N_STOPPED_MAX = 10
"""Looks in a row, one a second, at which a worker is stopped before it is killed. Our choice."""

_NOT_TOLD = "the system does not say how"
"""Why a worker died if the program ignores SIGCHLD, so that the system forgets it. Source: man 2 wait, notes."""


class Replica:
    """Keeps one worker of a pool alive, in a thread of its own."""

    def __init__(self, pool: Pool, i: int, launch: Callable[[], Link]) -> None:
        self.i = i
        self.connection: Connection | None = None
        """The worker, while there is one."""
        self.n_deaths = 0
        """Deaths and failed starts since a worker here last ended a request."""
        self.problem = ""
        """Why the last start failed; "" if it succeeded."""
        self.starts_s = 0.0
        """Time of the next start, by `time.perf_counter`; while a worker runs, that of its own start."""
        self.n_slots = 0
        """Of the last worker here."""
        self._n_looks_stopped = 0
        self._pool, self._launch = pool, launch
        self._link: Link | None = None
        self._is_over = threading.Event()
        self._linking = threading.RLock()  # a finalizer may end the replica anywhere
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
        link = self._link
        # without the lock: a finalizer that runs here may close the engine, which waits for the replica's thread
        is_stopped = link is not None and link.is_stopped()
        with self._linking:
            self._n_looks_stopped = self._n_looks_stopped + 1 if is_stopped else 0
            if link is not None and link is self._link and self._n_looks_stopped == N_STOPPED_MAX:
                link.kill(f"killed, because a signal had stopped it for {N_STOPPED_MAX} s")

    def _run(self) -> None:
        try:
            self._keep_alive()
        except Exception as error:  # a bug, of which readers would not be told otherwise
            _log.fail(f"worker {self.i} failed for good: an internal error")
            self._pool.fail(EngineError(f"internal error: {words_of(error)}"))

    def _keep_alive(self) -> None:
        while not self._is_over.wait(self._pause()):
            try:
                connection = self._connected()
            except CBatchError as error:
                self.n_deaths += 1
                self.problem = words_of(error)
                if self._is_over.is_set() or not self._pool.miss(error):
                    return
                self._tell("could not be started", self.problem)
                continue
            if self.n_deaths:
                _log.warn("worker %d is running again", self.i)
            self.problem = ""
            self._serve(connection)
            self.n_deaths += 1
            if not self._pool.leave(connection):
                return
            self._tell("died", connection.cause)

    def _tell(self, what: str, why: str) -> None:
        wait_s = back_off_s(self.n_deaths)
        when = f"in {wait_s:g} s" if wait_s else "now"
        _log.warn("worker %d %s: %s; restarting %s", self.i, what, why, when)

    def _pause(self) -> float:
        """Return how long to wait before the next start."""
        wait_s = back_off_s(self.n_deaths)
        self.starts_s = time.perf_counter() + wait_s
        return wait_s

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
            connection = Connection(link)
            try:
                self._pool.check_weights(connection)
            except ModelLoadError:
                link.kill()
                link.end()
                raise
        except BaseException:
            with self._linking:
                self._link = None
            raise
        return connection

    def _serve(self, connection: Connection) -> None:
        """Take what a worker sends until it is gone."""
        self.connection = self.thread.connection = connection
        self.n_slots = connection.n_slots
        try:
            self._pool.join(connection)
            for said in connection.messages():
                self._pool.take(connection, said)
                del said  # the results in it are kept by nobody else
        except Exception as error:
            connection.cause = f"it sent what cannot be read: {words_of(error)}"
            connection.link.kill()
            _log.fail("a frame of a worker could not be read")
        ended = connection.end()
        self.thread.connection = None
        with self._linking:
            self.connection = self._link = None
        connection.lose("; ".join(filter(None, (connection.cause, ended))) or _NOT_TOLD)


def back_off_s(n_deaths: int) -> float:
    """Return the seconds before the next start after so many deaths and failed starts in a row."""
    return BACK_OFF_S[min(n_deaths, len(BACK_OFF_S)) - 1] if n_deaths else 0.0
