"""The rooms of the backend: loading sees what computes, never the other way round, and the fake sees neither."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import cbatch.backend

ROOT = Path(cbatch.backend.__file__).parent

SEES = {
    "fake": {"fake", "logits_processors", "plan_check"},
    "llama": {
        "llama",
        "bindings",
        "devices",
        "host_limits",
        "logits_processors",
        "native_file",
        "plan_check",
        "protocol",
        "threads",
    },
    "load": {
        "load",
        "llama",
        "bindings",
        "devices",
        "host_limits",
        "library_trial",
        "protocol",
        "threads",
    },
}
"""What the modules of each room import of the backend, beside its front door."""


def seen(path: Path) -> set[str]:
    """The parts of the backend that a module imports, by the first name below `cbatch.backend`."""
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    names = [(n.module or "").split(".") for n in nodes if isinstance(n, ast.ImportFrom)]
    return {name[2] for name in names if name[:2] == ["cbatch", "backend"] and len(name) > 2}


@pytest.mark.parametrize("room", SEES)
def test_room_of_the_backend_sees_what_is_below_it(room: str) -> None:
    files = sorted((ROOT / room).glob("*.py"))
    assert files
    assert {name for path in files for name in seen(path)} <= SEES[room]
