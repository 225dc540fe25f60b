"""A job or a service on many nodes in virtual time: `python -m cbatch.bench.experiments.simulate_nodes`.

A node has slots and a queue; what its steps take comes from a table that `step_costs` measured. A job's
batches are there at once, and nodes fetch them as Ray Data's actors do. Requests of a service come at random, and are
sent to a node as Ray Serve does. Not simulated: networks, storage, and nodes that share a machine.
"""

from __future__ import annotations

import math
import random
import time
from collections import OrderedDict, deque
from dataclasses import dataclass, field, fields
from heapq import heappop, heappush
from pathlib import Path
from typing import TYPE_CHECKING

from cbatch.bench.experiments.rounds import parser
from cbatch.bench.experiments.simulate import Spread, line
from cbatch.bench.experiments.step_costs import SMALL, StepTable
from cbatch.bench.harness import emit
from cbatch.stats import Percentiles
from cbatch.support.checks import check_float, check_int

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cbatch.bench.experiments.fake_server import Cost


@dataclass(frozen=True, slots=True)
class Fleet:
    """Nodes, and the work that they are given.

    Raises:
        ConfigError: a value out of range.
    """

    n_nodes: int = 1
    n_slots: int = 16
    cost: Cost = SMALL
    n_rows: int = 100_000
    rate: float = math.inf
    """Requests a second, one by one when all nodes are up; infinite for a job, whose batches are all there."""
    batch_size: int = 64
    """Rows of a job's batch, as in `cbatch.integrations.ray.answer`."""
    n_in_flight: int = 5
    """Batches that a node has: those at work, and one that waits."""
    mean_prompt: int = 64
    mean_output: int = 64
    n_common: int = 0
    """Prompt tokens before those, which all rows with the same prefix have in common."""
    n_prefixes: int = 1
    n_kept: int = 16
    """Prefixes that a node keeps: those used last."""
    has_affinity: bool = False
    """Whether requests are sent to a node of their prefix, unless it has more to do than others by twice its slots."""
    start_s: float = 30.0
    """Seconds until a node computes; some take up to twice as long."""
    slow_share: float = 0.0
    slow_factor: float = 2.0
    """How much longer the steps of this share of the nodes take."""
    deaths_per_hour: float = 0.0
    """Of each node. What it had is computed again, and it starts again."""
    driver_s: float = 0.0
    """Work of the driver for each batch or request, one after the other."""
    seed: int = 0

    def __post_init__(self) -> None:
        for f in fields(self):
            least = 0 if f.name in ("n_common", "n_kept", "seed") else 1
            if f.type == "int":
                check_int(f.name, getattr(self, f.name), least, 2**31 - 1)
            elif f.type == "float" and getattr(self, f.name) != math.inf:
                check_float(f.name, getattr(self, f.name), 0.0, 1e9)
        check_float("slow_share", self.slow_share, 0.0, 1.0)
        check_float("slow_factor", self.slow_factor, 1e-3, 1e3)

    @property
    def is_job(self) -> bool:
        """Whether all work is there at the beginning."""
        return self.rate == math.inf


@dataclass(frozen=True, slots=True)
class NodesReport:
    """What a simulation found; times and rates are virtual."""

    seconds: float
    rows_per_s: float
    output_tps: float
    """By the mean length of answers."""
    busy: float
    """Share of the slots that computed, from the beginning to the end of all work."""
    prefix_hits: float
    """Share of the batches or requests whose node had kept their prefix."""
    n_deaths: int
    n_again: int
    """Rows whose computation began more than once."""
    total_s: Spread
    """Of a batch or request, from its arrival to its end."""
    price_per_million: float
    """Of a million output tokens, by the price of a node for an hour; every node is paid from beginning to end."""
    real_s: float = field(compare=False)


@dataclass(eq=False, slots=True)
class _Task:
    at_s: float
    n_rows: int
    prefix: int
    n_to_start: int = 0
    n_to_end: int = 0


