"""One answer by one call: `chat` and `generate`, in plain and in async code."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

import cbatch
from cbatch.backend.fake import FakeBackend
from cbatch.errors import ConfigError, EngineClosedError, PromptTooLongError, UnsupportedOptionError
from cbatch.runtime.batch_response import OneAnswer
from tests.kinds import Reason, each_kind, engine_on, thread_only

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cbatch.engine import Engine

pytestmark = each_kind

SHORT = {"max_tokens": 3, "temperature": 0, "ignore_eos": True, "seed": 1}


@pytest.fixture
def engine() -> Iterator[Engine]:
    with engine_on(FakeBackend(2, 64, 16), options=SHORT) as made:
        yield made


def test_chat_gives_the_answer_of_a_run(engine: Engine) -> None:
    messages = [{"role": "user", "content": "Say red."}]
    answer = engine.chat(messages, max_tokens=5)
    [result] = engine.run([messages], options={"max_tokens": 5}).results()
    assert (answer.text, answer.token_ids) == (result.text, result.token_ids)
    assert answer.finish_reason == "length"
    assert answer.usage.completion_tokens == 5
    assert isinstance(answer.result, cbatch.BatchResult)
    assert "text" in dir(answer)


def test_text_is_the_message_of_a_user_in_chat_and_a_prompt_in_generate(engine: Engine) -> None:
    chat = [{"role": "user", "content": "Say red."}]
    assert engine.chat("Say red.").token_ids == engine.submit(chat).result().token_ids
    assert engine.generate("Say red.").token_ids == engine.submit("Say red.").result().token_ids
    tokens = cbatch.BatchPrompt(tokens=[1, 2, 3], id="mine")
    assert engine.generate(tokens).id == "mine"


def test_wrong_call_is_refused_and_a_failed_request_raises_its_error(engine: Engine) -> None:
    with pytest.raises(UnsupportedOptionError, match="max_token"):
        engine.chat("a", max_token=3)
    with pytest.raises(ConfigError, match="call chat"):
        engine.generate([{"role": "user", "content": "a"}])  # type: ignore[arg-type]
    with pytest.raises(PromptTooLongError):
        engine.generate("a" * 100)
    with pytest.raises(AttributeError, match="no attribute 'txt'"):
        _ = engine.chat("a").txt
    engine.close()
    with pytest.raises(EngineClosedError):
        engine.chat("a")


def test_answer_can_be_extended(engine: Engine) -> None:
    answer = engine.generate("Once", max_tokens=3)
    longer = engine.extend(answer, 2).result()
    assert longer.token_ids == engine.generate("Once", max_tokens=5).token_ids


def test_awaited_answer_is_the_result(engine: Engine) -> None:
    async def ask() -> list[Any]:
        answers = [engine.chat("a"), engine.generate("b")]
        with pytest.raises(ConfigError, match="await it first"):
            _ = answers[0].text
        return [await answer for answer in (*answers, answers[0])]

    first, second, again = asyncio.run(ask())
    assert isinstance(first, cbatch.BatchResult)
    assert first is again
    assert (first.text, second.text) == (engine.chat("a").text, engine.generate("b").text)


def test_awaited_answer_raises_the_error_of_its_request(engine: Engine) -> None:
    async def ask() -> None:
        await engine.generate("a" * 100)

    with pytest.raises(PromptTooLongError):
        asyncio.run(ask())


@thread_only(Reason.BY_HAND)
def test_engine_without_a_thread_gives_one_answer_too() -> None:
    async def ask(engine: Engine) -> cbatch.BatchResult:
        return await engine.chat("a")

    with engine_on(FakeBackend(2, 64, 16), options=SHORT, threaded=False) as engine:
        assert asyncio.run(ask(engine)).text == engine.chat("a").text
        assert isinstance(engine.chat("a"), OneAnswer)
