"""What is said of a context reaches llama.cpp, and what it would refuse, or end the process over, is refused before."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, Any

import llama_cpp
import pytest

import cbatch
from cbatch.backend.llama.context import (
    _ROPE_SCALING,
    _params,
    check_cells,
    context_cells,
    slot_window,
)
from cbatch.backend.llama.layout import CELL_TYPES
from cbatch.backend.llama.llama_backend import LlamaBackend
from cbatch.backend.llama.model_tuning import Tuning
from cbatch.backend.load.open_model import open_model
from cbatch.core.span import N_TARGETS_MAX
from cbatch.engine_options import EngineOptions
from cbatch.errors import ConfigError, ModelLoadError
from tests.runtime.backends import backend_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from cbatch.backend.llama.model import LlamaModel
    from tests.conftest import SynthFactory

SMALL: dict[str, Any] = {"parallel": 2, "ctx_per_seq": 256, "n_threads": 1}
PROMPT = cbatch.BatchPrompt(
    tokens=[300 + 7 * i for i in range(40)], options={"max_tokens": 12, "temperature": 0}
)


@pytest.fixture(scope="module")
def model(synth: SynthFactory) -> Iterator[LlamaModel]:
    with closing(open_model(synth("test"), EngineOptions(exact=True))) as opened:
        yield opened


def options(**settings: Any) -> EngineOptions:
    return EngineOptions.of({**SMALL, **settings})


def answer(path: Path, **settings: Any) -> tuple[int, ...]:
    with cbatch.load(path, **SMALL, **settings) as engine:
        return engine.submit(PROMPT).result().token_ids


def logprobs(path: Path, **settings: Any) -> list[float]:
    """Of the prompt's tokens."""
    prompt = cbatch.BatchPrompt(
        tokens=PROMPT.tokens, options={"prompt_logprobs": 0, "max_tokens": 0}
    )
    with cbatch.load(path, **SMALL, **settings) as engine:
        found = engine.submit(prompt).result().prompt_logprobs or ()
    return [token.logprob for token in found if token]


# ---- what reaches llama.cpp ----


def test_nothing_said_is_llama_s_own(model: LlamaModel) -> None:
    params, own = _params(model, options(), 1), llama_cpp.llama_context_default_params()
    for name in (
        *("type_k", "type_v", "flash_attn_type", "offload_kqv", "rope_scaling_type"),
        *("rope_freq_base", "rope_freq_scale", "yarn_ext_factor", "yarn_attn_factor"),
        *("yarn_beta_fast", "yarn_beta_slow", "yarn_orig_ctx", "kv_unified"),
    ):
        assert getattr(params, name) == getattr(own, name), name
    assert context_cells(model, EngineOptions()) == 16 * 2048
    assert _params(model, EngineOptions(), 1).n_seq_max == EngineOptions().n_slots == 16


def test_what_is_said_is_passed_on(model: LlamaModel) -> None:
    said: dict[str, Any] = {
        "rope_freq_base": 5000.0,
        "rope_freq_scale": 0.5,
        "yarn_ext_factor": 0.75,
        "yarn_attn_factor": 1.5,
        "yarn_beta_fast": 16.0,
        "yarn_beta_slow": 2.0,
        "yarn_orig_ctx": 1024,
        "offload_kqv": False,
    }
    params = _params(model, options(**said, rope_scaling="yarn", cache_type_k="q5_1"), 3)
    assert {name: getattr(params, name) for name in said} == said
    assert params.rope_scaling_type == llama_cpp.LLAMA_ROPE_SCALING_TYPE_YARN
    assert (params.type_k, params.type_v) == (CELL_TYPES["q5_1"].id, CELL_TYPES["f16"].id)
    assert (params.n_seq_max, params.n_outputs_max, params.n_ctx) == (2, 2 + N_TARGETS_MAX, 512)
    assert (params.n_threads, params.n_threads_batch) == (3, 3)
    assert _params(model, options(yarn_ext_factor=0), 1).yarn_ext_factor == 0
    for word, number in (("auto", -1), ("on", 1), ("off", 0)):
        assert _params(model, options(flash_attn=word), 1).flash_attn_type == number
    for name, value in _ROPE_SCALING.items():
        word = "UNSPECIFIED" if name is None else name.upper()
        assert getattr(llama_cpp, f"LLAMA_ROPE_SCALING_TYPE_{word}") == value


