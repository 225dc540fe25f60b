"""The page of a run: whole, alone, and true to what was recorded."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import datetime, timezone
from html.parser import HTMLParser
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest

import cbatch
from cbatch.errors import ConfigError, GrammarError
from cbatch.files.report.charts import N_COLORS, Axis, DistributionChart, colors
from cbatch.files.report.page import machine_facts, report_page, version_facts, write_report
from cbatch.files.report.recorder import N_SPANS_PER_SLOT, RunRecorder
from cbatch.files.report.spans import SlotSpan
from cbatch.files.units import (
    clock,
    count,
    duration,
    percent,
    short,
    tick_step,
    ticks,
    time_step,
)
from cbatch.stats import Percentiles
from tests.files.steps import decode, prefill, result_of, run_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

NOW = datetime(2026, 3, 1, 9, 5, tzinfo=timezone.utc)


class Reader(HTMLParser):
    """Reads a page; fails where its tags are not balanced."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: list[tuple[str, str]] = []
        self.attributes: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes.append((tag, dict(attrs)))
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open:
            self.texts.append((self.open[-1], data))

    def all(self, tag: str) -> list[str]:
        return [text for name, text in self.texts if name == tag]


def a_run(n_slots: int = 2, id: str = "a") -> RunRecorder:
    """Two requests, one behind the other, then one that failed."""
    recorder = RunRecorder(n_slots)
    recorder(run_of(100.0, prefill(0, id), n_waiting=1))
    recorder(run_of(101.0, decode(0, id, 2)))
    recorder(run_of(102.0, prefill(0, "b")))
    recorder(run_of(103.0, decode(0, "b", 2)))
    recorder.add_result(result_of(id))
    recorder.add_result(result_of("b", "length"))
    recorder.add_result(result_of("c", "error", GrammarError("regex", "a <bad> one"), ttft_s=None))
    return recorder


def page_of(recorder: RunRecorder, title: str = "chats.jsonl") -> str:
    return report_page(recorder, title, {"model": "m.gguf"}, {"cores": "2"}, NOW)


def test_page_is_whole_and_tells_of_everything() -> None:
    page = Reader(page_of(a_run()))
    assert page.all("h1") == ["chats.jsonl"]
    assert page.all("h2") == [
        "Timeline of the slots", "Over time", "Latency", "Where the time went", "How items ended",
    ]  # fmt: skip
    assert page.all("time") == ["1 March 2026, 09:05 UTC"]
    assert {"m.gguf", "2", "1 failed"} <= set(page.all("dd"))
    assert {"GrammarError"} == set(page.all("code"))
    assert "regex: a <bad> one" in page.all("td")


def test_page_tells_of_pad_rows_where_there_were_some() -> None:
    for n_pad_rows, words in ((0, False), (3, True)):
        recorder = RunRecorder(n_slots=2)
        recorder(run_of(0, prefill(0, "a"), n_pad_rows=n_pad_rows))
        recorder(run_of(1, decode(0, "a"), n_pad_rows=n_pad_rows, n_steps=2))
        said = "6 pad rows beside 3 rows of sequences" in page_of(recorder)
        assert said == words


def test_page_tells_of_draft_tokens_where_there_were_some() -> None:
    recorder = RunRecorder(n_slots=2)
    recorder(run_of(0, prefill(0, "a")))
    recorder.add_result(result_of("a"))
    assert "Draft tokens" not in page_of(recorder)
    timings = replace(
        result_of("b").timings,
        n_draft_tokens=8,
        n_accepted_tokens=6,
        n_job_draft_tokens=3,
        n_job_accepted_tokens=1,
    )
    recorder.add_result(replace(result_of("b"), timings=timings))
    page = Reader(page_of(recorder))
    numbers = dict(zip(page.all("dt"), page.all("dd"), strict=False))
    values = [*page.all("dd")]
    assert "Draft tokens" in numbers
    assert "75 %" in values
    assert "of 8; from other answers 1 of 3, from the draft model 0 of 0" in values


