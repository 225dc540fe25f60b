"""The structures that cross the border to the native library, and plans as it takes them: native/include/cbatch.h."""

from __future__ import annotations

import ctypes
from array import array
from typing import Any

from cbatch.core.plan import Binding, TokenLogprobs
from cbatch.options import Sampling
from cbatch.support.picture_tokens import without_pictures


class NativeApi(ctypes.Structure):
    """The addresses of the functions that a stepper calls: `cbatch_api`."""

    _fields_ = [
        ("size", ctypes.c_uint32),
        ("abi", ctypes.c_uint32),
        ("decode", ctypes.c_void_p),
        ("get_logits_ith", ctypes.c_void_p),
        ("gomp_parallel", ctypes.c_void_p),
        ("synchronize", ctypes.c_void_p),
        ("get_memory", ctypes.c_void_p),
        ("memory_seq_rm", ctypes.c_void_p),
        ("clock_ns", ctypes.c_void_p),
    ]


class NativeSizes(ctypes.Structure):
    """Sizes of a stepper: `cbatch_sizes`."""

    _names = ("n_slots", "n_batch", "n_vocab", "n_threads", "isa", "n_scores")
    _fields_ = [(name, ctypes.c_int32) for name in _names]


class NativeBias(ctypes.Structure):
    """What is added to the logit of a token: `cbatch_bias`."""

    _fields_ = [("token", ctypes.c_int32), ("bias", ctypes.c_float)]


class NativeSampling(ctypes.Structure):
    """How a token is chosen: `cbatch_sampling`."""

    _fields_ = [
        ("temperature", ctypes.c_double),
        ("top_p", ctypes.c_double),
        ("min_p", ctypes.c_double),
        ("typical_p", ctypes.c_double),
        ("top_n_sigma", ctypes.c_double),
        ("xtc_probability", ctypes.c_double),
        ("xtc_threshold", ctypes.c_double),
        ("seed", ctypes.c_uint64),
        ("top_k", ctypes.c_int32),
        ("i_choice", ctypes.c_int32),
        ("repeat_penalty", ctypes.c_float),
        ("presence_penalty", ctypes.c_float),
        ("frequency_penalty", ctypes.c_float),
        ("repeat_last_n", ctypes.c_int32),
        ("dry_multiplier", ctypes.c_float),
        ("dry_base", ctypes.c_float),
        ("dry_allowed_length", ctypes.c_int32),
        ("dry_last_n", ctypes.c_int32),
        ("bias", ctypes.c_void_p),
        ("breakers", ctypes.c_void_p),
        ("n_bias", ctypes.c_int32),
        ("n_breakers", ctypes.c_int32),
    ]


_SAME_NAMES = tuple(name for name, *_ in NativeSampling._fields_ if name in Sampling.__slots__)
"""Values that `Sampling` has under the same names."""


class NativeBinding(ctypes.Structure):
    """What a slot needs to know of its sequence: `cbatch_binding`."""

    _fields_ = [
        ("sampling", NativeSampling),
        ("stop", ctypes.c_void_p),
        ("history", ctypes.c_void_p),
        ("n_stop", ctypes.c_int32),
        ("n_history", ctypes.c_int32),
        ("output_origin", ctypes.c_int32),
        ("has_logprobs", ctypes.c_int32),
        ("n_top", ctypes.c_int32),
        ("has_drafts", ctypes.c_int32),
        ("draft_group", ctypes.c_int64),
    ]


_DRAFTS_AGAIN, _DRAFTS_MODEL = 1, 2
"""Sources of draft tokens. Source: native/include/cbatch.h, CBATCH_DRAFTS_AGAIN and what follows."""

N_TOP_MAX = 20
"""Most alternatives that are reported of a token. Source: native/include/cbatch.h, CBATCH_TOP_MAX."""


class NativeDraftContext(ctypes.Structure):
    """The context of a draft model: `cbatch_draft_context`."""

    _fields_ = [
        ("ctx", ctypes.c_void_p),
        ("n_batch", ctypes.c_int32),
        ("n_window", ctypes.c_int32),
        ("n_vocab", ctypes.c_int32),
    ]


class NativeLogprobs(ctypes.Structure):
    """Log-probabilities of one token: `cbatch_logprobs`."""

    _fields_ = [
        ("logprob", ctypes.c_float),
        ("n_top", ctypes.c_int32),
        ("token", ctypes.c_int32 * N_TOP_MAX),
        ("top_logprob", ctypes.c_float * N_TOP_MAX),
    ]


class NativeScoring(ctypes.Structure):
    """Given tokens whose log-probabilities are to be reported: `cbatch_scoring`."""

    _fields_ = [(name, ctypes.c_void_p) for name in ("n_targets", "n_top", "targets", "out")]


class NativeWatchParams(ctypes.Structure):
    """What looks at the computing of graphs asks and calls: `cbatch_watch_params`."""

    _fields_ = [
        ("get_name", ctypes.c_void_p),
        ("get_op", ctypes.c_void_p),
        ("last", ctypes.c_char_p),
        ("turn", ctypes.c_void_p),
    ]


class NativeReport(ctypes.Structure):
    """What a run did: `cbatch_report`."""

    _fields_ = [
        ("n_steps", ctypes.c_int32),
        ("code", ctypes.c_int32),
        ("decode_ns", ctypes.c_int64),
        ("sample_ns", ctypes.c_int64),
        ("first_ns", ctypes.c_int64),
        ("n_drafts", ctypes.c_int32 * 3),
        ("n_accepted", ctypes.c_int32 * 3),
    ]


def as_native(b: Binding) -> tuple[NativeBinding, Any]:
    """Return a binding as the native library takes it, and the arrays that must live as long."""
    s = b.sampling
    breakers = ctypes.c_char_p(s.dry_breakers)
    seen = without_pictures(b.history)
    # what is behind a picture has other places than in the history
    sources = _DRAFTS_AGAIN * b.has_drafts + _DRAFTS_MODEL * b.has_model_drafts
    drafts_from = sources if seen is b.history else 0
    n_seen = len(seen) if drafts_from else max(s.repeat_last_n, s.dry_penalty_last_n, 0)
    stop = array("i", b.stop_tokens)
    history = array("i", seen[max(0, len(seen) - n_seen) :])
    biases = (NativeBias * len(s.logit_bias))(*(NativeBias(*pair) for pair in s.logit_bias))
    sampling = NativeSampling(
        **{name: getattr(s, name) for name in _SAME_NAMES},
        dry_last_n=s.dry_penalty_last_n,
        bias=ctypes.addressof(biases),
        breakers=ctypes.cast(breakers, ctypes.c_void_p),
        n_bias=len(biases),
        n_breakers=len(s.dry_breakers) // 4,
    )
    native = NativeBinding(
        sampling=sampling,
        stop=stop.buffer_info()[0],
        history=history.buffer_info()[0],
        n_stop=len(stop),
        n_history=len(history),
        output_origin=b.output_origin,
        has_logprobs=b.n_logprobs is not None,
        n_top=b.n_logprobs or 0,
        has_drafts=drafts_from,
        draft_group=b.draft_group,
    )
    return native, (stop, history, breakers, biases)


def as_logprobs(found: NativeLogprobs) -> TokenLogprobs:
    """Return what was reported of one token."""
    n = found.n_top
    return TokenLogprobs(
        found.logprob, tuple(zip(found.token[:n], found.top_logprob[:n], strict=True))
    )
