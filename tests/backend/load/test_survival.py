"""Whether llama.cpp survives several sequences, tried in a process of its own; here made to end as it may."""

from __future__ import annotations

import json
from contextlib import closing
from itertools import count
from typing import TYPE_CHECKING, Any

import llama_cpp
import pytest

import cbatch
from cbatch.backend.llama.llama_backend import LlamaBackend
from cbatch.backend.llama.model_tuning import Tuning
from cbatch.backend.load import survival
from cbatch.backend.load.open_model import open_model
from cbatch.backend.load.survival import endure, find_surviving, survives
from cbatch.engine_options import EngineOptions
from cbatch.support.processes import run_apart
from tests.zoo import ZOO

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from cbatch.backend.llama.model import LlamaModel
    from cbatch.core.plan import StepPlan, StepResult

pytestmark = pytest.mark.real

ABORTS, ENDS, FAILS = "import os; os.abort()", "", "raise SystemExit(1)"
KILLED = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
OPTIONS = EngineOptions(parallel=3, ctx_per_seq=256)


@pytest.mark.parametrize(
    ("code", "is_alive", "n_tried"),
    [(ENDS, True, 1), (ABORTS, False, 1), (FAILS, True, 2), (KILLED, True, 2)],
    ids=["ends", "aborts", "fails", "is killed"],
)
def test_crash_and_survival_are_remembered_and_nothing_else(
    model: LlamaModel,
    processes: Callable[[str], list[dict[str, Any]]],
    code: str,
    is_alive: bool,
    n_tried: int,
) -> None:
    asked = processes(code)
    assert [survives(model, OPTIONS) for _ in range(2)] == [is_alive] * 2
    assert len(asked) == n_tried
    assert (find_surviving(model, OPTIONS) is OPTIONS) == is_alive


def test_process_has_as_many_sequences_and_graphs_as_large(
    model: LlamaModel, processes: Callable[[str], list[dict[str, Any]]]
) -> None:
    asked = processes(ENDS)
    survives(model, EngineOptions(parallel=3, ctx_per_seq=100_000, n_ubatch=2000))
    survives(model, EngineOptions(parallel=5, ctx_per_seq=64, exact=True, n_ubatch=4))
    sizes = [(o["parallel"], o["n_ubatch"], o["ctx_per_seq"]) for o in asked]
    assert sizes == [(3, 2000, 666), (8, 8, 256)]


def test_fewer_and_fewer_slots_are_tried_and_last_one_at_a_time(
    model: LlamaModel, processes: Callable[[str], list[dict[str, Any]]]
) -> None:
    asked = processes(ABORTS)
    found = find_surviving(model, EngineOptions(parallel=12, ctx_per_seq=256))
    assert found.parallel == 1
    sizes = [(o["parallel"], o["n_ubatch"]) for o in asked]
    assert sizes == [(12, 512), (12, 504), (8, 512), (4, 512), (2, 512)]


def test_file_of_a_borrowed_model_is_tried(
    zoo: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    llama = llama_cpp.Llama(str(zoo("kimi-linear")), n_ctx=256, verbose=False)
    with closing(llama), cbatch.load(llama, parallel=3, ctx_per_seq=256) as engine:
        assert "n_ubatch=510" in engine.company


def test_steps_have_every_number_of_rows_and_prompts_beside_rows(
    test_model: Path,
) -> None:
    seen: list[list[tuple[int, int]]] = []

    class Seen(LlamaBackend):
        def run(self, plan: StepPlan) -> StepResult:
            seen.append([(chunk.slot, len(chunk.inputs)) for chunk in plan.spans])
            return super().run(plan)

    options = EngineOptions(parallel=6, ctx_per_seq=256)
    with closing(Seen(open_model(test_model), Tuning(options))) as backend:
        endure(backend)
        n_steps = len(seen)
        endure(backend, seconds=count(step=7).__next__)
    rows = [[slot for slot, _ in step] for step in seen if {n for _, n in step} == {1}]
    for n in range(2, 7):
        assert [*range(n)] in rows
        assert [*range(6 - n, 6)] in rows
    long = [step for step in seen if max(n for _, n in step) > 64]
    assert [[n for _, n in step].index(70) for step in long[:2]] == [0, 5]
    assert len(seen) - n_steps == 3


@pytest.mark.parametrize("given", [{"n_batch": 3}, {"n_ctx": 40, "ctx_per_seq": None}], ids=str)
def test_small_steps_and_windows_are_tried_too(test_model: Path, given: dict[str, Any]) -> None:
    options = EngineOptions(**{"parallel": 3, "ctx_per_seq": 256, **given})
    with closing(LlamaBackend(open_model(test_model), Tuning(options))) as backend:
        endure(backend)
        assert sum(backend.n_cells) > 0


@pytest.mark.parametrize("name", ["qwen3moe", "none"])
def test_process_that_cannot_try_a_model_exits_with_1(
    zoo: Callable[[str], Path], tmp_path: Path, name: str
) -> None:
    path = zoo(name) if name in ZOO else tmp_path / name
    done = run_apart(survival.__name__, str(path), json.dumps({"parallel": 2}), wall_s=600)
    assert done is not None
    assert done.returncode == (name == "none"), done.stderr
