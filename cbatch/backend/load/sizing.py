"""How many slots a context has, and of what window: from the memory that is free and the prompts that will come.

What was said is taken as said; the rest follows from the bytes of a cell and a memory budget.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

from cbatch.backend.llama.context import (
    DEFAULT_WINDOW,
    N_PAD,
    check_cell_types,
    context_cells,
    padded,
)
from cbatch.backend.llama.layout import footprint, read_layout
from cbatch.backend.llama.memory import has_states
from cbatch.backend.load.free_memory import free_for_cells, host_most, share_on_host
from cbatch.engine_options import DEFAULT_PARALLEL, MAX_PARALLEL
from cbatch.errors import CBatchError, ModelLoadError
from cbatch.logs import Log

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cbatch.backend import Vocab
    from cbatch.backend.llama.layout import Footprint
    from cbatch.backend.llama.model import LlamaModel
    from cbatch.engine_options import EngineOptions
    from cbatch.messages import BatchPrompt, LookAhead
    from cbatch.options import RunOptions

N_LOOKED_AT = 1024
"""Most prompts that are looked at: enough to know a job by, and read in a second."""

OUTPUT_UNSAID = 512
"""Tokens to have room for behind a prompt that has no `max_tokens`."""

COMMON_FOR_UNIFIED = 256
SHARE_FOR_UNIFIED = 2 / 3
"""Common tokens, and their share of a request's cells, from which one pool is faster. Source: measured on two models,
0 … 1,024 common tokens and 8 … 128 of output; see docs/performance.md."""

_MIB = 2**20
_log = Log("cbatch")


@dataclass(frozen=True, slots=True)
class WorkloadProfile:
    """What prompts ask of a context.

    Args:
        n_window: tokens of the longest prompt with its output; 0 where none could be read.
        n_common: tokens of a prompt that begin another one too, on average; each answer to a prompt counts as one.
        n_cells: tokens of a prompt with its output, on average.
        is_all: whether these were all prompts.
    """

    n_window: int = 0
    n_common: float = 0.0
    n_cells: float = 0.0
    is_all: bool = False


@dataclass(frozen=True, slots=True)
class Room:
    """What fits; what nobody knows is None, and is no limit.

    Args:
        footprint: what sequences take.
        n_budget: bytes that all cells together may take.
        n_free: bytes that there are for them now.
    """

    footprint: Footprint | None
    n_budget: int | None
    n_free: int | None = None

    def holds(self, n_slots: int, n_window: int) -> bool:
        """Whether so many slots of such a window fit."""
        n_bytes = self.n_bytes(n_slots, n_window)
        return n_bytes is None or self.n_budget is None or n_bytes <= self.n_budget

    def n_bytes(self, n_slots: int, n_window: int) -> int | None:
        """Return what so many slots of such a window take."""
        if self.footprint is None:
            return None
        return self.footprint.of(n_slots, n_slots * padded(n_window))

    def most_slots(self, n_window: int, n_most: int = MAX_PARALLEL) -> int:
        """Return how many slots of a window fit, 0 where not one does."""
        return next((n for n in range(n_most, 0, -1) if self.holds(n, n_window)), 0)

    def most_window(self, n_slots: int, n_most: int) -> int:
        """Return the widest window, whole steps of llama.cpp's or `n_most`, of which so many slots fit; or 0."""
        if self.holds(n_slots, n_most):
            return n_most
        low, high = 0, n_most // N_PAD + 1  # in steps: the first fits, the last does not
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.holds(n_slots, middle * N_PAD) else (low, middle)
        return low * N_PAD


@dataclass(frozen=True, slots=True)
class Sizes:
    """Slots, and the tokens that each holds."""

    n_slots: int
    n_window: int


def settle(
    model: LlamaModel, options: EngineOptions, room: Room, look_ahead: LookAhead | None = None
) -> EngineOptions:
    """Return the options with slots, window and kind of memory decided.

    Args:
        model: a loaded model.
        options: what was said.
        room: what fits, of `find_room`.
        look_ahead: prompts that will come.

    Raises:
        ModelLoadError: not even one slot of the least window fits.
    """
    demand = read_profile(model.vocab, look_ahead) if look_ahead else WorkloadProfile()
    kv = _kv(model, options, demand)
    if options.n_ctx is not None:
        return replace(options, parallel=options.n_slots, kv=kv)
    if options.ctx_per_seq is not None:
        wanted = Sizes(options.n_slots, options.ctx_per_seq)
        sizes = _as_many(options.parallel, options.ctx_per_seq, room)
    else:
        wanted = Sizes(options.n_slots, wanted_window(demand, trained_window(model, options)))
        sizes = choose_sizes(options.parallel, wanted.n_window, room)
    _tell(sizes, wanted, room)
    return _with(options, sizes, kv)


