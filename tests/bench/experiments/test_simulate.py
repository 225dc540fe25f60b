"""Simulation: virtual time to the second, every policy, and traces of any length."""

from __future__ import annotations

import gc
import json
import math
import statistics
import sys
from itertools import islice
from typing import TYPE_CHECKING, Any, get_args

import pytest

from cbatch.backend.fake import StepCost
from cbatch.bench.experiments import simulate as script
from cbatch.bench.experiments.simulate import Report, capacity, simulate
from cbatch.bench.experiments.step_costs import SMALL
from cbatch.bench.experiments.traffic import Arrival, poisson, read_trace
from cbatch.core.driver import SequenceDriver
from cbatch.core.plan import KvCapabilities
from cbatch.engine_options import Policy, ScheduleOptions
from cbatch.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

A_SECOND = StepCost(base_s=1.0)
POLICIES: tuple[str, ...] = get_args(Policy)


def served(
    *arrivals: Arrival, n_slots: int = 1, cost: StepCost = A_SECOND, **options: Any
) -> Report:
    return simulate(arrivals, n_slots=n_slots, cost=cost, options=ScheduleOptions(**options))


def near(seconds: float) -> Any:
    """What a percentile of equal times is: 2 % off at most, by its bucket."""
    return pytest.approx(seconds, rel=0.025)


def test_two_requests_in_one_slot_take_the_steps_they_need() -> None:
    report = served(Arrival(0.0, 4, 3), Arrival(0.5, 2, 1))
    assert (report.virtual_s, report.n_steps, report.mean_width) == (4.0, 4, 1.0)
    assert report.n_finished == {"length": 2}
    assert (report.output_tps, report.requests_per_s) == (1.0, 0.5)
    assert (report.ttft_s.p50, report.ttft_s.p99) == (near(1.0), near(3.5))
    assert report.queue_s.p99 == near(2.5)
    assert report.itl_s.p99 == near(1.0)
    assert (report.total_s.p50, report.total_s.p99) == (near(3.0), near(3.5))
    # the clock jumps to the next arrival when nothing runs
    report = served(Arrival(10.0, 4, 2), Arrival(100.0, 4, 1))
    assert (report.virtual_s, report.n_steps) == (101.0, 3)
    report = served()
    assert (report.virtual_s, report.output_tps, report.n_finished) == (0.0, 0.0, {})
    assert report.ttft_s.p50 is None


def test_arrival_ends_a_run_of_steps_and_is_admitted_behind_it() -> None:
    report = served(
        Arrival(0.0, 1, 100), Arrival(0.0055, 1, 1), n_slots=2, cost=StepCost(base_s=0.001)
    )
    assert report.queue_s.p99 == near(0.0005)
    assert report.virtual_s == pytest.approx(0.1)


def test_request_over_the_window_ends_as_an_error_and_the_next_one_runs() -> None:
    report = simulate([Arrival(0, 60, 9), Arrival(0, 6, 9)], n_slots=1, n_window=64)
    assert report.n_finished == {"error": 1, "length": 1}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    "memory", [None, KvCapabilities("unified", 300)], ids=["partitioned", "unified"]
)
def test_every_policy_serves_everybody_alike_each_time(
    policy: str, memory: KvCapabilities | None
) -> None:
    def run() -> Report:
        trace = poisson(2.0, 60, 8, 12, seed=3)
        options = ScheduleOptions(policy=policy)  # type: ignore[arg-type]
        return simulate(
            trace, n_slots=4, n_window=256, cost=StepCost(0.1), options=options, memory=memory
        )

    report = run()
    assert report.n_finished == {"length": 60}
    assert report.n_output_tokens == sum(a.n_output for a in poisson(2.0, 60, 8, 12, seed=3))
    assert report == run()


SHORT_AND_LONG = [Arrival(0.1 * i, 400 if i % 3 == 0 else 10, 4) for i in range(90)]
LATE_SHORT = [Arrival(0.0, 1, 100), *(Arrival(1.0, 1, 2) for _ in range(5))]


@pytest.mark.parametrize(
    ("policy", "trace", "given"),
    [
        ("shortest", SHORT_AND_LONG, {"n_slots": 2, "cost": StepCost(0.05, 0.001)}),
        ("round_robin", LATE_SHORT, {"quantum": 4}),
    ],
)
def test_short_ones_pass_long_ones_under_a_policy_for_them(
    policy: str, trace: list[Arrival], given: dict[str, Any]
) -> None:
    given = dict(given)
    fair = served(*trace, **given, policy=policy).ttft_s.p50
    given.pop("quantum", None)
    fcfs = served(*trace, **given, policy="fcfs").ttft_s.p50
    assert fcfs is not None
    assert fair is not None
    assert fair < fcfs / 2


def test_priority_saves_one_from_its_deadline() -> None:
    trace = [*(Arrival(0.0, 1, 5) for _ in range(10)), Arrival(1.0, 1, 5, 100, timeout_s=12.0)]
    assert served(*trace, policy="fcfs").n_finished == {"length": 10, "timeout": 1}
    assert served(*trace, policy="priority").n_finished == {"length": 11}


def test_full_queue_rejects_or_makes_the_trace_wait() -> None:
    trace = [Arrival(0.0, 1, 2) for _ in range(6)]
    rejected = served(*trace, max_queue=2, when_full="reject")
    assert (rejected.n_finished, rejected.n_rejected) == ({"length": 3}, 3)
    waited = served(*trace, max_queue=2)
    assert (waited.n_finished, waited.n_rejected) == ({"length": 6}, 0)
    assert waited.n_in_flight_max == 3
    assert waited.queue_s.p99 == near(10.0)


