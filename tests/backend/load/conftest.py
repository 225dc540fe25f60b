"""What tests of trials in separate processes share."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.fixture
def processes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[[str], list[dict[str, Any]]]:
    """Return a function that has processes run `code`, and returns a list that grows with the options of each."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def prepare(code: str) -> list[dict[str, Any]]:
        asked: list[dict[str, Any]] = []

        def command_of(module: str, path: str, said: str, *more: str) -> list[str]:
            asked.append(json.loads(said))
            return [sys.executable, "-c", code]

        monkeypatch.setattr("cbatch.support.processes.command_of", command_of)
        return asked

    return prepare
