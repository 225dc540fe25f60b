"""Cells on a real llama.cpp: moved ones go on undisturbed, wrong orders change nothing, failures say what is kept."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import llama_cpp
import pytest

from cbatch.backend.llama.llama_backend import LlamaBackend
from cbatch.backend.llama.model_tuning import Tuning
from cbatch.backend.load.loader import describe_model
from cbatch.backend.load.open_model import open_model
from cbatch.core.plan import Slot, StepPlan, StepResult
from cbatch.engine_options import EngineOptions
from cbatch.errors import ConfigError, EngineClosedError, ModelLoadError, PlanError
from tests.backend.slots import (
    KINDS,
    N_SLOTS,
    OTHER,
    PROMPT,
    bind_all,
    chunk,
    failing,
    go_on,
    held,
    is_refused,
)

if TYPE_CHECKING:
    from cbatch.core.span import Span
    from tests.backend.slots import MakeBackend
    from tests.conftest import SynthFactory


# ---- what a memory can do ----


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("parallel", [1, N_SLOTS])
def test_memory_is_found_by_trying_and_left_empty(
    make: MakeBackend, kind: str, parallel: int
) -> None:
    backend = make(kind, parallel=parallel)
    memory = backend.memory
    assert (memory.kind, memory.n_cells) == (kind, 768)
    assert (memory.can_trim, memory.can_save) == (kind != "recurrent", True)
    assert held(backend) == [0] * parallel


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n_cells", [1, 2, 200])
def test_saved_cells_take_the_bytes_that_memory_says(
    make: MakeBackend, kind: str, n_cells: int
) -> None:
    backend = make(kind)
    backend.run(StepPlan((chunk(1, 0, [300] * n_cells),)))
    backend.run(StepPlan((), saves=((Slot(1), 4),)))
    state = backend.export_state(4)
    assert state is not None
    assert len(state) == backend.memory.n_saved_bytes(n_cells)


def test_memory_that_forgets_what_is_out_of_sight_cannot_trim(
    make: MakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llama_cpp, "llama_model_n_swa", lambda model: 512)
    memory = make("partitioned").memory
    assert (memory.kind, memory.can_trim, memory.can_save) == ("partitioned", False, True)


def test_memory_that_does_not_load_what_it_saved_cannot_save(
    make: MakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llama_cpp, "llama_state_seq_set_data_ext", lambda *args: 0)
    backend = make("partitioned")
    assert (backend.memory.can_save, backend.memory.n_saved_bytes(9)) == (False, 0)
    backend.run(StepPlan((chunk(0, 0, PROMPT),)))
    with pytest.raises(PlanError, match="cannot be saved"):
        backend.run(StepPlan((), saves=((Slot(0), 1),)))


def test_pool_for_a_model_that_keeps_states_is_refused(make: MakeBackend) -> None:
    with pytest.raises(ConfigError, match="keeps a state"):
        make("recurrent", kv="unified", n_ctx=1536)


@pytest.mark.parametrize(("shape", "kv"), [("test", "unified"), ("mamba", "auto")])
def test_described_window_is_the_backends(
    synth: SynthFactory, shape: str, kv: Literal["unified", "auto"]
) -> None:
    options = EngineOptions(parallel=4, kv=kv, n_ctx=1000, n_threads=1)
    with_context = LlamaBackend(open_model(synth(shape)), Tuning(options))
    described = describe_model(synth(shape), options, asks_probe=False)
    assert described["n_window"] == with_context.n_window == (1024 if shape == "test" else 256)
    assert described["n_cells"] == with_context.memory.n_cells
    with_context.close()


# ---- orders that are done ----


@pytest.mark.parametrize("kind", KINDS)
def test_saved_cells_go_on_in_another_slot(make: MakeBackend, kind: str) -> None:
    backend = make(kind)
    expected = go_on(backend, 0, PROMPT, 20)
    first = go_on(backend, 0, PROMPT, 8, clears=(Slot(0),), start=0)
    backend.run(StepPlan((), saves=((Slot(0), 5),), clears=(Slot(0),)))
    assert held(backend) == [0, 0, 0]
    go_on(backend, 0, OTHER, 5)
    n_cells = len(PROMPT) + 7
    rest = go_on(backend, 2, first[-1:], 12, loads=((Slot(2), 5, n_cells),), start=n_cells)
    assert first + rest == expected
    assert held(backend) == [len(OTHER) + 4, 0, n_cells + 12]


@pytest.mark.parametrize("kind", ["partitioned", "recurrent"])
def test_saved_cells_give_the_same_bits_under_exact(make: MakeBackend, kind: str) -> None:
    backend = make(kind, exact=True)
    [token] = go_on(backend, 0, PROMPT, 1)
    backend.run(StepPlan((), saves=((Slot(0), 5),)))
    go_on(backend, 0, [token], 1)
    expected = backend.logits(Slot(0)).tobytes()
    loads = ((Slot(1), 5, len(PROMPT)),)
    go_on(backend, 1, [token], 1, clears=(Slot(0),), loads=loads, start=len(PROMPT))
    assert backend.logits(Slot(1)).tobytes() == expected


@pytest.mark.parametrize("kind", KINDS)
def test_two_sequences_change_slots_in_one_plan(make: MakeBackend, kind: str) -> None:
    backend = make(kind)
    expected = [go_on(backend, 0, PROMPT, 9), go_on(backend, 1, OTHER, 9)]
    slots = (Slot(0), Slot(1))
    start = [
        go_on(backend, i, p, 1, clears=(Slot(i),), start=0) for i, p in ((0, PROMPT), (1, OTHER))
    ]
    result = backend.run(
        StepPlan(
            (chunk(0, len(OTHER), start[1]), chunk(1, len(PROMPT), start[0])),
            n_steps=8,
            saves=((Slot(0), 1), (Slot(1), 2)),
            clears=slots,
            loads=((Slot(0), 2, len(OTHER)), (Slot(1), 1, len(PROMPT))),
        )
    )
    n = result.n_steps
    assert result.tokens == [expected[1][1 : 1 + n], expected[0][1 : 1 + n]]
    backend.run(StepPlan((), forgets=(1, 2)))
    assert backend.saved_keys == ()


@pytest.mark.parametrize("kind", KINDS)
def test_many_slots_and_plans_load_what_was_saved_once(make: MakeBackend, kind: str) -> None:
    backend, n = make(kind), len(PROMPT)
    expected = go_on(backend, 0, PROMPT, 9)
    start = go_on(backend, 0, PROMPT, 1, clears=(Slot(0),), start=0)
    result = backend.run(
        StepPlan(
            tuple(chunk(i, n, start) for i in range(3)),
            saves=((Slot(0), 5),),
            loads=((Slot(1), 5, n), (Slot(2), 5, n)),
        )
    )
    assert result.tokens == [expected[1:2]] * 3
    assert result.saved_bytes[5] <= backend.memory.n_saved_bytes(n)
    loads = ((Slot(1), 5, n),)
    again = go_on(backend, 1, start, 8, clears=(Slot(1),), loads=loads, forgets=(5,), start=n)
    assert again == expected[1:]
    assert backend.saved_keys == ()


@pytest.mark.parametrize("kind", ["partitioned", "unified"])
@pytest.mark.parametrize("n_kept", [0, 1, 26])
def test_trimmed_cells_are_computed_again(make: MakeBackend, kind: str, n_kept: int) -> None:
    backend = make(kind)
    output = go_on(backend, 1, PROMPT, 8)
    tokens = [*PROMPT, *output]
    trims = ((Slot(1), n_kept),)
    again = go_on(backend, 1, tokens[n_kept:27], 1, trims=trims, start=n_kept)
    assert again == output[-1:]
    assert held(backend) == [0, 27, 0]


@pytest.mark.parametrize("kind", KINDS)
def test_rebuilt_context_computes_the_same(make: MakeBackend, kind: str) -> None:
    backend = make(kind)
    first = go_on(backend, 0, PROMPT, 8)
    expected = first + go_on(backend, 0, first[-1:], 12)
    backend.run(StepPlan((chunk(1, 0, PROMPT),)))
    result = backend.run(StepPlan((), saves=((Slot(1), 9),), is_rebuild=True))
    assert (result.lost, result.n_steps, [*result.saved_bytes]) == ((), 0, [9])
    assert held(backend) == [0, 0, 0]
    with pytest.raises(PlanError, match="never bound"):
        backend.run(StepPlan((chunk(0, 0, PROMPT),)))
    bind_all(backend)
    assert go_on(backend, 0, PROMPT, 20) == expected
    loads = ((Slot(2), 9, len(PROMPT)),)
    assert go_on(backend, 2, first[:1], 19, loads=loads, start=len(PROMPT)) == expected[1:]


def test_context_that_cannot_be_made_anew_closes_the_backend(
    make: MakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = make("partitioned")
    monkeypatch.setattr(llama_cpp, "llama_init_from_model", lambda model, params: None)
    with pytest.raises(ModelLoadError, match="768 cells"):
        backend.run(StepPlan((), is_rebuild=True))
    backend.interrupt()
    with pytest.raises(EngineClosedError):
        backend.run(StepPlan((chunk(0, 0, PROMPT),)))
    backend.close()
    with pytest.raises(EngineClosedError):
        _ = backend.model.pointer


def test_cells_that_one_plan_saves_loads_and_forgets_are_moved(make: MakeBackend) -> None:
    backend, n = make("partitioned"), len(PROMPT)
    backend.run(StepPlan((chunk(0, 0, PROMPT),)))
    saves, loads = ((Slot(0), 1),), ((Slot(1), 1, n),)
    moves = StepPlan((), saves=saves, clears=(Slot(0),), loads=loads, forgets=(1,))
    assert backend.run(moves).lost == ()
    assert ([*backend.n_cells][:2], backend.saved_keys) == ([0, n], ())


def test_forgotten_cells_are_gone(make: MakeBackend) -> None:
    backend = make("partitioned")
    backend.run(StepPlan((chunk(0, 0, PROMPT),)))
    backend.run(StepPlan((), saves=((Slot(0), 1), (Slot(0), 2))))
    backend.run(StepPlan((), forgets=(1,)))
    assert list(backend.saved_keys) == [2]
    with pytest.raises(PlanError, match="under 1"):
        backend.run(StepPlan((), loads=((Slot(1), 1, len(PROMPT)),)))
    backend.run(StepPlan((), saves=((Slot(0), 1), (Slot(0), 3)), forgets=(2, 3, 1000)))
    assert list(backend.saved_keys) == [1]
    backend.close()
    assert backend.saved_keys == ()


# ---- orders that fail ----


def test_pool_that_is_full_is_said_by_the_code_and_goes_on(make: MakeBackend) -> None:
    backend = make("unified", n_ctx=256)
    expected = go_on(backend, 1, OTHER, 4)
    backend.run(StepPlan((chunk(0, 0, PROMPT * 10),), clears=(Slot(1),)))
    result = backend.run(StepPlan((chunk(0, 200, [7]), chunk(1, 0, OTHER * 2))))
    assert (result.code, result.n_steps, result.n_kept) == (1, 0, ())
    assert held(backend) == [200, 0, 0]
    assert go_on(backend, 1, OTHER, 4) == expected
    assert held(backend) == [200, len(OTHER) + 3, 0]


def test_load_into_a_pool_that_is_full_loses_the_key_and_computes_nothing(
    make: MakeBackend,
) -> None:
    backend = make("unified", n_ctx=256)
    backend.run(StepPlan((chunk(0, 0, PROMPT * 5),)))
    backend.run(StepPlan((chunk(1, 0, PROMPT * 10),), saves=((Slot(0), 3),), clears=(Slot(0),)))
    plan = StepPlan((chunk(1, 200, [7]), chunk(2, 100, [7])), loads=((Slot(2), 3, 100),))
    assert backend.run(plan) == StepResult([[], []], 0, lost=(3,))
    assert held(backend) == [0, 200, 0]
    assert backend.saved_keys == ()
    assert backend.run(StepPlan((chunk(1, 200, [7]), chunk(2, 0, [7])))).code == 0


@pytest.mark.parametrize("failure", ["nothing copied", "no memory", "no size"])
def test_save_that_fails_loses_the_key_and_the_rest_is_done(
    make: MakeBackend, monkeypatch: pytest.MonkeyPatch, failure: str
) -> None:
    backend = make("partitioned")
    backend.run(StepPlan((chunk(0, 0, PROMPT),)))
    if failure == "nothing copied":
        monkeypatch.setattr(llama_cpp, "llama_state_seq_get_data_ext", lambda *args: 0)
    else:
        n_bytes = 2**62 if failure == "no memory" else 0
        monkeypatch.setattr(llama_cpp, "llama_state_seq_get_size_ext", lambda *args: n_bytes)
    plan = StepPlan((chunk(1, 0, OTHER),), saves=((Slot(0), 3),), clears=(Slot(0),))
    result = backend.run(plan)
    assert (result.lost, result.n_steps) == ((3,), 1)
    assert held(backend) == [0, len(OTHER), 0]
    with pytest.raises(PlanError, match="under 3"):
        backend.run(StepPlan((), loads=((Slot(0), 3, len(PROMPT)),)))


def test_key_that_is_lost_before_it_is_loaded_computes_nothing(
    make: MakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = make("partitioned")
    backend.run(StepPlan((chunk(0, 0, PROMPT),)))
    monkeypatch.setattr(llama_cpp, "llama_state_seq_get_data_ext", lambda *args: 0)
    chunks = (chunk(1, len(PROMPT), [7]),)
    result = backend.run(
        StepPlan(
            chunks, saves=((Slot(0), 3),), clears=(Slot(0),), loads=((Slot(1), 3, len(PROMPT)),)
        )
    )
    assert result == StepResult([[]], 0, lost=(3,))
    assert held(backend) == [0, 0, 0]


# ---- orders that are refused ----


def plan(*chunks: Span, **orders: Any) -> StepPlan:
    return StepPlan(chunks, **orders)


# Slot 0 holds 20 cells and slots 1 and 2 none; 20 cells are saved under 1.
WRONG_PLANS = {
    "save of a slot too high": plan(saves=((Slot(3), 2),)),
    "save of a slot negative": plan(saves=((Slot(-1), 2),)),
    "save of an empty slot": plan(saves=((Slot(1), 2),)),
    "save under a key in use": plan(saves=((Slot(0), 1),)),
    "save under one key twice": plan(saves=((Slot(0), 2), (Slot(0), 2))),
    "load of a slot too high": plan(loads=((Slot(300), 1, 20),)),
    "load of an unknown key": plan(loads=((Slot(1), 2, 20),)),
    "load into a slot with cells": plan(loads=((Slot(0), 1, 20),)),
    "load of more cells than there are": plan(loads=((Slot(1), 1, 21),)),
    "load of no cells": plan(loads=((Slot(1), 1, 0),)),
    "save under a key that is forgotten": plan(saves=((Slot(0), 1),), forgets=(1,)),
    "trim of a slot too high": plan(trims=((Slot(3), 0),)),
    "trim to more cells than there are": plan(trims=((Slot(0), 21),)),
    "trim to cells that are cleared": plan(clears=(Slot(0),), trims=((Slot(0), 1),)),
    "trim to less than nothing": plan(trims=((Slot(0), -1),)),
    "chunk not after the loaded cells": plan(chunk(1, 0, [7]), loads=((Slot(1), 1, 20),)),
    "chunk not after the trimmed cells": plan(chunk(0, 20, [7]), trims=((Slot(0), 9),)),
    "chunk not after the rebuilding": plan(chunk(0, 20, [7]), is_rebuild=True),
    "chunk past the window": plan(chunk(1, 20, [7] * 237), loads=((Slot(1), 1, 20),)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_wrong_orders_are_refused_and_change_nothing(make: MakeBackend, kind: str) -> None:
    sizes = {"ctx_per_seq": 256} if kind == "unified" else {}
    backend = make(kind, **sizes)
    [token] = go_on(backend, 0, PROMPT, 1)
    backend.run(StepPlan((), saves=((Slot(0), 1),)))
    wrong_plans = dict(WRONG_PLANS)
    if kind == "recurrent":
        wrong_plans["trim where that cannot be"] = plan(trims=((Slot(0), 20),))
        wrong_plans["load of a part of a state"] = plan(loads=((Slot(1), 1, 19),))
    for name, wrong in wrong_plans.items():
        assert is_refused(backend, wrong), name
        assert held(backend) == [20, 0, 0], name
        assert list(backend.saved_keys) == [1], name
    expected = go_on(backend, 0, [token], 9)
    assert go_on(backend, 1, [token], 9, loads=((Slot(1), 1, 20),), start=20) == expected


# ---- after a failed decode ----


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("code", [2, -2, -3])
def test_failed_decode_says_what_is_kept(make: MakeBackend, kind: str, code: int) -> None:
    backend, failures = failing(make, kind)
    expected = go_on(backend, 1, PROMPT, 3)
    backend.run(StepPlan((chunk(2, 0, OTHER),), clears=(Slot(1),)))
    failures.append((code, 0))
    chunks = (chunk(1, 0, PROMPT), chunk(2, len(OTHER), [7]))
    result = backend.run(StepPlan(chunks))
    n_kept = (0, 0) if kind == "recurrent" else (len(PROMPT) - 1, len(OTHER))
    if kind == "partitioned":  # all of the prompt but its last token is computed first
        n_kept = (len(PROMPT) - 2, len(OTHER))
    assert (result.code, result.n_steps, result.n_kept) == (code, 0, n_kept)
    assert held(backend) == [0, *n_kept]
    assert go_on(backend, 1, PROMPT[n_kept[0] :], 3) == expected


@pytest.mark.parametrize("code", [1, -1])
def test_failed_decode_that_changes_nothing_keeps_all(make: MakeBackend, code: int) -> None:
    backend, failures = failing(make, "partitioned")
    backend.run(StepPlan((chunk(0, 0, PROMPT),)))
    failures.append((code, 0))
    result = backend.run(StepPlan((chunk(0, 20, [7]), chunk(1, 0, PROMPT))))
    assert (result.code, result.n_kept) == (code, ())
    assert held(backend) == [20, 0, 0]


@pytest.mark.parametrize(("code", "n_kept"), [(1, ()), (2, (22, 21)), (-3, (22, 21))])
def test_steps_before_a_failed_one_are_kept(
    make: MakeBackend, code: int, n_kept: tuple[int, ...]
) -> None:
    backend, failures = failing(make, "partitioned")
    expected = go_on(backend, 0, PROMPT, 5)
    failures.append((code, 2))
    chunks = (chunk(0, 0, [*PROMPT, expected[0]]), chunk(1, 0, PROMPT))
    result = backend.run(StepPlan(chunks, n_steps=4, clears=(Slot(0),)))
    assert (result.code, result.n_steps, result.n_kept) == (code, 2, n_kept)
    assert result.tokens == [expected[1:3], expected[:2]]
    assert held(backend) == [22, 21, 0]
    assert go_on(backend, 1, expected[1:2], 3) == expected[2:5]


@pytest.mark.parametrize("kind", ["partitioned", "recurrent"])
def test_failed_group_of_an_exact_plan_takes_back_what_memory_can(
    make: MakeBackend, kind: str
) -> None:
    backend, failures = failing(make, kind, exact=True)
    backend.run(StepPlan((chunk(0, 0, PROMPT),)))
    failures += [None, (1, 0)]
    result = backend.run(StepPlan((chunk(0, 20, [7]), chunk(1, 0, OTHER))))
    expected = (1, ()) if kind == "partitioned" else (-3, (0, 0))
    assert (result.code, result.n_kept) == expected
    assert held(backend) == ([20, 0, 0] if kind == "partitioned" else [0, 0, 0])


# ---- time ----


@pytest.mark.parametrize("is_exact", [False, True])
def test_first_step_takes_some_of_the_time_of_a_run(make: MakeBackend, is_exact: bool) -> None:
    backend = make("partitioned", exact=is_exact)
    result = backend.run(StepPlan((chunk(0, 0, PROMPT), chunk(1, 0, OTHER))))
    assert result.first_s == pytest.approx(result.decode_s + result.sample_s)
    result = backend.run(StepPlan((chunk(0, 20, [7]), chunk(1, 33, [7])), n_steps=4))
    assert 0 < result.first_s <= result.decode_s + result.sample_s
