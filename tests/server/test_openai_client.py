"""The package `openai`, unchanged, against the shipped model over a socket."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import openai
import pydantic
import pytest

from cbatch import Engine
from cbatch.server import create_app
from tests.chat.test_tool_calls import SAID, THINK_END, Speaker
from tests.face.test_tools import TIME
from tests.server.clients import Running, running

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.real

SUM = [{"role": "user", "content": "What is 2+3?"}]


@pytest.fixture
def client(server: Running) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as found:
        yield found


def test_stream_is_the_whole_answer(client: Any) -> None:
    story = [{"role": "user", "content": "Tell me a story."}]
    asked: dict[str, Any] = {"model": "m", "messages": story, "max_tokens": 24, "seed": 1}
    asked |= {"logprobs": True, "top_logprobs": 2, "n": 2, "temperature": 1}
    whole = client.chat.completions.create(**asked)
    with client.chat.completions.stream(**asked, stream_options={"include_usage": True}) as stream:
        for _ in stream:
            pass
        streamed = stream.current_completion_snapshot  # the other raises at `length`
    for a, b in zip(whole.choices, streamed.choices, strict=True):
        assert (a.message.content, a.finish_reason) == (b.message.content, b.finish_reason)
        assert a.logprobs.content == b.logprobs.content
        assert len(a.logprobs.content) == 24
    assert streamed.usage.total_tokens == whole.usage.total_tokens


def test_tool_is_called_and_its_answer_read() -> None:
    with (
        Engine(Speaker(SAID, n_slots=2, n_window=1024)) as engine,
        running(create_app(engine)) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        asked: dict[str, Any] = {"model": "m", "messages": SUM, "tools": [TIME]}
        answer = client.chat.completions.create(**asked)
        n_thought = SAID.index(THINK_END) + 1
        assert answer.usage.completion_tokens_details.reasoning_tokens == n_thought
        with client.chat.completions.stream(**asked) as stream:
            thoughts = [
                event.chunk.choices[0].delta.model_extra.get("reasoning_content", "")
                for event in stream
                if event.type == "chunk" and event.chunk.choices
            ]
            streamed = stream.get_final_completion()
        for (choice,) in (answer.choices, streamed.choices):
            (call,) = choice.message.tool_calls
            assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Wait.")
            assert call.function.name == "get_time"
            assert json.loads(call.function.arguments) == {"zone": "CET"}
        message = answer.choices[0].message
        assert message.reasoning_content == "".join(thoughts) == "I häve to"
        answered = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "12:00"}
        messages = [*SUM, message.to_dict(), answered]
        more = client.chat.completions.create(model="m", messages=messages, tools=[TIME])
        assert more.usage.prompt_tokens > 0


class Sum(pydantic.BaseModel):
    sum: int = pydantic.Field(ge=0, le=99)


def test_helpers_of_the_package_parse_what_a_class_describes(client: Any) -> None:
    asked = {"model": "m", "max_tokens": 40, "messages": SUM}
    (choice,) = client.chat.completions.parse(**asked, response_format=Sum).choices
    with client.chat.completions.stream(**asked, response_format=Sum) as stream:
        streamed = stream.get_final_completion().choices[0].message.parsed
    more = {"model": "m", "max_output_tokens": 40, "input": SUM, "text_format": Sum}
    with client.responses.stream(**more) as events:
        response = events.get_final_response().output_parsed
    parsed = choice.message.parsed
    assert isinstance(parsed, Sum)
    assert parsed == streamed == response == client.responses.parse(**more).output_parsed


def test_clients_of_an_event_loop_are_answered_together(server: Running) -> None:
    async def ask() -> list[str]:
        url = f"{server.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            sums = [[{"role": "user", "content": f"What is {i}+3?"}] for i in range(6)]
            whole = [client.chat.completions.create(model="m", messages=chat) for chat in sums]
            told = [answer.choices[0].message.content for answer in await asyncio.gather(*whole)]
            stream = await client.chat.completions.create(model="m", messages=SUM, stream=True)
            parts = [c.choices[0].delta.content or "" async for c in stream if c.choices]
            return [*told, "".join(parts)]

    assert asyncio.run(ask()) == ["3", "4", "5", "6", "7", "8", "5"]


def test_completion_echoes_with_log_probabilities(client: Any) -> None:
    asked: dict[str, Any] = {"model": "m", "prompt": "Once upon a time", "max_tokens": 1}
    asked |= {"echo": True, "logprobs": 1}
    (choice,) = client.completions.create(**asked).choices
    found = choice.logprobs
    assert choice.text.startswith("Once upon a time")
    assert "".join(found.tokens) == choice.text
    assert found.token_logprobs[0] is None
    pairs = zip(found.token_logprobs[1:], found.top_logprobs[1:], strict=True)
    assert all(number <= max(top.values()) for number, top in pairs)
    streamed = [c.choices[0] for c in client.completions.create(**asked, stream=True)]
    assert "".join(c.text for c in streamed) == choice.text
    assert [c.logprobs for c in streamed if c.logprobs] == [found]


def test_errors_are_those_of_the_package(client: Any) -> None:
    with pytest.raises(openai.BadRequestError) as wrong:
        client.chat.completions.create(model="m", messages=SUM, temperature=-1)
    assert (wrong.value.param, wrong.value.status_code) == ("temperature", 400)
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model="m", prompt="a b " * 4000)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("none")
    (model,) = client.models.list().data
    assert client.models.retrieve(model.id) == model
