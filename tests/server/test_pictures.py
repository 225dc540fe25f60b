"""Pictures and sounds over HTTP: all formats, on a fake backend for which each byte of one is a row."""

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

DATA = base64.b64encode(b"pixels").decode()
URL = f"data:image/png;base64,{DATA}"
CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"

OPENAI = {"type": "image_url", "image_url": {"url": URL}}
ANTHROPIC = {
    "type": "image",
    "source": {"type": "base64", "media_type": "image/png", "data": DATA},
}
INPUT = {"type": "input_image", "image_url": URL}


SOUND = {
    "type": "input_audio",
    "input_audio": {"data": base64.b64encode(b"samples").decode(), "format": "wav"},
}


def sensing(sense: str) -> Iterator[Starlette]:
    backend = FakeBackend(4, 256)
    setattr(backend.vocab, f"{sense}_refusal", "")
    with fake_app(engine=Engine(backend)) as app:
        yield app


@pytest.fixture
def app() -> Iterator[Starlette]:
    yield from sensing("picture")


@pytest.fixture
def hearing() -> Iterator[Starlette]:
    yield from sensing("sound")


def body_for(path: str, part: dict[str, Any], text: str = "What?") -> dict[str, Any]:
    kind = "input_text" if path == RESPONSES else "text"
    content = [part, {"type": kind, "text": text}]
    said = [{"role": "user", "content": content}]
    if path == RESPONSES:
        return {"input": said, "max_output_tokens": 3, "seed": 1}
    return {"messages": said, "max_tokens": 3, "seed": 1}


def test_three_formats_compute_a_picture_as_rows_and_give_one_answer(app: Starlette) -> None:
    first, second, third = (
        call(app, path, {**body_for(path, part), "seed": 1}).json()
        for path, part in ((CHAT, OPENAI), (MESSAGES, ANTHROPIC), (RESPONSES, INPUT))
    )
    n_rows = len("user:What?") + len(b"pixels")
    assert first["usage"]["prompt_tokens"] == third["usage"]["input_tokens"] == n_rows
    assert second["usage"]["input_tokens"] + second["usage"]["cache_read_input_tokens"] == n_rows
    assert first["usage"]["prompt_tokens_details"]["image_tokens"] == len(b"pixels")
    text = first["choices"][0]["message"]["content"]
    assert second["content"][0]["text"] == third["output"][-1]["content"][0]["text"] == text
    assert call(app, "/props").json()["modalities"] == {"vision": True, "audio": False}
    assert "multimodal" in call(app, "/models").json()["data"][0]["capabilities"]


def url_of(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


@pytest.mark.parametrize(
    ("path", "part", "words"),
    [
        *(
            (CHAT, url_of(url), "URLs are not fetched")
            for url in ("https://a.b/c.png", "file:///etc/x")
        ),
        (CHAT, {"type": "image", "image": "/etc/passwd"}, "image of type str"),
        (CHAT, {"type": "image_url"}, "without url"),
        (CHAT, {"type": "input_file"}, "only text, image_url and input_audio"),
        (CHAT, url_of("data:image/png;base64,%"), "base64"),
        (MESSAGES, {"type": "image", "source": {"type": "url", "url": "https://a.b"}}, "fetched"),
        (MESSAGES, {"type": "image", "source": {}}, "it must be base64 (no picture is fetched)"),
        (MESSAGES, {"type": "image"}, "source"),
        (RESPONSES, {"type": "input_image", "file_id": "file-1"}, "has no image_url"),
        (RESPONSES, {"type": "input_image", "image_url": "https://a.b/c"}, "URLs are not fetched"),
    ],
)
def test_wrong_picture_is_refused(
    app: Starlette, path: str, part: dict[str, Any], words: str
) -> None:
    answer = call(app, path, body_for(path, part))
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]


def test_data_of_pictures_is_no_text_of_the_prompt(
    app: Starlette, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"data:image/png;base64,{base64.b64encode(bytes(200)).decode()}"
    picture = {"type": "image_url", "image_url": {"url": url}}
    monkeypatch.setattr("cbatch.server.prompt_size.MIN_CHARACTERS", len(url))
    monkeypatch.setattr("cbatch.server.prompt_size.CHARACTERS_PER_TOKEN", 0)
    large = {"user": "x" * 2**17}
    assert call(app, CHAT, body_for(CHAT, picture) | large).status_code == 200
    error = error_of(call(app, CHAT, body_for(CHAT, picture, text=url) | large), 400)
    assert "characters; at most" in error["message"]


def test_messages_that_follow_each_other_keep_their_pictures(app: Starlette) -> None:
    said = [
        {"role": "user", "content": "One."},
        {"role": "user", "content": [ANTHROPIC, {"type": "text", "text": "Two."}]},
    ]
    answer = call(app, MESSAGES, {"messages": said, "max_tokens": 3}).json()
    assert answer["usage"]["input_tokens"] == len("user:One.Two.") + len(b"pixels")


def test_model_that_sees_nothing_says_how_it_would() -> None:
    with fake_app() as app:
        error = error_of(call(app, CHAT, body_for(CHAT, OPENAI)), 400)
        assert "load it with mmproj" in error["message"]
        assert call(app, "/props").json()["modalities"] == {"vision": False, "audio": False}


# ---- sounds ----


def test_sound_is_computed_as_rows_in_both_formats(hearing: Starlette) -> None:
    first = call(hearing, CHAT, body_for(CHAT, SOUND)).json()
    second = call(hearing, RESPONSES, body_for(RESPONSES, SOUND)).json()
    n = len("user:What?") + len(b"samples")
    assert first["usage"]["prompt_tokens"] == second["usage"]["input_tokens"] == n
    assert first["usage"]["prompt_tokens_details"]["audio_tokens"] == 7
    assert "image_tokens" not in first["usage"]["prompt_tokens_details"]
    text = first["choices"][0]["message"]["content"]
    assert second["output"][-1]["content"][0]["text"] == text
    assert call(hearing, "/props").json()["modalities"] == {"vision": False, "audio": True}
    assert "multimodal" in call(hearing, "/models").json()["data"][0]["capabilities"]
    with fake_app() as deaf:
        error = error_of(call(deaf, CHAT, body_for(CHAT, SOUND)), 400)
    assert "load it with mmproj" in error["message"]


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
def test_wrong_sound_is_refused(hearing: Starlette, path: str) -> None:
    wrong: dict[str, list[Any]] = {
        "sound without data": [{}, None, {"data": 5, "format": "wav"}],
        "empty sound": [{"data": "", "format": "wav"}],
        "format 'pcm16': it can be wav, mp3": [{"data": "AAAA", "format": "pcm16"}],
        "base64": [{"data": "%%%%", "format": "wav"}],
    }
    for words, every in wrong.items():
        for given in every:
            part = {"type": "input_audio", "input_audio": given}
            answer = call(hearing, path, body_for(path, part))
            assert (answer.status_code, words in answer.text) == (400, True), given


def test_python_part_names_no_file_of_the_server(hearing: Starlette) -> None:
    error = error_of(call(hearing, CHAT, body_for(CHAT, {"type": "audio", "audio": "/etc/x"})), 400)
    assert "sound of type str" in error["message"]
