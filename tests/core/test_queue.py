"""Who comes next: each policy's order, and the bounds that it promises to those who wait."""

from __future__ import annotations

from typing import TYPE_CHECKING, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cbatch.backend.fake import FakeVocab
from cbatch.core.driver import Event, SequenceDriver
from cbatch.core.queue import DEFAULT_AGEING_S, AdmissionQueue, length_and_age
from cbatch.engine_options import Policy, ScheduleOptions
from cbatch.errors import ConfigError
from tests.helpers import make_request

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


POLICIES: tuple[str, ...] = get_args(Policy)
MOVES = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9), st.booleans()), max_size=60)
"""(seconds until it comes, priority or length, whether the first one leaves then)"""


def queue(policy: str, ageing_s: float | None = None) -> AdmissionQueue:
    return AdmissionQueue(ScheduleOptions(policy=policy, ageing_s=ageing_s))  # type: ignore[arg-type]


def waiting(
    number: int,
    submitted_s: float = 0.0,
    *,
    priority: int = 0,
    n_prompt: int = 1,
    slot: int | None = None,
) -> SequenceDriver:
    request = make_request(str(number), priority=priority, slot=slot)
    driver = SequenceDriver.of(request, FakeVocab(320).piece, submitted_s)
    driver.number, driver.n_prompt = number, n_prompt
    return driver


def numbers(drivers: Sequence[SequenceDriver]) -> list[int]:
    return [d.number for d in drivers]


def order(queue: AdmissionQueue, *free: int) -> list[int]:
    """The numbers in order of those that could have one of the free slots, of which there are 4."""
    running = [None if i in free else waiting(99) for i in range(4)]
    for driver in filter(None, running):
        driver.undergo(Event.ADMIT)
    return numbers([*queue.candidates(running)])


def turns(queue: AdmissionQueue, arrivals: Sequence[tuple[SequenceDriver, bool]]) -> Iterator[int]:
    """Yield the numbers in order of their turns: some are served while others still come."""
    for driver, is_served in arrivals:
        queue.add([driver])
        if is_served:
            yield from _serve(queue)
    while len(queue):
        yield from _serve(queue)


def _serve(queue: AdmissionQueue) -> list[int]:
    first = next(queue.candidates([]))
    queue.remove(first)
    return [first.number]


@pytest.mark.parametrize("policy", POLICIES)
def test_equals_come_in_order_of_submission(policy: str) -> None:
    some = queue(policy)
    some.add([waiting(i, n_prompt=3) for i in range(5)])
    assert order(some) == [0, 1, 2, 3, 4]


def test_policy_without_a_rank_is_refused() -> None:
    options = ScheduleOptions()
    object.__setattr__(options, "policy", "lifo")  # as a policy that was only named would come
    with pytest.raises(ConfigError, match="policy 'lifo' gives the queue no order"):
        AdmissionQueue(options)


@pytest.mark.parametrize("policy", POLICIES)
def test_removal_from_the_middle_leaves_the_others_in_order(policy: str) -> None:
    some, drivers = queue(policy), [waiting(i, priority=i % 2, n_prompt=9) for i in range(6)]
    some.add(drivers)
    before = order(some)
    some.remove(drivers[3])
    assert order(some) == [i for i in before if i != 3]


@pytest.mark.parametrize("policy", POLICIES)
@given(adds=st.lists(st.lists(st.tuples(st.integers(-9, 9), st.integers(1, 30)), max_size=6)))
def test_one_by_one_or_many_at_once_come_in_one_order(
    policy: str, adds: list[list[tuple[int, int]]]
) -> None:
    at_once, one_by_one, n = queue(policy), queue(policy), 0
    for group in adds:
        new = [waiting(n + i, n, priority=p, n_prompt=k) for i, (p, k) in enumerate(group)]
        at_once.add(new)
        for driver in new:
            one_by_one.add([driver])
        n += len(new)
    assert order(at_once) == order(one_by_one)
    assert sorted(order(at_once)) == [*range(n)]


