"""How many threads compute: fewer while other programs have the cores, as many as there are once they do not.

A step ends when its last thread does, so a thread that waits for a core makes all of them wait. What a thread waited is
told by the kernel; whether fewer threads are faster is tried.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cbatch.core.plan import Chunk, StepResult

PERIOD_S = 0.25
"""Seconds of computing after which the threads are looked at, and that a trial takes."""

_DELAY = 0.15
"""The part of a period that the slowest thread waited for a core, from which fewer threads are tried."""

_IDLE = 0.6
"""Cores that nobody used in a period, from which one more thread is tried."""

_BETTER = 0.95
"""Part of its time that a step must at most take with another number of threads for that number to stay."""

_FIRST_WAIT_S = 1.0
_LONGEST_WAIT_S = 30.0
"""After a trial that gained nothing; twice as long after each further one."""

_N_SHAPES_MAX = 4096

_PROC = Path("/proc")


class Cores(NamedTuple):
    """What the kernel has counted, in seconds since some time."""

    idle_s: float
    """Of all cores that the process may use, together."""
    delays_s: dict[str, float]
    """What each thread of the process waited for a core though it could run, by its number."""


def count_cores() -> Cores | None:
    """Return what the kernel has counted; None where it does not tell.

    Source: Linux Documentation/filesystems/proc.rst (stat) and Documentation/scheduler/sched-stats.rst (schedstat).
    """
    try:
        mine = {f"cpu{i}" for i in os.sched_getaffinity(0)}
        ticks_s = 1 / os.sysconf("SC_CLK_TCK")
        lines = (line.split() for line in (_PROC / "stat").read_text().splitlines())
        idle = sum(int(words[4]) + int(words[5]) for words in lines if words and words[0] in mine)
        delays: dict[str, float] = {}
        for thread in os.listdir(_PROC / "self/task"):
            with suppress(OSError):  # it has ended
                said = (_PROC / "self/task" / thread / "schedstat").read_text().split()
                delays[thread] = int(said[1]) * 1e-9
    except (OSError, AttributeError, ValueError, IndexError):
        return None
    return Cores(idle * ticks_s, delays)


@dataclass(slots=True)
class _Trial:
    """Another number of threads, until the end of a period."""

    n_before: int
    slowness: float
    """Of steps with the number before."""


class ElasticThreads:
    """Decides after each run with how many threads the next one computes. Owner thread.

    Steps of one shape are compared with the fastest of that shape that was seen: their *slowness* is the time they take
    over that.
    """

    def __init__(
        self,
        n_most: int,
        use: Callable[[int], object],
        *,
        clock: Callable[[], float] = time.perf_counter,
        count: Callable[[], Cores | None] = count_cores,
    ) -> None:
        """Begin with `n_most` threads; `use` is called with another number before the run that is to have it."""
        self.n_most = self.n_threads = n_most
        self._use, self._clock, self._count = use, clock, count
        self._best_s: dict[object, float] = {}
        self._slowness: list[float] = []
        self._computed_s = 0.0
        self._trial: _Trial | None = None
        self._seen: tuple[float, Cores] | None = None
        self._may_try_s = 0.0
        self._wait_s = _FIRST_WAIT_S

    def note_run(self, chunks: Sequence[Chunk], result: StepResult) -> None:
        """Note the steps of a run, at least one."""
        n_rows = len(chunks)
        n_prompt = sum([len(c.tokens) for c in chunks]) - n_rows
        if n_prompt:  # about as many are compared
            self.note((n_rows, n_prompt.bit_length()), result.first_s, n_prompt)
        else:
            self.note(n_rows, result.first_s)
        if n_later := result.n_steps - 1:
            self.note(n_rows, result.later_s, n_later)

    def note(self, shape: object, seconds: float, n_units: int = 1) -> None:
        """Note what `n_units` of one shape, steps or tokens, took together."""
        if seconds <= 0:
            return
        unit_s = seconds / n_units
        best_s = self._best_s.get(shape)
        if best_s is None or unit_s < best_s:
            if len(self._best_s) >= _N_SHAPES_MAX:
                self._best_s.clear()
            self._best_s[shape] = best_s = unit_s
        self._slowness.append(unit_s / best_s)
        self._computed_s += seconds
        if self._computed_s >= PERIOD_S:
            slowness = median(self._slowness)
            self._slowness, self._computed_s = [], 0.0
            self._end_period(slowness)

    def _end_period(self, slowness: float) -> None:
        now, trial = self._clock(), self._trial
        if trial is not None:
            self._trial = None
            if slowness > _BETTER * trial.slowness:
                self._go_on_with(trial.n_before)
                self._may_try_s = now + self._wait_s
                self._wait_s = min(_LONGEST_WAIT_S, 2 * self._wait_s)
            else:
                self._wait_s = _FIRST_WAIT_S
                self._seen = None
            return
        if self.n_threads == self.n_most and slowness < 1 / _BETTER:
            self._seen = None  # nothing to gain: nothing is looked up
            return
        n = self._wanted(now)
        if n != self.n_threads and now >= self._may_try_s:
            self._trial = _Trial(self.n_threads, slowness)
            self._go_on_with(n)

    def _wanted(self, now: float) -> int:
        """Return the number of threads that may be faster, by what the kernel has counted since the last time."""
        before, cores = self._seen, self._count()
        self._seen = None if cores is None else (now, cores)
        if before is None or cores is None:
            return self.n_threads
        seconds = max(1e-6, now - before[0])
        delays = [s - before[1].delays_s.get(thread, s) for thread, s in cores.delays_s.items()]
        if max(delays, default=0.0) / seconds >= _DELAY:
            # a thread that shares its core with one other program waits for half of the time
            return max(1, self.n_threads - max(1, round(2 * sum(delays) / seconds)))
        n_idle = (cores.idle_s - before[1].idle_s) / seconds
        return min(self.n_most, self.n_threads + max(n_idle >= _IDLE, round(n_idle)))

    def _go_on_with(self, n: int) -> None:
        self.n_threads = n
        self._use(n)
