"""Random projectors: small GGUF files that encode pictures or sound for a model of any width, to try these with."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from cbatch.bench.synthetic_shapes import gguf_package
from cbatch.errors import ConfigError
from cbatch.support.folders import part_beside, told

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Mapping

    from numpy.typing import NDArray

KINDS = ("llava", "llava-tiles", "qwen2-vl", "gemma3")
"""CLIP with LLaVA's projector, for pictures of one size; and for a picture's tiles beside the whole, as LLaVA 1.6;
Qwen2-VL's, with a row for each 28 × 28 pixels, for the shape `qwen2-vl`; and Gemma 3's, for the shape `gemma3`."""

SOUND_KINDS = ("whisper",)
"""Whisper with Ultravox's projector: of sound alone."""

MIXED_KINDS = ("qwen2-omni",)
"""Qwen2-VL's for pictures and Whisper's for sound in one file, as Qwen2.5-Omni, for the shape `qwen2-vl`."""

_N_EMBD, _N_LAYER, _N_HEAD, _N_FF = 64, 3, 2, 128
_N_SIDE, _N_PATCH = 56, 14
_N_MERGED = 2
"""Patches of each side of what becomes a row, in Qwen2-VL's and Gemma 3's."""
_MEAN, _DEVIATION = (
    (0.48, 0.46, 0.41),
    (0.27, 0.26, 0.28),
)  # Source: CLIP's preprocessor_config.json
_N_EAR_LAYER, _N_MEL, _N_FRAMES = 2, 16, 1500
"""Layers, bands of a spectrogram, and frames of half a minute behind the convolutions, which libmtmd fills up with
silence."""
_N_STACK = 50
"""Frames of a row: a half minute has 30 rows."""
_EAR_SIZES = {
    "embedding_length": _N_EMBD,
    "attention.head_count": _N_HEAD,
    "feed_forward_length": _N_FF,
    "block_count": _N_EAR_LAYER,
    "num_mel_bins": _N_MEL,
    "projector.stack_factor": _N_STACK,
}
_TYPES = {"qwen2-vl": "qwen2vl_merger", "qwen2-omni": "qwen2vl_merger", "gemma3": "gemma3"}
"""By which llama.cpp knows projectors that are not LLaVA's. Source: llama.cpp, tools/mtmd/clip-impl.h."""


