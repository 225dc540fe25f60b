"""How many slots a context has, and of what window: from the free memory and the prompts that will come.

Sizes that the options set are kept; the others follow from the bytes of a cell and a memory budget.
"""

from __future__ import annotations

from bisect import bisect
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from cbatch.backend.host_limits import host_most
from cbatch.backend.llama.context import (
    DEFAULT_WINDOW,
    N_PAD,
    cells_of_slots,
    check_cells,
    context_cells,
    padded,
    sequences_of,
)
from cbatch.backend.llama.layout import Footprint, footprint, read_layout
from cbatch.backend.load.attention import settle_attention
from cbatch.backend.load.free_memory import free_for_cells, share_on_host
from cbatch.engine_options import DEFAULT_PARALLEL, MAX_PARALLEL, EngineOptions
from cbatch.errors import CBatchError, ModelLoadError
from cbatch.media import shown_messages
from cbatch.support.logs import Log
from cbatch.support.prefix_index import n_common

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cbatch.backend import Vocab
    from cbatch.backend.llama.model import LlamaModel
    from cbatch.messages import BatchPrompt, LookAhead
    from cbatch.options import RunOptions

N_LOOKED_AT = 1024
"""Most prompts that are read: enough to know a job by, and tokenized in a second."""

N_TOKENS_READ = 2**22
"""Tokens after which no further prompt is read, so that long prompts do not delay the load by minutes. Our choice."""

_N_CHARACTERS_READ = 2**24
"""Most characters that are read of one prompt: no window holds their tokens. Our choice."""

DEFAULT_OUTPUT = 512
"""Tokens to expect after a prompt that has no `max_tokens`."""

COMMON_FOR_UNIFIED = 256
SHARE_FOR_UNIFIED = 2 / 3
"""Common tokens, and their share of a request's cells, from which one pool is faster. Source: measured on two models,
0 … 1,024 common tokens and 8 … 128 of output; see docs/understand/performance.md."""

PROMPT_FOR_FLASH = 1024
SHARE_FOR_FLASH = 24
"""Tokens of a prompt that are its own, and how many times those of its answer, from which a job is faster with flash
attention on a processor that decodes faster without. Source: two models measured; docs/understand/performance.md."""

_MIB = 2**20
_log = Log("cbatch")


@dataclass(frozen=True, slots=True)
class WorkloadProfile:
    """What the prompts of a job need of a context."""

    n_window: int = 0
    """Tokens of the longest prompt with its output; 0 where no prompt could be read."""
    n_common: float = 0.0
    """Tokens that a prompt shares with the beginning of another, on average; each answer counts as one."""
    n_cells: float = 0.0
    """Tokens of a prompt with its output, on average."""
    is_mostly_prompt: bool = False
    """Whether prompts are so long, and answers so short, that the job is faster with flash attention."""
    is_all: bool = False
    """Whether all prompts of the job were read."""


@dataclass(frozen=True, slots=True)
class Room:
    """The memory for cells, in bytes; None is unknown, and no limit."""

    footprint: Footprint | None
    n_budget: int | None
    """What all cells together may take."""
    n_free: int | None = None
    options: EngineOptions = field(default_factory=EngineOptions)
    """What each slot needs besides its window: with `exact`, cells for pad rows."""

    def holds(self, n_slots: int, n_window: int) -> bool:
        """Whether `n_slots` slots of a window fit."""
        n_bytes = self.n_bytes(n_slots, n_window)
        return n_bytes is None or self.n_budget is None or n_bytes <= self.n_budget

    def n_bytes(self, n_slots: int, n_window: int) -> int | None:
        """Return the bytes of `n_slots` slots of a window; None where they are unknown."""
        if self.footprint is None:
            return None
        n_cells = cells_of_slots(self.options, n_slots, n_window)
        return self.footprint.of(sequences_of(self.options, n_slots), n_cells)

    def most_slots(self, n_window: int, n_most: int = MAX_PARALLEL) -> int:
        """Return how many slots of a window fit."""
        return next((n for n in range(n_most, 0, -1) if self.holds(n, n_window)), 0)

    def most_window(self, n_slots: int, n_most: int) -> int:
        """Return the widest window of which `n_slots` slots fit: `n_most` or a multiple of `N_PAD`; 0 for none."""
        if self.holds(n_slots, n_most):
            return n_most
        widths = range(N_PAD, n_most + 1, N_PAD)
        return N_PAD * bisect(widths, False, key=lambda width: not self.holds(n_slots, width))


