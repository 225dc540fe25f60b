"""Work that ends within a moment or is broken off, so that what waits behind it waits no longer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_is_brief: ContextVar[bool] = ContextVar("cbatch.support.moments", default=False)


class TakesLongError(Exception):
    """Brief work was broken off: it takes longer than a moment, and is to be done where it holds up nobody."""


def is_brief() -> bool:
    """Whether work of this thread is to be broken off after a moment, by a `TakesLongError`."""
    return _is_brief.get()


@contextmanager
def brief() -> Iterator[None]:
    """Have work in a block broken off after a moment, if it may take long."""
    before = _is_brief.set(True)
    try:
        yield
    finally:
        _is_brief.reset(before)
