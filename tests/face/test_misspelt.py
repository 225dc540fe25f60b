"""Names that are like known ones, and roles that are none, in every place that refuses them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import cbatch
from cbatch import errors
from cbatch.engine_options import EngineOptions
from cbatch.errors import CBatchError, ConfigError, UnsupportedOptionError, near, words_of
from cbatch.files.file_formats import check_name
from cbatch.messages import BatchPrompt
from cbatch.server.http_errors import unknown_field
from cbatch.server.server_settings import ServerSettings
from cbatch.support.checks import check_keys

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.mark.parametrize(
    ("use", "words"),
    [
        (lambda: cbatch.RunOptions(temperatur=1), "did you mean temperature?"),  # type: ignore[call-arg]
        (lambda: cbatch.RunOptions.of({"max_token": 1}), "did you mean max_tokens?"),
        (lambda: EngineOptions.of({"paralel": 1}), "did you mean parallel?"),
        (lambda: EngineOptions(paralel=1), "did you mean parallel?"),  # type: ignore[call-arg]
        (lambda: cbatch.load(ctx_per_sequence=1), "did you mean ctx_per_seq?"),
        (lambda: cbatch.RunOptions.of({"n_predict": 4}), "did you mean max_tokens?"),
        (lambda: cbatch.RunOptions.of({"temp": 1}), "did you mean temperature?"),
        (lambda: cbatch.RunOptions.of({"stream": True}), "read the chunks of a response"),
        (lambda: cbatch.RunOptions.of({"system": "x"}), '"role": "system"'),
        (lambda: cbatch.RunOptions.of({"options": {}}), "give each option by its name"),
        (lambda: cbatch.load(num_ctx=1), "did you mean ctx_per_seq?"),
        (lambda: cbatch.load(model_path="m.gguf"), "the model's path is the first argument"),
        (lambda: cbatch.load(max_tokens=4), "give options={'max_tokens': …}"),
        (lambda: cbatch.load(n_predict=4), "give options={'max_tokens': …}"),
        (lambda: ServerSettings(api_key=["a"]), "did you mean api_keys?"),  # type: ignore[call-arg]
        (lambda: check_keys("it", {"colour": 1}, ["color"]), "did you mean color?"),
        (lambda: BatchPrompt([{"role": "usr", "content": "Hi"}]), "did you mean user?"),
        (lambda: BatchPrompt([{"role": "User ", "content": "Hi"}]), "did you mean user?"),
        (lambda: BatchPrompt([{"role": "assistent", "content": "Hi"}]), "mean assistant?"),
    ],
)
def test_misspelt_name_is_answered_with_the_right_one(
    use: Callable[[], object], words: str
) -> None:
    with pytest.raises(CBatchError) as caught:
        use()
    assert words in str(caught.value)


def test_name_like_none_is_answered_with_all() -> None:
    with pytest.raises(UnsupportedOptionError, match="'colour'; known are adapter, best_of, "):
        cbatch.RunOptions(colour=1)  # type: ignore[call-arg]


@pytest.mark.parametrize("role", ["ipython", "observation", "bot", "context", "developer"])
def test_roles_of_templates_are_left_alone(role: str) -> None:
    prompt = BatchPrompt([{"role": role, "content": "Hi"}])
    assert prompt.messages is not None
    assert prompt.messages[0]["role"] == role


@pytest.mark.parametrize("name", ["c.xlsx", "c.XLS", "c.ods"])
def test_spreadsheet_is_no_name_of_answers(name: str) -> None:
    with pytest.raises(ConfigError, match="use a name that ends in "):
        check_name(Path(name), "cbatch")


def test_field_of_a_call_is_answered_with_the_right_one() -> None:
    problem = unknown_field("temprature", ("temperature", "top_p"))
    assert problem.message == "unknown field 'temprature'; did you mean temperature?"
    assert unknown_field("speed", ("top_p",)).message == "unknown field 'speed'"


def test_name_longer_than_any_known_is_compared_with_none(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[str] = []

    def close(name: str, *_: object) -> list[str]:
        compared.append(name)
        return []

    monkeypatch.setattr(errors, "get_close_matches", close)
    near("a" * 11, ["min_p", "top_k"])
    assert not compared
    near("temprature", ["temperature"])
    assert compared == ["temprature"]


def test_field_with_a_long_name_is_named_by_its_beginning() -> None:
    problem = unknown_field("x" * 5000, ("top_p",))
    assert (len(problem.message), len(problem.param or "")) == (95, 1024)


def _error_of(use: Callable[[], object]) -> Any:
    with pytest.raises((OSError, ValueError)) as caught:
        use()
    return caught.value


def test_words_of_the_systems_errors_have_no_number() -> None:
    error = _error_of(lambda: Path("/no/where").read_bytes())
    assert words_of(error) == "/no/where: No such file or directory"
    assert words_of(_error_of(lambda: b"a\xff".decode())) == "byte 2 is not UTF-8"
    assert words_of(ConfigError("")) == "ConfigError"
