"""What is broken, slow or worth knowing about an installation, and what to do about it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from cbatch.backend.named_library import VARIABLE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from cbatch.verify.installation import Installation

Severity: TypeAlias = Literal["broken", "slow", "note"]

_MIN_FREE = 2**30
"""Bytes of memory below which even small models find no room for their cells. Our choice."""

_SPINS_MOST = 100_000
"""Rounds of spinning above which waiting threads take a core from others. Source: docs/understand/performance.md."""

_REBUILD = (
    "pip install --force-reinstall --no-cache-dir --no-binary llama-cpp-python llama-cpp-python"
)
_INSTALL = "docs/use/install.md"

# llama.cpp's names of instruction sets, and Linux's. Source: ggml/src/ggml-cpu/ggml-cpu.cpp, ggml_cpu_get_features.
_SETS: Mapping[str, str] = {
    "AVX": "avx", "AVX2": "avx2", "FMA": "fma", "F16C": "f16c", "BMI2": "bmi2", "AVX_VNNI": "avx_vnni",
    "AVX512": "avx512f", "AVX512_VBMI": "avx512vbmi", "AVX512_VNNI": "avx512_vnni", "AVX512_BF16": "avx512_bf16",
    "NEON": "asimd", "DOTPROD": "asimddp", "MATMUL_INT8": "i8mm", "SVE": "sve",
}  # fmt: skip
_MUCH = ("AVX", "AVX2", "FMA", "F16C", "NEON", "DOTPROD")
"""Instruction sets without which llama.cpp takes several times as long."""

_DRIVERS = {
    "libcuda.so": "NVIDIA's driver",
    "libcudart": "the CUDA runtime of that version",
    "libcublas": "the CUDA runtime of that version",
    "libvulkan": "a Vulkan loader (libvulkan1) and the GPU's driver",
    "libamdhip": "AMD's ROCm runtime of that version",
    "libhipblas": "AMD's ROCm runtime of that version",
    "librocblas": "AMD's ROCm runtime of that version",
    "libOpenCL": "an OpenCL loader and the GPU's driver",
    "libze_loader": "Intel's level-zero loader",
    "libsycl": "Intel's oneAPI runtime",
}
_HOST_BACKENDS = ("CPU", "BLAS", "RPC")


@dataclass(frozen=True, slots=True)
class Advice:
    """One thing that was found.

    Args:
        name: for programs.
        severity: "broken", nothing is computed, or wrongly; "slow", or dangerous for speed; or a "note".
        text: what is so.
        todo: what to do about it.
    """

    name: str
    severity: Severity
    text: str
    todo: str


def check_up(found: Installation) -> list[Advice]:
    """Return what there is to say about an installation, the worst first."""
    order = ("broken", "slow", "note")
    all_found = [advice for rule in _RULES for advice in rule(found)]
    return sorted(all_found, key=lambda advice: order.index(advice.severity))


# ---- llama.cpp ----


def _library(found: Installation) -> Iterator[Advice]:
    problem = found.library["problem"]
    if problem is None:
        return
    name = found.library.get("kind") or "library-unfit"
    # what is missing, or too old, is a sentence already
    is_whole = name in ("library-missing", "bindings-old")
    text = problem if is_whole else f"the library of llama.cpp cannot be used: {problem}"
    todo = f"install another build of llama-cpp-python, or name another library: {_INSTALL}"
    if "cannot open shared object" in problem and (
        driver := _driver(problem)
    ):  # the system's words
        name, todo = "driver-missing", f"install {driver}"
    yield Advice(name, "broken", text, _TODO.get(name, todo))


_TODO = {
    "bindings-old": "pip install --upgrade llama-cpp-python",
    "no-backends": "copy the libggml-cpu that belongs to the library into the same folder",
}


def _driver(reason: str) -> str:
    """Return what a library that does not load needs of a GPU's maker; empty where that is not known."""
    return next((driver for name, driver in _DRIVERS.items() if name in reason), "")


def _answers(found: Installation) -> Iterator[Advice]:
    for device, problem in found.answers.items():
        if problem is not None and found.library["problem"] is None:
            text = f"on {device} the shipped model does not answer as it should: {problem}"
            todo = "update the device's driver, or build llama.cpp anew; until then, compute without it: n_gpu_layers=0"
            yield Advice("answer-wrong", "broken", text, todo)


def _sets(found: Installation) -> Iterator[Advice]:
    system = found.library.get("system", "")
    if "=" not in system or not found.features:
        return
    built = set(re.findall(r"(\w+) = 1", system))
    lost = [name for name, flag in _SETS.items() if flag in found.features and name not in built]
    if not lost or built.isdisjoint(_SETS):
        return
    much = [name for name in lost if name in _MUCH]
    share = "several times as long" if much else "about a tenth longer"
    yield Advice(
        "instruction-sets",
        "slow" if much else "note",
        f"the processor has {', '.join(lost)}, but this build of llama.cpp does not use them: steps take {share}",
        f'build it on this machine: CMAKE_ARGS="-DGGML_NATIVE=ON" {_REBUILD}{_use_it(found)}',
    )


def _amx(found: Installation) -> Iterator[Advice]:
    if found.has_amx_trap:
        yield Advice(
            "amx-trap",
            "slow",
            "llama.cpp's AMX code crashes here (a known fault of GCC 12), so weights are not repacked, and "
            "prompts take longer",
            "build llama-cpp-python with another compiler, or without AMX: "
            f'CXXFLAGS="-mno-amx-tile -mno-amx-int8 -mno-amx-bf16" {_REBUILD}{_use_it(found)}',
        )


