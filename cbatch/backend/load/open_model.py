"""A model opened: from a file, checked before and after llama.cpp reads it, or borrowed from a `llama_cpp.Llama`."""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

from cbatch.backend.bindings import bounded_spins, llama_cpp
from cbatch.backend.devices import add_servers, free_on_devices
from cbatch.backend.llama.chat_template import parse_override
from cbatch.backend.llama.fingerprint import Parts, model_parts
from cbatch.backend.llama.log import llama_log
from cbatch.backend.llama.model import LlamaModel, Placement
from cbatch.backend.load.amx import AMX_ADVICE, has_sound_amx
from cbatch.backend.load.gguf_check import check_file, is_proven
from cbatch.backend.load.load_trial import check_load
from cbatch.backend.load.packed import (
    KERNELS,
    packing,
    use_huge_pages,
    why_not_packed,
    why_unfit,
)
from cbatch.backend.threads import once
from cbatch.engine_options import EngineOptions
from cbatch.errors import ConfigError, ModelLoadError
from cbatch.support.interrupts import Postponed
from cbatch.support.logs import Log

FOLDER = Path(__file__).parents[2] / "models"
CHAT = "chat.gguf"

_WAY_OUT = "install cbatch again, in a clone (pip install --force-reinstall --no-deps .), or give a model of your own"
# Source: include/llama.h, enum llama_split_mode.
_SPLIT_MODES = {"none": 0, "layer": 1, "row": 2, "tensor": 3}
# By `use_mmap` and `use_mlock`. Source: llama-cpp-python's `Llama.__init__`.
_LOAD_MODES = {
    (False, False): llama_cpp.LLAMA_LOAD_MODE_NONE,
    (False, True): llama_cpp.LLAMA_LOAD_MODE_MLOCK,
    (True, False): llama_cpp.LLAMA_LOAD_MODE_MMAP,
    (True, True): llama_cpp.LLAMA_LOAD_MODE_MMAP_MLOCK,
}
_N_QUOTED = 3  # lines: llama.cpp logs the cause first, then that loading failed
_DEFAULTS = EngineOptions()
_log = Log("cbatch")


def open_model(
    model: str | os.PathLike[str] | llama_cpp.Llama,
    options: EngineOptions = _DEFAULTS,
    *,
    has_weights: bool = True,
    may_repack: bool = True,
    is_trial: bool = False,
    n_sharing: int = 1,
    is_stopped: Callable[[], bool] = bool,
) -> LlamaModel:
    """Load a GGUF file, or borrow the model of a `llama_cpp.Llama`.

    Args:
        model: the file (of a split model, the first one), or the `Llama`, taken as it was loaded.
        options: where the weights are put, and the chat template.
        has_weights: read the weights; nothing can be computed without.
        may_repack: let llama.cpp repack weights for this processor, which doubles their memory.
        is_trial: this is the separate process that tries the file; start no other one.
        n_sharing: processes that load this model.
        is_stopped: called for each tensor; once it is true, loading ends.

    Raises:
        ModelLoadError: no such file, damaged, refused by llama.cpp, or unable to generate text.
        ConfigError: `chat_template` does not compile, or this llama-cpp-python cannot do the placement.
    """
    template = None if options.chat_template is None else parse_override(options.chat_template)
    if isinstance(model, llama_cpp.Llama):
        return _borrow(model, template)
    path = Path(model)
    parts = model_parts(os.fspath(path))
    header = check_file(path)
    _init_backend()
    if not (is_trial or (header is not None and is_proven(header))):
        check_load(path, options, is_stopped, has_weights=has_weights)
    params = llama_cpp.llama_model_default_params()
    params.no_alloc = not has_weights
    params.load_mode = llama_cpp.LLAMA_LOAD_MODE_NONE
    kernels = ""
    if has_weights:
        if not may_repack or options.repack == "off":
            params.use_extra_bufts = False
        elif not has_sound_amx(shipped_model()):
            _log.warn("%s", AMX_ADVICE)
            params.use_extra_bufts = False
        elif not why_not_packed(parts, options, n_sharing):
            kernels = KERNELS
        # few weights stay as they are in the file where they are packed: nothing to map
        params.load_mode = _LOAD_MODES[options.use_mmap and not kernels, options.use_mlock]
    place(params, options)
    params.progress_callback = llama_cpp.llama_progress_callback(
        lambda share, data: not is_stopped()
    )
    with packing() if kernels else nullcontext():
        pointer = llama_cpp.llama_model_load_from_file(os.fsencode(path), params)
    if not pointer:
        raise ModelLoadError(f"{path}: {'loading was cancelled' if is_stopped() else _refusal()}")
    placement = Placement(
        n_gpu_layers=options.n_gpu_layers,
        split_mode=options.split_mode,
        main_gpu=options.main_gpu,
        tensor_split=options.tensor_split,
    )
    model = _checked(pointer, str(path), placement, template, has_weights=has_weights, parts=parts)
    model.kernels = kernels
    return model


