"""The prompt's log-probabilities and its echo, by the fake backend."""

from __future__ import annotations

import math
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest

from cbatch import BatchPrompt
from cbatch.backend.fake import FakeBackend, Faults
from cbatch.core.plan import KvCapabilities
from cbatch.core.span import N_TARGETS_MAX, PromptCuts
from cbatch.errors import ConfigError, RequestFailedError
from tests.kinds import Reason, each_kind, engine_on, no_pool
from tests.oracle.fake_streams import scores_alone
from tests.runtime.backends import GatedBackend, all_results, together

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from cbatch.core.plan import StepPlan
    from cbatch.engine import Engine
    from cbatch.response import BatchResult, TokenLogprob

pytestmark = each_kind

PROMPT = "It was a dark and stormy night; the rain fell in torrents, but for a few intervals."
LONG = {"ignore_eos": True, "max_tokens": 6}


@pytest.fixture
def backend() -> FakeBackend:
    return FakeBackend(4, 256, 200)


@pytest.fixture
def engine(backend: FakeBackend) -> Iterator[Engine]:
    with closing(engine_on(backend, options=LONG)) as made:
        yield made


def answer(engine: Engine, prompt: Any = PROMPT, **options: Any) -> BatchResult:
    [result] = all_results(engine.run([prompt], options=options))
    return result


def figures(told: Sequence[TokenLogprob | None] | None) -> list[Any]:
    return [
        t and (t.token_id, t.logprob, [(o.token_id, o.logprob) for o in t.top]) for t in told or ()
    ]


def wanted(backend: FakeBackend, text: str, n_top: int) -> list[Any]:
    tokens = backend.vocab.tokenize(text)
    scores = scores_alone(backend, tokens, n_top)
    return [None, *((t, s.logprob, list(s.top)) for t, s in zip(tokens[1:], scores, strict=True))]


def n_targets(plans: Sequence[StepPlan]) -> list[int]:
    return [n for plan in plans if (n := sum(len(c.targets) for c in plan.spans))]


# ---- prompt_logprobs ----


@pytest.mark.parametrize("n_top", [0, 3])
def test_each_token_of_the_prompt_but_the_first_is_scored(
    engine: Engine, backend: FakeBackend, n_top: int
) -> None:
    result = answer(engine, prompt_logprobs=n_top, seed=1)
    assert figures(result.prompt_logprobs) == wanted(backend, PROMPT, n_top)
    assert result.token_ids == answer(engine, seed=1).token_ids
    assert result.logprobs is None


def test_chat_has_prompt_logprobs_of_its_rendered_tokens(
    engine: Engine, backend: FakeBackend
) -> None:
    result = answer(engine, [{"role": "user", "content": "Hi"}], prompt_logprobs=0)
    assert figures(result.prompt_logprobs) == wanted(backend, "user:Hi", 0)


def test_prompt_of_one_token_has_nothing_to_score(engine: Engine) -> None:
    assert answer(engine, "a", prompt_logprobs=2).prompt_logprobs == (None,)


@no_pool(Reason.ONE_BACKEND)
def test_a_step_scores_no_more_than_there_is_room_for(engine: Engine, backend: FakeBackend) -> None:
    prompts = [PROMPT[i:] * 2 for i in range(6)]
    results = all_results(engine.run(prompts, options={"prompt_logprobs": 1}))
    for prompt, result in zip(prompts, results, strict=True):
        assert figures(result.prompt_logprobs) == wanted(backend, prompt, 1)
    per_step = n_targets(backend.plans)
    assert max(per_step) == N_TARGETS_MAX
    assert sum(per_step) == sum(len(p) - 1 for p in prompts)


@no_pool(Reason.ONE_BACKEND)
def test_company_that_is_not_scored_is_computed_beside(
    engine: Engine, backend: FakeBackend
) -> None:
    scored = BatchPrompt(prompt=PROMPT * 2, options={"prompt_logprobs": 0})
    with together(2):
        all_results(engine.run([scored, BatchPrompt(prompt=PROMPT[::-1])]))
    first = next(plan for plan in backend.plans if plan.spans)
    assert [len(c.inputs) for c in first.spans] == [N_TARGETS_MAX, len(PROMPT)]


def test_scored_prompt_takes_nothing_over_but_gives(backend: FakeBackend) -> None:
    memory = KvCapabilities("partitioned", 4 * 256, can_copy=True)
    with closing(engine_on(FakeBackend(4, 256, 200, memory=memory), options=LONG)) as engine:
        first = answer(engine, prompt_logprobs=0)
        again = answer(engine, prompt_logprobs=0)
        plain = answer(engine)
    assert again.prompt_logprobs == first.prompt_logprobs
    assert (first.usage.cached_tokens, again.usage.cached_tokens) == (0, 0)
    assert plain.usage.cached_tokens == len(PROMPT) - 1


