"""Traffic in virtual time: `python -m cbatch.bench.experiments.simulate --policy fcfs shortest --slots 16 32`.

The scheduler that serves models is driven here on `FakeBackend` in virtual time. What a step takes comes from a table
that `step_costs` measured, so policies, slots and budgets can be compared on millions of requests.
"""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cbatch.bench.experiments.fake_server import FakeServer
from cbatch.bench.experiments.rounds import parser
from cbatch.bench.experiments.step_costs import SMALL, StepTable
from cbatch.bench.experiments.traffic import Arrival, poisson, read_trace
from cbatch.bench.harness import emit
from cbatch.core.plan import KvCapabilities
from cbatch.engine_options import ScheduleOptions
from cbatch.runtime.delivery import count_end
from cbatch.stats import Percentiles

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable, Iterator, Sequence

    from cbatch.bench.experiments.fake_server import Cost
    from cbatch.core.driver import SequenceDriver

_SCHEDULE = {
    "quantum": int,
    "ageing_s": float,
    "admission": str,
    "max_queue": int,
    "when_full": str,
    "ttft": str,
    "prefill_budget": int,
    "prefill_chunk": int,
    "itl_ms": float,
    "swap_mib": int,
    "checkpoint_mib": int,
}
"""Options of the scheduler that are arguments here too."""

_OF_POLICY = {"quantum": "round_robin", "ageing_s": "priority"}
"""The policies that alone have these options."""


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
        memory: what the backend's memory can do; partitioned by default.
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


class _Simulation:
    def __init__(self, trace: Iterator[Arrival], server: FakeServer, *, is_watched: bool) -> None:
        self._trace, self._server, self._is_watched = trace, server, is_watched
        self._next = next(trace, None)
        self._total_s = Percentiles()
        self._n_read = self._n_rejected = self._n_in_flight_max = 0

    def run(self) -> None:
        server = self._server
        while True:
            self._submit()
            server.next_s = math.inf if self._next is None else self._next.at_s
            has_run = server.step()
            has_ended = self._take_ended()
            if not (has_run or has_ended or self._jump()):
                return

    def report(self, real_s: float) -> Report:
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
        """Queue all requests that have arrived by now, as far as the queue has room."""
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
        """Return how many more requests the queue takes: free slots are not part of it."""
        n_limit = self._server.options.max_queue
        if n_limit is None:
            return math.inf
        seen = self._server.batcher.occupancy()
        return n_limit + seen.n_open_slots - seen.n_waiting

    def _driver(self, arrival: Arrival) -> SequenceDriver:
        self._n_read += 1
        return self._server.driver(str(self._n_read), arrival, is_watched=self._is_watched)

    def _take_ended(self) -> bool:
        ended = self._server.batcher.take_ended()
        for driver in ended:
            count_end(self._server.stats, driver)
            total_s = driver.clock.after_s(driver.clock.finished_s)
            if driver.has_run and total_s is not None:
                self._total_s.add(total_s)
        return bool(ended)

    def _jump(self) -> bool:
        """Go on to the next arrival; False where there is none."""
        if self._next is None:
            return False
        backend = self._server.backend
        backend.now_s = max(backend.now_s, self._next.at_s)
        return True


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
        help="output of step_costs (default: that of the model *small*)",
    )
    add("--slots", type=int, nargs="+", default=[16], help="sequences at once")
    add("--policy", nargs="+", default=["fcfs"], help="queue policies to compare")
    add("--trace", type=Path, help="JSONL file of requests (default: random ones)")
    add("--requests", type=int, default=10_000, help="number of random requests")
    add("--rate", type=float, help="random requests a second (default: by --load)")
    add(
        "--load",
        type=float,
        default=0.9,
        help="rate as a share of what the largest of --slots can serve",
    )
    add("--mean-prompt", type=float, default=64.0, help="prompt tokens of a request")
    add("--mean-output", type=float, default=64.0, help="output tokens of a request")
    add("--seed", type=int, default=0, help="of the random requests")
    add("--window", type=int, default=2048, help="tokens of one slot")
    add("--batch", type=int, default=2048, help="most tokens in a step")
    add(
        "--unified-cells",
        type=int,
        help="size of one pool that all slots share, instead of --window",
    )
    add(
        "--saved-bytes", type=int, help="bytes of a saved cell (default: lost cells are recomputed)"
    )
    add(
        "--unwatched",
        action="store_true",
        help="no reader streams, so prompts may hold up decoding",
    )
    for name, kind in _SCHEDULE.items():
        policy = f", for --policy {_OF_POLICY[name]}" if name in _OF_POLICY else ""
        add(f"--{name.replace('_', '-')}", type=kind, help=f"as in cbatch.load{policy}")
    return made


def _schedule(policy: str, a: argparse.Namespace) -> ScheduleOptions:
    """Return the options of one policy: those of another are left out."""
    given: dict[str, Any] = {
        name: value
        for name in _SCHEDULE
        if (value := getattr(a, name)) is not None and _OF_POLICY.get(name, policy) == policy
    }
    return ScheduleOptions(policy=policy, **given)  # type: ignore[arg-type]  # it is checked there


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


def line(report: Any) -> dict[str, Any]:
    """Return a report for `json.dumps`, times and rates to four digits."""
    return {name: _rounded(value) for name, value in asdict(report).items()}


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _rounded(v) for name, v in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) else value


def main(words: Sequence[str] | None = None) -> None:
    """Print one JSON line for each number of slots and policy."""
    a = _parser().parse_args(words)
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
