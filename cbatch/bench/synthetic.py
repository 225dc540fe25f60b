"""Random-weight GGUF models, written from nothing: small ones for tests, real shapes for measuring.

The same shape and seed give the same file, byte for byte. Output weights are untied by default,
because tied random models repeat one token when greedy, and then every comparison looks equal.
"""

from __future__ import annotations

import os
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

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
    from types import ModuleType

    from gguf import GGUFWriter

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_FILE_TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q8_0": 7}  # Source: llama.h, llama_ftype
_BLOCK = 32  # Source: ggml-common.h, QK4_0 and QK8_0

# Scales, in units that keep them independent of the width; see `_tensors`.
_LOGIT_STD = 3.0
_ATTENTION_GAIN = 2.0
_EMBED_STD = 0.5
# Of a Mamba layer: its memory fades by 1 − softplus(_DT_BIAS) a token, to a tenth within some twenty.
_DT_BIAS = -2.0
_DECAY_STD = 0.2
_N_CONV = 4  # Source: the Mamba paper's d_conv
# A byte alone is seldom a character: a lower norm keeps them rare, as in a trained model.
_BYTE_NORM = 0.75


@dataclass(frozen=True, slots=True)
class Shape:
    """A model's sizes; a head is `n_embd / n_head` wide. A mamba has no heads: they count 1 and 1.

    Args:
        n_layer: transformer layers, ≥ 1.
        n_embd: width; a multiple of `n_head`, and of 32 for the quantised types.
        n_head: attention heads; a multiple of `n_kv_head`.
        n_kv_head: key and value heads.
        n_ff: width of the feed-forward layer, in a mamba of its own one: then `2 * n_embd`; a multiple of 32 for the
            quantised types.
        n_vocab: tokens, the 5 control and 256 byte tokens included.
        type: of the weight matrices: f32, f16, q8_0 or q4_0.
        n_ctx_train: positions the file says it was trained for.
        tied: whether the output uses the embedding's weights.
        architecture: llama, or mamba, which has a state of one size where llama has cells.

    Raises:
        ConfigError: sizes that do not fit together.
    """

    n_layer: int
    n_embd: int
    n_head: int
    n_kv_head: int
    n_ff: int
    n_vocab: int
    type: str
    n_ctx_train: int = 32768
    tied: bool = False
    architecture: Literal["llama", "mamba"] = "llama"

    def __post_init__(self) -> None:
        """Check that the sizes fit together."""
        if self.type not in _FILE_TYPES:
            raise ConfigError(
                f"unknown weight type {self.type!r}; known are {', '.join(_FILE_TYPES)}"
            )
        if self.architecture not in ("llama", "mamba"):
            raise ConfigError(f"unknown architecture {self.architecture!r}; known are llama, mamba")
        for wrong, rule in self._broken_rules():
            if wrong:
                raise ConfigError(f"{self}: {rule}")

    def _broken_rules(self) -> Iterator[tuple[bool, str]]:
        yield min(self.n_layer, self.n_head, self.n_kv_head, self.n_ctx_train) < 1, "sizes are ≥ 1"
        yield self.n_embd < 1 or self.n_ff < 1, "sizes are ≥ 1"
        yield (
            bool(self.n_embd % (2 * self.n_head)),
            "a head is n_embd / n_head wide, an even number",
        )
        yield bool(self.n_head % self.n_kv_head), "n_head is a multiple of n_kv_head"
        is_mamba = self.architecture == "mamba"
        yield is_mamba and self.n_head != 1, "a mamba has no heads: n_head is 1"
        yield is_mamba and self.n_ff != 2 * self.n_embd, "a mamba needs n_ff = 2 × n_embd"
        quantised = self.type.startswith("q")
        yield quantised and bool(self.n_embd % _BLOCK), f"{self.type} needs n_embd % {_BLOCK} = 0"
        yield quantised and bool(self.n_ff % _BLOCK), f"{self.type} needs n_ff % {_BLOCK} = 0"
        yield (
            self.n_vocab < MIN_VOCAB,
            f"n_vocab is at least {MIN_VOCAB}, for any text to have tokens",
        )

    @property
    def n_head_dim(self) -> int:
        """Width of one head."""
        return self.n_embd // self.n_head

    @property
    def n_state(self) -> int:
        """Numbers that a mamba remembers for each of its channels. Source: the Mamba paper's d_state."""
        return 16

    @property
    def n_rank(self) -> int:
        """Width of a mamba's time steps before they are spread over the channels. Source: the Mamba paper's dt_rank."""
        return -(-self.n_embd // 16)


_Array = npt.NDArray[np.float32]
_Value = tuple[object, str]  # a metadata value and its GGUF type's name


def write_model(
    path: str | os.PathLike[str],
    shape: Shape,
    *,
    seed: int = 0,
    metadata: Mapping[str, object] | None = None,
    force: bool = False,
) -> Path:
    """Write a random model of this shape as a GGUF file. The file appears whole or not at all.

    Args:
        path: where; missing folders are made.
        shape: sizes and weight type, such as `SHAPES["test"]`.
        seed: of weights and made-up pieces.
        metadata: GGUF keys to add or replace; `None` leaves a key out. For tests of wrong models.
        force: replace an existing file.

    Returns:
        The path.

    Raises:
        ConfigError: the file is there already, or the `gguf` package is not installed.
    """
    path = Path(path)
    if path.exists() and not force:
        raise ConfigError(f"{path} exists already; use force=True to replace it")
    gguf = _import_gguf()
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        _write(gguf, part, shape, seed, dict(metadata or {}))
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    return path


def _import_gguf() -> ModuleType:
    try:
        import gguf
    except ImportError as error:
        raise ConfigError(
            'writing a model needs the gguf package: pip install "cbatch[synth]"'
        ) from error
    return gguf  # type: ignore[no-any-return]


def _write(
    gguf: ModuleType, path: Path, shape: Shape, seed: int, changes: dict[str, object]
) -> None:
    architecture = str(changes.pop("general.architecture", shape.architecture))
    writer = gguf.GGUFWriter(path, architecture)
    try:
        _add_metadata(gguf, writer, _metadata(shape, architecture, seed), changes)
        for tensor in _tensors(shape):
            _declare(gguf, writer, tensor, shape.type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for tensor in _tensors(shape):
            writer.write_tensor_data(_weights(gguf, tensor, shape.type, seed))
    finally:
        writer.close()


# --- metadata ---


def _metadata(shape: Shape, architecture: str, seed: int) -> dict[str, _Value]:
    """Return every key but the architecture, in the file's order."""
    values: dict[str, _Value] = {
        "general.name": (f"synthetic {shape.n_layer}x{shape.n_embd}", "STRING"),
        "general.file_type": (_FILE_TYPES[shape.type], "UINT32"),
        "general.quantization_version": (2, "UINT32"),
    }
    sizes: dict[str, _Value] = {
        "vocab_size": (shape.n_vocab, "UINT32"),
        "context_length": (shape.n_ctx_train, "UINT32"),
        "embedding_length": (shape.n_embd, "UINT32"),
        "block_count": (shape.n_layer, "UINT32"),
        **(_mamba_sizes(shape) if shape.architecture == "mamba" else _attention_sizes(shape)),
    }
    values.update({f"{architecture}.{key}": value for key, value in sizes.items()})
    values.update(_tokenizer(shape.n_vocab, seed))
    return values


def _attention_sizes(shape: Shape) -> dict[str, _Value]:
    return {
        "feed_forward_length": (shape.n_ff, "UINT32"),
        "attention.head_count": (shape.n_head, "UINT32"),
        "attention.head_count_kv": (shape.n_kv_head, "UINT32"),
        "attention.layer_norm_rms_epsilon": (1e-5, "FLOAT32"),
        "rope.dimension_count": (shape.n_head_dim, "UINT32"),
        "rope.freq_base": (500000.0, "FLOAT32"),
    }


def _mamba_sizes(shape: Shape) -> dict[str, _Value]:
    """Source: llama.cpp convert_hf_to_gguf.py, MambaModel."""
    return {
        "feed_forward_length": (0, "UINT32"),
        "attention.head_count": (0, "UINT32"),
        "attention.layer_norm_rms_epsilon": (1e-5, "FLOAT32"),
        "ssm.conv_kernel": (_N_CONV, "UINT32"),
        "ssm.inner_size": (shape.n_ff, "UINT32"),
        "ssm.state_size": (shape.n_state, "UINT32"),
        "ssm.time_step_rank": (shape.n_rank, "UINT32"),
    }


def _tokenizer(n_vocab: int, seed: int) -> dict[str, _Value]:
    pieces = vocabulary(n_vocab, seed=seed)
    n_special = len(CONTROL_TOKENS) + 256
    return {
        "tokenizer.ggml.model": ("llama", "STRING"),
        "tokenizer.ggml.pre": ("default", "STRING"),
        "tokenizer.ggml.tokens": (pieces, "ARRAY"),
        # A higher score is merged first, so a piece comes after the pieces it is made of.
        "tokenizer.ggml.scores": (
            [0.0] * n_special + [-float(i) for i in range(n_vocab - n_special)],
            "ARRAY",
        ),
        # Source: llama.h, llama_token_type: 1 normal, 2 unknown, 3 control, 6 byte.
        "tokenizer.ggml.token_type": (
            [2] + [3] * (len(CONTROL_TOKENS) - 1) + [6] * 256 + [1] * (n_vocab - n_special),
            "ARRAY",
        ),
        "tokenizer.ggml.bos_token_id": (BOS, "UINT32"),
        "tokenizer.ggml.eos_token_id": (EOS, "UINT32"),
        "tokenizer.ggml.eot_token_id": (TURN_END, "UINT32"),
        "tokenizer.ggml.unknown_token_id": (UNK, "UINT32"),
        "tokenizer.ggml.add_bos_token": (True, "BOOL"),
        "tokenizer.ggml.add_eos_token": (False, "BOOL"),
        "tokenizer.ggml.add_space_prefix": (True, "BOOL"),
        "tokenizer.chat_template": (CHATML, "STRING"),
    }


def _add_metadata(
    gguf: ModuleType, writer: GGUFWriter, values: dict[str, _Value], changes: Mapping[str, object]
) -> None:
    for key, (value, type_name) in values.items():
        if key not in changes:
            _add_value(gguf, writer, key, value, type_name)
    for key, value in changes.items():
        if value is not None:
            _add_value(gguf, writer, key, value, _type_name(value))


def _add_value(
    gguf: ModuleType, writer: GGUFWriter, key: str, value: object, type_name: str
) -> None:
    writer.add_key_value(key, value, gguf.GGUFValueType[type_name])


def _type_name(value: object) -> str:
    for kind, name in ((bool, "BOOL"), (int, "UINT32"), (float, "FLOAT32"), (str, "STRING")):
        if isinstance(value, kind):
            return name
    return "ARRAY"


# --- weights ---


@dataclass(frozen=True, slots=True)
class _Tensor:
    name: str
    n_rows: int
    """0 for one dimension: `n_columns` float32 values."""
    n_columns: int
    std: float
    mean: float = 0.0
    is_plain: bool = False
    """Whether it is float32 whatever the weights' type."""


def _tensors(shape: Shape) -> Iterator[_Tensor]:
    """Yield every tensor in the file's order."""
    width = shape.n_embd
    yield _Tensor("token_embd.weight", shape.n_vocab, width, _EMBED_STD)
    if not shape.tied:
        yield _Tensor("output.weight", shape.n_vocab, width, _LOGIT_STD * width**-0.5)
    yield _norm("output_norm", width)
    layer = _mamba_layer if shape.architecture == "mamba" else _attention_layer
    for i_layer in range(shape.n_layer):
        yield from layer(shape, f"blk.{i_layer}")


def _attention_layer(shape: Shape, block: str) -> Iterator[_Tensor]:
    """Queries and keys are larger than usual, so that attention picks a few places of the context rather than
    averaging it away: outputs depend on the whole prompt.
    """
    width, n_kv, n_ff = shape.n_embd, shape.n_kv_head * shape.n_head_dim, shape.n_ff
    unit = width**-0.5
    sharp = unit * _ATTENTION_GAIN**0.5
    yield _norm(f"{block}.attn_norm", width)
    yield _Tensor(f"{block}.attn_q.weight", width, width, sharp)
    yield _Tensor(f"{block}.attn_k.weight", n_kv, width, sharp)
    yield _Tensor(f"{block}.attn_v.weight", n_kv, width, unit)
    yield _Tensor(f"{block}.attn_output.weight", width, width, unit)
    yield _norm(f"{block}.ffn_norm", width)
    yield _Tensor(f"{block}.ffn_gate.weight", n_ff, width, unit)
    yield _Tensor(f"{block}.ffn_up.weight", n_ff, width, unit)
    yield _Tensor(f"{block}.ffn_down.weight", width, n_ff, n_ff**-0.5)


def _mamba_layer(shape: Shape, block: str) -> Iterator[_Tensor]:
    """Its own width is `n_ff`; what is small or decides on decay is float32. Source: src/models/mamba.cpp."""
    width, inner, n_rank, n_state = shape.n_embd, shape.n_ff, shape.n_rank, shape.n_state
    yield _norm(f"{block}.attn_norm", width)
    yield _Tensor(f"{block}.ssm_in.weight", 2 * inner, width, _ATTENTION_GAIN * width**-0.5)
    yield _Tensor(f"{block}.ssm_conv1d.weight", inner, _N_CONV, _N_CONV**-0.5, is_plain=True)
    yield _Tensor(f"{block}.ssm_conv1d.bias", 0, inner, 0.0)
    yield _Tensor(
        f"{block}.ssm_x.weight", n_rank + 2 * n_state, inner, _ATTENTION_GAIN * inner**-0.5
    )
    yield _Tensor(f"{block}.ssm_dt.weight", inner, n_rank, n_rank**-0.5, is_plain=True)
    yield _Tensor(f"{block}.ssm_dt.bias", 0, inner, 0.0, mean=_DT_BIAS)
    yield _Tensor(f"{block}.ssm_a", inner, n_state, _DECAY_STD, mean=-1.0, is_plain=True)
    yield _Tensor(f"{block}.ssm_d", 0, inner, 0.0, mean=1.0)
    yield _Tensor(f"{block}.ssm_out.weight", width, inner, inner**-0.5)


def _norm(name: str, width: int) -> _Tensor:
    return _Tensor(f"{name}.weight", 0, width, 0.0, mean=1.0)


def _declare(gguf: ModuleType, writer: GGUFWriter, tensor: _Tensor, type: str) -> None:
    if tensor.n_rows == 0:
        n = tensor.n_columns
        writer.add_tensor_info(tensor.name, (n,), np.dtype(np.float32), 4 * n)
        return
    kind = _kind_of(gguf, tensor, type)
    shape = gguf.quant_shape_to_byte_shape((tensor.n_rows, tensor.n_columns), kind)
    n_bytes = shape[0] * shape[1]
    writer.add_tensor_info(tensor.name, shape, np.dtype(np.uint8), n_bytes, raw_dtype=kind)


def _kind_of(gguf: ModuleType, tensor: _Tensor, type: str) -> Any:
    return gguf.GGMLQuantizationType["F32" if tensor.is_plain else type.upper()]


def _weights(gguf: ModuleType, tensor: _Tensor, type: str, seed: int) -> npt.NDArray[np.generic]:
    """Return one tensor, `(n_rows, bytes of a row)` uint8; each has a generator of its own."""
    if tensor.n_rows == 0:
        return np.full(tensor.n_columns, tensor.mean, np.float32)
    rng = np.random.default_rng([seed, zlib.crc32(tensor.name.encode())])
    kind = _kind_of(gguf, tensor, type)
    out = np.empty(
        gguf.quant_shape_to_byte_shape((tensor.n_rows, tensor.n_columns), kind), np.uint8
    )
    for start in range(0, tensor.n_rows, _ROWS_AT_ONCE):
        n = min(_ROWS_AT_ONCE, tensor.n_rows - start)
        block = rng.standard_normal((n, tensor.n_columns), dtype=np.float32)
        block = block * np.float32(tensor.std) + np.float32(tensor.mean)
        if tensor.name == "output.weight" and start == 0:
            block[_BYTE_ROWS] *= np.float32(_BYTE_NORM)
        out[start : start + n] = gguf.quants.quantize(block, kind).view(np.uint8)
    return out


_ROWS_AT_ONCE = 8192  # bounds the memory of a large vocabulary's float32 weights
_BYTE_ROWS = slice(len(CONTROL_TOKENS), len(CONTROL_TOKENS) + 256)


SHAPES: Mapping[str, Shape] = {
    "test": Shape(2, 64, 2, 1, 128, 1024, "q8_0"),
    "exact": Shape(6, 384, 6, 2, 1024, 4096, "q8_0"),
    "tiny": Shape(4, 256, 4, 2, 768, 32_000, "q8_0"),
    "small": Shape(12, 768, 12, 4, 2048, 151_936, "q8_0"),
    "mamba": Shape(2, 64, 1, 1, 128, 1024, "q8_0", architecture="mamba"),
}
"""`test` and `mamba` run in milliseconds, `exact` shows rounding differences, `tiny` and `small` are for speed."""
