"""What each step computes: every decode row, then prompt chunks within the token budget."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cbatch.core.driver import SequenceDriver, Status
from cbatch.core.plan import Chunk, Slot, StepPlan, StepResult
from cbatch.errors import DecodeError, PlanError, RequestFailedError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cbatch.core.batcher import MultiRequestBatcher
    from cbatch.core.stats import EngineStats

N_STEPS_MAX = 64
"""Most steps in one run. A run also ends after about 20 ms, so this only sizes the buffers."""

_UNCHANGED = (1, -1)
"""Return codes of `llama_decode` that leave the cache as it was. Source: include/llama.h."""


class ContinuousBatchScheduler:
    """Plans steps over the sequences of a batcher, and takes their results.

    `plan` decides and `apply` does; between the two nothing may be submitted or cancelled.

    After a step that failed, its sequences are computed one at a time until each is past the place of the failure:
    so a passing failure does no harm, and one that fails again alone is guilty and ends with an error.
    """

    def __init__(
        self, batcher: MultiRequestBatcher, n_batch: int, stats: EngineStats, *, n_piece: int = 0
    ) -> None:
        self.batcher = batcher
        self.stats = stats
        self._n_batch = n_batch
        self._n_piece = n_piece
        self._suspects: dict[SequenceDriver, int] = {}  # and how many cells clear each of suspicion
        self._order: list[SequenceDriver] = []

    @property
    def is_idle(self) -> bool:
        """Whether nothing runs and nothing waits."""
        return not self.batcher.in_flight

    def plan(self, now: float) -> StepPlan | None:
        """Admit who can be admitted and return the next step, or None where there is nothing to do."""
        admitted = self.batcher.admit(now)
        self._order = [d for d in self._order if d.status is Status.RUNNING] + admitted
        binds = tuple(d.binding(d.slot) for d in admitted if d.slot is not None)
        suspect = self._next_suspect()
        shares = self._shares([suspect] if suspect else self._order)
        chunks = tuple(
            driver.chunk(Slot(i), shares[i])
            for i, driver in enumerate(self.batcher.running)
            if driver is not None and i in shares
        )
        clears = self.batcher.take_clears()
        if not chunks and not clears:
            return None
        return StepPlan(chunks, self._n_steps(chunks), clears, binds)

    def apply(self, plan: StepPlan, result: StepResult, now: float) -> list[SequenceDriver]:
        """Take a run's result; return the sequences that have something new, the ended ones included."""
        drivers = [self._at(chunk.slot) for chunk in plan.chunks]
        if result.n_steps:
            for driver, chunk, sampled in zip(drivers, plan.chunks, result.tokens, strict=True):
                self._accept(driver, len(chunk.tokens), sampled, now)
            self._count(plan, result)
        if result.code:
            self._contain(drivers, plan, result, now)
        return drivers

    def _n_steps(self, chunks: Sequence[Chunk]) -> int:
        """Return how often this plan can be done: until a row reaches its cap; once while a prompt is unfinished."""
        if not chunks or len(chunks) < len(self._order) or not all(c.has_output for c in chunks):
            return 1
        return min(N_STEPS_MAX, *(d.n_left for d in self._order))

    def recompute_all(self) -> None:
        """Forget every cell: for a run whose result is lost. The sequences go on from the tokens they have."""
        for driver in self.batcher.running:
            if driver is not None:
                self._recompute(driver)

    def _accept(self, driver: SequenceDriver, n_chunk: int, sampled: list[int], now: float) -> None:
        n_computed = driver.n_computed
        self.stats.n_prompt_tokens += max(0, min(n_chunk, driver.n_prompt - n_computed))
        driver.accept(n_chunk, sampled, now)
        if driver.slot is not None:
            self.batcher.ledger.add(driver.slot, driver.n_computed - n_computed)
        if driver.status is Status.FINISHED:
            self.batcher.retire(driver)

    def _contain(
        self,
        drivers: Sequence[SequenceDriver],
        plan: StepPlan,
        result: StepResult,
        now: float,
    ) -> None:
        """Handle a failed step: what fails again alone ends, and everything else is tried alone next."""
        alive = [d for d in drivers if d.status is Status.RUNNING]
        if self._suspects and not result.n_steps:
            for driver in alive:
                failure = RequestFailedError("computing this request failed")
                failure.__cause__ = DecodeError(result.code)
                driver.finish("error", now, failure)
                self.batcher.retire(driver)
        else:
            n_past = [c.start + len(c.tokens) + result.n_steps for c in plan.chunks]
            self._suspects = dict(zip(drivers, n_past, strict=True))
        if result.code not in _UNCHANGED:
            for driver in alive:
                self._recompute(driver)

    def _recompute(self, driver: SequenceDriver) -> None:
        if driver.status is Status.RUNNING and driver.slot is not None:
            driver.rewind()
            self.batcher.drop_cells(driver.slot)

    def _next_suspect(self) -> SequenceDriver | None:
        self._suspects = {
            d: n
            for d, n in self._suspects.items()
            if d.status is Status.RUNNING and d.n_computed < n
        }
        return next(iter(self._suspects), None)

    def _at(self, slot: Slot) -> SequenceDriver:
        driver = self.batcher.running[slot]
        if driver is None:
            raise PlanError(f"slot {slot} is in the plan but nothing runs there")
        return driver

    def _shares(self, order: Sequence[SequenceDriver]) -> dict[int, int]:
        """Return how many tokens each slot computes: 1 for every decode row, then the newcomers' shares."""
        shares: dict[int, int] = {}
        newcomers: list[SequenceDriver] = []
        for driver in order:
            if driver.slot is None:
                continue
            if driver.n_pending == 1:
                shares[driver.slot] = 1
            else:
                newcomers.append(driver)
        if newcomers:
            budget = self._n_batch - len(shares)
            if self._n_piece:
                wanted = whole_pieces([d.n_to_boundary(self._n_piece) for d in newcomers], budget)
            else:
                wanted = split_budget([d.n_pending for d in newcomers], budget)
            shares.update(
                (d.slot, n)
                for d, n in zip(newcomers, wanted, strict=True)
                if n and d.slot is not None
            )
        return shares

    def _count(self, plan: StepPlan, result: StepResult) -> None:
        stats, n_rows = self.stats, len(plan.chunks)
        stats.n_runs += 1
        stats.n_steps += result.n_steps
        stats.n_active_steps += n_rows * result.n_steps
        stats.n_active_max = max(stats.n_active_max, n_rows)
        stats.n_output_tokens += sum(map(len, result.tokens))


def split_budget(wanted: Sequence[int], budget: int) -> list[int]:
    """Share `budget` tokens among newcomers that want `wanted`, the oldest first in the list.

    The oldest gets up to half, so nobody waits for ever behind shorter prompts; the rest goes to the shortest first,
    whole as far as it lasts, so short prompts pass long ones and equals stay in order; what is left over goes back to
    the oldest. Few long chunks are computed faster than many short ones of as many tokens; see docs/performance.md.
    """
    shares = [0] * len(wanted)
    if not wanted:
        return shares
    shares[0] = min(wanted[0], (budget + 1) // 2)
    left = budget - shares[0]
    for i in sorted(range(1, len(wanted)), key=lambda i: wanted[i]):
        shares[i] = min(wanted[i], left)
        left -= shares[i]
    shares[0] += min(wanted[0] - shares[0], left)
    return shares


def whole_pieces(wanted: Sequence[int], budget: int) -> list[int]:
    """Give each newcomer all of its piece or nothing, the oldest first, while `budget` lasts."""
    shares = []
    for want in wanted:
        shares.append(want if want <= budget else 0)
        budget -= shares[-1]
    return shares
