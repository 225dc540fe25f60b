"""States beside one pool of cells, on hybrids of the zoo: what a plan does to both."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from cbatch.backend.llama.llama_backend import LlamaBackend
from cbatch.backend.llama.model_tuning import Tuning
from cbatch.backend.load.loader import describe_model
from cbatch.backend.load.open_model import open_model
from cbatch.core.plan import BROKEN_ROW, Slot, StepPlan
from cbatch.engine_options import EngineOptions
from cbatch.errors import ConfigError
from tests.backend.slots import bound_backends, chunk, go_on, held, saved

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

NAMES = ["falcon-h1", "lfm2", "qwen3next"]
N_SLOTS, N_POOL = 4, 512
SIZES: dict[str, Any] = {"parallel": N_SLOTS, "n_ctx": N_POOL, "n_batch": 512, "n_threads": 1}
PROMPT = [3 + 7 * i % 90 for i in range(20)]
LONG = [5 + 11 * i % 90 for i in range(200)]

each_name = pytest.mark.parametrize("name", NAMES)


@pytest.fixture
def make(zoo: Callable[[str], Path]) -> Iterator[Callable[..., LlamaBackend]]:
    def make(name: str, kv: str = "unified") -> LlamaBackend:
        options = EngineOptions.of({**SIZES, "kv": kv})
        return bound(LlamaBackend(open_model(zoo(name)), Tuning(options)))

    with bound_backends() as bound:
        yield make


@each_name
def test_pool_is_kept_at_ends_and_counts_states(
    make: Callable[..., LlamaBackend], zoo: Callable[[str], Path], name: str
) -> None:
    backend = make(name)
    memory = backend.memory
    assert (memory.kind, memory.n_cells, backend.n_window) == ("unified", N_POOL, N_POOL)
    assert (memory.can_trim, memory.can_copy, memory.can_shift) == (False, False, False)
    assert (memory.can_save, memory.can_check) == (True, True)
    assert min(memory.saved_bytes, memory.saved_bytes_per_cell) > 0
    for n in (1, 7, 20):  # a window of one of them loses those before
        assert len(saved(backend, LONG[:n])) == memory.n_saved_bytes(n)
    options = EngineOptions.of({**SIZES, "kv": "unified"})
    described = describe_model(zoo(name), options, asks_probe=False)
    assert (described["n_window"], described["n_cells"]) == (N_POOL, N_POOL)


@each_name
def test_cells_and_state_go_on_in_another_slot_and_in_slots_of_their_own(
    make: Callable[..., LlamaBackend], name: str
) -> None:
    pool, apart = make(name), make(name, "partitioned")
    expected = go_on(apart, 1, PROMPT, 8)
    go_on(pool, 2, LONG, 4)
    first = go_on(pool, 0, PROMPT, 1)
    pool.run(StepPlan((), saves=((Slot(0), 5),), clears=(Slot(0),)))
    assert first + go_on(pool, 3, first, 7, loads=((Slot(3), 5, 20),), start=20) == expected
    data = saved(pool, PROMPT)
    for backend in (pool, apart):
        backend.import_state(9, backend.validate_state(data, 20), 20)
        backend.run(StepPlan((), clears=(Slot(0),)))
        assert go_on(backend, 0, first, 7, loads=((Slot(0), 9, 20),), start=20) == expected[1:]


@each_name
def test_full_pool_changes_neither_cells_nor_states(
    make: Callable[..., LlamaBackend], name: str
) -> None:
    backend = make(name)
    expected = go_on(backend, 1, PROMPT, 9)
    backend.run(StepPlan((), clears=(Slot(1),)))
    found = go_on(backend, 1, PROMPT, 4)
    for slot in (0, 2):
        backend.run(StepPlan((chunk(slot, 0, LONG),)))
    before = held(backend)
    plan = StepPlan((chunk(1, before[1], found[-1:]), chunk(3, 0, LONG)))
    assert backend.run(plan).code == 1
    assert held(backend) == before
    assert found + go_on(backend, 1, found[-1:], 5) == expected


@pytest.mark.parametrize("name", [name for name in NAMES if name != "lfm2"])
def test_states_are_overwritten_where_the_pool_has_no_cells_for_it(
    make: Callable[..., LlamaBackend], name: str
) -> None:
    backend = make(name)
    expected = go_on(backend, 1, PROMPT, 5)
    backend.run(StepPlan((), clears=(Slot(1),)))
    data = saved(backend, PROMPT).copy()
    data[-64:].view("<f4")[:] = (
        np.nan
    )  # the end of the last layer's state, which of lfm2 is a header
    backend.import_state(4, data, 20)
    backend.run(StepPlan((), loads=((Slot(0), 4, 20),)))
    for slot, tokens in ((2, [*LONG, *LONG[:71]]), (3, LONG)):
        backend.run(StepPlan((chunk(slot, 0, tokens),)))
    assert sum(held(backend)) == N_POOL - 21
    [broken] = backend.run(StepPlan((chunk(0, 20, [7]),))).tokens
    assert broken == [BROKEN_ROW]
    backend.run(StepPlan((), clears=(Slot(0),)))
    backend.run(StepPlan((), clears=(Slot(3),)))
    for slot in (0, 1, 3):
        assert go_on(backend, slot, PROMPT, 5) == expected


def test_pool_for_a_model_without_cells_is_refused(zoo: Callable[[str], Path]) -> None:
    options = EngineOptions.of({**SIZES, "kv": "unified"})
    with pytest.raises(ConfigError, match="keeps a state"):
        LlamaBackend(open_model(zoo("rwkv7")), Tuning(options))
    with pytest.raises(ConfigError, match="keeps a state"):
        describe_model(zoo("rwkv7"), options, asks_probe=False)
