"""The page and the picture of a measurement: whole, alone, and of the same make as the page of a run."""

from __future__ import annotations

import re
from datetime import datetime, timezone
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest

from cbatch.bench.comparison import COLD, Load
from cbatch.bench.summary import Middle, Row, Table
from cbatch.cli.bench_page import bench_page, bench_picture
from cbatch.files.report.page import report_page
from cbatch.files.report.recorder import RunRecorder

NOW = datetime(2026, 3, 1, 9, 5, tzinfo=timezone.utc)
HEAD = re.compile(r"\A<!doctype html>.*?<title>", re.S)
FACTS = re.compile(r'<section class="pair facts">.*</main>', re.S)


def summary_of(*sides: str, n_loads: int = 2, text: str = "a note") -> Any:
    """Rows of one workload, a side after another, each half as fast as the one before."""
    rows = [
        Row("burst", Load(n), COLD, side, 3, 3, Middle(n * f, n * f - 1, n * f + 1), 9.0, 1.0)
        for side, f in zip(sides, (100.0, 50.0, 25.0), strict=False)
        for n in range(1, n_loads + 1)
    ]
    table = Table("burst: short", ("side", "tokens a second"), [(side, "9") for side in sides])
    tables = [table] if sides else []
    return SimpleNamespace(
        rows=rows, tables=lambda: tables, remarks=lambda: [text], problems=lambda: [text]
    )


def page_of(summary: Any, settings: dict[str, Any] | None = None) -> str:
    return bench_page(summary, settings or {"model": "m.gguf"}, {"cores": "2"}, NOW)


def test_page_has_the_frame_of_a_run_s_page() -> None:
    """What stands before and behind what was measured is the same template."""
    ours = page_of(summary_of("engine", "llama"))
    runs = report_page(RunRecorder(1), "m.gguf", {"model": "m.gguf"}, {"cores": "2"}, NOW)
    for part in (HEAD, FACTS):
        found, expected = part.search(ours), part.search(runs)
        assert found
        assert expected
        assert found.group() == expected.group()
    assert '<time datetime="2026-03-01T09:05:00+00:00">1 March 2026, 09:05 UTC</time>' in ours
    assert "<title>m.gguf – cbatch bench</title>" in ours
    assert "<title>m.gguf – cbatch</title>" in runs


def test_every_side_has_a_line_and_a_point_for_each_load() -> None:
    sides = ("engine", "llama", "static")
    page = page_of(summary_of(*sides, n_loads=4))
    assert page.count("<svg") == 1
    assert page.count('class="line"') == len(sides)
    titles = re.findall(r"<circle .*?<title>(.*?)</title>", page)
    assert [title.partition(":")[0] for title in titles] == [s for s in sides for _ in range(4)]
    assert titles[0] == "engine: 100 (99–101)"
    picture = ElementTree.fromstring(bench_picture(summary_of(*sides), {"model": "m.gguf"}))
    assert len([*picture.iter("{http://www.w3.org/2000/svg}path")]) == len(sides)


@pytest.mark.parametrize("text", ["<script>x</script>", '"><b>', "{{ 7 * 7 }}", "a & b"])
def test_every_text_of_a_measurement_is_escaped(text: str) -> None:
    known = page_of(summary_of("engine"))
    page = page_of(summary_of(text, text=text), {"model": text, text: text})
    tags = re.compile(r"<([a-z!0-9]+)")
    assert set(tags.findall(page)) == set(tags.findall(known))
    assert "49" not in "".join(re.findall(r"<(?:li|dd|th)[^>]*>([^<]*)", page))
    ElementTree.fromstring(bench_picture(summary_of(text), {"model": text}))


def test_nothing_measured_is_said() -> None:
    assert "Nothing was measured." in page_of(summary_of())
