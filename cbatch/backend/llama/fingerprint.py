"""What saved cells depend on: where any of it differs, loaded cells would be misread."""

from __future__ import annotations

import hashlib
import platform
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from cbatch.backend.bindings import build_name
from cbatch.backend.llama.context import ROPE_VALUES
from cbatch.backend.llama.gguf import DamagedError, read_header
from cbatch.core.span import PromptCuts
from cbatch.support.hub import parts_of_model

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cbatch.backend.llama.model import LlamaModel
    from cbatch.backend.llama.pad_rows import RowShape
    from cbatch.engine_options import EngineOptions

Parts: TypeAlias = "tuple[tuple[Path, int, int], ...]"
"""Each file of a model, its size, and when it was written in ns."""

_N_SAMPLES = 256
_N_SAMPLE_BYTES = 2**16
_N_HEAD_BYTES = 2**24

_OF_CELLS = ("cache_type_k", "cache_type_v")

_DEVICES = ("n_gpu_layers", "offload_kqv", "split_mode", "main_gpu", "tensor_split", "rpc_servers")
"""Engine options that choose where a model is computed: kernels of another device round differently."""

_SETTINGS = (*_OF_CELLS, "exact", "rope_scaling", *ROPE_VALUES)
"""Engine options that change the cells. Source: src/llama-kv-cache.cpp, state_read, and what it does not check."""


_N_CELLS_UNDIVIDED = 256
"""Most cells of a row that flash attention does not divide among threads.

Source: ggml/src/ggml-cpu/ops.cpp, use_split_kv_path."""


def fingerprint(digest: str, options: EngineOptions) -> dict[str, str]:
    """Return what the cells of a context depend on, by name.

    Args:
        digest: the model's, as `digest_of_loaded` found it.

    Raises:
        OSError: it is not known.
    """
    if not digest:
        raise OSError("the model's file was removed or replaced while it was loaded")
    said = {name: str(getattr(options, name)) for name in _SETTINGS}
    if options.exact:  # else only the layout of cells depends on it, and their rounding
        said["flash_attn"] = options.flash_attn
    return {"model": digest, "llama-cpp-python": build_name(), **said}


def answer_settings(
    options: EngineOptions, shape: RowShape, cuts: PromptCuts, n_window: int
) -> dict[str, str]:
    """Return the settings that change what a model answers, by name, in readable words.

    A setting that changes only the rounding, as company does, is left out, unless the options are exact.
    """
    return {
        "exact": _exactly(options, shape, cuts, n_window) if options.exact else "False",
        **{name: str(getattr(options, name)) for name in _OF_CELLS},
        "rope": _said(options, ("rope_scaling", *ROPE_VALUES)) or "the model's own",
    }


def _exactly(options: EngineOptions, shape: RowShape, cuts: PromptCuts, n_window: int) -> str:
    if cuts.is_every and cuts.most >= n_window:  # every prompt is one chunk, as with `n_ubatch`
        cuts = PromptCuts.every(max(cuts.most, options.n_ubatch))
    threads = ("n_threads",) if _divides_cells(options, shape, cuts, n_window) else ()
    devices = _said(options, ("flash_attn", *threads, *_DEVICES))
    places = f", {devices}" if devices else ""
    return f"True (pieces of {cuts}, {shape}, llama-cpp-python {build_name()}{places})"


def depends_on_threads(
    options: EngineOptions, shape: RowShape, cuts: PromptCuts, n_window: int
) -> bool:
    """Whether bits may depend on the number of threads with `exact`.

    Some of ARM's kernels take rows in pairs where a thread's part is even. Source: ggml/src/ggml-cpu/ggml-cpu.c,
    ggml_compute_forward_mul_mat_one_chunk.
    """
    is_x86 = platform.machine().lower() in {"x86_64", "amd64"}
    return not is_x86 or _divides_cells(options, shape, cuts, n_window)


def _divides_cells(
    options: EngineOptions, shape: RowShape, cuts: PromptCuts, n_window: int
) -> bool:
    """Whether flash attention may divide the cells of a single row among threads."""
    has_lone_rows = cuts.is_every or not shape.has_pads
    return options.flash_attn != "off" and has_lone_rows and n_window > _N_CELLS_UNDIVIDED


def _said(options: EngineOptions, names: Sequence[str]) -> str:
    values = ((name, getattr(options, name)) for name in names)
    return ", ".join(f"{name}={value}" for name, value in values if value is not None)


def rope_factors(model: LlamaModel, n_ctx_seq: int) -> str:
    """Return which of its two sets of factors a model uses in a context whose sequences have so many cells."""
    if model.n_window_short is None:
        return "one"
    return "long" if n_ctx_seq > model.n_window_short else "short"


def model_parts(name: str) -> Parts:
    """Return a model's files with size and time, or nothing where they are gone."""
    try:
        stats = [(part, part.stat()) for part in parts_of_model(Path(name).absolute())]
    except (OSError, ValueError):  # the second: no name of a file
        return ()
    return tuple((part, stat.st_size, stat.st_mtime_ns) for part, stat in stats)


def is_unchanged(parts: Parts) -> bool:
    """Whether files are there as `model_parts` found them."""
    return bool(parts) and parts == model_parts(str(parts[0][0]))


def digest_of_loaded(parts: Parts) -> str:
    """Return the digest of files that were just loaded, "" if they are gone or are not those of `parts`.

    Reads some 32 MiB, unless that was done before. Later the files may change: what was loaded stays the same.
    """
    try:
        found = file_digest(parts)
        return found if is_unchanged(parts) else ""
    except OSError:
        return ""


@lru_cache(maxsize=8)
def file_digest(parts: Parts) -> str:
    """Return a digest of a model's parts: their sizes, the headers, and samples spread over the weights.

    Two models that are equal in their first 16 MiB and in all 256 samples count as one.

    Args:
        parts: each file, its size, and when it was written in ns: so another file of the same name is read again.
    """
    digest = hashlib.sha256()
    for part, n_bytes, _ in parts:
        digest.update(n_bytes.to_bytes(8, "little"))
        with part.open("rb") as file:
            digest.update(file.read(_N_HEAD_BYTES))
            for i in range(_N_SAMPLES):
                file.seek(i * n_bytes // _N_SAMPLES)
                digest.update(file.read(_N_SAMPLE_BYTES))
    return f"sha256:{digest.hexdigest()}"


@lru_cache(maxsize=8)
def tensor_types(parts: Parts) -> Sequence[tuple[str, int]]:
    """Return the names and types of all tensors of a model's files; none where a file cannot be read.

    A header with a large vocabulary takes 0.1 s to read.
    """
    try:
        headers = [read_header(part, "") for part, *_ in parts]
    except DamagedError:
        return ()
    if None in headers:
        return ()
    return [(n, t.type) for header in headers if header for n, t in header.tensors.items()]
