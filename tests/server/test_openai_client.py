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
from cbatch.server.batch_index import ENDED
from tests.chat.test_tool_calls import SAID, THINK_END, Speaker
from tests.face.test_tools import TIME
from tests.server.clients import Running, running, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.real

SUM = [{"role": "user", "content": "What is 2+3?"}]


def client_of(server: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@pytest.fixture
def client(server: Running) -> Iterator[Any]:
    with client_of(server) as found:
        yield found


@pytest.fixture
def keeper(keeping_server: Running) -> Iterator[Any]:
    """A client of a server that keeps files and batches."""
    with client_of(keeping_server) as found:
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
        both = [[*c.logprobs.content] for c in (a, b)]
        assert [[t.token for t in of_one] for of_one in both] == [[t.token for t in both[0]]] * 2
        # steps of another width round otherwise
        likely = [[x.logprob for t in of_one for x in (t, *t.top_logprobs)] for of_one in both]
        assert likely[0] == pytest.approx(likely[1], abs=0.3)
        assert len(both[0]) == 24
    assert streamed.usage.total_tokens == whole.usage.total_tokens


def test_tool_is_called_and_its_answer_read() -> None:
    with (
        Engine(Speaker(SAID, n_slots=2, n_window=1024)) as engine,
        running(create_app(engine)) as server,
        client_of(server) as client,
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


# ---- files and batches ----


def requests(url: str, **bodies: dict[str, Any]) -> bytes:
    said = [{"custom_id": id, "method": "POST", "url": url, "body": b} for id, b in bodies.items()]
    return b"".join(json.dumps(each).encode() + b"\n" for each in said)


def ended(keeper: Any, id: str) -> Any:
    wait_until(lambda: keeper.batches.retrieve(id).status in ENDED)
    return keeper.batches.retrieve(id)


def test_batch_is_answered(keeper: Any, tmp_path: Path) -> None:
    sums = {f"s{i}": [{"role": "user", "content": f"What is {i}+{i}?"}] for i in range(1, 5)}
    asked = {id: {"model": "m", "messages": chat} for id, chat in sums.items()}
    path = tmp_path / "in.jsonl"
    path.write_bytes(requests("/v1/chat/completions", **asked, bad={"model": "m"}))
    with path.open("rb") as opened:
        file = keeper.files.create(file=opened, purpose="batch")
    assert keeper.files.wait_for_processing(file.id).status == "processed"
    assert keeper.files.retrieve(file.id) == file
    of_chats = {"endpoint": "/v1/chat/completions", "completion_window": "24h"}
    more = {**of_chats, "metadata": {"name": "sums"}}
    batch = keeper.batches.create(input_file_id=file.id, **more)
    assert batch.status == "validating"
    batch = ended(keeper, batch.id)
    assert (batch.status, batch.metadata) == ("completed", {"name": "sums"})
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (5, 4, 1)
    read = map(json.loads, keeper.files.content(batch.output_file_id).text.splitlines())
    answers = {each["custom_id"]: each["response"]["body"] for each in read}
    assert answers.keys() == sums.keys()
    for id, body in asked.items():
        alone = keeper.chat.completions.create(**body)
        assert answers[id]["choices"][0]["message"]["content"] == alone.choices[0].message.content
    (wrong,) = keeper.files.content(batch.error_file_id).iter_lines()
    told = json.loads(wrong)
    assert (told["custom_id"], told["response"]["status_code"]) == ("bad", 400)
    assert told["response"]["body"]["error"]["param"] == "messages"
    with pytest.raises(openai.ConflictError):
        keeper.batches.cancel(batch.id)
    assert {each.id for each in keeper.files.list()} >= {file.id, batch.output_file_id}
    assert keeper.files.delete(file.id).deleted
    with pytest.raises(openai.NotFoundError):
        keeper.files.retrieve(file.id)


def test_lists_have_pages(keeper: Any) -> None:
    asked = {"endpoint": "/v1/completions", "completion_window": "24h"}
    data = requests("/v1/completions", a={"prompt": "Once", "max_tokens": 1})
    files = [keeper.files.create(file=data, purpose="batch").id for _ in range(3)]
    ids = [keeper.batches.create(input_file_id=file, **asked).id for file in files]
    assert [batch.id for batch in keeper.batches.list(limit=2)][:3] == ids[::-1]
    assert [file.id for file in keeper.files.list(limit=1, purpose="batch")][:3] == files[::-1]
    for id in ids:
        assert ended(keeper, id).status == "completed"
