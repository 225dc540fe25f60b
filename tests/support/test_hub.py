"""Models of Hugging Face, by name."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import cbatch
from cbatch.errors import ConfigError, ModelLoadError
from cbatch.files.file_run import run_file
from cbatch.files.preview import check_file, estimate_file
from cbatch.support.hub import local_model
from tests.cli.conftest import invoke


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[dict[str, Any]]:
    """Put a `huggingface_hub` in place that has one file; return what it is asked for."""
    calls: list[dict[str, Any]] = []

    def download(**given: Any) -> str:
        calls.append(given)
        if given["filename"] != "q8/a.gguf":
            raise OSError(f"404: no {given['filename']}")
        return str(tmp_path / "a.gguf")

    hub = ModuleType("huggingface_hub")
    hub.hf_hub_download = download  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    return calls


@pytest.mark.parametrize("as_path", [False, True])
def test_named_file_is_had_from_the_hub(asked: list[dict[str, Any]], as_path: bool) -> None:
    name = "hf:me/models/q8/a.gguf"
    found = local_model(Path(name) if as_path else name)
    assert Path(found).name == "a.gguf"
    assert asked == [{"repo_id": "me/models", "filename": "q8/a.gguf"}]


@pytest.mark.parametrize("model", [None, "a.gguf", Path("hf/me/a.gguf"), 3])
def test_other_models_stay_as_they_are(asked: list[dict[str, Any]], model: Any) -> None:
    assert local_model(model) is model
    assert asked == []


def test_file_that_the_hub_lacks_says_why(asked: list[dict[str, Any]]) -> None:
    with pytest.raises(ConfigError, match=r"hf:me/models/b\.gguf: cannot be downloaded: 404"):
        local_model("hf:me/models/b.gguf")


def test_incomplete_name_says_what_is_wanted(asked: list[dict[str, Any]]) -> None:
    with pytest.raises(ConfigError, match=r"give hf:OWNER/REPO/FILE\.gguf"):
        local_model("hf:me/models")


@pytest.mark.parametrize(
    "words",
    [
        ("info", "hf:me/models/a.gguf"),
        ("info", "-m", "hf:me/models/a.gguf"),
        ("ask", "hi", "-m", "hf:me/models/a.gguf"),
        ("serve", "-m", "hf:me/models/a.gguf"),
        ("bench", "hf:me/models/a.gguf"),
        ("bench", "-m", "hf:me/models/a.gguf"),
        ("verify", "hf:me/models/a.gguf"),
        ("verify", "-m", "hf:me/models/a.gguf"),
    ],
)
def test_commands_say_what_to_install(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    shown = invoke(*words)
    assert shown.exit_code == 2
    assert "pip install huggingface_hub" in shown.stderr


def test_load_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ConfigError, match="pip install huggingface_hub"):
        cbatch.load("hf:me/models/a.gguf")


@pytest.mark.real
def test_path_that_is_none_says_that_nothing_is_downloaded() -> None:
    with pytest.raises(ModelLoadError, match="No such file or directory; nothing is downloaded"):
        cbatch.load("no.gguf")


@pytest.mark.real
def test_calls_on_files_take_the_name_too(
    asked: list[dict[str, Any]], tmp_path: Path, test_model: Path
) -> None:
    (tmp_path / "a.gguf").symlink_to(test_model)
    (tmp_path / "in.jsonl").write_text('{"prompt": "Hi", "options": {"max_tokens": 2}}\n')
    name, source = "hf:me/models/q8/a.gguf", tmp_path / "in.jsonl"
    done = run_file(source, tmp_path / "out.jsonl", model=name, isolate=False)
    assert (done.n_done, done.n_failed) == (1, 0)
    assert check_file(source, model=name).n_items == 1
    assert estimate_file(source, model=name).n_sample == 1
    assert len(asked) == 3


def test_output_may_not_be_the_file_that_the_name_stands_for(
    asked: list[dict[str, Any]], tmp_path: Path
) -> None:
    (tmp_path / "in.jsonl").write_text('{"prompt": "Hi"}\n')
    (tmp_path / "a.gguf").touch()
    with pytest.raises(ConfigError, match=r"a\.gguf: is the input"):
        run_file(tmp_path / "in.jsonl", tmp_path / "a.gguf", model="hf:me/models/q8/a.gguf")
