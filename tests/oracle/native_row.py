"""One row of logits, sampled by the code that a native stepper samples with."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from cbatch.backend.llama.library import library
from cbatch.backend.llama.native import ISA_BEST
from cbatch.backend.llama.structs import NativeLogprobs, as_logprobs, as_native
from cbatch.errors import PlanError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from cbatch.core.plan import Binding, TokenLogprobs

_NO_TOKEN = -2
"""Source: native/include/cbatch.h, CBATCH_NO_TOKEN."""

_int, _pointer = ctypes.c_int32, ctypes.c_void_p
_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "cbatch_sample_row": (
        _int,
        [_pointer, _int, _pointer, _pointer, _int, _int, _pointer, _pointer],
    ),
    "cbatch_isa_best": (_int, []),
    "cbatch_weights": (_int, [_pointer, _int, ctypes.c_double, _int, _pointer]),
    "cbatch_philox": (None, [_pointer, _pointer, _pointer]),
}
"""What the library has for tests alone. Source: native/include/cbatch.h."""


def row_library() -> Any:
    """Return the native library, those functions typed that it has for tests alone."""
    lib = library()
    for name, (restype, argtypes) in _SIGNATURES.items():
        function = getattr(lib, name)
        function.restype, function.argtypes = restype, argtypes
    return lib


@dataclass(frozen=True, slots=True)
class SampledRow:
    """What became of one row: the token, its log-probabilities if asked for, and the weights it was drawn by."""

    token: int
    logprobs: TokenLogprobs | None
    kept: NDArray[np.uint64]
    """(n_vocab,) uint64, 0 where a token could not have been drawn."""


def sample_row(
    logits: Any,
    binding: Binding,
    i_output: int = 0,
    *,
    mask: Any = None,
    isa: int = ISA_BEST,
) -> SampledRow:
    """Return what a stepper would make of one row; a broken one has no weights.

    Args:
        logits: (n_vocab,) float32 numpy array, contiguous; as before afterwards.
        binding: how to choose, and what was there.
        i_output: which output of its sequence the token is, from 0.
        mask: (n_words,) uint32, or None.
        isa: instruction set of the code to use.

    Raises:
        PlanError: a value is out of range, or this machine has not that instruction set.
    """
    try:
        native, _kept = as_native(binding)
    except (TypeError, OverflowError) as error:
        raise PlanError(f"{error}: {binding!r}") from error
    found, kept = NativeLogprobs(), np.zeros(len(logits), np.uint64)
    token: int = row_library().cbatch_sample_row(
        logits.ctypes.data,
        len(logits),
        ctypes.byref(native),
        None if mask is None else mask.ctypes.data,
        i_output,
        isa,
        ctypes.byref(found),
        kept.ctypes.data,
    )
    if token == _NO_TOKEN:
        raise PlanError(f"cannot sample {len(logits)} logits by {binding!r} with code {isa}")
    return SampledRow(token, None if binding.n_logprobs is None else as_logprobs(found), kept)
