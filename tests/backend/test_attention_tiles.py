"""When prompts behind many cells are given a shape that attention computes fast."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, Any

import llama_cpp
import pytest

from cbatch.backend.llama.memory import most_long_context_prefills
from cbatch.backend.load.open_model import open_model
from cbatch.engine_options import EngineOptions

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from cbatch.backend.llama.model import LlamaModel


@pytest.fixture(scope="module")
def model(test_model: Path) -> Iterator[LlamaModel]:
    """The model that ships inside, which has six heads."""
    with closing(open_model(test_model)) as opened:
        assert llama_cpp.llama_model_n_head(opened.pointer) == 6
        yield opened


@pytest.mark.parametrize(
    "settings",
    [
        {"cache_type_k": "q8_0", "cache_type_v": "q8_0"},
        {"cache_type_k": "bf16", "cache_type_v": "bf16"},
        {"cache_type_k": "f32", "cache_type_v": "f16"},
        {"flash_attn": "off"},
        {"exact": True},
        {"n_ubatch": 255},
    ],
)
def test_there_are_no_tiles_with(settings: dict[str, Any], model: LlamaModel) -> None:
    assert most_long_context_prefills(model, EngineOptions(**settings), n_threads=2) == 0


@pytest.mark.parametrize(
    ("n_threads", "n_ubatch", "n_chunks"), [(1, 512, 4), (6, 512, 4), (9, 512, 6), (64, 320, 5)]
)
def test_chunks_of_a_step_give_each_thread_whole_tiles(
    n_threads: int, n_ubatch: int, n_chunks: int, model: LlamaModel
) -> None:
    options = EngineOptions(n_ubatch=n_ubatch)
    assert most_long_context_prefills(model, options, n_threads) == n_chunks
