"""Files of models and adapters that a bad disk or a stranger has changed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from gguf import GGUFReader

if TYPE_CHECKING:
    from pathlib import Path
    from random import Random


def damaged(data: bytes, n_header: int, rng: Random, *, is_cut: bool) -> bytes:
    """Return a file cut off somewhere, or with some bytes of its header changed."""
    result = bytearray(data)
    if is_cut:
        del result[rng.choice([rng.randrange(n_header), rng.randrange(len(data))]) :]
    else:
        for _ in range(rng.choice([1, 1, 2, 4])):
            result[rng.randrange(n_header)] = rng.choice([0, 1, 6, 128, 255, rng.randrange(256)])
    return bytes(result)


def without_numbers(model: Path, path: Path, token: int) -> Path:
    """Write a model that computes no numbers of a token, nor of what attends to it; `model` has floats."""
    path.write_bytes(model.read_bytes())
    reader = GGUFReader(path, "r+")
    next(t for t in reader.tensors if t.name == "token_embd.weight").data[token] = np.nan
    reader.data.flush()
    return path