@dataclass(frozen=True, slots=True)
class SlotSizes:
    """How many slots, and the tokens that each holds."""

    n_slots: int
    n_window: int


def settle(
    model: LlamaModel, options: EngineOptions, room: Room, look_ahead: LookAhead | None = None
) -> EngineOptions:
    """Return the options with slots, window, kind of memory and flash attention decided; what is set is kept.

    Raises:
        ModelLoadError: not even one slot of the smallest window fits.
    """
    demand = read_profile(model.vocab, look_ahead) if look_ahead else WorkloadProfile()
    settled = _with_sizes(model, options, room, demand)
    return settled if demand.is_mostly_prompt else settle_attention(model, settled)


def _with_sizes(
    model: LlamaModel, options: EngineOptions, room: Room, demand: WorkloadProfile
) -> EngineOptions:
    kv = _fastest_kv(model, options, demand)
    if options.n_ctx is not None:
        return replace(options, parallel=options.n_slots, kv=kv)
    n_window = options.ctx_per_seq or wanted_window(demand, trained_window(model, options))
    wanted = SlotSizes(options.n_slots, n_window)
    sizes = choose_sizes(options.parallel, n_window, room, is_fixed=bool(options.ctx_per_seq))
    _tell(sizes, wanted, room)
    if kv == "unified" and options.ctx_per_seq is None:  # a request may take more than its share
        n_cells = padded(sizes.n_slots * sizes.n_window)
        return replace(options, parallel=sizes.n_slots, n_ctx=n_cells, kv=kv)
    return replace(options, parallel=sizes.n_slots, ctx_per_seq=sizes.n_window, kv=kv)


def _fastest_kv(
    model: LlamaModel, options: EngineOptions, demand: WorkloadProfile
) -> Literal["partitioned", "unified"]:
    """Return the kind of memory: no pool, which keeps flash attention, where that would be turned off without one."""
    kv = choose_kv(options, demand, has_states=model.has_states)
    if kv in ("partitioned", options.kv) or demand.is_mostly_prompt or options.flash_attn != "auto":
        return kv
    n_window = options.ctx_per_seq or wanted_window(demand, trained_window(model, options))
    apart = replace(options, kv="partitioned", n_ctx=None, ctx_per_seq=n_window)
    return "partitioned" if settle_attention(model, apart).flash_attn == "off" else kv


def find_room(
    model: LlamaModel,
    options: EngineOptions,
    *,
    draft: LlamaModel | None = None,
    n_unloaded: int = 0,
    n_sharing: int = 1,
) -> Room:
    """Return the memory for cells: `memory_mib`, or else half of what is free besides `n_unloaded` bytes of weights.

    Of what is free, `n_sharing` processes have equal shares. A `draft` model needs cells for the same tokens. A
    projector is loaded once all cells are there, so its bytes are left free.

    Raises:
        ConfigError: cells that the model cannot have.
    """
    check_cells(model, options)
    n_free = free_for_cells(model, options, n_unloaded=n_unloaded + _n_projector_bytes(options))
    n_half = None if n_free is None else n_free // 2 // n_sharing
    n_budget = n_half if options.memory_mib is None else options.memory_mib * _MIB
    own = footprint(read_layout(model), options)
    beside = draft and footprint(read_layout(draft), options)
    return Room((own and beside and own.with_other(beside)) or own, n_budget, n_free, options)


def _n_projector_bytes(options: EngineOptions) -> int:
    """Return the bytes of the projector's file; 0 without one, and where it cannot be read, which its loading tells."""
    with suppress(OSError):
        return Path(options.mmproj).stat().st_size if options.mmproj is not None else 0
    return 0


