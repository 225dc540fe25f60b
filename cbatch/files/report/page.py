"""`report.html`: what a run did, on one page that needs nothing but a browser."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timezone
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from cbatch.errors import ConfigError
from cbatch.files.output.durable import whole
from cbatch.files.report.charts import Axis, Curve, curve_chart, distribution_chart
from cbatch.files.report.environment import machine_facts, version_facts
from cbatch.files.report.markup import Markup, tag
from cbatch.files.report.timeline import slot_chart, stretch
from cbatch.files.report.units import count, duration, percent

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping

    from cbatch.core.stats import Percentiles
    from cbatch.files.report.recorder import Bucket, RunRecorder

    Value = Callable[[Bucket, float], float]

N_POINTS = 170
"""Points of a curve: six pixels each."""

_SLOTS = "Slots in use"
_GENERATOR = tag("meta", name="generator", content="cbatch")
_N_BEGINNING = 256
"""Bytes of a page in which its generator stands."""
_NO_NETWORK = "default-src 'none'; style-src 'unsafe-inline'"
_PHASES = {
    "decode": ("Decoding", "llama.cpp computes"),
    "sample": ("Sampling", "choosing the next tokens"),
    "plan": ("Planning", "admission, and what each step computes"),
    "border": ("Calls", "around decoding and sampling"),
    "apply": ("Results", "taking in what was sampled"),
    "deliver": ("Delivery", "handing out text and results"),
    "idle": ("Idle", "nothing to compute, between runs"),
}


def is_report(path: Path) -> bool:
    """Whether a file is a report, or empty, so that another one may replace it."""
    with path.open("rb") as file:
        beginning = file.read(_N_BEGINNING)
    return not beginning or _GENERATOR.encode() in beginning


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
        path: where.
        recorder: what it saw.
        title: of the page, such as the input's name.
        settings: readable facts to show: model, options.
        facts: of the machine and the versions; None finds them out.
        now: the date on the page.

    Raises:
        ConfigError: the file cannot be written.
    """
    if facts is None:
        facts = {**machine_facts(), **version_facts()}
    page = report_page(recorder, title, settings, facts, now or datetime.now(timezone.utc))
    _write(Path(path), page.encode("utf-8", "replace"))


def _write(path: Path, data: bytes) -> None:
    try:
        with whole(path) as part:
            part.write_bytes(data)
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
    """Return the page as HTML."""
    style = files("cbatch.files.report").joinpath("report.css").read_text(encoding="utf-8")
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        _GENERATOR,
        tag("meta", http_equiv="Content-Security-Policy", content=_NO_NETWORK),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", f"{title} – cbatch"),
        tag("style", Markup(style)),
    )
    sections = (
        _headline(recorder),
        _timeline(recorder),
        _curves(recorder),
        _distributions(recorder),
        _time_spent(recorder),
        _outcomes(recorder),
        _facts_section(settings, facts),
    )
    body = tag("body", tag("main", _header(recorder, title, now), *sections), _footer())
    return "<!doctype html>\n" + tag("html", head, body, lang="en")


def _header(recorder: RunRecorder, title: str, now: datetime) -> Markup:
    n_items = recorder.results.n_done
    items = f"{count(n_items)} item{'s' * (n_items != 1)} in {duration(recorder.steps.total_s)}"
    date = now.strftime("%d %B %Y, %H:%M %Z").lstrip("0").rstrip()
    return tag(
        "header",
        tag("p", "cbatch run", class_="kicker"),
        tag("h1", title),
        tag("p", f"{items} · ", tag("time", date, datetime=now.isoformat(timespec="seconds"))),
    )


def _footer() -> Markup:
    return tag(
        "footer",
        tag(
            "p",
            "TTFT: from a request's submission to its first token, time in the queue included. "
            "ITL: the time between two tokens of one request. "
            "Prompt tokens that were computed again after a preemption count twice.",
        ),
    )


def _section(name: str, said: str, *children: str) -> Markup:
    return tag("section", tag("h2", name), tag("p", said, class_="lead") if said else "", *children)


# ---- numbers ----