def test_broken_row_of_the_prompt_fails_its_item_alone() -> None:
    faults = Faults(broken=lambda chunk: chunk.inputs[-1] == ord("!"))
    with closing(engine_on(FakeBackend(4, 64, 64, faults=faults), options=LONG)) as engine:
        bad, good = all_results(
            engine.run(["a!b", "abc"], options={"prompt_logprobs": 0, "seed": 1})
        )
    assert isinstance(bad.error, RequestFailedError)
    assert bad.finish_reason == "error"
    assert good.error is None
    assert len(good.prompt_logprobs or ()) == 3


@no_pool(Reason.ONE_BACKEND)
def test_cancelled_prompt_tells_as_far_as_it_came() -> None:
    backend = GatedBackend(1, 256, 200, hold_at=0)
    with closing(engine_on(backend, options=LONG)) as engine:
        response = engine.run([PROMPT], options={"prompt_logprobs": 0, "logprobs": 1, "echo": True})
        backend.wait_until_held()
        backend.release_when_asked()
        response.cancel()
        [result] = response.results()
        longer = engine.extend(result, 2).result()
    told = [t is not None for t in result.prompt_logprobs or ()]
    n_told = sum(told)
    assert result.finish_reason == "cancelled"
    assert 0 < n_told < len(PROMPT) - 1
    assert told == [False] + [True] * n_told + [False] * (len(PROMPT) - 1 - n_told)
    assert [t.token_id for t in result.logprobs or ()] == list(result.token_ids)
    assert figures(longer.prompt_logprobs) == wanted(backend, PROMPT, 0)
    assert figures(longer.logprobs)[1 : len(PROMPT)] == wanted(backend, PROMPT, 1)[1:]


@no_pool(Reason.ONE_BACKEND)
def test_request_that_never_ran_tells_nothing_of_its_prompt() -> None:
    backend = GatedBackend(1, 256, 200, hold_at=0)
    said: dict[str, Any] = {"prompt_logprobs": 0, "logprobs": 1, "echo": True}
    with closing(engine_on(backend, options={**LONG, **said})) as engine:
        response = engine.run([PROMPT, PROMPT])
        backend.wait_until_held()
        backend.release_when_asked()
        response.cancel()
        _, last = response.results(return_errors=True)
    assert (last.text, last.token_ids, last.logprobs, last.prompt_logprobs) == ("", (), (), ())


@pytest.mark.parametrize("chunk_alignment", [8, 32])
def test_pieces_of_exact_are_scored_whole(chunk_alignment: int) -> None:
    """Where pieces are larger than what a step can score, those of a scored prompt are smaller, and nobody's else."""
    backend = FakeBackend(2, 256, 64, memory=KvCapabilities("partitioned", 512, can_copy=True))
    backend.cuts = PromptCuts.every(chunk_alignment)
    with (
        patch("cbatch.core.scheduler.N_TARGETS_MAX", 16),
        patch("cbatch.core.span.N_TARGETS_MAX", 16),
        closing(engine_on(backend, options=LONG)) as engine,
    ):
        results = [answer(engine, seed=3, prompt_logprobs=0)]
        results += all_results(
            engine.run([PROMPT, PROMPT[::-1]], options={"seed": 3, "prompt_logprobs": 0})
        )
        plain = answer(engine, seed=3)
    first, second, other = results
    assert figures(first.prompt_logprobs) == wanted(backend, PROMPT, 0)
    assert first.prompt_logprobs == second.prompt_logprobs
    assert figures(other.prompt_logprobs) == wanted(backend, PROMPT[::-1], 0)
    assert first.token_ids == second.token_ids == plain.token_ids
    assert {len(c.targets) for p in backend.plans for c in p.spans} <= {
        0,
        min(chunk_alignment, 16),
        2,
        3,
    }
    assert (plain.usage.cached_tokens > 0) == (chunk_alignment <= 16)


# ---- echo ----


def test_echo_has_the_prompt_before_the_answer(engine: Engine) -> None:
    result, plain = answer(engine, seed=1, echo=True), answer(engine, seed=1)
    assert result.text == PROMPT + plain.text
    assert result.token_ids == (*PROMPT.encode(), *plain.token_ids)
    assert result.usage.completion_tokens == plain.usage.completion_tokens
    assert result.prompt_logprobs is None
    assert result.logprobs is None


def test_echo_of_tokens_is_their_text(engine: Engine) -> None:
    result = answer(engine, BatchPrompt(tokens=list("été".encode())), max_tokens=0, echo=True)
    assert (result.text, result.finish_reason) == ("été", "length")


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_echo_with_logprobs_has_those_of_the_prompt(
    engine: Engine, backend: FakeBackend, max_tokens: int
) -> None:
    result = answer(engine, echo=True, logprobs=2, max_tokens=max_tokens, seed=1)
    assert result.logprobs is not None
    assert [t.token_id for t in result.logprobs] == list(result.token_ids)
    first, *behind = result.logprobs[: len(PROMPT)]
    assert (first.text, first.top) == (PROMPT[0], ())
    assert math.isnan(first.logprob)
    assert figures(behind) == wanted(backend, PROMPT, 2)[1:]
    alone = answer(engine, logprobs=2, max_tokens=1, seed=1).logprobs or ()
    assert result.logprobs[len(PROMPT) :] == alone[:max_tokens]


