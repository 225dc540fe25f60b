"""A scheduler on the fake backend, workloads small enough to check by eye, and the rules that hold after every step."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from itertools import islice, takewhile
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from cbatch.backend.fake import (
    FakeBackend,
    FakeConstraint,
    FakeGrammars,
    FakeMatcher,
    Faults,
    StepCost,
)
from cbatch.backend.fake.fake_tokens import tag_of
from cbatch.core.batcher import MultiRequestBatcher
from cbatch.core.books import KvLedger, find_ledger_imbalance
from cbatch.core.driver import SequenceDriver, Status
from cbatch.core.plan import Binding, KvCapabilities, OwnProcessor, Slot
from cbatch.core.queue import AdmissionQueue
from cbatch.core.request import Request
from cbatch.core.saved_cells import ToStore
from cbatch.core.scheduler import ContinuousBatchScheduler, Plan
from cbatch.core.slots import N_LOOK, N_PREEMPTED_MAX, SlotPlan
from cbatch.core.span import ANYWHERE, PromptCuts
from cbatch.engine_options import ScheduleOptions
from cbatch.errors import CacheError, GrammarError
from cbatch.messages import BatchPrompt
from cbatch.options import DryBreakers, RunOptions
from cbatch.runtime.output import result_of, take_chunk
from cbatch.runtime.prompts import PromptTokenizer
from cbatch.runtime.wants import N_REFUSED_MAX, CacheEntry, CacheRead, CacheRef, SequenceWants
from cbatch.stats import EngineStats
from tests.oracle.fake_streams import MovingContext, stream_alone

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from cbatch.core.plan import StepPlan
    from cbatch.core.saved_cells import Checkpoint
    from cbatch.core.span import Span
    from cbatch.options import Grammar
    from cbatch.response import BatchOutputChunk, BatchResult
    from cbatch.support.prefix_index import Branch, PrefixIndex

A_SECOND_A_STEP = StepCost(base_s=1.0)
NO_FAULTS = Faults()


def shared_pool(n_cells: int, *, can_save: bool = False, can_copy: bool = False) -> KvCapabilities:
    """Unified memory of `n_cells` cells; a saved cell takes 1 KiB."""
    return KvCapabilities(
        "unified", n_cells, can_save=can_save, can_copy=can_copy, saved_bytes_per_cell=1024
    )


def recurrent(n_slots: int, *, can_save: bool = False) -> KvCapabilities:
    """Memory that cannot trim; a saved state takes 4 KiB."""
    return KvCapabilities("recurrent", n_slots, can_trim=False, can_save=can_save, saved_bytes=4096)


def at_end_only(
    kind: Literal["partitioned", "unified", "recurrent"], n_cells: int
) -> KvCapabilities:
    """Memory of any kind that is kept at the end of a sequence alone, such as sliding windows; it can save."""
    memory = KvCapabilities("recurrent", n_cells, can_trim=False, can_save=True, saved_bytes=4096)
    return memory if kind == "recurrent" else replace(memory, kind=kind, saved_bytes_per_cell=1024)


def partitioned(n_cells: int) -> KvCapabilities:
    """A slot's own cells, which can be saved and copied; a saved cell takes 1 KiB."""
    return KvCapabilities(
        "partitioned", n_cells, can_save=True, can_copy=True, saved_bytes_per_cell=1024
    )


