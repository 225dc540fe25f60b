"""Which decoding steps are faster with pad rows: found out by the steps themselves, for each number of rows.

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

_N_TRIED = 6
"""Runs of a trial, with pad rows and without by turns."""

_N_SETTLED = 1000
"""Runs after a trial before the next one: histories grow, and the machine may be shared."""

_WORTH = 0.98
"""What the fastest step with pad rows must take of the fastest one without."""


class WidthTrials(PadRows):
    """Chooses pad rows for steps in which every sequence decodes one token."""

    def __init__(self, memory: ContextMemory, n_slots: int, n_window: int) -> None:
        """Take a memory whose slots have cells of their own that can be trimmed, and its sizes."""
        super().__init__(ANY_SHAPE, memory, n_slots)
        self._n_slots, self._n_window = n_slots, n_window
        self._trials: dict[int, _Trial] = {}

    def beside(self, rows: Sequence[Chunk], n_steps: int) -> Sequence[Chunk]:
        """Return the pad rows of a run; none that would not fit behind the cells of idle slots."""
        n_pads = _n_pads(rows)
        if not n_pads or len(rows) + n_pads > self._n_slots:
            return ()
        trial = self._trials.setdefault(len(rows), _Trial())
        if not trial.wants_pads:
            return ()
        low, high = rows[0].slot, rows[-1].slot + 1
        n_above = min(n_pads, self._n_slots - high)
        idle = (*range(low - n_pads + n_above, low), *range(high, high + n_above))
        held = ((Slot(i), self._memory.n_held(Slot(i))) for i in idle)
        pads = [Chunk(slot, n, (PAD_TOKEN,), has_output=False) for slot, n in held]
        return pads if all(c.start + n_steps <= self._n_window for c in pads) else ()

    def note(self, rows: Sequence[Chunk], pads: Sequence[Chunk], result: StepResult) -> None:
        """Learn from a run what its steps took."""
        trial = self._trials.get(len(rows))
        if trial is not None and _n_pads(rows) and result.n_steps and not result.code:
            trial.note(result.decode_s / result.n_steps, is_padded=bool(pads))


def _n_pads(rows: Sequence[Chunk]) -> int:
    """Return the pad rows that fill a step; 0 for one with prompts, or gaps, which cost a run of the graph each."""
    n_pads = -len(rows) % N_GROUP
    is_dense = rows[-1].slot - rows[0].slot == len(rows) - 1
    if len(rows) < _N_ROWS_MIN or not is_dense or any(len(c.tokens) > 1 for c in rows):
        return 0
    return n_pads


class _Trial:
    """What steps of one number of rows took."""

    def __init__(self) -> None:
        self.wants_pads = False
        """Whether the next run is to have pad rows."""
        self._begin()

    def _begin(self) -> None:
        self._n_left = _N_TRIED
        self._least_s = [inf, inf]  # without pad rows, with them

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
