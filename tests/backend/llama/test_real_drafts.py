"""Draft tokens on llama.cpp: greedy answers of a text that repeats itself, with and without, in every memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

import cbatch
from cbatch.messages import BatchPrompt

if TYPE_CHECKING:
    from pathlib import Path

    from cbatch.stats import EngineStats

pytestmark = pytest.mark.real

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


@pytest.mark.parametrize("kv", ["partitioned", "unified"])
@pytest.mark.parametrize(
    "options",
    [{}, {"stop": [";"], "include_stop": True}, {"repeat_penalty": 1.1}],
    ids=["plain", "stop", "penalty"],
)
def test_answers_of_one_sequence_are_those_without_drafts(
    test_model: Path, kv: str, options: dict[str, Any]
) -> None:
    plain, _ = answers(test_model, 1, options, kv=kv, speculate="off")
    found, stats = answers(test_model, 1, options, kv=kv, speculate="auto")
    assert found == plain
    assert stats.n_accepted_tokens <= stats.n_draft_tokens


def test_many_answers_end_and_drafts_are_counted(test_model: Path) -> None:
    found, stats = answers(test_model, 9, {"max_tokens": 200}, speculate="auto")
    assert [len(tokens) for tokens, *_ in found] == [200] * 9  # type: ignore[arg-type]
    assert 0 <= stats.n_accepted_tokens <= stats.n_draft_tokens


def test_exact_has_no_drafts(test_model: Path) -> None:
    _, stats = answers(test_model, 2, {}, exact=True, speculate="auto")
    assert stats.n_draft_tokens == 0
