"""The script that compares sampling with llama.cpp's."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from cbatch.bench import samplers

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_script_prints_a_line_for_each_chain_and_each_team(
    test_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [str(test_model), "--rows", "3", "--steps", "2", "--rounds", "1"]
    monkeypatch.setattr(sys, "argv", ["samplers", *given])
    samplers.main()
    alone, teams = capsys.readouterr().out.split("\n\n")
    rows = [line.split(" | ") for line in alone.splitlines()[2:]]
    assert [row[0].removeprefix("| ") for row in rows] == list(samplers.CHAINS)
    assert all(float(row[1]) > 0 and float(row[2]) > 0 and float(row[3]) > 0 for row in rows)
    assert len(teams.splitlines()) == 2 + len(samplers.TEAM)


def test_table_names_targets() -> None:
    line = samplers.Line("greedy", 100.0, 20.0, 5.0, 2.5)
    assert (
        samplers.table([line], "a", "b").splitlines()[-1]
        == "| greedy | 100.0 | 20.0 | 5.00 | ≥ 2.5 |"
    )
