"""The callback that ends the computing of a graph after a node."""

from __future__ import annotations

import ctypes

from cbatch.backend.llama.library import library
from cbatch.backend.llama.structs import NativeStop

NAMES = [ctypes.create_string_buffer(name) for name in (b"result_norm", b"wanted", b"wanted more")]
PLACES = [*map(ctypes.addressof, NAMES), None]
NAMED = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t)(PLACES.__getitem__)


def stop_at(name: bytes) -> NativeStop:
    return NativeStop(ctypes.cast(NAMED, ctypes.c_void_p), name)


def test_graph_stops_at_the_named_node_alone() -> None:
    stop, callback = stop_at(b"wanted"), library().cbatch_stop_callback
    at = ctypes.addressof(stop)
    assert [callback(tensor, True, at) for tensor in range(4)] == [False, True, False, False]


def test_graph_does_not_go_on_behind_the_node() -> None:
    stop = stop_at(b"wanted")
    assert library().cbatch_stop_callback(1, False, ctypes.addressof(stop)) is False
