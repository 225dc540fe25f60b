"""`report.html`: a run on one page that needs nothing but a browser."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

import cbatch
from cbatch.errors import ConfigError
from cbatch.files.output.durable import whole
from cbatch.files.report.charts import Axis, CurveChart, DistributionChart, SlotChart
from cbatch.files.units import count, duration, percent

if TYPE_CHECKING:
    from collections.abc import Mapping

    from jinja2 import Environment

    from cbatch.files.report.recorder import RunRecorder

N_POINTS = 170  # points of a curve: six pixels each
_GENERATOR = b'<meta name="generator" content="cbatch">'
_N_BEGINNING = 256  # the template has the generator in these first bytes of a page
_SLOTS = "Slots in use"
_PACKAGES = ("llama-cpp-python", "llguidance", "numpy")


def is_report(path: Path) -> bool:
    """Whether a file is a report, or empty, so that another one may replace it."""
    with path.open("rb") as file:
        beginning = file.read(_N_BEGINNING)
    return not beginning or _GENERATOR in beginning


def write_report(
    path: str | os.PathLike[str],
    recorder: RunRecorder,
    *,
    title: str,
    settings: Mapping[str, object],
    facts: Mapping[str, str] | None = None,
    now: datetime | None = None,
) -> None:
    """Write the page of a run; the file appears whole or not at all, an older one is replaced.

    End recording first: `engine.record_steps(None)`.

    Args:
        title: of the page, such as the input's name.
        settings: of the run, such as model and options.
        facts: of the machine and the versions; None: those of this machine.
        now: the date on the page.

    Raises:
        ConfigError: the file cannot be written.
    """
    if facts is None:
        facts = machine_and_versions()
    page = report_page(recorder, title, settings, facts, now or datetime.now(timezone.utc))
    try:
        with whole(Path(path)) as part:
            part.write_bytes(page.encode("utf-8", "replace"))
    except OSError as error:
        raise ConfigError(
            f"the report cannot be written to {path}: {error.strerror or error}; give another place"
        ) from error


def report_page(
    recorder: RunRecorder,
    title: str,
    settings: Mapping[str, object],
    facts: Mapping[str, str],
    now: datetime,
) -> str:
    """Return the page as HTML; every text in it is escaped by the template engine."""
    zero_s = recorder.steps.start_s or 0.0
    return (
        templates()
        .get_template("report.html")
        .render(
            title=title,
            now=now,
            n_slots=recorder.n_slots,
            steps=recorder.steps,
            results=recorder.results,
            timeline=[SlotChart(p, recorder.n_slots, zero_s) for p in recorder.steps.spans.parts()],
            curves=_curves(recorder),
            distributions=_distributions(recorder),
            settings=settings,
            machine=facts,
        )
    )


def templates(*packages: str) -> Environment:
    """Return the templates of packages, and what all pages share; every text in one is escaped."""
    from jinja2 import (  # slow to import
        ChoiceLoader,
        Environment,
        PackageLoader,
        StrictUndefined,
    )

    environment = Environment(
        loader=ChoiceLoader([PackageLoader(name) for name in (*packages, "cbatch.files.report")]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(count=count, duration=duration, percent=percent, px=_px, date=_date)
    return environment


def _date(moment: datetime) -> str:
    return moment.strftime("%d %B %Y, %H:%M %Z").lstrip("0").rstrip()


def _px(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


_CURVES = (
    ("Output tokens per second", "blue"),
    ("Prompt tokens per second", "violet"),
    (_SLOTS, "teal"),
    ("Requests waiting for a slot", "amber"),
    ("Cells in use, kept prompts included", "rose"),
)
"""Name and color of each figure of `WorkOverTime`, divided by seconds."""


def _curves(recorder: RunRecorder) -> list[CurveChart]:
    steps = recorder.steps
    if not steps.total_s:
        return []
    starts_s, seconds, figures = steps.work.joined(N_POINTS)
    axis = Axis(0.0, steps.total_s)
    charts = []
    for (name, color), values in zip(_CURVES, figures.T, strict=True):
        points = list(zip(starts_s.tolist(), (values / seconds).tolist(), strict=True))
        mean, limit = values.sum() / steps.total_s, None
        if name == _SLOTS:
            mean, limit = steps.mean_slots, recorder.n_slots
        charts.append(CurveChart(name, mean, points, axis, color, limit))
    return charts


def _distributions(recorder: RunRecorder) -> list[DistributionChart]:
    named = (
        ("Time to the first token (TTFT)", "requests", "blue", recorder.results.ttft_s),
        ("Time between tokens (ITL)", "gaps", "teal", recorder.steps.itl_s),
    )
    return [
        DistributionChart(name, f"{count(times.n)} {unit}", times, color)
        for name, unit, color, times in named
        if times.n
    ]


# ---- the machine ----


def machine_facts() -> dict[str, str]:
    """Return processor, cores, memory and system of this machine; unknown ones are left out."""
    found = {
        "processor": _processor(),
        "cores": _cores(),
        "memory": _memory(),
        "system": f"{platform.system()} {platform.release()}, {platform.machine()}",
    }
    return {name: value for name, value in found.items() if value}


def machine_and_versions() -> dict[str, str]:
    """Return the facts of this machine, then the versions."""
    return {**machine_facts(), **version_facts()}


def version_facts() -> dict[str, str]:
    """Return the versions of Python and of the packages that compute."""
    versions = {"cbatch": cbatch.__version__, "Python": platform.python_version()}
    for package in _PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return versions


def _processor() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()


def _cores() -> str:
    n_all, n_usable = os.cpu_count() or 1, len(os.sched_getaffinity(0))
    return str(n_all) if n_usable == n_all else f"{n_usable} of {n_all}"


def _memory() -> str:
    n_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return f"{n_bytes / 2**30:.0f} GiB"
