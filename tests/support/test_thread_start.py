"""A system that has no more threads: who asks is told, and nothing is left that waits for one."""

from __future__ import annotations

import gc
import os
import sys
import threading
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from cbatch import Engine
from cbatch.backend.fake import FakeBackend
from cbatch.backend.threads import Teams, run_in_fresh_thread
from cbatch.errors import NoThreadError
from cbatch.progress import SilentView
from cbatch.response import BatchError
from cbatch.support.logs import must_not_wait
from cbatch.support.thread_start import is_lack_of_threads, started
from cbatch.worker.line_sender import LineSender
from tests.no_threads import NoThreads

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.mark.parametrize("name", ["thread", "cbatch-compute"])
def test_thread_that_cannot_be_started_is_told(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    threads = NoThreads(monkeypatch, name)

    def start() -> None:
        if name == "thread":
            started(int, name).join()
        else:
            run_in_fresh_thread(int)

    with pytest.raises(NoThreadError, match="no more threads: try again later") as caught:
        start()
    assert is_lack_of_threads(caught.value.__cause__ or caught.value)
    threads.is_over = True
    start()


class WithoutMemory(threading.Thread):
    def _bootstrap_inner(self) -> None:
        raise MemoryError


def test_thread_that_ends_before_it_runs_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)
    with pytest.raises(NoThreadError):
        started(int, "cbatch-short", WithoutMemory)
    done = threading.Event()
    started(done.set, "cbatch-next").join()
    assert done.is_set()


def test_thread_that_ends_before_python_runs_in_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [n for n in ("_start_new_thread", "_start_joinable_thread") if hasattr(threading, n)]
    monkeypatch.setattr(threading, names[-1], lambda *_, **__: None)
    with pytest.raises(NoThreadError):
        started(int, "cbatch-short")


CALLS: dict[str, Callable[[Engine], object]] = {
    "cbatch-texts": lambda engine: engine.embed(["a", "b"], ids=["x", "y"]).results(),
    "cbatch-feed": lambda engine: engine.run(iter(["a", "b"])).results(),
    "cbatch-progress": lambda engine: engine.run(["a"], progress=SilentView()).results(),
}


@pytest.mark.parametrize("name", CALLS)
def test_call_without_a_thread_fails_alone_and_the_next_works(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    with Engine(FakeBackend()) as engine:
        threads = NoThreads(monkeypatch, name)
        with pytest.raises((NoThreadError, BatchError), match="no more threads"):
            CALLS[name](engine)
        assert engine.run(["a"], options={"max_tokens": 1}).results()[0].error is None
        threads.is_over = True
        for _ in range(2):  # with the same ids
            CALLS[name](engine)
        assert engine.stats().n_running == engine.stats().n_waiting == 0


def test_message_longer_than_a_pipe_needs_no_new_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    source, to = os.pipe()
    os.set_blocking(to, False)
    sent = [bytes([i]) * 300_000 for i in range(3)]
    lines = LineSender(to, lambda data: os.write(to, data))
    NoThreads(monkeypatch, "cbatch")
    for message in sent:
        lines.send(message)
    with closing(os.fdopen(source, "rb")) as pipe:
        assert pipe.read(900_000) == b"".join(sent)
        lines.send(b"more")
        assert pipe.read(4) == b"more"
    lines.end()
    os.close(to)
    assert "cbatch-worker-stdin" not in [thread.name for thread in threading.enumerate()]


def test_message_to_nobody_ends_the_thread_that_writes() -> None:
    source, to = os.pipe()
    os.set_blocking(to, False)
    lines = LineSender(to, lambda data: os.write(to, data))
    lines.send(bytes(300_000))
    os.close(source)
    lines.end()
    os.close(to)
    with pytest.raises(BrokenPipeError):
        lines.send(b"more")


class Again:
    """Garbage that the collector finds wherever it runs; the next piece is there at once, while `do` returns true."""

    def __init__(self, do: Callable[[], bool]) -> None:
        self.do, self.itself = do, self

    def __del__(self) -> None:
        if self.do():
            Again(self.do)


def test_no_finalizer_waits_for_a_thread_that_starts_nor_in_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here, working, is_starting, is_over = threading.get_ident(), set[int](), False, False
    found: set[tuple[str, bool]] = set()
    start_thread: Callable[[threading.Thread], None] = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        nonlocal is_starting
        is_starting = True
        start_thread(thread)
        is_starting = False

    def note() -> bool:
        if threading.get_ident() != here:
            found.add(("new thread", threading.get_ident() in working))
        elif is_starting:
            found.add(("its starter", must_not_wait()))
        return not is_over

    monkeypatch.setattr(threading.Thread, "start", start)
    before = gc.get_threshold()
    gc.set_threshold(1)
    try:
        Again(note)
        for _ in range(100):
            started(lambda: working.add(threading.get_ident()), "works").join()
            working.clear()
    finally:
        is_over = True
        gc.set_threshold(*before)
        gc.collect()
    assert ("new thread", False) not in found
    assert ("its starter", False) not in found


def test_one_thread_computes_where_the_system_has_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """GNU's OpenMP would end the process."""
    teams, threads = Teams(), NoThreads(monkeypatch, "cbatch-try")
    assert [teams.n_affordable(n) for n in (1, 2, 8)] == [1, 1, 1]
    threads.is_over = True
    assert teams.n_affordable(2) == 2
    threads.is_over = False
    assert teams.n_affordable(2) == 2  # they are there
    assert Teams().n_affordable(2) == 1
    teams.leave()
    before = threading.active_count()
    assert teams.n_affordable(2) == 2  # a moment ago there were some
    assert threading.active_count() == before
