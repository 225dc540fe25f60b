"""The bare loop and the script that compares the engine with it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cbatch.backend.load.open_model import open_model
from cbatch.bench.bare import BareLoop
from cbatch.engine_options import EngineOptions

if TYPE_CHECKING:
    from pathlib import Path


def test_bare_loop_runs_again_and_frees_what_it_took(test_model: Path) -> None:
    model = open_model(test_model)
    for _ in range(3):
        loop = BareLoop(model, EngineOptions(parallel=3, ctx_per_seq=256, n_threads=1))
        assert loop.decode(4) > 0
        assert loop.decode(2) > 0
        loop.close()
    model.close()
