"""Compares the next row of decoding sequences, computed in one shared step and alone; no result is kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from cbatch.core.plan import Binding, KvCapabilities, Slot, StepPlan
from cbatch.core.span import Span
from cbatch.errors import DecodeError, RequestFailedError, UnsupportedOptionError
from cbatch.options import GREEDY, AdapterSet
from cbatch.runtime.choices import display_id

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cbatch.backend import Backend
    from cbatch.core.driver import SequenceDriver

    Bind = Callable[[SequenceDriver, Slot], Binding]
    _Row = tuple[int, float]


@dataclass(frozen=True, slots=True)
class RowComparison:
    """What the model says after a sequence's last token, in a step with other sequences and alone.

    The tokens are the likeliest by the model's own logits, before any option changes them; −1 if the logits have a
    NaN.
    """

    id: str
    """The request's id; `a[0]`, `a[1]`, … for the choices of request `a`."""
    slot: int
    position: int
    """Position of the token that was computed."""
    n_rows: int
    """Number of sequences in the shared step, including this one."""
    shared_token: int
    shared_logprob: float
    single_token: int
    single_logprob: float

    @property
    def is_same_token(self) -> bool:
        """Whether both ways give the same token."""
        return self.shared_token == self.single_token

    @property
    def is_exact(self) -> bool:
        """Whether both ways give the same token, and the same bits of its log-probability."""
        return self.is_same_token and self.shared_logprob.hex() == self.single_logprob.hex()


def check_comparable(memory: KvCapabilities) -> None:
    """Raise an `UnsupportedOptionError` if computed tokens cannot be removed again."""
    if not memory.can_trim:
        reason = f"this model's memory ({memory.kind}) cannot take back a token that was computed"
        raise UnsupportedOptionError("compare_rows", reason=reason)


def check_room(memory: KvCapabilities, n_used: int, n_rows: int) -> None:
    """Raise a `RequestFailedError` where cells are too few: nobody loses any for a comparison."""
    n_free = memory.n_cells - n_used
    if n_rows > n_free:
        raise RequestFailedError(f"{n_rows} rows cannot be compared: only {n_free} cells are free")


def compare_rows(
    backend: Backend, rows: Sequence[tuple[Slot, SequenceDriver]], bind: Bind
) -> list[RowComparison]:
    """Compare sequences that decode; those with the same adapters share a step. Then every slot is as it was.

    Owner thread, between two runs. Where it raises, the slots hold anything.

    Args:
        backend: its memory can trim, and has room for one more cell a row.
        rows: what `MultiRequestBatcher.decoding` returned, or some of it.
        bind: `ContinuousBatchScheduler.binding`.

    Raises:
        RequestFailedError: a step failed.
    """
    found: list[RowComparison] = []
    for adapters in dict.fromkeys(d.request.adapters for _, d in rows):
        group = [row for row in rows if row[1].request.adapters == adapters]
        found += _compare(backend, group, adapters, bind)
    return sorted(found, key=lambda row: row.slot)


def _compare(
    backend: Backend,
    rows: Sequence[tuple[Slot, SequenceDriver]],
    adapters: AdapterSet,
    bind: Bind,
) -> list[RowComparison]:
    # with an output also where the sequence's next token is not sampled, but forced by its grammar
    spans = tuple(Span(slot, d.n_computed, d.tokens[d.n_computed :], True) for slot, d in rows)
    binds = tuple(Binding(c.slot, c.start + 1, GREEDY, (), n_logprobs=0) for c in spans)
    shared = _run(backend, StepPlan(spans, binds=binds, adapters=adapters))
    singles: list[_Row] = []
    trims = _trims(spans)
    for span in spans:
        singles += _run(backend, StepPlan((span,), trims=trims, adapters=adapters))
        trims = _trims((span,))
    own = tuple(bind(driver, slot) for slot, driver in rows)
    backend.run(StepPlan((), trims=trims, binds=own))
    return [
        RowComparison(
            display_id(driver.request.id), slot, driver.n_computed, len(rows), *in_company, *alone
        )
        for (slot, driver), in_company, alone in zip(rows, shared, singles, strict=True)
    ]


def _trims(spans: Sequence[Span]) -> tuple[tuple[Slot, int], ...]:
    """Return what takes back the cells of spans that were computed."""
    return tuple((c.slot, c.start) for c in spans)


def _run(backend: Backend, plan: StepPlan) -> list[_Row]:
    """Do one step; return each row's token and its log-probability."""
    result = backend.run(plan)
    if result.code:
        raise RequestFailedError("the rows could not be computed") from DecodeError(result.code)
    rows = zip(result.tokens, result.logprobs, strict=True)
    return [(tokens[0], logprobs[0].logprob) for tokens, logprobs in rows]