def place(params: Any, options: EngineOptions) -> None:
    """Write into `llama_model_params` where a model is put; register the servers. Warn where no device takes layers.

    Raises:
        ConfigError: more shares than llama.cpp has devices for, or see `add_servers`.
    """
    add_servers(options.rpc_servers or ())
    if options.n_gpu_layers and not free_on_devices():
        _log.warn(
            "n_gpu_layers=%d has no effect: llama.cpp sees no device but the CPU; "
            "to use a GPU, build llama-cpp-python for it",
            options.n_gpu_layers,
        )
    if options.n_gpu_layers is not None:
        params.n_gpu_layers = options.n_gpu_layers
    if options.split_mode is not None:
        params.split_mode = _SPLIT_MODES[options.split_mode]
    if options.main_gpu is not None:
        params.main_gpu = options.main_gpu
    if options.tensor_split is not None:
        params.tensor_split = _shares(options.tensor_split)


def _shares(shares: Sequence[float]) -> Any:
    n_most = int(llama_cpp.llama_max_devices())
    if len(shares) > n_most:
        raise ConfigError(
            f"tensor_split has {len(shares)} shares, but llama.cpp supports at most {n_most} devices"
        )
    return (ctypes.c_float * n_most)(*shares)  # ctypes keeps it alive with the struct


def _borrow(llama: Any, template: str | None) -> LlamaModel:
    pointer, name, params = llama._model.model, str(llama.model_path), llama.model_params
    if pointer is None:
        raise ModelLoadError(f"{name}: this llama_cpp.Llama is closed")
    if params.vocab_only or params.no_alloc:
        what = "vocab_only" if params.vocab_only else "no_alloc"
        raise ModelLoadError(
            f"{name}: this llama_cpp.Llama was loaded with {what}=True: it has no weights to compute with"
        )
    if params.use_extra_bufts and not has_sound_amx(shipped_model()):
        raise ModelLoadError(f"{name}: give its path instead of a Llama: {AMX_ADVICE}")
    placement = Placement(
        n_gpu_layers=params.n_gpu_layers,
        split_mode={mode: name for name, mode in _SPLIT_MODES.items()}.get(params.split_mode),
        main_gpu=params.main_gpu,
    )
    model = _checked(pointer, name, placement, template, owner=llama)
    # the stack calls its last callback first: before the model is freed
    stack: ExitStack = llama._model._exit_stack
    stack.callback(_give_up, weakref.ref(model), stack)
    return model


def _give_up(borrowed: weakref.ref[LlamaModel], stack: ExitStack) -> None:
    model = borrowed()
    if model is None:
        return

    def end() -> None:
        with Postponed(), rest:  # Ctrl-C here would leave contexts with a freed model
            model.give_up()

    rest = stack.pop_all()
    if not model.put_off(end):
        end()


def _checked(
    pointer: Any,
    name: str,
    placement: Placement,
    template: str | None,
    *,
    owner: object = None,
    has_weights: bool = True,
    parts: Parts | None = None,
) -> LlamaModel:
    """Return the model if it can generate text or embed it; otherwise free it, unless it is borrowed."""
    model = LlamaModel(
        pointer,
        name,
        placement=placement,
        owner=owner,
        template=template,
        has_weights=has_weights,
        parts=parts,
    )
    if model.why_not_generative and not model.can_embed:
        reason = model.why_not_generative
        model.close()
        raise ModelLoadError(f"{name}: {reason}; give a causal language model")
    return model


def _refusal() -> str:
    reason = " | ".join(llama_log().drain()[-_N_QUOTED:]) or (
        "the file is damaged, of an architecture that this llama-cpp-python does not know, or too large for the "
        "memory; see llama.cpp's log"
    )
    return f"llama.cpp refuses it: {reason}"


@once
def _init_backend() -> None:
    with bounded_spins():  # some builds load the CPU backend here, and OpenMP with it
        llama_cpp.llama_backend_init()
    why_unfit()
    use_huge_pages()


def shipped_model(folder: Path = FOLDER) -> Path:
    """Return the path of the chat model that ships inside.

    Raises:
        ModelLoadError: it is missing, or is not what was packed.
    """
    path = folder / CHAT
    try:
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        expected = json.loads((folder / "digests.json").read_text(encoding="utf-8"))[CHAT]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ModelLoadError(
            f"the model shipped with cbatch is missing: {error}: {_WAY_OUT}"
        ) from error
    if digest != expected:
        raise ModelLoadError(f"the model shipped with cbatch is damaged ({path}): {_WAY_OUT}")
    return path
