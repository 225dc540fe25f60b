"""Cores, slots and memory divided among workers, and how many workers there are."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cbatch.engine_options import EngineOptions
from cbatch.errors import ConfigError
from cbatch.worker.placement import (
    choose_replicas,
    divide,
    divide_cores,
    n_cores_taken,
    nodes_of,
    place,
)
from cbatch.worker.start import divisible, settings_of

if TYPE_CHECKING:
    from pathlib import Path

MIB = 2**20


def test_cores_are_told_apart_by_the_memory_near_to_them(tmp_path: Path) -> None:
    for i, text in ((0, "0-3,8\n"), (1, "4-7\n"), (10, "9\n")):
        (tmp_path / f"node{i}").mkdir()
        (tmp_path / f"node{i}" / "cpulist").write_text(text)
    assert nodes_of([0, 1, 4, 8, 9, 12], tmp_path) == [[0, 1, 8], [4], [9], [12]]
    assert nodes_of([1, 2], tmp_path / "none") == [[1, 2]]


@pytest.mark.parametrize(
    ("nodes", "n", "expected"),
    [
        ([[0, 1]], 2, [[0], [1]]),
        ([[0, 1, 2, 3, 4]], 2, [[0, 1], [2, 3, 4]]),
        ([[0, 1], [2, 3]], 2, [[0, 1], [2, 3]]),
        ([[0, 1], [2, 3]], 1, [[0, 1, 2, 3]]),
        ([[0, 1, 2, 3], [4, 5]], 3, [[0, 1], [4, 5], [2, 3]]),
        ([[0]], 3, [[0], [0], [0]]),
    ],
)
def test_workers_get_whole_nodes_or_parts_of_one(
    nodes: list[list[int]], n: int, expected: list[list[int]]
) -> None:
    assert divide_cores(nodes, n) == expected


@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=4), n=st.integers(1, 12))
def test_every_worker_has_cores_and_no_core_is_idle(sizes: list[int], n: int) -> None:
    nodes, first = list[list[int]](), 0
    for size in sizes:
        nodes.append([*range(first, first + size)])
        first += size
    parts = divide_cores(nodes, n)
    assert len(parts) == n
    assert all(parts)
    if n <= first:
        assert sorted(core for part in parts for core in part) == [*range(first)]


def test_things_are_divided_with_what_is_left_over_first() -> None:
    assert divide(7, 3) == [3, 2, 2]
    assert divide(None, 2) == [None, None]


@pytest.mark.parametrize(
    ("nodes", "mib", "n_slots", "expected"),
    [
        ([[0, 1]], 12, 16, 2),
        ([[0, 1]], 200, 32, 1),
        ([[0, 1]], 12, None, 2),
        ([[0, 1]], 12, 15, 1),
        ([[0]], 12, 64, 1),
        ([[0, 1], [2, 3], [4, 5]], 4000, 64, 3),
        ([[0, 1], [2, 3], [4, 5]], 4000, 32, 1),
    ],
)
def test_workers_are_chosen_by_cores_weights_and_slots(
    nodes: list[list[int]], mib: int, n_slots: int | None, expected: int
) -> None:
    assert choose_replicas(nodes, mib * MIB, n_slots, lambda _: 0.1) == expected


@pytest.mark.parametrize(
    ("cores", "n_slots", "n_taken", "expected"),
    [
        ([0, 1], 16, 0.9, 2),
        ([0, 1], None, 2.0, 2),
        ([0, 1], 16, 0.4, 1),
        ([0, 1], 15, 0.9, 1),
        ([0, 1, 2, 3], 64, 3.0, 1),
        ([0], 64, 1.0, 1),
    ],
)
def test_two_workers_share_two_cores_with_other_programs(
    cores: list[int], n_slots: int | None, n_taken: float, expected: int
) -> None:
    assert choose_replicas([cores], 500 * MIB, n_slots, lambda _: n_taken) == expected


def test_cores_are_taken_that_others_keep_busy(tmp_path: Path) -> None:
    def write(*busy: int) -> None:
        """Write the ticks that each core was busy; every core is idle for the rest of 100."""
        lines = [f"cpu{i} {n} 0 0 {100 - n} 0 0 0 0 0 0\n" for i, n in enumerate(busy)]
        stat.write_text("cpu 1 1 1 1 1 1 1 1 1 1\n" + "".join(lines) + "intr 1 2 3\n")

    stat = tmp_path / "stat"
    write(0, 0, 0)
    n = n_cores_taken([0, 2], stat, lambda _: stat.write_text(_later(stat.read_text())))
    assert 1.3 <= n <= 1.5
    assert n_cores_taken([0, 2], tmp_path / "none", lambda _: None) == 0.0


def _later(text: str) -> str:
    """Return the ticks a second later: the cores were busy for all, half, and half of it."""
    text = text.replace("cpu0 0 0 0 100", "cpu0 100 0 0 100")
    return text.replace("cpu1 0 0 0 100", "cpu1 50 0 0 150").replace(
        "cpu2 0 0 0 100", "cpu2 20 0 0 150 0 0 0 30"
    )


def test_settings_of_workers_add_up_to_those_of_the_pool() -> None:
    options = EngineOptions(parallel=5, n_ctx=4096, n_threads=3, swap_mib=100, exact=True)
    found = settings_of(options, 2)
    assert [s["parallel"] for s in found] == [3, 2]
    assert [s["n_ctx"] for s in found] == [2048, 2048]
    assert [s["n_threads"] for s in found] == [2, 1]
    assert [s["swap_mib"] for s in found] == [50, 50]
    assert all(s["exact"] for s in found)
    assert [s["parallel"] for s in settings_of(EngineOptions(), 3)] == [16, 16, 16]
    assert settings_of(EngineOptions(), 1) == [{}]


def test_too_little_for_all_workers_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="parallel=2 cannot be divided among 3 replicas"):
        settings_of(EngineOptions(parallel=2), 3)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [({}, 4), ({"n_threads": 1}, 1), ({"parallel": 3, "n_threads": 8}, 3), ({"max_queue": 0}, 4)],
)
def test_no_more_workers_are_chosen_than_the_settings_are_enough_for(
    settings: dict[str, Any], expected: int
) -> None:
    options = EngineOptions(**settings)
    assert divisible(options, 4) == expected
    settings_of(options, expected)


@pytest.mark.parametrize("cores", ["0", [], [-1], [True], [1.5], {}])
def test_cores_that_are_no_cores_are_refused(cores: object) -> None:
    with pytest.raises(ConfigError, match="cores"):
        place(cores)


def test_no_cores_are_any_cores() -> None:
    before = os.sched_getaffinity(0)
    place(None)
    assert os.sched_getaffinity(0) == before
