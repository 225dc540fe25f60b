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
from tests.server.clients import Running, running, wait_until
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


@pytest.fixture
def keeper(keeping_server: Running) -> Iterator[Any]:
    """A client of a server that keeps batches."""
    with client_of(keeping_server) as found:
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


# ---- batches ----


def ended(keeper: Any, id: str) -> Any:
    retrieve = keeper.messages.batches.retrieve
    wait_until(lambda: retrieve(id).processing_status == "ended")
    return retrieve(id)


def test_batch_is_answered(keeper: Any) -> None:
    asked: dict[str, dict[str, Any]] = {
        f"s{i}": {**ASKED, "messages": [{"role": "user", "content": f"What is {i}+{i}?"}]}
        for i in range(1, 5)
    }
    requests = [{"custom_id": id, "params": params} for id, params in asked.items()]
    requests.append({"custom_id": "bad", "params": {**ASKED, "temperature": -1}})
    batch = keeper.messages.batches.create(requests=requests)
    assert batch.processing_status == "in_progress"
    assert batch.request_counts.processing == 5
    with pytest.raises(anthropic.NotFoundError):
        keeper.messages.batches.retrieve("msgbatch_none")
    batch = ended(keeper, batch.id)
    assert batch.ended_at >= batch.created_at
    counts = batch.request_counts
    assert (counts.processing, counts.succeeded, counts.errored) == (0, 4, 1)
    results = {each.custom_id: each.result for each in keeper.messages.batches.results(batch.id)}
    assert results.keys() == {*asked, "bad"}
    for id, params in asked.items():
        alone = keeper.messages.create(**params)
        assert isinstance(results[id].message, anthropic.types.Message)
        assert results[id].message.content == alone.content
        assert results[id].message.stop_reason == alone.stop_reason
    wrong = results["bad"]
    assert (wrong.type, wrong.error.error.type) == ("errored", "invalid_request_error")
    assert keeper.messages.batches.delete(batch.id).type == "message_batch_deleted"
    with pytest.raises(anthropic.NotFoundError):
        keeper.messages.batches.retrieve(batch.id)


def test_lists_have_pages(keeper: Any) -> None:
    batches = keeper.messages.batches
    requests = [{"custom_id": "a", "params": ASKED}]
    ids = [batches.create(requests=requests).id for _ in range(3)][::-1]
    for id in ids:
        ended(keeper, id)
    assert [batch.id for batch in batches.list(limit=1)][:3] == ids
    assert [batch.id for batch in batches.list(limit=1, before_id=ids[2])][:2] == ids[1::-1]
    assert [batch.id for batch in keeper.beta.messages.batches.list(limit=2)][:3] == ids