@dataclass(eq=False, slots=True)
class Rig:
    """A scheduler with everything around it, and all it has given out so far."""

    backend: FakeBackend
    batcher: MultiRequestBatcher
    wants: SequenceWants
    scheduler: ContinuousBatchScheduler
    stats: EngineStats
    drivers: dict[str, SequenceDriver] = field(default_factory=dict)
    chunks: dict[str, list[BatchOutputChunk]] = field(default_factory=dict)
    results: dict[str, BatchResult] = field(default_factory=dict)
    disk: dict[CacheRef, tuple[CacheEntry, dict[int, NDArray[np.uint8]]]] = field(
        default_factory=dict
    )
    """Of each file what is in it, and its states by their numbers of cells, the whole one last."""
    storing: list[tuple[ToStore, CacheEntry | str]] = field(default_factory=list)
    fetching: list[CacheRead] = field(default_factory=list)
    compiling: list[Grammar | DryBreakers] = field(default_factory=list)
    n_visited: int = 0
    """Waiting sequences looked at, to make prompts tokens and to plan."""
    is_watched: bool = False
    """Whether all that is known is compared before and after each plan; this takes long."""
    in_run: Plan | None = None
    """The plan whose run is in flight."""
    has_lost_cells: bool = False
    """Whether cells that sequences shared were lost: then a pool may be too small for what was admitted."""
    has_slices: bool = False
    """Whether seconds end runs, too: with a step a second each run would be one step."""
    copy_s: float = 0.0
    """What a cell takes that is copied from slot to slot; then a plan admits no more than it may copy."""

    @property
    def now(self) -> float:
        """The backend's virtual clock: one second a step unless the test says otherwise."""
        return self.backend.now_s

    def submit(self, *requests: Request) -> None:
        piece, now = self.backend.vocab.piece, self.now
        drivers = [SequenceDriver.of(with_deadline(r, now), piece, now) for r in requests]
        for request, driver in zip(requests, drivers, strict=True):
            self.drivers[request.id] = driver
            self.chunks[request.id] = []
        self.batcher.submit(drivers)

    def cancel(self, id: str) -> bool:
        return self.batcher.cancel(id, self.now)

    def running(self) -> list[str]:
        """The ids in slots, in order of slots."""
        return [d.request.id for d in self.ledger.holders if d is not None]

    @property
    def state(self) -> MultiRequestBatcher:
        """The state that events and `apply` change, to look into."""
        return self.batcher

    @property
    def ledger(self) -> KvLedger:
        """The ledger of slots and cells."""
        return self.state.cells.ledger

    def alone(self, request: Request, n_output: int) -> list[int]:
        """The tokens of a request run alone, its end included."""
        tokens = tokenize(self.backend, request.prompt)
        binding = Binding(
            Slot(0),
            len(tokens),
            request.sampling,
            request.stop_tokens,
            tuple(tokens),
            constraint=constraint_of(request),
            processor=processor_of(request),
        )
        if not request.options.n_discard:
            return stream_alone(self.backend, tokens, binding, n_output, request.adapters)
        return self._alone_in_a_moving_window(request, tokens, n_output)

    def _alone_in_a_moving_window(
        self, request: Request, tokens: Sequence[int], n_output: int
    ) -> list[int]:
        """As `alone`, where `n_discard` tokens behind the first `n_keep` go whenever the window is full."""
        options, n_window = request.options, self.backend.n_window
        output, tag = list[int](), tag_of(request.adapters)
        n_keep = min(1 if options.n_keep is None else options.n_keep, len(tokens), n_window - 2)
        n_discard = min(options.n_discard or 0, n_window - n_keep - 1)
        cells = [token | tag for token in tokens]
        context = MovingContext(self.backend, cells, n_keep, n_discard, n_window)
        constraint = constraint_of(request)
        while len(output) < n_output and not (output and output[-1] in request.stop_tokens):
            if constraint is not None and is_complete(constraint, output):
                break
            i_output = len(context.cells) - len(output)
            binding = Binding(
                Slot(0),
                i_output,
                request.sampling,
                request.stop_tokens,
                (*tokens, *output),
                constraint=constraint,
                output=tuple(output),
                processor=processor_of(request),
            )
            found = stream_alone(self.backend, context.cells, binding, 1)
            if not found:  # the constraint cannot be followed
                break
            context.append(found[0] | tag)
            output += found
        return output


def processor_of(request: Request) -> OwnProcessor | None:
    """What stands for the request's processor of logits in `stream_alone`."""
    function = request.options.logits_processor
    return None if function is None else OwnProcessor(function, (), ())


def constraint_of(request: Request) -> FakeConstraint | None:
    """The request's grammar, compiled; None where it has none or a bad one."""
    if request.grammar is None:
        return None
    try:
        return FakeGrammars().compile(request.grammar)
    except GrammarError:
        return None


def is_complete(constraint: FakeConstraint, output: Sequence[int]) -> bool:
    """Whether a constraint lets nothing follow an output that has followed it."""
    if not output:
        return False
    said = FakeMatcher(constraint, output[:-1]).follow(output[-1])
    return said.is_complete and not said.forced


def tokenize(
    backend: FakeBackend, prompt: BatchPrompt, options: RunOptions | None = None
) -> Sequence[int]:
    if prompt.tokens is not None:
        return prompt.tokens
    if prompt.prompt is not None:
        return backend.vocab.tokenize(prompt.prompt)
    return backend.vocab.render(prompt.messages or (), (options or RunOptions()).template_variables)


