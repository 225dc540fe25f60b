"""What a long queue costs a step: `python -m cbatch.bench.experiments.queues`.

Plans and applies steps on `FakeBackend` with few and with many requests in the queue, in real microseconds. Every run
is one step, so a figure is the whole cost of deciding it: `decode` steps admit nothing (except where turns end), in
`admission` steps one request ends and the next one enters. Submitting and cancelling are timed on the way.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import count, product
from typing import Literal, get_args

from cbatch.backend.fake import StepCost
from cbatch.bench.experiments.fake_server import FakeServer
from cbatch.bench.experiments.rounds import parser
from cbatch.bench.experiments.traffic import Arrival
from cbatch.bench.harness import emit, percentile
from cbatch.core.driver import SequenceDriver
from cbatch.engine_options import Policy, ScheduleOptions

Case = Literal["decode", "admission"]

CASES: tuple[Case, Case] = ("decode", "admission")
POLICIES: tuple[str, ...] = get_args(Policy)
N_WINDOW = 4096
"""Room for decoding on through all steps of a measurement."""
N_BATCH = 2048


@dataclass(frozen=True, slots=True)
class QueueFigures:
    """What one queue cost; times of steps are medians."""

    policy: str
    case: Case
    slots: int
    queued: int
    plan_us: float
    plan_p99_us: float
    apply_us: float
    submit_us: float
    """A request, of all that were submitted at once."""
    submit_one_us: float
    """A request that comes alone, after all others."""
    cancel_us: float
    """A request, of all that were cancelled one after another."""


def measure(
    options: ScheduleOptions, case: Case, n_slots: int, n_queued: int, n_steps: int
) -> QueueFigures:
    """Return what `n_steps` steps take with `n_queued` requests in the queue all the time."""
    queue = _Queue(options, case, n_slots)
    submit_s = queue.fill(n_queued)
    times, submit_one_s = list[tuple[float, float]](), list[float]()
    for _ in range(n_steps):
        queue.server.step()
        times.append(queue.server.step_s)
        submit_one_s.append(queue.submit_one(n_queued))
    plan_s, apply_s = zip(*times, strict=True)
    n_left = len(queue.batcher.in_flight)
    return QueueFigures(
        policy=options.policy,
        case=case,
        slots=n_slots,
        queued=n_queued,
        plan_us=_us(statistics.median(plan_s)),
        plan_p99_us=_us(percentile(plan_s, 0.99)),
        apply_us=_us(statistics.median(apply_s)),
        submit_us=_us(submit_s / n_queued),
        submit_one_us=_us(statistics.median(submit_one_s)),
        cancel_us=_us(queue.cancel_all() / n_left),
    )


class _Queue:
    """Full slots and a queue, of mixed lengths and priorities.

    Where one ends in each step, the first requests end one after another, and every later one takes a step a slot.
    """

    def __init__(self, options: ScheduleOptions, case: Case, n_slots: int) -> None:
        self.server = FakeServer(n_slots, N_WINDOW, N_BATCH, options, StepCost(0.01))
        self.server.is_stepwise = True
        self.batcher = self.server.batcher
        self._case: Case = case
        self._n_slots = n_slots
        self._numbers = count()

    def fill(self, n_queued: int) -> float:
        """Fill the slots, then the queue; return the seconds that the queue took."""
        self.batcher.submit([self._driver(1 + i, is_first=True) for i in range(self._n_slots)])
        self.server.step()
        drivers = [self._driver(self._n_slots) for _ in range(n_queued)]
        start = time.perf_counter()
        self.batcher.submit(drivers)
        return time.perf_counter() - start

    def submit_one(self, n_queued: int) -> float:
        """Queue another, and take it back where the queue is full already; return the seconds without that."""
        driver = self._driver(self._n_slots)
        start = time.perf_counter()
        self.batcher.submit([driver])
        seconds = time.perf_counter() - start
        if self.batcher.occupancy().n_waiting > n_queued:
            self.batcher.cancel(driver.request.id, self.server.now)
        self.batcher.take_ended()
        return seconds

    def cancel_all(self) -> float:
        """Cancel all requests as an engine does; return the seconds it took."""
        batcher, now = self.batcher, self.server.now
        start = time.perf_counter()
        for id in list(batcher.in_flight):
            batcher.cancel(id, now)
        return time.perf_counter() - start

    def _driver(self, n_output: int, *, is_first: bool = False) -> SequenceDriver:
        i = next(self._numbers)
        n_output = n_output if self._case == "admission" else N_WINDOW // 2
        n_prompt, priority = (1, 0) if is_first else (1 + i * 37 % 64, i % 7 - 3)
        return self.server.driver(str(i), Arrival(self.server.now, n_prompt, n_output, priority))


def _us(seconds: float) -> float:
    return round(1e6 * seconds, 2)


def main(words: Sequence[str] | None = None) -> None:
    """Print one JSON line for each policy, case, number of slots and length of the queue."""
    asked = parser(__doc__, model=None)
    asked.add_argument("--policy", nargs="+", default=POLICIES)
    asked.add_argument("--slots", type=int, nargs="+", default=[16, 32], help="sequences at once")
    asked.add_argument("--queued", type=int, nargs="+", default=[10, 1_000, 100_000])
    asked.add_argument("--steps", type=int, default=500, help="steps of each line, up to 2,000")
    a = asked.parse_args(words)
    for policy, n_slots, case, n_queued in product(a.policy, a.slots, CASES, a.queued):
        figures = measure(ScheduleOptions(policy=policy), case, n_slots, n_queued, a.steps)
        emit(**asdict(figures))


if __name__ == "__main__":
    main()
