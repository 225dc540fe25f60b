"""The prompt's log-probabilities on real models: against llama.cpp's own logits, in company, in every memory."""

from __future__ import annotations

import math
from contextlib import closing
from typing import TYPE_CHECKING, Any

import llama_cpp
import numpy as np
import pytest

import cbatch
from cbatch import BatchPrompt
from cbatch.backend.llama.llama_backend import LlamaBackend
from cbatch.backend.llama.model_tuning import Tuning
from cbatch.backend.llama.native import NativeStepper
from cbatch.backend.load.open_model import open_model
from cbatch.core.plan import Binding, Slot, StepPlan
from cbatch.core.span import N_TARGETS_MAX, Span
from cbatch.engine_options import EngineOptions
from cbatch.options import GREEDY
from tests.oracle.python_stepper import PythonStepper
from tests.oracle.sampling import logprobs

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from cbatch.backend.llama.model import LlamaModel
    from cbatch.core.plan import StepResult, TokenLogprobs
    from cbatch.response import BatchResult
    from tests.conftest import SynthFactory

PROMPTS = [[300 + (7 * i + j * j) % 500 for j in range(n)] for i, n in enumerate((2, 30, 150, 220))]
SMALL: dict[str, Any] = {"parallel": 4, "ctx_per_seq": 256, "n_threads": 1}
SHORT: dict[str, Any] = {"max_tokens": 3, "ignore_eos": True, "temperature": 0}


def row_of(backend: LlamaBackend, i_token: int) -> NDArray[np.float32]:
    """Return the logits of a place in the last batch, as llama.cpp has them."""
    row = llama_cpp.llama_get_logits_ith(backend.ctx, i_token)
    return np.ctypeslib.as_array(row, shape=(backend.vocab.n_vocab,)).copy()


def scored(slot: int, tokens: Sequence[int], n: int) -> Span:
    """The first `n` tokens, each with the one that follows for its target."""
    return Span(Slot(slot), 0, tokens[:n], n == len(tokens), tokens[1 : n + 1])


def assert_alike(found: TokenLogprobs, wanted: TokenLogprobs) -> None:
    assert found.logprob == pytest.approx(wanted.logprob, abs=1e-5)
    assert [t for t, _ in found.top] == [t for t, _ in wanted.top]
    assert [p for _, p in found.top] == pytest.approx([p for _, p in wanted.top], abs=1e-5)


@pytest.mark.parametrize("stepper", [NativeStepper, PythonStepper])
def test_scores_are_the_softmax_of_llama_cpps_logits(model: LlamaModel, stepper: Any) -> None:
    one, two = PROMPTS[1], PROMPTS[2]
    chunks = (scored(0, one, 30), Span(Slot(1), 0, one[:1], True), scored(2, two, 35))
    binds = tuple(Binding(Slot(i), 2, GREEDY, (), n_target_top=5 * (i == 0)) for i in range(3))
    settings = EngineOptions(**SMALL, n_batch=128)
    with closing(
        LlamaBackend(model, Tuning(settings), owns_model=False, stepper=stepper)
    ) as backend:
        result = backend.run(StepPlan(chunks, binds=binds))
        # chunks with targets stay in one batch: all first tokens come first, then the remainders
        places = {0: [0, *range(3, 32)], 2: [2, *range(32, 66)]}
        for slot, n in ((0, 29), (2, 35)):
            chunk, scores = chunks[slot], result.scores[Slot(slot)]
            assert len(scores) == n
            for place, target, found in zip(places[slot], chunk.targets, scores, strict=False):
                assert_alike(found, logprobs(row_of(backend, place), target, 5 * (slot == 0)))
        assert [len(tokens) for tokens in result.tokens] == [1, 1, 0]


def one_by_one(model: LlamaModel, prompt: Sequence[int], n_top: int = 0) -> list[TokenLogprobs]:
    """Return the scores of a prompt that is fed token by token, a run for each."""
    found = []
    with closing(LlamaBackend(model, Tuning(EngineOptions(**SMALL)), owns_model=False)) as backend:
        backend.run(StepPlan((), binds=(Binding(Slot(0), 1, GREEDY, ()),)))
        for i, target in enumerate(prompt[1:]):
            backend.run(StepPlan((Span(Slot(0), i, prompt[i : i + 1], has_output=True),)))
            found.append(logprobs(backend.logits(Slot(0)), target, n_top))
    return found


