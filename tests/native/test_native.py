"""The native stepper and its Python twin, driven by stand-ins for llama.cpp's functions."""

from __future__ import annotations

import ctypes
import math
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import llama_cpp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cbatch.backend.llama import native
from cbatch.backend.llama.library import LlamaApi, library
from cbatch.backend.llama.native import NativeStepper
from cbatch.backend.llama.row_changes import RowChanges
from cbatch.backend.llama.structs import NativeSizes
from cbatch.backend.logits_processors import LogitsProcessors
from cbatch.core.plan import BROKEN_ROW, Binding, OwnProcessor, Slot, StepResult
from cbatch.core.span import Span
from cbatch.errors import EngineClosedError, PlanError
from cbatch.options import GREEDY, Sampling
from tests.oracle import native_row
from tests.oracle.python_stepper import PythonStepper
from tests.profiles import examples

Stepper = NativeStepper | PythonStepper
N_SLOTS, N_BATCH, N_VOCAB = 4, 16, 50

DECODE = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, llama_cpp.llama_batch)
GET_LOGITS = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32)
SYNCHRONIZE = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
TASK = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
GOMP = ctypes.CFUNCTYPE(None, TASK, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)


@dataclass(frozen=True, slots=True)
class SeenBatch:
    token: list[int]
    pos: list[int]
    slot: list[int]
    logits: list[int]

    @classmethod
    def of(cls, batch: Any) -> SeenBatch:
        n = batch.n_tokens
        assert batch.n_seq_id[:n] == [1] * n
        assert not batch.embd
        slots = [batch.seq_id[i][0] for i in range(n)]
        return cls(batch.token[:n], batch.pos[:n], slots, list(batch.logits[:n]))


@dataclass(eq=False, slots=True)
class FakeLlama:
    """Records batches; the likeliest token after (slot, position) is `next_token` of them."""

    next_token: Callable[[int, int], int] = lambda slot, pos: (10 * slot + pos) % N_VOCAB
    codes: dict[int, int] = field(default_factory=dict)
    """Return codes by number of the call, from 0; 0 where not said."""
    on_decode: Callable[[], None] = lambda: None
    n_vocab: int = N_VOCAB
    batches: list[SeenBatch] = field(default_factory=list)
    fetched: list[int] = field(default_factory=list)
    rows: list[Any] = field(default_factory=list)
    n_waits: int = 0

    def api(self, gomp_parallel: int | None = None) -> LlamaApi:
        decode, get_logits = DECODE(self.decode), GET_LOGITS(self.get_logits)
        return LlamaApi(decode, get_logits, gomp_parallel, SYNCHRONIZE(self.wait))

    def wait(self, ctx: int | None) -> None:
        self.n_waits += 1

    def decode(self, ctx: int | None, batch: Any) -> int:
        code = self.codes.get(len(self.batches), 0)
        self.batches.append(SeenBatch.of(batch))
        self.on_decode()
        return code

    def get_logits(self, ctx: int | None, i_token: int) -> int | None:
        batch = self.batches[-1]
        assert batch.logits[i_token] == 1
        self.fetched.append(i_token)
        token = self.next_token(batch.slot[i_token], batch.pos[i_token])
        if token < -1:
            return None
        row = np.zeros(self.n_vocab, dtype=np.float32)
        row[token] = np.nan if token == -1 else 9.0
        self.rows.append(row)
        return int(row.ctypes.data)


MakeStepper = Callable[..., Any]


@pytest.fixture(params=[NativeStepper, PythonStepper], ids=["native", "python"])
def make(request: pytest.FixtureRequest) -> Iterator[MakeStepper]:
    """Return a factory of steppers whose every slot is bound to greedy sampling."""
    made: list[Stepper] = []

    def make_stepper(fake: FakeLlama, **given: Any) -> Stepper:
        stop = given.pop("stop", ())
        sizes = {"n_slots": N_SLOTS, "n_batch": N_BATCH, "n_vocab": fake.n_vocab, "n_threads": 1}
        stepper = request.param(None, **{**sizes, "api": fake.api(), **given})
        for slot in range(N_SLOTS):
            stepper.bind(Binding(Slot(slot), 0, GREEDY, stop))
        made.append(stepper)
        return stepper  # type: ignore[no-any-return]

    yield make_stepper
    for stepper in made:
        stepper.close()


