"""LangChain's chat model: answers, streams, batches, tools and structured output."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import TYPE_CHECKING, Any

import pydantic
import pytest

from cbatch.backend.fake import FakeBackend
from cbatch.errors import ConfigError, PromptTooLongError, UnsupportedOptionError
from tests.chat.test_tool_calls import SAID, Speaker
from tests.face.test_tools import TIME
from tests.kinds import engine_on

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from cbatch.engine import Engine

pytest.importorskip("langchain_core", reason="langchain-core is not installed")

from langchain_core.caches import InMemoryCache
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.globals import set_llm_cache
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage, trim_messages

from cbatch.integrations.langchain import N_AT_ONCE_PER_SLOT, ChatCbatch

SHORT = {"max_tokens": 5, "temperature": 0, "ignore_eos": True, "seed": 1}


def test_cache_keeps_engines_apart_that_answer_differently() -> None:
    texts = []
    set_llm_cache(InMemoryCache())
    try:
        for n in (5, 5, 3):
            with engine_on(FakeBackend(4, 128, 16), options={**SHORT, "max_tokens": n}) as made:
                texts.append(ChatCbatch(engine=made).invoke("hi").content)
                n_asked = made.stats().n_submitted
                assert n_asked == (0 if len(texts) == 2 else 1)
    finally:
        set_llm_cache(None)
    assert texts[0] == texts[1] != texts[2]


class Person(pydantic.BaseModel):
    """A person."""

    name: str = pydantic.Field(max_length=20)
    age: int


@pytest.fixture
def engine() -> Iterator[Engine]:
    with engine_on(FakeBackend(4, 128, 16)) as made:
        yield made


@pytest.fixture
def speaker() -> Iterator[Any]:
    """A model that thinks, speaks and calls a tool."""
    with engine_on(Speaker(SAID)) as made:
        yield ChatCbatch(engine=made)


@pytest.fixture(scope="module")
def shipped(test_model: Path) -> Iterator[Engine]:
    import cbatch

    with cbatch.load(test_model, parallel=2, options={"temperature": 0, "max_tokens": 60}) as made:
        yield made


def tool(zone: str) -> str:
    """Tell the time."""
    return zone


def test_answer_is_that_of_the_engine(engine: Engine) -> None:
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Say red."}]
    model = ChatCbatch(engine=engine, **SHORT)
    answer = model.invoke([("system", "Be brief."), ("user", "Say red.")])
    result = engine.submit(chat, options=SHORT).result()
    assert answer.content == result.text != ""
    assert answer.response_metadata["finish_reason"] == "length"
    assert answer.usage_metadata["output_tokens"] == 5
    assert answer.usage_metadata["input_tokens"] == result.usage.prompt_tokens
    assert asyncio.run(model.ainvoke([("system", "Be brief."), ("user", "Say red.")])).content == (
        result.text
    )


def test_thinking_text_and_calls_are_apart_and_read_again(speaker: Any) -> None:
    answer = speaker.invoke("What time is it?", tools=[TIME])
    assert answer.content == "Wait."
    assert answer.additional_kwargs == {"reasoning_content": "I häve to"}
    [call] = answer.tool_calls
    assert (call["name"], call["args"]) == ("get_time", {"zone": "CET"})
    assert answer.response_metadata["finish_reason"] == "tool_calls"
    assert answer.usage_metadata["output_token_details"]["reasoning"] > 0
    told = ToolMessage("12:00", tool_call_id=call["id"])
    again = speaker.invoke([("user", "What time is it?"), answer, told], tools=[TIME])
    assert again.usage_metadata["input_tokens"] > answer.usage_metadata["input_tokens"]


@pytest.mark.parametrize("is_async", [False, True])
def test_stream_joined_is_the_answer(speaker: Any, *, is_async: bool) -> None:
    async def collect() -> list[Any]:
        return [chunk async for chunk in speaker.astream("What time is it?", tools=[TIME])]

    whole = speaker.invoke("What time is it?", tools=[TIME])
    chunks = (
        asyncio.run(collect()) if is_async else [*speaker.stream("What time is it?", tools=[TIME])]
    )
    assert len(chunks) > 5
    joined = chunks[0]
    for chunk in chunks[1:]:
        joined += chunk
    assert joined.content.strip() == whole.content
    assert joined.tool_calls[0]["args"] == {"zone": "CET"}
    assert joined.usage_metadata == whole.usage_metadata | {
        "input_token_details": joined.usage_metadata["input_token_details"]
    }
    assert joined.response_metadata["finish_reason"] == "tool_calls"


def test_stream_that_is_left_frees_its_slot(engine: Engine) -> None:
    stream = ChatCbatch(engine=engine, max_tokens=100, ignore_eos=True).stream("Say red.")
    next(stream)
    stream.close()
    assert engine.cancel_all() == 0


def test_wrong_options_are_refused_by_name(engine: Engine) -> None:
    with pytest.raises(ValueError, match="temprature"):
        ChatCbatch(engine=engine, temprature=0)
    model = ChatCbatch(engine=engine, options={"max_tokens": 3}, temperature=0)
    assert model.options == {"max_tokens": 3, "temperature": 0}
    with pytest.raises(UnsupportedOptionError, match="temprature"):
        model.invoke("a", temprature=0)


@pytest.mark.parametrize("is_async", [False, True])
def test_several_answers_are_not_streamed_as_one_text(engine: Engine, *, is_async: bool) -> None:
    async def collect(model: Any) -> list[Any]:
        return [chunk async for chunk in model.astream("a")]

    model = ChatCbatch(engine=engine, n=2, max_tokens=3)
    assert len(model.generate([[HumanMessage("a")]]).generations[0]) == 2
    with pytest.raises(ConfigError, match="n=2 answers cannot be streamed"):
        asyncio.run(collect(model)) if is_async else [*model.stream("a")]


def test_stop_logprobs_and_n_are_those_of_the_call(engine: Engine) -> None:
    model = ChatCbatch(engine=engine, **SHORT)
    whole = model.invoke("Say red.").content
    assert model.invoke("Say red.", stop=[whole[2]]).content == whole.partition(whole[2])[0]
    scored = model.bind(logprobs=True).invoke("Say red.").response_metadata["logprobs"]["content"]
    told = [c.response_metadata for c in model.bind(logprobs=True).stream("Say red.")]
    streamed = [t for each in told for t in each.get("logprobs", {}).get("content", ())]
    assert len(scored) == 5
    assert [t["id"] for t in streamed] == [t["id"] for t in scored]
    several = ChatCbatch(engine=engine, **{**SHORT, "temperature": 1, "n": 3})
    [generations] = several.generate([[HumanMessage("Say red.")]]).generations
    assert len({one.text for one in generations}) == 3
    assert generations[0].message.usage_metadata["output_tokens"] == 15


@pytest.mark.parametrize("is_async", [False, True])
def test_failing_row_of_a_batch_costs_itself(engine: Engine, *, is_async: bool) -> None:
    model = ChatCbatch(engine=engine, **SHORT)
    picture = [HumanMessage([{"type": "image_url", "image_url": {"url": "data:,"}}])]
    rows: list[Any] = ["a", "b" * 200, "c", picture, "d"]

    def batch(**options: Any) -> Any:
        if is_async:
            return asyncio.run(model.abatch(rows, **options))
        return model.batch(rows, **options)

    answers = batch(return_exceptions=True)
    kinds = [AIMessage, PromptTooLongError, AIMessage, ConfigError, AIMessage]
    assert [type(answer) for answer in answers] == kinds
    assert answers[4].content == model.invoke("d").content
    with pytest.raises((PromptTooLongError, ConfigError)):
        batch()


class Together(BaseCallbackHandler):
    """Has each row wait until as many have begun as are to be in flight at once."""

    raise_error = True

    def __init__(self, n: int) -> None:
        self.barrier = threading.Barrier(n)

    def on_chat_model_start(self, *_: Any, **__: Any) -> None:
        self.barrier.wait(60)


@pytest.mark.parametrize("method", ["batch", "batch_as_completed"])
def test_batch_has_two_rows_a_slot_in_flight(method: str) -> None:
    with engine_on(FakeBackend(20, 64, 64)) as engine:
        model = ChatCbatch(engine=engine, **SHORT)
        n = N_AT_ONCE_PER_SLOT * 20  # more than LangChain has by itself, on any machine
        rows = [f"{i}" for i in range(2 * n)]
        assert len([*getattr(model, method)(rows, {"callbacks": [Together(n)]})]) == 2 * n
        few = {"callbacks": [Together(3)], "max_concurrency": 3}
        assert len([*getattr(model, method)(rows[:6], few)]) == 6


def test_chain_gives_its_batch_to_the_model(engine: Engine) -> None:
    chain = (lambda n: f"Say {n}.") | ChatCbatch(engine=engine, **SHORT)
    assert [a.content for a in chain.batch([1, 2])] == [chain.invoke(n).content for n in (1, 2)]


def test_tokens_are_counted_by_the_model(engine: Engine) -> None:
    model = ChatCbatch(engine=engine)
    assert model.get_num_tokens("abc") == engine.count_tokens("abc")
    chat = [HumanMessage("a" * 50), AIMessage("b"), HumanMessage("c")]
    assert trim_messages(chat, max_tokens=30, token_counter=model, start_on="human") == chat[2:]


def test_tool_choice_is_said_in_langchains_ways(engine: Engine) -> None:
    model = ChatCbatch(engine=engine)
    named = {"type": "function", "function": {"name": "tool"}}
    said = {True: "any", "any": "any", "auto": "auto", "tool": named}
    for given, expected in said.items():
        assert model.bind_tools([tool], tool_choice=given).kwargs["tool_choice"] == expected
    assert "tool_choice" not in model.bind_tools([tool]).kwargs
    with pytest.raises(ConfigError, match="other"):
        model.bind_tools([tool], tool_choice="other").invoke("a")


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output_is_of_the_schema(shipped: Engine, method: str) -> None:
    model = ChatCbatch(engine=shipped)
    person = model.with_structured_output(Person, method=method).invoke("Ann is 7.")
    assert isinstance(person, Person)
    mapping = model.with_structured_output(Person.model_json_schema(), method=method)
    assert mapping.invoke("Ann is 7.").keys() == {"name", "age"}


def test_structured_output_with_the_raw_answer_raises_nothing(shipped: Engine) -> None:
    model = ChatCbatch(engine=shipped).with_structured_output(Person, include_raw=True)
    whole = model.invoke("Ann is 7.")
    assert Person(**json.loads(whole["raw"].content)) == whole["parsed"]
    cut = ChatCbatch(engine=shipped, max_tokens=2).with_structured_output(Person, include_raw=True)
    said = cut.invoke("Ann is 7.")
    assert said["parsed"] is None
    assert said["parsing_error"] is not None