class _Node:
    """Slots whose rows go on together, a token a step, and the tasks that it was given."""

    def __init__(self, fleet: Fleet, factor: float, chance: random.Random) -> None:
        cost, n = fleet.cost, fleet.n_slots
        self.step_s = [factor * cost(width, 0) for width in range(n + 1)]
        self._prompt_s = [
            factor * (cost(n, n_tokens) - cost(n, 0))
            for n_tokens in (fleet.mean_prompt, fleet.n_common)
        ]
        self._fleet, self._chance = fleet, chance
        self.is_up = False
        self.change = 0
        """Counts changes: what was expected before one does not come."""
        self.n_lives = self.n_hits = self.n_taken = 0
        self.slot_s = self._now = 0.0
        self.clear()

    def clear(self) -> None:
        self.n_lives += 1
        self.tasks: dict[_Task, None] = {}
        self._queue = deque[_Task]()
        self._rows: list[tuple[float, int, _Task]] = []  # by the step after which they end
        self._kept = OrderedDict[int, None]()
        self._n_steps = self._n_begun = 0.0
        self._wait_s = 0.0  # prompt tokens, before the next step

    def take(self, task: _Task) -> None:
        """Queue a task, whose prefix is computed unless it is kept."""
        self._queue.append(task)
        self.n_taken += 1
        if task.prefix in self._kept:
            self.n_hits += 1
        else:
            self._wait_s += self._prompt_s[1]
        self._kept[task.prefix] = None
        self._kept.move_to_end(task.prefix)
        while len(self._kept) > self._fleet.n_kept:
            self._kept.popitem(last=False)

    def go_on(self, now: float) -> list[_Task]:
        """Compute until `now`, and fill the slots; return the tasks that have ended."""
        passed, rows = now - self._now, self._rows
        self._now = now
        ended = list[_Task]()
        if rows:
            self.slot_s += passed * len(rows)
            waited = min(passed, self._wait_s)
            self._wait_s -= waited
            self._n_steps += (passed - waited) / self.step_s[len(rows)]
        while rows and rows[0][0] <= self._n_steps + 1e-6:
            task = heappop(rows)[2]
            task.n_to_end -= 1
            if not task.n_to_end:
                ended.append(task)
                del self.tasks[task]
        while self._queue and len(rows) < self._fleet.n_slots:
            task = self._queue[0]
            n_output = 1 + int(self._chance.expovariate(1 / self._fleet.mean_output))
            self._n_begun += 1
            heappush(rows, (self._n_steps + n_output, int(self._n_begun), task))
            self._wait_s += self._prompt_s[0]
            task.n_to_start -= 1
            if not task.n_to_start:
                self._queue.popleft()
        self.change += 1
        return ended

    @property
    def next_s(self) -> float:
        if not self._rows:
            return math.inf
        n_left = max(0.0, self._rows[0][0] - self._n_steps)
        return self._now + self._wait_s + n_left * self.step_s[len(self._rows)]