@pytest.mark.parametrize("policy", ["fcfs", "round_robin"])
def test_who_is_added_again_goes_to_the_end(policy: str) -> None:
    some, drivers = queue(policy), [waiting(i) for i in range(3)]
    some.add(drivers)
    some.remove(drivers[0])
    some.add([drivers[0]])
    assert order(some) == [1, 2, 0]


def test_higher_priority_comes_first_among_those_of_one_time() -> None:
    some = queue("priority", 10.0)
    some.add([waiting(0, priority=-1), waiting(1), waiting(2, priority=5)])
    assert order(some) == [2, 1, 0]


@pytest.mark.parametrize(("came_s", "is_passed"), [(29.0, True), (30.0, False), (31.0, False)])
def test_three_points_of_priority_overtake_less_than_three_ageings(
    came_s: float, is_passed: bool
) -> None:
    some = queue("priority", 10.0)
    some.add([waiting(0, 0.0), waiting(1, came_s, priority=3)])
    assert order(some) == ([1, 0] if is_passed else [0, 1])


def test_ageing_not_said_is_the_default() -> None:
    some = queue("priority")
    some.add([waiting(0, 0.0), waiting(1, 0.9 * DEFAULT_AGEING_S, priority=1)])
    some.add([waiting(2, 1.1 * DEFAULT_AGEING_S, priority=1)])
    assert order(some) == [1, 0, 2]


@given(moves=MOVES, ageing_s=st.sampled_from([0.5, 1.0, 4.0]))
def test_nobody_waits_behind_one_that_came_later_than_the_ageing_allows(
    moves: list[tuple[int, int, bool]], ageing_s: float
) -> None:
    arrivals, now = [], 0.0
    for i, (wait_s, priority, is_served) in enumerate(moves):
        now += wait_s
        arrivals.append((waiting(i, now, priority=priority), is_served))
    at = [d.clock.submitted_s for d, _ in arrivals]
    left = dict(enumerate(at))
    for first in turns(queue("priority", ageing_s), arrivals):
        del left[first]
        for i in (i for i in left if i < first):
            assert at[first] - at[i] <= ageing_s * (moves[first][1] - moves[i][1])


@given(MOVES)
def test_shortest_is_overtaken_by_at_most_as_many_as_it_has_tokens(
    moves: list[tuple[int, int, bool]],
) -> None:
    arrivals = [
        (waiting(i, n_prompt=n + 1), is_served) for i, (_, n, is_served) in enumerate(moves)
    ]
    n_overtaken = dict.fromkeys(range(len(moves)), 0)
    for first in turns(queue("shortest"), arrivals):
        del n_overtaken[first]
        for i in (i for i in n_overtaken if i < first):
            n_overtaken[i] += 1
            assert n_overtaken[i] <= moves[i][1] + 1


def test_shortest_passes_a_longer_one_until_it_has_waited_its_length() -> None:
    some = queue("shortest")
    some.add([waiting(0, n_prompt=4)])
    some.add(waiting(i, n_prompt=1) for i in range(1, 6))
    assert order(some) == [1, 2, 0, 3, 4, 5]
    assert length_and_age(waiting(3)) == length_and_age(waiting(0, n_prompt=4))


# ---- those that come back, and those that are held ----


def newcomers(n: int) -> list[SequenceDriver]:
    return [waiting(i) for i in range(n)]


def test_preempted_come_first_the_oldest_first_and_then_the_queue() -> None:
    queue, some = AdmissionQueue(ScheduleOptions()), newcomers(5)
    queue.add(some[:3])
    queue.put_back(some[4])
    queue.put_back(some[3])
    assert [*queue.candidates([])] == [some[i] for i in (3, 4, 0, 1, 2)]
    assert len(queue) == 5


@pytest.mark.parametrize("i", range(4))
def test_one_is_taken_out_wherever_it_stands(i: int) -> None:
    queue, some = AdmissionQueue(ScheduleOptions()), newcomers(4)
    queue.add(some[:2])
    for driver in some[2:]:
        queue.put_back(driver)
    queue.remove(some[i])
    assert [*queue.candidates([])] == [some[j] for j in (2, 3, 0, 1) if j != i]
