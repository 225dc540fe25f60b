"""Traces that Perfetto opens: whole ones, and what a broken-off run left."""

from __future__ import annotations

import json
import tracemalloc
from typing import TYPE_CHECKING, Any

import pytest

from cbatch.errors import ConfigError
from cbatch.files.report.trace import TraceWriter
from tests.files.steps import decode, prefill, run_of

if TYPE_CHECKING:
    from pathlib import Path

    from cbatch.runtime.step_record import StepRecord

Event = dict[str, Any]

TWO_SLOTS = [
    run_of(10.0, prefill(0, "a"), prefill(1, "b", 4, 0), n_waiting=1),
    run_of(11.0, decode(0, "a", 2), prefill(1, "b", 2)),
    run_of(12.0, prefill(0, "c"), decode(1, "b")),
    run_of(13.0, decode(1, "b")),
    run_of(14.0, decode(1, "b")),
]


def trace_of(path: Path, records: list[StepRecord]) -> list[Event]:
    with TraceWriter(path) as trace:
        for record in records:
            trace(record)
    events: list[Event] = json.loads(path.read_text(encoding="utf-8"))
    return events


def stays(events: list[Event]) -> list[tuple[int, int, str, float, float]]:
    """(track, depth, name, start, end) of every span; fails where they do not nest, or go back in time."""
    open_spans: dict[int, list[tuple[str, float]]] = {}
    last: dict[int, float] = {}
    found = []
    for e in events:
        if e["ph"] not in "BE":
            continue
        track = open_spans.setdefault(e["tid"], [])
        assert e["ts"] >= last.get(e["tid"], 0.0)
        last[e["tid"]] = e["ts"]
        if e["ph"] == "B":
            track.append((e["name"], e["ts"]))
        else:
            name, start = track.pop()
            found.append((e["tid"], len(track), name, start / 1e6, e["ts"] / 1e6))
    assert not any(open_spans.values())
    return found


def test_every_event_has_what_its_kind_needs(tmp_path: Path) -> None:
    needed = {
        "M": {"name", "pid", "tid", "args"},
        "X": {"name", "pid", "tid", "ts", "dur"},
        "B": {"name", "pid", "tid", "ts"},
        "E": {"pid", "tid", "ts"},
        "C": {"name", "pid", "ts", "args"},
    }
    for event in trace_of(tmp_path / "t.json", TWO_SLOTS):
        assert needed[event["ph"]] <= set(event)
        assert event.get("ts", 0) >= 0 <= event.get("dur", 0)


def test_requests_are_in_the_track_of_their_slot_with_their_phases(tmp_path: Path) -> None:
    assert sorted(stays(trace_of(tmp_path / "t.json", TWO_SLOTS))) == [
        (1000, 0, "a", 0.0, 2.0),
        (1000, 0, "c", 2.0, 3.0),
        (1000, 1, "decode", 1.0, 2.0),
        (1000, 1, "prefill", 0.0, 1.0),
        (1000, 1, "prefill", 2.0, 3.0),
        (1001, 0, "b", 0.0, 5.0),
        (1001, 1, "decode", 2.0, 5.0),
        (1001, 1, "prefill", 0.0, 2.0),
    ]


def test_tracks_have_names(tmp_path: Path) -> None:
    events = trace_of(tmp_path / "t.json", TWO_SLOTS)
    names = {e["tid"]: e["args"]["name"] for e in events if e.get("name") == "thread_name"}
    assert names == {1: "engine", 1000: "slot 0", 1001: "slot 1"}
    assert [e["ph"] for e in trace_of(tmp_path / "empty.json", [])] == ["M"] * 3


def test_phases_of_a_run_follow_each_other_on_the_engines_track(tmp_path: Path) -> None:
    times = {"admit_s": 1.0, "build_s": 2.0, "apply_s": 8.0, "deliver_s": 16.0}
    record = run_of(5.0, decode(0, "a"), seconds=4.0, decode_s=3.0, **times)
    phases = [e for e in trace_of(tmp_path / "t.json", [record]) if e["ph"] == "X"]
    assert [(e["name"], e["ts"] / 1e6, e["dur"] / 1e6) for e in phases] == [
        ("admit", 0.0, 1.0), ("build", 1.0, 2.0), ("run", 3.0, 4.0), ("apply", 7.0, 8.0), ("deliver", 15.0, 16.0),
    ]  # fmt: skip
    assert phases[2]["args"] == {
        "steps": 1, "rows": 1, "tokens": 1, "pad rows": 0, "code": 0, "decode_ms": 3000.0, "sample_ms": 0.0,
    }  # fmt: skip


def test_counters_are_written_when_they_change(tmp_path: Path) -> None:
    events = trace_of(tmp_path / "t.json", TWO_SLOTS)
    waiting = [
        (e["ts"], e["args"]["n"]) for e in events if e["ph"] == "C" and e["name"] == "waiting"
    ]
    assert waiting == [(0.0, 1), (1e6, 0)]


@pytest.mark.parametrize("id", ['"quoted"\\', "</script>", "\ud800", "\n\x00", "ä 🎉"])
def test_id_of_any_letters_is_written(tmp_path: Path, id: str) -> None:
    events = trace_of(tmp_path / "t.json", [run_of(0.0, decode(0, id))])
    assert [e["name"] for e in events if e.get("cat") == "request"] == [id]


def test_what_a_killed_run_left_is_an_array_without_its_end(tmp_path: Path) -> None:
    now = iter(range(100))
    trace = TraceWriter(tmp_path / "t.json", clock=lambda: next(now))
    for record in TWO_SLOTS:
        trace(record)
    left = (tmp_path / "t.json").read_text(encoding="utf-8")
    assert [e["name"] for e in json.loads(left + "]") if e.get("cat") == "request"] == [
        "a",
        "b",
        "c",
    ]
    trace.close()


@pytest.mark.slow
def test_memory_does_not_grow_with_the_run(tmp_path: Path) -> None:
    trace = TraceWriter(tmp_path / "t.json")
    n_bytes = list[int]()
    tracemalloc.start()
    for i in range(2_000):
        trace(run_of(i, decode(0, f"r{i}")))
        if i in (499, 1_999):
            n_bytes.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    assert n_bytes[1] - n_bytes[0] < 20_000
    trace.close()
    assert len(stays(json.loads((tmp_path / "t.json").read_text(encoding="utf-8")))) == 4_000


def test_closed_trace_writes_no_more(tmp_path: Path) -> None:
    trace = TraceWriter(tmp_path / "t.json")
    trace.close()
    before = (tmp_path / "t.json").read_bytes()
    trace(TWO_SLOTS[0])
    trace.close()
    assert (tmp_path / "t.json").read_bytes() == before
    assert trace.error is None


def test_full_disk_ends_the_trace_and_not_the_run() -> None:
    trace = TraceWriter("/dev/full")
    for i in range(2_000):
        trace(run_of(i, decode(0, f"r{i}")))
    trace.close()
    assert trace.error is not None
    assert "No space" in str(trace.error)


def test_trace_that_cannot_be_written_says_where(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"the trace cannot be written to .*no/t\.json: No such file"
    ):
        TraceWriter(tmp_path / "no" / "t.json")
