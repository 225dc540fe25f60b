"""How a model is computed on this machine: what a load finds out before it makes a context."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from cbatch.backend.llama.pad_rows import ANY_SHAPE, RowShape

if TYPE_CHECKING:
    from cbatch.engine_options import EngineOptions

NOT_TRIED = "together: not tried"


@dataclass(frozen=True, slots=True)
class Tuning:
    """The options of a context as they are decided, and what no option says; see `find_tuning`."""

    options: EngineOptions
    company: str = NOT_TRIED
    """See `Engine.company`."""
    is_sound: bool = True
    """Whether llama.cpp computes the model rightly with the options that were asked for."""
    exactness: str = ""
    """`bitwise`, or `not guaranteed: reason`; empty without `exact`."""
    shape: RowShape = ANY_SHAPE
    """Rows of decoding steps with `exact`; others may have any."""
    probe_s: float | None = None
    """Seconds that the probe of `exact` took, now or when it ran."""
    is_remembered: bool = False
    """Whether that probe ran in an earlier load."""
    may_widen: bool = False
    """Whether decoding steps may be filled with pad rows where that is found to be faster: weights have one kernel from
    two rows on."""
    has_short_pool: bool = False
    """Whether sequences are computed in a small pool while they are short, where that is possible."""
    may_vary_threads: bool = False
    """Whether fewer threads may compute while other programs take cores."""
