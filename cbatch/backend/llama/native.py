"""Steps in native code."""

from __future__ import annotations

import ctypes
import math
import threading
from array import array
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from cbatch.backend.llama.library import LlamaApi, library
from cbatch.backend.llama.structs import (
    NativeDraftContext,
    NativeLogprobs,
    NativeReport,
    NativeScoring,
    NativeSizes,
    as_logprobs,
    as_native,
)
from cbatch.core.plan import Binding, DraftCounts, Slot, StepPlan, StepResult, TokenLogprobs
from cbatch.core.span import N_TARGETS_MAX, Span
from cbatch.errors import EngineClosedError, PlanError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from numpy.typing import NDArray

    from cbatch.backend.llama.row_changes import RowChanges

    Masks: TypeAlias = "Sequence[NDArray[np.uint32] | None] | NDArray[np.uint32]"

_PAD_ROW = 2
"""`has_output` of a pad row. Source: native/include/cbatch.h, CBATCH_PAD_ROW."""

_SILENT_ROW = 3
"""`has_output` of a row that is computed as others are, but not sampled. Source: native/include/cbatch.h."""

ISA_BEST = -1
"""The best instruction set that build and machine have; 0, 1, 2 are the base, AVX2, AVX-512."""

# Source: native/include/cbatch.h, return codes.
_MEANINGS = {
    1: "the table of function addresses has another layout than this library expects",
    2: "a size below 1, or an instruction set that this machine does not have",
    3: "out of memory",
    4: "slots out of range, not ascending or repeated",
    5: "a sampling value out of its range",
    6: "no span, a span without tokens, a pad row of several tokens, or a start out of range",
    7: "a token id outside the vocabulary: an input, in a history, or with a bias",
    8: "more tokens than n_batch",
    9: "n_steps below 1; or several steps with masks, with changes, or with a span without output",
    10: "an output in a slot that was never bound",
    11: "targets that do not fit their span, are too many, outside the vocabulary, or in several steps",
    12: "negative number of draft tokens, or memory from which no token can be removed",
}

_VoidFunction = ctypes.CFUNCTYPE(None)


_N_COUNTS = len(DraftCounts._fields)


