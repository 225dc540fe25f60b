"""When requests are sent."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from cbatch.bench.measured import MeasuredAnswer, WorkRequest
from cbatch.bench.pacing import Pace, drive

if TYPE_CHECKING:
    from cbatch.bench.pacing import Now


def request(id: str) -> WorkRequest:
    return WorkRequest(id, "a", 1, 1)


class Counted:
    """Answers after some turns of the event loop, and counts who is asked at once."""

    def __init__(self) -> None:
        self.n_now = self.n_most = 0
        self.ids: list[str] = []

    async def ask(self, request: WorkRequest, sent_s: float, now: Now) -> MeasuredAnswer:
        self.n_now += 1
        self.n_most = max(self.n_most, self.n_now)
        self.ids.append(request.id)
        for _ in range(5):
            await asyncio.sleep(0)
        self.n_now -= 1
        return MeasuredAnswer(request.id, sent_s, sent_s, now(), 1)


@pytest.mark.parametrize("n_clients", [1, 3, 20])
def test_closed_loop_never_has_more_at_once_than_clients(n_clients: int) -> None:
    counted = Counted()
    chains = [[request(str(i))] for i in range(10)]
    answers, seconds = asyncio.run(drive(chains, Pace(n_clients), counted.ask))
    assert counted.n_most == min(n_clients, 10)
    assert sorted(a.id for a in answers) == sorted(str(i) for i in range(10))
    assert max(a.end_s for a in answers) <= seconds


def test_turn_is_sent_when_the_one_before_it_is_answered() -> None:
    counted = Counted()
    chains = [[request(f"{i}.{turn}") for turn in range(3)] for i in range(2)]
    answers, _ = asyncio.run(drive(chains, Pace(2), counted.ask))
    by_id = {a.id: a for a in answers}
    for i in range(2):
        for turn in range(2):
            assert by_id[f"{i}.{turn}"].end_s <= by_id[f"{i}.{turn + 1}"].sent_s
    assert counted.n_most == 2


def test_open_loop_counts_from_when_requests_were_due() -> None:
    pace = Pace(arrivals_s=(0.0, 0.001, 0.002))
    chains = [[request(str(i))] for i in range(3)]
    answers, _ = asyncio.run(drive(chains, pace, Counted().ask))
    assert {a.id: a.sent_s for a in answers} == {"0": 0.0, "1": 0.001, "2": 0.002}
    assert all(a.end_s >= a.sent_s for a in answers)


def test_arrivals_come_by_chance_at_the_rate_and_again_for_the_same_seed() -> None:
    first, again, other = (Pace.poisson(50.0, 2000, seed) for seed in (1, 1, 2))
    assert first == again != other
    assert first.arrivals_s is not None
    assert first.arrivals_s[0] == 0.0
    assert list(first.arrivals_s) == sorted(first.arrivals_s)
    assert 2000 / first.arrivals_s[-1] == pytest.approx(50.0, rel=0.1)
