"""The table of docs/understand/lifecycle.md, made from core/driver.py: `python -m tests.lifecycle_page` writes it."""

from __future__ import annotations

import re
from pathlib import Path

from cbatch.core.driver import TRANSITIONS, Event, Status, Wait

PAGE = Path(__file__).parent.parent / "docs/understand/lifecycle.md"
SECTION = re.compile(r"(?<=<!-- table -->\n).*(?=\n<!-- /table -->)", re.DOTALL)


STATUSES: dict[Status, str] = {
    Status.WAITING: (
        "queued, or back without a slot. The policy decides the order. A sequence gets the slot that holds most of its "
        "prompt, or copies its cells; otherwise it gets one that is empty or longest unused, in partitioned memory "
        "next to those in use. A sequence whose cells were saved takes any slot. Other threads tokenize the prompts of "
        "the first sequences in the queue; with `shortest`, each prompt as it is submitted. A prompt that cannot run "
        "fails then."
    ),
    Status.RUNNING: (
        "in a slot. Whether the sequence computes its prompt or decodes follows from its counters; nothing "
        "stores it. A sequence that loses its slot keeps its tokens, and its cells are saved in host memory or "
        "computed again: its reader sees a pause."
    ),
    Status.PAUSED: (
        "by `engine.pause(id)`, or where `pause_every` has it pause. Slot and cells stay until another "
        "sequence needs them: then the sequence is parked, paused without a slot, its cells saved or computed "
        "again."
    ),
    Status.STORING: (
        "ended, and its cells are being written to disk for `save_cache`: the result comes when that is done,"
        " or has failed. The slot is free."
    ),
    Status.FINISHED: (
        "the result is there and the slot is free. The cells stay there for prompts that begin alike, until "
        "the room is needed."
    ),
}

EVENTS: dict[Event, str] = {
    Event.ADMIT: "it gets a slot, for the first time or again",
    Event.LOSE_SLOT: (
        "its turn is over, or a shared pool is full (preemption); its cells are saved in host memory or computed again"
    ),
    Event.PAUSE: "`engine.pause(id)`, or it has sampled as many tokens as it may before it pauses",
    Event.RESUME: "`engine.resume(id)`, where it kept its slot",
    Event.REQUEUE: "`engine.resume(id)`, where it has no slot",
    Event.STORE: "it ends in a slot and without an error, and its request has `save_cache`",
    Event.FINISH: "it ends; or its cells are stored, or cannot be",
}

WAITS: dict[Wait, tuple[str, str, str]] = {
    Wait.PROMPT: (
        "the tokens of its long prompt; with `shortest`, of any prompt",
        "the tokens come, or the prompt is refused",
        "every one",
    ),
    Wait.COMPILE: (
        "its grammar, or what DRY needs of the vocabulary",
        "it is compiled; where it cannot be, the request ends",
        "every one",
    ),
    Wait.LEADER: (
        "another sequence that computes the same prefix",
        "the other has computed it, pauses, ends, or loses its slot",
        "every one, as long as a slot stays free for it",
    ),
    Wait.CACHE: (
        "its cells, which are read from disk",
        "they are read; where they cannot be, they are computed, or `cache_required` ends the request",
        "every one",
    ),
}
"""What a sequence waits for, what ends the wait, and which sequences may pass."""


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
    return "\n".join(f"- **{status.value}**: {STATUSES[status]}" for status in Status)


def _events() -> str:
    head = ["| event | what happens | from | to |", "|---|---|---|---|"]
    rows = []
    for event in Event:
        moves = {a: b for (a, e), b in TRANSITIONS.items() if e is event}
        to = ", ".join(dict.fromkeys(b.value for b in moves.values()))
        before = ", ".join(a.value for a in moves)
        rows.append(f"| {event.value} | {EVENTS[event]} | {before} | {to} |")
    return "\n".join((*head, *rows))


def _waits() -> str:
    intro = "A sequence that waits for one of these is held outside the queue:"
    head = [
        "| cause | what it waits for | what ends the wait | which may pass |",
        "|---|---|---|---|",
    ]
    rows = [f"| `{wait.value}` | {' | '.join(WAITS[wait])} |" for wait in Wait]
    return "\n".join((intro, "", *head, *rows))


if __name__ == "__main__":
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(SECTION.sub(lambda _: section(), text), encoding="utf-8")
