"""The cores that this process may use, and how many of them others keep busy, as Linux tells."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

STAT = Path("/proc/stat")


def my_cores() -> list[int]:
    """Return the cores that this process may use; a number for each where the system does not tell."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


class TakenCores:
    """How many of some cores others kept busy between two questions: other programs, and machines on the same host."""

    def __init__(self, cores: Iterable[int], path: Path = STAT) -> None:
        """Begin now."""
        self._names, self._path = {f"cpu{core}" for core in cores}, path
        self._last = self._now()

    def n_since(self) -> float | None:
        """Return how many were busy since the last call, on average; None where nothing tells."""
        last, self._last = self._last, self._now()
        if last is None or self._last is None:
            return None
        n_others, n_all = (now - then for now, then in zip(self._last, last, strict=True))
        return max(0.0, len(self._names) * n_others / n_all) if n_all > 0 else None

    def _now(self) -> tuple[float, int] | None:
        """Return ticks of the cores: busy but for this process, and all. Source: man 5 proc."""
        n_busy = n_all = 0
        try:
            for line in self._path.read_text().splitlines():
                name, *fields = line.split()
                if name in self._names:
                    user, nice, system, idle, io_wait, irq, soft_irq, stolen = map(int, fields[:8])
                    n_busy += user + nice + system + irq + soft_irq + stolen
                    n_all += user + nice + system + irq + soft_irq + stolen + idle + io_wait
        except (OSError, ValueError):
            return None
        return n_busy - sum(os.times()[:2]) * os.sysconf("SC_CLK_TCK"), n_all
