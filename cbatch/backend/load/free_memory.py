"""How much memory is free now for a context's cells, on the host and on devices."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cbatch.backend.load.devices import list_devices

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from cbatch.backend.llama.model import LlamaModel
    from cbatch.backend.load.devices import Device
    from cbatch.engine_options import EngineOptions

_PROC, _CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class Place:
    """A memory that holds a share of every cell."""

    n_free: int | None
    """Bytes; None where the system does not tell."""
    share: float


def free_for_cells(model: LlamaModel, options: EngineOptions, *, n_unloaded: int = 0) -> int | None:
    """Return the bytes that are free for all cells together; None where the system does not tell.

    Args:
        model: a loaded model.
        options: whether cells are on the devices of their layers.
        n_unloaded: bytes of weights that are not in memory yet.
    """
    places = _places(model, options)
    known = [(p.n_free, p.share) for p in places if p.share and p.n_free is not None]
    return min(
        (max(0, int((n_free - n_unloaded * share) / share)) for n_free, share in known),
        default=None,
    )


def _places(model: LlamaModel, options: EngineOptions) -> list[Place]:
    devices = list_devices() if options.offload_kqv else []
    chosen = _chosen(devices, model)
    on_devices = _share_on_devices(model) if chosen else 0.0
    places = [Place(host_free(model.name), 1 - on_devices)]
    split = model.placement.tensor_split
    if not split:  # llama.cpp splits by free memory, so that all devices are full at the same time
        return [*places, Place(sum(d.n_free for d in chosen), on_devices)]
    shares = [*split, *[0.0] * len(chosen)][: len(chosen)]
    n_all = sum(shares) or 1.0
    return places + [
        Place(d.n_free, on_devices * share / n_all) for d, share in zip(chosen, shares, strict=True)
    ]


def _chosen(devices: Sequence[Device], model: LlamaModel) -> Sequence[Device]:
    if model.placement.split_mode != "none":
        return devices
    i_main = model.placement.main_gpu or 0
    return devices[i_main : i_main + 1]


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
    known = [n for n in (_machine_free(), _group_free()) if n is not None]
    return max(0, min(known) - _mapped(path)) if known else None


def host_most() -> int | None:
    """Return the most bytes that the host can give this process: mapped weights may be dropped, and swap used."""
    known = [n for n in (_machine_free(), _group_free()) if n is not None]
    return min(known) + _swap_free() if known else None


def share_on_host(model: LlamaModel, options: EngineOptions) -> float:
    """Return the share of each cell that is in the host's memory."""
    return _places(model, options)[0].share


def _swap_free() -> int:
    try:
        return _fields(_PROC / "meminfo").get("SwapFree:", 0) * 1024
    except OSError:
        return 0


def _machine_free() -> int | None:
    with suppress(OSError, ValueError, KeyError):
        kib = _fields(_PROC / "meminfo")["MemAvailable:"]
        return kib * 1024
    with suppress(AttributeError, OSError, ValueError):  # macOS and Windows do not tell
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None


def _group_free() -> int | None:
    """Return the bytes that the control groups of this process leave; None without a limit."""
    return min(_limits(), default=None)


def _limits() -> Iterator[int]:
    # Source: Linux Documentation/admin-guide/cgroup-v2.rst, memory.max, memory.current, memory.stat
    for group in _groups():
        with suppress(OSError, ValueError):
            n_most = int((group / "memory.max").read_text())  # "max" is no number and no limit
            n_taken = int((group / "memory.current").read_text())
            counts = _fields(group / "memory.stat")
            n_of_files = counts.get("inactive_file", 0) + counts.get("active_file", 0)
            yield max(0, n_most - n_taken + n_of_files)


def _groups() -> Iterator[Path]:
    """Yield the folders of this process's control group and of the groups around it."""
    with suppress(OSError):
        for line in (_PROC / "self/cgroup").read_text().splitlines():
            if line.startswith("0::/"):
                own = _CGROUPS / line.removeprefix("0::/")
                yield own
                yield from (p for p in own.parents if p.is_relative_to(_CGROUPS))


def _mapped(path: str) -> int:
    """Return the bytes of model files that are mapped into this process."""
    try:
        lines = (_PROC / "self/maps").read_text().splitlines()
    except OSError:
        return 0
    own = os.path.realpath(path)
    fields = (line.split(maxsplit=5) for line in lines)
    return sum(
        _span(f[0]) for f in fields if len(f) == 6 and (f[5] == own or f[5].endswith(".gguf"))
    )


def _span(addresses: str) -> int:
    start, _, end = addresses.partition("-")
    return int(end, 16) - int(start, 16)


def _fields(path: Path) -> dict[str, int]:
    """Return the numbers of a file by the names before them, a line each."""
    words = (line.split() for line in path.read_text().splitlines())
    return {w[0]: int(w[1]) for w in words if len(w) > 1 and w[1].isdigit()}
