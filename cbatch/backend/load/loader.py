"""From a path to a backend that runs."""

from __future__ import annotations

import os
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from functools import partial, wraps
from time import perf_counter
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from cbatch.backend.bindings import llama_cpp
from cbatch.backend.devices import computes_on_cpu
from cbatch.backend.host_limits import available_cores
from cbatch.backend.llama.adapters import Adapters
from cbatch.backend.llama.context import (
    DEFAULT_WINDOW,
    context_cells,
    sequences_of,
    slot_window,
)
from cbatch.backend.llama.draft_model import DraftModel
from cbatch.backend.llama.embed_only import EmbedOnlyBackend
from cbatch.backend.llama.fingerprint import model_parts
from cbatch.backend.llama.library import handshake
from cbatch.backend.llama.llama_backend import LlamaBackend
from cbatch.backend.llama.log import llama_log
from cbatch.backend.llama.model import LlamaModel, facts_of
from cbatch.backend.llama.model_tuning import NOT_TRIED, Tuning
from cbatch.backend.llama.short_pool import N_CELLS
from cbatch.backend.load.attention import keep_attention, why_attention
from cbatch.backend.load.checkpoint_budget import described_mib
from cbatch.backend.load.company import BY_EXACT
from cbatch.backend.load.find_tuning import find_tuning
from cbatch.backend.load.open_model import open_model, shipped_model
from cbatch.backend.load.packed import why_not_packed
from cbatch.backend.load.probe import probe
from cbatch.backend.load.projector_check import check_projector, read_projector_file
from cbatch.backend.load.row_shapes import width_classes
from cbatch.backend.load.sizing import (
    Room,
    check_fits,
    find_room,
    settle,
    trained_window,
    warn_past_training,
)
from cbatch.backend.threads import run_in_fresh_thread
from cbatch.engine_options import BITWISE, DEFAULT_PARALLEL, MAX_THREADS, EngineOptions
from cbatch.errors import ConfigError, ModelLoadError
from cbatch.messages import LookAhead
from cbatch.support.checks import check_path, readable, reading
from cbatch.support.interrupts import Postponed
from cbatch.support.logs import Log

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from cbatch.backend.llama.native import NativeStepper
    from cbatch.backend.load.attention_trial import TrialRound

P = ParamSpec("P")
T = TypeVar("T")
_CORES = "the cores that it may use"
_FEWER = "fewer where that is faster"
_ASKED, _DEFAULT, _HELD = "as asked for", "the default", "what the memory holds"
_log = Log("cbatch")


def load_backend(
    model: Any,
    options: EngineOptions,
    look_ahead: LookAhead | None = None,
    is_stopped: Callable[[], bool] = bool,
    *,
    n_sharing: int = 1,
    stepper: Callable[..., NativeStepper] | None = None,
) -> tuple[LlamaBackend | EmbedOnlyBackend, Callable[[], str]]:
    """Load `model` and make its context; return the backend and a function that runs the exactness probe.

    All of it is computed in a thread that ends; see `cbatch.backend.threads`.

    Args:
        model: path of a GGUF file, a `llama_cpp.Llama`, or None for the model that ships inside.
        options: the slots, the window and the kind of memory that they leave open are decided; see `sizing`.
        look_ahead: prompts that will come, to decide them by.
        is_stopped: called now and then; once it is true, loading ends with a `CBatchError`.
        n_sharing: processes that load this model and share the free memory.
        stepper: what runs steps, called as `NativeStepper` is; None for that.

    Raises:
        ModelLoadError, IncompatibleLlamaError: see `cbatch.load`.
        ConfigError: `exact` is set and the probe found a difference.
    """
    load = partial(_load, model, options, look_ahead, is_stopped, n_sharing, stepper)
    return run_in_fresh_thread(load)


def n_bytes_on_cpu(model: Any, options: EngineOptions) -> int | None:
    """Return the bytes of a model's files; None where devices compute it, or the model is not a file that is there."""
    path = shipped_model() if model is None else model
    if not isinstance(path, str | os.PathLike):
        return None
    if not computes_on_cpu(options):
        return None
    return sum(size for _, size, _ in model_parts(os.fsdecode(path))) or None


def _until_struck(
    work: Callable[Concatenate[Callable[[], bool], P], T],
) -> Callable[P, T]:
    """Have `work` done in a thread that ends, with a function that says whether a signal has struck, such as Ctrl-C."""

    @wraps(work)
    def do(*args: P.args, **given: P.kwargs) -> T:
        with Postponed() as signals:
            has_struck = partial(getattr, signals, "has_struck")
            return run_in_fresh_thread(partial(work, has_struck, *args, **given))

    return do


