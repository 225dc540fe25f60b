"""Work in a thread that a task waits for to the end, whoever cancels it meanwhile."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from contextvars import copy_context
from functools import partial
from typing import TYPE_CHECKING

import anyio

from cbatch.runtime.waker import LoopWaker

if TYPE_CHECKING:
    from collections.abc import Callable


async def do_to_end(work: Callable[[], object], hurry: Callable[[], object] | None = None) -> None:
    """Do `work` in a thread of its own, which is started before anything is awaited; return when it has ended.

    A shield holds off the cancelling of scopes, but not that of asyncio's own `Task.cancel`, which may come often: it
    is raised behind the work, and `hurry` is called when it first comes. What the work raises is raised here, and is
    the cause of a cancellation where both are.
    """
    bell, has_ended, outcome = LoopWaker.here(), anyio.Event(), Future[None]()

    def do() -> None:
        try:
            work()
            outcome.set_result(None)
        except BaseException as error:
            outcome.set_exception(error)
        bell.ring(has_ended)

    threading.Thread(target=partial(copy_context().run, do), name="cbatch-to-end").start()
    cancelled = await _wait(has_ended, hurry)
    if cancelled is not None:
        raise cancelled from outcome.exception()
    outcome.result()


async def _wait(event: anyio.Event, hurry: Callable[[], object] | None) -> BaseException | None:
    """Wait for an event; return how the task was cancelled meanwhile, or None."""
    cancelled: BaseException | None = None
    with anyio.CancelScope(shield=True):
        while not event.is_set():
            try:
                await event.wait()
            except anyio.get_cancelled_exc_class() as error:  # noqa: PERF203
                if hurry is not None and cancelled is None:
                    hurry()
                cancelled = error
    return cancelled
