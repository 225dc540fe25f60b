"""llama.cpp's quantiser in a process of its own: what it refuses is told, and it is gone after the block."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest

from cbatch.backend.llama.gguf import read_header
from cbatch.backend.llama.quantiser import quantising
from cbatch.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import SynthFactory

Q4_K_M, Q8_0, NONE = 15, 7, 999
"""Source: llama.h, llama_ftype."""

_PATIENCE_S = 120.0


def test_model_is_quantised(synth: SynthFactory, tmp_path: Path) -> None:
    with quantising(synth("test", type="f16"), tmp_path / "q.gguf", Q8_0) as running:
        assert running.is_done(_PATIENCE_S)
        assert running.find_problem() == ""
    header = read_header(tmp_path / "q.gguf", "")
    assert header is not None
    assert header.values["general.file_type"] == Q8_0


@pytest.mark.parametrize(
    ("name", "file_type", "words"),
    [("none.gguf", Q8_0, "none.gguf"), ("", NONE, "invalid output file type 999")],
)
def test_refusal_is_told_in_the_words_of_llama_cpp(
    synth: SynthFactory, tmp_path: Path, name: str, file_type: int, words: str
) -> None:
    source = tmp_path / name if name else synth("test", type="f16")
    with quantising(source, tmp_path / "q.gguf", file_type) as running:
        assert running.is_done(_PATIENCE_S)
        assert words in running.find_problem()


@pytest.mark.real
def test_run_is_killed_at_the_end_of_the_block_or_ends_with_its_stdin(tmp_path: Path) -> None:
    """A source that nobody writes to makes it wait for ever. Whatever ends who waits for it closes its stdin."""
    os.mkfifo(tmp_path / "source")
    for is_killed in (True, False):
        with quantising(tmp_path / "source", tmp_path / "q.gguf", Q8_0) as running:
            process = running.process
            assert process.stdin is not None
            if is_killed:
                assert not running.is_done(0.01)
            else:
                process.stdin.close()
                assert running.is_done(_PATIENCE_S)
        assert (process.returncode == -signal.SIGKILL) >= is_killed


@pytest.mark.real
@pytest.mark.parametrize(
    ("program", "words"), [("", "does not know its own program"), ("none", "No such file")]
)
def test_program_that_cannot_be_started_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, words: str
) -> None:
    monkeypatch.setattr("sys.executable", program and str(tmp_path / program))
    with (
        pytest.raises(ConfigError, match=words),
        quantising(tmp_path / "a", tmp_path / "b", Q8_0),
    ):
        pass
