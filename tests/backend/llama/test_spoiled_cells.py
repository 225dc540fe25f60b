"""Cells that hold NaN, on a real llama.cpp: when a sequence has left them they change nobody's answer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from numpy.typing import NDArray

from cbatch.backend.llama.llama_backend import LlamaBackend
from cbatch.backend.llama.model_tuning import Tuning
from cbatch.backend.load.open_model import open_model
from cbatch.core.plan import BROKEN_ROW, Slot, StepPlan
from cbatch.core.span import Span
from cbatch.engine_options import EngineOptions
from tests.backend.damage import without_numbers
from tests.backend.slots import OTHER, PROMPT, bound_backends, chunk, go_on, held

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.conftest import SynthFactory

    Make = Callable[..., LlamaBackend]

pytestmark = pytest.mark.real

BROKEN = 5
"""A token whose embedding is no number."""
LONG = [BROKEN] + [300 + 11 * i % 700 for i in range(199)]
SHAPES: dict[str, dict[str, int]] = {"whole": {}, "window": {"n_window": 32}}

each_flash = pytest.mark.parametrize("flash", ["on", "off"])


@pytest.fixture
def make(synth: SynthFactory, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Make]:
    """Return what makes backends of 4 slots with a model that computes no numbers of one token."""

    def make(shape: str, **given: Any) -> LlamaBackend:
        path = tmp_path_factory.mktemp("broken") / "model.gguf"
        plain = synth(type="f16", tied=False, **SHAPES[shape])
        sizes = {"parallel": 4, "n_ctx": 4 * 256, "n_batch": 512, "n_threads": 1}
        options = EngineOptions.of({**sizes, **given})
        model = open_model(without_numbers(plain, path, BROKEN), options)
        return bound(LlamaBackend(model, Tuning(options)))

    with bound_backends() as bound:
        yield make


def spoil(backend: LlamaBackend, slot: int) -> None:
    """Compute a sequence of NaN in a slot, which ends there."""
    assert backend.run(StepPlan((chunk(slot, 0, LONG),))).tokens == [[BROKEN_ROW]]
    backend.run(StepPlan((), clears=(Slot(slot),)))


def state(backend: LlamaBackend, slot: int) -> NDArray[np.uint8]:
    backend.run(StepPlan((), saves=((Slot(slot), 9),)))
    data = backend.export_state(9)
    assert data is not None
    return data


@pytest.mark.parametrize(
    ("kv", "flash", "shape", "n_held"),
    [
        ("partitioned", "on", "whole", 1),
        ("partitioned", "off", "window", 2),
        ("unified", "on", "window", 0),
        ("unified", "off", "whole", 2),
        ("unified", "on", "whole", 1),
        ("partitioned", "on", "window", 1),
    ],
)
def test_cells_of_nan_are_overwritten_when_their_sequence_ends(
    make: Make, kv: str, flash: str, shape: str, n_held: int
) -> None:
    found = []
    for is_spoiled in (False, True):
        backend = make(shape, kv=kv, flash_attn=flash)
        for slot in range(n_held):
            backend.run(StepPlan((chunk(slot, 0, (OTHER, LONG[1:151])[slot]),)))
        if is_spoiled:
            spoil(backend, n_held)
        rows = [go_on(backend, slot, [7], 4) for slot in range(n_held)]
        rows += [go_on(backend, n_held, LONG[1:101], 4), go_on(backend, 3, PROMPT, 4)]
        assert (held(backend)[n_held], held(backend)[3]) == (103, len(PROMPT) + 3)
        found.append(rows)
    assert found[1] == found[0]


@pytest.mark.parametrize("given", [{"kv": "partitioned"}, {"exact": True}])
def test_scored_prompt_of_nan_changes_nothing_of_the_next(make: Make, given: Any) -> None:
    found = []
    for is_spoiled in (False, True):
        backend = make("whole", flash_attn="off", **given)
        if is_spoiled:
            scored = Span(Slot(0), 0, LONG[:60], has_output=False, targets=LONG[1:61])
            scores = backend.run(StepPlan((scored,))).scores[Slot(0)]
            assert all(np.isnan(score.logprob) for score in scores)
            backend.run(StepPlan((), clears=(Slot(0),)))
        found.append(go_on(backend, 0, PROMPT, 4))
    assert found[1] == found[0]


@each_flash
def test_pool_with_shared_cells_is_overwritten_around_them(make: Make, flash: str) -> None:
    backend = make("whole", kv="unified", flash_attn=flash)
    backend.run(StepPlan((chunk(0, 0, OTHER),)))
    backend.run(StepPlan((), copies=((Slot(0), Slot(1), 20), (Slot(0), Slot(2), 30))))
    for slot, n in ((1, 400), (2, 300)):
        backend.run(StepPlan((chunk(slot, held(backend)[slot], [9] * n),)))
    before = [state(backend, slot) for slot in range(3)]
    spoil(backend, 3)
    for slot in range(3):
        assert np.array_equal(state(backend, slot), before[slot])
    assert [BROKEN_ROW] not in [go_on(backend, slot, [7], 1) for slot in range(4)]
    assert backend.run(StepPlan((chunk(3, 1, [7] * 253),))).tokens != [[BROKEN_ROW]]


@each_flash
def test_slot_with_a_window_answers_with_the_same_bits_after_nan(make: Make, flash: str) -> None:
    backend = make("window", exact=True, flash_attn=flash)
    backend.run(StepPlan((chunk(1, 0, OTHER),)))
    rows, bits = list[list[int]](), list[NDArray[np.float32]]()
    for _ in range(2):
        rows.append(go_on(backend, 0, PROMPT, 4))
        bits.append(backend.logits(Slot(0)))
        backend.run(StepPlan((), clears=(Slot(0),)))
        spoil(backend, 0)
    assert rows[1] == rows[0]
    assert np.array_equal(bits[1], bits[0])
