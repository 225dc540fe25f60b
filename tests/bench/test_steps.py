"""The bare loop and the script that compares the engine with it."""

from __future__ import annotations

import json
import sys
from contextlib import closing
from typing import TYPE_CHECKING, Any

import llama_cpp
import pytest

from cbatch.backend.load.open_model import open_model
from cbatch.bench import steps
from cbatch.bench.bare import BareLoop
from cbatch.engine_options import EngineOptions

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def test_bare_loop_runs_again_and_frees_what_it_took(
    test_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = {"llama_decode": 0, "llama_batch_free": 0, "llama_free": 0}

    def counted(name: str) -> Callable[..., Any]:
        real = getattr(llama_cpp, name)

        def call(*args: Any) -> Any:
            calls[name] += 1
            return real(*args)

        return call

    with closing(open_model(test_model)) as model:
        for name in calls:
            monkeypatch.setattr(llama_cpp, name, counted(name))
        for i in range(1, 4):
            loop = BareLoop(model, EngineOptions(parallel=3, ctx_per_seq=256, n_threads=1))
            n_before = calls["llama_decode"]
            loop.run(4)
            assert calls["llama_decode"] - n_before == 4
            loop.run(2)
            assert calls["llama_decode"] - n_before == 6
            memory = llama_cpp.llama_get_memory(loop._ctx)
            assert [llama_cpp.llama_memory_seq_pos_max(memory, slot) for slot in range(3)] == [
                1
            ] * 3
            n_freed = calls["llama_free"]
            loop.close()
            assert calls["llama_free"] == n_freed + 1
            assert calls["llama_batch_free"] >= i


def test_script_prints_a_line_for_each_width(
    test_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [str(test_model), "--rows", "1", "3", "--steps", "4", "--rounds", "1"]
    monkeypatch.setattr(sys, "argv", ["steps", *given])
    steps.main()
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [f["rows"] for f in found] == [1, 3]
    for f in found:
        parts = f["ms_decode"] + f["ms_sample"] + f["ms_outside"]
        assert f["ms_step"] == pytest.approx(parts, abs=0.01)
        assert f["engine_over_bare"] > 0
