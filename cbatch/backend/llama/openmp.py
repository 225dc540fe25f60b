"""The OpenMP runtime that ggml computes with.

GNU's keeps a team of threads for each thread that has computed, also while that one waits. With more threads in all
teams than the machine has cores, those that wait at a barrier sleep almost at once. So an engine that only waits, or a
thread that computes now and then, would slow down every other in the process: each ends its team when it rests.
"""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cbatch.backend.bindings import llama_cpp

if TYPE_CHECKING:
    from collections.abc import Iterator

_SOFT = 1
"""Source: OpenMP 5.0, omp_pause_resource_t, omp_pause_soft."""


def end_team() -> None:
    """End the team of the calling thread, which must not be computing; its next computation has a new one."""
    pause = _pause()
    if pause is not None:
        pause(_SOFT)


@cache
def _pause() -> Any:
    """Return GNU's function that ends the calling thread's team; LLVM's would stop the teams of all threads."""
    for lib in _ggml_handles():
        if hasattr(lib, "GOMP_parallel") and not hasattr(lib, "__kmpc_fork_call"):
            return getattr(lib, "omp_pause_resource_all", None)
    return None


def gomp_parallel() -> int | None:
    """Return the address of ggml's own `GOMP_parallel`: another runtime has other threads."""
    for lib in _ggml_handles():
        function = getattr(lib, "GOMP_parallel", None)
        if function is not None:
            return ctypes.cast(function, ctypes.c_void_p).value
    return None


def _ggml_handles() -> Iterator[Any]:
    """Yield handles of libraries that ggml's OpenMP runtime is a dependency of.

    That is libllama, or the CPU backend where ggml loads its backends by itself.
    """
    yield llama_cpp.llama_cpp._lib
    with suppress(OSError):  # where there is no /proc
        maps = Path("/proc/self/maps").read_text("utf-8", "surrogateescape").splitlines()
        paths = (line.split(maxsplit=5)[5] for line in maps if "/libggml-cpu" in line)
        for path in dict.fromkeys(paths):
            yield ctypes.CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
