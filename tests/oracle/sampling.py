"""Sampling in plain numpy: the oracle that the native library must match token for token.

The definition stands in `native/sample.h`; here it is written for the reader, not for speed.
"""

from __future__ import annotations

import math
from collections import Counter
from itertools import takewhile
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from cbatch.core.plan import BROKEN_ROW, EMPTY_ROW, TokenLogprobs
from tests.breakers import unpack

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from numpy.typing import NDArray

    from cbatch.options import Sampling

Mask = npt.NDArray[np.uint32]
Logits = npt.NDArray[np.float32]
Ids = npt.NDArray[np.intp]
Weights = npt.NDArray[np.uint64]

_LOG2_E = 1.4426950408889634
_ROUNDER = np.float32(1.5 * 2**23)  # added and taken away, it rounds to a whole number
# Source: Cephes exp2f.c, as the float32 numbers they are; the highest power first.
_EXP2 = [
    np.float32(float.fromhex(digits))
    for digits in (
        "0x1.41fbbcp-13",
        "0x1.5f3e52p-10",
        "0x1.3b2d4cp-7",
        "0x1.c6aee8p-5",
        "0x1.ebfbdcp-3",
        "0x1.62e430p-1",
        "0x1p+0",
    )
]


def sample_row(
    logits: Logits,
    sampling: Sampling,
    i_output: int = 0,
    history: Sequence[int] = (),
    mask: Mask | None = None,
) -> int:
    """Return the token that `sampling` chooses from one row, or `BROKEN_ROW` or `EMPTY_ROW`.

    Args:
        logits: (n_vocab,) float32, read only.
        sampling: how to choose.
        i_output: which output of its sequence the token is, from 0; keys the generator.
        history: the sequence's tokens so far, which penalties and DRY see.
        mask: (n_words,) uint32, or None: which tokens are allowed.
    """
    logits = edited(masked(logits, mask), sampling, history)
    top = logits.max()
    if not np.isfinite(top):
        return EMPTY_ROW if top == -np.inf else BROKEN_ROW
    if sampling.temperature == 0.0:
        return int(np.flatnonzero(logits == top)[0])
    ids = np.sort(kept_ids(logits, sampling, i_output))
    cumulative = np.cumsum(weights(logits[ids], logits[ids].max(), sampling.temperature))
    r = random_bits(sampling, i_output) * int(cumulative[-1]) >> 64
    return int(ids[np.searchsorted(cumulative, np.uint64(r), side="right")])


# ---- before any filter ----


def masked(logits: Logits, mask: Mask | None) -> Logits:
    """Return the logits, −∞ where the mask does not allow a token; a NaN stays."""
    if mask is None:
        return logits
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[: len(logits)].astype(bool)
    return np.where(bits | np.isnan(logits), logits, np.float32(-np.inf))


def edited(logits: Logits, sampling: Sampling, history: Sequence[int]) -> Logits:
    """Return the logits after bias, penalties and DRY, every operation in float32 as in llama.cpp."""
    logits = logits.copy()
    with np.errstate(over="ignore", invalid="ignore"):
        for token, bias in sampling.logit_bias:
            logits[token] += np.float32(bias)
        _penalise(logits, sampling, history)
        for token, n_repeated in _repeats(sampling, history).items():
            logits[token] -= _dry_penalty(sampling, n_repeated)
    return logits


def _penalise(logits: Logits, s: Sampling, history: Sequence[int]) -> None:
    repeat, present, frequent = map(
        np.float32, (s.repeat_penalty, s.presence_penalty, s.frequency_penalty)
    )
    is_on = repeat != 1 or present != 0 or frequent != 0
    for token, count in Counter(_newest(history, s.repeat_last_n if is_on else 0)).items():
        logit = logits[token]
        repeated = logit * repeat if logit <= 0 else logit / repeat
        logits[token] = repeated - (np.float32(count) * frequent + present)


def _newest(history: Sequence[int], n: int) -> Sequence[int]:
    return history[max(0, len(history) - n) :]