def find_room(model: LlamaModel, options: EngineOptions, *, n_unloaded: int = 0) -> Room:
    """Return what fits into `memory_mib`, or else into half of what is free now.

    Args:
        model: a loaded model.
        options: types of cells, where they are, and the budget if it was said.
        n_unloaded: bytes of weights that are still to come into memory.

    Raises:
        ConfigError: types of cells that the model cannot have.
    """
    check_cell_types(model, options)
    n_free = free_for_cells(model, options, n_unloaded=n_unloaded)
    n_half = None if n_free is None else n_free // 2
    n_budget = n_half if options.memory_mib is None else options.memory_mib * _MIB
    return Room(footprint(read_layout(model), options), n_budget, n_free)


def check_fits(model: LlamaModel, options: EngineOptions, room: Room) -> None:
    """Refuse cells that the host surely cannot hold: the system would end the process while they are made.

    Args:
        model: a loaded model.
        options: what `settle` returned.
        room: what a cell takes.

    Raises:
        ModelLoadError: the message has the numbers.
        ConfigError: more cells than llama.cpp can count.
    """
    n_cells, n_most = context_cells(model, options), host_most()
    if n_most is None or room.footprint is None or room.footprint.is_about:
        return
    n_bytes = int(room.footprint.of(options.n_slots, n_cells) * share_on_host(model, options))
    if n_bytes > n_most:
        raise ModelLoadError(
            f"{n_cells:,} cells for {options.n_slots} slot{'s' * (options.n_slots > 1)} would take {_mib(n_bytes)} MiB "
            f"of memory, and {_mib(n_most)} MiB are free: use fewer slots (parallel), a smaller window "
            "(ctx_per_seq or n_ctx) or smaller cells (cache_type_k='q8_0', cache_type_v='q8_0')"
        )


def choose_sizes(parallel: int | None, n_window: int, room: Room) -> Sizes:
    """Return the slots and the window of a context where no window was said.

    Args:
        parallel: slots as they were said; then the window gives way, else their number does.
        n_window: the window that is wanted.
        room: what fits.

    Raises:
        ModelLoadError: nothing fits; the message has the numbers.
    """
    n_slots = _as_many(parallel, n_window, room).n_slots
    n_fitting = room.most_window(n_slots, n_window)
    if not n_fitting:
        raise ModelLoadError(_refusal(n_slots, room))
    return Sizes(n_slots, n_fitting)


def _as_many(parallel: int | None, n_window: int, room: Room) -> Sizes:
    """Return the slots that were said, or as many of a window as fit, one at least."""
    return Sizes(parallel or room.most_slots(n_window, DEFAULT_PARALLEL) or 1, n_window)


def wanted_window(demand: WorkloadProfile, n_trained: int) -> int:
    """Return the window that is wanted: the default one, or what the prompts that come need."""
    n_default = min(n_trained or DEFAULT_WINDOW, DEFAULT_WINDOW)
    if not demand.n_window:
        return n_default
    n_window = min(padded(demand.n_window), n_trained or padded(demand.n_window))
    return n_window if demand.is_all else max(n_window, n_default)


def trained_window(model: LlamaModel, options: EngineOptions) -> int:
    """Return the positions that a model is made for, with the YaRN that is asked for. 0 where the file is silent.

    Source: src/llama-context.cpp, llama_init_from_model, which corrects the model's own number so.
    """
    if options.rope_scaling == "yarn" and options.rope_freq_scale is not None:
        key = f"{model.architecture}.rope.scaling.original_context_length"
        n_original = options.yarn_orig_ctx or int(model.metadata.get(key, model.n_ctx_train))
        return int(n_original / options.rope_freq_scale)
    return model.n_ctx_train


def choose_kv(
    n_common: float, n_cells: float, *, can_share_pool: bool
) -> Literal["partitioned", "unified"]:
    """Return the kind of memory that is faster for prompts with such common beginnings.

    Args:
        n_common: tokens of a prompt that begin another one too, on average.
        n_cells: tokens of a prompt with its output, on average.
        can_share_pool: whether this model and what was promised allow one pool.
    """
    is_much = n_common >= max(COMMON_FOR_UNIFIED, SHARE_FOR_UNIFIED * n_cells)
    return "unified" if can_share_pool and is_much else "partitioned"


