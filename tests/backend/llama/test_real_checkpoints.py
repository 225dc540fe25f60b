"""On llama.cpp: where memory cannot be cut a common beginning is computed once, and no answer changes by it."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest

import cbatch

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.conftest import SynthFactory

N_COMMON, N_OWN, N_PROMPTS = 600, 20, 32
SIZES: dict[str, Any] = {"ctx_per_seq": 4096, "n_batch": 512, "n_ubatch": 128, "n_threads": 1}
KINDS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "narrow window": ("test", {"n_window": 16}, {}),
    "window": ("test", {"n_window": 128}, {}),
    "window in a pool": ("test", {"n_window": 128}, {"kv": "unified"}),
    "wide window": ("test", {"n_window": 1024}, {}),
    "state": ("mamba", {}, {}),
}
each_kind = pytest.mark.parametrize("kind", KINDS)


def prompt(i: int, n_common: int = N_COMMON, *, n_most: int = 190) -> cbatch.BatchPrompt:
    common = [5 + 7 * j % n_most for j in range(n_common)]
    own = [5 + (i + 3) * (j + 1) % n_most for j in range(N_OWN)]
    return cbatch.BatchPrompt(tokens=common + own)


def load(synth: SynthFactory, kind: str, **more: Any) -> cbatch.Engine:
    shape, sizes, settings = KINDS[kind]
    return cbatch.load(synth(shape, **sizes), **{"parallel": 16, **SIZES, **settings, **more})


@each_kind
def test_burst_computes_no_more_than_the_distinct_tokens(synth: SynthFactory, kind: str) -> None:
    with load(synth, kind) as engine:
        prompts = [prompt(i) for i in range(N_PROMPTS)]
        results = engine.run(prompts, options={"max_tokens": 4, "temperature": 0}).results()
        stats = engine.stats()
    assert stats.n_prompt_tokens <= 1.1 * (N_COMMON + N_PROMPTS * N_OWN)
    assert sum(r.usage.cached_tokens for r in results) == (N_PROMPTS - 1) * N_COMMON
    assert stats.n_checkpoints == 1
    assert 0 < stats.n_checkpoint_bytes <= 64 * 2**20


# ---- models of the zoo ----


@pytest.mark.parametrize(
    ("name", "kv"),
    [
        ("gpt-oss", "partitioned"),
        ("rwkv6", "auto"),
        ("granitehybrid", "auto"),
        ("lfm2", "unified"),
    ],
)
def test_zoo_computes_distinct_tokens_and_answers_as_without_sharing(
    zoo: Callable[[str], Path], name: str, kv: str
) -> None:
    options = {"max_tokens": 8, "temperature": 0, "ignore_eos": True, "logprobs": 1}
    found, n_computed = [], []
    for budget in (0, None):
        with cbatch.load(zoo(name), parallel=16, kv=kv, checkpoint_mib=budget, **SIZES) as engine:
            prompts = [prompt(i, n_most=90) for i in range(N_PROMPTS)]
            found.append(engine.run(prompts, options=options).results())
            n_computed.append(engine.stats().n_prompt_tokens)
    assert n_computed == [N_PROMPTS * (N_COMMON + N_OWN), N_COMMON + N_PROMPTS * N_OWN]
    n_alike = 0
    for alone, shared in zip(*found, strict=True):
        assert alone.logprobs is not None
        assert shared.logprobs is not None
        # the rounding differs by the shapes of steps
        assert shared.logprobs[0].logprob == pytest.approx(alone.logprobs[0].logprob, abs=0.05)
        n_alike += shared.token_ids == alone.token_ids
    assert n_alike >= 0.9 * N_PROMPTS


@pytest.mark.parametrize("name", ["gemma3", "lfm2"])
def test_turns_of_a_zoo_chat_compute_what_is_new(zoo: Callable[[str], Path], name: str) -> None:
    """In this vocabulary the end of a prompt and the answer are one token, which the second turn shows."""
    with cbatch.load(zoo(name), parallel=2, chat_template=TEMPLATE, **SIZES) as engine:
        n_new, lengths = turns(engine)
    assert n_new == [lengths[0], lengths[0] + lengths[1], *(n + 1 for n in lengths[2:])]


# ---- turns ----


@each_kind
def test_ten_turns_compute_what_is_new(synth: SynthFactory, kind: str) -> None:
    with load(synth, kind, parallel=2, chat_template=TEMPLATE) as engine:
        n_new, lengths = turns(engine)
    assert n_new == lengths


def turns(engine: cbatch.Engine) -> tuple[list[int], list[int]]:
    """Ask ten turns of a chat; return the tokens computed for each, and by how many each prompt is longer."""
    chat = [{"role": "user", "content": "Tell me of the sea, and of ships. " * 9}]
    n_new, lengths = [], [0]
    for turn in range(10):
        before = engine.stats().n_prompt_tokens
        result = engine.submit(chat, options={"max_tokens": 12, "ignore_eos": True}).result()
        n_new.append(engine.stats().n_prompt_tokens - before)
        lengths.append(result.usage.prompt_tokens)
        answer = {"role": "assistant", "content": "said otherwise in the history."}
        chat += [answer, {"role": "user", "content": f"And what of number {turn}? " * 9}]
    return n_new, [b - a for a, b in pairwise(lengths)]


TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
