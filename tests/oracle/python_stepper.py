"""`NativeStepper` in plain Python, over the oracle of its sampling: for tests and comparison."""

from __future__ import annotations

import ctypes
import math
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from cbatch.backend.fake.fake_cells import History
from cbatch.backend.llama.library import LlamaApi
from cbatch.backend.llama.structs import N_TOP_MAX
from cbatch.core.plan import (
    N_TARGETS_MAX,
    Binding,
    Chunk,
    Slot,
    StepPlan,
    StepResult,
    TokenLogprobs,
)
from cbatch.errors import PlanError
from tests.oracle.sampling import logprobs, sample_row

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from cbatch.backend.llama.native import Masks
    from cbatch.backend.llama.row_changes import RowChanges
    from cbatch.options import Sampling
    from tests.oracle.sampling import Logits, Mask


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
        has_silent_rows: bool = False,
        api: LlamaApi | None = None,
    ) -> None:
        """Take what `NativeStepper` takes; `n_threads` is not used."""
        self._ctx, self._n_threads = ctx, n_threads
        self._has_silent_rows = has_silent_rows
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

    are_apart = True

    def run(
        self,
        chunks: Sequence[Chunk],
        n_steps: int = 1,
        slice_s: float = 0.0,
        masks: Masks | None = None,
        await_masks: Callable[[], object] | None = None,
        pads: Collection[Chunk] = (),
        changes: RowChanges | None = None,
        n_drafts: int = 0,
    ) -> StepResult:
        """Do up to `n_steps` steps, without draft tokens; see `NativeStepper.run`."""
        del n_drafts
        padded = {c.slot for c in pads}
        self._check(chunks, n_steps, masks, padded, has_changes=changes is not None)
        begin = time.perf_counter()
        end_s = begin + slice_s if slice_s else math.inf
        tokens: list[list[int]] = [[] for _ in chunks]
        reports: list[list[TokenLogprobs]] = [[] for _ in chunks]
        scores: dict[Slot, list[TokenLogprobs]] = {}
        n_done, code, decode_s, first_s = 0, 0, 0.0, 0.0
        for n_done in range(n_steps + 1):
            if n_done > 0 and (n_done == n_steps or self._ends(chunks, tokens, end_s)):
                break
            step_begin = time.perf_counter()
            fed = list(_fed(chunks, tokens, n_done))
            code, rows = self._decode(fed, padded)
            decode_s += time.perf_counter() - step_begin
            if code:
                break
            scores = self._scores(fed, rows)
            outputs = [(i, row) for i, j, row in rows if _is_output(fed[i], j)]
            outputs.sort(key=lambda row: row[0])
            changed = self._changed([row for _, row in outputs], changes)
            if await_masks is not None:
                await_masks()
            for i_row, (i, logits) in enumerate(outputs):
                mask = None if masks is None else masks[i_row]
                token = self._sample(chunks[i], len(tokens[i]), changed[i_row], mask)
                tokens[i].append(token)
                n_top = self._bindings[chunks[i].slot].n_logprobs
                reports[i] += [] if n_top is None else [logprobs(logits, token, n_top)]
            first_s = first_s or time.perf_counter() - begin
        sample_s = time.perf_counter() - begin - decode_s
        found = reports if any(self._reports(c) for c in chunks) else ()
        return StepResult(
            tokens, n_done, code, decode_s, sample_s, first_s, logprobs=found, scores=scores
        )

    def _changed(self, rows: list[Logits], changes: RowChanges | None) -> list[Logits]:
        if changes is None:
            return rows
        for i, row in enumerate(rows):
            changes.addresses[i] = row.ctypes.data if len(row) == self._n_vocab else None
        changes.make(self._n_vocab)
        return [
            row if at is None else self._row_at(at)
            for row, at in zip(rows, changes.addresses, strict=True)
        ]

    def _row_at(self, address: int) -> Logits:
        floats = ctypes.cast(address, ctypes.POINTER(ctypes.c_float))
        return np.ctypeslib.as_array(floats, (self._n_vocab,)).copy()

    def _reports(self, chunk: Chunk) -> bool:
        return chunk.has_output and self._bindings[chunk.slot].n_logprobs is not None

    def interrupt(self) -> None:
        """Ask the run in flight, or else the next one, to end after its current step."""
        self._interrupted.set()

    def close(self) -> None:
        """Do nothing: nothing is held."""

    def _check(
        self,
        chunks: Sequence[Chunk],
        n_steps: int,
        masks: Masks | None,
        padded: set[Slot],
        *,
        has_changes: bool,
    ) -> None:
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
            and all(len(c.tokens) == 1 for c in chunks if c.slot in padded)
            and all(0 <= t < self._n_vocab for c in chunks for t in c.tokens)
            and all(c.slot in self._bindings for c in chunks if c.has_output)
            and (
                n_steps == 1
                or (
                    masks is None
                    and not has_changes
                    and all(c.has_output or c.slot in padded for c in chunks)
                )
            )
            and (masks is None or len(masks) == sum(c.has_output for c in chunks))
            and self._can_score(chunks, n_steps)
        )
        if not ok:
            raise PlanError(f"a run breaks a rule: {StepPlan(tuple(chunks), n_steps)!r}")

    def _can_score(self, chunks: Sequence[Chunk], n_steps: int) -> bool:
        targets = [token for c in chunks for token in c.targets]
        return (
            len(targets) <= (N_TARGETS_MAX if n_steps == 1 else 0)
            and all(0 <= token < self._n_vocab for token in targets)
            and all(len(c.targets) <= len(c.tokens) - c.has_output for c in chunks)
            and all(0 <= self._n_top(c) <= N_TOP_MAX for c in chunks if c.targets)
        )

    def _decode(
        self, chunks: Sequence[Chunk], padded: set[Slot]
    ) -> tuple[int, list[tuple[int, int, Logits]]]:
        """Decode one step; return llama.cpp's code and (chunk, token in it, its logits) of each output."""
        for chunk in chunks:
            if chunk.slot in self._histories and chunk.slot not in padded:
                self._histories[chunk.slot].feed(chunk)
        rows = list(_rows(chunks))
        unsampled = set(padded)
        if self._has_silent_rows:
            unsampled |= {c.slot for c in chunks if len(c.tokens) == 1}
        code = int(self._api.decode(self._ctx, _batch(chunks, rows, unsampled)))
        if code != 0:
            return code, []
        wanted = [(i, j, n) for n, (i, j) in enumerate(rows) if _has_logits(chunks[i], j)]
        if not wanted and self._api.synchronize is not None:
            self._api.synchronize(self._ctx)
        return code, [(i, j, self._logits(n)) for i, j, n in wanted]

    def _logits(self, i_token: int) -> Logits:
        row = self._api.get_logits_ith(self._ctx, i_token)
        if not row:
            return np.full(1, np.nan, dtype=np.float32)
        return self._row_at(row)

    def _sample(self, chunk: Chunk, n_sampled: int, logits: Logits, mask: Mask | None) -> int:
        binding = self._bindings[chunk.slot]
        i_output = chunk.start + len(chunk.tokens) + n_sampled - binding.output_origin
        history = self._histories[chunk.slot].tokens
        return sample_row(logits, binding.sampling, i_output, history, mask)

    def _scores(
        self, chunks: Sequence[Chunk], rows: Sequence[tuple[int, int, Logits]]
    ) -> dict[Slot, list[TokenLogprobs]]:
        """Return what is reported of each target, by slots."""
        found: dict[Slot, list[TokenLogprobs]] = {c.slot: [] for c in chunks if c.targets}
        for i, j, logits in rows:
            chunk = chunks[i]
            if j < len(chunk.targets):
                found[chunk.slot].append(logprobs(logits, chunk.targets[j], self._n_top(chunk)))
        return found

    def _n_top(self, chunk: Chunk) -> int:
        binding = self._bindings.get(chunk.slot)
        return binding.n_target_top if binding else 0

    def _ends(self, chunks: Sequence[Chunk], tokens: list[list[int]], end_s: float) -> bool:
        interrupted = self._interrupted.is_set()
        self._interrupted.clear()
        is_late = time.perf_counter() > end_s
        return interrupted or is_late or any(map(self._is_end, chunks, tokens))

    def _is_end(self, chunk: Chunk, tokens: list[int]) -> bool:
        if not tokens:
            return False
        return tokens[-1] < 0 or tokens[-1] in self._bindings[chunk.slot].stop_tokens


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


