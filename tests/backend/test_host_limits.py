"""The cores that this process may use: the narrowest of affinity, quotas and OpenMP's limit."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from cbatch.backend import host_limits
from cbatch.backend.host_limits import available_cores

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(autouse=True)
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of control groups of a system that gives this process four cores in the group a/b."""
    (tmp_path / "own").write_text("4:memory:/old\n0::/a/b\n")
    (tmp_path / "groups/a/b").mkdir(parents=True)
    monkeypatch.setattr(host_limits, "_OWN_GROUP", tmp_path / "own")
    monkeypatch.setattr(host_limits, "_CGROUPS", tmp_path / "groups")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 3, 5, 7}, raising=False)
    monkeypatch.delenv("OMP_THREAD_LIMIT", raising=False)
    return tmp_path / "groups"


@pytest.mark.parametrize("group", ["", "a", "a/b"])
@pytest.mark.parametrize(
    ("text", "n_cores"),
    [
        ("max 100000\n", 4),
        ("250000 100000\n", 2),
        ("50000 100000\n", 1),
        ("900000 100000\n", 4),
        ("nonsense", 4),
    ],
)
def test_quota_of_any_group_around_the_process_counts(
    groups: Path, group: str, text: str, n_cores: int
) -> None:
    (groups / group / "cpu.max").write_text(text)
    assert available_cores() == n_cores


@pytest.mark.parametrize(("limit", "n_cores"), [("2", 2), ("9", 4), ("0", 4), ("many", 4)])
def test_limit_of_openmp_counts(monkeypatch: pytest.MonkeyPatch, limit: str, n_cores: int) -> None:
    monkeypatch.setenv("OMP_THREAD_LIMIT", limit)
    assert available_cores() == n_cores


def test_machine_that_tells_nothing_has_a_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert available_cores() == 1
