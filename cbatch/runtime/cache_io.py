"""Moves cells between slots and files: reads them for sequences that start with them, writes those of ended ones."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from cbatch.errors import CacheError, words_of
from cbatch.runtime.wants import CacheEntry, CacheRead, CacheRef, SequenceWants
from cbatch.runtime.work_thread import WorkThread

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import NDArray

    from cbatch.backend import Backend
    from cbatch.cache.store import CacheStore, NoStore
    from cbatch.core.batcher import MultiRequestBatcher
    from cbatch.core.driver import SequenceDriver
    from cbatch.core.saved_cells import ToStore

    Post = Callable[[Callable[[], object]], None]
    """Has something done by the owner thread."""
    Read = tuple[CacheEntry | CacheError | None, NDArray[np.uint8] | None]
    """What a file holds, why it could not be read, or None where it was no longer wanted; and (n_bytes,) uint8 of its
    first cells, where some are wanted."""


_READ, _WRITE = range(2)
"""Reads come first, for a sequence waits for each of them."""


class CacheIo:
    """Reads and writes files as sequences want, in a thread of its own; moves cells into the backend and out.

    Results go to `post`, which has them handled by the owner thread between two runs. Every method: owner thread.
    """

    def __init__(
        self,
        store: CacheStore | NoStore,
        backend: Backend,
        batcher: MultiRequestBatcher,
        wants: SequenceWants,
        clock: Callable[[], float],
        post: Post,
        *,
        is_threaded: bool,
    ) -> None:
        self._store, self._backend, self._batcher = store, backend, batcher
        self._wants, self._clock, self._post = wants, clock, post
        self._thread = WorkThread("cbatch-cache", is_threaded=is_threaded)
        self._is_closing = False

    @property
    def is_current_thread(self) -> bool:
        """Whether the caller's thread is the one that reads and writes. From any thread."""
        return self._thread.is_current

    def order(self, want: CacheRead | ToStore) -> None:
        """Have a file read, or cells that were copied out written; a sequence whose cells are gone ends here."""
        if isinstance(want, CacheRead):
            self._thread.do(partial(self._read, want), _READ)
            return
        data = self._export(want.key)
        checkpoint = self._export(want.checkpoint[0]) if want.checkpoint else None
        if data is None:
            self._resolve(want, "the cells were not saved: they could not be copied to host memory")
        else:
            self._thread.do(partial(self._write, want, data, checkpoint), _WRITE)

    def _export(self, key: int) -> NDArray[np.uint8] | None:
        """Return what the backend has saved under a key; of checkpoints it keeps it, for others go on from them."""
        return self._backend.export_state(key, is_kept=key < 0)

    def close(self) -> None:
        """Return when the cells that were copied out are on disk and no file is read any more."""
        self._is_closing = True
        self._thread.close()

    # ---- in the thread ----

    def _read(self, want: CacheRead) -> None:
        """Read a file, if it is still wanted."""
        ref = want.ref
        read: Read = CacheError(ref.key, "reading its file was broken off"), None
        try:
            is_wanted = want.is_wanted and not self._is_closing
            read = self._read_first(want) if is_wanted else (None, None)
        except CacheError as error:
            read = error, None
        except Exception as error:
            failure = CacheError(ref.key, f"the saved cells cannot be read: {_words_of(error)}")
            failure.__cause__ = error
            read = failure, None
        finally:
            self._post(partial(self._take_read, want, *read))

    def _read_first(self, want: CacheRead) -> Read:
        """Read a file and cut it to the cells that are wanted."""
        ref = want.ref
        cells = self._store.read(ref.key, self._backend.fingerprint(ref.adapters))
        found, data = CacheEntry(cells.tokens, cells.n_prompt, cells.n_checkpoint), cells.data
        if not want.choose(found):
            return found, None
        if cells.checkpoint is not None and want.n_read == cells.n_checkpoint:
            data = cells.checkpoint
        try:
            return found, self._backend.validate_state(data, want.n_read)
        except ValueError as error:
            raise CacheError(ref.key, f"the cells in its file {error}") from error

    def _write(
        self, want: ToStore, data: NDArray[np.uint8], checkpoint: NDArray[np.uint8] | None
    ) -> None:
        driver, n_cells = want.driver, want.n_cells
        n_checkpoint = want.checkpoint[1] if want.checkpoint and checkpoint is not None else 0
        ref = CacheRef.of(driver.request)
        found: CacheEntry | str = "the cells were not saved: writing them was broken off"
        try:
            from cbatch.cache.cell_file import CachedCells  # numpy is slow to import

            tokens, n_prompt = driver.tokens[:n_cells], min(driver.n_prompt, n_cells)
            cells = CachedCells(tokens, n_prompt, data, n_checkpoint, checkpoint)
            self._store.write(ref.key, cells, self._backend.fingerprint(ref.adapters))
            found = CacheEntry(tokens, n_prompt, n_checkpoint)
        except Exception as error:
            found = f"the cells were not saved: {_words_of(error)}"
        finally:
            self._post(partial(self._resolve, want, found))

    # ---- what came of it ----

    def _resolve(
        self, want: CacheRead | ToStore, found: CacheEntry | CacheError | str | None
    ) -> list[tuple[SequenceDriver, int]]:
        return self._wants.resolve(want, found, self._clock())

    def _take_read(
        self, want: CacheRead, found: CacheEntry | CacheError | None, data: NDArray[np.uint8] | None
    ) -> None:
        """Hand cells to the backend for the sequences that waited for them."""
        for driver, key in self._resolve(want, found):
            try:
                if data is not None:
                    self._backend.import_state(key, data, want.n_read)
            except Exception as error:  # noqa: PERF203  # such as too little memory
                what = f"no room for its cells: {words_of(error)}"
                if key < 0:
                    self._batcher.drop_checkpoint(key)
                else:
                    refusal = CacheError(want.ref.key, what)
                    self._wants.files.refuse(driver, refusal, self._clock())


def _words_of(error: Exception) -> str:
    """Return an error's message without a path."""
    if isinstance(error, CacheError):
        return error.reason
    words = error.strerror if isinstance(error, OSError) else None
    return words or words_of(error)
