"""How many threads compute a decoding step: fewer than all where that is faster, which is learned while running.

Threads wait for each other after each operation of a graph. Where a step has few rows of a small model, or a machine
has many cores, these waits take longer than further threads save. What is best differs with the model, the rows and the
length of histories, so it is tried: a short series of steps with the number of threads that is best so far, then one
with half or twice as many.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

    from cbatch.core.plan import StepPlan, StepResult

N_PAIRS = 4
"""Pairs of series that all must show a gain."""

N_STEPS_TRIED, LEAST_S = 8, 0.005
"""A series has at least so many steps, and takes at least so many seconds, beside which an interrupt is short."""

MOST_OF_BEST = 0.95
"""A gain: the second series of a pair takes at most this much of the first for a row. Less is noise."""

MOST_LOST = 0.01
"""Trials cost at most about this share of the seconds of all steps: so long they wait."""

N_CELLS_ALIKE = 8
"""Histories of up to 2 to this power cells are one kind, and so are all between two powers above."""


class StepKind(NamedTuple):
    """Steps of decoding rows for which the same number of threads is best: magnitudes of what they compute."""

    rows: int
    cells: int


PROMPTS = StepKind(0, 0)
"""Steps with prompts, which all threads compute."""


@dataclass(eq=False, slots=True)
class _ThreadSeries:
    n_steps: int = 0
    n_rows: int = 0
    seconds: float = 0.0

    @property
    def row_s(self) -> float:
        return self.seconds / self.n_rows

    @property
    def n_missing(self) -> int:
        """Steps that the series needs to be whole; 0 if it is."""
        if self.n_steps < N_STEPS_TRIED:
            return N_STEPS_TRIED - self.n_steps
        missing_s = max(0.0, LEAST_S - self.seconds)
        return math.ceil(missing_s * self.n_steps / max(self.seconds, 1e-9))

    def add(self, plan: StepPlan, result: StepResult) -> None:
        self.n_steps += result.n_steps
        self.n_rows += result.n_steps * len(plan.spans) + sum(result.n_drafts)
        self.seconds += result.decode_s + result.sample_s


@dataclass(eq=False, slots=True)
class _Best:
    """The number of threads that is best for a kind of steps, as far as is known, and the trial of another."""

    n_threads: int
    tries_more: bool = False
    due_s: float = 0.0
    """No trial begins before all steps have taken so many seconds."""
    step_s: float = 0.0
    """Seconds of a step in the last run; 0 before the first."""
    n_pairs: int = 0
    """Pairs of series in the trial so far, all of which showed a gain."""
    before: _ThreadSeries = field(default_factory=_ThreadSeries)
    after: _ThreadSeries = field(default_factory=_ThreadSeries)

    def other(self, n_most: int) -> int:
        """Return the number of threads that is tried: half or twice as many, where there are."""
        if self.n_threads == n_most or (self.n_threads > 1 and not self.tries_more):
            return self.n_threads // 2
        return min(2 * self.n_threads, n_most)

    def begin_pair(self, n_pairs: int) -> None:
        self.n_pairs, self.before, self.after = n_pairs, _ThreadSeries(), _ThreadSeries()


class RowThreads:
    """Chooses the threads of the decoding steps of one backend, while no other program takes cores."""

    def __init__(self, n_most: int) -> None:
        """Take the most threads, at least two."""
        self._n_most = n_most
        self._best: dict[StepKind, _Best] = {}
        self._n_drafts: dict[int, int] = {}
        """Draft tokens of a step in the last run, by the number of rows."""
        self._tried: StepKind | None = None
        """What is tried now; the trial of another kind ends it."""
        self._spent_s = self._lost_s = 0.0
        """Seconds of all steps, and what trials have cost of them."""

    def n_best(self, plan: StepPlan) -> int:
        """Return how many threads are best for a plan, as far as is known: all of them for prompts."""
        best = self._best.get(self._expected(plan))
        return self._n_most if best is None else best.n_threads

    def run(self, plan: StepPlan, compute: Callable[[StepPlan, int], StepResult]) -> StepResult:
        """Compute a plan with the threads that are best, or with others in a trial."""
        kind = self._expected(plan)
        best = self._best.setdefault(kind, _Best(self._n_most))
        is_trial = kind != PROMPTS and self._is_tried(kind, best)
        is_other = is_trial and not best.before.n_missing
        series = best.after if is_other else best.before
        n_threads = best.other(self._n_most) if is_other else best.n_threads
        if is_trial:
            plan = replace(plan, n_steps=min(plan.n_steps, series.n_missing))
        if is_other and not series.n_steps:
            self._lost_s += best.before.seconds  # at most, until the series is whole
        result = compute(plan, n_threads)
        self._spent_s += result.decode_s + result.sample_s
        if not result.n_steps or kind == PROMPTS:
            return result
        n_drafts = round(sum(result.n_drafts) / result.n_steps)
        self._n_drafts[len(plan.spans)] = n_drafts
        if _magnitude(plan, n_drafts) != kind.rows:
            self._tried = None if is_trial else self._tried
        elif is_trial:
            series.add(plan, result)
            if not best.after.n_missing:
                self._judge(best)
        else:
            best.step_s = (result.decode_s + result.sample_s) / result.n_steps
        return result

    def end_trial(self) -> None:
        """Give up what is tried, because another program has taken a core meanwhile."""
        self._tried = None

    def _expected(self, plan: StepPlan) -> StepKind:
        """Return the kind of a plan's steps, with as many draft tokens as the last run with so many rows had."""
        return self._kind(plan, self._n_drafts.get(len(plan.spans), 0) if plan.n_drafts else 0)

    def _kind(self, plan: StepPlan, n_drafts: int) -> StepKind:
        n_cells = 0
        for span in plan.spans:
            if len(span.inputs) > 1:
                return PROMPTS
            n_cells = max(n_cells, span.start)
        return StepKind(_magnitude(plan, n_drafts), max(n_cells.bit_length(), N_CELLS_ALIKE))

    def _is_tried(self, kind: StepKind, best: _Best) -> bool:
        """Whether a kind is tried now. A trial begins where it may cost a series with the best threads so far."""
        if kind == self._tried:
            return True
        cost_s = max(LEAST_S, N_STEPS_TRIED * best.step_s)
        is_due = best.step_s > 0 and self._spent_s >= best.due_s
        if not is_due or self._lost_s + cost_s > MOST_LOST * self._spent_s:
            return False
        self._tried = kind
        best.begin_pair(0)
        return True

    def _judge(self, best: _Best) -> None:
        """Go on after a whole pair: one without a gain ends a trial, and the next waits twice as long."""
        share = best.after.row_s / best.before.row_s
        self._lost_s += max(0.0, 1 - 1 / share) * best.after.seconds - best.before.seconds
        has_gain = share <= MOST_OF_BEST
        best.begin_pair(best.n_pairs + 1)
        if has_gain and best.n_pairs < N_PAIRS:
            return
        self._tried = None
        if has_gain:
            best.n_threads = best.other(self._n_most)
        else:
            best.tries_more, best.due_s = not best.tries_more, 2 * self._spent_s


def _magnitude(plan: StepPlan, n_drafts: int) -> int:
    """Return the magnitude of the rows of a plan's steps with so many draft tokens."""
    return (len(plan.spans) + n_drafts).bit_length()
