"""Draft tokens on llama.cpp: greedy answers of a text that repeats itself, with and without, in every memory."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pytest

import cbatch
from cbatch.errors import ModelLoadError
from cbatch.messages import BatchPrompt

if TYPE_CHECKING:
    from cbatch.stats import EngineStats
    from tests.conftest import SynthFactory

pytestmark = pytest.mark.real

DRAFT = Path(cbatch.__file__).parent / "models/draft.gguf"

GREEDY = {"temperature": 0, "max_tokens": 60, "ignore_eos": True}


def prompts(n: int) -> list[BatchPrompt]:
    lines = [f"row {j}: name=item{j % 3}, price={j % 3}, stock=4;\n" for j in range(9)]
    return [BatchPrompt(prompt=f"Table {i}\n" + "".join(lines)) for i in range(n)]


def answers(
    model: Path | None, n: int, options: dict[str, Any], **given: Any
) -> tuple[list[tuple[object, ...]], EngineStats]:
    """Return tokens, texts and ends of answers that run together, and the engine's figures."""
    with cbatch.load(model, parallel=4, ctx_per_seq=1024, **given) as engine:
        engine.run(prompts(n), options={**GREEDY, "max_tokens": 8}).results()  # what steps cost
        results = engine.run(prompts(n), options={**GREEDY, **options}).results()
        return [(r.token_ids, r.text, r.finish_reason) for r in results], engine.stats()


@pytest.mark.parametrize(
    ("kv", "options", "speculate"),
    [
        ("partitioned", {}, "auto"),
        ("unified", {"stop": [";"], "include_stop": True}, "auto"),
        ("partitioned", {"repeat_penalty": 1.1}, "auto"),
        ("partitioned", {}, 1),
        ("unified", {}, 7),
    ],
)
def test_answers_of_one_sequence_are_those_without_drafts(
    test_model: Path, kv: str, options: dict[str, Any], speculate: Any
) -> None:
    plain, _ = answers(test_model, 1, options, kv=kv, speculate="off")
    found, stats = answers(test_model, 1, options, kv=kv, speculate=speculate)
    assert found == plain
    assert 0 <= stats.n_accepted_tokens <= stats.n_draft_tokens
    assert speculate == "auto" or stats.n_draft_tokens > 0


def test_exact_answers_have_no_drafts_and_are_those_without(test_model: Path) -> None:
    plain, _ = answers(test_model, 4, {"logprobs": True}, exact=True, speculate="off")
    found, stats = answers(test_model, 4, {"logprobs": True}, exact=True, speculate="auto")
    assert stats.n_draft_tokens == 0
    assert found == plain
    alone, _ = answers(test_model, 1, {}, exact=True, speculate="auto")
    assert alone[0][0] == found[0][0]


def test_draft_model_alone_guesses_tokens(test_model: Path) -> None:
    chats = [[{"role": "user", "content": "Tell me a short story about a fox in the castle."}]]
    with cbatch.load(
        test_model, parallel=1, ctx_per_seq=512, speculate="draft", draft=DRAFT
    ) as engine:
        for _ in range(4):
            [result] = engine.run(chats, options={"temperature": 0}).results()
        stats = engine.stats()
    assert stats.n_draft_tokens == stats.n_model_draft_tokens
    assert result.timings.n_draft_tokens == result.timings.n_model_draft_tokens


@pytest.mark.parametrize("kv", ["partitioned", "unified"])
def test_draft_model_guesses_what_the_model_says(test_model: Path, kv: Literal["unified"]) -> None:
    stories = [
        f"Tell me a short story about a {a} in the castle." for a in ("fox", "owl", "penguin")
    ]
    chats = [[{"role": "user", "content": text}] for text in stories]
    with cbatch.load(test_model, parallel=3, ctx_per_seq=512, kv=kv, draft=DRAFT) as engine:
        for _ in range(4):
            results = engine.run(chats, options={"temperature": 0}).results()
        stats = engine.stats()
    assert all(r.finish_reason == "stop" for r in results)
    assert 0 <= stats.n_model_accepted_tokens <= stats.n_model_draft_tokens <= stats.n_draft_tokens


def test_slots_may_be_more_than_the_ubatch_of_the_draft_model(test_model: Path) -> None:
    chats = [[{"role": "user", "content": f"Tell me a story about {n} owls."}] for n in range(12)]
    with cbatch.load(
        test_model, parallel=12, ctx_per_seq=256, n_ubatch=8, speculate=4, draft=DRAFT
    ) as engine:
        results = engine.run(chats, options={"temperature": 0, "max_tokens": 40}).results()
        stats = engine.stats()
    assert all(r.finish_reason in ("stop", "length") for r in results)
    assert stats.n_model_draft_tokens > 0


@pytest.mark.parametrize(
    ("draft", "words"),
    [
        ("test", "must have the same vocabulary"),
        ("missing.gguf", "missing.gguf"),
        ("mamba", "cannot be removed"),
    ],
)
def test_draft_model_that_cannot_draft_is_refused(
    synth: SynthFactory, draft: str, words: str
) -> None:
    path = draft if draft.endswith(".gguf") else synth(draft)
    model = None if draft == "test" else synth("test")
    with pytest.raises(ModelLoadError, match=words):
        cbatch.load(model, parallel=2, draft=path)


def test_draft_model_without_effect_is_told(
    synth: SynthFactory, test_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "cbatch"):
        cbatch.load(synth("mamba"), parallel=2, draft=synth("test")).close()
        assert "draft model has no effect" in caplog.text
        cbatch.load(DRAFT, parallel=2, draft=test_model).close()
        assert "will hardly make answers faster" in caplog.text
