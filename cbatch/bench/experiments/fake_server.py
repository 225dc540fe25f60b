"""The core on a fake backend in virtual time: what simulations of traffic and of long queues drive."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING

from cbatch.backend.fake import FakeBackend
from cbatch.core.batcher import MultiRequestBatcher
from cbatch.core.books import KvLedger
from cbatch.core.driver import SequenceDriver
from cbatch.core.request import Request
from cbatch.core.scheduler import ContinuousBatchScheduler, Plan
from cbatch.messages import BatchPrompt
from cbatch.options import GREEDY, RunOptions
from cbatch.runtime.prompts import PromptTokenizer
from cbatch.runtime.wants import SequenceWants
from cbatch.stats import EngineStats

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cbatch.bench.experiments.traffic import Arrival
    from cbatch.core.plan import KvCapabilities, StepResult
    from cbatch.engine_options import ScheduleOptions

    Cost = Callable[[int, int], float]


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
        ledger = KvLedger(n_slots, n_window, memory)
        tokenize = PromptTokenizer(self._tokenize, n_window).tokenize
        self.batcher = MultiRequestBatcher(ledger, SequenceWants(tokenize), options)
        self.scheduler = ContinuousBatchScheduler(
            self.batcher, n_batch, self.stats, options, memory=memory
        )
        self.is_stepwise = False
        """Whether every run is one step."""
        self.next_s = math.inf
        """When the next request arrives: if no other waits, it ends the run in flight, as an engine's `run` does."""
        self.step_s = (0.0, 0.0)
        """Real seconds that planning and applying the last step took."""
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
        driver.reply.is_watched = is_watched
        return driver

    def step(self) -> bool:
        """Plan, run and apply once; False where there was nothing to compute."""
        start = time.perf_counter()
        self.scheduler.begin_step(self.now)
        plan = self.scheduler.plan(self.now)
        planned = time.perf_counter()
        if plan is None:
            return False
        result = self._run(plan)
        ran = time.perf_counter()
        self.scheduler.apply(plan, result, self.now)
        self.step_s = (planned - start, time.perf_counter() - ran)
        return True

    def _run(self, plan: Plan) -> StepResult:
        is_urgent = self.batcher.occupancy().n_waiting <= plan.slot_plan.n_entering
        self._run_end_s = self.next_s if is_urgent and self.next_s > self.now else math.inf
        if self.is_stepwise:
            self.backend.interrupt()
        result = self.backend.run(plan.step)
        self.backend.plans.clear()  # it keeps them all for tests
        return result

    def _cost(self, n_rows: int, n_prompt: int) -> float:
        seconds = self.cost(n_rows, n_prompt)
        if self.backend.now_s + seconds >= self._run_end_s:
            self.backend.interrupt()
        return seconds

    def _tokenize(self, prompt: BatchPrompt, _: RunOptions) -> Sequence[int]:
        return self._tokens[: int(prompt.prompt or 0)]


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
