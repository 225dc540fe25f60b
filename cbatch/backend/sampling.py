"""Sampling in plain numpy: the oracle that the native library must match token for token.

The definition stands in `native/sample.h`; here it is written for the reader, not for speed.
"""

from __future__ import annotations

import ctypes
import math
import threading
import time
from collections import Counter
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from cbatch.backend.history import History
from cbatch.backend.native import N_TOP_MAX, LlamaApi
from cbatch.core.plan import BROKEN_ROW, Binding, Chunk, StepPlan, StepResult, TokenLogprobs
from cbatch.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from cbatch.backend.native import Masks
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
    """Return the token that `sampling` chooses from one row, or `BROKEN_ROW`.

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
        return BROKEN_ROW
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
    limit = _repeat_limit(tokens, s.dry_breakers)
    if len(tokens) <= s.dry_allowed_length or limit < s.dry_allowed_length:
        return {}
    singles = {breaker[0] for breaker in s.dry_breakers if len(breaker) == 1}
    found: dict[int, int] = {}
    for k in range(1, len(tokens)):
        pairs = zip(tokens, tokens[k:], strict=False)
        n = min(limit, sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs)))
        token = tokens[k - 1]
        if n >= s.dry_allowed_length and token not in singles:
            found[token] = max(n, found.get(token, 0))
    return found


def _repeat_limit(tokens: Sequence[int], breakers: Sequence[Sequence[int]]) -> int:
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
    """Return what is reported of a token: log-softmax of the model's own logits, in double precision."""
    if token == BROKEN_ROW:
        return TokenLogprobs(math.nan)
    exact = logits.astype(np.float64)
    found = exact - exact.max()
    found -= math.log(np.exp(found).sum())
    best = [int(i) for i in np.argsort(-logits, kind="stable")[:n_top] if logits[i] > -np.inf]
    return TokenLogprobs(float(found[token]), tuple((i, float(found[i])) for i in best))


class PythonStepper:
    """`NativeStepper` in Python: the same methods, the same tokens, for tests and comparison."""

    def __init__(
        self,
        ctx: Any,
        *,
        n_slots: int,
        n_batch: int,
        n_vocab: int,
        n_threads: int = 1,
        slice_s: float = 0.02,
        api: LlamaApi | None = None,
    ) -> None:
        """Take what `NativeStepper` takes; `n_threads` is not used."""
        self._ctx, self._n_threads, self._slice_s = ctx, n_threads, slice_s
        self._n_slots, self._n_batch, self._n_vocab = n_slots, n_batch, n_vocab
        self._api = api or LlamaApi.of_llama_cpp()
        self._bindings: dict[int, Binding] = {}
        self._histories: dict[int, History] = {}
        self._interrupted = threading.Event()

    def bind(self, binding: Binding) -> None:
        """Say how a slot is sampled from now on.

        Raises:
            PlanError: the slot or a sampling value is out of range.
        """
        s = binding.sampling
        tokens = (*binding.history, *(token for token, _ in s.logit_bias))
        in_range = (
            0 <= binding.slot < self._n_slots
            and all(0 <= t < self._n_vocab for t in tokens)
            and 0 <= (binding.n_logprobs or 0) <= N_TOP_MAX
        )
        if not in_range or not _is_sane(s):
            raise PlanError(f"a value out of range: {binding!r}")
        self._bindings[binding.slot] = binding
        self._histories[binding.slot] = History(binding.history)

    def run(
        self, chunks: Sequence[Chunk], n_steps: int = 1, masks: Masks | None = None
    ) -> StepResult:
        """Do up to `n_steps` steps; see `NativeStepper.run`."""
        self._check(chunks, n_steps, masks)
        begin = time.perf_counter()
        tokens: list[list[int]] = [[] for _ in chunks]
        reports: list[list[TokenLogprobs]] = [[] for _ in chunks]
        n_done, code, decode_s, first_s = 0, 0, 0.0, 0.0
        for n_done in range(n_steps + 1):
            if n_done > 0 and (n_done == n_steps or self._ends(chunks, tokens, begin)):
                break
            step_begin = time.perf_counter()
            code, rows = self._decode(list(_fed(chunks, tokens)))
            decode_s += time.perf_counter() - step_begin
            if code != 0:
                break
            for i_row, (i, logits) in enumerate(sorted(rows, key=lambda row: row[0])):
                mask = None if masks is None else masks[i_row]
                token = self._sample(chunks[i], len(tokens[i]), logits, mask)
                tokens[i].append(token)
                n_top = self._bindings[chunks[i].slot].n_logprobs
                reports[i] += [] if n_top is None else [logprobs(logits, token, n_top)]
            first_s = first_s or time.perf_counter() - begin
        sample_s = time.perf_counter() - begin - decode_s
        found = reports if any(self._reports(c) for c in chunks) else ()
        return StepResult(tokens, n_done, code, decode_s, sample_s, first_s, logprobs=found)

    def _reports(self, chunk: Chunk) -> bool:
        return chunk.has_output and self._bindings[chunk.slot].n_logprobs is not None

    def interrupt(self) -> None:
        """Ask the run in flight, or else the next one, to end after its current step."""
        self._interrupted.set()

    def close(self) -> None:
        """Do nothing: nothing is held."""

    def _check(self, chunks: Sequence[Chunk], n_steps: int, masks: Masks | None) -> None:
        slots = [c.slot for c in chunks]
        n_tokens = sum(len(c.tokens) for c in chunks)
        ok = (
            chunks
            and slots == sorted(set(slots))
            and slots[0] >= 0
            and slots[-1] < self._n_slots
            and n_tokens <= self._n_batch
            and n_steps >= 1
            and all(len(c.tokens) >= 1 and c.start >= 0 for c in chunks)
            and all(0 <= t < self._n_vocab for c in chunks for t in c.tokens)
            and all(c.slot in self._bindings for c in chunks if c.has_output)
            and (n_steps == 1 or (masks is None and all(c.has_output for c in chunks)))
            and (masks is None or len(masks) == sum(c.has_output for c in chunks))
        )
        if not ok:
            raise PlanError(f"a run breaks a rule: {StepPlan(tuple(chunks), n_steps)!r}")

    def _decode(self, chunks: Sequence[Chunk]) -> tuple[int, list[tuple[int, Logits]]]:
        """Decode one step; return llama.cpp's code and (chunk, its logits) of each output."""
        for chunk in chunks:
            if chunk.slot in self._histories:
                self._histories[chunk.slot].feed(chunk)
        rows = list(_rows(chunks))
        code = int(self._api.decode(self._ctx, _batch(chunks, rows)))
        if code != 0:
            return code, []
        wanted = [(i, n) for n, (i, j) in enumerate(rows) if _is_output(chunks[i], j)]
        return code, [(i, self._logits(n)) for i, n in wanted]

    def _logits(self, i_token: int) -> Logits:
        row = self._api.get_logits_ith(self._ctx, i_token)
        if not row:
            return np.full(1, np.nan, dtype=np.float32)
        floats = ctypes.cast(row, ctypes.POINTER(ctypes.c_float))
        return np.ctypeslib.as_array(floats, (self._n_vocab,)).copy()

    def _sample(self, chunk: Chunk, n_sampled: int, logits: Logits, mask: Mask | None) -> int:
        binding = self._bindings[chunk.slot]
        i_output = chunk.start + len(chunk.tokens) + n_sampled - binding.n_prompt
        history = self._histories[chunk.slot].tokens
        return sample_row(logits, binding.sampling, i_output, history, mask)

    def _ends(self, chunks: Sequence[Chunk], tokens: list[list[int]], begin: float) -> bool:
        interrupted = self._interrupted.is_set()
        self._interrupted.clear()
        late = 0 < self._slice_s < time.perf_counter() - begin
        return interrupted or late or any(map(self._is_end, chunks, tokens))

    def _is_end(self, chunk: Chunk, tokens: list[int]) -> bool:
        if not tokens:
            return False
        return tokens[-1] == BROKEN_ROW or tokens[-1] in self._bindings[chunk.slot].stop_tokens


