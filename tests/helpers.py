"""A scheduler on the fake backend, workloads small enough to check by eye, and the rules that hold after every step."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from cbatch.backend.fake import FakeBackend, StepCost
from cbatch.core.batcher import MultiRequestBatcher
from cbatch.core.driver import Request, SequenceDriver, Status
from cbatch.core.kv import KvLedger
from cbatch.core.scheduler import ContinuousBatchScheduler
from cbatch.core.stats import EngineStats
from cbatch.messages import BatchPrompt
from cbatch.options import RunOptions

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from cbatch.core.plan import Chunk, StepPlan, StepResult
    from cbatch.response import BatchOutputChunk, BatchResult

CACHE_KEPT = (0, 1, -1)
"""Return codes after which every cell is where the books say."""


@dataclass(eq=False, slots=True)
class Rig:
    """A scheduler with everything around it, and all it has given out so far."""

    backend: FakeBackend
    batcher: MultiRequestBatcher
    scheduler: ContinuousBatchScheduler
    stats: EngineStats
    drivers: dict[str, SequenceDriver] = field(default_factory=dict)
    chunks: dict[str, list[BatchOutputChunk]] = field(default_factory=dict)
    results: dict[str, BatchResult] = field(default_factory=dict)

    @property
    def now(self) -> float:
        """The backend's virtual clock: one second a step unless the test says otherwise."""
        return self.backend.now_s

    def submit(self, *requests: Request) -> None:
        for request in requests:
            driver = SequenceDriver.of(request, self.backend.vocab.piece, self.now)
            self.drivers[request.id] = driver
            self.chunks[request.id] = []
            self.batcher.submit(driver)

    def cancel(self, id: str) -> bool:
        return self.batcher.cancel(id, self.now)

    def running(self) -> list[str]:
        """The ids in slots, in order of slots."""
        return [d.request.id for d in self.batcher.running if d is not None]

    def alone(self, request: Request, n_output: int) -> list[int]:
        """The tokens of a request run alone, its end included."""
        tokens = tokenize(self.backend, request.prompt)
        probe = SequenceDriver.of(request, self.backend.vocab.piece, 0.0)
        probe.n_prompt = len(tokens)
        return self.backend.expected(tokens, probe.binding(self.batcher.ledger.next_slot), n_output)


def tokenize(backend: FakeBackend, prompt: BatchPrompt) -> Sequence[int]:
    if prompt.tokens is not None:
        return prompt.tokens
    if prompt.prompt is not None:
        return backend.vocab.tokenize(prompt.prompt)
    return backend.vocab.render(prompt.messages or ())


def make_scheduler(
    n_slots: int = 2,
    n_window: int = 64,
    n_batch: int = 16,
    *,
    n_vocab: int = 320,
    seed: int = 0,
    code: Callable[[Sequence[Chunk]], int] | None = None,
    broken: Callable[[Chunk], bool] | None = None,
) -> Rig:
    backend = FakeBackend(
        n_slots,
        n_window,
        n_batch,
        n_vocab=n_vocab,
        seed=seed,
        code=code,
        broken=broken,
        cost=StepCost(base_s=1.0),
    )
    ledger = KvLedger(n_slots, n_window)
    batcher = MultiRequestBatcher(ledger, lambda prompt: tokenize(backend, prompt))
    stats = EngineStats()
    return Rig(backend, batcher, ContinuousBatchScheduler(batcher, n_batch, stats), stats)


def make_request(
    id: str = "a", prompt: str | Sequence[int] = (1, 2, 3, 4), *, seed: int = 0, **options: Any
) -> Request:
    """A request that never stops at a token unless `stop_token_ids` or `ignore_eos=False` say so."""
    said = RunOptions(**{"ignore_eos": True, **options})
    given = {"prompt": prompt} if isinstance(prompt, str) else {"tokens": prompt}
    stops = (() if said.ignore_eos else (256,)) + tuple(said.stop_token_ids or ())
    return Request(id, BatchPrompt(**given), said, said.sampling({}, seed), stops)


def make_sequences(n: int, n_prompt: int = 4, **options: Any) -> list[Request]:
    """Requests `"0"`, `"1"`, … with different prompts."""
    return [
        make_request(str(i), [(16 * i + j) % 256 for j in range(n_prompt)], **options)
        for i in range(n)
    ]


def step(rig: Rig) -> StepPlan | None:
    """Plan, run and apply once, check everything, and take what came out."""
    plan = rig.scheduler.plan(rig.now)
    if plan is not None:
        check_plan(rig, plan)
        result = rig.backend.run(plan)
        check_clears(rig)
        in_plan = [d for c in plan.chunks if (d := rig.batcher.running[c.slot])]
        touched = rig.scheduler.apply(plan, result, rig.now)
        assert touched == in_plan
        for driver in touched:
            if driver.status is Status.RUNNING:
                _take_chunk(rig, driver)
        check_cells(rig, plan, result)
    for driver in rig.batcher.take_ended():
        _take_end(rig, driver)
    check_invariants(rig)
    return plan