def _repeats(s: Sampling, history: Sequence[int]) -> dict[int, int]:
    """Return each token that would go on with a repetition, and the longest one: by the definition, in O(n²)."""
    tokens = _newest(history, s.dry_penalty_last_n)[::-1] if s.has_dry else ()  # the newest first
    breakers = unpack(s.dry_breakers)
    limit = _repeat_limit(tokens, breakers)
    if len(tokens) <= s.dry_allowed_length or limit < s.dry_allowed_length:
        return {}
    singles = {breaker[0] for breaker in breakers if len(breaker) == 1}
    found: dict[int, int] = {}
    for k in range(1, len(tokens)):
        pairs = zip(tokens, tokens[k:], strict=False)
        n = min(limit, sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs)))
        token = tokens[k - 1]
        if n >= s.dry_allowed_length and token not in singles:
            found[token] = max(n, found.get(token, 0))
    return found


def _repeat_limit(tokens: Sequence[int], breakers: Collection[Sequence[int]]) -> int:
    """Return how many of the newest tokens no breaker reaches into."""
    for i in range(len(tokens)):
        lengths = [
            len(b)
            for b in breakers
            if len(b) <= i + 1 and tuple(b) == tuple(tokens[i::-1][: len(b)])
        ]
        if lengths:
            return i + 1 - max(lengths)
    return len(tokens)


def _dry_penalty(s: Sampling, n_repeated: int) -> np.float32:
    base = float(np.float32(s.dry_base))
    exponent = n_repeated - s.dry_allowed_length
    if base > 1.000001:
        most = int(np.float32(88.7228391) / np.float32(math.log(base)))
        exponent = min(exponent, most) if most > 0 else exponent
    return np.float32(float(np.float32(s.dry_multiplier)) * base**exponent)


# ---- the filters ----


def kept_ids(logits: Logits, sampling: Sampling, i_output: int = 0) -> Ids:
    """Return the ids that the filters leave of edited logits, the most probable first."""
    ids = np.argsort(-logits, kind="stable")
    least = _least_in_sigmas(logits, sampling.top_n_sigma)
    if sampling.top_k > 0:
        ids = ids[: sampling.top_k]
    ids = ids[(logits[ids].astype(np.float64) >= least) & (logits[ids] > -np.inf)]
    if sampling.typical_p < 1.0:
        ids = _typical(logits, ids, sampling.typical_p)
    top = logits[ids[0]]
    if sampling.top_p < 1.0:
        ids = ids[: _prefix_length(weights(logits[ids], top, 1.0), sampling.top_p)]
    if sampling.min_p > 0.0:
        ids = ids[logits[ids].astype(np.float64) >= float(top) + math.log(sampling.min_p)]
    if _has_xtc(sampling, i_output):
        mass = weights(logits[ids], top, 1.0)
        is_top = mass >= _share_of(mass, sampling.xtc_threshold)
        is_top[np.flatnonzero(is_top)[-1:]] = False
        ids = ids[~is_top]
    return ids


def _least_in_sigmas(logits: Logits, n_sigmas: float) -> float:
    if n_sigmas <= 0:
        return -math.inf
    is_finite = logits > -np.inf
    n = float(np.count_nonzero(is_finite))
    exact = logits.astype(np.float64)
    mean = _sum(np.where(is_finite, exact, 0.0)) / n
    with np.errstate(invalid="ignore"):
        squares = np.where(is_finite, (exact - mean) * (exact - mean), 0.0)
    return float(logits.max()) - n_sigmas * math.sqrt(_sum(squares) / n)


def _sum(terms: NDArray[np.float64]) -> float:
    """Return 16 sums of every 16th term each, added up: every build of the native library rounds so."""
    rows = np.append(terms, np.zeros(-len(terms) % 16)).reshape(-1, 16)
    sums = np.add.accumulate(rows, axis=0)[-1]
    return float(np.add.accumulate(sums)[-1])


