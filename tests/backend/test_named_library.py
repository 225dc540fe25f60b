"""The library of llama.cpp that the user names: found, tried, used in all processes, or refused with the reason."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from cbatch.backend import library_trial, named_library
from cbatch.backend.named_library import (
    TRIED,
    VARIABLE,
    backend_folders,
    check_library,
    find_library,
    load_backends,
    tried,
    use_library,
)
from cbatch.errors import ConfigError, IncompatibleLlamaError

if TYPE_CHECKING:
    from collections.abc import Sequence

ENDING = ".dylib" if sys.platform == "darwin" else ".so"
_SAY_TIGER = """
import cbatch
with cbatch.load({settings}) as engine:
    result = engine.run([[dict(role="user", content="Say tiger.")]], options=dict(temperature=0)).result()
    print(result.text)
"""


def _own() -> Path:
    """The file of llama-cpp-python's own library."""
    from cbatch.backend.bindings import llama_cpp

    return Path(llama_cpp.__file__).parent / "lib" / f"libllama{ENDING}"


@pytest.fixture
def renamed(tmp_path: Path) -> Path:
    """A folder as a foreign wheel may have it: other names, the library in `lib`."""
    (tmp_path / "lib").mkdir()
    for path in _own().parent.iterdir():
        name = path.name.replace(f"libllama{ENDING}", f"libllama{ENDING}.0")
        if not (tmp_path / "lib" / name).exists():
            (tmp_path / "lib" / name).symlink_to(path)
    return tmp_path


def _python(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k not in (VARIABLE, TRIED)}
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**environment, **variables},
        capture_output=True,
        text=True,
    )


# ---- where it is ----


@pytest.mark.parametrize(
    "names",
    [
        ("libllama{}",),
        ("lib", "libllama{}.0"),
        ("bin", "libllama{}"),
        ("libllama-e4014eb7{}.0.7.0",),
    ],
    ids=str,
)
def test_library_is_found_in_the_folders_of_builds_and_wheels(
    tmp_path: Path, names: Sequence[str]
) -> None:
    file = tmp_path.joinpath(*names[:-1], names[-1].format(ENDING))
    file.parent.mkdir(exist_ok=True)
    file.touch()
    assert find_library(tmp_path) == find_library(file) == file


def test_place_without_a_library_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no library of llama\.cpp in .*lib, lib64 or bin"):
        find_library(tmp_path)
    with pytest.raises(ConfigError, match=r"no library of llama\.cpp at .*no such file"):
        find_library(tmp_path / "none")


def test_library_whose_path_is_not_utf8_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "\udced" / f"libllama{ENDING}"
    file.parent.mkdir()
    file.touch()
    for place in (file, file.parent):
        with pytest.raises(ConfigError, match=r"\\xed.*path is not UTF-8: rename"):
            use_library(place)


def test_another_library_than_the_loaded_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    with pytest.raises(ConfigError, match="no such file"):
        use_library(tmp_path / "none")
    assert VARIABLE not in os.environ
    for loaded in (_own(), _own().parent, None):
        use_library(loaded)
    other = tmp_path / f"libllama{ENDING}"
    other.write_text("another")
    with pytest.raises(
        ConfigError, match=r"this process has loaded another library.*LLAMA_CPP_LIB_PATH"
    ):
        use_library(other)


# ---- what it is ----


def _elf(machine: int, bits: int = 2) -> bytes:
    return b"\x7fELF" + bytes([bits, 1]) + bytes(12) + machine.to_bytes(2, "little")


@pytest.mark.skipif(
    not Path("/proc/self/exe").exists(), reason="headers are compared on Linux alone"
)
@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"text\n", "it is not a shared library"),
        (b"", "it is not a shared library"),
        (_elf(243), r"it is for RISC-V \(64 bits, little-endian\), but this Python is for"),
        (_elf(3, 1), r"it is for x86 \(32 bits, little-endian\), but"),
        (_elf(9999), "it is for machine 9999"),
    ],
    ids=["text", "empty", "riscv", "x86", "unknown"],
)
def test_file_of_another_kind_is_refused_without_loading_it(
    tmp_path: Path, content: bytes, reason: str
) -> None:
    file = tmp_path / "libllama.so"
    file.write_bytes(content)
    with pytest.raises(
        IncompatibleLlamaError, match=rf"libllama\.so does not fit: {reason}.*docs/"
    ) as found:
        check_library(file)
    assert "does not fit" not in found.value.reason
    assert TRIED not in os.environ


