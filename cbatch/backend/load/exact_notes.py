"""Settings that make a model exact are found once: a note serves later loads with the same settings on this machine.

The note does not depend on how an engine is divided into replicas, that is on the threads, slots and memory of each. So
all processes of a machine compute the same bits.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from time import perf_counter
from typing import TYPE_CHECKING

from cbatch.backend.host_limits import available_cores
from cbatch.backend.llama.context import sequences_of
from cbatch.backend.llama.pad_rows import LAST_CHUNKS, RowShape, n_sequences
from cbatch.backend.load import notes
from cbatch.backend.load.note_parts import note_parts
from cbatch.backend.load.probe import COULD_NOT_RUN
from cbatch.backend.load.row_shapes import ExactSettings, confirm, find_exact
from cbatch.engine_options import BITWISE

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cbatch.backend.llama.model import LlamaModel
    from cbatch.engine_options import EngineOptions

_NAME = "exact"
_CONFIRMED = "exact-threads"
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
    other machines the next time. A finding with another number of threads is checked with this one.
    """
    depends = _depends(model, options)
    start_s = perf_counter()
    found = _known(depends, options)
    if found is None:
        settings = find_exact(model, options, is_stopped)
        found = ExactFinding(settings, round(perf_counter() - start_s, 3))
        is_found = depends and not settings.exactness.startswith(COULD_NOT_RUN)
        if is_found and (known := _known(depends, options)):  # another process was faster
            found = known
        elif is_found:
            notes.write(_written(found), _NAME, *depends)
            _tell_confirmed(found, depends, options)
    if found.settings.shape.least > sequences_of(options):
        why = (
            f"not guaranteed: only steps of {found.settings.shape.least} rows or more give the same bits, but an "
            f"engine of {options.n_slots} slots has fewer: leave replicas and exact_slots out"
        )
        return replace(found, settings=ExactSettings(why, options))
    return _confirmed(model, found, depends, is_stopped)


def _known(depends: Sequence[str], options: EngineOptions) -> ExactFinding | None:
    said = notes.read(_NAME, *depends) if depends else None
    return _read(said, options) if said else None


def _confirmed(
    model: LlamaModel,
    found: ExactFinding,
    depends: Sequence[str],
    is_stopped: Callable[[], bool],
) -> ExactFinding:
    """Return a finding; one of another process is checked first, once for each number of threads."""
    options = found.settings.options
    is_own = not found.is_remembered or found.settings.exactness != BITWISE
    if is_own or notes.read(_CONFIRMED, *_by_threads(found, depends, options)):
        return found
    start_s = perf_counter()
    exactness = confirm(model, found.settings, is_stopped)
    probe_s = round(perf_counter() - start_s, 3)
    if exactness == BITWISE:
        _tell_confirmed(found, depends, options)
        return replace(found, probe_s=probe_s, is_remembered=False)
    why = f"{exactness} (with n_threads={_n_threads(options)}; another process found it exact with its own n_threads)"
    return ExactFinding(ExactSettings(why, options), probe_s)


def _tell_confirmed(found: ExactFinding, depends: Sequence[str], options: EngineOptions) -> None:
    notes.write(BITWISE, _CONFIRMED, *_by_threads(found, depends, options))


def _by_threads(
    found: ExactFinding, depends: Sequence[str], options: EngineOptions
) -> Sequence[str]:
    shape, flash_attn = found.settings.shape, found.settings.options.flash_attn
    return *depends, f"{flash_attn} {shape!r}", f"n_threads={_n_threads(options)}"


def _n_threads(options: EngineOptions) -> int:
    return options.n_threads or available_cores()


def _depends(model: LlamaModel, options: EngineOptions) -> Sequence[str]:
    """Return what a finding depends on; empty where that is not known."""
    if model.is_borrowed:
        return ()
    window = options.ctx_per_seq or (options.n_ctx or _WINDOW) // options.n_slots
    return note_parts(model.name, options, slots=options.n_exact_slots, window=min(window, _WINDOW))


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
            } if 1 <= multiple <= least <= n_sequences(options.n_exact_slots) and n_last in (
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
