"""Records the steps and results of a run for its report, in bounded memory."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from cbatch.errors import ConfigError
from cbatch.files.report.spans import SlotSpans, SpanStore
from cbatch.files.units import cut
from cbatch.response import DRAFT_COUNTS, BatchResult
from cbatch.stats import Percentiles

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from cbatch.runtime.step_record import StepRecord

    _Floats: TypeAlias = NDArray[Any]

N_BUCKETS = 512  # most points of a curve: twice what a page is wide enough for
FIRST_WIDTH_S = 0.01  # width of the first buckets: about a step of a small model
N_SPANS_PER_SLOT = 60  # spans of a slot in each part of the timeline: about ten pixels each
N_SPANS = 1500  # most spans of each part, for a page that opens quickly
N_KINDS = 50  # most kinds of errors; others are counted together
N_MESSAGE = 300  # characters of an error's message
OTHER = "other"


def tee(*recorders: Callable[[StepRecord], object]) -> Callable[[StepRecord], None]:
    """Return a recorder that calls several: `Engine.record_steps` takes one."""

    def record(step: StepRecord) -> None:
        for recorder in recorders:
            recorder(step)

    return record


class WorkOverTime:
    """Figures summed in buckets of time of one width, which doubles when there are too many.

    The figures: output tokens; prompt tokens computed, those computed again included; slots in use, requests waiting
    for a slot, and cells in use, each times seconds.
    """

    def __init__(self, n_max: int = N_BUCKETS, width_s: float = FIRST_WIDTH_S) -> None:
        self._end_s = 0.0  # of the last entry
        self._width_s, self._sums = width_s, np.zeros((n_max, 5))

    def add(self, start_s: float, end_s: float, figures: Sequence[float]) -> None:
        """Spread figures evenly over a time, in seconds from the beginning."""
        self._end_s = max(self._end_s, end_s)
        half = len(self._sums) // 2
        while (last := self._index(end_s)) >= len(self._sums):
            self._width_s *= 2
            self._sums[:half] = self._sums.reshape(half, 2, -1).sum(1)
            self._sums[half:] = 0.0
        first = self._index(start_s)
        if first == last:
            self._sums[first] += figures
            return
        edges = np.arange(first, last + 2) * self._width_s
        seconds = np.diff(np.clip(edges, start_s, end_s))
        self._sums[first : last + 1] += np.outer(seconds / (end_s - start_s), figures)

    def joined(self, n_max: int) -> tuple[_Floats, _Floats, _Floats]:
        """Return the starts, the seconds and the figures of at most `n_max` pieces of one width but for the last."""
        n_buckets = self._index(self._end_s) + 1
        n_join = -(-n_buckets // n_max)
        firsts = np.arange(0, n_buckets, n_join)
        last_s = self._end_s - firsts[-1] * self._width_s
        if len(firsts) > 1 and last_s < n_join * self._width_s / 2:  # too short for a rate
            firsts = firsts[:-1]
        starts_s = firsts * self._width_s
        seconds = np.diff(np.append(starts_s, self._end_s))
        return starts_s, seconds, np.add.reduceat(self._sums[:n_buckets], firsts)

    def _index(self, time_s: float) -> int:
        return max(0, int(time_s / self._width_s))


@dataclass(eq=False, slots=True)
class ErrorKind:
    """The number of errors of a kind, and the message of the first."""

    message: str
    n: int = 0


class ResultBooks:
    """The results of a run, in numbers."""

    def __init__(self) -> None:
        self.n_done = self.n_failed = self.n_hits = 0
        self.n_before = 0  # items that an earlier run has done
        self.n_prompt = self.n_cached = 0
        self.drafts = dict.fromkeys(DRAFT_COUNTS, 0)
        self.queue_s, self.ttft_s = Percentiles(), Percentiles()
        self.finish_reasons: Counter[str] = Counter()
        self.errors: dict[str, ErrorKind] = {}

    def add(self, result: BatchResult) -> None:
        """Count a result."""
        usage, timings = result.usage, result.timings
        self.n_prompt += usage.prompt_tokens
        self.n_cached += usage.cached_tokens
        self.n_hits += usage.cached_tokens > 0
        for name in DRAFT_COUNTS:
            self.drafts[name] += getattr(timings, name)
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
        self.n_prompt = self.n_output = self.n_active_steps = self.n_pad_rows = 0
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
        self.n_pad_rows += record.n_pad_rows
        self.n_prompt += n_prompt
        self.n_output += n_output
        self.n_active_steps += record.n_rows * record.n_steps
        start_s = record.start_s - (self.start_s or 0.0)
        seconds = record.end_s - record.start_s
        slots_s, waiting_s = seconds * record.n_rows, seconds * record.n_waiting
        figures = (n_output, n_prompt, slots_s, waiting_s, seconds * record.n_cells)
        self.work.add(start_s, start_s + seconds, figures)
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
