"""The tokenizer of a synthetic model: made up, or taken from any GGUF file."""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np

from cbatch.backend.llama.gguf import (
    AGAIN,
    ARRAY,
    FLOAT,
    INTEGERS,
    SCALARS,
    STRING,
    DamagedError,
    Header,
    read_header,
)
from cbatch.backend.load.gguf_check import vocabulary_faults
from cbatch.bench.synthetic_shapes import BERTS, Shape
from cbatch.bench.synthetic_vocabulary import (
    BOS,
    CONTROL_TOKENS,
    EOS,
    MIN_VOCAB,
    TURN_END,
    UNK,
    vocabulary,
)
from cbatch.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    import numpy.typing as npt


CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

RERANK = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n<Instruct>: Given a web '
    "search query, retrieve relevant passages that answer the query\n<Query>: {query}\n<Document>: {document}"
    "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
"""Source: llama.cpp convert_hf_to_gguf.py, Qwen3Model, for Qwen3-Reranker."""

_NAMES = {
    **dict(enumerate(("UINT8", "INT8", "UINT16", "INT16", "UINT32", "INT32", "FLOAT32", "BOOL"))),
    **dict(enumerate(("STRING", "ARRAY", "UINT64", "INT64", "FLOAT64"), STRING)),
}
"""Source: ggml/include/gguf.h, gguf_type, by the names of the `gguf` package."""

_TEMPLATE = "tokenizer.chat_template"
_TOKENS, _SCORES, _TYPES, _MERGES = (
    f"tokenizer.ggml.{name}" for name in ("tokens", "scores", "token_type", "merges")
)
_GGML = "tokenizer.ggml"
_NO_VOCABULARY = ("none", "no_vocab")  # Source: llama-vocab.cpp

# Source: llama.h, llama_token_type: 1 normal, 2 unknown, 3 control, 4 user-defined, 5 unused, 6 byte.
_NORMAL, _UNKNOWN, _CONTROL, _UNUSED, _BYTE = 1, 2, 3, 5, 6

_PAD_SCORE = -1000  # Source: llama.cpp, convert_hf_to_gguf.py

# A byte alone is seldom a character: a lower norm keeps them rare, as in a trained model.
_BYTE_NORM = 0.75
_SPECIAL_NORM = 0.05
"""Of tokens that end an answer or mean nothing: an answer is as long as it may be."""


@dataclass(frozen=True, slots=True)
class Value:
    """A value of a file's metadata, with the names of its type and, for an array, of that of its items."""

    value: object
    type: str
    item_type: str | None = None


@dataclass(frozen=True, slots=True, eq=False)
class TokenizerData:
    """What a model file says of its tokens."""

    n_tokens: int
    values: dict[str, Value]
    """The metadata `tokenizer.*`."""
    loudness: npt.NDArray[np.float32]
    """`(n_tokens,)`: the size of each token's logits, 1 for an ordinary one."""


# ---- made up ----


