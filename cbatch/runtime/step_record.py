"""Reports of an engine: one run and where its time went (`record_steps`), and what a slot holds (`slots`)."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import repeat
from typing import TYPE_CHECKING

from cbatch.core.plan import FREE, GrammarStep, StepResult
from cbatch.runtime.choices import display_id

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cbatch.core.driver import SequenceDriver
    from cbatch.core.scheduler import Plan
    from cbatch.core.span import Span


@dataclass(frozen=True, slots=True)
class StepRow:
    """What one sequence did in a run."""

    slot: int
    id: str
    """The request's id; `a[0]`, `a[1]`, … for the choices of request `a`."""
    n_tokens: int
    """Number of tokens of its span in the first step."""
    n_prefill: int
    """How many of these are prompt tokens or are computed again: more than 0 in prefill, 0 in decode."""
    n_sampled: int
    """New output tokens of all steps together."""


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One run and where its time went, in seconds; for `Engine.record_steps`.

    The phases follow each other: admit, build, run (decode and sample are parts of it), apply, deliver.
    """

    start_s: float
    """When its first phase began, by the engine's clock."""
    n_rows: int
    n_steps: int
    n_tokens: int
    """Tokens of the first step; each further step has one token for each row."""
    n_waiting: int
    code: int
    admit_s: float
    build_s: float
    run_s: float
    decode_s: float
    sample_s: float
    apply_s: float
    deliver_s: float
    rows: tuple[StepRow, ...] = ()
    """In ascending order of slot."""
    first_s: float = 0.0
    """The first step's part of `decode_s` and `sample_s`."""
    n_pad_rows: int = 0
    """Pad rows of all steps, which belong to no sequence and only give a step its shape; see `exact`."""
    n_cells: int = 0
    """Cells in use before the run, including those of retained prefixes."""

    @property
    def first_ran_s(self) -> float:
        """When its first step was over, by the engine's clock."""
        return min(self.start_s + self.admit_s + self.build_s + self.first_s, self.ran_s)

    @property
    def ran_s(self) -> float:
        """When the run was over and its tokens were there, by the engine's clock."""
        return self.start_s + self.admit_s + self.build_s + self.run_s

    @property
    def end_s(self) -> float:
        """When its output was delivered, by the engine's clock."""
        return self.ran_s + self.apply_s + self.deliver_s


def record_of(
    plan: Plan, result: StepResult, n_cells: int, times: tuple[float, float, float, float]
) -> StepRecord:
    """Return the record of a run, before it is applied: sequences may leave their slots then.

    `times` is when the step began, and when admitting, building and running ended. The loop adds what comes afterwards.
    """
    start, admitted, built, ran = times
    tokens = result.tokens or repeat(())  # a step that failed may have none
    rows = (
        _row(span, driver, sampled, result.grammar_steps.get(span.slot, FREE))
        for span, driver, sampled in zip(plan.step.spans, plan.rows, tokens, strict=False)
    )
    return StepRecord(
        start_s=start,
        n_rows=len(plan.step.spans),
        n_steps=result.n_steps,
        n_tokens=sum(len(c.inputs) for c in plan.step.spans),
        n_waiting=0,
        code=result.code,
        admit_s=admitted - start,
        build_s=built - admitted,
        run_s=ran - built,
        decode_s=result.decode_s,
        sample_s=result.sample_s,
        apply_s=0.0,
        deliver_s=0.0,
        rows=tuple(rows),
        first_s=result.first_s,
        n_pad_rows=result.n_pad_rows,
        n_cells=n_cells,
    )


def _row(
    span: Span, driver: SequenceDriver, sampled: Sequence[int], guidance: GrammarStep
) -> StepRow:
    n_known = max(driver.n_prompt, driver.n_reached)
    return StepRow(
        slot=span.slot,
        id=display_id(driver.request.id),
        n_tokens=len(span.inputs),
        n_prefill=max(0, min(len(span.inputs), n_known - span.start)),
        n_sampled=len(sampled) + len(guidance.forced),
    )


@dataclass(frozen=True, slots=True)
class SlotState:
    """One slot; the counters are those of its sequence, 0 where it has none."""

    slot: int
    status: str
    """`free`, `running` or `paused`. A running sequence is in prefill while `n_computed` is less than `n_prompt`."""
    n_cells: int
    """Cells of its sequence, or in a free slot, of retained prefixes."""
    id: str | None = None
    """The request's id; `a[0]`, `a[1]`, … for the choices of request `a`; None if the slot is free."""
    n_prompt: int = 0
    n_computed: int = 0
    """Tokens of prompt and output that have cells."""
    n_output: int = 0
    n_cached: int = 0
    """Prompt tokens that were reused from a cache."""
    n_left: int = 0
    """Output tokens that the sequence may still sample."""


def slot_states(residents: Sequence[tuple[SequenceDriver | None, int]]) -> list[SlotState]:
    """Return the states of slots from what `MultiRequestBatcher.residents` returned. Owner thread."""
    return [_state(slot, *resident) for slot, resident in enumerate(residents)]


def _state(slot: int, driver: SequenceDriver | None, n_cells: int) -> SlotState:
    if driver is None:
        return SlotState(slot, "free", n_cells)
    return SlotState(
        slot,
        driver.status.value,
        n_cells,
        display_id(driver.request.id),
        driver.n_prompt,
        driver.n_computed,
        driver.n_output,
        driver.n_cached,
        driver.n_left,
    )
