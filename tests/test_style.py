"""What the tests themselves keep to."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
N_NAME_MAX = 70

FILES = sorted(TESTS.rglob("*.py"))


def functions(path: Path) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Return every function of a file, also those inside classes and functions."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]


def collected(path: Path) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [f for f in functions(path) if f.name.startswith("test_")]


def test_walk_finds_this_test() -> None:
    assert "test_walk_finds_this_test" in [f.name for f in collected(Path(__file__))]


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(TESTS)))
def test_name_of_a_test_is_short(path: Path) -> None:
    assert not [f.name for f in collected(path) if len(f.name) > N_NAME_MAX]
