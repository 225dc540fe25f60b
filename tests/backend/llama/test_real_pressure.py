"""The scheduler under pressure on llama.cpp itself: a full pool, failed steps, turns, pauses, leavers, slow readers."""

from __future__ import annotations

from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

import cbatch
from cbatch.backend.llama.llama_backend import LlamaBackend
from cbatch.backend.llama.model_tuning import Tuning
from cbatch.backend.llama.native import NativeStepper
from cbatch.backend.load.open_model import open_model
from cbatch.core.plan import StepResult
from cbatch.engine import Engine
from cbatch.engine_options import EngineOptions
from cbatch.errors import DecodeError, RequestFailedError
from tests.runtime.backends import all_results, streams

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from cbatch.core.span import Span
    from cbatch.response import BatchResult
    from tests.conftest import SynthFactory

GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
SMALL: dict[str, Any] = {"ctx_per_seq": 256, "n_threads": 1}
PROMPTS = [f"Tell me about number {i}: " + "one two three " * (i % 4) for i in range(8)]


def load(path: Path, **settings: Any) -> Engine:
    return cbatch.load(path, **{**SMALL, **settings})


def alone(
    path: Path, n_tokens: int, *, prompts: Sequence[str] = PROMPTS, **settings: Any
) -> list[tuple[str, tuple[int, ...]]]:
    """What each prompt gives with nobody beside it."""
    with load(path, parallel=1, **settings) as engine:
        return streams(engine.run(prompts, options={**GREEDY, "max_tokens": n_tokens}))


class FaultyStepper(NativeStepper):
    """Answers with a code instead of computing, where `fails` says one."""

    def __init__(self, ctx: Any, *, fails: Callable[[Sequence[Span]], int], **sizes: Any) -> None:
        super().__init__(ctx, **sizes)
        self._fails = fails

    def run(self, spans: Sequence[Span], *args: Any, **given: Any) -> StepResult:
        if code := self._fails(spans):
            return StepResult([[] for _ in spans], 0, code)
        return super().run(spans, *args, **given)


def faulty_engine(path: Path, fails: Callable[[Sequence[Span]], int], **settings: Any) -> Engine:
    """Return an engine of four slots on a stepper that fails."""
    options = EngineOptions(parallel=4, **SMALL, **settings)
    return Engine(
        LlamaBackend(open_model(path), Tuning(options), stepper=partial(FaultyStepper, fails=fails))
    )


TIE = 0.1
"""Two tokens are equally likely if their log-probabilities differ by less; f32 weights and f16 cells give 0.02."""


def assert_greedy(
    path: Path, asked: Sequence[Sequence[int]], results: Sequence[BatchResult]
) -> None:
    """Check each token against the model alone: the likeliest at its place, or as good as that.

    In a pool the place of a cell changes the rounding, so tokens may differ where two are equally likely.
    """
    answered = [[*p, *r.token_ids] for p, r in zip(asked, results, strict=True)]
    with load(path, parallel=1) as engine:
        items = [cbatch.BatchPrompt(tokens=tokens) for tokens in answered]
        scored = engine.run(items, options={"max_tokens": 0, "prompt_logprobs": 1}).results()
    for prompt, result in zip(asked, scored, strict=True):
        assert result.prompt_logprobs is not None
        found = result.prompt_logprobs[len(prompt) :]
        assert len(found) == result.usage.prompt_tokens - len(prompt) > 0
        for said in found:
            assert said is not None
            assert said.logprob > said.top[0].logprob - TIE


@pytest.mark.parametrize("swap_mib", [0, 64])
def test_full_pool_pauses_some_and_changes_no_token(synth: SynthFactory, swap_mib: int) -> None:
    path = synth("test", type="f32")
    asked = [[300 + i, *range(40, 44 + 3 * i)] for i in range(8)]
    pool = {"parallel": 8, "kv": "unified", "n_ctx": 512, "ctx_per_seq": None}
    with load(path, **pool, admission="optimistic", swap_mib=swap_mib) as engine:
        items = [cbatch.BatchPrompt(tokens=tokens) for tokens in asked]
        results = engine.run(items, options={**GREEDY, "max_tokens": 150}).results()
        stats = engine.stats()
    assert [(r.finish_reason, len(r.token_ids)) for r in results] == [("length", 150)] * 8
    assert stats.n_preempted > 0
    assert (stats.n_recomputed_tokens == 0) == (swap_mib > 0)
    assert_greedy(path, asked, results)


@pytest.mark.parametrize("swap_mib", [0, 64])
def test_turns_under_exact_give_the_tokens_of_alone(test_model: Path, swap_mib: int) -> None:
    expected = alone(test_model, 40, exact=True)
    settings = {"policy": "round_robin", "quantum": 7, "swap_mib": swap_mib}
    with load(test_model, parallel=3, exact=True, **settings) as engine:
        found = streams(engine.run(PROMPTS, options={**GREEDY, "max_tokens": 40}))
        n_again = engine.stats().n_recomputed_tokens
    assert found == expected
    assert (n_again == 0) == (swap_mib > 0)


