"""The script that tells what streaming costs."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import anyio
import pytest

from cbatch.backend.fake import FakeBackend
from cbatch.bench.experiments import streaming
from cbatch.bench.experiments.streaming import Way, awaited, one_batch, one_each, streamed
from cbatch.engine import Engine

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("way", [one_batch, one_each])
def test_both_readers_get_every_token_of_every_request(way: Way) -> None:
    prompts = streaming.requests(5, 12)
    with Engine(FakeBackend(2, 64, 32)) as engine:
        for read in (awaited, streamed):
            assert anyio.run(way, engine, prompts, read) == 60


def test_comparison_has_both_rates_and_their_ratio() -> None:
    with Engine(FakeBackend(2, 64, 32)) as engine:
        found = streaming.compare(engine, streaming.requests(3, 8), one_batch, 2)
    assert min(found["await_tps"], found["async_for_tps"]) > 0
    assert 0 < found["ratio_min"] <= found["ratio"] <= found["ratio_max"]


def test_script_prints_a_ratio_for_one_batch_and_for_a_task_each(
    test_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [str(test_model), "--requests", "3", "--tokens", "4", "--rounds", "2"]
    monkeypatch.setattr(sys, "argv", ["streaming", *given])
    streaming.main()
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [f["way"] for f in found] == ["one batch", "a task each"]
    for f in found:
        assert 0 < f["ratio_min"] <= f["ratio"] <= f["ratio_max"]
