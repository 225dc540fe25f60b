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
from tests.helpers import plain

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
def test_shift_takes_cells_out_on_which_the_rest_still_depends(unified: bool) -> None:
    outputs = []
    for n in (4, 5):  # what stays are the same tokens, of another text
        backend = moving(unified=unified)
        backend.run(StepPlan((), clears=(Slot(0),)))
        texts = Span(Slot(0), 0, (1, 2, *range(n), 6, 7, 8), has_output=False)
        backend.run(StepPlan((texts,)))
        outputs.append(next_tokens(backend, 0, 5, shifts=((Slot(0), 2, n),)))
        assert len(backend.cells[0]) == 8
    clean = FakeBackend(4, 16, 32)
    chunk = Span(Slot(0), 0, (1, 2, 6, 7, 8, 50), has_output=True)
    outputs += clean.run(StepPlan((chunk,), 3, binds=(bind(0, 8),))).tokens
    assert len({*map(tuple, outputs)}) == 3


@pytest.mark.parametrize("unified", [False, True])
@pytest.mark.parametrize("n", [1, 5, 8])
def test_copy_and_load_give_the_first_cells(unified: bool, n: int) -> None:
    backend = moving(unified=unified)
    n_used = backend.n_used
    copies, loads = ((Slot(0), Slot(1), n), (Slot(1), Slot(3), n)), ((Slot(2), 1, n),)
    backend.run(StepPlan((), copies=copies, loads=loads, forgets=(1, 99)))
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
        forgets=(2,),
    )
    assert backend.run(plan).lost == ()
    assert sorted(backend.saved) == [1]
    assert backend.cells == [TOKENS[:6], TOKENS[:7], [], []]
    plan = StepPlan(
        (),
        trims=((Slot(1), 5),),
        copies=((Slot(1), Slot(2), 5),),
        shifts=((Slot(1), 0, 2), (Slot(2), 1, 1), (Slot(2), 1, 1)),
    )
    backend.run(plan)
    assert [*map(plain, backend.cells)] == [TOKENS[:6], [3, 4, 5], [1, 4, 5], []]


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


def orders(**given: Any) -> StepPlan:
    return StepPlan((), **given)


S = [Slot(i) for i in range(5)]


def test_shift_of_what_others_of_a_pool_have_too_is_refused() -> None:
    backend = moving(unified=True)
    shifts = ((S[0], 2, 2),)
    with pytest.raises(PlanError, match="other slots"):
        backend.run(orders(copies=((S[0], S[1], 4),), shifts=shifts))
    backend.run(orders(copies=((S[0], S[1], 4),)))
    with pytest.raises(PlanError, match="other slots"):
        backend.run(orders(shifts=shifts))
    backend.run(orders(shifts=((S[0], 4, 2),)))
    backend.run(orders(clears=(S[1],)))
    backend.run(orders(shifts=shifts))
    assert [*map(plain, backend.cells)] == [[1, 2, 7, 8], [], [], []]
