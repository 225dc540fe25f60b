"""Whether llama.cpp survives steps of several sequences: on some models it crashes.

An assertion in the model's graph fails when a context is made, or at a step of some number of sequences. So such steps
are tried in a separate process, which shares the pages of the weights. The result is noted.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from time import perf_counter

from cbatch.backend.bindings import llama_cpp
from cbatch.backend.host_limits import available_cores
from cbatch.backend.llama.context import (
    context_cells,
    exact_batch,
    make_context,
    sequences_of,
)
from cbatch.backend.llama.embed_only import EmbedOnlyBackend
from cbatch.backend.llama.llama_backend import LlamaBackend
from cbatch.backend.llama.log import llama_log
from cbatch.backend.llama.model import LlamaModel
from cbatch.backend.llama.model_tuning import Tuning
from cbatch.backend.llama.projector import Projector
from cbatch.backend.load.load_trial import KEPT, N_WINDOW, NO_WEIGHTS, SURVIVED, outcome
from cbatch.backend.load.note_parts import note_parts
from cbatch.backend.load.open_model import open_model
from cbatch.core.plan import Binding, Slot, StepPlan
from cbatch.core.span import Span
from cbatch.engine_options import EngineOptions
from cbatch.errors import CBatchError
from cbatch.options import GREEDY

_NOTE = "survival"

_ENOUGH_S = 20.0
"""Most seconds of steps; the steps most likely to crash come first. Our choice."""

_N_ALL = 32  # up to so many rows, every number is tried
_SIZES = (3, 5, 2)  # tokens of prompts that share a step
_N_LONG = 70  # above 64, as some layers work in chunks of 64 tokens


def find_surviving(
    model: LlamaModel, options: EngineOptions, is_stopped: Callable[[], bool] = bool
) -> EngineOptions:
    """Return options that do not crash llama.cpp: the given ones, another `n_ubatch`, or fewer slots.

    If they cannot be tried (no file, no process), return the given ones.
    """
    for tried in _candidates(options):
        if tried.n_slots == 1 or survives(model, tried, is_stopped):
            break
    return tried


def survives(
    model: LlamaModel, options: EngineOptions, is_stopped: Callable[[], bool] = bool
) -> bool:
    """Whether a separate process survived steps of all numbers of sequences; tried once on a machine."""
    said = _for_process(model, options)
    depends = note_parts(model.parts, options, **{n: said[n] for n in ("parallel", "ctx_per_seq")})
    if not depends:
        return True
    found = outcome(_NOTE, depends, (model.name, json.dumps(said)), is_stopped)
    return found in (None, SURVIVED)


def _candidates(options: EngineOptions) -> Iterator[EngineOptions]:
    """Yield the options, then with `n_ubatch` a multiple of the sequences, then with fewer and fewer slots.

    Some models, such as kimi-linear, assert that the number of sequences divides `n_ubatch`.
    """
    yield options
    fewer = (2**i for i in range(options.n_slots.bit_length(), -1, -1) if 2**i < options.n_slots)
    for n_slots in (options.n_slots, *fewer):
        tried = replace(options, parallel=n_slots)
        n_seqs, n_ubatch = sequences_of(tried), min(options.n_ubatch, options.n_batch)
        if n_ubatch > n_seqs:
            tried = replace(tried, n_ubatch=n_ubatch - n_ubatch % n_seqs)
        if tried != options:
            yield tried


def _for_process(model: LlamaModel, options: EngineOptions) -> dict[str, object]:
    """Return the options of an engine with the same sequences and graphs, and few cells."""
    n_seqs, n_ubatch = sequences_of(options), min(options.n_ubatch, options.n_batch)
    n_cells = min(context_cells(model, options), max(n_ubatch, n_seqs * N_WINDOW))
    return {
        "parallel": n_seqs,
        "n_batch": exact_batch(options) if options.exact else options.n_batch,
        "n_ubatch": max(n_ubatch, n_seqs) if options.exact else n_ubatch,
        "ctx_per_seq": max(1, n_cells // n_seqs),
        "n_gpu_layers": 0,  # assertions do not depend on the device
        **{name: getattr(options, name) for name in ("kv", *KEPT)},
    }


# ---- the process itself ----


def main() -> None:
    """Compute steps with the model and options that the arguments name; without weights only build its graphs.

    Raises:
        SystemExit: the steps cannot be tried, mostly for lack of memory; this is not a crash.
    """
    path, said, *more = sys.argv[1:]
    has_weights = NO_WEIGHTS not in more
    options = EngineOptions.of(json.loads(said))
    llama_log().install()
    try:
        model = open_model(
            Path(path), options, has_weights=has_weights, may_repack=False, is_trial=True
        )
        if not has_weights and model.why_not_generative:
            return
        if not has_weights:
            llama_cpp.llama_free(make_context(model, options, 1))
            return
        if options.mmproj is not None:
            endure_media(model, options)
            return
        if model.why_not_generative:
            endure_texts(EmbedOnlyBackend(model, options))
            return
        with closing(LlamaBackend(model, Tuning(options))) as backend:
            endure(backend)
    except CBatchError as error:
        raise SystemExit(str(error)) from error


def endure_media(model: LlamaModel, options: EngineOptions) -> None:
    """Encode a picture and a sound, as far as the projector of the options takes them."""
    path, n_threads = str(options.mmproj), options.n_threads or available_cores()
    with (
        closing(model),
        closing(Projector(model, path, n_threads, n_ubatch=options.n_ubatch)) as projector,
    ):
        projector.try_out()


def endure_texts(backend: EmbedOnlyBackend) -> None:
    """Compute the vectors of a few texts, as a model that only embeds does."""
    pooling = backend.model.pooling or "mean"
    with closing(backend), closing(backend.make_embedder(pooling)) as embedder:
        n_most = min(embedder.n_most, N_WINDOW)
        for texts in ([(0,) * min(3, n_most)] * min(2, embedder.n_texts), [(0,) * n_most]):
            embedder.compute(texts)


def endure(backend: LlamaBackend, seconds: Callable[[], float] = perf_counter) -> None:
    """Compute steps until all are done, one fails, or the time is over."""
    end_s, n_cells = seconds() + _ENOUGH_S, [0] * backend.n_slots
    n_vocab = backend.vocab.n_vocab
    for step in _steps(backend.n_slots, backend.n_batch, backend.n_window):
        anew = [slot for slot, n in step if n > 1 or not 0 < n_cells[slot] < backend.n_window]
        for slot in anew:
            n_cells[slot] = 0
        plan = StepPlan(
            tuple(Span(Slot(i), n_cells[i], (i % n_vocab,) * n, has_output=True) for i, n in step),
            clears=tuple(map(Slot, anew)),
            binds=tuple(Binding(Slot(slot), 0, GREEDY, ()) for slot in anew),
        )
        if backend.run(plan).code or seconds() > end_s:
            return
        for slot, n in step:
            n_cells[slot] += n


def _steps(n: int, n_batch: int, n_window: int) -> Iterator[Sequence[tuple[int, int]]]:
    """Yield steps, as slots and their numbers of tokens: prompts together and beside rows, rows of every number."""
    n_most = min(n_batch // n, n_window)
    yield [(slot, min(n_most, _SIZES[slot % len(_SIZES)])) for slot in range(n)]
    rows = [(slot, 1) for slot in range(n)]
    yield rows
    n_long = max(1, min(_N_LONG, n_batch - n, n_window // 2))
    yield [(0, n_long), *rows[1:]]
    yield [*rows[:-1], (n - 1, n_long)]
    widths = [max(1, n - 1), 2, *range(3, min(n, _N_ALL + 1)), *range(_N_ALL, n, _N_ALL)]
    for width in dict.fromkeys(widths):
        yield rows[:width]
        yield rows[-width:]