def make_scheduler(
    n_slots: int = 2,
    n_window: int = 64,
    n_batch: int = 16,
    *,
    n_vocab: int = 320,
    seed: int = 0,
    code: Callable[[Sequence[Span]], int] = NO_FAULTS.code,
    broken: Callable[[Span], bool] = NO_FAULTS.broken,
    swap: Callable[[int], bool] = NO_FAULTS.swap,
    memory: KvCapabilities | None = None,
    cost: Callable[[int, int], float] = A_SECOND_A_STEP,
    cuts: PromptCuts = ANYWHERE,
    adapters: tuple[str, ...] = (),
    copy_s: float = 0.0,
    tokens_of: Callable[[BatchPrompt, RunOptions], Sequence[int]] | None = None,
    **options: Any,
) -> Rig:
    backend = FakeBackend(
        n_slots,
        n_window,
        n_batch,
        n_vocab=n_vocab,
        seed=seed,
        faults=Faults(code, broken, swap),
        cost=cost,
        memory=memory,
    )
    schedule = ScheduleOptions(**{"share_prefixes": False, **options})
    memory = backend.memory
    ledger = KvLedger(n_slots, n_window, memory)
    backend.cuts, backend.adapters = cuts, adapters
    prompts = PromptTokenizer(tokens_of or partial(tokenize, backend), n_window)
    wants = SequenceWants(prompts.tokenize)
    batcher = MultiRequestBatcher(ledger, wants, schedule, cuts)
    stats = EngineStats()
    scheduler = ContinuousBatchScheduler(
        batcher,
        n_batch,
        stats,
        schedule,
        cuts=cuts,
        memory=memory,
        has_adapters=bool(adapters),
    )
    scheduler.costs.learn_copy(1, copy_s)
    return Rig(backend, batcher, wants, scheduler, stats, copy_s=copy_s)


def make_request(
    id: str = "a", prompt: str | Sequence[int] = (1, 2, 3, 4), *, seed: int = 0, **options: Any
) -> Request:
    """A request that never stops at a token unless `stop_token_ids` or `ignore_eos=False` say so."""
    said = RunOptions(**{"ignore_eos": True, **options})
    given = {"prompt": prompt} if isinstance(prompt, str) else {"tokens": prompt}
    stops = (() if said.ignore_eos else (256,)) + tuple(said.stop_token_ids or ())
    sampling = said.sampling({}, seed)
    return Request(
        id,
        BatchPrompt(**given),
        said,
        sampling,
        stops,
        adapters=said.adapters,
        n_logprobs=said.n_logprobs,
        n_prompt_logprobs=said.n_prompt_logprobs,
        grammar=said.structure,
        asked_stops=said.stop_token_ids or (),
    )


def with_deadline(request: Request, now: float) -> Request:
    """The request with its deadline, counted from now: what the engine does on submission."""
    timeout_s = request.options.timeout_s
    return request if timeout_s is None else replace(request, deadline_s=now + timeout_s)


def make_sequences(n: int, n_prompt: int = 4, **options: Any) -> list[Request]:
    """Requests `"0"`, `"1"`, … with different prompts."""
    return [
        make_request(str(i), [(16 * i + j) % 256 for j in range(n_prompt)], **options)
        for i in range(n)
    ]


def step(rig: Rig) -> StepPlan | None:
    """Plan, run and apply once, check everything, and take what came out."""
    plan = plan_of(rig)
    if plan is not None:
        run(rig, plan)
    for driver in rig.batcher.take_ended():
        _take_end(rig, driver)
    check_cells(rig)
    check_invariants(rig)
    return None if plan is None else plan.step


class CountedQueue(AdmissionQueue):
    """A queue that counts the sequences that are looked at."""

    n_visited = 0

    def candidates(
        self, holders: Sequence[SequenceDriver | None], ending: Collection[SequenceDriver] = ()
    ) -> Iterator[SequenceDriver]:
        for driver in super().candidates(holders, ending):
            CountedQueue.n_visited += 1
            yield driver


