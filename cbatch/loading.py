"""Loading a model into this process or into worker processes."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from anyio.lowlevel import checkpoint_if_cancelled

from cbatch.backend.named_library import use_library
from cbatch.engine import Engine, IsStopped, Opener, cache_folder, open_local
from cbatch.engine_options import EngineOptions
from cbatch.errors import ConfigError
from cbatch.messages import LookAhead
from cbatch.options import RunOptions
from cbatch.runtime.interface import Runtime
from cbatch.runtime.waking import call_soon_here, do_to_end, is_in_event_loop
from cbatch.support.checks import MAX_INT, check_flag, check_int, readable, reading, shown
from cbatch.support.hub import local_model
from cbatch.support.plain import text_of

MAX_REPLICAS = 64
"""Our choice: machines with several hundred cores have some eight NUMA nodes."""

_LEAST_STACK = 256 * 1024
"""Bytes of a thread's stack with which llama.cpp loads and computes; with 64 KiB it is a segmentation fault."""


def load(
    model: str | os.PathLike[str] | Any = None,
    *,
    options: RunOptions | Mapping[str, Any] | None = None,
    threaded: bool = True,
    replicas: int | Literal["auto"] | None = None,
    look_ahead: LookAhead | None = None,
    n_sharing: int = 1,
    **settings: Any,
) -> Engine:
    """Load a GGUF model and return an engine that runs `parallel` requests at once.

    Loads at once, except in an event loop: there `async with` loads the engine in a worker thread, as `load_async`
    does. Without `async with`, it loads at its first use, with a warning.

    Args:
        model: path of a GGUF file (of a split model, the first part), a name `hf:OWNER/REPO/FILE.gguf` that
            `huggingface_hub` downloads, or a `llama_cpp.Llama`, whose model is shared; None for the small model that
            cbatch ships with.
        options: defaults for every request.
        threaded: compute in a thread of its own; otherwise `Engine.step` and waiting readers do the work.
        replicas: load into this number of worker processes, which share cores, slots and memory; one that dies is
            replaced. "auto": as many as compute fastest here, or none. Default: none, the model is loaded into this
            process.
        look_ahead: prompts that will come, with their options; slots' windows are sized for them.
        n_sharing: engines of this machine, in any process, that load now or soon: each takes its share of the memory
            that is free. The processes of `replicas` count as one.
        settings: fields of `cbatch.engine_options.EngineOptions` by name (they are explained there): sizes (`parallel`,
            `n_ctx`, `ctx_per_seq`, `memory_mib`), memory (`kv`, `cache_type_k`, …), computing (`exact`, `n_batch`,
            `n_threads`, …), devices (`n_gpu_layers`, …), the cache (`cache_dir`, …) and scheduling (`policy`, …).

    Raises:
        ConfigError: a wrong setting, a schema, grammar or template that cannot be compiled, or `exact=True`
            for a model that cannot guarantee it; the message says why.
        ModelLoadError: the file is missing or damaged, or its model neither generates nor embeds text.
        IncompatibleLlamaError: this cbatch does not work with the installed llama-cpp-python.
    """
    engine = _unloaded(
        model,
        options,
        threaded=threaded,
        replicas=replicas,
        look_ahead=look_ahead,
        n_sharing=n_sharing,
        settings=settings,
    )
    if is_in_event_loop():
        call_soon_here()(engine.warn_unless_opened)  # `async with` has begun by then
        return engine
    try:
        engine.open()
    except BaseException:  # Ctrl-C may have struck when it was loaded already
        engine.close()
        raise
    return engine


async def load_async(
    model: str | os.PathLike[str] | Any = None,
    *,
    options: RunOptions | Mapping[str, Any] | None = None,
    threaded: bool = True,
    replicas: int | Literal["auto"] | None = None,
    look_ahead: LookAhead | None = None,
    n_sharing: int = 1,
    **settings: Any,
) -> Engine:
    """Load a model in a thread, while the event loop goes on; return the engine when it is loaded.

    Cancelling the task stops loading and frees what was loaded. Otherwise the same as `load`.
    """
    made: list[Engine] = []

    def make() -> None:  # may download a model
        made.append(
            _unloaded(
                model,
                options,
                threaded=threaded,
                replicas=replicas,
                look_ahead=look_ahead,
                n_sharing=n_sharing,
                settings=settings,
            )
        )

    await do_to_end(make)
    engine = await made[0].__aenter__()
    try:
        await (
            checkpoint_if_cancelled()
        )  # a scope that was cancelled meanwhile: nobody gets the engine
    except BaseException:
        await do_to_end(engine.close)
        raise
    return engine