class NativeStepper:
    """Runs steps of one llama context in native code, the interpreter lock released.

    One thread only, but for `interrupt`.
    """

    def __init__(
        self,
        ctx: Any,
        *,
        n_slots: int,
        n_batch: int,
        n_vocab: int,
        n_threads: int,
        has_silent_rows: bool = False,
        api: LlamaApi | None = None,
        isa: int = ISA_BEST,
    ) -> None:
        """Allocate everything that a step needs.

        Args:
            ctx: address of the `llama_context`, for `n_slots + N_TARGETS_MAX` outputs where spans have targets; must
                outlive the stepper.
            n_slots: llama.cpp's sequence ids `0 … n_slots − 1`: the slots, and those for pad rows.
            n_vocab: floats in one row of logits.
            n_threads: most threads that sample; give what decoding uses.
            has_silent_rows: compute the logits of spans of one token without output too, so that the shape of a step
                does not depend on how many rows are sampled.
            api: functions to call instead of llama-cpp-python's.
            isa: instruction set of the sampling code; all give the same tokens.

        Raises:
            IncompatibleLlamaError: the library is missing or does not fit.
            PlanError: a size is out of range.
        """
        self._lib = library()
        self._api = api or LlamaApi.of_llama_cpp()  # kept: it owns what the addresses point to
        # `interrupt`, also in a handler of a signal, against `close`
        self._lock = threading.RLock()
        self._report = NativeReport()
        self._report_at = ctypes.addressof(self._report)
        self._grow_out(0)
        self._n_out = (ctypes.c_int32 * n_slots)()
        self._n_out_at = ctypes.addressof(self._n_out)
        self.are_apart = True
        """Whether memory is apart for each slot, so that spans of several lengths are several runs of the graph. Then
        there are as many draft tokens behind each row, or none."""
        self.has_all_drafts = False
        """Whether each row gets the most draft tokens wherever there are as many, and not only where that is faster."""
        self.position: Callable[[int, int], int] | None = None
        """Gives the position of a slot's cell at an index; None where the two are the same."""
        self._reporting: set[int] = set()  # slots that report log-probabilities
        self._n_tops: dict[int, int] = {}  # alternatives of targets, by slots
        self._n_vocab, self._has_silent_rows = n_vocab, has_silent_rows
        self._drafted = (ctypes.c_int32 * (_N_COUNTS * n_slots))()
        self._drafted_at = ctypes.addressof(self._drafted)
        self._n_threads = n_threads
        table, handle = self._api.table(), ctypes.c_void_p()
        sizes = NativeSizes(n_slots, n_batch, n_vocab, n_threads, isa, N_TARGETS_MAX)
        code = self._lib.cbatch_stepper_init(
            ctypes.byref(table), ctx, ctypes.byref(sizes), ctypes.byref(handle)
        )
        if code != 0:
            given = {name: getattr(sizes, name) for name, *_ in NativeSizes._fields_}
            raise PlanError(f"{_MEANINGS[code]}: {given}")
        self._handle = handle.value

    def _grow_out(self, n: int) -> None:
        self._out = (ctypes.c_int32 * n)()
        self._out_at = ctypes.addressof(self._out)

    def use(self, ctx: Any) -> None:
        """Compute in another `llama_context` of the same sizes from now on; what is bound stays."""
        self._lib.cbatch_stepper_use(self._open(), ctx)

    def set_threads(self, n_threads: int) -> None:
        """Sample with so many threads from now on, at most those that it was made with."""
        self._lib.cbatch_stepper_set_threads(self._open(), n_threads)
        self._n_threads = n_threads

    def draft_with(self, ctx: Any, *, n_batch: int, n_window: int, n_vocab: int) -> None:
        """Draft tokens with a smaller model, too.

        Args:
            ctx: its `llama_context *`, which has the slots as sequences; nobody else computes in it. It is emptied.
            n_batch: most tokens of one call.

        Raises:
            PlanError: memory cannot be cut, or there is none for it.
        """
        context = NativeDraftContext(ctx, n_batch, n_window, n_vocab)
        code = self._lib.cbatch_stepper_draft_with(self._open(), ctypes.byref(context))
        if code != 0:
            raise PlanError(f"draft model: {_MEANINGS[code]}")

    def bind(self, binding: Binding) -> None:
        """Say how `binding.slot` is sampled from now on. Copies everything.

        Raises:
            PlanError: the slot, a sampling value or a token is out of range.
        """
        try:
            native, _kept = as_native(binding)
        except (TypeError, OverflowError, ctypes.ArgumentError) as error:
            raise PlanError(f"{error}: {binding!r}") from error
        code = self._lib.cbatch_stepper_bind(self._open(), binding.slot, ctypes.byref(native))
        if code != 0:
            raise PlanError(f"{_MEANINGS[code]}: {binding!r}")
        change = self._reporting.discard if binding.n_logprobs is None else self._reporting.add
        change(binding.slot)
        self._n_tops[binding.slot] = binding.n_target_top

    def shift(self, slot: Slot, n_removed: int) -> None:
        """Note that tokens have left the window of a slot, which stays bound.

        Raises:
            PlanError: there is no such slot.
        """
        code = self._lib.cbatch_stepper_shift(self._open(), slot, n_removed)
        if code != 0:
            raise PlanError(f"{_MEANINGS[code]}: {slot}")

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
        """Do up to `n_steps` steps, feeding each sampled token to the next.

        `StepPlan` says when a run ends early. Mutates the cells of the spans' slots. A failing
        `llama_decode` is not an exception here: it is the result's `code`.

        Args:
            spans: what to compute.
            n_steps: most steps; 1 where there are masks or changes.
            slice_s: the run ends after the first step that ends later; 0 for no limit.
            masks: (n_rows, n_words) uint32, a row for each span with an output, `n_words` of 32 tokens each; token `i`
                is allowed where bit `i % 32` of word `i // 32` is set. A sequence of rows may hold None for all tokens.
            await_masks: called once the step is decoded and before the masks are read: returns when they are written.
                Not called where decoding fails. None where they are written already.
            pads: those of the spans that are pad rows: nothing is sampled of them, and each step computes one more.
            changes: made to rows after decoding; log-probabilities are those of the unchanged rows.
            n_drafts: most draft tokens behind a row's own; see `StepPlan`.

        Raises:
            PlanError: the spans break a rule of `StepPlan`, or the masks do not fit; nothing was done.
            EngineClosedError: the stepper is closed.
        """
        n_spans = len(spans)
        if n_spans * n_steps > len(self._out):
            self._grow_out(n_spans * n_steps)
        try:
            heads, tokens = _flatten(spans, pads, has_silent_rows=self._has_silent_rows)
            if self.position is not None:
                for i, c in enumerate(spans):
                    heads[4 * i + 1] = self.position(c.slot, c.start)
            has_targets = [c for c in spans if c.targets]
            scoring = _Scoring(spans, self._n_tops) if has_targets else None
        except (TypeError, OverflowError) as error:
            raise PlanError(f"{error}: {StepPlan(tuple(spans), n_steps)!r}") from error
        mask_rows = None if masks is None else self._mask_rows(masks, spans)
        reports = self._reports(spans, n_steps)
        code = self._lib.cbatch_stepper_run(
            self._open(),
            heads.buffer_info()[0],
            n_spans,
            tokens.buffer_info()[0],
            n_steps,
            math.ceil(slice_s * 1e6),
            n_drafts,
            self.are_apart,
            self.has_all_drafts,
            mask_rows,
            None if changes is None else changes.addresses,
            self._before_sampling(await_masks if masks is not None else None, changes),
            self._out_at,
            self._n_out_at,
            self._drafted_at if n_drafts else None,
            reports,
            None if scoring is None else scoring.at,
            self._report_at,
        )
        if code != 0:
            raise PlanError(f"{_MEANINGS[code]}: {StepPlan(tuple(spans), n_steps)!r}")
        return self._result(spans, n_steps, reports, scoring)

    def _mask_rows(self, masks: Masks, spans: Sequence[Span]) -> Any:
        """Return the addresses of the masks, checked; they are read while `masks` lives."""
        n_rows, n_words = sum(c.has_output for c in spans), (self._n_vocab + 31) // 32
        if len(masks) != n_rows:
            raise PlanError(f"need a mask for each of {n_rows} rows, got {len(masks)}")
        for mask in masks:
            if mask is not None and not _is_mask(mask, n_words):
                raise PlanError(f"a mask is {n_words} contiguous uint32 words, not {mask!r}")
        return (ctypes.c_void_p * n_rows)(*(None if m is None else m.ctypes.data for m in masks))

    def _before_sampling(
        self, await_masks: Callable[[], object] | None, changes: RowChanges | None
    ) -> Any:
        if changes is None:
            return None if await_masks is None else _VoidFunction(await_masks)

        def change_and_wait() -> None:
            changes.make(self._n_vocab)
            if await_masks is not None:
                await_masks()

        return _VoidFunction(change_and_wait)

    def _reports(self, spans: Sequence[Span], n_steps: int) -> Any:
        if not self._reporting or n_steps < 1:
            return None
        is_asked = any(c.slot in self._reporting and c.has_output for c in spans)
        return (NativeLogprobs * (len(spans) * n_steps))() if is_asked else None

    def _logprobs(
        self, spans: Sequence[Span], n_steps: int, reports: Any
    ) -> list[list[TokenLogprobs]]:
        n_out = self._n_out
        return [
            [as_logprobs(reports[i * n_steps + j]) for j in range(n_out[i])]
            if c.has_output and c.slot in self._reporting
            else []
            for i, c in enumerate(spans)
        ]

    def _result(
        self, spans: Sequence[Span], n_steps: int, reports: Any, scoring: _Scoring | None
    ) -> StepResult:
        report, out, n_out = self._report, self._out, self._n_out
        if n_steps == 1 and report.n_steps:  # the usual case, twice as fast as by slices
            tokens = [[out[i]] if c.has_output else [] for i, c in enumerate(spans)]
        else:
            tokens = [
                out[i * n_steps : i * n_steps + n_out[i]] if c.has_output else []
                for i, c in enumerate(spans)
            ]
        has_drafts = any(report.n_drafts)
        return StepResult(
            tokens,
            report.n_steps,
            report.code,
            decode_s=report.decode_ns * 1e-9,
            sample_s=report.sample_ns * 1e-9,
            first_s=report.first_ns * 1e-9,
            logprobs=() if reports is None else self._logprobs(spans, n_steps, reports),
            scores={} if scoring is None or not report.n_steps else scoring.found(),
            n_drafts=tuple(report.n_drafts),
            n_accepted=tuple(report.n_accepted),
            drafted=self._counts(len(spans)) if has_drafts else (),
            n_threads=self._n_threads,
        )

    def _counts(self, n_spans: int) -> list[DraftCounts]:
        found = self._drafted[: _N_COUNTS * n_spans]
        return [DraftCounts(*found[i : i + _N_COUNTS]) for i in range(0, len(found), _N_COUNTS)]

    def interrupt(self) -> None:
        """Ask the run in flight, or else the next, to end after its current step. Any thread."""
        with self._lock:
            if self._handle is not None:
                self._lib.cbatch_stepper_interrupt(self._handle)

    def close(self) -> None:
        """Free everything; twice is harmless. Not while a run is in flight."""
        with self._lock:
            handle, self._handle = self._handle, None
        self._lib.cbatch_stepper_free(handle)

    def _open(self) -> int:
        if self._handle is None:
            raise EngineClosedError("the stepper is closed")
        return self._handle


