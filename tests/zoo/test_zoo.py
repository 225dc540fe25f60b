"""The zoo: what it writes is what it says, small, and the same each time."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import pytest

from tests.conftest import ROOT
from tests.zoo import REFUSED, ZOO, write_arch

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.zoo import Memory

pytestmark = pytest.mark.real

N_BYTES_MAX = 1_150_000
LARGER = {"deepseek4": 2_500_000}
"""Its layers are wider: it compresses 128 cells into one."""


def memory_of(path: Path) -> Memory:
    """Return the memory that llama.cpp gives a model."""
    import llama_cpp

    from cbatch.backend.load.open_model import open_model

    model = open_model(path, is_trial=True)  # in this process, and not in another before
    try:
        if llama_cpp.llama_model_is_recurrent(model.pointer):
            return "state"
        if llama_cpp.llama_model_is_hybrid(model.pointer):
            return "hybrid"
        return "window" if llama_cpp.llama_model_n_swa(model.pointer) else "cells"
    finally:
        model.close()


def test_each_model_is_small_and_has_its_memory(zoo: Callable[[str], Path]) -> None:
    found = {name: memory_of(zoo(name)) for name in ZOO}
    assert found == dict(ZOO)
    sizes = {name: zoo(name).stat().st_size for name in ZOO}
    assert {n: size for n, size in sizes.items() if size > LARGER.get(n, N_BYTES_MAX)} == {}
    assert min(Counter(ZOO.values()).values()) >= 5
    assert not set(ZOO) & set(REFUSED)


@pytest.mark.parametrize("name", ["gemma4", "llama-tied", "llama-q4_k_m", "qwen3moe-q4_0", "mamba"])
def test_same_seed_writes_the_same_file(
    name: str, zoo: Callable[[str], Path], tmp_path: Path
) -> None:
    again = write_arch(name, tmp_path / "again.gguf").read_bytes()
    other = write_arch(name, tmp_path / "other.gguf", seed=1).read_bytes()
    assert again == zoo(name).read_bytes()
    assert again != other


@pytest.mark.parametrize("n_window", [16, 48])
def test_window_is_as_wide_as_it_is_said(n_window: int, tmp_path: Path) -> None:
    import llama_cpp

    from cbatch.backend.load.open_model import open_model

    said = {"attention.sliding_window": n_window}
    model = open_model(write_arch("gemma3", tmp_path / "model.gguf", metadata=said))
    assert llama_cpp.llama_model_n_swa(model.pointer) == n_window
    model.close()


def test_documented_table_has_each_model() -> None:
    lines = (ROOT / "docs/operate/compatibility.md").read_text(encoding="utf-8").splitlines()
    rows = [line.split("|")[1:3] for line in lines if line.startswith("| ") and ".gguf" in line]
    found = {model.strip().removesuffix(".gguf"): loads.strip() for model, loads in rows}
    assert set(found) == {*ZOO, *REFUSED}
    assert {name for name, loads in found.items() if loads != "yes"} == set(REFUSED)
