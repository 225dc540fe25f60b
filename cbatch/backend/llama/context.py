"""A llama.cpp context's sizes and how it is made."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cbatch.backend.bindings import llama_cpp
from cbatch.backend.llama.layout import CELL_TYPES, read_layout
from cbatch.backend.llama.log import llama_log
from cbatch.backend.llama.pad_rows import n_sequences
from cbatch.core.plan import N_STEPS_MAX
from cbatch.core.span import N_TARGETS_MAX
from cbatch.errors import ConfigError, ModelLoadError

if TYPE_CHECKING:
    from cbatch.backend.llama.model import LlamaModel
    from cbatch.engine_options import EngineOptions

DEFAULT_WINDOW = 2048
"""One slot's window where no option sets it and the model allows it: room for a long prompt and answer."""

N_PAD = 256
"""llama.cpp rounds a context's cells up to a multiple of this. Source: src/llama-context.cpp."""

_N_CTX_MAX = 2**31 - 1
"""Positions are int32. Source: include/llama.h, llama_pos."""

# Source: include/llama.h, enum llama_flash_attn_type and enum llama_rope_scaling_type.
_FLASH_ATTN = {"auto": -1, "off": 0, "on": 1}
_ROPE_SCALING = {None: -1, "none": 0, "linear": 1, "yarn": 2, "longrope": 3}

ROPE_VALUES = (
    "rope_freq_base",
    "rope_freq_scale",
    "yarn_ext_factor",
    "yarn_attn_factor",
    "yarn_beta_fast",
    "yarn_beta_slow",
    "yarn_orig_ctx",
)
"""Options that llama.cpp has under the same names."""


def make_context(model: LlamaModel, options: EngineOptions, n_threads: int) -> Any:
    """Return a new `llama_context *`; the caller frees it.

    Raises:
        ModelLoadError: llama.cpp cannot make it, for want of memory as a rule.
        ConfigError: more cells than llama.cpp can count, a type of cells that this model cannot have, a pool of cells
            where it has none, or a YaRN option without effect.
    """
    check_cells(model, options)
    check_yarn(model, options)
    params = _params(model, options, n_threads)
    ctx = llama_cpp.llama_init_from_model(model.pointer, params)
    if not ctx:
        raise ModelLoadError(
            f"llama.cpp cannot make a context of {params.n_ctx} cells for {options.n_slots} "
            f"sequences: {llama_log().reason()}. "
            "Fewer slots (parallel) or a smaller window (ctx_per_seq) need less memory"
        )
    return ctx


def _params(model: LlamaModel, options: EngineOptions, n_threads: int) -> Any:
    params = llama_cpp.llama_context_default_params()
    n_sequences = sequences_of(options)
    params.n_seq_max = n_sequences
    # with more outputs llama.cpp ends the process; the graph's memory is reserved for this many
    params.n_outputs_max = n_sequences + N_TARGETS_MAX
    params.n_ctx = context_cells(model, options)
    params.n_batch = exact_batch(options) if options.exact else options.n_batch
    params.n_ubatch = min(options.n_ubatch, options.n_batch)
    if options.exact:  # a step's rows are one run of the graph
        params.n_ubatch = max(params.n_ubatch, n_sequences)
    params.n_threads = params.n_threads_batch = n_threads
    params.kv_unified = options.kv == "unified"
    params.type_k = CELL_TYPES[options.cache_type_k].id
    params.type_v = CELL_TYPES[options.cache_type_v].id
    set_computing(params, options)
    return params


def set_computing(params: Any, options: EngineOptions) -> None:
    """Write into `llama_context_params` how attention and positions are computed, and where."""
    params.flash_attn_type = _FLASH_ATTN[options.flash_attn]
    params.offload_kqv = options.offload_kqv
    params.rope_scaling_type = _ROPE_SCALING[options.rope_scaling]
    for name in ROPE_VALUES:
        if (value := getattr(options, name)) is not None:
            setattr(params, name, value)


def sequences_of(options: EngineOptions, n_slots: int | None = None) -> int:
    """Return the sequences of a context of `n_slots` slots, the options' by default.

    `exact` needs more sequences than slots, for pad rows; see `n_sequences`.
    """
    n_slots = options.n_slots if n_slots is None else n_slots
    return n_sequences(n_slots, options.exact_slots or 1) if options.exact else n_slots


def exact_batch(options: EngineOptions) -> int:
    """Return the most tokens of a step with `exact`. Engines that give the same bits must agree on it."""
    return max(options.n_batch, n_sequences(options.n_exact_slots))


def n_pad_cells(options: EngineOptions, n_slots: int | None = None) -> int:
    """Return the cells of each sequence that pad rows need beyond its window, rounded up as llama.cpp does."""
    return padded(N_STEPS_MAX) if options.exact and sequences_of(options, n_slots) > 1 else 0


