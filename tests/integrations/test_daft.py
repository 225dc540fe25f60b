"""Daft's provider: rows, what fails, structured output, and one engine for all expressions."""

from __future__ import annotations

import logging
import pickle
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import pydantic
import pytest

from cbatch.backend.fake import FakeBackend
from cbatch.engine_spec import EngineSpec
from cbatch.errors import ConfigError, UnsupportedOptionError
from tests.kinds import engine_on

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from cbatch.engine import Engine

pytest.importorskip("daft", reason="daft is not installed")

import daft
from daft.functions import prompt

from cbatch.integrations.daft import CbatchProvider

pytestmark = pytest.mark.filterwarnings("ignore")  # Daft's own

SHORT = {"max_tokens": 5, "temperature": 0, "seed": 1, "ignore_eos": True}


class Size(pydantic.BaseModel):
    """A size."""

    big: bool


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    with engine_on(FakeBackend(4, 64, 16)) as made:
        monkeypatch.setattr(EngineSpec, "shared", lambda _: nullcontext(made))
        yield made


def answers(rows: list[Any], **options: Any) -> list[Any]:
    """Return the column that `prompt` makes of rows."""
    table = daft.from_pydict({"q": rows})
    found: list[Any] = table.select(prompt(daft.col("q"), **options).alias("a")).to_pydict()["a"]
    return found


def test_rows_have_the_answers_of_the_engine(engine: Engine) -> None:
    rows = [f"Say {n}." for n in range(10)]
    chats = [
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": r}] for r in rows
    ]
    expected = [result.text for result in engine.run(chats, options=SHORT).results()]
    assert answers(rows, provider="cbatch", system_message="Be brief.", **SHORT) == expected


def test_failing_and_null_rows_cost_themselves(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    rows = ["a", "b" * 200, None, "c"]
    alone = answers(["a", "c"], provider="cbatch", **SHORT)
    expected = [alone[0], None, None, alone[1]]
    assert answers(rows, provider="cbatch", on_error="ignore", **SHORT) == expected
    with caplog.at_level(logging.WARNING, "cbatch"):
        assert answers(rows, provider="cbatch", on_error="log", **SHORT) == expected
    assert "a row failed: the prompt has" in caplog.text
    with pytest.raises(Exception, match="the prompt has"):
        answers(rows, provider="cbatch", **SHORT)


def test_wrong_options_are_refused_before_the_first_row(engine: Engine) -> None:
    with pytest.raises(UnsupportedOptionError, match="temprature"):
        prompt(daft.col("q"), provider="cbatch", temprature=0)
    with pytest.raises(ConfigError, match="parallel"):
        CbatchProvider(parallel=0)
    with pytest.raises(UnsupportedOptionError, match="paralel"):
        CbatchProvider(paralel=2)
    assert answers([b"bytes"], provider="cbatch", on_error="ignore") == [None]
    assert engine.stats().n_submitted == 0


def test_descriptor_can_be_sent_to_another_process() -> None:
    provider = CbatchProvider("mine", parallel=3)
    told = provider.get_prompter("model.gguf", return_format=Size, on_error="log", max_tokens=5)
    again = pickle.loads(pickle.dumps(told))
    assert again == told
    assert again.spec == EngineSpec("model.gguf", parallel=3)
    assert (again.get_provider(), again.get_udf_options().on_error) == ("mine", "raise")


def test_expressions_share_one_engine_and_follow_a_class(test_model: Path) -> None:
    provider = CbatchProvider(parallel=4)
    asked = {"provider": provider, "model": str(test_model), "temperature": 0, "max_tokens": 40}
    table = daft.from_pydict({"q": [f"Is {n} big?" for n in range(8)]})
    made = table.with_column("text", prompt(daft.col("q"), **asked)).with_column(
        "size", prompt(daft.col("q"), return_format=Size, **asked)
    )
    found = made.to_pydict()
    assert all(isinstance(text, str) for text in found["text"])
    assert all(size.keys() == {"big"} for size in found["size"])
    with EngineSpec(test_model, parallel=4).shared() as engine:
        assert engine.stats().n_submitted == 16
