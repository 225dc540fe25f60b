"""The page and the picture of a measurement: whole, alone, and of the same make as the page of a run."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace
from datetime import datetime, timezone
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

import pytest

from cbatch.bench.comparison import COLD, Load
from cbatch.bench.summary import Middle, SideRow, TextTable, Width
from cbatch.cli.bench_page import Rates, bench_page, bench_picture
from cbatch.files.report.page import report_page
from cbatch.files.report.recorder import RunRecorder
from tests.cli.conftest import invoke

if TYPE_CHECKING:
    from pathlib import Path

SVG = "{http://www.w3.org/2000/svg}"
NOW = datetime(2026, 3, 1, 9, 5, tzinfo=timezone.utc)
HEAD = re.compile(r"\A<!doctype html>.*?<title>", re.S)
FACTS = re.compile(r'<section class="pair facts">.*</main>', re.S)


def summary_of(*sides: str, n_loads: int = 2, text: str = "a note") -> Any:
    """Rows of one workload, a side after another, each half as fast as the one before."""
    rows = [
        SideRow("burst", Load(n), COLD, side, 3, 3, Middle(n * f, n * f - 1, n * f + 1), 9.0, 1.0)
        for side, f in zip(sides, (100.0, 50.0, 25.0), strict=False)
        for n in range(1, n_loads + 1)
    ]
    table = TextTable("burst: short", ("side", "tokens a second"), [(side, "9") for side in sides])
    tables = [table] if sides else []
    return SimpleNamespace(
        rows=rows, widths=[], tables=lambda: tables, remarks=lambda: [text], problems=lambda: [text]
    )


def drawn(*runs: Rates) -> ElementTree.Element:
    return ElementTree.fromstring(bench_picture(runs))


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
    picture = drawn(Rates("m.gguf", summary_of(*sides).rows, []))
    assert len([*picture.iter(f"{SVG}path")]) == len(sides)


def test_picture_has_a_plot_for_each_workload_and_model_with_the_bare_loop() -> None:
    rows = summary_of("engine").rows
    rows += [replace(row, workload="decode") for row in rows]
    widths = [Width(1, 120.0), Width(2, 240.0), Width(8, 300.0)]
    picture = drawn(Rates("a.gguf", rows, widths), Rates("b.gguf", rows, widths))
    texts = [found.text for found in picture.iter(f"{SVG}text")]
    named = [text for text in texts if text and text.endswith(".gguf")]
    assert named == ["burst, a.gguf", "burst, b.gguf", "decode, a.gguf", "decode, b.gguf"]
    assert texts.count("bare loop") == 1
    points = [found.text for found in picture.iter(f"{SVG}title")]
    assert points[:4] == [
        "engine: 100 (99–101)",
        "engine: 200 (199–201)",
        "bare loop: 120 (120–120)",
        "bare loop: 240 (240–240)",
    ]


def test_files_of_earlier_runs_are_drawn_as_the_runs_were(tmp_path: Path) -> None:
    """One file has one request at once, the other two: they are one line."""
    whole = Rates("m.gguf", summary_of("engine").rows, [Width(1, 120.0), Width(2, 240.0)])
    for i in range(2):
        run = {
            "settings": {"model": "/models/m.gguf"},
            "rows": [asdict(whole.rows[i])],
            "widths": [asdict(whole.widths[i])],
        }
        (tmp_path / f"{i}.json").write_text(json.dumps(run), encoding="utf-8")
    words = [word for i in range(2) for word in ("--from", tmp_path / f"{i}.json")]
    shown = invoke("bench", *words, "--svg", tmp_path / "rates.svg")
    assert shown.exit_code == 0, shown.stderr
    assert (tmp_path / "rates.svg").read_text(encoding="utf-8") == bench_picture([whole])


@pytest.mark.parametrize(
    ("text", "args", "words"),
    [
        ("[]", (), "a.json: has no figures: give a file of cbatch bench --json"),
        ("{", (), "a.json: has no figures"),
        ('{"settings": {"model": "m"}, "widths": [], "rows": [{"x": 1}]}', (), "has no figures"),
        ('{"settings": {"model": "m"}, "widths": [], "rows": []}', (), "no rates of decode, mixed"),
        ("[]", ("--html", "a.html"), "--from measures nothing"),
        (None, (), "a.json cannot be read"),
    ],
)
def test_file_without_figures_is_refused(
    tmp_path: Path, text: str | None, args: tuple[str, ...], words: str
) -> None:
    if text is not None:
        (tmp_path / "a.json").write_text(text, encoding="utf-8")
    shown = invoke("bench", "--from", tmp_path / "a.json", "--svg", tmp_path / "a.svg", *args)
    assert (shown.exit_code, words in shown.stderr) == (2, True), shown.stderr
    assert not (tmp_path / "a.svg").exists()


@pytest.mark.parametrize("text", ["<script>x</script>", '"><b>', "{{ 7 * 7 }}", "a & b"])
def test_every_text_of_a_measurement_is_escaped(text: str) -> None:
    known = page_of(summary_of("engine"))
    page = page_of(summary_of(text, text=text), {"model": text, text: text})
    tags = re.compile(r"<([a-z!0-9]+)")
    assert set(tags.findall(page)) == set(tags.findall(known))
    assert "49" not in "".join(re.findall(r"<(?:li|dd|th)[^>]*>([^<]*)", page))
    drawn(Rates(text, summary_of(text).rows, []))


def test_nothing_measured_is_said() -> None:
    assert "Nothing was measured." in page_of(summary_of())
