"""A client of the daemon's lines over pipes, with a whole engine on the fake backend."""

from __future__ import annotations

import os
import re
import select
import socket
import struct
import threading
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, BinaryIO

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cbatch.backend.fake import FakeBackend, FakeVocab
from cbatch.daemon.line_session import LineSession
from cbatch.daemon.lines import END, MORE
from cbatch.daemon.streams import StreamWriter, lines_of
from cbatch.engine import Engine
from cbatch.engine_options import ScheduleOptions
from cbatch.errors import NoThreadError
from cbatch.messages import BatchPrompt
from cbatch.options import RunOptions
from cbatch.runtime.local import LocalRuntime
from cbatch.worker.host import SessionEnd
from tests.no_threads import NoThreads
from tests.profiles import examples
from tests.runtime.backends import PATIENCE_S, FailingBackend, in_thread
from tests.worker.links import workers_over

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from cbatch.runtime.interface import Runtime

GREEDY = RunOptions(temperature=0.0, seed=3)


def make_runtime(backend: FakeBackend) -> LocalRuntime:
    return LocalRuntime(backend, ScheduleOptions())


@dataclass
class Client:
    """The other side of a session: what it says and what it reads."""

    lines: BinaryIO
    frames: BinaryIO
    text: BinaryIO
    wait: Callable[[], SessionEnd]
    streams: dict[int, list[int]] = field(default_factory=dict)

    def say(self, *lines: object) -> None:
        for line in lines:
            self.lines.write(line if isinstance(line, bytes) else f"{line}\n".encode())
        self.lines.flush()

    def read(self) -> tuple[int, int]:
        """Return the next frame; fails rather than hangs."""
        data = b""
        while len(data) < 12:
            ready, _, _ = select.select([self.frames], [], [], PATIENCE_S)
            assert ready, f"no frame comes behind {self.streams}"
            data += (part := os.read(self.frames.fileno(), 12 - len(data)))
            assert part, f"the frames end behind {self.streams}"
        mark, id, value = struct.unpack("<3i", data)
        assert mark == -2
        self.streams.setdefault(id, []).append(value)
        return id, value

    def read_until(self, id: int, value: int) -> list[int]:
        """Read frames until one of them comes; return the stream of its id."""
        while self.read() != (id, value):
            pass
        return self.streams[id]

    def hear(self, words: str) -> str:
        """Read text until a line has these words."""
        while words.encode() not in (line := self.text.readline()):
            assert line, f"nobody says {words!r}"
        return line.decode()

    def end(self) -> dict[int, list[int]]:
        """Say no more, and read all that comes."""
        self.lines.close()
        while head := self.frames.read(12):
            _, id, value = struct.unpack("<3i", head)
            self.streams.setdefault(id, []).append(value)
        return self.streams


@contextmanager
def session(
    runtime: Runtime, *, is_tagged: bool = True, options: RunOptions = GREEDY
) -> Iterator[Client]:
    """Serve a client in a thread; at the end its session is over, and the runtime goes on."""
    pipes = [os.pipe() for _ in range(3)]
    (line_source, line_sink), (frame_source, frame_sink), (text_source, text_sink) = pipes

    def serve() -> SessionEnd:
        text = StreamWriter(text_sink, lambda: None)
        try:
            made = LineSession(runtime, frame_sink, text, options, is_tagged=is_tagged)
            return made.serve(lines_of(source))
        finally:
            text.close()
            os.close(frame_sink)
            os.close(text_sink)

    with (
        open(line_source, "rb") as source,
        open(line_sink, "wb") as lines,
        open(frame_source, "rb") as frames,
        open(text_source, "rb") as text,
    ):
        wait = in_thread(serve)
        try:
            yield Client(lines, frames, text, wait)
        finally:
            lines.close()
            frames.close()
            wait()  # before the source is closed, which would wait for a thread that reads there


