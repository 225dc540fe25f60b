"""Drafts of a smaller model: the same tokens, in fewer steps, and cells of the slots in its own context."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cbatch.backend.llama.native import NativeStepper
from cbatch.core.plan import Slot
from cbatch.core.span import N_TARGETS_MAX, Span
from cbatch.errors import PlanError
from cbatch.options import GREEDY, Sampling
from tests.native.test_drafts import (
    DRAFT,
    N_DRAFT_BATCH,
    N_VOCAB,
    SAMPLINGS,
    Pair,
    TextLlama,
    bindings_of,
    counts_of,
    generate,
    line,
    n_drafted,
)
from tests.profiles import examples

if TYPE_CHECKING:
    from collections.abc import Callable

PROMPTS = [[5, 9, 1], [8, 8, 2, 30]]


def unlike(tokens: list[int]) -> Any:
    """Logits of a text in which nothing repeats itself: the next token follows from how many there are."""
    logits = np.zeros(N_VOCAB, np.float32)
    logits[np.random.default_rng(len(tokens)).integers(0, N_VOCAB)] = 9.0
    return logits


def cheap(n_tokens: int) -> int:
    return 100_000


@settings(max_examples=examples(150), deadline=None)
@given(
    prompts=st.lists(
        st.lists(st.integers(0, N_VOCAB - 1), min_size=1, max_size=30), min_size=1, max_size=5
    ),
    sampling=SAMPLINGS,
    period=st.integers(1, 9),
    noises=st.tuples(st.integers(2, 30), st.integers(2, 30)),
    stop=st.sampled_from([(), (7,)]),
    counts=st.tuples(st.integers(2, 40), st.integers(1, 9)),
    draft_sizes=st.none()
    | st.tuples(st.integers(N_VOCAB - 6, N_VOCAB), st.sampled_from([20, 1000])),
    are_apart=st.booleans(),
    has_all=st.booleans(),
    sources=st.sampled_from([{}, {"has_drafts": False}]),
)
def test_answers_are_those_without_drafts(
    prompts: list[list[int]],
    sampling: Sampling,
    period: int,
    noises: tuple[int, int],
    stop: tuple[int, ...],
    counts: tuple[int, int],
    draft_sizes: tuple[int, int] | None,
    are_apart: bool,
    has_all: bool,
    sources: dict[str, Any],
) -> None:
    """Drafted from the text alone, or by a smaller model, too."""
    (n_steps, n_drafts), row = counts, line(period, noises[1])
    bindings = bindings_of(prompts, sampling, stop, **sources)
    alone, plain = generate(TextLlama(line(period, noises[0])), prompts, bindings, 40, 0, n_steps)
    given: dict[str, Any] = {"are_apart": are_apart, "has_all": has_all}
    if draft_sizes is not None:
        n_vocab, n_window = draft_sizes
        given["draft"] = TextLlama(
            lambda tokens: row(tokens)[:n_vocab].copy(), cheap, n_window=n_window, n_vocab=n_vocab
        )
    llama = TextLlama(line(period, noises[0]))
    found, drafted = generate(llama, prompts, bindings, 40, n_drafts, n_steps, **given)
    assert found == alone
    assert not any(any(r.n_drafts) for r in plain)
    assert all(0 <= sum(r.n_accepted) <= sum(r.n_drafts) for r in drafted)
    assert all(counts_of(r.drafted) == (*r.n_drafts, *r.n_accepted) for r in drafted)
    assert all(not are_apart or len(set(c)) == 1 for c in llama.counts if sum(c) > len(c) > 1)
    assert all(sum(c) - len(c) <= N_TARGETS_MAX for c in llama.counts)
    assert draft_sizes is None or all(sum(c) <= N_DRAFT_BATCH for c in given["draft"].counts)
    assert not sources or not any(r.n_drafts[0] for r in drafted if not are_apart)


def test_good_draft_model_takes_fewer_steps() -> None:
    bindings = bindings_of(PROMPTS, GREEDY)
    draft = TextLlama(unlike, cheap)
    _, results = generate(TextLlama(unlike), PROMPTS, bindings, 200, 7, 64, draft=draft)
    n_guessed = sum(r.n_drafts[2] for r in results)
    assert sum(r.n_steps for r in results) < 100
    assert n_guessed == sum(r.n_accepted[2] for r in results) > 150 * len(PROMPTS)


@pytest.mark.parametrize("has_model_drafts", [True, False])
def test_model_guesses_only_for_slots_that_allow_it(has_model_drafts: bool) -> None:
    sources: dict[str, Any] = {"has_drafts": False, "has_model_drafts": has_model_drafts}
    bindings = bindings_of(PROMPTS, GREEDY, **sources)
    draft = TextLlama(unlike, cheap)
    _, results = generate(TextLlama(unlike), PROMPTS, bindings, 60, 7, draft=draft, has_all=True)
    assert (sum(r.n_accepted[2] for r in results) > 50) is has_model_drafts
    assert n_drafted(results) == sum(r.n_drafts[2] for r in results)


@pytest.mark.parametrize(
    ("row", "cost_ns"),
    [(lambda tokens: unlike([*tokens, 1, 2, 3]), 100_000), (unlike, 2_000_000)],
    ids=["poor", "slow"],
)
def test_draft_model_that_does_not_pay_is_hardly_asked(
    row: Callable[[list[int]], Any], cost_ns: int
) -> None:
    draft, model = TextLlama(row, lambda n_tokens: cost_ns), TextLlama(unlike)
    generate(model, PROMPTS, bindings_of(PROMPTS, GREEDY), 400, 7, 64, draft=draft)
    assert draft.now_ns < 0.05 * model.now_ns


def test_model_that_is_seldom_sure_takes_no_more_than_it_brings() -> None:
    """Its guesses are right where they are checked, but later most are not worth that."""

    def row(tokens: list[int]) -> Any:
        logits = unlike(tokens)
        is_sure = len(tokens) < 200 or len(tokens) % 8 == 0
        return logits if is_sure else (logits[::-1] / 90).copy()

    bindings = bindings_of(PROMPTS[:1], GREEDY)
    plain, model = TextLlama(unlike, n_window=2000), TextLlama(unlike, n_window=2000)
    draft = TextLlama(row, lambda n_tokens: 500_000, n_window=2000)
    generate(plain, PROMPTS[:1], bindings, 1500, 0, 64)
    generate(model, PROMPTS[:1], bindings, 1500, 7, 64, draft=draft)
    assert model.now_ns + draft.now_ns < 1.05 * plain.now_ns


def test_short_answers_do_not_pay_for_a_long_prompt() -> None:
    prompt = [i % 31 for i in range(400)]
    draft = TextLlama(unlike, lambda n_tokens: n_tokens * 100_000)
    generate(TextLlama(unlike), [prompt], bindings_of([prompt], GREEDY), 8, 7, draft=draft)
    assert len(draft.cells[0]) < 100


def test_model_that_fails_drafts_no_more() -> None:
    bindings = bindings_of(PROMPTS, GREEDY)
    draft = TextLlama(unlike, cheap, code=-2)
    alone, _ = generate(TextLlama(unlike), PROMPTS, bindings, 60, 0)
    found, results = generate(TextLlama(unlike), PROMPTS, bindings, 60, 7, draft=draft)
    assert found == alone
    assert n_drafted(results) < 20


def stepper_of_one_slot(draft: TextLlama) -> tuple[Pair, NativeStepper]:
    """Return a model with its draft model, and a stepper of both."""
    pair = Pair(TextLlama(unlike), draft)
    stepper = NativeStepper(
        None, n_slots=1, n_batch=64, n_vocab=N_VOCAB, n_threads=1, api=pair.api()
    )
    stepper.draft_with(DRAFT, n_batch=64, n_window=1000, n_vocab=N_VOCAB)
    return pair, stepper


def test_slot_that_goes_to_another_request_keeps_the_beginning() -> None:
    draft = TextLlama(unlike, cheap)
    pair, stepper = stepper_of_one_slot(draft)
    for end in (1, 2):
        pair.model.cells.clear()
        prompt = [*range(30), end]
        stepper.bind(bindings_of([prompt], GREEDY)[0])
        tokens = stepper.run([Span(Slot(0), 0, prompt, has_output=True)]).tokens[0]
        while len(tokens) < 60:
            chunk = Span(Slot(0), len(prompt) + len(tokens) - 1, tokens[-1:], has_output=True)
            tokens += stepper.run([chunk], 8, n_drafts=7).tokens[0]
        assert draft.cells[0][:31] == prompt
    stepper.close()


@pytest.mark.parametrize("n_batch", [1, 3, 5, 16])
def test_guesses_are_computed_in_batches_that_the_context_takes(n_batch: int) -> None:
    """More rows than a batch has, and each is some tokens behind at first."""
    prompts = [[i, *range(6)] for i in range(12)]
    bindings, draft = bindings_of(prompts, GREEDY), TextLlama(unlike, cheap)
    alone, _ = generate(TextLlama(unlike), prompts, bindings, 40, 0)
    found, results = generate(
        TextLlama(unlike),
        prompts,
        bindings,
        40,
        3,
        draft=draft,
        has_all=True,
        n_draft_batch=n_batch,
    )
    assert found == alone
    assert max(sum(c) for c in draft.counts) == n_batch
    assert sum(r.n_accepted[2] for r in results) > 25 * len(prompts)


def test_model_drafts_again_for_a_slot_that_gets_the_same_prompt() -> None:
    draft = TextLlama(unlike, cheap)
    pair, stepper = stepper_of_one_slot(draft)
    stepper.has_all_drafts = True
    accepted = []
    prompt = [*range(30)]
    for history in (prompt, prompt[:20], prompt[:20], prompt):
        pair.model.cells.clear()
        stepper.bind(bindings_of([history], GREEDY)[0])
        chunk, n_right = Span(Slot(0), 0, history[:-1], has_output=False), 0
        stepper.run([chunk])
        tokens = [history[-1]]
        while len(tokens) < 40:
            chunk = Span(Slot(0), len(history) + len(tokens) - 2, tokens[-1:], has_output=True)
            result = stepper.run([chunk], 8, n_drafts=7)
            assert result.n_drafts == result.n_accepted
            tokens, n_right = [*tokens, *result.tokens[0]], n_right + result.n_accepted[2]
        accepted.append(n_right)
    stepper.close()
    assert min(accepted) > 20


def test_tokens_that_the_target_lacks_are_not_drafted() -> None:
    fed: set[int] = set()

    def see(tokens: list[int]) -> Any:
        fed.update(tokens)
        return unlike(tokens)

    def row(tokens: list[int]) -> Any:
        return np.append(unlike(tokens), np.full(8, 20, np.float32))

    draft = TextLlama(row, cheap, n_vocab=N_VOCAB + 8)
    generate(
        TextLlama(see), PROMPTS, bindings_of(PROMPTS, GREEDY), 40, 7, draft=draft, has_all=True
    )
    assert max(fed) < N_VOCAB


def test_draft_model_is_refused_where_memory_cannot_be_cut() -> None:
    llama = TextLlama(unlike)
    stepper = NativeStepper(
        None, n_slots=1, n_batch=8, n_vocab=N_VOCAB, n_threads=1, api=llama.api(can_cut=False)
    )
    with pytest.raises(PlanError, match="draft"):
        stepper.draft_with(DRAFT, n_batch=8, n_window=8, n_vocab=N_VOCAB)
    stepper.close()
