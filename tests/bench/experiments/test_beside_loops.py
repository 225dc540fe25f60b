"""The script that tells what is left of the rate beside other programs."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from cbatch.bench.experiments import beside_loops

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_script_tells_the_price_alone_what_is_left_and_workloads(
    test_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ["--slots", "2", "--steps", "4", "--rounds", "1", "--seconds", "0.2", "--count", "2"]
    beside_loops.main(
        [str(test_model), *sizes, "--answers", "20", "--loops", "0", "1", "--workloads", "burst"]
    )
    price, followed, *rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert price["ratio"] > 0
    assert followed["loops"] == 1
    assert followed["alone"] >= 0
    assert [(row["workload"], row["beside"]) for row in rows] == [("burst", 0), ("burst", 1)]
    assert rows[0]["of_alone"] == {"engine": 1.0}