def cells_of_slots(options: EngineOptions, n_slots: int, n_window: int) -> int:
    """Return the cells of `n_slots` slots with memory of their own, and of what pad rows need besides."""
    return sequences_of(options, n_slots) * (padded(n_window) + n_pad_cells(options, n_slots))


def _asked(options: EngineOptions, n_ctx_train: int) -> int:
    if options.n_ctx and options.kv != "unified":
        return options.n_ctx // options.n_slots
    return options.ctx_per_seq or min(n_ctx_train or DEFAULT_WINDOW, DEFAULT_WINDOW)


def check_cells(model: LlamaModel, options: EngineOptions) -> None:
    """Refuse a pool where there are no cells, and types of cells that llama.cpp would refuse for this model or misread.

    Raises:
        ConfigError: a pool for a model without attention, heads that blocks do not divide, keys and values of two types
            where the model stores one, or values in blocks where the model has no flash attention.
    """
    if options.kv == "unified" and not model.has_cells:
        raise ConfigError(
            "kv='unified' needs cells, but this model has none: it keeps a state of fixed size for each sequence. "
            "Leave out kv and admission"
        )
    # Source: src/llama-context.cpp, llama_init_from_model
    layout = read_layout(model)
    for name, cell_type, widths in (
        ("cache_type_k", options.cache_type_k, layout.key_widths),
        ("cache_type_v", options.cache_type_v, layout.value_widths),
    ):
        n_block = CELL_TYPES[cell_type].n_block
        for n_width in widths:
            if n_width % n_block:
                raise ConfigError(
                    f"{name}={cell_type!r} stores blocks of {n_block} numbers, but this model's heads have "
                    f"{n_width}, which is not a multiple: use 'f16', 'bf16' or 'f32'"
                )
    if layout.has_one_type and options.cache_type_k != options.cache_type_v:
        raise ConfigError(
            f"cache_type_k={options.cache_type_k!r} and cache_type_v={options.cache_type_v!r} must be equal: "
            f"a model of architecture {model.architecture!r} stores both together"
        )
    if model.architecture == "grok" and options.has_quantised_values:
        raise ConfigError(
            f"cache_type_v={options.cache_type_v!r} needs flash attention, which grok models cannot have: "
            "use 'f16', 'bf16' or 'f32'"
        )


def check_yarn(model: LlamaModel, options: EngineOptions) -> None:
    """Refuse YaRN options that llama.cpp ignores: its corrections where YaRN is off, its factor where it is on.

    Raises:
        ConfigError: an option without effect; the message names what it needs.
    """
    is_on = _yarn_ext_factor(model, options) != 0
    names, needed = ["yarn_attn_factor"], "yarn_ext_factor=0 (else llama.cpp computes it)"
    if not is_on:
        names = ["yarn_beta_fast", "yarn_beta_slow", "yarn_orig_ctx"]
        needed = "YaRN: rope_scaling='yarn'"
    for name in names:
        if (value := getattr(options, name)) is not None:
            raise ConfigError(
                f"{name}={value} has no effect without {needed}: set that, or leave {name} out"
            )


def _yarn_ext_factor(model: LlamaModel, options: EngineOptions) -> float:
    """Return YaRN's mix as llama.cpp decides it. Source: src/llama-context.cpp, the constructor."""
    said, prefix = model.metadata, f"{model.architecture}.rope.scaling."
    factor = options.yarn_ext_factor
    if factor is None:
        factor = model.number_of(f"{prefix}yarn_ext_factor", -1)
    if factor >= 0:
        return factor
    return float((options.rope_scaling or said.get(f"{prefix}type")) == "yarn")


def context_cells(model: LlamaModel, options: EngineOptions) -> int:
    """Return the cells in total: the pool, or every slot's window, rounded up as llama.cpp does.

    Raises:
        ConfigError: more than llama.cpp can count.
    """
    if options.kv == "unified":
        n_ctx = padded(options.n_ctx or options.n_slots * _asked(options, model.n_ctx_train))
    else:
        n_ctx = cells_of_slots(options, options.n_slots, _asked(options, model.n_ctx_train))
    if n_ctx > _N_CTX_MAX:
        raise ConfigError(
            f"{options.n_slots} slots of {n_ctx // options.n_slots} cells need {n_ctx} cells; "
            f"llama.cpp allows at most {_N_CTX_MAX}: "
            "use fewer slots (parallel) or a smaller window (ctx_per_seq)"
        )
    return n_ctx


def slot_window(options: EngineOptions, n_cells: int, n_ctx_train: int, *, is_pool: bool) -> int:
    """Return the positions of one slot: its part of `n_cells`; in a pool the window that is set or trained."""
    if not is_pool:
        n_most = n_cells // sequences_of(options) - n_pad_cells(options)
        return min(n_most, padded(_asked(options, n_ctx_train)))
    return min(n_cells, options.ctx_per_seq or n_ctx_train or n_cells)


def padded(n_cells: int) -> int:
    """Return a number of cells rounded up as llama.cpp does."""
    return -(-n_cells // N_PAD) * N_PAD
