"""The native stepper and its Python twin, driven by stand-ins for llama.cpp's functions."""

from __future__ import annotations

import ctypes
import math
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
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
from cbatch.core.span import N_TARGETS_MAX, Span
from cbatch.errors import EngineClosedError, PlanError
from cbatch.options import GREEDY, Sampling
from tests.breakers import pack
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


@dataclass(eq=False, slots=True)
class Countdown(FakeLlama):
    """Token 9 is the likeliest, then 8, 7, … down to 0."""

    def get_logits(self, ctx: int | None, i_token: int) -> int | None:
        row = np.zeros(self.n_vocab, dtype=np.float32)
        row[:10] = np.arange(1, 11)
        self.rows.append(row)
        return int(row.ctypes.data)


@dataclass(eq=False, slots=True)
class Noise(FakeLlama):
    """Every row is another one, told by slot and position; at position 13 it is broken."""

    def get_logits(self, ctx: int | None, i_token: int) -> int | None:
        batch = self.batches[-1]
        assert batch.logits[i_token] == 1
        self.fetched.append(i_token)
        slot, pos = batch.slot[i_token], batch.pos[i_token]
        row = np.random.default_rng(100 * slot + pos).normal(0, 4, self.n_vocab).astype(np.float32)
        row[7] = np.nan if pos == 13 else row[7]
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


def pad(slot: int, start: int, *tokens: int) -> Span:
    return chunk(slot, start, *tokens or (0,), has_output=False)


def scored(slot: int, start: int, *tokens: int, has_output: bool = False) -> Span:
    """A chunk of which every token but the last has the next one for its target."""
    return Span(Slot(slot), start, tokens, has_output, tokens[1:])


# ---- one step ----


def test_run_fills_first_tokens_then_remainders_and_pads_have_logits(make: MakeStepper) -> None:
    fake, a_pad = FakeLlama(), pad(2, 9)
    result = make(fake).run(
        [chunk(0, 5, 7), chunk(1, 0, 11, 12, 13), a_pad, chunk(3, 8, 21, 22, has_output=False)],
        pads=[a_pad],
    )
    assert fake.batches == [
        SeenBatch(
            token=[7, 11, 0, 21, 12, 13, 22],
            pos=[5, 0, 9, 8, 1, 2, 9],
            slot=[0, 1, 2, 3, 1, 1, 3],
            logits=[1, 0, 1, 0, 0, 1, 0],
        )
    ]
    assert fake.fetched == [0, 5]
    assert result.tokens == [[5], [12], [], []]
    assert (result.n_steps, result.code) == (1, 0)


def test_run_with_a_full_batch_of_any_sequence_is_done(make: MakeStepper) -> None:
    fake = FakeLlama()
    make(fake).run([Span(Slot(0), 0, tuple(range(N_BATCH)), has_output=True)])
    assert fake.batches[0].token == list(range(N_BATCH))


def test_run_where_llama_gives_no_row_is_broken(make: MakeStepper) -> None:
    stepper = make(FakeLlama(next_token=lambda slot, pos: -2))
    stepper.bind(Binding(Slot(0), 0, GREEDY, (), (), 3))
    result = stepper.run([chunk(0, 0, 1)])
    assert result.tokens == [[BROKEN_ROW]]
    [[found]] = result.logprobs
    assert math.isnan(found.logprob)
    assert found.top == ()


# ---- several steps ----


def test_run_of_many_steps_outgrows_the_first_buffer(make: MakeStepper) -> None:
    fake = FakeLlama(next_token=lambda slot, pos: pos % N_VOCAB)
    result = make(fake, n_slots=N_SLOTS).run([chunk(0, 0, 1), chunk(1, 5, 1)], n_steps=500)
    assert result.tokens[0] == [i % N_VOCAB for i in range(500)]
    assert result.tokens[1] == [(5 + i) % N_VOCAB for i in range(500)]


def test_interrupt_ends_the_run_in_flight_or_the_next_one_after_a_step(make: MakeStepper) -> None:
    fake = FakeLlama()
    stepper = make(fake)

    def interrupt_elsewhere() -> None:
        if len(fake.batches) == 2:
            thread = threading.Thread(target=stepper.interrupt)
            thread.start()
            thread.join()

    fake.on_decode = interrupt_elsewhere
    assert stepper.run([chunk(0, 0, 1)], n_steps=9).n_steps == 2
    assert stepper.run([chunk(0, 2, 1)], n_steps=9).n_steps == 9
    stepper.interrupt()
    assert stepper.run([chunk(0, 0, 1)], n_steps=9).n_steps == 1
    assert stepper.run([chunk(0, 1, 1)], n_steps=3).n_steps == 3


