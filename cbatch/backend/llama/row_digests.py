"""Digests of the rows of logits that an engine samples from, to compare engines by."""

from __future__ import annotations

import ctypes
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from cbatch.backend.bindings import llama_cpp
from cbatch.backend.llama.llama_backend import output_row
from cbatch.backend.llama.native import NativeStepper

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from cbatch.backend.llama.row_changes import RowChanges
    from cbatch.core.plan import Binding, Slot, StepResult
    from cbatch.core.span import Span

RowDigests = dict[tuple[int, int], bytes]
"""By the seed of a request and the position of the token that a row stands after."""


class DigestingStepper(NativeStepper):
    """Keeps a digest of each row of logits; does one step a run."""

    def __init__(self, ctx: Any, *, rows: RowDigests, **sizes: Any) -> None:
        super().__init__(ctx, **sizes)
        self._rows, self._pointer, self._n_bytes = rows, ctx, 4 * sizes["n_vocab"]
        self._seeds: dict[Slot, int] = {}

    def bind(self, binding: Binding) -> None:
        """Say how a slot is sampled from now on."""
        super().bind(binding)
        self._seeds[binding.slot] = binding.sampling.seed

    def run(
        self,
        chunks: Sequence[Span],
        n_steps: int = 1,
        slice_s: float = 0.0,
        masks: Any = None,
        await_masks: Any = None,
        pads: Collection[Span] = (),
        changes: RowChanges | None = None,
        n_drafts: int = 0,
    ) -> StepResult:
        """Do one step; see `NativeStepper.run`."""
        result = super().run(
            chunks, masks=masks, await_masks=await_masks, pads=pads, changes=changes
        )
        for i, chunk in enumerate(chunks):
            if result.n_steps and chunk.has_output and chunk.slot in self._seeds:
                position = chunk.start + len(chunk.inputs) - 1
                self._rows[self._seeds[chunk.slot], position] = self._digest(output_row(chunks, i))
        return result

    def _digest(self, i_row: int) -> bytes:
        row = llama_cpp.llama_get_logits_ith(self._pointer, i_row)
        return sha256(ctypes.string_at(row, self._n_bytes)).digest()
