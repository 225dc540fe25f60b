"""One worker as its client sees it: messages both ways, and the requests that it has."""

from __future__ import annotations

import os
import threading
from collections import deque
from contextlib import contextmanager, suppress
from itertools import count
from typing import TYPE_CHECKING, Any, Protocol

from msgspec import Raw, structs

from cbatch.errors import (
    CBatchError,
    ConfigError,
    EngineError,
    InsideStepError,
    WorkerDiedError,
    words_of,
)
from cbatch.support.checks import MAX_INT, check_int
from cbatch.support.garbage import uncollected
from cbatch.support.interrupts import HeldBack, Latch
from cbatch.support.logs import must_not_wait
from cbatch.support.thread_start import started
from cbatch.worker.framing import N_LINE_MAX, framed
from cbatch.worker.wire import VERSION, Frame, Ready, WireAnswer, decode, encode_call

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from cbatch.stats import EngineStats
    from cbatch.support.model_facts import ModelFacts
    from cbatch.worker.protocol_commands import ProtocolCommand
    from cbatch.worker.requests import Asked


_N_LARGE = 2**14
"""Bytes of a frame from which on its values are many: no garbage is collected while they are made. Our choice."""


class Link(Protocol):
    """A pair of pipes, or a socket, to a worker."""

    def send(self, message: bytes) -> None:
        """Send a message. Raises an OSError where the worker is gone."""

    def frames(self) -> Iterator[bytes]:
        """Yield the worker's frames as they come, until it is gone."""

    def end(self) -> str:
        """Let go of the worker, wait until it is gone, and return why, in words; "" where it was asked to end."""

    def kill(self, why: str = "") -> None:
        """End the worker now; `end` says why, if the link knows how it ended."""

    def is_stopped(self) -> bool:
        """Whether a signal has stopped the worker since the last call, as far as this system tells."""


class FrameThread(threading.Thread):
    """Takes a worker's frames. While it waits for a reply, another thread reads on, for the reply may be there."""

    connection: Connection | None = None
    """The worker that it reads from now."""


class _AsideThread(FrameThread):
    """Reads on meanwhile."""


