"""What a load decides is one value: what is used of all that makes a model faster, or exact."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest

from cbatch.backend.llama.llama_backend import LlamaBackend
from cbatch.backend.llama.short_pool import N_CELLS
from cbatch.backend.load.loader import load_backend
from cbatch.engine_options import EngineOptions

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.conftest import SynthFactory

pytestmark = [pytest.mark.real, pytest.mark.cpu("a device decides other things")]

SIZES: dict[str, Any] = {"parallel": 4, "n_ctx": 4 * N_CELLS}


def used(path: Path, **settings: Any) -> str:
    """What a load decides to use with these settings, and whether its backend has a pool for short sequences."""
    backend, _ = load_backend(path, EngineOptions(**{**SIZES, **settings}))
    with closing(backend):
        assert isinstance(backend, LlamaBackend)
        tuning = backend.tuning
        assert (backend.short_pool is not None) == tuning.has_short_pool
        found = {
            "pool": tuning.has_short_pool,
            "pads": tuning.may_widen,
            "threads": tuning.may_vary_threads,
            "shape": tuning.shape.has_pads,
        }
    return " ".join(name for name, is_used in found.items() if is_used)


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({}, "pool pads threads"),
        ({"kv": "partitioned"}, "pads threads"),
        ({"kv": "unified"}, "threads"),
        ({"parallel": 1}, "threads"),
        ({"cache_type_k": "q8_0"}, "pads threads"),
        ({"exact": True, "parallel": 3, "n_ctx": 768}, "threads shape"),
    ],
    ids=str,
)
def test_settings_decide_what_is_used(
    test_model: Path, settings: dict[str, Any], wanted: str
) -> None:
    assert used(test_model, **settings) == wanted


def test_weights_and_architecture_decide_too(
    synth: SynthFactory, zoo: Callable[[str], Path]
) -> None:
    assert used(synth("exact", type="q6_k")) == "pool threads"
    assert used(zoo("stablelm")) == "pads threads"  # whether it is right in a pool is not known