def _use_it(found: Installation) -> str:
    """Return what else to do for a rebuilt llama-cpp-python to be used."""
    return f", and unset {VARIABLE}" if VARIABLE in found.variables else ""


# ---- devices ----


def _gpus(found: Installation) -> Iterator[Advice]:
    if found.library["problem"] is not None:
        return
    names = [d["name"] for d in found.library.get("devices", ()) if d["takes_layers"]]
    severity: Severity = "slow" if found.gpu_files and not names else "note"
    unloaded = found.library.get("unloaded", {})
    for file, reason in unloaded.items():
        text = f"the backend {file} does not load: {reason}"
        todo = f"if there is a GPU, install {_driver(reason) or 'what it needs'}"
        yield Advice("driver-missing", severity, text, todo)
    backends = found.library.get("backends", {})
    idle = [n for n, count in backends.items() if not count and n not in _HOST_BACKENDS]
    for name in idle:
        text = f"this build has {name}, but it finds no device"
        todo = "install the GPU's driver; in a container, pass the device in (--gpus all, --device)"
        yield Advice("no-device", severity, text, todo)
    if found.gpu_files and not names and not unloaded and not idle:
        text = f"there is a GPU ({', '.join(found.gpu_files)}), but this build computes on the CPU alone"
        yield Advice("gpu-unused", "slow", text, f"build llama.cpp for it: {_INSTALL}")


# ---- the machine ----


def _cores(found: Installation) -> Iterator[Advice]:
    if found.n_cores < found.n_cores_online:
        yield Advice(
            "few-cores",
            "slow" if found.n_cores <= found.n_cores_online / 2 else "note",
            f"this process may use {found.n_cores} of {found.n_cores_online} cores: its affinity, a quota of its "
            "control group or OMP_THREAD_LIMIT leaves no more",
            "raise the limit (taskset, --cpus, OMP_THREAD_LIMIT) if the process is to use more",
        )


def _memory(found: Installation) -> Iterator[Advice]:
    if found.n_free_bytes is not None and found.n_free_bytes < _MIN_FREE:
        yield Advice(
            "little-memory",
            "slow",
            f"{found.n_free_bytes / 2**20:,.0f} MiB of memory are free: enough for few slots with short windows",
            "free some, raise the limit of the container, or take a smaller model",
        )


def _huge_pages(found: Installation) -> Iterator[Advice]:
    if found.huge_pages == "never":
        yield Advice(
            "no-huge-pages",
            "note",
            "the system gives no program huge pages, with which a single request decodes up to a fifth faster",
            "as root: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
        )


def _openmp(found: Installation) -> Iterator[Advice]:
    """Yield settings of OpenMP by which threads are fewer than asked for, share a core, or do not let others run."""
    if "OPENMP = 0" in found.library.get("system", ""):
        return
    said = {name: value.strip().lower() for name, value in found.variables.items()}
    if "OMP_NUM_THREADS" in said:
        yield Advice(
            "threads-variable",
            "note",
            f"OMP_NUM_THREADS={said['OMP_NUM_THREADS']} does not change how many threads compute a model here",
            "set n_threads (--threads), or the affinity of the process",
        )
    if said.get("OMP_DYNAMIC") in ("true", "1"):
        yield Advice(
            "openmp-dynamic",
            "slow",
            "OMP_DYNAMIC lets OpenMP start fewer threads than a step needs",
            "unset OMP_DYNAMIC",
        )
    if said.get("OMP_PROC_BIND", "false") not in ("false", "") or "GOMP_CPU_AFFINITY" in said:
        yield Advice(
            "openmp-binding",
            "slow",
            "OMP_PROC_BIND or GOMP_CPU_AFFINITY binds threads: several engines or workers share the same cores",
            "unset it: cbatch gives workers cores of their own",
        )
    if _spins(said):
        yield Advice(
            "openmp-spins",
            "slow",
            "OMP_WAIT_POLICY or GOMP_SPINCOUNT makes waiting threads spin: while any other program runs, steps take "
            "several times as long",
            "unset it: then cbatch lets them sleep sooner while another program runs",
        )


def _spins(said: Mapping[str, str]) -> bool:
    count = said.get("GOMP_SPINCOUNT")
    if count is None:
        return said.get("OMP_WAIT_POLICY") == "active"
    return count in ("infinite", "infinity") or (count.isdigit() and int(count) > _SPINS_MOST)


# ---- cbatch ----


def _native(found: Installation) -> Iterator[Advice]:
    if found.native_problem:
        name = "native-missing" if found.is_native_missing else "native-other"
        yield Advice(name, "broken", found.native_problem, "install cbatch again")


def _notes(found: Installation) -> Iterator[Advice]:
    if not found.has_notes:
        yield Advice(
            "notes-unwritable",
            "slow",
            "findings about this machine cannot be saved, so every load tests the model again",
            "make the user's cache folder writable (XDG_CACHE_HOME names it)",
        )


_RULES: tuple[Callable[[Installation], Iterator[Advice]], ...] = (
    *(_library, _native, _answers, _amx, _sets, _gpus),
    *(_cores, _memory, _huge_pages, _openmp, _notes),
)
