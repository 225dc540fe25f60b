"""`cbatch doctor` on problems that are really there: settings, files, libraries, and packages that are found first."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

from tests.verify.doctor_runs import names_of, run_doctor

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not Path("/proc/self/exe").exists(), reason="plants problems of Linux"),
]


def _with_first_on_path(folder: Path) -> dict[str, str]:
    return {"PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])}


def _build(file: Path, source: str, *words: str | Path) -> None:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    file.parent.mkdir(exist_ok=True)
    text = file.with_suffix(".c")
    text.write_text(source)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", file, text, *words], check=True)


def _needing_a_driver(file: Path, name: str, folder: Path) -> None:
    """Build a library that needs another one, which is not there."""
    driver = folder / name
    _build(driver, "int used(void) { return 0; }\n", f"-Wl,-soname,{name}")
    _build(file, "int used(void);\nint use(void) { return used(); }\n", driver)
    driver.unlink()


def test_each_setting_and_missing_file_is_found(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("no folder")
    code, found = run_doctor(
        OMP_NUM_THREADS="1",
        OMP_WAIT_POLICY="active",
        OMP_DYNAMIC="true",
        OMP_PROC_BIND="close",
        OMP_THREAD_LIMIT="1",
        CBATCH_LIBRARY=str(tmp_path / "none.so"),
        XDG_CACHE_HOME=str(tmp_path / "cache"),
    )
    assert (code, found["is_broken"]) == (1, True)
    planted = {
        *("native-missing", "notes-unwritable", "threads-variable"),
        *("openmp-spins", "openmp-dynamic", "openmp-binding"),
    }
    if (os.cpu_count() or 1) > 1:
        planted.add("few-cores")
    assert names_of(found) >= planted
    assert found["variables"]["OMP_NUM_THREADS"] == "1"


def test_native_library_of_another_cbatch_is_found(tmp_path: Path) -> None:
    file = tmp_path / "libcbatch.so"
    _build(file, "int cbatch_abi_version(void) { return 1; }\n")
    code, found = run_doctor(CBATCH_LIBRARY=str(file))
    assert (code, names_of(found, only="broken")) == (1, {"native-other"})


def test_library_that_is_a_text_is_found(tmp_path: Path) -> None:
    file = tmp_path / "libllama.so"
    file.write_text("no library")
    code, found = run_doctor("--llama-library", str(file))
    assert (code, names_of(found, only="broken")) == (1, {"library-unfit"})


def test_library_that_is_not_there_is_found(tmp_path: Path) -> None:
    code, found = run_doctor(LLAMA_CPP_LIB_PATH=str(tmp_path / "none"))
    assert (code, names_of(found, only="broken")) == (1, {"library-missing"})


def test_library_of_another_project_is_found(tmp_path: Path) -> None:
    file = tmp_path / "libllama.so"
    _build(file, "int nothing(void) { return 0; }\n")
    code, found = run_doctor("--llama-library", str(file))
    assert (code, names_of(found, only="broken")) == (1, {"library-unfit"})
    assert "it has no function llama_" in found["findings"][0]["text"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("libcuda.so.1", "install NVIDIA's driver"),
        ("libcudart.so.12", "install the CUDA runtime of that version"),
        ("libvulkan.so.1", "install a Vulkan loader"),
    ],
)
def test_driver_that_a_library_needs_is_found(tmp_path: Path, name: str, words: str) -> None:
    with suppress(OSError):
        ctypes.CDLL(name)
        pytest.skip("this machine has that driver")
    file = tmp_path / "libllama.so"
    _needing_a_driver(file, name, tmp_path)
    code, found = run_doctor("--llama-library", str(file))
    assert (code, names_of(found, only="broken")) == (1, {"driver-missing"})
    assert name in found["findings"][0]["text"]
    assert found["findings"][0]["todo"].startswith(words)


def test_driver_that_a_backend_needs_is_found(tmp_path: Path) -> None:
    from cbatch.backend.bindings import llama_cpp

    folder = tmp_path / "lib"
    folder.mkdir()
    for path in Path(llama_cpp.__file__).parent.joinpath("lib").iterdir():
        (folder / path.name).symlink_to(path)
    _needing_a_driver(folder / "libggml-cuda.so", "libcuda.so.1", tmp_path)
    code, found = run_doctor("--llama-library", str(folder))
    assert code == 0
    [finding] = [f for f in found["findings"] if f["name"] == "driver-missing"]
    assert "libggml-cuda.so does not load" in finding["text"]
    assert found["answers"]["CPU"] is None


def test_bindings_that_are_too_old_are_found(tmp_path: Path) -> None:
    folder = tmp_path / "llama_cpp_python-0.3.20.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: llama_cpp_python\nVersion: 0.3.20\n"
    )
    code, found = run_doctor(**_with_first_on_path(tmp_path))
    assert (code, names_of(found, only="broken")) == (1, {"bindings-old"})


def test_bindings_without_a_library_are_found(tmp_path: Path) -> None:
    (tmp_path / "llama_cpp").mkdir()
    (tmp_path / "llama_cpp" / "__init__.py").write_text(
        "raise FileNotFoundError(\"Shared library with base name 'llama' not found\")\n"
    )
    code, found = run_doctor(**_with_first_on_path(tmp_path))
    assert (code, names_of(found, only="broken")) == (1, {"library-missing"})
    assert "name another library" in found["findings"][0]["todo"]


def test_bindings_that_are_not_installed_are_found(tmp_path: Path) -> None:
    (tmp_path / "llama_cpp.py").write_text(
        "raise ModuleNotFoundError(\"No module named 'llama_cpp'\")\n"
    )
    code, found = run_doctor(**_with_first_on_path(tmp_path))
    assert (code, names_of(found, only="broken")) == (1, {"library-missing"})
    assert "pip install llama-cpp-python" in found["findings"][0]["text"]