def _is_sane(s: Sampling) -> bool:
    shares = (s.top_p, s.min_p, s.typical_p, s.xtc_probability, s.xtc_threshold)
    counts = (s.top_k, s.i_choice, s.repeat_last_n, s.dry_penalty_last_n, s.dry_allowed_length)
    finite = (s.top_n_sigma, s.presence_penalty, s.frequency_penalty, s.dry_base)
    return (
        0 <= s.temperature < math.inf
        and all(0 <= share <= 1 for share in shares)
        and min(counts) >= 0
        and all(map(math.isfinite, finite))
        and 0 < s.repeat_penalty < math.inf
        and 0 <= s.dry_multiplier < math.inf
        and all(bias < math.inf for _, bias in s.logit_bias)
    )


def _fed(chunks: Sequence[Chunk], tokens: list[list[int]]) -> Iterator[Chunk]:
    """Yield the next step's chunks: each the token sampled last; before the first step itself."""
    for chunk, sampled in zip(chunks, tokens, strict=True):
        if sampled:
            start = chunk.start + len(chunk.tokens) + len(sampled) - 1
            yield Chunk(chunk.slot, start, sampled[-1:], has_output=True)
        else:
            yield chunk


def _rows(chunks: Sequence[Chunk]) -> Iterator[tuple[int, int]]:
    """Yield (chunk, token in it) in batch order: every chunk's first token, then the remainders."""
    for i in range(len(chunks)):
        yield i, 0
    for i, chunk in enumerate(chunks):
        for j in range(1, len(chunk.tokens)):
            yield i, j


def _is_output(chunk: Chunk, j: int) -> bool:
    return chunk.has_output and j == len(chunk.tokens) - 1


def _batch(chunks: Sequence[Chunk], rows: Sequence[tuple[int, int]]) -> Any:
    """Return a `llama_batch` that keeps its own arrays alive."""
    import llama_cpp

    n = len(rows)
    ids = [ctypes.c_int32(chunks[i].slot) for i, _ in rows]
    arrays = (
        (ctypes.c_int32 * n)(*[chunks[i].tokens[j] for i, j in rows]),
        None,
        (ctypes.c_int32 * n)(*[chunks[i].start + j for i, j in rows]),
        (ctypes.c_int32 * n)(*[1] * n),
        (ctypes.POINTER(ctypes.c_int32) * n)(*[ctypes.pointer(slot) for slot in ids]),
        (ctypes.c_int8 * n)(*[_is_output(chunks[i], j) for i, j in rows]),
    )
    return llama_cpp.llama_batch(n, *arrays)
