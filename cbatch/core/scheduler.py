"""Decides what each step computes: every decoding row, then chunks of prompts within the token budget."""

from __future__ import annotations

from dataclasses import dataclass, replace
from operator import itemgetter
from typing import TYPE_CHECKING, TypeAlias

from cbatch.core.budget import SHORT_RUN_S, PromptBudget, split_budget, whole_chunks
from cbatch.core.driver import Status
from cbatch.core.plan import FREE, N_STEPS_MAX, UNCHANGED, Slot, StepPlan, StepResult
from cbatch.core.span import ANYWHERE, N_TARGETS_MAX, Pending, limit_targets
from cbatch.engine_options import MAX_DRAFTS
from cbatch.errors import DecodeError, PlanError, RequestFailedError
from cbatch.support.picture_tokens import n_rows_at

if TYPE_CHECKING:
    from collections.abc import Container, Mapping, Sequence

    from cbatch.core.batcher import MultiRequestBatcher
    from cbatch.core.driver import SequenceDriver
    from cbatch.core.plan import Binding, KvCapabilities
    from cbatch.core.slots import SlotPlan
    from cbatch.core.span import PromptCuts, Span
    from cbatch.engine_options import ScheduleOptions
    from cbatch.options import AdapterSet
    from cbatch.stats import EngineStats

RUN_S = 0.5
"""Time limit of a run in seconds: a step that ends later is its last. A command or deadline ends a run earlier."""

DEFAULT_QUANTUM = 64
"""Tokens of a turn in `round_robin`: about a second at 10 ms a token, so cells are not saved and loaded too often."""

_Share: TypeAlias = "tuple[Slot, SequenceDriver, int, int]"
"""What a sequence computes in a step: its slot, itself, where it starts, and how many inputs it has."""

_DRIVER_OF = itemgetter(1)

N_FAILURES_MAX = 16
"""Most failed computations in a row; one more stops the engine. Enough to find one culprit among 256 sequences."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What happens next: `step` for the backend, and what `apply` commits after the run."""

    step: StepPlan
    rows: tuple[SequenceDriver, ...]
    """The sequence of each span."""
    slot_plan: SlotPlan
    """Changes of slots."""
    adapter_turns: Mapping[AdapterSet, int] | None
    """When each set of adapters in use had its turn; None if there is only one."""
    now: float


