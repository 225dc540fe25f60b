"""What a recorder keeps of a run: everything that the report tells, in bounded memory."""

from __future__ import annotations

import pickle
import random
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

import cbatch
from cbatch.backend.fake import FakeBackend, StepCost
from cbatch.core.plan import StepResult
from cbatch.engine import Engine
from cbatch.errors import ConfigError, GrammarError, PromptTooLongError
from cbatch.files.report.recorder import (
    N_KINDS,
    N_MESSAGE,
    N_SPANS_PER_SLOT,
    OTHER,
    RunRecorder,
    WorkOverTime,
    phases,
)
from cbatch.files.report.spans import GAP_S, SlotSpan, SlotSpans, SpanStore
from cbatch.runtime.step_record import StepRecord, StepRow
from tests.face.test_stats import submit
from tests.files.steps import decode, prefill, result_of, run_of
from tests.helpers import Rig, make_scheduler, make_sequences
from tests.runtime.backends import loop_over

if TYPE_CHECKING:
    from cbatch.runtime.loop import Loop

# ---- rows of a step ----


def recorded(rig: Rig) -> tuple[Loop, list[StepRecord]]:
    loop, records = loop_over(rig.backend, rig, lambda: rig.now), list[StepRecord]()
    loop.recorder = records.append
    return loop, records


def test_record_tells_what_each_slot_computed_and_sampled() -> None:
    rig = make_scheduler(2, cost=StepCost(base_s=1 / 64))
    loop, records = recorded(rig)
    submit(loop, rig, *make_sequences(2, max_tokens=3))
    loop.step()
    assert records[0].rows == (StepRow(0, "0", 4, 4, 3), StepRow(1, "1", 4, 4, 3))
    assert (records[0].n_steps, records[0].first_s) == (3, 1 / 64)


def test_what_is_computed_again_is_prefill() -> None:
    rig = make_scheduler(1)
    loop, records = recorded(rig)
    submit(loop, rig, *make_sequences(1, max_tokens=3))
    rig.backend.interrupt()
    loop.step()
    driver = rig.batcher.in_flight["0"]
    rig.batcher.keep_cells(driver, 0)
    rig.backend.interrupt()
    loop.step()
    # the token that was sampled had no cell before
    assert records[1].rows == (StepRow(0, "0", 5, 4, 1),)


def test_failed_step_that_tells_of_no_tokens_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = make_scheduler(1)
    loop, records = recorded(rig)
    submit(loop, rig, *make_sequences(1, max_tokens=3))
    monkeypatch.setattr(rig.backend, "run", lambda plan: StepResult([], 0, -3))
    loop.step()
    assert (records[0].rows, records[0].n_steps) == ((StepRow(0, "0", 4, 4, 0),), 0)


def test_choices_of_a_request_are_told_apart() -> None:
    records: list[StepRecord] = []
    with Engine(FakeBackend(2, 64, 16), options={"max_tokens": 2, "n": 2}) as engine:
        engine.record_steps(records.append)
        engine.submit(cbatch.BatchPrompt(prompt="word", id="a")).result()
        engine.record_steps(None)
    assert {row.id for r in records for row in r.rows} == {"a[0]", "a[1]"}


# ---- spans ----


def spans_of(*records: StepRecord) -> list[tuple[int, str, bool, float, float, int]]:
    slots, found = SlotSpans(), list[SlotSpan]()
    for record in records:
        found += [c.after for c in slots.take(record) if c.after]
    return [(s.slot, s.id, s.is_prefill, s.start_s, s.end_s, s.n_tokens) for s in found]


def test_prefill_and_decode_are_two_spans_that_grow() -> None:
    found = spans_of(
        run_of(0.0, prefill(0, "a", 4, 0)),
        run_of(1.0, prefill(0, "a", 2)),
        run_of(2.0, decode(0, "a", 3)),
        run_of(3.0, decode(0, "a", 2)),
    )
    assert found == [(0, "a", True, 0.0, 2.0, 6), (0, "a", False, 2.0, 4.0, 5)]


def test_run_of_steps_that_begins_with_a_prompt_is_prefill_and_decode() -> None:
    found = spans_of(run_of(0.0, prefill(0, "a", 4, 3), seconds=4.0, n_steps=3, first_s=2.0))
    assert found == [(0, "a", True, 0.0, 2.0, 4), (0, "a", False, 2.0, 4.0, 3)]


def test_failed_step_holds_its_slot_without_tokens() -> None:
    assert spans_of(run_of(0.0, prefill(0, "a", 4, 0), n_steps=0)) == [(0, "a", True, 0.0, 1.0, 0)]