def chunk(slot: int, start: int, *tokens: int, has_output: bool = True) -> Span:
    return Span(Slot(slot), start, list(tokens), has_output)


# ---- one step ----


def test_run_fills_first_tokens_then_remainders_by_ascending_slot(make: MakeStepper) -> None:
    fake = FakeLlama()
    result = make(fake).run(
        [chunk(0, 5, 7), chunk(1, 0, 11, 12, 13), chunk(3, 8, 21, 22, has_output=False)]
    )
    assert fake.batches == [
        SeenBatch(
            token=[7, 11, 21, 12, 13, 22],
            pos=[5, 0, 8, 1, 2, 9],
            slot=[0, 1, 3, 1, 1, 3],
            logits=[1, 0, 0, 0, 1, 0],
        )
    ]
    assert fake.fetched == [0, 4]
    assert result.tokens == [[5], [12], []]
    assert (result.n_steps, result.code) == (1, 0)


def test_step_ends_when_a_device_has_computed_it(make: MakeStepper) -> None:
    """Fetching a row waits for the device; where there is no row, the stepper does."""
    fake = FakeLlama()
    stepper = make(fake)
    stepper.run([chunk(0, 0, 1), chunk(2, 0, 1, 2, has_output=False)])
    assert fake.n_waits == 0
    stepper.run([chunk(2, 2, 1, 2, has_output=False)])
    assert fake.n_waits == 1
    fake.codes[2] = -3
    stepper.run([chunk(2, 4, 1, 2, has_output=False)])
    assert fake.n_waits == 1


def test_run_without_outputs_samples_nothing(make: MakeStepper) -> None:
    fake = FakeLlama()
    result = make(fake).run([chunk(2, 0, 1, 2, has_output=False)])
    assert (result.tokens, result.n_steps, fake.fetched) == ([[]], 1, [])


def test_run_with_a_full_batch_is_done(make: MakeStepper) -> None:
    fake = FakeLlama()
    make(fake).run([chunk(0, 0, *range(N_BATCH))])
    assert fake.batches[0].token == list(range(N_BATCH))


def test_run_takes_tokens_from_any_sequence(make: MakeStepper) -> None:
    fake = FakeLlama()
    make(fake).run([Span(Slot(0), 0, (1, 2), has_output=True)])
    assert fake.batches[0].token == [1, 2]


def test_run_where_llama_gives_no_row_is_broken(make: MakeStepper) -> None:
    stepper = make(FakeLlama(next_token=lambda slot, pos: -2))
    stepper.bind(Binding(Slot(0), 0, GREEDY, (), (), 3))
    result = stepper.run([chunk(0, 0, 1)])
    assert result.tokens == [[BROKEN_ROW]]
    [[found]] = result.logprobs
    assert math.isnan(found.logprob)
    assert found.top == ()


def test_run_keys_the_generator_by_output_position(make: MakeStepper) -> None:
    how = Sampling(temperature=99.0, top_k=0, top_p=1.0, min_p=0.0, seed=9, i_choice=2)
    fake = FakeLlama(n_vocab=5000, next_token=lambda slot, pos: 0)
    stepper = make(fake)
    stepper.bind(Binding(Slot(1), 3, how, ()))
    found = stepper.run([chunk(1, 2, 4, 5)]).tokens  # positions 2 and 3: the token at 4 is output 1
    row = fake.rows[-1]
    binding = Binding(Slot(1), 3, how, ())
    assert found == [[native_row.sample_row(row, binding, 1).token]]
    assert found != [[native_row.sample_row(row, binding, 0).token]]


# ---- several steps ----


def test_run_of_several_steps_feeds_each_sampled_token(make: MakeStepper) -> None:
    fake = FakeLlama()
    result = make(fake).run([chunk(0, 3, 1, 2), chunk(2, 6, 9)], n_steps=3)
    assert result.tokens == [[4, 5, 6], [26, 27, 28]]
    assert fake.batches[1:] == [
        SeenBatch(token=[4, 26], pos=[5, 7], slot=[0, 2], logits=[1, 1]),
        SeenBatch(token=[5, 27], pos=[6, 8], slot=[0, 2], logits=[1, 1]),
    ]
    assert result.n_steps == 3


