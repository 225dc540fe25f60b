"""The script that tells what it brings to compute prompts before the rows of a step."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

from cbatch.bench.experiments import prompts_first
from cbatch.bench.experiments.prompts_first import PromptsJob

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_prompts_begin_alike_and_are_the_same_for_a_seed() -> None:
    job = PromptsJob(n_requests=3, n_common=5, own=(2, 4), output=(1, 2))
    prompts = job.prompts(100, seed=1)
    assert prompts == job.prompts(100, seed=1)
    tokens = [p.tokens or () for p in prompts]
    assert {t[:5] for t in tokens} == {tokens[0][:5]}
    assert all(7 <= len(t) <= 9 and min(t) >= 3 for t in tokens)


def test_script_prints_both_times_and_their_ratio(
    test_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ["--requests", "4", "--common", "300", "--own", "70", "80", "--output", "1", "2"]
    sizes += ["--slots", "4", "--rounds", "1"]
    monkeypatch.setattr(sys, "argv", ["prompts_first", str(test_model), *sizes])
    prompts_first.main()
    found = json.loads(capsys.readouterr().out)
    assert found["first_s"] > 0 < found["together_s"]
    assert found["ratio_min"] == found["ratio"] == found["ratio_max"]
