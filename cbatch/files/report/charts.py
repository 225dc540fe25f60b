"""All charts of pages: slots, curves over time, distributions, values over loads.

Scales are computed here; `charts.html` draws.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from cbatch.files.units import clock, count, duration, short, tick_step, ticks, time_step

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from cbatch.files.report.spans import Part, SlotSpan
    from cbatch.stats import Percentiles

WIDTH = 1040.0
LEFT = 52.0  # room for the labels of the vertical axis
_MARGIN = 6.0


@dataclass(frozen=True, slots=True)
class Axis:
    """Times from left to right: `start_s` is at `LEFT`, `end_s` at the right edge; labels count from `zero_s`."""

    start_s: float
    end_s: float
    zero_s: float = 0.0

    def x(self, time_s: float) -> float:
        """Return the place of a time; a time outside of the axis is at its end."""
        share = (time_s - self.start_s) / max(self.end_s - self.start_s, 1e-9)
        return LEFT + min(1.0, max(0.0, share)) * (WIDTH - LEFT - _MARGIN)

    def marks(self) -> list[tuple[float, str]]:
        """Return the place and the label of each tick."""
        start_s, end_s = self.start_s - self.zero_s, self.end_s - self.zero_s
        step = time_step(max(end_s - start_s, 1e-6), 9)
        found = ticks(start_s, end_s, step)
        return [(self.x(self.zero_s + t), clock(t, step)) for t in found]


N_COLORS = 6
_SLOTS_HEIGHT = 400.0
_LOWEST_ROW, _HIGHEST_ROW = 3.0, 22.0


class SlotChart:
    """The picture of continuous batching in a stretch of time: a row for each slot, a bar for each request in it."""

    left, top, width = LEFT, 4.0, WIDTH

    def __init__(self, part: Part, n_slots: int, zero_s: float) -> None:
        self.n_slots = n_slots
        self.axis = Axis(part.start_s, part.end_s, zero_s)
        self.stretch = self.stretch_of(part)
        self.title = f"Timeline of {n_slots} slots, {self.stretch}"
        self._row = row = min(_HIGHEST_ROW, max(_LOWEST_ROW, _SLOTS_HEIGHT / n_slots))
        self.bar_height = row - (2.0 if row >= 8 else 1.0)
        self.bottom = self.y(n_slots) + 2
        self.height = self.bottom + 22
        # slots from one number to the next for which there is room
        self.number_step = 1 << math.ceil(math.log2(max(1.0, 14 / row)))
        self.bars = [
            (span, color)
            for span, color in zip(part.spans, colors(part.spans), strict=True)
            if span.end_s > part.start_s and span.start_s < part.end_s
        ]

    def y(self, slot: int) -> float:
        """Return the place of a slot's row."""
        return self.top + self._row * slot

    def stretch_of(self, part: Part | SlotSpan) -> str:
        """Return the beginning and the end of a stretch of time."""
        zero_s = self.axis.zero_s
        return f"{duration(part.start_s - zero_s)} to {duration(part.end_s - zero_s)}"


def colors(spans: Sequence[SlotSpan]) -> list[int]:
    """Return a color for each span: one for all spans of a request, another than that of the request before it."""
    found: list[int] = []
    n_stays = 0
    last: dict[int, tuple[str, int]] = {}
    for span in spans:
        id, color = last.get(span.slot, ("", -1))
        if span.slot not in last or id != span.id:
            color = _next_color(n_stays, color)
            n_stays += 1
            last[span.slot] = span.id, color
        found.append(color)
    return found


def _next_color(n: int, before: int) -> int:
    color = n % N_COLORS
    return color if color != before else (color + 1) % N_COLORS


class CurveChart:
    """Values over time, filled down to zero."""

    left, right, width, height = LEFT, WIDTH - _MARGIN, WIDTH, 96.0
    top, bottom = 8.0, 74.0

    def __init__(
        self,
        name: str,
        mean: float,
        points: Sequence[tuple[float, float]],
        axis: Axis,
        color: str,
        limit: float | None,
    ) -> None:
        """Compute the scales; at `limit`, the largest possible value, is the top of the chart.

        Each of the points, (seconds, value), at least one, holds until the next, the last until the axis ends.
        """
        self.name, self.axis, self.color = name, axis, color
        most = max(value for _, value in points)
        self.note = f"mean {count(mean)}, most {count(most)}"
        self.title = f"{name} over time: {self.note}"
        highest = limit or most or 1.0
        step = tick_step(highest, 4)
        self._ceiling = highest if limit else step * math.ceil(highest / step - 1e-9)
        self.levels = [(self._y(v), short(v)) for v in _levels(self._ceiling, step, limit)]
        (start_s, value), *later = points
        moves = [f"H{axis.x(t):.1f}V{self._y(v):.1f}" for t, v in later]
        start = f"{axis.x(start_s):.1f} {self._y(value):.1f}"
        self.path = f"{start}{''.join(moves)}H{axis.x(axis.end_s):.1f}"

    def _y(self, value: float) -> float:
        return self.bottom - (self.bottom - self.top) * min(1.0, value / self._ceiling)