def make_tokenizer(
    n_vocab: int, seed: int = 0, *, changes: Mapping[str, Value | None] = MappingProxyType({})
) -> TokenizerData:
    """Return a tokenizer of made-up pieces, and some English words.

    Args:
        n_vocab: how many, the 5 control and 256 byte tokens included.
        seed: of the made-up pieces.
        changes: metadata to add or replace; `None` leaves a key out.

    Raises:
        ConfigError: too few for any text to have tokens.
    """
    if n_vocab < MIN_VOCAB:
        raise ConfigError(f"n_vocab must be at least {MIN_VOCAB}, so that any text has tokens")
    pieces = vocabulary(n_vocab, seed=seed)
    n_special = len(CONTROL_TOKENS) + 256
    n_ordinary = n_vocab - n_special
    loudness = np.ones(n_vocab, np.float32)
    loudness[len(CONTROL_TOKENS) : n_special] = _BYTE_NORM
    values = {
        "tokenizer.ggml.model": Value("llama", "STRING"),
        "tokenizer.ggml.pre": Value("default", "STRING"),
        _TOKENS: Value(pieces, "ARRAY"),
        # A higher score is merged first, so a piece comes after the pieces it is made of.
        _SCORES: Value([0.0] * n_special + [-float(i) for i in range(n_ordinary)], "ARRAY"),
        _TYPES: Value(_types(n_vocab), "ARRAY"),
        "tokenizer.ggml.bos_token_id": Value(BOS, "UINT32"),
        "tokenizer.ggml.eos_token_id": Value(EOS, "UINT32"),
        "tokenizer.ggml.eot_token_id": Value(TURN_END, "UINT32"),
        "tokenizer.ggml.unknown_token_id": Value(UNK, "UINT32"),
        "tokenizer.ggml.add_bos_token": Value(True, "BOOL"),
        "tokenizer.ggml.add_eos_token": Value(False, "BOOL"),
        "tokenizer.ggml.add_space_prefix": Value(True, "BOOL"),
        _TEMPLATE: Value(CHATML, "STRING"),
    }
    changed = {key: value for key, value in {**values, **changes}.items() if value is not None}
    return TokenizerData(n_vocab, changed, loudness)


def _types(n_vocab: int, byte: int = _BYTE) -> list[int]:
    n_control = len(CONTROL_TOKENS)
    head = [_UNKNOWN] + [_CONTROL] * (n_control - 1) + [byte] * 256
    return head + [_NORMAL] * (n_vocab - len(head))


def tokenizer_changes(shape: Shape) -> dict[str, Value | None]:
    """Return what the metadata of a made-up tokenizer says otherwise in a model for embeddings: how a text begins and
    ends, and of two texts, what is between them.

    BERT's kind of tokenizer takes the same pieces: it joins words with the space before them, too.
    """
    if not shape.pooling:
        return {}
    ended = {f"{_GGML}.add_eos_token": Value(True, "BOOL")}
    if shape.architecture == "qwen3":  # a text ends with EOS and begins with nothing
        template = {f"{_TEMPLATE}.rerank": Value(RERANK, "STRING")}
        return {
            f"{_GGML}.add_bos_token": Value(False, "BOOL"),
            **ended,
            **(template if shape.pooling == "rank" else {}),
        }
    changes: dict[str, Value | None] = {_TEMPLATE: None, f"{_GGML}.eot_token_id": None, **ended}
    if shape.architecture in BERTS:
        types = _types(shape.n_vocab, byte=_NORMAL)  # llama.cpp ends where a BERT has bytes
        changes |= {
            _TYPES: Value(types, "ARRAY"),
            f"{_GGML}.model": Value("bert", "STRING"),
            f"{_GGML}.seperator_token_id": Value(EOS, "UINT32"),  # spelt so in llama.cpp
            f"{_GGML}.add_sep_token": Value(False, "BOOL"),  # EOS parts two texts
        }
    return changes


# ---- taken ----


def take_tokenizer(path: Path, n_vocab: int | None = None) -> TokenizerData:
    """Return the tokenizer of a GGUF file; only the file's beginning is read, and nothing in it is trusted.

    Args:
        path: a model's file, or one of a vocabulary alone.
        n_vocab: how many tokens there shall be: those that the file has not are unused ones.

    Raises:
        ConfigError: it is not a GGUF file, is damaged, or has no vocabulary; or it has more tokens than `n_vocab`.
    """
    try:
        header = read_header(path, "give a .gguf file that has a vocabulary")
        if header is None:
            raise DamagedError("has a version of GGUF that this cbatch does not know")
        for fault in _faults(header):
            raise DamagedError(fault)
        values = dict(_read_values(path, header))
    except DamagedError as error:
        raise ConfigError(f"{path}: {error}") from error
    n_tokens = len(header.tokens)
    n_vocab = n_vocab or n_tokens
    if n_vocab < n_tokens:
        raise ConfigError(f"n_vocab is {n_vocab}, but {path} has {n_tokens} tokens")
    values.setdefault(_TEMPLATE, Value(CHATML, "STRING"))
    return TokenizerData(n_vocab, _padded(values, n_vocab - n_tokens), _loudness(header, n_vocab))


