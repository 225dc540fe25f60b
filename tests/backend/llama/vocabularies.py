"""Tiny models with vocabularies of several kinds, some with marks beside which llama.cpp removes white space."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from cbatch.bench.synthetic import Shape, write_model
from cbatch.bench.synthetic_tokenizer import TokenizerData, Value
from tests.bench.test_synthetic_tokenizer import BPE, UGM, WPM, Pairs, kind, types

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

MARKS = (
    *("<mask>", "[MASK]", "<|endoftext|>", "<s>", "</s>", "<unk>"),
    *("<e> ", " <b>", "\n<n>", "<a> <c>", "<ab", "ab>", "<x>\t"),
)
"""Control tokens of the vocabularies; some begin or end with white space, or overlap."""

_CONTROL, OF_USERS = 3, 4
"""Kinds of tokens. Source: llama.h, llama_token_type."""
SPM = kind(
    "llama",
    [*(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "ab", "▁a", "▁▁"],
    scores=([0.0] * 256 + [-float(i) for i in range(6)], "ARRAY", "FLOAT32"),
    token_type=types(*[6] * 256, *[1] * 6),
)
_RUNS = ["\n", "\n\n", "\n" * 5, "  ", "   ", "\t\t"]
_RUNS_OF_SPM = kind(
    "llama",
    [*SPM["tokenizer.ggml.tokens"][0], *_RUNS],
    scores=([0.0] * 268, "ARRAY", "FLOAT32"),
    token_type=types(*[6] * 256, *[1] * 6, *[4] * 6),
)
"""With runs of white space, as Gemma's and GPT-NeoX's vocabularies have them."""
RWKV = kind(
    "rwkv",
    ["<pad>", *(f"\\x{byte:02x}" for byte in range(256) if byte != 0xC3), *map(str, range(32))],
    token_type=types(*[1] * 288),
)
"""Without end tokens, as many as fill words of 32, and none for a byte: its letters have no token, not even `<unk>`."""
# Source: llama-vocab.cpp, which gives marks their attributes by the names of models and pre-tokenizers
_TO_THE_LEFT: dict[str, object] = {"general.name": "modern-bert"}
_TO_THE_RIGHT: dict[str, object] = {"general.name": "Phi-3"}
KINDS: Mapping[str, tuple[Pairs, dict[str, object]]] = {
    "bpe": (BPE, {}),
    "bpe, left of <mask>": (BPE, {"tokenizer.ggml.pre": "jina-v2-de"}),
    "bpe, with an end": (BPE, {"tokenizer.ggml.add_eos_token": True}),
    "spm": (SPM, {}),
    "spm, runs": (_RUNS_OF_SPM, {}),
    "spm, runs, right of most": (_RUNS_OF_SPM, _TO_THE_RIGHT),
    "spm, left of [MASK]": (SPM, _TO_THE_LEFT),
    "spm, right of most": (SPM, _TO_THE_RIGHT),
    "ugm, right of most": (UGM, _TO_THE_RIGHT),
    "wpm, left of [MASK]": (WPM, {**_TO_THE_LEFT, "tokenizer.ggml.bos_token_id": 2}),
}
"""Vocabularies and further metadata; the names tell where white space is removed."""


def write_plain_model_of(path: Path, vocabulary: Pairs) -> Path:
    """Write a model with a vocabulary as it is."""
    values = {key: Value(*pair) for key, pair in vocabulary.items()}
    n = len(vocabulary["tokenizer.ggml.tokens"][0])
    tokenizer = TokenizerData(n, values, np.ones(n, np.float32))
    return write_model(path, Shape(1, 32, 1, 1, 32, n, "f32"), tokenizer=tokenizer)


def write_model_of(
    path: Path, vocabulary: Pairs, metadata: Mapping[str, object], kind_of_marks: int = _CONTROL
) -> Path:
    """Write a model with a vocabulary, to which `MARKS` are added."""
    values = {key: Value(*pair) for key, pair in vocabulary.items()}
    tokens = values["tokenizer.ggml.tokens"].value
    assert isinstance(tokens, list)
    new = [mark for mark in MARKS if mark not in tokens]
    more: dict[str, list[Any]] = {
        "tokens": new,
        "token_type": [kind_of_marks] * len(new),
        "scores": [0.0] * len(new),
    }
    for name, items in more.items():
        if (old := values.get(f"tokenizer.ggml.{name}")) is not None:
            assert isinstance(old.value, list)
            values[f"tokenizer.ggml.{name}"] = Value([*old.value, *items], old.type, old.item_type)
    n = len(tokens) + len(new)
    tokenizer = TokenizerData(n, values, np.ones(n, np.float32))
    shape = Shape(1, 32, 1, 1, 32, n, "f32")
    return write_model(path, shape, tokenizer=tokenizer, metadata=metadata)
