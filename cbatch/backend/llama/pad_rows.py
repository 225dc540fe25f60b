"""Pad rows: rows of idle slots that a step computes besides, so that its shape does not depend on company."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from cbatch.core.plan import Slot
from cbatch.core.span import PromptCuts, Span

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cbatch.backend.llama.context_memory import ContextMemory

PAD_TOKEN = 0
"""What a pad row computes: any token does."""

N_TILED = 8
"""Fewest rows that llama.cpp multiplies in tiles. Source: ggml/src/ggml-cpu/tiled/tiled.cpp, ggml_tiled_min_batch."""

N_GROUP = 4
"""Rows that llama.cpp's kernels for repacked weights take together, those that are left over one by one.
Source: ggml/src/ggml-cpu/repack.cpp, forward_mul_mat_one_chunk."""

CHUNK_ALIGNMENT = 64
"""Prompts are cut at multiples of this. Attention takes other kernels for fewer rows of one sequence.
Source: ggml/src/ggml-cpu/common.h, GGML_FA_TILE_Q; ggml-cpu/ops.cpp, use_tiled."""

N_CUT_LEAST = 4 * CHUNK_ALIGNMENT
"""Where chunks cannot have as many tokens, every chunk is as long as it can be."""

LAST_CHUNKS = (N_TILED, CHUNK_ALIGNMENT)
"""Fewest tokens of a last chunk that the probe tries."""


@dataclass(frozen=True, slots=True)
class RowShape:
    """The numbers of rows that a decoding step may have: multiples of `multiple` from `least` on; and prompts' cuts."""

    least: int = 1
    multiple: int = 1
    n_last: int = 0
    """Fewest tokens of a prompt's last chunk, before its last token, with which prompts may be cut at any multiple of
    `CHUNK_ALIGNMENT`; 0: each chunk is as long as it can be."""

    def width(self, n_rows: int) -> int:
        """Return the rows of a step in which `n_rows` sequences decode."""
        return max(self.least, -(-n_rows // self.multiple) * self.multiple)

    def cuts(self, n_most: int) -> PromptCuts:
        """Return where prompts are cut whose chunks may have up to `n_most` tokens."""
        if self.n_last and n_most >= N_CUT_LEAST:
            return PromptCuts(CHUNK_ALIGNMENT, n_most, self.n_last + 1, ends_in_row=True)
        return PromptCuts.every(n_most)

    @property
    def has_pads(self) -> bool:
        """Whether a step may need pad rows."""
        return max(self.least, self.multiple) > 1

    def __str__(self) -> str:
        if not self.has_pads:
            return "any number of rows"
        by = f", in multiples of {self.multiple}" if self.multiple > 1 else ""
        return f"{self.least} rows or more{by}"


ANY_SHAPE = RowShape()


def shapes(n_slots: int, *, is_plain: bool) -> Sequence[RowShape]:
    """Return the shapes to try for a context of `n_slots` slots, the one with the fewest pad rows first.

    Flash attention has a kernel of its own for a lone row, and so have products of floats. With weights that are not
    all plain, kernels change at 8 rows, and rows are taken by fours. The last shape has one width alone.
    Source: ggml/src/ggml-cpu/repack.cpp; tiled.cpp; ops.cpp, flash attention; docs/understand/exactness.md.
    """
    if n_slots == 1:
        return [ANY_SHAPE]
    n_most = n_sequences(n_slots)
    tried = [*((2, 1),) * is_plain, (4, 4), (8, 4), (n_most, n_most)]
    least = 2 if is_plain else min(N_TILED, n_most)
    return [RowShape(*shape) for shape in tried if least <= shape[0] <= n_most]


def n_sequences(n_slots: int, n_exact_slots: int = 1) -> int:
    """Return how many sequences a context needs so that every step can be padded: its slots, and up to 3 more.

    If several engines share `n_exact_slots`, each has as many as the kernels of all of them need.
    """
    return max(_in_groups(n_slots), min(N_TILED, _in_groups(n_exact_slots)))


def _in_groups(n_slots: int) -> int:
    return n_slots if n_slots == 1 else -(-n_slots // N_GROUP) * N_GROUP


class PadRows:
    """Adds pad rows to the decoding rows of a step, and removes their cells after it."""

    def __init__(self, shape: RowShape, memory: ContextMemory, n_sequences: int) -> None:
        self._shape, self._memory, self._n_sequences = shape, memory, n_sequences

    def beside(self, rows: Sequence[Span]) -> Sequence[Span]:
        """Return the pad rows of a step with these decoding rows, which ascend by slot; `remove` them.

        llama.cpp computes rows of consecutive sequences together, so pad rows fill the gaps between the slots too.
        """
        if not self._shape.has_pads:
            return ()
        low, high = rows[0].slot, rows[-1].slot + 1
        width = self._shape.width(high - low)
        if width == len(rows):
            return ()
        taken = {c.slot for c in rows}
        start = self._start(low, high, width)
        slots = [Slot(i) for i in range(start, start + width) if i not in taken]
        return [
            Span(slot, self._memory.place_pad(slot), (PAD_TOKEN,), has_output=False)
            for slot in slots
        ]

    def _start(self, low: int, high: int, width: int) -> int:
        """Return the first of `width` sequences around the rows: with the fewest to put aside, else the last ones."""
        starts = range(min(low, self._n_sequences - width), max(0, high - width) - 1, -1)
        is_in_the_way = self._memory.is_in_the_way
        return min(
            starts,
            key=lambda start: sum(
                is_in_the_way(Slot(i)) for i in (*range(start, low), *range(high, start + width))
            ),
        )

    def remove(self, pads: Sequence[Span]) -> None:
        """Remove the cells that pad rows have made, in one step or several."""
        for pad in pads:
            self._memory.remove_pad(pad.slot)
