"""An abort by llama.cpp itself, for tests of what that costs."""

from __future__ import annotations

from cbatch.backend.bindings import llama_cpp


def trip_assertion() -> None:
    """End this process by a `GGML_ASSERT`: the name of no device is asked for."""
    llama_cpp.llama_cpp._lib.ggml_backend_dev_name(None)