def test_recurrent_model_takes_turns_and_answers_as_alone(synth: SynthFactory) -> None:
    path = synth("mamba")
    expected = alone(path, 24, exact=True)
    with load(path, parallel=3, policy="round_robin", quantum=5, exact=True) as engine:
        response = engine.run(PROMPTS, options={**GREEDY, "max_tokens": 24})
        order = [(chunk.id, chunk.finish_reason) for chunk in response]
        assert engine.stats().n_recomputed_tokens == 0
    begins = {id: order.index((id, None)) for id in response.ids}
    ends = [i for i, (_, reason) in enumerate(order) if reason]
    assert max(begins.values()) < min(ends)  # everybody had a turn before anybody was done
    assert streams(response) == expected


@pytest.mark.parametrize("code", [1, 2, -3])
def test_decode_step_that_fails_once_changes_no_token(test_model: Path, code: int) -> None:
    expected = alone(test_model, 30, exact=True, flash_attn="on")
    codes: list[int] = []

    def fails(chunks: Sequence[Span]) -> int:
        is_decode = all(len(c.inputs) == 1 for c in chunks)
        return codes.pop() if codes and is_decode else 0

    with faulty_engine(test_model, fails, exact=True, flash_attn="on") as engine:
        codes.append(code)
        found = streams(engine.run(PROMPTS, options={**GREEDY, "max_tokens": 30}))
    assert not codes
    assert found == expected


@pytest.mark.parametrize("code", [1, -3])
def test_request_that_fails_steps_fails_alone(test_model: Path, code: int) -> None:
    is_loaded = False

    def fails(chunks: Sequence[Span]) -> int:
        return code if is_loaded and any(33 in c.inputs[1:] for c in chunks) else 0

    prompts = [cbatch.BatchPrompt(tokens=[300 + i, 301, 33 if i == 5 else 302]) for i in range(8)]
    with faulty_engine(test_model, fails) as engine:
        is_loaded = True
        results = all_results(engine.run(prompts, options={**GREEDY, "max_tokens": 12}))
    assert [r.finish_reason for r in results] == ["length"] * 5 + ["error"] + ["length"] * 2
    assert isinstance(results[5].error, RequestFailedError)
    assert isinstance(results[5].error.__cause__, DecodeError)


def shared_prompts(n: int) -> list[cbatch.BatchPrompt]:
    """Prompts with 150 tokens in common and some of their own."""
    common = [(7 * i) % 1200 + 300 for i in range(150)]
    return [
        cbatch.BatchPrompt(tokens=[*common, *range(300 + i, 300 + 2 * i + 1)]) for i in range(n)
    ]


@pytest.mark.parametrize("is_exact", [False, True])
def test_common_beginning_is_computed_once(test_model: Path, is_exact: bool) -> None:
    with load(test_model, parallel=4, exact=is_exact, n_ubatch=64) as engine:
        results = engine.run(shared_prompts(10), options={**GREEDY, "max_tokens": 6}).results()
        stats = engine.stats()
    n_common = 128 if is_exact else 150  # whole pieces
    assert [r.usage.cached_tokens >= n_common for r in results] == [False] + [True] * 9
    assert stats.n_prompt_tokens <= 150 + sum(150 - n_common + i + 1 for i in range(10))


def test_next_turn_of_a_chat_computes_what_is_new(test_model: Path) -> None:
    chat: list[dict[str, str]] = [{"role": "user", "content": "What is 3 + 4?"}]
    with load(test_model, parallel=2) as engine:
        first = engine.submit(chat, options={"temperature": 0}).result()
        chat += [
            {"role": "assistant", "content": first.text},
            {"role": "user", "content": "Say red."},
        ]
        second = engine.submit(chat, options={"temperature": 0}).result()
    assert second.usage.cached_tokens >= first.usage.prompt_tokens
    assert second.text == alone_text(test_model, chat)


def alone_text(path: Path, chat: list[dict[str, str]]) -> str:
    with load(path, parallel=1) as engine:
        return engine.submit(chat, options={"temperature": 0}).result().text


def test_failed_step_leaves_no_mask_in_the_making(
    test_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cbatch.backend.llama.llama_backend.computes_on_cpu", lambda _: False)
    codes = [0, 0, -2, 0, -3]
    options = {**GREEDY, "regex": "[a-z ]*", "max_tokens": 12}
    with closing(faulty_engine(test_model, lambda _: codes.pop(0) if codes else 0)) as engine:
        found = streams(engine.run(PROMPTS, options=options))
        assert not codes
        assert streams(engine.run(PROMPTS, options=options)) == found
