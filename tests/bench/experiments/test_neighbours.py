"""The script that tells what other programs on the same cores cost."""

from __future__ import annotations

from cbatch.bench.experiments import neighbours


def test_what_names_no_count_is_what_the_engine_chooses() -> None:
    from cbatch.backend.bindings import SPIN_COUNT

    assert neighbours.SETTINGS[SPIN_COUNT] == {}
