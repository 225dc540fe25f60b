"""The part of docs/lifecycle.md that core/lifecycle.py makes: `python -m tests.lifecycle_page` writes it."""

from __future__ import annotations

import re
from pathlib import Path

from cbatch.core.lifecycle import TRANSITIONS, WAITS, Event, Status, Wait

PAGE = Path(__file__).parent.parent / "docs" / "lifecycle.md"
SECTION = re.compile(r"(?<=<!-- table -->\n).*(?=\n<!-- /table -->)", re.DOTALL)


def section() -> str:
    """Return the diagram, the statuses, the events and the causes of waiting."""
    return "\n\n".join((_diagram(), _statuses(), _events(), _waits()))


def _diagram() -> str:
    moves = [f"    {a.value} --> {b.value}: {e.value}" for (a, e), b in TRANSITIONS.items()]
    last = set(TRANSITIONS.values()) - {a for a, _ in TRANSITIONS}
    ends = [f"    {status.value} --> [*]" for status in last]
    first = f"    [*] --> {Status.WAITING.value}"
    return "\n".join(("```mermaid", "stateDiagram-v2", first, *moves, *ends, "```"))


def _statuses() -> str:
    return "\n".join(f"- **{status.value}**: {status.meaning}" for status in Status)


def _events() -> str:
    head = ["| event | what happens | from | to |", "|---|---|---|---|"]
    rows = []
    for event in Event:
        moves = {a: b for (a, e), b in TRANSITIONS.items() if e is event}
        to = ", ".join(dict.fromkeys(b.value for b in moves.values()))
        before = ", ".join(a.value for a in moves)
        rows.append(f"| {event.value} | {event.meaning} | {before} | {to} |")
    return "\n".join((*head, *rows))


def _waits() -> str:
    intro = "A sequence that waits for one of these is held outside the queue:"
    head = [
        "| cause | what it waits for | what ends the wait | which may pass |",
        "|---|---|---|---|",
    ]
    rows = [f"| `{w.value}` | {w.meaning} | {WAITS[w].end} | {WAITS[w].passing} |" for w in Wait]
    return "\n".join((intro, "", *head, *rows))


if __name__ == "__main__":
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(SECTION.sub(lambda _: section(), text), encoding="utf-8")