def test_run_beyond_its_slice_ends_after_the_step(make: MakeStepper) -> None:
    for slice_s in (1e-6, 1e-9):
        assert make(FakeLlama()).run([chunk(0, 0, 1)], 9, slice_s=slice_s).n_steps == 1
    assert make(FakeLlama()).run([chunk(0, 0, 1)], 9, slice_s=1e6).n_steps == 9


def test_native_run_reports_the_time_of_its_first_step() -> None:
    stepper = native_stepper(FakeLlama(codes={4: 2}))
    stepper.bind(Binding(Slot(0), 0, GREEDY, ()))
    result = stepper.run([chunk(0, 0, 1)], n_steps=3)
    assert min(result.decode_s, result.sample_s) > 0
    assert 0 < result.first_s < result.decode_s + result.sample_s
    alone = stepper.run([chunk(0, 3, 1)])
    assert alone.first_s == pytest.approx(alone.decode_s + alone.sample_s)
    assert stepper.run([chunk(0, 4, 1)]).first_s == 0


# ---- history, masks, log-probabilities ----

AGAIN = Sampling(temperature=0.0, repeat_penalty=100.0, repeat_last_n=3)
"""Greedy, but a token of the last three is as good as banned."""


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


@pytest.mark.parametrize("sampling", [AGAIN, replace(AGAIN, temperature=1.0)])
def test_shift_is_as_binding_anew_with_all_tokens(make: MakeStepper, sampling: Sampling) -> None:
    found = []
    for is_bound in (False, True):
        stepper = make(Countdown())
        stepper.bind(Binding(Slot(0), 1, sampling, (), (5,)))
        [first] = stepper.run([chunk(0, 0, 5)], n_steps=4).tokens
        if is_bound:
            stepper.bind(Binding(Slot(0), -2, sampling, (), (5, *first)))
        else:
            stepper.shift(Slot(0), 3)
        found.append(stepper.run([chunk(0, 1, first[-1])], n_steps=20).tokens[0])
    assert found[0] == found[1]
    with pytest.raises(PlanError):
        native_stepper(FakeLlama()).shift(Slot(N_SLOTS), 1)


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


@pytest.mark.parametrize(
    ("n_steps", "given"),
    [
        (1, {"masks": []}),
        (1, {"masks": [None] * 2}),
        (2, {"masks": [None]}),
        (2, {"changes": changes_of([chunk(0, 0, 1)])}),
    ],
    ids=["none", "two", "several steps", "changes in several steps"],
)
def test_masks_and_changes_that_do_not_fit_the_run_raise(
    make: MakeStepper, n_steps: int, given: dict[str, Any]
) -> None:
    fake = Countdown()
    with pytest.raises(PlanError):
        make(fake).run([chunk(0, 0, 1)], n_steps=n_steps, **given)
    assert fake.batches == []


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


def test_logprobs_are_empty_where_nobody_wants_them(make: MakeStepper) -> None:
    stepper = make(Countdown())
    stepper.bind(Binding(Slot(0), 0, GREEDY, (), (), 0))
    assert len(stepper.run([chunk(0, 0, 1), chunk(1, 0, 1)]).logprobs) == 2
    assert stepper.run([chunk(1, 1, 1)]).logprobs == ()
    stepper.bind(Binding(Slot(0), 0, GREEDY, ()))
    assert stepper.run([chunk(0, 1, 1)]).logprobs == ()


# ---- plans that break a rule ----


