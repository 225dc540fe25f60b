"""A library of llama.cpp that the user names, in place of the one inside llama-cpp-python.

It is found, tried in a separate process, which it may crash, and lent to llama-cpp-python, which loads it. A process
has one library; those that it starts have the same one.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import json
import logging
import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from cbatch.errors import ConfigError, IncompatibleLlamaError
from cbatch.support.checks import readable
from cbatch.support.processes import run_apart

VARIABLE = "LLAMA_CPP_LIB_PATH"
"""The environment variable that names a library: llama-cpp-python's own, which takes a folder with `libllama.so`."""

TRIED = "CBATCH_TRIED_LIBRARY"
"""Tells processes that this one starts which library they need not try again."""

_TRIAL = "cbatch.backend.library_trial"
_WALL_S = 120.0
_ENDINGS = (".dylib", ".so", ".so.*") if sys.platform == "darwin" else (".so", ".so.*")
_DIGEST = f"-{'[0-9a-f]' * 8}"
"""What auditwheel adds to the names of libraries in a wheel's folder NAME.libs."""

_IN = (".", "lib", "lib64", "bin")
"""Folders of a named one that may have the library: of a build, of an installation, of a wheel."""

_NO_RENAMED_BACKENDS = ("libggml-base-", "libggml-cpu-")
"""The first is not a backend; the others have scores, by which ggml chooses one."""

_BACKENDS_IN = (".", "backends", "ggml", "../bin", "../lib", "../backends")
"""Folders that may have the backends of a library, seen from its own."""

# Source: the System V ABI's registry of e_machine.
_MACHINES = {
    3: "x86",
    21: "ppc64",
    22: "s390",
    40: "Arm",
    62: "x86-64",
    183: "AArch64",
    243: "RISC-V",
    258: "LoongArch",
}


def use_library(path: str | os.PathLike[str] | None) -> None:
    """Load llama.cpp from a file or folder into this process, and into those that it starts; None: as found by itself.

    Raises:
        ConfigError: there is no library, or this process has loaded another one.
        IncompatibleLlamaError: it does not fit cbatch or llama-cpp-python.
    """
    if path is None:
        return
    file = find_library(path)
    before = os.environ.get(VARIABLE)
    if "llama_cpp" not in sys.modules:
        os.environ[VARIABLE] = str(file)
        try:
            import_module("cbatch.backend.bindings")
        except BaseException:
            _restore(before)
            raise
    if not _is_loaded(file):
        raise ConfigError(
            f"llama.cpp cannot be loaded from {file}: this process has loaded another library already. Name this one "
            f"at the first load, before llama_cpp is imported, or in {VARIABLE}"
        )


def _is_loaded(file: Path) -> bool:
    bindings: Any = sys.modules["llama_cpp.llama_cpp"]
    with suppress(OSError):
        return bool(ctypes.CDLL(str(file), mode=os.RTLD_NOLOAD)._handle == bindings._lib._handle)
    return False


def named_library() -> Path | None:
    """Return the file of the library that the environment names; None where llama-cpp-python's own is to be used.

    Raises:
        ConfigError: there is none at that place.
    """
    named = os.environ.get(VARIABLE)
    return find_library(named) if named else None


def find_library(path: str | os.PathLike[str]) -> Path:
    """Return the file of the library that a path is, or that a folder has, made absolute.

    Raises:
        ConfigError: there is none.
    """
    place = Path(os.path.abspath(os.path.expanduser(path)))
    if readable(place) != str(place):
        raise ConfigError(
            f"Python cannot load the llama.cpp library {readable(place)}, for its path is not UTF-8: rename the file "
            "or its folder"
        )
    if place.is_file():
        return place
    if not place.is_dir():
        raise ConfigError(f"no library of llama.cpp at {place}: there is no such file or folder")
    for folder in (place / name for name in _IN):
        if found := _files(folder, "libllama"):
            return Path(os.path.abspath(found[0]))
    raise ConfigError(
        f"no library of llama.cpp in {place}: neither this folder nor lib, lib64 or bin in it has "
        f"libllama{_ENDINGS[0]}; name the file itself"
    )


def _files(folder: Path, stem: str) -> Sequence[Path]:
    """Return the files of a library in a folder, the plain name first, then those that auditwheel has renamed."""
    names = [f"{stem}{digest}{ending}" for digest in ("", _DIGEST) for ending in _ENDINGS]
    return [path for name in names for path in sorted(folder.glob(name)) if path.is_file()]


def check_library(file: Path) -> None:
    """Try a library in a separate process, once for this process and those that it starts.

    Raises:
        IncompatibleLlamaError: it does not fit; the message says why.
        ConfigError: no process can be started.
    """
    stat = file.stat()
    stamp = f"{file}:{stat.st_size}:{stat.st_mtime_ns}"
    if os.environ.get(TRIED) == stamp:
        return
    if reason := _other_machine(file):
        raise misfit(file, reason)
    os.environ[TRIED] = stamp  # the trial's own process loads it, too
    try:
        found = tried()
        if reason := found["problem"]:
            raise misfit(file, reason, found.get("kind", ""))
    except BaseException:
        del os.environ[TRIED]
        raise


def misfit(file: Path, reason: str, kind: str = "") -> IncompatibleLlamaError:
    """Return the error that refuses a library, of a kind that `cbatch doctor` names."""
    return IncompatibleLlamaError(
        f"the library of llama.cpp {file} does not fit: {reason} (llama-cpp-python {bindings_version()}; "
        "docs/operate/compatibility.md#a-library-of-your-own)",
        reason,
        kind,
    )


