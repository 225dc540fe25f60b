"""What a recorder is told of a step."""

from __future__ import annotations

from itertools import pairwise, repeat
from typing import TYPE_CHECKING

from cbatch.core.plan import FREE
from cbatch.core.stats import StepRecord, StepRow
from cbatch.runtime.choices import display_id

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import TypeAlias

    from cbatch.core.batcher import MultiRequestBatcher
    from cbatch.core.driver import SequenceDriver
    from cbatch.core.plan import Chunk, GrammarStep, StepPlan, StepResult

    Seen: TypeAlias = tuple[tuple[StepRow, ...], int]
    """The rows of a run and the cells in use."""

UNSEEN: Seen = ((), 0)
"""What there is where nobody records."""


def seen_in(plan: StepPlan, result: StepResult, batcher: MultiRequestBatcher) -> Seen:
    """Return what a record tells of the sequences in a run: before it is applied, for then they may be gone."""
    tokens = result.tokens or repeat(())  # a step that failed may have none
    rows = (
        _row(chunk, driver, sampled, result.guided.get(chunk.slot, FREE))
        for chunk, sampled in zip(plan.chunks, tokens, strict=False)
        if (driver := batcher.running[chunk.slot]) is not None
    )
    return tuple(rows), batcher.ledger.n_used


def _row(
    chunk: Chunk, driver: SequenceDriver, sampled: Sequence[int], guidance: GrammarStep
) -> StepRow:
    n_known = max(driver.n_prompt, driver.n_reached)
    return StepRow(
        slot=chunk.slot,
        id=display_id(driver.request.id),
        n_tokens=len(chunk.tokens),
        n_prefill=max(0, min(len(chunk.tokens), n_known - chunk.start)),
        n_sampled=len(sampled) + len(guidance.forced),
    )


def record_of(
    plan: StepPlan, result: StepResult, n_waiting: int, times: tuple[float, ...], seen: Seen
) -> StepRecord:
    """Return the record of a step; `times` is when it began and when each of its phases ended."""
    phases = [end - start for start, end in pairwise(times)]
    return StepRecord(
        start_s=times[0],
        n_rows=len(plan.chunks),
        n_steps=result.n_steps,
        n_tokens=sum(len(c.tokens) for c in plan.chunks),
        n_waiting=n_waiting,
        code=result.code,
        admit_s=phases[0],
        build_s=phases[1],
        run_s=phases[2],
        decode_s=result.decode_s,
        sample_s=result.sample_s,
        apply_s=phases[3],
        deliver_s=phases[4],
        rows=seen[0],
        first_s=result.first_s,
        n_cells=seen[1],
    )
