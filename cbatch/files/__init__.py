"""Batch files: many prompts in, as many answers out; and the report and the trace of a run.

The public names of this room are here, each imported when it is first used: `sqlite3` and others are slow to import.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cbatch.files.file_run import FileStream, run_file, stream_file
    from cbatch.files.file_status import RunStatus, status_of
    from cbatch.files.frames import run_table
    from cbatch.files.input.source import Source, open_source
    from cbatch.files.outcome import Interrupted, RunSummary, Stopper
    from cbatch.files.output.sorting import Sorted, sort_in_place, sort_to
    from cbatch.files.preview import CheckSummary, Estimate, check_file, estimate_file
    from cbatch.files.report.page import write_report
    from cbatch.files.report.recorder import RunRecorder, tee
    from cbatch.files.report.trace import TraceWriter
    from cbatch.files.settings import FileOptions
    from cbatch.files.vector_files import embed_file, rerank_file

__all__ = [
    "CheckSummary",
    "Estimate",
    "FileOptions",
    "FileStream",
    "Interrupted",
    "RunRecorder",
    "RunStatus",
    "RunSummary",
    "Sorted",
    "Source",
    "Stopper",
    "TraceWriter",
    "check_file",
    "embed_file",
    "estimate_file",
    "open_source",
    "rerank_file",
    "run_file",
    "run_table",
    "sort_in_place",
    "sort_to",
    "status_of",
    "stream_file",
    "tee",
    "write_report",
]

_MODULES = {
    "file_run": ("FileStream", "run_file", "stream_file"),
    "file_status": ("RunStatus", "status_of"),
    "frames": ("run_table",),
    "input.source": ("Source", "open_source"),
    "outcome": ("Interrupted", "RunSummary", "Stopper"),
    "output.sorting": ("Sorted", "sort_in_place", "sort_to"),
    "preview": ("CheckSummary", "Estimate", "check_file", "estimate_file"),
    "report.page": ("write_report",),
    "report.recorder": ("RunRecorder", "tee"),
    "report.trace": ("TraceWriter",),
    "settings": ("FileOptions",),
    "vector_files": ("embed_file", "rerank_file"),
}


if not TYPE_CHECKING:  # so that types are checked by the imports above

    def __getattr__(name: str) -> object:
        for module, names in _MODULES.items():
            if name in names:
                return getattr(import_module(f"{__name__}.{module}"), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
