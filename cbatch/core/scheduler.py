"""What each step computes: every decode row, then prompt chunks within the token budget."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cbatch.core.bisection import FaultBisection
from cbatch.core.budget import (
    StepCosts,
    even_out,
    limit_long_context_prefills,
    split_budget,
    whole_pieces,
)
from cbatch.core.driver import SequenceDriver, Status
from cbatch.core.plan import BROKEN_ROW, FREE, N_TARGETS_MAX, Chunk, Slot, StepPlan, StepResult
from cbatch.core.preemption import slot_of
from cbatch.engine_options import ScheduleOptions
from cbatch.errors import CacheError, DecodeError, PlanError, RequestFailedError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cbatch.core.batcher import MultiRequestBatcher
    from cbatch.core.plan import Binding, KvCapabilities
    from cbatch.core.stats import EngineStats
    from cbatch.options import AdapterSet

N_STEPS_MAX = 64
"""Most steps in one run. A run also ends after about 20 ms, so this only sizes the buffers."""

DEFAULT_QUANTUM = 64
"""Tokens of a turn in `round_robin`: at some 10 ms a token, a turn a second where cells are saved and put back."""

MIXED_OVER_DECODE = 2.0
"""A step that decodes for somebody who reads along may take so many times what it takes without prompts."""

N_PROMPT_MIN = 16
"""Prompt tokens that a step has room for whatever they cost: fewer are computed no faster on a CPU."""

N_FAILURES_MAX = 16
"""So many failed computations in a row, without one that worked, end the engine: more than to find one among 256."""

_UNCHANGED = (1, -1)
"""Return codes of `llama_decode` that leave the cache as it was. Source: include/llama.h."""


class ContinuousBatchScheduler:
    """Plans steps over the sequences of a batcher, and takes their results.

    `plan` decides and `apply` does; between the two nothing may be submitted or cancelled.

    After a step that failed, its sequences are computed in halves, apart from each other, until each is past the
    place of the failure: so a passing failure does no harm, and one that fails alone is the culprit and ends with an
    error.
    """

    def __init__(
        self,
        batcher: MultiRequestBatcher,
        n_batch: int,
        stats: EngineStats,
        options: ScheduleOptions | None = None,
        *,
        memory: KvCapabilities,
        chunk_alignment: int = 0,
        has_adapters: bool = False,
    ) -> None:
        self.batcher = batcher
        self.stats = stats
        self.options = options or ScheduleOptions()
        self.costs = StepCosts(batcher.ledger.n_slots)
        self.bisection = FaultBisection()
        self._n_batch, self._chunk_alignment, self._can_trim = (
            n_batch,
            chunk_alignment,
            memory.can_trim,
        )
        self._n_long_context_prefills = 0 if chunk_alignment else memory.n_long_context_prefills
        self._can_even = not (chunk_alignment or batcher.ledger.is_shared)
        is_fair = self.options.policy == "round_robin"
        self._quantum = (self.options.quantum or DEFAULT_QUANTUM) if is_fair else 0
        self._has_adapters = has_adapters
        self._turns: dict[AdapterSet, int] = {}
        self._n_turns = 0
        self._order: list[SequenceDriver] = []
        self._n_changes = -1
        self._n_failures = 0
        self._has_rebuilt = self._must_rebuild = self._has_made_room = False

    @property
    def is_idle(self) -> bool:
        """Whether nothing runs and nothing waits."""
        return not self.batcher.in_flight

    def plan(self, now: float) -> StepPlan | None:
        """Admit who can be admitted and return the next step, or None where there is nothing to do."""
        admitted = self.admit(now)
        return self.build(admitted)

    def admit(self, now: float) -> list[SequenceDriver]:
        """Let go whose time is over, take back what others need, and admit who fits then.

        Returns:
            Who has to be bound: those new in their slots, and those whose window moved.
        """
        self.batcher.expire(now)
        if self._must_rebuild:
            return []
        self._end_turns()  # before windows move: what moves in a plan cannot be saved in it
        full = self._shift_full_windows()
        is_short, self._has_made_room = self._has_preempted(), False
        shifted = [d for d in full if d.slot is not None]
        if is_short and self._running():  # who just lost its cells would take them back
            return shifted
        admitted = self.batcher.admit(now, self._n_copied_max())
        if not (admitted or shifted or self.batcher.n_waiting or self.batcher.n_awaited):
            moved = self.batcher.compact_slots()
            return [] if moved is None else [moved]
        return [*shifted, *admitted]

    def build(self, admitted: Sequence[SequenceDriver]) -> StepPlan | None:
        """Return the step for those that run now, of whom `admitted` have to be bound."""
        if self._must_rebuild:
            return self._rebuild()
        order, shares = self._take_turn(self.bisection.suspects() or self._running())
        chunks = tuple(
            driver.chunk(Slot(i), driver.n_computed, shares[i])
            for i, driver in enumerate(self.batcher.running)
            if driver is not None and i in shares
        )
        orders = self.batcher.cells.take()
        if not chunks:
            self._check_progress(admitted)
            if not (admitted or orders):
                return None
        binds = tuple(d.binding(d.slot) for d in admitted if d.slot is not None)
        self.batcher.last_adapters = adapters = order[0].request.adapters if order else ()
        n_steps = 1 if self.bisection.suspects() else self._n_steps(chunks, order)
        return StepPlan(chunks, n_steps, binds=binds, adapters=adapters, **orders)

    def apply(self, plan: StepPlan, result: StepResult, now: float) -> list[SequenceDriver]:
        """Take a run's result; return the sequences that have something new, the ended ones included.

        Raises:
            DecodeError: steps go on failing, whoever is in them: the engine cannot go on.
        """
        drivers = [self._at(chunk.slot) for chunk in plan.chunks]
        self._settle_orders(plan, result, now)
        if result.n_steps:
            self._n_failures, self._has_rebuilt = 0, False
            self._count(drivers, plan, result, now)
            broken = self._take_scores(result, now) if result.scores else ()
            later_s = result.later_s
            for i, (driver, chunk) in enumerate(zip(drivers, plan.chunks, strict=True)):
                if driver not in broken:
                    self._accept(driver, chunk, result, i, now, later_s)
        if result.code:
            self._contain(drivers, plan, result, now)
        self.bisection.clear()  # who is cleared is so now: it may lose its cells in the next plan
        return drivers

    def start_over(self) -> StepPlan:
        """Return a plan that empties everything and binds anew: for after a run of which nobody knows what it did.

        The sequences go on from the tokens they have.
        """
        self.batcher.lose_all_cells()
        self.batcher.cells.forget_all()
        orders = self.batcher.cells.take()
        orders["clears"] = tuple(Slot(i) for i in range(self.batcher.ledger.n_slots))
        return StepPlan((), binds=self._bindings(), **orders)

    # ---- who is in a step ----

    def _running(self) -> list[SequenceDriver]:
        """Return those that run, the oldest first."""
        if self._n_changes != self.batcher.n_changes:
            running = (d for d in self.batcher.running if d and d.status is Status.RUNNING)
            self._order = sorted(running, key=lambda d: d.number)
            self._n_changes = self.batcher.n_changes
        return self._order

    def _take_turn(
        self, order: list[SequenceDriver]
    ) -> tuple[list[SequenceDriver], dict[int, int]]:
        """Return those of one set of adapters and what each slot computes: a step has one set, each has its turn."""
        sets = dict.fromkeys(d.request.adapters for d in order) if self._has_adapters else {}
        if len(sets) < 2:
            return order, self._shares(order)
        self._turns = {adapters: self._turns.get(adapters, self._n_turns) for adapters in sets}
        for adapters in sorted(self._turns, key=lambda adapters: self._turns[adapters]):
            group = [d for d in order if d.request.adapters == adapters]
            if shares := self._shares(group):  # in a full pool there may be no room for its turn
                break
        self._n_turns += 1
        self._turns[group[0].request.adapters] = self._n_turns
        return group, shares

    def _shift_full_windows(self) -> list[SequenceDriver]:
        """Have tokens taken out of windows that are full, where that was asked for; return whose."""
        full = [d for d in self._running() if d.is_over_window]
        for driver in full:
            self.batcher.cells.shift(driver, slot_of(driver))
        return full

    def _n_copied_max(self) -> int | None:
        """Return how many cells may be copied in a step: no more than take as long as decoding, where others wait."""
        if not (self.batcher.n_waiting or len(self.batcher.followers)):
            return None  # nobody can enter
        n_rows = sum(d.n_pending == 1 for d in self._running())
        return self.costs.n_copied_within(self.costs.seen_s(n_rows)) if n_rows else None

    def _has_preempted(self) -> bool:
        """Take back cells of a shared pool until each decoding row can have one; return whether any was taken."""
        ledger, is_short = self.batcher.ledger, self._has_made_room
        while ledger.is_shared and (running := self._running()):
            n_rows = sum(d.n_pending == 1 for d in running)
            self.batcher.cells.make_room(max(1, n_rows))
            if ledger.n_free_cells >= max(1, n_rows):
                break
            is_short = True
            if not self.batcher.make_room():
                break
        return is_short

    def _end_turns(self) -> None:
        """Take the slots of those that had their quantum, as many as others wait for."""
        batcher = self.batcher
        if not self._quantum:
            return
        n_needed = max(0, batcher.n_waiting - batcher.ledger.n_free_slots)
        over = [d for d in self._running() if d.n_turn >= self._quantum]
        over.sort(key=lambda d: -d.n_turn)
        for driver in over[:n_needed]:
            batcher.end_turn(driver)

    def _shares(self, order: Sequence[SequenceDriver]) -> dict[int, int]:
        """Return how many tokens each slot computes: 1 for every decode row, then the newcomers' shares."""
        shares: dict[int, int] = {}
        newcomers: list[SequenceDriver] = []
        if self.batcher.ledger.is_shared:
            self._make_room(order)
        n_free = self.batcher.ledger.n_free_cells
        for driver in order:
            if driver.slot is None:
                continue
            if driver.n_pending > 1:
                newcomers.append(driver)
            elif len(shares) < n_free:
                shares[driver.slot] = 1
        if newcomers:
            budget = min(self._budget(order, len(shares)), n_free - len(shares))
            wanted = self._wanted(newcomers)
            split = whole_pieces if self._chunk_alignment else split_budget
            for driver, n in zip(newcomers, split(wanted, budget), strict=True):
                if n and driver.slot is not None:
                    shares[driver.slot] = n
            if len(newcomers) > 1 and self._can_even:
                cut = [
                    d.slot
                    for d in newcomers
                    if d.slot is not None and 1 < shares.get(d.slot, 0) < d.n_pending
                ]
                even_out(shares, cut)
        return shares

    def _make_room(self, order: Sequence[SequenceDriver]) -> None:
        """Have cells that nobody needs give way to what those in a step can use, and to the steps after it."""
        n_wanted = min(self._n_batch, sum(d.n_pending for d in order))
        n_steps = min((d.n_room for d in order), default=0)
        self.batcher.cells.make_room(n_wanted + min(N_STEPS_MAX, n_steps) * len(order))

    def _wanted(self, newcomers: Sequence[SequenceDriver]) -> list[int]:
        n_chunk = self.options.prefill_chunk or self._n_batch
        wanted = [
            d.n_to_boundary(self._chunk_alignment, d.n_computed)
            if self._chunk_alignment
            else min(d.n_pending, n_chunk)
            for d in newcomers
        ]
        if any(d.is_scoring for d in newcomers):
            self._limit_targets(newcomers, wanted)
        if self._n_long_context_prefills:
            limit_long_context_prefills(
                wanted, [d.n_computed for d in newcomers], self._n_long_context_prefills
            )
        return wanted

    def _limit_targets(self, newcomers: Sequence[SequenceDriver], wanted: list[int]) -> None:
        """Have no more to score than a step can, the oldest first; pieces are whole or not at all."""
        n_left = N_TARGETS_MAX
        for i, driver in enumerate(newcomers):
            if driver.scores is not None:
                n = driver.scores.n_within(driver.n_computed, wanted[i], n_left)
                wanted[i] = 0 if self._chunk_alignment and n < wanted[i] else n
                n_left -= driver.scores.n_targets(driver.n_computed, wanted[i])

    def _budget(self, order: Sequence[SequenceDriver], n_rows: int) -> int:
        """Return how many prompt tokens may join `n_rows` decoding rows."""
        room, asked = self._n_batch - n_rows, self.options.prefill_budget
        if not any(d.is_decoding for d in order):
            return room
        if asked is None:
            asked = self._measured_budget(order, n_rows)
        if asked is None:
            return room
        return min(room, max(asked, self._chunk_alignment)) if asked else 0

    def _measured_budget(self, order: Sequence[SequenceDriver], n_rows: int) -> int | None:
        """Return what keeps the step within the time it may take, by what steps took so far.

        The time that a step may take by default is counted from the width it has when all prompts are through,
        so that one early decoder does not hold up all newcomers.
        """
        if self.options.itl_ms is not None:
            limit_s = self.options.itl_ms * 1e-3
        elif any(d.is_watched and d.is_decoding for d in order):
            decode_s = self.costs.decode_s(n_rows) or 0.0
            limit_s = MIXED_OVER_DECODE * max(decode_s, self.costs.seen_s(len(order)))
        else:
            return None
        if not self.costs.has_decoded:
            return 0  # this step tells what decoding takes
        n_tokens = self.costs.n_prompt_within(n_rows, limit_s)
        return max(N_PROMPT_MIN, 2 * self.costs.n_free if n_tokens is None else n_tokens)

    def _n_steps(self, chunks: Sequence[Chunk], running: Sequence[SequenceDriver]) -> int:
        """Return how often this plan can be done: while no row ends, no turn ends, and nobody is left out."""
        if not chunks or len(chunks) < len(running):
            return 1
        if not all(c.has_output and not c.targets for c in chunks):
            return 1
        if len(self.batcher.followers) or any(d.request.grammar is not None for d in running):
            return 1
        n_steps = min(N_STEPS_MAX, *(d.n_room for d in running))
        if self._quantum and self.batcher.n_waiting:
            n_steps = min(n_steps, *(max(1, self._quantum - d.n_turn) for d in running))
        if self.batcher.ledger.is_shared:
            n_spare = self.batcher.ledger.n_free_cells - sum(len(c.tokens) for c in chunks)
            n_steps = min(n_steps, 1 + n_spare // len(chunks))
        return n_steps

    def _check_progress(self, admitted: Sequence[SequenceDriver]) -> None:
        """Refuse to sleep while somebody could be served.

        Raises:
            PlanError: nothing runs although somebody waits, or nobody that runs can be computed.
        """
        batcher = self.batcher
        is_idle = admitted or batcher.has_ended or batcher.n_awaited or batcher.storing
        if self._running() or (self.batcher.n_waiting and not is_idle):
            raise PlanError(
                f"no progress: {len(self._running())} run, {self.batcher.n_waiting} wait, "
                f"{self.batcher.ledger.n_free_cells} cells and {self.batcher.ledger.n_free_slots} slots are free"
            )

    # ---- what a step brought ----

    def _at(self, slot: Slot) -> SequenceDriver:
        driver = self.batcher.running[slot]
        if driver is None:
            raise PlanError(f"slot {slot} is in the plan but nothing runs there")
        return driver

    def _settle_orders(self, plan: StepPlan, result: StepResult, now: float) -> None:
        """Take in what became of saved and copied cells; who wanted nothing but what was lost fails."""
        for driver in self.batcher.cells.settle(result.lost):
            options = driver.request.options
            error = CacheError(options.cache_key or "", "llama.cpp cannot take these cells")
            for other in driver.load_followers:
                if other.status is Status.WAITING:
                    other.proceed_uncached(error)
            driver.load_followers = ()
            if options.cache_required:
                driver.finish("error", now, error)
                self.batcher.retire(driver)
            else:
                driver.warnings.append(str(error))
        if result.move_s:
            self.costs.learn_copy(sum(n for _, _, n in plan.copies), result.move_s)

    def _take_scores(self, result: StepResult, now: float) -> list[SequenceDriver]:
        """Give out what was scored; return those that ended by it, for a row was broken."""
        scored = {self._at(slot): scores for slot, scores in result.scores.items()}
        broken = [d for d, scores in scored.items() if d.scores and not d.scores.take(scores)]
        for driver in broken:
            driver.fail_row(now, BROKEN_ROW)
            self.batcher.retire(driver)
        return broken

    def _accept(
        self,
        driver: SequenceDriver,
        chunk: Chunk,
        result: StepResult,
        i: int,
        now: float,
        later_s: float,
    ) -> None:
        n_chunk, n_computed = len(chunk.tokens), driver.n_computed
        if n_computed < driver.n_prompt or n_computed < driver.n_reached:
            self.stats.n_prompt_tokens += max(0, min(n_chunk, driver.n_prompt - n_computed))
            self.stats.n_recomputed_tokens += max(0, min(n_chunk, driver.n_reached - n_computed))
        logprobs = result.logprobs[i] if result.logprobs else ()
        guidance = result.grammar_steps.get(chunk.slot, FREE)
        driver.accept(n_chunk, result.tokens[i], now, guidance, logprobs, later_s=later_s)
        if driver.slot is not None:
            self.batcher.ledger.add(driver.slot, driver.n_computed - n_computed)
        if driver.finish_reason is not None:
            self.batcher.retire(driver)

    def _count(
        self, drivers: Sequence[SequenceDriver], plan: StepPlan, result: StepResult, now: float
    ) -> None:
        """Enter a run into the statistics and the costs, before its drivers are touched."""
        n_rows, n_later = len(plan.chunks), result.n_steps - 1
        n_decode = sum(
            c.start >= d.n_prompt and len(c.tokens) == 1
            for c, d in zip(plan.chunks, drivers, strict=True)
        )
        n_prompt = sum(len(c.tokens) for c in plan.chunks) - n_decode
        first_s = result.first_s
        self.stats.count_step(n_rows, n_decode, n_prompt, first_s)
        if n_prompt:
            self.costs.learn_mixed(n_decode, n_prompt, first_s)
        else:
            self.costs.learn_decode(n_rows, first_s)
        if n_later:
            self.stats.count_step(n_rows, n_rows, 0, result.later_s, n_later)
            self.costs.learn_decode(n_rows, result.later_s / n_later)
        self.stats.n_runs += 1
        n_sampled = [len(row) - (row[-1] < 0) if row else 0 for row in result.tokens]
        for i, chunk in enumerate(plan.chunks if result.grammar_steps else ()):
            n_sampled[i] += len(result.grammar_steps.get(chunk.slot, FREE).forced)
        self.stats.count_tokens(drivers, n_sampled, now, result.later_s)

    # ---- failures ----

    def _contain(
        self, drivers: Sequence[SequenceDriver], plan: StepPlan, result: StepResult, now: float
    ) -> None:
        """Handle a failed step by its code: what becomes of the cells, and who is to blame."""
        n_past = {
            d: c.start + len(c.tokens) + result.n_steps
            for d, c in zip(drivers, plan.chunks, strict=True)
            if d.status is Status.RUNNING
        }
        if result.code not in _UNCHANGED:
            self._settle_cells(drivers, result)
        if result.code == 1 and self.batcher.ledger.is_shared:
            if self.batcher.cells.make_room(self.batcher.ledger.n_pool):
                return
            if self.batcher.make_room():
                self._has_made_room = True
                return
        is_again = not result.n_steps and bool(self.bisection.suspects())
        if result.code < -1:
            self._note_failure(result.code)
            if self._must_rebuild and len(n_past) == 1:
                return
        if not is_again:
            self.bisection.suspect(n_past)
        elif culprit := self.bisection.split(n_past):
            self._fail(culprit, plan, result.code, now)

    def _settle_cells(self, drivers: Sequence[SequenceDriver], result: StepResult) -> None:
        """Keep the cells that are still known after an abort; drop those of a computation that failed."""
        n_kept = result.n_kept if result.code == 2 and self._can_trim else ()
        for i, driver in enumerate(drivers):
            if driver.status is not Status.RUNNING:  # ended by an earlier step of this run
                self.batcher.cells.give_up_store(slot_of(driver))
                self.batcher.cells.clear(slot_of(driver))
            elif n_kept:
                self._keep_cells(driver, n_kept[i])
            else:
                self.batcher.drop_cells(driver)

    def _keep_cells(self, driver: SequenceDriver, n_kept: int) -> None:
        """Keep what has a cell, but for the last token: it must be computed again for its logits."""
        n_kept = min(n_kept, driver.n_takeable)
        if self._chunk_alignment and n_kept < driver.n_prompt:
            n_kept -= n_kept % driver.own_alignment(self._chunk_alignment)
        self.batcher.keep_cells(driver, n_kept)

    def _note_failure(self, code: int) -> None:
        """Have the context made anew when a computation failed twice in a row; give up when that does not help."""
        self._n_failures += 1
        if self._n_failures > N_FAILURES_MAX:
            raise DecodeError(code)
        if self._n_failures > 1 and not self._has_rebuilt:
            self._must_rebuild = self._has_rebuilt = True

    def _rebuild(self) -> StepPlan:
        """Return the plan that makes the context anew; everybody goes on from the tokens it has."""
        self._must_rebuild = False
        self.batcher.lose_all_cells()
        orders = self.batcher.cells.take()
        return StepPlan((), binds=self._bindings(), is_rebuild=True, **orders)

    def _bindings(self) -> tuple[Binding, ...]:
        having = (d for d in self.batcher.running if d is not None)
        return tuple(d.binding(d.slot) for d in having if d.slot is not None)

    def _fail(self, driver: SequenceDriver, plan: StepPlan, code: int, now: float) -> None:
        failure = RequestFailedError("computing this request failed")
        failure.__cause__ = DecodeError(code)
        if code == -1:
            failure.__cause__.__cause__ = PlanError(repr(plan))
        driver.finish("error", now, failure)
        self.batcher.retire(driver)
