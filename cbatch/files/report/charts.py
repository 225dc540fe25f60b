"""Charts as SVG: a curve over time, a distribution over a logarithmic axis."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cbatch.files.report.markup import Markup, join, tag
from cbatch.files.report.units import (
    clock,
    count,
    duration,
    percent,
    short,
    tick_step,
    ticks,
    time_step,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cbatch.core.stats import Percentiles

_WIDTH = 1040.0
LEFT = 52.0
"""Room for what an axis says."""

_RIGHT = 6.0


@dataclass(frozen=True, slots=True)
class Axis:
    """Times from left to right: `start_s` stands at `LEFT`, `end_s` at the right edge."""

    start_s: float
    end_s: float
    zero_s: float = 0.0
    """What the labels count from."""
    width: float = _WIDTH

    def x(self, time_s: float) -> float:
        """Return where a time stands; outside of the axis, its end."""
        share = (time_s - self.start_s) / max(self.end_s - self.start_s, 1e-9)
        return LEFT + min(1.0, max(0.0, share)) * (self.width - LEFT - _RIGHT)

    def marks(self) -> list[tuple[float, str]]:
        """Return where ticks stand, and what they say."""
        start_s, end_s = self.start_s - self.zero_s, self.end_s - self.zero_s
        step = time_step(max(end_s - start_s, 1e-6), 9)
        found = ticks(start_s, end_s, step)
        return [(self.x(self.zero_s + t), clock(t, step)) for t in found]

    def draw(self, top: float, bottom: float) -> Markup:
        """Return the ticks: a hairline from top to bottom, the time below."""
        pieces = []
        for x, text in self.marks():
            pieces.append(tag("line", x1=x, x2=x, y1=top, y2=bottom, class_="grid"))
            anchor = "end" if x > self.width - 24 else "middle"
            pieces.append(tag("text", text, x=x, y=bottom + 16, class_="tick", text_anchor=anchor))
        return join(pieces)


@dataclass(frozen=True, slots=True)
class Curve:
    """Values over time: `points` are (seconds, value), each until the next, the last until the axis ends."""

    points: Sequence[tuple[float, float]]
    color: str
    limit: float | None = None
    """The most there can be: drawn as a line, and the top of the chart."""


def picture(width: float, height: float, title: str, *children: str, name: str = "") -> Markup:
    """Return an SVG picture; who cannot see it is told its title."""
    return tag(
        "svg",
        *children,
        viewBox=f"0 0 {width:.0f} {height:.0f}",
        role="img",
        aria_label=title,
        class_=f"chart {name}".strip(),
    )


def curve_chart(curve: Curve, axis: Axis, title: str, height: float = 96.0) -> Markup:
    """Return one curve over time, filled down to nothing."""
    top, bottom = 8.0, height - 22.0
    most = curve.limit or max((v for _, v in curve.points), default=0.0) or 1.0
    step = tick_step(most, 4)
    ceiling = most if curve.limit else step * math.ceil(most / step - 1e-9)

    def y(value: float) -> float:
        return bottom - (bottom - top) * min(1.0, value / ceiling)

    line = _steps(curve.points, axis, y)
    area = f"M{LEFT:.1f} {bottom:.1f}{line}V{bottom:.1f}Z"
    return picture(
        axis.width,
        height,
        title,
        axis.draw(top, bottom),
        _levels(_values(ceiling, step, curve.limit), y, axis.width),
        tag("path", d=area, class_=f"area {curve.color}"),
        tag("path", d="M" + line[1:], class_=f"line {curve.color}"),
    )


def _steps(points: Sequence[tuple[float, float]], axis: Axis, y: Callable[[float], float]) -> str:
    moves = [f"L{axis.x(t):.1f} {y(v):.1f}" for t, v in points[:1]]
    for time_s, value in points[1:]:
        moves.append(f"H{axis.x(time_s):.1f}V{y(value):.1f}")
    return "".join(moves) + f"H{axis.x(axis.end_s):.1f}"


def _values(ceiling: float, step: float, limit: float | None) -> list[float]:
    """Return what is written at the axis: nothing that would touch the limit."""
    values = ticks(0.0, ceiling, step)
    if limit is None:
        return values
    return [v for v in values if v <= limit - 0.4 * step] + [limit]


def _levels(values: Sequence[float], y: Callable[[float], float], width: float) -> Markup:
    pieces = []
    for value in values:
        at = y(value)
        pieces.append(tag("line", x1=LEFT, x2=width - _RIGHT, y1=at, y2=at, class_="grid"))
        text = tag("text", short(value), x=LEFT - 8, y=at + 4, class_="tick", text_anchor="end")
        pieces.append(text)
    return join(pieces)


# ---- distributions ----

_PERCENTILES = (50, 90, 99)
_HALF = 500.0
_LABEL = 96.0
"""Room for what is said of a percentile."""

_N_BARS = 44
"""About so many bars: each is a whole number of the buckets that were counted."""


def distribution_chart(times: Percentiles, title: str, color: str, height: float = 176.0) -> Markup:
    """Return how often each size of a time occurred, on a logarithmic axis, with its percentiles."""
    bars = _bars(times)
    low, high = math.log(bars[0][0]), math.log(bars[-1][1])
    top, bottom, left = 46.0, height - 22.0, 6.0
    most = max(n for _, _, n in bars)

    def x(seconds: float) -> float:
        return left + (_HALF - 2 * left) * (math.log(seconds) - low) / (high - low)

    def shape(start_s: float, end_s: float, n: int) -> Markup:
        said = f"{duration(start_s)} to {duration(end_s)}: {count(n)} ({percent(n, times.n)})"
        size = (bottom - top) * n / most
        place = {"x": x(start_s), "y": bottom - size, "height": size, "rx": 1.5}
        width = max(0.6, x(end_s) - x(start_s) - 1)
        return tag("rect", tag("title", said), **place, width=width, class_=f"bar {color}")

    edge = tag("line", x1=left, x2=_HALF - left, y1=bottom, y2=bottom, class_="axis")
    return picture(
        _HALF,
        height,
        title,
        *(shape(*bar) for bar in bars if bar[2]),
        edge,
        _decades(low, high, x, bottom),
        _percentile_lines(times, x, bottom),
        name="half",
    )


def _bars(times: Percentiles) -> list[tuple[float, float, int]]:
    """Return the counted buckets joined to bars of one width, empty ones between them included."""
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


def _decades(low: float, high: float, x: Callable[[float], float], bottom: float) -> Markup:
    """Return ticks at 1, 2, 5 × 10ⁿ; at 1 alone where these would be many."""
    first, last = math.floor(low / math.log(10)), math.ceil(high / math.log(10))
    sizes = (1,) if last - first > 4 else (1, 2, 5)
    pieces = []
    for value in (m * 10.0**i for i in range(first, last + 1) for m in sizes):
        if low <= math.log(value) <= high:
            at = min(max(x(value), 20.0), _HALF - 22)
            mark = tag("line", x1=x(value), x2=x(value), y1=bottom, y2=bottom + 4, class_="axis")
            text = tag("text", duration(value), x=at, y=bottom + 18, class_="tick middle")
            pieces += [mark, text]
    return join(pieces)


def _percentile_lines(times: Percentiles, x: Callable[[float], float], bottom: float) -> Markup:
    """Return a line for each percentile; labels stand in rows so that no line runs through one."""
    places = [(p, times.at(p) or 1.0) for p in _PERCENTILES]
    is_left = x(places[-1][1]) > _HALF - _LABEL
    if is_left:
        places.reverse()
    return join(
        _percentile(p, seconds, x(seconds), 10.0 + 13 * i, bottom, is_left=is_left)
        for i, (p, seconds) in enumerate(places)
    )


def _percentile(
    p: int, seconds: float, at: float, y: float, bottom: float, *, is_left: bool
) -> Markup:
    is_left = is_left and at > _LABEL
    label = tag(
        "text",
        tag("tspan", f"p{p} ", class_="faint"),
        duration(seconds),
        x=at - 6 if is_left else at + 6,
        y=y,
        class_="label",
        text_anchor="end" if is_left else "start",
    )
    return join([tag("line", x1=at, x2=at, y1=y - 8, y2=bottom, class_="mark"), label])
