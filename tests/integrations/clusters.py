"""A cluster of Ray on this machine, and what tests look at on it."""

from __future__ import annotations

import time
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

PATIENCE_S = 300.0
"""After which something hangs: many times what it takes on a machine whose cores others have."""

WORDS = ("red", "blue", "green", "one", "two")

with_ray = pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")


def actors() -> list[int]:
    """Return the processes of the actors that answer."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes()
        except OSError:  # it has ended
            continue
        if command.startswith(b"ray::MapWorker(MapBatches(Answers))"):
            found.append(int(folder.name))
    return sorted(found)


def wait_until(is_so: Callable[[], Any]) -> Any:
    """Return what `is_so` returns when that is true; fail where it never is."""
    end_s = time.perf_counter() + PATIENCE_S
    while not (found := is_so()):
        assert time.perf_counter() < end_s, "it never is"
        time.sleep(0.05)  # other processes tell nothing
    return found
