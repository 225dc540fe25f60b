"""What those that run will want of a shared pool: the worst case, or what can be expected."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from cbatch.backend.fake import FakeVocab
from cbatch.core.books import KvLedger
from cbatch.core.driver import SequenceDriver
from cbatch.core.slots import N_PREEMPTED_MAX, Demand, KvDemandEstimator
from tests.helpers import make_request, shared_pool

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cbatch.response import FinishReason


class Pool:
    """What is expected of the requests of a pool, and the pool."""

    def __init__(self, ledger: KvLedger, *, is_optimistic: bool) -> None:
        self.ledger = ledger
        self.estimator = KvDemandEstimator(ledger, is_optimistic=is_optimistic)


def demand(n_pool: int, *, is_optimistic: bool = False) -> Pool:
    return Pool(KvLedger(4, 64, shared_pool(n_pool)), is_optimistic=is_optimistic)


def sequence(n_prompt: int, n_left: int, n_output: int = 0, **given: Any) -> SequenceDriver:
    driver = SequenceDriver.of(make_request(**given), FakeVocab(320).piece, 0.0)
    driver.tokens, driver.n_prompt = [1] * (n_prompt + n_output), n_prompt
    driver.output = [1] * n_output
    driver.n_cap, driver.n_window = n_output + n_left, n_prompt + n_output + n_left
    return driver


def fits_beside(pool: Pool, driver: SequenceDriver, running: Sequence[SequenceDriver]) -> bool:
    found = Demand(pool.estimator)
    for other in running:
        found.join(other, other.n_computed)
    return found.fits(driver, pool.ledger)


def ended(reason: FinishReason, n_output: int, n_cap: int) -> SequenceDriver:
    driver = sequence(4, n_cap - n_output, n_output, max_tokens=n_cap)
    driver.finish(reason, 0.0)
    return driver


@pytest.mark.parametrize(("n_pool", "fits"), [(30, True), (29, False)])
def test_reserve_fits_exactly_where_every_cap_does(n_pool: int, fits: bool) -> None:
    load_followers = [sequence(4, 6), sequence(2, 5, n_output=3)]
    assert fits_beside(demand(n_pool), sequence(7, 3), load_followers) is fits


@pytest.mark.parametrize(("n_pool", "fits"), [(19, True), (18, False)])
def test_optimistic_counts_a_share_of_what_is_left(n_pool: int, fits: bool) -> None:
    some = demand(n_pool, is_optimistic=True)
    some.estimator.ratio = 0.5
    load_followers = sequence(4, 5, n_output=3, max_tokens=8)
    assert (
        fits_beside(some, sequence(4, 10, max_tokens=10), [load_followers]) is fits
    )  # 4 + 5, 7 + 3


@pytest.mark.parametrize(("n_pool", "fits"), [(18, True), (17, False)])
def test_optimistic_counts_a_slots_share_or_less_without_a_cap(n_pool: int, fits: bool) -> None:
    some = demand(n_pool, is_optimistic=True)
    assert fits_beside(some, sequence(4, 10), [sequence(4, 2, n_output=4)]) is fits  # 4 + 4, 8 + 2


@pytest.mark.parametrize(("n_pool", "fits"), [(15, True), (14, False)])
@pytest.mark.parametrize("is_optimistic", [False, True])
def test_one_whose_window_is_over_wants_the_window(
    n_pool: int, fits: bool, is_optimistic: bool
) -> None:
    over = sequence(6, 90, 10, max_tokens=100)
    over.n_window = 15
    assert fits_beside(demand(n_pool, is_optimistic=is_optimistic), over, []) is fits


def test_optimistic_counts_the_worst_case_after_too_many_preemptions() -> None:
    some = demand(30, is_optimistic=True)
    often = sequence(4, 20)
    assert fits_beside(some, sequence(4, 10), [often])
    often.n_preempted = N_PREEMPTED_MAX
    assert not fits_beside(some, sequence(4, 10), [often])
    assert not fits_beside(some, often, [sequence(4, 10)])
    assert fits_beside(some, often, [])


@pytest.mark.parametrize("reason", ["stop", "length"])
def test_ratio_moves_towards_what_ended_by_itself(reason: FinishReason) -> None:
    some = demand(64, is_optimistic=True)
    some.estimator.learn(ended(reason, 2, 10))
    assert some.estimator.ratio == pytest.approx(0.7 - 0.5 / 32)
    for _ in range(500):
        some.estimator.learn(ended(reason, 2, 10))
    assert some.estimator.ratio == pytest.approx(0.2, abs=1e-3)


@pytest.mark.parametrize("reason", ["cancelled", "timeout", "error"])
def test_ratio_learns_nothing_from_what_was_cut_short(reason: FinishReason) -> None:
    some = demand(64, is_optimistic=True)
    some.estimator.learn(ended(reason, 1, 10))
    assert some.estimator.ratio == 0.7


def test_ratio_learns_nothing_from_a_prompt_alone() -> None:
    some = demand(64, is_optimistic=True)
    prompt = sequence(4, 0, max_tokens=9, prefill_only=True)
    prompt.finish("length", 0.0)
    some.estimator.learn(prompt)
    assert some.estimator.ratio == 0.7


def test_full_pool_raises_the_ratio_up_to_the_worst_case() -> None:
    some = demand(64, is_optimistic=True)
    some.estimator.raise_ratio()
    assert some.estimator.ratio == pytest.approx(0.82)
    for _ in range(9):
        some.estimator.raise_ratio()
    assert some.estimator.ratio == 1.0
