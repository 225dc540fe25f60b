"""Options of choice, through the whole engine on a real model."""

from __future__ import annotations

import math
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest

import cbatch
from cbatch import BatchPrompt
from cbatch.backend.llama.llama_backend import LlamaBackend
from cbatch.backend.llama.model_tuning import Tuning
from cbatch.bench.experiments.sampler_bench import LlamaChain
from cbatch.core.plan import Binding, Slot, StepPlan
from cbatch.core.span import Span
from cbatch.engine_options import EngineOptions
from cbatch.options import DRY_SEQUENCE_BREAKERS, GREEDY, RunOptions
from tests.oracle.sampling import logprobs
from tests.runtime.backends import backend_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from cbatch.backend.llama.model import LlamaModel
    from tests.conftest import SynthFactory

PROMPT = tuple(range(300, 330)) * 2
LONG: dict[str, Any] = {"max_tokens": 40, "ignore_eos": True}

HARD: dict[str, Any] = {
    "repeat_penalty": 1.3,
    "frequency_penalty": 0.2,
    "dry_multiplier": 0.8,
    "logit_bias": {5: -math.inf, 310: 2.0},
}


@pytest.fixture(scope="module")
def engine(test_model: Path) -> Iterator[cbatch.Engine]:
    with cbatch.load(
        test_model,
        parallel=4,
        ctx_per_seq=256,
        n_threads=1,
        exact=True,
        n_ubatch=32,
        flash_attn="on",
    ) as loaded:
        yield loaded


def tokens_of(engine: cbatch.Engine, tokens: Sequence[int], **options: Any) -> tuple[int, ...]:
    item = BatchPrompt(tokens=tokens, options={**LONG, **options})
    return engine.submit(item).result().token_ids


def by_llama_cpp(
    model: LlamaModel, prompt: Sequence[int], n: int, options: RunOptions
) -> list[int]:
    """Return what llama.cpp's chain chooses, token by token, after it has accepted the prompt as llama-server does."""
    sampling = options.sampling({}, 0)
    settings = EngineOptions(parallel=1, ctx_per_seq=256, n_threads=1, exact=True, n_ubatch=32)
    backend = LlamaBackend(model, Tuning(settings), owns_model=False)
    chain = LlamaChain(
        sampling,
        model.vocab.n_vocab,
        vocab=model.vocab.pointer,
        breakers=DRY_SEQUENCE_BREAKERS,
    )
    with closing(backend), closing(chain):
        chain.accept(prompt)
        backend.run(StepPlan((), binds=(Binding(Slot(0), len(prompt), GREEDY, ()),)))
        output: list[int] = []
        start = 0
        for i in range(0, len(prompt), 32):
            chunk = Span(Slot(0), i, prompt[i : i + 32], has_output=i + 32 >= len(prompt))
            backend.run(StepPlan((chunk,)))
            start = i + len(chunk.inputs)
        while len(output) < n:
            output.append(chain.sample(backend.ctx, -1))
            backend.run(StepPlan((Span(Slot(0), start, output[-1:], has_output=True),)))
            start += 1
    return output


def test_greedy_with_every_edit_gives_llama_cpps_answer(
    engine: cbatch.Engine, model: LlamaModel
) -> None:
    found = tokens_of(engine, PROMPT, temperature=0, **HARD)
    assert list(found) == by_llama_cpp(model, PROMPT, 40, RunOptions(temperature=0, **HARD))
    assert found != tokens_of(engine, PROMPT, temperature=0)


