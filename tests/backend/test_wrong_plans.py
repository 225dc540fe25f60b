"""Plans that would end the process, or lose count: refused by every backend, the fake one too, and nothing changes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from cbatch.backend.fake import FakeBackend
from cbatch.core.plan import Binding, KvCapabilities, Slot, StepPlan
from cbatch.core.span import Span
from cbatch.errors import PlanError
from cbatch.options import GREEDY, Sampling
from tests.backend.slots import KINDS, N_SLOTS, PROMPT, chunk, go_on, held, is_refused

if TYPE_CHECKING:
    from tests.backend.slots import MakeBackend

N_BATCH = 64
S = [Slot(i) for i in range(N_SLOTS + 1)]


def plan(*chunks: Span, **orders: Any) -> StepPlan:
    return StepPlan(chunks, **orders)


def bound(slot: int, stops: tuple[int, ...] = (), **sampling: Any) -> Binding:
    return Binding(Slot(slot), 4, Sampling(**sampling), stops)


# Slot 0 holds 20 cells and slots 1 and 2 none; 20 cells are saved under 1.
WRONG_PLANS: dict[str, StepPlan] = {
    "too many tokens": plan(chunk(1, 0, [7] * (N_BATCH + 1))),
    "position past the cells": plan(chunk(0, 21, [7])),
    "position before the cells": plan(chunk(0, 0, [7])),
    "negative position": plan(chunk(1, -1, [7])),
    "slot too high": plan(chunk(N_SLOTS, 0, [7])),
    "slot far too high": plan(chunk(300, 0, [7])),
    "slots not ascending": plan(chunk(2, 0, [7]), chunk(1, 0, [7])),
    "slot twice": plan(chunk(1, 0, [7]), chunk(1, 0, [7])),
    "no tokens": plan(chunk(1, 0, [])),
    "no steps": plan(chunk(1, 0, [7]), n_steps=0),
    "clear of a slot negative": plan(clears=(Slot(-1),)),
    "save of an empty slot": plan(saves=((S[1], 2),)),
    "save under a key in use": plan(saves=((S[0], 1),)),
    "save under one key twice": plan(saves=((S[0], 2), (S[0], 2))),
    "load of an unknown key": plan(loads=((S[1], 2, 20),)),
    "load into a slot with cells": plan(loads=((S[0], 1, 20),)),
    "load of more cells than there are": plan(loads=((S[1], 1, 21),)),
    "load of no cells": plan(loads=((S[1], 1, 0),)),
    "trim to more cells than there are": plan(trims=((S[0], 21),)),
    "trim of what is cleared": plan(clears=(S[0],), trims=((S[0], 1),)),
    "trim to less than nothing": plan(trims=((S[0], -1),)),
    "shift of nothing": plan(shifts=((S[0], 4, 0),)),
    "shift of less than nothing": plan(shifts=((S[0], 4, -1),)),
    "shift of more than there is": plan(shifts=((S[0], 4, 17),)),
    "two shifts of more than there is": plan(shifts=((S[0], 0, 15), (S[0], 0, 6))),
    "shift behind less than nothing": plan(shifts=((S[0], -1, 2),)),
    "shift of an empty slot": plan(shifts=((S[1], 0, 1),)),
    "shift of a slot too high": plan(shifts=((S[3], 0, 1),)),
    "shift of what is cleared": plan(clears=(S[0],), shifts=((S[0], 0, 1),)),
    "shift of what is trimmed": plan(trims=((S[0], 5),), shifts=((S[0], 4, 2),)),
    "shift of more than is loaded": plan(loads=((S[1], 1, 9),), shifts=((S[1], 0, 10),)),
    "shift of more than is copied": plan(copies=((S[0], S[1], 9),), shifts=((S[1], 0, 10),)),
    "copy of nothing": plan(copies=((S[0], S[1], 0),)),
    "copy of more than there is": plan(copies=((S[0], S[1], 21),)),
    "copy of an empty slot": plan(copies=((S[1], S[2], 1),)),
    "copy to itself": plan(copies=((S[0], S[0], 20),)),
    "copy to a slot twice": plan(copies=((S[0], S[1], 9), (S[0], S[1], 9))),
    "copy to a slot too high": plan(copies=((S[0], S[3], 9),)),
    "copy of what is trimmed": plan(trims=((S[0], 5),), copies=((S[0], S[1], 6),)),
    "copy of what is cleared": plan(clears=(S[0],), copies=((S[0], S[1], 9),)),
    "copy to where is loaded": plan(loads=((S[1], 1, 20),), copies=((S[0], S[1], 9),)),
    "chunk not after the shift": plan(chunk(0, 20, [7]), shifts=((S[0], 4, 7),)),
    "chunk not after the trim": plan(chunk(0, 20, [7]), trims=((S[0], 9),)),
    "chunk not after the copy": plan(chunk(1, 20, [7]), copies=((S[0], S[1], 9),)),
    "chunk not after the load": plan(chunk(1, 0, [7]), loads=((S[1], 1, 20),)),
    "chunk not after the rebuilding": plan(chunk(0, 20, [7]), is_rebuild=True),
}
OF_LLAMA_CPP: dict[str, StepPlan] = {
    "slot negative": plan(chunk(-1, 0, [7])),
    "token out of vocabulary": plan(chunk(1, 0, [10**6])),
    "token negative": plan(chunk(1, 0, [-1])),
    "token past 32 bits": plan(chunk(1, 0, [2**31])),
    "clear of a slot past llama.cpp's most": plan(clears=(Slot(300),)),
    "binding of a slot too high": plan(binds=(bound(N_SLOTS),)),
    "binding of a slot negative": plan(binds=(bound(-1),)),
    "temperature NaN": plan(binds=(bound(0, temperature=float("nan")),)),
    "stop token past 32 bits": plan(binds=(bound(0, (2**31,)),)),
    "save under a key that is forgotten": plan(saves=((S[0], 1),), forgets=(1,)),
    "shift of what is rebuilt": plan(is_rebuild=True, shifts=((S[0], 0, 1),)),
    "copy of what is rebuilt": plan(is_rebuild=True, copies=((S[0], S[1], 9),)),
}
"""What the fake backend cannot be asked, or lets pass."""
NOT_EXACT: dict[str, StepPlan] = {
    "too many tokens together": plan(chunk(1, 0, [7] * 40), chunk(2, 0, [7] * 40)),
    "steps without output": plan(Span(S[1], 0, [7, 8], has_output=False), n_steps=2),
    "past the window by its steps": plan(chunk(0, 20, [7]), n_steps=238),
}
"""Under `exact` prompts are computed one by one, a step a run."""
OF_STATES: dict[str, StepPlan] = {
    "trim where that cannot be": plan(trims=((S[0], 20),)),
    "load of a part of a state": plan(loads=((S[1], 1, 19),)),
}


@pytest.mark.parametrize("kind", [*KINDS, "exact"])
def test_wrong_plan_is_refused_and_changes_nothing(make: MakeBackend, kind: str) -> None:
    more: dict[str, dict[str, Any]] = {
        "unified": {"ctx_per_seq": 256},
        "exact": {"exact": True},
    }
    given: dict[str, Any] = {"n_batch": N_BATCH, **more.get(kind, {})}
    backend = make("partitioned" if kind == "exact" else kind, **given)
    [token] = go_on(backend, 0, PROMPT, 1)
    backend.run(StepPlan((), saves=((S[0], 1),)))
    wrong_plans = {**WRONG_PLANS, **OF_LLAMA_CPP}
    wrong_plans |= NOT_EXACT if kind != "exact" else {}
    wrong_plans |= OF_STATES if kind == "recurrent" else {}
    for name, wrong in wrong_plans.items():
        assert is_refused(backend, wrong), name
        assert held(backend) == [20, 0, 0], name
        assert list(backend.saved_keys) == [1], name
    expected = go_on(backend, 0, [token], 9)
    assert go_on(backend, 1, [token], 9, loads=((S[1], 1, 20),), start=20) == expected


def fake(*, is_pool: bool = False, **can: Any) -> FakeBackend:
    able = {"can_save": True, "can_copy": True, "can_shift": True, "saved_bytes_per_cell": 8}
    kind: Any = "unified" if is_pool else "partitioned"
    memory = KvCapabilities(kind, 768, **{**able, **can})
    backend = FakeBackend(N_SLOTS, 256, N_BATCH, memory=memory)
    binds = tuple(Binding(slot, 0, GREEDY, ()) for slot in S[:N_SLOTS])
    backend.run(StepPlan((chunk(0, 0, PROMPT[:20]),), binds=binds))
    if memory.can_save:
        backend.run(StepPlan((), saves=((S[0], 1),)))
    return backend


@pytest.mark.parametrize("is_pool", [False, True])
def test_fake_backend_is_as_strict(is_pool: bool) -> None:
    backend = fake(is_pool=is_pool)
    before, n_plans = [*map(list, backend.cells)], len(backend.plans)
    wrong_plans = {
        **WRONG_PLANS,
        **NOT_EXACT,
        "adapter that there is not": plan(adapters=(("none", 1.0),)),
    }
    for name, wrong in wrong_plans.items():
        assert is_refused(backend, wrong), name
        assert (backend.cells, [*backend.saved]) == (before, [1]), name
    assert len(backend.plans) == n_plans


@pytest.mark.parametrize(
    ("name", "orders"),
    [
        ("can_save", {"saves": ((S[0], 2),)}),
        ("can_copy", {"copies": ((S[0], S[1], 4),)}),
        ("can_shift", {"shifts": ((S[0], 2, 2),)}),
        ("can_trim", {"trims": ((S[0], 2),)}),
    ],
)
def test_fake_memory_that_cannot_refuses(name: str, orders: dict[str, Any]) -> None:
    backend = fake(**dict[str, Any]({name: False}))
    with pytest.raises(PlanError):
        backend.run(plan(**orders))
    assert [len(cells) for cells in backend.cells] == [20, 0, 0]
