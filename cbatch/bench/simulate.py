"""A day of traffic in a minute: `python -m cbatch.bench.simulate --policy fcfs shortest --slots 16 32`.

The scheduler that serves models is driven here on `FakeBackend` in virtual time. What a step takes comes from a table
that `cbatch.bench.step_costs` measured, so policies, slots and budgets can be compared on millions of requests.
"""

from __future__ import annotations

import json
import math
import random
import time
from dataclasses import asdict, dataclass, field, fields, replace
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cbatch.backend.fake import FakeBackend
from cbatch.bench.harness import emit, parser
from cbatch.bench.step_costs import SMALL, StepTable
from cbatch.checks import check_seconds
from cbatch.core.batcher import MultiRequestBatcher
from cbatch.core.driver import SequenceDriver
from cbatch.core.kv import KvLedger
from cbatch.core.plan import KvCapabilities
from cbatch.core.request import Request
from cbatch.core.scheduler import ContinuousBatchScheduler
from cbatch.core.stats import EngineStats, Percentiles
from cbatch.engine_options import ScheduleOptions
from cbatch.errors import ConfigError, PlanError
from cbatch.messages import BatchPrompt
from cbatch.options import GREEDY, MAX_PRIORITY, RunOptions

if TYPE_CHECKING:
    import argparse
    import os
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from cbatch.core.plan import StepPlan, StepResult

    Cost = Callable[[int, int], float]

RUN_S = 0.02
"""After so many seconds a run of several steps ends. Source: `slice_s` of `NativeStepper`."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a trace.

    Args:
        at_s: when it is submitted, in seconds from the beginning.
        n_prompt: tokens of its prompt.
        n_output: tokens it generates.
        priority: as in `RunOptions`.
        timeout_s: as in `RunOptions`.

    Raises:
        ConfigError: a value of the wrong type or out of range.
    """

    at_s: float
    n_prompt: int
    n_output: int
    priority: int = 0
    timeout_s: float | None = None

    def __post_init__(self) -> None:
        """Check what nobody checks later."""
        if type(self.at_s) not in (int, float) or not 0 <= self.at_s < math.inf:
            raise ConfigError(f"at_s must be seconds from the beginning, not {self.at_s!r}")
        for name in ("n_prompt", "n_output"):
            if type(value := getattr(self, name)) is not int or value < 1:
                raise ConfigError(f"{name} must be a whole number above 0, not {value!r}")
        if type(self.priority) is not int or abs(self.priority) > MAX_PRIORITY:
            raise ConfigError(f"priority must be within ±{MAX_PRIORITY}, not {self.priority!r}")
        if self.timeout_s is not None:
            check_seconds("timeout_s", self.timeout_s)


def poisson(
    rate: float, n: int, mean_prompt: float, mean_output: float, seed: int = 0
) -> Iterator[Arrival]:
    """Yield `n` requests that come by chance, `rate` a second (`math.inf`: all at once), of geometric lengths."""
    for name, value, low in (
        ("rate", rate, 0.0), ("mean_prompt", mean_prompt, 1.0), ("mean_output", mean_output, 1.0),
    ):  # fmt: skip
        if not value >= low or not value:
            raise ConfigError(f"{name} must be at least {low:g} and not 0, not {value!r}")
    return _poisson(rate, n, mean_prompt, mean_output, random.Random(seed))


def _poisson(
    rate: float, n: int, mean_prompt: float, mean_output: float, chance: random.Random
) -> Iterator[Arrival]:
    at_s = 0.0
    for _ in range(n):
        at_s += chance.expovariate(rate) if rate < math.inf else 0.0
        yield Arrival(at_s, _length(chance, mean_prompt), _length(chance, mean_output))


def _length(chance: random.Random, mean: float) -> int:
    """Return a whole number ≥ 1 of geometric distribution."""
    if mean <= 1:
        return 1
    return 1 + int(math.log(1.0 - chance.random()) / math.log1p(-1 / mean))


