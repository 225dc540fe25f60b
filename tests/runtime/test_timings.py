"""Times and rates of one request, and the engine's counts."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cbatch.backend.fake import StepCost
from cbatch.core.request import RequestClock
from cbatch.runtime.output import timings_of
from tests.helpers import drive, make_request, make_scheduler, make_sequences, partitioned, step

SECONDS = st.one_of(st.none(), st.floats(0, 1e9))


def test_timings_of_a_whole_life() -> None:
    clock = RequestClock(
        submitted_s=1.0, admitted_s=3.0, first_token_s=5.0, last_token_s=9.0, finished_s=13.0
    )
    timings = timings_of(clock, n_computed=10, n_output=9)
    assert (timings.queue_s, timings.ttft_s, timings.total_s) == (2.0, 4.0, 12.0)
    assert timings.last_token_s == 8.0
    assert timings.prompt_tps == 10 / 2
    assert timings.generation_tps == (9 - 1) / 4


def test_timings_of_a_single_token_have_no_generation_rate() -> None:
    clock = RequestClock(0.0, 0.0, first_token_s=2.0, last_token_s=2.0, finished_s=3.0)
    timings = timings_of(clock, n_computed=4, n_output=1)
    assert (timings.prompt_tps, timings.generation_tps) == (2.0, None)


def test_timings_of_a_request_that_never_ran_count_its_waiting() -> None:
    timings = timings_of(RequestClock(submitted_s=1.0, finished_s=4.0), 0, 0)
    assert (timings.queue_s, timings.ttft_s, timings.total_s) == (3.0, None, 3.0)
    assert (timings.prompt_tps, timings.generation_tps) == (None, None)
    assert timings.last_token_s is None


@given(st.floats(0, 1e9), st.tuples(*[SECONDS] * 5), st.integers(0, 99), st.integers(0, 99))
def test_rates_never_divide_by_zero_and_are_never_negative(
    submitted: float, others: tuple[float | None, ...], n_computed: int, n_output: int
) -> None:
    timings = timings_of(RequestClock(submitted, *others), n_computed, n_output)
    for rate in (timings.prompt_tps, timings.generation_tps):
        assert rate is None or rate > 0


@pytest.mark.parametrize("is_one_run", [True, False])
def test_tokens_have_the_times_of_their_steps_however_many_a_run_does(
    is_one_run: bool,
) -> None:
    rig = make_scheduler(1, cost=StepCost(base_s=1.0))
    rig.submit(make_request(max_tokens=9))
    drive(rig, before=None if is_one_run else lambda rig: rig.backend.interrupt())
    timings = rig.results["a"].timings
    assert (timings.ttft_s, timings.last_token_s, timings.total_s) == (1.0, 9.0, 9.0)
    assert timings.generation_tps == (9 - 1) / (9 - 1)
    assert (rig.stats.itl_s.n, rig.stats.n_output_tokens) == (8, 9)
    assert rig.stats.itl_s.at(50) == pytest.approx(1.0, rel=0.025)


def test_last_token_of_a_request_that_is_cancelled_is_the_one_that_it_has() -> None:
    rig = make_scheduler(1, cost=StepCost(base_s=1.0))
    rig.submit(make_request(max_tokens=50))
    for _ in range(4):
        rig.backend.interrupt()
        step(rig)
    rig.batcher.pause("a")
    rig.backend.now_s += 100.0
    rig.cancel("a")
    drive(rig)
    timings = rig.results["a"].timings
    assert (timings.last_token_s, timings.total_s) == (4.0, 104.0)
    assert timings.generation_tps == 1.0


def test_prompt_rate_counts_what_was_computed_and_not_what_was_taken_over() -> None:
    memory = partitioned(2 * 64)
    rig = make_scheduler(2, memory=memory, share_prefixes=True, cost=StepCost(token_s=0.5))
    rig.submit(make_request("a", [7] * 8, max_tokens=2))
    drive(rig)
    rig.submit(make_request("b", [7] * 8 + [9] * 4, max_tokens=1))
    drive(rig)
    first, second = rig.results["a"], rig.results["b"]
    assert (first.usage.cached_tokens, second.usage.cached_tokens) == (0, 8)
    assert first.timings.prompt_tps == second.timings.prompt_tps == 2.0


def test_prompt_rate_counts_once_what_was_computed_again() -> None:
    rig = make_scheduler(1, n_batch=4, cost=StepCost(base_s=1.0))
    rig.submit(make_request("a", range(8), max_tokens=1))
    step(rig)
    rig.batcher.keep_cells(rig.drivers["a"], 0)
    drive(rig)
    assert rig.stats.n_recomputed_tokens == 4
    assert rig.results["a"].timings.prompt_tps == 8 / 3


@pytest.mark.parametrize(
    "options", [{"prefill_only": True}, {"max_tokens": 0, "prompt_logprobs": 0}]
)
def test_prompt_alone_has_a_rate_and_no_token(options: dict[str, Any]) -> None:
    rig = make_scheduler(1, cost=StepCost(token_s=0.5))
    rig.submit(make_request("a", range(8), **options))
    drive(rig)
    timings = rig.results["a"].timings
    assert (timings.prompt_tps, timings.ttft_s, timings.generation_tps) == (2.0, None, None)


def test_row_without_a_number_is_no_token() -> None:
    rig = make_scheduler(1, broken=lambda chunk: chunk.start >= 6)
    rig.submit(make_request(max_tokens=9))
    drive(rig)
    assert len(rig.results["a"].token_ids) == rig.stats.n_output_tokens == 3
    assert rig.results["a"].timings.generation_tps == 1.0


def test_clock_of_a_queued_request_counts_from_submission() -> None:
    rig = make_scheduler(n_slots=1)
    rig.submit(*make_sequences(2, max_tokens=3))
    drive(rig, before=lambda rig: rig.backend.interrupt())
    first, second = (rig.results[id].timings for id in "01")
    assert (first.queue_s, first.ttft_s, first.total_s) == (0.0, 1.0, 3.0)
    assert (second.queue_s, second.ttft_s, second.total_s) == (3.0, 4.0, 6.0)


def test_engine_counts_of_two_requests_side_by_side() -> None:
    rig = make_scheduler(n_slots=2, n_batch=16)
    rig.submit(
        make_request("a", (1, 2, 3, 4), max_tokens=5), make_request("b", (5, 6), max_tokens=3)
    )
    drive(rig)
    stats = rig.stats
    assert (stats.n_prompt_tokens, stats.n_output_tokens) == (4 + 2, 5 + 3)
    assert (stats.n_steps, stats.n_active_steps, stats.n_active_max) == (5, 3 * 2 + 2, 2)
    assert stats.n_runs == 2
