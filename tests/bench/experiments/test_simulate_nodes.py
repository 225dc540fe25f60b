"""Simulation of many nodes: what can be counted by hand, and that no row is lost whatever happens to nodes."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from typing import Any

import pytest

from cbatch.backend.fake import StepCost
from cbatch.bench.experiments import simulate_nodes as script
from cbatch.bench.experiments.simulate_nodes import (
    Fleet,
    NodesReport,
    _NodesSimulation,
    simulate_nodes,
)
from cbatch.errors import ConfigError

A_SECOND = StepCost(base_s=1.0)
"""A step takes a second, whatever it computes."""

JOB = Fleet(n_rows=6400, n_slots=4, batch_size=16, cost=A_SECOND, start_s=0.0, mean_output=20)


def figures(report: NodesReport) -> dict[str, Any]:
    return {f.name: getattr(report, f.name) for f in fields(report) if f.compare}


def test_node_computes_as_many_rows_at_once_as_it_has_slots() -> None:
    one = simulate_nodes(replace(JOB, mean_output=1000, n_rows=2000))
    assert one.busy == pytest.approx(1, abs=0.02)
    assert one.output_tps == pytest.approx(
        4, rel=0.1
    )  # of four slots, by the mean length of an answer


def test_more_nodes_are_faster_and_cost_more_by_what_they_wait() -> None:
    few, many = (simulate_nodes(replace(JOB, n_nodes=n), hourly=3.6) for n in (1, 8))
    assert many.rows_per_s == pytest.approx(8 * few.rows_per_s, rel=0.1)
    assert few.price_per_million == pytest.approx(1000 / few.output_tps)
    assert many.price_per_million == pytest.approx(8 * 1000 / many.output_tps)


def test_same_seed_gives_the_same_figures() -> None:
    fleet = replace(JOB, n_nodes=3, deaths_per_hour=5, slow_share=0.4)
    assert figures(simulate_nodes(fleet)) == figures(simulate_nodes(fleet))
    assert figures(simulate_nodes(fleet)) != figures(simulate_nodes(replace(fleet, seed=1)))


@pytest.mark.parametrize("rate", [float("inf"), 0.3])
def test_deaths_lose_no_row_and_those_begun_are_computed_again(rate: float) -> None:
    fleet = replace(JOB, n_nodes=3, n_rows=800, rate=rate, deaths_per_hour=20, start_s=10)
    simulation = _NodesSimulation(fleet)
    simulation.run()
    assert simulation.n_deaths > 3
    assert simulation.n_again > 0
    assert simulation.total_s.n == (800 if rate == 0.3 else 50)
    assert not any(node.tasks for node in simulation.nodes)


def test_slow_node_gets_less_of_a_job() -> None:
    simulation = _NodesSimulation(replace(JOB, n_nodes=2, slow_share=0.5, slow_factor=3.0))
    simulation.run()
    slow, fast = simulation.nodes
    assert slow.n_taken == pytest.approx(fast.n_taken / 3, rel=0.15)


def test_driver_that_needs_longer_for_a_batch_than_a_node_is_the_limit() -> None:
    free = simulate_nodes(replace(JOB, n_nodes=20))
    bound = simulate_nodes(replace(JOB, n_nodes=20, driver_s=10.0))
    assert bound.seconds == pytest.approx(10 * 400, rel=0.1)
    assert bound.busy < 0.6 * free.busy


def test_affinity_computes_prefixes_less_often() -> None:
    cost = StepCost(base_s=0.1, token_s=0.001)
    fleet = replace(
        JOB, n_nodes=4, cost=cost, rate=1.0, n_rows=2000, n_common=300, n_prefixes=40, n_kept=10
    )
    blind, apt = (simulate_nodes(replace(fleet, has_affinity=has)) for has in (False, True))
    assert apt.prefix_hits > 0.8 > 0.4 > blind.prefix_hits
    assert apt.total_s.p50 is not None
    assert blind.total_s.p50 is not None
    assert apt.total_s.p50 < blind.total_s.p50


@pytest.mark.parametrize(
    "wrong", [{"n_nodes": 0}, {"rate": -1.0}, {"slow_share": 2.0}, {"start_s": float("nan")}]
)
def test_values_that_would_mean_nothing_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Fleet(**wrong)


def test_script_prints_a_line_for_each_number_of_nodes(capsys: pytest.CaptureFixture[str]) -> None:
    script.main(["--nodes", "1", "3", "--rows", "500", "--price", "0.1", "--affinity"])
    lines = [json.loads(said) for said in capsys.readouterr().out.splitlines()]
    assert [said["nodes"] for said in lines] == [1, 3]
    assert all(said["rows_per_s"] > 0 for said in lines)
