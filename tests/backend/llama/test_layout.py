"""What a model's sequences take: as its file says, and as llama.cpp's own saved states prove."""

from __future__ import annotations

import ctypes
from contextlib import closing
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import llama_cpp
import pytest

from cbatch.backend.llama.layout import (
    CELL_TYPES,
    Footprint,
    Layout,
    footprint,
    read_layout,
)
from cbatch.backend.llama.llama_backend import LlamaBackend
from cbatch.backend.llama.model_tuning import Tuning
from cbatch.backend.load.open_model import open_model
from cbatch.engine_options import EngineOptions

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cbatch.backend.llama.model import LlamaModel
    from tests.conftest import SynthFactory

N_OF_A_CELL = 12
"""Most bytes that a saved cell has besides keys and values: its position and its sequences."""

SIZES: dict[str, object] = {
    "block_count": 4,
    "embedding_length": 64,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
}


def layout(
    changes: Mapping[str, object] | None = None,
    *,
    architecture: str = "llama",
    lists: dict[str, tuple[int, ...]] | None = None,
    has_states: bool = False,
) -> Layout:
    """The layout of a file with these sizes; None leaves one out."""
    sizes = {**SIZES, **(changes or {})}
    metadata = {f"{architecture}.{k}": str(v) for k, v in sizes.items() if v is not None}
    named = {f"{architecture}.{k}": v for k, v in (lists or {}).items()}
    model = SimpleNamespace(
        architecture=architecture, metadata=metadata, integers=named, has_states=has_states
    )
    return read_layout(cast("LlamaModel", model))


def cost(layout: Layout, **settings: Any) -> Footprint:
    found = footprint(layout, EngineOptions(**settings))
    assert found is not None
    return found


# ---- against llama.cpp ----


def test_cell_types_are_as_the_library_stores_them() -> None:
    ggml = llama_cpp.llama_cpp._lib
    of = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int)(("ggml_blck_size", ggml))
    size = ctypes.CFUNCTYPE(ctypes.c_size_t, ctypes.c_int)(("ggml_type_size", ggml))
    name = ctypes.CFUNCTYPE(ctypes.c_char_p, ctypes.c_int)(("ggml_type_name", ggml))
    for word, kind in CELL_TYPES.items():
        assert name(kind.id).decode() == word
        assert (of(kind.id), size(kind.id)) == (kind.n_block, kind.n_bytes)


@pytest.mark.parametrize(
    ("shape", "types"),
    [
        ("test", ("f16", "f16")),
        ("exact", ("q8_0", "q8_0")),
        ("test", ("q4_1", "bf16")),
        ("exact", ("f32", "q5_0")),
    ],
)
def test_bytes_of_a_cell_are_those_that_llama_saves(
    synth: SynthFactory, shape: str, types: tuple[str, str]
) -> None:
    options = EngineOptions.of(
        {"parallel": 2, "n_threads": 1, "cache_type_k": types[0], "cache_type_v": types[1]}
    )
    check(open_model(synth(shape)), options)


def test_heads_that_a_file_lists_layer_by_layer_are_read(synth: SynthFactory) -> None:
    listed = {"llama.attention.head_count": [2, 2], "llama.attention.head_count_kv": [1, 1]}
    model = open_model(synth("test", metadata=listed))
    assert "llama.attention.head_count_kv" not in model.metadata
    assert read_layout(model).heads == (1, 1)
    check(model, EngineOptions(parallel=2, n_threads=1))


def test_file_that_is_gone_has_no_lists(synth: SynthFactory) -> None:
    with closing(open_model(synth("test"))) as model:
        model.name = "gone.gguf"
        assert model.integers == {}
        assert read_layout(model).heads == (1, 1)


def test_state_of_a_recurrent_model_is_what_llama_saves(synth: SynthFactory) -> None:
    model = open_model(synth("mamba"))
    known = cost(read_layout(model))
    with closing(LlamaBackend(model, Tuning(EngineOptions(parallel=2, n_threads=1)))) as backend:
        assert (known.n_cell_bytes, known.is_about) == (0, False)
        assert 0 <= backend.memory.saved_bytes - known.n_state_bytes <= 100