class Reply:
    """The answer to a call; a thread may wait for it."""

    def __init__(
        self,
        read: Callable[[Raw], Any] | None = None,
        then: Callable[[Reply], object] | None = None,
    ) -> None:
        """Make one without an answer.

        Args:
            read: makes the value of its bytes, or raises where they are something else; None for no value.
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
        then, self._then = self._then, None  # what it refers to refers to this
        if then is not None:
            then(self)

    def wait(self) -> Any:
        """Return the value, or raise the error; an `InsideStepError` where the worker may wait for this thread."""
        thread = threading.current_thread()
        if must_not_wait() or isinstance(thread, _AsideThread):
            raise InsideStepError
        if isinstance(thread, FrameThread) and thread.connection is not None:
            with thread.connection.read_aside():
                self._done.wait()
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
        self.has_limit = False
        """Whether queueing may wait there for room in the queue."""
        self.facts: ModelFacts | None = None
        """What its model is, if its first frame tells it."""
        self.weights = ""
        """A digest of the files that it has loaded, as `Ready` has it."""
        try:
            self.n_slots, self.n_window = self._sizes()
        except BaseException as error:
            is_gone = isinstance(error, StopIteration)
            if not is_gone:
                link.kill()
            ended = link.end()
            if isinstance(error, CBatchError):
                raise
            cause = ended if is_gone else words_of(error)
            raise EngineError(f"a worker ended before it was ready: {cause}") from None
        self.requests: dict[str, Asked] = {}
        """What it has in flight, by id, in order of sending; for the client to keep."""
        self.n_entering = 0
        """Messages with requests that it has not answered. With the lock of its pool."""
        self.is_giving = False
        """Whether it is asked to give requests back."""
        self.stats: EngineStats | None = None
        """Its figures, as they were when somebody last asked."""
        self.cause = ""
        """Why it says that it ends."""
        self.key = os.urandom(8).hex()
        """Stands for this worker, and for none that takes its place."""
        self._numbers = count()
        self._replies: dict[int | str, Reply] = {}
        self._is_gone = False
        self._locked = threading.RLock()
        self._outgoing: deque[bytes] = deque()
        self._sending, self._is_sending, self._has_ended = threading.RLock(), False, False
        self._put_off: deque[Frame] = deque()
        """What a thread aside has read, for the thread that takes frames."""
        self._aside: threading.Thread | None = None
        self._is_aside = self._reads_on = False
        self._failure: Exception | None = None

    def _sizes(self) -> tuple[int, int]:
        """Return slots and window, as the first frame tells them.

        Raises:
            StopIteration: there is none.
            CBatchError: the error that it tells; or an EngineError where it is none of a worker's.
        """
        frame = next(self.frames)
        try:
            ready = decode(frame, Ready)
            if ready.cbatch == VERSION and ready.error is None:
                self.has_limit, self.facts = ready.has_limit, ready.facts
                self.weights = ready.weights
                window = check_int("n_window", ready.n_window, 1, MAX_INT)
                return check_int("parallel", ready.parallel, 1, MAX_INT), window
        except Exception as wrong:
            raise EngineError(
                f"what answered is not a worker of cbatch: {words_of(wrong)}"
            ) from None
        raise ready.error or EngineError(
            f"the worker speaks version {ready.cbatch} of the protocol, this cbatch version {VERSION}"
        )

    @property
    def n_waiting(self) -> int:
        """Requests beyond its slots."""
        return len(self.requests) - self.n_slots

    # ---- to the worker ----

    def tell(self, command: ProtocolCommand) -> None:
        """Send a command that has no answer; one to a worker that is gone is lost."""
        self.post(command)
        self.flush()

    def call(self, command: ProtocolCommand, read: Callable[[Raw], Any] | None = None) -> Reply:
        """Send a command and return its answer to come; see `ask` and `Reply`."""
        reply = self.ask(command, read)
        self.flush()
        return reply

    def post(self, command: ProtocolCommand) -> None:
        """Have `flush` send a command that has no answer."""
        self._outgoing.append(framed(encode_call(command), "msgpack"))

    def ask(
        self,
        command: ProtocolCommand,
        read: Callable[[Raw], Any] | None = None,
        then: Callable[[Reply], object] | None = None,
    ) -> Reply:
        """Have `flush` send a command; return its answer to come.

        The answer is a ConfigError where the command is too long, or has a value that cannot be sent.
        """
        reply, number = Reply(read, then), next(self._numbers)
        try:
            message = _message_of(structs.replace(command, n=number))
        except ConfigError as error:
            reply.settle(None, error)
            return reply
        with HeldBack(), self._locked:
            is_gone = self._is_gone
            if not is_gone:
                self._replies[number] = reply
                self._outgoing.append(message)
        if is_gone:
            reply.settle(None, WorkerDiedError(self.cause))
        return reply

    def flush(self) -> None:
        """Send what is to be sent. May wait until the worker reads, so not under a lock."""
        while self._outgoing:
            with HeldBack(), self._sending:
                # what a finalizer adds in the midst is sent by the outer loop, for half a line would spoil the next
                if self._is_sending:
                    return
                if self._has_ended:
                    self._outgoing.clear()
                    return
                self._is_sending = True
                try:
                    # an error says that the worker is gone, as the thread that takes frames will find
                    with suppress(OSError, ValueError, IndexError):
                        self.link.send(self._outgoing.popleft())
                finally:
                    self._is_sending = False

    # ---- from the worker ----

    def messages(self) -> Iterator[Frame]:
        """Yield what the worker's frames hold as they come, until it is gone. For one thread, which is a `FrameThread`.

        Raises:
            ConfigError: a frame cannot be read.
        """
        while True:
            if self._put_off:
                yield self._put_off.popleft()
            elif self._aside is not None:
                self._aside.join()
                self._aside = None
            elif self._failure is not None:
                raise self._failure
            elif (frame := next(self.frames, None)) is not None:
                yield _read(frame)
            else:
                return

    @contextmanager
    def read_aside(self) -> Iterator[None]:
        """Have another thread read meanwhile: it settles calls and puts off all else. For the thread of `messages`."""
        with HeldBack(), self._locked:  # a finalizer amid it must not wait
            if not self._is_aside:
                self._aside = started(self._read_aside, "cbatch-aside", _AsideThread)
            self._reads_on = self._is_aside = True
        try:
            yield
        finally:
            self._reads_on = False

    def _read_aside(self) -> None:
        try:
            while (frame := next(self.frames, None)) is not None:
                said = _read(frame)
                replies, said.replies = said.replies, []
                for answer in replies:
                    self.settle(answer)
                self._put_off.append(said)
                with HeldBack(), self._locked:
                    if not self._reads_on:
                        self._is_aside = False
                        return
        except Exception as error:
            self._failure = error
        self.lose(self.cause)

    def end(self) -> str:
        """Let go of the worker, wait until it is gone, and return why: as `Link.end`. Nothing is sent any more."""
        with (
            self._sending
        ):  # else what is sent goes to whoever gets the number of the descriptor next
            self._has_ended = True
        return self.link.end()

    def settle(self, answer: WireAnswer) -> None:
        """Give a call its answer; one that cannot be read raises, and the call stays open. In the thread of frames."""
        reply = self._replies.get(answer.n)
        if reply is not None:
            found = reply.read(answer.value) if answer.error is None else None
            if self._replies.pop(answer.n, None) is reply:
                reply.settle(found, answer.error)

    def lose(self, cause: str) -> None:
        """Give every call that waits the error of a worker that is gone."""
        self.cause = cause
        with HeldBack(), self._locked:
            self._is_gone = True
            replies, self._replies = self._replies, {}
        for reply in replies.values():
            reply.settle(None, WorkerDiedError(cause))


def _read(data: bytes) -> Frame:
    """Return what a frame says. Raises a ConfigError where it cannot be read."""
    if len(data) < _N_LARGE:
        return decode(data, Frame)
    with uncollected():
        return decode(data, Frame)


def _message_of(command: ProtocolCommand) -> bytes:
    """Return a command as it is sent. Raises a ConfigError where it is too long, or has a value that cannot be sent."""
    data = encode_call(command)
    if len(data) > N_LINE_MAX:
        raise ConfigError(
            f"a message of {len(data):,} bytes is too long for a worker process; at most {N_LINE_MAX:,} are allowed"
        )
    return framed(data, "msgpack")