@pytest.mark.parametrize(("n_slots", "n_sequences"), [(1, 1), (2, 4), (4, 4), (5, 8), (16, 16)])
def test_exact_context_has_sequences_and_cells_for_pad_rows(
    model: LlamaModel, n_slots: int, n_sequences: int
) -> None:
    settings = EngineOptions(parallel=n_slots, ctx_per_seq=256, exact=True, n_batch=n_slots)
    params = _params(model, settings, 1)
    window = 256 if n_slots == 1 else 512  # llama.cpp counts by 256
    assert (params.n_seq_max, params.n_ctx) == (n_sequences, n_sequences * window)
    assert min(params.n_batch, params.n_ubatch) >= n_sequences
    assert slot_window(settings, params.n_ctx, 4096, is_pool=False) >= 256


@pytest.mark.parametrize(
    ("settings", "is_changed"),
    [
        ({"rope_freq_base": 500.0}, True),
        ({"rope_scaling": "linear", "rope_freq_scale": 0.25}, True),
        ({"rope_scaling": "yarn", "rope_freq_scale": 0.25, "yarn_orig_ctx": 64}, True),
        ({"cache_type_k": "q4_0", "cache_type_v": "q4_0"}, True),
        ({"offload_kqv": False}, False),
        ({"split_mode": "layer", "main_gpu": 0, "tensor_split": [1.0]}, False),
    ],
    ids=str,
)
def test_what_is_said_shows_in_the_tokens(
    synth: SynthFactory, settings: dict[str, Any], is_changed: bool
) -> None:
    path = synth("test")
    assert (answer(path, **settings) != answer(path)) == is_changed


YARN: dict[str, Any] = {"rope_scaling": "yarn", "rope_freq_scale": 0.25}
YARN_VALUES: dict[str, Any] = {"yarn_beta_fast": 1.0, "yarn_beta_slow": 20.0, "yarn_orig_ctx": 64}


@pytest.mark.parametrize("name", YARN_VALUES)
def test_correction_of_yarn_has_an_effect_or_is_refused(synth: SynthFactory, name: str) -> None:
    path, said = synth("test"), {name: YARN_VALUES[name]}
    assert logprobs(path, **YARN, **said) != logprobs(path, **YARN)
    for settings in (dict[str, Any](), {**YARN, "yarn_ext_factor": 0.0}):
        with pytest.raises(
            ConfigError, match=f"{name}=.* has no effect without YaRN: rope_scaling='yarn'"
        ):
            cbatch.load(path, **SMALL, **settings, **said)


def test_factor_of_yarn_has_an_effect_or_is_refused(synth: SynthFactory) -> None:
    path, said = synth("test"), dict[str, Any](yarn_attn_factor=3.0)
    unmixed = {**YARN, "yarn_ext_factor": 0.0}
    assert logprobs(path, **unmixed, **said) != logprobs(path, **unmixed)
    assert logprobs(path, **said) != logprobs(path)
    own = synth("test", metadata={"llama.rope.scaling.type": "yarn"})
    cbatch.load(own, **SMALL, yarn_beta_fast=16.0).close()
    for model, settings in ((path, YARN), (own, {})):
        with pytest.raises(ConfigError, match=r"has no effect without yarn_ext_factor=0 \(else"):
            cbatch.load(model, **SMALL, **settings, **said)


@pytest.mark.parametrize("cell_type", CELL_TYPES)
def test_every_type_of_cells_answers(synth: SynthFactory, cell_type: str) -> None:
    settings: dict[str, Any] = {"cache_type_k": cell_type, "cache_type_v": cell_type}
    assert len(answer(synth("test"), **settings)) == 12


# ---- what is refused ----


