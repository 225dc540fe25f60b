"""Architectures of every memory through the real engine: answers in company are those of an engine that computes one
token at a time, alone."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest

import cbatch
from cbatch.errors import GrammarError, ModelLoadError, UnsupportedTaskError
from cbatch.messages import BatchPrompt
from cbatch.verify.one_model import difference, rounding_of
from tests.zoo import REFUSED, ZOO, write_arch
from tests.zoo.metadata import N_VOCAB

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from cbatch.response import BatchResult

pytestmark = pytest.mark.real

TRIED = {
    "cells": ["deepseek2", "deepseek32", "gpt2", "llama-q4_k_m", "phi3", "qwen3moe"],
    "window": ["cohere2", "gemma3-q8_0", "gemma4", "gpt-oss", "llama4"],
    "state": ["mamba", "mamba2", "rwkv6", "rwkv7"],
    "hybrid": [
        "falcon-h1",
        "jamba",
        "kimi-linear",
        "lfm2",
        "nemotron_h_moe",
        "qwen35",
        "qwen3next",
    ],
}
"""By memory: latents, two caches, learned positions, experts; shared layers, sinks, chunks; convolutions, deltas."""

SIZES = (3, 70, 9, 5, 41, 17, 66, 33)
N_COMMON = 40
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 10, "ignore_eos": True, "logprobs": 5}


def type_of(name: str) -> str:
    """Return the weights' type of a model of the zoo."""
    type = name.rpartition("-")[2]
    return type if type in ("q8_0", "q4_k_m") else "f32"


def prompts() -> list[tuple[int, ...]]:
    """Prompts shorter and longer than a window; half of them begin alike."""
    dice = random.Random(7)
    common = dice.choices(range(N_VOCAB), k=N_COMMON)
    made = [dice.choices(range(N_VOCAB), k=n) for n in SIZES]
    return [(*common, *p) if i % 2 else tuple(p) for i, p in enumerate(made)]


def answers(engine: cbatch.Engine, asked: Sequence[tuple[int, ...]]) -> list[BatchResult]:
    return engine.run([BatchPrompt(tokens=p) for p in asked], options=GREEDY).results()


def settings() -> list[Any]:
    """Every model in slots of its own, in a pool if it has cells, or in turns if it has states, one after the other."""
    found = []
    for memory, names in TRIED.items():
        others: list[dict[str, Any]] = [{}]
        if memory != "state":
            others.append({"kv": "unified"})
        if memory in ("state", "hybrid"):
            others.append({"policy": "round_robin", "quantum": 6})
        for i, name in enumerate(names):
            assert ZOO[name] == memory
            options = others[i % len(others)]
            found.append(pytest.param(name, options, id=", ".join([name, *options][:2])))
    return found


@pytest.mark.parametrize(("name", "options"), settings())
def test_answers_in_company_are_those_alone(
    name: str,
    options: dict[str, Any],
    zoo: Callable[[str], Path],
) -> None:
    with cbatch.load(zoo(name), parallel=1, n_ubatch=1, ctx_per_seq=256) as engine:
        expected = [answers(engine, [prompt])[0] for prompt in prompts()]
    with cbatch.load(zoo(name), parallel=4, ctx_per_seq=256, **options) as engine:
        assert engine.company.startswith("together: ")
        assert engine.parallel == 4
        found = answers(engine, prompts())
    rounding = rounding_of(type_of(name))
    assert [
        difference(a.logprobs or (), b.logprobs or (), rounding)
        for a, b in zip(expected, found, strict=True)
    ] == [""] * len(SIZES)
    assert len({token for result in expected for token in result.token_ids}) > 8  # not one alone


EMBEDS = ("gemma-embedding", "t5encoder")
"""Models of `REFUSED` that load, for embeddings."""


@pytest.mark.parametrize("name", EMBEDS)
def test_model_that_only_embeds_refuses_prompts(name: str, zoo: Callable[[str], Path]) -> None:
    with cbatch.load(zoo(name)) as engine:
        assert not engine.can_generate
        with pytest.raises(UnsupportedTaskError, match="cannot generate"):
            engine.run(["red"])
        assert engine.embed([[5, 6, 7]]).array().shape == (1, engine.n_embedding)


@pytest.mark.parametrize("name", [name for name in REFUSED if name not in EMBEDS])
def test_model_that_generates_no_text_is_refused_by_name(
    name: str, zoo: Callable[[str], Path]
) -> None:
    with pytest.raises(ModelLoadError) as caught:
        cbatch.load(zoo(name))
    assert REFUSED[name] in str(caught.value)
    assert f"({name}" in str(caught.value)


def test_model_without_a_vocabulary_works_with_token_ids(
    zoo: Callable[[str], Path], tmp_path: Path
) -> None:
    path = write_arch("qwen35", tmp_path / "model.gguf", vocabulary="none")
    said = {**GREEDY, "echo": True, "dry_multiplier": 0.5}
    found = []
    for file in (path, zoo("qwen35")):
        with cbatch.load(file, parallel=2) as engine:
            asked = [BatchPrompt(tokens=p) for p in prompts()]
            found.append(engine.run(asked, options=said).results())
    assert [r.token_ids for r in found[0]] == [r.token_ids for r in found[1]]
    assert {r.text for r in found[0]} == {""}
    assert all(r.text for r in found[1])


def test_text_for_a_model_without_a_vocabulary_ends_its_request_alone(tmp_path: Path) -> None:
    path = write_arch("llama", tmp_path / "model.gguf", vocabulary="none")
    items = [
        BatchPrompt(prompt="Hi"),
        BatchPrompt(tokens=(1, 2), options={"regex": "a+"}),
        BatchPrompt(tokens=(1, 2), options={"stop": "a"}),
    ]
    with cbatch.load(path, parallel=2) as engine:
        assert engine.model_facts.n_vocab == N_VOCAB
        text, constrained, stopped = engine.run(items, options=GREEDY).results(return_errors=True)
        assert "no vocabulary" in str(text.error)
        assert isinstance(constrained.error, GrammarError)
        assert "no vocabulary" in str(constrained.error)
        assert (stopped.error, len(stopped.token_ids)) == (None, 10)
        assert engine.pieces([0, 5]) == [b"", b""]


@pytest.mark.parametrize("name", ["gemma4", "qwen3next", "rwkv7"])
def test_vocabulary_for_tests_writes_and_reads_text(name: str, zoo: Callable[[str], Path]) -> None:
    with cbatch.load(zoo(name), parallel=2) as engine:
        [result] = engine.run(["any text"], options={"max_tokens": 4, "temperature": 0}).results()
        assert result.text == "".join(f"{token:x}" for token in result.token_ids)
        assert len(result.token_ids) == 4
