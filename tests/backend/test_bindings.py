"""How llama.cpp's OpenMP runtime is loaded, seen from the runtime's own display of what it read."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from cbatch.backend.bindings import POLICIES, spin_count

_LOAD = "import os; before = dict(os.environ); import {}; assert dict(os.environ) == before"


def _spin_count_read(module: str, **policy: str) -> str:
    """What libgomp says that it read when `module` was imported in a new process."""
    environment = {k: v for k, v in os.environ.items() if k not in POLICIES}
    done = subprocess.run(
        [sys.executable, "-c", _LOAD.format(module)],
        env={**environment, "OMP_DISPLAY_ENV": "verbose", **policy},
        capture_output=True,
        text=True,
        check=True,
    )
    [line] = [line for line in done.stderr.splitlines() if "GOMP_SPINCOUNT" in line]
    return line.partition("=")[2].strip(" '")


@pytest.mark.real
@pytest.mark.parametrize("module", ["cbatch.backend.load.loader", "cbatch.backend.bindings"])
def test_openmp_spins_briefly_and_the_environment_is_as_before(module: str) -> None:
    assert 100 < int(_spin_count_read(module)) < 1_000_000


def test_spins_are_counted_where_the_native_library_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spin_count.cache_clear()
    monkeypatch.setenv("CBATCH_LIBRARY", "/nowhere/libcbatch.so")
    assert spin_count() == 30_000
    spin_count.cache_clear()


@pytest.mark.real
@pytest.mark.parametrize(
    ("policy", "count"), [({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "passive"}, "0")]
)
def test_policy_of_the_user_is_kept(policy: dict[str, str], count: str) -> None:
    assert _spin_count_read("cbatch.backend.load.loader", **policy) == count
