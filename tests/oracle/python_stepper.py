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
from cbatch.core.plan import Binding, Slot, StepPlan, StepResult, TokenLogprobs
from cbatch.core.span import N_TARGETS_MAX, Span
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

    def shift(self, slot: Slot, n_removed: int) -> None:
        """Note that tokens have left the window of a slot."""
        binding = self._bindings[slot]
        self._histories[slot].shift(n_removed)
        self._bindings[slot] = replace(binding, output_origin=binding.output_origin - n_removed)

    are_apart = True

    def run(
        self,
        spans: Sequence[Span],
        n_steps: int = 1,
        slice_s: float = 0.0,
        masks: Masks | None = None,
        await_masks: Callable[[], object] | None = None,
        pads: Collection[Span] = (),
        changes: RowChanges | None = None,
        n_drafts: int = 0,
    ) -> StepResult:
        """Do up to `n_steps` steps, without draft tokens; see `NativeStepper.run`."""
        del n_drafts
        padded = {c.slot for c in pads}
        self._check(spans, n_steps, masks, padded, has_changes=changes is not None)
        begin = time.perf_counter()
        end_s = begin + slice_s if slice_s else math.inf
        tokens: list[list[int]] = [[] for _ in spans]
        reports: list[list[TokenLogprobs]] = [[] for _ in spans]
        scores: dict[Slot, list[TokenLogprobs]] = {}
        n_done, code, decode_s, first_s = 0, 0, 0.0, 0.0
        for n_done in range(n_steps + 1):
            if n_done > 0 and (n_done == n_steps or self._ends(spans, tokens, end_s)):
                break
            step_begin = time.perf_counter()
            fed = list(_fed(spans, tokens, n_done))
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
                token = self._sample(spans[i], len(tokens[i]), changed[i_row], mask)
                tokens[i].append(token)
                n_top = self._bindings[spans[i].slot].n_logprobs
                reports[i] += [] if n_top is None else [logprobs(logits, token, n_top)]
            first_s = first_s or time.perf_counter() - begin
        sample_s = time.perf_counter() - begin - decode_s
        found = reports if any(self._reports(c) for c in spans) else ()
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

    def _reports(self, span: Span) -> bool:
        return span.has_output and self._bindings[span.slot].n_logprobs is not None

    def interrupt(self) -> None:
        """Ask the run in flight, or else the next one, to end after its current step."""
        self._interrupted.set()

    def close(self) -> None:
        """Do nothing: nothing is held."""

    def _check(
        self,
        spans: Sequence[Span],
        n_steps: int,
        masks: Masks | None,
        padded: set[Slot],
        *,
        has_changes: bool,
    ) -> None:
        slots = [c.slot for c in spans]
        n_tokens = sum(len(c.inputs) for c in spans)
        ok = (
            spans
            and slots == sorted(set(slots))
            and slots[0] >= 0
            and slots[-1] < self._n_slots
            and n_tokens <= self._n_batch
            and n_steps >= 1
            and all(len(c.inputs) >= 1 and c.start >= 0 for c in spans)
            and all(len(c.inputs) == 1 for c in spans if c.slot in padded)
            and all(0 <= t < self._n_vocab for c in spans for t in c.inputs)
            and all(c.slot in self._bindings for c in spans if c.has_output)
            and (
                n_steps == 1
                or (
                    masks is None
                    and not has_changes
                    and all(c.has_output or c.slot in padded for c in spans)
                )
            )
            and (masks is None or len(masks) == sum(c.has_output for c in spans))
            and self._can_score(spans, n_steps)
        )
        if not ok:
            raise PlanError(f"a run breaks a rule: {StepPlan(tuple(spans), n_steps)!r}")

    def _can_score(self, spans: Sequence[Span], n_steps: int) -> bool:
        targets = [token for c in spans for token in c.targets]
        return (
            len(targets) <= (N_TARGETS_MAX if n_steps == 1 else 0)
            and all(0 <= token < self._n_vocab for token in targets)
            and all(len(c.targets) <= len(c.inputs) - c.has_output for c in spans)
            and all(0 <= self._n_top(c) <= N_TOP_MAX for c in spans if c.targets)
        )

    def _decode(
        self, spans: Sequence[Span], padded: set[Slot]
    ) -> tuple[int, list[tuple[int, int, Logits]]]:
        """Decode one step; return llama.cpp's code and (span, token in it, its logits) of each output."""
        for span in spans:
            if span.slot in self._histories and span.slot not in padded:
                self._histories[span.slot].feed(span)
        rows = list(_rows(spans))
        unsampled = set(padded)
        if self._has_silent_rows:
            unsampled |= {c.slot for c in spans if len(c.inputs) == 1}
        code = int(self._api.decode(self._ctx, _batch(spans, rows, unsampled)))
        if code != 0:
            return code, []
        wanted = [(i, j, n) for n, (i, j) in enumerate(rows) if _has_logits(spans[i], j)]
        if not wanted and self._api.synchronize is not None:
            self._api.synchronize(self._ctx)
        return code, [(i, j, self._logits(n)) for i, j, n in wanted]

    def _logits(self, i_token: int) -> Logits:
        row = self._api.get_logits_ith(self._ctx, i_token)
        if not row:
            return np.full(1, np.nan, dtype=np.float32)
        return self._row_at(row)

    def _sample(self, span: Span, n_sampled: int, logits: Logits, mask: Mask | None) -> int:
        binding = self._bindings[span.slot]
        i_output = span.start + len(span.inputs) + n_sampled - binding.output_origin
        history = self._histories[span.slot].tokens
        return sample_row(logits, binding.sampling, i_output, history, mask)

    def _scores(
        self, spans: Sequence[Span], rows: Sequence[tuple[int, int, Logits]]
    ) -> dict[Slot, list[TokenLogprobs]]:
        """Return what is reported of each target, by slots."""
        found: dict[Slot, list[TokenLogprobs]] = {c.slot: [] for c in spans if c.targets}
        for i, j, logits in rows:
            span = spans[i]
            if j < len(span.targets):
                found[span.slot].append(logprobs(logits, span.targets[j], self._n_top(span)))
        return found

    def _n_top(self, span: Span) -> int:
        binding = self._bindings.get(span.slot)
        return binding.n_target_top if binding else 0

    def _ends(self, spans: Sequence[Span], tokens: list[list[int]], end_s: float) -> bool:
        interrupted = self._interrupted.is_set()
        self._interrupted.clear()
        is_late = time.perf_counter() > end_s
        return interrupted or is_late or any(map(self._is_end, spans, tokens))

    def _is_end(self, span: Span, tokens: list[int]) -> bool:
        if not tokens:
            return False
        return tokens[-1] < 0 or tokens[-1] in self._bindings[span.slot].stop_tokens


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


