"""What a run ran on: machine and versions, as a reader of its figures wants to know them."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from contextlib import suppress
from pathlib import Path

import cbatch

_PACKAGES = ("llama-cpp-python", "llguidance", "numpy")


def machine_facts() -> dict[str, str]:
    """Return processor, cores, memory and system of this machine; what cannot be found out is left out."""
    found = {
        "processor": _processor(),
        "cores": _cores(),
        "memory": _memory(),
        "system": f"{platform.system()} {platform.release()}, {platform.machine()}",
    }
    return {name: value for name, value in found.items() if value}


def version_facts() -> dict[str, str]:
    """Return the versions of Python and of the packages that compute."""
    versions = {"cbatch": cbatch.__version__, "Python": platform.python_version()}
    for package in _PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return versions


def peak_bytes() -> int | None:
    """Return the most host memory that this process has had, in bytes; None where the system does not tell."""
    try:
        import resource  # which Windows has not
    except ImportError:
        return None
    n = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return n if sys.platform == "darwin" else n * 1024


def _processor() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()


def _cores() -> str:
    n_all = os.cpu_count() or 1
    n_usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else n_all
    return str(n_all) if n_usable == n_all else f"{n_usable} of {n_all}"


def _memory() -> str:
    with suppress(OSError, ValueError, AttributeError):
        n_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return f"{n_bytes / 2**30:.0f} GiB"
    return ""
