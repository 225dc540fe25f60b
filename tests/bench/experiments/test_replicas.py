"""The script that compares an engine in this process with worker processes."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from cbatch.backend.fake import FakeBackend
from cbatch.bench.experiments import replicas
from cbatch.engine import Engine
from cbatch.messages import BatchPrompt
from tests.worker.links import engine_over

if TYPE_CHECKING:
    from pathlib import Path

OPTIONS = {"max_tokens": 5, "ignore_eos": True}
REQUESTS = [BatchPrompt(prompt=f"number {i}", options=OPTIONS) for i in range(6)]


@pytest.mark.parametrize("is_streamed", [False, True])
def test_engines_take_turns_and_are_set_against_the_first(is_streamed: bool) -> None:
    backends = [FakeBackend(2, 64, 32) for _ in range(3)]
    with Engine(backends[0]) as here, engine_over(*backends[1:]) as pool:
        engines = {"thread": here, "2": pool}
        found = replicas.compare(engines, REQUESTS, 2, is_streamed=is_streamed)
        assert (
            here.stats().n_submitted == pool.stats().n_submitted == 18
        )  # two rounds, one to warm up
    assert found["tps"].keys() == {"thread", "2"}
    assert found["against thread"].keys() == {"2"}


@pytest.mark.real
def test_script_prints_a_line_for_each_file_and_way_of_reading(
    tmp_path: Path, test_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = {"id": "a", "prompt": "Say red.", "max_tokens": 3, "temperature": 0, "seed": 1}
    (tmp_path / "short.jsonl").write_text(json.dumps(line))
    words = [str(test_model), str(tmp_path / "short.jsonl"), "--rounds=1", "--parallel=2"]
    replicas.main([*words, "--replicas", "thread", "1", "--streamed"])
    rows = [json.loads(row) for row in capsys.readouterr().out.splitlines()]
    assert [row["streamed"] for row in rows] == [False, True]
    assert all(row["tps"].keys() == {"thread", "1"} for row in rows)
