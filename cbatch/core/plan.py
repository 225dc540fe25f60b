"""What a step is: a plan says everything the backend has to do, a result everything it found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NewType

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cbatch.options import Sampling

Slot = NewType("Slot", int)

BROKEN_ROW = -1
"""Stands for a token where a row's logits held a NaN, or no finite maximum."""


@dataclass(frozen=True, slots=True)
class Binding:
    """What the backend must know of a sequence that enters a slot; it holds until the slot is bound again.

    `i_output` of a sampled token is its position minus `n_prompt`: the generator is keyed by it, so a
    sequence that is computed again draws the same tokens.
    """

    slot: Slot
    n_prompt: int
    sampling: Sampling
    stop_tokens: tuple[int, ...]
    """Every token id that ends the sequence, the model's end-of-generation ids included unless ignored."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """The part of one sequence in this step: `tokens` stand at positions `start`, `start + 1`, …"""

    slot: Slot
    start: int
    tokens: Sequence[int]
    has_output: bool
    """Whether the last token's logits are sampled: it is the sequence's last pending token."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One backend run. In this order: drop the cells of `clears`, take the `binds`, then compute.

    `chunks` are in ascending order of slot, one a slot at most. With `n_steps` > 1 every chunk has an output, and
    each further step computes the token that the step before sampled, one a slot. The run ends early after a step
    in which a row sampled one of its stop tokens or was broken, when it is interrupted, or when decoding failed; a
    backend may also end it after any step.
    """

    chunks: tuple[Chunk, ...]
    n_steps: int = 1
    clears: tuple[Slot, ...] = ()
    binds: tuple[Binding, ...] = ()


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a run did. `tokens[i]` are the tokens sampled for `chunks[i]`: `n_steps` of them, or none without output."""

    tokens: list[list[int]]
    n_steps: int
    """Steps done in full. A failing step is not among them and has sampled nothing."""
    code: int = 0
    """The return code of the last `llama_decode`; not 0 means that the step after the `n_steps` failed."""
    decode_s: float = 0.0
    sample_s: float = 0.0
