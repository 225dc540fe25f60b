"""Cells on disk: read for those that begin with them, written for those that end; never by the thread that computes."""

from __future__ import annotations

import threading
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from queue import PriorityQueue
from typing import TYPE_CHECKING

import numpy as np

from cbatch.cache.cell_file import CachedCells
from cbatch.core.waiting import CacheEntry, CacheRef
from cbatch.errors import CacheError, words_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from cbatch.backend import Backend
    from cbatch.cache.store import CacheStore, NoStore
    from cbatch.core.cell_ops import Stored
    from cbatch.core.driver import SequenceDriver

    Wants = Callable[[CacheEntry | None], int]
    """Tells how many of a file's cells are wanted, before it is read with None: 0 for nothing. From any thread."""
    Post = Callable[[Callable[[], object]], None]
    """Has something done by the owner thread."""
    Written = Callable[[SequenceDriver, CacheEntry | None, str | None], object]
    """Takes whose cells were to be written, what is on disk now, and what went wrong."""


_READ, _WRITE, _END = range(3)
"""What comes first: somebody waits for a read with a slot to be had."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """What reading a file brought.

    Args:
        fetch: what was to be read.
        found: what the file holds, why it could not be read, or None where nobody wanted it any more.
        data: (n_bytes,) uint8: its first cells; None where there are none to be had.
        n_cells: how many these are.
    """

    fetch: CacheRef
    found: CacheEntry | CacheError | None
    data: NDArray[np.uint8] | None = None
    n_cells: int = 0


class CacheIo:
    """Reads and writes files of cells in a thread of its own, which starts with the first of them.

    What it brings it hands to `post`, which has it done by the owner thread between two runs.
    """

    def __init__(
        self, store: CacheStore | NoStore, backend: Backend, post: Post, *, is_threaded: bool
    ) -> None:
        self._store, self._backend, self._post = store, backend, post
        self._is_threaded = is_threaded
        self._work: PriorityQueue[tuple[int, int, Callable[[], None] | None]] = PriorityQueue()
        self._numbers = count()
        self._thread: threading.Thread | None = None
        self._is_closing = False

    @property
    def is_current_thread(self) -> bool:
        """Whether the caller's thread is the one that reads and writes."""
        return self._thread is threading.current_thread()

    def read(self, fetch: CacheRef, then: Callable[[Arrival], object], n_wanted: Wants) -> None:
        """Read a file, if it is wanted still, then have `then` called with what came of it."""
        self._do(lambda: self._read(fetch, then, n_wanted), _READ)

    def write(self, stored: Stored, data: NDArray[np.uint8], then: Written) -> None:
        """Write a sequence's cells, then have `then` called with the driver, what is on disk, and what went wrong."""
        self._do(lambda: self._write(stored, data, then), _WRITE)

    def close(self) -> None:
        """Return when all has been written; nothing is read any more. Nothing may be asked for afterwards."""
        self._is_closing = True
        if self._thread is not None:
            self._work.put((_END, next(self._numbers), None))
            self._thread.join()

    def _do(self, work: Callable[[], None], rank: int) -> None:
        if self._is_threaded and self._thread is None:
            self._start()
        if self._is_threaded:
            self._work.put((rank, next(self._numbers), work))
        else:
            work()

    def _start(self) -> None:
        thread = threading.Thread(target=self._run, name="cbatch-keeper", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the process may have no more: then who asks does the work
            self._is_threaded = False
        else:
            self._thread = thread

    def _run(self) -> None:
        while (work := self._work.get()[2]) is not None:
            with suppress(Exception):  # it has told whoever asked
                work()

    def _read(self, fetch: CacheRef, then: Callable[[Arrival], object], n_wanted: Wants) -> None:
        arrival = Arrival(fetch, CacheError(fetch.key, "reading it was broken off"))
        try:
            is_wanted = not self._is_closing and n_wanted(None)
            arrival = self._read_first(fetch, n_wanted) if is_wanted else Arrival(fetch, None)
        except CacheError as error:
            arrival = Arrival(fetch, error)
        except Exception as error:
            failure = CacheError(fetch.key, f"it cannot be read: {words_of(error)}")
            failure.__cause__ = error
            arrival = Arrival(fetch, failure)
        finally:
            self._post(lambda: then(arrival))

    def _read_first(self, fetch: CacheRef, n_wanted: Wants) -> Arrival:
        """Read a file, and keep as many of its cells as somebody wants."""
        cells = self._store.read(fetch.key, self._backend.fingerprint(fetch.adapters))
        found = CacheEntry(cells.tokens.tolist(), cells.n_prompt)
        n_cells = n_wanted(found)
        if not n_cells:
            return Arrival(fetch, found)
        try:
            data = self._backend.validate_state(cells.data, len(found.tokens), n_cells)
        except ValueError as error:
            raise CacheError(fetch.key, f"the cells in its file {error}") from error
        return Arrival(fetch, found, data, n_cells)

    def _write(self, stored: Stored, data: NDArray[np.uint8], then: Written) -> None:
        driver, n_cells = stored.driver, stored.n_cells
        key, adapters = driver.request.options.cache_key or "", driver.request.adapters
        found: CacheEntry | None = None
        problem: str | None = "the cells were not saved: writing them was broken off"
        try:
            tokens = np.array(driver.tokens[:n_cells], np.int32)
            cells = CachedCells(tokens, min(driver.n_prompt, n_cells), data)
            self._store.write(key, cells, self._backend.fingerprint(adapters))
            found, problem = CacheEntry(tokens.tolist(), cells.n_prompt), None
        except Exception as error:
            problem = f"the cells were not saved: {words_of(error)}"
        finally:
            self._post(lambda: then(driver, found, problem))
