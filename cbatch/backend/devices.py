"""Devices that ggml knows: their names, the free memory of those other than the CPU, and RPC servers that lend some."""

from __future__ import annotations

import ctypes
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cbatch.backend.bindings import llama_cpp
from cbatch.errors import ConfigError, ModelLoadError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cbatch.engine_options import EngineOptions

# Source: ggml/include/ggml-backend.h, enum ggml_backend_dev_type.
_GPU, _SHARED_GPU = 1, 2
_CONNECT_S = 5.0
"""A server in the same building answers within milliseconds."""

_size, _pointer, _text = ctypes.c_size_t, ctypes.c_void_p, ctypes.c_char_p
# Source: ggml/include/ggml-backend.h, ggml.h.
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "ggml_backend_dev_count": (_size,),
    "ggml_backend_dev_get": (_pointer, _size),
    "ggml_backend_dev_type": (ctypes.c_int, _pointer),
    "ggml_backend_dev_name": (_text, _pointer),
    "ggml_backend_dev_description": (_text, _pointer),
    "ggml_backend_dev_memory": (None, _pointer, _pointer, _pointer),
    "ggml_backend_dev_backend_reg": (_pointer, _pointer),
    "ggml_backend_reg_count": (_size,),
    "ggml_backend_reg_get": (_pointer, _size),
    "ggml_backend_reg_name": (_text, _pointer),
    "ggml_backend_reg_dev_count": (_size, _pointer),
    "ggml_backend_reg_by_name": (_pointer, _text),
    "ggml_backend_reg_get_proc_address": (_pointer, _pointer, _text),
    "ggml_backend_register": (None, _pointer),
    "ggml_blck_size": (ctypes.c_int64, ctypes.c_int),
    "ggml_type_size": (_size, ctypes.c_int),
}


def free_on_devices() -> list[int]:
    """Return the free bytes of each device that llama.cpp puts layers on, in its order; none with the CPU alone.

    Source: src/llama.cpp, llama_prepare_model_devices: servers, then GPUs; without GPUs those that
    share the host's memory.
    """
    if not llama_cpp.llama_supports_gpu_offload():
        return []
    handles = _devices()
    kinds = [(ggml("ggml_backend_dev_type", h), _is_server(h), h) for h in handles]
    servers = [h for kind, is_server, h in kinds if kind == _GPU and is_server]
    gpus = [h for kind, is_server, h in kinds if kind == _GPU and not is_server]
    shared = [h for kind, _, h in kinds if kind == _SHARED_GPU]
    return [_n_free(h) for h in (*servers, *(gpus or shared))]


def computes_on_cpu(options: EngineOptions) -> bool:
    """Whether processors of this machine alone compute with these options."""
    return not (options.rpc_servers or (options.n_gpu_layers != 0 and free_on_devices()))


@dataclass(frozen=True, slots=True)
class Device:
    """A device that ggml knows: a processor, a GPU, a server's.

    Args:
        name: what ggml calls it, such as CUDA0.
        maker: what its maker calls it.
        takes_layers: whether layers can be put there: it is none of the processors of this machine.
        n_free: bytes of its memory that are free.
        n_total: bytes of its memory.
    """

    name: str
    maker: str
    takes_layers: bool
    n_free: int
    n_total: int
    handle: Any


def devices() -> list[Device]:
    """Return the devices, in ggml's order."""
    return [_described(handle) for handle in _devices()]


def _described(handle: Any) -> Device:
    name, maker = (ggml(f"ggml_backend_dev_{word}", handle) for word in ("name", "description"))
    is_gpu = ggml("ggml_backend_dev_type", handle) in (_GPU, _SHARED_GPU)
    return Device(_readable(name), _readable(maker), is_gpu, *_memory(handle), handle)


def backends() -> dict[str, int]:
    """Return how many devices each backend has, by ggml's names, such as CUDA."""
    handles = [ggml("ggml_backend_reg_get", i) for i in range(ggml("ggml_backend_reg_count"))]
    return {
        _readable(ggml("ggml_backend_reg_name", h)): ggml("ggml_backend_reg_dev_count", h)
        for h in handles
    }


def device_names() -> list[str]:
    """Return what each device is called by its maker: processors too."""
    return [_readable(ggml("ggml_backend_dev_description", handle)) for handle in _devices()]


def _readable(text: bytes) -> str:
    return text.decode("utf-8", "backslashreplace")


def add_servers(servers: Sequence[str]) -> None:
    """Register ggml's RPC servers, "host:port" each, with this process; servers from before stay.

    Raises:
        ConfigError: this llama-cpp-python is built without RPC.
        ModelLoadError: a server does not answer, at which llama.cpp would end the process, or has no device.
    """
    if servers and not llama_cpp.llama_supports_rpc():
        raise ConfigError(
            "rpc_servers needs a llama-cpp-python with ggml's RPC backend: "
            'CMAKE_ARGS="-DGGML_RPC=on" pip install --force-reinstall --no-cache-dir '
            "--no-binary llama-cpp-python llama-cpp-python"
        )
    for server in servers:
        host, _, port = server.partition(":")
        try:
            socket.create_connection((host, int(port)), timeout=_CONNECT_S).close()
        except (OSError, ValueError) as error:  # ValueError: no valid name of a host
            raise ModelLoadError(
                f"rpc_servers: {server} does not answer: {error}; start rpc-server there, or leave it out"
            ) from error
        _register(server)


def _register(server: str) -> None:
    # Source: common/arg.cpp, add_rpc_devices; a server that is registered twice counts once
    backend = ggml("ggml_backend_reg_by_name", b"RPC")
    address = ggml("ggml_backend_reg_get_proc_address", backend, b"ggml_backend_rpc_add_server")
    add = ctypes.CFUNCTYPE(_pointer, _text)(address)
    added = add(server.encode())
    if not added:
        raise ModelLoadError(
            f"rpc_servers: {server} has no device: start rpc-server there with a device, or leave this server out"
        )
    ggml("ggml_backend_register", added)


def _n_free(handle: Any) -> int:
    return _memory(handle)[0]


def _memory(handle: Any) -> tuple[int, int]:
    n_free, n_total = _size(), _size()
    ggml("ggml_backend_dev_memory", handle, ctypes.byref(n_free), ctypes.byref(n_total))
    return n_free.value, n_total.value


def _devices() -> list[Any]:
    return [ggml("ggml_backend_dev_get", i) for i in range(ggml("ggml_backend_dev_count"))]


def _is_server(handle: Any) -> bool:
    backend = ggml("ggml_backend_dev_backend_reg", handle)
    return bool(ggml("ggml_backend_reg_name", backend) == b"RPC")


def ggml(name: str, *args: Any) -> Any:
    """Call a function of llama.cpp's own ggml; a wheel may contain another copy, with other devices."""
    result, *kinds = _SIGNATURES[name]
    return ctypes.CFUNCTYPE(result, *kinds)((name, llama_cpp.llama_cpp._lib))(*args)
