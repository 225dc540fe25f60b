"""From a path to a backend that runs."""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING, Any

import llama_cpp

from cbatch.backend.aside import run_aside
from cbatch.backend.llama import LlamaBackend
from cbatch.backend.model import LlamaModel, open_model
from cbatch.backend.native import handshake, llama_log
from cbatch.backend.probe import BITWISE, probe
from cbatch.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from cbatch.options import EngineOptions


def load_backend(model: Any, options: EngineOptions) -> tuple[LlamaBackend, Callable[[], str]]:
    """Load `model` and make its context; return the backend and what asks the exactness probe.

    Whatever this computes, it computes aside; see `cbatch.backend.aside`.

    Raises:
        ModelLoadError, IncompatibleLlamaError: see `cbatch.load`.
        ConfigError: `exact` was asked for and the probe found a difference.
    """
    return run_aside(partial(_load, model, options))


def _load(model: Any, options: EngineOptions) -> tuple[LlamaBackend, Callable[[], str]]:
    if not isinstance(model, str | os.PathLike | llama_cpp.Llama):
        raise ConfigError(f"model must be a path or a llama_cpp.Llama, not {type(model).__name__}")
    handshake()
    log = llama_log()
    log.install()
    try:
        loaded = open_model(
            model,
            n_gpu_layers=options.n_gpu_layers,
            use_mmap=options.use_mmap,
            use_mlock=options.use_mlock,
            use_extra_bufts=False if options.exact else None,
            chat_template=options.chat_template,
            recent_errors=log.drain,
        )
        try:
            return _make_backend(loaded, options)
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
