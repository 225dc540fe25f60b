"""From a path to a backend that runs."""

from __future__ import annotations

import os
from contextlib import closing, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import llama_cpp

from cbatch.backend.aside import run_aside
from cbatch.backend.context import context_cells, slot_window
from cbatch.backend.llama import LlamaBackend
from cbatch.backend.log import llama_log
from cbatch.backend.memory import has_states
from cbatch.backend.model import LlamaModel, open_model
from cbatch.backend.native import handshake
from cbatch.backend.probe import BITWISE, probe
from cbatch.backend.shipped import shipped_model
from cbatch.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from cbatch.options import EngineOptions


def load_backend(model: Any, options: EngineOptions) -> tuple[LlamaBackend, Callable[[], str]]:
    """Load `model` and make its context; return the backend and what asks the exactness probe.

    Whatever this computes, it computes aside; see `cbatch.backend.aside`.

    Raises:
        ModelLoadError, IncompatibleLlamaError: see `cbatch.load`.
        ConfigError: `exact` was asked for and the probe found a difference.
    """
    return run_aside(partial(_load, model, options))


def describe_model(
    model: str | os.PathLike[str] | None, options: EngineOptions, *, asks_probe: bool
) -> dict[str, Any]:
    """Return what a model file is and what a slot would hold, as JSON values; no context of that size is made.

    Args:
        model: path of a GGUF file; None for the one that ships inside.
        options: those that `load_backend` would get.
        asks_probe: find out the exactness too, which computes for some seconds; None in its place without.

    Raises:
        ModelLoadError, IncompatibleLlamaError: see `cbatch.load`.
        ConfigError: more cells than llama.cpp can count.
    """
    return run_aside(partial(_describe, model, options, asks_probe))


def _describe(model: Any, options: EngineOptions, asks_probe: bool) -> dict[str, Any]:
    model = shipped_model() if model is None else model
    with _opened(model, options, will_compute=asks_probe) as loaded, closing(loaded):
        n_cells = context_cells(loaded, options)
        is_pool = options.kv == "unified" and not has_states(loaded)
        return {
            "path": loaded.name,
            "name": loaded.metadata.get("general.name", ""),
            "architecture": loaded.architecture,
            "file_type": loaded.file_type,
            "n_bytes": os.path.getsize(model),
            "n_params": int(llama_cpp.llama_model_n_params(loaded.pointer)),
            "n_ctx_train": loaded.n_ctx_train,
            "has_chat_template": "tokenizer.chat_template" in loaded.metadata,
            "n_vocab": loaded.vocab.n_vocab,
            "end_tokens": list(loaded.vocab.end_tokens),
            "sampling_defaults": dict(loaded.sampling_defaults),
            "parallel": options.parallel,
            "n_window": slot_window(options, n_cells, loaded.n_ctx_train, is_pool=is_pool),
            "n_cells": n_cells,
            "exactness": probe(loaded, options) if asks_probe else None,
        }


def _load(model: Any, options: EngineOptions) -> tuple[LlamaBackend, Callable[[], str]]:
    model = shipped_model() if model is None else model
    if not isinstance(model, str | os.PathLike | llama_cpp.Llama):
        raise ConfigError(f"model must be a path or a llama_cpp.Llama, not {type(model).__name__}")
    with _opened(model, options, will_compute=True) as loaded:
        return _make_backend(loaded, options)


@contextmanager
def _opened(model: Any, options: EngineOptions, *, will_compute: bool) -> Iterator[LlamaModel]:
    """Open a model and keep llama.cpp's log meanwhile; where the block fails, close it.

    Where nothing will be computed, the weights stay in the file: not repacked, none on a GPU.
    """
    handshake()
    log = llama_log()
    log.install()
    try:
        loaded = open_model(
            model,
            n_gpu_layers=options.n_gpu_layers if will_compute else 0,
            use_mmap=options.use_mmap,
            use_mlock=options.use_mlock,
            use_extra_bufts=False if options.exact or not will_compute else None,
            chat_template=options.chat_template,
            recent_errors=log.drain,
        )
        try:
            yield loaded
        except BaseException:
            loaded.close()
            raise
    finally:
        log.remove()


def _make_backend(
    loaded: LlamaModel, options: EngineOptions
) -> tuple[LlamaBackend, Callable[[], str]]:
    ask: Callable[[], str] = partial(run_aside, partial(probe, loaded, options))
    if options.exact:
        found = probe(loaded, options)
        if found != BITWISE:
            raise ConfigError(f"exact=True cannot hold for this model: {found}")
        ask = partial(str, found)
    return LlamaBackend(loaded, options), ask