@dataclass(frozen=True, slots=True)
class _Number:
    name: str
    value: str
    unit: str = ""
    detail: str = ""


def _headline(recorder: RunRecorder) -> Markup:
    numbers = _throughput_numbers(recorder) + _latency_numbers(recorder)
    return tag("dl", *(_number(n) for n in numbers), class_="numbers")


def _throughput_numbers(recorder: RunRecorder) -> list[_Number]:
    steps, results = recorder.steps, recorder.results
    total_s = steps.total_s or 1e-9
    cached = percent(results.n_cached, results.n_prompt)
    failed = f"{count(results.n_failed)} failed" if results.n_failed else "none failed"
    return [
        _Number("Items", count(results.n_done), detail=failed),
        _Number(
            "Output", count(steps.n_output / total_s), "tok/s", f"{count(steps.n_output)} tokens"
        ),
        _Number(
            "Prompts", count(steps.n_prompt / total_s), "tok/s", f"{count(steps.n_prompt)} tokens"
        ),
        _Number("From cache", cached, detail=f"of prompt tokens, in {count(results.n_hits)} items"),
        _Number("Slots in use", count(steps.mean_slots), f"of {recorder.n_slots}", "on average"),
    ]


def _latency_numbers(recorder: RunRecorder) -> list[_Number]:
    ttft_s, itl_s = recorder.results.ttft_s, recorder.steps.itl_s
    named = (
        ("First token", ttft_s),
        ("Next token", itl_s),
        ("In the queue", recorder.results.queue_s),
    )
    return [_median(name, times) for name, times in named]


def _median(name: str, times: Percentiles) -> _Number:
    value, _, unit = duration(times.at(50)).partition(" ")
    return _Number(name, value, unit, f"median; p99 {duration(times.at(99))}")


def _number(n: _Number) -> Markup:
    value = tag("dd", n.value, tag("small", f" {n.unit}") if n.unit else "", class_="value")
    return tag("div", tag("dt", n.name), value, tag("dd", n.detail, class_="detail"))


# ---- pictures ----


def _timeline(recorder: RunRecorder) -> Markup:
    steps, parts = recorder.steps, recorder.steps.spans.parts()
    if not parts:
        return Markup("")
    zero_s, is_cut = steps.start_s or 0.0, len(parts) > 1
    names = ("The beginning", "The end") if is_cut else ("",)
    figures = [
        _figure(name, slot_chart(part, recorder.n_slots, zero_s), stretch(part, zero_s))
        for name, part in zip(names, parts, strict=True)
    ]
    said = "A row for each slot, a bar for each request in it; a slot that is free is lent at once."
    if is_cut:
        said += (
            f" Of {count(steps.spans.n_spans)} bars the first and the last are shown;"
            " the curves below tell of all."
        )
    return _section("Timeline of the slots", said, _legend(), *figures)


def _legend() -> Markup:
    entries = [
        tag("span", tag("i", class_=f"swatch {kind}"), text)
        for kind, text in (
            ("prefill", "prefill: the prompt is computed"),
            ("decode", "decode: the answer is written"),
            ("free", "free"),
        )
    ]
    return tag("p", *entries, class_="legend")


def _figure(name: str, chart: str, note: str = "") -> Markup:
    caption = tag("figcaption", tag("b", name), " ", tag("span", note)) if name else ""
    return tag("figure", caption, chart)


_CURVES: tuple[tuple[str, str, Value], ...] = (
    ("Output tokens per second", "blue", lambda work, s: work.n_output / s),
    ("Prompt tokens per second", "violet", lambda work, s: work.n_prompt / s),
    (_SLOTS, "teal", lambda work, s: work.slots_s / s),
    ("Requests waiting for a slot", "amber", lambda work, s: work.waiting_s / s),
    ("Cells in use, kept prompts included", "rose", lambda work, s: work.cells_s / s),
)


