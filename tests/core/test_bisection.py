"""The search for who made a step fail: halves, and halves of halves."""

from __future__ import annotations

import math

import pytest

from cbatch.backend.fake import FakeVocab
from cbatch.core.driver import Event, SequenceDriver
from cbatch.core.plan import Slot
from cbatch.core.scheduler import FaultBisection
from tests.helpers import make_request
from tests.profiles import some


def running(n: int) -> list[SequenceDriver]:
    drivers = [SequenceDriver.of(make_request(str(i)), FakeVocab(320).piece, 0.0) for i in range(n)]
    for i, driver in enumerate(drivers):
        driver.admit(Slot(i), 0.0)
    return drivers


def ids(drivers: list[SequenceDriver]) -> str:
    return "".join(d.request.id for d in drivers)


def search(drivers: list[SequenceDriver], culprit: int) -> tuple[SequenceDriver, int, int]:
    """Compute groups until the culprit is found; return it, the failed and the good steps."""
    bisection, n_failed, n_good = FaultBisection(), 1, 0
    bisection.suspect(dict.fromkeys(drivers, 5))
    while group := bisection.suspects():
        if drivers[culprit] in group:
            n_failed += 1
            if found := bisection.split(dict.fromkeys(group, 5)):
                return found, n_failed, n_good
        else:
            n_good += 1
            for driver in group:
                driver.n_computed = 5
    raise AssertionError("nobody was found")


def test_who_is_past_the_failure_is_clear_and_the_others_are_not() -> None:
    bisection, drivers = FaultBisection(), running(4)
    bisection.suspect({d: 4 + i for i, d in enumerate(drivers)})
    drivers[0].n_computed = drivers[1].n_computed = 4
    assert ids(bisection.suspects()) == "1"
    drivers[1].n_computed = 5
    assert ids(bisection.suspects()) == "23"


def test_who_leaves_its_slot_is_no_longer_looked_at() -> None:
    bisection, drivers = FaultBisection(), running(4)
    bisection.suspect(dict.fromkeys(drivers, 5))
    drivers[0].cancel(0.0)
    drivers[1].undergo(Event.PAUSE)
    drivers[2].undergo(Event.LOSE_SLOT)
    assert ids(bisection.suspects()) == "3"


def test_who_was_cleared_stays_so_when_its_cells_are_lost() -> None:
    bisection, drivers = FaultBisection(), running(2)
    bisection.suspect(dict.fromkeys(drivers, 5))
    drivers[0].n_computed = 5
    bisection.clear()
    drivers[0].n_computed = 0
    assert [ids(bisection.suspects()) for _ in range(2)] == ["1", "1"]


@pytest.mark.parametrize("n", [1, 2, 3, 16, 17, 256])
def test_each_of_many_is_found_in_about_twice_the_logarithm_of_steps(n: int) -> None:
    for culprit in some(range(0, n, 25 if n > 17 else 1), 8):
        found, n_failed, n_good = search(running(n), culprit)
        assert found.request.id == str(culprit)
        assert n_failed <= math.ceil(math.log2(n)) + 2
        assert n_failed + n_good <= 2 * math.ceil(math.log2(n)) + 2
