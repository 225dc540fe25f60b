"""Tiny random models of many architectures, made in milliseconds: what llama.cpp computes is tried on each.

`write_arch("qwen3next", path)` writes one of `ZOO`; the fixture `zoo` gives its path, written once. The vocabulary is
llama.cpp's own for tests: token ids are the natural prompts, any text is some tokens, and no token ends an answer.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from cbatch.bench.synthetic import Shape

Memory: TypeAlias = Literal["cells", "window", "state", "hybrid"]
"""What a sequence is remembered by: cells that can be cut anywhere, cells of which layers with a window lose some, a
state of one size, or a state beside cells."""

_CELLS = """
apertus arcee arctic baichuan bailingmoe bailingmoe2 bitnet bloom chatglm codeshell cogvlm command-r dbrx deci deepseek
deepseek2 deepseek32 dots1 ernie4_5 ernie4_5-moe exaone falcon gemma glm-dsa glm4 glm4moe gpt2 gptneox granite
granite-moe granitemoe grok grovemoe hrm_text hunyuan-dense hunyuan-moe hunyuan_vl hy_v3 internlm2 jais jais2 llama
llama-f16 llama-moe llama-q4_k_m llama-q6_k llama-tied maincoder minicpm minicpm3 minimax-m2 minimax-m3 mistral3
mistral4 mpt nanbeige nemotron olmo olmoe openelm orion paddleocr pangu-embedded phi2 phi3 phimoe plamo qwen qwen2
qwen2-q5_0 qwen2moe qwen2vl qwen3 qwen3-bf16 qwen3moe qwen3moe-q4_0 qwen3vl qwen3vlmoe refact seed_oss smollm3 stablelm
starcoder starcoder2 talkie xverse
"""
_WINDOW = """
afmoe cohere2 cohere2moe exaone-moe exaone4 gemma2 gemma3 gemma3-q8_0 gemma4 gpt-oss granite_swa laguna llama4 maple
mellum mimo2 muse-glimmer olmo2 plamo3 smallthinker spark2_5 step35
"""
_STATE = "arwkv7 mamba mamba-q8_0 mamba2 rwkv6 rwkv7"
_HYBRID = """
bailingmoe3 deepseek4 falcon-h1 granitehybrid jamba kimi-k3 kimi-linear lfm2 lfm2moe minimax-01 nemotron_h
nemotron_h_moe plamo2 qwen35 qwen35moe qwen3next qwen3next-q8_0
"""

_OF_MEMORY: tuple[tuple[Memory, str], ...] = (
    ("cells", _CELLS),
    ("window", _WINDOW),
    ("state", _STATE),
    ("hybrid", _HYBRID),
)
ZOO: Mapping[str, Memory] = MappingProxyType(
    {name: memory for memory, names in _OF_MEMORY for name in names.split()}
)
"""The memory of each model, by name: the architecture's, with `-moe` for experts, `-tied` for one matrix of embedding
and output, or a type of weights, which are float without."""

REFUSED: Mapping[str, str] = MappingProxyType(
    {
        "dream": "a diffusion model",
        "llada": "a diffusion model",
        "llada-moe": "a diffusion model",
        "rnd1": "a diffusion model",
        "gemma-embedding": "non-causal attention",
        "t5": "an encoder model",
        "t5encoder": "an encoder model",
    }
)
"""Models that `write_arch` knows and that generate no text token by token, with the words of the refusal."""

# Source: llama.cpp, tests/test-llama-archs.cpp, moe_mandatory.
_WITH_EXPERTS = """
afmoe arctic bailingmoe bailingmoe2 bailingmoe3 cohere2moe dbrx deepseek deepseek2 deepseek32 deepseek4 dots1
ernie4_5-moe exaone-moe glm-dsa glm4moe gpt-oss grok grovemoe hunyuan-moe hy_v3 kimi-k3 kimi-linear laguna
lfm2moe llada-moe llama4 maple mellum mimo2 minimax-01 minimax-m2 minimax-m3 mistral4 nemotron_h_moe olmoe
phimoe qwen2moe qwen35moe qwen3moe qwen3next qwen3vlmoe rnd1 smallthinker step35
"""
_QUANTISED = ("q4_k_m", "q6_k")
_TYPES = ("f16", "bf16", "q8_0", "q5_0", "q4_0", *_QUANTISED)


def write_arch(
    name: str,
    path: Path,
    *,
    seed: int = 0,
    metadata: Mapping[str, Any] | None = None,
    vocabulary: str = "test",
) -> Path:
    """Write one of `ZOO` or `REFUSED`; the same arguments give the same file.

    Args:
        name: of the model.
        path: where; a file that is there is replaced.
        seed: of the weights.
        metadata: keys to add or replace, without the architecture's name, such as `attention.sliding_window`.
        vocabulary: "test", or "none" for one without pieces.

    Returns:
        The path.
    """
    architecture, part = _parts(name)
    if part in _QUANTISED:
        return _write_quantised(path, part, seed)
    from tests.zoo.writing import Model, write

    model = Model(
        architecture,
        has_experts=part == "moe" or architecture in _WITH_EXPERTS.split(),
        is_tied=part == "tied",
        type=part if part in _TYPES else "f32",
        vocabulary=vocabulary,
        metadata=dict(metadata or {}),
    )
    write(path, model, seed)
    return path


def _parts(name: str) -> tuple[str, str]:
    """Return the architecture, and what is otherwise than usual."""
    architecture, _, part = name.rpartition("-")
    if part in _TYPES or part == "tied" or name in ("granite-moe", "llama-moe"):
        return architecture, part
    return name, ""


def _write_quantised(path: Path, type: str, seed: int) -> Path:
    """Have llama.cpp's quantiser write a llama: it takes rows of 256 at least."""
    from cbatch.bench.synthetic import Shape, write_model

    shape: Shape = Shape(2, 256, 4, 2, 256, 512, type, n_ctx_train=1024)
    return write_model(path, shape, seed=seed, force=True)
