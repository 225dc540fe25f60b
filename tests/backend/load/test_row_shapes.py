"""The shape of steps under `exact`: what is found for kernels that depend on the rows of a step in some way."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from cbatch.backend.llama import memory
from cbatch.backend.llama.llama_backend import LlamaBackend
from cbatch.backend.llama.pad_rows import ANY_SHAPE, PAD_TOKEN, RowShape, n_sequences
from cbatch.backend.load import probe as probe_module
from cbatch.backend.load import row_shapes
from cbatch.backend.load.loader import describe_model
from cbatch.backend.load.open_model import open_model
from cbatch.backend.load.row_shapes import find_exact
from cbatch.engine_options import BITWISE, EngineOptions
from cbatch.loading import load
from tests.backend.damage import without_numbers

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from cbatch.backend.llama.memory import FoundMemory
    from cbatch.backend.llama.model import LlamaModel
    from cbatch.backend.llama.model_tuning import Tuning
    from cbatch.core.plan import Slot, StepPlan, StepResult
    from tests.conftest import SynthFactory

Touch = Callable[[LlamaBackend, "Slot"], float]
"""What a slot's logits hold after the last step, by what was computed in it."""

PARALLEL = 17
N_LAST = 64
"""Fewest tokens of a last chunk with flash attention, which takes fewer one by one."""
N_LAST_WITHOUT = 8
"""The same without: the fewest that are tried."""

WHOLE = RowShape(20, 20, N_LAST)
"""One width alone, of 17 slots."""


@pytest.fixture(scope="module")
def states(synth: SynthFactory) -> Iterator[LlamaModel]:
    """Yield a model whose memory cannot be cut."""
    with closing(open_model(synth("mamba"))) as opened:
        yield opened


def options(**given: Any) -> EngineOptions:
    sizes = {"parallel": PARALLEL, "ctx_per_seq": 1024, "n_threads": 1}
    return EngineOptions(**{**sizes, "exact": True, **given})


def find(
    monkeypatch: pytest.MonkeyPatch,
    model: LlamaModel,
    touch: Touch,
    *,
    is_plain: bool = True,
    **given: Any,
) -> Tuning:
    """Return what is found for a model whose logits are what `touch` says, and all contexts closed."""
    made: list[LlamaBackend] = []

    class Touched(LlamaBackend):
        def __init__(self, *args: Any, **given: Any) -> None:
            super().__init__(*args, **given)
            made.append(self)

        def logits(self, slot: Slot) -> NDArray[np.float32]:
            return np.full(self.vocab.n_vocab, touch(self, slot), np.float32)

    monkeypatch.setattr(row_shapes, "LlamaBackend", Touched)
    monkeypatch.setattr(probe_module, "LlamaBackend", Touched)
    monkeypatch.setattr(row_shapes, "has_plain_weights", lambda model: is_plain)
    found = find_exact(model, options(**given))
    assert made
    assert all(backend.ctx is None for backend in made)
    return found


def width_of(backend: LlamaBackend) -> int:
    """The rows of the last step; 0 where it computed a prompt."""
    chunks = backend.last_chunks
    return len(chunks) if all(len(c.inputs) == 1 for c in chunks) else 0


def tokens_of(backend: LlamaBackend) -> Sequence[tuple[int, ...]]:
    return [tuple(c.inputs) for c in backend.last_chunks]


def nothing(backend: LlamaBackend, slot: Slot) -> float:
    return 1.0


def is_narrow(backend: LlamaBackend, slot: Slot) -> float:
    return float(0 < width_of(backend) < 8)


def is_left_over(backend: LlamaBackend, slot: Slot) -> float:
    """Rows that are left over, where a kernel takes four together."""
    width, i_row = width_of(backend), [c.slot for c in backend.last_chunks].index(slot)
    return float(i_row >= width - width % 4)


def each_width(backend: LlamaBackend, slot: Slot) -> float:
    return float(width_of(backend))


def is_first_row(backend: LlamaBackend, slot: Slot) -> float:
    return float(width_of(backend) > 0 and backend.last_chunks[0].slot == slot)


def is_slot_2(backend: LlamaBackend, slot: Slot) -> float:
    return float(slot == 2)


def has_likes(backend: LlamaBackend, slot: Slot) -> float:
    """Whether all rows compute the same token."""
    return float(width_of(backend) > 1 and len(set(tokens_of(backend))) == 1)


def has_long_company(backend: LlamaBackend, slot: Slot) -> float:
    return float(slot != 0 and any(c.slot == 0 and c.start > 256 for c in backend.last_chunks))


def is_short_chunk(backend: LlamaBackend, slot: Slot) -> float:
    return float(1 < len(backend.last_chunks[0].inputs) < 64)


