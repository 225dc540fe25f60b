"""`choice_probs`: labels are chosen by the probability of each text, not by sampling."""

from __future__ import annotations

import csv
import json
import math
from typing import TYPE_CHECKING, Any

import pytest

import cbatch
from cbatch import BatchPrompt
from cbatch.backend.fake import FakeBackend
from cbatch.core.plan import KvCapabilities
from cbatch.errors import ConfigError, PromptTooLongError
from cbatch.files import run_file
from tests.kinds import each_kind, engine_on

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from cbatch.engine import Engine

TEXTS = ["red", "blue and white", "green"]
ASKED: dict[str, Any] = {"choice": TEXTS, "choice_probs": True}


@pytest.fixture
def engine() -> Iterator[Engine]:
    memory = KvCapabilities("partitioned", 4 * 64, can_copy=True)
    with engine_on(FakeBackend(4, 64, 16, memory=memory)) as made:
        yield made


def wanted(engine: Engine, prompt: Any) -> dict[str, float]:
    """The softmax of the texts' scores."""
    [scores] = engine.score([(prompt, TEXTS)]).results()
    weights = [math.exp(score.logprob) for score in scores]
    return {text: w / sum(weights) for text, w in zip(TEXTS, weights, strict=True)}


@each_kind
@pytest.mark.parametrize("prompt", ["What colour?", [{"role": "user", "content": "What colour?"}]])
def test_answer_is_the_likeliest_text_with_the_probability_of_each(
    engine: Engine, prompt: Any
) -> None:
    probs = wanted(engine, prompt)
    result = engine.run([prompt], options={**ASKED, "logprobs": 2}).results()[0]
    assert result.choice_probs == pytest.approx(probs)
    assert sum((result.choice_probs or {}).values()) == pytest.approx(1)
    assert result.text == max(probs, key=probs.__getitem__)
    assert result.finish_reason == "stop"
    assert b"".join(token.data for token in result.logprobs or ()) == result.text.encode()
    assert result.token_ids == tuple(token.token_id for token in result.logprobs or ())
    assert result.usage.prompt_tokens == len(engine.tokenize(prompt))
    assert result.usage.completion_tokens == len(result.token_ids)
    assert not result.choices


@each_kind
def test_one_text_is_certain_and_chunks_are_one(engine: Engine) -> None:
    response = engine.run(["a", "b"], options={"choice": ["x"], "choice_probs": True})
    chunks = list(response)
    assert [(chunk.text, chunk.finish_reason) for chunk in chunks] == [("x", "stop")] * 2
    assert engine.generate("a", choice=["x"], choice_probs=True).choice_probs == {"x": 1.0}


@each_kind
def test_text_that_does_not_fit_fails_its_request_alone(engine: Engine) -> None:
    items = [BatchPrompt(prompt="a" * 60, id="long"), BatchPrompt(prompt="a", id="short")]
    long, short = engine.run(items, options=ASKED).results(return_errors=True)
    assert isinstance(long.error, PromptTooLongError)
    assert (long.text, long.choice_probs) == ("", None)
    assert short.error is None
    assert engine.cancel("long") is False


@each_kind
def test_cancelled_request_ends_once(engine: Engine) -> None:
    response = engine.run([BatchPrompt(prompt="a", id=str(i)) for i in range(20)], options=ASKED)
    response.cancel()
    results = response.results(return_errors=True)
    assert [result.id for result in results] == [str(i) for i in range(20)]
    assert all(r.finish_reason == "cancelled" or r.choice_probs for r in results)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"choice": None}, "needs choice"),
        ({"choice": ["a", "b", "ab"]}, "'a' is the beginning of 'ab'"),
        ({"n": 2}, "n cannot"),
        ({"echo": True}, "echo cannot"),
        ({"prompt_logprobs": 1}, "prompt_logprobs cannot"),
        ({"prefill_only": True}, "prefill_only cannot"),
        ({"pause_every": 1}, "pause_every cannot"),
        ({"slot": 0}, "slot cannot"),
    ],
)
def test_options_that_do_not_go_with_it_are_refused(
    engine: Engine, more: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        engine.generate("a", **{**ASKED, **more})


def test_prompt_of_tokens_is_refused(engine: Engine) -> None:
    with pytest.raises(ConfigError, match="tokens"):
        engine.generate(BatchPrompt(tokens=[1, 2]), **ASKED)


def test_tables_and_records_have_the_probabilities(engine: Engine, tmp_path: Path) -> None:
    source = tmp_path / "in.csv"
    source.write_text("prompt\nfirst\nsecond\n")
    for name in ("out.csv", "out.jsonl"):
        run_file(source, tmp_path / name, engine=engine, options=ASKED)
    with (tmp_path / "out.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    records = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    for row, record in zip(rows, records, strict=True):
        probs = json.loads(row["choice_probs"])
        assert row["response"] == max(probs, key=probs.__getitem__)
        assert json.loads(record["choice_probs"]) == pytest.approx(probs)
    run_file(source, tmp_path / "plain.csv", engine=engine, options={"max_tokens": 2})
    assert "choice_probs" not in (tmp_path / "plain.csv").read_text()


@pytest.mark.real
def test_probabilities_are_the_same_in_company_and_workers() -> None:
    prompts = [[{"role": "user", "content": f"Is {w} a colour?"}] for w in ("red", "blue", "cats")]
    settings: dict[str, Any] = {"exact": True, "ctx_per_seq": 128}
    with cbatch.load(parallel=4, **settings) as engine:
        together = [r.choice_probs for r in engine.run(prompts, options=ASKED).results()]
    with cbatch.load(parallel=1, replicas=1, **settings) as engine:
        alone = [engine.submit(p, options=ASKED).result().choice_probs for p in prompts]
    assert together == alone
