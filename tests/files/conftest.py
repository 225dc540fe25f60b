"""Fixtures for tests of batch files."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import pytest

from tests.files.runs import make_engine, write_requests

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cbatch.engine import Engine

_MEMORY = Path("/dev/shm")


@pytest.fixture
def tmp_path(tmp_path: Path) -> Iterator[Path]:
    """Return an empty folder in memory, where nothing waits for a disk."""
    with TemporaryDirectory(dir=_MEMORY if _MEMORY.is_dir() else tmp_path) as folder:
        yield Path(folder)


@pytest.fixture
def engine() -> Iterator[Engine]:
    """Return an engine of four slots on the fake backend."""
    with make_engine() as made:
        yield made


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with an input of nine requests."""
    write_requests(tmp_path / "in.jsonl", 9)
    return tmp_path
