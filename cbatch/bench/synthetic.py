"""Random-weight GGUF models, written from nothing: small ones for tests, real shapes for measuring.

The same shape, vocabulary and seed give the same file, byte for byte. Matrices are made and written some rows at a
time, so a model needs little memory, whatever its size.
"""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from cbatch.backend.llama.gguf import DamagedError, read_header
from cbatch.backend.llama.quantiser import quantising
from cbatch.bench.synthetic_shapes import BERTS, SHAPES, WEIGHT_TYPES, Shape, gguf_package
from cbatch.bench.synthetic_tensors import (
    N_CONV,
    N_TOKEN_TYPES,
    RandomTensor,
    random_rows,
    tensors_of,
)
from cbatch.bench.synthetic_tokenizer import TokenizerData, Value, make_tokenizer, tokenizer_changes
from cbatch.errors import ConfigError, OutputError
from cbatch.support.folders import part_beside, told

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import ModuleType

    from gguf import GGUFWriter

    Show = Callable[[int, int], object]

__all__ = ["SHAPES", "Shape", "write_model"]

_BEFORE_QUANTISING = "f16"
_ALIGNMENT = 32  # Source: ggml/include/gguf.h, GGUF_DEFAULT_ALIGNMENT
_LOOK_S = 0.2
_POOLINGS = ("none", "mean", "cls", "last", "rank")  # Source: llama.h, llama_pooling_type

# What a quantised file may take at most beside the bits of its type: llama.cpp gives some matrices more.
_N_BITS_MORE, _N_BITS_OF_LOGITS = 2.0, 8.5


