"""Sampling in plain numpy: the oracle that the native library must match token for token.

The definition stands in `native/sample.h`; here it is written for the reader, not for speed.
"""

from __future__ import annotations

import ctypes
import math
import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from cbatch.backend.native import LlamaApi
from cbatch.core.plan import BROKEN_ROW, Binding, Chunk, StepPlan, StepResult
from cbatch.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from cbatch.options import Sampling

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


def sample_row(logits: Logits, sampling: Sampling, i_output: int) -> int:
    """Return the token that `sampling` chooses from one row, or `BROKEN_ROW`.

    Args:
        logits: (n_vocab,) float32, read only.
        sampling: how to choose.
        i_output: which output of its sequence the token is, from 0; keys the generator.
    """
    top = logits.max()
    if not np.isfinite(top):
        return BROKEN_ROW
    if sampling.temperature == 0.0:
        return int(np.flatnonzero(logits == top)[0])
    ids = np.sort(kept_ids(logits, sampling))
    cumulative = np.cumsum(weights(logits[ids], top, sampling.temperature))
    r = random_bits(sampling.seed, i_output, sampling.i_choice) * int(cumulative[-1]) >> 64
    return int(ids[np.searchsorted(cumulative, np.uint64(r), side="right")])


def kept_ids(logits: Logits, sampling: Sampling) -> Ids:
    """Return the ids that top_k, top_p and min_p leave, the most probable first."""
    ids = np.argsort(-logits, kind="stable")
    if sampling.top_k > 0:
        ids = ids[: sampling.top_k]
    top = logits[ids[0]]
    if sampling.top_p < 1.0:
        ids = ids[: _prefix_length(weights(logits[ids], top, 1.0), sampling.top_p)]
    if sampling.min_p > 0.0:
        ids = ids[logits[ids].astype(np.float64) >= float(top) + math.log(sampling.min_p)]
    return ids


def _prefix_length(mass: Weights, top_p: float) -> int:
    cumulative = np.cumsum(mass)
    share = int(top_p * 2.0**32)
    needed = max(1, -(-int(cumulative[-1]) * share >> 32))
    return int(np.searchsorted(cumulative, np.uint64(needed), side="left")) + 1


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


def random_bits(seed: int, i_output: int, i_choice: int) -> int:
    """Return the 64 random bits of one draw."""
    counter = (i_output % 2**32, i_choice % 2**32, 0, 0)
    words = philox(counter, (seed % 2**32, seed >> 32))
    return words[0] | words[1] << 32


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
        self._interrupted = threading.Event()

    def bind(self, binding: Binding) -> None:
        """Say how a slot is sampled from now on.

        Raises:
            PlanError: the slot or a sampling value is out of range.
        """
        s = binding.sampling
        in_range = 0 <= binding.slot < self._n_slots and binding.n_prompt >= 0
        sane = 0 <= s.temperature < math.inf and 0 <= s.top_p <= 1 and 0 <= s.min_p <= 1
        if not in_range or not sane or s.top_k < 0 or s.i_choice < 0:
            raise PlanError(f"a value out of range: {binding!r}")
        self._bindings[binding.slot] = binding

    def run(self, chunks: Sequence[Chunk], n_steps: int = 1) -> StepResult:
        """Do up to `n_steps` steps; see `NativeStepper.run`."""
        self._check(chunks, n_steps)
        begin = time.perf_counter()
        tokens: list[list[int]] = [[] for _ in chunks]
        n_done, code, decode_s, first_s = 0, 0, 0.0, 0.0
        for n_done in range(n_steps + 1):
            if n_done > 0 and (n_done == n_steps or self._ends(chunks, tokens, begin)):
                break
            step_begin = time.perf_counter()
            code, rows = self._decode(list(_fed(chunks, tokens)))
            decode_s += time.perf_counter() - step_begin
            if code != 0:
                break
            for i, logits in rows:
                tokens[i].append(self._sample(chunks[i], len(tokens[i]), logits))
            first_s = first_s or time.perf_counter() - begin
        sample_s = time.perf_counter() - begin - decode_s
        return StepResult(tokens, n_done, code, decode_s, sample_s, first_s)

    def interrupt(self) -> None:
        """Ask the run in flight, or else the next one, to end after its current step."""
        self._interrupted.set()

    def close(self) -> None:
        """Do nothing: nothing is held."""

    def _check(self, chunks: Sequence[Chunk], n_steps: int) -> None:
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
            and (n_steps == 1 or all(c.has_output for c in chunks))
        )
        if not ok:
            raise PlanError(f"a run breaks a rule: {StepPlan(tuple(chunks), n_steps)!r}")

    def _decode(self, chunks: Sequence[Chunk]) -> tuple[int, list[tuple[int, Logits]]]:
        """Decode one step; return llama.cpp's code and (chunk, its logits) of each output."""
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

    def _sample(self, chunk: Chunk, n_sampled: int, logits: Logits) -> int:
        binding = self._bindings[chunk.slot]
        position = chunk.start + len(chunk.tokens) + n_sampled
        return sample_row(logits, binding.sampling, position - binding.n_prompt)

    def _ends(self, chunks: Sequence[Chunk], tokens: list[list[int]], begin: float) -> bool:
        interrupted = self._interrupted.is_set()
        self._interrupted.clear()
        late = 0 < self._slice_s < time.perf_counter() - begin
        return interrupted or late or any(map(self._is_end, chunks, tokens))

    def _is_end(self, chunk: Chunk, tokens: list[int]) -> bool:
        if not tokens:
            return False
        return tokens[-1] == BROKEN_ROW or tokens[-1] in self._bindings[chunk.slot].stop_tokens


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
