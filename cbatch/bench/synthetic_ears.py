"""Random encoders of sound: Whisper with Ultravox's projector, in a file of a few megabytes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

_N_EMBD, _N_LAYER, _N_HEAD, _N_FF = 64, 2, 2, 128
_N_MEL, _N_FRAMES = 16, 1500
"""Bands of a spectrogram, and frames of half a minute behind the convolutions, which libmtmd fills up with silence."""
_N_STACK = 50
"""Frames of a row: a half minute has 30 rows."""


TYPE = "ultravox"
"""By which llama.cpp knows the projector."""

SIZES = {
    "embedding_length": _N_EMBD,
    "attention.head_count": _N_HEAD,
    "feed_forward_length": _N_FF,
    "block_count": _N_LAYER,
    "num_mel_bins": _N_MEL,
    "projector.stack_factor": _N_STACK,
}
"""Sizes of the encoder. Source: llama.cpp, tools/mtmd/clip-impl.h."""


def ear_tensors(random: np.random.Generator, n_embd: int) -> Iterator[tuple[str, NDArray[Any]]]:
    """Yield the weights by name. Source: llama.cpp, tools/mtmd/clip.cpp, load_tensors, and models/whisper-enc.cpp."""

    def matrix(*shape: int, scale: float | None = None) -> NDArray[np.float32]:
        factor = shape[-1] ** -0.5 if scale is None else scale
        return (random.standard_normal(shape) * factor).astype(np.float32)

    def norm(name: str) -> Iterator[tuple[str, NDArray[np.float32]]]:
        yield f"{name}.weight", np.ones(_N_EMBD, np.float32)
        yield f"{name}.bias", np.zeros(_N_EMBD, np.float32)

    for i, n_in in ((1, _N_MEL), (2, _N_EMBD)):
        # ggml's convolution takes halves
        yield f"a.conv1d.{i}.weight", matrix(_N_EMBD, n_in, 3, scale=n_in**-0.5).astype(np.float16)
        yield f"a.conv1d.{i}.bias", np.zeros((_N_EMBD, 1), np.float32)
    yield "a.position_embd.weight", matrix(_N_FRAMES, _N_EMBD, scale=0.3)
    yield from norm("a.post_ln")
    for i in range(_N_LAYER):
        layer = f"a.blk.{i}"
        for name in ("attn_q", "attn_k", "attn_v", "attn_out"):
            yield f"{layer}.{name}.weight", matrix(_N_EMBD, _N_EMBD)
            if name != "attn_k":
                yield f"{layer}.{name}.bias", np.zeros(_N_EMBD, np.float32)
        yield from norm(f"{layer}.ln1")
        yield from norm(f"{layer}.ln2")
        for name, n_out, n_in in (("ffn_up", _N_FF, _N_EMBD), ("ffn_down", _N_EMBD, _N_FF)):
            yield f"{layer}.{name}.weight", matrix(n_out, n_in)
            yield f"{layer}.{name}.bias", np.zeros(n_out, np.float32)
    yield "mm.a.norm_pre.weight", np.ones(_N_EMBD * _N_STACK, np.float32)
    yield "mm.a.mlp.1.weight", matrix(2 * n_embd, _N_EMBD * _N_STACK)
    yield "mm.a.norm_mid.weight", np.ones(n_embd, np.float32)
    yield "mm.a.mlp.2.weight", matrix(n_embd, n_embd)
