"""Fake cells go where a plan orders; what cannot be done is refused, and then nothing has changed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cbatch.backend.fake import FakeBackend, Faults
from cbatch.core.plan import KvCapabilities, Slot, StepPlan
from cbatch.core.span import Span
from cbatch.errors import PlanError
from tests.backend.fake.plans import bind, row

ABLE = {"can_save": True, "can_copy": True, "can_shift": True, "saved_bytes_per_cell": 8}
TOKENS = list(range(1, 9))


def moving(*, unified: bool = False, faults: Faults | None = None, **can: Any) -> FakeBackend:
    """A backend that can move cells; slot 0 holds 8, the other 3 none, and the first 8 are saved under 1."""
    memory = KvCapabilities("unified" if unified else "partitioned", 64, **{**ABLE, **can})
    backend = FakeBackend(4, 16, 32, memory=memory, faults=faults or Faults())
    backend.run(StepPlan((row(n=8),), binds=tuple(bind(slot, 8) for slot in range(4))))
    if memory.can_save:
        backend.run(StepPlan((), saves=((Slot(0), 1),)))
    return backend


def next_tokens(backend: FakeBackend, slot: int, start: int, **orders: Any) -> list[int]:
    chunk = Span(Slot(slot), start, (50,), has_output=True)
    plan = StepPlan((chunk,), n_steps=3, binds=(bind(slot, 8),), **orders)
    return backend.run(plan).tokens[0]


@pytest.mark.parametrize("unified", [False, True])
def test_shift_takes_cells_out_and_the_rest_goes_on_as_that(unified: bool) -> None:
    backend = moving(unified=unified)
    output = next_tokens(backend, 0, 5, shifts=((Slot(0), 2, 3),))
    assert backend.cells[0][:6] == [1, 2, 6, 7, 8, 50]
    clean = FakeBackend(4, 16, 32)
    chunk = Span(Slot(0), 0, (1, 2, 6, 7, 8, 50), has_output=True)
    assert clean.run(StepPlan((chunk,), 3, binds=(bind(0, 8),))).tokens == [output]


@pytest.mark.parametrize("unified", [False, True])
@pytest.mark.parametrize("n", [1, 5, 8])
def test_copy_and_load_give_the_first_cells(unified: bool, n: int) -> None:
    backend = moving(unified=unified)
    n_used = backend.n_used
    copies, loads = ((Slot(0), Slot(1), n), (Slot(1), Slot(3), n)), ((Slot(2), 1, n),)
    backend.run(StepPlan((), copies=copies, loads=loads, forgets=(1,)))
    assert backend.cells == [TOKENS, TOKENS[:n], TOKENS[:n], TOKENS[:n]]
    assert backend.saved == {}
    assert backend.n_used == n_used + (n if unified else 3 * n)
    outputs = [next_tokens(backend, slot, n) for slot in (1, 2, 3)]
    assert outputs[0] == outputs[1] == outputs[2]


def test_orders_are_done_in_the_order_that_the_plan_names() -> None:
    backend = moving()
    plan = StepPlan(
        (),
        saves=((Slot(0), 2),),
        clears=(Slot(0),),
        loads=((Slot(0), 2, 6), (Slot(1), 1, 7)),
    )
    backend.run(plan)
    assert backend.cells == [TOKENS[:6], TOKENS[:7], [], []]
    plan = StepPlan(
        (),
        trims=((Slot(1), 5),),
        copies=((Slot(1), Slot(2), 5),),
        shifts=((Slot(1), 0, 2), (Slot(2), 1, 1), (Slot(2), 1, 1)),
    )
    backend.run(plan)
    assert backend.cells == [TOKENS[:6], [3, 4, 5], [1, 4, 5], []]


def test_cells_go_from_one_backend_to_another() -> None:
    first, second = moving(), moving()
    data = first.export_state(1)
    assert data is not None
    assert first.export_state(1) is None
    assert data.dtype == np.uint8
    second.import_state(7, data, 8)
    output = next_tokens(second, 3, 8, loads=((Slot(3), 7, 8),))
    assert output == next_tokens(first, 0, 8)


@pytest.mark.parametrize("n_bytes", [0, 1, 17, 32])
def test_cut_cells_are_lost_and_nothing_is_copied_or_computed(n_bytes: int) -> None:
    backend = moving()
    data = backend.export_state(1)
    assert data is not None
    backend.import_state(7, data[:n_bytes], 8)
    chunk = Span(Slot(1), 8, (50,), has_output=True)
    orders: dict[str, Any] = {"copies": ((Slot(0), Slot(2), 4),), "loads": ((Slot(1), 7, 8),)}
    result = backend.run(StepPlan((chunk,), **orders))
    assert (result.lost, result.n_steps, result.tokens) == ((7,), 0, [[]])
    assert backend.cells == [TOKENS, [], [], []]


def test_fault_of_a_swap_loses_the_key() -> None:
    backend = moving(faults=Faults(swap=lambda key: key != 5))
    assert backend.run(StepPlan((), saves=((Slot(0), 5), (Slot(0), 6)))).lost == (5,)
    assert sorted(backend.saved) == [1, 6]


def test_cells_that_one_plan_saves_loads_and_forgets_are_moved() -> None:
    backend = moving()
    moves = StepPlan((), saves=((Slot(0), 5),), loads=((Slot(1), 5, 8),), forgets=(5,))
    assert backend.run(moves).lost == ()
    assert (backend.cells[1], sorted(backend.saved)) == (TOKENS, [1])


def test_key_that_is_saved_and_forgotten_at_once_is_gone() -> None:
    backend = moving()
    assert backend.run(StepPlan((), saves=((Slot(0), 5),), forgets=(5, 1, 99))).lost == ()
    assert backend.saved == {}


def orders(**given: Any) -> StepPlan:
    return StepPlan((), **given)


S = [Slot(i) for i in range(5)]
WRONG_ORDERS: dict[str, StepPlan] = {
    "shift of nothing": orders(shifts=((S[0], 2, 0),)),
    "shift of less than nothing": orders(shifts=((S[0], 2, -1),)),
    "shift of more than there is": orders(shifts=((S[0], 2, 7),)),
    "shift behind less than nothing": orders(shifts=((S[0], -1, 2),)),
    "shift of an empty slot": orders(shifts=((S[1], 0, 1),)),
    "shift of what is trimmed": orders(trims=((S[0], 3),), shifts=((S[0], 2, 2),)),
    "shift of what is cleared": orders(clears=(S[0],), shifts=((S[0], 2, 2),)),
    "copy of nothing": orders(copies=((S[0], S[1], 0),)),
    "copy of more than there is": orders(copies=((S[0], S[1], 9),)),
    "copy to itself": orders(copies=((S[0], S[0], 8),)),
    "copy to a slot twice": orders(copies=((S[0], S[1], 4), (S[0], S[1], 4))),
    "copy of what is trimmed": orders(trims=((S[0], 3),), copies=((S[0], S[1], 4),)),
    "save of an empty slot": orders(saves=((S[1], 2),)),
    "save under a key in use": orders(saves=((S[0], 1),)),
    "load of an unknown key": orders(loads=((S[1], 9, 1),)),
    "load into a slot with cells": orders(loads=((S[0], 1, 8),)),
    "trim to more than there is": orders(trims=((S[0], 9),)),
    "chunk not after the copy": StepPlan((row(1, 8),), copies=((S[0], S[1], 4),)),
    "chunk not after the shift": StepPlan((row(0, 8),), shifts=((S[0], 2, 2),)),
    "chunk not after the load": StepPlan((row(1, 8),), loads=((S[1], 1, 4),)),
    "adapter that there is not": orders(adapters=(("none", 1.0),)),
    "copy to where is loaded": orders(loads=((S[1], 1, 8),), copies=((S[0], S[1], 4),)),
    "load of more than was saved": orders(loads=((S[1], 1, 9),)),
    "load of nothing": orders(loads=((S[1], 1, 0),)),
    "trim to less than nothing": orders(trims=((S[0], -1),)),
    "trim of what is cleared": orders(clears=(S[0],), trims=((S[0], 1),)),
    "shift of a slot too high": orders(shifts=((S[4], 0, 1),)),
    "copy to a slot too high": orders(copies=((S[0], S[4], 4),)),
    "clear of a slot negative": orders(clears=(Slot(-1),)),
}


@pytest.mark.parametrize("unified", [False, True])
@pytest.mark.parametrize("name", WRONG_ORDERS)
def test_wrong_orders_raise_and_change_nothing(unified: bool, name: str) -> None:
    backend = moving(unified=unified)
    n_plans = len(backend.plans)
    with pytest.raises(PlanError):
        backend.run(WRONG_ORDERS[name])
    assert backend.cells == [TOKENS, [], [], []]
    assert backend.saved == {1: TOKENS}
    assert len(backend.plans) == n_plans


CANNOT: dict[str, dict[str, Any]] = {
    "can_save": {"saves": ((S[0], 2),)},
    "can_copy": {"copies": ((S[0], S[1], 4),)},
    "can_shift": {"shifts": ((S[0], 2, 2),)},
    "can_trim": {"trims": ((S[0], 2),)},
}


@pytest.mark.parametrize("name", CANNOT)
def test_memory_that_cannot_refuses(name: str) -> None:
    backend = moving(**dict[str, Any]({name: False}))
    with pytest.raises(PlanError):
        backend.run(orders(**CANNOT[name]))
    assert backend.cells == [TOKENS, [], [], []]


def test_shift_of_what_others_of_a_pool_have_too_is_refused() -> None:
    backend = moving(unified=True)
    shifts = ((S[0], 2, 2),)
    with pytest.raises(PlanError, match="others"):
        backend.run(orders(copies=((S[0], S[1], 4),), shifts=shifts))
    backend.run(orders(copies=((S[0], S[1], 4),)))
    with pytest.raises(PlanError, match="others"):
        backend.run(orders(shifts=shifts))
    backend.run(orders(shifts=((S[0], 4, 2),)))
    backend.run(orders(clears=(S[1],)))
    backend.run(orders(shifts=shifts))
    assert backend.cells == [[1, 2, 7, 8], [], [], []]
