"""How many cells sequences with slots will need, and which of them loses its slot when the pool is full."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from cbatch.core.driver import BY_AGE

if TYPE_CHECKING:
    from cbatch.core.books import KvLedger
    from cbatch.core.driver import SequenceDriver

N_PREEMPTED_MAX = 3
"""Most preemptions of one sequence while any cell is free; after that, all slots are admitted by the worst case."""

_FIRST_RATIO = 0.7
"""Share of the cap that an output is expected to use before any has ended. Source: SGLang's initial new-token ratio."""

_N_REMEMBERED = 32
"""The expectation follows about this many of the last requests."""


class KvDemandEstimator:
    """Estimates how many cells a sequence will need: in the worst case, or judged by earlier ones.

    The estimate is a share of the cap, `ratio`, which follows ended requests and rises when the pool was full. Without
    a cap it starts as a slot's share of the pool, because the rest of the window says nothing about an answer.
    """

    def __init__(self, ledger: KvLedger, *, is_optimistic: bool) -> None:
        self.ratio = _FIRST_RATIO
        self.is_optimistic = is_optimistic
        self._n_unknown = ledger.n_pool // ledger.n_slots

    def learn(self, driver: SequenceDriver) -> None:
        """Learn which share of its cap an ended sequence used, if it ended by itself."""
        if driver.is_capped and driver.n_cap > 0 and driver.finish_reason in ("stop", "length"):
            self.ratio += (driver.n_output / driver.n_cap - self.ratio) / _N_REMEMBERED

    def raise_ratio(self) -> None:
        """Expect more: the pool was full."""
        self.ratio = min(1.0, self.ratio * 1.1 + 0.05)

    def n_expected(self, driver: SequenceDriver, *, is_worst_case: bool) -> int:
        """Return how many more cells a sequence will need, as an estimate or in the worst case."""
        n_left = driver.n_left
        n_most = max(0, min(n_left, driver.n_window - driver.n_tokens))
        if is_worst_case:
            return n_most
        if not driver.is_capped:
            return min(n_most, self._n_unknown)
        return min(n_most, math.ceil(self.ratio * n_left))


class Demand:
    """The cells that sequences with slots will need in a shared pool; decides whether one more fits."""

    def __init__(self, estimator: KvDemandEstimator) -> None:
        self._estimator = estimator
        self._is_worst_case = not estimator.is_optimistic
        self._n_coming = self._n_coming_at_worst = 0

    def join(self, driver: SequenceDriver, n_computed: int) -> None:
        """Add a running sequence with `n_computed` cells."""
        self._is_worst_case |= driver.n_preempted >= N_PREEMPTED_MAX
        n_pending = driver.n_tokens - n_computed
        self._n_coming += n_pending + self._estimator.n_expected(driver, is_worst_case=False)
        self._n_coming_at_worst += n_pending + self._estimator.n_expected(
            driver, is_worst_case=True
        )

    def fits(self, driver: SequenceDriver, ledger: KvLedger, n_shared: int = 0) -> bool:
        """Return whether the pool has room for `driver`; `n_shared` of its cells are in other slots already."""
        if not ledger.is_overcommitted:
            return True
        is_worst_case = self._is_worst_case or driver.n_preempted >= N_PREEMPTED_MAX
        n_coming = self._n_coming_at_worst if is_worst_case else self._n_coming
        n_new = min(driver.n_tokens, driver.n_window) - n_shared
        n_new += self._estimator.n_expected(driver, is_worst_case=is_worst_case)
        return ledger.n_in_use() + n_coming + n_new <= ledger.n_pool


def choose_victim(ledger: KvLedger) -> SequenceDriver | None:
    """Return the sequence to preempt: the one with the fewest computed tokens, but never the oldest.

    Sequences that were preempted too often, or share all their cells, are chosen only if no cell is free. Shared cells
    become free when all sequences that share them have left.
    """
    by_age = sorted([d for d in ledger.holders if d is not None], key=BY_AGE)
    eligible = [d for d in by_age[1:] if d.slot is not None and ledger.n_own(d.slot)]
    if ledger.n_free_cells:
        eligible = [d for d in eligible if d.n_preempted < N_PREEMPTED_MAX]
    elif not eligible:
        eligible = [d for d in by_age[1:] if d.slot is not None]
    return min(eligible, key=_cost, default=None)


def _cost(victim: SequenceDriver) -> tuple[bool, int, int]:
    return victim.n_preempted >= N_PREEMPTED_MAX, victim.n_computed, -victim.number
