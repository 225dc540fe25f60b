"""A llama.cpp context's sizes and how it is made."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import llama_cpp

from cbatch.backend.log import llama_log
from cbatch.errors import ConfigError, ModelLoadError

if TYPE_CHECKING:
    from cbatch.backend.model import LlamaModel
    from cbatch.options import EngineOptions

DEFAULT_WINDOW = 2048
"""One slot's window where nothing was said and the model allows it: room for a long prompt and answer."""

_N_PAD = 256
"""llama.cpp rounds a context's cells up to a multiple of this. Source: src/llama-context.cpp."""

_N_CTX_MAX = 2**31 - 1
"""Positions are int32. Source: include/llama.h, llama_pos."""

# Source: include/llama.h, enum llama_flash_attn_type.
_FLASH_ATTN = {"auto": -1, "off": 0, "on": 1}


def make_context(model: LlamaModel, options: EngineOptions, n_threads: int) -> Any:
    """Return a new `llama_context *`; the caller frees it.

    Raises:
        ModelLoadError: llama.cpp cannot make it, for want of memory as a rule.
        ConfigError: more cells than llama.cpp can count.
    """
    params = llama_cpp.llama_context_default_params()
    params.n_seq_max = options.parallel
    params.n_ctx = context_cells(model, options)
    params.n_batch = options.n_batch
    params.n_outputs_max = options.parallel
    params.n_ubatch = min(options.n_ubatch, options.n_batch)
    params.n_threads = params.n_threads_batch = n_threads
    params.kv_unified = options.kv == "unified"
    params.flash_attn_type = 0 if options.exact else _FLASH_ATTN[options.flash_attn]
    ctx = llama_cpp.llama_init_from_model(model.pointer, params)
    if not ctx:
        llama_log().drain()
        said = "; ".join(llama_log().recent[-2:])
        raise ModelLoadError(
            f"llama.cpp cannot make a context of {params.n_ctx} cells for {options.parallel} "
            f"sequences: {said or 'it gave no reason'}. "
            "Fewer slots (parallel) or a smaller window (ctx_per_seq) need less memory"
        )
    return ctx


def context_cells(model: LlamaModel, options: EngineOptions) -> int:
    """Return the cells in total: the pool, or every slot's window, rounded up as llama.cpp does it.

    Raises:
        ConfigError: more than llama.cpp can count.
    """
    window = min(model.n_ctx_train or DEFAULT_WINDOW, DEFAULT_WINDOW)
    if options.kv == "unified":
        n_ctx = _padded(options.n_ctx or options.parallel * (options.ctx_per_seq or window))
    else:
        asked = options.n_ctx // options.parallel if options.n_ctx else options.ctx_per_seq
        n_ctx = options.parallel * _padded(asked or window)
    if n_ctx > _N_CTX_MAX:
        raise ConfigError(
            f"{options.parallel} slots of {n_ctx // options.parallel} cells need {n_ctx}, "
            f"llama.cpp counts up to {_N_CTX_MAX}: "
            "use fewer slots (parallel) or a smaller window (ctx_per_seq)"
        )
    return n_ctx


def slot_window(options: EngineOptions, n_cells: int, n_ctx_train: int, *, is_pool: bool) -> int:
    """Return the most positions of one slot: its part of `n_cells`, or of a pool what is asked or was trained for."""
    if not is_pool:
        return n_cells // options.parallel
    return min(n_cells, options.ctx_per_seq or n_ctx_train or n_cells)


def available_cores() -> int:
    """Return how many cores this process may use: its affinity and its cgroup's quota, not the machine's count."""
    try:
        n_cores = len(os.sched_getaffinity(0))
    except AttributeError:  # macOS and Windows have no affinity to ask for
        n_cores = os.cpu_count() or 1
    return max(1, min(n_cores, _cgroup_cores() or n_cores))


def _padded(n_cells: int) -> int:
    return -(-n_cells // _N_PAD) * _N_PAD


def _cgroup_cores() -> int | None:
    # Source: Linux Documentation/admin-guide/cgroup-v2.rst, cpu.max: "$MAX $PERIOD", MAX may be "max".
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return max(1, int(quota) // int(period)) if quota != "max" else None
    except (OSError, ValueError):
        return None