@_until_struck
def describe_model(
    is_stopped: Callable[[], bool],
    model: str | os.PathLike[str] | None,
    options: EngineOptions,
    *,
    asks_probe: bool,
    asks_company: bool = False,
) -> dict[str, Any]:
    """Describe a model file and the context that it would get, as JSON values; only probe and trial read weights.

    Of a model that generates no text, the file alone.

    Args:
        model: path of a GGUF file; None for the one that ships inside.
        options: as for `load_backend`.
        asks_probe: run the exactness probe too, which takes some seconds; without it `exactness` is None.
        asks_company: try too whether several sequences are computed rightly together, as each load does; without it,
            and without the probe, `company` is None where that is not known beforehand.

    Raises:
        ModelLoadError, IncompatibleLlamaError: see `cbatch.load`.
        ConfigError: more cells than llama.cpp can count.
    """
    has_weights = asks_probe or asks_company
    opened = _opened(model, options, is_stopped, has_weights=has_weights)
    with opened as loaded, closing(loaded), ExitStack() as stack:
        if loaded.why_not_generative:
            return {**_told_of_file(loaded, options), "n_weight_bytes": loaded.n_bytes}
        draft = _open_draft(loaded, options, is_stopped, has_weights=has_weights)
        beside = stack.enter_context(closing(draft)).model if draft else None
        n_weights = loaded.n_bytes + (beside.n_bytes if beside else 0)
        n_unloaded = 0 if has_weights else n_weights
        room = find_room(loaded, options, draft=beside, n_unloaded=n_unloaded)
        tuning = find_tuning(
            loaded,
            options,
            settle(loaded, options, room),
            room,
            is_stopped,
            tries=has_weights,
            proves=asks_probe,
        )
        settled = tuning.options
        has_proof = options.exact and asks_probe
        exactness = tuning.exactness or None
        if asks_probe and not has_proof:
            exactness = probe(loaded, settled, is_stopped)
        is_proven = has_proof and exactness == BITWISE
        is_open = tuning.company == NOT_TRIED or (
            tuning.company.startswith(BY_EXACT) and not is_proven
        )
        n_short = N_CELLS if tuning.has_short_pool else 0
        return {
            **_told_of_file(loaded, options),
            **_told_of_memory(loaded, options, settled, room),
            "draft": beside and beside.name,
            "n_draft_bytes": beside and beside.n_bytes,
            **_told_of_projector(options),
            "n_short_cells": n_short,
            "n_short_bytes": room.footprint and room.footprint.of(0, n_short),
            "checkpoint_mib": described_mib(loaded, options, n_unloaded=n_unloaded),
            "flash_attn": settled.flash_attn,
            "company": None if is_open else tuning.company,
            "exactness": exactness,
            "step_rows": str(tuning.shape) if is_proven else None,
            "probe_s": tuning.probe_s,
            "is_remembered": tuning.is_remembered if has_proof else None,
        }


@_until_struck
def find_widths(
    is_stopped: Callable[[], bool], model: str | os.PathLike[str] | None, options: EngineOptions
) -> list[list[int]]:
    """Return the numbers of rows of a step, up to `parallel`, that give the same bits, in groups.

    Raises:
        ModelLoadError, IncompatibleLlamaError: see `cbatch.load`.
        CBatchError: a step cannot be computed.
    """
    with _opened(model, options, is_stopped) as loaded, closing(loaded):
        return width_classes(loaded, options, is_stopped)


@_until_struck
def note_attention(
    is_stopped: Callable[[], bool],
    model: str | os.PathLike[str] | None,
    options: EngineOptions,
    seen: Sequence[TrialRound],
    *,
    is_off: bool,
) -> bool:
    """Keep for later loads of a model whether it is faster without flash attention; see `keep_attention`.

    Raises:
        ModelLoadError, IncompatibleLlamaError: see `cbatch.load`.
    """
    with _opened(model, options, is_stopped, has_weights=False) as loaded, closing(loaded):
        settled = settle(loaded, options, find_room(loaded, options, n_unloaded=loaded.n_bytes))
        asked = replace(settled, flash_attn=options.flash_attn)
        return keep_attention(loaded, asked, seen, is_off=is_off)


_OF_VECTORS = ("can_generate", "can_embed", "can_rerank", "pooling", "n_embedding", "n_embed_max")


def _told_of_file(loaded: LlamaModel, options: EngineOptions) -> dict[str, Any]:
    return {
        "path": loaded.name,
        "name": loaded.metadata.get("general.name", ""),
        "architecture": loaded.architecture,
        "file_type": loaded.file_type,
        "n_bytes": sum(size for _, size, _ in loaded.parts),
        "why_not_packed": why_not_packed(loaded.parts, options),
        "n_params": loaded.n_params,
        "n_ctx_train": loaded.n_ctx_train,
        "has_chat_template": "tokenizer.chat_template" in loaded.metadata,
        "n_vocab": loaded.vocab.n_vocab,
        "end_tokens": list(loaded.vocab.end_tokens),
        "sampling_defaults": dict(loaded.sampling_defaults),
        **{name: getattr(facts_of(loaded), name) for name in _OF_VECTORS},
    }


