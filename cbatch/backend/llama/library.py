"""The native library: found, loaded, checked against llama-cpp-python, and given the functions that it calls."""

from __future__ import annotations

import ctypes
import importlib.metadata
from dataclasses import dataclass, fields
from typing import Any

from cbatch.backend.bindings import llama_cpp
from cbatch.backend.llama.openmp import gomp_parallel
from cbatch.backend.llama.structs import NativeApi
from cbatch.backend.native_file import native_file
from cbatch.backend.threads import once
from cbatch.errors import IncompatibleLlamaError

ABI_VERSION = 17
"""Surface number that this file is written for: CBATCH_ABI_VERSION in native/include/cbatch.h."""

_REINSTALL = "reinstall it, in a clone: pip install --force-reinstall --no-deps --no-cache-dir ."
_BATCH_FIELDS = ("n_tokens", "token", "embd", "pos", "n_seq_id", "seq_id", "logits")

_int, _pointer = ctypes.c_int32, ctypes.c_void_p
_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "cbatch_batch_layout": (None, [_pointer]),
    "cbatch_stepper_init": (_int, [_pointer, _pointer, _pointer, _pointer]),
    "cbatch_stepper_free": (None, [_pointer]),
    "cbatch_stepper_use": (None, [_pointer, _pointer]),
    "cbatch_stepper_set_threads": (None, [_pointer, _int]),
    "cbatch_stepper_draft_with": (_int, [_pointer, _pointer]),
    "cbatch_stepper_bind": (_int, [_pointer, _int, _pointer]),
    "cbatch_stepper_shift": (_int, [_pointer, _int, _int]),
    "cbatch_stepper_run": (
        _int,
        [_pointer, _pointer, _int, _pointer, _int, ctypes.c_int64, *[_int] * 3, *[_pointer] * 9],
    ),
    "cbatch_stepper_interrupt": (None, [_pointer]),
    "cbatch_log_init": (_pointer, [_int]),
    "cbatch_log_set_debug": (None, [_pointer, _int]),
    "cbatch_log_callback": (None, [_int, ctypes.c_char_p, _pointer]),
    "cbatch_log_drain": (_int, [_pointer, _pointer, _int, _pointer]),
    "cbatch_watch_init": (_pointer, [_pointer]),
    "cbatch_watch_free": (None, [_pointer]),
    "cbatch_watch_stop": (None, [_pointer]),
    "cbatch_watch_hurry": (None, [_pointer]),
    "cbatch_watch_callback": (ctypes.c_bool, [_pointer, ctypes.c_bool, _pointer]),
    "cbatch_packed_open": (_int, [_pointer]),
    "cbatch_packed_want": (None, [_int]),
    "cbatch_huge_pages_open": (_int, [_pointer]),
}

_QUICK = {
    *("cbatch_log_drain", "cbatch_stepper_bind", "cbatch_stepper_shift", "cbatch_stepper_use"),
    *("cbatch_stepper_interrupt", "cbatch_stepper_set_threads"),
    *("cbatch_watch_stop", "cbatch_watch_hurry"),
}
"""Functions of some microseconds, which keep Python's lock: to get it back from a busy thread takes up to 5 ms."""

_LLAMA_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "llama_decode": (_int, [_pointer, llama_cpp.llama_batch]),
    "llama_get_logits_ith": (ctypes.POINTER(ctypes.c_float), [_pointer, _int]),
    "llama_synchronize": (None, [_pointer]),
    "llama_get_memory": (_pointer, [_pointer]),
    "llama_memory_seq_rm": (ctypes.c_bool, [_pointer, _int, _int, _int]),
    "llama_log_set": (None, [llama_cpp.llama_log_callback, _pointer]),
}
"""What cbatch takes llama.cpp's functions to be."""


