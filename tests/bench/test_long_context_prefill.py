"""The script that tells what it brings to hold back prompts behind many cells."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

from cbatch.bench import long_context_prefill
from cbatch.bench.long_context_prefill import Job

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_prompts_begin_alike_and_are_the_same_for_a_seed() -> None:
    job = Job(n_requests=3, n_common=5, own=(2, 4), output=(1, 2))
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
    monkeypatch.setattr(sys, "argv", ["long_context_prefill", str(test_model), *sizes])
    long_context_prefill.main()
    found = json.loads(capsys.readouterr().out)
    assert found["few_s"] > 0 < found["all_at_once_s"]
    assert found["ratio_min"] == found["ratio"] == found["ratio_max"]
