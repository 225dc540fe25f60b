"""What a server counts itself: its HTTP requests, and sizes and times of its answers."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from cbatch.response import BatchResult
    from cbatch.stats import Percentiles

# Source of all bounds: vLLM's histograms; ITL has finer ones below.
TTFT_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
ITL_S = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5),
    *(0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
LATENCY_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
N_TOKENS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))

_NEWEST = 0.1
"""What the newest answer has in the mean of all: some twenty of them count."""


class Histogram:
    """Counts of values, each in the first bound that it does not exceed, and their sum."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float, n: int = 1) -> None:
        """Count a value `n` times."""
        self._counts[bisect_left(self._bounds, value)] += n
        self.total += value * n

    def cumulative(self) -> list[tuple[float, int]]:
        """Return each bound, infinity last, with the number of values that do not exceed it."""
        found, n_all = [], 0
        for bound, n in zip((*self._bounds, float("inf")), self._counts, strict=True):
            n_all += n
            found.append((bound, n_all))
        return found

    @classmethod
    def of(cls, times: Percentiles, bounds: Sequence[float]) -> Histogram:
        """Return times that were counted to about 2 %: so exact are bounds and sum."""
        made = cls(bounds)
        for low, high, n in times.buckets():
            made.add((low * high) ** 0.5, n)
        return made


class Meters:
    """The counts of one server, from its event loop."""

    def __init__(self) -> None:
        self.n_http: Counter[tuple[str, int]] = Counter()
        """HTTP requests by route and status."""
        self.queue_s, self.e2e_s = Histogram(LATENCY_S), Histogram(LATENCY_S)
        self.ttft_s = Histogram(TTFT_S)
        self.prompt_tokens, self.output_tokens = Histogram(N_TOKENS), Histogram(N_TOKENS)
        self.slot_s: float | None = None
        """Seconds from slots to ends: a mean of which the newest answers have the most; None before the first."""
        self.prompt_s = self.output_s = 0.0
        """Seconds from slots to first tokens, and from there to last ones, of all answers."""
        self.n_computed = self.n_decoded = 0
        """Tokens of these times: prompt tokens that were computed, and output tokens but for the first ones."""

    def count_answers(self, results: Iterable[BatchResult]) -> None:
        """Count prompts that were answered."""
        for result in results:
            times, usage = result.timings, result.usage
            self.queue_s.add(times.queue_s)
            self.e2e_s.add(times.total_s)
            in_slot_s = max(0.0, times.total_s - times.queue_s)
            before_s = in_slot_s if self.slot_s is None else self.slot_s
            self.slot_s = before_s + _NEWEST * (in_slot_s - before_s)
            self.prompt_tokens.add(usage.prompt_tokens)
            self.output_tokens.add(usage.completion_tokens)
            if times.ttft_s is not None:
                self.ttft_s.add(times.ttft_s)
                self.prompt_s += times.prompt_s
                self.output_s += times.output_s
                self.n_computed += usage.prompt_tokens - usage.cached_tokens
                self.n_decoded += usage.completion_tokens - len(result.choices or (result,))
