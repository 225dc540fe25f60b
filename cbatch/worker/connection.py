"""One worker as its client sees it: messages both ways, and the requests that it has."""

from __future__ import annotations

import threading
from contextlib import suppress
from itertools import count
from typing import TYPE_CHECKING, Any, Protocol

from cbatch.checks import MAX_INT, check_int, shown
from cbatch.errors import CBatchError, EngineError, WorkerDiedError, words_of
from cbatch.interrupts import HeldBack, Latch
from cbatch.worker.wire import VERSION, dumps, error_of_json, loads

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from cbatch.core.stats import EngineStats
    from cbatch.worker.requests import Asked


class Link(Protocol):
    """A pair of pipes, or a socket, to a worker."""

    def send(self, line: bytes) -> None:
        """Send one line, which has no end yet. Raises an OSError where the worker is gone."""

    def frames(self) -> Iterator[bytes]:
        """Yield the worker's frames as they come, until it is gone."""

    def end(self) -> str:
        """Let go of the worker, wait until it is gone, and return why, in words; "" where it was asked to end."""

    def kill(self) -> None:
        """End the worker now."""


class Reply:
    """The answer to a call; a thread may wait for it."""

    def __init__(
        self,
        read: Callable[[Any], Any] | None = None,
        then: Callable[[Reply], object] | None = None,
    ) -> None:
        """Make one without an answer.

        Args:
            read: makes the value of what the worker says, or raises where it says something else; None for no value.
            then: called with the reply in the thread that takes frames.
        """
        self.value: Any = None
        self.error: Exception | None = None
        self.read = read or _nothing
        self._then, self._done = then, Latch()

    def settle(self, value: object, error: Exception | None = None) -> None:
        """Give the answer. Call it once."""
        self.value, self.error = value, error
        self._done.open()
        if self._then is not None:
            self._then(self)

    def wait(self) -> Any:
        """Return the value, or raise the error."""
        self._done.wait()
        if self.error is not None:
            raise self.error
        return self.value


def _nothing(_: object) -> None:
    """Return nothing of what a worker says."""


class Connection:
    """Sends messages to a worker and keeps what it was asked for. Every method from any thread."""

    def __init__(self, link: Link) -> None:
        """Wait for the worker's first frame.

        Raises:
            CBatchError: what it could not do, such as load its model; an EngineError where it ended without a word.
        """
        self.link = link
        self.frames = link.frames()
        try:
            self.n_slots, self.n_window = self._sizes()
        except BaseException as error:
            link.kill()
            ended = link.end()
            if isinstance(error, CBatchError):
                raise
            cause = ended if isinstance(error, StopIteration) else words_of(error)
            raise EngineError(f"a worker ended before it was ready: {cause}") from None
        self.requests: dict[str, Asked] = {}
        """What it has in flight, by id, in order of sending; for the client to keep."""
        self.is_giving = False
        """Whether it is asked to give requests back."""
        self.stats: EngineStats | None = None
        """Its figures, as they were when somebody last asked."""
        self.cause = ""
        """Why it says that it ends."""
        self._numbers = count()
        self._replies: dict[int, Reply] = {}
        self._is_gone = False
        self._sending = threading.RLock()

    def _sizes(self) -> tuple[int, int]:
        """Return slots and window, as the first frame tells them.

        Raises:
            StopIteration: there is none.
            CBatchError: the error that it tells; or an EngineError where it is none of a worker's.
        """
        frame = next(self.frames)
        try:
            said = loads(frame)
            version, error = said.get("cbatch"), error_of_json(said.get("error"))
            if version == VERSION and error is None:
                window = check_int("n_window", said.get("n_window"), 1, MAX_INT)
                return check_int("parallel", said.get("parallel"), 1, MAX_INT), window
        except Exception as wrong:
            raise EngineError(f"what answers is no worker: {words_of(wrong)}") from None
        raise error or EngineError(
            f"the worker speaks version {shown(version)} of the protocol, this cbatch {VERSION}"
        )

    @property
    def n_waiting(self) -> int:
        """Requests beyond its slots."""
        return len(self.requests) - self.n_slots

    def tell(self, op: str, **fields: object) -> None:
        """Send a command that has no answer; one to a worker that is gone is lost."""
        self._send(dumps({"op": op, **fields}))

    def call(self, op: str, read: Callable[[Any], Any] | None = None, **fields: object) -> Reply:
        """Send a command and return its answer to come; see `send` and `Reply`."""
        return self.send({"op": op, **fields}, read)

    def send(
        self,
        message: dict[str, Any],
        read: Callable[[Any], Any] | None = None,
        then: Callable[[Reply], object] | None = None,
    ) -> Reply:
        """Send a message and return its answer to come: a `WorkerDiedError` where the worker is gone."""
        reply, number = Reply(read, then), next(self._numbers)
        line = dumps({**message, "n": number})
        with HeldBack(), self._sending:
            is_gone = self._is_gone
            if not is_gone:
                self._replies[number] = reply
                self._send(line)
        if is_gone:
            reply.settle(None, WorkerDiedError(self.cause))
        return reply

    def settle(self, number: int, value: object, error: Any = None) -> None:
        """Give a call its answer; one that cannot be read raises, and the call stays open. In the thread of frames."""
        reply = self._replies.get(number)
        if reply is not None:
            failure = error_of_json(error)
            found = reply.read(value) if failure is None else None
            if self._replies.pop(number, None) is reply:
                reply.settle(found, failure)

    def lose(self, cause: str) -> None:
        """Give every call that waits the error of a worker that is gone."""
        self.cause = cause
        with HeldBack(), self._sending:
            self._is_gone = True
            replies, self._replies = self._replies, {}
        for reply in replies.values():
            reply.settle(None, WorkerDiedError(cause))

    def _send(self, line: bytes) -> None:
        """Send a whole line, for half of one would spoil the next."""
        # an error says that the worker is gone, as the thread that takes frames will find
        with HeldBack(), self._sending, suppress(OSError, ValueError):
            self.link.send(line)
