"""How much memory is free now for a context's cells, on the host and on devices."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from cbatch.backend.host_limits import control_groups
from cbatch.backend.load.devices import free_on_devices

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cbatch.backend.llama.model import LlamaModel
    from cbatch.engine_options import EngineOptions

_PROC = Path("/proc")


def free_for_cells(model: LlamaModel, options: EngineOptions, *, n_unloaded: int = 0) -> int | None:
    """Return the bytes that are free for all cells together besides `n_unloaded` bytes of weights; None: unknown."""
    found = [
        max(0, int((n_free - n_unloaded * share) / share))
        for n_free, share in _shares(model, options)
        if share and n_free is not None
    ]
    return min(found, default=None)


def share_on_host(model: LlamaModel, options: EngineOptions) -> float:
    """Return the share of each cell that is in the host's memory."""
    return _shares(model, options)[0][1]


def _shares(model: LlamaModel, options: EngineOptions) -> list[tuple[int | None, float]]:
    """Return the free bytes of the host and of each device, None where unknown, with the share of a cell there."""
    placement, devices = model.placement, free_on_devices() if options.offload_kqv else []
    if placement.split_mode == "none":
        i_main = placement.main_gpu or 0
        devices = devices[i_main : i_main + 1]
    on_devices = _share_on_devices(model) if devices else 0.0
    host = (host_free(model.name), 1 - on_devices)
    if not placement.tensor_split:  # llama.cpp fills all devices at the same time
        return [host, (sum(devices), on_devices)]
    split = [*placement.tensor_split, *[0.0] * len(devices)][: len(devices)]
    n_all = sum(split) or 1.0
    return [host, *((n, on_devices * part / n_all) for n, part in zip(devices, split, strict=True))]


def _share_on_devices(model: LlamaModel) -> float:
    """Return the share of the layers that are on devices. Source: src/llama-model.cpp, load_tensors: output first."""
    n_layers, n_asked = model.n_layers, model.placement.n_gpu_layers
    if n_asked is None or n_asked < 0:
        return 1.0
    return min(max(n_asked - 1, 0), n_layers) / max(n_layers, 1)


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
    """Yield the bytes that each control group around this process leaves; none without a limit."""
    # Source: Linux Documentation/admin-guide/cgroup-v2.rst, memory.max, memory.current, memory.stat
    for group in control_groups():
        with suppress(OSError, ValueError):
            n_most = int((group / "memory.max").read_text())  # "max" is no number and no limit
            n_taken = int((group / "memory.current").read_text())
            counts = _counts(group / "memory.stat")
            n_of_files = counts.get("inactive_file", 0) + counts.get("active_file", 0)
            yield max(0, n_most - n_taken + n_of_files)


def _mapped(path: str) -> int:
    """Return the bytes of model files that are mapped into this process."""
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
