"""The tensors of synthetic models, and the random numbers in them.

Scales keep the numbers of every layer near 1 whatever the sizes, and the logits as far apart as a trained model's.
Output weights are untied by default, because tied random models repeat one token when greedy, unless, as here, what a
token's own embedding adds to its logit is small beside what the layers add.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from cbatch.bench.synthetic_shapes import BERTS, Shape

if TYPE_CHECKING:
    from collections.abc import Iterator

    Floats = npt.NDArray[np.float32]

_LOGIT_STD = 3.0
_ATTENTION_GAIN = 4.0
_MIXING_GAIN = 0.5
_MAMBA_GAIN = 2.0
_EMBED_STD = 0.5
_POSITION_STD = 0.1  # of what positions and token types add to an embedding
_RANK_GAIN = 4.0  # scores of a reranker are some logits apart
_TIED_STD = 0.02
# Of a Mamba layer: its memory fades by 1 − softplus(_DT_BIAS) a token, to a tenth within some twenty.
_DT_BIAS = -2.0
_DECAY_STD = 0.2
N_CONV = 4
"""Source: the Mamba paper's d_conv."""
N_TOKEN_TYPES = 2
"""Source: BERT's type_vocab_size: the first and the second text of a pair; llama.cpp uses the first alone."""

_N_AT_ONCE = 2**22  # numbers; bounds the memory of a large matrix's float32 weights


@dataclass(frozen=True, slots=True)
class RandomTensor:
    """One tensor: random numbers of a normal distribution."""

    name: str
    n_rows: int
    """0 for one dimension: `n_columns` float32 values, all of them `mean`."""
    n_columns: int
    std: float
    mean: float = 0.0
    is_plain: bool = False
    """Whether it is float32 whatever the weights' type."""
    n_stacked: int = 0
    """Matrices of experts, one behind the other; 0 for a single matrix."""
    gives_logits: bool = False
    """Whether each row makes the logit of a token."""

    @property
    def n_all_rows(self) -> int:
        """Rows of all matrices, 1 for one dimension."""
        return max(self.n_rows, 1) * max(self.n_stacked, 1)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The outermost first."""
        stacked = (self.n_stacked,) if self.n_stacked else ()
        rows = (self.n_rows,) if self.n_rows else ()
        return (*stacked, *rows, self.n_columns)


def tensors_of(shape: Shape) -> Iterator[RandomTensor]:
    """Yield every tensor in the file's order."""
    if shape.architecture in BERTS:
        yield from _bert(shape)
        return
    width = shape.n_embd
    unit = width**-0.5
    is_tied = shape.tied and not shape.is_encoder
    std = _TIED_STD if is_tied else _EMBED_STD
    yield RandomTensor("token_embd.weight", shape.n_vocab, width, std, gives_logits=is_tied)
    if not (shape.tied or shape.is_encoder):
        yield RandomTensor(
            "output.weight", shape.n_vocab, width, _LOGIT_STD * unit, gives_logits=True
        )
    louder = _LOGIT_STD * unit / _TIED_STD if is_tied else 1.0
    yield _norm("output_norm", width, louder)
    if shape.pooling == "rank":  # of yes and no, as in Qwen3-Reranker
        yield RandomTensor("cls.output.weight", 2, width, unit / louder, is_plain=True)
    layer = _mamba_layer if shape.architecture == "mamba" else _attention_layer
    for i_layer in range(shape.n_layer):
        yield from layer(shape, f"blk.{i_layer}")


def _attention_layer(shape: Shape, block: str) -> Iterator[RandomTensor]:
    width = shape.n_embd
    yield _norm(f"{block}.attn_norm", width)
    yield from _attention(shape, block)
    is_gemma = shape.architecture in ("gemma-embedding", "gemma3")
    if shape.architecture == "qwen3" or is_gemma:
        yield _norm(f"{block}.attn_q_norm", shape.n_head_dim, _ATTENTION_GAIN**0.5)
        yield _norm(f"{block}.attn_k_norm", shape.n_head_dim, _ATTENTION_GAIN**0.5)
    if is_gemma:
        yield _norm(f"{block}.post_attention_norm", width)
        yield _norm(f"{block}.post_ffw_norm", width)
    elif shape.n_window:  # attention may look at nothing: a logit of 0 beside those of the keys
        yield RandomTensor(f"{block}.attn_sinks.weight", 0, shape.n_head, 0.0)
    yield _norm(f"{block}.ffn_norm", width)
    yield from _experts(shape, block) if shape.n_expert else _feed_forward(shape, block)


def _attention(shape: Shape, block: str) -> Iterator[RandomTensor]:
    """Queries and keys are larger than usual, so that attention picks a few places of the context rather than
    averaging it away, and what it finds is smaller than what a token computes by itself. Otherwise greedy outputs
    of deep models go round in short circles.
    """
    width, n_kv = shape.n_embd, shape.n_kv_head * shape.n_head_dim
    unit = width**-0.5
    sharp = unit * _ATTENTION_GAIN**0.5
    yield RandomTensor(f"{block}.attn_q.weight", width, width, sharp)
    yield RandomTensor(f"{block}.attn_k.weight", n_kv, width, sharp)
    yield RandomTensor(f"{block}.attn_v.weight", n_kv, width, unit)
    yield RandomTensor(f"{block}.attn_output.weight", width, width, _MIXING_GAIN * unit)


