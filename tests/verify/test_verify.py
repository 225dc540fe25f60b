"""`cbatch verify --archs`: models tried apart, differences found, a table and JSON."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import pytest

from cbatch.response import TokenLogprob
from cbatch.verify.findings import Finding, table
from cbatch.verify.folder import models_in, verify_apart
from cbatch.verify.one_model import difference
from tests.cli.conftest import invoke

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def token(token_id: int, logprob: float, *top: tuple[int, float]) -> TokenLogprob:
    others = tuple(TokenLogprob(i, b"", p) for i, p in top)
    return TokenLogprob(token_id, b"", logprob, (TokenLogprob(token_id, b"", logprob), *others))


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ([token(1, -0.5), token(2, -0.1)], ""),
        ([token(1, -0.51), token(2, -0.1)], ""),
        ([token(1, -0.5), token(2, -0.3)], "the log-probability of token 2 differs by 0.2"),
        ([token(1, -0.5), token(2, float("nan"))], "the log-probability of token 2 differs by nan"),
        ([token(7, -0.52), token(9, -3.0)], ""),
        ([token(8, -0.5), token(2, -0.1)], "token 1 is 8, alone 1"),
        ([token(6, -0.9), token(2, -0.1)], "token 1 is 6, alone 1"),
    ],
)
def test_answers_differ_by_more_than_rounding(found: list[TokenLogprob], words: str) -> None:
    alone = [token(1, -0.5, (7, -0.53), (6, -0.9)), token(2, -0.1, (3, -4.0))]
    assert difference(alone, found, 0.02) == words


def test_table_tells_what_ended_and_what_was_refused() -> None:
    found = [
        Finding("a.gguf", company="together: tried", exactness="bitwise", n_slot_bytes=2048),
        Finding("b.gguf", end="ended by SIGABRT: a | b"),
        Finding("c.gguf", refusal="an encoder model"),
        Finding("d.gguf", company="one at a time: there", difference="prompt 1"),
        Finding("e.gguf", company="one at a time: llama.cpp", shared=0.5, resumed=1.0),
    ]
    assert [finding.is_wrong for finding in found] == [False, True, False, True, False]
    head, _, *rows = table(found)
    assert len({len(line) for line in (head, *rows)}) == 1
    cells = [[cell.strip(" |") for cell in row.split(" | ")] for row in rows]
    assert cells[0][1:] == ["yes", "yes", "0%", "0%", "yes", "0", "2"]
    assert cells[1][1] == r"no: ended by SIGABRT: a \| b".partition(" | ")[0]
    assert cells[2][1] == "no: an encoder model"
    assert cells[3][2] == "no: prompt 1"
    assert cells[4][2:6] == ["yes, one at a time", "50%", "100%", "no"]


@pytest.fixture
def folder(zoo: Callable[[str], Path], tmp_path: Path) -> Path:
    for name in ("llama", "qwen35", "t5"):
        (tmp_path / f"{name}.gguf").symlink_to(zoo(name))
    return tmp_path


@pytest.mark.real
def test_every_model_of_a_folder_is_a_line(folder: Path) -> None:
    result = invoke("verify", "--archs", folder, "--json")
    assert result.exit_code == 0, result.stderr
    llama, qwen, refused = map(json.loads, result.stdout.splitlines())
    assert [f["model"] for f in (llama, qwen, refused)] == ["llama.gguf", "qwen35.gguf", "t5.gguf"]
    for finding in (llama, qwen):
        assert finding["company"].startswith("together: ")
        assert not finding["is_wrong"]
        assert finding["n_compared"] == 8 * 12
        assert finding["tokens_per_s"] > 0
        assert finding["n_slot_bytes"] > 1000
    assert (llama["architecture"], llama["file_type"]) == ("llama", "f32")
    assert llama["is_cut_anywhere"]
    assert min(llama["shared"], llama["resumed"]) > 0.9
    assert not qwen["is_cut_anywhere"]
    assert "encoder" in refused["refusal"]


@pytest.mark.real
def test_wrong_model_is_told_and_ends_the_command_with_1(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("qwen35", "t5"):
        (folder / f"{name}.gguf").unlink()
    monkeypatch.setenv("CBATCH_VERIFY_TIMEOUT_S", "1")  # too short to load anything
    monkeypatch.setenv("CBATCH_LIBRARY", "/dev/null")
    result = invoke("verify", "--archs", folder)
    assert result.exit_code == 1
    assert "| llama.gguf | no: " in result.stdout
    assert "1 models, 0 refused, 1 wrong" in result.stderr


@pytest.mark.real
def test_process_that_ends_by_a_signal_is_told(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = [sys.executable, "-c", "import os; os.abort()"]
    monkeypatch.setattr("cbatch.support.processes.command_of", lambda *_: command)
    found = verify_apart(folder / "llama.gguf", 4, 60)
    assert found.end.startswith("ended by SIGABRT")
    assert found.is_wrong


def test_later_parts_of_a_split_model_are_left_out(tmp_path: Path) -> None:
    for name in ("a-00001-of-00002", "a-00002-of-00002", "b-of-3", "c"):
        (tmp_path / f"{name}.gguf").touch()
    assert [p.stem for p in models_in(tmp_path)] == ["a-00001-of-00002", "b-of-3", "c"]


def test_folder_without_models_is_refused(tmp_path: Path) -> None:
    for folder, words in ((tmp_path, "no .gguf files"), (tmp_path / "none", "no folder")):
        result = invoke("verify", "--archs", folder)
        assert (result.exit_code, words in result.stderr) == (2, True)
    assert "--archs" in invoke("verify").stderr
