"""A short run of `kill_vectors`, at every run of the tests."""

from __future__ import annotations

import random
import sys
from typing import TYPE_CHECKING

import pytest

from tests.files.kill_vectors import kills

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.real
@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGKILL")
def test_killed_embedding_run_loses_and_doubles_nothing(tmp_path: Path) -> None:
    seed = random.randrange(2**32)
    tally = kills(tmp_path, 1500, 2, 4.0, seed)
    assert tally.is_clean, (seed, tally)
