"""Log-probabilities of given tokens, by the native stepper and its Python twin."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cbatch.backend.llama.library import LlamaApi
from cbatch.backend.llama.native import NativeStepper
from cbatch.core.plan import Binding, Slot, StepResult, TokenLogprobs
from cbatch.core.span import N_TARGETS_MAX, Span
from cbatch.errors import PlanError
from cbatch.options import GREEDY, Sampling
from tests.native.test_native import N_SLOTS, N_VOCAB, FakeLlama, chunk
from tests.oracle import sampling
from tests.oracle.python_stepper import PythonStepper
from tests.profiles import examples

Stepper = NativeStepper | PythonStepper
MakeStepper = Callable[..., Any]


@dataclass(eq=False, slots=True)
class Noise(FakeLlama):
    """Every row is another one, told by slot and position; at position 13 it is broken."""

    def get_logits(self, ctx: int | None, i_token: int) -> int | None:
        batch = self.batches[-1]
        assert batch.logits[i_token] == 1
        row = noise(batch.slot[i_token], batch.pos[i_token], self.n_vocab)
        self.rows.append(row)
        return int(row.ctypes.data)


def noise(slot: int, pos: int, n_vocab: int = N_VOCAB) -> sampling.Logits:
    row = np.random.default_rng(100 * slot + pos).normal(0, 4, n_vocab).astype(np.float32)
    row[7] = np.nan if pos == 13 else row[7]
    return row


def scored(slot: int, start: int, *tokens: int, has_output: bool = False) -> Span:
    """A chunk of which every token but the last has the next one for its target."""
    return Span(Slot(slot), start, tokens, has_output, tokens[1:])


def make_stepper(kind: type[Stepper], fake: FakeLlama, **given: Any) -> Stepper:
    sizes = {"n_slots": N_SLOTS, "n_batch": 99, "n_vocab": fake.n_vocab}
    said: dict[str, Any] = {**sizes, "n_threads": 1, "api": fake.api(), **given}
    stepper = kind(None, **said)
    bind(stepper, (0,) * N_SLOTS)
    return stepper


def bind(stepper: Stepper, n_tops: Sequence[int]) -> None:
    for slot, n_top in enumerate(n_tops):
        stepper.bind(Binding(Slot(slot), 0, GREEDY, (), n_target_top=n_top))


@pytest.fixture(params=[NativeStepper, PythonStepper], ids=["native", "python"])
def make(request: pytest.FixtureRequest) -> Iterator[MakeStepper]:
    """Return a factory of steppers whose every slot is bound to greedy sampling."""
    made: list[Stepper] = []

    def make_one(fake: FakeLlama, **given: Any) -> Stepper:
        made.append(make_stepper(request.param, fake, **given))
        return made[-1]

    yield make_one
    for stepper in made:
        stepper.close()


def assert_alike(found: TokenLogprobs, wanted: TokenLogprobs) -> None:
    assert found.logprob == pytest.approx(wanted.logprob, abs=1e-5, rel=1e-6, nan_ok=True)
    assert [t for t, _ in found.top] == [t for t, _ in wanted.top]
    tops = [p for _, p in wanted.top]
    assert [p for _, p in found.top] == pytest.approx(tops, abs=1e-5, rel=1e-6)


def test_targets_are_scored_by_the_row_before_each(make: MakeStepper) -> None:
    fake = Noise()
    stepper = make(fake)
    bind(stepper, (2, 0, 0))
    result = stepper.run(
        [scored(0, 3, 5, 6, 7), chunk(1, 8, 1), scored(2, 0, 9, 4, has_output=True)]
    )
    assert fake.batches[0].logits == [1, 1, 1, 1, 0, 1]
    assert list(result.scores) == [0, 2]
    first, second = result.scores[Slot(0)]
    assert_alike(first, sampling.logprobs(noise(0, 3), 6, 2))
    assert_alike(second, sampling.logprobs(noise(0, 4), 7, 2))
    assert_alike(result.scores[Slot(2)][0], sampling.logprobs(noise(2, 0), 4, 0))
    assert result.tokens == [[], [int(noise(1, 8).argmax())], [int(noise(2, 1).argmax())]]


def test_scores_are_of_the_models_own_logits(make: MakeStepper) -> None:
    stepper = make(Noise())
    biased = Sampling(temperature=0.0, repeat_penalty=9.0, logit_bias=((6, 40.0),))
    stepper.bind(Binding(Slot(0), 0, biased, (), (5, 6)))
    result = stepper.run([scored(0, 0, 5, 6, has_output=True)])
    assert_alike(result.scores[Slot(0)][0], sampling.logprobs(noise(0, 0), 6, 0))


def test_slot_that_was_never_bound_can_be_scored() -> None:
    for kind in (NativeStepper, PythonStepper):
        sizes: dict[str, Any] = {"n_slots": 1, "n_batch": 4, "n_vocab": N_VOCAB, "n_threads": 1}
        stepper: Stepper = kind(None, **sizes, api=Noise().api())
        assert len(stepper.run([scored(0, 0, 1, 2)]).scores[Slot(0)]) == 1


def test_broken_row_has_a_score_that_is_no_number(make: MakeStepper) -> None:
    before, broken, behind = make(Noise()).run([scored(1, 12, 1, 2, 3, 4)]).scores[Slot(1)]
    assert math.isfinite(before.logprob)
    assert math.isnan(broken.logprob)
    assert broken.top == ()
    assert math.isfinite(behind.logprob)


def test_failed_step_scores_nothing(make: MakeStepper) -> None:
    result = make(Noise(codes={0: 2})).run([scored(0, 0, 1, 2)])
    assert (result.code, result.n_steps, dict(result.scores)) == (2, 0, {})


def test_run_without_targets_reports_no_scores(make: MakeStepper) -> None:
    assert dict(make(Noise()).run([chunk(0, 0, 1, 2)]).scores) == {}


@pytest.mark.parametrize(
    "chunks",
    [
        [Span(Slot(0), 0, (1,), False, (2, 3))],
        [Span(Slot(0), 0, (1, 2), True, (2, 3))],
        [Span(Slot(0), 0, (1, 2), False, (N_VOCAB,))],
        [Span(Slot(0), 0, (1, 2), False, (-1,))],
        [scored(0, 0, *range(40)), scored(1, 0, *range(27))],
    ],
    ids=["more", "output", "high", "low", "many"],
)
def test_targets_that_do_not_fit_are_refused(make: MakeStepper, chunks: list[Span]) -> None:
    fake = Noise()
    with pytest.raises(PlanError):
        make(fake).run(chunks)
    assert fake.batches == []


@pytest.mark.parametrize("n_top", [-1, 21])
def test_alternatives_out_of_range_are_refused(make: MakeStepper, n_top: int) -> None:
    stepper = make(Noise())
    bind(stepper, (n_top,))
    with pytest.raises(PlanError):
        stepper.run([scored(0, 0, 1, 2)])


def test_targets_in_several_steps_are_refused(make: MakeStepper) -> None:
    with pytest.raises(PlanError):
        make(Noise()).run([scored(0, 0, 1, 2, has_output=True)], n_steps=2)


def test_as_many_targets_as_there_is_room_for_are_scored(make: MakeStepper) -> None:
    result = make(Noise()).run([scored(0, 20, *range(40)), scored(1, 20, *range(26))])
    assert {slot: len(scores) for slot, scores in result.scores.items()} == {0: 39, 1: 25}


@st.composite
def steps(draw: st.DrawFn) -> list[Span]:
    slots = sorted(draw(st.sets(st.integers(0, N_SLOTS - 1), min_size=1)))
    token = st.integers(0, N_VOCAB - 1)
    chunks = []
    for slot in slots:
        tokens, has_output = draw(st.lists(token, min_size=1, max_size=4)), draw(st.booleans())
        n_most = min(2, len(tokens) - has_output)
        targets = draw(st.lists(token, max_size=n_most))
        start = draw(st.integers(0, 30))
        chunks.append(Span(Slot(slot), start, tokens, has_output, targets))
    return chunks


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(steps(), min_size=1, max_size=4), st.lists(st.integers(0, 20), max_size=N_SLOTS))
def test_native_and_python_steppers_score_the_same(
    workload: list[list[Span]], n_tops: list[int]
) -> None:
    ours, theirs = Noise(), Noise()
    native, python = make_stepper(NativeStepper, ours), make_stepper(PythonStepper, theirs)
    bind(native, n_tops)
    bind(python, n_tops)
    for chunks in workload:
        found, wanted = native.run(chunks), python.run(chunks)
        assert found.tokens == wanted.tokens
        assert found.scores.keys() == wanted.scores.keys()
        for slot, scores in wanted.scores.items():
            for one, other in zip(found.scores[slot], scores, strict=True):
                assert_alike(one, other)
    assert ours.batches == theirs.batches


def test_team_of_ggmls_openmp_gives_the_same_scores() -> None:
    gomp = LlamaApi.of_llama_cpp().gomp_parallel
    if gomp is None:
        pytest.skip("this llama-cpp-python computes without OpenMP")

    def found(gomp_parallel: int | None, n_threads: int) -> StepResult:
        fake = Noise(n_vocab=40_000)  # some rows of it are work for a team
        api = fake.api(gomp_parallel)
        stepper = make_stepper(NativeStepper, fake, api=api, n_threads=n_threads)
        bind(stepper, (3,))
        return stepper.run([scored(0, 20, *range(N_TARGETS_MAX + 1), has_output=True)])

    assert len(found(gomp, 2).scores[Slot(0)]) == N_TARGETS_MAX
    assert found(gomp, 2).scores == found(None, 1).scores