def check_prompt(
    result: BatchResult, prompt: Sequence[int], wanted: Sequence[TokenLogprobs], *, within: float
) -> None:
    """Compare with a reference; in other shapes llama.cpp rounds otherwise, in every layer."""
    first, *behind = result.prompt_logprobs or ()
    assert first is None
    assert [t and t.token_id for t in behind] == list(prompt[1:])
    found = np.array([t.logprob for t in behind if t is not None])
    assert np.abs(found - [w.logprob for w in wanted]).mean() < within


@pytest.mark.parametrize(
    ("shape", "options", "within"),
    [
        ("", {"prefill_chunk": 7}, 1e-5),
        ("", {"kv": "unified", "prefill_chunk": 7}, 0.2),
        ("", {}, 0.2),
        ("", {"exact": True}, 0.2),
        ("mamba", {}, 1e-3),
    ],
    ids=["chunks", "unified", "whole", "exact", "recurrent"],
)
def test_prompts_scored_together_are_as_fed_one_by_one(
    test_model: Path, synth: SynthFactory, shape: str, options: dict[str, Any], within: float
) -> None:
    path = synth(shape) if shape else test_model
    given = options if shape else {"flash_attn": "on", **options}
    with closing(open_model(path)) as model, cbatch.load(path, **SMALL, **given) as engine:
        items = [BatchPrompt(tokens=p) for p in PROMPTS]
        results = engine.run(items, options={**SHORT, "prompt_logprobs": 2}).results()
        for prompt, result in zip(PROMPTS, results, strict=True):
            check_prompt(result, prompt, one_by_one(model, prompt), within=within)
            assert result.finish_reason == "length"


def test_exact_scores_and_answers_are_the_same_bits_in_company(test_model: Path) -> None:
    items = [
        BatchPrompt(tokens=p, options={"prompt_logprobs": i % 3 if i < 3 else None, "seed": i})
        for i, p in enumerate([*PROMPTS, PROMPTS[3][:200]])
    ]
    said = {**SHORT, "temperature": 1.0, "logprobs": 3}
    with cbatch.load(test_model, **SMALL, exact=True) as engine:
        together = engine.run(items * 2, options=said).results()
        alone = [engine.submit(item, options=said).result() for item in items]
    for found, wanted in zip(together, alone * 2, strict=True):
        assert found.token_ids == wanted.token_ids
        assert found.logprobs == wanted.logprobs
        assert found.prompt_logprobs == wanted.prompt_logprobs


class CountingStepper(NativeStepper):
    """Keeps the most targets and outputs of a run."""

    n_most = 0

    def run(self, spans: Sequence[Span], *args: Any, **more: Any) -> StepResult:
        n = sum(len(c.targets) for c in spans)
        CountingStepper.n_most = max(CountingStepper.n_most, n)
        return super().run(spans, *args, **more)


