"""Between the computing thread and the keeper: which cells are read from disk, and which are written there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cbatch.core.holds import Fetch
from cbatch.core.plan import StepPlan

if TYPE_CHECKING:
    from cbatch.backend import Backend
    from cbatch.core.batcher import MultiRequestBatcher
    from cbatch.core.driver import SequenceDriver
    from cbatch.core.holds import Found
    from cbatch.runtime.keeper import Arrival, Keeper


class Disk:
    """Hands the keeper what there is to read and to write, and takes in what came of it. Owner thread."""

    def __init__(
        self, backend: Backend, batcher: MultiRequestBatcher, keeper: Keeper | None
    ) -> None:
        self._backend, self._batcher, self._keeper = backend, batcher, keeper

    def fetch(self) -> None:
        """Have cells read that somebody waits for."""
        if self._keeper is not None:
            for fetch in self._batcher.fetches.take_orders():
                self._keeper.read(fetch, self._arrive)

    def _arrive(self, arrival: Arrival) -> None:
        """Give cells from disk to the backend, and let those go on that waited for them."""
        drivers, keys = self._batcher.fetches.arrive(arrival.fetch, arrival.found)
        for key, n_cells in keys:
            if arrival.data is not None:
                self._backend.keep(key, arrival.data, n_cells)
        for driver in drivers:
            self._batcher.release(driver)

    def store(self) -> None:
        """Have cells written that were copied out; whose cells could not be, has ended."""
        if not self._batcher.storing:
            return
        for stored in self._batcher.cells.take_stored():
            data = None if stored.key is None else self._backend.take(stored.key)
            if data is None or self._keeper is None:
                self._batcher.end_stored(stored.driver)
            else:
                self._keeper.write(stored, data, self._end_stored)

    def _end_stored(self, driver: SequenceDriver, found: Found | None, problem: str | None) -> None:
        request = driver.request
        if found is not None:
            fetch = Fetch(request.options.cache_key or "", request.adapters)
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