def _told_of_projector(options: EngineOptions) -> dict[str, Any]:
    if options.mmproj is None:
        return {"mmproj": None, "n_mmproj_bytes": None, "mmproj_takes": None}
    path = check_path("mmproj", options.mmproj)
    file = read_projector_file(path)
    takes = ["pictures"] * file.has_eyes + ["sound"] * file.has_ears
    return {
        "mmproj": path,
        "n_mmproj_bytes": file.n_bytes,
        "mmproj_takes": " and ".join(takes),
    }


def _told_of_memory(
    loaded: LlamaModel, options: EngineOptions, settled: EngineOptions, room: Room
) -> dict[str, Any]:
    n_cells, n_slots, cost = context_cells(loaded, settled), settled.n_slots, room.footprint
    is_pool = settled.kv == "unified"
    n_window = slot_window(settled, n_cells, loaded.n_ctx_train, is_pool=is_pool)
    return {
        "parallel": n_slots,
        "n_window": n_window,
        **_reasons(loaded, options, settled, room, n_window),
        "n_threads": options.n_threads or min(available_cores(), MAX_THREADS),
        "n_cells": n_cells,
        "kv": settled.kv,
        "cache_type_k": settled.cache_type_k,
        "cache_type_v": settled.cache_type_v,
        "flash_attn_why": why_attention(loaded, replace(settled, flash_attn=options.flash_attn)),
        "n_cell_bytes": cost and cost.n_cell_bytes,
        "n_state_bytes": cost and cost.n_state_bytes,
        "is_about": cost is None or cost.is_about,
        "n_memory_bytes": cost and cost.of(sequences_of(settled), n_cells),
        "n_weight_bytes": loaded.n_bytes,
        "n_free_bytes": room.n_free,
        "n_budget_bytes": room.n_budget,
        "n_slots_fit": room.most_slots(n_cells // n_slots),
        "n_window_fit": room.most_window(n_slots, loaded.n_ctx_train or n_cells),
    }


def _reasons(
    loaded: LlamaModel, options: EngineOptions, settled: EngineOptions, room: Room, n_window: int
) -> dict[str, str]:
    """Return where slots, window, kind of memory and threads come from; "" where another line tells it."""
    n_trained = trained_window(loaded, options)
    n_usual = min(DEFAULT_WINDOW, n_trained or DEFAULT_WINDOW)
    if options.parallel is not None:
        slots = _ASKED if settled.parallel == options.parallel else ""
    elif settled.n_slots == DEFAULT_PARALLEL:
        slots = _DEFAULT
    else:
        slots = "" if room.holds(DEFAULT_PARALLEL, n_usual) else _HELD
    if options.ctx_per_seq is not None or options.n_ctx is not None:
        window = _ASKED
    elif n_window < n_usual:
        window = _HELD
    else:
        window = _DEFAULT if n_window == DEFAULT_WINDOW else "what the model was trained for"
    return {
        "parallel_why": slots,
        "n_window_why": window,
        "kv_why": _DEFAULT if options.kv == "auto" else _ASKED,
        "n_threads_why": (
            _ASKED if options.n_threads else _CORES if options.exact else f"{_CORES}; {_FEWER}"
        ),
    }


def _load(
    model: Any,
    options: EngineOptions,
    look_ahead: LookAhead | None,
    is_stopped: Callable[[], bool],
    n_sharing: int,
    stepper: Callable[..., NativeStepper] | None,
) -> tuple[LlamaBackend | EmbedOnlyBackend, Callable[[], str]]:
    if not isinstance(look_ahead, LookAhead | None):
        raise ConfigError(f"look_ahead must be a LookAhead, not {type(look_ahead).__name__}")
    start_s = perf_counter()
    with _opened(model, options, is_stopped, n_sharing=n_sharing) as loaded:
        if loaded.why_not_generative:
            return _embed_only(loaded, options)
        draft = _open_draft(loaded, options, is_stopped, n_sharing=n_sharing)
        try:
            room = find_room(
                loaded, options, draft=draft.model if draft else None, n_sharing=n_sharing
            )
            settled = settle(loaded, options, room, look_ahead)
            check_fits(loaded, settled, room)
            if options.mmproj is not None:
                check_projector(loaded, options, is_stopped)
            tuning = find_tuning(loaded, options, settled, room, is_stopped)
            if options.exact and tuning.exactness != BITWISE:
                raise ConfigError(
                    f"exact=True cannot be guaranteed for this model: {tuning.exactness}"
                )
            backend = _make_backend(loaded, tuning, draft, stepper)
        except BaseException:
            if draft is not None:
                draft.close()
            raise
        if not tuning.is_sound:
            _log.warn("%s: %s", readable(loaded.name), tuning.company)
        warn_past_training(loaded, settled, backend.n_window)
        if _log.has_info:
            load_s = round(perf_counter() - start_s, 3)
            _log_load(loaded, settled, room, backend, load_s)
        if options.exact:
            return backend, partial(str, tuning.exactness)
        return backend, partial(_probed, loaded, tuning.options)


@_until_struck
def _probed(is_stopped: Callable[[], bool], loaded: LlamaModel, options: EngineOptions) -> str:
    return probe(loaded, options, is_stopped)


def _embed_only(
    loaded: LlamaModel, options: EngineOptions
) -> tuple[EmbedOnlyBackend, Callable[[], str]]:
    for name in ("adapters", "draft", "mmproj"):
        if getattr(options, name):
            raise ConfigError(
                f"{name} has no effect with a model that only embeds or reranks: leave it out"
            )
    backend = EmbedOnlyBackend(loaded, options)
    said = BITWISE if options.exact else "not guaranteed: texts are computed together (exact=False)"
    return backend, partial(str, said)


def _open_draft(
    target: LlamaModel,
    options: EngineOptions,
    is_stopped: Callable[[], bool],
    *,
    has_weights: bool = True,
    n_sharing: int = 1,
) -> DraftModel | None:
    if options.draft is None:
        return None
    own = replace(options, chat_template=None)
    model = open_model(
        options.draft, own, has_weights=has_weights, n_sharing=n_sharing, is_stopped=is_stopped
    )
    try:
        if model.why_not_generative:
            raise ModelLoadError(
                f"{model.name} cannot draft: {model.why_not_generative}; give a smaller model of the same family"
            )
        return DraftModel(model, target)
    except BaseException:
        model.close()
        raise


def _log_load(
    loaded: LlamaModel,
    options: EngineOptions,
    room: Room,
    backend: LlamaBackend,
    load_s: float,
) -> None:
    n_cells = context_cells(loaded, options)
    _log.tell(
        "loaded",
        model=readable(loaded.name),
        architecture=loaded.architecture,
        file_type=loaded.file_type,
        weight_bytes=loaded.n_bytes,
        slots=backend.n_slots,
        window=backend.n_window,
        cells=n_cells,
        kv=backend.memory.kind,
        cache_type_k=options.cache_type_k,
        cache_type_v=options.cache_type_v,
        flash_attn=options.flash_attn,
        memory_bytes=room.footprint and room.footprint.of(options.n_slots, n_cells),
        batch=backend.n_batch,
        threads=backend.n_threads,
        load_s=load_s,
        probe_s=backend.tuning.probe_s,
        probe_remembered=backend.tuning.is_remembered if options.exact else None,
    )


def _checked(model: object) -> object:
    with reading("model"):
        if isinstance(model, llama_cpp.Llama):
            return model
        if isinstance(model, str | os.PathLike):
            return check_path("model", model)
        if model is None:
            return shipped_model()
    raise ConfigError(f"model must be a path or a llama_cpp.Llama, not {type(model).__name__}")


@contextmanager
def _opened(
    model: Any,
    options: EngineOptions,
    is_stopped: Callable[[], bool],
    *,
    has_weights: bool = True,
    n_sharing: int = 1,
) -> Iterator[LlamaModel]:
    """Open a model while llama.cpp's log is captured; close it where the block fails."""
    handshake()
    with llama_log().captured(), ExitStack() as undo:
        loaded = open_model(
            _checked(model),
            options,
            has_weights=has_weights,
            n_sharing=n_sharing,
            is_stopped=is_stopped,
        )
        undo.callback(loaded.close)
        yield loaded
        undo.pop_all()


def _make_backend(
    loaded: LlamaModel,
    tuning: Tuning,
    draft: DraftModel | None,
    stepper: Callable[..., NativeStepper] | None,
) -> LlamaBackend:
    options = tuning.options
    with ExitStack() as undo:
        adapters = Adapters(loaded, options.adapters or {})
        undo.callback(adapters.close)
        backend = LlamaBackend(loaded, tuning, stepper=stepper, adapters=adapters)
        undo.pop_all()
        undo.callback(_discard, backend)
        if draft is not None:
            backend.draft_with(draft)
        if options.mmproj is not None:
            backend.see_with(check_path("mmproj", options.mmproj))
        undo.pop_all()
    return backend


def _discard(backend: LlamaBackend) -> None:
    backend.owns_model = False
    backend.close()