def _curves(recorder: RunRecorder) -> Markup:
    steps = recorder.steps
    pieces = steps.buckets.joined(N_POINTS)
    if not pieces:
        return Markup("")
    axis = Axis(0.0, steps.total_s)
    figures = []
    for name, color, value in _CURVES:
        points = [(start_s, value(work, seconds)) for start_s, seconds, work in pieces]
        limit = recorder.n_slots if name == _SLOTS else None
        mean = sum(value(work, steps.total_s) for _, _, work in pieces)
        if name == _SLOTS:
            mean = steps.mean_slots
        note = f"mean {count(mean)}, most {count(max(v for _, v in points))}"
        chart = curve_chart(Curve(points, color, limit), axis, f"{name} over time: {note}")
        figures.append(_figure(name, chart, note))
    return _section("Over time", "", *figures)


def _distributions(recorder: RunRecorder) -> Markup:
    named = (
        ("Time to the first token (TTFT)", "requests", "blue", recorder.results.ttft_s),
        ("Time between tokens (ITL)", "gaps", "teal", recorder.steps.itl_s),
    )
    figures = [
        _figure(name, distribution_chart(times, name, color), f"{count(times.n)} {unit}")
        for name, unit, color, times in named
        if times.n
    ]
    if not figures:
        return Markup("")
    said = "How often each time occurred, on a logarithmic axis."
    return _section("Latency", said, tag("div", *figures, class_="pair"))


def _time_spent(recorder: RunRecorder) -> Markup:
    """Return the parts of the computing thread's time: a bar, and the same as a table."""
    steps = recorder.steps
    if not steps.total_s:
        return Markup("")
    spent = {**steps.phases, "idle": max(0.0, steps.total_s - sum(steps.phases.values()))}
    bar = [
        tag("i", class_=f"part-{name}", style=f"flex-grow:{seconds / steps.total_s:.5f}")
        for name, seconds in spent.items()
    ]
    rows = [
        tag(
            "tr",
            tag("th", tag("i", class_=f"swatch part-{name}"), _PHASES[name][0], scope="row"),
            tag("td", _PHASES[name][1], class_="said"),
            tag("td", duration(seconds)),
            tag("td", percent(seconds, steps.total_s)),
        )
        for name, seconds in spent.items()
    ]
    said = f"The thread that computes: {count(steps.n_steps)} steps in {count(steps.n_runs)} runs."
    if steps.n_failed_steps:
        said += f" {count(steps.n_failed_steps)} failed and were done again."
    return _section(
        "Where the time went",
        said,
        tag("div", *bar, class_="stack", aria_hidden="true"),
        tag("table", *rows),
    )


# ---- tables ----


def _outcomes(recorder: RunRecorder) -> Markup:
    results = recorder.results
    if not results.n_done:
        return Markup("")
    most = max(results.finish_reasons.values())
    reasons = [
        tag(
            "tr",
            tag("th", reason, scope="row"),
            tag("td", tag("i", class_=f"bar {reason}", style=f"width:{100 * n / most:.1f}%")),
            tag("td", count(n)),
            tag("td", percent(n, results.n_done)),
        )
        for reason, n in results.finish_reasons.most_common()
    ]
    return _section("How items ended", "", tag("table", *reasons, class_="bars"), _errors(recorder))


def _errors(recorder: RunRecorder) -> Markup:
    errors = sorted(recorder.results.errors.items(), key=lambda e: -e[1].n)
    if not errors:
        return Markup("")
    head = tag(
        "tr", *(tag("th", name, scope="col") for name in ("error", "items", "first message"))
    )
    rows = [
        tag(
            "tr",
            tag("th", tag("code", kind), scope="row"),
            tag("td", count(error.n)),
            tag("td", error.message, class_="message"),
        )
        for kind, error in errors
    ]
    return tag("table", tag("thead", head), tag("tbody", *rows), class_="errors")


def _facts_section(settings: Mapping[str, object], facts: Mapping[str, str]) -> Markup:
    lists = [
        tag("div", tag("h3", name), tag("dl", *(_fact(k, str(v)) for k, v in given.items())))
        for name, given in (("Settings", settings), ("Machine and versions", facts))
        if given
    ]
    return tag("section", *lists, class_="pair facts")


def _fact(name: str, value: str) -> Markup:
    return tag("div", tag("dt", name), tag("dd", value))
