"""A model opened: from a file, checked before and after llama.cpp reads it, or borrowed from a `llama_cpp.Llama`."""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cbatch.backend.bindings import llama_cpp, short_spins
from cbatch.backend.llama.chat_template import parse_override
from cbatch.backend.llama.model import LlamaModel, Placement, read_metadata
from cbatch.backend.load.amx import AMX_ADVICE, has_sound_amx
from cbatch.backend.load.devices import add_servers, list_devices
from cbatch.backend.load.gguf_check import check_file
from cbatch.backend.threads import once
from cbatch.errors import ConfigError, ModelLoadError
from cbatch.interrupts import Postponed
from cbatch.logs import Log

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    RecentErrors = Callable[[], list[str]]

FOLDER = Path(__file__).parents[2] / "models"
CHAT = "chat.gguf"

_WAY_OUT = (
    "install cbatch again (pip install --force-reinstall cbatch), or give a model of your own"
)
# Source: include/llama.h, enum llama_split_mode.
_SPLIT_MODES = {"none": 0, "layer": 1, "row": 2, "tensor": 3}
# As files have them; llama.cpp writes "unspecified", which is −1, as an unsigned number.
_UNPOOLED = tuple(
    str(kind % 2**32)
    for kind in (llama_cpp.LLAMA_POOLING_TYPE_NONE, llama_cpp.LLAMA_POOLING_TYPE_UNSPECIFIED)
)
_log = Log("cbatch")
_N_QUOTED = 3  # lines: llama.cpp logs the cause first, then that loading failed


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """What a caller passes to follow and stop a load.

    Args:
        recent_errors: returns llama.cpp's last error lines, for messages.
        is_stopped: called for each tensor; once it is true, loading ends.
    """

    recent_errors: RecentErrors | None = None
    is_stopped: Callable[[], bool] = bool


def open_model(
    model: str | os.PathLike[str] | llama_cpp.Llama,
    *,
    placement: Placement | None = None,
    use_mmap: bool = True,
    use_mlock: bool = False,
    use_extra_bufts: bool | None = None,
    has_weights: bool = True,
    chat_template: str | None = None,
    watch: Watch | None = None,
) -> LlamaModel:
    """Load a GGUF file, or borrow the model of a `llama_cpp.Llama`.

    Args:
        model: the file (of a split model, the first one), or the `Llama`, taken as it was loaded.
        placement: which devices hold it; None: llama.cpp's choice.
        use_mmap: map the file instead of reading it.
        use_mlock: keep the weights in memory.
        use_extra_bufts: whether weights are repacked for the CPU; None: llama.cpp's default.
        has_weights: read the weights; nothing can be computed without.
        chat_template: "chatml" or Jinja, instead of the model's own.
        watch: see `Watch`.

    Raises:
        ModelLoadError: no such file, damaged, refused by llama.cpp, or unable to generate text.
        ConfigError: `chat_template` does not compile, or this llama-cpp-python cannot do the placement.
    """
    template = None if chat_template is None else parse_override(chat_template)
    if isinstance(model, llama_cpp.Llama):
        return _borrow(model, template)
    path = Path(model)
    check_file(path)
    _init_backend()
    params = _params(
        use_mmap=use_mmap,
        use_mlock=use_mlock,
        use_extra_bufts=use_extra_bufts,
        has_weights=has_weights,
    )
    placement = placement or Placement()
    place(params, placement)
    watch = watch or Watch()
    params.progress_callback = llama_cpp.llama_progress_callback(
        lambda share, data: not watch.is_stopped()
    )
    pointer = llama_cpp.llama_model_load_from_file(os.fsencode(path), params)
    if not pointer and watch.is_stopped():
        raise ModelLoadError(f"{path}: loading was broken off")
    if not pointer:
        raise ModelLoadError(_refusal(path, watch.recent_errors))
    return _checked(pointer, str(path), placement=placement, template=template)


def _params(
    *, use_mmap: bool, use_mlock: bool, use_extra_bufts: bool | None, has_weights: bool
) -> Any:
    params = llama_cpp.llama_model_default_params()
    params.load_mode = _load_mode(
        use_mmap=use_mmap and has_weights, use_mlock=use_mlock and has_weights
    )
    params.no_alloc = not has_weights
    if use_extra_bufts is None and has_weights and not has_sound_amx(shipped_model()):
        _log.warn("%s", AMX_ADVICE)
        use_extra_bufts = False
    if use_extra_bufts is not None:
        params.use_extra_bufts = use_extra_bufts
    return params


def place(params: Any, placement: Placement) -> None:
    """Write a placement into `llama_model_params`; register its servers. Warn where no device takes layers.

    Raises:
        ConfigError: more shares than llama.cpp has devices for, or see `add_servers`.
    """
    add_servers(placement.rpc_servers)
    if placement.n_gpu_layers and not list_devices():
        _log.warn(
            "n_gpu_layers=%d has no effect: llama.cpp sees no device but the CPU; "
            "llama-cpp-python has to be built for the GPU",
            placement.n_gpu_layers,
        )
    if placement.n_gpu_layers is not None:
        params.n_gpu_layers = placement.n_gpu_layers
    if placement.split_mode is not None:
        params.split_mode = _SPLIT_MODES[placement.split_mode]
    if placement.main_gpu is not None:
        params.main_gpu = placement.main_gpu
    if placement.tensor_split is not None:
        params.tensor_split = _shares(placement.tensor_split)