@pytest.mark.parametrize(
    ("name", "kind", "flash_attn", "n_embd"),
    [
        ("cache_type_k", "q8_0", "auto", 96),
        ("cache_type_v", "q8_0", "on", 96),
        # without flash attention llama.cpp does not look: heads of 48 give no numbers, of 24 an abort
        ("cache_type_k", "q4_0", "off", 96),
        ("cache_type_k", "q4_0", "off", 48),
    ],
)
def test_blocks_that_do_not_divide_the_heads_are_refused(
    synth: SynthFactory, name: str, kind: str, flash_attn: str, n_embd: int
) -> None:
    path = synth("test", n_embd=n_embd, n_head=2, n_kv_head=n_embd // 48, type="f32")
    settings: dict[str, Any] = {name: kind, "flash_attn": flash_attn}
    words = f"{name}='{kind}' stores blocks of 32 .* heads have {n_embd // 2}, .*: use 'f16'"
    with pytest.raises(ConfigError, match=words):
        cbatch.load(path, **SMALL, **settings)
    with closing(open_model(path)) as opened, pytest.raises(ConfigError, match=words):
        LlamaBackend(opened, Tuning(options(**settings)), owns_model=False)


def test_model_that_stores_both_in_one_wants_one_type(synth: SynthFactory) -> None:
    latent = {"llama.attention.key_length_mla": 32, "llama.attention.value_length_mla": 32}
    with closing(open_model(synth("test", metadata=latent))) as opened:
        check_cells(opened, options(cache_type_k="q8_0", cache_type_v="q8_0"))
        with pytest.raises(ConfigError, match="must be equal: a model of architecture 'llama'"):
            check_cells(opened, options(cache_type_v="q8_0"))


def test_values_in_blocks_are_refused_where_flash_attention_cannot_be(
    synth: SynthFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(open_model(synth("test"))) as opened:
        opened.metadata = {
            key.replace("llama.", "grok."): value for key, value in opened.metadata.items()
        } | {"general.architecture": "grok"}
        check_cells(opened, options(cache_type_k="q8_0"))
        with pytest.raises(ConfigError, match="which grok models cannot have"):
            check_cells(opened, options(cache_type_v="q8_0"))


def test_context_that_cannot_be_made_names_its_numbers(
    model: LlamaModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llama_cpp, "llama_init_from_model", lambda *args: None)
    with pytest.raises(ModelLoadError, match=r"context of 512 cells for 2 sequences.*ctx_per_seq"):
        LlamaBackend(model, Tuning(options()), owns_model=False)


@pytest.mark.cpu("it would offload")
def test_build_that_could_offload_is_none_that_does(
    synth: SynthFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llama_cpp.llama_supports_gpu_offload", lambda: True)
    with cbatch.load(synth("test"), **SMALL) as engine:
        assert backend_of(engine, LlamaBackend).has_prompts_apart


@pytest.mark.skipif(llama_cpp.llama_supports_gpu_offload(), reason="this build has a GPU")
def test_refusal_of_a_placement_quotes_llama(synth: SynthFactory) -> None:
    with pytest.raises(ModelLoadError, match="SPLIT_MODE_TENSOR needs >= 1 devices"):
        cbatch.load(synth("test"), **SMALL, split_mode="tensor")


def test_borrowed_model_is_where_its_owner_put_it(test_model: Path) -> None:
    llama = llama_cpp.Llama(
        str(test_model), n_ctx=64, n_gpu_layers=3, split_mode=0, main_gpu=0, verbose=False
    )
    with closing(open_model(llama)) as borrowed:
        placement = borrowed.placement
        assert (placement.n_gpu_layers, placement.split_mode, placement.main_gpu) == (3, "none", 0)
    llama.close()


def test_model_without_its_weights_tells_all_but_computes_nothing(test_model: Path) -> None:
    with (
        closing(open_model(test_model, EngineOptions(use_mlock=True), has_weights=False)) as told,
        closing(open_model(test_model)) as whole,
    ):
        for name in ("n_ctx_train", "n_bytes", "n_layers", "metadata", "integers"):
            assert getattr(told, name) == getattr(whole, name), name
        assert told.vocab.tokenize("Hi") == whole.vocab.tokenize("Hi")
