"""What the types of weights say of kernels: whether rows are padded to 8, and where company chooses a kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import cbatch
from cbatch.backend.load.open_model import open_model
from cbatch.backend.load.weight_kernels import has_plain_weights, may_cut_anywhere, tiled_experts
from cbatch.engine_options import EngineOptions
from cbatch.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import SynthFactory

EXPERTS = {"n_expert": 4, "n_expert_used": 2, "n_layer": 1}

on_tiles = pytest.mark.cpu("its kernels do not change with the rows of an expert")

PLAIN, MIXED = ("f16", "bf16", "q8_0", "q4_0"), ("q4_k_m", "iq4_xs")


@pytest.mark.parametrize(
    ("type", "is_plain"), [*((type, True) for type in PLAIN), *((type, False) for type in MIXED)]
)
def test_plain_weights_are_those_of_one_kernel(
    synth: SynthFactory, type: str, is_plain: bool
) -> None:
    found = open_model(synth("exact", type=type))
    assert has_plain_weights(found) == is_plain
    found.close()


def test_weights_of_a_split_model_are_those_of_all_parts(
    synth: SynthFactory, tmp_path: Path
) -> None:
    for types, is_plain in ((("f16", "q8_0"), True), (("f16", "q4_k_m"), False)):
        parts = [tmp_path / f"{types[1]}-0000{i}-of-00002.gguf" for i in (1, 2)]
        for part, type in zip(parts, types, strict=True):
            part.write_bytes(synth("exact", type=type).read_bytes())
        found = open_model(parts[0])
        assert has_plain_weights(found) == is_plain
        found.close()


@on_tiles
@pytest.mark.parametrize(("type", "said"), [("q6_k", "q6_K"), ("iq4_xs", "iq4_xs"), ("q8_0", "")])
def test_experts_of_two_kernels_are_told_by_name(synth: SynthFactory, type: str, said: str) -> None:
    found = open_model(synth("exact", type=type, **EXPERTS))
    words = tiled_experts(found, EngineOptions(parallel=16, exact=True))
    assert bool(words) == bool(said)
    assert said in words
    assert not said or "_exps.weight" in words
    assert tiled_experts(found, EngineOptions(parallel=4, exact=True)) == ""
    found.close()
    dense = open_model(synth("exact", type=type))
    assert tiled_experts(dense, EngineOptions(parallel=16, exact=True)) == ""
    dense.close()


@on_tiles
def test_experts_on_processors_are_told_where_servers_could_be(
    synth: SynthFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llama_cpp.llama_supports_gpu_offload", lambda: True)  # as with RPC
    found = open_model(synth("exact", type="q6_k", **EXPERTS))
    assert "q6_K" in tiled_experts(found, EngineOptions(parallel=16, exact=True))
    assert not may_cut_anywhere(found, EngineOptions(exact=True))
    found.close()
    dense = open_model(synth("exact", type="q6_k"))
    assert may_cut_anywhere(dense, EngineOptions(exact=True))
    dense.close()


@on_tiles
@pytest.mark.parametrize(
    ("name", "value", "has_reason"),
    [
        ("GGML_CPU_TILED_MM", "0", False),
        ("GGML_CPU_TILED_MM", "1", True),
        ("GGML_CPU_TILED_MM_FORCE", "1", False),
    ],
)
def test_experts_have_one_kernel_where_a_variable_says_so(
    synth: SynthFactory,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    value: str,
    has_reason: bool,
) -> None:
    monkeypatch.setenv(name, value)
    found = open_model(synth("exact", type="q6_k", **EXPERTS))
    assert bool(tiled_experts(found, EngineOptions(parallel=16, exact=True))) == has_reason
    found.close()


@on_tiles
def test_exact_is_refused_for_experts_that_depend_on_company(synth: SynthFactory) -> None:
    path = synth("exact", type="q6_k", **EXPERTS)
    with pytest.raises(ConfigError, match=r"q6_K .*GGML_CPU_TILED_MM=0.*parallel=4"):
        cbatch.load(path, exact=True, parallel=8, ctx_per_seq=256)
    with cbatch.load(path, exact=True, parallel=4, ctx_per_seq=256) as engine:
        assert engine.exactness == "bitwise"
