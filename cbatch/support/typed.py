"""Types that msgspec reads: it ends the process where two threads use one for the first time at once."""

from __future__ import annotations

import os
import threading
from functools import cache
from typing import TypeVar

import msgspec

T = TypeVar("T")

_locks = {"learning": threading.Lock()}
os.register_at_fork(after_in_child=lambda: _locks.update(learning=threading.Lock()))


@cache
def known(kind: type[T]) -> type[T]:
    """Return a type that msgspec has learned, with those in it: then any thread may use it."""
    with _locks["learning"]:
        msgspec.json.Decoder(kind)
    return kind
