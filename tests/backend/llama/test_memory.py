"""Cells on a real llama.cpp: moved ones go on undisturbed, wrong orders change nothing, failures say what is kept."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

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
)

if TYPE_CHECKING:
    from tests.backend.slots import MakeBackend
    from tests.conftest import SynthFactory


# ---- what a memory can do ----


@pytest.mark.parametrize(
    ("kind", "parallel"), [*((kind, N_SLOTS) for kind in KINDS), ("partitioned", 1)]
)
def test_memory_is_found_by_trying_and_left_empty(
    make: MakeBackend, kind: str, parallel: int
) -> None:
    backend = make(kind, parallel=parallel)
    memory = backend.memory
    assert (memory.kind, memory.n_cells) == (kind, 768)
    assert (memory.can_trim, memory.can_save) == (kind != "recurrent", True)
    assert held(backend) == [0] * parallel


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
def test_trimmed_cells_are_computed_again(make: MakeBackend, kind: str) -> None:
    backend = make(kind)
    output = go_on(backend, 1, PROMPT, 8)
    tokens = [*PROMPT, *output]
    for n_kept in (26, 1, 0):
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


def test_forgotten_cells_are_gone(make: MakeBackend) -> None:
    backend, n = make("partitioned"), len(PROMPT)
    backend.run(StepPlan((chunk(0, 0, PROMPT),)))
    backend.run(StepPlan((), saves=((Slot(0), 1), (Slot(0), 2))))
    backend.run(StepPlan((), forgets=(1,)))
    assert list(backend.saved_keys) == [2]
    with pytest.raises(PlanError, match="under 1"):
        backend.run(StepPlan((), loads=((Slot(1), 1, n),)))
    saves, loads = ((Slot(0), 1), (Slot(0), 3)), ((Slot(1), 3, n),)
    plan = StepPlan((), saves=saves, clears=(Slot(0),), loads=loads, forgets=(2, 3, 1000))
    assert backend.run(plan).lost == ()
    assert (held(backend), list(backend.saved_keys)) == ([0, n, 0], [1])
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
    saves, loads = ((Slot(0), 3),), ((Slot(2), 3, len(PROMPT)),)
    chunks = (chunk(2, len(PROMPT), [7]),)
    result = backend.run(StepPlan(chunks, saves=saves, clears=(Slot(0),), loads=loads))
    assert (result, held(backend)) == (StepResult([[]], 0, lost=(3,)), [0, 0, 0])
    backend.run(StepPlan((chunk(0, 0, PROMPT),)))
    plan = StepPlan((chunk(1, 0, OTHER),), saves=saves, clears=(Slot(0),))
    result = backend.run(plan)
    assert (result.lost, result.n_steps) == ((3,), 1)
    assert held(backend) == [0, len(OTHER), 0]
    with pytest.raises(PlanError, match="under 3"):
        backend.run(StepPlan((), loads=loads))


# ---- after a failed decode ----


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        *(("partitioned", code) for code in (1, -1, 2, -3)),
        *(("unified", -2), ("recurrent", 2), ("recurrent", -3)),
    ],
)
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
    if is_whole := code in (1, -1):  # nothing has changed
        n_kept = (0, len(OTHER))
    assert (result.code, result.n_steps, result.n_kept) == (code, 0, () if is_whole else n_kept)
    assert held(backend) == [0, *n_kept]
    assert go_on(backend, 1, PROMPT[n_kept[0] :], 3) == expected


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
