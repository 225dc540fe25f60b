"""The network in PyTorch: llama.cpp's "llama" architecture as a function of named weights.

A weight has the name and the layout that it has in the GGUF file, so exporting is copying. There, a query's and a
key's numbers turn with their position in pairs of neighbours.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F  # noqa: N812

from cbatch.models.recipe.export import NORM_EPS, ROPE_BASE, weight_sizes

if TYPE_CHECKING:
    from torch import Tensor

    from cbatch.bench.synthetic_shapes import Shape

    Weights = dict[str, Tensor]

_EMBED_STD = 0.02


def new_weights(shape: Shape, seed: int) -> Weights:
    """Return fresh float32 weights by name; a block adds nothing at first."""
    rng = torch.Generator().manual_seed(seed)
    return {
        name: _new_weight(name, size, rng).requires_grad_()
        for name, size in weight_sizes(shape).items()
    }


def _new_weight(name: str, size: tuple[int, ...], rng: torch.Generator) -> Tensor:
    if len(size) == 1:
        return torch.ones(size)
    if name.endswith(("attn_output.weight", "ffn_down.weight")):
        return torch.zeros(size)
    std = _EMBED_STD if name == "token_embd.weight" else size[1] ** -0.5
    return torch.randn(size, generator=rng) * std


def halved(weights: Weights) -> Weights:
    """Return the matrices in bfloat16 to compute with; gradients reach the originals."""
    return {name: w.to(torch.bfloat16) if w.dim() == 2 else w for name, w in weights.items()}


def hidden(weights: Weights, shape: Shape, tokens: Tensor) -> Tensor:
    """Return what the output matrix reads.

    Args:
        weights: by name; matrices in the type to compute in.
        shape: their sizes.
        tokens: (n_rows, n_tokens) int64; each row starts at position 0.

    Returns:
        (n_rows, n_tokens, n_embd), normed.
    """
    x = F.embedding(tokens, weights["token_embd.weight"])
    angles = _angles(tokens.shape[1], shape.n_head_dim, x.dtype)
    mask = torch.full((tokens.shape[1],) * 2, -torch.inf, dtype=x.dtype).triu(1)
    for i in range(shape.n_layer):
        start = f"blk.{i}."
        block = {n.removeprefix(start): w for n, w in weights.items() if n.startswith(start)}
        normed = _norm(x, block["attn_norm.weight"])
        x = x + _attention(block, shape.n_head_dim, normed, angles, mask)
        x = x + _feed_forward(block, _norm(x, block["ffn_norm.weight"]))
    return _norm(x, weights["output_norm.weight"])


def logits(weights: Weights, states: Tensor) -> Tensor:
    """Return the logits of what `hidden` returned, (…, n_vocab) float32."""
    return F.linear(states, weights["token_embd.weight"]).float()


def _norm(x: Tensor, scale: Tensor) -> Tensor:
    return F.rms_norm(x, scale.shape, scale.to(x.dtype), NORM_EPS)


def _attention(
    block: Weights, n_head_dim: int, x: Tensor, angles: tuple[Tensor, Tensor], mask: Tensor
) -> Tensor:
    """Attend in plain steps: at these sizes PyTorch's fused attention is slower on a CPU."""
    query = _heads(x, _parted(block["attn_q.weight"], n_head_dim), n_head_dim)
    key = _heads(x, _parted(block["attn_k.weight"], n_head_dim), n_head_dim)
    value = _heads(x, block["attn_v.weight"], n_head_dim)
    n_sharing = query.shape[2] // key.shape[2]
    query = (_turn(query, angles) * n_head_dim**-0.5).transpose(1, 2)
    key = _turn(key, angles).repeat_interleave(n_sharing, 2).transpose(1, 2)
    value = value.repeat_interleave(n_sharing, 2).transpose(1, 2)
    mixed = (query @ key.transpose(2, 3) + mask).softmax(-1) @ value
    return F.linear(mixed.transpose(1, 2).flatten(2), block["attn_output.weight"])


def _heads(x: Tensor, weight: Tensor, n_head_dim: int) -> Tensor:
    """Return (n_rows, n_tokens, n_heads, n_head_dim)."""
    return F.linear(x, weight).unflatten(-1, (-1, n_head_dim))


def _parted(weight: Tensor, n_head_dim: int) -> Tensor:
    """Return a matrix whose heads have the first of every pair before all the seconds.

    Products of queries and keys stay the same, and halves turn four times as fast as neighbours.
    """
    return weight.unflatten(0, (-1, n_head_dim // 2, 2)).transpose(1, 2).reshape(weight.shape)


def _feed_forward(block: Weights, x: Tensor) -> Tensor:
    gate, up = F.linear(x, block["ffn_gate.weight"]), F.linear(x, block["ffn_up.weight"])
    return F.linear(F.silu(gate) * up, block["ffn_down.weight"])


def _angles(n_tokens: int, n_head_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return for `_turn` cosines and signed sines, each (n_tokens, 1, n_head_dim)."""
    rates = ROPE_BASE ** (-torch.arange(0, n_head_dim, 2) / n_head_dim)
    turns = torch.outer(torch.arange(n_tokens), rates)[:, None, :]
    cos, sin = turns.cos(), turns.sin()
    return torch.cat((cos, cos), -1).to(dtype), torch.cat((-sin, sin), -1).to(dtype)


def _turn(x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate each pair by its position's angle; x is (…, n_tokens, n_heads, n_head_dim), in halves."""
    cos, sin = angles
    return x * cos + x.roll(x.shape[-1] // 2, -1) * sin
