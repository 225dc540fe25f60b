"""`exact=True` over kinds of memory and architectures: the same tokens and log-probabilities alone and in company."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pytest

import cbatch
from cbatch.messages import BatchPrompt
from tests.zoo import ZOO

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from cbatch.engine import Engine
    from cbatch.response import BatchResult

N_VOCAB = 190
ANSWER: dict[str, Any] = {"temperature": 0, "max_tokens": 6, "ignore_eos": True, "logprobs": 3}
CELLS = ["llama-f16", "llama-q4_k_m", "llama-moe", "qwen3moe-q4_0", "deepseek2", "glm4moe", "phi3"]
WINDOWS = ["gemma2", "gemma3", "gemma3-q8_0", "gpt-oss", "llama4", "granite_swa", "cohere2"]
STATES = ["mamba", "mamba-q8_0", "mamba2", "rwkv6"]
HYBRIDS = ["jamba", "falcon-h1", "granitehybrid", "qwen3next", "qwen3next-q8_0", "lfm2", "lfm2moe"]
NAMES = [*CELLS, *WINDOWS, *STATES, *HYBRIDS]
SOME = ["gemma2", "gemma3", "gpt-oss", "mamba2", "rwkv6", "granitehybrid", "qwen3next", "lfm2moe"]
"""Of those whose memory cannot be cut."""
LONG = ["qwen3moe-q4_0", "gemma3", "mamba2", "qwen3next"]
"""One of each kind, tried with more and longer prompts, and in more ways."""

TURNS: Sequence[dict[str, Any]] = (
    {"policy": "round_robin", "quantum": 4},
    {"policy": "round_robin", "quantum": 4, "swap_mib": 0},
)
"""Slots change hands: cells are saved and restored, or computed again."""


@dataclass(frozen=True, slots=True)
class Size:
    """How many prompts there are, how long they are, and over how many slots."""

    n_prompts: int
    longest: int
    n_common: int
    parallel: int
    ctx_per_seq: int

    def items(self) -> list[BatchPrompt]:
        """Prompts of which most are short; the longest begin alike."""
        dice, last = random.Random(1), self.n_prompts - 1
        lengths = [3 + round((i / last) ** 3 * (self.longest - 3)) for i in range(self.n_prompts)]
        made = [[dice.randrange(1, N_VOCAB) for _ in range(n)] for n in lengths]
        for tokens in made[-3:]:
            tokens[: self.n_common] = made[-1][: self.n_common]
        asked = [BatchPrompt(tokens=t, id=f"p{i}", options=ANSWER) for i, t in enumerate(made)]
        dice.shuffle(asked)
        return asked


SMALL, LARGE = Size(12, 150, 100, 5, 256), Size(32, 600, 530, 16, 1024)
MIDDLE = Size(0, 0, 0, 4, 1024)


def answers(results: Sequence[BatchResult]) -> list[tuple[object, object]]:
    assert [r.error for r in results] == [None] * len(results)
    return [(r.token_ids, r.logprobs) for r in results]


def load(path: Path, size: Size, **settings: Any) -> Engine:
    sizes: dict[str, Any] = {"parallel": size.parallel, "ctx_per_seq": size.ctx_per_seq}
    return cbatch.load(path, exact=True, **sizes, **settings)


@pytest.mark.parametrize(
    ("name", "size"),
    [*((name, SMALL) for name in NAMES), *((name, LARGE) for name in LONG)],
    ids=lambda value: value if isinstance(value, str) else f"{value.n_prompts} prompts",
)
def test_answers_are_the_same_bits_alone_in_company_and_in_turns(
    zoo: Callable[[str], Path], name: str, size: Size
) -> None:
    asked = size.items()
    with load(zoo(name), size) as engine:
        assert engine.exactness == "bitwise"
        together = answers(engine.run(asked).results())
    with load(zoo(name), size) as engine:
        alone = answers([engine.submit(item).result() for item in asked])
    assert alone == together
    assert len({tokens for tokens, _ in alone}) > len(asked) // 2
    for turns in TURNS if name in LONG else TURNS[:1]:
        with load(zoo(name), size, **turns) as engine:
            assert answers(engine.run(asked).results()) == alone


@pytest.mark.parametrize("name", SOME)
def test_beginnings_are_shared_to_the_bit_where_memory_cannot_be_cut(
    zoo: Callable[[str], Path], name: str
) -> None:
    dice, common = random.Random(6), random.Random(5).choices(range(1, N_VOCAB), k=600)
    asked = [
        BatchPrompt(tokens=[*common[:n], *dice.choices(range(1, N_VOCAB), k=m)], options=ANSWER)
        for n, m in ((600, 70), (600, 3), (570, 150), (330, 90), (70, 64), (600, 300))
    ]
    with load(zoo(name), MIDDLE, checkpoint_mib=0) as engine:
        alone = answers([engine.submit(item).result() for item in asked])
        assert engine.stats().n_checkpoints == 0
    for turns in ({}, TURNS[0]) if name in LONG else ({},):
        with load(zoo(name), MIDDLE, **turns) as engine:
            results = engine.run(asked).results()
        assert answers(results) == alone
        n_shared = [r.usage.cached_tokens for r in results]
        assert sum(n_shared) >= 3 * 448
        assert {n % 64 for n in n_shared} == {0}


@pytest.mark.parametrize("name", ["qwen3moe-q4_0", "deepseek2", *SOME])
def test_answers_from_cells_on_disk_are_the_same_bits(
    zoo: Callable[[str], Path], tmp_path: Path, name: str
) -> None:
    dice, common = random.Random(4), random.Random(3).choices(range(1, N_VOCAB), k=160)
    asked = [
        BatchPrompt(tokens=[*common, *dice.choices(range(1, N_VOCAB), k=n)], options=ANSWER)
        for n in (40, 65, 80)
    ]
    saved = {"cache_key": "k", "save_cache": True, "prefill_only": True}
    required = {**ANSWER, "cache_key": "k", "cache_required": True}
    with load(zoo(name), SMALL, cache_dir=tmp_path, share_prefixes=False) as engine:
        alone = answers([engine.submit(item).result() for item in asked])
        engine.submit(BatchPrompt(tokens=common[:128]), options=saved).result()
    for of_one in (False, True) if name in LONG else (False,):
        with load(zoo(name), SMALL, cache_dir=tmp_path) as engine:
            items = [replace(item, options=required) for item in asked]
            batches = [[item] for item in items] if of_one else [items]
            results = [r for batch in batches for r in engine.run(batch).results()]
        assert answers(results) == alone
        assert all(r.usage.cached_tokens >= 128 for r in results)


def test_kinds_are_those_of_the_zoo() -> None:
    kinds = {"cells": CELLS, "window": WINDOWS, "state": STATES, "hybrid": HYBRIDS}
    assert {ZOO[name]: kind for kind, names in kinds.items() for name in names}.keys() == set(kinds)
    assert {name: kind for kind, names in kinds.items() for name in names} == {
        name: ZOO[name] for name in NAMES
    }
