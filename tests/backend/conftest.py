"""What tests of llama.cpp share: a model that is loaded once, and backends of every kind of memory."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from cbatch.backend.llama.model import LlamaModel
    from tests.backend.slots import MakeBackend
    from tests.conftest import SynthFactory


@pytest.fixture(scope="session")
def model(test_model: Path) -> Iterator[LlamaModel]:
    """Return the model that ships inside, loaded; no test changes or closes it."""
    from cbatch.backend.load.open_model import open_model

    with closing(open_model(test_model)) as opened:
        yield opened


@pytest.fixture
def make(synth: SynthFactory) -> Iterator[MakeBackend]:
    """Return a factory of backends by kind of memory: 3 slots, 768 cells."""
    from tests.backend.slots import make_backends

    yield from make_backends(synth)


@pytest.fixture(scope="session")
def longrope_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the path of a model with two sets of rope factors, the long ones for windows above 1,100."""
    from tests.zoo import write_arch

    said = {"rope.scaling.type": "longrope", "rope.scaling.original_context_length": 1100}
    said |= {"context_length": 4096}
    return write_arch("llama", tmp_path_factory.mktemp("longrope") / "m.gguf", metadata=said)


@pytest.fixture(scope="session")
def showing_model(synth: SynthFactory) -> Path:
    """Return the path of a random model whose prompts are the text of a message, pictures and sounds included."""
    return synth(
        "test", tied=False, metadata={"tokenizer.chat_template": "{{ messages[0].content }}"}
    )
