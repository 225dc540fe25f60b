"""`llama_cpp`, imported here alone, with the library of llama.cpp that the user names or its own.

Its threads are not to spin at barriers for long. Every operation of a graph ends in a barrier, thousands of them a
step. Where another program has a core, the threads wait there for one that is not scheduled; GNU's OpenMP lets them
spin for some milliseconds first, on the very core that the late one waits for. `GOMP_SPINCOUNT` bounds that, and
`cbatch.backend.llama.openmp` makes waits shorter still while there is such a program. The runtime reads the variable
once, when it is loaded, so it is in the environment only while llama.cpp's libraries are loaded; a policy that the user
has set stays.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from cbatch.backend.named_library import (
    VARIABLE,
    bindings_version,
    check_library,
    lent,
    load_backends,
    misfit,
    named_library,
)
from cbatch.backend.native_file import native_file
from cbatch.backend.param_layout import fit_structures
from cbatch.errors import IncompatibleLlamaError, words_of

_SPIN_S = 3e-4
"""How long a thread spins before it sleeps. Source: docs/understand/performance.md."""

_ROUND_S = 1e-8
"""Seconds of a round of spinning, where they cannot be measured."""

POLICIES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
"""Variables by which a user says how OpenMP's threads wait. Source: the manual of GNU libgomp."""

OLDEST = "0.3.36"
"""The oldest llama-cpp-python that has what cbatch calls; as in pyproject.toml."""


@cache
def spin_count() -> int:
    """Return how many rounds a thread spins: a round takes 1 to 50 ns, by processor."""
    try:
        measure = ctypes.CDLL(str(native_file())).cbatch_spin_s
    except (OSError, AttributeError):  # which is told where it is loaded for use
        return round(_SPIN_S / _ROUND_S)
    measure.restype = ctypes.c_double
    round_s: float = measure()
    return max(1, round(_SPIN_S / round_s))


@contextmanager
def bounded_spins() -> Iterator[None]:
    """Have an OpenMP runtime that is loaded in the block spin for a bounded time; a user's own policy stays."""
    if any(name in os.environ for name in POLICIES):
        yield
        return
    os.environ["GOMP_SPINCOUNT"] = str(spin_count())
    try:
        yield
    finally:
        del os.environ["GOMP_SPINCOUNT"]


def checked_library() -> Path | None:
    """Return the library that the user names, tried; None for llama-cpp-python's own.

    Raises:
        IncompatibleLlamaError: the library does not fit, or llama-cpp-python is too old.
        ConfigError: there is no library at the place that is named.
    """
    if bindings_version() and _numbers(bindings_version()) < _numbers(OLDEST):
        raise IncompatibleLlamaError(
            f"llama-cpp-python {bindings_version()} is too old: cbatch needs {OLDEST} or later; "
            "pip install --upgrade llama-cpp-python",
            kind="bindings-old",
        )
    file = named_library()
    if file is not None:
        check_library(file)
    return file


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)[:3]))


def not_loaded(file: Path | None, error: BaseException) -> IncompatibleLlamaError:
    """Return what to say where `llama_cpp` cannot be imported."""
    missing, has_none = "library-missing", isinstance(error, ModuleNotFoundError)
    if file is not None:
        reason = _no_function(error) or words_of(error)
        return misfit(file, reason, missing if has_none else "")
    if has_none:
        words = f"{words_of(error)}: pip install llama-cpp-python"
        return IncompatibleLlamaError(words, kind=missing)
    return IncompatibleLlamaError(
        f"llama-cpp-python {bindings_version()} cannot load its library of llama.cpp: {words_of(error)}. Install it "
        f"again, or name another library: {VARIABLE}, load(library=…) or --llama-library",
        kind=missing,
    )


def _no_function(error: BaseException) -> str:
    """Return that the library lacks a function of the bindings, if that is what an error says; else nothing."""
    found = re.search(r"undefined symbol: (\w+)$|, (\w+)\): symbol not found", words_of(error))
    if found is None or not isinstance(error, AttributeError):
        return ""
    name = found[1] or found[2]
    return f"it has no function {name}, which llama-cpp-python needs: it is an older build, or not one of llama.cpp"


def _prepare(llama: Any) -> None:
    """Load the library's backends, and make the bindings' structures those of the library.

    Raises:
        IncompatibleLlamaError: there are no backends, or the structures do not fit.
    """
    bindings = llama.llama_cpp
    file = library_file()
    load_backends(bindings._lib, file)
    if reason := fit_structures(bindings):
        raise misfit(file, reason)
    for name in ("llama_context_params", "llama_model_params"):
        setattr(llama, name, getattr(bindings, name))


def library_file() -> Path:
    """Return the file of the library that is loaded."""
    return LIBRARY or Path(llama_cpp.llama_cpp._lib._name)


LIBRARY = checked_library()
"""The file of the library that the user names; None for llama-cpp-python's own."""

try:
    with bounded_spins(), lent(LIBRARY):
        import llama_cpp
        from llama_cpp import llama_chat_format

        _prepare(llama_cpp)
except (ImportError, OSError, RuntimeError, AttributeError) as error:
    raise not_loaded(LIBRARY, error) from error


def mtmd_bindings() -> Any:
    """Return the bindings of libmtmd, which encodes pictures; it is loaded at the first call.

    Raises:
        IncompatibleLlamaError: it is not there, or llama.cpp is a library that the user named.
    """
    if LIBRARY is not None:
        raise IncompatibleLlamaError(
            f"pictures need llama-cpp-python's own library, not {LIBRARY}: leave library, or mmproj, out"
        )
    try:
        with bounded_spins():
            from llama_cpp import mtmd_cpp
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        raise IncompatibleLlamaError(
            f"llama-cpp-python {bindings_version()} has no library for pictures (libmtmd): {words_of(error)}"
        ) from error
    return mtmd_cpp


def build_name() -> str:
    """Return the version of llama-cpp-python, and that of the library where it is another than its own."""
    own = str(llama_cpp.__version__)
    return own if LIBRARY is None else f"{own} with llama.cpp {library_version()}"


def library_version() -> str:
    """Return the version of the library that is loaded, and of its ggml, as far as it tells them."""
    return " ".join(filter(None, (said("llama_version"), _ggml_version())))


def _ggml_version() -> str:
    version, commit = said("ggml_version"), said("ggml_commit")
    return f"(ggml {version}, {commit})" if version else ""


def said(name: str) -> str:
    """Return the text of a function without arguments; empty where the library has no such function."""
    function = getattr(llama_cpp.llama_cpp._lib, name, None)
    if function is None:
        return ""
    function.restype = ctypes.c_char_p
    return (function() or b"").decode(errors="replace")


__all__ = ["llama_chat_format", "llama_cpp"]
