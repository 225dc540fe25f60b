"""The script that tells what other programs on the same cores cost."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from cbatch.bench.experiments import neighbours

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_script_takes_turns_and_prints_a_line_for_each_number_of_loops(
    test_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ["--slots", "2", "--steps", "4", "--rounds", "2", "--threads", "1"]
    given = [*sizes, "--loops", "0", "1", "--settings", "1000", "passive"]
    neighbours.main([str(test_model), *given])
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [f["beside"] for f in found] == [0, 1]
    for f in found:
        assert {name: len(rates) for name, rates in f["tps"].items()} == {"1000": 2, "passive": 2}
        assert all(rate > 0 for rates in f["tps"].values() for rate in rates)