def test_run_of_many_steps_outgrows_the_first_buffer(make: MakeStepper) -> None:
    fake = FakeLlama(next_token=lambda slot, pos: pos % N_VOCAB)
    result = make(fake, n_slots=N_SLOTS).run([chunk(0, 0, 1), chunk(1, 5, 1)], n_steps=500)
    assert result.tokens[0] == [i % N_VOCAB for i in range(500)]
    assert result.tokens[1] == [(5 + i) % N_VOCAB for i in range(500)]


def test_run_ends_after_a_stop_token(make: MakeStepper) -> None:
    result = make(FakeLlama(), stop=(40, 27)).run([chunk(0, 0, 1), chunk(2, 6, 9)], n_steps=9)
    assert (result.tokens, result.n_steps) == ([[0, 1], [26, 27]], 2)


def test_run_ends_only_at_the_slots_own_stop_tokens(make: MakeStepper) -> None:
    stepper = make(FakeLlama())
    stepper.bind(Binding(Slot(0), 0, GREEDY, (27,)))
    stepper.bind(Binding(Slot(2), 0, GREEDY, (2,)))
    assert stepper.run([chunk(0, 0, 1), chunk(2, 6, 9)], n_steps=4).n_steps == 4


def test_bind_again_forgets_the_old_stop_tokens(make: MakeStepper) -> None:
    stepper = make(FakeLlama(), stop=(1,))
    stepper.bind(Binding(Slot(0), 0, GREEDY, ()))
    assert stepper.run([chunk(0, 0, 1)], n_steps=4).n_steps == 4


def test_run_ends_after_a_broken_row(make: MakeStepper) -> None:
    fake = FakeLlama(next_token=lambda slot, pos: -1 if (slot, pos) == (1, 2) else 5)
    result = make(fake).run([chunk(0, 0, 1), chunk(1, 1, 1)], n_steps=9)
    assert (result.tokens, result.n_steps) == ([[5, 5], [5, BROKEN_ROW]], 2)


def test_run_ends_when_decoding_fails(make: MakeStepper) -> None:
    result = make(FakeLlama(codes={2: 1})).run([chunk(0, 0, 1)], n_steps=9)
    assert (result.tokens, result.n_steps, result.code) == ([[0, 1]], 2, 1)


def test_run_whose_first_decode_fails_has_sampled_nothing(make: MakeStepper) -> None:
    fake = FakeLlama(codes={0: -3})
    result = make(fake).run([chunk(0, 0, 1), chunk(1, 0, 1, has_output=False)])
    assert (result.tokens, result.n_steps, result.code) == ([[], []], 0, -3)
    assert fake.fetched == []


def test_interrupt_ends_the_run_in_flight_after_its_step(make: MakeStepper) -> None:
    fake = FakeLlama()
    stepper = make(fake)
    fake.on_decode = lambda: stepper.interrupt() if len(fake.batches) == 2 else None
    assert stepper.run([chunk(0, 0, 1)], n_steps=9).n_steps == 2
    fake.on_decode = lambda: None
    assert stepper.run([chunk(0, 2, 1)], n_steps=9).n_steps == 9


def test_interrupt_without_a_run_ends_the_next_one_only(make: MakeStepper) -> None:
    stepper = make(FakeLlama())
    stepper.interrupt()
    assert stepper.run([chunk(0, 0, 1)], n_steps=9).n_steps == 1
    assert stepper.run([chunk(0, 1, 1)], n_steps=3).n_steps == 3


def test_interrupt_comes_from_another_thread(make: MakeStepper) -> None:
    fake = FakeLlama()
    stepper = make(fake)

    def interrupt_elsewhere() -> None:
        thread = threading.Thread(target=stepper.interrupt)
        thread.start()
        thread.join()

    fake.on_decode = interrupt_elsewhere
    assert stepper.run([chunk(0, 0, 1)], n_steps=9).n_steps == 1


def test_run_beyond_its_slice_ends_after_the_step(make: MakeStepper) -> None:
    for slice_s in (1e-6, 1e-9):
        assert make(FakeLlama()).run([chunk(0, 0, 1)], 9, slice_s=slice_s).n_steps == 1
    assert make(FakeLlama()).run([chunk(0, 0, 1)], 9, slice_s=1e6).n_steps == 9