def _feed_forward(shape: Shape, block: str, *, has_gate: bool = True) -> Iterator[RandomTensor]:
    width, n_ff = shape.n_embd, shape.n_ff
    unit = width**-0.5
    if has_gate:
        yield RandomTensor(f"{block}.ffn_gate.weight", n_ff, width, unit)
    yield RandomTensor(f"{block}.ffn_up.weight", n_ff, width, unit)
    yield RandomTensor(f"{block}.ffn_down.weight", width, n_ff, n_ff**-0.5)


def _experts(shape: Shape, block: str) -> Iterator[RandomTensor]:
    """The router's logits are as far apart as 1, so that every expert has its share of tokens."""
    width, n_ff, n = shape.n_embd, shape.n_ff, shape.n_expert
    unit = width**-0.5
    yield RandomTensor(f"{block}.ffn_gate_inp.weight", n, width, unit, is_plain=True)
    yield RandomTensor(f"{block}.ffn_gate_exps.weight", n_ff, width, unit, n_stacked=n)
    yield RandomTensor(f"{block}.ffn_up_exps.weight", n_ff, width, unit, n_stacked=n)
    yield RandomTensor(f"{block}.ffn_down_exps.weight", width, n_ff, n_ff**-0.5, n_stacked=n)


def _bert(shape: Shape) -> Iterator[RandomTensor]:
    """Norms come behind what they normalise; biases are zeros. Source: src/models/bert.cpp."""
    width, unit, name = shape.n_embd, shape.n_embd**-0.5, shape.architecture
    yield RandomTensor("token_embd.weight", shape.n_vocab, width, _EMBED_STD)
    yield RandomTensor("token_types.weight", N_TOKEN_TYPES, width, _POSITION_STD, is_plain=True)
    if name == "bert":  # the others turn queries and keys, or subtract the distance
        yield RandomTensor("position_embd.weight", shape.n_ctx_train, width, _POSITION_STD)
    yield from _layer_norm("token_embd_norm", width)
    if shape.pooling == "rank":
        yield RandomTensor("cls.weight", width, width, unit, is_plain=True)
        yield RandomTensor("cls.bias", 0, width, 0.0)
        yield RandomTensor("cls.output.weight", 1, width, _RANK_GAIN * unit, is_plain=True)
        yield RandomTensor("cls.output.bias", 0, 1, 0.0)
    for i_layer in range(shape.n_layer):
        block = f"blk.{i_layer}"
        yield from _attention(shape, block)
        yield RandomTensor(f"{block}.attn_output.bias", 0, width, 0.0)
        yield from _layer_norm(f"{block}.attn_output_norm", width)
        yield from _feed_forward(shape, block, has_gate=name != "bert")
        yield RandomTensor(f"{block}.ffn_down.bias", 0, width, 0.0)
        yield from _layer_norm(f"{block}.layer_output_norm", width)


def _layer_norm(name: str, width: int) -> Iterator[RandomTensor]:
    yield _norm(name, width)
    yield RandomTensor(f"{name}.bias", 0, width, 0.0)


def _mamba_layer(shape: Shape, block: str) -> Iterator[RandomTensor]:
    """Its own width is `n_ff`; what is small or decides on decay is float32. Source: src/models/mamba.cpp."""
    width, inner, n_rank, n_state = shape.n_embd, shape.n_ff, shape.n_rank, shape.n_state
    yield _norm(f"{block}.attn_norm", width)
    yield RandomTensor(f"{block}.ssm_in.weight", 2 * inner, width, _MAMBA_GAIN * width**-0.5)
    yield RandomTensor(f"{block}.ssm_conv1d.weight", inner, N_CONV, N_CONV**-0.5, is_plain=True)
    yield RandomTensor(f"{block}.ssm_conv1d.bias", 0, inner, 0.0)
    yield RandomTensor(
        f"{block}.ssm_x.weight", n_rank + 2 * n_state, inner, _MAMBA_GAIN * inner**-0.5
    )
    yield RandomTensor(f"{block}.ssm_dt.weight", inner, n_rank, n_rank**-0.5, is_plain=True)
    yield RandomTensor(f"{block}.ssm_dt.bias", 0, inner, 0.0, mean=_DT_BIAS)
    yield RandomTensor(f"{block}.ssm_a", inner, n_state, _DECAY_STD, mean=-1.0, is_plain=True)
    yield RandomTensor(f"{block}.ssm_d", 0, inner, 0.0, mean=1.0)
    yield RandomTensor(f"{block}.ssm_out.weight", width, inner, inner**-0.5)


def _norm(name: str, width: int, mean: float = 1.0) -> RandomTensor:
    return RandomTensor(f"{name}.weight", 0, width, 0.0, mean=mean)


def random_rows(tensor: RandomTensor, seed: int, loudness: Floats) -> Iterator[Floats]:
    """Yield a tensor's rows, `(n, n_columns)` float32, a few at once; each tensor has a generator of its own.

    Args:
        seed: of all tensors.
        loudness: `(n_vocab,)` float32, by which the rows that give logits are multiplied.
    """
    if tensor.n_rows == 0:
        yield np.full((1, tensor.n_columns), tensor.mean, np.float32)
        return
    rng = np.random.default_rng([seed, zlib.crc32(tensor.name.encode())])
    n_at_once = max(_N_AT_ONCE // tensor.n_columns, 1)
    for start in range(0, tensor.n_all_rows, n_at_once):
        n = min(n_at_once, tensor.n_all_rows - start)
        rows = rng.standard_normal((n, tensor.n_columns), dtype=np.float32)
        rows = rows * np.float32(tensor.std) + np.float32(tensor.mean)
        if tensor.gives_logits:
            rows *= loudness[start : start + n, None]
        yield rows