def test_page_needs_nothing_from_elsewhere() -> None:
    page = page_of(a_run())
    assert "http" not in page.replace("http-equiv", "")
    assert not re.search(r"url\(|@import|<script|<link|<img| src=| href=", page)
    policy = {a["content"] for t, a in Reader(page).attributes if a.get("http-equiv")}
    assert policy == {"default-src 'none'; style-src 'unsafe-inline'"}


@pytest.mark.parametrize("id", ["<script>x</script>", "]]>", "\ud800"])
def test_id_and_title_are_text_whatever_they_say(tmp_path: Path, id: str) -> None:
    path = tmp_path / "report.html"
    write_report(path, a_run(id=id), title=id, settings={id: id}, facts={}, now=NOW)
    written, shown = path.read_text(encoding="utf-8"), id.replace("\ud800", "?")
    page = Reader(written)
    assert "script" not in {tag for tag, _ in page.attributes}
    assert page.all("h1") == [shown]
    assert any(text.startswith(f"{shown}\nslot 0, prefill") for text in page.all("title"))


@pytest.mark.parametrize("text", ["<script>x</script>", '"><b>', "' onload='x", "{{ 7 * 7 }}"])
def test_every_text_of_a_record_is_escaped(text: str) -> None:
    recorder = a_run(id=text)
    recorder.add_error(text, text)
    recorder.results.finish_reasons[text] += 1
    page = Reader(report_page(recorder, text, {text: text}, {text: text}, NOW))
    known = Reader(page_of(a_run()))
    assert {tag for tag, _ in page.attributes} <= {tag for tag, _ in known.attributes}
    assert {n for _, a in page.attributes for n in a} <= {n for _, a in known.attributes for n in a}
    places = ("h1", "dt", "dd", "code", "td", "th")
    assert all(text in page.all(place) for place in places)


def test_every_picture_says_what_it_shows() -> None:
    pictures = [a for tag, a in Reader(page_of(a_run())).attributes if tag == "svg"]
    assert len(pictures) == 1 + 5 + 2
    assert all(a["role"] == "img" and a["aria-label"] for a in pictures)
    assert pictures[0]["aria-label"] == "Timeline of 2 slots, 0 s to 4 s"


def test_bars_of_the_timeline_stand_at_their_times() -> None:
    axis = Axis(0.0, 4.0)
    found = [
        (a["class"], float(a["x"] or 0), float(a["width"] or 0))
        for tag, a in Reader(page_of(a_run(1))).attributes
        if tag == "rect" and re.fullmatch(r"[pd]\d", a.get("class") or "")
    ]
    assert [kind for kind, _, _ in found] == ["p0", "d0", "p1", "d1"]
    assert [x for _, x, _ in found] == pytest.approx([axis.x(i) for i in range(4)], abs=0.06)
    assert [w for _, _, w in found] == pytest.approx([axis.x(1.0) - axis.x(0.0)] * 4, abs=0.06)


def test_numbers_at_the_top_are_those_of_the_run() -> None:
    page = Reader(page_of(a_run()))
    numbers = dict(zip(page.all("dt"), page.all("dd")[::2], strict=False))
    assert numbers["Items"] == "3"
    assert numbers["Output"] == "1.5"  # six tokens in four seconds
    assert numbers["Prompts"] == "2"
    assert numbers["Slots in use"] == "1"


def test_long_run_shows_its_beginning_and_its_end() -> None:
    recorder = RunRecorder(1)
    for i in range(3 * N_SPANS_PER_SLOT):
        recorder(run_of(float(i), decode(0, f"r{i}")))
    page = Reader(page_of(recorder))
    assert {"The beginning", "The end"} <= set(page.all("b"))
    assert "Of 180 bars the first and the last are shown" in "".join(page.all("p"))
    bars = [text.split("\n")[0] for text in page.all("title") if "slot 0" in text]
    assert (bars[0], bars[-1]) == ("r0", "r179")
    assert len(bars) <= 2 * N_SPANS_PER_SLOT + 2


