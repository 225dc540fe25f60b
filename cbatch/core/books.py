"""Checks that the counts of slots, cells, saved cells and requests in flight agree."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cbatch.core.checkpoints import N_CHECKPOINTS_MAX
from cbatch.core.driver import Status

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from cbatch.core.driver import SequenceDriver
    from cbatch.core.kv import KvLedger
    from cbatch.core.slots import BatcherState


def find_imbalance(state: BatcherState, in_flight: Mapping[str, SequenceDriver]) -> str:
    """Return what is wrong with the counts; "" if they balance. Changes nothing. Call it between two runs."""
    return next(_problems(state, in_flight), "")


def find_ledger_imbalance(ledger: KvLedger) -> str:
    """Return what is wrong with a ledger; "" if it balances."""
    return next(_of_ledger(ledger), "")


def _problems(state: BatcherState, in_flight: Mapping[str, SequenceDriver]) -> Iterator[str]:
    yield from _of_ledger(state.cells.ledger)
    yield from _of_slots(state.cells.ledger, in_flight)
    yield from _of_waiting(state, in_flight)
    yield from _of_saved(state)


def _of_ledger(ledger: KvLedger) -> Iterator[str]:
    n_free = ledger.holders.count(None)
    if n_free != ledger.n_free_slots:
        yield f"{n_free} slots are free, but the count is {ledger.n_free_slots}"
    if not all(0 <= n <= ledger.n_window for n in ledger.n_cells):
        yield f"slots of {ledger.n_window} cells hold {ledger.n_cells} cells"
    n_used = sum(ledger.n_cells)
    if ledger.is_overcommitted:
        n_used = sum({id(b): b.n for blocks in ledger.blocks for b in blocks}.values())
        held = [b for blocks in ledger.blocks for b in blocks]
        if any(b.n < 1 or b.n_slots != held.count(b) for b in held):
            yield "cells are shared by other slots than the count says"
        if [sum(b.n for b in blocks) for blocks in ledger.blocks] != ledger.n_cells:
            yield f"slots hold {ledger.n_cells} cells, but their blocks have other lengths"
    if not n_used == ledger.n_used <= ledger.n_pool:
        yield f"{n_used} of {ledger.n_pool} cells are used, but the count is {ledger.n_used}"


def _of_slots(ledger: KvLedger, in_flight: Mapping[str, SequenceDriver]) -> Iterator[str]:
    for slot, driver in enumerate(ledger.holders):
        if driver is None:
            continue
        if in_flight.get(driver.request.id) is not driver:
            yield f"slot {slot} is held by a request that is not in flight"
        elif driver.slot != slot or driver.chosen_slot not in (None, slot):
            yield f"slot {slot} is held by a request that has slot {driver.slot}"
        elif driver.status not in (Status.RUNNING, Status.PAUSED):
            yield f"slot {slot} is held by a request that is {driver.status.name.lower()}"
        elif not ledger.n_cells[slot] == driver.n_computed < driver.n_tokens <= ledger.n_window:
            yield (
                f"slot {slot} holds {ledger.n_cells[slot]} cells of a request with {driver.n_computed} of "
                f"{driver.n_tokens} tokens computed"
            )


def _of_waiting(state: BatcherState, in_flight: Mapping[str, SequenceDriver]) -> Iterator[str]:
    n_queued = 0
    for driver in in_flight.values():
        if driver.slot is None:
            n_queued += driver.status is Status.WAITING and driver.waits_for is None
            if driver.n_computed and driver.saved_key is None:
                yield "a request without a slot has computed tokens, but no saved cells"
        elif state.cells.ledger.holders[driver.slot] is not driver:
            yield f"a request in flight has slot {driver.slot}, which another request holds"
        if driver.status is Status.FINISHED:
            yield "a request counted as in flight has ended"
    if n_queued != len(state.queue):
        yield f"{n_queued} requests wait for a slot, but {len(state.queue)} are queued"


def _of_saved(state: BatcherState) -> Iterator[str]:
    saved, books = state.saved, state.cells.prefixes.checkpoints
    if not saved.n_counted == saved.n_bytes <= saved.n_bytes_max:
        n_bytes, n_limit = saved.n_counted, saved.n_bytes_max
        yield f"saved cells take {n_bytes} bytes, the count is {saved.n_bytes}, the limit {n_limit}"
    n_bytes = sum(kept.n_bytes for kept in books.kept.values())
    if not n_bytes == books.n_bytes <= books.n_bytes_max:
        n_limit = books.n_bytes_max
        yield f"checkpoints take {n_bytes} bytes, the count is {books.n_bytes}, the limit {n_limit}"
    if len(books) > N_CHECKPOINTS_MAX:
        yield f"there are {len(books)} checkpoints, the limit is {N_CHECKPOINTS_MAX}"
