"""The page of a measurement, tables and plots that need nothing but a browser; and its rates as one picture."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

from cbatch.bench.comparison import COLD, Load
from cbatch.bench.summary import Middle, SideRow, Summary, Width
from cbatch.errors import ConfigError
from cbatch.files.report.charts import LoadChart, Point
from cbatch.files.report.page import templates
from cbatch.support.checks import reading

_BARE = "bare loop"
_COLORS = ("blue", "rose", "teal", "amber", "violet")
"""Of the sides, in their order; what comes behind them begins again."""


def load_of(row: SideRow) -> float:
    """Return the number that a load is on the axis."""
    load = row.load
    return float(load.at_once or 1) if load.rate is None else load.rate


def charts_of(rows: Sequence[SideRow], widths: Sequence[Width] = ()) -> list[LoadChart]:
    """Return the plots of one workload's rows that count; beside the rates, what the bare loop decodes."""
    cold = [row for row in rows if row.state == COLD and row.output_tps is not None]
    named: tuple[tuple[str, Callable[[SideRow], Point | None]], ...] = (
        ("Generated tokens a second", _output),
        ("First token, median, ms", lambda row: _median(row, row.ttft_ms)),
        ("Between tokens, median, ms", lambda row: _median(row, row.itl_ms)),
        ("Whole answer, median, ms", lambda row: _median(row, row.total_ms)),
    )
    found = []
    for title, point_of in named:
        series: dict[str, list[Point]] = {}
        for row in cold:
            point = point_of(row)
            if point is not None:
                series.setdefault(row.side, []).append(point)
        if series and point_of is _output:
            series |= _bare(widths, {row.load.at_once for row in cold})
        if series:
            found.append(LoadChart(title, {k: sorted(v) for k, v in series.items()}))
    return found


def _bare(widths: Sequence[Width], at_once: Collection[int | None]) -> dict[str, list[Point]]:
    """Return the line of the bare loop, which decodes as many rows as there are requests at once."""
    shown = [(float(w.n_rows), w.bare_tps) for w in widths if w.n_rows in at_once]
    return {_BARE: [Point(n, tps, tps, tps) for n, tps in shown]} if shown else {}


def _output(row: SideRow) -> Point | None:
    middle = row.output_tps
    if middle is None:
        return None
    return Point(load_of(row), middle.median, middle.least, middle.most)


def _median(row: SideRow, times: Mapping[int, float] | None) -> Point | None:
    return None if not times else Point(load_of(row), times[50], times[50], times[50])


def bench_page(
    summary: Summary,
    settings: Mapping[str, Any],
    machine: Mapping[str, str],
    now: datetime | None = None,
) -> str:
    """Return the page as HTML; every text in it is escaped by the template engine."""
    now = now or datetime.now(timezone.utc)
    tables = {table.title: table for table in summary.tables()}
    parts = []
    for title, table in tables.items():
        rows = [row for row in summary.rows if title.startswith(f"{row.workload}:")]
        parts.append((table, charts_of(rows, summary.widths)))
    return (
        templates("cbatch.cli")
        .get_template("bench.html")
        .render(
            title=Path(settings["model"]).name,
            now=now,
            parts=parts,
            colors=_colors(summary.rows),
            is_rate=_is_rate(summary.rows),
            remarks=summary.remarks(),
            problems=summary.problems(),
            settings=settings,
            machine=machine,
        )
    )


@dataclass(frozen=True, slots=True)
class Rates:
    """The generated tokens a second of one model: of each side under each load, and of the bare loop by rows."""

    model: str
    rows: Sequence[SideRow]
    widths: Sequence[Width]

    @classmethod
    def of(cls, summary: Summary, settings: Mapping[str, Any]) -> Rates:
        """Return the rates of a measurement."""
        return cls(Path(settings["model"]).name, summary.rows, summary.widths)


def read_rates(path: Path) -> Rates:
    """Read the rates that a measurement has written as JSON.

    Raises:
        ConfigError: the file cannot be read, or has no such figures.
    """
    with reading(str(path)):
        text = path.read_text(encoding="utf-8")
    try:
        found = json.loads(text)
        model = Path(found["settings"]["model"]).name
        widths = [Width(**width) for width in found["widths"]]
        return Rates(model, [_row(row) for row in found["rows"]], widths)
    except (ValueError, KeyError, TypeError):
        raise ConfigError(f"{path}: has no figures: give a file of cbatch bench --json") from None


def _row(found: Mapping[str, Any]) -> SideRow:
    names = ("workload", "state", "side", "n_counted", "n_rounds")
    tps = found["output_tps"]
    return SideRow(
        load=Load(**found["load"]),
        output_tps=None if tps is None else Middle(**tps),
        **{name: found[name] for name in names},
    )


def merged(runs: Iterable[Rates], workloads: Collection[str]) -> list[Rates]:
    """Return the rates of some workloads, those of one model together: one run may have few at once, another many."""
    by_model: dict[str, list[Rates]] = {}
    for run in runs:
        by_model.setdefault(run.model, []).append(run)
    return [
        Rates(
            model,
            [row for run in group for row in run.rows if row.workload in workloads],
            [width for run in group for width in run.widths],
        )
        for model, group in by_model.items()
    ]


class Panel(NamedTuple):
    """A plot in a picture, and where its corner is."""

    x: float
    y: float
    chart: LoadChart


def bench_picture(runs: Sequence[Rates]) -> str:
    """Return the generated tokens a second of each workload and model as one SVG, readable on light and dark pages."""
    rows = [row for run in runs for row in run.rows]
    charts = []
    for name in dict.fromkeys(row.workload for row in rows):
        for run in runs:
            found = charts_of([row for row in run.rows if row.workload == name], run.widths)
            if found:
                found[0].title = name if len(runs) == 1 else f"{name}, {run.model}"
                charts.append(found[0])
    panels = [Panel(i % 2 * 520.0, 56.0 + i // 2 * 270.0, chart) for i, chart in enumerate(charts)]
    return (
        templates("cbatch.cli")
        .get_template("bench.svg")
        .render(
            title=", ".join(run.model for run in runs),
            panels=panels,
            sides=list(dict.fromkeys(side for chart in charts for side in chart.series)),
            colors=_colors(rows),
            is_rate=_is_rate(rows),
            height=56 + (len(panels) + 1) // 2 * 270,
        )
    )


def _colors(rows: Iterable[SideRow]) -> dict[str, str]:
    sides = dict.fromkeys(row.side for row in rows)
    return {side: _COLORS[i % len(_COLORS)] for i, side in enumerate(sides)} | {_BARE: "gray"}


def _is_rate(rows: Iterable[SideRow]) -> bool:
    return any(row.load.rate is not None for row in rows)
