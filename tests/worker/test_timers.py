"""Actions at their time, and how many threads that takes."""

from __future__ import annotations

import threading
import time
from queue import SimpleQueue

from cbatch.backend.fake import FakeBackend
from cbatch.worker.timers import Timers
from tests.places import wait_until
from tests.runtime.backends import PATIENCE_S
from tests.worker.links import engine_over


def n_threads() -> int:
    return sum(thread.name == "cbatch-timers" for thread in threading.enumerate())


def test_actions_come_in_order_and_one_that_raises_ends_none() -> None:
    timers, done, now = Timers(), SimpleQueue[int](), time.perf_counter()
    timers.set(now + PATIENCE_S, lambda: done.put(9))
    timers.set(now + 0.02, lambda: done.put(2))
    timers.set(now + 0.01, lambda: 1 / 0)
    timers.set(now, lambda: done.put(1))
    assert [done.get(timeout=PATIENCE_S) for _ in range(2)] == [1, 2]
    assert n_threads() == 1
    timers.close()
    wait_until(lambda: not n_threads())
    assert done.empty()


def test_feeds_with_a_time_limit_leave_no_thread_behind() -> None:
    with engine_over(FakeBackend(1, 64)) as engine:
        for _ in range(3):
            n_before = threading.active_count()
            engine.run(iter(["a"]), options={"max_tokens": 1}, max_time_s=3600).results()
        assert threading.active_count() <= n_before
    wait_until(lambda: not n_threads())
