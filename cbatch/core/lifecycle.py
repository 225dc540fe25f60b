"""The statuses of a sequence, what changes them, and what a sequence waits for: see docs/lifecycle.md."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class _Word(Enum):
    """A value with what it means, for docs/lifecycle.md."""

    meaning: str

    def __new__(cls, word: str, meaning: str) -> _Word:
        """Return the member of this word."""
        member = object.__new__(cls)
        member._value_, member.meaning = word, meaning
        return member


class Status(_Word):
    """Where a sequence is in its life; prefill and decode are derived from its counters."""

    WAITING = (
        "waiting",
        "queued, or back without a slot. The policy says whose turn it is; the slot that holds most of the prompt is "
        "given, else one beside those in use. A prompt becomes tokens at its turn, so one that cannot run fails then; "
        "token ids are checked at once.",
    )
    RUNNING = (
        "running",
        "in a slot. Whether the sequence computes its prompt or decodes follows from its counters; nothing stores it. "
        "A sequence that is preempted loses slot and cells and keeps its tokens: its reader sees a pause.",
    )
    PAUSED = (
        "paused",
        "by `engine.pause(id)`, or where `pause_every` has it pause. Slot and cells stay until another sequence needs "
        "them.",
    )
    STORING = (
        "storing",
        "ended, and its cells are being written to disk for `save_cache`: the result comes when that is done, or has "
        "failed. The slot is free.",
    )
    FINISHED = (
        "finished",
        "the result is there and the slot is free. The cells stay there for prompts that begin alike, until the room "
        "is needed.",
    )


class Event(_Word):
    """What can happen to a sequence."""

    ADMIT = "admit", "it gets a slot, for the first time or again"
    PREEMPT = "preempt", "slot and cells are taken: a shared pool is full, or its turn is over"
    PAUSE = (
        "pause",
        "`engine.pause(id)`, or it has sampled as many tokens as it may before it pauses",
    )
    RESUME = "resume", "`engine.resume(id)`, where it kept its slot"
    REQUEUE = "requeue", "`engine.resume(id)`, where it has no slot"
    STORE = "store", "it ends in a slot and without an error, and its request has `save_cache`"
    FINISH = "finish", "it ends; or its cells are stored, or cannot be"


TRANSITIONS: dict[tuple[Status, Event], Status] = {
    (Status.WAITING, Event.ADMIT): Status.RUNNING,
    (Status.WAITING, Event.PAUSE): Status.PAUSED,
    (Status.WAITING, Event.FINISH): Status.FINISHED,
    (Status.RUNNING, Event.PREEMPT): Status.WAITING,
    (Status.RUNNING, Event.PAUSE): Status.PAUSED,
    (Status.RUNNING, Event.STORE): Status.STORING,
    (Status.RUNNING, Event.FINISH): Status.FINISHED,
    (Status.PAUSED, Event.RESUME): Status.RUNNING,
    (Status.PAUSED, Event.REQUEUE): Status.WAITING,
    (Status.PAUSED, Event.STORE): Status.STORING,
    (Status.PAUSED, Event.FINISH): Status.FINISHED,
    (Status.STORING, Event.FINISH): Status.FINISHED,
}
"""Every change of status there is; a pair that is not here raises and changes nothing."""


class Wait(_Word):
    """What a waiting sequence is held for, outside the queue."""

    COMPILE = "compile", "its grammar, or what DRY needs of the vocabulary"
    LEADER = "leader", "another sequence that computes the same prefix"
    CACHE = "cache", "its cells, which are read from disk"


@dataclass(frozen=True, slots=True)
class WaitRule:
    """What ends a wait, and which sequences may pass meanwhile."""

    end: str
    passing: str


WAITS: dict[Wait, WaitRule] = {
    Wait.COMPILE: WaitRule("it is compiled; where it cannot be, the request ends", "every one"),
    Wait.LEADER: WaitRule(
        "the other has computed it, makes no progress, or leaves its slot",
        "every one, as long as a slot stays free for it",
    ),
    Wait.CACHE: WaitRule(
        "they are read; where they cannot be, they are computed, or `cache_required` ends the request",
        "every one",
    ),
}
"""Every cause of waiting."""