def load_library() -> Any:
    """Return the library, its functions typed; `library` does so once. `CBATCH_LIBRARY` names another file to load.

    Raises:
        IncompatibleLlamaError: the file is missing, does not load, or is of another cbatch.
    """
    path = native_file()
    folder = path.parent
    if not path.exists() and (folder.parent / "native" / "CMakeLists.txt").exists():
        raise IncompatibleLlamaError(
            f"{folder} is the source checkout of cbatch, not the installed package: run Python from another folder, "
            "with your script there, or set PYTHONSAFEPATH=1 (Python 3.11 and later)",
            kind="native-missing",
        )
    try:
        lib = ctypes.CDLL(str(path))
        version = lib.cbatch_abi_version()
    except (OSError, AttributeError) as error:
        raise IncompatibleLlamaError(
            f"cbatch's native library {path} is missing or does not load ({error}); {_REINSTALL}",
            kind="native-missing",
        ) from error
    if version != ABI_VERSION:
        raise IncompatibleLlamaError(
            f"cbatch's native library {path} has interface version {version}, "
            f"cbatch {_version('cbatch')} needs {ABI_VERSION}; {_REINSTALL}"
        )
    quick = ctypes.PyDLL(str(path))
    for name, (restype, argtypes) in _SIGNATURES.items():
        function = getattr(quick if name in _QUICK else lib, name)
        function.restype, function.argtypes = restype, argtypes
        setattr(lib, name, function)
    return lib


library = once(load_library)


def handshake() -> None:
    """Check that the native library and llama-cpp-python agree on everything they share.

    Raises:
        IncompatibleLlamaError: they do not; the message names both sides and both versions.
    """
    ours, theirs = _native_layout(), _llama_layout()
    if ours != theirs:
        raise _mismatch(
            f"llama_batch has the layout {ours} in cbatch, {theirs} in llama-cpp-python"
        )
    for name, wanted in _LLAMA_SIGNATURES.items():
        function = getattr(llama_cpp, name, None)
        if function is None:
            raise _mismatch(f"llama-cpp-python has no function {name}")
        found = (function.restype, list(function.argtypes or []))
        if found != wanted:
            raise _mismatch(
                f"cbatch calls {name} with the types {wanted}, llama-cpp-python with {found}"
            )


def _native_layout() -> dict[str, int]:
    out = (ctypes.c_int32 * 8)()
    library().cbatch_batch_layout(out)
    return dict(zip(("size", *_BATCH_FIELDS), out, strict=True))


def _llama_layout() -> dict[str, int]:
    batch = llama_cpp.llama_batch
    offsets = {name: getattr(batch, name).offset for name, *_ in batch._fields_}
    return {"size": ctypes.sizeof(batch), **offsets}


def _mismatch(what: str) -> IncompatibleLlamaError:
    return IncompatibleLlamaError(
        f"{what} (cbatch {_version('cbatch')}, llama-cpp-python {_version('llama-cpp-python')}); "
        "install versions that fit: docs/operate/compatibility.md"
    )


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "of unknown version"


# ---- what the library calls ----


@dataclass(frozen=True, slots=True)
class LlamaApi:
    """The llama.cpp functions that a stepper calls, as ctypes functions; tests give their own."""

    decode: Any
    get_logits_ith: Any
    gomp_parallel: int | None = None
    """Address of `GOMP_parallel` in the OpenMP runtime that ggml computes with, if it does."""
    synchronize: Any = None
    """Waits for what a device computes."""
    get_memory: Any = None
    memory_seq_rm: Any = None
    """Removes cells of a sequence: without it there are no drafts."""
    clock_ns: Any = None
    """Nanoseconds of a clock in place of the system's."""

    @classmethod
    def of_llama_cpp(cls) -> LlamaApi:
        """Return the functions of the installed llama-cpp-python."""
        return cls(
            llama_cpp.llama_decode,
            llama_cpp.llama_get_logits_ith,
            gomp_parallel(),
            llama_cpp.llama_synchronize,
            llama_cpp.llama_get_memory,
            llama_cpp.llama_memory_seq_rm,
        )

    def table(self) -> NativeApi:
        """Return the addresses as the native library takes them; valid while `self` lives."""
        return NativeApi(
            size=ctypes.sizeof(NativeApi),
            abi=ABI_VERSION,
            **{f.name: address(getattr(self, f.name)) for f in fields(self)},
        )


def address(function: Any) -> Any:
    """Return the address of a function of a library, None for None."""
    return None if function is None else ctypes.cast(function, ctypes.c_void_p)
