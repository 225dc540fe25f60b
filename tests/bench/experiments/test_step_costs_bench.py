"""Tables of what steps cost: lines through points, files, and one measured on a model."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import pytest

from cbatch.bench.experiments import step_costs
from cbatch.bench.experiments.step_costs import SMALL, StepTable
from cbatch.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

TABLE = StepTable(((4, 10.0), (1, 4.0), (8, 12.0)), ((10, 5.0), (20, 15.0)))


@pytest.mark.parametrize(
    ("n_rows", "seconds"), [(1, 4.0), (2, 6.0), (4, 10.0), (6, 11.0), (10, 13.0), (1000, 508.0)]
)
def test_width_between_and_beyond_points_is_on_their_lines(n_rows: int, seconds: float) -> None:
    assert TABLE(n_rows, 0) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("n_prompt", "more_s"),
    [(0, 0.0), (4, 2.0), (10, 5.0), (15, 10.0), (30, 25.0), (10_000, 9995.0)],
)
def test_prompt_tokens_add_from_nothing_on(n_prompt: int, more_s: float) -> None:
    assert TABLE(1, n_prompt) - TABLE(1, 0) == pytest.approx(more_s)


def test_line_that_falls_ends_at_the_smallest_figure() -> None:
    table = StepTable(((8, 2.0), (16, 1.0)), ((1, 3.0), (2, 1.0)))
    assert table(64, 0) == 1.0
    assert table(16, 50) == 1.0
    assert table(1, 0) == pytest.approx(2.875)
    assert StepTable(((8, 2.0),), ((1, 0.0),))(200, 7) == 2.0  # one point


def test_table_comes_back_from_its_file(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(SMALL.as_json()))
    assert StepTable.read(path) == SMALL
    with pytest.raises(ConfigError, match="absent"):
        StepTable.read(tmp_path / "absent")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"decode_s": [], "prompt_s": [[1, 1]]}',
        '{"decode_s": [[1, 1]], "prompt_s": 3}',
        '{"decode_s": [[1, 1]], "prompt_s": [[1]]}',
        '{"decode_s": [[1, 1], [1, 2]], "prompt_s": [[1, 1]]}',
        '{"decode_s": [[1.5, 1]], "prompt_s": [[1, 1]]}',
        '{"decode_s": [[1, -1]], "prompt_s": [[1, 1]]}',
        '{"decode_s": [[1, NaN]], "prompt_s": [[1, 1]]}',
        '{"decode_s": [[1, "x"]], "prompt_s": [["1", 1]]}',
    ],
)
def test_bad_file_is_refused_by_name(text: str, tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"costs\.json"):
        StepTable.read(path)


def test_script_prints_a_table_of_a_model(
    test_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ["--widths", "1", "3", "--chunks", "8", "40"]
    monkeypatch.setattr(
        sys, "argv", ["step_costs", str(test_model), *sizes, "--rounds", "1", "--threads", "1"]
    )
    step_costs.main()
    table = StepTable.of(json.loads(capsys.readouterr().out))
    assert [n for n, _ in table.decode_s] == [1, 3]
    assert [n for n, _ in table.prompt_s] == [8, 40]
    assert table(1, 0) > 0