def test_run_reports_where_its_time_went(make: MakeStepper) -> None:
    result = make(FakeLlama()).run([chunk(0, 0, 1)], n_steps=3)
    assert result.decode_s > 0
    assert result.sample_s > 0


def test_native_run_reports_the_time_of_its_first_step() -> None:
    stepper = native_stepper(FakeLlama())
    stepper.bind(Binding(Slot(0), 0, GREEDY, ()))
    result = stepper.run([chunk(0, 0, 1)], n_steps=3)
    assert 0 < result.first_s < result.decode_s + result.sample_s
    alone = stepper.run([chunk(0, 3, 1)])
    assert alone.first_s == pytest.approx(alone.decode_s + alone.sample_s)


def test_native_run_whose_first_decode_fails_reports_no_first_step() -> None:
    stepper = native_stepper(FakeLlama(codes={0: 2}))
    stepper.bind(Binding(Slot(0), 0, GREEDY, ()))
    assert stepper.run([chunk(0, 0, 1)]).first_s == 0


# ---- history, masks, log-probabilities ----

AGAIN = Sampling(temperature=0.0, repeat_penalty=100.0, repeat_last_n=3)
"""Greedy, but a token of the last three is as good as banned."""


def test_history_at_bind_is_seen_from_the_first_output_on(make: MakeStepper) -> None:
    stepper = make(Countdown())
    stepper.bind(Binding(Slot(0), 4, AGAIN, (), (9, 1, 2, 3)))
    stepper.bind(Binding(Slot(1), 4, AGAIN, (), (1, 9, 2, 3)))
    result = stepper.run([chunk(0, 0, 9, 1, 2, 3), chunk(1, 0, 1, 9, 2, 3)])
    assert result.tokens == [[9], [8]]
    stepper.bind(Binding(Slot(1), 4, GREEDY, (), (9, 9, 9, 9)))
    assert stepper.run([chunk(1, 4, 9)]).tokens == [[9]]


@dataclass(eq=False, slots=True)
class Countdown(FakeLlama):
    """Token 9 is the likeliest, then 8, 7, … down to 0."""

    def get_logits(self, ctx: int | None, i_token: int) -> int | None:
        row = np.zeros(self.n_vocab, dtype=np.float32)
        row[:10] = np.arange(1, 11)
        self.rows.append(row)
        return int(row.ctypes.data)


def test_history_grows_by_each_sampled_token_within_a_run(make: MakeStepper) -> None:
    stepper = make(Countdown())
    stepper.bind(Binding(Slot(0), 1, AGAIN, (), (5,)))
    assert stepper.run([chunk(0, 0, 5)], n_steps=6).tokens == [[9, 8, 7, 6, 9, 8]]
    assert stepper.run([chunk(0, 6, 8)], n_steps=2).tokens == [[7, 6]]


def test_history_takes_tokens_that_nobody_sampled(make: MakeStepper) -> None:
    stepper = make(Countdown())
    stepper.bind(Binding(Slot(0), 1, AGAIN, (), (5,)))
    assert stepper.run([chunk(0, 0, 5)]).tokens == [[9]]
    assert stepper.run([chunk(0, 1, 9, 8, has_output=False)]).tokens == [[]]
    assert stepper.run([chunk(0, 3, 7)]).tokens == [[6]]


def test_history_has_what_is_computed_again_once(make: MakeStepper) -> None:
    fake = Countdown(codes={1: 2})
    stepper = make(fake)
    stepper.bind(Binding(Slot(0), 2, AGAIN, (), (5, 4)))
    assert stepper.run([chunk(0, 0, 5, 4)]).tokens == [[9]]
    assert stepper.run([chunk(0, 2, 9)]).code == 2
    assert stepper.run([chunk(0, 1, 4, has_output=False)]).code == 0
    assert stepper.run([chunk(0, 2, 9)], n_steps=3).tokens == [[8, 7, 6]]


def test_history_is_kept_however_long_it_becomes(make: MakeStepper) -> None:
    stepper = make(Countdown())
    stepper.bind(Binding(Slot(0), 1, AGAIN, (), (5,)))
    found = stepper.run([chunk(0, 0, 5)], n_steps=50).tokens[0]
    assert found == [9 - i % 4 for i in range(50)]


