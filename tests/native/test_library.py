"""The native library is loaded where it fits llama-cpp-python, and refused where it does not."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

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


def test_handshake_with_another_layout_names_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    shifted = {**library._llama_layout(), "pos": 32}
    monkeypatch.setattr(library, "_llama_layout", lambda: shifted)
    with pytest.raises(IncompatibleLlamaError, match=r"llama_batch.*'pos': 24.*'pos': 32.*0\.3"):
        library.handshake()


def test_handshake_with_another_signature_names_the_function(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(llama_cpp, "llama_decode", ctypes.CFUNCTYPE(None)(lambda: None))
    with pytest.raises(IncompatibleLlamaError, match="llama_decode"):
        library.handshake()


def test_handshake_without_a_function_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(llama_cpp, "llama_get_logits_ith")
    with pytest.raises(IncompatibleLlamaError, match="no llama_get_logits_ith"):
        library.handshake()


def test_library_that_is_missing_says_how_to_reinstall(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CBATCH_LIBRARY", "/nowhere/libcbatch.so")
    with pytest.raises(IncompatibleLlamaError, match=r"/nowhere/libcbatch\.so.*pip install"):
        library.load_library()


def test_checkout_without_a_built_library_says_to_leave_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "native").mkdir()
    (tmp_path / "native" / "CMakeLists.txt").touch()
    monkeypatch.delenv("CBATCH_LIBRARY", raising=False)
    monkeypatch.setattr(native_file, "_PACKAGE", tmp_path / "cbatch")
    with pytest.raises(IncompatibleLlamaError, match=r"is the source checkout.*PYTHONSAFEPATH=1"):
        library.load_library()


def test_installed_package_without_a_library_says_how_to_reinstall(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CBATCH_LIBRARY", raising=False)
    monkeypatch.setattr(native_file, "_PACKAGE", tmp_path / "cbatch")
    with pytest.raises(IncompatibleLlamaError, match=r"missing.*pip install .*--no-deps.* \.$"):
        library.load_library()


def test_library_of_another_surface_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "ABI_VERSION", 99)
    with pytest.raises(IncompatibleLlamaError, match=r"interface version 15.*needs 99"):
        library.load_library()
