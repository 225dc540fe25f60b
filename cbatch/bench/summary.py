"""Medians of what a comparison has measured, and the tables that show them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from cbatch.bench.comparison import COLD, Comparison, Load, Measured
from cbatch.bench.measured import PERCENTS
from cbatch.bench.sides import ONE_BY_ONE

OURS = ("engine", "serve", "one", "static")

CLIFF = 0.99
"""A width is a cliff below this share of a narrower one's rate: less is noise. Our choice."""


@dataclass(frozen=True, slots=True)
class Middle:
    """The median of some figures, and their range."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Middle | None:
        """Return the middle of some values; None of none."""
        found = sorted(values)
        return cls(statistics.median(found), found[0], found[-1]) if found else None


@dataclass(frozen=True, slots=True)
class SideRow:
    """All rounds of one side under one load. Rates are medians; times are medians of the rounds' percentiles in ms.

    Args:
        wall_ratio: the time of so many at once over the time of one alone; the number at once where nothing overlaps.
        of_bare: generated tokens a second over those of the bare loop of as many rows.
        of_ideal: the time over prompt tokens at the best prompt rate plus output at the best decode rate.
        ours: the side that is compared with this one.
        ratio: tokens a second of `ours` over those of this side, round by round.
        over_one: tokens a second over those of one request after another, by `llama_cpp.Llama` if it was measured.
    """

    workload: str
    load: Load
    state: str
    side: str
    n_counted: int
    n_rounds: int
    output_tps: Middle | None = None
    prompt_tps: float | None = None
    rps: float | None = None
    ttft_ms: dict[int, float] | None = None
    itl_ms: dict[int, float] | None = None
    total_ms: dict[int, float] | None = None
    wall_ratio: float | None = None
    of_bare: Middle | None = None
    of_ideal: float | None = None
    ours: str | None = None
    ratio: Middle | None = None
    over_one: Middle | None = None
    memory_mib: float | None = None


@dataclass(frozen=True, slots=True)
class Width:
    """What so many rows decode in a step: the bare loop's tokens a second, and the least width that is as fast."""

    n_rows: int
    bare_tps: float
    faster: int | None = None
    """The narrower width that is faster, if there is one: a cliff."""


@dataclass(frozen=True, slots=True)
class TextTable:
    """Cells as text, for people."""

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]
    note: str = ""


