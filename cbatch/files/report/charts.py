"""Charts of a report: slots, a curve over time, a distribution. Places are computed here; `charts.html` draws them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from cbatch.files.units import clock, count, duration, percent, short, tick_step, ticks, time_step

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cbatch.core.stats import Percentiles
    from cbatch.files.report.spans import Part, Span

WIDTH = 1040.0
LEFT = 52.0
"""Room for the labels of the vertical axis."""
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


class Bar(NamedTuple):
    """A rectangle, and the text that it shows under the pointer."""

    x: float
    y: float
    width: float
    words: str
    style: str = ""


# ---- slots ----

N_COLORS = 6
_SLOTS_HEIGHT = 400.0
_LOWEST_ROW, _HIGHEST_ROW = 3.0, 22.0
_SLOTS_TOP = 4.0


class SlotChart:
    """The picture of continuous batching in a stretch of time: a row for each slot, a bar for each request in it."""

    left, top, width = LEFT, _SLOTS_TOP, WIDTH

    def __init__(self, part: Part, n_slots: int, zero_s: float) -> None:
        """Compute the places; labels count from `zero_s`."""
        self.axis = Axis(part.start_s, part.end_s, zero_s)
        self.stretch = _stretch(part, zero_s)
        self.title = f"Timeline of {n_slots} slots, {self.stretch}"
        self._row = row = min(_HIGHEST_ROW, max(_LOWEST_ROW, _SLOTS_HEIGHT / n_slots))
        self.bar_height = row - (2.0 if row >= 8 else 1.0)
        self.height = self.top + row * n_slots + 24
        self.bottom = self.top + row * n_slots + 2
        self.lane_width = self.axis.x(part.end_s) - LEFT
        self.lanes = [self._y(slot) for slot in range(n_slots)]
        every = 1 << math.ceil(math.log2(max(1.0, 14 / row)))  # numbers for which there is room
        middle = self.bar_height / 2 + 4
        self.numbers = [(slot, self._y(slot) + middle) for slot in range(0, n_slots, every)]
        self.bars = [
            self._bar(span, color)
            for span, color in zip(part.spans, colors(part.spans), strict=True)
            if span.end_s > part.start_s and span.start_s < part.end_s
        ]

    def _y(self, slot: int) -> float:
        return self.top + self._row * slot

    def _bar(self, span: Span, color: int) -> Bar:
        kind, tokens = ("prefill", "prompt") if span.is_prefill else ("decode", "output")
        stretch = _stretch(span, self.axis.zero_s)
        words = f"{span.id}\nslot {span.slot}, {kind}: {count(span.n_tokens)} {tokens} tokens\n{stretch}"
        x = self.axis.x(span.start_s)
        width = max(0.5, self.axis.x(span.end_s) - x)
        return Bar(x, self._y(span.slot), width, words, f"{kind[0]}{color}")


def _stretch(part: Part | Span, zero_s: float) -> str:
    return f"{duration(part.start_s - zero_s)} to {duration(part.end_s - zero_s)}"


def colors(spans: Sequence[Span]) -> list[int]:
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


# ---- curves ----


class CurveChart:
    """Values over time, filled down to zero."""

    left, right, width, height = LEFT, WIDTH - _MARGIN, WIDTH, 96.0
    top, bottom = 8.0, 74.0

    def __init__(
        self,
        name: str,
        note: str,
        points: Sequence[tuple[float, float]],
        axis: Axis,
        color: str,
        limit: float | None = None,
    ) -> None:
        """Compute the places.

        Args:
            name: of the values.
            note: in words, what they come to.
            points: (seconds, value): each value holds until the next, the last until the axis ends.
            axis: of the times.
            color: of the curve.
            limit: the largest possible value, which is the top of the chart.
        """
        self.name, self.note, self.axis, self.color = name, note, axis, color
        self.title = f"{name} over time: {note}"
        most = limit or max((value for _, value in points), default=0.0) or 1.0
        step = tick_step(most, 4)
        self._ceiling = most if limit else step * math.ceil(most / step - 1e-9)
        self.levels = [(self._y(v), short(v)) for v in _levels(self._ceiling, step, limit)]
        self.path = self._path(points)

    def _y(self, value: float) -> float:
        return self.bottom - (self.bottom - self.top) * min(1.0, value / self._ceiling)

    def _path(self, points: Sequence[tuple[float, float]]) -> str:
        x = self.axis.x
        moves = [f"{x(t):.1f} {self._y(v):.1f}" for t, v in points[:1]]
        moves += [f"H{x(t):.1f}V{self._y(v):.1f}" for t, v in points[1:]]
        return "".join(moves) + f"H{x(self.axis.end_s):.1f}"


def _levels(ceiling: float, step: float, limit: float | None) -> list[float]:
    """Return the values that have a label: none whose label would touch that of the limit."""
    values = ticks(0.0, ceiling, step)
    return values if limit is None else [v for v in values if v <= limit - 0.4 * step] + [limit]


# ---- distributions ----

_PERCENTILES = (50, 90, 99)
_LABEL = 96.0
"""Width of the label of a percentile."""

_N_BARS = 44
"""About the number of bars: each is a whole number of the buckets that were counted."""


class PercentileMark(NamedTuple):
    """A line at a percentile, whose label is to its left or its right."""

    percent: int
    seconds: float
    x: float
    y: float
    is_left: bool


class DistributionChart:
    """How often each size of a time occurred, on a logarithmic axis, with its percentiles."""

    left, right, width, height = _MARGIN, 500.0 - _MARGIN, 500.0, 176.0
    top, bottom = 46.0, 154.0

    def __init__(self, name: str, note: str, times: Percentiles, color: str) -> None:
        """Compute the places of at least one time."""
        self.name = self.title = name
        self.note, self.color = note, color
        pieces = _joined_buckets(times)
        self._low, self._high = math.log(pieces[0][0]), math.log(pieces[-1][1])
        most = max(n for _, _, n in pieces)
        self.bars = [self._bar(*piece, most, times.n) for piece in pieces if piece[2]]
        self.decades = self._decades()
        self.percentiles = _percentile_marks(times, self._x, self.width)

    def _x(self, seconds: float) -> float:
        share = (math.log(seconds) - self._low) / (self._high - self._low)
        return self.left + (self.right - self.left) * share

    def _bar(self, start_s: float, end_s: float, n: int, most: int, n_all: int) -> Bar:
        words = f"{duration(start_s)} to {duration(end_s)}: {count(n)} ({percent(n, n_all)})"
        x = self._x(start_s)
        y = self.bottom - (self.bottom - self.top) * n / most
        return Bar(x, y, max(0.6, self._x(end_s) - x - 1), words)

    def _decades(self) -> list[tuple[float, float, str]]:
        """Return ticks at 1, 2, 5 × 10ⁿ, at 1 alone where these would be many: places of line and label, and label."""
        first, last = math.floor(self._low / math.log(10)), math.ceil(self._high / math.log(10))
        sizes = (1,) if last - first > 4 else (1, 2, 5)
        values = [m * 10.0**i for i in range(first, last + 1) for m in sizes]
        return [
            (x := self._x(v), min(max(x, 20.0), self.width - 22), duration(v))
            for v in values
            if self._low <= math.log(v) <= self._high
        ]


def _joined_buckets(times: Percentiles) -> list[tuple[float, float, int]]:
    """Return the counted buckets joined to pieces of one width, empty ones between them included."""
    found = times.buckets()
    width = math.log(found[0][1] / found[0][0])
    first = round(math.log(found[0][0]) / width)
    n_wide = round(math.log(found[-1][1] / found[0][0]) / width)
    n_join = max(1, round(n_wide / _N_BARS))
    counts = [0] * (n_wide // n_join + 1)
    for start, _, n in found:
        counts[(round(math.log(start) / width) - first) // n_join] += n
    while len(counts) > 1 and not counts[-1]:
        counts.pop()
    edges = [math.exp(width * (first + i * n_join)) for i in range(len(counts) + 1)]
    return list(zip(edges, edges[1:], counts, strict=False))


def _percentile_marks(
    times: Percentiles, x: Callable[[float], float], width: float
) -> list[PercentileMark]:
    """Return a mark for each percentile; labels are in rows so that no line runs through a label."""
    places = [(p, times.at(p) or 1.0) for p in _PERCENTILES]
    is_left = x(places[-1][1]) > width - _LABEL
    if is_left:
        places.reverse()
    return [
        PercentileMark(p, seconds, x(seconds), 10.0 + 13 * i, is_left and x(seconds) > _LABEL)
        for i, (p, seconds) in enumerate(places)
    ]