def read_trace(path: str | os.PathLike[str]) -> Iterator[Arrival]:
    """Yield the requests of a JSONL file, an `Arrival`'s fields by name in each line; read as far as is asked for.

    Raises:
        ConfigError: the file cannot be read, or a line is no request or comes before the one above it in time; the
            message names file and line.
    """
    try:
        with Path(path).open(encoding="utf-8") as file:
            yield from _arrivals(file, str(path))
    except OSError as error:
        raise ConfigError(f"{path}: {error}") from error


def _arrivals(lines: Iterable[str], name: str) -> Iterator[Arrival]:
    last_s = 0.0
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            arrival = _arrival(json.loads(line))
            if arrival.at_s < last_s:
                raise ConfigError(f"at_s goes back from {last_s} to {arrival.at_s}")
        except ValueError as error:  # ConfigError and bad JSON are ValueErrors
            raise ConfigError(f"{name}, line {number}: {error}") from error
        last_s = arrival.at_s
        yield arrival


def _arrival(data: Any) -> Arrival:
    if not isinstance(data, dict):
        raise ConfigError(f"a request is an object, not {data!r}")
    known = {f.name for f in fields(Arrival)}
    missing, unknown = {"at_s", "n_prompt", "n_output"} - data.keys(), data.keys() - known
    if missing or unknown:
        raise ConfigError(f"missing: {sorted(missing)}, unknown: {sorted(unknown)}")
    return Arrival(**data)


@dataclass(frozen=True, slots=True)
class Spread:
    """Percentiles of a time in seconds, to about 2 %; None where nothing was counted."""

    p50: float | None
    p90: float | None
    p99: float | None

    @classmethod
    def of(cls, times: Percentiles) -> Spread:
        """Return the percentiles of what was counted."""
        return cls(times.at(50), times.at(90), times.at(99))


@dataclass(frozen=True, slots=True)
class Report:
    """What a simulation found; rates are of virtual time."""

    n_finished: dict[str, int]
    """Requests by finish reason."""
    n_rejected: int
    """Requests that found the queue full, with `when_full="reject"`."""
    n_in_flight_max: int
    """Most requests that ran or waited at once."""
    output_tps: float
    requests_per_s: float
    queue_s: Spread
    ttft_s: Spread
    itl_s: Spread
    total_s: Spread
    """Submission to the end, of all requests that got a slot."""
    mean_width: float
    """Sequences in a step."""
    n_steps: int
    n_output_tokens: int
    n_preempted: int
    n_recomputed_tokens: int
    virtual_s: float
    real_s: float = field(compare=False)
    """What the simulation itself took."""


def simulate(
    trace: Iterable[Arrival],
    *,
    n_slots: int,
    options: ScheduleOptions | None = None,
    cost: Cost = SMALL,
    n_window: int = 2048,
    n_batch: int = 2048,
    memory: KvCapabilities | None = None,
    is_watched: bool = True,
) -> Report:
    """Serve a trace in virtual time and return how it went; memory does not grow with the trace.

    Args:
        trace: requests in order of arrival; read one ahead. A prompt has no tokens in common with another.
        n_slots: sequences at once.
        options: policy, budgets and limits of the scheduler. At `max_queue` with `when_full="wait"` the trace waits
            before the queue, as callers of `run` do; that counts as queue time.
        cost: seconds of a step by its rows and its tokens beyond one each.
        n_window: tokens of one slot; a longer request ends as an error.
        n_batch: most tokens in a step.
        memory: partitioned unless said.
        is_watched: whether the output is streamed, so that prompts must not hold it up; see `prefill_budget`.
    """
    start = time.perf_counter()
    settings = options or ScheduleOptions()
    simulation = _Simulation(
        iter(trace),
        FakeServer(n_slots, n_window, n_batch, settings, cost, memory),
        is_watched=is_watched,
    )
    simulation.run()
    return simulation.report(time.perf_counter() - start)


