"""The rates of a measurement, which a picture shows: of this run, or from files of `cbatch bench --json`."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cbatch.bench.comparison import Load
from cbatch.bench.summary import Middle, SideRow, Summary, Width
from cbatch.errors import ConfigError
from cbatch.support.checks import reading


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