def read_profile(vocab: Vocab, look_ahead: LookAhead) -> WorkloadProfile:
    """Return what these prompts ask for; those that cannot be read are left out, and say nothing."""
    prompts = look_ahead.prompts[:N_LOOKED_AT]
    read = [(t, options) for prompt, options in prompts if (t := _tokens(vocab, prompt, options))]
    n_answers = max(1, sum(options.n_choices for _, options in read))
    n_again = sum(len(tokens) * (options.n_choices - 1) for tokens, options in read)
    n_cells = sum(o.n_choices * (len(t) + (o.max_tokens or OUTPUT_UNSAID)) for t, o in read)
    return WorkloadProfile(
        n_window=max((_n_needed(len(tokens), options) for tokens, options in read), default=0),
        n_common=(n_common_tokens([tokens for tokens, _ in read]) + n_again) / n_answers,
        n_cells=n_cells / n_answers,
        is_all=look_ahead.is_all and len(prompts) == len(look_ahead.prompts),
    )


def n_common_tokens(prompts: Sequence[Sequence[int]]) -> int:
    """Return how many tokens another prompt begins with too: those need not be computed again."""
    ordered = sorted(map(tuple, prompts))
    return sum(_n_common(a, b) for a, b in pairwise(ordered))


def _n_common(a: Sequence[int], b: Sequence[int]) -> int:
    n_shorter = min(len(a), len(b))
    return next((i for i in range(n_shorter) if a[i] != b[i]), n_shorter)


def _n_needed(n_prompt: int, options: RunOptions) -> int:
    """Return the tokens of a request. One without `max_tokens` may go on to the window's end: never the less for it."""
    if options.max_tokens is not None:
        return n_prompt + options.max_tokens
    return max(n_prompt + OUTPUT_UNSAID, DEFAULT_WINDOW)


def _tokens(vocab: Vocab, prompt: BatchPrompt, options: RunOptions) -> Sequence[int]:
    try:
        if prompt.prompt is not None:
            return vocab.tokenize(prompt.prompt)
        return prompt.tokens or vocab.render(prompt.messages or (), options.template_variables)
    except CBatchError:  # it will be said of this prompt alone
        return ()


def _kv(
    model: LlamaModel, options: EngineOptions, demand: WorkloadProfile
) -> Literal["partitioned", "unified"]:
    if options.kv != "auto":
        return options.kv
    can_share_pool = not (options.exact or has_states(model))
    return choose_kv(demand.n_common, demand.n_cells, can_share_pool=can_share_pool)


def _with(
    options: EngineOptions, sizes: Sizes, kv: Literal["partitioned", "unified"]
) -> EngineOptions:
    """Return the options with these sizes; in a pool a request may take more than its part of it."""
    if kv == "unified" and options.ctx_per_seq is None:
        n_cells = padded(sizes.n_slots * sizes.n_window)
        return replace(options, parallel=sizes.n_slots, n_ctx=n_cells, kv=kv)
    return replace(options, parallel=sizes.n_slots, ctx_per_seq=sizes.n_window, kv=kv)


def _tell(sizes: Sizes, wanted: Sizes, room: Room) -> None:
    """Log sizes that are less than they would be with more memory."""
    if sizes == wanted:
        return
    _log.warn(
        "%d slots of %d tokens, for %d of %d would take %s MiB and the memory budget is %s MiB: "
        "memory_mib sets another, cache_type_k and cache_type_v='q8_0' need about half",
        sizes.n_slots,
        sizes.n_window,
        wanted.n_slots,
        wanted.n_window,
        _mib(room.n_bytes(wanted.n_slots, wanted.n_window)),
        _mib(room.n_budget),
    )


def _refusal(n_slots: int, room: Room) -> str:
    return (
        f"{n_slots} slot{'s' * (n_slots > 1)} of {N_PAD} cells, the least there is, would take "
        f"{_mib(room.n_bytes(n_slots, N_PAD))} MiB, and the memory budget is {_mib(room.n_budget)} MiB: "
        "set another (memory_mib; not said: half of what is free), use fewer slots (parallel), smaller cells "
        "(cache_type_k='q8_0', cache_type_v='q8_0') or a smaller model, or give a window (ctx_per_seq), which is tried"
    )


def _mib(n_bytes: int | None) -> str:
    return "?" if n_bytes is None else f"{n_bytes / _MIB:,.1f}"
