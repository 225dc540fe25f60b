"""A loaded model: checked before and after llama.cpp reads it, freed once."""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import threading
import weakref
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from cbatch.backend.amx import AMX_ADVICE, has_sound_amx
from cbatch.backend.bindings import llama_cpp, short_spins
from cbatch.backend.chat_template import parse_override
from cbatch.backend.devices import add_servers, list_devices
from cbatch.backend.gguf_check import Cursor, DamagedError, check_file, read_header
from cbatch.backend.once import once
from cbatch.backend.shipped import shipped_model
from cbatch.backend.vocab import LlamaVocab
from cbatch.errors import ConfigError, EngineClosedError, ModelLoadError
from cbatch.interrupts import Postponed
from cbatch.logs import Log
from cbatch.options import RunOptions

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    RecentErrors = Callable[[], list[str]]

# Source: llama-model.cpp, llama_model_meta_key_str; ours are the names of `RunOptions`.
_SAMPLING_KEYS = {
    "temperature": "general.sampling.temp",
    "top_k": "general.sampling.top_k",
    "top_p": "general.sampling.top_p",
    "min_p": "general.sampling.min_p",
    "xtc_probability": "general.sampling.xtc_probability",
    "xtc_threshold": "general.sampling.xtc_threshold",
    "repeat_penalty": "general.sampling.penalty_repeat",
    "repeat_last_n": "general.sampling.penalty_last_n",
}
# Source: include/llama.h, enum llama_split_mode.
_SPLIT_MODES = {"none": 0, "layer": 1, "row": 2, "tensor": 3}
# As files have them; llama.cpp writes "unspecified", which is −1, as an unsigned number.
_UNPOOLED = tuple(
    str(kind % 2**32)
    for kind in (llama_cpp.LLAMA_POOLING_TYPE_NONE, llama_cpp.LLAMA_POOLING_TYPE_UNSPECIFIED)
)
_log = Log("cbatch")
_N_MAGIC = 8  # bytes of a GGUF before its counts: its name and version
_N_QUOTED = 3  # llama.cpp says the cause first, then that loading failed


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Which devices hold a model's layers; what is not said is llama.cpp's choice.

    Args:
        n_gpu_layers: layers to put on GPUs, -1 for all.
        split_mode: "none" for one device, "layer", "row" or "tensor" for several.
        main_gpu: the device that "none" takes.
        tensor_split: shares of the devices.
        rpc_servers: "host:port" of ggml's RPC servers, whose devices come before the own ones.
    """

    n_gpu_layers: int | None = None
    split_mode: str | None = None
    main_gpu: int | None = None
    tensor_split: Sequence[float] | None = None
    rpc_servers: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """What the caller of a load gives along.

    Args:
        recent_errors: returns llama.cpp's last error lines, to be quoted.
        is_stopped: asked for each tensor that is read; once it is true, no more are.
    """

    recent_errors: RecentErrors | None = None
    is_stopped: Callable[[], bool] = bool


class Context(Protocol):
    """Computes with a model."""

    def give_up(self) -> None:
        """Free what belongs to the model; wait for the run in flight. From any thread."""


class LlamaModel:
    """Owns a `llama_model *`, or borrows a `llama_cpp.Llama`'s, which it then never frees."""

    def __init__(
        self,
        pointer: Any,
        name: str,
        *,
        placement: Placement | None = None,
        owner: object = None,
        template: str | None = None,
    ) -> None:
        """Read the model's metadata and vocabulary.

        Args:
            pointer: `llama_model *` as ctypes gives it.
            name: what error messages call it: its path.
            placement: where its layers were put.
            owner: who frees it; `None` for this object.
            template: Jinja that replaces the model's own chat template.
        """
        self.placement = placement or Placement()
        self._pointer: Any = pointer
        self._owner = owner
        self._end = ""
        """Why it is closed; empty while it is open."""
        self.contexts: weakref.WeakSet[Context] = weakref.WeakSet()
        """What computes with it."""
        self.busy = threading.Lock()
        """Held by who must not lose the model while it works on it; `close` waits for it."""
        self.name = name
        self.metadata: Mapping[str, str] = _read_metadata(pointer)
        self.n_ctx_train = int(llama_cpp.llama_model_n_ctx_train(pointer))
        own = self.metadata.get("tokenizer.chat_template")
        self.vocab = LlamaVocab(
            pointer,
            template=template or own,
            template_name="the given chat_template" if template else f"the template in {name}",
        )

    @property
    def pointer(self) -> Any:
        """The `llama_model *`, valid until `close`.

        Raises:
            EngineClosedError: the model is closed.
        """
        self.check_open()
        return self._pointer

    def check_open(self) -> None:
        """Refuse to work on a model that is freed.

        Raises:
            EngineClosedError: it is closed, by us or by the `llama_cpp.Llama` that it is borrowed from.
        """
        if self._end:
            raise EngineClosedError(self._end)

    @property
    def architecture(self) -> str:
        """Such as "llama"."""
        return self.metadata.get("general.architecture", "")

    @property
    def file_type(self) -> str:
        """What most weights are stored as, such as "q4_k_m"; by its tensors where the file is silent."""
        found = llama_cpp.llama_model_ftype(self.pointer) & ~llama_cpp.LLAMA_FTYPE_GUESSED
        return _file_types().get(found, "unknown")

    @cached_property
    def sampling_defaults(self) -> Mapping[str, float]:
        """What the file itself says of sampling, by the names of `RunOptions`, where that takes the values."""
        found = {name: _number(self.metadata.get(key)) for name, key in _SAMPLING_KEYS.items()}
        said = {
            name: int(value) if name in ("top_k", "repeat_last_n") else value
            for name, value in found.items()
            if value is not None
        }
        return {name: value for name, value in said.items() if _is_option(name, value)}

    @property
    def n_layers(self) -> int:
        """Layers, without the output's."""
        return int(llama_cpp.llama_model_n_layer(self.pointer))

    @property
    def n_bytes(self) -> int:
        """Bytes of all weights."""
        return int(llama_cpp.llama_model_size(self.pointer))

    @cached_property
    def integers(self) -> Mapping[str, tuple[int, ...]]:
        """The file's arrays of whole numbers, which llama.cpp reads and does not show; empty without the file."""
        try:
            return _read_integers(Path(self.name))
        except (OSError, ValueError, DamagedError):
            return {}

    def give_up(self) -> None:
        """Let go of a borrowed model, for its owner frees it: those that compute with it end their run first."""
        self._end = (
            f"{self.name}: the llama_cpp.Llama that owns this model was closed under its engine: "
            "close the engine first"
        )
        for context in list(self.contexts):
            context.give_up()
        self.close()

    def close(self) -> None:
        """Free the model, unless it is borrowed. Twice is harmless; no context may be using it."""
        with self.busy:
            pointer, self._pointer = self._pointer, None
            self._end = self._end or f"{self.name} is closed"
            self.vocab.close(self._end)
            if pointer is not None and self._owner is None:
                llama_cpp.llama_model_free(pointer)
            self._owner = None


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
        placement: which devices hold it; not said: llama.cpp's choice.
        use_mmap: map the file rather than read it.
        use_mlock: keep the weights in memory.
        use_extra_bufts: whether weights are repacked for the CPU; not said: llama.cpp's default.
        has_weights: read the weights; without, nothing can be computed.
        chat_template: "chatml" or Jinja, instead of the model's own.
        watch: see `Watch`.

    Raises:
        ModelLoadError: no such file, damaged, refused by llama.cpp, or unable to generate text.
        ConfigError: `chat_template` does not compile, or a placement that this llama-cpp-python cannot do.
    """
    template = None if chat_template is None else parse_override(chat_template)
    if isinstance(model, llama_cpp.Llama):
        return _borrow(model, template)
    path = Path(model)
    check_file(path)
    _init_backend()
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


def place(params: Any, placement: Placement) -> None:
    """Write a placement into `llama_model_params`; register its servers. Log layers that no device will take.

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
    # what was given to the stack last is called first: before the model is freed
    llama._model._exit_stack.callback(_give_up, weakref.ref(model))
    return model


