"""Types that msgspec reads: it ends the process where two threads use one for the first time at once."""

from __future__ import annotations

import os
import threading
from collections.abc import Hashable
from functools import cache
from typing import Any, TypeVar, cast

import msgspec

from cbatch.support.garbage import no_finalizers
from cbatch.support.interrupts import HeldBack

T = TypeVar("T")

_locks = {"learning": threading.Lock()}
os.register_at_fork(after_in_child=lambda: _locks.update(learning=threading.Lock()))


def known(kind: type[T]) -> type[T]:
    """Return a type that msgspec has learned, with those in it: then any thread may use it."""
    _learn(cast("Hashable", kind))
    return kind


@cache
def _learn(kind: Any) -> None:
    # no handler nor finalizer comes here again amid this, to wait for its own thread
    with HeldBack(), no_finalizers(), _locks["learning"]:
        msgspec.json.Decoder(kind)
