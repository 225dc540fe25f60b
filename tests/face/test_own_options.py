"""An option that is wrong for one item fails it alone; one of the whole batch is refused before anything runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from cbatch.backend.fake import FakeBackend
from cbatch.errors import ConfigError, DuplicateIdError
from cbatch.messages import BatchPrompt
from cbatch.response import BatchError
from tests.kinds import Reason, each_kind, engine_on, no_pool
from tests.places import ENDLESS
from tests.runtime.backends import GatedBackend

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cbatch.engine import Engine
    from cbatch.messages import Prompt
    from cbatch.response import BatchOutputChunk

pytestmark = each_kind

SHORT = {"max_tokens": 3, "temperature": 0, "ignore_eos": True, "seed": 1}
WRONG: dict[str, Any] = {
    "slot": 9,
    "priority": 1,
    "adapter": "none of that name",
    "n_keep": 4,
    "cache_required": True,
    "stop_token_ids": [10**6],
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
}


@pytest.fixture
def engine() -> Iterator[Engine]:
    with engine_on(FakeBackend(2, 64, 16), options=SHORT) as made:
        yield made


@pytest.mark.parametrize("name", WRONG)
def test_item_with_a_wrong_option_of_its_own_fails_alone(engine: Engine, name: str) -> None:
    wrong = BatchPrompt(prompt="b", id="b", options={name: WRONG[name]})
    given: list[Prompt] = ["a", wrong, "c", BatchPrompt(prompt="d", options={"n": 2})]
    response = engine.run(given)
    chunks = list(response)
    first, failed, *others = response.results(return_errors=True)
    assert [r.error for r in (first, *others)] == [None] * 3
    assert (failed.id, failed.finish_reason, failed.text) == ("b", "error", "")
    assert isinstance(failed.error, ConfigError)
    assert name in str(failed.error)
    [last] = [chunk for chunk in chunks if chunk.id == "b"]
    assert str(last.error) == str(failed.error)
    with pytest.raises(BatchError, match="1 of 4 items failed"):
        response.results()
    assert response.n_open == 0


def test_every_item_may_be_refused(engine: Engine) -> None:
    wrong = [BatchPrompt(prompt="b", options={"slot": n, "n": 1}) for n in (5, 6, 7)]
    results = engine.run(wrong).results(return_errors=True)
    assert [type(r.error) for r in results] == [ConfigError] * 3
    assert engine.stats().n_submitted == 0


def test_only_item_of_a_batch_is_refused_at_once(engine: Engine) -> None:
    with pytest.raises(ConfigError, match="slot=9"):
        engine.run([BatchPrompt(prompt="b", options={"slot": 9})])
    with pytest.raises(ConfigError, match="slot=9"):
        engine.generate("b", slot=9)


@pytest.mark.parametrize("own", [None, {"max_tokens": 2}])
def test_option_of_the_whole_batch_is_refused_at_once(engine: Engine, own: Any) -> None:
    given: list[Prompt] = ["a", BatchPrompt(prompt="b", options=own)]
    with pytest.raises(ConfigError, match="priority=1 has no effect"):
        engine.run(given, options={"priority": 1})
    assert engine.stats().n_submitted == 0


def test_refused_batch_tells_nobody_of_an_item_that_was_refused_before(engine: Engine) -> None:
    wrong = BatchPrompt(prompt="b", id="b", options={"slot": 9})
    with pytest.raises(DuplicateIdError):
        engine.run([wrong, BatchPrompt(prompt="a", id="a"), BatchPrompt(prompt="c", id="a")])
    assert engine.run([wrong, BatchPrompt(prompt="a", id="a")]).results(return_errors=True)[1].text


@no_pool(Reason.ONE_BACKEND)
def test_last_chunk_tells_what_never_ran_from_what_is_partial() -> None:
    with engine_on(GatedBackend(1, ENDLESS, 64), options={"ignore_eos": True}) as engine:
        response = engine.run(["a", "b"])
        ends: dict[str, BatchOutputChunk] = {}
        for chunk in response:
            if chunk.id == "0" and not ends:
                response.cancel()
            if chunk.finish_reason is not None:
                ends[chunk.id] = chunk
    assert [ends[id].finish_reason for id in "01"] == ["cancelled"] * 2
    assert ends["0"].error is None
    assert "before it got a slot" in str(ends["1"].error)
