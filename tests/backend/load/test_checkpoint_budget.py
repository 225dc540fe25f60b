"""How much memory checkpoints may take, and what it says where there is none."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import cbatch
from cbatch.backend.load.checkpoint_budget import most_mib

if TYPE_CHECKING:
    from tests.conftest import SynthFactory

GIB = 2**30


@pytest.mark.parametrize(
    ("n_free", "n_sharing", "n_mib"),
    [(None, 1, 1024), (16 * GIB, 1, 2048), (16 * GIB, 4, 512), (900 * GIB, 1, 4096), (0, 1, 1)],
)
def test_budget_is_a_share_of_what_is_free(n_free: int | None, n_sharing: int, n_mib: int) -> None:
    assert most_mib(n_free, n_sharing) == n_mib


@pytest.mark.parametrize(("shape", "is_told"), [("mamba", True), ("test", False)])
def test_no_budget_says_what_it_costs_where_memory_cannot_be_cut(
    synth: SynthFactory, caplog: pytest.LogCaptureFixture, shape: str, is_told: bool
) -> None:
    cbatch.load(synth(shape), parallel=2, checkpoint_mib=0).close()
    assert ("computed again for each" in caplog.text) == is_told
    assert ("checkpoint_mib" in caplog.text) == is_told
