"""On llama.cpp: random workloads of models that keep states beside cells, and their moves into gaps between slots."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest

import cbatch
from cbatch.messages import BatchPrompt
from cbatch.verify.one_model import difference, rounding_of
from tests.zoo.metadata import N_VOCAB

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from cbatch.response import BatchResult

pytestmark = pytest.mark.real

SIZES: dict[str, Any] = {"parallel": 4, "n_batch": 64, "n_ubatch": 32, "n_threads": 1}
MEMORIES: dict[str, dict[str, Any]] = {
    "apart": {"ctx_per_seq": 256},
    "pool": {"kv": "unified", "n_ctx": 1024},
    "full pool": {"kv": "unified", "n_ctx": 256, "ctx_per_seq": 256},
}
SHARING: dict[str, dict[str, Any]] = {
    "off": {"share_prefixes": False, "swap_mib": 0},
    "on": {},
    "computed again": {"swap_mib": 0},
}


def workload(seed: int, caps: Sequence[int]) -> list[BatchPrompt]:
    """Prompts of which many begin alike, with answers of any length; together far more cells than a small pool has."""
    dice = random.Random(seed)
    beginnings = [dice.choices(range(N_VOCAB), k=n) for n in (40, 40, 64, 90)]
    beginnings.append(beginnings[0] + dice.choices(range(N_VOCAB), k=34))
    made = []
    for _ in range(16):
        own = dice.choices(range(N_VOCAB), k=dice.randint(1, 30))
        tokens = dice.choice([[], *beginnings]) + own
        # answers that end at their caps: a small pool expects them to want less, and takes cells back
        made.append(BatchPrompt(tokens=tokens, options={"max_tokens": dice.choice(caps)}))
    return made


def answers(
    path: Path, prompts: list[BatchPrompt], **given: Any
) -> tuple[list[BatchResult], cbatch.EngineStats]:
    options = {"temperature": 0, "ignore_eos": True, "logprobs": 5}
    with cbatch.load(path, **{**SIZES, **given}) as engine:
        return engine.run(prompts, options=options).results(), engine.stats()


@pytest.mark.parametrize(
    ("name", "memory"), [*zip(["falcon-h1", "lfm2", "qwen3next"], MEMORIES, strict=True)]
)
def test_random_workloads_answer_as_without_sharing(
    zoo: Callable[[str], Path], name: str, memory: str
) -> None:
    n_preempted = 0
    for seed in range(3):
        # longer answers fill a pool that is small
        prompts = workload(seed, (4, 60, 100) if memory == "full pool" else (4, 30, 90))
        found = {
            sharing: answers(zoo(name), prompts, **MEMORIES[memory], **given)
            for sharing, given in SHARING.items()
        }
        expected, stats = found["off"]
        assert stats.n_checkpoints == 0
        for sharing in ("on", "computed again"):
            results, stats = found[sharing]
            assert stats.n_checkpoints > 0
            n_preempted += stats.n_preempted
            for alone, shared in zip(expected, results, strict=True):
                problem = difference(
                    alone.logprobs or (), shared.logprobs or (), rounding_of("f32")
                )
                assert not problem, (seed, sharing, shared.id)
        assert found["on"][1].n_prompt_tokens < found["off"][1].n_prompt_tokens
    assert (n_preempted > 0) == (memory == "full pool")


@pytest.mark.parametrize(
    ("name", "settings"), [("mamba2", {}), ("falcon-h1", {"exact": True}), ("qwen3next", {})]
)
def test_answers_are_the_same_after_moves_into_gaps(
    zoo: Callable[[str], Path], name: str, settings: dict[str, Any]
) -> None:
    """Slots 1 and 3 end early: the sequences above them move down, with states and cells."""
    caps = (60, 4, 60, 20, 60)
    tokens = [[5 + i, *(5 + (i + 3) * j % 90 for j in range(30))] for i in range(5)]
    prompts = [
        BatchPrompt(tokens=t, options={"max_tokens": n}) for t, n in zip(tokens, caps, strict=True)
    ]
    sizes = {"parallel": 5, "ctx_per_seq": 256, **settings}
    options = {"temperature": 0, "ignore_eos": True, "logprobs": 5}
    found = []
    for swap_mib in (0, 64):
        with cbatch.load(zoo(name), **{**SIZES, **sizes, "swap_mib": swap_mib}) as engine:
            response = engine.run(prompts, options=options)
            found.append(response.results())
            used = [[slot.n_cells > 0 for slot in engine.slots()]]
            assert engine.stats().n_recomputed_tokens == 0
        # what has moved leaves its slot empty; what stays is kept where it ends
        assert used == [[True] * 5] if not swap_mib else not all(used[0])
    for stayed, moved in zip(*found, strict=True):
        if settings:
            assert (stayed.token_ids, stayed.logprobs) == (moved.token_ids, moved.logprobs)
        problem = difference(stayed.logprobs or (), moved.logprobs or (), rounding_of("f32"))
        assert not problem
