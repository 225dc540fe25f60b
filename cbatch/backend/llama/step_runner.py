"""A plan's spans are computed, with grammar masks: in one native call, or prompts first in calls of their own."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from cbatch.backend.llama.pad_rows import N_GROUP, PadRows
from cbatch.backend.llama.row_changes import RowChanges, without_failed
from cbatch.backend.logits_processors import LogitsProcessors
from cbatch.core.plan import Binding, Slot, StepPlan, StepResult, TokenLogprobs

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cbatch.backend.llama.cheaper_widths import CheaperWidths
    from cbatch.backend.llama.grammar_matchers import GrammarMatchers
    from cbatch.backend.llama.native import NativeStepper
    from cbatch.backend.llama.picture_rows import PictureRows
    from cbatch.core.span import PromptCuts, Span
    from cbatch.errors import RequestFailedError

_CELLS_UNKNOWN = -3
"""Stands for a failure after which a slot's cells are not known. Source: include/llama.h, llama_decode."""


class StepRunner:
    """Computes and samples the spans of plans."""

    def __init__(
        self,
        make_stepper: Callable[[], tuple[NativeStepper, Any]],
        matchers: GrammarMatchers,
        pad_rows: PadRows,
        *,
        is_on_device: bool,
        cheaper_widths: CheaperWidths | None = None,
    ) -> None:
        """Take what `renew` calls for a stepper and its `llama_context *`, what fills steps, and whether a device
        computes: then masks are made meanwhile.

        Last, what fills steps that need no shape where that is faster; None where it must not.
        """
        self._make_stepper, self._matchers, self._pad_rows = make_stepper, matchers, pad_rows
        self._cheaper_widths = cheaper_widths
        self._is_on_device = is_on_device
        self.pictures: PictureRows | None = None
        """What computes rows of pictures; None where there are none."""
        self._processors = LogitsProcessors()
        self.renew()

    def renew(self) -> None:
        """Go on with a new context: every slot is unbound."""
        self._stepper, self._ctx = self._make_stepper()
        self.last_chunks: Sequence[Span] = ()
        """What the last call of the stepper computed, pad rows included."""

    def use(self, ctx: Any) -> None:
        """Compute in another `llama_context` of the same model from now on; what is bound stays."""
        self._ctx = ctx
        self._stepper.use(ctypes.cast(ctx, ctypes.c_void_p))

    def set_threads(self, n_threads: int) -> None:
        """Sample with so many threads from now on."""
        self._stepper.set_threads(n_threads)

    def bind(self, bindings: Sequence[Binding]) -> None:
        """Say how slots are sampled from now on, and what their output must match."""
        for binding in bindings:
            self._stepper.bind(binding)
            self._matchers.bind(binding)
            self._processors.bind(binding)

    def shift(self, shifts: Sequence[tuple[Slot, int, int]]) -> None:
        """Note which tokens have left the windows of slots; see `StepPlan.shifts`."""
        for slot, _, n_removed in shifts:
            self._stepper.shift(slot, n_removed)

    def run(
        self,
        plan: StepPlan,
        undo: Callable[[Sequence[Span]], bool],
        *,
        cuts: PromptCuts,
        is_apart: bool = False,
        are_apart: bool = True,
    ) -> StepResult:
        """Compute and sample a plan's spans; `follow` tells what grammars make of the result.

        Args:
            plan: its moves are done, its slots bound.
            undo: takes back the cells of spans that were computed; False where that is impossible.
            cuts: where prompts are cut; where there are rules, the shape of a computation must not depend on company.
            is_apart: llama.cpp computes prompts of several lengths in several runs of the graph anyway.
            are_apart: see `NativeStepper`.
        """
        self._stepper.are_apart = are_apart
        is_exact = bool(cuts)
        parts = self.pictures.groups(plan.spans) if self.pictures is not None else ()
        if parts and not is_exact:
            return self._run_groups(plan.spans, parts, undo)
        if parts or ((is_exact or is_apart) and any(len(c.inputs) > 1 for c in plan.spans)):
            groups = _each_alone(plan.spans, cuts) if is_exact else _prompts_first(plan.spans)
            if is_exact or len(groups) > 1:
                return self._run_groups(plan.spans, groups, undo)
        if self._cheaper_widths is not None:
            return self._cheaper_widths.run(plan, self._run_padded)
        pads = self._pad_rows.beside(plan.spans) if is_exact else ()
        return self._run_padded(plan.spans, pads, plan.n_steps, plan.slice_s, plan.n_drafts)

    def follow(self, spans: Sequence[Span], result: StepResult) -> StepResult:
        """Have grammars follow the tokens of at least one step; mark the rows whose processor failed."""
        result = without_failed(spans, result)
        tokens, steps = self._matchers.follow(spans, result.tokens)
        return replace(result, tokens=tokens, grammar_steps=steps) if steps else result

    def _run_padded(
        self,
        spans: Sequence[Span],
        pads: Sequence[Span],
        n_steps: int = 1,
        slice_s: float = 0.0,
        n_drafts: int = 0,
    ) -> StepResult:
        """Run the stepper with pad rows besides, whose cells are removed again; then there are no drafts."""
        if not pads:
            return self._run(spans, pads, n_steps, slice_s, n_drafts)
        rows = sorted([*spans, *pads], key=lambda c: c.slot)
        try:
            result = self._run(rows, pads, n_steps, slice_s)
        finally:
            self._pad_rows.remove(pads)
        padded = {c.slot for c in pads}
        kept = [i for i, c in enumerate(rows) if c.slot not in padded]
        logprobs = [result.logprobs[i] for i in kept] if result.logprobs else ()
        return replace(
            result,
            tokens=[result.tokens[i] for i in kept],
            logprobs=logprobs,
            n_pad_rows=len(pads) * result.n_steps,
        )

    def _run(
        self,
        rows: Sequence[Span],
        pads: Sequence[Span],
        n_steps: int,
        slice_s: float,
        n_drafts: int = 0,
    ) -> StepResult:
        """Run the stepper; masks are made while a device computes, but before decoding where that needs the cores."""
        self.last_chunks = rows
        changed = self._processors.of(rows)
        changes = RowChanges(self._processors, changed, rows) if changed else None
        result = self._run_masked(rows, pads, n_steps, slice_s, changes, n_drafts)
        return result if changes is None else changes.told(result)

    def _run_masked(
        self,
        rows: Sequence[Span],
        pads: Sequence[Span],
        n_steps: int,
        slice_s: float,
        changes: RowChanges | None,
        n_drafts: int,
    ) -> StepResult:
        masks = self._matchers.masks(rows)
        if masks is None:
            return self._stepper.run(
                rows,
                n_steps,
                slice_s,
                pads=pads,
                changes=changes,
                n_drafts=n_drafts,
            )
        if not self._is_on_device:
            self._matchers.fill(rows)
            return self._stepper.run(rows, n_steps, slice_s, masks, pads=pads, changes=changes)
        await_masks = self._matchers.fill_meanwhile(rows)
        try:
            return self._stepper.run(rows, n_steps, slice_s, masks, await_masks, pads, changes)
        finally:
            await_masks()  # the stepper does not where decoding failed

    def _run_groups(
        self,
        spans: Sequence[Span],
        groups: Sequence[Sequence[Span]],
        undo: Callable[[Sequence[Span]], bool],
    ) -> StepResult:
        """Compute groups of spans one after another, as one step."""
        results: list[StepResult] = []
        for group in groups:
            result = self._run_group(group)
            if result.code:
                done = [c for g in groups[: len(results)] for c in g]
                if self.pictures and group[0].begins_in_picture:
                    done += [c for c in group if not self.pictures.is_in_one_batch(c)]
                return StepResult([], 0, result.code if undo(done) else _CELLS_UNKNOWN)
            results.append(result)
        return _joined(spans, groups, results)

    def _run_group(self, group: Sequence[Span]) -> StepResult:
        if self.pictures is not None and group[0].begins_in_picture:
            return self.pictures.run(self._ctx, group[0])
        pads = self._pad_rows.beside(group) if group[0].is_lone_token else ()
        return self._run_padded(group, pads)

    def interrupt(self) -> None:
        """End a run in flight after its current step. From any thread."""
        self._stepper.interrupt()

    def free(self) -> None:
        """Free the stepper, before its context is freed."""
        self._stepper.close()