def drive(
    rig: Rig,
    *,
    before: Callable[[Rig], object] | None = None,
    after: Callable[[Rig, StepPlan], object] | None = None,
    n_max: int = 5000,
) -> list[StepPlan]:
    """Step until nothing is left to do; return the plans."""
    plans: list[StepPlan] = []
    while len(plans) < n_max:
        if before is not None:
            before(rig)
        plan = step(rig)
        if plan is None:
            assert rig.scheduler.is_idle, "requests in flight, but nothing to compute"
            assert set(rig.results) == set(rig.drivers)
            return plans
        plans.append(plan)
        if after is not None:
            after(rig, plan)
    raise AssertionError(f"not done after {n_max} plans: {rig.batcher.in_flight}")


def check_plan(rig: Rig, plan: StepPlan) -> None:
    """Rows ascend, positions follow the books, the budget holds, no decode row and no room is left out."""
    slots = [c.slot for c in plan.chunks]
    assert slots == sorted(set(slots))
    shares: Mapping[int, int] = {c.slot: len(c.tokens) for c in plan.chunks}
    n_tokens = sum(shares.values())
    assert n_tokens <= rig.backend.n_batch
    assert not (rig.batcher.n_waiting and rig.batcher.ledger.has_free_slot)
    running = [d for d in rig.batcher.running if d is not None]
    by_slot = {d.slot: d for d in running}
    for c in plan.chunks:
        driver = by_slot[c.slot]
        end = c.start + len(c.tokens)
        assert c.start == driver.n_computed
        assert list(c.tokens) == driver.tokens[c.start : end]
        assert c.has_output == (end == driver.n_tokens)
        assert plan.n_steps <= driver.n_left
    if rig.scheduler._suspects:
        assert len(plan.chunks) == 1
        return
    assert all(d.slot in shares for d in running if d.n_pending == 1)
    if n_tokens < rig.backend.n_batch:
        assert all(d.slot is not None and shares[d.slot] == d.n_pending for d in running)


def check_clears(rig: Rig) -> None:
    """A slot that nobody runs in is empty once the plan's clears are done."""
    for slot, driver in enumerate(rig.batcher.running):
        assert driver is not None or not rig.backend.cells[slot]


def check_cells(rig: Rig, plan: StepPlan, result: StepResult) -> None:
    """The backend holds exactly the computed tokens, but for slots that the next plan clears."""
    dropped = {c.slot for c in plan.chunks} if result.code not in CACHE_KEPT else set()
    for driver in rig.batcher.running:
        if driver is None or driver.slot is None:
            continue
        if driver.slot in dropped:
            assert driver.n_computed == 0
        else:
            assert rig.backend.cells[driver.slot] == driver.tokens[: driver.n_computed]


def check_invariants(rig: Rig) -> None:
    """The books of slots, cells and requests balance."""
    batcher, ledger = rig.batcher, rig.batcher.ledger
    ledger.check()
    running = [d for d in batcher.running if d is not None]
    assert ledger.n_lent == len(running) == len(set(map(id, running)))
    for slot, driver in enumerate(batcher.running):
        assert ledger.n_cells[slot] == (0 if driver is None else driver.n_computed)
        if driver is not None:
            assert driver.slot == slot
            assert driver.status is Status.RUNNING
            assert driver.n_pending >= 1
            assert driver.n_tokens <= rig.backend.n_window
    status = Counter(d.status for d in batcher.in_flight.values())
    assert status[Status.FINISHED] == 0
    assert status[Status.RUNNING] == len(running)
    assert status[Status.WAITING] == batcher.n_waiting
    assert set(batcher.in_flight) == set(rig.drivers) - set(rig.results)


def _take_chunk(rig: Rig, driver: SequenceDriver) -> None:
    chunk = driver.take_chunk()
    if chunk is not None:
        assert chunk.text
        assert chunk.finish_reason is None
        rig.chunks[driver.request.id].append(chunk)


def _take_end(rig: Rig, driver: SequenceDriver) -> None:
    """Take the last chunk and the result; the chunks joined are the result."""
    id = driver.request.id
    assert id not in rig.results, f"{id} ended twice"
    last = driver.take_chunk()
    assert last is not None
    chunks = rig.chunks[id]
    chunks.append(last)
    result = rig.results[id] = driver.result()
    assert last.finish_reason == result.finish_reason
    assert "".join(c.text for c in chunks) == result.text
    assert tuple(t for c in chunks for t in c.token_ids) == result.token_ids
    assert (result.error is not None) == (
        result.finish_reason == "error"
        or (result.finish_reason == "cancelled" and driver.slot is None)
    )
