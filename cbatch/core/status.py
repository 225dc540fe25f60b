"""Where a sequence is in its life, and every way from there."""

from __future__ import annotations

from enum import Enum


class Status(Enum):
    """Where a sequence is in its life; prefill and decode are derived from its counters."""

    WAITING = "waiting"
    RUNNING = "running"
    PAUSED = "paused"
    FINISHED = "finished"


class Wait(Enum):
    """What a waiting sequence waits for, besides a slot. Only `CELLS` holds up those behind it."""

    COMPILE = "compile"
    """its grammar, or what DRY needs of the vocabulary"""
    LEADER = "leader"
    """another sequence that computes the same prefix"""
    CACHE = "cache"
    """its cells, which are read from disk"""
    RESTORE = "restore"
    """its cells, which stand in host memory or have to be computed again"""
    CELLS = "cells"
    """room in the pool"""


class Event(Enum):
    """What can happen to a sequence."""

    ADMIT = "admit"
    PREEMPT = "preempt"
    PAUSE = "pause"
    RESUME = "resume"
    REQUEUE = "requeue"
    FINISH = "finish"


TRANSITIONS: dict[tuple[Status, Event], Status] = {
    (Status.WAITING, Event.ADMIT): Status.RUNNING,
    (Status.WAITING, Event.PAUSE): Status.PAUSED,
    (Status.WAITING, Event.FINISH): Status.FINISHED,
    (Status.RUNNING, Event.PREEMPT): Status.WAITING,
    (Status.RUNNING, Event.PAUSE): Status.PAUSED,
    (Status.RUNNING, Event.FINISH): Status.FINISHED,
    (Status.PAUSED, Event.RESUME): Status.RUNNING,
    (Status.PAUSED, Event.REQUEUE): Status.WAITING,
    (Status.PAUSED, Event.FINISH): Status.FINISHED,
}
"""Every change of status there is; a pair that is not here raises and changes nothing."""
