"""Settings that make a model exact are found once: a note serves later loads with the same settings on this machine.

The note does not depend on how an engine is divided into replicas, that is on the threads, slots and memory of each. So
all processes of a machine compute the same bits.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from time import perf_counter
from typing import Literal

from cbatch.backend.host_limits import available_cores
from cbatch.backend.llama.context import sequences_of
from cbatch.backend.llama.model import LlamaModel
from cbatch.backend.llama.model_tuning import Tuning
from cbatch.backend.llama.pad_rows import ANY_SHAPE, LAST_CHUNKS, RowShape, n_sequences
from cbatch.backend.load import notes
from cbatch.backend.load.note_parts import note_parts
from cbatch.backend.load.probe import COULD_NOT_RUN
from cbatch.backend.load.row_shapes import confirm, find_exact
from cbatch.engine_options import BITWISE, EngineOptions

_NAME = "exact"
_CONFIRMED = "exact-threads"
_WINDOW = 1024
"""Longer windows of slots change nothing: the probe's own are shorter."""


@dataclass(frozen=True, slots=True)
class _ExactNote:
    exactness: str
    flash_attn: Literal["auto", "on", "off"]
    least: int
    multiple: int
    n_last: int
    probe_s: float

    def fits(self, options: EngineOptions) -> bool:
        is_shape = 1 <= self.multiple <= self.least <= n_sequences(options.n_exact_slots)
        return is_shape and self.n_last in (0, *LAST_CHUNKS)


def exact_finding(
    model: LlamaModel, options: EngineOptions, is_stopped: Callable[[], bool] = bool
) -> Tuning:
    """Return what `find_exact` finds, or found when this model was loaded with these settings on this machine.

    Nothing is kept of a model that is borrowed, whose weights may not be its file's; nor with RPC servers, which may be
    other machines the next time. A finding with another number of threads is checked with this one.
    """
    depends = _depends(model, options)
    start_s = perf_counter()
    found = _known(depends, options)
    if found is None:
        found = find_exact(model, options, is_stopped)
        found = replace(found, probe_s=round(perf_counter() - start_s, 3))
        is_found = depends and not found.exactness.startswith(COULD_NOT_RUN)
        if is_found and (known := _known(depends, options)):  # another process was faster
            found = known
        elif is_found:
            notes.write(json.dumps(asdict(_noted(found))), _NAME, *depends)
            _tell_confirmed(found, depends)
    if found.shape.least > sequences_of(options):
        why = (
            f"not guaranteed: only steps of at least {found.shape.least} rows are bit-identical, but an engine of "
            f"{options.n_slots} slots computes fewer rows a step: leave replicas and exact_slots out"
        )
        return replace(found, options=options, exactness=why, shape=ANY_SHAPE)
    return _confirmed(model, found, depends, is_stopped)


def _known(depends: Sequence[str], options: EngineOptions) -> Tuning | None:
    note = notes.read_as(_ExactNote, _NAME, *depends) if depends else None
    if note is None or not note.fits(options):
        return None
    return Tuning(
        replace(options, flash_attn=note.flash_attn),
        exactness=note.exactness,
        shape=RowShape(note.least, note.multiple, note.n_last),
        probe_s=note.probe_s,
        is_remembered=True,
    )


def _confirmed(
    model: LlamaModel, found: Tuning, depends: Sequence[str], is_stopped: Callable[[], bool]
) -> Tuning:
    """Return a finding; one of another process is checked first, once for each number of threads."""
    is_own = not found.is_remembered or found.exactness != BITWISE
    if is_own or notes.read(_CONFIRMED, *_by_threads(found, depends)):
        return found
    start_s = perf_counter()
    exactness = confirm(model, found, is_stopped)
    checked = replace(found, probe_s=round(perf_counter() - start_s, 3), is_remembered=False)
    if exactness == BITWISE:
        _tell_confirmed(found, depends)
        return checked
    why = (
        f"{exactness} (with n_threads={_n_threads(found.options)}; in another process, with its own n_threads, "
        "the results were exact)"
    )
    return replace(checked, exactness=why, shape=ANY_SHAPE)


def _tell_confirmed(found: Tuning, depends: Sequence[str]) -> None:
    notes.write(BITWISE, _CONFIRMED, *_by_threads(found, depends))


def _by_threads(found: Tuning, depends: Sequence[str]) -> Sequence[str]:
    options = found.options
    return (
        *depends,
        f"{options.flash_attn} {found.shape!r}",
        f"n_threads={_n_threads(options)}",
    )


def _n_threads(options: EngineOptions) -> int:
    return options.n_threads or available_cores()


def _depends(model: LlamaModel, options: EngineOptions) -> Sequence[str]:
    """Return what a finding depends on; empty where that is not known."""
    if model.is_borrowed:
        return ()
    window = options.ctx_per_seq or (options.n_ctx or _WINDOW) // options.n_slots
    return note_parts(
        model.parts, options, slots=options.n_exact_slots, window=min(window, _WINDOW)
    )


def _noted(found: Tuning) -> _ExactNote:
    shape = found.shape
    return _ExactNote(
        found.exactness,
        found.options.flash_attn,
        shape.least,
        shape.multiple,
        shape.n_last,
        found.probe_s or 0.0,
    )
