"""Models, tokens, templates, properties and health."""

from __future__ import annotations

from threading import get_ident
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from cbatch import Engine, load
from cbatch.backend.fake import FakeBackend
from cbatch.errors import EngineClosedError
from cbatch.messages import BatchPrompt
from cbatch.server import create_app
from tests.no_threads import NoThreads
from tests.server.clients import CHAT, COMPLETIONS, MESSAGES, USER, call, error_of, fake_app

if TYPE_CHECKING:
    from pathlib import Path

    from starlette.applications import Starlette


def test_models_are_the_engine_and_its_adapters() -> None:
    backend = FakeBackend(2, 64)
    backend.adapters = ("a/b",)
    with fake_app(engine=Engine(backend), model_name="m") as app:
        listed = call(app, "/v1/models").json()
        assert [m["id"] for m in listed["data"]] == ["m", "a/b"]
        assert listed["data"][0]["max_model_len"] == 64
        assert call(app, "/models/a/b").json() == listed["data"][1]


def test_adapter_answers_where_it_is_named_as_the_model() -> None:
    backend = FakeBackend(2, 64)
    backend.adapters = ("a",)
    with fake_app(engine=Engine(backend)) as app:
        asked = {"prompt": "ab", "max_tokens": 9, "seed": 1}
        texts = {
            name: call(app, "/v1/completions", {**asked, "model": name}).json()["choices"]
            for name in ("a", "b", "c")
        }
    assert texts["b"] == texts["c"] != texts["a"]


def test_tokens_of_a_chat_are_counted_as_its_answer_counts_them(app: Starlette) -> None:
    asked = {"messages": USER, "max_tokens": 1}
    counted = call(app, f"{CHAT}/input_tokens", asked).json()
    answered = call(app, CHAT, asked).json()["usage"]["prompt_tokens"]
    assert counted == {"input_tokens": answered, "object": "response.input_tokens"}


TOKENIZED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"content": "ab"}, {"tokens": [97, 98]}),
    ({"content": ""}, {"tokens": []}),
    (
        {"content": "é", "with_pieces": True},
        {"tokens": [{"id": 195, "piece": [195]}, {"id": 169, "piece": [169]}]},
    ),
    ({"prompt": "ab"}, {"count": 2, "max_model_len": 256, "tokens": [97, 98]}),
    ({"messages": USER}, {"count": 7, "max_model_len": 256, "tokens": [*b"user:Hi"]}),
]


def test_tokens_of_text_and_chats(app: Starlette) -> None:
    for body, answer in TOKENIZED:
        assert call(app, "/tokenize", body).json() == answer
    answer = call(app, "/detokenize", {"tokens": [195, 169, 256]}).json()
    assert answer == {"content": "é<end>", "prompt": "é<end>"}


WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("/tokenize", {}, "prompt"),
    ("/tokenize", {"content": 3}, "content"),
    ("/tokenize", {"content": "a", "parse_special": False}, "parse_special"),
    ("/tokenize", {"content": "a", "with_pieces": 1}, "with_pieces"),
    *(("/detokenize", said, "tokens") for said in ({}, {"tokens": "a"})),
    *(("/detokenize", {"tokens": said}, "tokens") for said in ([-1], [999])),
    ("/apply-template", {}, "messages"),
]


def test_wrong_field_is_named(app: Starlette) -> None:
    for path, body, param in WRONG:
        assert error_of(call(app, path, body), 400)["param"] == param, body


def test_shipped_model_tells_its_tokens_and_template(test_model: Path) -> None:
    with load(test_model, parallel=1, n_threads=1) as engine:
        app = create_app(engine)
        info = call(app, "/tokenizer_info").json()
        assert "{%" in info["chat_template"]
        text = call(app, "/apply-template", {"messages": USER}).json()["prompt"]
        assert "Hi" in text
        chat = call(app, "/tokenize", {"messages": USER}).json()["tokens"]
        assert chat == engine.tokenize(USER)
        assert call(app, "/tokenize", {"prompt": text}).json()["tokens"] == chat
        assert call(app, "/detokenize", {"tokens": chat}).json()["content"] == text
        props = call(app, "/props").json()
        assert (props["total_slots"], props["chat_template"]) == (1, info["chat_template"])
        assert props["model_path"] == test_model.name


LONG = "a" * 2**17
LONG_CHAT = {"messages": [{"role": "user", "content": LONG}], "max_tokens": 1}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        *((path, LONG_CHAT) for path in (CHAT, MESSAGES, f"{MESSAGES}/count_tokens", "/tokenize")),
        *((path, {"prompt": LONG}) for path in (COMPLETIONS, "/tokenize")),
        *((path, {"input": LONG}) for path in ("/v1/responses", "/v1/responses/input_tokens")),
        ("/apply-template", LONG_CHAT),
    ],
)
def test_prompt_of_a_large_body_is_made_outside_of_the_event_loop(
    app: Starlette, path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    check, threads = BatchPrompt.__post_init__, set()

    def watched(prompt: BatchPrompt) -> None:
        threads.add(get_ident())
        check(prompt)

    monkeypatch.setattr(BatchPrompt, "__post_init__", watched)
    call(app, path, body)
    assert threads
    assert get_ident() not in threads


def test_lack_of_threads_is_told_and_passes(
    app: Starlette, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = {"content": "hello " * 40_000}
    threads = NoThreads(monkeypatch, "")
    answer = call(app, "/tokenize", asked)
    assert threads.n_refused
    assert error_of(answer, 503)["code"] == "no_threads"
    assert "retry-after" in answer.headers
    threads.is_over = True
    assert call(app, "/tokenize", asked).status_code == 200


def test_application_does_not_start_over_the_engine_of_a_parent_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def start() -> None:
        async with app.router.lifespan_context(app):
            pass

    with Engine(FakeBackend(2, 256)) as engine:
        app = create_app(engine)
        with monkeypatch.context() as patch:
            patch.setattr("os.getpid", lambda: 1)
            with pytest.raises(EngineClosedError, match="load another one after the fork"):
                anyio.run(start)
        anyio.run(start)


def test_health_of_an_engine_of_a_parent_process_is_told_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with fake_app() as app, monkeypatch.context() as patch:
        patch.setattr("os.getpid", lambda: 1)
        answer = call(app, "/health")
    assert answer.status_code == 503
    assert answer.json()["error"]["message"] == "the engine has ended: the server's log says why"
    assert "load another one after the fork" in caplog.text
