"""A few of the runs of `kill_runs`, at every run of the tests."""

from __future__ import annotations

import random
import sys
from typing import TYPE_CHECKING

import pytest

from tests.files.kill_runs import exits, kills

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs SIGKILL")


@pytest.mark.real
def test_runs_that_exit_at_any_step_lose_double_and_mispair_nothing(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    seed = random.randrange(2**32)
    tally = exits(tmp_path, 8, seed)
    assert (tally.n_exits >= 8, tally.is_clean) == (True, True), seed


@pytest.mark.real
def test_command_killed_at_any_moment_loses_doubles_and_mispairs_nothing(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    seed = random.randrange(2**32)
    tally = kills(tmp_path, 1, seed)
    assert (tally.n_kills >= 1, tally.is_clean) == (True, True), seed
