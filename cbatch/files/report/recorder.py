"""Records the steps and results of a run for its report, in bounded memory."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from cbatch.core.stats import Percentiles
from cbatch.errors import ConfigError
from cbatch.files.report.spans import SlotSpans, SpanStore
from cbatch.files.units import cut

if TYPE_CHECKING:
    from collections.abc import Callable

    from cbatch.response import BatchResult
    from cbatch.runtime.step_record import StepRecord

N_BUCKETS = 512
"""Most points of a curve: twice what a page is wide enough for."""

FIRST_WIDTH_S = 0.01
"""Width of the first buckets: about a step of a small model."""

N_SPANS_PER_SLOT = 60
"""Spans of a slot in each part of the timeline: about ten pixels each."""

N_SPANS = 1500
"""Most spans of each part, for a page that opens quickly."""

N_KINDS = 50
"""Most kinds of errors; others are counted together."""

N_MESSAGE = 300
"""Characters of an error's message."""

OTHER = "other"


def tee(*recorders: Callable[[StepRecord], object]) -> Callable[[StepRecord], None]:
    """Return a recorder that calls several: `Engine.record_steps` takes one."""

    def record(step: StepRecord) -> None:
        for recorder in recorders:
            recorder(step)

    return record


@dataclass(eq=False, slots=True)
class Bucket:
    """Sums over a piece of time."""

    n_prompt: float = 0.0
    """Prompt tokens computed, including those computed again."""
    n_output: float = 0.0
    slots_s: float = 0.0
    """Slots in use, times seconds."""
    waiting_s: float = 0.0
    """Requests waiting for a slot, times seconds."""
    cells_s: float = 0.0

    def add(self, other: Bucket, share: float = 1.0) -> None:
        """Add a share of another bucket."""
        for f in _FIGURES:
            setattr(self, f, getattr(self, f) + share * getattr(other, f))


_FIGURES = tuple(f.name for f in fields(Bucket))


