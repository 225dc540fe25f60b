"""Weights packed for cbatch's own products, which processors with AVX-512 VNNI compute two to three times as fast.

The native library puts a buffer type into ggml's CPU backend (native/packed.cpp). A model that is loaded here has its
weights in it: 16 rows side by side, in the bits of their own type. Products then run in ggml's threads as before. Other
models of the process stay as they are.

It also has ggml ask for huge pages (native/huge_pages.cpp), on any processor.
"""

from __future__ import annotations

import functools
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

from cbatch.backend.bindings import build_name, llama_cpp, said
from cbatch.backend.devices import computes_on_cpu
from cbatch.backend.host_limits import host_total
from cbatch.backend.library_trial import wrong_answer
from cbatch.backend.llama.library import library
from cbatch.backend.load import notes
from cbatch.errors import ConfigError
from cbatch.support.processes import run_apart

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cbatch.backend.llama.fingerprint import Parts
    from cbatch.engine_options import EngineOptions

KERNELS = "packed 1"
"""Raised when the bits of a product change."""

_KNOWN = frozenset({"0.25.3"})
"""Versions of ggml whose types native/ggml_abi.h has; any other is tried in a process of its own first."""

_N_TIMES, _N_PROCESSES = 3, 8
"""A machine's memory holds the weights of all processes so many times. With `exact`, where all processes of a machine
are to decide alike, they are taken to be so many. Our choice."""

_WALL_S = 60.0
_FITS, _BAD_PROCESSOR, _TOO_LATE = 0, 2, 13
_SOUND = "sound"


def why_not_packed(parts: Parts, options: EngineOptions, n_sharing: int = 1) -> str:
    """Return why a model's weights are not packed, in words for `cbatch info`; empty if they are.

    Args:
        parts: the model's files.
        n_sharing: processes that load it.
    """
    if options.repack != "auto":
        return f"repack={options.repack!r}"
    if not computes_on_cpu(options):
        return "a GPU or another device computes them"
    n_copies = _N_PROCESSES if options.exact else n_sharing
    n_bytes = sum(size for _, size, _ in parts) * n_copies
    if n_bytes * _N_TIMES > (host_total() or 0):
        return f"the memory is smaller than {_N_TIMES} times the weights of all processes"
    return why_unfit()


def kernels(parts: Parts, options: EngineOptions) -> str:
    """Return which products compute a model, for notes and fingerprints; empty for llama.cpp's."""
    return "" if why_not_packed(parts, options) else KERNELS


@contextmanager
def packing() -> Iterator[None]:
    """Have the model that this thread loads in the block keep its weights packed."""
    library().cbatch_packed_want(1)
    try:
        yield
    finally:
        library().cbatch_packed_want(0)


@functools.cache
def why_unfit() -> str:
    """Return why this process has no packed weights; empty if it has. To be asked before llama.cpp loads a model."""
    if b"AMX_INT8 = 1" in llama_cpp.llama_print_system_info():
        return "llama.cpp uses AMX here"
    if not said("ggml_version"):
        return "this build of llama.cpp does not say which version of ggml it has"
    return _open() if _are_types_known() else _misfit()


def use_huge_pages() -> None:
    """Have ggml ask the system for huge pages for weights, cells and what a graph computes in."""
    if _are_types_known():
        library().cbatch_huge_pages_open(llama_cpp.llama_cpp._lib._handle)


@functools.cache
def _are_types_known() -> bool:
    """Whether native/ggml_abi.h has the types of the ggml that is loaded."""
    version = said("ggml_version")
    return version in _KNOWN or (bool(version) and _is_sound())


def _misfit() -> str:
    return f"they do not fit this build of llama.cpp ({build_name()})"


def _open() -> str:
    """Put the buffer type in its place; return why that cannot be, or nothing."""
    found = library().cbatch_packed_open(llama_cpp.llama_cpp._lib._handle)
    if found == _FITS:
        return ""
    if found == _BAD_PROCESSOR:
        return "they are for x86-64 processors with AVX-512 VNNI, on Linux"
    if found == _TOO_LATE:
        return "llama-cpp-python loaded a model in this process before cbatch did"
    return _misfit()


def _is_sound() -> bool:
    """Whether the model that ships answers rightly with packed weights, tried once in a process of its own."""
    if notes.read("packed", KERNELS) == _SOUND:
        return True
    try:
        done = run_apart(__name__, wall_s=_WALL_S)
    except ConfigError:
        return False
    is_sound = done is not None and done.returncode == 0 and done.stdout.endswith(_SOUND.encode())
    if is_sound:
        notes.write(_SOUND, "packed", KERNELS)
    return is_sound


def main() -> None:
    """Compute an answer with packed weights, and say so if it is right; runs in a separate process."""
    llama_cpp.llama_backend_init()
    if not _open():
        with packing():
            if wrong_answer(llama_cpp, None, repacks=True) is None:
                sys.stdout.write(_SOUND)
