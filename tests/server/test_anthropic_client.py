"""The package `anthropic`, unchanged, against the shipped model over a socket."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Literal

import anthropic
import pydantic
import pytest

from cbatch import Engine
from cbatch.server import create_app
from tests.chat.test_tool_calls import SAID, Speaker
from tests.server.clients import Running, running
from tests.server.test_anthropic_messages import TOOL

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.real

SUM = [{"role": "user", "content": "What is 2+3?"}]
ASKED: dict[str, Any] = {"model": "m", "max_tokens": 24, "messages": SUM}


def client_of(server: Running, **more: Any) -> Any:
    settings = {"base_url": server.url, "api_key": "none", "max_retries": 0, **more}
    return anthropic.Anthropic(**settings)


@pytest.fixture
def client(server: Running) -> Iterator[Any]:
    with client_of(server) as found:
        yield found


def test_stream_accumulates_to_the_whole_message(client: Any) -> None:
    asked = {**ASKED, "extra_body": {"seed": 1, "temperature": 1}}
    asked["messages"] = [{"role": "user", "content": "Tell me a story."}]
    whole = client.messages.create(**asked)
    with client.messages.stream(**asked) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert [block.text for block in final.content] == [block.text for block in whole.content]
    assert (text, final.stop_reason) == (whole.content[0].text, whole.stop_reason)
    assert final.usage.output_tokens == whole.usage.output_tokens
    raw = [event.type for event in client.messages.create(**asked, stream=True)]
    assert raw[:2] == ["message_start", "content_block_start"]
    assert raw[-3:] == ["content_block_stop", "message_delta", "message_stop"]


def test_thinking_and_calls_come_and_are_told_back() -> None:
    with (
        Engine(Speaker(SAID, n_slots=2, n_window=1024)) as engine,
        running(create_app(engine)) as server,
        client_of(server) as client,
    ):
        asked = {**ASKED, "max_tokens": 200, "tools": [TOOL], "tool_choice": {"type": "auto"}}
        asked["thinking"] = {"type": "enabled", "budget_tokens": 1024}
        whole = client.messages.create(**asked)
        with client.messages.stream(**asked) as stream:
            kinds = [event.type for event in stream]
            final = stream.get_final_message()
        assert {"thinking", "signature", "text", "input_json"} <= {*kinds}
        assert whole.stop_reason == final.stop_reason == "tool_use"
        for message in (whole, final):
            thinking, said, used = message.content
            assert (thinking.thinking, said.text) == ("I häve to", "Wait.")
            assert (used.name, used.input) == ("get_time", {"zone": "CET"})
        assert final.content[0].signature == whole.content[0].signature != ""
        told = {"type": "tool_result", "tool_use_id": final.content[2].id, "content": "12:00"}
        said = {"role": "assistant", "content": final.content}
        turns = [*SUM, said, {"role": "user", "content": [told]}]
        assert client.messages.create(**{**asked, "messages": turns}).stop_reason == "tool_use"


class Sum(pydantic.BaseModel):
    sum: Literal["five", "six"]


def test_helpers_of_the_package_parse_what_a_class_describes(client: Any) -> None:
    asked = {**ASKED, "max_tokens": 60, "output_format": Sum}
    parsed = client.messages.parse(**asked).parsed_output
    with client.messages.stream(**asked) as stream:
        streamed = stream.get_final_message().parsed_output
    assert isinstance(parsed, Sum)
    assert parsed == streamed == client.beta.messages.parse(**asked).parsed_output


def test_clients_of_an_event_loop_are_answered_together(server: Running) -> None:
    async def ask() -> list[str]:
        settings: dict[str, Any] = {"base_url": server.url, "api_key": "none", "max_retries": 0}
        async with anthropic.AsyncAnthropic(**settings) as client:
            sums = [[{"role": "user", "content": f"What is {i}+3?"}] for i in range(6)]
            whole = [client.messages.create(**{**ASKED, "messages": chat}) for chat in sums]
            told = [message.content[0].text for message in await asyncio.gather(*whole)]
            async with client.messages.stream(**ASKED) as stream:
                return [*told, "".join([text async for text in stream.text_stream])]

    assert asyncio.run(ask()) == ["3", "4", "5", "6", "7", "8", "5"]


def test_errors_are_of_their_own_kinds(client: Any) -> None:
    with pytest.raises(anthropic.BadRequestError) as wrong:
        client.messages.create(**ASKED, extra_body={"temperature": -1})
    assert wrong.value.type == "invalid_request_error"
    assert wrong.value.request_id == wrong.value.body["request_id"]
    long = [{"role": "user", "content": "x y " * 9000}]
    with (
        pytest.raises(anthropic.BadRequestError, match="prompt is too long: "),
        client.messages.stream(**{**ASKED, "messages": long}),
    ):
        pass
    with pytest.raises(anthropic.NotFoundError):
        client.messages.batches.list()


def test_models_are_listed(client: Any) -> None:
    (model,) = client.models.list()
    assert (model.type, model.max_tokens) == ("model", 2048)
    assert model.created_at.year >= 2020
    assert client.models.retrieve(model.id) == model
    with pytest.raises(anthropic.NotFoundError):
        client.models.retrieve("none")


def test_keys_and_the_end_of_a_server_are_told() -> None:
    with Engine(Speaker(SAID)) as engine:
        app = create_app(engine, api_keys="right")
        with running(app) as server:
            with client_of(server) as wrong, pytest.raises(anthropic.AuthenticationError):
                wrong.messages.create(**ASKED)
            with client_of(server, api_key="right") as right:
                assert right.messages.create(**ASKED).content
                app.state.desk.is_draining = True
                with pytest.raises(anthropic.InternalServerError) as over:
                    right.messages.create(**ASKED)
                assert over.value.status_code == 529
                assert over.value.type == "overloaded_error"