def test_library_is_tried_once_for_a_process_and_those_it_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TRIED, "another:1:1")
    found: dict[str, str | None] = {"problem": None}
    calls: list[str] = []

    def try_it() -> dict[str, str | None]:
        calls.append(os.environ[TRIED])
        return found

    monkeypatch.setattr(named_library, "tried", try_it)
    file = tmp_path / "libllama.so"
    file.write_bytes(Path(sys.executable).read_bytes()[:64])
    check_library(file)
    check_library(file)
    assert len(calls) == 1
    assert calls[0].startswith(f"{file}:64:")
    file.write_bytes(Path(sys.executable).read_bytes()[:65])
    found["problem"] = "it computes wrongly"
    with pytest.raises(IncompatibleLlamaError, match="does not fit: it computes wrongly"):
        check_library(file)
    assert TRIED not in os.environ


def test_library_without_backends_says_where_they_are_sought(tmp_path: Path) -> None:
    class Library:
        def __init__(self) -> None:
            self.folders: list[bytes] = []

        class ggml_backend_reg_count:  # noqa: N801
            restype = None

            def __new__(cls) -> int:  # type: ignore[misc]
                return 0

        def ggml_backend_load_all_from_path(self, folder: bytes) -> None:
            self.folders.append(folder)

    for name in ("lib", "bin"):
        (tmp_path / name).mkdir()
    file = tmp_path / "lib" / "libllama.so"
    library = Library()
    with pytest.raises(
        IncompatibleLlamaError,
        match=r"no backend, such as libggml-cpu, can be loaded from .*lib, .*bin",
    ):
        load_backends(library, file)
    assert library.folders == [os.fsencode(tmp_path / name) for name in ("lib", "bin")]
    assert backend_folders(file) == [tmp_path / "lib", tmp_path / "bin"]
    (tmp_path / "lib" / "of").mkdir()
    link = tmp_path / "lib" / "of" / "libllama.so"
    file.touch()
    link.symlink_to(file)
    assert backend_folders(link)[0] == link.parent
    assert set(backend_folders(link)) >= {tmp_path / "lib", tmp_path / "bin"}


def test_backends_that_auditwheel_renamed_are_loaded_too(tmp_path: Path) -> None:
    loaded: list[str] = []

    class Library:
        @property
        def ggml_backend_reg_count(self) -> type:
            class Count:
                def __new__(cls) -> int:  # type: ignore[misc]
                    return len(loaded)

            return Count

        def ggml_backend_load_all_from_path(self, _: bytes) -> None:
            loaded.append("cpu")

        def ggml_backend_load(self, path: bytes) -> None:
            loaded.append(Path(os.fsdecode(path)).name)

    others = ("base-82914aef", "cpu-0786c92d", "cuda")
    for name in ("vulkan-4062e2a6", "cuda-d63ffb31", *others):
        (tmp_path / f"libggml-{name}{ENDING}").touch()
    load_backends(Library(), tmp_path / f"libllama-af9aab63{ENDING}")
    assert loaded == ["cpu", f"libggml-cuda-d63ffb31{ENDING}", f"libggml-vulkan-4062e2a6{ENDING}"]


# ---- processes ----


@pytest.mark.real
def test_trial_of_the_installed_library_finds_no_problem() -> None:
    found = tried()
    assert found["problem"] is None
    assert found["devices"][0].keys() == {"name", "maker", "takes_layers", "n_free", "n_total"}
    assert found["version"]
    assert "CPU" in found["system"]


@pytest.mark.real
@pytest.mark.parametrize("settings", ["library={!r}, replicas=2", ""])
def test_named_library_answers_here_in_workers_and_by_the_environment(
    renamed: Path, settings: str
) -> None:
    given = {} if settings else {VARIABLE: str(renamed / "lib")}
    done = _python(_SAY_TIGER.format(settings=settings.format(str(renamed))), **given)
    assert (done.stdout, done.returncode) == ("tiger\n", 0), done.stderr


@pytest.mark.real
def test_named_link_comes_first_and_finds_what_is_beside_its_target(
    tmp_path: Path,
) -> None:
    (tmp_path / f"libllama{ENDING}").symlink_to(_own())
    code = _SAY_TIGER.format(settings=f"library={str(tmp_path)!r}")
    done = _python(code, **{VARIABLE: str(tmp_path / "none")})
    assert done.stdout == "tiger\n", done.stderr


