"""Random LoRA adapters as GGUF files, for the models of the tests."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

import gguf
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    Change = Callable[[str, NDArray[np.float32]], NDArray[np.float32] | None]

ATTENTION = ("attn_q", "attn_k", "attn_v", "attn_output")
ALL = (*ATTENTION, "ffn_gate", "ffn_up", "ffn_down")
ALPHA = "adapter.lora.alpha"


def write_lora(
    path: Path,
    model: Path,
    *,
    seed: int = 0,
    targets: Sequence[str] = ATTENTION,
    rank: int = 4,
    alpha: float = 8.0,
    type: str = "f16",
    std: float = 0.1,
    metadata: Mapping[str, object] | None = None,
    change: Change | None = None,
) -> Path:
    """Write an adapter for some weights of a model; the same arguments give the same file.

    Args:
        path: where; replaced if it is there.
        model: the GGUF file whose shapes it takes.
        seed: of the weights.
        targets: what is adapted in every layer, such as "attn_q"; with a dot, one tensor: "token_embd.weight".
        rank: columns of `lora_b`, rows of `lora_a`.
        alpha: what llama.cpp scales with, over the rank.
        type: of the tensors: f32, f16, bf16 or q8_0.
        std: of every number in both matrices.
        metadata: GGUF keys to add or replace; `None` leaves a key out.
        change: makes another array of the one of a name, or None to leave it out. For tests of wrong files.

    Returns:
        The path.
    """
    writer = gguf.GGUFWriter(path, "llama")
    writer.kv_data[0].clear()
    said: dict[str, object] = {
        "general.type": "adapter",
        "general.architecture": "llama",
        "adapter.type": "lora",
        ALPHA: alpha,
    }
    for key, value in {**said, **(metadata or {})}.items():
        if value is not None:
            _add(writer, key, value)
    kind = gguf.GGMLQuantizationType[type.upper()]
    for name, shape in _weights(model, targets).items():
        for suffix, sizes in _pair(name, shape, rank).items():
            numbers = _numbers(name + suffix, sizes, seed, std)
            changed = numbers if change is None else change(name + suffix, numbers)
            if changed is not None:
                writer.add_tensor(name + suffix, gguf.quantize(changed, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, key: str, value: object) -> None:
    kind = gguf.GGUFValueType.get_type(value)
    is_ids = kind == gguf.GGUFValueType.ARRAY  # llama.cpp wants token ids unsigned
    writer.add_key_value(key, value, kind, gguf.GGUFValueType.UINT32 if is_ids else None)


def _weights(model: Path, targets: Sequence[str]) -> dict[str, tuple[int, int]]:
    """Return the (rows, columns) of every weight that is meant."""
    found = {}
    for tensor in gguf.GGUFReader(model).tensors:
        if tensor.name in targets or tensor.name.removesuffix(".weight").split(".")[-1] in targets:
            n_columns, n_rows = (int(n) for n in tensor.shape)
            found[str(tensor.name)] = (n_rows, n_columns)
    return found


def _pair(name: str, shape: tuple[int, int], rank: int) -> dict[str, tuple[int, int]]:
    """Source: llama.cpp's convert_lora_to_gguf.py, which turns `lora_a` of the embedding over."""
    n_rows, n_columns = shape
    if name == "token_embd.weight":
        return {".lora_a": (n_rows, rank), ".lora_b": (n_columns, rank)}
    return {".lora_a": (rank, n_columns), ".lora_b": (n_rows, rank)}


def _numbers(name: str, shape: tuple[int, int], seed: int, std: float) -> NDArray[np.float32]:
    rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
    return rng.standard_normal(shape, dtype=np.float32) * np.float32(std)