def test_long_prompts_do_not_hold_up_readers() -> None:
    def longest_gap(*, is_watched: bool) -> float:
        trace = [Arrival(0.0, 1, 300), *(Arrival(5.0 + i, 1000, 1) for i in range(10))]
        cost = StepCost(0.05, 0.001)
        report = simulate(trace, n_slots=2, cost=cost, is_watched=is_watched)
        return report.itl_s.p99 or 0.0

    assert (
        longest_gap(is_watched=True) < 0.27
    )  # one waits for the next token, one for its first: five steps
    assert longest_gap(is_watched=False) > 1.0


@pytest.mark.slow
@pytest.mark.usefixtures("new_objects_only")
def test_trace_of_any_length_is_read_one_by_one_and_forgotten() -> None:
    n_live = list[int]()

    def watched() -> Iterator[Arrival]:
        for i, arrival in enumerate(poisson(100.0, 5000, 4, 4)):
            if i % 500 == 0:
                n_live.append(n_drivers())
            yield arrival

    report = simulate(watched(), n_slots=8, cost=StepCost(0.01))
    assert report.n_finished == {"length": 5000}
    assert len(n_live) == 10
    assert 0 < max(n_live) < 100


def n_drivers() -> int:
    return sum(isinstance(o, SequenceDriver) for o in gc.get_objects())


def test_poisson_keeps_its_means() -> None:
    trace = list(poisson(10.0, 4000, 20, 5, seed=1))
    assert trace[-1].at_s == pytest.approx(400, rel=0.1)
    assert statistics.mean(a.n_prompt for a in trace) == pytest.approx(20, rel=0.1)
    assert statistics.mean(a.n_output for a in trace) == pytest.approx(5, rel=0.1)
    assert all(a.n_output == 1 for a in poisson(10.0, 5, 20, 1))
    assert list(poisson(1.0, 5, 8, 8, seed=1)) != list(poisson(1.0, 5, 8, 8, seed=2))


@pytest.mark.parametrize("wrong", [(0.0, 4, 4), (-1.0, 4, 4), (1.0, 0.5, 4), (1.0, 4, math.nan)])
def test_poisson_without_a_rate_or_a_length_is_refused(wrong: tuple[float, float, float]) -> None:
    rate, mean_prompt, mean_output = wrong
    with pytest.raises(ConfigError, match="must be"):
        poisson(rate, 5, mean_prompt, mean_output)


def test_capacity_is_what_a_full_house_does() -> None:
    report = simulate(poisson(math.inf, 400, 16, 16), n_slots=16, cost=SMALL, is_watched=False)
    assert report.requests_per_s == pytest.approx(capacity(SMALL, 16, 16, 16), rel=0.15)


def test_trace_file_gives_its_requests(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(
        '{"at_s": 0, "n_prompt": 3, "n_output": 4}\n\n'
        '{"at_s": 1.5, "n_prompt": 5, "n_output": 6, "priority": -2, "timeout_s": 9}\n'
    )
    assert list(read_trace(path)) == [Arrival(0, 3, 4), Arrival(1.5, 5, 6, -2, 9)]
    with pytest.raises(ConfigError, match="absent"):
        next(read_trace(tmp_path / "absent"))


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "{}",
        '{"at_s": 2, "n_prompt": 3}',
        '{"at_s": 2, "n_prompt": 3, "n_output": 4, "colour": 1}',
        '{"at_s": 0.5, "n_prompt": 3, "n_output": 4}',
        '{"at_s": NaN, "n_prompt": 3, "n_output": 4}',
        '{"at_s": "2", "n_prompt": 3, "n_output": 4}',
        '{"at_s": 2, "n_prompt": 0, "n_output": 4}',
        '{"at_s": 2, "n_prompt": 3, "n_output": 4, "priority": 101}',
        '{"at_s": 2, "n_prompt": 3, "n_output": 4, "timeout_s": -1}',
    ],
)
def test_bad_line_of_a_trace_is_named_when_it_is_reached(line: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"at_s": 1, "n_prompt": 3, "n_output": 4}\n' + line + "\n")
    trace = read_trace(path)
    assert len(list(islice(trace, 1))) == 1
    with pytest.raises(ConfigError, match=r"trace\.jsonl, line 2"):
        next(trace)


def lines(
    given: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> list[dict[str, Any]]:
    monkeypatch.setattr(sys, "argv", ["simulate", *given])
    script.main()
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_script_prints_a_line_for_each_combination(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--slots", "2", "4", "--policy", "fcfs", "round_robin", "--quantum", "8"]
    sizes = ["--requests", "30", "--mean-prompt", "8", "--mean-output", "6"]
    found = lines([*given, *sizes], monkeypatch, capsys)
    assert [(f["slots"], f["policy"]) for f in found] == [
        (2, "fcfs"), (2, "round_robin"), (4, "fcfs"), (4, "round_robin"),
    ]  # fmt: skip
    for f in found:
        assert f["n_finished"] == {"length": 30}
        assert 0 < f["ttft_s"]["p50"] <= f["ttft_s"]["p90"] <= f["ttft_s"]["p99"]


def test_script_serves_a_trace_with_costs_of_a_file_in_a_shared_pool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trace, costs = tmp_path / "trace.jsonl", tmp_path / "costs.json"
    trace.write_text('{"at_s": 0, "n_prompt": 3, "n_output": 20}\n' * 8)
    costs.write_text('{"decode_s": [[1, 1.0]], "prompt_s": [[1, 0.0]]}')
    given = ["--trace", str(trace), "--costs", str(costs), "--slots", "4", "--window", "64"]
    pool = ["--unified-cells", "60", "--admission", "optimistic", "--saved-bytes", "100"]
    [found] = lines([*given, *pool], monkeypatch, capsys)
    assert found["n_finished"] == {"length": 8}
    assert found["virtual_s"] >= 40
