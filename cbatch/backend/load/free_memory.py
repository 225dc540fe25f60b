"""How much memory is free now for a context's cells, on the host and on devices."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cbatch.backend.devices import free_on_devices
from cbatch.backend.host_limits import host_free

if TYPE_CHECKING:
    from cbatch.backend.llama.model import LlamaModel
    from cbatch.engine_options import EngineOptions


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
