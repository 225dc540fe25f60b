"""Who has no slot: those that come back first, then the queue, and nobody who is held."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from cbatch.core.line import AdmissionQueue
from cbatch.engine_options import ScheduleOptions
from tests.core.drivers import make_driver

if TYPE_CHECKING:
    from cbatch.core.driver import SequenceDriver


def drivers(n: int) -> list[SequenceDriver]:
    some = [make_driver(id=str(i)) for i in range(n)]
    for i, driver in enumerate(some):
        driver.number = i
    return some


@pytest.mark.parametrize("n", range(6))
def test_preempted_come_first_the_oldest_first_and_then_the_queue(n: int) -> None:
    line, some = AdmissionQueue(ScheduleOptions()), drivers(5)
    line.add(some[:3])
    line.put_back(some[4])
    line.put_back(some[3])
    assert line.first(n) == [some[i] for i in (3, 4, 0, 1, 2)][:n]
    assert len(line) == 5


@pytest.mark.parametrize("i", range(4))
def test_one_is_taken_out_wherever_it_stands(i: int) -> None:
    line, some = AdmissionQueue(ScheduleOptions()), drivers(4)
    line.add(some[:2])
    for driver in some[2:]:
        line.put_back(driver)
    line.remove(some[i])
    assert line.first(9) == [some[j] for j in (2, 3, 0, 1) if j != i]


def test_held_one_stands_nowhere_until_it_is_put_back() -> None:
    line, [driver] = AdmissionQueue(ScheduleOptions()), drivers(1)
    line.hold(driver)
    assert (line.is_held(driver), line.n_held, len(line)) == (True, 1, 0)
    line.put_back(driver)
    assert (line.is_held(driver), line.n_held, len(line)) == (False, 0, 1)
    assert not line.let_go(driver)