@pytest.fixture(params=["here", "worker"])
def runtime(request: pytest.FixtureRequest) -> Iterator[Runtime]:
    made = partial(make_runtime, FakeBackend(4, 128, 32))
    runtime = made() if request.param == "here" else workers_over(made)
    yield runtime
    runtime.close()


@pytest.fixture
def prompt(tmp_path: Path) -> Callable[..., Path]:
    """Return a writer of prompt files."""

    def write(*tokens: int) -> Path:
        path = tmp_path / f"p{'-'.join(map(str, tokens[:4]))}-{len(tokens)}.bin"
        path.write_bytes(struct.pack(f"<{len(tokens)}i", *tokens))
        return path

    return write


def expected(tokens: tuple[int, ...], n: int) -> list[int]:
    """What `Engine.run` gives for a prompt."""
    with Engine(FakeBackend(4, 128, 32)) as engine:
        options = RunOptions(temperature=0.0, seed=3, max_tokens=n)
        result = engine.run(BatchPrompt(tokens=tokens), options=options).results()[0]
    return [*result.token_ids]


def tokens_of(stream: list[int]) -> list[int]:
    return [value for value in stream if value >= 0]


A, B, C = (1, 2, 3), (40, 50), tuple(range(100, 160))


# ---- every command ----


def test_session_of_every_command(runtime: Runtime, prompt: Callable[..., Path]) -> None:
    a, b = prompt(*A), prompt(*B)
    with session(runtime) as client:
        client.say(f"REQ 1 SLOT 2 START {a} 12 2", f"REQUEST=2 START {b} 12 3")
        client.read_until(1, MORE)
        if MORE not in client.streams.get(2, []):
            client.read_until(2, MORE)
        client.say("LIST_REQUESTS", "LIST_TARGET_CACHE_SLOTS", "SCHED_BATCH_PEEK")
        assert client.hear("LIST_REQ") == "LIST_REQUESTS 2:0:9:3:3:0 1:2:10:2:2:0\n"
        assert client.hear("LIST_T") == "LIST_TARGET_CACHE_SLOTS 0:2:5:0 1:-:0:0 2:1:5:0 3:-:0:0\n"
        assert client.hear("PEEK") == "SCHED_BATCH_PEEK rows=2 2:0:5 1:2:5\n"
        client.say("SCHED_BATCH_PROBE")
        assert client.hear("compared") == "SCHED_BATCH_PROBE compared=2 differences=0\n"
        client.say("SCHED_BATCH_TARGET_STEP", "SCHED_STEP", "REQ 1 CONTINUE 3", "SCHED_BATCH_PEEK")
        client.hear("PEEK")
        client.say("SCHED_BATCH_TARGET_TAIL", "SCHED_BATCH_DRAIN 2", "SCHED_DRAIN", "SCHED_STEP")
        client.hear("SCHED_STEP: idle")
        client.say("REQ 2 CONT 2", f"REQ 3 START {a} 8 2", "REQ 3 CANCEL", "CANCEL 3")
        client.hear("cancelled already")
        client.say(f"SLOT 1 {b} 5", "park")
        client.hear("PARK is not offered")
        client.say("SLOT 1 SNAPSHOT 0", "LIST_SLOTS")
        assert client.hear("slots=") == "[snap] slots=0\n"
        client.say(f"RESTORE 0 {prompt(*B, *expected(B, 5))} 4", "FREE_SNAPSHOT 0")
        client.hear("freed slot=0")
        streams = client.end()
        assert client.wait() is SessionEnd.DONE
    assert tokens_of(streams[1]) == expected(A, 12)
    assert tokens_of(streams[2]) == expected(B, 14)
    assert streams[3][-1] == END
    longer = (*B, *expected(B, 5))
    assert tokens_of(streams[0]) == expected(B, 5) + expected(longer, 4)
    assert [streams[id].count(END) for id in (1, 2, 3)] == [1, 2, 1]