def _unloaded(
    model: Any,
    options: RunOptions | Mapping[str, Any] | None,
    *,
    threaded: object,
    replicas: object,
    look_ahead: LookAhead | None,
    n_sharing: object,
    settings: Mapping[str, Any],
) -> Engine:
    """Return an engine that is not loaded, after all checks that need no model."""
    engine_options = EngineOptions.of(settings)
    cache_folder(engine_options.cache_dir)
    model = local_model(model)
    engine_options = replace(
        engine_options,
        draft=local_model(engine_options.draft),
        mmproj=local_model(engine_options.mmproj),
    )
    is_threaded = check_flag("threaded", threaded)
    n_of_memory = check_int("n_sharing", n_sharing, 1, MAX_INT)
    n_replicas = _n_replicas(replicas, model, engine_options, is_threaded=is_threaded)
    open_here = partial(open_local, is_threaded=is_threaded, n_sharing=n_of_memory)
    opener: Opener = partial(open_here, model, engine_options, look_ahead)
    if n_replicas:
        from cbatch.worker.start import open_workers

        open_there = partial(open_workers, n=n_replicas, n_sharing=n_of_memory)
        opener = partial(open_there, model, engine_options, look_ahead)
    elif 0 < (n_stack := threading.stack_size()) < _LEAST_STACK:
        raise ConfigError(
            f"threading.stack_size() is {n_stack:,} bytes; loading a model needs at least {_LEAST_STACK:,}: set it to "
            "that, or to 0 for the system's default"
        )
    defaults = RunOptions.of(options)
    opener = partial(_open_checked, defaults, engine_options, opener)
    return Engine(options=defaults, opener=opener, model_name=model_name(model))


def _open_checked(
    defaults: RunOptions, options: EngineOptions, opener: Opener, is_stopped: IsStopped
) -> Runtime:
    """Open after a check of the library of llama.cpp, and of the defaults of all requests."""
    use_library(options.library)
    check_structure(defaults)
    return opener(is_stopped)


def check_structure(options: RunOptions) -> None:
    """Compile the schema, regex or grammar in the default options of all requests, without a model.

    Raises:
        ConfigError: the schema, regex or grammar cannot be compiled.
    """
    if options.structure is not None:
        from cbatch.backend.load import early_checks  # llama_cpp is slow to import

        early_checks.check_structure(options.structure)


def check_replicas(name: str, value: object) -> int | Literal["auto"]:
    """Return a number of replicas, or "auto". Raises a `ConfigError` for another value."""
    text = text_of(value)
    if text == "auto":
        return "auto"
    if text is not None:
        raise ConfigError(f"{name} must be a whole number or auto, not {shown(value)}")
    return check_int(name, value, 1, MAX_REPLICAS)


def _n_replicas(asked: object, model: Any, options: EngineOptions, *, is_threaded: bool) -> int:
    """Return how many worker processes to start; 0 for none."""
    if asked is None:
        return 0
    if text_of(asked) == "auto":
        n_best = best_replicas(model, options) if is_threaded else 1
        return n_best if n_best > 1 else 0
    n = int(check_replicas("replicas", asked))
    if not is_threaded:
        raise ConfigError(
            f"replicas={n} needs threaded=True: worker processes do the steps themselves"
        )
    return n


def best_replicas(model: Any, options: EngineOptions) -> int:
    """Return how many worker processes compute a model fastest here; 1 if dividing the cores does not pay."""
    use_library(options.library)
    from cbatch.backend.load.loader import n_bytes_on_cpu  # llama_cpp is slow to import
    from cbatch.support.taken_cores import my_cores
    from cbatch.worker.placement import choose_replicas, nodes_of
    from cbatch.worker.start import divisible

    n_bytes = n_bytes_on_cpu(model, options)
    if n_bytes is None:
        return 1
    n_slots = options.parallel if options.n_ctx is None else options.n_slots
    return divisible(options, choose_replicas(nodes_of(my_cores()), n_bytes, n_slots))


def model_name(model: Any) -> str:
    """Return what logs and records call a model: its file's name without the ending; "cbatch" for the shipped one."""
    with reading("model"):
        path = getattr(model, "model_path", model)
        is_path = isinstance(path, str | os.PathLike)
        return readable(Path(os.fsdecode(path)).stem) if is_path else "cbatch"
