"""A model's file looked at before llama.cpp reads it: clear errors, and no abort for what llama.cpp only asserts.

llama.cpp returns an error for most damage. A few values it only asserts, which ends the process. Those
are checked here; assertions of single architectures are tried in a separate process, see `load_trial`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from cbatch.backend.bindings import llama_cpp
from cbatch.backend.llama.gguf import AGAIN, DamagedError, Header, read_header
from cbatch.errors import ModelLoadError

_MAX_LAYERS, _MAX_EXPERTS = 512, 1024  # Source: llama-hparams.h; larger ones end the process
_MAP_ALIGNMENT = 32  # Source: ggml-impl.h, TENSOR_ALIGNMENT
_BYTE_TOKEN = 6  # Source: llama.h, LLAMA_TOKEN_TYPE_BYTE


_PLAIN = frozenset(
    (
        *(
            "command-r",
            "falcon",
            "gemma",
            "gemma2",
            "gemma3",
            "granite",
            "llama",
            "mistral3",
            "olmo",
            "olmo2",
        ),
        *("phi2", "phi3", "qwen", "qwen2", "qwen3", "smollm3", "stablelm", "starcoder2"),
    )
)
"""Dense transformers whose graphs assert only that `_HEAD_SIZES` are equal. Source: src/models/, damaged files."""

_HEAD_SIZES = ("attention.key_length", "attention.value_length", "rope.dimension_count")
"""Head sizes that must be equal in the graphs of `_PLAIN`."""


def check_file(path: Path) -> Header | None:
    """Check that a file is a whole GGUF model that llama.cpp can read without ending the process.

    Args:
        path: the file; of a split model, the first one.

    Returns:
        its header; None if only llama.cpp can read it.

    Raises:
        ModelLoadError: it is not; the message names the path, the reason and the way out.
    """
    try:
        header = read_header(path, "give a model's .gguf file")
    except DamagedError as error:
        raise ModelLoadError(f"{path}: {error}") from error
    if header is not None:
        for rule in _RULES:
            for reason in rule(header):
                raise ModelLoadError(f"{path}: {reason}")
    return header


def is_proven(header: Header) -> bool:
    """Whether the header shows that no assertion of llama.cpp can fail."""
    n_embd, n_heads = header.count("embedding_length"), header.count("attention.head_count")
    own = {name: f"{header.architecture}.{name}" for name in _HEAD_SIZES}
    if header.architecture not in _PLAIN or n_heads < 1 or n_embd % n_heads:
        return False
    sizes = [header.count(name) for name, key in own.items() if key in header.kinds]
    lacks_heads = any(own[name] not in header.kinds for name in _HEAD_SIZES[:2])
    return len({*sizes, *([n_embd // n_heads] if lacks_heads else ())}) == 1


# ---- rules: each yields what is wrong with a header ----


def _kind_of_file(header: Header) -> Iterator[str]:
    kind = header.values.get("general.type", "model")
    if kind != "model":
        yield f"is of type {kind!r}, not a model; give the model's .gguf file"
    if header.values.get("split.no", 0) != 0:
        yield "is a later part of a split model; give the first part (-00001-of-…)"
    if not header.tensors and header.values.get("split.count", 0) in (0, 1):
        yield "holds no weights (a vocabulary only); give the model's .gguf file"


def _tensors_in_file(header: Header) -> Iterator[str]:
    alignment = header.values.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment % _MAP_ALIGNMENT:
        yield f"is damaged: general.alignment is {alignment}, not a multiple of 32; {AGAIN}"
        return
    start = -(-header.n_header // max(alignment, 1)) * alignment
    n_needed = start + max((t.offset for t in header.tensors.values()), default=0)
    if header.tensors and n_needed >= header.n_file:
        yield (
            f"is cut off or damaged: it has {header.n_file} bytes, "
            f"but its weights reach past byte {n_needed}; {AGAIN}"
        )


# Source of the three below: llama-model.cpp, load_hparams, its assertions.


def _layers(header: Header) -> Iterator[str]:
    n_layers, n_nextn = header.count("block_count"), header.count("nextn_predict_layers")
    if not 0 < n_layers <= _MAX_LAYERS:
        yield f"is damaged: block_count is {n_layers}, not in 1 … {_MAX_LAYERS}; {AGAIN}"
    if n_nextn > n_layers:
        yield f"is damaged: nextn_predict_layers is {n_nextn}, more than all {n_layers} layers; {AGAIN}"


def _experts(header: Header) -> Iterator[str]:
    n_experts, n_used = header.count("expert_count"), header.count("expert_used_count")
    n_groups, n_in_use = header.count("expert_group_count"), header.count("expert_group_used_count")
    if header.architecture.startswith("hunyuan") and n_experts <= 1:
        return  # llama.cpp overrides what these files say
    experts_fit = n_used <= n_experts <= _MAX_EXPERTS and (n_experts > 0) == (n_used > 0)
    groups_fit = n_groups < max(n_experts, 1)
    if n_groups > 1:
        groups_fit = groups_fit and n_experts % n_groups == 0 and 0 < n_in_use < n_groups
    if not (experts_fit and groups_fit):
        yield (
            f"is damaged: it says that it uses {n_used} of {n_experts} experts and {n_in_use} of {n_groups} "
            f"expert groups; {AGAIN}"
        )


def _rope_and_norm(header: Header) -> Iterator[str]:
    scaling = header.values.get(f"{header.architecture}.rope.scaling.type")
    if isinstance(scaling, str) and scaling not in _rope_scalings():
        yield f"is damaged: rope.scaling.type is {scaling!r}; {AGAIN}"
    for key, value in header.values.items():
        if key.endswith("epsilon") and isinstance(value, float) and not 0 <= value < math.inf:
            yield f"is damaged: {key} is {value}; {AGAIN}"


def _rope_scalings() -> set[str]:
    prefix = "LLAMA_ROPE_SCALING_TYPE_"
    names = {
        name.removeprefix(prefix).lower() for name in dir(llama_cpp) if name.startswith(prefix)
    }
    return names - {"unspecified", "max_value"}


# Source of the next: llama-vocab.cpp, which asserts unique tokens at load, and where token_to_byte
# and byte_to_token throw later.


def vocabulary_faults(header: Header) -> Iterator[str]:
    """Yield what is wrong with a vocabulary: what llama.cpp would end the process on."""
    pieces = {token or f"[EMPTY_{i}]".encode() for i, token in enumerate(header.tokens)}
    n_twice = len(header.tokens) - len(pieces)
    if n_twice:
        yield f"is damaged: {n_twice} of its tokens occur twice; {AGAIN}"
    tokenizer = header.values.get("tokenizer.ggml.model")
    types = header.integers.get("tokenizer.ggml.token_type", ())
    for token, kind in zip(header.tokens, types, strict=False):
        if kind == _BYTE_TOKEN and (len(token) < 3 or tokenizer == "bert"):
            yield f"is damaged: token {token!r} cannot stand for a byte; {AGAIN}"
    bytes_of_text = ({f"<0x{byte:02X}>".encode(), bytes([byte])} for byte in range(256))
    if tokenizer == "llama" and any(map(pieces.isdisjoint, bytes_of_text)):
        yield f"is damaged: it has no token for some bytes, at which llama.cpp would crash; {AGAIN}"
    if tokenizer == "rwkv":
        yield from _endless_bytes(header.tokens)


_ESCAPED = re.compile(rb"\\x([0-9a-f]{2})|\\([^x])|([^\\])", re.DOTALL)
_NAMED = {b"t": b"\t", b"n": b"\n", b"r": b"\r"}


def _endless_bytes(tokens: Iterable[bytes]) -> Iterator[str]:
    """Source: llama-vocab.cpp, llama_unescape_rwkv_token, and llm_tokenizer_rwkv_session, which starts again there."""
    alone: set[bytes] = set()
    first: set[bytes] = set()
    for token in tokens:
        if found := _ESCAPED.match(token):
            in_hex, named, plain = found.groups()
            byte = bytes.fromhex(in_hex.decode()) if in_hex else _NAMED.get(named, named) or plain
            (alone if found.end() == len(token) else first).add(byte)
    if endless := first - alone:
        yield (
            f"is damaged: its tokens begin with the byte 0x{min(endless).hex()}, which is no token itself: llama.cpp "
            f"would never return from text with it; {AGAIN}"
        )


_RULES = (_kind_of_file, _tensors_in_file, _layers, _experts, _rope_and_norm, vocabulary_faults)
