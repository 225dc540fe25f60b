"""What a side in a process of its own computes: answers again, as prompts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

import cbatch
from cbatch.bench.measured import WorkRequest
from cbatch.bench.side_process import margins_of
from cbatch.bench.verdict import n_likely, unlikely

if TYPE_CHECKING:
    from pathlib import Path

DRAWN = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.0, "seed": 4}


@pytest.mark.real
@pytest.mark.parametrize("options", [{"temperature": 0}, DRAWN], ids=["greedy", "drawn"])
def test_answers_of_an_engine_are_the_models_and_junk_is_not(
    test_model: Path, options: dict[str, Any]
) -> None:
    prompt, asked = [300, 301, 302], WorkRequest("a", "", 3, 48, options)

    with cbatch.load(test_model, parallel=2, ctx_per_seq=128) as engine:
        given = {**options, "max_tokens": 48, "ignore_eos": True}
        tokens = engine.submit(cbatch.BatchPrompt(tokens=prompt), options=given).result().token_ids
        junk = [*tokens[:1], *((t + 500) % 1000 + 300 for t in tokens[1:])]
        items = [
            {"tokens": [*prompt, *said], "n_prompt": 3, "n_likely": n_likely(asked), "banned": []}
            for said in (tokens, junk)
        ]
        right, wrong = margins_of(engine, items)
    assert len(right) == len(wrong) == 48
    assert right[0] == wrong[0]
    assert unlikely([asked], [right]) == []
    assert unlikely([asked], [wrong]) != []


@pytest.mark.real
def test_banned_tokens_are_none_that_could_be_drawn(test_model: Path) -> None:
    with cbatch.load(test_model, parallel=2, ctx_per_seq=128) as engine:
        options = {"temperature": 0, "max_tokens": 1}
        first = engine.submit(cbatch.BatchPrompt(tokens=[300]), options=options).result()
        second = engine.submit(
            cbatch.BatchPrompt(tokens=[300]),
            options={**options, "logit_bias": {first.token_ids[0]: -100}},
        ).result()
        item = {"tokens": [300, *second.token_ids], "n_prompt": 1, "n_likely": 1}
        banned = [list(first.token_ids), []]
        [[margin], [behind]] = margins_of(engine, [{**item, "banned": ids} for ids in banned])
    assert margin == pytest.approx(0, abs=0.01)
    assert behind < 0
