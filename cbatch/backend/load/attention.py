"""Whether flash attention is faster: on some processors decoding steps take half the time without it.

llama.cpp's flash attention for the CPU goes cell by cell where a sequence has few new tokens, as in decoding, and works
in tiles for prompts. Without it both are products of matrices, through a buffer as wide as a window. What that makes of
a step depends on processor and build: so it is tried, with the model that ships inside, once.
"""

from __future__ import annotations

import functools
from contextlib import ExitStack, closing
from dataclasses import replace
from math import inf
from time import perf_counter
from typing import TYPE_CHECKING

from cbatch.backend.bindings import llama_cpp
from cbatch.backend.llama.context import DEFAULT_WINDOW
from cbatch.backend.llama.llama_backend import LlamaBackend
from cbatch.backend.load import notes
from cbatch.backend.load.devices import free_on_devices
from cbatch.backend.load.open_model import open_model, shipped_model
from cbatch.core.plan import Binding, Chunk, Slot, StepPlan
from cbatch.engine_options import EngineOptions
from cbatch.errors import CBatchError
from cbatch.options import GREEDY

if TYPE_CHECKING:
    from cbatch.backend.llama.model import LlamaModel

SLOWER = 1.25
"""How many times as long a step must take with flash attention for it to be turned off."""

_N_BUFFER_MAX = 2**28
"""Bytes of scores (heads × rows × cells, f32) that llama.cpp may have to hold without flash attention."""

_N_ROWS = 8
_N_CELLS = 512  # of each row: a prompt and an answer
_N_ROUNDS = 4
_OPTIONS = {
    said: EngineOptions(parallel=_N_ROWS, ctx_per_seq=_N_CELLS + 1, n_threads=1, flash_attn=said)
    for said in ("on", "off")
}
_NOTE = "flash-attention"


def settle_attention(model: LlamaModel, options: EngineOptions) -> EngineOptions:
    """Return the options with flash attention turned off where it is left open and this processor is faster without.

    It stays as llama.cpp has it where a device computes, under `exact` (whose probe decides), in one pool (without
    flash attention every row looks at all its cells), for sliding windows and states, and for wide windows.
    """
    if options.flash_attn != "auto" or options.exact or not is_better_off(model, options):
        return options
    return replace(options, flash_attn="off")


def is_better_off(model: LlamaModel, options: EngineOptions) -> bool:
    """Whether a context of these settings may do without flash attention and is faster then."""
    return _may_be_off(model, options) and not is_faster_with()


def _may_be_off(model: LlamaModel, options: EngineOptions) -> bool:
    is_plain = not (model.has_states or llama_cpp.llama_model_n_swa(model.pointer))
    cells = {options.cache_type_k, options.cache_type_v}
    n_ctx = options.n_ctx and options.n_ctx // options.n_slots
    n_window = options.ctx_per_seq or n_ctx or DEFAULT_WINDOW
    n_heads = max(1, int(llama_cpp.llama_model_n_head(model.pointer)))
    n_bytes = 4 * n_heads * min(options.n_ubatch, options.n_batch) * n_window
    return (
        is_plain
        and cells == {"f16"}
        and options.split_mode != "tensor"
        and options.kv != "unified"
        and n_bytes <= _N_BUFFER_MAX
        and not options.rpc_servers
        and not free_on_devices()
    )


@functools.cache
def is_faster_with() -> bool:
    """Whether decoding steps are faster with flash attention, or about as fast.

    Tried once a machine, and kept in the user's cache folder. Where it cannot be kept it is not turned off, for all
    processes of this machine must find the same: their cells are laid out by it.
    """
    if notes.read(_NOTE) is None:
        try:
            took = seconds_of_steps()
        except CBatchError:
            return True
        if notes.read(_NOTE) is None:  # nor has another process found it meanwhile
            notes.write("slower" if took["on"] > SLOWER * took["off"] else "faster", _NOTE)
    return notes.read(_NOTE) != "slower"


def seconds_of_steps() -> dict[str, float]:
    """Return what a step of rows with long histories takes on one core, with flash attention on and off."""
    slots = [Slot(i) for i in range(_N_ROWS)]
    history = Chunk(slots[0], 0, tuple(range(_N_CELLS)), has_output=True)
    others = tuple((slots[0], slot, _N_CELLS) for slot in slots[1:])
    step = StepPlan(tuple(Chunk(slot, _N_CELLS, (1,), has_output=True) for slot in slots))
    undo = StepPlan((), trims=tuple((slot, _N_CELLS) for slot in slots))
    with closing(open_model(shipped_model())) as model, ExitStack() as stack:
        backends = {}
        for said, options in _OPTIONS.items():
            backend = LlamaBackend(model, options, owns_model=False)
            backends[said] = stack.enter_context(closing(backend))
            binds = tuple(Binding(slot, 0, GREEDY, ()) for slot in slots)
            backend.run(StepPlan((history,), binds=binds))
            backend.run(StepPlan((), copies=others))
        took = dict.fromkeys(backends, inf)
        for _ in range(_N_ROUNDS):  # by turns, as other programs may take the core
            for said, backend in backends.items():
                start_s = perf_counter()
                backend.run(step)
                took[said] = min(took[said], perf_counter() - start_s)
                backend.run(undo)
    return took