def plan_of(rig: Rig) -> Plan | None:
    """Begin a step and plan it; check that the plan is sound and that planning changes nothing."""
    settle_compiled(rig)
    take_wants(rig)
    settle_disk(rig)
    rig.state.queue.__class__ = CountedQueue
    n_visited = CountedQueue.n_visited
    rig.scheduler.begin_step(rig.now)
    take_wants(rig)
    before = snapshot(rig) if rig.is_watched else None
    plan = rig.scheduler.plan(rig.now)
    n_visited = CountedQueue.n_visited - n_visited
    assert n_visited <= n_visited_max(rig)
    rig.n_visited += n_visited
    again = rig.scheduler.plan(rig.now)
    assert again == plan
    assert before is None or snapshot(rig) == before
    assert before is None or _plain_values(again, {}) == _plain_values(plan, {})
    if plan is not None:
        check_plan(rig, plan)
    return plan


def run(rig: Rig, plan: Plan) -> None:
    """Run a plan, apply it, and take the chunks that came out."""
    rig.in_run = plan
    order = plan.step if rig.has_slices else replace(plan.step, slice_s=0.0)
    result = rig.backend.run(order)
    rig.has_lost_cells |= result.code not in (0, 1, -1) or bool(result.lost)
    touched = rig.scheduler.apply(plan, result, rig.now)
    assert touched == plan.rows
    check_slots(rig)
    for driver in touched:
        if driver.finish_reason is None:
            _take_chunk(rig, driver)
    take_wants(rig)


def park_paused(rig: Rig) -> None:
    """Take the slot of a paused sequence, as a plan does for one that waits."""
    slots = rig.batcher.slot_plan()
    assert slots.free_a_slot()
    run(rig, Plan(slots.cells.step(), (), slots, None, rig.now))


def snapshot(rig: Rig) -> object:
    """All that the scheduler, the batcher and their parts know, as plain values."""
    return _plain_values(rig.scheduler, {})


_DERIVED = {"_running"}
"""What is found again whenever other sequences run."""


def _plain_values(thing: object, seen: dict[int, int]) -> object:
    if isinstance(thing, (str, int, float, bytes, type(None), Enum)) or callable(thing):
        return thing
    if id(thing) in seen:
        return seen[id(thing)]
    seen[id(thing)] = len(seen)
    if isinstance(thing, dict):
        return [(_plain_values(k, seen), _plain_values(v, seen)) for k, v in thing.items()]
    if isinstance(thing, (list, tuple, set, frozenset, deque)):
        return [_plain_values(item, seen) for item in thing]
    names = [*getattr(thing, "__dict__", ())]
    names += [n for c in type(thing).__mro__ for n in getattr(c, "__slots__", ())]
    return [
        (name, _plain_values(getattr(thing, name), seen))
        for name in names
        if name not in _DERIVED and hasattr(thing, name)
    ]


def take_wants(rig: Rig) -> None:
    """Note what is to be compiled and read, and write what was copied out; `settle_…` tells the batcher of it."""
    while (want := rig.wants.take()) is not None:
        if isinstance(want, CacheRead):
            rig.fetching.append(want)
        elif isinstance(want, ToStore):
            store(rig, want)
        else:
            rig.compiling.append(want)


def settle_disk(rig: Rig) -> None:
    """Let those go on whose cells were read or written since the last step."""
    for want in rig.fetching:
        missing = CacheError(want.ref.key, "there is none", is_missing=True)
        data = np.empty(0, np.uint8)
        found, states = rig.disk.get(want.ref, (missing, {0: data}))
        if isinstance(found, CacheEntry) and want.choose(found):
            whole = states[max(states)]
            data = rig.backend.validate_state(states.get(want.n_read, whole), want.n_read)
        for _, key in rig.wants.resolve(want, found, rig.now):
            rig.backend.import_state(key, data, want.n_read)
    for stored, entry in rig.storing:
        rig.wants.resolve(stored, entry, rig.now)
    rig.fetching, rig.storing = [], []


def settle_compiled(rig: Rig) -> None:
    """Hand over what was to be compiled when the plan before was made."""
    wants, rig.compiling = rig.compiling, []
    for want in wants:
        found: object
        try:
            if isinstance(want, DryBreakers):
                found = rig.backend.vocab.dry_breakers(want.strings)
            else:
                found = rig.backend.grammars.compile(want)
        except GrammarError as error:
            found = error
        rig.wants.resolve(want, found, rig.now)


