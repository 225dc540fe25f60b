"""The native library: found, loaded and checked against llama-cpp-python."""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.resources
import os
import sys
from typing import Any

from cbatch.backend.bindings import llama_cpp
from cbatch.backend.threads import once
from cbatch.errors import IncompatibleLlamaError

ABI_VERSION = 5
"""Surface number that this file is written for: CBATCH_ABI_VERSION in native/include/cbatch.h."""

_FILE_NAME = {"darwin": "libcbatch.dylib", "win32": "libcbatch.dll"}.get(
    sys.platform, "libcbatch.so"
)
_REINSTALL = "reinstall it with: pip install --force-reinstall --no-deps --no-cache-dir cbatch"
_BATCH_FIELDS = ("n_tokens", "token", "embd", "pos", "n_seq_id", "seq_id", "logits")

_int, _pointer = ctypes.c_int32, ctypes.c_void_p
_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "cbatch_batch_layout": (None, [_pointer]),
    "cbatch_isa_best": (_int, []),
    "cbatch_stepper_init": (_int, [_pointer, _pointer, _pointer, _pointer]),
    "cbatch_stepper_free": (None, [_pointer]),
    "cbatch_stepper_bind": (_int, [_pointer, _int, _pointer]),
    "cbatch_stepper_run": (
        _int,
        [_pointer, _pointer, _int, _pointer, _int, ctypes.c_int64, *[_pointer] * 6],
    ),
    "cbatch_stepper_interrupt": (None, [_pointer]),
    "cbatch_sample_row": (
        _int,
        [_pointer, _int, _pointer, _pointer, _int, _int, _pointer, _pointer],
    ),
    "cbatch_weights": (_int, [_pointer, _int, ctypes.c_double, _int, _pointer]),
    "cbatch_philox": (None, [_pointer, _pointer, _pointer]),
    "cbatch_log_init": (_pointer, [_int]),
    "cbatch_log_free": (None, [_pointer]),
    "cbatch_log_set_debug": (None, [_pointer, _int]),
    "cbatch_log_callback": (None, [_int, ctypes.c_char_p, _pointer]),
    "cbatch_log_drain": (_int, [_pointer, _pointer, _int, _pointer]),
}


def _path() -> str:
    given = os.environ.get("CBATCH_LIBRARY")
    if given:
        return given
    return str(importlib.resources.files("cbatch") / _FILE_NAME)


def load_library() -> Any:
    """Return the library, its functions typed; `library` does so once. `CBATCH_LIBRARY` names another file to load.

    Raises:
        IncompatibleLlamaError: the file is missing, does not load, or is of another cbatch.
    """
    path = _path()
    try:
        lib = ctypes.CDLL(path)
        version = lib.cbatch_abi_version()
    except (OSError, AttributeError) as error:
        raise IncompatibleLlamaError(
            f"cbatch's native library {path} is missing or does not load ({error}); {_REINSTALL}"
        ) from error
    if version != ABI_VERSION:
        raise IncompatibleLlamaError(
            f"cbatch's native library {path} has surface {version}, "
            f"cbatch {_version('cbatch')} wants {ABI_VERSION}; {_REINSTALL}"
        )
    for name, (restype, argtypes) in _SIGNATURES.items():
        function = getattr(lib, name)
        function.restype, function.argtypes = restype, argtypes
    return lib


library = once(load_library)


def handshake() -> None:
    """Check that the native library and llama-cpp-python agree on everything they share.

    Raises:
        IncompatibleLlamaError: they do not; the message names both sides and both versions.
    """
    ours, theirs = _native_layout(), _llama_layout()
    if ours != theirs:
        raise _mismatch(f"llama_batch is {ours} for cbatch but {theirs} for llama-cpp-python")
    for name, (restype, argtypes) in _llama_signatures().items():
        _check_function(name, restype, argtypes)


def _native_layout() -> dict[str, int]:
    out = (ctypes.c_int32 * 8)()
    library().cbatch_batch_layout(out)
    return dict(zip(("size", *_BATCH_FIELDS), out, strict=True))


def _llama_layout() -> dict[str, int]:
    batch = llama_cpp.llama_batch
    offsets = {name: getattr(batch, name).offset for name, *_ in batch._fields_}
    return {"size": ctypes.sizeof(batch), **offsets}


def _llama_signatures() -> dict[str, tuple[Any, list[Any]]]:
    return {
        "llama_decode": (ctypes.c_int32, [ctypes.c_void_p, llama_cpp.llama_batch]),
        "llama_get_logits_ith": (
            ctypes.POINTER(ctypes.c_float),
            [ctypes.c_void_p, ctypes.c_int32],
        ),
        "llama_log_set": (None, [llama_cpp.llama_log_callback, ctypes.c_void_p]),
    }


def _check_function(name: str, restype: Any, argtypes: list[Any]) -> None:
    function = getattr(llama_cpp, name, None)
    if function is None:
        raise _mismatch(f"llama-cpp-python has no {name}")
    found = (function.restype, list(function.argtypes or []))
    if found != (restype, argtypes):
        raise _mismatch(f"{name} is {(restype, argtypes)} for cbatch but {found} there")


def _mismatch(what: str) -> IncompatibleLlamaError:
    return IncompatibleLlamaError(
        f"{what} (cbatch {_version('cbatch')}, llama-cpp-python {_version('llama-cpp-python')}); "
        "install versions that fit: docs/compatibility.md"
    )


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "of unknown version"
