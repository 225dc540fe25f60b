"""Times and rates of one request, and the engine's counts."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cbatch.core.stats import RequestClock
from tests.helpers import drive, make_request, make_scheduler, make_sequences

SECONDS = st.one_of(st.none(), st.floats(0, 1e9))


def test_timings_of_a_whole_life() -> None:
    clock = RequestClock(submitted_s=1.0, admitted_s=3.0, first_token_s=5.0, finished_s=9.0)
    timings = clock.timings(n_prompt=10, n_output=9)
    assert (timings.queue_s, timings.ttft_s, timings.total_s) == (2.0, 4.0, 8.0)
    assert timings.prompt_tps == 10 / 2
    assert timings.generation_tps == (9 - 1) / 4


def test_timings_of_a_single_token_have_no_generation_rate() -> None:
    clock = RequestClock(submitted_s=0.0, admitted_s=0.0, first_token_s=2.0, finished_s=2.0)
    timings = clock.timings(n_prompt=4, n_output=1)
    assert (timings.prompt_tps, timings.generation_tps) == (2.0, None)


def test_timings_of_a_request_that_never_ran_count_its_waiting() -> None:
    timings = RequestClock(submitted_s=1.0, finished_s=4.0).timings(0, 0)
    assert (timings.queue_s, timings.ttft_s, timings.total_s) == (3.0, None, 3.0)
    assert (timings.prompt_tps, timings.generation_tps) == (None, None)


@given(st.floats(0, 1e9), SECONDS, SECONDS, SECONDS, st.integers(0, 99), st.integers(0, 99))
def test_rates_never_divide_by_zero_and_are_never_negative(
    submitted: float,
    admitted: float | None,
    first: float | None,
    finished: float | None,
    n_prompt: int,
    n_output: int,
) -> None:
    timings = RequestClock(submitted, admitted, first, finished).timings(n_prompt, n_output)
    for rate in (timings.prompt_tps, timings.generation_tps):
        assert rate is None or rate > 0


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