def test_page_is_made_for_many_slots() -> None:
    recorder = RunRecorder(256)
    recorder(run_of(0.0, *(prefill(i, str(i)) for i in range(256))))
    assert Reader(page_of(recorder)).all("h2")[0] == "Timeline of the slots"


def test_run_without_a_step_has_a_page() -> None:
    recorder = RunRecorder(2)
    recorder.add_error("invalid_json_line", "line 1 is no JSON")
    page = Reader(page_of(recorder))
    assert page.all("h2") == ["How items ended"]
    assert page.all("code") == ["invalid_json_line"]


def test_report_replaces_an_older_one_and_leaves_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_text("old")
    write_report(path, a_run(), title="a", settings={})
    assert "cbatch" in path.read_text(encoding="utf-8")
    assert list(tmp_path.iterdir()) == [path]


def test_report_that_cannot_be_written_says_where(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot be written to .*no/r\.html: No such file"):
        write_report(tmp_path / "no" / "r.html", a_run(), title="a", settings={})
    with pytest.raises(ConfigError, match="Is a directory"):
        write_report(tmp_path, a_run(), title="a", settings={})


def test_facts_name_machine_and_versions() -> None:
    assert {"cores", "system"} <= set(machine_facts())
    assert version_facts()["cbatch"] == cbatch.__version__


# ---- parts ----


def test_request_has_one_color_and_its_neighbour_another() -> None:
    ids = [("a", True), ("a", False), *((f"r{i}", False) for i in range(40))]
    spans = [SlotSpan(0, id, is_prefill, i, i + 1, 1) for i, (id, is_prefill) in enumerate(ids)]
    found = colors(spans)
    assert found[0] == found[1]
    assert all(a != b for a, b in pairwise(found[1:]))
    assert set(found) == set(range(N_COLORS))


@pytest.mark.parametrize("times", [[1.0], [1e-6, 1e3], [0.1] * 9, [0.01 * i for i in range(1, 99)]])
def test_distribution_shows_every_time_once(times: list[float]) -> None:
    counted = Percentiles()
    for seconds in times:
        counted.add(seconds)
    bars = DistributionChart("t", "", counted, "blue").bars
    assert sum(bar.n for bar in bars) == len(times)
    assert bars[0].start_s <= min(times)
    assert max(times) < bars[-1].end_s


@pytest.mark.parametrize(
    ("say", "values", "said"),
    [
        (
            duration,
            [None, 0.0, 1.2e-5, 0.99951e-3, 0.0123],
            ["–", "0 s", "12 µs", "1 ms", "12.3 ms"],
        ),
        (duration, [0.99951, 59.94, 99.96, 3725], ["1 s", "59.9 s", "1 min 40 s", "1 h 02 min"]),
        (duration, [266_400], ["3 d 2 h"]),
        (count, [0, 2.0, 2.25, 1234.5], ["0", "2", "2.2", "1,234"]),
        (short, [0.5, 950, 1200, 3e6], ["0.5", "950", "1.2k", "3M"]),
        (
            lambda n: percent(*n),
            [(1, 400), (1, 3), (0, 9), (1, 0)],
            ["0.2 %", "33 %", "0 %", "0 %"],
        ),
        (lambda n: clock(*n), [(2.0, 1.0), (0.25, 0.05)], ["2 s", "0.25 s"]),
        (lambda n: clock(*n), [(120, 60), (5400, 600)], ["2 min", "1:30 h"]),
    ],
)
def test_figures_are_said_in_the_unit_that_suits_them(
    say: Callable[[Any], str], values: list[Any], said: list[str]
) -> None:
    assert [say(value) for value in values] == said


def test_ticks_are_round_and_few() -> None:
    assert [tick_step(7, 4), tick_step(8, 4), tick_step(0.3, 4)] == pytest.approx([2, 2, 0.1])
    assert ticks(0.3, 1.0, 0.25) == [0.5, 0.75, 1.0]
    assert [time_step(s, 9) for s in (8, 90, 600, 36_000, 2_000_000)] == [
        1, 10, 120, 7200, 259_200,
    ]  # fmt: skip