class Summary:
    """What a comparison has found."""

    def __init__(self, comparison: Comparison) -> None:
        self._measured = comparison.measured
        self._best_prompt_tps = max(comparison.prompt_tps.values(), default=None)
        self.plan, self.n_slots = comparison.plan, comparison.n_slots
        self.refused, self.notes = list(comparison.refused), list(comparison.notes)
        self.prompt_tps = dict(comparison.prompt_tps)
        self.widths = list(_widths(comparison.bare_tps))
        self._best_decode_tps = max((w.bare_tps for w in self.widths), default=None)
        keys = dict.fromkeys((m.workload, m.load, m.state, m.side) for m in self._measured)
        self.rows = [self._row(*key) for key in keys]

    # ---- rows ----

    def _rounds(self, workload: str, load: Load, state: str, side: str) -> list[Measured]:
        key = workload, load, state, side
        return [m for m in self._measured if (m.workload, m.load, m.state, m.side) == key]

    def _counted(self, row: SideRow, load: Load, side: str) -> dict[int, Measured]:
        """Return the rounds that count, by their number, of a row with this load and side."""
        found = self._rounds(row.workload, load, row.state, side)
        return {m.i_round: m for m in found if m.counts}

    def _row(self, workload: str, load: Load, state: str, side: str) -> SideRow:
        n_rounds = len(self._rounds(workload, load, state, side))
        row = SideRow(workload, load, state, side, 0, n_rounds)
        counted = self._counted(row, load, side)
        row = replace(row, n_counted=len(counted))
        figures = [m.figures for m in counted.values() if m.figures is not None]
        if not figures:
            return row
        ours = self._ours_of(side)
        return replace(
            row,
            output_tps=Middle.of(f.output_tps for f in figures),
            prompt_tps=statistics.median(f.prompt_tps for f in figures),
            rps=statistics.median(f.rps for f in figures),
            ttft_ms=_percentiles(f.ttft_ms for f in figures),
            itl_ms=_percentiles(f.itl_ms for f in figures),
            total_ms=_percentiles(f.total_ms for f in figures),
            wall_ratio=self._wall_ratio(counted, row),
            of_bare=Middle.of(
                _tps(m) / m.bare_tps
                for m in counted.values()
                if m.bare_tps and m.load.at_once is not None
            ),
            of_ideal=self._of_ideal(counted.values()),
            ours=ours,
            ratio=None if ours is None else _over(self._counted(row, load, ours), counted),
            over_one=self._over_one(counted, row),
            memory_mib=_last(m.memory_mib for m in counted.values()),
        )

    def _wall_ratio(self, counted: dict[int, Measured], row: SideRow) -> float | None:
        """Return wall(c) / wall(1) of equal requests: by tokens, so that a round may have any number of them."""
        n = row.load.at_once
        if n is None or row.side in ONE_BY_ONE:
            return None
        alone = self._counted(row, type(row.load)(at_once=1), row.side)
        found = Middle.of(n * _tps(alone[i]) / _tps(m) for i, m in counted.items() if i in alone)
        return None if found is None else found.median

    def _of_ideal(self, rounds: Iterable[Measured]) -> float | None:
        prompt, decode = self._best_prompt_tps, self._best_decode_tps
        if prompt is None or decode is None:
            return None
        found = Middle.of(
            (m.n_distinct / prompt + m.figures.n_output / decode) / m.figures.seconds
            for m in rounds
            if m.figures is not None and m.state == COLD and m.load.at_once is not None
        )
        return None if found is None else found.median

    def _ours_of(self, side: str) -> str | None:
        """Return which side of ours a side is compared with: a server with our server, all else with the engine."""
        there = {m.side for m in self._measured}
        first = "engine" if side in (*OURS, *ONE_BY_ONE) else "serve"
        found = [name for name in (first, "engine", "serve") if name in there and name != side]
        return None if side in ("engine", "serve") or not found else found[0]

    def _over_one(self, counted: dict[int, Measured], row: SideRow) -> Middle | None:
        """Return tokens a second over those of one request after another, where that was measured."""
        if row.side in ONE_BY_ONE:
            return None
        there = {m.side for m in self._measured}
        one = next((name for name in ("llama", "one") if name in there), "")
        loads = dict.fromkeys(m.load for m in self._measured if m.side == one)
        at = row.load if row.load in loads else next(iter(loads), row.load)
        return _over(counted, self._counted(row, at, one))

    # ---- problems ----

    def problems(self) -> list[str]:
        """Return every rate that was refused, with the reason."""
        rounds = [
            f"{m.workload}, {m.load}, round {m.i_round + 1}, {m.state}, {m.side}: {'; '.join(m.problems)}"
            for m in self._measured
            if m.problems
        ]
        return [*self.refused, *rounds]

    def remarks(self) -> list[str]:
        """Return what a reader must know to read the figures."""
        early: dict[str, int] = {}
        for m in self._measured:
            early[m.side] = early.get(m.side, 0) + m.n_early
        ended = [
            f"{side}: ended answers early, {n:,} tokens in all are missing; rates count generated tokens only"
            for side, n in early.items()
            if n
        ]
        cliffs = [
            f"cliff: {w.n_rows} rows decode {w.bare_tps:,.0f} tokens/s, fewer than {w.faster} rows do"
            for w in self.widths
            if w.faster is not None
        ]
        return [*self.notes, *ended, *cliffs]

    # ---- tables ----

    def tables(self) -> list[TextTable]:
        """Return one table for each workload, and one of widths."""
        found = [self._table(w.name, w.told, w.sizes) for w in self.plan.workloads]
        found = [table for table in found if table.rows]
        if len(self.widths) > 1:
            rows: list[tuple[str, ...]] = [
                (str(w.n_rows), _n(w.bare_tps), _n(1e3 * w.n_rows / w.bare_tps), _cliff(w))
                for w in self.widths
            ]
            columns = ("rows", "tokens/s", "ms a step", "")
            found.append(TextTable("Rows of a step, in a bare loop of llama_decode", columns, rows))
        return found

    def _table(self, name: str, told: str, sizes: str) -> TextTable:
        rows = [row for row in self.rows if row.workload == name]
        shown: list[tuple[str, Callable[[SideRow], str]]] = [
            ("load", lambda r: str(r.load)),
            ("state", lambda r: r.state),
            ("side", lambda r: r.side),
            ("out/s", lambda r: _n(r.output_tps.median) if r.output_tps else "refused"),
            ("in/s", lambda r: _n(r.prompt_tps)),
            ("req/s", lambda r: _n(r.rps)),
            ("TTFT ms", lambda r: _times(r.ttft_ms)),
            ("ITL ms", lambda r: _times(r.itl_ms)),
            ("end to end ms", lambda r: _times(r.total_ms)),
            ("wall(c)/wall(1)", lambda r: _ratio(r.wall_ratio)),
            ("of bare", lambda r: _ratio(r.of_bare.median if r.of_bare else None)),
            ("of ideal", lambda r: _ratio(r.of_ideal)),
            ("over one by one", lambda r: shown_middle(r.over_one)),
            ("cbatch over it", lambda r: shown_middle(r.ratio)),
            ("MiB", lambda r: _n(r.memory_mib)),
        ]
        cells = [tuple(show(row) for _, show in shown) for row in rows]
        kept = [
            i
            for i, (column, _) in enumerate(shown)
            if column in ("load", "side", "out/s") or any(c[i] not in ("", "cold") for c in cells)
        ]
        columns = tuple(shown[i][0] for i in kept)
        note = "Times are p50 / p99."
        title = f"{name}: {told} ({sizes})" if sizes else f"{name}: {told}"
        return TextTable(title, columns, [tuple(c[i] for i in kept) for c in cells], note)

    def as_dict(self) -> dict[str, Any]:
        """Return everything as JSON values: medians, and each round."""
        return {
            "rows": [asdict(row) for row in self.rows],
            "widths": [asdict(width) for width in self.widths],
            "prompt_tps": self.prompt_tps,
            "refused": self.problems(),
            "notes": self.remarks(),
            "rounds": [
                {**asdict(m), "figures": m.figures.as_dict() if m.figures else None}
                for m in self._measured
            ],
        }