@pytest.mark.parametrize("exact", [False, True])
def test_backend_reports_logprobs_of_the_model_itself(model: LlamaModel, exact: bool) -> None:
    settings = EngineOptions(parallel=3, ctx_per_seq=256, n_threads=1, exact=exact)
    sampling = RunOptions(temperature=0, **HARD).sampling({}, 0)
    binds = (
        Binding(Slot(0), 3, sampling, (), PROMPT[:3], 2),
        Binding(Slot(1), 2, GREEDY, ()),
        Binding(Slot(2), 2, GREEDY, (), (), 0),
    )
    chunks = tuple(Span(Slot(i), 0, PROMPT[: 3 - (i > 0)], has_output=True) for i in range(3))
    with closing(LlamaBackend(model, Tuning(settings), owns_model=False)) as backend:
        result = backend.run(StepPlan(chunks, binds=binds))
        rows = [backend.logits(Slot(i)) if i == 2 or not exact else None for i in range(3)]
    assert [len(found) for found in result.logprobs] == [1, 0, 1]
    for i, n_top in ((0, 2), (2, 0)):
        if (row := rows[i]) is not None:
            [found], [token] = result.logprobs[i], result.tokens[i]
            wanted = logprobs(row, token, n_top)
            assert found.logprob == pytest.approx(wanted.logprob, abs=1e-5)
            assert [t for t, _ in found.top] == [t for t, _ in wanted.top]


def test_requests_keep_their_own_options_while_others_leave_and_enter(
    engine: cbatch.Engine,
) -> None:
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 1.2, **HARD},
        {"temperature": 1.5, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
        {"temperature": 1.0, "regex": "[a-z ]*"},
        {"temperature": 1.0, "xtc_probability": 0.5, "xtc_threshold": 0.05},
        {"temperature": 1.0, "typical_p": 0.8, "logprobs": True},
        {"temperature": 1.5, "top_n_sigma": 1.0, "top_k": 0},
    ]
    items = [
        BatchPrompt(
            tokens=PROMPT[: 20 + i], options={**kind, "seed": i, "max_tokens": 1 + 7 * i % 31}
        )
        for i, kind in enumerate(kinds * 3)
    ]
    together = [r.token_ids for r in engine.run(items, options={"ignore_eos": True}).results()]
    alone = [engine.submit(item, options={"ignore_eos": True}).result().token_ids for item in items]
    assert together == alone
    assert len(set(map(len, together))) > 6
    assert len(set(together)) > 14


def test_bias_changes_the_first_token_and_later_ones_in_company_too(engine: cbatch.Engine) -> None:
    free = tokens_of(engine, PROMPT, temperature=0)
    greedy: dict[str, Any] = {**LONG, "temperature": 0}
    banned = {**greedy, "logit_bias": dict.fromkeys(set(free), -math.inf)}
    items = [BatchPrompt(tokens=PROMPT, options=options) for options in (greedy, banned, greedy)]
    before, edited, after = [r.token_ids for r in engine.run(items).results()]
    assert before == after == tuple(free)
    assert not set(edited) & set(free)
    assert set(tokens_of(engine, PROMPT, logit_bias={str(free[0]): 1000.0})) == {free[0]}
    lasting = {"presence_penalty": 100, "repeat_last_n": 2**20}  # of the prompt and the answer
    found = tokens_of(engine, PROMPT, temperature=0, **lasting)
    assert len({*found, *PROMPT}) == len(found) + len(set(PROMPT))


# ---- what is reported ----


def test_logprobs_of_an_answer_are_those_of_each_step(
    engine: cbatch.Engine, model: LlamaModel
) -> None:
    options: dict[str, Any] = {**LONG, "temperature": 0.9, "seed": 4, "top_logprobs": 3}
    item = BatchPrompt(tokens=PROMPT, options={**options, "logprobs": True, **HARD})
    result = engine.submit(item).result()
    assert result.logprobs is not None
    assert [t.token_id for t in result.logprobs] == list(result.token_ids)
    for token in result.logprobs:  # a number is the very one among the likeliest
        assert all(
            top.logprob == token.logprob for top in token.top if top.token_id == token.token_id
        )
    for i in (0, 1, 17, 39):
        asked = [*PROMPT, *result.token_ids[:i]]
        said = {**options, "max_tokens": 1, "temperature": 0, "logprobs": True}
        [again] = engine.submit(BatchPrompt(tokens=asked, options=said)).result().logprobs or ()
        assert [t.token_id for t in result.logprobs[i].top] == [t.token_id for t in again.top]
        for found, wanted in zip(result.logprobs[i].top, again.top, strict=True):
            assert found.logprob == pytest.approx(wanted.logprob, abs=1e-4)
        assert all(t.logprob <= again.logprob + 1e-4 for t in result.logprobs[i].top)


