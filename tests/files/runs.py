"""Runs over files on the fake backend: inputs, and an engine that forgets its plans."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from cbatch.backend.fake import FakeBackend
from cbatch.engine import Engine
from cbatch.files.file_run import run_file

if TYPE_CHECKING:
    from pathlib import Path

    from cbatch.core.plan import StepPlan, StepResult
    from cbatch.files.outcome import RunSummary

SHORT = {"max_tokens": 3, "temperature": 0, "ignore_eos": True, "seed": 1}


class ForgetfulBackend(FakeBackend):
    """Keeps no plans, so that its memory does not grow with the run."""

    def run(self, plan: StepPlan) -> StepResult:
        self.plans.clear()
        return super().run(plan)


def make_engine(n_slots: int = 4, *, threaded: bool = False, **more: Any) -> Engine:
    return Engine(ForgetfulBackend(n_slots, 128, 64, **more), options=SHORT, threaded=threaded)


def write_requests(path: Path, n: int, **options: Any) -> Path:
    with path.open("w") as file:
        for i in range(n):
            request = {"id": f"r{i}", "prompt": f"question {i}", "options": options}
            file.write(json.dumps(request) + "\n")
    return path


def run_in(folder: Path, engine: Engine, output: str, **more: Any) -> RunSummary:
    """Run the input of a folder."""
    return run_file(folder / "in.jsonl", folder / output, engine=engine, **more)


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def answers(path: Path) -> dict[str, Any]:
    """What does not differ from run to run: text, reason and error by id; every id once."""
    found = records(path)
    by_id = {r["id"]: (r["text"], r["finish_reason"], r["error"]) for r in found}
    assert len(by_id) == len(found)
    return by_id
