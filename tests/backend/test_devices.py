"""Devices: their order, and servers that are asked before llama.cpp ends the process over them."""

from __future__ import annotations

import ctypes
import socket
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import llama_cpp
import pytest

from cbatch.backend import devices
from cbatch.backend.devices import add_servers, free_on_devices
from cbatch.backend.load.open_model import _SPLIT_MODES, open_model, place
from cbatch.engine_options import EngineOptions
from cbatch.errors import ConfigError, ModelLoadError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

CPU, GPU, SHARED_GPU = 0, 1, 2


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return what makes ggml have these devices: the kind of each, and whether a server lends it."""

    def have(*found: tuple[int, bool]) -> None:
        def ggml(name: str, *args: Any) -> Any:
            if name == "ggml_backend_dev_memory":
                args[1]._obj.value = 100 + args[0]
            answers: dict[str, Callable[..., Any]] = {
                "ggml_backend_dev_count": lambda: len(found),
                "ggml_backend_dev_get": lambda i: i,
                "ggml_backend_dev_type": lambda i: found[i][0],
                "ggml_backend_dev_memory": lambda *args: None,
                "ggml_backend_dev_backend_reg": lambda i: i,
                "ggml_backend_reg_name": lambda i: b"RPC" if found[i][1] else b"CUDA",
            }
            return answers[name](*args)

        monkeypatch.setattr(devices, "ggml", ggml)
        monkeypatch.setattr(llama_cpp, "llama_supports_gpu_offload", lambda: True)

    return have


@pytest.fixture
def port() -> Iterator[int]:
    """A port where somebody answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_servers_come_first_and_shared_memory_only_without_others(
    pretend: Callable[..., None],
) -> None:
    cpu, shared = (CPU, False), (SHARED_GPU, False)
    pretend(cpu, (GPU, False), shared, (GPU, True))
    assert free_on_devices() == [103, 101]
    pretend(cpu, shared, (GPU, True))
    assert free_on_devices() == [102, 101]


def test_signatures_are_those_of_the_library() -> None:
    ggml = devices.ggml
    assert ggml("ggml_backend_dev_count") >= 1
    first = ggml("ggml_backend_dev_get", 0)
    assert devices._n_free(first) >= 0
    assert devices._is_server(first) is False
    assert not ggml("ggml_backend_reg_by_name", b"none")


@pytest.mark.skipif(llama_cpp.llama_supports_gpu_offload(), reason="this build has a GPU")
def test_build_without_gpus_has_no_devices() -> None:
    assert free_on_devices() == []


@pytest.mark.skipif(llama_cpp.llama_supports_rpc(), reason="this build has RPC")
def test_servers_without_rpc_are_refused_with_the_build_that_has_it(test_model: Path) -> None:
    with pytest.raises(ConfigError, match="-DGGML_RPC=on"):
        open_model(test_model, EngineOptions(rpc_servers=("localhost:50052",)))


def test_server_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    monkeypatch.setattr(llama_cpp, "llama_supports_rpc", lambda: True)
    added: list[str] = []
    monkeypatch.setattr(devices, "_register", added.append)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        silent = f"127.0.0.1:{closed.getsockname()[1]}"
    with pytest.raises(ModelLoadError, match=f"{silent} does not answer"):
        add_servers([f"127.0.0.1:{port}", silent])
    assert added == [f"127.0.0.1:{port}"]


@pytest.mark.parametrize("host", ["..", "\0", "x" * 300])
def test_host_that_cannot_be_is_named(monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    monkeypatch.setattr(llama_cpp, "llama_supports_rpc", lambda: True)
    with pytest.raises(ModelLoadError, match="does not answer"):
        add_servers([f"{host}:50052"])


@pytest.mark.parametrize("has_device", [True, False])
def test_server_is_registered_by_the_backend_s_own_function(
    monkeypatch: pytest.MonkeyPatch, port: int, has_device: bool
) -> None:
    server, calls = f"127.0.0.1:{port}", list[object]()

    def note(named: bytes) -> int:
        calls.append(named)
        return 7 if has_device else 0

    add = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_char_p)(note)

    def ggml(name: str, *args: Any) -> Any:
        calls.append((name, *args))
        return ctypes.cast(add, ctypes.c_void_p).value if name.endswith("address") else 5

    monkeypatch.setattr(devices, "ggml", ggml)
    monkeypatch.setattr(llama_cpp, "llama_supports_rpc", lambda: True)
    refused = pytest.raises(ModelLoadError, match=f"{server} has no device")
    with nullcontext() if has_device else refused:
        add_servers([server])
    if not has_device:
        return
    assert calls == [
        ("ggml_backend_reg_by_name", b"RPC"),
        ("ggml_backend_reg_get_proc_address", 5, b"ggml_backend_rpc_add_server"),
        server.encode(),
        ("ggml_backend_register", 7),
    ]


def test_placement_reaches_llama_s_parameters() -> None:
    params = llama_cpp.llama_model_default_params()
    place(
        params, EngineOptions(n_gpu_layers=3, split_mode="row", main_gpu=1, tensor_split=(1.0, 3.0))
    )
    assert (params.n_gpu_layers, params.split_mode, params.main_gpu) == (3, 2, 1)
    n_most = llama_cpp.llama_max_devices()
    assert list(params.tensor_split[:n_most]) == [1.0, 3.0, *[0.0] * (n_most - 2)]
    for name, mode in _SPLIT_MODES.items():
        assert getattr(llama_cpp, f"LLAMA_SPLIT_MODE_{name.upper()}") == mode
    params, default = (llama_cpp.llama_model_default_params() for _ in range(2))
    place(params, EngineOptions())
    for name in ("n_gpu_layers", "split_mode", "main_gpu"):
        assert getattr(params, name) == getattr(default, name)
    assert not params.tensor_split


@pytest.mark.parametrize("n_layers", [99, -1])
def test_layers_for_no_device_are_said_in_the_log(
    pretend: Callable[..., None], caplog: pytest.LogCaptureFixture, n_layers: int
) -> None:
    params = llama_cpp.llama_model_default_params()
    pretend((CPU, False), (GPU, False))
    place(params, EngineOptions(n_gpu_layers=n_layers))
    pretend((CPU, False))
    place(params, EngineOptions(n_gpu_layers=0))
    place(params, EngineOptions())
    assert not caplog.records
    place(params, EngineOptions(n_gpu_layers=n_layers))
    assert f"n_gpu_layers={n_layers} has no effect" in caplog.text


def test_more_shares_than_devices_are_refused() -> None:
    n_most = llama_cpp.llama_max_devices()
    params = llama_cpp.llama_model_default_params()
    with pytest.raises(
        ConfigError, match=f"{n_most + 1} shares, but llama.cpp supports at most {n_most}"
    ):
        place(params, EngineOptions(tensor_split=[1.0] * (n_most + 1)))
