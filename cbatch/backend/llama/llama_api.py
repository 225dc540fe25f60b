"""Addresses of llama.cpp's functions, for the native library to call."""

from __future__ import annotations

import contextlib
import ctypes
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cbatch.backend.bindings import llama_cpp
from cbatch.backend.llama.library import ABI_VERSION
from cbatch.backend.llama.structs import NativeApi

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True, slots=True)
class LlamaApi:
    """The llama.cpp functions that a stepper calls, as ctypes functions; tests give their own."""

    decode: Any
    get_logits_ith: Any
    gomp_parallel: int | None = None
    """Address of `GOMP_parallel` in the OpenMP runtime that ggml computes with, if it does."""

    @classmethod
    def of_llama_cpp(cls) -> LlamaApi:
        """Return the functions of the installed llama-cpp-python."""
        return cls(llama_cpp.llama_decode, llama_cpp.llama_get_logits_ith, _gomp_parallel())

    def table(self) -> NativeApi:
        """Return the addresses as the native library takes them; valid while `self` lives."""
        return NativeApi(
            size=ctypes.sizeof(NativeApi),
            abi=ABI_VERSION,
            decode=ctypes.cast(self.decode, ctypes.c_void_p),
            get_logits_ith=ctypes.cast(self.get_logits_ith, ctypes.c_void_p),
            gomp_parallel=self.gomp_parallel,
        )


def _gomp_parallel() -> int | None:
    """Return the address of ggml's own `GOMP_parallel`: another runtime has other threads."""
    for lib in _ggml_handles():
        function = getattr(lib, "GOMP_parallel", None)
        if function is not None:
            return ctypes.cast(function, ctypes.c_void_p).value
    return None


def _ggml_handles() -> Iterator[Any]:
    """Yield handles among whose dependencies ggml's OpenMP is.

    libllama is one, unless ggml loads its CPU backends by itself; then the backend is.
    """
    yield llama_cpp.llama_cpp._lib
    for path in _loaded_files("libggml-cpu"):
        with contextlib.suppress(OSError):
            yield ctypes.CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_NOW)


def _loaded_files(prefix: str) -> list[str]:
    """Return the mapped files whose name begins with `prefix`; none where there is no /proc."""
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
            paths = [line.split(maxsplit=5)[5].rstrip("\n") for line in maps if "/" in line]
    except OSError:
        return []
    return [p for p in dict.fromkeys(paths) if os.path.basename(p).startswith(prefix)]