class FakeServer:
    """The core on a `FakeBackend`, put together as an engine does it; `step` is one turn of its loop.

    Prompts are their length as text, and become tokens when their turn comes.
    """

    def __init__(
        self,
        n_slots: int,
        n_window: int,
        n_batch: int,
        options: ScheduleOptions,
        cost: Cost,
        memory: KvCapabilities | None = None,
    ) -> None:
        options = replace(options, share_prefixes=False)  # its prompts are all alike
        self.cost, self.options = cost, options
        n_window = min(n_window, memory.n_cells) if memory is not None else n_window
        self.backend = FakeBackend(n_slots, n_window, n_batch, cost=self._cost, memory=memory)
        memory = self.backend.memory
        self.stats = EngineStats()
        self.batcher = MultiRequestBatcher(
            KvLedger(n_slots, n_window, memory), self._tokenize, options, memory
        )
        self.scheduler = ContinuousBatchScheduler(
            self.batcher, n_batch, self.stats, options, memory=memory
        )
        self.run_s = RUN_S
        """A run is over after the first step that ends so late; 0 for one step a run."""
        self.next_s = math.inf
        """When the next arrival is due: where nobody waits, it ends the run in flight, as an engine's `run` does."""
        self._run_end_s = math.inf
        self._tokens = (1,) * (n_window + 1)

    @property
    def now(self) -> float:
        """Seconds of virtual time."""
        return self.backend.now_s

    def driver(self, id: str, arrival: Arrival, *, is_watched: bool = False) -> SequenceDriver:
        """Return a waiting sequence for an arrival."""
        options = _run_options(arrival.n_output, arrival.priority)
        ends_s = math.inf if arrival.timeout_s is None else arrival.at_s + arrival.timeout_s
        request = Request(id, _prompt(arrival.n_prompt), options, GREEDY, (), ends_s)
        driver = SequenceDriver.of(request, _no_text, arrival.at_s)
        driver.is_watched = is_watched
        return driver

    def step(self) -> bool:
        """Plan, run and apply once; False where there was nothing to compute."""
        plan = self.scheduler.plan(self.now)
        if plan is None:
            return False
        result = self._run(plan)
        self.scheduler.apply(plan, result, self.now)
        return True

    def timed_step(self) -> tuple[float, float]:
        """Do one step where there is something to compute; return the real seconds of planning and of applying."""
        times = [time.perf_counter()]
        plan = self.scheduler.plan(self.now)
        times.append(time.perf_counter())
        if plan is None:
            raise PlanError("nothing to compute")
        result = self._run(plan)
        times.append(time.perf_counter())
        self.scheduler.apply(plan, result, self.now)
        return times[1] - times[0], time.perf_counter() - times[2]

    def _run(self, plan: StepPlan) -> StepResult:
        self._run_end_s = self.now + self.run_s
        if self.next_s > self.now and not self.batcher.n_waiting:
            self._run_end_s = min(self._run_end_s, self.next_s)
        result = self.backend.run(plan)
        self.backend.plans.clear()  # it keeps them all for tests
        return result

    def _cost(self, n_rows: int, n_prompt: int) -> float:
        seconds = self.cost(n_rows, n_prompt)
        if self.backend.now_s + seconds >= self._run_end_s:
            self.backend.interrupt()
        return seconds

    def _tokenize(self, prompt: BatchPrompt, _: RunOptions) -> Sequence[int]:
        return self._tokens[: int(prompt.prompt or 0)]


