"""The statuses of a sequence, what changes them, and what a sequence waits for: see docs/lifecycle.md."""

from __future__ import annotations

from enum import Enum


class Status(Enum):
    """Where a sequence is in its life; prefill and decode are derived from its counters."""

    WAITING = "waiting"
    """In the queue, or held outside of it; without a slot, because it never had one or has lost it."""
    RUNNING = "running"
    PAUSED = "paused"
    """With its slot and cells until another sequence needs them, or without."""
    STORING = "storing"
    """Ended, without a slot; its cells are being written to disk."""
    FINISHED = "finished"


class Event(Enum):
    """What can happen to a sequence."""

    ADMIT = "admit"
    PREEMPT = "preempt"
    PAUSE = "pause"
    RESUME = "resume"
    """It kept its slot."""
    REQUEUE = "requeue"
    """It is resumed without a slot."""
    STORE = "store"
    FINISH = "finish"


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


class Wait(Enum):
    """What a waiting sequence is held for, outside the queue: others pass it meanwhile."""

    COMPILE = "compile"
    """Its grammar, or what DRY needs of the vocabulary."""
    LEADER = "leader"
    """Another sequence that computes the same prefix."""
    CACHE = "cache"
    """Its cells, which are read from disk."""