@pytest.mark.real
def test_refused_library_leaves_the_process_as_it_was(tmp_path: Path) -> None:
    file = tmp_path / "libllama.so"
    file.write_text("no library")
    code = f"""
import cbatch
try:
    cbatch.load(library={str(file)!r})
except cbatch.IncompatibleLlamaError as error:
    print(error.reason)
{_SAY_TIGER.format(settings="")}
"""
    done = _python(code)
    assert done.stdout == "it is not a shared library\ntiger\n", done.stderr


@pytest.mark.real
@pytest.mark.parametrize(
    "command",
    [
        ("ask", "Say tiger."),
        ("synth", "model.gguf"),
        ("embed", "in.csv", "-o", "out.csv"),
    ],
    ids=lambda command: command[0],
)
def test_commands_take_the_library_and_name_what_is_wrong(
    tmp_path: Path, command: tuple[str, ...]
) -> None:
    file = tmp_path / "libllama.so"
    file.write_text("no library")
    words = [sys.executable, "-m", "cbatch", *command, "--llama-library", str(file)]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 2
    assert f"cbatch: the library of llama.cpp {file} does not fit" in done.stderr


ENDS = "#include <stdlib.h>\n__attribute__((constructor)) void end(void) { abort(); }\n"


@pytest.mark.real
@pytest.mark.parametrize(
    ("source", "words"),
    [
        (ENDS, r"does not fit: a process that tried it ended with SIGABRT"),
        (
            "int nothing(void) { return 0; }\n",
            r"it has no function llama_\w+, which llama-cpp-python needs",
        ),
        ("", "does not fit: "),
    ],
    ids=["ends", "no function", "cut off"],
)
def test_library_that_cannot_be_used_is_refused(tmp_path: Path, source: str, words: str) -> None:
    code, file = tmp_path / "made.c", tmp_path / f"libllama{ENDING}"
    if source:
        code.write_text(source)
        subprocess.run([_compiler(), "-shared", "-fPIC", "-o", file, code], check=True)
    else:
        file.write_bytes(_own().read_bytes()[:5000])
    with pytest.raises(IncompatibleLlamaError, match=words):
        check_library_in_new_process(file)


def check_library_in_new_process(file: Path) -> None:
    """Try a library as a process does that has loaded none: the variable is set for the trial's own process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, str(file))
        patch.delenv(TRIED, raising=False)
        check_library(file)


def _compiler() -> str:
    found = shutil.which("cc")
    if found is None:
        pytest.skip("no C compiler")
    return found


# ---- what it computes ----


@pytest.mark.real
@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("FIRST", {280: 22.0}, "a logit of the model shipped with cbatch is off by 1.3"),
        ("ANSWER", (280, 360, 277, 4), "token 281 in place of 277"),
        ("N_PROMPT", 3, "it splits a text of 3 tokens into 16 tokens"),
        ("MODEL", Path("/nowhere.gguf"), "it cannot load /nowhere.gguf"),
    ],
)
def test_trial_names_what_a_library_computes_wrongly(
    monkeypatch: pytest.MonkeyPatch, name: str, value: object, words: str
) -> None:
    from cbatch.backend.bindings import llama_cpp

    monkeypatch.setattr(library_trial, name, value)
    assert words in (library_trial.wrong_answer(llama_cpp, None) or "")


def test_bindings_that_are_too_old_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from cbatch.backend import bindings

    monkeypatch.setattr(bindings, "bindings_version", lambda: "0.3.35")
    with pytest.raises(IncompatibleLlamaError, match=r"0\.3\.35 is too old.*0\.3\.36.*pip install"):
        bindings.checked_library()


def test_oldest_bindings_are_those_of_the_package() -> None:
    from importlib.metadata import requires

    from cbatch.backend.bindings import OLDEST

    [floor] = [name for name in requires("cbatch") or () if name.startswith("llama-cpp-python")]
    assert floor == f"llama-cpp-python>={OLDEST}"


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ModuleNotFoundError("No module named 'llama_cpp'"), "pip install llama-cpp-python"),
        (
            FileNotFoundError("Shared library with base name 'llama' not found"),
            "LLAMA_CPP_LIB_PATH",
        ),
    ],
)
def test_bindings_without_a_library_say_what_to_do(error: Exception, words: str) -> None:
    from cbatch.backend import bindings

    assert words in str(bindings.not_loaded(None, error))