def check_fits(model: LlamaModel, options: EngineOptions, room: Room) -> None:
    """Refuse cells that the host cannot hold: the system would end the process while llama.cpp makes them.

    Raises:
        ModelLoadError: the message has the numbers.
        ConfigError: more cells than llama.cpp can count.
    """
    n_cells, n_most = context_cells(model, options), host_most()
    if n_most is None or room.footprint is None or room.footprint.is_about:
        return
    n_bytes = int(room.footprint.of(sequences_of(options), n_cells) * share_on_host(model, options))
    if n_bytes > n_most:
        raise ModelLoadError(
            f"{n_cells:,} cells for {options.n_slots} slot{'s' * (options.n_slots > 1)} would take {_mib(n_bytes)} MiB "
            f"of memory, and {_mib(n_most)} MiB are free: use fewer slots (parallel), a smaller window "
            "(ctx_per_seq or n_ctx) or smaller cells (cache_type_k='q8_0', cache_type_v='q8_0')"
        )


def choose_sizes(
    parallel: int | None, n_window: int, room: Room, *, is_fixed: bool = False
) -> SlotSizes:
    """Return the slots and the window of a context: the window becomes smaller only for slots that an option sets.

    A window that an option sets, `is_fixed`, stays as it is, and is tried even where it does not fit.

    Raises:
        ModelLoadError: nothing fits; the message has the numbers.
    """
    n_slots = parallel or room.most_slots(n_window, DEFAULT_PARALLEL) or 1
    n_fitting = n_window if is_fixed else room.most_window(n_slots, n_window)
    if not n_fitting:
        raise ModelLoadError(_refusal(n_slots, room))
    return SlotSizes(n_slots, n_fitting)


def wanted_window(demand: WorkloadProfile, n_trained: int) -> int:
    """Return the window to aim at: the default one, or what the coming prompts need."""
    n_default = min(n_trained or DEFAULT_WINDOW, DEFAULT_WINDOW)
    if not demand.n_window:
        return n_default
    n_window = min(padded(demand.n_window), n_trained or padded(demand.n_window))
    return n_window if demand.is_all else max(n_window, n_default)


def trained_window(model: LlamaModel, options: EngineOptions) -> int:
    """Return the positions that a model is trained for, extended by YaRN where that is set; 0 where unknown.

    Source: src/llama-context.cpp, llama_init_from_model, which corrects the model's own number in this way.
    """
    if options.rope_scaling == "yarn" and options.rope_freq_scale is not None:
        key = f"{model.architecture}.rope.scaling.original_context_length"
        n_original = options.yarn_orig_ctx or int(model.metadata.get(key, model.n_ctx_train))
        return int(n_original / options.rope_freq_scale)
    return model.n_ctx_train


def warn_past_training(model: LlamaModel, options: EngineOptions, n_window: int) -> None:
    """Warn if a slot's window exceeds what the model was trained for, unless rope settings extend it."""
    n_trained = trained_window(model, options)
    is_extended = options.rope_freq_base is not None or options.rope_freq_scale is not None
    if n_trained and n_window > padded(n_trained) and not is_extended:
        _log.warn(
            "a slot holds %d tokens, but the model was trained for %d: answers to longer texts may make no sense",
            n_window,
            n_trained,
        )


def choose_kv(
    options: EngineOptions, demand: WorkloadProfile, *, has_states: bool
) -> Literal["partitioned", "unified"]:
    """Return the kind of memory: the option's, or else one pool where prompts have much in common and may share it."""
    if options.kv != "auto":
        return options.kv
    can_share_pool = not (options.exact or has_states)
    is_much = demand.n_common >= max(COMMON_FOR_UNIFIED, SHARE_FOR_UNIFIED * demand.n_cells)
    return "unified" if can_share_pool and is_much else "partitioned"