@pytest.mark.parametrize(
    ("chunks", "n_steps", "code"),
    [
        pytest.param([], 1, 6, id="no chunk"),
        pytest.param([chunk(1, 0, 1), chunk(0, 0, 1)], 1, 4, id="descending slots"),
        pytest.param([chunk(1, 0, 1), chunk(1, 1, 1)], 1, 4, id="one slot twice"),
        pytest.param([chunk(-1, 0, 1)], 1, None, id="slot below 0"),
        pytest.param([chunk(N_SLOTS, 0, 1)], 1, None, id="slot too high"),
        pytest.param([chunk(0, 0)], 1, 6, id="no token"),
        pytest.param([chunk(0, -1, 1)], 1, 6, id="start below 0"),
        pytest.param([chunk(0, 0, N_VOCAB)], 1, 7, id="token too high"),
        pytest.param([chunk(0, 0, -1)], 1, 7, id="token below 0"),
        pytest.param([chunk(0, 0, 1), chunk(1, 0, *[1] * N_BATCH)], 1, 8, id="batch too full"),
        pytest.param([chunk(0, 0, 1)], 0, 9, id="no step"),
        pytest.param([chunk(0, 0, 1, has_output=False)], 2, 9, id="steps without output"),
    ],
)
def test_run_that_breaks_a_rule_names_it_and_does_nothing(
    make: MakeStepper, chunks: list[Span], n_steps: int, code: int | None
) -> None:
    fake = FakeLlama()
    stepper = make(fake)
    with pytest.raises(PlanError, match="StepPlan") as caught:
        stepper.run(chunks, n_steps)
    if isinstance(stepper, NativeStepper) and code is not None:
        assert native._MEANINGS[code] in str(caught.value)
    assert fake.batches == []
    assert stepper.run([chunk(0, 0, 1)]).tokens == [[0]]


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


@pytest.mark.parametrize(
    ("name", "value"),
    [("n_slots", 0), ("n_batch", 0), ("n_vocab", 0), ("n_threads", 0), ("isa", 77)],
)
def test_native_stepper_of_a_wrong_size_raises(name: str, value: int) -> None:
    with pytest.raises(PlanError, match=name):
        native_stepper(FakeLlama(), **{name: value})


def test_native_stepper_that_is_closed_raises() -> None:
    stepper = native_stepper(FakeLlama())
    stepper.close()
    stepper.close()
    stepper.interrupt()
    with pytest.raises(EngineClosedError):
        stepper.run([chunk(0, 0, 1)])


# ---- random workloads ----


@dataclass(frozen=True, slots=True)
class Asked:
    """A run: chunks, of which some are pad rows, its steps, and a mask for each output."""

    chunks: list[Span]
    pads: list[Span]
    n_steps: int
    masks: list[Any] | None


@st.composite
def runs(draw: st.DrawFn) -> Asked:
    token, word = st.integers(0, N_VOCAB - 1), st.just(0) | st.integers(0, 2**32 - 1)
    chunks, pads = list[Span](), list[Span]()
    for slot in sorted(draw(st.sets(st.integers(0, N_SLOTS - 1), min_size=1))):
        kind = draw(st.sampled_from(["row", "row", "prompt", "scored", "pad"]))
        n_most = 1 if kind in ("row", "pad") else 4
        tokens = draw(st.lists(token, min_size=1, max_size=n_most))
        has_output = kind == "row" or (kind != "pad" and draw(st.booleans()))
        n_targets = min(2, len(tokens) - has_output) if kind == "scored" else 0
        targets = draw(st.lists(token, max_size=n_targets))
        chunks.append(Span(Slot(slot), draw(st.integers(0, 30)), tokens, has_output, targets))
        pads += chunks[-1:] * (kind == "pad")
    n_outputs = sum(c.has_output for c in chunks)
    is_open = n_outputs + len(pads) == len(chunks) and not any(c.targets for c in chunks)
    n_steps = draw(st.integers(1, 6)) if is_open else 1
    mask = st.none() | st.tuples(word, word).map(lambda words: np.array(words, np.uint32))
    masks = draw(st.none() | st.lists(mask, min_size=n_outputs, max_size=n_outputs))
    return Asked(chunks, pads, n_steps, masks if n_steps == 1 and n_outputs else None)


HOW = [
    Sampling(temperature=5.0, top_k=20, seed=4),
    Sampling(temperature=5.0, repeat_penalty=1.5, frequency_penalty=2.0, repeat_last_n=7, seed=5),
    Sampling(
        temperature=5.0, dry_multiplier=3.0, dry_allowed_length=0, dry_breakers=pack([(1,), (2, 3)])
    ),
    Sampling(temperature=9.0, typical_p=0.9, xtc_probability=0.5, top_n_sigma=4.0, min_p=0.0),
]


def reports_of(result: StepResult) -> tuple[list[Any], list[float]]:
    """What is told of sampled tokens and of targets: which there are, and their numbers."""
    found = [*result.logprobs, *(result.scores[slot] for slot in sorted(result.scores))]
    tokens = [[[token for token, _ in told.top] for told in of_one] for of_one in found]
    numbers = [n for each in found for t in each for n in (t.logprob, *(p for _, p in t.top))]
    return [sorted(result.scores), tokens], numbers


