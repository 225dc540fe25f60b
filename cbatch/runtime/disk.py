"""Between the computing thread and the keeper: which cells are read from disk, and which are written there."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from cbatch.core.plan import StepPlan
from cbatch.core.waiting import CacheRef
from cbatch.errors import CacheError, words_of

if TYPE_CHECKING:
    from cbatch.backend import Backend
    from cbatch.core.batcher import MultiRequestBatcher
    from cbatch.core.driver import SequenceDriver
    from cbatch.core.waiting import CacheEntry
    from cbatch.runtime.cache_io import Arrival, CacheIo


class Disk:
    """Hands the keeper what there is to read and to write, and takes in what came of it. Owner thread."""

    def __init__(
        self, backend: Backend, batcher: MultiRequestBatcher, keeper: CacheIo | None
    ) -> None:
        self._backend, self._batcher, self._keeper = backend, batcher, keeper

    @property
    def is_current_thread(self) -> bool:
        """Whether the caller's thread is the one that reads and writes."""
        return self._keeper is not None and self._keeper.is_current_thread

    def fetch(self) -> None:
        """Have cells read that somebody waits for."""
        if self._keeper is not None:
            while (fetch := self._batcher.fetches.take_order()) is not None:
                n_wanted = partial(self._batcher.fetches.n_wanted, fetch)
                self._keeper.read(fetch, self._arrive, n_wanted)

    def _arrive(self, arrival: Arrival) -> None:
        """Give cells from disk to the backend, and let those go on that waited for them."""
        drivers, adopted = self._batcher.fetches.arrive(
            arrival.fetch, arrival.found, arrival.n_cells
        )
        for driver, key in adopted:
            self._keep(arrival, driver, key)
        for driver in drivers:
            self._batcher.release(driver)

    def _keep(self, arrival: Arrival, driver: SequenceDriver, key: int) -> None:
        try:
            if arrival.data is not None:
                self._backend.import_state(key, arrival.data, arrival.n_cells)
        except Exception as error:  # for want of memory
            self._batcher.cells.forget(driver)
            driver.lose_adopted()
            what = f"no room for its cells: {words_of(error)}"
            driver.proceed_uncached(CacheError(arrival.fetch.key, what))

    def store(self) -> None:
        """Have cells written that were copied out; whose cells could not be, has ended."""
        if not self._batcher.storing:
            return
        while (stored := self._batcher.cells.take_stored()) is not None:
            data = None if stored.key is None else self._backend.export_state(stored.key)
            if data is None or self._keeper is None:
                self._batcher.end_stored(stored.driver)
            else:
                self._keeper.write(stored, data, self._end_stored)

    def _end_stored(
        self, driver: SequenceDriver, found: CacheEntry | None, problem: str | None
    ) -> None:
        request = driver.request
        if found is not None:
            fetch = CacheRef(request.options.cache_key or "", request.adapters)
            self._batcher.fetches.learn(fetch, found)
        self._batcher.end_stored(driver, problem)

    def close(self) -> None:
        """Have cells written of requests that closing has ended; return when all is on disk and told."""
        plan = StepPlan((), **self._batcher.cells.take_saves())
        try:
            lost = self._backend.run(plan).lost if plan.saves else ()
        except Exception:  # it has failed before
            lost = tuple(key for _, key in plan.saves)
        self._batcher.cells.settle(lost)
        self.store()
        if self._keeper is not None:
            self._keeper.close()