def _faults(header: Header) -> Iterator[str]:
    kind, n = header.values.get("tokenizer.ggml.model"), len(header.tokens)
    if not n or kind is None or kind in _NO_VOCABULARY:
        yield "has no vocabulary; give a .gguf file that has one"
    for key, kinds in ((_SCORES, (FLOAT, *INTEGERS)), (_TYPES, (*INTEGERS,))):
        item_kind, n_items = header.lengths.get(key, (-1, 0))
        if key in header.kinds and (item_kind not in kinds or n_items != n):
            yield f"is damaged: {key} is not one number for each of the {n} tokens; {AGAIN}"
    if header.lengths.get(_MERGES) == (STRING, 0):
        yield f"is damaged: {_MERGES} is empty; {AGAIN}"
    yield from vocabulary_faults(header)


def _read_values(path: Path, header: Header) -> Iterator[tuple[str, Value]]:
    """Yield what the file says of its tokenizer; empty arrays say nothing, and writers refuse them."""
    try:
        with path.open("rb") as file:
            for key, (start, end) in header.spans.items():
                if key.startswith("tokenizer."):
                    file.seek(start)
                    value = _value(header.kinds[key], file.read(end - start))
                    if value.value != []:
                        yield key, value
    except (OSError, struct.error) as error:  # the file was cut off meanwhile
        raise DamagedError(f"cannot be read: {error}") from error


def _value(kind: int, data: bytes) -> Value:
    if kind == STRING:
        return Value(data[8:], "STRING")
    if kind != ARRAY:
        return Value(SCALARS[kind].unpack(data)[0], _NAMES[kind])
    item_kind, n = struct.unpack_from("<IQ", data)
    if item_kind == STRING:
        return Value(list(_strings(data, n)), "ARRAY", "STRING")
    code = SCALARS[item_kind].format.removeprefix("<")
    return Value(list(struct.unpack_from(f"<{n}{code}", data, 12)), "ARRAY", _NAMES[item_kind])


def _strings(data: bytes, n: int) -> Iterator[bytes]:
    at = 12
    for _ in range(n):
        n_bytes = struct.unpack_from("<Q", data, at)[0]
        yield data[at + 8 : at + 8 + n_bytes]
        at += 8 + n_bytes


def _padded(values: dict[str, Value], n: int) -> dict[str, Value]:
    """Return the values with `n` more tokens, which are unused."""
    more: dict[str, list[object]] = {
        _TOKENS: [f"[PAD{i}]".encode() for i in range(n)],
        _SCORES: [_PAD_SCORE] * n,
        _TYPES: [_UNUSED] * n,
    }
    for key, items in more.items():
        if n and key in values:
            old = values[key].value
            assert isinstance(old, list)
            values[key] = replace(values[key], value=[*old, *items])
    return values


def _loudness(header: Header, n_vocab: int) -> npt.NDArray[np.float32]:
    """Return the size of each token's logits: special tokens end answers, or have no text.

    Where a file does not mark them, they are in angle brackets.
    """
    loudness = np.full(n_vocab, _SPECIAL_NORM, np.float32)
    types = header.integers.get(_TYPES, (_NORMAL,) * len(header.tokens))
    norms = {_UNKNOWN: _SPECIAL_NORM, _CONTROL: _SPECIAL_NORM, _UNUSED: _SPECIAL_NORM}
    norms[_BYTE] = _BYTE_NORM
    for i, (token, kind) in enumerate(zip(header.tokens, types, strict=True)):
        is_marked = kind != _BYTE and token[:1] == b"<" and token[-1:] == b">" and len(token) > 2
        loudness[i] = _SPECIAL_NORM if is_marked else norms.get(kind, 1.0)
    for key, value in header.values.items():
        is_id = key.startswith("tokenizer.") and key.endswith("_token_id")
        if is_id and isinstance(value, int) and 0 <= value < n_vocab:
            loudness[value] = _SPECIAL_NORM
    return loudness
