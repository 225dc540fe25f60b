"""The engine's figures: percentiles in constant memory, whose time a step was, and where a run's time went."""

from __future__ import annotations

import math
import pickle
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import to_builtins

from cbatch.backend.fake import StepCost
from cbatch.core.driver import SequenceDriver
from cbatch.runtime.in_flight import InFlight, Route
from cbatch.runtime.mailbox import Mailbox
from cbatch.runtime.step_record import StepRecord
from cbatch.stats import EngineStats, Percentiles
from tests.helpers import Rig, drive, make_request, make_scheduler, make_sequences, step
from tests.runtime.backends import loop_over, no_texts

if TYPE_CHECKING:
    from cbatch.core.request import Request
    from cbatch.runtime.loop import Loop
    from cbatch.stats import Split

PERCENTS = (0, 1, 50, 90, 99, 100)


def counted(times: list[float]) -> Percentiles:
    percentiles = Percentiles()
    for seconds in times:
        percentiles.add(seconds)
    return percentiles


def true_percentile(times: list[float], percent: float) -> float:
    """The smallest time that so many are not above."""
    return sorted(times)[max(0, math.ceil(len(times) * percent / 100) - 1)]


@given(st.lists(st.floats(1e-6, 1e4), min_size=1, max_size=200))
def test_every_percentile_is_within_two_and_a_half_percent(times: list[float]) -> None:
    for percent in PERCENTS:
        assert counted(times).at(percent) == pytest.approx(
            true_percentile(times, percent), rel=0.025
        )


def test_many_at_once_are_as_many_one_by_one() -> None:
    some = Percentiles()
    some.add(0.5, 99)
    some.add(8.0)
    assert some.n == 100
    assert some.at(99) == pytest.approx(0.5, rel=0.025)
    assert some.at(99.5) == pytest.approx(8.0, rel=0.025)


def test_nothing_counted_has_no_percentile() -> None:
    assert Percentiles().at(50) is None


@pytest.mark.parametrize("seconds", [0.0, -1.0, 1e-12])
def test_no_time_at_all_is_a_short_time(seconds: float) -> None:
    value = counted([seconds]).at(50)
    assert value is not None
    assert 0 < value < 1e-6


def test_million_times_take_few_buckets() -> None:
    some = Percentiles()
    for i in range(1, 1000):
        some.add(i * 1e-3, 1000)
    assert some.n == 999_000
    assert len(pickle.dumps(some)) < 2000


def test_copy_counts_on_its_own() -> None:
    some = counted([1.0])
    copy = some.copy()
    some.add(100.0, 9)
    assert (copy.n, some.n) == (1, 10)
    assert copy.at(100) == pytest.approx(1.0, rel=0.025)


# ---- phases ----


def synthetic() -> EngineStats:
    """A prefill of 100 tokens in 2 s, two decodes of 4 rows in 1 s, and a mixed step of 4 + 12 tokens in 1 s."""
    stats = EngineStats()
    stats.count_step(n_rows=1, n_decode=0, n_prompt=100, seconds=2.0)
    stats.count_step(n_rows=4, n_decode=4, n_prompt=0, seconds=1.0, n_steps=2)
    stats.count_step(n_rows=5, n_decode=4, n_prompt=12, seconds=1.0)
    return stats


def test_mixed_step_counts_as_decoding_and_its_prompt_tokens_nowhere() -> None:
    assert synthetic().generation_tps() == (8 + 4) / (1.0 + 1.0)
    assert synthetic().prompt_tps() == 100 / 2.0


def test_mixed_step_can_be_split_by_its_tokens() -> None:
    assert synthetic().generation_tps(split="proportional") == 12 / (1.0 + 1.0 * 4 / 16)
    assert synthetic().prompt_tps(split="proportional") == 112 / (2.0 + 1.0 * 12 / 16)


