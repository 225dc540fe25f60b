"""The cyclic garbage collector, kept from large values: no other thread runs while it visits their objects."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from cbatch.support.interrupts import Postponed

_N_OLD = 2**17
"""Least objects made old, as many as may be garbage, before old garbage is collected. Our choice: some 10 MB."""


class _Blocks:
    """The blocks of all threads in which nothing is collected."""

    def __init__(self) -> None:
        self._n_old, self._n_old_most = 0, _N_OLD
        """Objects made old since old garbage was collected, and from how many on it is collected again."""
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

        Old garbage too, where a third of all objects may be some: making objects old keeps Python from doing so itself.
        """
        if self._n or not gc.isenabled():
            return
        if self._n_old < self._n_old_most or gc.get_freeze_count():
            gc.collect(1)
            return
        gc.collect()
        gc.freeze()
        self._n_old, self._n_old_most = 0, max(_N_OLD, gc.get_freeze_count() // 2)
        gc.unfreeze()

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
