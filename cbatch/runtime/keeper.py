"""Cells on disk: read for those that begin with them, written for those that end; never by the thread that computes."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TYPE_CHECKING

import numpy as np

from cbatch.core.holds import Fetch, Found
from cbatch.errors import CacheError
from cbatch.store import CachedCells, CacheStore

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from cbatch.backend import Backend
    from cbatch.core.cells import Stored
    from cbatch.core.driver import SequenceDriver

    Post = Callable[[Callable[[], object]], None]
    """Has something done by the owner thread."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """What reading a file brought; `data` is None where it failed."""

    fetch: Fetch
    found: Found | CacheError
    data: NDArray[np.uint8] | None = None


class Keeper:
    """Reads and writes files of cells in a thread of its own, which starts with the first of them.

    What it brings it hands to `post`, which has it done by the owner thread between two runs.
    """

    def __init__(
        self, store: CacheStore, backend: Backend, post: Post, *, is_threaded: bool
    ) -> None:
        self._store, self._backend, self._post = store, backend, post
        self._is_threaded = is_threaded
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def read(self, fetch: Fetch, then: Callable[[Arrival], object]) -> None:
        """Read a file, then have `then` called with what came of it."""
        self._do(lambda: self._read(fetch, then))

    def write(
        self,
        stored: Stored,
        data: NDArray[np.uint8],
        then: Callable[[SequenceDriver, Found | None, str | None], object],
    ) -> None:
        """Write a sequence's cells, then have `then` called with the driver, what is on disk, and what went wrong."""
        self._do(lambda: self._write(stored, data, then))

    def close(self) -> None:
        """Return when all has been written. Nothing may be asked for afterwards."""
        if self._thread is not None:
            self._work.put(None)
            self._thread.join()

    def _do(self, work: Callable[[], None]) -> None:
        if not self._is_threaded:
            work()
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="cbatch-keeper", daemon=True)
            self._thread.start()
        self._work.put(work)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()

    def _read(self, fetch: Fetch, then: Callable[[Arrival], object]) -> None:
        try:
            cells = self._store.read(fetch.key, self._backend.fingerprint(fetch.adapters))
            arrival = Arrival(fetch, Found(cells.tokens.tolist(), cells.n_prompt), cells.data)
        except CacheError as error:
            arrival = Arrival(fetch, error)
        except Exception as error:
            failure = CacheError(fetch.key, f"it cannot be read: {error}")
            failure.__cause__ = error
            arrival = Arrival(fetch, failure)
        self._post(lambda: then(arrival))

    def _write(
        self,
        stored: Stored,
        data: NDArray[np.uint8],
        then: Callable[[SequenceDriver, Found | None, str | None], object],
    ) -> None:
        driver, n_cells = stored.driver, stored.n_cells
        key, adapters = driver.request.options.cache_key or "", driver.request.adapters
        tokens = np.array(driver.tokens[:n_cells], np.int32)
        cells = CachedCells(tokens, min(driver.n_prompt, n_cells), data)
        found, problem = Found(tokens.tolist(), cells.n_prompt), None
        try:
            self._store.write(key, cells, self._backend.fingerprint(adapters))
        except Exception as error:
            problem = f"the cells were not saved: {error}"
        self._post(lambda: then(driver, None if problem else found, problem))
