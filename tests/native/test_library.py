"""The native library is loaded where it fits llama-cpp-python, and refused where it does not."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import llama_cpp
import pytest

from cbatch.backend import native_file
from cbatch.backend.llama import library
from cbatch.errors import IncompatibleLlamaError

if TYPE_CHECKING:
    from pathlib import Path


def test_handshake_with_the_installed_llama_cpp_passes() -> None:
    library.handshake()
    ours, theirs = library._native_layout(), library._llama_layout()
    assert ours == theirs
    assert len(set(ours.values())) == len(ours) == 8  # no two fields at one place
    assert all(llama_cpp.__dict__[name].argtypes for name in library._LLAMA_SIGNATURES)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("pos", 32, r"llama_batch.*'pos': 24.*'pos': 32.*0\.3"),
        ("llama_decode", ctypes.CFUNCTYPE(None)(lambda: None), "llama_decode"),
        ("llama_get_logits_ith", None, "no function llama_get_logits_ith"),
    ],
    ids=["layout", "signature", "missing"],
)
def test_handshake_names_what_is_otherwise(
    monkeypatch: pytest.MonkeyPatch, name: str, value: Any, words: str
) -> None:
    if name == "pos":
        shifted = {**library._llama_layout(), name: value}
        monkeypatch.setattr(library, "_llama_layout", lambda: shifted)
    elif value is None:
        monkeypatch.delattr(llama_cpp, name)
    else:
        monkeypatch.setattr(llama_cpp, name, value)
    with pytest.raises(IncompatibleLlamaError, match=words):
        library.handshake()


@pytest.mark.parametrize(
    ("named", "is_checkout", "words"),
    [
        ("/nowhere/libcbatch.so", False, r"/nowhere/libcbatch\.so.*pip install"),
        (None, True, r"is the source checkout.*PYTHONSAFEPATH=1"),
        (None, False, r"missing.*pip install .*--no-deps.* \.$"),
    ],
    ids=["named", "checkout", "installed"],
)
def test_library_that_is_missing_says_what_to_do(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    named: str | None,
    is_checkout: bool,
    words: str,
) -> None:
    (tmp_path / "native").mkdir()
    if is_checkout:
        (tmp_path / "native" / "CMakeLists.txt").touch()
    monkeypatch.delenv("CBATCH_LIBRARY", raising=False)
    if named:
        monkeypatch.setenv("CBATCH_LIBRARY", named)
    monkeypatch.setattr(native_file, "_PACKAGE", tmp_path / "cbatch")
    with pytest.raises(IncompatibleLlamaError, match=words):
        library.load_library()


def test_library_of_another_surface_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    said = rf"interface version {library.ABI_VERSION}.*needs 99"
    monkeypatch.setattr(library, "ABI_VERSION", 99)
    with pytest.raises(IncompatibleLlamaError, match=said):
        library.load_library()
