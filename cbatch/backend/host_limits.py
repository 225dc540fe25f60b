"""What the system lets this process use: its cores, its memory, and the control groups around it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")
_OWN_GROUP = Path("/proc/self/cgroup")
_PROC = Path("/proc")


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
    # Source: Linux Documentation/admin-guide/cgroup-v2.rst, cpu.max: "$MAX $PERIOD", MAX may be "max".
    for group in control_groups():
        with suppress(OSError, ValueError):  # "max" is no number and no quota
            quota, period = (group / "cpu.max").read_text().split()
            yield int(quota) // int(period)


def _thread_limit() -> Iterator[int]:
    # Source: OpenMP 5.0, 6.10 OMP_THREAD_LIMIT: a positive integer
    with suppress(KeyError, ValueError):
        n_most = int(os.environ["OMP_THREAD_LIMIT"])
        if n_most > 0:
            yield n_most


def host_free(path: str) -> int | None:
    """Return the bytes that this process may still take from the host, with the mapped weights of `path` in memory.

    Cached files count as free, on the machine and in a control group, except for mapped weights.
    """
    n_free = _n_free()
    return None if n_free is None else max(0, n_free - _mapped(path))


def host_most() -> int | None:
    """Return the most bytes that the host can give this process: mapped weights may be dropped, and swap used."""
    n_free = _n_free()
    return (
        None if n_free is None else n_free + _counts(_PROC / "meminfo").get("SwapFree:", 0) * 1024
    )


def host_total() -> int | None:
    """Return the bytes of the machine, or of the smallest control group around this process; None: unknown."""
    known = [*_group_sizes()]
    if (kib := _counts(_PROC / "meminfo").get("MemTotal:")) is not None:
        known.append(kib * 1024)
    return min(known, default=None)


def _group_sizes() -> Iterator[int]:
    for group in control_groups():
        with suppress(OSError, ValueError):  # "max" is no number and no limit
            yield int((group / "memory.max").read_text())


def _n_free() -> int | None:
    """Return the bytes that the machine and its control groups leave; None where the system does not tell."""
    known = [*_limits()] if (n_free := _machine_free()) is None else [n_free, *_limits()]
    return min(known, default=None)


def _machine_free() -> int | None:
    if (kib := _counts(_PROC / "meminfo").get("MemAvailable:")) is not None:
        return kib * 1024
    with suppress(AttributeError, OSError, ValueError):  # macOS and Windows do not tell
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None


def _limits() -> Iterator[int]:
    # Source: Linux Documentation/admin-guide/cgroup-v2.rst, memory.max, memory.current, memory.stat
    for group in control_groups():
        with suppress(OSError, ValueError):
            n_most = int((group / "memory.max").read_text())  # "max" is no number and no limit
            n_taken = int((group / "memory.current").read_text())
            counts = _counts(group / "memory.stat")
            n_of_files = counts.get("inactive_file", 0) + counts.get("active_file", 0)
            yield max(0, n_most - n_taken + n_of_files)


def _mapped(path: str) -> int:
    own, n_bytes = os.path.realpath(path), 0
    with suppress(OSError):
        for line in (_PROC / "self/maps").read_text().splitlines():
            addresses, *_, file = line.split(maxsplit=5)
            if file == own or file.endswith(".gguf"):
                start, end = addresses.split("-")
                n_bytes += int(end, 16) - int(start, 16)
    return n_bytes


def _counts(path: Path) -> dict[str, int]:
    """Return the numbers of a file by the names before them, a line each; none where the file cannot be read."""
    words: list[list[str]] = []
    with suppress(OSError):
        words = [line.split() for line in path.read_text().splitlines()]
    return {w[0]: int(w[1]) for w in words if len(w) > 1 and w[1].isdigit()}