def check(model: Any, options: EngineOptions) -> None:
    known = cost(
        read_layout(model), cache_type_k=options.cache_type_k, cache_type_v=options.cache_type_v
    )
    assert not known.is_about
    with closing(LlamaBackend(model, Tuning(options))) as backend:
        n_saved = backend.memory.saved_bytes_per_cell
    assert 0 < n_saved - known.n_cell_bytes <= N_OF_A_CELL


# ---- what files say ----


def test_cell_is_keys_and_values_of_all_layers() -> None:
    assert cost(layout()) == Footprint(4 * (2 * 16 + 2 * 16) * 2)
    assert cost(layout(), cache_type_k="q8_0", cache_type_v="f32").n_cell_bytes == 4 * (34 + 128)
    assert Footprint(10, 1000).of(n_slots=3, n_cells=256) == 3000 + 2560
    assert layout({"attention.head_count_kv": None}).heads == (4, 4, 4, 4)
    found = layout({"attention.key_length": 48, "attention.value_length": 32})
    assert (found.n_key, found.n_value, found.is_about) == (48, 32, False)
    found = layout({"attention.key_length_swa": 32})  # the widest count where layers differ
    assert (found.n_key, found.key_widths) == (32, frozenset((16, 32)))


def test_layers_behind_those_with_cells_count_nothing() -> None:
    assert len(layout({"nextn_predict_layers": 1}).heads) == 3
    assert len(layout({"attention.shared_kv_layers": 3}).heads) == 1
    assert len(layout({"block_count": 35}, architecture="gemma3n").heads) == 20


def test_model_that_stores_keys_alone_has_no_values() -> None:
    found = layout({"attention.key_length": 96, "attention.key_length_mla": 64})
    assert (found.n_key, found.n_value, found.has_one_type) == (96, 0, True)
    assert cost(found).n_cell_bytes == 4 * 2 * 96 * 2
    assert not layout().has_one_type


@pytest.mark.parametrize(
    ("changes", "lists"),
    [
        ({"attention.key_length_swa": 32}, {}),
        ({"attention.indexer.head_count": 4}, {}),
        ({"attention.head_count_kv": None}, {"attention.head_count_kv": (1, 2, 1, 2)}),
    ],
    ids=str,
)
def test_layers_that_differ_make_it_an_estimate(
    changes: dict[str, object], lists: dict[str, tuple[int, ...]]
) -> None:
    assert layout(changes, lists=lists).is_about


def test_hybrid_counts_states_of_the_layers_without_heads() -> None:
    ssm: dict[str, object] = {
        "ssm.inner_size": 128,
        "ssm.state_size": 16,
        "ssm.conv_kernel": 4,
        "ssm.group_count": 1,
    }
    listed: dict[str, tuple[int, ...]] = {"attention.head_count_kv": (0, 2, 0, 0)}
    found = layout({**ssm, "attention.head_count_kv": None}, lists=listed, has_states=True)
    assert found.n_state == 3 * (3 * (128 + 2 * 16) + 16 * 128)
    assert found.is_about
    assert cost(found).n_cell_bytes == 2 * (16 + 16) * 2
    assert layout(ssm).n_state == 0  # such a model keeps none
    few = {name: ssm[name] for name in ("ssm.inner_size", "ssm.state_size")}
    unlisted = layout({**SIZES, **few}, has_states=True)
    assert (unlisted.n_state, unlisted.is_about) == (4 * 16 * 128, True)


@pytest.mark.parametrize(
    "changes",
    [
        {"attention.head_count": None, "attention.head_count_kv": None},
        {"attention.head_count": 0},
        {"block_count": None},
        {"attention.head_count": 0, "attention.head_count_kv": 0},
    ],
    ids=str,
)
def test_file_that_does_not_tell_gives_nothing(changes: dict[str, object]) -> None:
    found = layout(changes)
    assert not found.is_known
    assert footprint(found, EngineOptions()) is None
