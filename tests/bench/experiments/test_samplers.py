"""The script that compares sampling with llama.cpp's."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

from cbatch.bench.experiments import samplers

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_script_prints_a_line_for_each_chain_and_each_team(
    test_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [str(test_model), "--rows", "3", "--steps", "2", "--rounds", "1"]
    monkeypatch.setattr(sys, "argv", ["samplers", *given])
    samplers.main()
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [f["chain"] for f in found] == [*samplers.CHAINS, *samplers.TEAM]
    assert {f["base"] for f in found[: len(samplers.CHAINS)]} == {"llama.cpp"}
    assert found[0]["target"] == samplers.CHAINS["greedy"][1]
    for f in found:
        assert min(f["base_us"], f["ours_us"], f["ratio"]) > 0
