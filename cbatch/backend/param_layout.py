"""Whether llama.cpp's parameter structures are in the loaded library what they are in llama-cpp-python.

They are passed by value, so a library of another version may have fields elsewhere: what is then set is another field,
without any error. Their defaults show where fields are.
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Iterator, Mapping
from typing import Any

_DEFAULTS: Mapping[str, Mapping[str, object]] = {
    "llama_context_params": {
        "n_ctx": 512,
        "n_batch": 2048,
        "n_ubatch": 512,
        "n_seq_max": 1,
        "n_outputs_max": 0,
        "n_threads": 4,
        "n_threads_batch": 4,
        "rope_scaling_type": -1,
        "pooling_type": -1,
        "attention_type": -1,
        "flash_attn_type": -1,
        "rope_freq_base": 0.0,
        "rope_freq_scale": 0.0,
        "yarn_ext_factor": -1.0,
        "yarn_orig_ctx": 0,
        "cb_eval_user_data": None,
        "type_k": 1,
        "type_v": 1,
        "embeddings": False,
        "offload_kqv": True,
        "op_offload": True,
        "swa_full": True,
        "kv_unified": False,
    },
    "llama_model_params": {
        "devices": None,
        "tensor_buft_overrides": None,
        "split_mode": 1,
        "main_gpu": 0,
        "progress_callback_user_data": None,
        "vocab_only": False,
        "check_tensors": False,
        "use_extra_bufts": True,
        "no_host": False,
        "no_alloc": False,
    },
}
"""Defaults that have stayed the same. Source: src/llama-context.cpp, src/llama-model.cpp, default_params."""

_N_ROOM = 4096
"""Bytes for a structure of unknown size."""


def fit_structures(llama: Any) -> str:
    """Make the structures of the module `llama_cpp.llama_cpp` those of its library.

    A structure of the library may have more fields before its flags or at its end: they keep their defaults.

    Returns:
        why the structures do not fit; empty if they do.
    """
    for name, defaults in _DEFAULTS.items():
        kind, maker = getattr(llama, name), name.replace("_params", "_default_params")
        n_bytes = _size(llama._lib, maker)
        fitting = [
            k for k in _candidates(kind, n_bytes) if _matches(llama._lib, maker, k, defaults)
        ]
        if not fitting:
            n_known = ctypes.sizeof(kind)
            return (
                f"{name}, which has {n_known} bytes in llama-cpp-python, has its fields elsewhere in the library"
                + f", where it has {n_bytes} bytes" * (n_bytes not in (None, n_known))
            )
        if fitting[0] is not kind:
            _replace(llama, name, kind, fitting[0])
    return ""


def _size(lib: Any, maker: str) -> int | None:
    """Return the bytes that a library's structure takes; None where that cannot be seen.

    Source: System V ABI AMD64 and Microsoft's x64 convention: a large result is written where the first argument says.
    """
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return None
    make = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)((maker, lib))
    rooms = [(ctypes.c_ubyte * _N_ROOM)(*[fill] * _N_ROOM) for fill in (0x55, 0xAA)]
    for room in rooms:
        make(ctypes.addressof(room))
    written = [i for i, (a, b) in enumerate(zip(*rooms, strict=True)) if a == b]
    align = ctypes.alignment(ctypes.c_void_p)
    return -(-(max(written, default=-1) + 1) // align) * align


def _candidates(kind: Any, n_bytes: int | None) -> Iterator[Any]:
    """Yield the structures of that size that may be the library's: the known one, or with unknown bytes in it."""
    n_more = 0 if n_bytes is None else n_bytes - ctypes.sizeof(kind)
    if n_more == 0:
        yield kind
    if n_more > 0:
        fields = list(kind._fields_)
        more = ("unknown", ctypes.c_ubyte * n_more)
        i_flags = next(i for i, (_, type_, *_) in enumerate(fields) if type_ is ctypes.c_bool)
        for i in (i_flags, len(fields)):
            grown = [*fields[:i], more, *fields[i:]]
            yield type(kind.__name__, (ctypes.Structure,), {"_fields_": grown})


def _matches(lib: Any, maker: str, kind: Any, defaults: Mapping[str, object]) -> bool:
    made = ctypes.CFUNCTYPE(kind)((maker, lib))()
    return all(getattr(made, name, value) == value for name, value in defaults.items())


def _replace(llama: Any, name: str, old: Any, new: Any) -> None:
    setattr(llama, name, new)
    for function in vars(llama).values():
        if isinstance(function, type):  # such as the type of a callback
            continue
        if getattr(function, "restype", None) is old:
            function.restype = new
        if old in (getattr(function, "argtypes", None) or ()):
            function.argtypes = [new if kind is old else kind for kind in function.argtypes]
