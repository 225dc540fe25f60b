"""The provider of inspect_ai: configuration, tools, schemas, what went wrong, and a whole evaluation."""

from __future__ import annotations

import asyncio
import json
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import pytest

from cbatch.backend.fake import FakeBackend
from cbatch.engine_spec import EngineSpec
from cbatch.errors import ConfigError, UnsupportedOptionError
from tests.chat.test_tool_calls import SAID, Speaker
from tests.kinds import engine_on

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from cbatch.engine import Engine

pytest.importorskip("inspect_ai", reason="inspect_ai is not installed")

from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.model import (
    ChatMessageAssistant,
    ChatMessageSystem,
    ChatMessageTool,
    ChatMessageUser,
    ContentImage,
    GenerateConfig,
    ResponseSchema,
    get_model,
)
from inspect_ai.scorer import includes
from inspect_ai.solver import generate
from inspect_ai.tool import ToolCall, ToolFunction, ToolInfo, ToolParams
from inspect_ai.util import JSONSchema, json_schema

from cbatch.integrations.inspect import N_AT_ONCE_PER_SLOT, CbatchAPI

pytestmark = pytest.mark.filterwarnings("ignore")  # those of inspect_ai's own libraries

SHORT = {"max_tokens": 5, "temperature": 0, "seed": 1}
ENDLESS = {"extra_body": {"ignore_eos": True}}
TIME = ToolInfo(
    name="get_time",
    description="Tell the time.",
    parameters=ToolParams(properties={"zone": JSONSchema(type="string")}, required=["zone"]),
)


def model_over(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a model that computes with this engine."""
    monkeypatch.setattr(EngineSpec, "shared", lambda _: nullcontext(engine))
    return get_model("cbatch/any", memoize=False)


@pytest.fixture
def engine() -> Iterator[Engine]:
    with engine_on(FakeBackend(2, 128, 16)) as made:
        yield made


@pytest.fixture
def model(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Any:
    return model_over(engine, monkeypatch)


def ask(model: Any, input: Any, tools: Any = (), choice: Any = None, **config: Any) -> Any:
    return asyncio.run(
        model.generate(input, tools=[*tools], tool_choice=choice, config=GenerateConfig(**config))
    )


def test_answer_is_that_of_the_engine(engine: Engine, model: Any) -> None:
    chat = [ChatMessageSystem(content="Be brief."), ChatMessageUser(content="Say red.")]
    told = [{"role": m.role, "content": m.content} for m in chat]
    output = ask(model, chat, **SHORT, **ENDLESS, stop_seqs=["never"], logprobs=True)
    result = engine.submit(told, options=SHORT | {"ignore_eos": True}).result()
    assert output.completion == result.text != ""
    assert output.stop_reason == "max_tokens"
    assert output.usage.output_tokens == 5
    used = output.usage.input_tokens + output.usage.input_tokens_cache_read
    assert used == result.usage.prompt_tokens
    assert len(output.choices[0].logprobs.content) == 5


def test_thinking_and_calls_are_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    with engine_on(Speaker(SAID)) as engine:
        model = model_over(engine, monkeypatch)
        output = ask(model, "What time is it?", [TIME], "auto")
        message = output.message
        assert [part.type for part in message.content] == ["reasoning", "text"]
        assert (message.content[0].reasoning, message.text) == ("I häve to", "Wait.")
        [call] = message.tool_calls
        assert (call.function, call.arguments) == ("get_time", {"zone": "CET"})
        assert output.stop_reason == "tool_calls"
        again = [
            ChatMessageUser(content="What time is it?"),
            message,
            ChatMessageTool(content="12:00", tool_call_id=call.id, function="get_time"),
        ]
        assert ask(model, again, [TIME], "auto").completion == "Wait."


def test_prompt_that_is_too_long_is_an_answer_with_its_reason(model: Any) -> None:
    output = ask(model, "a" * 500)
    assert output.stop_reason == "model_length"
    assert "505 tokens" in output.completion


def test_what_cannot_be_read_is_refused_by_name(model: Any) -> None:
    picture = ChatMessageUser(content=[ContentImage(image="data:image/png;base64,AAAA")])
    with pytest.raises(ConfigError, match="ContentImage"):
        ask(model, [picture])
    with pytest.raises(UnsupportedOptionError, match="temprature"):
        ask(model, "a", extra_body={"temprature": 0})
    with pytest.raises(ConfigError, match="base_url"):
        get_model("cbatch/shipped", base_url="http://127.0.0.1", memoize=False)
    with pytest.raises(UnsupportedOptionError, match="paralel"):
        get_model("cbatch/shipped", paralel=2, memoize=False)


def test_request_of_a_cancelled_task_is_cancelled(engine: Engine, model: Any) -> None:
    async def leave() -> None:
        begun, loop = asyncio.Event(), asyncio.get_running_loop()
        engine.record_steps(lambda _: loop.call_soon_threadsafe(begun.set))
        task = asyncio.create_task(
            model.generate("a", config=GenerateConfig(extra_body={"pause_every": 1}))
        )
        await asyncio.wait_for(begun.wait(), 60)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(leave())
    assert engine.cancel_all() == 0


def test_limits_and_tokens_are_those_of_the_engine(engine: Engine, model: Any) -> None:
    assert model.api.max_connections() == N_AT_ONCE_PER_SLOT * 2
    assert asyncio.run(model.api.tokenize("abc")) == engine.tokenize("abc")
    assert asyncio.run(model.api.count_text_tokens("abc")) == engine.count_tokens("abc")
    others = {
        get_model("cbatch/any", memoize=False, parallel=n).api.connection_key() for n in (2, 3)
    }
    assert len(others | {model.api.connection_key()}) == 3


def test_demanded_tool_and_schema_are_followed(test_model: Path) -> None:
    model = get_model(f"cbatch/{test_model}", parallel=2, memoize=False)
    for choice in ("any", ToolFunction(name="get_time")):
        [call] = ask(
            model, "What time is it in CET?", [TIME], choice, max_tokens=200, temperature=0
        ).message.tool_calls
        assert call.function == "get_time"
        assert isinstance(call, ToolCall)
        assert call.arguments.keys() == {"zone"}
    shape = ResponseSchema(
        name="size",
        json_schema=JSONSchema(
            type="object", properties={"big": json_schema(bool)}, required=["big"]
        ),
    )
    assert json.loads(
        ask(model, "Big?", response_schema=shape, max_tokens=40).completion
    ).keys() == {"big"}
    assert isinstance(ask(model, "Say red.").message, ChatMessageAssistant)
    api = model.api
    model.api.close()
    model.api.close()  # a second time has no effect
    assert isinstance(api, CbatchAPI)


@pytest.mark.real
@pytest.mark.slow
def test_evaluation_runs(tmp_path: Path) -> None:
    samples = [Sample(input=f"What is {n}+3?", target=str(n + 3)) for n in range(1, 6)]
    task = Task(dataset=samples, solver=generate(), scorer=includes())
    [log] = eval(
        task,
        model="cbatch/shipped",
        model_args={"parallel": 2},
        temperature=0,
        display="none",
        log_dir=str(tmp_path),
    )
    assert log.status == "success"
    assert log.results is not None
    assert log.results.scores[0].metrics["accuracy"].value == 1