def _each_alone(spans: Sequence[Span], cuts: PromptCuts) -> Sequence[Sequence[Span]]:
    """Return spans of one token together and every other span alone, so that no shape depends on company.

    Prompts that end in a row are computed before the rows, all others after them: pad rows stand beside what was
    counted of a slot.
    """
    lone: list[Span] = []
    ahead: list[Span] = []
    rows: list[Span] = []
    after: list[Span] = []
    for span in spans:
        *before, last = cuts.parts(span)
        for part in before:
            (lone if part.is_lone_token else ahead).append(part)
        (rows if last.is_lone_token else after).append(last)
    groups = [lone, *([c] for c in ahead), rows, *([c] for c in after)]
    return [group for group in groups if group]


def _prompts_first(spans: Sequence[Span]) -> Sequence[Sequence[Span]]:
    """Return the spans of prompts by their lengths, and then all others with the prompts' last tokens as rows beside.

    llama.cpp would compute a token of each span, then as many of each prompt as the shortest has, then of the next
    shortest, and so on: runs of few tokens, and wherever one prompt ends a product of its row alone with the whole
    vocabulary. Spans with targets stay as they are; so do all where the last tokens would be a run that costs more
    than it saves.
    """
    ahead: dict[int, list[Span]] = {}
    rows: list[Span] = []
    has_row = False
    for c in spans:
        tokens = c.inputs
        if len(tokens) == 1 or c.targets:
            rows.append(c)
            has_row = True
            continue
        if c.has_output:
            c, row = c.split()
            rows.append(row)
        ahead.setdefault(len(c.inputs), []).append(c)
    if rows and not has_row and len(ahead) < N_GROUP:
        return [spans]
    return [*ahead.values(), *([rows] if rows else [])]


