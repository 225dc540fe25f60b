"""What a worker has to say, until a thread has written it: a slow reader stops neither the engine nor other readers."""

from __future__ import annotations

import threading
from array import array
from bisect import bisect_left
from collections import OrderedDict, deque
from dataclasses import replace
from io import StringIO
from itertools import chain
from typing import TYPE_CHECKING, Any

from cbatch.response import BatchOutputChunk, BatchResult, TokenLogprob
from cbatch.runtime.output_size import n_logprobs
from cbatch.support.thread_start import started
from cbatch.worker.wire import (
    N_PART,
    ResultPart,
    encode,
    encode_frame,
    n_first_part,
    parted,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from cbatch.worker.framing import FrameSink

N_FRAME_BYTES = 2**18
"""About the bytes after which a frame has no more values: a reader takes some milliseconds for it. Our choice."""

N_ANSWERS_MAX = 1000
"""Replies and errors that may wait before no more lines are read. Our choice."""

N_ANSWER_BYTES_MAX = 2**26
"""Most bytes of these together, about. Our choice: the longest line that a worker takes."""

N_EVENTS_MAX = 10_000
"""Records of steps, and lines of the log, that are kept for a reader: the newest ones. Our choice."""

_N_ECHO = 16
"""Tokens of a first chunk that count as an echo: fewer are told for each choice. Our choice."""

_SOON_S = 0.01

_OUTPUT = ("admitted", "chunks", "parts", "results", "steps", "logs")
_REPLIES = ("errors", "replies")
_ANSWERS = (*_REPLIES, "died")
_KINDS = (*_OUTPUT, *_ANSWERS)


class Outbox:
    """Collects output, replies and events for one reader. Every method from any thread.

    A frame has lists by kind, which a reader takes in the order of `wire.Frame`. Chunks of one answer that wait are one
    chunk, so no more waits than the answers and N_EVENTS_MAX events. Long ones are cut, so that no frame is long.
    """

    def __init__(
        self,
        sink: FrameSink,
        on_left: Callable[[], object],
        credit: int | None = None,
        *,
        takes_parts: bool = False,
    ) -> None:
        """Start to write.

        Args:
            sink: takes one frame after the other, and may wait.
            on_left: called once, where the reader has left: nothing more is kept for it.
            credit: the bytes that may be written before `grant`, but for replies and errors; None for any number.
            takes_parts: whether the reader takes the log-probabilities of a large result in parts, before it.

        Raises:
            NoThreadError: the system has no more threads.
        """
        self._takes_parts = takes_parts
        self._sink, self._on_left, self._credit = sink, on_left, credit
        self._has_left = self._is_closed = False
        self._changed = threading.Condition()
        self._chunks: OrderedDict[tuple[str, int], BatchOutputChunk | _Merged] = OrderedDict()
        self._echoes: dict[str, Sequence[TokenLogprob]] = {}
        """The log-probabilities of first chunks that are long, as those with an echo are, by request."""
        self._cut_firsts: set[str] = set()
        """Requests of whose first choice a part was written, and the rest waits."""
        self._waiting: dict[str, deque[Any]] = {
            kind: deque(maxlen=N_EVENTS_MAX if kind in ("steps", "logs") else None)
            for kind in _KINDS
        }
        self._may_pass: deque[bool] = deque()
        """Whether each of the replies may come between the parts of a large result."""
        self._n_answer_bytes = 0
        self._unwritten: set[str] = set()
        self._writing = threading.Lock()
        self._thread = started(self._run, "cbatch-outbox")

    # ---- what there is to say ----

    def deliver(self, chunks: Sequence[BatchOutputChunk], results: Iterable[BatchResult]) -> None:
        """Take new output; what was given must not be changed afterwards."""
        with self._changed:
            waiting = self._chunks
            for given in chunks:
                chunk = self._without_echo(given) if self._takes_parts else given
                key = chunk.id, chunk.index
                held = waiting.get(key)
                if held is None:
                    waiting[key] = chunk
                elif isinstance(held, _Merged):
                    held.add(chunk)
                else:
                    waiting[key] = _Merged(held).add(chunk)
            for result in results:
                self._waiting["results"].append(result)
                self._unwritten.add(result.id)
                self._echoes.pop(result.id, None)
            self._changed.notify_all()

    def _without_echo(self, chunk: BatchOutputChunk) -> BatchOutputChunk:
        """Return a chunk; of a further choice without the log-probabilities that it has of the first one's echo."""
        scores = chunk.logprobs or ()
        if not chunk.index:
            if len(scores) >= _N_ECHO:
                self._echoes.setdefault(chunk.id, scores)
            return chunk
        echo = self._echoes.get(chunk.id, ())
        n = min(len(echo), len(scores))
        n = bisect_left(range(n), True, key=lambda i: scores[i] is not echo[i])
        return replace(chunk, logprobs=scores[n:]) if n else chunk

    def put(self, kind: str, *values: object, may_pass: bool = False) -> None:
        """Add values of another kind; a reply that `may_pass` may come between the parts of a large result."""
        with self._changed:
            self._waiting[kind].extend(values)
            if kind == "replies":
                self._may_pass.extend([may_pass] * len(values))
            if kind in _REPLIES:
                self._n_answer_bytes += sum(map(_size_of_reply, values))
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Tell an error that belongs to no call."""
        self.put("errors", error)

    def put_at_once(self, kind: str, values: Sequence[object]) -> None:
        """Write values before this returns, where the reader takes them: the process may end without another word."""
        may_write = self._credit is None or self._credit > 0
        if may_write and self._sink.is_ready() and self._writing.acquire(timeout=_SOON_S):
            try:
                if self._write(self._sink.write_at_once, encode({kind: values}, self._sink.frames)):
                    return
            finally:
                self._writing.release()
        self.put(kind, *values)

    def grant(self, n_bytes: int) -> None:
        """Allow the writing of so many more bytes."""
        with self._changed:
            if self._credit is not None:
                self._credit += n_bytes
            self._changed.notify_all()

    def holds_result_of(self, id: str) -> bool:
        """Whether a request's result waits, so that what came of a new one with its id could be written before."""
        return id in self._unwritten

    def wait_for_room(self) -> None:
        """Return when the reader has taken most of its replies, or has left."""
        if self._has_room:
            return
        with self._changed:
            self._changed.wait_for(lambda: self._has_room or self._has_left or self._is_closed)

    def close(self, patience_s: float | None = None) -> None:
        """Write what waits, credit or not, and end; leave a reader that takes nothing for `patience_s` seconds."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._sink.wait_for(self._thread, patience_s)
        self._has_left = True

    @property
    def _has_room(self) -> bool:
        n_answers = sum(len(self._waiting[kind]) for kind in _REPLIES)
        return n_answers < N_ANSWERS_MAX and self._n_answer_bytes < N_ANSWER_BYTES_MAX

    # ---- the thread ----

    def _run(self) -> None:
        try:
            while (frame := self._take()) is not None:
                with self._writing:
                    self._send(frame)
                del frame  # the results in it are kept by nobody else
        except BaseException:  # a reader that waits must not wait for ever
            self._leave()
            raise

    def _take(self) -> dict[str, list[Any]] | None:
        """Wait for something to write; return it, cut where it is long, or None at the end."""
        frame: dict[str, list[Any]] = {}
        with self._changed:
            self._changed.wait_for(self._has_work)
            if self._must_part("results"):
                self._part_next()
            n_left = N_FRAME_BYTES
            if self._credit is not None and not self._is_closed:
                n_left = min(self._credit, n_left)
            for kind in _KINDS if n_left > 0 else _ANSWERS:
                if kind == _ANSWERS[0]:
                    n_left = N_FRAME_BYTES  # answers need no credit
                values = frame[kind] = []
                n_left = self._fill(values, kind, n_left)
                if self._has(kind):  # what comes after it in a frame comes after it in the next
                    if kind == "parts":
                        self._fill_between(frame.setdefault("replies", []))
                    break
            self._changed.notify_all()  # there may be room
        return {kind: values for kind, values in frame.items() if values} or None

    def _fill(self, values: list[Any], kind: str, n_left: int) -> int:
        """Take values that have room in a frame; return about the bytes that are left."""
        size_of = _SIZES.get(kind, _size_of_other)
        while self._has(kind) and n_left > 0 and not self._must_part(kind):
            values.append(self._next(kind))
            n_left -= size_of(values[-1])
        return n_left

    def _fill_between(self, replies: list[Any]) -> None:
        """Take the next replies, as far as they may come between the parts of a large result."""
        n_left = N_FRAME_BYTES
        while self._may_pass and self._may_pass[0] and n_left > 0:
            replies.append(self._next("replies"))
            n_left -= _size_of_reply(replies[-1])

    def _must_part(self, kind: str) -> bool:
        """Whether the next value is a large result, before which its log-probabilities come."""
        if kind != "results" or not (self._takes_parts and self._has(kind)):
            return False
        return _is_large(self._waiting[kind][0])

    def _part_next(self) -> None:
        results = self._waiting["results"]
        parts, results[0] = parted(results[0])
        self._waiting["parts"].extend(parts)

    def _has(self, kind: str) -> bool:
        return bool(self._chunks if kind == "chunks" else self._waiting[kind])

    def _next(self, kind: str) -> Any:
        if kind != "chunks":
            value = self._waiting[kind].popleft()
            if kind == "results":
                self._unwritten.discard(value.id)
            if kind in _REPLIES:
                self._n_answer_bytes -= _size_of_reply(value)
            if kind == "replies":
                self._may_pass.popleft()
            return value
        id, index = next(iter(self._chunks))
        while index and id in self._cut_firsts:  # its echo has not been written yet
            self._chunks.move_to_end((id, index))
            id, index = next(iter(self._chunks))
        held = self._chunks.pop((id, index))
        first, rest = _cut(held.chunk() if isinstance(held, _Merged) else held)
        if rest is not None:
            self._chunks[id, index] = rest
        if not index:
            (self._cut_firsts.discard if rest is None else self._cut_firsts.add)(id)
        return first

    def _has_work(self) -> bool:
        may_write = self._credit is None or self._credit > 0
        return self._is_closed or any(map(self._has, _KINDS if may_write else _ANSWERS))

    def _send(self, frame: dict[str, list[Any]]) -> None:
        self._write(self._sink.write, encode_frame(frame, self._sink.frames))

    def _write(self, write: Callable[[bytes], object], line: bytes) -> object:
        """Write a frame, which uses up credit, unless the reader has left; note that it has."""
        if self._has_left:
            return True
        n_before = self._sink.n_written
        try:
            return write(line)
        except (OSError, ValueError):  # a closed file raises a ValueError
            self._leave()
            return True
        finally:
            with self._changed:
                if self._credit is not None:
                    self._credit -= self._sink.n_written - n_before

    def _leave(self) -> None:
        self._has_left = True
        self._on_left()


class _Merged:
    """Chunks of one answer that nobody has read yet, as one: what is not joined is as in the last of them."""

    __slots__ = ("_last", "_logprobs", "_parts", "_text", "_tokens")

    def __init__(self, chunk: BatchOutputChunk) -> None:
        self._last = chunk
        self._text, self._tokens = StringIO(), array("i")
        self._logprobs: list[TokenLogprob] | None = None
        self._parts: tuple[StringIO, StringIO] | None = None
        """Content and thinking, from where they are not the text alone."""
        self.add(chunk)

    def add(self, chunk: BatchOutputChunk) -> _Merged:
        if self._parts is None and (chunk.reasoning or chunk.content != chunk.text):
            self._parts = StringIO(), StringIO()
            self._parts[0].write(self._text.getvalue())
        if self._parts is not None:
            self._parts[0].write(chunk.content)
            self._parts[1].write(chunk.reasoning)
        self._text.write(chunk.text)
        self._tokens.extend(chunk.token_ids)
        if chunk.logprobs is not None:
            self._logprobs = self._logprobs or []
            self._logprobs += chunk.logprobs
        self._last = chunk
        return self

    def chunk(self) -> BatchOutputChunk:
        text, logprobs = self._text.getvalue(), self._logprobs
        content, thought = (p.getvalue() for p in self._parts) if self._parts else (text, "")
        return replace(
            self._last,
            text=text,
            token_ids=tuple(self._tokens),
            content=content,
            reasoning=thought,
            logprobs=None if logprobs is None else tuple(logprobs),
        )


def _cut(chunk: BatchOutputChunk) -> tuple[BatchOutputChunk, BatchOutputChunk | None]:
    """Return what comes at once of a chunk, and the rest, if there is one: tokens alone, and the end."""
    scores, tokens = chunk.logprobs or (), chunk.token_ids
    n, n_echoed = n_first_part(scores), len(tokens) - len(scores)
    if n == len(scores) or n_echoed < 0:
        return chunk, None
    end = n_echoed + n
    first = replace(
        chunk, token_ids=tokens[:end], logprobs=scores[:n], finish_reason=None, error=None
    )
    rest = replace(
        chunk, text="", content="", reasoning="", token_ids=tokens[end:], logprobs=scores[n:]
    )
    return first, rest


def _is_large(result: BatchResult) -> bool:
    """Whether a result has more than N_PART log-probabilities, alternatives and those of its choices counted."""
    n = 0
    for answer in (result, *result.choices):
        for token in chain(answer.logprobs or (), answer.prompt_logprobs or ()):
            n += 1 + len(token.top) if token else 1
            if n > N_PART:
                return True
    return False


def _size_of_chunk(chunk: BatchOutputChunk) -> int:
    parts = "" if chunk.content is chunk.text else chunk.content + chunk.reasoning
    own = 32 + len(chunk.text) + len(parts) + 8 * len(chunk.token_ids)
    return own + _size_of_logprobs(chunk.logprobs) if chunk.logprobs else own


def _size_of_result(result: BatchResult) -> int:
    own = 512 + len(result.text) + 8 * len(result.token_ids) + len(result.embedding or b"")
    own += _size_of_logprobs(result.logprobs) + _size_of_logprobs(result.prompt_logprobs)
    return own + sum(map(_size_of_result, result.choices))


def _size_of_part(part: ResultPart) -> int:
    return 32 + _size_of_logprobs(part.tokens)


def _size_of_logprobs(found: Sequence[TokenLogprob | None] | None) -> int:
    return 40 * n_logprobs(found)


def _size_of_other(_: object) -> int:
    return 128


def _size_of_reply(reply: Any) -> int:
    """Return about the bytes of a reply, or of an error that belongs to no call."""
    return 128 + sum(map(_size_of_said, reply if isinstance(reply, tuple) else (reply,)))


def _size_of_said(value: object) -> int:
    """Return about the bytes of a call's number, of a value, or of an error."""
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, BaseException):
        return len(str(value))
    if not isinstance(value, list):
        return 0
    has_texts = bool(value) and isinstance(value[0], str | bytes)
    return 8 * len(value) + (sum(map(len, value)) if has_texts else 0)


_SIZES: dict[str, Callable[[Any], int]] = {
    "chunks": _size_of_chunk,
    "parts": _size_of_part,
    "results": _size_of_result,
    "replies": _size_of_reply,
}
"""About the bytes of a value."""
