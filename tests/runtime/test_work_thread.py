"""How far a thread for slow work gives way to the owner thread."""

from __future__ import annotations

import os
import sys
import threading

import pytest

from cbatch.runtime.work_thread import WorkThread


@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone has a niceness for each thread")
@pytest.mark.parametrize(("cores", "is_little"), [([0], True), ([0, 1], False), ([2, 3, 5], False)])
def test_thread_gives_way_less_where_it_has_the_owners_one_core(
    cores: list[int], is_little: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cbatch.runtime.work_thread.my_cores", lambda: cores)
    found: list[int] = []

    def look() -> None:
        found.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

    if os.getpriority(os.PRIO_PROCESS, 0):
        pytest.skip("these tests run with a niceness of their own")
    thread = WorkThread("nice", is_threaded=True, is_nice=True)
    thread.do(look)
    thread.close()
    assert found[0] > 0
    assert (found[0] < 10) == is_little
