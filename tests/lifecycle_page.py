"""The table of docs/understand/lifecycle.md, made from core/driver.py: `python -m tests.lifecycle_page` writes it."""

from __future__ import annotations

import re
from pathlib import Path

from cbatch.core.driver import TRANSITIONS, Event, Status, Wait

PAGE = Path(__file__).parent.parent / "docs/understand/lifecycle.md"
SECTION = re.compile(r"(?<=<!-- table -->\n).*(?=\n<!-- /table -->)", re.DOTALL)


STATUSES: dict[Status, str] = {
    Status.WAITING: (
        "in the queue, as a new sequence or after it lost its slot. The policy decides the order. A sequence gets the "
        "slot that holds most of its prompt, or a copy of those cells; otherwise it gets a slot that is empty or least "
        "recently used, in partitioned memory next to those in use. A sequence whose cells were saved can use any "
        "slot. Other threads tokenize the prompts of the first sequences in the queue; with `shortest`, each prompt "
        "when it is submitted. A prompt that cannot run fails then."
    ),
    Status.RUNNING: (
        "in a slot. Whether the sequence computes its prompt or decodes follows from its counters; it is not "
        "stored. A sequence that loses its slot keeps its tokens, and its cells are saved in host memory or "
        "computed again: its reader sees a pause."
    ),
    Status.PAUSED: (
        "by `engine.pause(id)`, or by `pause_every`. It keeps its slot and cells until another sequence needs "
        "them. Then it is parked: paused without a slot, and its cells are saved, or computed again later."
    ),
    Status.STORING: (
        "ended, and its cells are being written to disk for `save_cache`: the result is delivered when they "
        "are written, or when that has failed. The slot is free."
    ),
    Status.FINISHED: (
        "the result is delivered and the slot is free. The cells stay in the slot for prompts with the same prefix, "
        "until the room is needed."
    ),
}

EVENTS: dict[Event, str] = {
    Event.ADMIT: "it gets a slot, for the first time or again",
    Event.LOSE_SLOT: (
        "its turn is over, or a shared pool is full (preemption); its cells are saved in host memory or computed again"
    ),
    Event.PAUSE: "`engine.pause(id)`, or it has sampled as many tokens as `pause_every` allows",
    Event.RESUME: "`engine.resume(id)`, if it has kept its slot",
    Event.REQUEUE: "`engine.resume(id)`, if it has no slot",
    Event.STORE: "it ends in a slot without an error, and its request has `save_cache`",
    Event.FINISH: "it ends; with `save_cache`, its cells are stored or storing has failed",
}

WAITS: dict[Wait, tuple[str, str, str]] = {
    Wait.PROMPT: (
        "the tokens of its long prompt; with `shortest`, of any prompt",
        "the tokens are ready, or the prompt is refused",
        "all",
    ),
    Wait.COMPILE: (
        "its compiled grammar, or the data that DRY needs from the vocabulary",
        "it is ready; if it cannot be compiled, the request ends",
        "all",
    ),
    Wait.LEADER: (
        "another sequence, which computes the same prefix",
        "the other sequence has computed it, pauses, ends, or loses its slot",
        "all, as long as a slot stays free for it",
    ),
    Wait.CACHE: (
        "its cells, which are read from disk",
        "they are read; if they cannot be read, they are computed, or `cache_required` ends the request",
        "all",
    ),
    Wait.END: (
        "its end: it is cancelled or late with many others",
        "some of them end before each step",
        "all",
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
        "| cause | what it waits for | what ends the wait | which sequences may pass |",
        "|---|---|---|---|",
    ]
    rows = [f"| `{wait.value}` | {' | '.join(WAITS[wait])} |" for wait in Wait]
    return "\n".join((intro, "", *head, *rows))


if __name__ == "__main__":
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(SECTION.sub(lambda _: section(), text), encoding="utf-8")
