"""What a socket serves: an application, replaced by another one when the model is reloaded."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import anyio

from cbatch.errors import words_of
from cbatch.server.gate import OPEN_PATHS
from cbatch.server.http_errors import draining, reloading
from cbatch.support.logs import Log

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from starlette.applications import Starlette
    from starlette.types import Receive, Scope, Send

    from cbatch.engine import Engine
    from cbatch.server.desk import Desk

_log = Log("cbatch.reload")

_LAST_S = 5.0
"""Most seconds for short calls to end before the applications change, and for the last bytes of ended ones."""

_FILES_S = 2.0
"""Most seconds for which new calls wait until the files and batches have changed hands. Our choice."""

_LEAVE_S = 1.0
"""Most seconds of one wait for batches to be left. Our choice: the end of the server waits for it, too."""

_AGAIN_S = 2.0
"""Seconds until a folder of files that could not be opened is tried again. Our choice."""

_LOOK_S = 0.02
"""Seconds between two looks at calls that are to end. Our choice."""

State: TypeAlias = Literal["none", "loading", "draining", "failed"]


@dataclass(frozen=True, slots=True)
class Renewal:
    """How a model is loaded once more.

    Args:
        find: returns the model; may wait, as for a download.
        load: returns an engine for it that is not open yet.
        create: returns an application over that engine, without a folder of files, which it gets later; may wait.
    """

    find: Callable[[], Any]
    load: Callable[[Any], Engine]
    create: Callable[[Engine], Starlette]


@dataclass(eq=False)
class _RunningApp:
    """An application, and the calls that it answers."""

    app: Starlette
    n_calls: int = 0

    @property
    def desk(self) -> Desk:
        desk: Desk = self.app.state.desk
        return desk


class Front:
    """Passes new calls to the newest application. Calls of an older one have some time to end there.

    A reload loads the model beside the old one. If that fails, the old model stays in use; otherwise new calls get the
    new model. Old calls that are still running after the grace period end with an error that names the reload. The new
    application has the files and batches as soon as the old one has left them.
    """

    def __init__(
        self, app: Starlette, renewal: Renewal | None = None, grace_s: float = 0.0
    ) -> None:
        """Make one; without a `renewal` the model cannot be reloaded."""
        self._served: list[_RunningApp] = []
        """The newest last."""
        self._renewal, self._grace_s = renewal, grace_s
        self._is_asked = self._is_draining = False
        self._task: asyncio.Task[None] | None = None
        self._leaving: list[Desk] = []
        """Those of older applications that may still have the folder of files open."""
        self._handover: asyncio.Task[None] | None = None
        """Opens the folder of files for the newest application."""
        self._change: asyncio.Event | None = None
        """Set once the applications have changed; new calls wait for it."""
        self._state: State = "none"
        self._own: list[Engine] = []
        """Engines that were loaded here, and are to be closed here."""
        self._serve(_RunningApp(app))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a call on."""
        while self._change is not None and scope["path"] not in OPEN_PATHS:
            await self._change.wait()
        served = self._served[-1]
        served.n_calls += 1
        try:
            await served.app(scope, receive, send)
        finally:
            served.n_calls -= 1

    @property
    def desk(self) -> Desk:
        """That of new calls."""
        return self._served[-1].desk

    @property
    def is_idle(self) -> bool:
        """Whether no client waits for an engine."""
        return all(served.desk.is_idle for served in self._served)

    @property
    def n_calls(self) -> int:
        """Calls that are being read or answered."""
        return sum(served.n_calls for served in self._served)

    def drain(self) -> None:
        """Refuse new calls from now on, and reload nothing. From any thread or signal handler."""
        self._is_draining = True
        for served in [*self._served]:
            served.desk.drain()

    def end_visits(self) -> None:
        """End every call that is being answered: its client is told that the server shuts down."""
        for served in self._served:
            served.desk.end_visits(draining())

    # ---- reloads ----

    @property
    def state(self) -> State:
        """State of the last reload; `none` before the first one and after a success."""
        return "loading" if self._is_asked and not self._is_under_way else self._state

    @property
    def _is_under_way(self) -> bool:
        return self._state in ("loading", "draining")

    @property
    def can_reload(self) -> bool:
        """Whether there is a model to load once more."""
        return self._renewal is not None

    def ask(self) -> bool:
        """Have the model reloaded; False while that is under way or the server ends."""
        if self._is_asked or self._is_under_way:
            return False
        return self.ask_again()

    def ask_again(self) -> bool:
        """Have the model reloaded, after a reload under way; False while the server ends. Also in a signal handler."""
        self._is_asked = self.can_reload and not self._is_draining
        return self._is_asked

    def look(self) -> None:
        """Begin a reload that was asked for, unless an earlier one is under way. In the event loop."""
        if self._is_asked and not self._is_under_way and self._renewal is not None:
            self._state, self._is_asked = "loading", False
            self._task = asyncio.create_task(self._reload(self._renewal))

    async def _reload(self, renewal: Renewal) -> None:
        _log.warn("the model is being reloaded")
        try:
            old = await self._replaced(renewal)
        except Exception as error:  # whatever failed, the old model still serves
            self._state = "failed"
            _log.warn("the reload failed, the old model stays in use: %s", words_of(error))
            return
        self._state = "draining"
        _log.warn(
            "the model is reloaded; calls still running on the old one: %d", old.desk.n_visits
        )
        await _until(lambda: not old.n_calls, self._grace_s)
        old.desk.end_visits(reloading())
        await _until(lambda: not old.n_calls, _LAST_S)
        self._served.remove(old)
        try:
            await self._close(old.desk.engine)
        except Exception as error:  # whatever failed, the new model serves
            _log.warn("the old model could not be closed: %s", words_of(error))
        self._state = "none"

    async def _replaced(self, renewal: Renewal) -> _RunningApp:
        """Load the model, have new calls go to it, and return the application that was there before."""
        engine = renewal.load(await anyio.to_thread.run_sync(renewal.find))
        await engine.__aenter__()  # cancelling this ends the load
        self._own.append(engine)
        try:
            new = _RunningApp(await anyio.to_thread.run_sync(renewal.create, engine))
        except Exception:
            await self._close(engine)
            raise
        old = self._served[-1]
        # fast uploads and the like end where they began; new calls wait for none of them
        await _until(lambda: old.n_calls <= old.desk.n_visits, _LAST_S)
        await self._end_handover()
        self._change = change = asyncio.Event()
        try:
            self._serve(new)
            self._begin_handover(old.desk, new.desk)
            await _until(lambda: not new.desk.lacks_files, _FILES_S)
        finally:
            self._change = None
            change.set()
        return old

    def _begin_handover(self, old: Desk, new: Desk) -> None:
        """Have the new application take over the files and batches."""
        new.files_dir = old.files_dir
        self._leaving.append(old)
        self._handover = asyncio.create_task(self._hand_over(new))

    async def _end_handover(self) -> None:
        """Open the folder of files for no application from now on."""
        if self._handover is not None:
            self._handover.cancel()
            await asyncio.wait([self._handover])

    async def _hand_over(self, new: Desk) -> None:
        """Open the folder of files for a new application; where that fails, try again."""
        told = ""
        while words := await self._take_over(new):
            if words != told:
                _log.warn(
                    "files and batches are unavailable after the reload, until this is solved: %s",
                    words,
                )
            told = words
            await anyio.sleep(_AGAIN_S)
        if told:
            _log.warn("files and batches are available again")

    async def _take_over(self, new: Desk) -> str:
        """Open the folder once the older applications have left it; return why it is not open, "" if it is."""
        try:
            while self._leaving:
                leave = self._leaving[0].leave_batches
                if not await anyio.to_thread.run_sync(leave, _LEAVE_S, reloading()):
                    return "the old model's batches have not stopped yet"
                del self._leaving[0]
            await anyio.to_thread.run_sync(new.open_files)
        except Exception as error:  # whatever failed, it may pass
            return words_of(error)
        return ""

    async def _close(self, engine: Engine) -> None:
        """Close an engine that gets no new calls; its workers have a minute to end."""
        await anyio.to_thread.run_sync(engine.close)
        self._own = [own for own in self._own if own is not engine]

    def _serve(self, new: _RunningApp) -> None:
        new.desk.front = self
        self._served.append(new)
        if self._is_draining:
            new.desk.drain()

    # ---- the end ----

    def cancel(self) -> None:
        """Break off a reload. In the event loop."""
        for task in (self._task, self._handover):
            if task is not None:
                task.cancel()

    def close_desks(self, within_s: float) -> None:
        """Leave the batches to the next server."""
        desks = *self._leaving, *(served.desk for served in self._served)
        for desk in dict.fromkeys(desks):
            desk.close(within_s)

    def close_own_engines(self, within_s: float) -> None:
        """Close engines that were loaded here."""
        for engine in [*self._own]:
            engine.close(within_s=within_s)

    def close_engines(self, within_s: float) -> None:
        """Close all engines with all their requests."""
        for served in [*self._served]:
            served.desk.engine.close(within_s=within_s)
        self.close_own_engines(within_s)


async def _until(is_so: Callable[[], bool], seconds: float) -> None:
    """Wait until the condition holds, at most `seconds`."""
    with anyio.move_on_after(seconds):
        while not is_so():  # noqa: ASYNC110  # calls do not signal their end
            await anyio.sleep(_LOOK_S)


@contextmanager
def on_hangup(reload: Callable[[], object]) -> Iterator[None]:
    """Reload on SIGHUP during the block, unless the process has a terminal or ignores SIGHUP."""
    before = signal.getsignal(signal.SIGHUP)
    if before is signal.SIG_IGN or _has_terminal():
        yield
        return
    signal.signal(signal.SIGHUP, lambda number, frame: reload())
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)


def _has_terminal() -> bool:
    """Whether this process has a controlling terminal; the system sends SIGHUP when it is closed."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True