@pytest.mark.parametrize("split", ["whole", "proportional"])
def test_phase_that_there_was_none_of_has_no_rate(split: Split) -> None:
    nothing, decode, prefill = EngineStats(), EngineStats(), EngineStats()
    decode.count_step(2, 2, 0, 1.0)
    prefill.count_step(2, 0, 20, 1.0)
    rates = [
        (s.prompt_tps(split=split), s.generation_tps(split=split))
        for s in (nothing, decode, prefill)
    ]
    assert rates == [(0.0, 0.0), (0.0, 2.0), (20.0, 0.0)]


def test_steps_that_took_no_time_have_no_rate() -> None:
    stats = EngineStats()
    stats.count_step(2, 1, 1, 0.0)
    assert (
        stats.generation_tps()
        == stats.prompt_tps()
        == stats.prompt_tps(split="proportional")
        == 0.0
    )


def test_mean_width_is_counted_by_steps_or_by_tokens() -> None:
    assert synthetic().avg_concurrent_seq() == (1 + 4 + 4 + 5) / 4
    assert synthetic().avg_concurrent_seq(by="token") == (1 * 100 + 4 * 4 * 2 + 5 * 16) / 124
    assert EngineStats().avg_concurrent_seq() == EngineStats().avg_concurrent_seq(by="token") == 0.0


@pytest.mark.parametrize("n", [1, 2])
def test_mean_width_of_equal_requests_is_their_number(n: int) -> None:
    rig = make_scheduler(n)
    rig.submit(*make_sequences(n, max_tokens=9))
    drive(rig)
    assert rig.stats.avg_concurrent_seq() == rig.stats.avg_concurrent_seq(by="token") == n


def test_scheduler_counts_steps_as_they_are() -> None:
    rig = make_scheduler(2, cost=StepCost(1.0, 0.5))
    rig.submit(make_request("a", (1, 2, 3, 4), max_tokens=3))
    rig.backend.interrupt()
    step(rig)  # 4 prompt tokens, 3 s
    rig.submit(make_request("b", (5,), max_tokens=1))
    drive(rig)  # a decode token beside a prompt of one, 2 s; then a decode token, 1.5 s
    stats = rig.stats
    assert (stats.n_pure_tokens, stats.pure_prefill_s) == (4, 3.0)
    assert (stats.n_step_decode_tokens, stats.any_decode_s) == (2, 3.5)
    assert (stats.decode_share_s, stats.prefill_share_s) == (1.0 + 1.5, 3.0 + 1.0)


def test_recomputed_tokens_are_prompt_tokens_and_counted_apart() -> None:
    rig = make_scheduler(1, policy="round_robin", quantum=2)
    rig.submit(*make_sequences(2, max_tokens=4))
    drive(rig)
    assert rig.stats.n_recomputed_tokens == 2 * (4 + 1)
    assert rig.stats.n_output_tokens == 8
    assert rig.stats.n_step_tokens - rig.stats.n_step_decode_tokens == 2 * 4 + 2 * (4 + 2)


# ---- times of requests, and of each run ----


def make_loop(n_slots: int = 1) -> tuple[Loop, Rig]:
    rig = make_scheduler(n_slots)
    return loop_over(rig.backend, rig, lambda: rig.now), rig


def submit(loop: Loop, rig: Rig, *requests: Request) -> InFlight:
    in_flight = InFlight(loop, rig.batcher, lambda: rig.now, no_texts(loop, rig))
    box = Mailbox(len(requests), in_flight, None)
    loop.routes.update((r.id, Route(box, i, r.id)) for i, r in enumerate(requests))
    in_flight.submit([SequenceDriver.of(r, rig.backend.vocab.piece, rig.now) for r in requests])
    return in_flight


def work(loop: Loop, rig: Rig) -> None:
    rig.backend.interrupt()
    while loop.step():
        rig.backend.interrupt()


def test_queue_time_first_token_and_gaps_are_counted() -> None:
    loop, rig = make_loop()
    submit(loop, rig, *make_sequences(2, max_tokens=3))
    work(loop, rig)
    stats = rig.stats
    assert (stats.queue_s.n, stats.ttft_s.n, stats.itl_s.n) == (2, 2, 2 * 2)
    near = [pytest.approx(x, rel=0.025) for x in (3.0, 4.0, 1.0, 1.0)]
    assert [
        stats.queue_s.at(99),
        stats.ttft_s.at(99),
        stats.itl_s.at(1),
        stats.itl_s.at(99),
    ] == near


