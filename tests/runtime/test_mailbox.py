"""One batch's mailbox: what is put in comes out once, and nobody waits for ever."""

from __future__ import annotations

import threading

import pytest

from cbatch.errors import EngineClosedError, EngineError
from cbatch.response import BatchOutputChunk, BatchResult, Timings, Usage
from cbatch.runtime.batch_response import BatchResponse
from cbatch.runtime.mailbox import Mailbox
from tests.runtime.backends import PATIENCE_S, Cancelled, in_thread


def chunk(id: str, text: str = "", *, is_last: bool = False) -> BatchOutputChunk:
    return BatchOutputChunk(id, text, (1,), 0, "stop" if is_last else None)


def result(id: str) -> BatchResult:
    timings = Timings(0.0, None, 0.0, None, None)
    return BatchResult(id, "", (), "stop", None, Usage(1, 1), timings, 0)


def mailbox(n_items: int = 2) -> Mailbox:
    return Mailbox(n_items, Cancelled(7), None)


def test_results_come_in_input_order_and_in_order_of_completion() -> None:
    box = mailbox()
    box.deliver([], [(1, result("b"))])
    box.deliver([], [(0, result("a"))])
    assert [r.id for r in box.wait(0)] == ["a", "b"]
    assert [r.id for r in BatchResponse(box).as_completed()] == ["b", "a"]
    assert [r.id for r in box.wait(0)] == ["a", "b"]


def test_chunks_come_once_and_then_none() -> None:
    box = mailbox(1)
    assert not box.is_streamed
    box.deliver([chunk("a", "x")], [])
    box.deliver([chunk("a", "y", is_last=True)], [(0, result("a"))])
    chunks = iter(BatchResponse(box))
    assert [c.text for c in chunks] == ["x", "y"]
    assert box.is_streamed
    assert list(chunks) == []


def test_reader_waits_until_something_is_delivered() -> None:
    box, started = mailbox(1), threading.Event()

    def read() -> list[str]:
        started.set()
        return [c.text for c in BatchResponse(box)]

    wait = in_thread(read)
    assert started.wait(PATIENCE_S)
    box.deliver([chunk("a", "x", is_last=True)], [(0, result("a"))])
    assert wait() == ["x"]


def test_one_delivery_wakes_all_readers() -> None:
    box = mailbox(1)
    waits = [
        in_thread(lambda: box.wait(PATIENCE_S)),
        in_thread(lambda: next(BatchResponse(box).as_completed())),
    ]
    box.deliver([], [(0, result("a"))])
    assert [r.id for r in waits[0]()] == ["a"]
    assert waits[1]().id == "a"


def test_timeout_names_how_many_are_open() -> None:
    box = mailbox(3)
    box.deliver([], [(1, result("b"))])
    with pytest.raises(TimeoutError, match="2 of 3"):
        box.wait(0)


def test_cancel_is_passed_on() -> None:
    assert mailbox().cancel() == 7


def test_reader_without_a_thread_steps_until_it_has_what_it_wants() -> None:
    n_steps = 0

    def pump() -> bool:
        nonlocal n_steps
        n_steps += 1
        box.deliver([chunk("a", str(n_steps))], [(0, result("a"))] if n_steps == 3 else [])
        return True

    box = Mailbox(1, Cancelled(), pump)
    chunks = iter(BatchResponse(box))
    assert (next(chunks).text, n_steps) == ("1", 1)
    assert [r.id for r in box.wait(None)] == ["a"]
    assert n_steps == 3


def test_reader_without_a_thread_gives_up_where_there_is_nothing_to_do() -> None:
    box = Mailbox(2, Cancelled(), lambda: False)
    with pytest.raises(EngineError, match="2 requests have not ended"):
        box.wait(None)
    with pytest.raises(TimeoutError):
        Mailbox(1, Cancelled(), lambda: True).wait(0)


def test_step_that_ends_the_engine_ends_the_wait_with_results() -> None:
    def pump() -> bool:
        box.deliver([], [(0, result("a"))])
        raise EngineClosedError("it broke")

    box = Mailbox(1, Cancelled(), pump)
    assert [r.id for r in box.wait(None)] == ["a"]


def test_closed_engine_is_told_where_items_are_open() -> None:
    def pump() -> bool:
        raise EngineClosedError("closed")

    with pytest.raises(EngineClosedError):
        Mailbox(1, Cancelled(), pump).wait(None)
