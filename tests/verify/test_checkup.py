"""`cbatch doctor`: each planted problem is found and named, and a sound installation is left alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from cbatch.verify.checkup import check_up
from cbatch.verify.installation import Installation
from tests.verify.doctor_runs import run_doctor

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_CPU = {"name": "CPU", "maker": "A", "takes_layers": False, "n_free": 2**34, "n_total": 2**35}
_GPU = {**_CPU, "name": "CUDA0", "takes_layers": True}
_LIBRARY: Mapping[str, Any] = {
    "problem": None,
    "library": "/lib/libllama.so",
    "version": "0.5.0",
    "system": "CPU : SSE3 = 1 | AVX = 1 | AVX2 = 1 | F16C = 1 | FMA = 1 | BMI2 = 1 | OPENMP = 1 | REPACK = 1 | ",
    "backends": {"CPU": 1},
    "unloaded": {},
    "devices": [_CPU],
}
SOUND = Installation(
    versions={"cbatch": "0.1.0"},
    library=_LIBRARY,
    answers={"CPU": None},
    features=frozenset({"avx", "avx2", "fma", "f16c", "bmi2", "sse4_2"}),
    n_cores=4,
    n_cores_online=4,
    n_free_bytes=2**34,
)


def _with_library(**changed: Any) -> Installation:
    return replace(SOUND, library={**_LIBRARY, **changed})


def _unusable(problem: str, kind: str = "") -> Installation:
    return replace(SOUND, library={"problem": problem, "kind": kind}, answers={})


def _with_variable(name: str, value: str) -> Installation:
    return replace(SOUND, variables={name: value})


PLANTED: Mapping[str, tuple[Installation, str, str, str]] = {
    "library missing": (
        _unusable("llama-cpp-python 0.3.36 cannot load its library of llama.cpp: not found", "library-missing"),
        "library-missing", "broken", "name another library",
    ),
    "bindings missing": (
        _unusable("No module named 'llama_cpp': pip install llama-cpp-python", "library-missing"),
        "library-missing", "broken", "install",
    ),
    "library foreign": (
        _unusable("llama_context_params, which has 160 bytes in llama-cpp-python, has its fields elsewhere"),
        "library-unfit", "broken", "another build",
    ),
    "no backends": (
        _unusable("no backend, such as libggml-cpu, can be loaded from /lib", "no-backends"),
        "no-backends", "broken", "libggml-cpu",
    ),
    "bindings old": (
        _unusable("llama-cpp-python 0.3.20 is too old: cbatch needs 0.3.36 or later", "bindings-old"),
        "bindings-old", "broken", "pip install --upgrade",
    ),
    "library linked to a driver that is missing": (
        _unusable("libcuda.so.1: cannot open shared object file: No such file or directory"),
        "driver-missing", "broken", "NVIDIA's driver",
    ),
    "library that computes wrongly": (
        _unusable("it computes wrongly: token 3 where 4 is right", "answer-wrong"), "answer-wrong", "broken", "build",
    ),
    "device that computes wrongly": (
        replace(
            _with_library(devices=[_CPU, _GPU]),
            answers={"CPU": None, "CUDA0": "it computes wrongly: a logit is off by 3"},
        ),
        "answer-wrong", "broken", "n_gpu_layers=0",
    ),
    "native library missing": (
        replace(SOUND, native_problem="cbatch's native library x is missing", is_native_missing=True),
        "native-missing", "broken", "install cbatch again",
    ),
    "native library of another cbatch": (
        replace(SOUND, native_problem="cbatch's native library x has interface version 9, cbatch 0.1.0 needs 10"),
        "native-other", "broken", "install cbatch again",
    ),
    "build without AVX2": (
        _with_library(system="CPU : SSE3 = 1 | AVX = 1 | OPENMP = 1 | "),
        "instruction-sets", "slow", "GGML_NATIVE=ON",
    ),
    "build without AVX-512": (
        replace(SOUND, features=SOUND.features | {"avx512f", "avx512_vnni"}),
        "instruction-sets", "note", "GGML_NATIVE=ON",
    ),
    "AMX that ends the process": (replace(SOUND, has_amx_trap=True), "amx-trap", "slow", "-mno-amx"),
    "one thread": (_with_variable("OMP_NUM_THREADS", "1"), "threads-variable", "note", "--threads"),
    "spinning": (_with_variable("OMP_WAIT_POLICY", "ACTIVE"), "openmp-spins", "slow", "unset"),
    "long spins": (_with_variable("GOMP_SPINCOUNT", "300000000"), "openmp-spins", "slow", "unset"),
    "fewer threads": (_with_variable("OMP_DYNAMIC", "true"), "openmp-dynamic", "slow", "unset"),
    "bound threads": (_with_variable("OMP_PROC_BIND", "close"), "openmp-binding", "slow", "unset"),
    "few cores": (replace(SOUND, n_cores=1), "few-cores", "slow", "taskset"),
    "little memory": (replace(SOUND, n_free_bytes=2**28), "little-memory", "slow", "container"),
    "no huge pages": (replace(SOUND, huge_pages="never"), "no-huge-pages", "note", "echo madvise"),
    "notes unwritable": (replace(SOUND, has_notes=False), "notes-unwritable", "slow", "XDG_CACHE_HOME"),
    "backend without a driver": (
        _with_library(unloaded={"libggml-vulkan.so": "libvulkan.so.1: cannot open shared object file"}),
        "driver-missing", "note", "Vulkan loader",
    ),
    "GPU build without a device": (
        replace(_with_library(backends={"CPU": 1, "CUDA": 0}), gpu_files=("/dev/nvidia0",)),
        "no-device", "slow", "driver",
    ),
    "GPU that the build does not use": (
        replace(SOUND, gpu_files=("/dev/nvidia0",)), "gpu-unused", "slow", "build llama.cpp",
    ),
}  # fmt: skip


def test_sound_installation_has_no_findings() -> None:
    assert check_up(SOUND) == []
    on_device = replace(
        _with_library(devices=[_CPU, _GPU], backends={"CPU": 1, "CUDA": 1}),
        answers={"CPU": None, "CUDA0": None},
        gpu_files=("/dev/nvidia0",),
    )
    assert check_up(on_device) == []


@pytest.mark.parametrize("name", PLANTED)
def test_each_planted_problem_is_the_one_finding(name: str) -> None:
    planted, finding, severity, todo = PLANTED[name]
    [found] = check_up(planted)
    assert (found.name, found.severity) == (finding, severity)
    assert todo in found.todo


def test_rebuilt_library_is_used_once_no_other_is_named() -> None:
    variables = {"LLAMA_CPP_LIB_PATH": "/lib"}
    [found] = check_up(replace(SOUND, variables=variables, features=frozenset({"avx512f"})))
    assert found.todo.endswith(", and unset LLAMA_CPP_LIB_PATH")


def test_policy_of_openmp_with_a_short_spin_count_is_no_problem() -> None:
    variables = {"OMP_WAIT_POLICY": "active", "GOMP_SPINCOUNT": "1000"}
    assert check_up(replace(SOUND, variables=variables)) == []


def test_worst_findings_come_first() -> None:
    found = replace(
        SOUND, variables={"OMP_NUM_THREADS": "1"}, has_notes=False, native_problem="it is missing"
    )
    assert [a.severity for a in check_up(found)] == ["broken", "slow", "note"]


# ---- the command ----


@pytest.mark.real
def test_doctor_finds_nothing_broken_here() -> None:
    code, found = run_doctor()
    assert (code, found["is_broken"]) == (0, False)
    assert found["answers"]["CPU"] is None
    assert found["versions"]["cbatch"]
    assert found["library"]["problem"] is None


@pytest.mark.real
def test_doctor_as_lines_names_what_is_wrong_and_what_to_do(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "cbatch", "doctor"],
        env={**os.environ, "CBATCH_LIBRARY": str(tmp_path / "none.so")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert "llama-cpp-python  0.3" in done.stdout
    assert "answers right\n" in done.stdout
    assert "broken: cbatch's native library" in done.stdout
    assert "\n  install cbatch again\n" in done.stdout


@pytest.mark.real
def test_doctor_tells_no_secret() -> None:
    names = ("CBATCH_API_KEY", "LLAMA_ARG_HF_TOKEN", "GGML_SECRET", "LLAMA_PASSWORD", "OMP_AUTH")
    proxy = "http://user:hidden@host:80/path"
    _, found = run_doctor(**dict.fromkeys(names, "hidden"), LLAMA_PROXY=proxy)
    assert "hidden" not in json.dumps(found)
    assert found["variables"]["LLAMA_PROXY"] == "http://…@host:80/path"