def each_chunk(backend: LlamaBackend, slot: Slot) -> float:
    n_tokens = len(backend.last_chunks[0].inputs)
    return float(n_tokens if n_tokens > 1 else 0)


# ---- what is found ----


def is_touched_by(number: float) -> Touch:
    """Rows that differ without a number between them."""
    return lambda backend, slot: number if 1 < width_of(backend) < 8 else 0.0


@pytest.mark.parametrize(
    ("touch", "given", "shape"),
    [
        (nothing, {}, RowShape(2, 1, N_LAST)),
        (nothing, {"flash_attn": "on"}, RowShape(2, 1, N_LAST)),
        (nothing, {"is_plain": False}, RowShape(8, 4, N_LAST)),
        (is_narrow, {}, RowShape(8, 4, N_LAST)),
        (is_touched_by(float("nan")), {}, RowShape(8, 4, N_LAST)),
        (is_touched_by(-0.0), {}, RowShape(8, 4, N_LAST)),
        (is_left_over, {}, RowShape(4, 4, N_LAST)),
        (is_left_over, {"is_plain": False}, RowShape(8, 4, N_LAST)),
        (each_width, {}, WHOLE),
        (each_width, {"is_plain": False}, WHOLE),
    ],
)
def test_shape_is_the_first_in_which_logits_do_not_depend_on_the_width(
    monkeypatch: pytest.MonkeyPatch,
    model: LlamaModel,
    states: LlamaModel,
    touch: Touch,
    given: dict[str, Any],
    shape: RowShape,
) -> None:
    said = {name: value for name, value in given.items() if name != "is_plain"}
    for tried in (model, states) if shape in (RowShape(2, 1, N_LAST), WHOLE) else (model,):
        found = find(monkeypatch, tried, touch, **given)
        assert (found.exactness, found.shape) == (BITWISE, shape)
        assert found.options == options(**said)


def is_nan_beside_likes(backend: LlamaBackend, slot: Slot) -> float:
    return float("nan") if has_likes(backend, slot) else 1.0


@pytest.mark.parametrize("touch", [is_slot_2, is_first_row, has_likes, is_nan_beside_likes])
def test_what_no_shape_helps_is_refused(
    monkeypatch: pytest.MonkeyPatch, model: LlamaModel, touch: Touch
) -> None:
    found = find(monkeypatch, model, touch)
    assert found.exactness.startswith("not guaranteed: ")
    assert "with the other rows of a step" in found.exactness
    assert (found.options.flash_attn, found.shape) == ("auto", ANY_SHAPE)


@pytest.mark.parametrize("parallel", [2, 5, PARALLEL, 256])
def test_long_company_that_changes_logits_is_found(
    monkeypatch: pytest.MonkeyPatch, model: LlamaModel, parallel: int
) -> None:
    found = find(monkeypatch, model, has_long_company, parallel=parallel)
    assert "logits change with" in found.exactness


@pytest.mark.parametrize("n_slots", [33, 64, 256])
def test_width_of_more_slots_than_are_tried_is_never_another_one(
    monkeypatch: pytest.MonkeyPatch, model: LlamaModel, n_slots: int
) -> None:
    found = find(monkeypatch, model, each_width, parallel=n_slots)
    widths = {found.shape.width(n) for n in range(1, n_slots + 1)}
    assert found.exactness != BITWISE or widths == {n_sequences(n_slots)}


def test_shape_does_not_depend_on_the_number_of_threads(synth: SynthFactory) -> None:
    """Also not with one head of keys, where threads share the cells of few rows: workers have fewer threads."""
    with closing(open_model(synth("gemma3"))) as opened:
        found = [
            find_exact(opened, options(parallel=4, n_threads=n_threads)) for n_threads in (1, 3)
        ]
    assert {tuning.exactness for tuning in found} == {BITWISE}
    assert len({tuning.shape for tuning in found}) == 1


# ---- cuts of prompts ----


@pytest.mark.parametrize(
    ("touch", "n_last", "n_ubatch"),
    [
        *((nothing, 8, 512), (is_short_chunk, 64, 256), (each_chunk, 0, 512)),
        pytest.param(nothing, 8, 256, id="compared with none that was cut"),
    ],
)
def test_last_chunk_is_the_shortest_with_which_cuts_change_nothing(
    monkeypatch: pytest.MonkeyPatch, model: LlamaModel, touch: Touch, n_last: int, n_ubatch: int
) -> None:
    found = find(monkeypatch, model, touch, flash_attn="off", n_ubatch=n_ubatch)
    assert (found.exactness, found.shape.n_last) == (BITWISE, n_last)


