"""Numbers, times, ticks and long texts for people."""

from __future__ import annotations

import math
from collections.abc import Iterable

_STEPS_S = (60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200)
_DAY_S = 86400

_N_LISTED = 2000
"""Characters of a list of names: our choice."""


def count(n: float) -> str:
    """Return a number with separators; a small fraction with one decimal."""
    return f"{n:,.1f}".removesuffix(".0") if n < 99.95 else f"{n:,.0f}"


def short(n: float) -> str:
    """Return a number in few letters: 950, 1.2k, 3M."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if n >= size:
            return f"{n / size:.3g}{unit}"
    return f"{n:.3g}"


def cut(text: str, n_most: int) -> str:
    """Return text of at most `n_most` characters; an ellipsis stands for the rest."""
    return text if len(text) <= n_most else f"{text[: n_most - 1]}…"


def listed(names: Iterable[str]) -> str:
    """Return names as an error shows them: a table may have a million."""
    return cut(", ".join(names), _N_LISTED)


def percent(part: float, whole: float) -> str:
    """Return a share in percent; 0 % of nothing."""
    share = 100 * part / whole if whole else 0.0
    return f"{share:.1f} %" if 0 < share < 9.95 else f"{share:.0f} %"


def duration(seconds: float | None) -> str:
    """Return a time in a unit of its size."""
    if seconds is None:
        return "–"
    if seconds < 0.5e-6:
        return "0 s"
    if seconds < 0.9995e-3:
        return f"{seconds * 1e6:.0f} µs"
    if seconds < 0.9995:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 99.95:
        return f"{seconds:.3g} s"
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    days, h = divmod(hours, 24)
    if days:
        return f"{days} d {h} h"
    return f"{h} h {m:02} min" if h else f"{m} min {s:02} s"


def tick_step(span: float, n_max: int) -> float:
    """Return the smallest of 1, 2, 5 × 10ⁿ that divides `span` into at most `n_max` pieces."""
    least = max(span, 1e-12) / n_max
    base = 10.0 ** math.floor(math.log10(least))
    return next(m * base for m in (1, 2, 5, 10) if m * base >= least * (1 - 1e-9))


def time_step(span_s: float, n_max: int) -> float:
    """Return the same for seconds, with steps of a clock from a minute on."""
    least = span_s / n_max
    if least <= _STEPS_S[0] / 3:
        return tick_step(span_s, n_max)
    whole = (float(step) for step in _STEPS_S if step >= least)
    return next(whole, _DAY_S * math.ceil(least / _DAY_S))


def ticks(start: float, end: float, step: float) -> list[float]:
    """Return the multiples of `step` from `start` to `end`."""
    first = math.ceil(start / step - 1e-9)
    last = math.floor(end / step + 1e-9)
    return [i * step for i in range(first, last + 1)]


def clock(seconds: float, step: float) -> str:
    """Return the label of a tick of times, as fine as its step."""
    if step >= 60:
        minutes = round(seconds / 60)
        hours, m = divmod(minutes, 60)
        return f"{hours}:{m:02} h" if step >= 600 or hours else f"{m} min"
    n_digits = max(0, -math.floor(math.log10(step) + 1e-9))
    return f"{seconds:.{n_digits}f} s"