class _NodesSimulation:
    def __init__(self, fleet: Fleet) -> None:
        self._fleet, self._chance = fleet, random.Random(fleet.seed)
        n_slow = round(fleet.slow_share * fleet.n_nodes)
        self.nodes = [
            _Node(fleet, fleet.slow_factor if i < n_slow else 1.0, self._chance)
            for i in range(fleet.n_nodes)
        ]
        self._events: list[tuple[float, int, Callable[[_Node, int], None], _Node, int]] = []
        self._n_events = 0
        self.now = self._driver_s = 0.0
        self.n_deaths = self.n_again = 0
        self.total_s = Percentiles()
        size = fleet.batch_size if fleet.is_job else 1
        self._n_tasks = self._n_open = -(-fleet.n_rows // size)
        self._size = size
        self._waiting = deque[_Task]()
        for node in self.nodes:
            self._at(fleet.start_s * self._chance.uniform(1, 2), self._up, node)

    def run(self) -> None:
        if self._fleet.is_job:
            self._waiting.extend(self._task(i) for i in range(self._n_tasks))
        else:
            self._at(2 * self._fleet.start_s, self._arrive, self.nodes[0])
        while self._n_open:
            self.now, _, action, node, change = heappop(self._events)
            action(node, change)

    def _at(
        self, when_s: float, action: Callable[[_Node, int], None], node: _Node, change: int = 0
    ) -> None:
        self._n_events += 1
        heappush(self._events, (when_s, self._n_events, action, node, change))

    def _task(self, i: int) -> _Task:
        n, n_prefixes = self._fleet.n_rows - i * self._size, self._fleet.n_prefixes
        sorted_prefix = i * n_prefixes // self._n_tasks
        prefix = sorted_prefix if self._fleet.is_job else self._chance.randrange(n_prefixes)
        return _Task(self.now, min(self._size, n), prefix)

    # ---- what happens ----

    def _up(self, node: _Node, _: int) -> None:
        node.is_up = True
        if self._fleet.deaths_per_hour:
            after_s = self._chance.expovariate(self._fleet.deaths_per_hour / 3600)
            self._at(self.now + after_s, self._die, node)
        self._go_on(node)

    def _die(self, node: _Node, _: int) -> None:
        node.go_on(self.now)
        lost = [*node.tasks]
        node.clear()
        node.is_up = False
        self.n_deaths += 1
        self._at(self.now + self._fleet.start_s * self._chance.uniform(1, 2), self._up, node)
        for task in reversed(lost):
            self.n_again += task.n_rows - task.n_to_start
            self._waiting.appendleft(task)
        self._spread()

    def _arrive(self, node: _Node, n_before: int) -> None:
        self._waiting.append(self._task(n_before))
        self._spread()
        if n_before + 1 < self._n_tasks:
            after_s = self._chance.expovariate(self._fleet.rate)
            self._at(self.now + after_s, self._arrive, node, n_before + 1)

    def _row(self, node: _Node, change: int) -> None:
        if change == node.change:
            self._go_on(node)

    def _go_on(self, node: _Node) -> None:
        """Compute until now, and give the node what there is for it."""
        for task in node.go_on(self.now):
            self._n_open -= 1
            self.total_s.add(self.now - task.at_s)
        if self._fleet.is_job:
            while self._waiting and len(node.tasks) < self._fleet.n_in_flight:
                self._give(node, self._waiting.popleft())
        else:
            self._spread()
        self._at(node.next_s, self._row, node, node.change)

    # ---- who gets what ----

    def _spread(self) -> None:
        if self._fleet.is_job:
            for node in self.nodes:
                if node.is_up and self._waiting and len(node.tasks) < self._fleet.n_in_flight:
                    self._go_on(node)
            return
        while self._waiting and (chosen := self._chosen(self._waiting[0])) is not None:
            self._give(chosen, self._waiting.popleft())

    def _chosen(self, task: _Task) -> _Node | None:
        """Return the node for a request: the less busy of two random ones, or that of its prefix."""
        up = self.nodes if self._fleet.n_nodes < 3 else self._chance.sample(self.nodes, 2)
        some = [node for node in up if node.is_up] or [n for n in self.nodes if n.is_up]
        least = min(some, key=lambda node: len(node.tasks), default=None)
        if least is None or not self._fleet.has_affinity:
            return least
        own = self.nodes[task.prefix % len(self.nodes)]
        is_busy = len(own.tasks) > len(least.tasks) + 2 * self._fleet.n_slots
        return own if own.is_up and not is_busy else least

    def _give(self, node: _Node, task: _Task) -> None:
        """Give a task to a node, when the driver comes to it."""
        task.n_to_start = task.n_to_end = task.n_rows
        node.tasks[task] = None
        self._driver_s = max(self._driver_s, self.now) + self._fleet.driver_s
        life = node.n_lives

        def come(node: _Node, _: int) -> None:
            if task in node.tasks and node.n_lives == life:
                node.take(task)
                self._go_on(node)

        self._at(self._driver_s, come, node)


def simulate_nodes(fleet: Fleet, hourly: float = 1.0) -> NodesReport:
    """Do the work of a fleet in virtual time; `hourly` is the price of a node's hour."""
    start = time.perf_counter()
    simulation = _NodesSimulation(fleet)
    simulation.run()
    nodes, seconds = simulation.nodes, simulation.now
    rows_per_s = fleet.n_rows / seconds
    return NodesReport(
        seconds=seconds,
        rows_per_s=rows_per_s,
        output_tps=rows_per_s * fleet.mean_output,
        busy=sum(node.slot_s for node in nodes) / (seconds * fleet.n_nodes * fleet.n_slots),
        prefix_hits=sum(n.n_hits for n in nodes) / max(1, sum(n.n_taken for n in nodes)),
        n_deaths=simulation.n_deaths,
        n_again=simulation.n_again,
        total_s=Spread.of(simulation.total_s),
        price_per_million=hourly * fleet.n_nodes / 3600 / (rows_per_s * fleet.mean_output) * 1e6,
        real_s=time.perf_counter() - start,
    )


def main(words: Sequence[str] | None = None) -> None:
    """Print one JSON line for each number of nodes."""
    asked, default = parser(__doc__, model=None), Fleet()
    asked.add_argument("--nodes", type=int, nargs="+", default=[1, 10, 100])
    asked.add_argument(
        "--costs",
        type=Path,
        help="output of step_costs (default: that of the model *small*)",
    )
    asked.add_argument("--price", type=float, default=1.0, help="of one node for an hour")
    for f in fields(Fleet):
        if f.name not in ("n_nodes", "cost"):
            value, flag = getattr(default, f.name), f.name.removeprefix("n_").removeprefix("has_")
            how = (
                {"action": "store_true"}
                if value is False
                else {"type": type(value), "default": value}
            )
            asked.add_argument(f"--{flag.replace('_', '-')}", dest=f.name, **how)
    a = asked.parse_args(words)
    given = {f.name: getattr(a, f.name) for f in fields(Fleet) if f.name not in ("n_nodes", "cost")}
    cost = StepTable.read(a.costs) if a.costs else SMALL
    for n_nodes in a.nodes:
        report = simulate_nodes(Fleet(n_nodes=n_nodes, cost=cost, **given), a.price)
        emit(nodes=n_nodes, **line(report))


if __name__ == "__main__":
    main()
