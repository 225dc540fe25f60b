"""Damaged projectors: libmtmd takes some that are cut off, and ends the process on others."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

import cbatch
from cbatch.backend.load.projector_check import read_projector_file
from cbatch.bench.synthetic_projector import KINDS, MIXED_KINDS, SOUND_KINDS, write_projector
from cbatch.errors import ModelLoadError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = [pytest.mark.real, pytest.mark.own_library]

LOAD = """
import sys, cbatch
try:
    cbatch.load(sys.argv[1], mmproj=sys.argv[2], parallel=1, ctx_per_seq=64).close()
except cbatch.ModelLoadError as error:
    print(error)
"""


@pytest.mark.parametrize("kind", [*KINDS, *SOUND_KINDS, *MIXED_KINDS])
def test_projector_that_lacks_its_last_byte_is_refused(
    showing_model: Path, tmp_path: Path, kind: str
) -> None:
    path = write_projector(tmp_path / "p.gguf", 64, kind=kind)
    whole = path.read_bytes()
    assert read_projector_file(str(path)).n_bytes == len(whole)
    path.write_bytes(whole[:-1])
    with pytest.raises(ModelLoadError, match=r"p\.gguf is cut off or damaged: it has .* bytes"):
        read_projector_file(str(path))
    if kind == KINDS[0]:  # libmtmd takes it, and computes with whatever was in memory
        with pytest.raises(ModelLoadError, match="is cut off or damaged"):
            cbatch.load(showing_model, mmproj=path, parallel=1, ctx_per_seq=64)


def test_projector_that_lacks_a_tensor_ends_no_process(showing_model: Path, tmp_path: Path) -> None:
    path = write_projector(tmp_path / "p.gguf", 64)
    path.write_bytes(path.read_bytes().replace(b"v.blk.1.attn_v.weight", b"v.blk.1.attn_?.weight"))
    command = [sys.executable, "-c", LOAD, str(showing_model), str(path)]
    for _ in range(2):
        done = subprocess.run(command, capture_output=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        assert "p.gguf: llama.cpp crashed on this file in a separate" in done.stdout.decode()


def test_projector_is_tried_once_a_file(
    processes: Callable[[str], list[dict[str, Any]]], showing_model: Path, tmp_path: Path
) -> None:
    asked = processes("")
    path = write_projector(tmp_path / "p.gguf", 64)
    for seed, n_tried in ((0, 1), (0, 1), (1, 2)):
        write_projector(path, 64, seed=seed)
        cbatch.load(showing_model, mmproj=path, parallel=1, ctx_per_seq=64).close()
        assert [said["mmproj"] for said in asked if said["mmproj"]] == [str(path)] * n_tried
