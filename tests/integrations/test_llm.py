"""The plugin of `llm`: chats, events, options, schemas, tools, and models that are added."""

from __future__ import annotations

import asyncio
import json
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import click
import pytest
from click.testing import CliRunner

from cbatch.backend.fake import FakeBackend
from cbatch.engine_spec import EngineSpec
from cbatch.errors import ConfigError
from cbatch.response import BatchError
from tests.chat.test_tool_calls import SAID, Speaker
from tests.integrations.test_page import register_llm_plugin
from tests.kinds import engine_on

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from cbatch.engine import Engine

pytest.importorskip("llm", reason="llm is not installed")

import llm

from cbatch.integrations import llm as plugin

SHORT = {"max_tokens": 5, "temperature": 0, "ignore_eos": True, "seed": 1}


@pytest.fixture(autouse=True)
def registered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Register the plugin, with no models added."""
    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path))
    register_llm_plugin()


def lend(monkeypatch: pytest.MonkeyPatch, engine: Engine) -> None:
    """Have an engine take the place of each that a model would load."""
    monkeypatch.setattr(EngineSpec, "shared", lambda _: nullcontext(engine))


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    with engine_on(FakeBackend(2, 128, 16)) as made:
        lend(monkeypatch, made)
        yield made


def text_of(model: Any, prompt: str, **options: Any) -> str:
    """Return the answer of a model for plain code or for async code."""
    if isinstance(model, llm.Model):
        return str(model.prompt(prompt, **options).text())

    async def ask() -> str:
        return str(await model.prompt(prompt, **options).text())

    return asyncio.run(ask())


@pytest.mark.parametrize("get", [llm.get_model, llm.get_async_model])
def test_answer_is_that_of_the_engine(engine: Engine, get: Any) -> None:
    answer = engine.chat("Say red.", **SHORT)
    assert text_of(get("cbatch"), "Say red.", **SHORT) == answer.text != ""


def test_conversation_is_told_from_its_beginning(engine: Engine) -> None:
    conversation = llm.get_model("cbatch").conversation()
    first = conversation.prompt("Hi", system="Be brief.", **SHORT)
    said = first.text()
    again = conversation.prompt("Again", **SHORT)
    again.text()
    chat = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": said},
        {"role": "user", "content": "Again"},
    ]
    assert again.usage().input == engine.count_tokens(chat)
    assert again.text() == engine.submit(chat, options=SHORT).result().text
    assert again.response_json["finish_reason"] == "length"


def test_options_are_checked_and_listed(engine: Engine) -> None:
    model = llm.get_model("cbatch")
    assert {"temperature", "max_tokens", "stop", "regex"} <= model.Options.model_fields.keys()
    assert not {"n", "tools", "slot"} & model.Options.model_fields.keys()
    with pytest.raises(ValueError, match="temprature"):
        model.prompt("a", temprature=0)
    with pytest.raises(ConfigError, match="temperature"):
        model.prompt("a", temperature=-1).text()


@pytest.mark.parametrize("is_async", [False, True])
def test_thinking_text_and_calls_are_events(
    monkeypatch: pytest.MonkeyPatch, *, is_async: bool
) -> None:
    def get_time(zone: str) -> str:
        """Tell the time."""
        return f"noon in {zone}"

    async def collect(response: Any) -> list[Any]:
        return [event async for event in response.astream_events()]

    with engine_on(Speaker(SAID)) as engine:
        lend(monkeypatch, engine)
        get = llm.get_async_model if is_async else llm.get_model
        response = get("cbatch").prompt("What time is it?", tools=[get_time])
        events = asyncio.run(collect(response)) if is_async else [*response.stream_events()]
        kinds = [event.type for event in events]
        assert kinds == sorted(
            kinds, key=["reasoning", "text", "tool_call_name", "tool_call_args"].index
        )
        assert {*kinds} == {"reasoning", "text", "tool_call_name", "tool_call_args"}
        [call] = response.tool_calls_or_raise()
        assert (call.name, call.arguments) == ("get_time", {"zone": "CET"})
        if not is_async:
            assert response.execute_tool_calls()[0].output == "noon in CET"


def test_tools_are_asked_and_their_answers_read(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[str]()

    def get_time(zone: str) -> str:
        """Tell the time."""
        asked.append(zone)
        return "noon"

    with engine_on(Speaker(SAID)) as engine:
        lend(monkeypatch, engine)
        talk = llm.get_model("cbatch").conversation(tools=[get_time], chain_limit=2)
        chain = talk.chain("What time is it?")
        with pytest.raises(ValueError, match="limit"):
            chain.text()
    first, second = talk.responses
    assert asked == ["CET"]
    assert second.usage().input > first.usage().input


def test_stream_that_is_left_frees_its_slot(engine: Engine) -> None:
    stream = iter(llm.get_model("cbatch").prompt("a", max_tokens=100, ignore_eos=True))
    next(stream)
    stream.close()
    assert engine.cancel_all() == 0


def test_model_that_is_added_is_registered(tmp_path: Path, test_model: Path) -> None:
    cli = click.Group()
    plugin.register_commands(cli)
    wrong = CliRunner().invoke(cli, ["cbatch", "add", "mine", "m.gguf", "-s", "paralel", "2"])
    assert wrong.exit_code == 1
    assert "paralel" in wrong.output
    added = CliRunner().invoke(
        cli, ["cbatch", "add", "mine", str(test_model), "-s", "parallel", "2"]
    )
    assert added.output == f"llm -m mine answers with {test_model}\n"
    assert json.loads((tmp_path / "cbatch.json").read_text()) == {
        "mine": {"model": str(test_model), "parallel": 2}
    }
    age = {"type": "integer", "minimum": 0, "maximum": 99}
    schema = {"type": "object", "properties": {"age": age}, "required": ["age"]}
    with EngineSpec(test_model, parallel=2).shared() as engine:
        answer = llm.get_model("mine").prompt("Ann is 7.", schema=schema, max_tokens=40)
        assert json.loads(answer.text()).keys() == {"age"}
        assert engine.stats().n_submitted == 1  # the engine is shared


def test_texts_are_embedded_by_the_command(engine: Engine, tmp_path: Path) -> None:
    from llm.cli import cli

    found = CliRunner().invoke(cli, ["embed", "-m", "cbatch", "-c", "red"])
    expected = engine.embed(["red"]).array()[0].tolist()
    assert json.loads(found.output) == pytest.approx(expected)
    lines = [{"id": str(i), "text": f"text {i}"} for i in range(20)]
    data, kept = tmp_path / "in.json", str(tmp_path / "e.db")
    data.write_text(json.dumps(lines))
    words = ["embed-multi", "all", str(data), "-m", "cbatch", "-d", kept, "--store"]
    assert not CliRunner().invoke(cli, words).exception
    with pytest.raises(BatchError, match="empty"):
        list(llm.get_embedding_model("cbatch").embed_multi(["red", ""]))
    near = CliRunner().invoke(cli, ["similar", "all", "-d", kept, "-c", "text 7", "-n", "1"])
    assert json.loads(near.output)["id"] == "7"