def _levels(ceiling: float, step: float, limit: float | None) -> list[float]:
    """Return the values that have a label: none whose label would touch that of the limit."""
    values = ticks(0.0, ceiling, step)
    return values if limit is None else [v for v in values if v <= limit - 0.4 * step] + [limit]


_PERCENTILES = (50, 90, 99)
_LABEL = 96.0  # width of the label of a percentile
_N_BARS = 44  # about the number of bars: each is a whole number of the buckets that were counted


class TimeBar(NamedTuple):
    """The number of times between two."""

    start_s: float
    end_s: float
    n: int


class DistributionChart:
    """How often each size of a time occurred, on a logarithmic axis, with its percentiles."""

    left, right, width, height = _MARGIN, 500.0 - _MARGIN, 500.0, 176.0
    top, bottom = 46.0, 154.0

    def __init__(self, name: str, note: str, times: Percentiles, color: str) -> None:
        self.name = self.title = name
        self.note, self.color, self.n = note, color, times.n
        pieces = _joined_buckets(times)
        self._low, self._high = math.log(pieces[0].start_s), math.log(pieces[-1].end_s)
        self._most = max(piece.n for piece in pieces)
        self.bars = [piece for piece in pieces if piece.n]
        self.percentiles = [(p, times.at(p) or 1.0) for p in _PERCENTILES]
        # labels are to the left of their lines where there is no room to the right
        self.is_left = self.x(self.percentiles[-1][1]) > self.width - _LABEL
        if self.is_left:  # labels are in rows, so that no line runs through a label
            self.percentiles.reverse()

    def x(self, seconds: float) -> float:
        """Return the place of a time."""
        share = (math.log(seconds) - self._low) / (self._high - self._low)
        return self.left + (self.right - self.left) * share

    def y(self, n: int) -> float:
        """Return the upper edge of a bar."""
        return self.bottom - (self.bottom - self.top) * n / self._most

    def is_label_left(self, seconds: float) -> bool:
        """Whether the label of a percentile is to the left of its line."""
        return self.is_left and self.x(seconds) > _LABEL

    def decades(self) -> list[float]:
        """Return the times of ticks: 1, 2, 5 × 10ⁿ, or 1 × 10ⁿ alone where these would be many."""
        first, last = math.floor(self._low / math.log(10)), math.ceil(self._high / math.log(10))
        sizes = (1,) if last - first > 4 else (1, 2, 5)
        values = [m * 10.0**i for i in range(first, last + 1) for m in sizes]
        return [v for v in values if self._low <= math.log(v) <= self._high]


def _joined_buckets(times: Percentiles) -> list[TimeBar]:
    """Return the counted buckets joined to pieces of one width, empty ones between them included."""
    import numpy as np  # slow to import

    starts, ends, counts = np.array(times.buckets()).T
    width = math.log(ends[0] / starts[0])
    n_buckets = round(math.log(ends[-1] / starts[0]) / width)
    n_join = max(1, round(n_buckets / _N_BARS))
    n_pieces = math.ceil(n_buckets / n_join)
    edges = starts[0] * np.exp(width * n_join * np.arange(n_pieces + 1))
    joined, _ = np.histogram(np.sqrt(starts * ends), edges, weights=counts)
    return [TimeBar(*bar) for bar in zip(edges, edges[1:], map(round, joined), strict=False)]


class Point(NamedTuple):
    """One value under one load."""

    load: float
    value: float
    least: float
    most: float


class LoadChart:
    """Values over loads, a line for each side; loads are on a logarithmic axis."""

    left, top, right, bottom = 52.0, 8.0, 488.0, 196.0
    width, height = 500.0, 222.0

    def __init__(self, title: str, series: Mapping[str, Sequence[Point]]) -> None:
        self.title, self.series = title, series
        points = [point for line in series.values() for point in line]
        self.loads = sorted({point.load for point in points})
        self._first, self._last = math.log(self.loads[0]), math.log(self.loads[-1])
        step = tick_step(max(point.most for point in points) or 1.0, 4)
        self._ceiling = step * math.ceil(max(point.most for point in points) / step - 1e-9) or step
        self.levels = [(self.y(v), short(v)) for v in ticks(0.0, self._ceiling, step)]

    def x(self, load: float) -> float:
        """Return the place of a load."""
        if self._last == self._first:
            return (self.left + self.right) / 2
        share = (math.log(load) - self._first) / (self._last - self._first)
        return self.left + 10 + share * (self.right - self.left - 20)

    def y(self, value: float) -> float:
        """Return the place of a value."""
        return self.bottom - (self.bottom - self.top) * value / self._ceiling

    def path(self, line: Iterable[Point]) -> str:
        """Return the line through points."""
        return "L".join(f"{self.x(p.load):.1f} {self.y(p.value):.1f}" for p in line)
