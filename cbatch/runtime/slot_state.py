"""What a slot holds now, as `Engine.slots` tells it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from cbatch.runtime.choices import display_id

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cbatch.core.driver import SequenceDriver


@dataclass(frozen=True, slots=True)
class SlotState:
    """One slot; the counters are those of its sequence, 0 where it has none."""

    slot: int
    status: str
    """`free`, `running` or `paused`. A running sequence is in prefill while `n_computed` is less than `n_prompt`."""
    n_cells: int
    """Of its sequence; in a free slot of prefixes that are kept."""
    id: str | None = None
    """The sequence's request; of several choices `a[0]`, `a[1]`, …"""
    n_prompt: int = 0
    n_computed: int = 0
    """Tokens of prompt and output that have cells."""
    n_output: int = 0
    n_cached: int = 0
    """Tokens of the prompt whose cells were taken over."""
    n_left: int = 0
    """Tokens of output that it may still sample."""


def slot_states(residents: Sequence[tuple[SequenceDriver | None, int]]) -> list[SlotState]:
    """Return the states of slots from what `MultiRequestBatcher.residents` returned. Owner thread."""
    return [_state(slot, *resident) for slot, resident in enumerate(residents)]


def _state(slot: int, driver: SequenceDriver | None, n_cells: int) -> SlotState:
    if driver is None:
        return SlotState(slot, "free", n_cells)
    return SlotState(
        slot,
        driver.status.value,
        n_cells,
        display_id(driver.request.id),
        driver.n_prompt,
        driver.n_computed,
        driver.n_output,
        driver.n_cached,
        driver.n_left,
    )
