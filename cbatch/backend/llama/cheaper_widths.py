"""Decoding steps of a few rows more, where that is faster: learned while running, for each number of rows.

Kernels for repacked and tiled weights take rows by fours, and those that are left over one by one: on some machines
five rows take longer than eight. So rows of idle slots fill a step up to the next multiple of four. That is only for
weights whose products have the same bits for any number of rows from two on.
Source: ggml/src/ggml-cpu/repack.cpp, forward_mul_mat; docs/understand/exactness.md.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cbatch.backend.llama.pad_rows import N_GROUP, PAD_TOKEN
from cbatch.core.plan import Slot, StepPlan, StepResult
from cbatch.core.span import Span

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cbatch.backend.llama.context_memory import ContextMemory

N_PAIRS = 4
"""Pairs of series, without and with pad rows, that all must show a gain."""

N_STEPS_TRIED = 8
"""Steps of a series."""

MOST_OF_NATURAL = 0.97
"""A gain: a series with pad rows takes at most this much of the series before it, without. Less is noise.

What disturbs one series leaves steps as they are, and what slows a machine for longer is in both.
"""

MOST_LOST = 0.005
"""Trials cost at most about this share of all steps: so long they wait, and longest after those without a gain."""

N_LOST = N_STEPS_TRIED / 2
"""Steps that a series with pad rows may cost besides: about the most that was measured."""

N_CELLS_ALIKE = 8
"""Histories of up to 2 to this power cells are one class, as attention looks at no fewer; others differ by twice."""


@dataclass(eq=False, slots=True)
class _Series:
    n_steps: int = 0
    seconds: float = 0.0

    @property
    def is_whole(self) -> bool:
        return self.n_steps >= N_STEPS_TRIED

    @property
    def step_s(self) -> float:
        return self.seconds / self.n_steps


@dataclass(eq=False, slots=True)
class _PairTrial:
    n_pairs: int = 0
    natural: _Series = field(default_factory=_Series)
    padded: _Series = field(default_factory=_Series)


class CheaperWidths:
    """Adds pad rows to decoding steps of one context where it found steps with them to be faster."""

    def __init__(
        self,
        memory: ContextMemory,
        *,
        n_slots: int,
        n_most: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Take the memory whose cells are counted, its slots, and the most rows that are one run of the graph."""
        self._memory, self._n_slots, self._clock = memory, n_slots, clock
        self._n_most = min(n_slots, n_most)
        self._is_cheaper: dict[tuple[int, int], bool] = {}
        """What is settled, for the context's life: by the rows of a step, and the class of their longest history."""
        self._key, self._trial = (0, 0), _PairTrial()
        """What is tried now; steps of other kinds in between begin it anew."""
        self._n_steps = 0
        self._n_lost = 0.0
        """All steps, and what trials have cost in such steps."""

    def run(
        self,
        plan: StepPlan,
        compute: Callable[[Sequence[Span], Sequence[Span], int, float, int], StepResult],
    ) -> StepResult:
        """Compute a plan's chunks with the pad rows that make it faster, or that show whether they do.

        Args:
            plan: its chunks ascend by slot.
            compute: computes chunks beside pad rows, whose cells it removes, in so many steps within so many seconds,
                with so many draft tokens behind a row where there are no pad rows.
        """
        rows = plan.spans
        n_longest = max(c.start for c in rows)
        key = len(rows), max(n_longest.bit_length(), N_CELLS_ALIKE)
        is_cheaper = self._is_cheaper.get(key)
        start_s = self._clock()
        pads: Sequence[Span] = ()
        if is_cheaper or (is_cheaper is None and self._may_try(key)):
            pads = self._beside(plan, n_longest)
        if is_cheaper or not pads:
            result = compute(rows, pads, plan.n_steps, plan.slice_s, plan.n_drafts)
            self._n_steps += result.n_steps
            return result
        if key != self._key:
            self._key, self._trial = key, _PairTrial()
        trial = self._trial
        is_padded = trial.natural.is_whole
        series = trial.padded if is_padded else trial.natural
        if is_padded and not series.n_steps:
            self._n_lost += N_LOST
        n_steps = min(plan.n_steps, N_STEPS_TRIED - series.n_steps)
        result = compute(rows, pads if is_padded else (), n_steps, plan.slice_s, 0)
        self._n_steps += result.n_steps
        if not result.code:
            series.n_steps += result.n_steps
            series.seconds += self._clock() - start_s
        if trial.padded.is_whole:
            self._judge(trial)
        return result

    def _may_try(self, key: tuple[int, int]) -> bool:
        """Whether a series with pad rows has begun, or may cost what it may cost."""
        is_padded = key == self._key and self._trial.padded.n_steps > 0
        return is_padded or self._n_lost + N_LOST <= MOST_LOST * self._n_steps

    def _judge(self, trial: _PairTrial) -> None:
        """Note what a whole pair shows: one without a gain ends a trial for good."""
        share = trial.padded.step_s / trial.natural.step_s
        self._n_lost += max(0.0, share - 1) * trial.padded.n_steps - N_LOST
        has_gain = share <= MOST_OF_NATURAL
        self._trial = _PairTrial(trial.n_pairs + 1)
        if not has_gain or self._trial.n_pairs == N_PAIRS:
            self._is_cheaper[self._key] = has_gain
            self._key = (0, 0)

    def _beside(self, plan: StepPlan, n_longest: int) -> Sequence[Span]:
        """Return the pad rows of a step whose rows are in consecutive slots, in idle slots beside them.

        None where there is no room. A row alone has kernels of its own.
        """
        rows = plan.spans
        low, high = rows[0].slot, rows[-1].slot + 1
        width = -(-len(rows) // N_GROUP) * N_GROUP
        if not 1 < len(rows) == high - low < width <= self._n_most or plan.adapters:
            return ()
        if any(len(c.inputs) > 1 or not c.has_output for c in rows):
            return ()
        for start in range(min(low, self._n_slots - width), max(0, high - width) - 1, -1):
            slots = [Slot(i) for i in (*range(start, low), *range(high, start + width))]
            if all(self._memory.has_pad_room(slot, plan.n_steps, n_longest) for slot in slots):
                places = ((slot, self._memory.place_pad(slot)) for slot in slots)
                return [Span(slot, at, (PAD_TOKEN,), has_output=False) for slot, at in places]
        return ()