@settings(max_examples=examples(150), deadline=None)
@given(
    workload=st.lists(runs(), min_size=1, max_size=4),
    failing=st.sets(st.integers(0, 12), max_size=2),
    n_tops=st.lists(st.none() | st.integers(0, 20), min_size=N_SLOTS, max_size=N_SLOTS),
    is_silent=st.booleans(),
)
def test_native_and_python_steppers_do_the_same(
    workload: list[Asked], failing: set[int], n_tops: list[int | None], is_silent: bool
) -> None:
    """With stop tokens, histories, masks, pad rows, targets and reports, on rows of which some are broken."""
    fakes = [Noise(codes=dict.fromkeys(failing, 1)) for _ in range(2)]
    sizes: dict[str, Any] = {"n_slots": N_SLOTS, "n_batch": N_BATCH, "n_vocab": N_VOCAB}
    sizes |= {"n_threads": 1, "has_silent_rows": is_silent}
    found: list[list[StepResult]] = []
    for kind, fake in zip((NativeStepper, PythonStepper), fakes, strict=True):
        stepper: Stepper = kind(None, **sizes, api=fake.api())
        for slot, n_top in enumerate(n_tops):
            stepper.bind(
                Binding(
                    Slot(slot),
                    3,
                    HOW[slot],
                    (slot, 17),
                    (4, slot, 4),
                    n_logprobs=n_top,
                    n_target_top=n_top or 0,
                )
            )
        found.append(
            [
                stepper.run(asked.chunks, asked.n_steps, masks=asked.masks, pads=asked.pads)
                for asked in workload
            ]
        )
        stepper.close()
    for ours, theirs in zip(*found, strict=True):
        assert (ours.tokens, ours.n_steps, ours.code) == (
            theirs.tokens,
            theirs.n_steps,
            theirs.code,
        )
        (found_tokens, numbers), (tokens, expected) = reports_of(ours), reports_of(theirs)
        assert found_tokens == tokens
        assert numbers == pytest.approx(expected, abs=1e-5, rel=1e-6, nan_ok=True)
    assert fakes[0].batches == fakes[1].batches
    assert set(fakes[0].fetched) == set(fakes[1].fetched)
    assert fakes[0].n_waits == fakes[1].n_waits


@pytest.mark.parametrize(
    ("chunks", "words"),
    [
        ([Span(Slot(0), 0, (1,), False, (2, 3))], "more"),
        ([Span(Slot(0), 0, (1, 2), True, (2, 3))], "output"),
        ([Span(Slot(0), 0, (1, 2), False, (N_VOCAB,))], "high"),
        ([Span(Slot(0), 0, (1, 2), False, (-1,))], "low"),
        ([scored(0, 0, *range(40)), scored(1, 0, *range(27))], "many"),
    ],
)
def test_targets_that_do_not_fit_are_refused(
    make: MakeStepper, chunks: list[Span], words: str
) -> None:
    fake = Noise()
    stepper = make(fake, n_batch=99)
    with pytest.raises(PlanError):
        stepper.run(chunks)
    assert fake.batches == [], words
    stepper.bind(Binding(Slot(0), 0, GREEDY, (), n_target_top=21))
    with pytest.raises(PlanError):
        stepper.run([scored(0, 0, 1, 2)])


def test_as_many_targets_as_there_is_room_for_are_scored(make: MakeStepper) -> None:
    result = make(Noise(), n_batch=99).run([scored(0, 20, *range(40)), scored(1, 20, *range(26))])
    assert {slot: len(scores) for slot, scores in result.scores.items()} == {0: 39, 1: 25}


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

    def scores(gomp_parallel: int | None, n_threads: int) -> Any:
        fake = Noise(n_vocab=N_BIG)  # some rows of it are work for a team
        api = fake.api(gomp_parallel)
        stepper = native_stepper(fake, api=api, n_threads=n_threads, n_batch=99)
        stepper.bind(Binding(Slot(0), 0, GREEDY, (), n_target_top=3))
        tokens = range(N_TARGETS_MAX + 1)
        return stepper.run([scored(0, 20, *tokens, has_output=True)]).scores

    assert len(scores(gomp, 2)[Slot(0)]) == N_TARGETS_MAX
    assert scores(gomp, 2) == scores(None, 1)


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
