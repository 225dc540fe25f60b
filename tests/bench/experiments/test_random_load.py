"""The script that has programs come and go beside an engine."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from cbatch.bench.experiments import random_load

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_script_repeats_requests_beside_loops_and_compares_answers(
    test_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    random_load.main([str(test_model), "--seconds", "0.5", "--requests", "3", "--exact"])
    found = json.loads(capsys.readouterr().out)
    assert found["answers"] == 3 * found["rounds"] > 0
    assert found["differ"] == 0
    assert found["changes_of_load"] > 0
    assert found["longest_step_s"] >= found["median_step_s"] > 0
