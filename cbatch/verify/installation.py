"""What is installed here: versions, the library of llama.cpp, the machine, and what its devices compute."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from cbatch.backend.host_limits import available_cores
from cbatch.backend.named_library import VARIABLE, tried
from cbatch.errors import CBatchError, IncompatibleLlamaError, words_of

_DEVICE_FILES = ("nvidia[0-9]*", "dri/renderD*", "kfd", "dxg")
"""Files in /dev of GPUs. Source: the drivers of NVIDIA, of Linux's DRM, of AMD's compute devices, and of WSL."""

_VARIABLES = ("OMP_", "GOMP_", "KMP_", "GGML_", "LLAMA_", "CBATCH_", "CUDA_VISIBLE", "HIP_VISIBLE")
"""Beginnings of environment variables that change what is computed, or how fast."""

_SECRET = re.compile("KEY|TOKEN|SECRET|PASSW|CREDENTIAL|AUTH")
_LOGIN = re.compile(r"(?<=://)[^/?#\s]*@")
"""A user and a password in a URL."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Installation:
    """What was found; every part has a value that means that nothing is wrong with it.

    Args:
        versions: of Python and of the packages that compute.
        machine: processor, cores, memory and system, in words.
        variables: environment variables that matter, without keys, passwords and the like.
        library: what a trial of llama.cpp's library found; see `cbatch.backend.library_trial.main`.
        answers: by the names of devices, how the shipped model's answer is wrong there; None where it is right.
        native_problem: why cbatch's native library cannot be used; empty if it can.
        is_native_missing: whether that is because there is none.
        has_amx_trap: whether llama.cpp's AMX code ends its process.
        features: instruction sets of the processor, as Linux names them; empty where unknown.
        n_cores: cores that this process may use.
        n_cores_online: cores of the machine.
        n_free_bytes: of the host's memory, for this process; None where unknown.
        huge_pages: who gets huge pages of memory, as Linux names it: "always", "madvise" (who asks for them, as cbatch
            does) or "never"; empty where unknown.
        has_notes: whether findings about this machine can be kept.
        gpu_files: files in /dev that belong to a GPU.
    """

    versions: Mapping[str, str] = field(default_factory=dict)
    machine: Mapping[str, str] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)
    library: Mapping[str, Any] = field(default_factory=dict)
    answers: Mapping[str, str | None] = field(default_factory=dict)
    native_problem: str = ""
    is_native_missing: bool = False
    has_amx_trap: bool = False
    features: frozenset[str] = frozenset()
    n_cores: int = 1
    n_cores_online: int = 1
    n_free_bytes: int | None = None
    huge_pages: str = ""
    has_notes: bool = True
    gpu_files: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Return everything as JSON values."""
        return {**asdict(self), "features": sorted(self.features)}


def examine(versions: Mapping[str, str], machine: Mapping[str, str]) -> Installation:
    """Look at what is installed; llama.cpp is first loaded in separate processes, which it may end.

    Args:
        versions: of Python and packages, taken as they are.
        machine: facts of the machine in words, taken as they are.
    """
    library = _tried(None)
    is_usable = library["problem"] is None
    return Installation(
        versions=versions,
        machine=machine,
        variables=_variables(),
        library=library,
        answers=dict(_answers(library)),
        features=_features(),
        n_cores=available_cores(),
        n_cores_online=os.cpu_count() or 1,
        huge_pages=_huge_pages(),
        gpu_files=tuple(_gpu_files()),
        **(_of_llama() if is_usable else {}),
    )


def _tried(device: int | None) -> dict[str, Any]:
    try:
        return tried(device)
    except CBatchError as error:
        return {"problem": words_of(error)}


def _answers(library: Mapping[str, Any]) -> Iterator[tuple[str, str | None]]:
    """Yield each device with what is wrong with the answer that it computes; the CPU's is that of the first trial."""
    for i, device in enumerate(library.get("devices", ())):
        problem = library["problem"]
        yield device["name"], _tried(i)["problem"] if device["takes_layers"] else problem


def _of_llama() -> dict[str, Any]:
    """Return what is known where llama.cpp can be loaded into this process."""
    from cbatch.backend.host_limits import host_most
    from cbatch.backend.llama.library import handshake  # llama_cpp is slow to import
    from cbatch.backend.load import notes
    from cbatch.backend.load.amx import has_sound_amx
    from cbatch.backend.load.open_model import shipped_model

    problem, is_missing = "", False
    try:
        handshake()
        has_amx_trap = not has_sound_amx(shipped_model())
    except CBatchError as error:
        problem, has_amx_trap = words_of(error), False
        is_missing = isinstance(error, IncompatibleLlamaError) and error.kind == "native-missing"
    return {
        "native_problem": problem,
        "is_native_missing": is_missing,
        "has_amx_trap": has_amx_trap,
        "n_free_bytes": host_most(),
        "has_notes": notes.can_write(),
    }


def _variables() -> dict[str, str]:
    names = sorted(n for n in os.environ if n.startswith(_VARIABLES) and not _SECRET.search(n))
    told = {name: _LOGIN.sub("…@", os.environ[name]) for name in names}
    return {name: value for name, value in told.items() if name != VARIABLE or value}


def _features() -> frozenset[str]:
    """Return the processor's instruction sets. Source: Linux's /proc/cpuinfo: flags on x86, Features on Arm."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            name, _, words = line.partition(":")
            if name.strip().lower() in ("flags", "features"):
                return frozenset(words.split())
    return frozenset()


def _huge_pages() -> str:
    """Return the word in brackets. Source: Linux, Documentation/admin-guide/mm/transhuge.rst."""
    with suppress(OSError):
        said = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text(encoding="utf-8")
        return said.partition("[")[2].partition("]")[0]
    return ""


def _gpu_files() -> Iterator[str]:
    for pattern in _DEVICE_FILES:
        yield from sorted(map(str, Path("/dev").glob(pattern)))
