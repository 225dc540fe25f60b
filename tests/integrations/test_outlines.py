"""Outlines' model: inputs, output types, batches, streams, and Outlines' own generator and application."""

from __future__ import annotations

import asyncio
import json
from enum import Enum
from typing import TYPE_CHECKING, Any, Literal

import pydantic
import pytest

from cbatch.backend.fake import FakeBackend
from cbatch.errors import ConfigError, PromptTooLongError, UnsupportedOptionError
from cbatch.response import BatchError
from tests.kinds import engine_on

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from cbatch.engine import Engine

pytest.importorskip("outlines", reason="outlines is not installed")

import outlines
from outlines.inputs import Chat
from outlines.types import CFG, Regex

from cbatch.integrations.outlines import AsyncCbatch, Cbatch

SHORT = {"max_tokens": 5, "temperature": 0, "seed": 1, "ignore_eos": True}


class Person(pydantic.BaseModel):
    """A person."""

    name: str = pydantic.Field(max_length=20)
    age: int = pydantic.Field(ge=0, le=99)


class Colour(Enum):
    """A colour."""

    red = "dark red"
    blue = "blue (light)"


@pytest.fixture
def engine() -> Iterator[Engine]:
    with engine_on(FakeBackend(2, 64, 16)) as made:
        yield made


@pytest.fixture(scope="module")
def shipped(test_model: Path) -> Iterator[Engine]:
    import cbatch

    with cbatch.load(test_model, parallel=4, options={"temperature": 0, "max_tokens": 60}) as made:
        yield made


def test_answers_are_those_of_the_engine(engine: Engine) -> None:
    chat = [{"role": "user", "content": "Say red."}]
    model = Cbatch(engine)
    raw = engine.submit("Say red.", options=SHORT).result().text
    said = engine.submit(chat, options=SHORT).result().text
    assert model("Say red.", **SHORT) == raw != said
    assert model(Chat(chat), **SHORT) == said
    assert model.batch(["Say red.", Chat(chat)], **SHORT) == [raw, said]
    assert "".join(model.stream("Say red.", **SHORT)) == raw
    assert [*map(type, model.batch(["a", "b"], n=2, **SHORT))] == [list, list]
    assert len(model.batch([f"{n}" for n in range(20)], **SHORT)) == 20
    assert engine.stats().n_active_max == 2


def test_async_answers_are_those_of_the_engine(engine: Engine) -> None:
    async def ask() -> tuple[Any, ...]:
        model = AsyncCbatch(engine)
        parts = [part async for part in model.stream("Say red.", **SHORT)]
        whole = await model("Say red.", **SHORT), await model.batch(["Say red."] * 3, **SHORT)
        return "".join(parts), *whole

    raw = engine.submit("Say red.", options=SHORT).result().text
    assert asyncio.run(ask()) == (raw, raw, [raw] * 3)


def test_failures_are_raised_by_name(engine: Engine) -> None:
    model = Cbatch(engine)
    with pytest.raises(PromptTooLongError):
        model("a" * 100)
    with pytest.raises(PromptTooLongError):
        [*model.stream("a" * 100)]
    with pytest.raises(BatchError) as caught:
        model.batch(["a", "b" * 100], **SHORT)
    assert [result.error is None for result in caught.value.results] == [True, False]
    with pytest.raises(ConfigError, match="n=2 answers cannot be streamed"):
        [*model.stream("a", n=2)]
    with pytest.raises(ConfigError, match="list"):
        model(["a", "a picture"])
    with pytest.raises(UnsupportedOptionError, match="temprature"):
        model("a", temprature=0)


def test_stream_that_is_left_frees_its_slot(engine: Engine) -> None:
    stream = Cbatch(engine).stream("a", pause_every=1, **SHORT)
    next(stream)
    stream.close()
    assert engine.cancel_all() == 0


@pytest.mark.parametrize(
    ("output_type", "accepted"),
    [
        (Literal["yes", "no (never)"], ["yes", "no (never)"]),
        (Colour, ["dark red", "blue (light)"]),
        (bool, ["True", "False"]),
        (Regex("[ab]{2}"), ["aa", "ab", "ba", "bb"]),
        (CFG('start: "x" | "y"'), ["x", "y"]),
    ],
    ids=["literal", "enum", "bool", "regex", "grammar"],
)
def test_answer_is_of_its_type(shipped: Engine, output_type: Any, accepted: list[str]) -> None:
    assert set(Cbatch(shipped).batch(["Say it.", "What?"], output_type)) <= {*accepted}


def test_generator_and_application_of_outlines_take_the_model(shipped: Engine) -> None:
    model = Cbatch(shipped)
    generate = outlines.Generator(model, Person)
    answers = [generate("Ann is 7."), *generate.batch(["Ben is 8.", "Cleo is 9."])]
    assert all(json.loads(answer).keys() == {"name", "age"} for answer in answers)
    assert isinstance(Person.model_validate_json("".join(generate.stream("Ann is 7."))), Person)
    template = outlines.Template.from_string("Is {{ thing }} blue?")
    application = outlines.Application(template, Literal["yes", "no"])
    assert application(model, {"thing": "the sky"}) in ("yes", "no")

    async def ask() -> Any:
        return await outlines.Generator(AsyncCbatch(shipped), int).batch(["1", "2"], max_tokens=20)

    assert all(answer.lstrip("-").isdigit() for answer in asyncio.run(ask()))
