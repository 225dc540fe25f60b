"""What makes a model exact is found once: a note of it serves later loads with the same settings on this machine."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields, replace
from time import perf_counter
from typing import TYPE_CHECKING

from cbatch.backend.llama.context import available_cores
from cbatch.backend.llama.fingerprint import file_digest, model_parts
from cbatch.backend.llama.pad_rows import LAST_CHUNKS, RowShape, n_sequences
from cbatch.backend.load import notes
from cbatch.backend.load.probe import COULD_NOT_RUN
from cbatch.backend.load.row_shapes import ExactSettings, find_exact

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cbatch.backend.llama.model import LlamaModel
    from cbatch.engine_options import EngineOptions

_NAME = "exact"
_WINDOW = 1024
"""Longer windows of slots change nothing: the probe's own are shorter."""


@dataclass(frozen=True, slots=True)
class ExactFinding:
    """What makes a model exact, or why nothing does, and what it took to find out."""

    settings: ExactSettings
    probe_s: float
    """Seconds that the probe took, now or when it ran."""
    is_remembered: bool = False
    """Whether the probe ran in an earlier load."""


def exact_finding(
    model: LlamaModel, options: EngineOptions, is_stopped: Callable[[], bool] = bool
) -> ExactFinding:
    """Return what `find_exact` finds, or found when this model was loaded with these settings on this machine.

    Nothing is kept of a model that is borrowed, whose weights may not be its file's; nor with RPC servers, which may be
    other machines the next time.
    """
    depends = _depends(model, options)
    if depends and (said := notes.read(_NAME, *depends)) and (known := _read(said, options)):
        return known
    start_s = perf_counter()
    settings = find_exact(model, options, is_stopped)
    found = ExactFinding(settings, round(perf_counter() - start_s, 3))
    if depends and not settings.exactness.startswith(COULD_NOT_RUN):
        notes.write(_written(found), _NAME, *depends)
    return found


def _depends(model: LlamaModel, options: EngineOptions) -> Sequence[str]:
    """Return what a finding depends on; empty where that is not known."""
    parts = model_parts(model.name)
    if model.is_borrowed or options.rpc_servers or not parts:
        return ()
    try:
        digest = file_digest(parts)
    except OSError:
        return ()
    window = options.ctx_per_seq or (options.n_ctx or _WINDOW) // options.n_slots
    n_threads = options.n_threads or available_cores()
    same = replace(options, n_ctx=None, ctx_per_seq=min(window, _WINDOW), n_threads=n_threads)
    return digest, *(f"{field.name}={getattr(same, field.name)!r}" for field in fields(same))


def _written(found: ExactFinding) -> str:
    settings = found.settings
    said = {
        "exactness": settings.exactness,
        "flash_attn": settings.options.flash_attn,
        "least": settings.shape.least,
        "multiple": settings.shape.multiple,
        "n_last": settings.shape.n_last,
        "probe_s": found.probe_s,
    }
    return json.dumps(said)


def _read(said: str, options: EngineOptions) -> ExactFinding | None:
    """Return a finding as it was written; None where it is none."""
    try:
        match json.loads(said):
            case {
                "exactness": str(exactness),
                "flash_attn": "auto" | "on" | "off" as flash_attn,
                "least": int(least),
                "multiple": int(multiple),
                "n_last": int(n_last),
                "probe_s": float(probe_s),
            } if 1 <= multiple <= least <= n_sequences(options.n_slots) and n_last in (
                0,
                *LAST_CHUNKS,
            ):
                pass
            case _:
                return None
    except (ValueError, RecursionError):
        return None
    settings = ExactSettings(
        exactness, replace(options, flash_attn=flash_attn), RowShape(least, multiple, n_last)
    )
    return ExactFinding(settings, probe_s, is_remembered=True)