def write_projector(
    path: str | os.PathLike[str], n_embd: int, *, kind: str = "llava", seed: int = 0
) -> Path:
    """Write a random projector for a model that is `n_embd` wide; return the path.

    A picture, or a tile, has 16 rows; with "qwen2-vl" as many as its size asks for, 8 at least. Half a minute of sound
    has 30.

    Raises:
        ConfigError: an unknown kind, or the `gguf` package is not installed.
        OutputError: the file cannot be written.
    """
    known = (*KINDS, *SOUND_KINDS, *MIXED_KINDS)
    if kind not in known:
        raise ConfigError(f"unknown kind of projector {kind!r}; known are {', '.join(known)}")
    gguf = gguf_package("writing a projector")
    path = Path(path)
    with told(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with part_beside(path) as part:
            writer = gguf.GGUFWriter(part, "clip")
            try:
                random = np.random.default_rng(seed)
                writer.add_file_type(0)
                if kind not in SOUND_KINDS:
                    _write_eyes(writer, n_embd, kind)
                    for name, values in _tensors(random, n_embd, kind):
                        writer.add_tensor(name, values)
                if kind not in KINDS:
                    _write_encoder(writer, "audio", "ultravox", n_embd, _EAR_SIZES)
                    for name, values in _ear_tensors(random, n_embd):
                        writer.add_tensor(name, values)
                writer.write_header_to_file()
                writer.write_kv_data_to_file()
                writer.write_tensors_to_file()
            finally:
                writer.close()
            part.replace(path)
    return path


def _n_side(kind: str) -> int:
    return _N_SIDE * _N_MERGED if kind == "gemma3" else _N_SIDE


def _write_encoder(
    writer: Any, sense: str, projector: str, n_embd: int, sizes: Mapping[str, int]
) -> None:
    """Source: llama.cpp, tools/mtmd/clip-impl.h."""
    writer.add_bool(f"clip.has_{sense}_encoder", True)
    writer.add_string(f"clip.{sense}.projector_type", projector)
    for name, value in {"projection_dim": n_embd, **sizes}.items():
        writer.add_uint32(f"clip.{sense}.{name}", value)
    writer.add_float32(f"clip.{sense}.attention.layer_norm_epsilon", 1e-5)


def _write_eyes(writer: Any, n_embd: int, kind: str) -> None:
    sizes = {
        "embedding_length": _N_EMBD,
        "attention.head_count": _N_HEAD,
        "feed_forward_length": _N_FF,
        "block_count": _N_LAYER,
        "image_size": _n_side(kind),
        "patch_size": _N_PATCH,
    }
    if kind == "gemma3":
        sizes["projector.scale_factor"] = _N_MERGED
    _write_encoder(writer, "vision", _TYPES.get(kind, "mlp"), n_embd, sizes)
    writer.add_array("clip.vision.image_mean", _MEAN)
    writer.add_array("clip.vision.image_std", _DEVIATION)
    if kind == "llava-tiles":
        sides = [_N_SIDE * n for shape in ((1, 2), (2, 1), (2, 2)) for n in shape]
        writer.add_array("clip.vision.image_grid_pinpoints", sides)


Tensors: TypeAlias = "Iterator[tuple[str, NDArray[Any]]]"


class _Weights:
    def __init__(self, random: np.random.Generator) -> None:
        self._random = random

    def matrix(self, *shape: int, scale: float | None = None) -> NDArray[np.float32]:
        factor = shape[-1] ** -0.5 if scale is None else scale
        return (self._random.standard_normal(shape) * factor).astype(np.float32)

    def linear(self, name: str, n_out: int, n_in: int) -> Tensors:
        yield f"{name}.weight", self.matrix(n_out, n_in)
        yield f"{name}.bias", np.zeros(n_out, np.float32)

    def norm(self, name: str) -> Tensors:
        yield f"{name}.weight", np.ones(_N_EMBD, np.float32)
        yield f"{name}.bias", np.zeros(_N_EMBD, np.float32)


def _tensors(random: np.random.Generator, n_embd: int, kind: str) -> Tensors:
    """Yield the weights by name. Source: llama.cpp, tools/mtmd/clip.cpp, load_tensors."""
    weights = _Weights(random)
    matrix, linear, norm = weights.matrix, weights.linear, weights.norm
    has_class = kind not in _TYPES
    n_patches = (_n_side(kind) // _N_PATCH) ** 2 + has_class
    if has_class:
        yield "v.class_embd", matrix(_N_EMBD)
        yield from norm("v.pre_ln")
    yield "v.patch_embd.weight", matrix(_N_EMBD, 3, _N_PATCH, _N_PATCH, scale=0.05)
    if kind.startswith("qwen2"):  # frames of a video come in pairs
        yield "v.patch_embd.weight.1", matrix(_N_EMBD, 3, _N_PATCH, _N_PATCH, scale=0.05)
    else:
        yield "v.position_embd.weight", matrix(n_patches, _N_EMBD, scale=0.3)
    for i in range(_N_LAYER):
        layer = f"v.blk.{i}"
        for name in ("attn_q", "attn_k", "attn_v", "attn_out"):
            yield from linear(f"{layer}.{name}", _N_EMBD, _N_EMBD)
        yield from norm(f"{layer}.ln1")
        yield from norm(f"{layer}.ln2")
        yield from linear(f"{layer}.ffn_up", _N_FF, _N_EMBD)
        yield from linear(f"{layer}.ffn_down", _N_EMBD, _N_FF)
    if kind == "gemma3":
        yield from norm("v.post_ln")
        yield "mm.soft_emb_norm.weight", np.ones(_N_EMBD, np.float32)
        yield "mm.input_projection.weight", matrix(_N_EMBD, n_embd, scale=_N_EMBD**-0.5)
        return
    n_merged = _N_MERGED**2 if kind.startswith("qwen2") else 1
    yield from linear("mm.0", n_embd, n_merged * _N_EMBD)
    yield from linear("mm.2", n_embd, n_embd)
    if kind == "llava-tiles":
        yield "model.image_newline", matrix(n_embd, scale=1.0)


def _ear_tensors(random: np.random.Generator, n_embd: int) -> Tensors:
    """Yield the weights by name. Source: llama.cpp, tools/mtmd/clip.cpp, load_tensors, and models/whisper-enc.cpp."""
    weights = _Weights(random)
    matrix, linear, norm = weights.matrix, weights.linear, weights.norm
    for i, n_in in ((1, _N_MEL), (2, _N_EMBD)):
        # ggml's convolution takes halves
        yield f"a.conv1d.{i}.weight", matrix(_N_EMBD, n_in, 3, scale=n_in**-0.5).astype(np.float16)
        yield f"a.conv1d.{i}.bias", np.zeros((_N_EMBD, 1), np.float32)
    yield "a.position_embd.weight", matrix(_N_FRAMES, _N_EMBD, scale=0.3)
    yield from norm("a.post_ln")
    for i in range(_N_EAR_LAYER):
        layer = f"a.blk.{i}"
        yield from linear(f"{layer}.attn_q", _N_EMBD, _N_EMBD)
        yield f"{layer}.attn_k.weight", matrix(_N_EMBD, _N_EMBD)
        yield from linear(f"{layer}.attn_v", _N_EMBD, _N_EMBD)
        yield from linear(f"{layer}.attn_out", _N_EMBD, _N_EMBD)
        yield from norm(f"{layer}.ln1")
        yield from norm(f"{layer}.ln2")
        yield from linear(f"{layer}.ffn_up", _N_FF, _N_EMBD)
        yield from linear(f"{layer}.ffn_down", _N_EMBD, _N_FF)
    yield "mm.a.norm_pre.weight", np.ones(_N_EMBD * _N_STACK, np.float32)
    yield "mm.a.mlp.1.weight", matrix(2 * n_embd, _N_EMBD * _N_STACK)
    yield "mm.a.norm_mid.weight", np.ones(n_embd, np.float32)
    yield "mm.a.mlp.2.weight", matrix(n_embd, n_embd)