def test_streams_by_hand_and_by_drain_are_those_of_the_engine(
    runtime: Runtime, prompt: Callable[..., Path]
) -> None:
    starts = [
        f"REQ {i} START {prompt(*tokens)} {n} {q}"
        for i, tokens, n, q in ((1, A, 20, 3), (2, B, 9, 1), (3, C, 40, 7))
    ]
    for order in ("SCHED_STEP", "SCHED_DRAIN", "SCHED_BATCH_TARGET_STEP", "SCHED_BATCH_DRAIN 2"):
        with session(runtime) as client:
            client.say(*starts, *[order] * 60, "SCHED_DRAIN")
            streams = client.end()
        for id, tokens, n in ((1, A, 20), (2, B, 9), (3, C, 40)):
            assert tokens_of(streams[id]) == expected(tokens, n), order
            assert streams[id][-1] == END
            assert streams[id].count(END) == 1


def test_late_request_shares_steps_with_a_drain(
    runtime: Runtime, prompt: Callable[..., Path]
) -> None:
    with session(runtime) as client:
        client.say(f"REQ 1 START {prompt(*A)} 100 4", "REQ 1 CONTINUE 3", "SCHED_DRAIN")
        for _ in range(9):
            client.read()
        client.say(f"REQ 2 START {prompt(*B)} 4 1")
        streams = client.end()
    assert tokens_of(streams[1]) == expected(A, 100)
    assert [i for i, value in enumerate(streams[1]) if value < 0][:3] == [4, 8, 13]
    assert tokens_of(streams[2]) == expected(B, 4)


def test_tokens_come_before_they_are_text(
    prompt: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeVocab, "piece", lambda self, token: b"\xf0")
    runtime = make_runtime(FakeBackend(4, 128, 32))
    try:
        with session(runtime) as client:
            client.say(f"REQ 1 START {prompt(*A)} 6 2")
            client.read_until(1, MORE)
            assert len(client.streams[1]) == 3
    finally:
        runtime.close()


def test_untagged_stream_is_bare_numbers(runtime: Runtime, prompt: Callable[..., Path]) -> None:
    with session(runtime, is_tagged=False) as client:
        client.say(f"{prompt(*A)} 5", "FOO", f"{prompt(*B)} 2")
        client.lines.close()
        found = [*struct.iter_unpack("<i", client.frames.read())]
    values = [value for (value,) in found]
    assert values == [*expected(A, 5), END, END, *expected(B, 2), END]


# ---- the end ----


def test_reader_who_leaves_ends_its_requests_alone(
    runtime: Runtime, prompt: Callable[..., Path]
) -> None:
    with session(runtime) as client:
        client.say(f"REQ 1 START {prompt(*A)} 120 1", "SCHED_DRAIN")
        client.read()
        client.frames.close()
        assert client.wait() is SessionEnd.LEFT
    assert not runtime.ids
    with session(runtime) as client:
        client.say(f"REQ 1 START {prompt(*A)} 3 3")
        assert tokens_of(client.end()[1]) == expected(A, 3)


def test_slow_reader_stops_nobody(runtime: Runtime, prompt: Callable[..., Path]) -> None:
    with session(runtime) as client:
        for i in range(1, 61):  # 12 bytes × 121 × 60: more than a pipe holds
            client.say(f"REQ {i} START {prompt(*A)} 120 120")
            client.hear("ended")
        assert len(client.end()) == 60


def test_engine_that_stops_ends_every_stream(prompt: Callable[..., Path]) -> None:
    runtime = make_runtime(FailingBackend(4, 128, 32, error=RuntimeError("no cells"), fail_at=6))
    try:
        with session(runtime) as client:
            client.say(f"REQ 1 START {prompt(*A)} 90 2", f"REQ 2 START {prompt(*B)} 90 2")
            client.say("SCHED_DRAIN")
            assert client.hear("error: ") == "error: the engine stopped: no cells\n"
            streams = client.end()
            assert client.wait() is SessionEnd.FAILED
        assert [streams[id][-1] for id in (1, 2)] == [END, END]
    finally:
        runtime.close()


