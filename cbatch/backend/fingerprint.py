"""What saved cells depend on: loaded where any of it differs, they would be read as something else."""

from __future__ import annotations

import hashlib
import os
import re
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import llama_cpp

if TYPE_CHECKING:
    from cbatch.backend.model import LlamaModel
    from cbatch.options import EngineOptions

_N_SAMPLES = 256
_N_SAMPLE_BYTES = 2**16
_N_HEAD_BYTES = 2**24

_SETTINGS = (
    "cache_type_k",
    "cache_type_v",
    "flash_attn",
    "exact",
    "rope_scaling",
    "rope_freq_base",
    "rope_freq_scale",
    "yarn_ext_factor",
    "yarn_attn_factor",
    "yarn_beta_fast",
    "yarn_beta_slow",
    "yarn_orig_ctx",
)
"""Engine options that change the cells. Source: src/llama-kv-cache.cpp, state_read, and what it does not check."""


def fingerprint(model: LlamaModel, options: EngineOptions) -> dict[str, str]:
    """Return what the cells of a context depend on, by name. Reads some 32 MiB of a model's file, the first time."""
    said = {name: str(getattr(options, name)) for name in _SETTINGS}
    return {
        "model": _digest_of(Path(model.name)),
        "llama-cpp-python": llama_cpp.__version__,
        **said,
    }


def _digest_of(path: Path) -> str:
    stat = path.stat()
    return file_digest(path, stat.st_size, stat.st_mtime_ns)


@lru_cache(maxsize=8)
def file_digest(path: Path, n_bytes: int, changed_ns: int) -> str:
    """Return a digest of a model's parts: their sizes, the headers, and samples spread over the weights.

    Two models that share a beginning of 16 MiB and each of 256 places in the weights count as one.

    Args:
        path: the first part.
        n_bytes: its size, and
        changed_ns: when it was written: another file of that name is read anew.
    """
    digest = hashlib.sha256()
    for part in _parts(path):
        n = part.stat().st_size
        digest.update(n.to_bytes(8, "little"))
        with part.open("rb") as file:
            digest.update(file.read(_N_HEAD_BYTES))
            for i in range(_N_SAMPLES):
                file.seek(i * n // _N_SAMPLES)
                digest.update(file.read(_N_SAMPLE_BYTES))
    return f"sha256:{digest.hexdigest()}"


def _parts(path: Path) -> list[Path]:
    """Return the files of a split model, or the one. Source: llama.cpp, llama_split_path: NAME-00001-of-00003.gguf."""
    match = re.fullmatch(r"(.*-)00001(-of-\d{5}\.gguf)", path.name)
    if match is None:
        return [path]
    names = sorted(os.listdir(path.parent))
    before, behind = match.groups()
    return [path.parent / n for n in names if n.startswith(before) and n.endswith(behind)]