class _Simulation:
    """A trace that is being served."""

    def __init__(self, trace: Iterator[Arrival], server: FakeServer, *, is_watched: bool) -> None:
        self._trace, self._server, self._is_watched = trace, server, is_watched
        self._next = next(trace, None)
        self._total_s = Percentiles()
        self._n_read = self._n_rejected = self._n_in_flight_max = 0

    def run(self) -> None:
        """Serve all there is."""
        server = self._server
        while True:
            self._submit()
            server.next_s = math.inf if self._next is None else self._next.at_s
            has_run = server.step()
            has_ended = self._take_ended()
            if not (has_run or has_ended or self._jump()):
                return

    def report(self, real_s: float) -> Report:
        """Return what was found."""
        stats, now = self._server.stats, self._server.now
        return Report(
            n_finished=dict(stats.n_finished),
            n_rejected=self._n_rejected,
            n_in_flight_max=self._n_in_flight_max,
            output_tps=stats.n_output_tokens / now if now else 0.0,
            requests_per_s=sum(stats.n_finished.values()) / now if now else 0.0,
            queue_s=Spread.of(stats.queue_s),
            ttft_s=Spread.of(stats.ttft_s),
            itl_s=Spread.of(stats.itl_s),
            total_s=Spread.of(self._total_s),
            mean_width=stats.avg_concurrent_seq(),
            n_steps=stats.n_steps,
            n_output_tokens=stats.n_output_tokens,
            n_preempted=stats.n_preempted,
            n_recomputed_tokens=stats.n_recomputed_tokens,
            virtual_s=now,
            real_s=real_s,
        )

    def _submit(self) -> None:
        """Queue everybody who has come by now, as far as the queue takes them."""
        now, n_room = self._server.now, self._room()
        drivers: list[SequenceDriver] = []
        while self._next is not None and self._next.at_s <= now:
            if len(drivers) < n_room:
                drivers.append(self._driver(self._next))
            elif self._server.options.when_full == "reject":
                self._n_rejected += 1
            else:
                break
            self._next = next(self._trace, None)
        if drivers:
            batcher = self._server.batcher
            batcher.submit(drivers)
            self._n_in_flight_max = max(self._n_in_flight_max, len(batcher.in_flight))

    def _room(self) -> float:
        """Return how many more may come in: those that a free slot takes at once do not count as waiting."""
        batcher, n_limit = self._server.batcher, self._server.options.max_queue
        if n_limit is None:
            return math.inf
        return n_limit + batcher.ledger.n_free_slots - batcher.n_waiting

    def _driver(self, arrival: Arrival) -> SequenceDriver:
        self._n_read += 1
        return self._server.driver(str(self._n_read), arrival, is_watched=self._is_watched)

    def _take_ended(self) -> bool:
        ended = self._server.batcher.take_ended()
        for driver in ended:
            self._server.stats.count_end(driver)
            clock = driver.clock
            if clock.admitted_s is not None and clock.finished_s is not None:
                self._total_s.add(clock.finished_s - clock.submitted_s)
        return bool(ended)

    def _jump(self) -> bool:
        """Go on to the next arrival; False where there is none."""
        if self._next is None:
            return False
        backend = self._server.backend
        backend.now_s = max(backend.now_s, self._next.at_s)
        return True


@lru_cache(maxsize=4096)
def _prompt(n_tokens: int) -> BatchPrompt:
    return BatchPrompt(prompt=str(n_tokens))


@lru_cache(maxsize=4096)
def _run_options(n_output: int, priority: int) -> RunOptions:
    return RunOptions(
        max_tokens=n_output, strict_max_tokens=True, priority=priority, ignore_eos=True
    )


def _no_text(_: int) -> bytes:
    return b""


def capacity(cost: Cost, n_slots: int, mean_prompt: float, mean_output: float) -> float:
    """Return about how many requests a second `n_slots` serve at most: decoding at full width, and their prompts."""
    n_prompt = round(n_slots * mean_prompt)
    prompt_s = (cost(n_slots, n_prompt) - cost(n_slots, 0)) / n_slots
    return 1 / (cost(n_slots, 0) * mean_output / n_slots + prompt_s)