def test_several_steps_of_one_run_count_with_their_mean_gap() -> None:
    rig = make_scheduler(2, cost=StepCost(1.0))
    rig.submit(*make_sequences(2, max_tokens=5))
    rig.backend.interrupt()
    step(rig)
    drive(rig)
    assert rig.stats.itl_s.n == 2 * 4
    assert rig.stats.itl_s.at(50) == pytest.approx(1.0, rel=0.025)


def test_pause_between_two_tokens_is_in_their_gap() -> None:
    rig = make_scheduler(2)
    rig.submit(*make_sequences(2, max_tokens=3))
    rig.backend.interrupt()
    step(rig)
    rig.batcher.pause("0")
    drive_others(rig)
    rig.batcher.resume("0")
    drive(rig, before=lambda rig: rig.backend.interrupt())
    assert rig.stats.itl_s.at(100) == pytest.approx(3.0, rel=0.025)


def drive_others(rig: Rig) -> None:
    while "1" not in rig.results:
        rig.backend.interrupt()
        step(rig)


def test_buckets_of_percentiles_hold_what_was_counted() -> None:
    times = Percentiles()
    times.add(3.0)
    times.add(0.5, 4)
    (low, _, few), (start, end, one) = times.buckets()
    assert (low, few, one) == (0.5, 4, 1)
    assert start <= 3.0 < end < start * 1.05


def test_who_never_ran_has_no_queue_time_and_no_first_token() -> None:
    loop, rig = make_loop()
    submit(loop, rig, *make_sequences(2, max_tokens=3)).cancel(["1"])
    work(loop, rig)
    assert rig.stats.n_finished == {"cancelled": 1, "length": 1}
    assert (rig.stats.queue_s.n, rig.stats.ttft_s.n) == (1, 1)


def test_phases_of_a_run_follow_each_other_and_sum_up_to_it() -> None:
    rig = make_scheduler(1, cost=StepCost(base_s=1 / 64))
    times = iter([0.0, 1.0, 3.0, 7.0, 15.0, 31.0])
    loop, records = loop_over(rig.backend, rig, lambda: next(times)), list[StepRecord]()
    loop.recorder = records.append
    submit(loop, rig, *make_sequences(3, max_tokens=4))
    loop.step()
    [r] = records
    assert (r.admit_s, r.build_s, r.run_s, r.apply_s, r.deliver_s) == (1.0, 2.0, 4.0, 8.0, 16.0)
    assert (r.start_s, r.n_rows, r.n_steps, r.n_tokens, r.n_waiting, r.code) == (0.0, 1, 4, 4, 2, 0)
    assert (r.decode_s, r.sample_s) == (4 / 64, 0.0)
    assert (rig.stats.plan_s, rig.stats.run_s, rig.stats.apply_s) == (3.0, 4.0, 24.0)


def test_record_tells_the_code_of_a_failed_step() -> None:
    rig = make_scheduler(2, code=lambda chunks: -3 if chunks[0].start >= 4 else 0, cost=StepCost())
    loop, records = loop_over(rig.backend, rig, lambda: rig.now), list[StepRecord]()
    loop.recorder = records.append
    submit(loop, rig, make_request(max_tokens=3))
    loop.step()
    assert (records[0].code, records[0].n_steps) == (-3, 1)


def test_nothing_is_recorded_where_nobody_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cbatch.runtime.loop.record_of", None)  # calling it would raise
    loop, rig = make_loop()
    submit(loop, rig, *make_sequences(2, max_tokens=3))
    work(loop, rig)
    assert rig.stats.n_output_tokens == 6


def test_statistics_begun_anew_are_those_of_an_engine_just_loaded() -> None:
    stats = synthetic()
    stats.itl_s.add(1.0)
    stats.n_finished["length"] = 3
    before = stats.copy()
    stats.clear()
    assert to_builtins(stats) == to_builtins(EngineStats())
    assert (before.n_steps, before.itl_s.n, before.n_finished) == (4, 1, {"length": 3})
