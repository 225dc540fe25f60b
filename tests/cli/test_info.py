"""`cbatch info`: what a model file is, the same window as a loaded engine has, the probe on request."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

import cbatch
from cbatch.backend.llama import LlamaBackend
from cbatch.cli.info import as_text
from tests.cli.conftest import forbid_opening, invoke

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import SynthFactory


def info(model: Path, *args: object) -> dict[str, Any]:
    """What the command says as JSON."""
    result = invoke("info", model, "--json", *args)
    assert result.exit_code == 0, result.stderr
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_info_knows_the_file(synth: SynthFactory) -> None:
    model = synth(
        metadata={"general.name": "Name", "general.sampling.temp": 0.5, "general.sampling.top_k": 7}
    )
    found = info(model)
    assert found["path"] == str(model)
    assert (found["name"], found["architecture"], found["file_type"]) == ("Name", "llama", "q8_0")
    assert found["n_bytes"] == model.stat().st_size
    assert found["has_chat_template"]
    assert found["end_tokens"] == [2, 4]
    assert found["sampling_defaults"] == {"temperature": 0.5, "top_k": 7}
    assert found["exactness"] is None


def test_info_of_a_silent_file_says_so(synth: SynthFactory) -> None:
    model = synth(metadata={"general.name": None, "tokenizer.chat_template": None})
    found = info(model)
    assert (found["name"], found["has_chat_template"]) == ("", False)
    said = invoke("info", model).stdout
    assert "name           not said\n" in said
    assert "chat template  none: give --chat-template" in said
    assert "sampling       not said\n" in said


@pytest.mark.parametrize("settings", [{}, {"parallel": 3}, {"parallel": 2, "ctx_per_seq": 300}])
def test_info_tells_the_window_of_a_loaded_engine(
    test_model: Path, settings: dict[str, Any]
) -> None:
    args = [part for k, v in settings.items() for part in (f"--{k.replace('_', '-')}", v)]
    found = info(test_model, *args)
    with cbatch.load(test_model, n_threads=1, **settings) as engine:
        assert (found["parallel"], found["n_window"]) == (engine.parallel, engine.n_window)
        assert found["n_cells"] == engine.parallel * engine.n_window


def test_info_makes_no_context(test_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise MemoryError("a context was made")

    monkeypatch.setattr(LlamaBackend, "__init__", refuse)
    assert info(test_model, "--parallel", 256)["parallel"] == 256


def test_info_in_lines_is_aligned_and_complete(test_model: Path) -> None:
    result = invoke("info", test_model, "--parallel", 2, "--ctx-per-seq", 256)
    assert (result.exit_code, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert [line[:15].strip() for line in lines] == [
        *("name", "architecture", "file type", "file size", "parameters", "trained for"),
        *("chat template", "vocabulary", "end tokens", "sampling", "slots", "window"),
    ]
    assert all(line[13:15] == "  " and line[15] != " " for line in lines)
    assert "window         256 cells per slot, 512 in all" in lines


def test_info_on_a_narrow_terminal_keeps_values_in_their_column(test_model: Path) -> None:
    found = info(test_model, "--parallel", 256)
    wide, narrow = as_text(found).splitlines(), as_text(found, 40).splitlines()
    assert max(map(len, narrow)) <= 40 < max(map(len, wide))
    more = [line for line in narrow if line.startswith(" ")]
    assert len(narrow) - len(more) == len(wide)
    assert all(line[:15] == " " * 15 and line[15] != " " for line in more)
    assert as_text(found, 200).splitlines() == wide


def test_model_without_permission_is_named(
    test_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forbid_opening(test_model, monkeypatch)
    for command in (("info", test_model), ("ask", "Hi", "-m", test_model)):
        result = invoke(*command)
        assert (result.exit_code, result.stdout) == (2, "")
        assert result.stderr == f"cbatch: {test_model}: cannot be read: Permission denied\n"


def test_info_asks_the_probe_as_the_model_would_be_loaded(
    test_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []

    def probe(model: object, options: Any) -> str:
        asked.append(options.exact)
        return "found"

    monkeypatch.setattr("cbatch.backend.load.probe", probe)
    assert info(test_model, "--exactness")["exactness"] == "found"
    assert info(test_model, "--exact")["exactness"] == "found"
    assert asked == [False, True]
    assert invoke("info", test_model, "--exactness").stdout.endswith("\nexactness      found\n")


def test_info_answers_what_the_engine_answers(synth: SynthFactory) -> None:
    model = synth("test", type="f32")
    found = info(model, "--exactness", "--parallel", 2, "--threads", 1)
    with cbatch.load(model, parallel=2, n_threads=1) as engine:
        assert found["exactness"] == engine.exactness


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("none.gguf",), "none.gguf: cannot be read"),
        ((".",), "cbatch: ."),
        (("none.gguf", "--parallel", 0), "parallel must be 1 … 256, not 0"),
        (("none.gguf", "--ctx-per-seq", -1), "ctx_per_seq must be 1 …"),
    ],
    ids=str,
)
def test_bad_input_of_info_is_one_line(args: tuple[object, ...], words: str) -> None:
    result = invoke("info", *args)
    assert (result.exit_code, result.stdout) == (2, "")
    assert words in result.stderr
    assert result.stderr.count("\n") == 1


def test_info_of_a_window_beyond_counting_is_one_line(test_model: Path) -> None:
    result = invoke("info", test_model, "--parallel", 256, "--ctx-per-seq", 2**30)
    assert result.exit_code == 2
    assert "llama.cpp counts up to" in result.stderr
    assert result.stderr.count("\n") == 1
