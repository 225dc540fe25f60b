"""Synthetic models: the same bytes every time, loadable in every type, and not dull when greedy."""

from __future__ import annotations

import ctypes
import hashlib
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import llama_cpp
import numpy as np
import pytest

from cbatch.backend.load.open_model import open_model
from cbatch.bench.synthetic import SHAPES, Shape, write_model
from cbatch.bench.synthetic_vocabulary import CONTROL_TOKENS, vocabulary
from cbatch.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    import numpy.typing as npt

    from cbatch.backend.llama.model import LlamaModel
    from tests.conftest import SynthFactory

SMALLEST = Shape(1, 32, 1, 1, 32, 400, "f32")


def _logits(context: object, n_vocab: int) -> npt.NDArray[np.float32]:
    row = llama_cpp.llama_get_logits_ith(context, -1)
    copied: npt.NDArray[np.float32] = np.ctypeslib.as_array(row, (n_vocab,)).copy()
    return copied


def _greedy(model: LlamaModel, prompt: str, n: int) -> tuple[list[int], npt.NDArray[np.float32]]:
    """Return n greedy tokens after the prompt, and the last logits, (n_vocab,) float32."""
    params = llama_cpp.llama_context_default_params()
    params.n_ctx, params.n_threads, params.n_threads_batch = 512, 1, 1
    context = llama_cpp.llama_init_from_model(model.pointer, params)
    tokens, output = model.vocab.tokenize(prompt), list[int]()
    for _ in range(n):
        given = (ctypes.c_int32 * len(tokens))(*tokens)  # the batch only points to it
        batch = llama_cpp.llama_batch_get_one(given, len(tokens))
        assert llama_cpp.llama_decode(context, batch) == 0
        logits = _logits(context, model.vocab.n_vocab)
        tokens = [int(logits.argmax())]
        output += tokens
    llama_cpp.llama_free(context)
    return output, logits


def test_write_model_twice_gives_the_same_bytes(tmp_path: Path) -> None:
    digests = {
        hashlib.sha256(write_model(tmp_path / name, SMALLEST).read_bytes()).digest()
        for name in ("a.gguf", "b.gguf")
    }
    assert len(digests) == 1


def test_write_model_with_another_seed_gives_other_bytes(tmp_path: Path) -> None:
    first = write_model(tmp_path / "a.gguf", SMALLEST, seed=1)
    assert first.read_bytes() != write_model(tmp_path / "b.gguf", SMALLEST, seed=2).read_bytes()


def test_write_model_over_a_file_needs_force(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(b"precious")
    with pytest.raises(ConfigError, match="force=True"):
        write_model(path, SMALLEST)
    assert path.read_bytes() == b"precious"
    assert write_model(path, SMALLEST, force=True).read_bytes()[:4] == b"GGUF"


def test_write_model_that_fails_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Unknown type"):
        write_model(tmp_path / "a.gguf", SMALLEST, metadata={"odd": [object()]})
    assert list(tmp_path.iterdir()) == []


def test_write_model_without_gguf_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ConfigError, match=r"cbatch\[synth\]"):
        write_model(tmp_path / "a.gguf", SMALLEST)


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"type": "q9"}, "q9"),
        ({"n_layer": 0}, "≥ 1"),
        ({"n_embd": 48, "type": "q8_0"}, "n_embd % 32"),
        ({"n_ff": 40, "type": "q4_0"}, "n_ff % 32"),
        ({"n_head": 2, "n_kv_head": 3}, "multiple of n_kv_head"),
        ({"n_head": 3}, "even"),
        ({"n_vocab": 300}, "n_vocab"),
        ({"architecture": "rwkv"}, "rwkv"),
        ({"architecture": "mamba"}, "2 × n_embd"),
        ({"architecture": "mamba", "n_ff": 64, "n_head": 2}, "no heads"),
    ],
)
def test_shape_that_does_not_fit_is_refused(change: dict[str, int], rule: str) -> None:
    with pytest.raises(ConfigError, match=rule):
        replace(SMALLEST, **change)  # type: ignore[arg-type]


@pytest.mark.parametrize("type", ["f32", "f16", "q8_0", "q4_0"])
@pytest.mark.parametrize("tied", [False, True])
def test_model_of_every_type_loads_and_decodes(synth: SynthFactory, type: str, tied: bool) -> None:
    model = open_model(synth(SMALLEST, type=type, tied=tied))
    assert model.file_type == type
    _, logits = _greedy(model, "Hello", 2)
    assert np.isfinite(logits).all()
    model.close()


@pytest.mark.parametrize("type", ["f32", "f16", "q8_0", "q4_0"])
def test_mamba_of_every_type_loads_and_decodes(synth: SynthFactory, type: str) -> None:
    model = open_model(synth("mamba", type=type))
    assert (model.architecture, model.file_type) == ("mamba", type)
    assert llama_cpp.llama_model_is_recurrent(model.pointer)
    _, logits = _greedy(model, "Hello", 2)
    assert np.isfinite(logits).all()
    model.close()


@pytest.mark.parametrize("shape", ["test", "mamba"])
def test_greedy_outputs_differ_and_wander(synth: SynthFactory, shape: str) -> None:
    model = open_model(synth(shape))
    prompts = ["Say red.", "Say blue.", "What is the colour of the sea?", "a", "tell me " * 40]
    runs = [_greedy(model, prompt, 64) for prompt in prompts]
    for i, (output, logits) in enumerate(runs):
        assert len(set(output)) > 24, prompts[i]
        shares = np.exp(logits - logits.max())
        assert 0.02 < 1 / shares.sum() < 0.95  # the likeliest token: neither flat nor one-hot
        others = [other for j, (other, _) in enumerate(runs) if j != i]
        assert all(np.mean(np.array(output) == np.array(other)) < 0.2 for other in others)
    model.close()


@pytest.mark.parametrize("n_vocab", [356, 1024, 5000])
def test_vocabulary_has_distinct_pieces_of_the_size_asked(n_vocab: int) -> None:
    pieces = vocabulary(n_vocab)
    assert len(pieces) == len(set(pieces)) == n_vocab
    assert pieces[: len(CONTROL_TOKENS)] == list(CONTROL_TOKENS)


def test_common_words_are_single_tokens(random_model: Path) -> None:
    model = open_model(random_model)
    tokens = model.vocab.tokenize("the people")
    assert [model.vocab.piece(token) for token in tokens] == [b"", b" the", b" people"]
    model.close()


def test_named_shapes_have_distinct_sizes() -> None:
    assert list(SHAPES) == ["test", "exact", "tiny", "small", "mamba"]
    assert len(set(SHAPES.values())) == len(SHAPES)