def _typical(logits: Logits, ids: Ids, typical_p: float) -> Ids:
    """Return those of `ids` that are typical, the most probable first."""
    top = logits[ids[0]]
    mass = weights(logits[ids], top, 1.0)
    terms = np.zeros(len(logits))
    terms[ids] = mass.astype(np.float64) * (float(top) - logits[ids].astype(np.float64))
    terms[ids[mass == 0]] = 0.0
    total = int(mass.sum())
    centre = float(top) - _sum(terms) / total
    with np.errstate(over="ignore"):
        distance = np.abs(centre - logits[ids].astype(np.float64)).astype(np.float32)
    order = np.lexsort((ids, distance))[: np.count_nonzero(np.isfinite(distance))]
    need = (total * int(typical_p * 2.0**32) >> 32) + 1
    n_kept = int(np.searchsorted(np.cumsum(mass[order]), np.uint64(need), side="left")) + 1
    return ids[np.sort(order[:n_kept])]


def _prefix_length(mass: Weights, top_p: float) -> int:
    need = _share_of(mass, top_p)
    return int(np.searchsorted(np.cumsum(mass), np.uint64(need), side="left")) + 1


def _share_of(mass: Weights, share: float) -> int:
    """Return a share of all mass, rounded up, at least 1."""
    return max(1, -(-int(mass.sum()) * int(share * 2.0**32) >> 32))


def _has_xtc(sampling: Sampling, i_output: int) -> bool:
    if sampling.xtc_threshold > 0.5:
        return False
    words = _words(sampling, i_output, stream=1)
    return words[0] < int(sampling.xtc_probability * 2.0**32)


def weights(logits: Logits, top: np.float32, temperature: float) -> Weights:
    """Return floor(2³² · exp((logits − top) / temperature)) as (n,) uint64; for `top` it is 2³².

    Every operation is one float32 operation, in the order in which the native library does it.
    """
    scale = np.float32(min(max(_LOG2_E / temperature, 1e-30), 1e30))
    with np.errstate(over="ignore"):
        x = np.maximum((logits - top) * scale, np.float32(-33))
    n = (x + _ROUNDER) - _ROUNDER
    f = x - n
    p = np.full_like(f, _EXP2[0])
    for coefficient in _EXP2[1:]:
        p = p * f + coefficient
    fixed = (p * np.float32(2**30)).astype(np.int64)
    whole: Weights = ((fixed << 2) >> (-n).astype(np.int64)).astype(np.uint64)
    return whole


def random_bits(sampling: Sampling, i_output: int) -> int:
    """Return the 64 random bits of one draw."""
    words = _words(sampling, i_output, stream=0)
    return words[0] | words[1] << 32


def _words(s: Sampling, i_output: int, stream: int) -> tuple[int, int, int, int]:
    counter = (i_output % 2**32, s.i_choice % 2**32, stream, 0)
    return philox(counter, (s.seed % 2**32, s.seed >> 32))


def philox(counter: Sequence[int], key: Sequence[int]) -> tuple[int, int, int, int]:
    """Return Philox4x32-10 of a counter of four 32-bit words and a key of two.

    Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", 2011.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        a, b = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (
            (b >> 32) ^ c1 ^ k0,
            b % 2**32,
            (a >> 32) ^ c3 ^ k1,
            a % 2**32,
        )
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return c0, c1, c2, c3


def logprobs(logits: Logits, token: int, n_top: int) -> TokenLogprobs:
    """Return what is reported of a token, sampled or given: log-softmax of the model's own logits, in double precision.

    Args:
        logits: (n_vocab,) float32, read only.
        token: its id, or what stands for one.
        n_top: how many alternatives to report.
    """
    if token < 0 or not np.isfinite(logits.max()):
        return TokenLogprobs(math.nan)
    exact = logits.astype(np.float64)
    found = exact - exact.max()
    found -= math.log(np.exp(found).sum())
    best = [int(i) for i in np.argsort(-logits, kind="stable")[:n_top] if logits[i] > -np.inf]
    return TokenLogprobs(float(found[token]), tuple((i, float(found[i])) for i in best))
