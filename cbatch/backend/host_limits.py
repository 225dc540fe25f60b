"""What the system lets this process use: its cores, and the control groups around it."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_CGROUPS = Path("/sys/fs/cgroup")
_OWN_GROUP = Path("/proc/self/cgroup")


def available_cores() -> int:
    """Return how many cores this process may use: by its affinity, the quotas around it and `OMP_THREAD_LIMIT`."""
    try:
        n_cores = len(os.sched_getaffinity(0))
    except AttributeError:  # macOS and Windows have no affinity to ask for
        n_cores = os.cpu_count() or 1
    return max(1, min([n_cores, *_quotas(), *_thread_limit()]))


def control_groups() -> Iterator[Path]:
    """Yield the folders of this process's control group and of the groups around it, the root's last."""
    # Source: Linux Documentation/admin-guide/cgroup-v2.rst; a container may see its own group as the root.
    with suppress(OSError):
        for line in _OWN_GROUP.read_text().splitlines():
            if line.startswith("0::/"):
                own = _CGROUPS / line.removeprefix("0::/")
                yield own
                yield from (p for p in own.parents if p.is_relative_to(_CGROUPS))


def _quotas() -> Iterator[int]:
    """Yield the whole cores that each control group leaves; none without a quota."""
    # Source: Linux Documentation/admin-guide/cgroup-v2.rst, cpu.max: "$MAX $PERIOD", MAX may be "max".
    for group in control_groups():
        with suppress(OSError, ValueError):  # "max" is no number and no quota
            quota, period = (group / "cpu.max").read_text().split()
            yield int(quota) // int(period)


def _thread_limit() -> Iterator[int]:
    """Yield the most threads that OpenMP starts in this process; none without a limit."""
    # Source: OpenMP 5.0, 6.10 OMP_THREAD_LIMIT: a positive integer
    with suppress(KeyError, ValueError):
        n_most = int(os.environ["OMP_THREAD_LIMIT"])
        if n_most > 0:
            yield n_most