def test_choices_of_a_prompt_are_those_of_their_seeds_and_share_it(engine: cbatch.Engine) -> None:
    before = engine.stats()
    item = BatchPrompt(tokens=PROMPT, options={**LONG, "n": 4, "seed": 11, "temperature": 1.5})
    result = engine.submit(item).result()
    n_computed = engine.stats().n_prompt_tokens - before.n_prompt_tokens
    alone = [tokens_of(engine, PROMPT, seed=11 + i, temperature=1.5) for i in range(4)]
    assert [c.token_ids for c in result.choices] == alone
    assert len(set(alone)) == 4
    assert n_computed < 2.5 * len(PROMPT)


def test_best_of_keeps_the_highest_mean_logprob(engine: cbatch.Engine) -> None:
    said: dict[str, Any] = {**LONG, "seed": 11, "temperature": 1.5, "logprobs": True}
    every = engine.submit(BatchPrompt(tokens=PROMPT, options={**said, "n": 4})).result().choices
    kept = engine.submit(BatchPrompt(tokens=PROMPT, options={**said, "best_of": 4})).result()
    means = {c.token_ids: sum(t.logprob for t in c.logprobs or ()) / 40 for c in every}
    assert kept.token_ids == max(means, key=lambda tokens: means[tokens])


def test_tokens_that_the_file_suppresses_are_never_sampled(synth: SynthFactory) -> None:
    options: dict[str, Any] = {"temperature": 0, "max_tokens": 3, "ignore_eos": True}
    with cbatch.load(synth("test"), parallel=2, ctx_per_seq=64) as free:
        first = free.submit("Hi", options=options).result().token_ids[0]
    path = synth("test", metadata={"tokenizer.ggml.suppress_tokens": [first]})
    with cbatch.load(path, parallel=2, ctx_per_seq=64) as engine:
        pushed = {**options, "logit_bias": {first: 100.0}}
        for said in (options, pushed, {**options, "temperature": 5.0, "top_k": 0}):
            assert first not in engine.submit("Hi", options=said).result().token_ids


def test_grammar_and_bans_that_leave_no_token_are_named_as_the_reason(
    model: LlamaModel, test_model: Path
) -> None:
    banned = dict.fromkeys(range(model.vocab.n_vocab), -math.inf)
    prompts = [
        BatchPrompt(prompt="A", options={"regex": "a", "logit_bias": banned}),
        BatchPrompt(prompt="B", options={"logit_bias": banned}),
        BatchPrompt(prompt="C"),
    ]
    with cbatch.load(test_model, parallel=2, ctx_per_seq=64) as engine:
        results = engine.run(prompts, options={"max_tokens": 4}).results(return_errors=True)
    said = [str(r.error) for r in results]
    assert said[0].startswith(
        "regex: every token that the grammar allows is ruled out by logit_bias"
    )
    assert said[1].startswith("logit_bias bans every token that could follow")
    assert isinstance(results[1].error, cbatch.BannedTokensError)
    assert results[2].error is None


def test_closing_end_token_is_told_with_its_logprob_where_it_is_asked_for(
    engine: cbatch.Engine,
) -> None:
    [end, *_] = backend_of(engine, LlamaBackend).vocab.end_tokens
    item = BatchPrompt(tokens=PROMPT)
    options: dict[str, Any] = {"logit_bias": {end: 1e4}, "temperature": 0, "logprobs": 2}
    plain, whole = (
        engine.submit(item, options={**options, "echo": echo, "include_stop": include}).result()
        for echo, include in ((False, False), (True, True))
    )
    assert (plain.text, plain.token_ids, plain.logprobs) == ("", (), ())
    assert whole.token_ids == (*PROMPT, end)
    assert whole.logprobs is not None
    assert [t.token_id for t in whole.logprobs] == [*PROMPT, end]
    assert whole.logprobs[-1].logprob < -1
    assert len(whole.logprobs[-1].top) == 2
    assert (whole.finish_reason, whole.stop_reason) == ("stop", None)
    assert whole.usage.completion_tokens == plain.usage.completion_tokens == 1