def test_bind_in_the_middle_goes_on_as_if_it_had_not_been(make: MakeStepper) -> None:
    stepper = make(Countdown())
    stepper.bind(Binding(Slot(2), 1, AGAIN, (), (5, 9, 8)))
    pending = chunk(2, 0, 5, 9, 8, has_output=True)
    assert stepper.run([pending], n_steps=3).tokens == [[7, 6, 9]]


def test_masks_belong_to_the_chunks_with_an_output(make: MakeStepper) -> None:
    stepper = make(Countdown())
    only_3, only_4 = (np.array([1 << i, 0], dtype=np.uint32) for i in (3, 4))
    chunks = [chunk(0, 0, 1, 2), chunk(1, 0, 1, has_output=False), chunk(2, 0, 1), chunk(3, 0, 1)]
    masks = [only_3, None, only_4]
    assert stepper.run(chunks, masks=masks).tokens == [[3], [], [9], [4]]
    both = np.stack([only_3, only_4])
    assert stepper.run([chunk(0, 2, 1), chunk(3, 1, 1)], masks=both).tokens == [[3], [4]]
    assert stepper.run([chunk(0, 3, 1)]).tokens == [[9]]


def changes_of(chunks: list[Span], **own: Callable[[Any, Any], Any]) -> RowChanges:
    """The changes of a step's rows by processors of slots `s0`, `s1`, …"""
    processors = LogitsProcessors()
    for name, function in own.items():
        slot = Slot(int(name[1:]))
        processor = OwnProcessor(function, (1,), ())
        processors.bind(Binding(slot, 0, GREEDY, (), processor=processor))
    return RowChanges(processors, processors.of(chunks), chunks)


def test_changed_rows_are_sampled_and_the_models_rows_stay(make: MakeStepper) -> None:
    fake = Countdown()
    stepper, ban_9 = make(fake), lambda _, row: row.__setitem__(9, -1)
    stepper.bind(Binding(Slot(3), 0, GREEDY, (), n_logprobs=1))
    chunks = [chunk(0, 0, 1, 2), chunk(1, 0, 1, has_output=False), chunk(2, 0, 1), chunk(3, 0, 1)]
    plain = stepper.run(chunks)
    again = [chunk(c.slot, c.start, *c.inputs, has_output=c.has_output) for c in chunks]
    found = stepper.run(again, changes=changes_of(chunks, s2=ban_9, s3=ban_9))
    assert plain.tokens == [[9], [], [9], [9]]
    assert found.tokens == [[9], [], [8], [8]]
    assert found.logprobs[3][0].top == plain.logprobs[3][0].top
    assert all(row.max() == 10 for row in fake.rows)


def test_masks_come_after_changed_rows(make: MakeStepper) -> None:
    stepper, chunks = make(Countdown()), [chunk(0, 0, 1)]
    mask = np.array([1 << 3 | 1 << 5, 0], dtype=np.uint32)
    changes = changes_of(chunks, s0=lambda _, row: row.put([3, 7], [20, 30]))
    waited: list[int] = []
    found = stepper.run(chunks, masks=[mask], await_masks=lambda: waited.append(1), changes=changes)
    assert (found.tokens, waited) == ([[3]], [1])


def test_row_that_is_not_there_is_not_changed(make: MakeStepper) -> None:
    chunks, called = [chunk(0, 0, 1), chunk(1, 0, 1)], list[int]()
    fake = FakeLlama(next_token=lambda slot, _: -slot - 1)
    changes = changes_of(chunks, s0=lambda *_: called.append(0), s1=lambda *_: called.append(1))
    assert changes.told(make(fake).run(chunks, changes=changes)).tokens == [[BROKEN_ROW]] * 2
    assert called == []


def test_changes_with_several_steps_raise(make: MakeStepper) -> None:
    chunks = [chunk(0, 0, 1)]
    with pytest.raises(PlanError):
        make(Countdown()).run(chunks, n_steps=2, changes=changes_of(chunks))


@pytest.mark.parametrize("n_masks", [0, 2])
def test_masks_of_another_number_raise(make: MakeStepper, n_masks: int) -> None:
    fake = Countdown()
    with pytest.raises(PlanError):
        make(fake).run([chunk(0, 0, 1)], masks=[None] * n_masks)
    assert fake.batches == []


def test_masks_with_several_steps_raise(make: MakeStepper) -> None:
    with pytest.raises(PlanError):
        make(Countdown()).run([chunk(0, 0, 1)], n_steps=2, masks=[None])


