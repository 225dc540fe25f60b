"""The cyclic garbage collector, kept from large values: no other thread runs while it visits their objects."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from cbatch.support.interrupts import Postponed

_N_OLD = 2**17
"""Objects made old before all objects are counted, and as many more as may be garbage. Our choice: some 10 MB."""


class _Blocks:
    """The blocks of all threads in which nothing is collected."""

    def __init__(self) -> None:
        self._n_old, self._n_old_most = 0, _N_OLD
        """Objects made old since all were counted, and after how many they are counted again."""
        self._n_all_most = 0
        """Objects from which on old garbage is collected."""
        self._lock = threading.RLock()  # reentrant: a handler of a signal may begin a block, too
        self._n = 0
        self._was_enabled = False
        os.register_at_fork(after_in_child=self._renew)

    def _renew(self) -> None:
        """Forget, in the child of a fork, the blocks of threads that are not there."""
        if self._n and self._was_enabled:
            gc.enable()
        self._lock, self._n = threading.RLock(), 0

    def collect(self) -> None:
        """Collect young garbage, which must not become old, before an outermost block.

        Old garbage too, where objects have become more by half: making objects old keeps Python from doing so itself.
        """
        if self._n or not gc.isenabled():
            return
        gc.collect(1)
        if self._n_old < self._n_old_most or gc.get_freeze_count():
            return
        n_all = _count()
        if n_all > self._n_all_most:
            gc.collect()
            n_all = _count()
            self._n_all_most = n_all + max(_N_OLD, n_all // 2)
        self._n_old, self._n_old_most = 0, max(_N_OLD, n_all // 4)

    def begin(self) -> None:
        with self._lock:
            if not self._n:
                self._was_enabled = gc.isenabled()
                gc.disable()
            self._n += 1

    def end(self, *, makes_old: bool) -> None:
        with self._lock:
            self._n -= 1
            if self._n or not self._was_enabled:
                return
            if makes_old and not gc.get_freeze_count():  # what a program keeps frozen stays so
                self._n_old += gc.get_count()[0]
                gc.freeze()
                gc.unfreeze()  # to the oldest generation, without a visit
            gc.enable()


def _count() -> int:
    """Return how many objects there are for the collector, without a visit, which takes about ten times as long."""
    gc.freeze()
    n = gc.get_freeze_count()
    gc.unfreeze()
    return n


_blocks = _Blocks()


@contextmanager
def no_finalizers() -> Iterator[None]:
    """Collect no garbage in a short block, inside a `HeldBack` one: no finalizer of garbage runs amid its work."""
    _blocks.begin()
    try:
        yield
    finally:
        _blocks.end(makes_old=False)


@contextmanager
def uncollected() -> Iterator[None]:
    """Collect no garbage in a block that makes many objects without cycles, nor visit them all soon after it.

    At the end, young objects count as old: the next collection of young ones would visit all of them at once. Blocks
    of several threads may overlap.
    """
    with Postponed():
        _blocks.collect()
        _blocks.begin()
        try:
            yield
        finally:
            _blocks.end(makes_old=True)


def drop_frames(error: BaseException) -> None:
    """Drop the tracebacks of an error that was dealt with, and of those behind it.

    A frame among them that refers to its error, as that of each `await` of a failed future does, would keep all values
    of all of them in memory until the collector visits old objects.
    """
    errors, seen = [error], set[int]()
    while errors:
        error = errors.pop()
        if id(error) in seen:
            continue
        seen.add(id(error))
        error.__traceback__ = None
        errors += [e for e in (error.__cause__, error.__context__) if e is not None]