def test_thread_of_a_session_ends_with_it() -> None:
    runtime = make_runtime(FakeBackend(4, 128, 32))
    before = {*threading.enumerate()}
    with closing(runtime), session(runtime) as client:
        client.frames.close()
        client.say("FOO", *["LIST_REQUESTS"] * 4000)  # the reader is gone before all are done
        assert client.wait() is SessionEnd.LEFT
    for thread in {*threading.enumerate()} - before:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


def test_client_that_reads_nothing_is_hung_up_on_at_its_end(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cbatch.daemon.line_session.STALL_S", 0.3)
    here, there = socket.socketpair()
    with here, there:
        hang_up = partial(here.shutdown, socket.SHUT_RDWR)
        made = LineSession(runtime, here.fileno(), None, GREEDY, is_tagged=True, hang_up=hang_up)
        assert made.serve([b"LIST_REQUESTS\n"] * 20_000) is SessionEnd.DONE


@pytest.mark.parametrize("name", ["cbatch-writer", "cbatch-lines"])
def test_client_for_whom_there_is_no_thread_costs_nobody_else(
    name: str, runtime: Runtime, prompt: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = NoThreads(monkeypatch, name)
    with open(os.devnull, "w+b") as nobody, pytest.raises(NoThreadError):
        LineSession(runtime, nobody.fileno(), None, GREEDY, is_tagged=True).serve(iter(()))
    threads.is_over = True
    with session(runtime) as client:
        client.say(f"REQ 1 START {prompt(*A)} 3 3")
        assert tokens_of(client.end()[1]) == expected(A, 3)


# ---- chance ----

PARTS = st.sampled_from(
    [
        *("REQ 1 ", "REQ=2 ", "REQUEST 3 ", "SLOT 1 ", "SLOT=7 ", "CANCEL 1", "CANCEL 2", "CANCEL"),
        *("START a 9 2", "START b 3 1", "START c 200 1", "START none 1 1", "CONTINUE 2", "CONT 9"),
        *("SCHED_STEP", "SCHED_DRAIN", "SCHED_BATCH_PEEK", "SCHED_BATCH_PROBE", "a 5", "\0", "é"),
        *("SCHED_BATCH_TARGET_TAIL", "SCHED_BATCH_TARGET_STEP 2", "SCHED_BATCH_DRAIN", "\n", " "),
        *("LIST_REQUESTS", "LIST_TARGET_CACHE_SLOTS", "1" * 40, "RESTORE 0 a 4", "0", "-1"),
    ]
)
LINES = st.lists(
    st.one_of(
        st.lists(PARTS, min_size=1, max_size=4).map(lambda parts: "".join(parts).encode()),
        st.binary(max_size=20),
        st.sampled_from([b"x" * (2**20 + 5), b"REQ 2 START " + b"y" * 2**20]),
    ),
    max_size=30,
)


@settings(max_examples=examples(40), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lines=LINES)
def test_random_lines_stop_nothing(
    lines: list[bytes],
    runtime: Runtime,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, tokens in (("a", A), ("b", B), ("c", C)):
        (tmp_path / name).write_bytes(struct.pack(f"<{len(tokens)}i", *tokens))
    with session(runtime) as client:
        client.say(*(line + b"\n" for line in lines))
        client.end()
        assert client.wait() is SessionEnd.DONE
        text = client.text.read().decode()
    ends = sum(stream.count(END) for stream in client.streams.values())
    n_lives = len(re.findall(r"^(?:REQ \d+ )?(?:started|continued) in slot", text, re.MULTILINE))
    n_ended = len(re.findall(r"^(?:REQ \d+ )?ended: ", text, re.MULTILINE))
    n_errors = len(re.findall(r"^(?:REQ \d+ )?error in line ", text, re.MULTILINE))
    n_more = n_errors + text.count("cancelled while it waited")
    assert n_lives == n_ended <= ends <= n_lives + n_more
    assert not runtime.ids