@pytest.mark.parametrize(
    "mask",
    [
        np.zeros(1, np.uint32),
        np.zeros(2, np.int32),
        np.zeros((1, 2), np.uint32),
        np.zeros(4, np.uint32)[::2],
    ],
    ids=["short", "signed", "two dimensions", "gaps"],
)
def test_native_mask_of_another_shape_raises(mask: Any) -> None:
    stepper = native_stepper(Countdown())
    stepper.bind(Binding(Slot(0), 0, GREEDY, ()))
    with pytest.raises(PlanError, match="2 words"):
        stepper.run([chunk(0, 0, 1)], masks=[mask])


def test_logprobs_come_with_each_token_of_the_slots_that_want_them(make: MakeStepper) -> None:
    stepper = make(Countdown())
    stepper.bind(Binding(Slot(0), 0, AGAIN, (), (), 2))
    result = stepper.run([chunk(0, 0, 1), chunk(1, 0, 1)], n_steps=3)
    assert result.tokens == [[9, 8, 7], [9, 9, 9]]
    row = np.zeros(N_VOCAB)
    row[:10] = np.arange(1, 11)
    p = row - np.log(np.exp(row).sum())
    wanted, none = result.logprobs
    assert list(none) == []
    assert [found.logprob for found in wanted] == pytest.approx([p[9], p[8], p[7]], abs=1e-5)
    for found in wanted:
        assert [token for token, _ in found.top] == [9, 8]
        assert [q for _, q in found.top] == pytest.approx([p[9], p[8]], abs=1e-5)


def test_logprobs_are_empty_where_nobody_wants_them(make: MakeStepper) -> None:
    stepper = make(Countdown())
    stepper.bind(Binding(Slot(0), 0, GREEDY, (), (), 0))
    assert len(stepper.run([chunk(0, 0, 1), chunk(1, 0, 1)]).logprobs) == 2
    assert stepper.run([chunk(1, 1, 1)]).logprobs == ()
    stepper.bind(Binding(Slot(0), 0, GREEDY, ()))
    assert stepper.run([chunk(0, 1, 1)]).logprobs == ()


# ---- plans that break a rule ----


@pytest.mark.parametrize(
    ("chunks", "n_steps"),
    [
        pytest.param([], 1, id="no chunk"),
        pytest.param([chunk(1, 0, 1), chunk(0, 0, 1)], 1, id="descending slots"),
        pytest.param([chunk(1, 0, 1), chunk(1, 1, 1)], 1, id="one slot twice"),
        pytest.param([chunk(-1, 0, 1)], 1, id="slot below 0"),
        pytest.param([chunk(N_SLOTS, 0, 1)], 1, id="slot too high"),
        pytest.param([chunk(0, 0)], 1, id="no token"),
        pytest.param([chunk(0, -1, 1)], 1, id="start below 0"),
        pytest.param([chunk(0, 0, N_VOCAB)], 1, id="token too high"),
        pytest.param([chunk(0, 0, -1)], 1, id="token below 0"),
        pytest.param([chunk(0, 0, 1), chunk(1, 0, *[1] * N_BATCH)], 1, id="batch too full"),
        pytest.param([chunk(0, 0, 1)], 0, id="no step"),
        pytest.param([chunk(0, 0, 1, has_output=False)], 2, id="steps without output"),
    ],
)
def test_run_that_breaks_a_rule_raises_and_does_nothing(
    make: MakeStepper, chunks: list[Span], n_steps: int
) -> None:
    fake = FakeLlama()
    stepper = make(fake)
    with pytest.raises(PlanError, match="StepPlan"):
        stepper.run(chunks, n_steps)
    assert fake.batches == []
    assert stepper.run([chunk(0, 0, 1)]).tokens == [[0]]


