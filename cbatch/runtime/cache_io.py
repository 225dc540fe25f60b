"""Cells between slots and files: read for sequences that begin with them, written for sequences that have ended."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from cbatch.core.waiting import CacheEntry, CacheRef
from cbatch.errors import CacheError, words_of
from cbatch.runtime.work_thread import WorkThread

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import NDArray

    from cbatch.backend import Backend
    from cbatch.cache.store import CacheStore, NoStore
    from cbatch.core.batcher import MultiRequestBatcher
    from cbatch.core.cell_ops import Stored

    Post = Callable[[Callable[[], object]], None]
    """Has something done by the owner thread."""
    Read = tuple[CacheEntry | CacheError | None, NDArray[np.uint8] | None, int]
    """What a file holds, why it could not be read, or None where it was no longer wanted; (n_bytes,) uint8 and the
    number of its first cells, where some are wanted."""


_READ, _WRITE = range(2)
"""Reads come first, for a sequence waits for each of them."""


class CacheIo:
    """Reads and writes files as the batcher orders, in a thread of its own; moves cells into the backend and out.

    Results go to `post`, which has them handled by the owner thread between two runs. Every method: owner thread.
    """

    def __init__(
        self,
        store: CacheStore | NoStore,
        backend: Backend,
        batcher: MultiRequestBatcher,
        post: Post,
        *,
        is_threaded: bool,
    ) -> None:
        self._store, self._backend, self._batcher, self._post = store, backend, batcher, post
        self._thread = WorkThread("cbatch-cache", is_threaded=is_threaded)
        self._is_closing = False

    @property
    def is_current_thread(self) -> bool:
        """Whether the caller's thread is the one that reads and writes. From any thread."""
        return self._thread.is_current

    def read_ordered(self) -> None:
        """Have the files read that sequences wait for."""
        for ref in self._batcher.take_reads():
            self._thread.do(partial(self._read, ref), _READ)

    def write_stored(self) -> None:
        """Have cells written that were copied out; a sequence ends here whose cells could not be."""
        while (stored := self._batcher.take_stored()) is not None:
            data = None if stored.key is None else self._backend.export_state(stored.key)
            if data is None:
                self._batcher.end_stored(stored.driver)
            else:
                self._thread.do(partial(self._write, stored, data), _WRITE)

    def close(self) -> None:
        """Return when the cells that were copied out are on disk and no file is read any more."""
        self.write_stored()
        self._is_closing = True
        self._thread.close()

    # ---- in the thread ----

    def _read(self, ref: CacheRef) -> None:
        """Read a file, if it is still wanted."""
        read: Read = CacheError(ref.key, "reading it was broken off"), None, 0
        try:
            is_wanted = not self._is_closing and self._batcher.n_wanted(ref)
            read = self._read_first(ref) if is_wanted else (None, None, 0)
        except CacheError as error:
            read = error, None, 0
        except Exception as error:
            failure = CacheError(ref.key, f"it cannot be read: {words_of(error)}")
            failure.__cause__ = error
            read = failure, None, 0
        finally:
            self._post(partial(self._take_read, ref, read))

    def _read_first(self, ref: CacheRef) -> Read:
        """Read a file and cut it to the cells that are wanted."""
        cells = self._store.read(ref.key, self._backend.fingerprint(ref.adapters))
        found = CacheEntry(cells.tokens.tolist(), cells.n_prompt)
        n_cells = self._batcher.n_wanted(ref, found)
        if not n_cells:
            return found, None, 0
        try:
            return found, self._backend.validate_state(cells.data, n_cells), n_cells
        except ValueError as error:
            raise CacheError(ref.key, f"the cells in its file {error}") from error

    def _write(self, stored: Stored, data: NDArray[np.uint8]) -> None:
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
            self._post(lambda: self._batcher.end_stored(driver, found, problem))

    # ---- what was read ----

    def _take_read(self, ref: CacheRef, read: Read) -> None:
        """Hand cells to the backend for the sequences that waited for them."""
        found, data, n_cells = read
        for driver, key in self._batcher.take_cells(ref, found, n_cells):
            try:
                if data is not None:
                    self._backend.import_state(key, data, n_cells)
            except Exception as error:  # noqa: PERF203  # for want of memory
                what = f"no room for its cells: {words_of(error)}"
                self._batcher.refuse_cells(driver, CacheError(ref.key, what))
