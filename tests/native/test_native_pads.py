"""Pad rows in the native stepper and its Python twin: computed to give a step its shape, and nothing sampled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from cbatch.backend.llama.native import NativeStepper
from cbatch.core.plan import Binding, Slot
from cbatch.core.span import Span
from cbatch.errors import PlanError
from cbatch.options import GREEDY, Sampling
from tests.native.test_native import (
    AGAIN,
    N_BATCH,
    N_SLOTS,
    Countdown,
    FakeLlama,
    SeenBatch,
    chunk,
    native_stepper,
)
from tests.native.test_targets import Noise, noise
from tests.oracle.python_stepper import PythonStepper

Stepper = NativeStepper | PythonStepper
MakeStepper = Callable[..., Any]
DRY = Sampling(
    temperature=0.0, dry_multiplier=100.0, dry_base=2.0, dry_allowed_length=1, dry_penalty_last_n=99
)


@pytest.fixture(params=[NativeStepper, PythonStepper], ids=["native", "python"])
def make(request: pytest.FixtureRequest) -> Iterator[MakeStepper]:
    """Return a factory of steppers whose slots 0 and 2 are bound to greedy sampling, the others never."""
    made: list[Stepper] = []

    def make_stepper(fake: FakeLlama, **given: Any) -> Stepper:
        sizes = {"n_slots": N_SLOTS, "n_batch": N_BATCH, "n_vocab": fake.n_vocab, "n_threads": 1}
        stepper: Stepper = request.param(None, **{**sizes, "api": fake.api(), **given})
        made.append(stepper)
        for slot in (0, 2):
            stepper.bind(Binding(Slot(slot), 0, GREEDY, ()))
        return stepper

    yield make_stepper
    for stepper in made:
        stepper.close()


def pad(slot: int, start: int, *tokens: int) -> Span:
    return chunk(slot, start, *tokens or (0,), has_output=False)


def test_pad_row_is_computed_with_its_logits_and_not_sampled(make: MakeStepper) -> None:
    fake, pads = FakeLlama(), [pad(1, 9), pad(3, 0)]
    result = make(fake).run([chunk(0, 5, 7), pads[0], chunk(2, 8, 9), pads[1]], pads=pads)
    assert fake.batches == [
        SeenBatch(token=[7, 0, 9, 0], pos=[5, 9, 8, 0], slot=[0, 1, 2, 3], logits=[1, 1, 1, 1])
    ]
    assert fake.fetched == [0, 2]
    assert result.tokens == [[5], [], [28], []]


def test_chunk_that_is_no_pad_keeps_what_it_says(make: MakeStepper) -> None:
    fake, a_pad = FakeLlama(), pad(1, 0)
    make(fake).run([chunk(0, 0, 1, has_output=False), a_pad], pads=[a_pad])
    assert (fake.batches[0].logits, fake.fetched) == ([0, 1], [])


def test_pad_row_in_a_bound_slot_is_not_sampled_either(make: MakeStepper) -> None:
    fake, a_pad = FakeLlama(), pad(2, 4)
    assert make(fake).run([chunk(0, 0, 1), a_pad], pads=[a_pad]).tokens == [[0], []]
    assert fake.fetched == [0]


def test_pad_rows_go_on_a_position_a_step(make: MakeStepper) -> None:
    fake, pads = FakeLlama(), [pad(1, 9), pad(3, 0)]
    chunks = [chunk(0, 3, 1), pads[0], chunk(2, 6, 9), pads[1]]
    result = make(fake).run(chunks, n_steps=3, pads=pads)
    assert result.tokens == [[3, 4, 5], [], [26, 27, 28], []]
    assert result.n_steps == 3
    assert fake.batches[1:] == [
        SeenBatch(token=[3, 0, 26, 0], pos=[4, 10, 7, 1], slot=[0, 1, 2, 3], logits=[1] * 4),
        SeenBatch(token=[4, 0, 27, 0], pos=[5, 11, 8, 2], slot=[0, 1, 2, 3], logits=[1] * 4),
    ]


def test_run_of_pad_rows_alone_computes_and_samples_nothing(make: MakeStepper) -> None:
    fake, a_pad = FakeLlama(), pad(1, 4)
    result = make(fake).run([a_pad], n_steps=2, pads=[a_pad])
    assert (result.tokens, result.n_steps, fake.fetched) == ([[]], 2, [])
    assert [batch.pos for batch in fake.batches] == [[4], [5]]


def test_pad_rows_end_no_run(make: MakeStepper) -> None:
    fake, a_pad = FakeLlama(next_token=lambda slot, pos: 5), pad(2, 0)
    stepper = make(fake)
    stepper.bind(Binding(Slot(2), 0, GREEDY, (0, 5)))
    assert stepper.run([chunk(0, 0, 1), a_pad], n_steps=4, pads=[a_pad]).n_steps == 4


def test_broken_logits_of_a_pad_row_are_not_looked_at(make: MakeStepper) -> None:
    fake, a_pad = FakeLlama(next_token=lambda slot, pos: -1 if slot == 1 else 5), pad(1, 0)
    result = make(fake).run([chunk(0, 0, 1), a_pad], n_steps=3, pads=[a_pad])
    assert (result.tokens, result.n_steps) == ([[5, 5, 5], []], 3)


def test_run_that_decoding_ends_keeps_the_steps_that_were_done(make: MakeStepper) -> None:
    fake, a_pad = FakeLlama(codes={2: 2}), pad(1, 0)
    result = make(fake).run([chunk(0, 0, 1), a_pad], n_steps=9, pads=[a_pad])
    assert (result.tokens, result.n_steps, result.code) == ([[0, 1], []], 2, 2)


# ---- what belongs to the other rows stays theirs ----


def test_masks_are_not_shifted_by_pad_rows(make: MakeStepper) -> None:
    stepper, pads = make(Countdown()), [pad(1, 0), pad(3, 0)]
    only_3, only_4 = (np.array([1 << i, 0], dtype=np.uint32) for i in (3, 4))
    stepper.bind(Binding(Slot(3), 0, GREEDY, ()))
    result = stepper.run([pads[0], chunk(2, 0, 1)], masks=[only_4], pads=pads[:1])
    assert result.tokens == [[], [4]]
    chunks = [chunk(0, 0, 1), pads[0], chunk(2, 1, 1), pads[1]]
    assert stepper.run(chunks, masks=[only_3, only_4], pads=pads).tokens == [[3], [], [4], []]
    a_pad, stepped = pad(0, 1), [chunk(2, 2, 1, 2), chunk(3, 0, 1)]
    result = stepper.run([a_pad, *stepped], masks=[only_3, only_4], pads=[a_pad])
    assert result.tokens == [[], [3], [4]]


def test_logprobs_are_not_shifted_by_pad_rows(make: MakeStepper) -> None:
    found = []
    for pads in ([], [pad(1, 5), pad(3, 0)]):
        stepper = make(Noise())
        for slot in (0, 2):
            stepper.bind(Binding(Slot(slot), 0, GREEDY, (), (), 2))
        rows = sorted([chunk(0, 3, 1), chunk(2, 6, 9), *pads], key=lambda c: c.slot)
        result = stepper.run(rows, n_steps=3, pads=pads)
        reports = dict(zip((c.slot for c in rows), result.logprobs, strict=True))
        assert [len(reports[c.slot]) for c in pads] == [0] * len(pads)
        assert len(reports[Slot(0)]) == len(reports[Slot(2)]) == 3
        found.append((reports[Slot(0)], reports[Slot(2)]))
    assert found[0] == found[1]


def test_targets_are_not_shifted_by_pad_rows(make: MakeStepper) -> None:
    a_pad = pad(1, 4)
    stepper = make(Noise(), n_batch=99)
    scored = Span(Slot(2), 2, (4, 5), has_output=True, targets=(5,))
    result = stepper.run([chunk(0, 0, 1), a_pad, scored], pads=[a_pad])
    assert list(result.scores) == [2]
    row = noise(2, 2).astype(np.float64)
    expected = row[5] - np.log(np.exp(row).sum())
    assert [found.logprob for found in result.scores[Slot(2)]] == pytest.approx(
        [expected], abs=1e-5
    )
    assert result.tokens == [
        [int(noise(0, 0).argmax())],
        [],
        [int(noise(2, 3).argmax())],
    ]


@pytest.mark.parametrize("n_steps", [1, 4])
def test_history_of_a_bound_slot_is_not_fed_by_its_pad_rows(
    make: MakeStepper, n_steps: int
) -> None:
    stepper, a_pad = make(Countdown()), pad(2, 3, 9)
    stepper.bind(Binding(Slot(2), 3, AGAIN, (), (9, 8, 7)))
    assert stepper.run([chunk(2, 2, 7)]).tokens == [[6]]
    stepper.run([chunk(0, 0, 1), a_pad], n_steps=n_steps, pads=[a_pad])
    assert stepper.run([chunk(2, 3, 6)], n_steps=2).tokens == [[9, 8]]


def test_pad_row_before_the_first_output_places_no_history(make: MakeStepper) -> None:
    stepper, a_pad = make(Countdown()), pad(2, 3, 9)
    stepper.bind(Binding(Slot(2), 3, AGAIN, (), (9, 8, 7)))
    stepper.run([chunk(0, 0, 1), a_pad], pads=[a_pad])
    assert stepper.run([chunk(2, 2, 7)], n_steps=3).tokens == [[6, 9, 8]]


@pytest.mark.parametrize("n_steps", [1, 4])
def test_dry_of_a_bound_slot_does_not_see_its_pad_rows(make: MakeStepper, n_steps: int) -> None:
    found = []
    for pads in ([], [pad(2, 5, 9)]):
        stepper = make(Countdown())
        stepper.bind(Binding(Slot(2), 5, DRY, (), (1, 9, 2, 3, 1)))
        assert stepper.run([chunk(2, 4, 1)]).tokens == [[8]]  # 9 has followed 1 before
        stepper.run([chunk(0, 0, 1), *pads], n_steps=n_steps, pads=pads)
        found.append(stepper.run([chunk(2, 5, 8)], n_steps=4).tokens)
    assert found[0] == found[1] == [[9, 9, 8, 8]]


# ---- what is refused ----


@pytest.mark.parametrize(
    ("chunks", "i_pads", "n_steps", "words"),
    [
        pytest.param([chunk(0, 0, 1), pad(1, 0, 1, 2)], [1], 1, "a pad row of several", id="two"),
        pytest.param(
            [chunk(0, 0, 1), pad(1, 0), pad(3, 0)], [1], 2, "without output", id="steps, no output"
        ),
        pytest.param([chunk(0, 0, 1), pad(N_SLOTS, 0)], [1], 1, "out of range", id="slot"),
        pytest.param([pad(0, -1)], [0], 1, "start out of range", id="start"),
        pytest.param([pad(0, 2**31 - 2)], [0], 2, "start out of range", id="end"),
        pytest.param([pad(0, 0, -1)], [0], 1, "outside the vocabulary", id="token"),
        pytest.param(
            [chunk(0, 0, *[1] * N_BATCH), pad(1, 0)], [1], 1, "more tokens than n_batch", id="full"
        ),
        pytest.param([pad(1, 0), chunk(3, 0, 1)], [0], 1, "never bound", id="output not bound"),
    ],
)
def test_wrong_native_run_with_pad_rows_is_refused_and_does_nothing(
    chunks: list[Span], i_pads: list[int], n_steps: int, words: str
) -> None:
    fake = FakeLlama()
    stepper = native_stepper(fake)
    for slot in (0, 2):
        stepper.bind(Binding(Slot(slot), 0, GREEDY, ()))
    with pytest.raises(PlanError, match=words):
        stepper.run(chunks, n_steps, pads=[chunks[i] for i in i_pads])
    assert fake.batches == []
    assert stepper.run([chunk(0, 0, 1)]).tokens == [[0]]
