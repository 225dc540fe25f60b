"""What the benchmarks share: turns, medians, and the lines that they print."""

from __future__ import annotations

from functools import partial

import pytest

from cbatch.bench.experiments.rounds import compare, median, parser, ratios, take_turns
from cbatch.bench.harness import percentile


def test_each_way_is_as_often_first_and_the_first_round_is_left_out() -> None:
    done: list[str] = []

    def way(name: str) -> str:
        done.append(name)
        return f"{name}{len(done)}"

    assert take_turns(2, partial(way, "a"), partial(way, "b")) == [("a4", "b3"), ("a5", "b6")]
    assert "".join(done) == "abbaab"


def test_ratios_are_those_of_each_round() -> None:
    rounds = [(90.0, 100.0), (200.0, 200.0), (40.0, 50.0)]
    assert ratios(rounds, "a_over_b") == {"a_over_b": 0.9, "ratio_min": 0.8, "ratio_max": 1.0}
    assert median([1.0, 2.0, 4.00049]) == 2.0


def test_two_ways_have_their_medians_and_the_ratio_of_the_first() -> None:
    times = iter([9.0, 9.0, 2.0, 1.0, 4.0, 6.0])  # "b" is first in the second round
    found = compare(2, 0, a_ms=lambda: next(times), b_ms=lambda: next(times))
    assert found == {"a_ms": 2, "b_ms": 4, "ratio": 0.5833, "ratio_min": 0.5, "ratio_max": 0.6667}


@pytest.mark.parametrize(("share", "time"), [(0.5, 50), (0.99, 99), (0.991, 100), (1.0, 100)])
def test_percentile_is_a_time_that_was_measured(share: float, time: int) -> None:
    assert percentile(range(1, 101), share) == time


def test_arguments_are_those_that_the_benchmark_has() -> None:
    doc = "Title.\n\nMore."
    assert vars(parser(doc, model=None).parse_args([])) == {}
    assert vars(parser(doc, model="inside", n_rounds=3).parse_args([])) == {
        "model": None,
        "rounds": 3,
    }
    assert parser(doc).parse_args(["a.gguf"]).model == "a.gguf"
    assert parser(doc).description == "Title."