@pytest.mark.parametrize(
    ("chunks", "n_steps", "code"),
    [
        ([], 1, 6),
        ([chunk(1, 0, 1), chunk(0, 0, 1)], 1, 4),
        ([chunk(0, 0)], 1, 6),
        ([chunk(0, 2**31 - 1, 1)], 1, 6),
        ([chunk(0, 0, N_VOCAB)], 1, 7),
        ([chunk(0, 0, *[1] * N_BATCH), chunk(1, 0, 1)], 1, 8),
        ([chunk(0, 0, 1)], 0, 9),
        ([chunk(0, 0, 1, has_output=False)], 2, 9),
        ([chunk(3, 0, 1)], 1, 10),
    ],
)
def test_native_codes_name_the_rule(chunks: list[Span], n_steps: int, code: int) -> None:
    stepper = native_stepper(FakeLlama())
    for slot in range(3):
        stepper.bind(Binding(Slot(slot), 0, GREEDY, ()))
    with pytest.raises(PlanError, match=native._MEANINGS[code]):
        stepper.run(chunks, n_steps)


@pytest.mark.parametrize("chunks", [[chunk(0, 2**40, 1)], [chunk(0, 0, 2**40)]])
def test_native_run_with_numbers_beyond_32_bits_raises(chunks: list[Span]) -> None:
    with pytest.raises(PlanError, match="StepPlan"):
        native_stepper(FakeLlama()).run(chunks)


@pytest.mark.parametrize(
    "binding",
    [
        Binding(Slot(N_SLOTS), 0, GREEDY, ()),
        Binding(Slot(-1), 0, GREEDY, ()),
        Binding(Slot(0), 0, GREEDY, (), (N_VOCAB,)),
        Binding(Slot(0), 0, GREEDY, (), (-1,)),
        Binding(Slot(0), 0, GREEDY, (), (), 21),
        Binding(Slot(0), 0, GREEDY, (), (), -1),
        Binding(Slot(0), 0, Sampling(logit_bias=((N_VOCAB, 1.0),)), ()),
        Binding(Slot(0), 0, Sampling(repeat_penalty=0.0), ()),
        Binding(Slot(0), 0, Sampling(temperature=-1.0), ()),
        Binding(Slot(0), 0, Sampling(top_p=2.0), ()),
        Binding(Slot(0), 0, Sampling(top_k=-5), ()),
    ],
    ids=repr,
)
def test_bind_out_of_range_raises(make: MakeStepper, binding: Binding) -> None:
    with pytest.raises(PlanError, match="Binding"):
        make(FakeLlama()).bind(binding)


def native_stepper(fake: FakeLlama, **given: Any) -> NativeStepper:
    sizes = {"n_slots": N_SLOTS, "n_batch": N_BATCH, "n_vocab": fake.n_vocab, "n_threads": 1}
    return NativeStepper(None, **{**sizes, "api": fake.api(), **given})


@pytest.mark.parametrize("name", ["n_slots", "n_batch", "n_vocab", "n_threads"])
def test_native_stepper_with_a_size_of_zero_raises(name: str) -> None:
    with pytest.raises(PlanError, match=name):
        native_stepper(FakeLlama(), **{name: 0})


def test_native_stepper_with_an_unknown_instruction_set_raises() -> None:
    with pytest.raises(PlanError, match="isa"):
        native_stepper(FakeLlama(), isa=77)


def test_native_stepper_that_is_closed_raises() -> None:
    stepper = native_stepper(FakeLlama())
    stepper.close()
    stepper.close()
    stepper.interrupt()
    with pytest.raises(EngineClosedError):
        stepper.run([chunk(0, 0, 1)])


# ---- random workloads ----


@st.composite
def runs(draw: st.DrawFn) -> tuple[list[Span], int]:
    slots = sorted(draw(st.sets(st.integers(0, N_SLOTS - 1), min_size=1)))
    tokens = st.lists(st.integers(0, N_VOCAB - 1), min_size=1, max_size=4)
    all_have_output = draw(st.booleans())
    chunks = [
        Span(
            Slot(slot),
            draw(st.integers(0, 99)),
            draw(tokens),
            all_have_output or draw(st.booleans()),
        )
        for slot in slots
    ]
    n_steps = draw(st.integers(1, 6)) if all(c.has_output for c in chunks) else 1
    return chunks, n_steps


HOW = [
    Sampling(temperature=5.0, top_k=20, seed=4),
    Sampling(temperature=5.0, repeat_penalty=1.5, frequency_penalty=2.0, repeat_last_n=7, seed=5),
    Sampling(
        temperature=5.0, dry_multiplier=3.0, dry_allowed_length=0, dry_breakers=((1,), (2, 3))
    ),
    Sampling(temperature=9.0, typical_p=0.9, xtc_probability=0.5, top_n_sigma=4.0, min_p=0.0),
]


