"""Long work that is broken off, or lets other work go first, so that it does not delay what waits behind it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_is_brief: ContextVar[bool] = ContextVar("is_brief", default=False)
_in_pauses: ContextVar[Callable[[], object]] = ContextVar("in_pauses", default=bool)


class TakesLongError(Exception):
    """Brief work was broken off: it takes longer than a moment, and is to be done where it holds up nobody."""


class NobodyWaitsError(BaseException):
    """Work was broken off in a pause: nobody waits for it. Not an `Exception`: those of decoders are translated."""


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


def pause() -> None:
    """Between two pieces of long work, call the function given to `pausing`; if it raises, the work is broken off."""
    _in_pauses.get()()


@contextmanager
def pausing(do: Callable[[], object]) -> Iterator[None]:
    """Have `do` called at each `pause` of long work in the block."""
    before = _in_pauses.set(do)
    try:
        yield
    finally:
        _in_pauses.reset(before)