def _fed(chunks: Sequence[Chunk], tokens: list[list[int]], n_done: int) -> Iterator[Chunk]:
    """Yield the next step's chunks: each the token sampled last, or a pad row; before the first step itself."""
    for chunk, sampled in zip(chunks, tokens, strict=True):
        if sampled:
            start = chunk.start + len(chunk.tokens) + len(sampled) - 1
            yield Chunk(chunk.slot, start, sampled[-1:], has_output=True)
        else:
            yield replace(chunk, start=chunk.start + n_done, tokens=[0] if n_done else chunk.tokens)


def _rows(chunks: Sequence[Chunk]) -> Iterator[tuple[int, int]]:
    """Yield (chunk, token in it) in batch order: every chunk's first token, then the remainders."""
    for i in range(len(chunks)):
        yield i, 0
    for i, chunk in enumerate(chunks):
        for j in range(1, len(chunk.tokens)):
            yield i, j


def _is_output(chunk: Chunk, j: int) -> bool:
    return chunk.has_output and j == len(chunk.tokens) - 1


def _has_logits(chunk: Chunk, j: int) -> bool:
    return _is_output(chunk, j) or j < len(chunk.targets)


def _batch(chunks: Sequence[Chunk], rows: Sequence[tuple[int, int]], padded: set[Slot]) -> Any:
    """Return a `llama_batch` that keeps its own arrays alive."""
    from cbatch.backend.bindings import llama_cpp

    n = len(rows)
    ids = [ctypes.c_int32(chunks[i].slot) for i, _ in rows]
    arrays = (
        (ctypes.c_int32 * n)(*[chunks[i].tokens[j] for i, j in rows]),
        None,
        (ctypes.c_int32 * n)(*[chunks[i].start + j for i, j in rows]),
        (ctypes.c_int32 * n)(*[1] * n),
        (ctypes.POINTER(ctypes.c_int32) * n)(*[ctypes.pointer(slot) for slot in ids]),
        (ctypes.c_int8 * n)(
            *[_has_logits(chunks[i], j) or chunks[i].slot in padded for i, j in rows]
        ),
    )
    return llama_cpp.llama_batch(n, *arrays)