@pytest.mark.parametrize(("n_prompt_top", "n_top"), [(3, 1), (1, 3), (0, 2), (2, 2)])
def test_echo_and_prompt_logprobs_have_as_many_alternatives_as_each_asks(
    engine: Engine, n_prompt_top: int, n_top: int
) -> None:
    said = {"echo": True, "logprobs": n_top, "prompt_logprobs": n_prompt_top, "seed": 1}
    result = answer(engine, **said)
    for longer in (result, engine.extend(result, 2).result(), *answer(engine, n=2, **said).choices):
        assert {len(t.top) for t in (longer.prompt_logprobs or ())[1:] if t} == {n_prompt_top}
        assert {len(t.top) for t in (longer.logprobs or ())[1:]} == {n_top}


def test_echo_is_streamed_with_the_first_chunk(engine: Engine) -> None:
    response = engine.run([PROMPT], options={"echo": True, "seed": 1})
    chunks = list(response)
    [result] = response.results()
    assert chunks[0].text.startswith(PROMPT)
    assert "".join(c.text for c in chunks) == result.text
    assert tuple(t for c in chunks for t in c.token_ids) == result.token_ids


def test_echo_of_a_chat_is_refused_with_the_way_out(engine: Engine) -> None:
    with pytest.raises(ConfigError, match="prompt_logprobs"):
        engine.run([{"role": "user", "content": "Hi"}], options={"echo": True})


def test_extended_echo_is_that_of_one_run(engine: Engine, backend: FakeBackend) -> None:
    said: dict[str, Any] = {"echo": True, "logprobs": 2, "seed": 1}
    first = answer(engine, **said)
    n_scored = sum(n_targets(backend.plans))
    longer = engine.extend(first, 5).result()
    assert sum(n_targets(backend.plans)) == n_scored
    whole = answer(engine, **said, max_tokens=11)
    assert (longer.text, longer.token_ids) == (whole.text, whole.token_ids)
    assert longer.prompt_logprobs == whole.prompt_logprobs
    assert repr(longer.logprobs) == repr(whole.logprobs)  # a NaN is not itself


# ---- several answers ----


def test_prompt_of_several_answers_is_scored_once(engine: Engine, backend: FakeBackend) -> None:
    said: dict[str, Any] = {"echo": True, "logprobs": 2, "seed": 1}
    result = answer(engine, n=3, **said)
    assert sum(n_targets(backend.plans)) == len(PROMPT) - 1
    alone = [answer(engine, **{**said, "seed": 1 + i}) for i in range(3)]
    for choice, wanted in zip(result.choices, alone, strict=True):
        assert choice.text == wanted.text
        assert choice.prompt_logprobs == wanted.prompt_logprobs
        assert repr(choice.logprobs) == repr(wanted.logprobs)
    longer = engine.extend(replace(result.choices[2]), 2).result()
    assert longer.prompt_logprobs == result.prompt_logprobs


def test_best_of_looks_at_the_answers_alone(engine: Engine) -> None:
    for seed in range(6):
        plain = answer(engine, best_of=5, seed=seed)
        echoed = answer(engine, best_of=5, seed=seed, echo=True, logprobs=True)
        assert echoed.token_ids[len(PROMPT) :] == plain.token_ids


# ---- what does not go together ----


def test_no_tokens_without_echo_are_refused_with_the_ways_out(engine: Engine) -> None:
    with pytest.raises(ConfigError, match=r"max_tokens.*echo.*prompt_logprobs.*prefill_only"):
        engine.run([PROMPT], options={"max_tokens": 0})
    result = answer(engine, max_tokens=0, prompt_logprobs=0)
    assert (result.text, result.finish_reason, result.usage.completion_tokens) == ("", "length", 0)


def test_cells_from_disk_are_not_for_a_scored_prompt() -> None:
    memory = KvCapabilities("partitioned", 512, can_save=True, can_copy=True)
    backend = FakeBackend(2, 256, 64, memory=memory)
    with closing(engine_on(backend, options=LONG)) as engine:
        with pytest.raises(ConfigError, match="cache_required"):
            answer(engine, prompt_logprobs=0, cache_key="k", cache_required=True)
        backend.cuts = PromptCuts.every(128)
        with pytest.raises(ConfigError, match="n_ubatch=64"):
            answer(engine, echo=True, logprobs=True, cache_key="k", save_cache=True)
