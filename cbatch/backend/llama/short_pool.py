"""A small pool beside the slots' own memory, in which sequences are computed while all of them are short.

In memory that each slot has for itself llama.cpp computes the prompt of every newcomer in a run of the graph of its
own, behind one for the rows of all others: for short prompts each costs about as much as a decoding step. In one pool a
step is one run, but its rows look at all cells. So short sequences are in a second context that has one pool of few
cells and the same weights, and all of them move, at once, when they have become too long for it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from cbatch.backend.bindings import llama_cpp
from cbatch.backend.llama.context import context_cells, make_context
from cbatch.backend.llama.fingerprint import rope_factors
from cbatch.backend.llama.memory import LlamaCells
from cbatch.core.span import N_TARGETS_MAX

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cbatch.backend.llama.model import LlamaModel
    from cbatch.backend.llama.saved import SavedFormat
    from cbatch.core.plan import StepPlan
    from cbatch.engine_options import EngineOptions

N_CELLS = 1024
"""Of the pool: with so many a step without a prompt takes as long as in memory that slots have for themselves.
Source: measured on two models; see docs/understand/performance.md."""


def may_have_short_pool(model: LlamaModel, options: EngineOptions) -> bool:
    """Whether sequences may move between memory of these settings and a pool: several slots with plain cells of f16.

    llama.cpp chooses a model's rope factors by the cells of a context: both must have the same.
    """
    types = {options.cache_type_k, options.cache_type_v}
    is_apart = options.kv == "partitioned" and options.n_slots > 1 and not options.exact
    n_cells = context_cells(model, options)
    if not (is_apart and model.has_plain_cells and types == {"f16"} and n_cells >= 4 * N_CELLS):
        return False
    return rope_factors(model, N_CELLS) == rope_factors(model, n_cells // options.n_slots)


class ShortPool:
    """A second context of a model, with one pool."""

    def __init__(
        self, model: LlamaModel, options: EngineOptions, n_threads: int, apart: SavedFormat
    ) -> None:
        """Make the context; `apart` is how the slots' own memory writes a sequence.

        Raises:
            ModelLoadError: llama.cpp cannot make it.
            ValueError: sequences cannot move from one memory to the other.
        """
        together = apart.in_pool()
        if together is None:
            raise ValueError("cached values of this type cannot be transposed")
        self.together, self.apart = together, apart
        """How a sequence is written for the pool, and for the slots' own memory."""
        pooled = replace(options, kv="unified", n_ctx=N_CELLS, ctx_per_seq=None, flash_attn="on")
        self.ctx: Any = make_context(model, pooled, n_threads)
        """`llama_context *`; None once it is freed."""
        self.cells = LlamaCells(self.ctx)
        self.n_cells = N_CELLS
        self.is_used = False
        """Whether the slots' cells are here."""

    def is_for(self, plan: StepPlan, n_cells: Sequence[int]) -> bool:
        """Whether a plan is computed here, by what slots hold before it copies and computes.

        Sequences come where the plan's first step leaves half of the pool free, and stay until one would fill it: not
        with a chunk that has no output, for nobody would see that its cells are not finite, and reach others.
        """
        if plan.shifts or not all(c.has_output for c in plan.spans):
            return False
        return self._n_after(plan, n_cells) <= (self.n_cells if self.is_used else self.n_cells // 2)

    def within(self, plan: StepPlan, n_cells: Sequence[int]) -> StepPlan:
        """Return a plan that belongs here with as many steps as there is room for, and with room for draft tokens."""
        n_rows, n_free = len(plan.spans), self.n_cells - self._n_after(plan, n_cells)
        n_steps = min(plan.n_steps, 1 + n_free // n_rows)
        has_room = n_free - (n_steps - 1) * n_rows >= N_TARGETS_MAX
        n_drafts = plan.n_drafts if has_room else 0
        if (n_steps, n_drafts) == (plan.n_steps, plan.n_drafts):
            return plan
        return replace(plan, n_steps=n_steps, n_drafts=n_drafts)

    @staticmethod
    def _n_after(plan: StepPlan, n_cells: Sequence[int]) -> int:
        n_copied = sum(n for _, _, n in plan.copies)
        return sum(n_cells) + n_copied + sum(len(c.inputs) for c in plan.spans)

    def clear(self) -> None:
        """Forget all cells, and what stands in their memory."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.ctx), True)
        self.is_used = False

    def free(self) -> None:
        """Free the context; twice is harmless."""
        ctx, self.ctx = self.ctx, None
        if ctx is not None:
            llama_cpp.llama_free(ctx)
