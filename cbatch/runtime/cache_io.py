"""Cells between slots and files: read for sequences that begin with them, written for sequences that have ended."""

from __future__ import annotations

import threading
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import count
from queue import PriorityQueue
from typing import TYPE_CHECKING

from cbatch.core.waiting import CacheEntry, CacheRef
from cbatch.errors import CacheError, words_of

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import NDArray

    from cbatch.backend import Backend
    from cbatch.cache.store import CacheStore, NoStore
    from cbatch.core.batcher import MultiRequestBatcher
    from cbatch.core.cell_ops import Stored
    from cbatch.core.driver import SequenceDriver

    Wanted = Callable[[CacheEntry | None], int]
    """Returns how many of a file's cells are wanted; before the file is read, whether any are. From any thread."""
    Post = Callable[[Callable[[], object]], None]
    """Has something done by the owner thread."""
    Written = Callable[[SequenceDriver, CacheEntry | None, str | None], object]
    """Takes the driver whose cells were to be written, what the file holds now, and what went wrong."""


_READ, _WRITE, _END = range(3)
"""Reads come first, for a sequence waits for each of them."""


@dataclass(frozen=True, slots=True)
class ReadResult:
    """What came of reading a file.

    Args:
        ref: the file.
        found: what the file holds, why it could not be read, or None where nobody wanted it any more.
        data: (n_bytes,) uint8: its first cells; None where none are wanted.
        n_cells: how many cells these are.
    """

    ref: CacheRef
    found: CacheEntry | CacheError | None
    data: NDArray[np.uint8] | None = None
    n_cells: int = 0


class CacheIo:
    """Reads and writes files of cells in a thread of its own, which starts with the first of them.

    The results go to `post`, which has them handled by the owner thread between two runs.
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

    def read(self, ref: CacheRef, then: Callable[[ReadResult], object], n_wanted: Wanted) -> None:
        """Read a file if it is still wanted, then have `then` called with the result."""
        self._do(lambda: self._read(ref, then, n_wanted), _READ)

    def write(self, stored: Stored, data: NDArray[np.uint8], then: Written) -> None:
        """Write a sequence's cells, then have `then` called with what came of it."""
        self._do(lambda: self._write(stored, data, then), _WRITE)

    def close(self) -> None:
        """Return when everything is written; nothing more is read. Nothing may be asked for afterwards."""
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
        thread = threading.Thread(target=self._run, name="cbatch-cache", daemon=True)
        try:
            thread.start()
        except (
            RuntimeError
        ):  # the process may have no more threads: the caller's thread does the work
            self._is_threaded = False
        else:
            self._thread = thread

    def _run(self) -> None:
        while (work := self._work.get()[2]) is not None:
            with suppress(Exception):  # the owner thread has been told
                work()

    def _read(self, ref: CacheRef, then: Callable[[ReadResult], object], n_wanted: Wanted) -> None:
        result = ReadResult(ref, CacheError(ref.key, "reading it was broken off"))
        try:
            is_wanted = not self._is_closing and n_wanted(None)
            result = self._read_first(ref, n_wanted) if is_wanted else ReadResult(ref, None)
        except CacheError as error:
            result = ReadResult(ref, error)
        except Exception as error:
            failure = CacheError(ref.key, f"it cannot be read: {words_of(error)}")
            failure.__cause__ = error
            result = ReadResult(ref, failure)
        finally:
            self._post(lambda: then(result))

    def _read_first(self, ref: CacheRef, n_wanted: Wanted) -> ReadResult:
        """Read a file and cut it to the cells that are wanted."""
        cells = self._store.read(ref.key, self._backend.fingerprint(ref.adapters))
        found = CacheEntry(cells.tokens.tolist(), cells.n_prompt)
        n_cells = n_wanted(found)
        if not n_cells:
            return ReadResult(ref, found)
        try:
            data = self._backend.validate_state(cells.data, n_cells)
        except ValueError as error:
            raise CacheError(ref.key, f"the cells in its file {error}") from error
        return ReadResult(ref, found, data, n_cells)

    def _write(self, stored: Stored, data: NDArray[np.uint8], then: Written) -> None:
        driver, n_cells = stored.driver, stored.n_cells
        ref, found = CacheRef.of(driver.request), None
        problem: str | None = "the cells were not saved: writing them was broken off"
        try:
            from cbatch.cache.cell_file import CachedCells  # numpy is slow to import

            tokens, n_prompt = driver.tokens[:n_cells], min(driver.n_prompt, n_cells)
            cells = CachedCells.of(tokens, n_prompt, data)
            self._store.write(ref.key, cells, self._backend.fingerprint(ref.adapters))
            found, problem = CacheEntry(tokens, n_prompt), None
        except Exception as error:
            problem = f"the cells were not saved: {words_of(error)}"
        finally:
            self._post(lambda: then(driver, found, problem))


class CellTransfers:
    """Has files read and written as the batcher orders; moves cells into the backend and out. Owner thread."""

    def __init__(self, backend: Backend, batcher: MultiRequestBatcher, io: CacheIo | None) -> None:
        self._backend, self._batcher, self._io = backend, batcher, io

    @property
    def is_current_thread(self) -> bool:
        """Whether the caller's thread is the one that reads and writes."""
        return self._io is not None and self._io.is_current_thread

    def read_ordered(self) -> None:
        """Have the files read that sequences wait for."""
        if self._io is not None:
            for ref in self._batcher.take_reads():
                self._io.read(ref, self._take_read, partial(self._batcher.n_wanted, ref))

    def _take_read(self, result: ReadResult) -> None:
        """Hand cells to the backend for the sequences that waited for them."""
        for driver, key in self._batcher.take_cells(result.ref, result.found, result.n_cells):
            self._import(result, driver, key)

    def _import(self, result: ReadResult, driver: SequenceDriver, key: int) -> None:
        try:
            if result.data is not None:
                self._backend.import_state(key, result.data, result.n_cells)
        except Exception as error:  # for want of memory
            what = f"no room for its cells: {words_of(error)}"
            self._batcher.refuse_cells(driver, CacheError(result.ref.key, what))

    def write_stored(self) -> None:
        """Have cells written that were copied out; a sequence ends here whose cells could not be."""
        while (stored := self._batcher.take_stored()) is not None:
            data = None if stored.key is None else self._backend.export_state(stored.key)
            if data is None or self._io is None:
                self._batcher.end_stored(stored.driver)
            else:
                self._io.write(stored, data, self._batcher.end_stored)

    def close(self) -> None:
        """Return when the cells that were copied out are on disk, and their sequences have ended."""
        self.write_stored()
        if self._io is not None:
            self._io.close()
