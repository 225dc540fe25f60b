"""One way to make an engine, over which tests of its face run: in a thread, in a worker, and in a pool of two workers.

A module says `pytestmark = each_kind`, and a test that is of fewer kinds has a decorator with the reason. In each run a
test has to make an engine of its kind, so that none is run over workers for nothing.
"""

from __future__ import annotations

import copy
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import pytest

from cbatch.engine import Engine
from cbatch.engine_options import ScheduleOptions
from cbatch.runtime.local import LocalRuntime
from tests.worker.links import workers_over

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cbatch.backend import Backend

Kind: TypeAlias = Literal["thread", "worker", "pool"]


@dataclass(slots=True)
class _Chosen:
    kind: Kind = "thread"
    made: list[Kind] = field(default_factory=list)


_CHOSEN = _Chosen()


@contextmanager
def chosen(kind: Kind) -> Iterator[list[Kind]]:
    """Have `engine_on` make engines of this kind in the block; gives the kinds that it made."""
    _CHOSEN.kind, _CHOSEN.made = kind, []
    try:
        yield _CHOSEN.made
    finally:
        _CHOSEN.kind = "thread"


def engine_on(
    backend: Backend,
    *,
    schedule: ScheduleOptions | None = None,
    threaded: bool = True,
    cache_dir: Any = None,
    **more: Any,
) -> Engine:
    """Make an engine on a backend: of the kind that the test runs over, or by hand in this thread.

    A pool's second worker has a backend of its own, which is like the first.
    """
    kind = _CHOSEN.kind if threaded else "thread"
    if kind == "thread":
        return Engine(backend, schedule=schedule, threaded=threaded, cache_dir=cache_dir, **more)
    _CHOSEN.made.append(kind)
    backends = [backend] if kind == "worker" else [backend, copy.deepcopy(backend)]
    runtimes = [
        partial(LocalRuntime, one, schedule or ScheduleOptions(), cache_dir=cache_dir)
        for one in backends
    ]
    return Engine(opener=lambda _: workers_over(*runtimes), **more)


class Reason(Enum):
    """Why a test is not one of each kind."""

    BY_HAND = "its engine has no thread, or it makes none"
    OWNER = "it looks into the thread that computes, or at its clock"
    DEATH = "an engine that fails is closed, a worker that dies is replaced: tests/worker/test_deaths.py"
    AT_ONCE = "orders have to be known at once, and chunks not joined: a worker reads and writes when it can"
    LONG = "it takes long, and over more kinds it would see the same code"
    ONE_BACKEND = "it looks into the only backend, has it stop, or counts who waits for its slots"


each_kind = pytest.mark.kinds("thread", "worker", "pool")
"""A test, or all tests of a module, run over each kind of engine."""


def thread_only(why: Reason) -> pytest.MarkDecorator:
    """Have a test run over an engine in a thread alone."""
    return pytest.mark.kinds("thread", why=why)


def no_pool(why: Reason) -> pytest.MarkDecorator:
    """Have a test run over a thread and a worker, but not over a pool."""
    return pytest.mark.kinds("thread", "worker", why=why)


def kinds_of(test: pytest.Function) -> tuple[Kind, ...]:
    """Return the kinds over which a test runs; none where it is not told."""
    marker = test.get_closest_marker("kinds")
    return () if marker is None else marker.args