class ContinuousBatchScheduler:
    """Plans steps over the sequences of a batcher, and applies their results.

    `plan` decides and changes nothing: two calls return equal plans. `apply` commits what the backend did. Between the
    two no command may change the batcher: nothing is submitted, cancelled, paused or dropped.

    After a failed step, its sequences are computed in separate halves until each is past the place of the failure. So
    a temporary failure does no harm, and a sequence that fails alone ends with an error.
    """

    def __init__(
        self,
        batcher: MultiRequestBatcher,
        n_batch: int,
        stats: EngineStats,
        options: ScheduleOptions,
        *,
        memory: KvCapabilities,
        cuts: PromptCuts = ANYWHERE,
        has_adapters: bool = False,
    ) -> None:
        self.batcher = batcher
        self._stats = stats
        self.options = options
        self.budget = PromptBudget(options)
        self.costs = self.budget.costs
        self.bisection = FaultBisection()
        self._n_batch = n_batch
        self._cuts = replace(cuts, has_whole_pictures=memory.has_whole_pictures)
        self._can_trim, self._has_whole_pictures = memory.can_trim, memory.has_whole_pictures
        cells = batcher.slot_plan().cells
        self._is_overcommitted = cells.ledger.is_overcommitted
        self._has_checkpoints = cells.prefixes.checkpoints.is_on
        is_fair = options.policy == "round_robin"
        self._quantum = (options.quantum or DEFAULT_QUANTUM) if is_fair else 0
        can_draft = options.speculate != "off" and memory.can_draft and not cuts
        asked = options.speculate
        n_most = asked if isinstance(asked, int) else MAX_DRAFTS
        self._n_drafts = n_most if can_draft else 0
        self._sources = {
            "has_drafts": can_draft and asked != "draft",
            "shares_drafts": asked not in ("ngram", "draft"),
            "has_model_drafts": can_draft and asked not in ("ngram", "job"),
        }
        self._has_adapters = has_adapters
        self._adapter_turns: Mapping[AdapterSet, int] = {}
        self._n_adapter_turns = 0
        self._n_prompts = 0
        """Prompt tokens computed so far."""
        self._n_failures = 0
        self._has_rebuilt = self._must_rebuild = False
        self._was_alone = False
        """Whether the last run computed a picture alone."""
        self._is_pool_full = False
        """Whether the last run found no free cell and the next plan can free some."""

    def begin_step(self, now: float) -> None:
        """Handle deadlines, finished waits and full windows before a plan; see `MultiRequestBatcher`."""
        ending = self._past_quantum(self.batcher.slot_plan()) if self._quantum else ()
        self.batcher.begin_step(now, ending)
        self.batcher.shift_full_windows()

    def plan(self, now: float) -> Plan | None:
        """Return what happens next, or None if there is nothing to do. Changes nothing."""
        slot_plan = self.batcher.slot_plan()
        if self._must_rebuild and self.batcher.in_flight:
            step = slot_plan.cells.step(binds=self._bindings(slot_plan), is_rebuild=True)
            return Plan(step, (), slot_plan, None, now)
        self._change_slots(slot_plan)
        suspects = self.bisection.suspects(slot_plan.leaving())
        running = suspects or slot_plan.running_then()
        group, shares, adapter_turns = self._take_adapter_turn(running, slot_plan)
        spans = tuple([driver.span(slot, start, n) for slot, driver, start, n in shares])
        if not (spans or slot_plan.has_changes or slot_plan.cells.has_ops):
            self._check_progress(slot_plan)
            return None
        n_steps, slice_s = (1, 0.0) if suspects else self._length(spans, group, slot_plan, now)
        step = slot_plan.cells.step(
            spans,
            n_steps,
            slice_s,
            n_drafts=self._n_drafted(n_steps, spans, slot_plan) if n_steps > 1 else 0,
            binds=self._bindings(slot_plan),
            adapters=group[0].request.adapters if group else (),
        )
        drivers = tuple(map(_DRIVER_OF, shares))
        return Plan(step, drivers, slot_plan, adapter_turns, now)

    def apply(self, plan: Plan, result: StepResult, now: float) -> Sequence[SequenceDriver]:
        """Commit a plan and the result of its run; return the sequences of its rows.

        Raises:
            DecodeError: steps keep failing regardless of their contents, so the engine must stop.
            PlanError: a sequence of the plan has ended since.
        """
        drivers, step = plan.rows, plan.step
        for driver, span in zip(drivers, step.spans, strict=True):
            if driver.finish_reason is not None:
                raise PlanError(
                    f"internal error: the sequence in slot {span.slot} ended between plan and apply"
                )
        self._commit(plan, result, now)
        if result.n_steps:
            self._n_failures, self._has_rebuilt = 0, False
            self._accept(plan, result, now)
        if result.code:
            self._contain(drivers, step, result, now)
        self.bisection.clear()  # a cleared suspect may lose its cells in the next plan
        return drivers

    # ---- changes of slots ----

    def _change_slots(self, slot_plan: SlotPlan) -> None:
        """Free the slots and cells that others need, then admit the waiting sequences that fit."""
        n_waiting = slot_plan.n_waiting
        if self._has_checkpoints:
            slot_plan.take_checkpoints()
        if self._quantum and n_waiting:
            self._end_turns(slot_plan)
        must_wait = self._is_overcommitted and self._free_cells_for_rows(slot_plan)
        if must_wait and slot_plan.running_then():
            return  # a waiting sequence, such as an earlier victim, would take the cells just freed
        if n_waiting and slot_plan.can_admit:
            slot_plan.admit(self._n_copied_max(slot_plan))
        elif not n_waiting and not slot_plan.n_awaiting_cells and not slot_plan.cells.rebinds:
            slot_plan.compact()

    def _end_turns(self, slot_plan: SlotPlan) -> None:
        """Take slots from sequences past their quantum: those that waiting ones chose, and more as needed."""
        queue, n_free = slot_plan.batcher.queue, slot_plan.ledger.n_free_slots
        over = sorted(self._past_quantum(slot_plan), key=lambda d: -d.n_turn)
        chosen = [d for d in over if d.slot in queue.chosen_slots]
        others = [d for d in over if d not in chosen]
        for driver in (*chosen, *others[: max(0, len(queue) - queue.n_chosen - n_free)]):
            slot_plan.leave(driver, "turn")

    def _past_quantum(self, slot_plan: SlotPlan) -> list[SequenceDriver]:
        """Return the running sequences that are past their quantum."""
        return [d for d in slot_plan.running_then() if d.n_turn >= self._quantum]

    def _free_cells_for_rows(self, slot_plan: SlotPlan) -> bool:
        """Free a cell for each decoding row, and at least one cell; return whether no sequence may be admitted.

        Free slots with retained cells are emptied first.
        """
        is_tight = self._is_pool_full
        if is_tight and _make_room_or_free_slot(slot_plan):
            slot_plan.make_room(slot_plan.ledger.n_pool)  # including the slot of a victim
        while running := slot_plan.running_then():
            n_rows = self._n_least(running, slot_plan)
            slot_plan.make_room(n_rows)
            if slot_plan.ledger.n_free_cells >= n_rows:
                break
            is_tight = True
            if not slot_plan.free_a_slot():
                break
        return is_tight

    def _n_least(self, running: Sequence[SequenceDriver], slot_plan: SlotPlan) -> int:
        """Return the fewest free cells with which each decoding row, or else one of the prompts, can be computed."""
        n_rows = max(1, _n_single(running))
        if not self._has_whole_pictures:
            return n_rows
        asked = self.bisection.suspects(slot_plan.leaving()) or running
        if _n_single(asked):
            return n_rows
        return max(n_rows, min(n_rows_at(d.picture_edges, slot_plan.n_computed(d)) for d in asked))

    def _n_copied_max(self, slot_plan: SlotPlan) -> int | None:
        """Return how many cells a step may copy: as many as take as long as its decoding; None for no limit."""
        n_rows = _n_single(slot_plan.running_then())
        return self.costs.n_copied_within(self.costs.seen_s(n_rows)) if n_rows else None

    def _bindings(self, slot_plan: SlotPlan) -> tuple[Binding, ...]:
        """Return bindings for the sequences that are new in their slots or whose positions have changed."""
        holders, placed = slot_plan.ledger.holders, slot_plan.placed
        if not (placed or slot_plan.cells.rebinds):
            return ()
        rebound = [(holders[slot], slot) for slot in slot_plan.cells.rebinds]
        held = [(d, slot) for d, slot in rebound if d is not None and d not in placed]
        held += [(driver, slot) for driver, (slot, _) in placed.items()]
        return tuple([self.binding(driver, slot) for driver, slot in held])

    def binding(self, driver: SequenceDriver, slot: Slot) -> Binding:
        """Return the backend's settings for a sequence in a slot, with the sources of its draft tokens."""
        return driver.binding(slot, **self._sources)

    # ---- what a step computes ----

    def _take_adapter_turn(
        self, running: Sequence[SequenceDriver], slot_plan: SlotPlan
    ) -> tuple[Sequence[SequenceDriver], Sequence[_Share], Mapping[AdapterSet, int] | None]:
        """Return the sequences of one set of adapters and what each computes. The sets in use take turns."""
        sets = dict.fromkeys(d.request.adapters for d in running) if self._has_adapters else {}
        if len(sets) < 2:
            return running, self._shares(running, slot_plan), None
        adapter_turns = {
            adapters: self._adapter_turns.get(adapters, self._n_adapter_turns) for adapters in sets
        }
        for adapters in sorted(adapter_turns, key=adapter_turns.__getitem__):
            group = [d for d in running if d.request.adapters == adapters]
            if shares := self._shares(group, slot_plan):  # a full pool may have no room for it
                break
        adapter_turns[group[0].request.adapters] = self._n_adapter_turns + 1
        return group, shares, adapter_turns

    def _shares(self, group: Sequence[SequenceDriver], slot_plan: SlotPlan) -> list[_Share]:
        """Return (slot, sequence, start, number of inputs) of each span, by slot.

        A sequence with one pending token computes it; those with more share the prompt tokens of the step.
        """
        if self._is_overcommitted:
            self._make_room_for_step(group, slot_plan)
        shares: list[_Share] = []
        prefills: list[Pending] = []
        n_free, placed = slot_plan.ledger.n_free_cells, slot_plan.placed
        is_decoding = is_watched = False
        for driver in group:
            slot, start = placed.get(driver) or (driver.slot, driver.n_computed)
            if slot is None or start == driver.n_window:  # its window must move first
                continue
            if len(driver.tokens) - start > 1:
                prefills.append(Pending(driver, slot, start))
                continue
            if len(shares) < n_free:
                shares.append((slot, driver, start, 1))
            if driver.output:
                is_decoding = True
                is_watched = is_watched or driver.reply.is_watched
        if prefills:
            n_decoding = len(shares) if is_decoding else 0
            self._add_prefills(shares, prefills, n_decoding, slot_plan, is_watched=is_watched)
        shares.sort()
        return shares

    def _add_prefills(
        self,
        shares: list[_Share],
        prefills: list[Pending],
        n_decoding: int,
        slot_plan: SlotPlan,
        *,
        is_watched: bool,
    ) -> None:
        """Add what sequences with more than one pending token compute beside the rows in `shares`."""
        if len(prefills) > 1:
            prefills.sort(key=self._turn_of)
        n_rows, n_free = len(shares), slot_plan.ledger.n_free_cells
        wanted = self._wanted(prefills, slot_plan)
        room = min(self._n_batch, n_free) - n_rows
        n_most, n_enough = self.budget.of(prefills, n_decoding, wanted[0], is_watched=is_watched)
        if n_most is not None:
            room = min(room, n_most and max(n_most, self._cuts.n_room))
        if self._has_whole_pictures and room > 0:
            n_alone = self._room_for_picture(prefills, room, n_free - n_rows)
            if n_alone + n_rows <= self._n_batch:
                room = n_alone
            elif not (n_decoding and self._was_alone):
                room = n_alone
                shares.clear()  # a large picture is a step of its own; decoding rows have the next step
        split = self._split(prefills, wanted, room, n_enough)
        shares += [(*p.place, n) for p, n in zip(prefills, split, strict=True) if n]

    def _room_for_picture(self, prefills: Sequence[Pending], room: int, n_free: int) -> int:
        """Return how many prompt tokens a step may have: more than `room` if a larger picture is next."""
        for pending in prefills:
            if pending.n_rows <= room:
                return room
            if pending.n_rows <= n_free:
                return pending.n_rows
        return room

    def _turn_of(self, prefill: Pending) -> int:
        """Return the sort key of prompts that share a step: fewest tokens before the first output first.

        Prompt tokens that the engine had computed when the sequence got its slot are added. So a prompt is passed by
        at most as many tokens of later prompts as it has itself.
        """
        n_before = prefill.driver.n_prompts_before
        return prefill.n + (self._n_prompts if n_before is None else n_before)

    def _split(
        self, prefills: Sequence[Pending], wanted: list[int], room: int, n_enough: int | None
    ) -> list[int]:
        """Share `room` prompt tokens among prefills, which can use `wanted`."""
        if self._cuts:
            wanted[0] = prefills[0].n_chunk(self._cuts, min(room, wanted[0]))
            return whole_chunks(wanted, room)
        n_whole = [p.n_whole for p in prefills] if self._has_whole_pictures else None
        return split_budget(wanted, [p.n for p in prefills], room, n_enough, n_whole=n_whole)

    def _make_room_for_step(self, group: Sequence[SequenceDriver], slot_plan: SlotPlan) -> None:
        """Empty slots with retained cells, to make room for this step's tokens and the later steps of the run."""
        n_wanted, n_steps, n_most = 0, N_STEPS_MAX, self._n_batch
        for driver in group:
            n_computed = slot_plan.n_computed(driver)
            n_wanted += len(driver.tokens) - n_computed
            n_steps = min(n_steps, max(1, driver.n_room))
            if self._has_whole_pictures:
                n_most = max(n_most, n_rows_at(driver.picture_edges, n_computed))
        slot_plan.make_room(min(n_most, n_wanted) + n_steps * len(group))

    def _wanted(self, prefills: Sequence[Pending], slot_plan: SlotPlan) -> list[int]:
        """Return how many tokens each prefill may compute in a step of its own."""
        n_chunk = self.options.prefill_chunk or self._n_batch
        if self._cuts:
            wanted = [p.n_chunk(self._cuts, self._n_batch) for p in prefills]
        else:
            wanted = [min(p.n_fitting, n_chunk) for p in prefills]
        if self._has_whole_pictures:
            wanted = [max(n, p.n_rows) for n, p in zip(wanted, prefills, strict=True)]
        if self._has_checkpoints:
            to_mark = [slot_plan.n_to_mark(p.driver, p.start) for p in prefills]
            wanted = [n if m is None else min(n, m) for n, m in zip(wanted, to_mark, strict=True)]
        if any(p.driver.is_scoring for p in prefills):
            limit_targets(prefills, wanted, has_cuts=bool(self._cuts))
        return wanted

    def _length(
        self,
        spans: Sequence[Span],
        group: Sequence[SequenceDriver],
        slot_plan: SlotPlan,
        now: float,
    ) -> tuple[int, float]:
        """Return how many steps a run may have, and its time limit in seconds.

        A plan may be repeated while no row ends, no turn ends, and no sequence is left out.
        """
        if not spans or len(spans) < len(group) or slot_plan.n_following:
            return 1, 0.0
        for span in spans:
            if not span.has_output or span.targets:
                return 1, 0.0
        # the next plan may have room for a sequence that this one leaves out
        n_waiting, n_steps = slot_plan.n_waiting, min(N_STEPS_MAX, *[d.n_room for d in group])
        is_short = bool(n_waiting and slot_plan.ledger.n_free_slots)
        is_turn = self._quantum and n_waiting
        has_checkpoints = self._has_checkpoints
        for d in group:
            if d.request.grammar is not None or d.request.options.logits_processor is not None:
                return 1, 0.0
            if has_checkpoints and slot_plan.n_to_mark(d, d.n_computed) is not None:
                return 1, 0.0  # the next plan takes a checkpoint
            # tokens sampled after a stop string are wasted
            is_short = is_short or d.reply.is_watched or d.reply.text.has_stops
            if is_turn:
                n_turn = 0 if d in slot_plan.placed else d.n_turn
                n_steps = min(n_steps, max(1, self._quantum - n_turn))
        if self._is_overcommitted:
            n_tokens = sum([len(c.inputs) for c in spans])
            n_steps = min(n_steps, 1 + (slot_plan.ledger.n_free_cells - n_tokens) // len(spans))
        if is_short:
            return n_steps, SHORT_RUN_S
        next_s = self.batcher.next_deadline_s
        left_s = RUN_S if next_s is None else next_s - now
        return n_steps, max(SHORT_RUN_S, min(RUN_S, left_s))

    def _n_drafted(self, n_steps: int, spans: Sequence[Span], slot_plan: SlotPlan) -> int:
        """Return how many draft tokens may follow a row; 0 if the pool may lack cells for them."""
        if not self._is_overcommitted:
            return self._n_drafts
        n_tokens = sum([len(c.inputs) for c in spans]) + (n_steps - 1) * len(spans)
        has_room = slot_plan.ledger.n_free_cells >= n_tokens + N_TARGETS_MAX
        return self._n_drafts if has_room else 0

    def _check_progress(self, slot_plan: SlotPlan) -> None:
        """Check that an empty plan leaves no sequence waiting for ever.

        Raises:
            PlanError: a sequence waits and none runs, or none of the running ones can be computed.
        """
        seen, n_running = self.batcher.occupancy(), len(slot_plan.running_then())
        is_idle = (
            seen.n_ended or slot_plan.n_awaiting_cells or seen.n_storing or slot_plan.awaits_prompts
        )
        if n_running or (seen.n_waiting and not is_idle):
            ledger = slot_plan.ledger
            raise PlanError(
                f"internal error: no progress: {n_running} requests run, {seen.n_waiting} wait, "
                f"{ledger.n_free_cells} cells and {ledger.n_free_slots} slots are free"
            )

    # ---- results of a step ----

    def _commit(self, plan: Plan, result: StepResult, now: float) -> None:
        """Commit what the run did to slots and cells."""
        step = plan.step
        self._was_alone = len(step.spans) == 1 and step.spans[0].begins_in_picture
        self._is_pool_full = False
        if step.is_rebuild:
            self._must_rebuild = False
        for driver in plan.slot_plan.placed:
            driver.enter(self._n_prompts)
        if plan.adapter_turns is not None:
            self._adapter_turns = plan.adapter_turns
            self._n_adapter_turns += 1
        self.batcher.commit(plan.slot_plan, step, result, plan.now, now)
        if result.move_s:
            self.costs.learn_copy(sum(n for _, _, n in step.copies), result.move_s)

    def _accept(self, plan: Plan, result: StepResult, now: float) -> None:
        """Give each sequence its new cells and tokens, and count them; ended sequences leave their slots."""
        stats, later_s, grammar_steps = self._stats, result.later_s, result.grammar_steps
        cells: list[tuple[Slot, int]] = []
        finished: list[SequenceDriver] = []
        n_decode = n_prompt = 0
        n_before = 0.0
        has_paused = False
        n_rows_by_gap: dict[tuple[float | None, int], int] = {}
        for i, (driver, span) in enumerate(zip(plan.rows, plan.step.spans, strict=True)):
            n_inputs, n_computed, sampled = len(span.inputs), driver.n_computed, result.tokens[i]
            guidance = grammar_steps.get(span.slot, FREE)
            n_new = len(sampled) - (sampled[-1] < 0) + len(guidance.forced) if sampled else 0
            gap = driver.clock.last_token_s, n_new
            n_rows_by_gap[gap] = n_rows_by_gap.get(gap, 0) + 1
            if n_inputs == 1 and n_computed >= driver.n_prompt:  # as `EngineStats` defines it
                n_decode += 1
            else:
                n_prompt += n_inputs
                n_before += n_inputs * (n_computed + n_inputs / 2)
            scores = result.scores.get(span.slot, ())
            if span.targets and not driver.take_scores(span, scores, now):
                finished.append(driver)
                continue
            if failure := result.failures.get(span.slot):
                driver.finish("error", now, failure)
                finished.append(driver)
                continue
            if n_computed < driver.n_prompt or n_computed < driver.n_reached:
                stats.n_prompt_tokens += max(0, min(n_inputs, driver.n_prompt - n_computed))
                stats.n_recomputed_tokens += max(0, min(n_inputs, driver.n_reached - n_computed))
            if result.drafted and any(drafted := result.drafted[i]):
                driver.drafted = driver.drafted.and_more(drafted)
            logprobs = result.logprobs[i] if result.logprobs else ()
            driver.accept(n_inputs, sampled, now, guidance, logprobs, later_s=later_s)
            cells.append((span.slot, driver.n_computed - n_computed))
            if driver.finish_reason is not None:
                finished.append(driver)
            has_paused = has_paused or driver.status is Status.PAUSED
        self._count(n_decode, n_prompt, n_before, len(plan.rows), result)
        self._n_prompts += n_prompt
        stats.count_tokens(n_rows_by_gap, now, later_s)
        has_cells = result.code in UNCHANGED
        self.batcher.record_step(cells, finished, has_paused=has_paused, has_cells=has_cells)

    def _count(
        self, n_decode: int, n_prompt: int, n_before: float, n_rows: int, result: StepResult
    ) -> None:
        """Add a run to the statistics and to the costs of steps."""
        n_later, first_s, later_s = result.n_steps - 1, result.first_s, result.later_s
        self._stats.n_runs += 1
        self._stats.n_pad_rows += result.n_pad_rows
        if n_drafts := sum(result.n_drafts):
            self._stats.count_drafts(result.n_drafts, result.n_accepted)
        self._stats.count_step(n_rows, n_decode, n_prompt, first_s)
        if n_later:
            self._stats.count_step(n_rows, n_rows, 0, later_s, n_later)
        busy = self.costs.learn_waits(first_s + later_s, result.waited_s)
        if n_prompt:
            self.costs.learn_mixed(n_decode, n_prompt, busy * first_s, n_before)
        elif n_drafts:  # they are counted for all steps of a run together
            n_mean = n_rows + round(n_drafts / result.n_steps)
            self.costs.learn_decode(n_mean, busy * (first_s + later_s) / result.n_steps)
        else:
            self.costs.learn_decode(n_rows, busy * first_s)
        if n_later and not n_drafts:
            self.costs.learn_decode(n_rows, busy * later_s / n_later)

    # ---- failures ----

    def _contain(
        self, drivers: Sequence[SequenceDriver], step: StepPlan, result: StepResult, now: float
    ) -> None:
        """Handle a failed step by its return code: correct the cells, and search for the culprit."""
        n_new = [len(tokens) for tokens in result.tokens] if result.n_steps else [0] * len(drivers)
        n_past = {
            d: d.n_removed + c.start + len(c.inputs) + n_new[i]
            for i, (d, c) in enumerate(zip(drivers, step.spans, strict=True))
            if d.status is Status.RUNNING
        }
        if result.code not in UNCHANGED:
            self._settle_cells(drivers, result)
        is_full = result.code == 1 and self._is_overcommitted
        # only tried here, on a plan that is discarded; the next plan does it
        if is_full and _make_room_or_free_slot(self.batcher.slot_plan()):
            self._is_pool_full = True
            return
        is_again = not result.n_steps and bool(self.bisection.suspects())
        if result.code < -1:
            self._note_failure(result.code)
            if self._must_rebuild and len(n_past) == 1:
                return  # the only suspect gets one more try on the new context
        if not is_again:
            self.bisection.suspect(n_past)
        elif culprit := self.bisection.split(n_past):
            self._fail(culprit, step, result.code, now)

    def _settle_cells(self, drivers: Sequence[SequenceDriver], result: StepResult) -> None:
        """After an abort, keep the cells that are still known; after a failure, drop the cells of the step."""
        n_kept = result.n_kept if result.code == 2 and self._can_trim else ()
        for i, driver in enumerate(drivers):
            if driver.status is not Status.RUNNING:  # it ended in an earlier step of this run
                continue
            # the last token is computed again for its logits
            n = min(n_kept[i], driver.n_reusable) if n_kept else 0
            self.batcher.keep_cells(driver, driver.n_whole(self._cuts, n))

    def _note_failure(self, code: int) -> None:
        """Rebuild the context when a computation failed twice in a row; raise when that does not help."""
        self._n_failures += 1
        if self._n_failures > N_FAILURES_MAX:
            raise DecodeError(code)
        if self._n_failures > 1 and not self._has_rebuilt:
            self._must_rebuild = self._has_rebuilt = True
            self.batcher.lose_cells()

    def _fail(self, driver: SequenceDriver, step: StepPlan, code: int, now: float) -> None:
        failure = RequestFailedError("computing this request failed")
        failure.__cause__ = DecodeError(code)
        if code == -1:
            failure.__cause__.__cause__ = PlanError(repr(step))
        self.batcher.fail(driver, failure, now)


def _make_room_or_free_slot(slot_plan: SlotPlan) -> bool:
    """Empty all free slots, or else take the slot of one sequence; False if neither is possible."""
    return slot_plan.make_room(slot_plan.ledger.n_pool) or slot_plan.free_a_slot()


def _n_single(drivers: Sequence[SequenceDriver]) -> int:
    """Return the number of sequences with one pending token."""
    return len([d for d in drivers if d.n_pending == 1])


class FaultBisection:
    """Finds the sequence that makes a step fail: a stack of groups of suspects, each computed apart from the others.

    A suspect is cleared when it has computed its tokens past the place of the failure, so a failure that does not recur
    ends no sequence. Finding one culprit among n sequences takes about 2 log₂ n steps.
    """

    def __init__(self) -> None:
        self._groups: list[dict[SequenceDriver, int]] = []  # by suspect, its n_clear

    def suspects(self, leaving: Container[SequenceDriver] = ()) -> list[SequenceDriver]:
        """Return the group to compute next, without any other sequence; empty if there is no suspect.

        Args:
            leaving: sequences that lose their slots first.
        """
        for group in reversed(self._groups):
            if suspects := [d for d, n in group.items() if _is_suspect(d, n) and d not in leaving]:
                return suspects
        return []

    def clear(self) -> None:
        """Clear the suspects that are past the failure or have left. They stay cleared if they lose cells later."""
        while self._groups:
            group = self._groups.pop()
            if suspects := {d: n for d, n in group.items() if _is_suspect(d, n)}:
                self._groups.append(suspects)
                return

    def suspect(self, n_clear: Mapping[SequenceDriver, int]) -> None:
        """Add the sequences of a failed step in two halves; `n_clear` computed tokens clear each."""
        suspects = list(n_clear.items())
        half = (len(suspects) + 1) // 2
        self._groups += [dict(part) for part in (suspects[half:], suspects[:half]) if part]

    def split(self, n_clear: Mapping[SequenceDriver, int]) -> SequenceDriver | None:
        """Halve the group that failed again; if it is a single sequence, return it as the culprit."""
        self.clear()
        self._groups.pop()
        if len(n_clear) == 1:
            return next(iter(n_clear))
        self.suspect(n_clear)
        return None


def _is_suspect(driver: SequenceDriver, n_clear: int) -> bool:
    return driver.status is Status.RUNNING and driver.n_removed + driver.n_computed < n_clear