def store(rig: Rig, stored: ToStore) -> None:
    """Write what was copied out."""
    driver, n = stored.driver, stored.n_cells
    data = rig.backend.export_state(stored.key, is_kept=stored.key < 0)
    entry: CacheEntry | str = "the cells were not saved: they could not be copied to host memory"
    if data is not None:
        states, n_checkpoint = {n: data}, 0
        if stored.checkpoint is not None:
            key, n_checkpoint = stored.checkpoint
            if (state := rig.backend.export_state(key, is_kept=True)) is not None:
                states = {n_checkpoint: state, n: data}
        n_checkpoint *= len(states) > 1
        entry = CacheEntry(driver.tokens[:n], min(n, driver.n_prompt), n_checkpoint)
        rig.disk[CacheRef.of(driver.request)] = entry, states
    rig.storing.append((stored, entry))


def n_visited_max(rig: Rig) -> int:
    """The most waiting sequences that one plan may look at, however many wait."""
    return N_LOOK * (rig.backend.n_slots + N_REFUSED_MAX + 1)


def drive(
    rig: Rig,
    *,
    before: Callable[[Rig], object] | None = None,
    after: Callable[[Rig, StepPlan], object] | None = None,
    n_max: int = 40_000,
) -> list[StepPlan]:
    """Step until nothing is left to do; return the plans."""
    plans: list[StepPlan] = []
    while len(plans) < n_max:
        if before is not None:
            before(rig)
        plan = step(rig)
        if plan is None and (rig.fetching or rig.storing or rig.compiling):
            continue
        if plan is None:
            assert not rig.batcher.in_flight, "requests in flight, but nothing to compute"
            assert set(rig.results) == set(rig.drivers)
            return plans
        plans.append(plan)
        if after is not None:
            after(rig, plan)
    raise AssertionError(f"not done after {n_max} plans: {rig.batcher.in_flight}")


def check_plan(rig: Rig, planned: Plan) -> None:
    """Rows ascend, positions follow the ledger, the budget holds, no decode row and no room is left out."""
    plan, planned_slots = planned.step, planned.slot_plan
    slots = [c.slot for c in plan.spans]
    assert slots == sorted(set(slots))
    assert len(planned.rows) == len(slots)
    entering = [d for d in planned_slots.placed if d.slot is None]
    leaves = {leave.driver: leave.reason for leave in planned_slots.leaves}
    has_preempted = "cells" in leaves.values()
    starts = {d: place.n_cells for d, place in planned_slots.placed.items()}
    shares: Mapping[int, int] = {c.slot: len(c.inputs) for c in plan.spans}
    n_tokens = sum(shares.values())
    ledger = planned_slots.cells.ledger
    assert not find_ledger_imbalance(ledger)
    check_cell_ops(rig, planned)
    assert n_tokens <= rig.backend.n_batch
    assert n_tokens + (plan.n_steps - 1) * len(slots) <= ledger.n_free_cells
    assert not (has_preempted and entering)
    running = [d for d in rig.ledger.holders if d and d.status is Status.RUNNING]
    running = [d for d in running if d not in leaves] + entering
    for c, driver in zip(plan.spans, planned.rows, strict=True):
        end, start = c.start + len(c.inputs), starts.get(driver, driver.n_computed)
        assert driver in running
        assert c.start == start
        assert list(c.inputs) == driver.tokens[c.start : end]
        assert driver.request.adapters == plan.adapters
        is_open = driver.n_cap > 0 and driver.held is None
        assert c.has_output == (end == driver.n_tokens and is_open)
        assert plan.n_steps <= max(1, driver.n_room)
        check_targets(c, driver)
        if rig.backend.cuts:
            check_shape(c, driver, driver.own_cuts(rig.backend.cuts))
    if plan.is_rebuild:
        assert not plan.spans
        return
    n_holds = len(planned_slots.holds)
    n_waiting = len(waiting_for(rig, planned.slot_plan))
    if not ledger.is_overcommitted:
        assert entering or "parked" not in leaves.values()
        is_full = rig.state.n_awaiting_cells + n_holds > 0
        is_full = is_full or bool(rig.state.storing or (plan.copies and rig.copy_s))
        assert is_full or not (n_waiting and ledger.n_free_slots)
    suspects = rig.scheduler.bisection.suspects(leaves)
    if suspects:
        assert set(planned.rows) <= set(suspects)
        return
    running = [
        d for d in running if d.request.adapters == plan.adapters and d.n_tokens <= d.n_window
    ]
    if not ledger.is_overcommitted:
        pending = {d: d.n_tokens - starts.get(d, d.n_computed) for d in running}
        assert all(d in planned.rows for d, n in pending.items() if n == 1)
    options = rig.scheduler.options
    limits = (options.prefill_chunk, options.prefill_budget, options.itl_ms)
    is_free = limits == (None, None, None) and not rig.backend.cuts
    is_free = is_free and not any(d.is_scoring or d.reply.is_watched for d in running)
    if is_free and n_tokens < min(rig.backend.n_batch, ledger.n_free_cells):
        done = {d: c.start + len(c.inputs) for c, d in zip(plan.spans, planned.rows, strict=True)}
        marks = {d: planned_slots.marks.get(d, d.marks) for d in running}
        assert all(done[d] in (d.n_tokens, *marks[d]) for d in running)


