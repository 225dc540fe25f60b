"""On llama.cpp: where memory cannot be cut a common beginning is computed once, and no answer changes by it."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest

import cbatch

if TYPE_CHECKING:
    from tests.conftest import SynthFactory

N_COMMON, N_OWN, N_PROMPTS = 600, 20, 32
SIZES: dict[str, Any] = {"ctx_per_seq": 768, "n_batch": 512, "n_ubatch": 128, "n_threads": 1}
KINDS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "narrow window": ("test", {"n_window": 16}, {}),
    "window": ("test", {"n_window": 128}, {}),
    "window in a pool": ("test", {"n_window": 128}, {"kv": "unified"}),
    "wide window": ("test", {"n_window": 1024}, {}),
    "state": ("mamba", {}, {}),
}
each_kind = pytest.mark.parametrize("kind", KINDS)


def prompt(i: int, n_common: int = N_COMMON, n_own: int = N_OWN) -> cbatch.BatchPrompt:
    common = [5 + 7 * j % 190 for j in range(n_common)]
    return cbatch.BatchPrompt(tokens=common + [5 + (i + 3) * (j + 1) % 190 for j in range(n_own)])


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


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "pool" not in kind])
def test_exact_answers_are_to_the_bit_those_without_sharing(synth: SynthFactory, kind: str) -> None:
    options = {"max_tokens": 8, "temperature": 0, "ignore_eos": True, "logprobs": 1}
    found = []
    for settings in ({"checkpoint_mib": 0, "parallel": 1}, {"parallel": 4}):
        with load(synth, kind, exact=True, **settings) as engine:
            prompts = [prompt(i, n) for n in (600, 150) for i in range(6)]
            found.append(engine.run(prompts, options=options).results())
    alone, shared = found
    assert {r.usage.cached_tokens for r in alone} == {0}
    assert [r.usage.cached_tokens for r in shared] == [0, *[512] * 5, 0, *[128] * 5]
    for one, other in zip(alone, shared, strict=True):
        assert (one.token_ids, one.logprobs) == (other.token_ids, other.logprobs)


@each_kind
def test_ten_turns_compute_what_is_new(synth: SynthFactory, kind: str) -> None:
    with load(synth, kind, parallel=2, chat_template=TEMPLATE) as engine:
        chat = [{"role": "user", "content": "Tell me of the sea, and of ships. " * 4}]
        n_new = []
        for turn in range(10):
            before = engine.stats().n_prompt_tokens
            result = engine.submit(chat, options={"max_tokens": 12, "ignore_eos": True}).result()
            n_new.append((result.usage.prompt_tokens, engine.stats().n_prompt_tokens - before))
            answer = {"role": "assistant", "content": "said otherwise in the history."}
            chat += [answer, {"role": "user", "content": f"And what of number {turn}?"}]
    lengths = [n for n, _ in n_new]
    grown = [lengths[0], *(b - a for a, b in pairwise(lengths))]
    assert [n for _, n in n_new] == grown


TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
