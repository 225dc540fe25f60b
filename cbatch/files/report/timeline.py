"""The picture of continuous batching: a row for each slot, a bar for each request in it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from cbatch.files.report.charts import LEFT, Axis, picture
from cbatch.files.report.markup import Markup, join, tag
from cbatch.files.report.units import count, duration

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cbatch.files.report.spans import Part, Span

N_COLORS = 6
_HEIGHT = 400.0
_LOWEST, _HIGHEST = 3.0, 22.0
_TOP = 4.0


def slot_chart(part: Part, n_slots: int, zero_s: float) -> Markup:
    """Return the slots in a stretch of time; labels count from `zero_s`."""
    axis = Axis(part.start_s, part.end_s, zero_s)
    row = min(_HIGHEST, max(_LOWEST, _HEIGHT / n_slots))
    bottom = _TOP + row * n_slots
    bars = [
        _bar(span, color, axis, row, zero_s)
        for span, color in zip(part.spans, colors(part.spans), strict=True)
        if span.end_s > part.start_s and span.start_s < part.end_s
    ]
    return picture(
        axis.width,
        bottom + 24,
        f"Timeline of {n_slots} slots, {stretch(part, zero_s)}",
        axis.draw(_TOP, bottom + 2),
        _lanes(n_slots, row, axis),
        join(bars),
        name="slots",
    )


def stretch(part: Part | Span, zero_s: float) -> str:
    """Return from when to when something goes, counted from `zero_s`."""
    return f"{duration(part.start_s - zero_s)} to {duration(part.end_s - zero_s)}"


def colors(spans: Sequence[Span]) -> list[int]:
    """Return a color for each span: one for a request's time in a slot, never that of the one before it there."""
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


def _bar(span: Span, color: int, axis: Axis, row: float, zero_s: float) -> Markup:
    x, gap = axis.x(span.start_s), _gap(row)
    kind = "prefill" if span.is_prefill else "decode"
    tokens = f"{count(span.n_tokens)} {'prompt' if span.is_prefill else 'output'} tokens"
    return tag(
        "rect",
        tag("title", f"{span.id}\nslot {span.slot}, {kind}: {tokens}\n{stretch(span, zero_s)}"),
        x=x,
        y=_TOP + row * span.slot,
        width=max(0.5, axis.x(span.end_s) - x),
        height=row - gap,
        class_=f"{kind[0]}{color}",
    )


def _gap(row: float) -> float:
    return 2.0 if row >= 8 else 1.0


def _lanes(n_slots: int, row: float, axis: Axis) -> Markup:
    """Return the empty slots, and the numbers of as many as there is room for."""
    every = 1 << math.ceil(math.log2(max(1.0, 14 / row)))
    lanes = [
        tag(
            "rect",
            x=LEFT,
            y=_TOP + row * i,
            width=axis.x(axis.end_s) - LEFT,
            height=row - _gap(row),
            class_="lane",
        )
        for i in range(n_slots)
    ]
    middle = _TOP + (row - _gap(row)) / 2 + 4
    numbers = [
        tag("text", str(i), x=LEFT - 8, y=middle + row * i, class_="tick", text_anchor="end")
        for i in range(0, n_slots, every)
    ]
    return join([*lanes, *numbers])