def _parser() -> argparse.ArgumentParser:
    made = parser(__doc__, model=None)
    add = made.add_argument
    add(
        "--costs",
        type=Path,
        help="table of cbatch.bench.step_costs; without, that of the model small",
    )
    add("--slots", type=int, nargs="+", default=[16], help="sequences at once")
    add("--policy", nargs="+", default=["fcfs"], help="policies of the queue")
    add("--trace", type=Path, help="JSONL file of requests; without, they come by chance")
    add("--requests", type=int, default=10_000, help="how many come by chance")
    add("--rate", type=float, help="of them a second; without, by --load")
    add("--load", type=float, default=0.9, help="rate as a share of what the most slots can do")
    add("--mean-prompt", type=float, default=64.0, help="prompt tokens of a request")
    add("--mean-output", type=float, default=64.0, help="output tokens of a request")
    add("--seed", type=int, default=0, help="of chance")
    add("--window", type=int, default=2048, help="tokens of one slot")
    add("--batch", type=int, default=2048, help="most tokens in a step")
    add("--unified-cells", type=int, help="one pool of so many cells instead of a window a slot")
    add(
        "--saved-bytes",
        type=int,
        help="a saved cell's bytes; without, lost cells are computed again",
    )
    add("--unwatched", action="store_true", help="nobody streams: prompts may hold up decoding")
    add("--quantum", type=int, help="for round_robin")
    add("--ageing-s", type=float, help="for priority")
    add("--admission", help="reserve or optimistic, with --unified-cells")
    add("--max-queue", type=int)
    add("--when-full", help="wait or reject, with --max-queue")
    add("--prefill-budget", type=int)
    add("--prefill-chunk", type=int)
    add("--itl-ms", type=float)
    add("--swap-mib", type=int, default=ScheduleOptions.swap_mib)
    return made


_COMMON = (
    "admission",
    "max_queue",
    "when_full",
    "prefill_budget",
    "prefill_chunk",
    "itl_ms",
    "swap_mib",
)


def _schedule(policy: str, a: argparse.Namespace) -> ScheduleOptions:
    """Return the options of one policy: those of another are left out."""
    said: dict[str, Any] = {name: getattr(a, name) for name in _COMMON}
    if policy == "round_robin":
        said["quantum"] = a.quantum
    if policy == "priority":
        said["ageing_s"] = a.ageing_s
    return ScheduleOptions(policy=policy, **said)  # type: ignore[arg-type]  # it is checked there


def _memory(n_slots: int, a: argparse.Namespace) -> KvCapabilities:
    n_cells = a.unified_cells or n_slots * a.window
    return KvCapabilities(
        "unified" if a.unified_cells else "partitioned",
        n_cells,
        can_save=a.saved_bytes is not None,
        saved_bytes_per_cell=a.saved_bytes or 0,
    )


def _trace(a: argparse.Namespace, cost: Cost) -> Iterator[Arrival]:
    if a.trace is not None:
        return read_trace(a.trace)
    rate = a.rate or a.load * capacity(cost, max(a.slots), a.mean_prompt, a.mean_output)
    return poisson(rate, a.requests, a.mean_prompt, a.mean_output, a.seed)


def line(report: Report) -> dict[str, Any]:
    """Return a report for `json.dumps`, times and rates to four digits."""
    return {name: _rounded(value) for name, value in asdict(report).items()}


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _rounded(v) for name, v in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) else value


def main() -> None:
    """Print one JSON line for each number of slots and policy."""
    a = _parser().parse_args()
    cost = StepTable.read(a.costs) if a.costs else SMALL
    for n_slots, policy in product(a.slots, a.policy):
        report = simulate(
            _trace(a, cost),
            n_slots=n_slots,
            options=_schedule(policy, a),
            cost=cost,
            n_window=a.window,
            n_batch=a.batch,
            memory=_memory(n_slots, a),
            is_watched=not a.unwatched,
        )
        emit(slots=n_slots, policy=policy, **line(report))


if __name__ == "__main__":
    main()