def test_pause_is_a_gap_but_not_a_short_one() -> None:
    near, far = 1.0 + GAP_S / 2, 1.0 + 2 * GAP_S
    assert len(spans_of(run_of(0.0, decode(0, "a")), run_of(near, decode(0, "a")))) == 1
    assert len(spans_of(run_of(0.0, decode(0, "a")), run_of(far, decode(0, "a")))) == 2


def test_slot_is_free_when_it_misses_a_run() -> None:
    slots = SlotSpans()
    slots.take(run_of(0.0, decode(0, "a"), decode(1, "b")))
    slots.take(run_of(1.0, decode(1, "b")))
    [change] = slots.take(run_of(2.0, decode(1, "b")))
    assert change.before is not None
    assert (change.before.id, change.after) == ("a", None)


# ---- time ----

works = st.lists(
    st.tuples(st.floats(0, 50), st.floats(1e-6, 20), st.integers(0, 100)), min_size=1, max_size=40
)


@given(works)
def test_buckets_lose_no_work_and_stay_few(entries: list[tuple[float, float, int]]) -> None:
    time, start_s = WorkOverTime(n_max=16), 0.0
    for gap_s, seconds, n in entries:
        start_s += gap_s
        time.add(start_s, start_s + seconds, (n, 0, seconds, 0, 0))
        start_s += seconds
    n_all = sum(n for _, _, n in entries)
    for n_most in (16, 5):
        _, seconds_of_each, figures = time.joined(n_most)
        assert len(figures) <= n_most
        assert figures[:, 0].sum() == pytest.approx(n_all)
        assert (figures[:, 2] <= seconds_of_each * (1 + 1e-9)).all()
        assert seconds_of_each.sum() == pytest.approx(start_s)


@pytest.mark.parametrize(
    ("start_s", "end_s", "n_most", "expected"),
    [
        (0.5, 2.75, 512, ([0, 1, 2], [1, 1, 0.75], [2, 4, 3])),
        (0.0, 2.25, 9, ([0, 1], [1, 1.25], [4, 5])),  # the last piece is too short for a rate
    ],
)
def test_work_is_spread_over_its_time(
    start_s: float, end_s: float, n_most: int, expected: tuple[list[float], ...]
) -> None:
    time = WorkOverTime(width_s=1.0)
    time.add(start_s, end_s, (9, 0, 0, 0, 0))
    starts_s, seconds, figures = time.joined(n_most)
    assert (list(starts_s), list(seconds), list(figures[:, 0])) == expected


# ---- the first and the last spans ----


def clipped(spans: list[SlotSpan], start_s: float, end_s: float) -> list[tuple[object, ...]]:
    inside = [s for s in spans if s.end_s > start_s and s.start_s < end_s]
    return sorted(
        (s.slot, max(s.start_s, start_s), min(s.end_s, end_s), s.id, s.is_prefill) for s in inside
    )


@given(st.integers(0, 10_000), st.integers(1, 6), st.integers(1, 5))
def test_in_the_parts_that_are_shown_no_span_is_missing(
    seed: int, n_keep: int, n_slots: int
) -> None:
    rng, slots, store = random.Random(seed), SlotSpans(), SpanStore(n_keep)
    everything: list[SlotSpan] = []
    now, n_ids = 0.0, 0
    in_slot: dict[int, str] = {}
    for _ in range(30):
        for slot in range(n_slots):
            if rng.random() < 0.4:
                n_ids += 1
                in_slot[slot] = f"r{n_ids}"
        rows = [
            (prefill if rng.random() < 0.3 else decode)(slot, id)
            for slot, id in sorted(in_slot.items())
            if rng.random() < 0.8
        ]
        n_steps = rng.choice([1, 3])
        record = run_of(now, *rows, seconds=1.0, n_steps=n_steps, first_s=0.25)
        for change in slots.take(record):
            if change.after:
                store.add(change.after)
                everything.append(change.after)
        now += 1.0
    parts = store.parts()
    assert len(store.first) + len(store.last) <= 2 * n_keep
    for part in parts:
        whole = clipped(everything, part.start_s, part.end_s)
        assert clipped(part.spans, part.start_s, part.end_s) == whole
    if len(everything) <= 2 * n_keep:
        assert len(parts) == bool(everything)


