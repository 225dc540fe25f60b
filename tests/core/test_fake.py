"""The fake backend is as strict as the real one: what breaks a rule is refused, and what leaks is seen."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from cbatch.backend.fake import (
    END_TOKEN,
    FakeBackend,
    FakeVocab,
    Faults,
    StepCost,
    fake_logprobs,
)
from cbatch.core.plan import BROKEN_ROW, Binding, Chunk, Memory, Slot, StepPlan
from cbatch.errors import ConfigError, PlanError
from cbatch.options import GREEDY


def bind(slot: int = 0, n_prompt: int = 2) -> Binding:
    return Binding(Slot(slot), n_prompt, GREEDY, ())


def row(slot: int = 0, start: int = 0, n: int = 2, *, has_output: bool = True) -> Chunk:
    return Chunk(Slot(slot), start, tuple(range(1, n + 1)), has_output)


@pytest.mark.parametrize(
    "plan",
    [
        StepPlan((row(2), row(1)), binds=(bind(1), bind(2))),
        StepPlan((row(1), row(1)), binds=(bind(1),)),
        StepPlan((row(4),), binds=(bind(4),)),
        StepPlan((row(n=0),), binds=(bind(),)),
        StepPlan((row(n=9),), binds=(bind(),)),
        StepPlan((row(start=1),), binds=(bind(),)),
        StepPlan((row(),)),
        StepPlan((row(),), n_steps=0, binds=(bind(),)),
        StepPlan((row(has_output=False),), n_steps=2, binds=(bind(),)),
        StepPlan((row(),), n_steps=16, binds=(bind(),)),
    ],
)
def test_plan_that_breaks_a_rule_raises_and_does_nothing(plan: StepPlan) -> None:
    backend = FakeBackend(n_slots=4, n_window=16, n_batch=8)
    backend.run(StepPlan((row(3),), binds=(bind(3),)))
    with pytest.raises(PlanError):
        backend.run(StepPlan(plan.chunks, plan.n_steps, (Slot(3),), plan.binds))
    assert backend.cells == [[], [], [], [1, 2]]
    assert len(backend.plans) == 1


def test_plan_up_to_every_limit_is_run() -> None:
    backend = FakeBackend(n_slots=4, n_window=16, n_batch=8)
    result = backend.run(StepPlan((row(3, n=8),), n_steps=9, binds=(bind(3, 8),)))
    assert (result.n_steps, len(result.tokens[0])) == (9, 9)
    assert len(backend.cells[3]) == 16


def test_stream_is_the_expected_one_and_does_not_depend_on_the_slot() -> None:
    backend = FakeBackend(n_slots=2)
    plan = StepPlan((row(0), row(1)), n_steps=5, binds=(bind(0), bind(1)))
    first, second = backend.run(plan).tokens
    assert first == second == backend.expected([1, 2], bind(), 5)


def test_leaked_cell_gives_another_token() -> None:
    clean, leaky = FakeBackend(), FakeBackend()
    leaky._set_cells(0, [7])
    good = clean.run(StepPlan((row(),), binds=(bind(),))).tokens
    assert leaky.run(StepPlan((row(start=1),), binds=(bind(),))).tokens != good


def test_run_ends_after_the_step_in_which_a_row_stops() -> None:
    backend = FakeBackend()
    stop = backend.expected([1, 2], bind(), 3)[2]
    binding = Binding(Slot(0), 2, GREEDY, (stop,))
    result = backend.run(StepPlan((row(),), n_steps=9, binds=(binding,)))
    assert (result.n_steps, result.tokens[0][-1]) == (3, stop)
    assert backend.expected([1, 2], binding, 9) == result.tokens[0]


def test_run_ends_after_a_broken_row() -> None:
    backend = FakeBackend(faults=Faults(broken=lambda chunk: chunk.start >= 3))
    result = backend.run(StepPlan((row(),), n_steps=9, binds=(bind(),)))
    assert (result.n_steps, result.tokens[0][-1]) == (3, BROKEN_ROW)


def test_interrupt_without_a_run_ends_the_next_one_after_a_step_and_no_other() -> None:
    backend = FakeBackend()
    backend.interrupt()
    assert backend.run(StepPlan((row(),), n_steps=4, binds=(bind(),))).n_steps == 1
    more = Chunk(Slot(0), 2, (5,), has_output=True)
    assert backend.run(StepPlan((more,), n_steps=4)).n_steps == 4


@pytest.mark.parametrize(("code", "n_cells"), [(1, 0), (-1, 0), (2, 2), (-2, 2), (-3, 2)])
def test_failed_step_leaves_what_llama_cpp_would_leave(code: int, n_cells: int) -> None:
    backend = FakeBackend(faults=Faults(code=lambda _: code))
    result = backend.run(StepPlan((row(n=4),), binds=(bind(),)))
    assert (result.code, result.n_steps, result.tokens) == (code, 0, [[]])
    assert len(backend.cells[0]) == n_cells


def test_virtual_clock_counts_steps_and_tokens() -> None:
    backend = FakeBackend(cost=StepCost(base_s=1.0, token_s=0.25))
    backend.run(StepPlan((row(n=4),), n_steps=3, binds=(bind(),)))
    assert backend.now_s == 3 * 1.0 + (4 + 1 + 1) * 0.25


def test_closed_backend_refuses_runs() -> None:
    backend = FakeBackend()
    backend.close()
    backend.close()
    with pytest.raises(PlanError, match="closed"):
        backend.run(StepPlan((row(),), binds=(bind(),)))


def test_vocabulary_without_an_end_token_is_refused() -> None:
    with pytest.raises(ConfigError, match="256"):
        FakeBackend(n_vocab=END_TOKEN)


def test_vocabulary_goes_there_and_back() -> None:
    vocab = FakeVocab(4096)
    tokens = vocab.tokenize("é€")
    assert b"".join(map(vocab.piece, tokens)).decode() == "é€"
    assert vocab.piece(END_TOKEN) == b""
    assert all(len(vocab.piece(t).decode()) == 1 for t in range(257, 4096))
    assert vocab.render([{"role": "user", "content": "hi"}]) == vocab.tokenize("user:hi")


# ---- histories and log-probabilities ----


def test_history_of_another_sequence_gives_other_tokens() -> None:
    def tokens(*history: int) -> list[list[int]]:
        binding = Binding(Slot(0), 2, GREEDY, (), history)
        return FakeBackend().run(StepPlan((row(),), n_steps=3, binds=(binding,))).tokens

    assert tokens(1, 2) == tokens(1, 2)
    assert tokens(1, 2) != tokens(1, 3)
    assert tokens(1, 2) != tokens(2)
    assert tokens(9, 1, 2, 3, 4) != tokens(1, 2, 3, 4)


def test_history_grows_by_what_is_computed() -> None:
    binding = Binding(Slot(0), 2, GREEDY, (), (1, 2))
    backend = FakeBackend()
    whole = backend.run(StepPlan((row(),), n_steps=6, binds=(binding,))).tokens[0]
    assert whole == backend.expected([1, 2], binding, 6)
    parts = FakeBackend()
    found = parts.run(StepPlan((row(),), n_steps=2, binds=(binding,))).tokens[0]
    chunk = Chunk(Slot(0), 3, found[1:], has_output=True)
    assert parts.run(StepPlan((chunk,), n_steps=4)).tokens[0] == whole[2:]
    again = Binding(Slot(0), 2, GREEDY, (), (1, 2, *whole))
    more = Chunk(Slot(0), 7, whole[-1:], has_output=True)
    assert (
        backend.run(StepPlan((more,))).tokens
        == parts.run(StepPlan((more,), 1, (), (again,))).tokens
    )


def test_logprobs_are_made_up_for_who_wants_them() -> None:
    binds = (Binding(Slot(0), 2, GREEDY, (), (), 3), bind(1))
    result = FakeBackend().run(StepPlan((row(0), row(1)), n_steps=2, binds=binds))
    [wanted, none] = result.logprobs
    assert list(wanted) == [fake_logprobs(token, 3) for token in result.tokens[0]]
    assert list(none) == []
    for found, token in zip(wanted, result.tokens[0], strict=True):
        assert found.top[0] == (token, found.logprob)
        assert len(dict(found.top)) == 3
        assert sum(map(math.exp, dict(found.top).values())) < 3
    assert FakeBackend().run(StepPlan((row(),), binds=(bind(),))).logprobs == ()


# ---- memory verbs ----

ABLE = {"can_save": True, "can_copy": True, "can_shift": True, "saved_bytes_per_cell": 8}
TOKENS = list(range(1, 9))


def moving(*, unified: bool = False, faults: Faults | None = None, **can: Any) -> FakeBackend:
    """A backend that can move cells; slot 0 holds 8, the other 3 none, and the first 8 are saved under 1."""
    memory = Memory("unified" if unified else "partitioned", 64, **{**ABLE, **can})
    backend = FakeBackend(4, 16, 32, memory=memory, faults=faults or Faults())
    backend.run(StepPlan((row(n=8),), binds=tuple(bind(slot, 8) for slot in range(4))))
    if memory.can_save:
        backend.run(StepPlan((), saves=((Slot(0), 1),)))
    return backend


def next_tokens(backend: FakeBackend, slot: int, start: int, **orders: Any) -> list[int]:
    chunk = Chunk(Slot(slot), start, (50,), has_output=True)
    plan = StepPlan((chunk,), n_steps=3, binds=(bind(slot, 8),), **orders)
    return backend.run(plan).tokens[0]


@pytest.mark.parametrize("unified", [False, True])
def test_shift_takes_cells_out_and_the_rest_goes_on_as_that(unified: bool) -> None:
    backend = moving(unified=unified)
    output = next_tokens(backend, 0, 5, shifts=((Slot(0), 2, 3),))
    assert backend.cells[0][:6] == [1, 2, 6, 7, 8, 50]
    clean = FakeBackend(4, 16, 32)
    chunk = Chunk(Slot(0), 0, (1, 2, 6, 7, 8, 50), has_output=True)
    assert clean.run(StepPlan((chunk,), 3, binds=(bind(0, 8),))).tokens == [output]


@pytest.mark.parametrize("unified", [False, True])
@pytest.mark.parametrize("n", [1, 5, 8])
def test_copy_and_load_give_the_first_cells(unified: bool, n: int) -> None:
    backend = moving(unified=unified)
    n_used = backend.n_used
    copies, loads = ((Slot(0), Slot(1), n), (Slot(1), Slot(3), n)), ((Slot(2), 1, n),)
    backend.run(StepPlan((), copies=copies, loads=loads))
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
    data = first.take(1)
    assert data is not None
    assert first.take(1) is None
    assert data.dtype == np.uint8
    second.keep(7, data, 8)
    output = next_tokens(second, 3, 8, loads=((Slot(3), 7, 8),))
    assert output == next_tokens(first, 0, 8)


@pytest.mark.parametrize("n_bytes", [0, 1, 17, 32])
def test_cut_cells_are_lost_and_nothing_is_copied_or_computed(n_bytes: int) -> None:
    backend = moving()
    data = backend.take(1)
    assert data is not None
    backend.keep(7, data[:n_bytes], 8)
    chunk = Chunk(Slot(1), 8, (50,), has_output=True)
    orders: dict[str, Any] = {"copies": ((Slot(0), Slot(2), 4),), "loads": ((Slot(1), 7, 8),)}
    result = backend.run(StepPlan((chunk,), **orders))
    assert (result.lost, result.n_steps, result.tokens) == ((7,), 0, [[]])
    assert backend.cells == [TOKENS, [], [], []]


def test_fault_of_a_swap_loses_the_key() -> None:
    backend = moving(faults=Faults(swap=lambda key: key != 5))
    assert backend.run(StepPlan((), saves=((Slot(0), 5), (Slot(0), 6)))).lost == (5,)
    assert sorted(backend.saved) == [1, 6]


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
    "load of one key twice": orders(loads=((S[1], 1, 8), (S[2], 1, 8))),
    "load of a forgotten key": orders(forgets=(1,), loads=((S[1], 1, 8),)),
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