def _shares(shares: Sequence[float]) -> Any:
    n_most = int(llama_cpp.llama_max_devices())
    if len(shares) > n_most:
        raise ConfigError(
            f"tensor_split has {len(shares)} shares, llama.cpp knows up to {n_most} devices"
        )
    return (ctypes.c_float * n_most)(*shares)  # ctypes keeps it alive with the struct


def _borrow(llama: Any, template: str | None) -> LlamaModel:
    pointer = llama._model.model
    if pointer is None:
        raise ModelLoadError(f"{llama.model_path}: this llama_cpp.Llama is closed")
    if llama.model_params.vocab_only or llama.model_params.no_alloc:
        what = "vocab_only" if llama.model_params.vocab_only else "no_alloc"
        raise ModelLoadError(
            f"{llama.model_path}: this llama_cpp.Llama was loaded with {what}=True: it has no weights to compute with"
        )
    if llama.model_params.use_extra_bufts and not has_sound_amx(shipped_model()):
        raise ModelLoadError(f"{llama.model_path}: give its path instead of a Llama: {AMX_ADVICE}")
    model = _checked(
        pointer,
        str(llama.model_path),
        placement=_placement_of(llama.model_params),
        owner=llama,
        template=template,
    )
    # the stack calls its last callback first: before the model is freed
    llama._model._exit_stack.callback(_give_up, weakref.ref(model))
    return model


def _give_up(borrowed: weakref.ref[LlamaModel]) -> None:
    model = borrowed()
    if model is not None:
        with Postponed():  # Ctrl-C here would leave contexts with a freed model
            model.give_up()


def _placement_of(params: Any) -> Placement:
    return Placement(
        n_gpu_layers=params.n_gpu_layers,
        split_mode={mode: name for name, mode in _SPLIT_MODES.items()}.get(params.split_mode),
        main_gpu=params.main_gpu,
    )


def _checked(
    pointer: Any,
    name: str,
    *,
    placement: Placement,
    template: str | None,
    owner: object = None,
) -> LlamaModel:
    """Return the model if it can generate text; otherwise free it, unless it is borrowed."""
    reason = _why_not_generative(pointer)
    if reason is None:
        return LlamaModel(pointer, name, placement=placement, owner=owner, template=template)
    if owner is None:
        llama_cpp.llama_model_free(pointer)
    raise ModelLoadError(f"{name}: {reason}; give a causal language model")


def _why_not_generative(pointer: Any) -> str | None:
    metadata = read_metadata(pointer)
    arch = metadata.get("general.architecture", "")
    if llama_cpp.llama_model_has_encoder(pointer) or not llama_cpp.llama_model_has_decoder(pointer):
        return f"an encoder model ({arch}) cannot generate text here"
    if llama_cpp.llama_model_is_diffusion(pointer):
        return f"a diffusion model ({arch}) cannot generate text token by token"
    # gemma-embedding says nothing in its metadata. Source: src/models/gemma-embedding.cpp
    if metadata.get(f"{arch}.attention.causal") == "false" or arch == "gemma-embedding":
        return f"a model with non-causal attention ({arch}) cannot generate text"
    if metadata.get(f"{arch}.pooling_type", _UNPOOLED[0]) not in _UNPOOLED:
        return f"an embedding or reranking model ({arch}, it pools) cannot generate text"
    vocab = llama_cpp.llama_model_get_vocab(pointer)
    if llama_cpp.llama_vocab_type(vocab) == llama_cpp.LLAMA_VOCAB_TYPE_NONE:
        return f"a model without a vocabulary ({arch}) cannot generate text"
    return None


def _refusal(path: Path, recent_errors: RecentErrors | None) -> str:
    lines = recent_errors() if recent_errors is not None else []
    if lines:
        return f"{path}: llama.cpp refuses it: {' | '.join(lines[-_N_QUOTED:])}"
    return (
        f"{path}: llama.cpp refuses it: the file is damaged, of an architecture that this "
        "llama-cpp-python does not know, or too large for the memory; see llama.cpp's log"
    )


@once
def _init_backend() -> None:
    with short_spins():  # some builds load the CPU backend here, and OpenMP with it
        llama_cpp.llama_backend_init()


def _load_mode(*, use_mmap: bool, use_mlock: bool) -> int:
    """Source: llama-cpp-python's `Llama.__init__`."""
    if use_mmap:
        return int(
            llama_cpp.LLAMA_LOAD_MODE_MMAP_MLOCK if use_mlock else llama_cpp.LLAMA_LOAD_MODE_MMAP
        )
    return int(llama_cpp.LLAMA_LOAD_MODE_MLOCK if use_mlock else llama_cpp.LLAMA_LOAD_MODE_NONE)


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
            f"the model that ships inside is missing: {error}: {_WAY_OUT}"
        ) from error
    if digest != expected:
        raise ModelLoadError(f"the model that ships inside is damaged ({path}): {_WAY_OUT}")
    return path
