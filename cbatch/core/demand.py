"""How many cells of a shared pool those that run will want before they end."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from cbatch.core.driver import SequenceDriver
    from cbatch.core.kv import KvLedger

N_PREEMPTED_MAX = 3
"""How often a sequence may lose its cells; then it gets room for its worst case, and so does who runs beside it."""

_FIRST_RATIO = 0.7
"""Expected share of the cap before anything has ended. Source: SGLang's initial new-token ratio."""

_N_REMEMBERED = 32
"""About so many of the last requests decide what is expected of the next."""


class KvDemandEstimator:
    """Decides whether a sequence fits, in the worst case or as far as can be expected.

    The expectation is a share of the cap, `ratio`: it follows what ended, and rises where the pool was full. Without a
    cap it is at first a slot's share of the pool: the rest of the window says nothing about an answer.
    """

    def __init__(self, ledger: KvLedger, *, is_optimistic: bool) -> None:
        self.ratio = _FIRST_RATIO
        self._ledger = ledger
        self._is_optimistic = is_optimistic
        self.begin(())

    def begin(self, running: Iterable[SequenceDriver | None]) -> None:
        """Take in who runs, for those that are let in one after the other now."""
        self._is_certain = not self._is_optimistic
        self._n_coming = self._n_coming_at_worst = 0
        for driver in running if self._ledger.is_shared else ():
            if driver is not None:
                self.join(driver)

    def join(self, driver: SequenceDriver) -> None:
        """Take in one more that runs."""
        if not self._ledger.is_shared:
            return
        self._is_certain |= driver.n_preempted >= N_PREEMPTED_MAX
        n_pending = driver.n_pending
        self._n_coming += n_pending + self._n_expected(driver, is_certain=False)
        self._n_coming_at_worst += n_pending + self._n_expected(driver, is_certain=True)

    def fits(self, driver: SequenceDriver, n_shared: int = 0) -> bool:
        """Whether the pool holds `driver` beside those that run, of whom one has `n_shared` of its cells."""
        if not self._ledger.is_shared:
            return True
        is_certain = self._is_certain or driver.n_preempted >= N_PREEMPTED_MAX
        n_coming = self._n_coming_at_worst if is_certain else self._n_coming
        n_new = min(driver.n_tokens, driver.n_window) - n_shared
        n_new += self._n_expected(driver, is_certain=is_certain)
        return self._ledger.n_in_use() + n_coming + n_new <= self._ledger.n_pool

    def learn(self, driver: SequenceDriver) -> None:
        """Take in how much of its cap a sequence needed that ended by itself."""
        if driver.is_capped and driver.n_cap > 0 and driver.finish_reason in ("stop", "length"):
            self.ratio += (driver.n_output / driver.n_cap - self.ratio) / _N_REMEMBERED

    def raise_ratio(self) -> None:
        """Expect more: the pool was full."""
        self.ratio = min(1.0, self.ratio * 1.1 + 0.05)

    def _n_expected(self, driver: SequenceDriver, *, is_certain: bool) -> int:
        n_left = driver.n_left
        n_most = max(0, min(n_left, driver.n_window - driver.n_tokens))
        if is_certain:
            return n_most
        if not driver.is_capped:
            return min(n_most, self._ledger.n_pool // self._ledger.n_slots)
        return min(n_most, math.ceil(self.ratio * n_left))
