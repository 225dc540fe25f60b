"""Progress for programs: JSON lines on stderr."""

import json
import os
from contextlib import suppress
from dataclasses import fields
from typing import Any

from cbatch.cli.main import say
from cbatch.runtime.progress import PLAIN_INTERVAL_S, Snapshot


class EventView:
    """Says everything as one JSON object a line, with its kind under `event`."""

    interval_s = PLAIN_INTERVAL_S

    def say(self, line: str) -> None:
        """Tell something that stays."""
        _say(event="note", text=line)

    def tell(self, kind: str, found: Any) -> None:
        """Tell the values of a dataclass."""
        _say(event=kind, **{f.name: getattr(found, f.name) for f in fields(found)})

    def show(self, snapshot: Snapshot) -> None:
        """Tell how far it is."""
        _say(event="progress", **as_json(snapshot))

    def finish(self, snapshot: Snapshot) -> None:
        """Tell what was done."""
        _say(event="summary", **as_json(snapshot))


def note_at_once(words: str) -> None:
    """Tell something in the midst of anything, what is being printed too."""
    with suppress(OSError):
        os.write(2, f"{_line(event='note', text=words)}\n".encode())


def as_json(s: Snapshot) -> dict[str, Any]:
    """Return a moment of a run as JSON values."""
    counts = s.counts
    return {
        "n_total": counts.n_total,
        "n_about": counts.n_about,
        "n_done": counts.n_done,
        "n_before": counts.n_before,
        "n_failed": counts.n_failed,
        "n_running": s.n_running,
        "n_waiting": s.n_waiting,
        "n_slots": s.n_slots,
        "prompt_tokens": s.n_prompt_tokens,
        "cached_tokens": s.n_cached_tokens,
        "output_tokens": s.n_output_tokens,
        "elapsed_s": round(s.elapsed_s, 3),
        "left_s": None if s.left_s is None else round(s.left_s, 1),
    }


def _say(**values: Any) -> None:
    say(_line(**values))


def _line(**values: Any) -> str:
    return json.dumps(values)
