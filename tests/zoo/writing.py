"""A tiny random model of any architecture, written as a file.

llama.cpp makes a model from metadata alone, and so tells which tensors it wants; their values are made here.
"""

from __future__ import annotations

import ctypes
import zlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import gguf
import llama_cpp
import numpy as np

from cbatch.backend.llama.log import llama_log
from tests.zoo.metadata import N_VOCAB, metadata_of

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

_SOFTER = {("gemma4", "attn_q_norm"): 0.1}
"""Factors of what would be too loud: gemma4 does not scale products of queries and keys, which would choose one cell
each, and another by rounding."""

_N_QUOTED = 3  # lines of llama.cpp's log


@dataclass(frozen=True)
class Model:
    """What is written."""

    architecture: str
    has_experts: bool
    is_tied: bool
    type: str
    """Of the matrices."""
    vocabulary: str
    metadata: dict[str, Any] = field(default_factory=dict)


class Wanted(NamedTuple):
    """A tensor that llama.cpp asks for."""

    name: str
    sizes: tuple[int, ...]
    """The greatest step first, as numpy has it."""

    @property
    def part(self) -> str:
        """What it is in its layer, such as `attn_q`."""
        return self.name.removesuffix(".weight").removesuffix(".bias").rpartition(".")[2]


class _TensorHead(ctypes.Structure):
    """The first fields of a tensor. Source: ggml/include/ggml.h, struct ggml_tensor."""

    _fields_ = (("type", ctypes.c_int), ("buffer", ctypes.c_void_p), ("ne", ctypes.c_int64 * 4))


class _GgufParams(ctypes.Structure):
    """Source: ggml/include/gguf.h, struct gguf_init_params."""

    _fields_ = (("no_alloc", ctypes.c_bool), ("ctx", ctypes.c_void_p))


def write(path: Path, model: Model, seed: int) -> None:
    """Write a model.

    Raises:
        RuntimeError: llama.cpp refuses its metadata.
    """
    writer = _begin(path, model)
    _end(writer)
    wanted = [tensor for tensor in _find_wanted(path) if _is_kept(tensor, model)]
    writer = _begin(path, model)
    is_tied = all(tensor.name != "output.weight" for tensor in wanted)
    for tensor in wanted:
        values = _values(tensor, seed, is_tied=is_tied)
        values *= np.float32(_SOFTER.get((model.architecture, tensor.part), 1))
        kind = _kind(tensor, model.type)
        data = values if kind.name == "F32" else gguf.quants.quantize(values, kind)
        writer.add_tensor(tensor.name, data, raw_dtype=kind)
    _end(writer)


def _begin(path: Path, model: Model) -> gguf.GGUFWriter:
    name = model.architecture
    writer = gguf.GGUFWriter(path, name)
    said = {**metadata_of(name, has_experts=model.has_experts), **model.metadata}
    for key, value in said.items():
        _add(writer, key[1:] if key.startswith(".") else f"{name}.{key}", value)
    _add(writer, "tokenizer.ggml.model", model.vocabulary)
    if model.vocabulary != "none":
        _add(writer, "tokenizer.ggml.tokens", [f"tok_{i}" for i in range(N_VOCAB)])
        _add(writer, "tokenizer.ggml.scores", [0.0] * N_VOCAB)
    return writer


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    kinds = gguf.GGUFValueType
    types = {bool: kinds.BOOL, int: kinds.UINT32, float: kinds.FLOAT32, str: kinds.STRING}
    if isinstance(value, list):
        writer.add_key_value(key, value, kinds.ARRAY, types[type(value[0])])
    else:
        writer.add_key_value(key, value, types[type(value)])


def _end(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _ggml(name: str, result: Any, *arguments: Any) -> Any:
    """Return a function of llama.cpp's own ggml."""
    return llama_cpp.llama_cpp.ctypes_function(name, list(arguments), result)(lambda: None)


def _find_wanted(head: Path) -> list[Wanted]:
    """Return the tensors that llama.cpp wants of a model whose metadata is in a file, each once."""
    found: dict[str, Wanted] = {}

    def take(pointer: int, data: object) -> None:
        sizes = list(_TensorHead.from_address(pointer).ne)
        while len(sizes) > 1 and sizes[-1] == 1:
            sizes.pop()
        name = _ggml("ggml_get_name", ctypes.c_char_p, ctypes.c_void_p)(pointer).decode()
        found[name] = Wanted(name, tuple(reversed(sizes)))

    log = llama_log()
    log.install()
    init = _ggml("gguf_init_from_file", ctypes.c_void_p, ctypes.c_char_p, _GgufParams)
    metadata = init(bytes(head), _GgufParams(True, None))
    params = llama_cpp.llama_model_default_params()
    params.n_gpu_layers = 0
    callback = llama_cpp.llama_model_set_tensor_data_t(take)
    try:
        llama_cpp.llama_backend_init()
        model = llama_cpp.llama_model_init_from_user(metadata, callback, None, params)
        if not model:
            raise RuntimeError(" | ".join(log.drain()[-_N_QUOTED:]))
        llama_cpp.llama_model_free(model)
    finally:
        _ggml("gguf_free", None, ctypes.c_void_p)(metadata)
        log.remove()
    return list(found.values())


def _is_kept(tensor: Wanted, model: Model) -> bool:
    """Whether a file has a tensor: scales belong to types that are not written here."""
    if tensor.name.endswith((".scale", ".input_scale")):
        return False
    return not (model.is_tied and tensor.name == "output.weight")


def _values(tensor: Wanted, seed: int, *, is_tied: bool) -> NDArray[np.float32]:
    """Return a tensor's values: of its name and the seed, and such that no layer drowns the others."""
    name, sizes = tensor
    dice = np.random.default_rng([seed, zlib.crc32(name.encode())])
    values = dice.standard_normal(sizes, np.float32)
    scale = float(sizes[-1]) ** -0.5
    if tensor.part.startswith(("rope_freqs", "rope_factors")):
        return np.abs(values) + np.float32(1)
    if "norm" in tensor.part and not name.endswith("bias"):
        return values / np.float32(10) + np.float32(1)
    if tensor.part == "ssm_a":
        return -np.abs(values)
    if tensor.part == "token_embd":
        scale = 0.1 if is_tied else 1.0  # or a token would give itself
    elif tensor.part == "output":
        scale *= 4  # tokens whose logits are alike would change places by rounding
    elif len(sizes) == 1:
        scale = 0.1
    return values * np.float32(scale)


def _kind(tensor: Wanted, type: str) -> Any:
    """Return the type of a tensor: the model's for products of matrices, else float."""
    kinds = gguf.GGMLQuantizationType
    kind = kinds[type.upper()]
    n_block, _ = gguf.GGML_QUANT_SIZES[kind]
    is_product = tensor.part.startswith(("attn_", "ffn_", "ssm_in", "ssm_out", "output", "token"))
    is_matrix = len(tensor.sizes) > 1 and not tensor.sizes[-1] % n_block
    return kind if is_product and is_matrix and "norm" not in tensor.part else kinds.F32
