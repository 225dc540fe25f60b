"""Which of those that run is to leave its slot: for want of cells, or to close a gap between slots."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cbatch.core.demand import N_PREEMPTED_MAX
from cbatch.core.driver import SequenceDriver, Status
from cbatch.errors import LedgerError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from cbatch.core.kv import KvLedger
    from cbatch.core.plan import Slot

N_WORTH_MOVE = 8
"""Tokens to come that are worth moving a sequence for: a copy takes less than a step."""


def slot_of(driver: SequenceDriver) -> Slot:
    """Return the slot of a sequence that has one.

    Raises:
        LedgerError: it has none.
    """
    if driver.slot is None:
        raise LedgerError(f"{driver.request.id!r} has no slot")
    return driver.slot


def choose_victim(
    running: Iterable[SequenceDriver | None], ledger: KvLedger
) -> SequenceDriver | None:
    """Return who can best give up its cells: never the oldest, nobody too often, and who has computed least."""
    drivers = [d for d in running if d is not None]
    oldest = min(drivers, key=lambda d: d.number, default=None)
    eligible = [
        d
        for d in drivers
        if d is not oldest and d.n_preempted < N_PREEMPTED_MAX and ledger.n_own(slot_of(d))
    ]
    return min(eligible, key=lambda d: (d.n_computed, -d.number), default=None)


def choose_mover(
    running: Iterable[SequenceDriver | None], ledger: KvLedger
) -> SequenceDriver | None:
    """Return who has the highest slot, if a gap is below it and moving there can be and pays.

    In partitioned memory each gap costs a run of the graph, as long as a step; the move costs less than one.
    """
    memory = ledger.memory
    if memory is None or memory.kind != "partitioned" or not memory.can_copy:
        return None
    highest = max((d for d in running if d), key=slot_of, default=None)
    if highest is None or slot_of(highest) == ledger.n_lent - 1 or not _is_worth_moving(highest):
        return None
    return highest if ledger.n_cells[slot_of(highest)] else None


def _is_worth_moving(driver: SequenceDriver) -> bool:
    """Whether one has enough left to compute, and nothing in its slot is about to move."""
    return driver.status is Status.RUNNING and driver.n_left >= N_WORTH_MOVE and not driver.n_shifts
