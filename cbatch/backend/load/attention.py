"""Whether a model is faster with flash attention on this machine: tried when the model is loaded.

llama.cpp's flash attention for the CPU goes cell by cell where a sequence has few new tokens, as in decoding, and works
in tiles for prompts. Without it both are matrix products, through a buffer as wide as a window. Which is faster
depends on model, processor and build, so a trial computes the same steps both ways, in turn. Flash attention is
llama.cpp's default, and is turned off only if nearly every round shows a clear gain.

A note keeps the result for all processes of this machine. It is valid for long only if a second trial, in a later
load, has the same result: so what a trial found on a busy machine is soon put right.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from math import sqrt
from statistics import median

from cbatch.backend.bindings import llama_cpp
from cbatch.backend.devices import free_on_devices
from cbatch.backend.llama.context import DEFAULT_WINDOW
from cbatch.backend.llama.model import LlamaModel
from cbatch.backend.load import notes
from cbatch.backend.load.attention_trial import TrialRound, TrialShape, rounds
from cbatch.engine_options import EngineOptions
from cbatch.errors import CBatchError

GAIN, LEAST = 1.05, 0.95
"""Time with flash attention over time without, from which a round counts for turning it off: least average, and least
of either kind of steps (rows of many lengths, long rows). Our choice: other decisions lose less."""

_LEAD_OFF, _LEAD_ON, _N_ROUNDS_MOST = 4, -2, 9
"""A trial ends when rounds with a gain, less those without, reach one of the first two: off, or on. After the most
rounds it ends with on. With 5 % of noise a round and no true gain, one trial in 800 turns flash attention off."""

_MOST_S = 0.5
"""Longest round, in seconds, with which a trial goes on: a first round costs about as much as loading the model."""

_LEAST_CPU = 0.7
"""CPU time over wall time below which other programs disturbed a trial. Source: on 2 cores 0.97; 0.85 if steps take
3 ms; 0.5 if another program takes a core."""

_DAY_S = 24 * 3600.0
_CLEAR_S, _UNCLEAR_S, _SOON_S = 30 * _DAY_S, _DAY_S, 60.0
"""Seconds that a note is valid: if two trials agreed and all rounds of the second did, if some rounds did not, and if
there is no second trial yet, or other programs disturbed it. Within the last one all workers of an engine load. Our
choice."""

_N_BUFFER_MAX = 2**28
"""Bytes of scores (heads × rows × cells, f32) that llama.cpp may have to hold without flash attention."""

_NAME = "attention"


@dataclass(frozen=True, slots=True)
class AttentionFinding:
    """What a trial found."""

    is_off: bool
    made_s: float
    """When, in seconds since 1970."""
    due_s: float
    """When the trial is to be repeated."""
    rounds: tuple[TrialRound, ...] = ()
    """Empty if the model is too slow for a trial or other programs disturbed it."""

    def is_due(self, now_s: float) -> bool:
        """Whether to repeat the trial: its note has expired, or the clock was wrong."""
        return not now_s < self.due_s <= now_s + _CLEAR_S

    def after(self, earlier: AttentionFinding | None) -> AttentionFinding:
        """Return the finding, to be tried again soon unless an earlier trial has found the same."""
        is_first = earlier is None or not earlier.rounds or earlier.is_off != self.is_off
        return replace(self, due_s=self.made_s + _SOON_S) if self.rounds and is_first else self

    def __str__(self) -> str:
        if not self.rounds:
            return "llama.cpp's default; not measured, because steps are slow or other programs were busy"
        ratios = sorted(g if self.is_off else 1 / g for g in map(_gain, self.rounds))
        other = "with" if self.is_off else "without"
        day = time.strftime("%Y-%m-%d", time.gmtime(self.made_s))
        return (
            f"measured with this model on {day}: {median(ratios):.2f} × as fast as {other}, "
            f"{ratios[0]:.2f}–{ratios[-1]:.2f} in {len(ratios)} rounds"
        )


def settle_attention(model: LlamaModel, options: EngineOptions) -> EngineOptions:
    """Return the options, with flash attention off if it is "auto" and this model is faster without.

    llama.cpp's default holds on devices, with `exact` (its probe decides), in one pool (where every row without flash
    attention looks at all cells), for sliding windows and states, and for wide windows.
    """
    if options.flash_attn != "auto" or options.exact or not is_better_off(model, options):
        return options
    return replace(options, flash_attn="off")


def is_better_off(model: LlamaModel, options: EngineOptions) -> bool:
    """Whether a context of these settings may do without flash attention and is faster then."""
    found = find_attention(model, options)
    return found is not None and found.is_off


def why_attention(model: LlamaModel, options: EngineOptions) -> str:
    """Return why flash attention is on or off with these options, without a trial; "" if a probe decides."""
    if options.flash_attn != "auto":
        return "as asked for"
    if options.exact:
        return ""
    if not _may_be_off(model, options):
        return "llama.cpp's default"
    found = _noted(*_depends(model, options))
    return (
        "llama.cpp's default; loading the model measures whether off is faster"
        if found is None
        else str(found)
    )


def find_attention(
    model: LlamaModel, options: EngineOptions, clock: Callable[[], float] = time.time
) -> AttentionFinding | None:
    """Return the result of a trial now or in an earlier load; None if there is no trial, or no note of one.

    All processes of this machine must use the same result, so there is no trial if no note can be written, and a note
    that another process has written meanwhile is used.
    """
    if not _may_be_off(model, options):
        return None
    depends = _depends(model, options)
    known = _noted(*depends)
    if known is not None and not known.is_due(clock()):
        return known
    if not model.has_weights or not notes.can_write():
        return known
    now_s = clock()
    try:
        with closing(rounds(model, TrialShape.of(model, options))) as tried:
            found = judge(tried, now_s)
    except CBatchError:
        return known
    other = _noted(*depends)
    if other is not None and other != known:
        return other
    if found is None:
        found = replace(
            known or AttentionFinding(is_off=False, made_s=now_s, due_s=now_s),
            due_s=now_s + _SOON_S,
        )
    else:
        found = found.after(known)
    notes.write(json.dumps(asdict(found)), _NAME, *depends)
    return _noted(*depends)


def keep_attention(
    model: LlamaModel, options: EngineOptions, seen: Sequence[TrialRound], *, is_off: bool
) -> bool:
    """Note what whole jobs have shown, for as long as a second trial with the same result; False if no load asks.

    Args:
        model: may have no weights.
        options: settled, as for `settle_attention`.
        seen: `mixed` and `alike` are times of the jobs *mixed* and *decode*, with flash attention over without.
        is_off: whether the jobs are faster without.
    """
    is_asked = options.flash_attn == "auto" and not options.exact and _may_be_off(model, options)
    if not is_asked or not notes.can_write():
        return False
    now_s = time.time()
    found = AttentionFinding(is_off, now_s, now_s + _CLEAR_S, tuple(seen))
    notes.write(json.dumps(asdict(found)), _NAME, *_depends(model, options))
    return True


def judge(tried: Iterator[TrialRound], now_s: float) -> AttentionFinding | None:
    """Return what rounds show, taking as few as needed; None if other programs disturbed them.

    The first round only shows what a round costs.
    """
    first = next(tried, None)
    seen, lead = list[TrialRound](), 0
    if first is not None and first.wall_s <= _MOST_S:
        while _LEAD_ON < lead < _LEAD_OFF and len(seen) < _N_ROUNDS_MOST:
            seen.append(next(tried))
            lead += 1 if _has_gain(seen[-1]) else -1
    timed = seen or ([first] if first else [])
    if sum(r.cpu_s for r in timed) < _LEAST_CPU * sum(r.wall_s for r in timed):
        return None
    is_off = lead >= _LEAD_OFF
    is_clear = all(_has_gain(r) == is_off for r in seen)
    due_s = now_s + (_CLEAR_S if is_clear else _UNCLEAR_S)
    return AttentionFinding(is_off, now_s, due_s, tuple(seen))


def _gain(seen: TrialRound) -> float:
    return sqrt(seen.mixed * seen.alike)


def _has_gain(seen: TrialRound) -> bool:
    return _gain(seen) >= GAIN and min(seen.mixed, seen.alike) >= LEAST


def _may_be_off(model: LlamaModel, options: EngineOptions) -> bool:
    cells = {options.cache_type_k, options.cache_type_v}
    n_ctx = options.n_ctx and options.n_ctx // options.n_slots
    n_window = options.ctx_per_seq or n_ctx or DEFAULT_WINDOW
    n_heads = max(1, int(llama_cpp.llama_model_n_head(model.pointer)))
    n_bytes = 4 * n_heads * min(options.n_ubatch, options.n_batch) * n_window
    return (
        model.has_plain_cells
        and cells == {"f16"}
        and options.split_mode != "tensor"
        and options.kv != "unified"
        and n_bytes <= _N_BUFFER_MAX
        and not options.rpc_servers
        and not free_on_devices()
    )


def _depends(model: LlamaModel, options: EngineOptions) -> Sequence[str]:
    """Return what a finding depends on besides the machine: what a step of the model computes, and with what."""
    sizes = (
        llama_cpp.llama_model_n_embd(model.pointer),
        llama_cpp.llama_model_n_head(model.pointer),
        llama_cpp.llama_model_n_head_kv(model.pointer),
        model.n_layers,
        model.n_params,
        model.n_bytes,
    )
    shape = TrialShape.of(model, options)
    return model.architecture, model.file_type, repr(sizes), str(shape), f"{os.cpu_count()} cores"


def _noted(*depends: str) -> AttentionFinding | None:
    return notes.read_as(AttentionFinding, _NAME, *depends)
