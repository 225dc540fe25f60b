"""`trace.json`: every run of steps and every request in its slot, for Perfetto or chrome://tracing.

The array form of the trace event format: its end may be missing, so the trace of a killed run can be opened too.
Source: "Trace Event Format", Google, the section on the JSON array format.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cbatch.errors import ConfigError
from cbatch.files.report.spans import Change, SlotSpan, SlotSpans

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable, Iterator

    from cbatch.runtime.step_record import StepRecord

FLUSH_S = 1.0  # most seconds that a killed process loses
_PROCESS = 1
_ENGINE = 1
"""Thread of the engine's track: the main one has the process's number. Perfetto joins thread 0 with it."""

_SLOTS = 1000  # thread of slot 0: Perfetto shows these numbers after the names
_N_BUFFER = 1 << 16

_Event = dict[str, Any]


def is_trace(path: Path) -> bool:
    """Whether a file is a trace, or empty, so that another one may replace it."""
    with path.open("rb") as file:
        return file.read(len(_BEGINNING)) in (b"", _BEGINNING.encode())


class TraceWriter:
    """Writes the events of steps, given to `Engine.record_steps`, at once, so that memory does not grow.

    A full disk ends the trace, not the run: see `error`.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """Open a file; ConfigError where it cannot be written. The first step replaces an older trace."""
        self.error: OSError | None = None
        """Why the trace ended early, or None."""
        self._clock, self._flushed_s = clock, clock()
        self._zero_s: float | None = None
        self._spans, self._named = SlotSpans(), set[int]()
        self._counts: dict[str, int] = {}
        self.keeps_older = Path(path).is_file() and Path(path).stat().st_size > 0
        """Whether the file still has an older trace."""
        mode = "r+" if self.keeps_older else "w"
        try:
            self._file = Path(path).open(mode, buffering=_N_BUFFER, encoding="utf-8")  # noqa: SIM115  # until `close`
            if not self.keeps_older:
                self._open()
        except OSError as error:
            raise ConfigError(
                f"the trace cannot be written to {path}: {error.strerror or error}; give another place"
            ) from error

    def _open(self) -> None:
        """Write the first events, over an older trace."""
        if self.keeps_older:
            self._file.truncate(0)
            self.keeps_older = False
        self._file.write(_BEGINNING)
        self._write(_track(_ENGINE, "engine"))

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __call__(self, record: StepRecord) -> None:
        """Write a run of steps; do nothing after `close`."""
        if self.keeps_older and not self._file.closed:
            try:
                self._open()
            except OSError as error:
                self.error = error
                self._close()
        if self._zero_s is None:
            self._zero_s = record.start_s
        now = self._clock()
        is_due = now - self._flushed_s >= FLUSH_S
        if is_due:
            self._flushed_s = now
        self._write(self._events(record), is_flushed=is_due)

    def close(self) -> None:
        """End all spans and the file, after recording has ended. Twice is harmless; `error` tells of a failure."""
        if self.keeps_older:
            self._close()
            return
        ends = (e for change in self._spans.end_all() for e in self._change(change))
        self._write(ends, "\n]\n")
        self._close()

    def _write(self, events: Iterable[_Event], end: str = "", *, is_flushed: bool = False) -> None:
        if self._file.closed:
            return
        text = "".join(",\n" + json.dumps(e, separators=(",", ":")) for e in events)
        try:
            self._file.write(text + end)
            if is_flushed:
                self._file.flush()
        except OSError as error:
            self.error = error
            self._close()

    def _close(self) -> None:
        try:
            self._file.close()  # which flushes
        except OSError as error:
            self.error = self.error or error

    # ---- events ----

    def _events(self, record: StepRecord) -> Iterator[_Event]:
        yield from self._run(record)
        yield from self._counters(record)
        for change in self._spans.take(record):
            yield from self._change(change)

    def _run(self, record: StepRecord) -> Iterator[_Event]:
        """Yield the phases of a run, one after the other."""
        start_s = record.start_s
        details = {
            "steps": record.n_steps,
            "rows": record.n_rows,
            "tokens": record.n_tokens,
            "pad rows": record.n_pad_rows,
            "code": record.code,
            "decode_ms": round(record.decode_s * 1e3, 3),
            "sample_ms": round(record.sample_s * 1e3, 3),
        }
        for name in ("admit", "build", "run", "apply", "deliver"):
            seconds: float = getattr(record, f"{name}_s")
            args = {"args": details} if name == "run" else {}
            yield self._at("X", start_s, _ENGINE, name=name, dur=round(seconds * 1e6, 3), **args)
            start_s += seconds

    def _counters(self, record: StepRecord) -> Iterator[_Event]:
        """Yield the counters that changed since the last run."""
        counts = {
            "tokens in the step": record.n_tokens,
            "slots in use": record.n_rows,
            "waiting": record.n_waiting,
            "cells": record.n_cells,
        }
        for name, n in counts.items():
            if self._counts.get(name) != n:
                self._counts[name] = n
                yield self._at("C", record.start_s, _ENGINE, name=name, args={"n": n})

    def _change(self, change: Change) -> Iterator[_Event]:
        """Yield the events of a change in a slot: a request, and in it a phase."""
        before, after = change.before, change.after
        stays = before is not None and after is not None and before.id == after.id
        if before is not None:
            yield self._end(before)
            if not stays:
                yield self._at("E", before.end_s, _SLOTS + before.slot)
        if after is not None:
            yield from self._begin(after, is_new=not stays)

    def _begin(self, span: SlotSpan, *, is_new: bool) -> Iterator[_Event]:
        thread = _SLOTS + span.slot
        if thread not in self._named:
            self._named.add(thread)
            yield from _track(thread, f"slot {span.slot}")
        if is_new:
            yield self._at("B", span.start_s, thread, name=span.id, cat="request")
        phase = "prefill" if span.is_prefill else "decode"
        yield self._at("B", span.start_s, thread, name=phase, cat=phase)

    def _end(self, span: SlotSpan) -> _Event:
        return self._at("E", span.end_s, _SLOTS + span.slot, args={"tokens": span.n_tokens})

    def _at(self, kind: str, time_s: float, thread: int, **fields: object) -> _Event:
        micros = round((time_s - (self._zero_s or 0.0)) * 1e6, 3)
        return {"ph": kind, "ts": micros, "pid": _PROCESS, "tid": thread, **fields}


def _track(thread: int, name: str) -> Iterator[_Event]:
    """Yield the name and the position of a track: the engine is above the slots."""
    yield _about(thread, "thread_name", name=name)
    yield _about(thread, "thread_sort_index", sort_index=thread)


def _about(thread: int, kind: str, **args: object) -> _Event:
    return {"ph": "M", "name": kind, "pid": _PROCESS, "tid": thread, "args": args}


_BEGINNING = "[\n" + json.dumps(_about(_ENGINE, "process_name", name="cbatch"))
