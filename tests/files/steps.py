"""Runs as an engine would record them, with numbers small enough to check by eye."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cbatch.response import BatchResult, FinishReason, Timings, Usage
from cbatch.runtime.step_record import StepRecord, StepRow

if TYPE_CHECKING:
    from cbatch.errors import CBatchError

_NOTHING = {
    "n_waiting": 0, "code": 0, "admit_s": 0.0, "build_s": 0.0, "decode_s": 0.0, "sample_s": 0.0,
    "apply_s": 0.0, "deliver_s": 0.0,
}  # fmt: skip


def prefill(slot: int, id: str, n: int = 4, n_sampled: int = 1) -> StepRow:
    """A prompt computed in one chunk."""
    return StepRow(slot, id, n, n, n_sampled)


def decode(slot: int, id: str, n_sampled: int = 1) -> StepRow:
    """One token a step."""
    return StepRow(slot, id, 1, 0, n_sampled)


def run_of(start_s: float, *rows: StepRow, seconds: float = 1.0, **fields: Any) -> StepRecord:
    """A run whose time is all in the backend."""
    given = {**_NOTHING, "n_steps": 1, "run_s": seconds, **fields}
    n_tokens = sum(row.n_tokens for row in rows)
    return StepRecord(start_s=start_s, n_rows=len(rows), n_tokens=n_tokens, rows=rows, **given)


def result_of(
    id: str = "a",
    finish_reason: FinishReason = "stop",
    error: CBatchError | None = None,
    *,
    n_cached: int = 0,
    ttft_s: float | None = 0.5,
) -> BatchResult:
    """Four prompt tokens, three of output."""
    timings = Timings(0.25, ttft_s, 2.0, None, None)
    return BatchResult(id, "", (), finish_reason, error, Usage(4, 3, n_cached), timings, seed=0)
