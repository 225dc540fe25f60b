"""Files of architectures that llama.cpp asserts much of, tried in a process of their own before they are loaded."""

from __future__ import annotations

import struct
import subprocess
import sys
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest

from cbatch.backend.llama.gguf import read_header
from cbatch.backend.load.gguf_check import check_file, is_proven
from cbatch.backend.load.load_trial import check_load
from cbatch.backend.load.open_model import open_model
from cbatch.engine_options import EngineOptions
from cbatch.errors import ModelLoadError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.conftest import SynthFactory

pytestmark = pytest.mark.real

ASSERTS = (
    "import os, sys; print('/x.cpp:3: GGML_ASSERT(a == b) failed', file=sys.stderr); os.abort()"
)
ABORTS, ENDS, FAILS = "import os; os.abort()", "", "raise SystemExit(1)"
KILLED = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
OPTIONS = EngineOptions(parallel=3)


LOAD = """
import sys, cbatch
try:
    cbatch.load(sys.argv[1], parallel=2, ctx_per_seq=256).close()
except cbatch.ModelLoadError as error:
    print(error)
"""


DESCRIBE = """
import sys, cbatch
from cbatch.backend.load.loader import describe_model
from cbatch.engine_options import EngineOptions
try:
    describe_model(sys.argv[1], EngineOptions(), asks_probe=False)
except cbatch.ModelLoadError as error:
    print(error)
"""


def is_refused_by_a_trial(path: Path, code: str = LOAD) -> str:
    """Load a file in a process, which must survive it, and return the reason."""
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    begin = f"{path}: llama.cpp crashed on this file in a separate process ("
    said = done.stdout.decode()
    assert said.startswith(begin)
    return said.removeprefix(begin).partition("): ")[0]


@pytest.mark.parametrize("code", [LOAD, DESCRIBE], ids=["loads", "describes"])
def test_states_of_a_wrong_size_end_no_process(
    zoo: Callable[[str], Path], tmp_path: Path, code: str
) -> None:
    data = bytearray(zoo("jamba").read_bytes())
    header = read_header(zoo("jamba"), "")
    assert header is not None
    start, end = header.spans["jamba.ssm.inner_size"]
    [size] = struct.unpack("<I", data[start:end])
    data[start:end] = struct.pack("<I", 2 * size)
    path = tmp_path / "damaged.gguf"
    path.write_bytes(data)
    assert is_refused_by_a_trial(path, code) == "GGML_ASSERT(2 * n_embd == d_inner) failed"


def test_heads_of_a_wrong_size_end_no_process_that_loads(synth: SynthFactory) -> None:
    """llama.cpp refuses them in *llama*, and asserts them in others."""
    said = {"general.architecture": "mistral3", "mistral3.rope.dimension_count": 2}
    reason = is_refused_by_a_trial(synth("test", metadata=said))
    assert reason == "GGML_ASSERT(n_embd_head == n_rot) failed"


@pytest.mark.parametrize(
    ("code", "reason", "n_tried"),
    [
        (ENDS, "", 1),
        (ASSERTS, r"\(GGML_ASSERT\(a == b\) failed\): the file is damaged", 1),
        (ABORTS, r"\(exit code -6\)", 1),
        (FAILS, "", 2),
        (KILLED, "", 2),
    ],
    ids=["ends", "asserts", "aborts", "fails", "is killed"],
)
def test_end_of_the_process_is_told_and_remembered(
    processes: Callable[[str], list[dict[str, Any]]],
    test_model: Path,
    code: str,
    reason: str,
    n_tried: int,
) -> None:
    asked = processes(code)
    for _ in range(2):
        if reason:
            with pytest.raises(ModelLoadError, match=reason):
                check_load(test_model, OPTIONS)
        else:
            check_load(test_model, OPTIONS)
    assert len(asked) == n_tried
    assert (asked[0]["parallel"], asked[0]["ctx_per_seq"]) == (1, 256)


@pytest.mark.parametrize("has_weights", [True, False])
def test_whole_file_is_tried_once(
    zoo: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    has_weights: bool,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for _ in range(2):
        check_load(zoo("rwkv7"), OPTIONS, has_weights=has_weights)
        monkeypatch.setattr("cbatch.backend.load.load_trial.run_apart", None)


def test_file_is_tried_where_its_header_proves_nothing(
    processes: Callable[[str], list[dict[str, Any]]], zoo: Callable[[str], Path], test_model: Path
) -> None:
    asked = processes(ENDS)
    for path, n_tried in ((test_model, 0), (zoo("qwen3"), 0), (zoo("rwkv7"), 1), (zoo("rwkv7"), 1)):
        with closing(open_model(path, has_weights=False)):
            assert len(asked) == n_tried


def test_dense_architectures_that_many_use_are_proven(zoo: Callable[[str], Path]) -> None:
    dense = ["llama", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "phi3", "mistral3"]
    others = ["deepseek2", "falcon-h1", "mamba2", "qwen3moe", "rwkv7"]
    headers = [(name, check_file(zoo(name))) for name in dense + others]
    assert [name for name, header in headers if header is not None and is_proven(header)] == dense


@pytest.mark.parametrize(
    ("sizes", "is_told"),
    [
        ({"attention.key_length": 16, "attention.value_length": 16}, True),
        ({"attention.key_length": 16, "attention.value_length": 32}, False),
        ({"attention.key_length": 64}, False),
        ({"rope.dimension_count": 1}, False),
        ({"attention.head_count": 0}, False),
        ({"attention.head_count": 7}, False),
    ],
    ids=str,
)
def test_sizes_of_heads_that_do_not_fit_are_tried(
    synth: SynthFactory, sizes: dict[str, int], is_told: bool
) -> None:
    said: dict[str, object] = {"llama.rope.dimension_count": None}
    path = synth("test", metadata={**said, **{f"llama.{name}": n for name, n in sizes.items()}})
    header = check_file(path)
    assert header is not None
    assert is_proven(header) is is_told