def write_model(
    path: str | os.PathLike[str],
    shape: Shape,
    *,
    tokenizer: TokenizerData | None = None,
    seed: int = 0,
    metadata: Mapping[str, object] | None = None,
    force: bool = False,
    show: Show = lambda n_done, n_all: None,
) -> Path:
    """Write a random model of this shape as a GGUF file. The file appears whole or not at all; what a killed process
    has left beside it is removed.

    Args:
        path: where; missing folders are made.
        shape: sizes and weight type, such as `SHAPES["test"]`.
        tokenizer: of `shape.n_vocab` tokens; made up without.
        seed: of weights and made-up pieces.
        metadata: GGUF keys to add or replace; `None` leaves a key out. For tests of wrong models.
        force: replace an existing file.
        show: called now and then with the bytes that were written and about how many there will be.

    Returns:
        The path.

    Raises:
        ConfigError: the file is there already, the `gguf` package is not installed, or the tokenizer does not fit.
        OutputError: the file cannot be written, for lack of room for instance.
    """
    path = Path(path)
    if path.exists() and not (force and path.is_file()):
        raise ConfigError(
            f"{path} exists already; use force=True to replace it"
            if path.is_file()
            else f"{path} is not a regular file"
        )
    writing = _Writing(gguf_package("writing a model"), shape, seed, show)
    with told(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        real = Path(os.path.realpath(path))
        with part_beside(real) as part:
            _check_room(path, writing.n_bytes)
            writing.tokenizer = tokenizer or make_tokenizer(
                shape.n_vocab, seed, changes=tokenizer_changes(shape)
            )
            if writing.tokenizer.n_tokens != shape.n_vocab:
                raise ConfigError(
                    f"the tokenizer has {writing.tokenizer.n_tokens} tokens, but the shape has {shape.n_vocab}"
                )
            if shape.weight_type.is_direct:
                writing.write(part, shape.type, dict(metadata or {}))
            else:
                with part_beside(real, suffix=f".{_BEFORE_QUANTISING}.part") as floats:
                    writing.write(floats, _BEFORE_QUANTISING, dict(metadata or {}))
                    writing.quantise(floats, part)
            part.replace(real)
    return path


def _check_room(path: Path, n_bytes: int) -> None:
    n_free = shutil.disk_usage(path.parent).free
    if n_bytes > n_free:
        raise OutputError(
            path, f"needs about {n_bytes:,} bytes of disk, but {n_free:,} are free: free some space"
        )


class _Writing:
    tokenizer: TokenizerData

    def __init__(self, gguf: ModuleType, shape: Shape, seed: int, show: Show) -> None:
        self._gguf, self._shape, self._seed, self._show = gguf, shape, seed, show
        self._n_done = 0
        self.n_bytes = _n_bytes(shape)

    def write(self, path: Path, type: str, changes: dict[str, object]) -> None:
        self._write_head(path, type, changes)
        with path.open("ab") as file:
            _pad(file)
            for tensor in tensors_of(self._shape):
                kind = self._kind(tensor, type)
                for rows in random_rows(tensor, self._seed, self.tokenizer.loudness):
                    data = self._gguf.quants.quantize(rows, kind)
                    file.write(data.tobytes())
                    self._advance(data.nbytes)
                _pad(file)

    def _write_head(self, path: Path, type: str, changes: dict[str, object]) -> None:
        name = str(changes.pop("general.architecture", self._shape.gguf_architecture))
        writer = self._gguf.GGUFWriter(path, name)
        try:
            values = {**_sizes(self._shape, name, type), **self.tokenizer.values}
            _add_metadata(self._gguf, writer, values, changes)
            for tensor in tensors_of(self._shape):
                kind = self._kind(tensor, type)
                sizes = tensor.sizes
                n_bytes = _n_row_bytes(self._gguf, sizes[-1], kind) * tensor.n_all_rows
                writer.add_tensor_info(
                    tensor.name, sizes, np.dtype(np.float32), n_bytes, raw_dtype=kind
                )
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
        finally:
            writer.close()

    def _kind(self, tensor: RandomTensor, type: str) -> Any:
        is_float = tensor.is_plain or tensor.n_rows == 0
        name = "F32" if is_float else WEIGHT_TYPES[type].tensor_type
        return self._gguf.GGMLQuantizationType[name]

    def quantise(self, floats: Path, part: Path) -> None:
        kind = self._shape.weight_type
        before = self._n_done
        with quantising(
            floats, part, kind.file_type, has_importance=kind.needs_importance
        ) as running:
            while not running.is_done(_LOOK_S):
                self._advance(before + part.stat().st_size - self._n_done)
            problem = running.find_problem()
        if problem:
            raise ConfigError(f"llama.cpp cannot quantise {self._shape}: {problem}")
        if not self._is_whole(part):  # llama.cpp does not look whether its writes succeed
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _is_whole(self, path: Path) -> bool:
        try:
            header = read_header(path, "")
        except DamagedError:
            return False
        if header is None:
            return False
        start = -(-header.n_header // _ALIGNMENT) * _ALIGNMENT
        ends = (
            start + tensor.offset + self._n_tensor_bytes(tensor.type, tensor.sizes)
            for tensor in header.tensors.values()
        )
        return header.n_file >= max(ends, default=1)

    def _n_tensor_bytes(self, type: int, sizes: tuple[int, ...]) -> int:
        kind = self._gguf.GGMLQuantizationType(type)
        n_rows = sizes[1] * sizes[2] * sizes[3]
        return n_rows * _n_row_bytes(self._gguf, sizes[0], kind)

    def _advance(self, n_bytes: int) -> None:
        self._n_done += n_bytes
        self._show(self._n_done, max(self.n_bytes, self._n_done))


def _n_bytes(shape: Shape) -> int:
    """Return about how many bytes are written, those before quantising included."""
    kind, total = shape.weight_type, 0.0
    for tensor in tensors_of(shape):
        n = tensor.n_all_rows * tensor.n_columns
        if tensor.is_plain or tensor.n_rows == 0:
            total += 4 * n
        elif kind.is_direct:
            total += n * kind.n_bits / 8
        else:
            n_bits = _N_BITS_OF_LOGITS if tensor.gives_logits else kind.n_bits + _N_BITS_MORE
            total += n * (WEIGHT_TYPES[_BEFORE_QUANTISING].n_bits + n_bits) / 8
    return int(total)


def _n_row_bytes(gguf: ModuleType, n_columns: int, kind: Any) -> int:
    n_block, n_block_bytes = gguf.GGML_QUANT_SIZES[kind]
    return int(n_columns // n_block * n_block_bytes)


def _pad(file: BinaryIO) -> None:
    file.write(bytes(-file.tell() % _ALIGNMENT))


# ---- metadata ----


def _sizes(shape: Shape, architecture: str, type: str) -> dict[str, Value]:
    """Return every key but the architecture's and the tokenizer's, in the file's order."""
    values = {
        "general.name": Value(f"synthetic {shape.n_layer}x{shape.n_embd}", "STRING"),
        "general.file_type": Value(WEIGHT_TYPES[type].file_type, "UINT32"),
        "general.quantization_version": Value(2, "UINT32"),
    }
    sizes = {
        "vocab_size": Value(shape.n_vocab, "UINT32"),
        "context_length": Value(shape.n_ctx_train, "UINT32"),
        "embedding_length": Value(shape.n_embd, "UINT32"),
        "block_count": Value(shape.n_layer, "UINT32"),
        **(_mamba_sizes(shape) if shape.architecture == "mamba" else _attention_sizes(shape)),
    }
    values.update({f"{architecture}.{key}": value for key, value in sizes.items()})
    if shape.architecture in BERTS:
        values["tokenizer.ggml.token_type_count"] = Value(N_TOKEN_TYPES, "UINT32")
    return values


def _attention_sizes(shape: Shape) -> dict[str, Value]:
    sizes = {
        "feed_forward_length": Value(shape.n_ff, "UINT32"),
        "attention.head_count": Value(shape.n_head, "UINT32"),
        "attention.head_count_kv": Value(shape.n_kv_head, "UINT32"),
        "attention.layer_norm_rms_epsilon": Value(1e-5, "FLOAT32"),
        "rope.dimension_count": Value(shape.n_head_dim, "UINT32"),
        "rope.freq_base": Value(500000.0, "FLOAT32"),
    }
    if shape.architecture == "qwen2vl":
        sizes["rope.dimension_sections"] = Value(_rope_sections(shape), "ARRAY", "INT32")
    if shape.n_expert:
        sizes["expert_count"] = Value(shape.n_expert, "UINT32")
        sizes["expert_used_count"] = Value(shape.n_expert_used, "UINT32")
    if shape.is_encoder:
        sizes["attention.causal"] = Value(False, "BOOL")
        sizes["attention.layer_norm_epsilon"] = Value(1e-12, "FLOAT32")  # BERT's
    if shape.pooling:
        sizes["pooling_type"] = Value(_POOLINGS.index(shape.pooling), "UINT32")
    if shape.pooling == "rank" and shape.architecture == "qwen3":
        sizes["classifier.output_labels"] = Value(["yes", "no"], "ARRAY", "STRING")
    if shape.n_window:
        pattern = [int(shape.has_window(i)) for i in range(shape.n_layer)]
        sizes["logit_scale"] = Value(1.0, "FLOAT32")  # llama.cpp demands it of Granite
        sizes["attention.sliding_window"] = Value(shape.n_window, "UINT32")
        sizes["attention.sliding_window_pattern"] = Value(pattern, "ARRAY", "INT32")
    return sizes


def _rope_sections(shape: Shape) -> list[int]:
    """Return how many pairs of a head are turned by time, height and width. Source: Qwen2-VL's 16, 24, 24 of 64."""
    n_pairs = shape.n_head_dim // 2
    n_time = n_pairs // 4
    n_height = (n_pairs - n_time) // 2
    return [n_time, n_height, n_pairs - n_time - n_height, 0]


def _mamba_sizes(shape: Shape) -> dict[str, Value]:
    """Source: llama.cpp convert_hf_to_gguf.py, MambaModel."""
    return {
        "feed_forward_length": Value(0, "UINT32"),
        "attention.head_count": Value(0, "UINT32"),
        "attention.layer_norm_rms_epsilon": Value(1e-5, "FLOAT32"),
        "ssm.conv_kernel": Value(N_CONV, "UINT32"),
        "ssm.inner_size": Value(shape.n_ff, "UINT32"),
        "ssm.state_size": Value(shape.n_state, "UINT32"),
        "ssm.time_step_rank": Value(shape.n_rank, "UINT32"),
    }


def _add_metadata(
    gguf: ModuleType, writer: GGUFWriter, values: dict[str, Value], changes: Mapping[str, object]
) -> None:
    for key, value in values.items():
        if key not in changes:
            _add_value(gguf, writer, key, value)
    for key, changed in changes.items():
        if changed is not None:
            _add_value(gguf, writer, key, Value(changed, _type_name(changed)))


def _add_value(gguf: ModuleType, writer: GGUFWriter, key: str, value: Value) -> None:
    kinds = gguf.GGUFValueType
    item = None if value.item_type is None else kinds[value.item_type]
    writer.add_key_value(key, value.value, kinds[value.type], item)


def _type_name(value: object) -> str:
    for kind, name in ((bool, "BOOL"), (int, "UINT32"), (float, "FLOAT32"), (str, "STRING")):
        if isinstance(value, kind):
            return name
    return "ARRAY"
