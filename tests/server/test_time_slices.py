"""Threads that compute in slices of time: one at a time, in turn, and none is left waiting."""

from __future__ import annotations

from functools import partial

import pytest

from cbatch.server.time_slices import TimeSlices
from tests.runtime.backends import in_thread


def test_threads_that_compute_without_end_take_turns() -> None:
    slices, begun, most = TimeSlices(), set[str](), list[int]()
    at_work = 0

    def work(name: str) -> None:
        nonlocal at_work
        with slices.share() as go_on:
            begun.add(name)
            while len(begun) < 3:
                at_work += 1
                most.append(at_work)
                at_work -= 1
                go_on()

    ends = [in_thread(partial(work, name)) for name in "abc"]
    for end in ends:
        end()
    assert max(most) == 1


def test_thread_keeps_its_slice_until_it_is_over() -> None:
    slices, done = TimeSlices(lambda: 0.0), list[str]()

    def work() -> None:
        with slices.share():
            done.append("b")

    with slices.share() as go_on:
        end = in_thread(work)
        for _ in range(100):
            go_on()
        done.append("a")
    end()
    assert done == ["a", "b"]


def test_thread_that_fails_leaves_the_others_their_turn() -> None:
    slices = TimeSlices()
    with pytest.raises(ZeroDivisionError), slices.share():
        raise ZeroDivisionError
    with slices.share() as go_on:
        go_on()
