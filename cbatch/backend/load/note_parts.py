"""What findings about a model depend on: its file, and settings that change how it is computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

from cbatch.backend.llama.fingerprint import Parts, file_digest, is_unchanged
from cbatch.backend.load.packed import kernels
from cbatch.engine_options import EngineOptions, ScheduleOptions

_SIZES = ("parallel", "exact_slots", "n_ctx", "ctx_per_seq", "memory_mib", "n_threads")
_NO_MATTER = (
    "cache_dir",
    "cache_mib",
    "cache_media",
    "use_mmap",
    "use_mlock",
    "chat_template",
    "library",
)
_LEFT_OUT = {f.name for f in fields(ScheduleOptions)}.union(_SIZES, _NO_MATTER)


def note_parts(parts: Parts, options: EngineOptions, **sizes: object) -> Sequence[str]:
    """Return what a finding depends on, for `notes`; empty if the model's file has changed, or RPC servers compute.

    Args:
        parts: the model's files as they were before they were read.
        options: sizes, and options that change no bits, are left out.
        sizes: those on which the finding depends.
    """
    if options.rpc_servers or not is_unchanged(parts):
        return ()
    try:
        digest = file_digest(parts)
    except OSError:
        return ()
    if found := kernels(parts, options):
        sizes["kernels"] = found
    said = {f.name: getattr(options, f.name) for f in fields(options) if f.name not in _LEFT_OUT}
    return digest, *(f"{name}={value!r}" for name, value in {**said, **sizes}.items())
