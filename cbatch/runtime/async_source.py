"""An async generator of prompts as a normal iterator, for the thread that reads prompts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, Callable
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

import anyio
from anyio.lowlevel import current_token

from cbatch.errors import RequestCancelledError
from cbatch.runtime.waking import call_soon_here

_LOOK_S = 0.5
"""Seconds between a waiting thread's checks for a closed event loop: `close` notifies nobody. Our choice."""


class _Read(NamedTuple):
    """What reading one prompt gave: the prompt, or the error that ended the reading."""

    item: object = None
    error: BaseException | None = None


class AsyncSource:
    """Iterates, in another thread, over an async iterable that one task of the event loop here reads on demand."""

    def __init__(self, items: AsyncIterable[Any]) -> None:
        """Start the task. Call this in the event loop."""
        self._items = items.__aiter__()
        self._call_soon = call_soon_here()
        self._is_closed: Callable[[], bool] = getattr(
            current_token().native_token, "is_closed", bool
        )
        self._wanted = anyio.Event()
        self._scope = anyio.CancelScope()
        self._found: SimpleQueue[_Read] = SimpleQueue()
        self._task = _spawn(self._read_all)  # kept: asyncio does not

    def __iter__(self) -> AsyncSource:
        return self

    def __next__(self) -> object:
        """Wait for the next item and return it. Not to be called in the event loop's thread."""
        self._do_soon(lambda: self._wanted.set())
        found = self._wait()
        if found.error is None:
            return found.item
        self._found.put(found)  # for later calls
        if isinstance(found.error, StopAsyncIteration):
            raise StopIteration
        raise found.error

    def _wait(self) -> _Read:
        while True:
            try:
                return self._found.get(timeout=_LOOK_S)
            except Empty:  # noqa: PERF203
                if self._is_closed():  # neither the task nor its wake-up runs any more
                    return _Read(error=_loop_has_ended())

    def leave(self) -> None:
        """End the reading, even while an item is awaited. From any thread; no effect a second time."""
        self._do_soon(self._scope.cancel)

    def _do_soon(self, do: Any) -> None:
        try:
            self._call_soon(do)
        except RuntimeError:  # the loop has ended: asyncio's error; trio's is a subclass
            self._found.put(_Read(error=_loop_has_ended()))

    async def _read_all(self) -> None:
        error: BaseException = _loop_has_ended()
        try:
            with self._scope:
                while True:
                    await self._wanted.wait()
                    self._wanted = anyio.Event()
                    self._found.put(_Read(await self._items.__anext__()))
        except Exception as found:  # StopAsyncIteration, too
            error = found
        finally:
            self._found.put(_Read(error=error))
            await self._close()

    async def _close(self) -> None:
        """End the generator in the task that has run it; what it raises then reaches nobody."""
        close = getattr(self._items, "aclose", None)
        if close is not None:
            with anyio.CancelScope(shield=True):
                try:
                    await close()
                except Exception:
                    return


def _loop_has_ended() -> RequestCancelledError:
    return RequestCancelledError(
        "the batch was abandoned, or its event loop ended, before all prompts were read"
    )


def _spawn(work: Any) -> object:
    """Run a coroutine function as a task of the running event loop that outlives the caller's scopes."""
    loop: Any = current_token().native_token
    if hasattr(loop, "call_soon_threadsafe"):
        return asyncio.ensure_future(work())
    import trio

    return trio.lowlevel.spawn_system_task(work)