@pytest.mark.slow
def test_recorder_of_a_long_run_stays_small() -> None:
    recorder, n_bytes = RunRecorder(2), list[int]()
    for i in range(20_000):
        recorder(run_of(0.01 * i, prefill(0, f"a{i}"), decode(1, f"b{i}"), seconds=0.01))
        if i in (9_999, 19_999):
            n_bytes.append(len(pickle.dumps(recorder)))
    assert n_bytes[1] <= 1.1 * n_bytes[0]
    steps = recorder.steps
    assert steps.spans.n_spans == 40_000
    assert len(steps.spans.first) + len(steps.spans.last) == 2 * N_SPANS_PER_SLOT * 2
    assert len(steps.work.joined(10_000)[0]) <= 512
    assert steps.total_s == pytest.approx(200.0)


# ---- sums ----


def test_gaps_between_tokens_are_counted_in_whatever_slot() -> None:
    recorder = RunRecorder(2)
    recorder(run_of(0.0, prefill(0, "a")))
    recorder(run_of(1.0, decode(0, "a", 4), seconds=4.0))
    recorder(run_of(5.0, prefill(1, "b")))
    recorder(run_of(6.0, decode(1, "a"), seconds=7.0))
    itl_s = recorder.steps.itl_s
    assert itl_s.n == 5
    assert itl_s.at(50) == pytest.approx(1.0, rel=0.025)
    assert itl_s.at(100) == pytest.approx(8.0, rel=0.025)
    other = RunRecorder(1)  # a run of steps that begins with a prompt
    other(run_of(0.0, prefill(0, "a", 4, 3), seconds=8.0, n_steps=3, first_s=2.0))
    assert other.steps.itl_s.n == 2
    assert other.steps.itl_s.at(50) == pytest.approx(3.0, rel=0.025)


def test_results_are_counted_by_how_they_ended() -> None:
    recorder = RunRecorder(1)
    recorder.add_result(result_of("a", n_cached=3))
    recorder.add_result(result_of("b", "length"))
    recorder.add_result(result_of("c", "error", GrammarError("regex", "no such rule"), ttft_s=None))
    recorder.add_result(result_of("d", "error", PromptTooLongError(9, 8, 1), ttft_s=None))
    recorder.add_error("invalid_json_line", "line 5 is no JSON")
    results = recorder.results
    assert (results.n_done, results.n_failed, results.n_hits, results.n_cached) == (5, 3, 1, 3)
    assert results.finish_reasons == {"stop": 1, "length": 1, "error": 3}
    assert {k: e.n for k, e in results.errors.items()} == {
        "GrammarError": 1,
        "PromptTooLongError": 1,
        "invalid_json_line": 1,
    }
    assert results.ttft_s.n == 2


def test_errors_are_kept_in_bounds() -> None:
    recorder = RunRecorder(1)
    recorder.add_error("a", "first\n   second")
    recorder.add_error("b", "x" * 100_000)
    for i in range(N_KINDS + 3):
        recorder.add_error(f"kind {i}", "it failed")
    errors = recorder.results.errors
    assert errors["a"].message == "first second"
    assert len(errors["b"].message) == N_MESSAGE
    assert len(errors) == N_KINDS + 1
    assert errors[OTHER].n == 5


def test_phases_sum_up_to_the_run() -> None:
    times = {"admit_s": 1.0, "build_s": 2.0, "apply_s": 16.0, "deliver_s": 32.0}
    record = run_of(0.0, decode(0, "a"), seconds=13.0, decode_s=4.0, sample_s=8.0, **times)
    assert phases(record) == {
        "decode": 4.0, "sample": 8.0, "plan": 3.0, "border": 1.0, "apply": 16.0, "deliver": 32.0,
    }  # fmt: skip


def test_failed_step_computed_no_prompt() -> None:
    recorder = RunRecorder(1)
    recorder(run_of(0.0, prefill(0, "a", 4, 0), n_steps=0, code=-3))
    assert (recorder.steps.n_prompt, recorder.steps.n_failed_steps) == (0, 1)


def test_recorder_of_no_slots_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"at least 1, not 0: give engine\.parallel"):
        RunRecorder(0)


def test_recorder_counts_what_an_engine_did() -> None:
    recorder = RunRecorder(4)
    prompts = [cbatch.BatchPrompt(prompt="word " * (1 + i % 7)) for i in range(30)]
    with Engine(FakeBackend(4, 64, 32), options={"max_tokens": 5}) as engine:
        engine.record_steps(recorder)
        n_output = 0
        for result in engine.run(prompts).as_completed():
            recorder.add_result(result)
            n_output += result.usage.completion_tokens
        engine.record_steps(None)
    results = recorder.results
    assert results.n_done == 30
    assert recorder.steps.n_output == n_output
    assert recorder.steps.n_prompt == results.n_prompt - results.n_cached
    assert recorder.steps.itl_s.n == n_output - 30
    assert {s.id for s in recorder.steps.spans.first} == {str(i) for i in range(30)}