def _fed(spans: Sequence[Span], tokens: list[list[int]], n_done: int) -> Iterator[Span]:
    """Yield the next step's spans: each the token sampled last, or a pad row; before the first step itself."""
    for span, sampled in zip(spans, tokens, strict=True):
        if sampled:
            start = span.start + len(span.inputs) + len(sampled) - 1
            yield Span(span.slot, start, sampled[-1:], has_output=True)
        else:
            yield replace(span, start=span.start + n_done, inputs=[0] if n_done else span.inputs)


def _rows(spans: Sequence[Span]) -> Iterator[tuple[int, int]]:
    """Yield (span, token in it) in batch order: every span's first token, then the remainders."""
    for i in range(len(spans)):
        yield i, 0
    for i, span in enumerate(spans):
        for j in range(1, len(span.inputs)):
            yield i, j


def _is_output(span: Span, j: int) -> bool:
    return span.has_output and j == len(span.inputs) - 1


def _has_logits(span: Span, j: int) -> bool:
    return _is_output(span, j) or j < len(span.targets)


def _batch(spans: Sequence[Span], rows: Sequence[tuple[int, int]], padded: set[Slot]) -> Any:
    """Return a `llama_batch` that keeps its own arrays alive."""
    from cbatch.backend.bindings import llama_cpp

    n = len(rows)
    ids = [ctypes.c_int32(spans[i].slot) for i, _ in rows]
    arrays = (
        (ctypes.c_int32 * n)(*[spans[i].inputs[j] for i, j in rows]),
        None,
        (ctypes.c_int32 * n)(*[spans[i].start + j for i, j in rows]),
        (ctypes.c_int32 * n)(*[1] * n),
        (ctypes.POINTER(ctypes.c_int32) * n)(*[ctypes.pointer(slot) for slot in ids]),
        (ctypes.c_int8 * n)(
            *[_has_logits(spans[i], j) or spans[i].slot in padded for i, j in rows]
        ),
    )
    return llama_cpp.llama_batch(n, *arrays)