def _widths(by_rows: Mapping[int, Sequence[float]]) -> Iterator[Width]:
    """Yield the median of the bare loop by rows, and which narrower width is faster."""
    best: tuple[float, int] | None = None
    for n_rows in sorted(by_rows):
        tps = statistics.median(by_rows[n_rows])
        yield Width(n_rows, tps, best[1] if best is not None and tps < CLIFF * best[0] else None)
        best = max(best or (0.0, 0), (tps, n_rows))


def _percentiles(rounds: Iterable[Any]) -> dict[int, float] | None:
    found = [times for times in rounds if times]
    return {p: statistics.median(times[p] for times in found) for p in PERCENTS} if found else None


def _over(these: dict[int, Measured], those: dict[int, Measured]) -> Middle | None:
    return Middle.of(_tps(these[i]) / _tps(m) for i, m in those.items() if i in these)


def _tps(m: Measured) -> float:
    return 0.0 if m.figures is None else m.figures.output_tps


def _last(values: Iterable[float | None]) -> float | None:
    found = [value for value in values if value is not None]
    return found[-1] if found else None


# ---- cells ----


def _n(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _times(times: dict[int, float] | None) -> str:
    return "" if not times else f"{_n(times[50])} / {_n(times[99])}"


def shown_middle(value: Middle | None) -> str:
    """Return a median and its range as text; nothing of None."""
    if value is None:
        return ""
    return f"{value.median:.2f} ({value.least:.2f}–{value.most:.2f})"


def _cliff(width: Width) -> str:
    return "" if width.faster is None else f"cliff: {width.faster} rows are faster"


# ---- text ----

WORD_COLUMNS = ("load", "state", "side", "setting", "verdict", "")
"""Columns of words, on the left; all others are numbers."""


def text_table(table: TextTable, width: int) -> list[str]:
    """Return a table as lines of at most `width` columns; what is too wide follows below, with the words again.

    A cell that is wider than the terminal alone is not cut.
    """
    columns = [*zip(table.columns, *table.rows, strict=True)]
    n_words = next((i for i, name in enumerate(table.columns) if name not in WORD_COLUMNS), 0)
    n_words = n_words if n_words < len(columns) else 0
    words, parts = columns[:n_words], list[list[tuple[str, ...]]]()
    for column in columns[n_words:]:
        if parts and _width_of([*words, *parts[-1], column]) <= width:
            parts[-1].append(column)
        else:
            parts.append([column])
    lines: list[str] = []
    for part in parts:
        lines += [""] if lines else []
        lines += _aligned([*words, *part])
    return lines


def _width_of(columns: Sequence[Sequence[str]]) -> int:
    return sum(max(map(len, column)) for column in columns) + 2 * (len(columns) - 1)


def _aligned(columns: Sequence[Sequence[str]]) -> list[str]:
    shown = []
    for column in columns:
        n = max(map(len, column))
        is_word = column[0] in WORD_COLUMNS
        shown.append([cell.ljust(n) if is_word else cell.rjust(n) for cell in column])
    return ["  ".join(cells).rstrip() for cells in zip(*shown, strict=True)]


# ---- files ----


def markdown(tables: Sequence[TextTable], lines: Sequence[str] = ()) -> str:
    """Return tables, and lines behind them, as Markdown."""
    parts = ["\n".join(_markdown_lines(table)) for table in tables]
    parts += ["\n".join(f"- {line}" for line in lines)] if lines else []
    return "\n\n".join(parts) + "\n"


def _markdown_lines(table: TextTable) -> Iterator[str]:
    yield f"## {table.title}"
    yield ""
    for cells in (table.columns, ("---",) * len(table.columns), *table.rows):
        yield f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |"
    if table.note:
        yield ""
        yield table.note
