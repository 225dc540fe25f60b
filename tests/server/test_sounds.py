"""Sounds over HTTP: chat completions and Responses, on a fake backend for which each byte of a sound is a row."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Any

import pytest

from cbatch import Engine
from cbatch.backend.fake.fake_backend import FakeBackend
from tests.server.clients import call, error_of, fake_app

if TYPE_CHECKING:
    from collections.abc import Iterator

    from starlette.applications import Starlette

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
SOUND = {
    "type": "input_audio",
    "input_audio": {"data": base64.b64encode(b"samples").decode(), "format": "wav"},
}


@pytest.fixture
def app() -> Iterator[Starlette]:
    backend = FakeBackend(4, 256)
    backend.vocab.sound_refusal = ""
    with fake_app(engine=Engine(backend)) as app:
        yield app


def body_for(path: str, part: dict[str, Any]) -> dict[str, Any]:
    kind = "input_text" if path == RESPONSES else "text"
    said = [{"role": "user", "content": [part, {"type": kind, "text": "What?"}]}]
    if path == RESPONSES:
        return {"input": said, "max_output_tokens": 3, "seed": 1}
    return {"messages": said, "max_tokens": 3, "seed": 1}


def test_sound_is_computed_as_rows_in_both_formats(app: Starlette) -> None:
    first = call(app, CHAT, body_for(CHAT, SOUND)).json()
    second = call(app, RESPONSES, body_for(RESPONSES, SOUND)).json()
    n = len("user:What?") + len(b"samples")
    assert first["usage"]["prompt_tokens"] == second["usage"]["input_tokens"] == n
    assert first["usage"]["prompt_tokens_details"]["audio_tokens"] == 7
    assert "image_tokens" not in first["usage"]["prompt_tokens_details"]
    text = first["choices"][0]["message"]["content"]
    assert second["output"][-1]["content"][0]["text"] == text
    assert call(app, "/props").json()["modalities"] == {"vision": False, "audio": True}
    assert "multimodal" in call(app, "/models").json()["data"][0]["capabilities"]
    with fake_app() as deaf:
        error = error_of(call(deaf, CHAT, body_for(CHAT, SOUND)), 400)
    assert "load it with mmproj" in error["message"]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "sound without data"),
        (None, "sound without data"),
        ({"data": "", "format": "wav"}, "empty sound"),
        ({"data": "AAAA", "format": "pcm16"}, "format 'pcm16': it can be wav, mp3"),
        ({"data": "%%%%", "format": "wav"}, "base64"),
        ({"data": 5, "format": "wav"}, "sound without data"),
    ],
)
@pytest.mark.parametrize("path", [CHAT, RESPONSES])
def test_wrong_sound_is_refused(app: Starlette, path: str, given: Any, words: str) -> None:
    answer = call(app, path, body_for(path, {"type": "input_audio", "input_audio": given}))
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]


def test_python_part_names_no_file_of_the_server(app: Starlette) -> None:
    error = error_of(call(app, CHAT, body_for(CHAT, {"type": "audio", "audio": "/etc/x"})), 400)
    assert "sound of type str" in error["message"]
