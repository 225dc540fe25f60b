"""What a load decides about a model: known before, read from notes of this machine, or tried now."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from cbatch.backend.devices import computes_on_cpu
from cbatch.backend.llama.context import context_cells, sequences_of
from cbatch.backend.llama.model_tuning import Tuning
from cbatch.backend.llama.short_pool import N_CELLS, may_have_short_pool
from cbatch.backend.load.company import find_company, find_known
from cbatch.backend.load.exact_notes import exact_finding
from cbatch.backend.load.weight_kernels import has_plain_weights

if TYPE_CHECKING:
    from collections.abc import Callable

    from cbatch.backend.llama.model import LlamaModel
    from cbatch.backend.load.sizing import Room
    from cbatch.engine_options import EngineOptions


def find_tuning(
    model: LlamaModel,
    asked: EngineOptions,
    settled: EngineOptions,
    room: Room,
    is_stopped: Callable[[], bool] = bool,
    *,
    tries: bool = True,
    proves: bool = True,
) -> Tuning:
    """Decide how a model is computed on this machine.

    Sizes, the kind of memory and flash attention are settled before. Then: whether llama.cpp computes several sequences
    rightly together; with `exact`, the shape of steps; and which means to speed are used. What is tried is noted for
    other loads: see `attention`, `survival`, `company` and `exact_notes`.

    Args:
        model: a loaded model; without weights nothing can be tried.
        settled: the same, with sizes and the like; see `settle`.
        is_stopped: called now and then; once it is true, trials end with a `CBatchError`.
        tries: try whether sequences are computed rightly together where that is not known.
        proves: with `exact`, find the shape of steps; `exactness` tells whether there is one.
    """
    known = find_known(model, settled)
    tuning = find_company(model, settled, is_stopped) if tries else known or Tuning(settled)
    if asked.exact and proves:
        proof = exact_finding(model, tuning.options, is_stopped)
        tuning = replace(proof, company=tuning.company, is_sound=tuning.is_sound)
    options = tuning.options
    is_on_cpu = computes_on_cpu(options)
    is_apart = options.kv == "partitioned" and options.n_slots > 1 and not options.exact
    # in a pool, too, only models that are known to be are computed rightly
    may_pool = asked.kv == "auto" and is_on_cpu and known is not None
    return replace(
        tuning,
        may_widen=tries and is_apart and has_plain_weights(model),
        has_short_pool=may_pool and _has_room_for_pool(model, options, room),
        may_vary_threads=is_on_cpu,
    )


def _has_room_for_pool(model: LlamaModel, options: EngineOptions, room: Room) -> bool:
    if not may_have_short_pool(model, options):
        return False
    if room.footprint is None or room.n_budget is None:
        return True
    n_cells = context_cells(model, options) + N_CELLS
    return room.footprint.of(sequences_of(options), n_cells) <= room.n_budget
