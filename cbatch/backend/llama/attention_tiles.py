"""Which shapes of prompts llama.cpp's attention computes fast on a CPU, where each slot has memory of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cbatch.backend.bindings import llama_cpp

if TYPE_CHECKING:
    from cbatch.backend.llama.model import LlamaModel
    from cbatch.engine_options import EngineOptions

_N_ROWS = 64
"""Rows of one sequence in a run of the graph from which attention takes tiles, about twice as fast row for row.
Source: ggml/src/ggml-cpu/common.h, GGML_FA_TILE_Q; ggml-cpu/ops.cpp, use_tiled."""

_N_PARTS = 4
"""Into so many parts for each thread the rows of all heads are cut, and no tile is larger than a part.
Source: ggml/src/ggml-cpu/ops.cpp, nth_scaled."""

_N_CHUNKS_MIN = 4
"""Measured with one to eight chunks of equal and unequal length; see docs/performance.md."""


def most_long_context_prefills(model: LlamaModel, options: EngineOptions, n_threads: int) -> int:
    """Return `KvCapabilities.n_long_context_prefills`: enough for each thread's tiles, few of unequal length.

    0 where attention is not computed by tiles.
    """
    has_tiles = options.cache_type_k == options.cache_type_v and options.cache_type_k in (
        "f16",
        "f32",
    )
    if not has_tiles or options.exact or options.flash_attn == "off":
        return 0
    n_heads = max(1, int(llama_cpp.llama_model_n_head(model.pointer)))
    n_chunks = max(_N_CHUNKS_MIN, -(-_N_PARTS * n_threads // n_heads))
    n_most = min(options.n_ubatch, options.n_batch) // _N_ROWS
    return min(n_chunks, n_most) if n_most >= _N_CHUNKS_MIN else 0