@pytest.mark.parametrize("given", [{"n_ubatch": 128}, {"n_batch": 250}], ids=str)
def test_cuts_are_fixed_in_what_is_too_small(
    monkeypatch: pytest.MonkeyPatch, model: LlamaModel, given: dict[str, Any]
) -> None:
    found = find(monkeypatch, model, nothing, **given)
    assert (found.exactness, found.shape) == (BITWISE, RowShape(2, 1))
    with closing(LlamaBackend(model, found, owns_model=False)) as backend:
        assert backend.cuts.is_every


def test_cells_that_differ_by_a_cut_are_found_where_logits_do_not(
    monkeypatch: pytest.MonkeyPatch, model: LlamaModel
) -> None:
    export = LlamaBackend.export_state

    def export_state(backend: LlamaBackend, key: int) -> NDArray[np.uint8]:
        export(backend, key)
        return np.array([len(backend.last_chunks[0].inputs) % 251], np.uint8)

    monkeypatch.setattr(LlamaBackend, "export_state", export_state)
    assert find(monkeypatch, model, nothing).shape == RowShape(2, 1)


@pytest.mark.parametrize(("flash_attn", "n_last"), [("auto", 64), ("on", 64), ("off", 8)])
def test_last_chunk_is_long_for_flash_attention_whatever_is_seen(
    monkeypatch: pytest.MonkeyPatch, model: LlamaModel, flash_attn: str, n_last: int
) -> None:
    export = LlamaBackend.export_state

    def export_state(backend: LlamaBackend, key: int) -> NDArray[np.uint8]:
        export(backend, key)
        return np.zeros(1, np.uint8)

    monkeypatch.setattr(LlamaBackend, "export_state", export_state)
    assert find(monkeypatch, model, nothing, flash_attn=flash_attn).shape.n_last == n_last


# ---- flash attention ----


def is_by_flash_attention(backend: LlamaBackend, slot: Slot) -> float:
    """Flash attention differs by the row's place, the other does not."""
    return is_first_row(backend, slot) * (backend.options.flash_attn != "off")


def test_flash_attention_is_turned_off_where_that_is_enough(
    monkeypatch: pytest.MonkeyPatch, model: LlamaModel, states: LlamaModel
) -> None:
    for tried in (model, states):
        found = find(monkeypatch, tried, is_by_flash_attention)
        assert (found.exactness, found.options.flash_attn) == (BITWISE, "off")
        assert found.shape == RowShape(2, 1, N_LAST_WITHOUT)


@pytest.mark.parametrize("given", [{"flash_attn": "on"}, {"cache_type_v": "q8_0"}], ids=str)
def test_flash_attention_that_is_needed_is_not_turned_off(
    monkeypatch: pytest.MonkeyPatch, model: LlamaModel, given: dict[str, Any]
) -> None:
    found = find(monkeypatch, model, is_by_flash_attention, **given)
    assert "with the other rows of a step" in found.exactness


def test_refusal_is_that_with_flash_attention_where_nothing_helps(
    monkeypatch: pytest.MonkeyPatch, model: LlamaModel
) -> None:
    def touch(backend: LlamaBackend, slot: Slot) -> float:
        return is_first_row(backend, slot) * (2 - (backend.options.flash_attn == "off"))

    found = find(monkeypatch, model, touch)
    assert "by up to 2)" in found.exactness
    assert found.options.flash_attn == "auto"


@pytest.mark.parametrize(
    ("parallel", "exact_slots", "is_plain"), [(1, 2, True), (2, 4, False), (8, 17, True)]
)
def test_replica_finds_what_an_engine_of_all_slots_finds(
    monkeypatch: pytest.MonkeyPatch,
    model: LlamaModel,
    parallel: int,
    exact_slots: int,
    is_plain: bool,
) -> None:
    for touch in (nothing, is_left_over):
        said: dict[str, Any] = {"is_plain": is_plain}
        whole = find(monkeypatch, model, touch, parallel=exact_slots, **said)
        said["exact_slots"] = exact_slots
        part = find(monkeypatch, model, touch, parallel=parallel, **said)
        assert part.shape == whole.shape
        assert part.shape.least <= n_sequences(parallel, exact_slots)


# ---- memory that cannot be cut ----


@pytest.mark.parametrize(
    ("touch", "parallel", "is_exact"),
    [(nothing, 4, True), (each_width, 1, True), (each_width, 4, False)],
)
def test_memory_without_pad_rows_is_exact_where_widths_are_alike(
    monkeypatch: pytest.MonkeyPatch,
    states: LlamaModel,
    touch: Touch,
    parallel: int,
    is_exact: bool,
) -> None:
    def find_memory(*args: Any, **given: Any) -> FoundMemory:
        found = real(*args, **given)
        return replace(found, capabilities=replace(found.capabilities, can_save=False))

    real = memory.find_memory
    monkeypatch.setattr("cbatch.backend.llama.llama_backend.find_memory", find_memory)
    found = find(monkeypatch, states, touch, parallel=parallel)
    assert (found.exactness == BITWISE) == is_exact
    assert found.shape == ANY_SHAPE


