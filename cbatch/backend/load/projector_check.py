"""A projector's file looked at before llama.cpp reads it: libmtmd checks no lengths, and some sizes end the process.

A file that is cut off in its last tensor is taken, and the rest of the tensor is whatever was in memory. So lengths are
checked here; what libmtmd asserts is tried in a separate process.
"""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from cbatch.backend.bindings import llama_cpp, mtmd_bindings
from cbatch.backend.devices import ggml
from cbatch.backend.llama.gguf import AGAIN, DamagedError, Header, StoredTensor, read_header
from cbatch.backend.load.load_trial import check_load
from cbatch.errors import ModelLoadError
from cbatch.support.checks import check_path, readable

if TYPE_CHECKING:
    from collections.abc import Callable

    from cbatch.backend.llama.model import LlamaModel
    from cbatch.engine_options import EngineOptions

_WAY_OUT = "mmproj takes the file that belongs to the model, often named mmproj-….gguf"

_EYES, _EARS = "clip.has_vision_encoder", "clip.has_audio_encoder"


class ProjectorFile(NamedTuple):
    """What a projector's file has."""

    n_bytes: int
    has_eyes: bool
    """Whether it encodes pictures."""
    has_ears: bool
    """Whether it encodes sound."""


def read_projector_file(path: str) -> ProjectorFile:
    """Return what a projector's file has.

    Raises:
        ModelLoadError: there is none, it is cut off or damaged, or it has no encoder.
        IncompatibleLlamaError: libmtmd is not there.
    """
    mtmd_bindings()
    try:
        header = read_header(Path(path), _WAY_OUT)
        if header is None:
            raise DamagedError(f"is of a newer version of GGUF; {_WAY_OUT}")
        has_eyes, has_ears = (header.values.get(key) is True for key in (_EYES, _EARS))
        if not has_eyes and not has_ears:
            raise DamagedError(f"has no encoder of pictures or sound: {_WAY_OUT}")
        _check_length(header)
    except DamagedError as error:
        raise ModelLoadError(f"{readable(path)} {error}") from error
    return ProjectorFile(header.n_file, has_eyes, has_ears)


def check_projector(
    model: LlamaModel, options: EngineOptions, is_stopped: Callable[[], bool] = bool
) -> None:
    """Check a projector's file, and encode with it in a separate process. Done once on a machine.

    Raises:
        ModelLoadError: as for `read_projector_file`, or llama.cpp ended the process.
    """
    path = check_path("mmproj", options.mmproj)
    read_projector_file(path)
    check_load(Path(model.name), options, is_stopped, projector=path)


def _check_length(header: Header) -> None:
    alignment = header.values.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise DamagedError(f"is damaged: general.alignment is {alignment}; {AGAIN}")
    start = -(-header.n_header // alignment) * alignment
    n_needed = start + max((t.offset + _n_bytes(t) for t in header.tensors.values()), default=0)
    if n_needed > header.n_file:
        raise DamagedError(
            f"is cut off or damaged: it has {header.n_file:,} bytes, but its weights take {n_needed:,}; {AGAIN}"
        )


def _n_bytes(tensor: StoredTensor) -> int:
    """Return the bytes of a tensor; 0 where its type is unknown, which llama.cpp refuses."""
    if tensor.type >= llama_cpp.GGML_TYPE_COUNT:
        return 0
    n_block = ggml("ggml_blck_size", tensor.type)
    return int(prod(tensor.sizes) // max(n_block, 1) * ggml("ggml_type_size", tensor.type))