def waiting_for(rig: Rig, slots: SlotPlan) -> list[SequenceDriver]:
    """Those that still wait though one of the slots that a plan leaves free is theirs to have."""
    waiting = islice(rig.state.queue.candidates(slots.ledger.holders), rig.backend.n_slots + 1)
    waiting_ready = takewhile(lambda d: d.is_tokenized, waiting)
    gone = [*slots.placed, *slots.holds]
    copied = slots.cells.prefixes.copied
    return [d for d in waiting_ready if d not in gone and d.chosen_slot not in copied]


def check_targets(chunk: Span, driver: SequenceDriver) -> None:
    """Every token of a prompt is scored once: as soon as the one before it is computed, not when that is again."""
    n_scored, start = driver.scores.n_scored if driver.scores else 0, chunk.start
    end = start + len(chunk.inputs)
    is_first = driver.scores is not None and not driver.scores.found
    assert not driver.is_scoring or start <= n_scored
    if driver.is_scoring and (start == n_scored or (is_first and end > n_scored)):
        assert list(chunk.targets) == driver.tokens[start + 1 : min(end + 1, driver.n_prompt)]
    else:
        assert not chunk.targets
        assert not driver.is_scoring or end <= n_scored


def check_shape(chunk: Span, driver: SequenceDriver, cuts: PromptCuts) -> None:
    """A prompt is computed in chunks that begin and end where it may be cut, output one by one."""
    n_prompt, n_tokens = driver.n_prompt, len(chunk.inputs)
    n_apart = n_prompt - cuts.n_before_row(n_prompt) if driver.output else 0
    n_left = n_prompt - n_apart - chunk.start
    if n_left <= 0:
        assert n_tokens == 1
        return
    assert chunk.start % cuts.multiple == 0
    if cuts.is_every:
        assert n_tokens == min(cuts.multiple, n_left)
    else:
        is_cut = n_prompt - chunk.start - n_tokens >= cuts.least
        is_whole = n_tokens % cuts.multiple == 0 and is_cut
        assert n_tokens <= cuts.most
        assert n_tokens == n_left or is_whole
        assert is_whole or chunk.start == 0 or n_tokens >= cuts.least - n_apart


def plain(cells: Sequence[int]) -> list[int]:
    """The tokens of fake cells, whatever they were computed with."""
    return [cell & 0xFFFFFF for cell in cells]


def check_slots(rig: Rig) -> None:
    """A slot that nobody has holds what the ledger says, and the index knows it."""
    ledger, prefixes = rig.ledger, rig.state.cells.prefixes
    for slot, driver in enumerate(rig.ledger.holders):
        cells = plain(rig.backend.cells[slot])
        if driver is None and slot not in rig.state.cells.clears:
            n = rig.state.cells.trims.get(Slot(slot))
            assert len(cells[:n]) == ledger.n_cells[slot]
            assert not cells or rig.scheduler.options.share_prefixes
            requests = [d.request for d in rig.drivers.values()]
            sets = {(r.adapters, r.options.cache_salt) for r in requests}
            known = max(prefixes.common(a, cells[:n], s).get(Slot(slot), 0) for a, s in sets)
            assert known == len(cells[:n]) or (rig.backend.cuts and known)


def known_in(rig: Rig, tokens: Sequence[int]) -> dict[Slot, int]:
    """How many of these tokens each slot is known to begin with, where there is any."""
    common = rig.state.cells.prefixes.common((), tokens)
    return {slot: n for slot, n in common.items() if n}