def read_profile(vocab: Vocab, look_ahead: LookAhead) -> WorkloadProfile:
    """Return what these prompts need; prompts that cannot be tokenized are left out."""
    prompts: list[tuple[BatchPrompt, RunOptions]] = []
    read: list[tuple[Sequence[int], RunOptions]] = []
    n_tokens = 0
    for prompt, options in look_ahead.prompts[:N_LOOKED_AT]:
        if n_tokens >= N_TOKENS_READ:
            break
        prompts.append((prompt, options))
        if tokens := _tokens(vocab, prompt, options):
            read.append((tokens, options))
            n_tokens += len(tokens)
    n_answers = max(1, sum(options.n_choices for _, options in read))
    n_again = sum(len(tokens) * (options.n_choices - 1) for tokens, options in read)
    n_output = sum(o.n_choices * (o.max_tokens or DEFAULT_OUTPUT) for _, o in read)
    n_common = n_common_tokens([tokens for tokens, _ in read])
    n_own = n_tokens - n_common
    is_long = n_own >= max(PROMPT_FOR_FLASH * len(read), SHARE_FOR_FLASH * n_output)
    has_caches = any(options.cache_key is not None for _, options in read)
    needed = [_n_needed(len(tokens), options) for tokens, options in read]
    if any(prompt.has_media for prompt, _ in prompts):
        needed.append(DEFAULT_WINDOW)  # only a projector knows the rows of a picture or a sound
    return WorkloadProfile(
        n_window=max(needed, default=0),
        n_common=(n_common + n_again) / n_answers,
        n_cells=(n_tokens + n_again + n_output) / n_answers,
        is_mostly_prompt=bool(read) and is_long and not has_caches,  # their cells are of one kind
        is_all=look_ahead.is_all and len(prompts) == len(look_ahead.prompts),
    )


def n_common_tokens(prompts: Sequence[Sequence[int]]) -> int:
    """Return how many tokens of all prompts are also the beginning of another: these are computed once."""
    ordered = sorted(map(tuple, prompts))
    return sum(n_common(a, b) for a, b in pairwise(ordered))


def _n_needed(n_prompt: int, options: RunOptions) -> int:
    """Return the tokens of a request; without `max_tokens` at least the default window, as it may go on to its end."""
    if options.max_tokens is not None:
        return n_prompt + options.max_tokens
    return max(n_prompt + DEFAULT_OUTPUT, DEFAULT_WINDOW)


def _tokens(vocab: Vocab, prompt: BatchPrompt, options: RunOptions) -> Sequence[int]:
    try:
        if prompt.prompt is not None:
            return vocab.tokenize(prompt.prompt[:_N_CHARACTERS_READ])
        messages = shown_messages(prompt.messages or ())
        return prompt.tokens or vocab.render(messages, options.template_variables)
    except CBatchError:  # the request of this prompt will report it
        return ()


def _tell(sizes: SlotSizes, wanted: SlotSizes, room: Room) -> None:
    """Log sizes that are smaller than they would be with more memory."""
    if sizes != wanted:
        n_bytes = room.n_bytes(wanted.n_slots, wanted.n_window)
        _log.warn(
            "%s",
            f"{sizes.n_slots} slots of {sizes.n_window} tokens: {wanted.n_slots} slots of {wanted.n_window} would take "
            f"{_mib(n_bytes)} MiB, and the memory budget is {_mib(room.n_budget)} MiB; memory_mib sets another "
            "budget, and with cache_type_k and cache_type_v='q8_0' cells need about half",
        )


def _refusal(n_slots: int, room: Room) -> str:
    return (
        f"{n_slots} slot{'s' * (n_slots > 1)} of {N_PAD} cells, the smallest window, would take "
        f"{_mib(room.n_bytes(n_slots, N_PAD))} MiB, and the memory budget is {_mib(room.n_budget)} MiB: "
        "raise it (memory_mib; the default is half of what is free), use fewer slots (parallel), smaller cells "
        "(cache_type_k='q8_0', cache_type_v='q8_0') or a smaller model, or set a window (ctx_per_seq), which ignores it"
    )


def _mib(n_bytes: int | None) -> str:
    return "?" if n_bytes is None else f"{n_bytes / _MIB:,.1f}"
