"""Progress for programs: JSON lines on stderr."""

from dataclasses import fields
from typing import Any

from cbatch.cli.terminal import tell
from cbatch.progress import PLAIN_INTERVAL_S, BatchSnapshot


class EventView:
    """A progress view that prints JSON objects, one a line, with their kind under `event`."""

    interval_s = PLAIN_INTERVAL_S

    def say(self, line: str) -> None:
        """Print a note."""
        tell("note", text=line)

    def tell(self, kind: str, found: Any) -> None:
        """Print the values of a dataclass."""
        tell(kind, **{f.name: getattr(found, f.name) for f in fields(found)})

    def show(self, snapshot: BatchSnapshot) -> None:
        """Print the progress."""
        tell("progress", **as_json(snapshot))

    def finish(self, snapshot: BatchSnapshot) -> None:
        """Print the summary."""
        tell("summary", **as_json(snapshot))


def as_json(s: BatchSnapshot) -> dict[str, Any]:
    """Return the progress of a run as JSON values."""
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
        "ending": counts.ending,
        "left_s": None if s.left_s is None else round(s.left_s, 1),
    }
