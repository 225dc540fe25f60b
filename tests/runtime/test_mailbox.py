"""One batch's mailbox: what is put in comes out once, and nobody waits for ever."""

from __future__ import annotations

import pytest

from cbatch.errors import EngineClosedError, EngineError
from cbatch.response import BatchOutputChunk, BatchResult, Timings, Usage
from cbatch.runtime.batch_response import BatchResponse
from cbatch.runtime.mailbox import Mailbox
from tests.runtime.backends import Cancelled


def chunk(id: str, text: str = "", *, is_last: bool = False) -> BatchOutputChunk:
    return BatchOutputChunk(id, text, (1,), 0, "stop" if is_last else None)


def result(id: str) -> BatchResult:
    timings = Timings(0.0, None, 0.0, None, None)
    return BatchResult(id, "", (), "stop", None, Usage(1, 1), timings, 0)


def mailbox(n_items: int = 2) -> Mailbox:
    return Mailbox(n_items, Cancelled(7), None)


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