def bindings_version() -> str:
    """Return the version of llama-cpp-python; empty where pip knows none."""
    with suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version("llama-cpp-python")
    return ""


def tried(device: int | None = None) -> dict[str, Any]:
    """Load llama.cpp in a separate process, and compute with the model that ships inside; return what was found.

    Args:
        device: the number of the device that computes; None: the CPU.

    Returns:
        the values of `cbatch.backend.library_trial.main`; where the process ended early, only `problem`.

    Raises:
        ConfigError: no process can be started.
    """
    words = () if device is None else (str(device),)
    done = run_apart(_TRIAL, *words, wall_s=_WALL_S)
    if done is None:
        return {"problem": f"a process that tried it had not ended after {_WALL_S:.0f} s"}
    with suppress(ValueError, IndexError):
        found = json.loads(done.stdout.splitlines()[-1])
        if isinstance(found, dict) and "problem" in found and done.returncode == 0:
            return found
    last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
    words_of_it = f": {last[0][:300]}" if last else ""
    return {
        "problem": f"a process that tried it ended with {_ending(done.returncode)}{words_of_it}"
    }


def _ending(code: int) -> str:
    """Return how a process ended, such as "SIGSEGV" or "exit code 3"."""
    with suppress(ValueError):
        return signal.Signals(-code).name
    return f"exit code {code}"


def _other_machine(file: Path) -> str:
    """Return why a file is not a library for this Python, by the headers of both; else nothing."""
    try:
        with open("/proc/self/exe", "rb") as python, file.open("rb") as library:
            ours, theirs = python.read(20), library.read(20)
    except OSError:  # no Linux: loading it will tell
        return ""
    if ours[:4] != b"\x7fELF" or len(ours) < 20:
        return ""
    if theirs[:4] != b"\x7fELF" or len(theirs) < 20:
        return "it is not a shared library"
    # Source: the ELF specification: e_ident has class and byte order, e_machine is at 18
    if ours[4:6] == theirs[4:6] and ours[18:20] == theirs[18:20]:
        return ""
    return f"it is for {_machine(theirs)}, but this Python is for {_machine(ours)}"


def _machine(head: bytes) -> str:
    order = "big" if head[5] == 2 else "little"
    number = int.from_bytes(head[18:20], order)  # type: ignore[arg-type]
    bits = 64 if head[4] == 2 else 32
    return f"{_MACHINES.get(number, f'machine {number}')} ({bits} bits, {order}-endian)"


@contextmanager
def lent(file: Path | None) -> Iterator[None]:
    """Have llama-cpp-python find a library, of whatever name, if it is imported in the block; None: its own.

    Raises:
        OSError: the library does not load.
    """
    if file is None:
        yield
        return
    # loaded by its own path, so that it finds the libraries beside it; links of the usual names are the same file
    try:
        ctypes.CDLL(str(file))
    except OSError:
        ctypes.CDLL(os.path.realpath(file))  # a link, with the libraries beside what it names
    with tempfile.TemporaryDirectory(prefix="cbatch-") as folder, _variable(folder):
        Path(folder, f"libllama{_ENDINGS[0]}").symlink_to(file)
        for path in _files(file.parent, "libmtmd")[:1]:
            Path(folder, f"libmtmd{_ENDINGS[0]}").symlink_to(path)
        yield


@contextmanager
def _variable(value: str) -> Iterator[None]:
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = value
    try:
        yield
    finally:
        _restore(before)


def _restore(before: str | None) -> None:
    os.environ.pop(VARIABLE, None)
    if before is not None:
        os.environ[VARIABLE] = before


def load_backends(lib: Any, file: Path) -> None:
    """Load a library's backends from its folder or those beside it, where it has none built in.

    Source: ggml/src/ggml-backend-reg.cpp, ggml_backend_load_all_from_path.

    Raises:
        IncompatibleLlamaError: there are none.
    """
    lib.ggml_backend_reg_count.restype = ctypes.c_size_t
    folders = backend_folders(file)
    with _quietly():
        for folder in folders:
            if lib.ggml_backend_reg_count():
                return
            lib.ggml_backend_load_all_from_path(os.fsencode(folder))
            if lib.ggml_backend_reg_count():
                for path in _renamed_backends(folder):
                    lib.ggml_backend_load(os.fsencode(path))
    if not lib.ggml_backend_reg_count():
        raise misfit(
            file,
            f"no backend, such as libggml-cpu, can be loaded from {', '.join(map(str, folders))}",
            "no-backends",
        )


def _renamed_backends(folder: Path) -> Sequence[Path]:
    """Return backends that ggml does not find by itself: auditwheel has renamed them, and they have no score."""
    names = [f"libggml-*{_DIGEST}{ending}" for ending in _ENDINGS]
    found = [path for name in names for path in sorted(folder.glob(name))]
    return [path for path in found if not path.name.startswith(_NO_RENAMED_BACKENDS)]


def backend_folders(file: Path) -> Sequence[Path]:
    """Return the folders that may have the backends of a library."""
    beside = [file.parent]
    if file.is_symlink():
        beside.append(Path(os.path.realpath(file)).parent)
    places = [Path(os.path.abspath(folder / name)) for folder in beside for name in _BACKENDS_IN]
    return [place for place in dict.fromkeys(places) if place.is_dir()]


@contextmanager
def _quietly() -> Iterator[None]:
    """Have llama-cpp-python print no line of llama.cpp's log in the block."""
    logger = logging.getLogger("llama-cpp-python")
    before = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(before)