def test_many_long_prompts_never_ask_for_more_rows_than_there_are(
    test_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cbatch.backend.llama.llama_backend.NativeStepper", CountingStepper)
    with cbatch.load(test_model, **SMALL) as engine:
        items = [BatchPrompt(tokens=PROMPTS[3][i:]) for i in range(12)]
        results = engine.run(items, options={**SHORT, "prompt_logprobs": 20}).results()
    assert CountingStepper.n_most == N_TARGETS_MAX
    assert [len(r.prompt_logprobs or ()) for r in results] == [220 - i for i in range(12)]


# ---- as evaluation harnesses ask ----


def continuation(result: BatchResult, context: str) -> tuple[float, bool]:
    """Return the log-likelihood of what follows `context` in an echo, and whether greedy choice would give it."""
    assert result.logprobs is not None
    n_bytes, behind = 0, []
    for token in result.logprobs[: result.usage.prompt_tokens]:
        n_bytes += len(token.data)
        if n_bytes > len(context.encode()):
            behind.append(token)
    is_greedy = all(t.logprob == max(o.logprob for o in t.top) for t in behind)
    return sum(t.logprob for t in behind), is_greedy


@pytest.mark.parametrize(("max_tokens", "replicas"), [(1, None), (0, 1)])
def test_log_likelihood_of_a_continuation(
    test_model: Path, max_tokens: int, replicas: int | None
) -> None:
    context = "Once upon a time there was a"
    with cbatch.load(test_model, **SMALL, replicas=replicas) as engine:
        greedy = engine.submit(context, options=SHORT).result()
        prompts = [context + greedy.text, context + " zebra of glass"]
        said = {"echo": True, "logprobs": 1, "max_tokens": max_tokens, "temperature": 0}
        results = engine.run(prompts, options=said).results()
        likely, unlikely = (continuation(r, context) for r in results)
    assert all(r.text.startswith(p) for r, p in zip(results, prompts, strict=True))
    assert likely[0] > unlikely[0]
    assert (likely[1], unlikely[1]) == (True, False)
    assert math.isnan((results[0].logprobs or ())[0].logprob)


# ---- continuations of contexts ----

CONTEXT = [300 + (11 * i) % 500 for i in range(150)]
ENDS = [[400 + i, 401 + 2 * i, 402][: 1 + i % 3] for i in range(12)]


def scores_of(engine: cbatch.Engine, contexts: Sequence[Sequence[int]]) -> list[list[float]]:
    pairs = [(BatchPrompt(tokens=context), ENDS) for context in contexts]
    found = engine.score(pairs).results()
    return [[token.logprob for token in score.tokens] for scores in found for score in scores]


def test_scores_of_continuations_are_those_of_whole_prompts(test_model: Path) -> None:
    with cbatch.load(test_model, **SMALL) as engine:
        found = scores_of(engine, [CONTEXT])
        n_prompt = engine.stats().n_prompt_tokens
        items = [BatchPrompt(tokens=[*CONTEXT, *end]) for end in ENDS]
        whole = engine.run(items, options={"max_tokens": 0, "prompt_logprobs": 0}).results()
    for scores, result in zip(found, whole, strict=True):
        behind = [token.logprob for token in (result.prompt_logprobs or ())[150:] if token]
        assert scores == pytest.approx(behind, abs=0.2)
    # the context once, and with each continuation the last token before it
    assert n_prompt == 149 + sum(1 + len(end) for end in ENDS)


@pytest.mark.parametrize("options", [{"replicas": 1}], ids=["worker"])
def test_exact_scores_are_the_same_bits_in_company(
    test_model: Path, options: dict[str, Any]
) -> None:
    contexts = [CONTEXT, CONTEXT[:120], CONTEXT[5:], CONTEXT[:64], CONTEXT[:9]]
    with cbatch.load(test_model, **SMALL, exact=True, **options) as engine:
        together = scores_of(engine, contexts)
        n_prompt = engine.stats().n_prompt_tokens
    alone = []
    with cbatch.load(test_model, **SMALL, exact=True) as engine:
        for context in contexts:
            for end in ENDS:
                [[score]] = engine.score([(BatchPrompt(tokens=context), end)]).results()
                alone.append([token.logprob for token in score.tokens])
    assert together == alone
    assert n_prompt < sum(len(context) for context in contexts) * len(ENDS) / 2


@pytest.mark.parametrize(
    ("shape", "sizes"),
    [("mamba", {}), ("test", {"n_window": 64})],
    ids=["state", "sliding window"],
)
def test_memory_of_every_kind_computes_a_context_once(
    synth: SynthFactory, shape: str, sizes: dict[str, Any]
) -> None:
    with cbatch.load(synth(shape, **sizes), **SMALL) as engine:
        # the first is through before anybody knows of the others
        [[alone]] = engine.score([(BatchPrompt(tokens=CONTEXT), ENDS[-1])]).results()
        found = scores_of(engine, [CONTEXT])
        n_prompt = engine.stats().n_prompt_tokens
    assert found[-1] == pytest.approx([token.logprob for token in alone.tokens], abs=0.05)
    assert n_prompt <= 150 + sum(3 + len(end) for end in (*ENDS, ENDS[-1]))
