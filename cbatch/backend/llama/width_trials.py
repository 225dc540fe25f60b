"""Which decoding steps are faster with pad rows: found out by steps of each number of rows, as they come.

Kernels of llama.cpp for a CPU take rows by fours and more in one pass over the weights, and the rest in others.
Source: ggml/src/ggml-cpu/llamafile/sgemm.cpp, tinyBLAS_Q0; docs/performance.md, "Pad rows".
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from cbatch.backend.llama.pad_rows import ANY_SHAPE, N_GROUP, PAD_TOKEN, PadRows
from cbatch.core.plan import Chunk, Slot

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cbatch.backend.llama.context_memory import ContextMemory
    from cbatch.core.plan import StepResult

_N_ROWS_MIN = 5
"""Rows of a step that may be filled: up to 4 are a part of one pass."""

_N_TRIED = 8
"""Runs of a trial, with pad rows and without by turns."""

_N_STEPS = 2
"""Steps of such a run."""

_N_SETTLED = 300
"""Runs after a trial before the next one: histories grow, and the machine may be shared."""

_WORTH = 0.95
"""What the fastest step with pad rows must take of the fastest one without."""


class WidthTrials(PadRows):
    """Chooses pad rows for steps in which every sequence decodes one token."""

    def __init__(self, memory: ContextMemory, n_slots: int, n_window: int) -> None:
        """Take a memory whose slots have cells of their own that can be trimmed, and its sizes."""
        super().__init__(ANY_SHAPE, memory, n_slots)
        self._n_slots, self._n_window = n_slots, n_window
        self._trials: dict[int, _Trial] = {}

    def most_steps(self, rows: Sequence[Chunk], n_steps: int) -> int:
        """Return how many of `n_steps` steps a run has at most: few in a trial."""
        trial = self._trial(rows)
        return n_steps if trial is None or trial.is_settled else min(n_steps, _N_STEPS)

    def _trial(self, rows: Sequence[Chunk]) -> _Trial | None:
        """Return the trial of this number of rows; None where a step has no pad rows."""
        n_pads = _n_pads(rows)
        if not n_pads or len(rows) + n_pads > self._n_slots:
            return None
        return self._trials.setdefault(len(rows), _Trial())

    def beside(self, rows: Sequence[Chunk], n_steps: int) -> Sequence[Chunk]:
        """Return the pad rows of a run; none that would not fit behind the cells of idle slots."""
        trial, n_pads = self._trial(rows), _n_pads(rows)
        if trial is None or not trial.wants_pads:
            return ()
        low, high = rows[0].slot, rows[-1].slot + 1
        n_above = min(n_pads, self._n_slots - high)
        idle = (*range(low - n_pads + n_above, low), *range(high, high + n_above))
        held = ((Slot(i), self._memory.n_held(Slot(i))) for i in idle)
        pads = [Chunk(slot, n, (PAD_TOKEN,), has_output=False) for slot, n in held]
        return pads if all(c.start + n_steps <= self._n_window for c in pads) else ()

    def note(self, rows: Sequence[Chunk], pads: Sequence[Chunk], result: StepResult) -> None:
        """Learn from a run what its steps took."""
        trial = self._trial(rows)
        if trial is not None and result.n_steps and not result.code:
            trial.note(result.decode_s / result.n_steps, is_padded=bool(pads))


def _n_pads(rows: Sequence[Chunk]) -> int:
    """Return the pad rows that fill a step; 0 for one with prompts, or gaps, which cost a run of the graph each."""
    n_rows = len(rows)
    n_pads = -n_rows % N_GROUP
    if n_pads == 0 or n_rows < _N_ROWS_MIN or rows[-1].slot - rows[0].slot >= n_rows:
        return 0
    return 0 if any(len(c.tokens) > 1 for c in rows) else n_pads


class _Trial:
    """What steps of one number of rows took."""

    def __init__(self) -> None:
        self.wants_pads = False
        """Whether the next run is to have pad rows."""
        self._begin()

    def _begin(self) -> None:
        self._n_left = _N_TRIED
        self._least_s = [inf, inf]  # without pad rows, with them

    @property
    def is_settled(self) -> bool:
        """Whether it is over."""
        return self._n_left <= 0

    def note(self, step_s: float, *, is_padded: bool) -> None:
        """Take the seconds of a step; runs of a trial take turns, then the faster kind stays for long."""
        self._n_left -= 1
        if self._n_left < 0:
            if self._n_left < -_N_SETTLED:
                self._begin()
            return
        self._least_s[is_padded] = min(self._least_s[is_padded], step_s)
        plain_s, padded_s = self._least_s
        self.wants_pads = not is_padded if self._n_left else padded_s <= _WORTH * plain_s