def test_loaded_states_that_change_logits_are_refused(
    monkeypatch: pytest.MonkeyPatch, states: LlamaModel
) -> None:
    loaded: set[int] = set()

    def import_state(backend: LlamaBackend, key: int, *given: Any) -> None:
        loaded.add(id(backend))
        real(backend, key, *given)

    def touch(backend: LlamaBackend, slot: Slot) -> float:
        return float(id(backend) in loaded)

    real = LlamaBackend.import_state
    monkeypatch.setattr(LlamaBackend, "import_state", import_state)
    assert "saved states" in find(monkeypatch, states, touch).exactness


# ---- sizes ----


@pytest.mark.parametrize(
    "given",
    [
        {"parallel": 1, "ctx_per_seq": 1},
        {"parallel": 3, "ctx_per_seq": None, "n_ctx": 6},
        {"parallel": 3, "n_batch": 3, "n_ubatch": 1},
        {"parallel": 256, "ctx_per_seq": None, "n_ctx": 1024},
        {"parallel": 256, "n_ubatch": 1},
    ],
    ids=str,
)
def test_small_windows_and_steps_are_tried_too(model: LlamaModel, given: dict[str, Any]) -> None:
    found, parallel = find_exact(model, options(**given)), given["parallel"]
    assert (found.exactness, found.options) == (BITWISE, options(**given))
    assert found.shape.has_pads == (parallel > 1)
    assert found.shape.width(parallel) <= n_sequences(parallel)


def test_engine_with_steps_of_one_row_a_slot_answers(test_model: Path) -> None:
    sizes: dict[str, Any] = {"parallel": 3, "n_batch": 3, "n_ubatch": 1, "n_threads": 1}
    with load(test_model, exact=True, ctx_per_seq=64, **sizes) as engine:
        assert engine.exactness == BITWISE
        found = [engine.submit(text, options={"max_tokens": 3}) for text in ("a", "b c", "d e f g")]
        assert all(request.result().finish_reason for request in found)


# ---- pad rows that are NaN ----


@pytest.mark.parametrize("flash_attn", ["auto", "off"])
def test_model_that_makes_pad_rows_nan_is_refused(
    synth: SynthFactory, tmp_path: Path, flash_attn: str
) -> None:
    found = open_model(without_numbers(synth(type="f16"), tmp_path / "model.gguf", PAD_TOKEN))
    assert (
        "cells of token 0, which pad rows compute"
        in find_exact(found, options(flash_attn=flash_attn)).exactness
    )
    assert find_exact(found, options(flash_attn=flash_attn, parallel=1)).exactness == BITWISE
    found.close()


# ---- what it takes ----


@pytest.mark.parametrize(("flash_attn", "is_plain"), [("on", False), ("off", True)])
def test_search_takes_few_tokens_and_steps(
    monkeypatch: pytest.MonkeyPatch, model: LlamaModel, flash_attn: str, is_plain: bool
) -> None:
    steps: list[int] = []

    def run(backend: LlamaBackend, plan: StepPlan) -> StepResult:
        if plan.spans:
            steps.append(sum(len(c.inputs) for c in plan.spans))
        return real(backend, plan)

    real = LlamaBackend.run
    monkeypatch.setattr(LlamaBackend, "run", run)
    given: dict[str, Any] = {"parallel": 16, "flash_attn": flash_attn}
    assert find(monkeypatch, model, nothing, is_plain=is_plain, **given).exactness == BITWISE
    assert sum(steps) <= 550
    assert len(steps) <= 15


# ---- what stops it ----


def test_search_that_cannot_run_says_why(test_model: Path) -> None:
    closed = open_model(test_model)
    closed.close()
    found = find_exact(closed, options())
    assert found.exactness.startswith("not guaranteed: the probe could not run: ")
    assert test_model.name in found.exactness


def test_search_ends_once_it_is_stopped(model: LlamaModel) -> None:
    asked = []

    def is_stopped() -> bool:
        asked.append(1)
        return len(asked) > 9

    found = find_exact(model, options(), is_stopped)
    assert found.exactness == "not guaranteed: the probe could not run: the probe was stopped"
    assert len(asked) < 20


# ---- what is said of a model ----


def test_description_says_what_loading_finds(synth: SynthFactory) -> None:
    found = describe_model(synth("exact", type="f16"), options(), asks_probe=True)
    assert found["exactness"] == BITWISE
