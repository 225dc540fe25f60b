"""Spans: the time of a request in a slot, joined of runs of steps; the first and the last spans are kept."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cbatch.runtime.step_record import StepRecord, StepRow

GAP_S = 0.02  # most seconds between two runs of one span: about a run of several steps


@dataclass(eq=False, slots=True)
class SlotSpan:
    """The time of one request in one slot, in prefill or in decode; seconds of the engine's clock."""

    slot: int
    id: str
    is_prefill: bool
    start_s: float
    end_s: float
    n_tokens: int
    """Prompt tokens computed, or output tokens sampled."""

    def can_join(self, other: SlotSpan) -> bool:
        """Whether `other` continues this span."""
        same = self.id == other.id and self.is_prefill == other.is_prefill
        return same and other.start_s - self.end_s <= GAP_S

    def join(self, other: SlotSpan) -> None:
        """Extend this span by `other`."""
        self.end_s = other.end_s
        self.n_tokens += other.n_tokens


@dataclass(frozen=True, slots=True)
class Change:
    """In a slot `before` ends and `after` begins; None: the slot was, or is, free."""

    before: SlotSpan | None
    after: SlotSpan | None


class SlotSpans:
    """The open span of each slot."""

    def __init__(self) -> None:
        self._open: dict[int, SlotSpan] = {}

    def take(self, record: StepRecord) -> list[Change]:
        """Add a run of steps; return the changes. An open span grows until it is the `before` of a change."""
        changes = [
            c for row in record.rows for part in parts(record, row) if (c := self._add(part))
        ]
        return changes + self._end(record.start_s - GAP_S)

    def end_all(self) -> list[Change]:
        """End all open spans."""
        return self._end(float("inf"))

    def _add(self, part: SlotSpan) -> Change | None:
        span = self._open.get(part.slot)
        if span is not None and span.can_join(part):
            span.join(part)
            return None
        self._open[part.slot] = part
        return Change(span, part)

    def _end(self, before_s: float) -> list[Change]:
        over = [span for span in self._open.values() if span.end_s < before_s]
        for span in over:
            del self._open[span.slot]
        return [Change(span, None) for span in over]


def parts(record: StepRecord, row: StepRow) -> Iterator[SlotSpan]:
    """Yield the spans of a row in a run of steps, whose first step may compute the end of the prompt."""

    def span(start_s: float, end_s: float, n_tokens: int, *, is_prefill: bool) -> SlotSpan:
        return SlotSpan(row.slot, row.id, is_prefill, start_s, end_s, n_tokens)

    start_s, end_s = record.start_s, record.end_s
    if not row.n_prefill:
        yield span(start_s, end_s, row.n_sampled, is_prefill=False)
    elif record.n_steps > 1:
        yield span(start_s, record.first_ran_s, row.n_prefill, is_prefill=True)
        yield span(record.first_ran_s, end_s, row.n_sampled, is_prefill=False)
    else:
        yield span(start_s, end_s, row.n_prefill * record.n_steps, is_prefill=True)


@dataclass(frozen=True, slots=True)
class Part:
    """A stretch of time, and spans, some of which may lie outside."""

    start_s: float
    end_s: float
    spans: list[SlotSpan]


class SpanStore:
    """The first and the last spans of a run, or all if they are few."""

    def __init__(self, n_keep: int) -> None:
        """Keep `n_keep` spans of each end."""
        self.first: list[SlotSpan] = []
        self.last: deque[SlotSpan] = deque()
        self.n_spans = 0
        self._n_keep, self._cut_s = n_keep, math.inf
        self._left: dict[int, SlotSpan] = {}

    def add(self, span: SlotSpan) -> None:
        """Add a span that begins; it may grow afterwards."""
        self.n_spans += 1
        if len(self.first) < self._n_keep:
            self.first.append(span)
            return
        self._cut_s = min(self._cut_s, span.start_s)
        self.last.append(span)
        if len(self.last) > self._n_keep:
            gone = self.last.popleft()
            self._left[gone.slot] = gone

    def parts(self) -> list[Part]:
        """Return the stretches of time in which every span is known: the whole run, or its beginning and its end."""
        known = [*self.first, *self._left.values(), *self.last]
        if not known:
            return []
        start_s, end_s = known[0].start_s, max(s.end_s for s in known)
        if not self._left:
            return [Part(start_s, end_s, known)]
        # in each slot all spans are known from the one dropped last on
        last_s = max(s.start_s for s in self._left.values())
        return [Part(start_s, self._cut_s, known), Part(last_s, end_s, known)]