def _flatten(
    spans: Sequence[Span], pads: Collection[Span] = (), *, has_silent_rows: bool = False
) -> tuple[array[int], array[int]]:
    """Return the spans as `cbatch_span`s (n_spans × 4 int32) and all their tokens (int32)."""
    heads: list[int] = []
    tokens: list[int] = []
    for c in spans:
        heads += (c.slot, c.start, len(c.inputs), c.has_output)
        tokens += c.inputs
    if has_silent_rows:
        for i in (i for i, c in enumerate(spans) if len(c.inputs) == 1 and not c.has_output):
            heads[4 * i + 3] = _SILENT_ROW
    if pads:
        padded = {c.slot for c in pads}
        for i in (i for i, c in enumerate(spans) if c.slot in padded):
            heads[4 * i + 3] = _PAD_ROW
    return array("i", heads), array("i", tokens)


class _Scoring:
    """The targets of spans as the native library takes them, and memory for their log-probabilities."""

    def __init__(self, spans: Sequence[Span], n_tops: Mapping[int, int]) -> None:
        self._chunks = spans
        self._n_targets = array("i", [len(c.targets) for c in spans])
        self._n_top = array("i", [n_tops.get(c.slot, 0) for c in spans])
        self._targets = array("i", [token for c in spans for token in c.targets])
        self._out = (NativeLogprobs * len(self._targets))()
        self._native = NativeScoring(
            self._n_targets.buffer_info()[0],
            self._n_top.buffer_info()[0],
            self._targets.buffer_info()[0],
            ctypes.addressof(self._out),
        )
        self.at = ctypes.addressof(self._native)

    def found(self) -> dict[Slot, list[TokenLogprobs]]:
        each = map(as_logprobs, self._out)
        return {c.slot: [next(each) for _ in c.targets] for c in self._chunks if c.targets}


def _is_mask(mask: Any, n_words: int) -> bool:
    return bool(mask.shape == (n_words,) and mask.dtype == np.uint32 and mask.flags.c_contiguous)