def _joined(
    spans: Sequence[Span], groups: Sequence[Sequence[Span]], results: Sequence[StepResult]
) -> StepResult:
    """Return the results of groups that were computed one after another as that of one step.

    Of a slot that is in two of them the later has the output.
    """
    tokens: dict[Slot, list[int]] = {}
    reports: dict[Slot, Sequence[TokenLogprobs]] = {}
    scores: dict[Slot, Sequence[TokenLogprobs]] = {}
    failures: dict[Slot, RequestFailedError] = {}
    for group, result in zip(groups, results, strict=True):
        tokens.update((c.slot, t) for c, t in zip(group, result.tokens, strict=True))
        if result.logprobs:
            reports.update((c.slot, p) for c, p in zip(group, result.logprobs, strict=True))
        for slot, found in result.scores.items():
            scores[slot] = [*scores.get(slot, ()), *found]
        failures.update(result.failures)
    decode_s, sample_s = sum(r.decode_s for r in results), sum(r.sample_s for r in results)
    return StepResult(
        [tokens[c.slot] for c in spans],
        1,
        decode_s=decode_s,
        sample_s=sample_s,
        first_s=decode_s + sample_s,
        logprobs=[reports.get(c.slot, []) for c in spans] if reports else (),
        scores=scores,
        failures=failures,
        n_pad_rows=sum(r.n_pad_rows for r in results),
        n_threads=results[-1].n_threads,
    )