def _give_up(borrowed: weakref.ref[LlamaModel]) -> None:
    model = borrowed()
    if model is not None:
        with Postponed():  # else it would be freed under those that compute with it
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
    """Return the model if it can generate text; otherwise free what is ours to free."""
    reason = _why_not_generative(pointer)
    if reason is None:
        return LlamaModel(pointer, name, placement=placement, owner=owner, template=template)
    if owner is None:
        llama_cpp.llama_model_free(pointer)
    raise ModelLoadError(f"{name}: {reason}; give a causal language model")


def _why_not_generative(pointer: Any) -> str | None:
    metadata = _read_metadata(pointer)
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
    with short_spins():  # some builds load the library that computes here
        llama_cpp.llama_backend_init()


def _load_mode(*, use_mmap: bool, use_mlock: bool) -> int:
    """Source: llama-cpp-python's `Llama.__init__`."""
    if use_mmap:
        return int(
            llama_cpp.LLAMA_LOAD_MODE_MMAP_MLOCK if use_mlock else llama_cpp.LLAMA_LOAD_MODE_MMAP
        )
    return int(llama_cpp.LLAMA_LOAD_MODE_MLOCK if use_mlock else llama_cpp.LLAMA_LOAD_MODE_NONE)


def _read_metadata(pointer: Any) -> dict[str, str]:
    """Return the GGUF's key-value pairs as text; arrays are not among them."""
    return {
        _read_text(llama_cpp.llama_model_meta_key_by_index, pointer, i): _read_text(
            llama_cpp.llama_model_meta_val_str_by_index, pointer, i
        )
        for i in range(llama_cpp.llama_model_meta_count(pointer))
    }


def _read_integers(path: Path) -> Mapping[str, tuple[int, ...]]:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return read_header(Cursor(data, at=_N_MAGIC)).integers


def _read_text(read: Callable[..., int], *args: Any) -> str:
    """Call a llama.cpp function that fills a buffer and returns the length it needs."""
    n_room = 256
    while True:
        buffer = ctypes.create_string_buffer(n_room)
        n = read(*args, buffer, n_room)
        if n < n_room:
            return buffer.raw[: max(n, 0)].decode(errors="replace")
        n_room = n + 1


@cache
def _file_types() -> Mapping[int, str]:
    """Return the names of file types by their values, from llama.cpp's constants."""
    prefix = "LLAMA_FTYPE_"
    return {
        getattr(llama_cpp, name): name.removeprefix(prefix)
        .removeprefix("MOSTLY_")
        .removeprefix("ALL_")
        .lower()
        for name in dir(llama_cpp)
        if name.startswith(prefix)
    }


def _is_option(name: str, value: float) -> bool:
    try:
        RunOptions.of({name: value})
    except ConfigError:
        return False
    return True


def _number(text: str | None) -> float | None:
    try:
        value = float(text) if text is not None else math.nan
    except ValueError:
        return None
    return value if math.isfinite(value) else None
