"""The script that tells what a long queue costs a step."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

from cbatch.bench.experiments import queues
from cbatch.bench.experiments.queues import CASES, POLICIES

if TYPE_CHECKING:
    import pytest


def test_script_prints_a_line_for_each_combination(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        sys, "argv", ["queues", "--slots", "2", "--queued", "3", "30", "--steps", "8"]
    )
    queues.main()
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(f["policy"], f["case"], f["queued"]) for f in found] == [
        (p, c, n) for p in POLICIES for c in CASES for n in (3, 30)
    ]
    for f in found:
        assert min(f["plan_us"], f["apply_us"], f["submit_us"], f["cancel_us"]) > 0