def outcome(stepper: Stepper, workload: list[tuple[list[Span], int]]) -> list[StepResult]:
    for slot in range(N_SLOTS):
        stepper.bind(Binding(Slot(slot), 3, HOW[slot], (slot, 17), (4, slot, 4)))
    results = [stepper.run(chunks, n_steps) for chunks, n_steps in workload]
    return [StepResult(r.tokens, r.n_steps, r.code) for r in results]


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(runs(), min_size=1, max_size=4), st.sets(st.integers(0, 12), max_size=2))
def test_native_and_python_steppers_do_the_same(
    workload: list[tuple[list[Span], int]], failing: set[int]
) -> None:
    codes = dict.fromkeys(failing, 1)
    ours, theirs = FakeLlama(codes=codes), FakeLlama(codes=codes)
    is_silent = bool(failing)
    sizes: dict[str, Any] = {"n_slots": N_SLOTS, "n_batch": N_BATCH, "n_vocab": N_VOCAB}
    sizes |= {"n_threads": 1, "has_silent_rows": is_silent}
    found = outcome(NativeStepper(None, **sizes, api=ours.api()), workload)
    wanted = outcome(PythonStepper(None, **sizes, api=theirs.api()), workload)
    assert found == wanted
    assert ours.batches == theirs.batches
    assert ours.fetched == theirs.fetched


# ---- threads ----

N_BIG = 40_000  # four rows of it are work for a team where top_p looks at the whole row


def sampled_with(**given: Any) -> StepResult:
    fake = FakeLlama(n_vocab=N_BIG)
    n_now = given.pop("n_now", None)
    stepper = native_stepper(fake, **{"api": fake.api(given.pop("gomp", None)), **given})
    if n_now is not None:
        stepper.set_threads(n_now)
    for slot in range(N_SLOTS):
        stepper.bind(Binding(Slot(slot), 0, Sampling(top_k=0, temperature=9.0), ()))
    return stepper.run([chunk(slot, 0, 1) for slot in range(N_SLOTS)])


def test_team_of_ggmls_openmp_samples_the_same_tokens() -> None:
    gomp = LlamaApi.of_llama_cpp().gomp_parallel
    if gomp is None:
        pytest.skip("this llama-cpp-python computes without OpenMP")
    assert sampled_with(n_threads=2, gomp=gomp).tokens == sampled_with(n_threads=1).tokens


def test_team_has_the_size_of_the_stepper_and_samples_each_row_once() -> None:
    asked: list[int] = []

    def parallel(fn: Any, data: int, n_threads: int, flags: int) -> None:
        asked.append(n_threads)
        for _ in range(n_threads + 1):  # one more than there is scratch for: it must do nothing
            fn(data)

    team = GOMP(parallel)
    address = ctypes.cast(team, ctypes.c_void_p).value
    alone = sampled_with(n_threads=1).tokens
    assert sampled_with(n_threads=3, gomp=address).tokens == alone
    fewer = sampled_with(n_threads=3, n_now=2, gomp=address)
    assert (fewer.tokens, fewer.n_threads) == (alone, 2)
    assert sampled_with(n_threads=3, n_now=1, gomp=address).tokens == alone
    assert asked == [3, 2]


@pytest.mark.parametrize("isa", range(native_row.row_library().cbatch_isa_best() + 1))
def test_every_instruction_set_samples_the_same_tokens(isa: int) -> None:
    assert sampled_with(isa=isa).tokens == sampled_with().tokens


@pytest.mark.parametrize(
    "change",
    [{"size": 8}, {"abi": 99}, {"decode": None}, {"get_logits_ith": None}],
    ids=lambda change: next(iter(change)),
)
def test_table_that_does_not_fit_is_refused(change: dict[str, int | None]) -> None:
    api = FakeLlama().api()
    table, handle = api.table(), ctypes.c_void_p(1)
    for name, value in change.items():
        setattr(table, name, value)
    sizes = NativeSizes(1, 1, 1, 1, native.ISA_BEST)
    code = library().cbatch_stepper_init(
        ctypes.byref(table), None, ctypes.byref(sizes), ctypes.byref(handle)
    )
    assert (code, handle.value) == (1, None)
