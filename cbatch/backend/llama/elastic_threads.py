"""How many threads compute: fewer while other programs take their cores, and all again as soon as cores are free.

Threads wait for each other thousands of times a step, so a step is as slow as the thread that gets the least of a core.
The owner thread's own CPU time tells: what it lacks of a step's time it was without a core, or waited for a thread that
was. Whether fewer threads are faster then, or all of them again, only a trial can tell: a short run with another
number, next to runs of the same shape.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from cbatch.core.plan import StepPlan, StepResult

WINDOW_S = 0.1
"""Seconds of computing after which it is decided whether another number is tried."""

TRIAL_S = 0.05
"""Seconds of computing with another number. Several slices that a system gives programs in turn."""

LONGEST_TRIAL = 4
"""A trial ends without a result after so many times its seconds, where no step had the shape of one before."""

WAITED = 0.2
"""Share of a step's time that the owner thread may be without a core.

Source: `cbatch.bench.experiments.beside_loops`.
"""

MOST_OF_OTHER = 0.95
"""A gain: a trial's steps take at most this much of those before it. Less is noise."""

UP_WAIT_S, DOWN_WAIT_S = 0.5, 1.0
"""Shortest seconds between two trials of more threads, and of fewer."""

WAIT_FOR_LOST = 20
"""A trial without a gain is repeated no sooner than after so many times the seconds that it cost."""

MOST_DOUBLED = 3
"""So often the wait for a trial of fewer threads doubles while they bring nothing."""


@dataclass(eq=False, slots=True)
class _Window:
    """What steps with one number of threads took."""

    n_threads: int
    spent_s: float = 0.0
    waited_s: float = 0.0
    paces: dict[tuple[int, int], tuple[float, int]] = field(default_factory=dict)
    """Seconds and tokens by the shape of steps: their chunks, and the magnitude of the prompt tokens."""

    def learn(self, plan: StepPlan, result: StepResult, cpu_s: float) -> None:
        spent_s = result.decode_s + result.sample_s
        self.spent_s += spent_s
        self.waited_s += max(0.0, spent_s - cpu_s)
        n_chunks = len(plan.spans)
        n_tokens = sum([len(c.inputs) for c in plan.spans])
        self._add((n_chunks, (n_tokens - n_chunks).bit_length()), result.first_s, n_tokens)
        if result.n_steps > 1:
            self._add((n_chunks, 0), result.later_s, n_chunks * (result.n_steps - 1))

    def _add(self, shape: tuple[int, int], seconds: float, n_tokens: int) -> None:
        before_s, n_before = self.paces.get(shape, (0.0, 0))
        self.paces[shape] = before_s + seconds, n_before + n_tokens

    def share_of(self, other: _Window) -> float | None:
        """Return the time of this window's steps over that of the other's, by common shapes; None without one."""
        own_s = others_s = 0.0
        for shape, (seconds, n_tokens) in self.paces.items():
            if shape in other.paces:
                before_s, n_before = other.paces[shape]
                own_s += seconds
                others_s += before_s / n_before * n_tokens
        return own_s / others_s if others_s else None


class ElasticThreads:
    """Chooses the number of threads of each run of one backend."""

    def __init__(self, n_most: int, cpu_clock: Callable[[], float] = time.thread_time) -> None:
        """Take the most threads, and the clock of the calling thread's CPU time."""
        self._n_most, self._cpu_clock = n_most, cpu_clock
        self._n = n_most
        self._window = _Window(n_most)
        self._trial: _Window | None = None
        self._up_wait_s = self._down_wait_s = 0.0
        """Seconds of computing before the next trial."""
        self._n_failed_ups = self._n_failed_downs = 0

    def run(self, plan: StepPlan, compute: Callable[[StepPlan, int], StepResult]) -> StepResult:
        """Compute a plan with the number of threads that is best now, or that is tried."""
        window = self._window
        if self._trial is not None:
            window = self._trial
            plan = replace(plan, slice_s=min(plan.slice_s or TRIAL_S, TRIAL_S))
        begun_s = self._cpu_clock()
        result = compute(plan, window.n_threads)
        cpu_s = self._cpu_clock() - begun_s
        if result.code or not result.n_steps:
            return result
        window.learn(plan, result, cpu_s)
        if window is self._trial:
            self._judge(window)
        elif window.spent_s >= WINDOW_S:
            self._decide(window)
        return result

    def _decide(self, window: _Window) -> None:
        """Begin a trial where one may bring something, else a new window."""
        self._up_wait_s -= window.spent_s
        self._down_wait_s -= window.spent_s
        n_tried = self._n
        if window.n_threads < self._n_most and self._up_wait_s <= 0:
            n_tried = self._n + 1 if self._n_failed_ups % 2 else self._n_most
        elif window.waited_s > WAITED * window.spent_s and self._down_wait_s <= 0:
            n_tried = max(1, self._n // 2 if self._n_failed_downs % 2 else self._n - 1)
        if n_tried == self._n:
            self._window = _Window(self._n)
        else:
            self._trial = _Window(n_tried)

    def _judge(self, trial: _Window) -> None:
        """Take over the trial's number if its steps are faster; go on if it is too early to say."""
        share = trial.share_of(self._window)
        if trial.spent_s < (TRIAL_S if share else LONGEST_TRIAL * TRIAL_S):
            return
        is_up = trial.n_threads > self._n
        if share is not None and share <= MOST_OF_OTHER:
            self._n = trial.n_threads
            self._n_failed_ups = self._n_failed_downs = 0
            self._up_wait_s = UP_WAIT_S if not is_up else 0.0
            self._down_wait_s = 0.0
        else:
            lost_s = trial.spent_s * (1 - 1 / share) if share and share > 1 else 0.0
            if is_up:
                self._n_failed_ups += 1
                self._up_wait_s = max(UP_WAIT_S, WAIT_FOR_LOST * lost_s)
            else:
                wait_s = max(DOWN_WAIT_S, WAIT_FOR_LOST * lost_s)
                self._down_wait_s = wait_s * 2 ** min(self._n_failed_downs, MOST_DOUBLED)
                self._n_failed_downs += 1
        self._trial, self._window = None, _Window(self._n)