class WorkOverTime:
    """Time in buckets of one width, which doubles when there are too many."""

    def __init__(self, n_max: int = N_BUCKETS, width_s: float = FIRST_WIDTH_S) -> None:
        self.width_s = width_s
        self.end_s = 0.0
        """End of the last entry."""
        self.buckets: list[Bucket] = []
        self._n_max = n_max

    def add(self, start_s: float, end_s: float, work: Bucket) -> None:
        """Spread work evenly over a time, in seconds from the beginning."""
        self._reach(end_s)
        first, last = self._index(start_s), self._index(end_s)
        if first == last:
            self.buckets[first].add(work)
            return
        for i in range(first, last + 1):
            from_s, to_s = max(start_s, i * self.width_s), min(end_s, (i + 1) * self.width_s)
            self.buckets[i].add(work, max(0.0, to_s - from_s) / (end_s - start_s))

    def joined(self, n_max: int) -> list[tuple[float, float, Bucket]]:
        """Return (start, seconds, work) of at most `n_max` pieces of time, of one width but for the last."""
        n_join = -(-len(self.buckets) // n_max) or 1
        width_s = self.width_s * n_join
        pieces: list[tuple[float, float, Bucket]] = []
        for i in range(0, len(self.buckets), n_join):
            start_s, work = i * self.width_s, Bucket()
            seconds = min(width_s, self.end_s - start_s)
            if pieces and seconds < width_s / 2:  # too short for a rate: part of the piece before
                start_s, before_s, work = pieces.pop()
                seconds += before_s
            for bucket in self.buckets[i : i + n_join]:
                work.add(bucket)
            pieces.append((start_s, seconds, work))
        return pieces

    def _reach(self, end_s: float) -> None:
        self.end_s = max(self.end_s, end_s)
        while self._index(end_s) >= self._n_max:
            self._halve()
        n_missing = self._index(end_s) + 1 - len(self.buckets)
        self.buckets += [Bucket() for _ in range(n_missing)]

    def _index(self, time_s: float) -> int:
        return max(0, int(time_s / self.width_s))

    def _halve(self) -> None:
        """Join neighbours."""
        self.width_s *= 2
        for left, right in zip(self.buckets[::2], self.buckets[1::2], strict=False):
            left.add(right)
        del self.buckets[1::2]


@dataclass(eq=False, slots=True)
class ErrorKind:
    """The number of errors of a kind, and the message of the first."""

    message: str
    n: int = 0


class ResultBooks:
    """The results of a run, in numbers."""

    def __init__(self) -> None:
        self.n_done = self.n_failed = self.n_hits = 0
        self.n_prompt = self.n_cached = 0
        self.queue_s, self.ttft_s = Percentiles(), Percentiles()
        self.finish_reasons: Counter[str] = Counter()
        self.errors: dict[str, ErrorKind] = {}

    def add(self, result: BatchResult) -> None:
        """Count a result."""
        usage, timings = result.usage, result.timings
        self.n_prompt += usage.prompt_tokens
        self.n_cached += usage.cached_tokens
        self.n_hits += usage.cached_tokens > 0
        if timings.ttft_s is not None:
            self.queue_s.add(timings.queue_s)
            self.ttft_s.add(timings.ttft_s)
        if result.error is not None:
            self.add_error(type(result.error).__name__, str(result.error))
            return
        self.n_done += 1
        self.finish_reasons[result.finish_reason] += 1

    def add_error(self, kind: str, message: str) -> None:
        """Count an error."""
        self.n_done += 1
        self.n_failed += 1
        self.finish_reasons["error"] += 1
        if kind not in self.errors and len(self.errors) >= N_KINDS:
            kind, message = OTHER, ""
        line = " ".join(message[: 4 * N_MESSAGE].split())
        self.errors.setdefault(kind, ErrorKind(cut(line, N_MESSAGE))).n += 1


class StepBooks:
    """The steps of a run, in numbers; times are of the engine's clock."""

    def __init__(self, n_slots: int) -> None:
        self.start_s: float | None = None
        self.end_s = 0.0
        self.work = WorkOverTime()
        self.spans = SpanStore(min(N_SPANS, N_SPANS_PER_SLOT * n_slots))
        self.itl_s = Percentiles()
        self.n_runs = self.n_steps = self.n_failed_steps = 0
        self.n_prompt = self.n_output = self.n_active_steps = 0
        self.phases: defaultdict[str, float] = defaultdict(float)
        self._slots, self._n_tracked = SlotSpans(), 8 * n_slots
        self._last_token_s: dict[str, float] = {}

    @property
    def total_s(self) -> float:
        """From the first step to the end of the last."""
        return 0.0 if self.start_s is None else self.end_s - self.start_s

    @property
    def mean_slots(self) -> float:
        """Slots in use, on average over the steps, as in the summary of a run."""
        return self.n_active_steps / max(self.n_steps, 1)

    def add(self, record: StepRecord) -> None:
        """Count a run of steps."""
        if self.start_s is None:
            self.start_s = record.start_s
        self.end_s = record.end_s
        for change in self._slots.take(record):
            if change.after is not None:
                self.spans.add(change.after)
        self._count(record)
        self._count_gaps(record)

    def _count(self, record: StepRecord) -> None:
        n_prompt = sum(row.n_prefill for row in record.rows) if record.n_steps else 0
        n_output = sum(row.n_sampled for row in record.rows)
        self.n_runs += 1
        self.n_steps += record.n_steps
        self.n_failed_steps += record.code != 0
        self.n_prompt += n_prompt
        self.n_output += n_output
        self.n_active_steps += record.n_rows * record.n_steps
        start_s = record.start_s - (self.start_s or 0.0)
        seconds = record.end_s - record.start_s
        work = Bucket(
            n_prompt=n_prompt,
            n_output=n_output,
            slots_s=seconds * record.n_rows,
            waiting_s=seconds * record.n_waiting,
            cells_s=seconds * record.n_cells,
        )
        self.work.add(start_s, start_s + seconds, work)
        for phase, phase_s in phases(record).items():
            self.phases[phase] += phase_s

    def _count_gaps(self, record: StepRecord) -> None:
        """Count the times between tokens; several tokens in a run of steps count with their mean."""
        known = self._last_token_s
        for row in record.rows:
            if row.n_sampled:
                last_s = known.pop(row.id, None)
                known[row.id] = record.ran_s  # the last in order
                n = row.n_sampled - (last_s is None)
                if n:
                    since_s = record.first_ran_s if last_s is None else last_s
                    self.itl_s.add((record.ran_s - since_s) / n, n)
        while len(known) > self._n_tracked:
            del known[next(iter(known))]


class RunRecorder:
    """Records steps, given to `Engine.record_steps`, and results, for `write_report`.

    Steps arrive in the thread that computes, results in that of the reader, so they are counted apart. Memory depends
    on the number of slots, not on the length of the run.
    """

    def __init__(self, n_slots: int) -> None:
        """Begin for an engine of `n_slots` slots, at least one."""
        if n_slots < 1:
            raise ConfigError(f"n_slots must be at least 1, not {n_slots}: give engine.parallel")
        self.n_slots = n_slots
        self.steps = StepBooks(n_slots)
        self.results = ResultBooks()

    def __call__(self, record: StepRecord) -> None:
        """Count a run of steps."""
        self.steps.add(record)

    def add_result(self, result: BatchResult) -> None:
        """Count a result."""
        self.results.add(result)

    def add_error(self, kind: str, message: str) -> None:
        """Count an item that could not run, such as a bad line; `kind` is a code."""
        self.results.add_error(kind, message)


def phases(record: StepRecord) -> dict[str, float]:
    """Return the seconds of each part of a run.

    `plan` is admission and building, `border` the other time of the call into the backend.
    """
    return {
        "decode": record.decode_s,
        "sample": record.sample_s,
        "plan": record.admit_s + record.build_s,
        "border": max(0.0, record.run_s - record.decode_s - record.sample_s),
        "apply": record.apply_s,
        "deliver": record.deliver_s,
    }