def check_cell_ops(rig: Rig, planned: Plan) -> None:
    """The operations of a plan lead from the cells that slots hold to those of the plan's own ledger."""
    n_cells, ops, ledger = [*rig.ledger.n_cells], planned.step, planned.slot_plan.cells.ledger
    for slot in ops.clears:
        n_cells[slot] = 0
    for slot, n in ops.trims:
        n_cells[slot] = n
    for slot, _, n in ops.loads:
        n_cells[slot] = n
    for _, slot, n in ops.copies:
        n_cells[slot] = n
    assert n_cells == ledger.n_cells


def root_of(index: PrefixIndex) -> Branch:
    """The node that every beginning in an index starts at."""
    return index._root


def saved_by_key(rig: Rig) -> dict[int, Any]:
    """What is saved under each key: the driver and the bytes."""
    return rig.state.saved._saved


def checkpoints_by_key(rig: Rig) -> dict[int, Checkpoint]:
    """The books of checkpoints."""
    return rig.state.cells.prefixes.checkpoints.kept


def check_cells(rig: Rig) -> None:
    """The backend holds exactly the computed tokens, but for what the next plan takes off."""
    cells, cells_saved = rig.state.cells, saved_by_key(rig)
    for driver in rig.ledger.holders:
        if driver is None or driver.slot is None:
            continue
        held = plain(rig.backend.cells[driver.slot])
        if driver.slot in cells.clears:
            held = []
        held = held[: cells.trims.get(driver.slot)]
        n_keep, n_moved = cells.shifts.get(driver.slot, (0, 0))
        del held[n_keep : n_keep + n_moved]
        assert held == driver.tokens[: driver.n_computed]
    if rig.ledger.is_overcommitted and not (cells.clears or cells.trims or cells.shifts):
        assert rig.backend.n_used == rig.ledger.n_used
    checkpoints = checkpoints_by_key(rig)
    assert set(rig.backend.saved) - set(cells.forgets) == {*cells_saved, *checkpoints}
    for key, kept in checkpoints.items():
        assert len(rig.backend.saved[key]) == kept.n_cells
    for key, entry in cells_saved.items():
        driver = entry.driver
        assert driver.slot is None
        assert driver.saved_key == key
        assert entry.n_bytes in (0, rig.backend.memory.n_saved_bytes(driver.n_computed))
        n = driver.n_computed
        assert plain(rig.backend.saved[key])[:n] == driver.tokens[:n]


def check_invariants(rig: Rig) -> None:
    """The books balance, and each request is where this rig has seen it."""
    batcher = rig.batcher
    assert not batcher.imbalance()
    leaving = [stored.driver for stored in rig.state.storing.values()]
    storing = {d.request.id for d in leaving}
    assert {stored.driver for stored, _ in rig.storing} <= set(leaving)
    assert set(batcher.in_flight) == set(rig.drivers) - set(rig.results) - storing
    assert batcher.occupancy().n_storing == len(leaving)
    held = [d for d in batcher.in_flight.values() if d.slot is None and is_held(d)]
    assert len(held) == batcher.occupancy().n_held
    for driver in batcher.in_flight.values():
        assert driver.n_preempted <= N_PREEMPTED_MAX or rig.has_lost_cells


def is_held(driver: SequenceDriver) -> bool:
    """Whether a sequence without a slot is out of the queue."""
    return driver.status is Status.PAUSED or driver.waits_for is not None


def _take_chunk(rig: Rig, driver: SequenceDriver) -> None:
    chunk = take_chunk(driver)
    if chunk is not None:
        assert chunk.text or (driver.status is Status.PAUSED and chunk.token_ids)
        assert chunk.finish_reason is None
        rig.chunks[driver.request.id].append(chunk)


def _take_end(rig: Rig, driver: SequenceDriver) -> None:
    """Take the last chunk and the result; the chunks joined are the result."""
    id = driver.request.id
    assert id not in rig.results, f"{id} ended twice"
    last = take_chunk(driver)
    assert last is not None
    chunks = rig.chunks[id]
    chunks.append(last)
    result = rig.results[id] = result_of(driver)
    assert last.finish_reason == result.finish_reason
    assert "".join(c.text for c in chunks) == result.text
    assert [c.content for c in chunks] == [c.text for c in chunks]
    assert tuple(t for c in chunks for t in c.token_ids) == result.token_ids
    assert (result.error is not None) == (
        result.finish_reason == "error"
        or (result.finish_reason in ("cancelled", "timeout") and not driver.has_run)
    )
