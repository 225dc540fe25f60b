"""What the types of a model's weights say of the kernels that compute them on a CPU."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from cbatch.backend.bindings import llama_cpp
from cbatch.backend.devices import computes_on_cpu
from cbatch.backend.llama.fingerprint import tensor_types
from cbatch.backend.llama.pad_rows import N_GROUP, N_TILED, n_sequences

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cbatch.backend.llama.model import LlamaModel
    from cbatch.engine_options import EngineOptions

# Source: ggml/include/ggml.h, enum ggml_type: f32, f16, q4_0, q4_1, q5_0, q5_1, q8_0, bf16.
_PLAIN = frozenset((0, 1, 2, 3, 6, 7, 8, 30))

# Source: ggml/include/ggml.h, enum ggml_type; ggml/src/ggml-cpu/tiled/tiled.cpp, ggml_tiled_supported.
_TILED = {
    11: "q3_K", 13: "q5_K", 14: "q6_K", 16: "iq2_xxs", 17: "iq2_xs", 18: "iq3_xxs",
    19: "iq1_s", 21: "iq3_s", 22: "iq2_s", 23: "iq4_xs", 29: "iq1_m",
}  # fmt: skip
"""Types that have another kernel for 8 rows and more, and no repacked form."""


def has_plain_weights(model: LlamaModel) -> bool:
    """Whether llama.cpp computes all of a model's weights alike in steps of two rows and more."""
    types = {type for _, type in tensor_types(model.parts)}
    return bool(types) and types <= _PLAIN


def tiled_experts(model: LlamaModel, options: EngineOptions) -> str:
    """Return why experts depend on company: their kernel changes at 8 rows that choose the same one; else nothing."""
    if n_sequences(options.n_exact_slots) < N_TILED or not computes_on_cpu(options):
        return ""
    for name, type in _tiled_experts(model):
        return (
            f"experts in {_TILED[type]} ({name}) use another kernel when {N_TILED} rows of a step choose "
            "the same expert, so logits depend on the other requests in the batch: set GGML_CPU_TILED_MM=0 before the "
            f"program starts, use parallel={N_GROUP} or less, or a file with experts in q8_0, q4_0, f16 or bf16"
        )
    return ""


def may_cut_anywhere(model: LlamaModel, options: EngineOptions) -> bool:
    """Whether no kernel is known that depends on how many tokens of a prompt are computed together.

    Devices have such kernels, and a chunk's tokens are each other's company where they choose experts.
    """
    return computes_on_cpu(options) and not _tiled_experts(model)


def _tiled_experts(model: LlamaModel) -> Sequence[tuple[str, int]]:
    if not _has_tiles():
        return ()
    types = tensor_types(model.parts)
    return [(name, type) for name, type in types if "_exps." in name and type in _TILED]


def _has_tiles() -> bool:
    """Whether kernels in tiles are chosen by the number of rows: on x86 with AVX, unless a variable of ggml decides."""
    if os.environ.get("GGML_CPU_TILED_MM") == "0":
        return False
    is_forced = os.environ.get("GGML_CPU_TILED_MM_FORCE") == "1"
    return not is_forced and b"AVX = 1" in llama_cpp.llama_print_system_info()
