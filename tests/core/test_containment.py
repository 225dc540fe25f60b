"""A step that fails: the guilty is found and ends alone, the others go on, and what cannot be mended ends all."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from cbatch.core.scheduler import N_FAILURES_MAX
from cbatch.core.slots import SlotPlan
from cbatch.errors import DecodeError, PlanError, RequestFailedError
from tests.helpers import (
    Rig,
    drive,
    make_request,
    make_scheduler,
    make_sequences,
    partitioned,
    recurrent,
    shared_pool,
    step,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from cbatch.core.plan import KvCapabilities
    from cbatch.core.request import Request
    from cbatch.core.span import Span

GUILTY = 99


def of_guilty(code: int) -> Callable[[Sequence[Span]], int]:
    """Fail every step with the guilty token in it."""
    return lambda chunks: code if any(GUILTY in c.inputs for c in chunks) else 0


def counted(code: Callable[[Sequence[Span]], int], failed: list[int]) -> Any:
    """Note what each failing step returned."""

    def count(chunks: Sequence[Span]) -> int:
        found = code(chunks)
        failed.extend([found] if found else [])
        return found

    return count


def in_turn(codes: Iterable[int]) -> Callable[[Sequence[Span]], int]:
    """One step after the other returns these; then all is well."""
    rest = iter(codes)
    return lambda _: next(rest, 0)


def crowd(n: int, guilty: int, cap: int = 4) -> list[Request]:
    return [
        make_request(str(i), (i, 100 + i, 3, GUILTY if i == guilty else 7), max_tokens=cap)
        for i in range(n)
    ]


def check_innocents(rig: Rig, requests: Sequence[Request], guilty: int | None = None) -> None:
    for i, request in enumerate(requests):
        if i != guilty:
            cap = request.options.max_tokens or 0
            assert rig.results[request.id].token_ids == tuple(rig.alone(request, cap))


# ---- one is guilty ----


@pytest.mark.parametrize(("code", "guilty"), [(1, 0), (-1, 6), (2, 15), (-2, 6), (-3, 0)])
def test_one_guilty_among_sixteen_is_found_in_about_twice_four_steps(
    code: int, guilty: int
) -> None:
    failed: list[int] = []
    rig = make_scheduler(16, n_batch=64, code=counted(of_guilty(code), failed))
    requests = crowd(16, guilty)
    rig.submit(*requests)
    while str(guilty) not in rig.results:
        step(rig)
    assert failed in ([code] * 5, [code] * 6)  # once more in a context made anew
    assert rig.backend.n_steps <= 2 * 4 + 2
    n_failed = len(failed)
    drive(rig)
    assert len(failed) == n_failed
    check_innocents(rig, requests, guilty)
    assert isinstance(rig.results[str(guilty)].error, RequestFailedError)


def test_guilty_one_keeps_the_text_it_had() -> None:
    rig = make_scheduler(2, code=lambda chunks: -1 if any(c.start >= 6 for c in chunks) else 0)
    long, short = make_sequences(2, max_tokens=9)
    rig.submit(long)
    drive(rig)
    result = rig.results["0"]
    assert result.token_ids == tuple(rig.alone(long, 3))
    assert "".join(c.text for c in rig.chunks["0"]) == result.text
    assert short.id not in rig.results


def test_code_of_a_bad_batch_tells_of_the_plan() -> None:
    rig = make_scheduler(2, code=of_guilty(-1))
    rig.submit(*crowd(2, 1))
    drive(rig)
    cause = rig.results["1"].error.__cause__  # type: ignore[union-attr]
    assert isinstance(cause, DecodeError)
    assert cause.code == -1
    assert isinstance(cause.__cause__, PlanError)
    assert "StepPlan(" in str(cause.__cause__)


@pytest.mark.parametrize("code", [1, 2, -2, -3])
def test_other_codes_are_no_fault_of_the_plan(code: int) -> None:
    rig = make_scheduler(2, code=of_guilty(code))
    rig.submit(*crowd(2, 1))
    drive(rig)
    cause = rig.results["1"].error.__cause__  # type: ignore[union-attr]
    assert isinstance(cause, DecodeError)
    assert (cause.code, cause.__cause__) == (code, None)


def test_row_without_numbers_fails_alone_and_the_step_counts() -> None:
    rig = make_scheduler(4, n_batch=64, broken=lambda chunk: GUILTY in chunk.inputs)
    requests = crowd(4, 2)
    rig.submit(*requests)
    drive(rig)
    assert rig.results["2"].finish_reason == "error"
    assert rig.stats.n_steps == 4
    check_innocents(rig, requests, 2)


# ---- cells ----


def test_full_pool_with_one_alone_fails_it_and_nobody_else() -> None:
    rig = make_scheduler(2, 64, memory=shared_pool(80), code=of_guilty(1))
    requests = crowd(3, 0)
    rig.submit(*requests)
    drive(rig)
    assert rig.results["0"].finish_reason == "error"
    check_innocents(rig, requests, 0)


@pytest.mark.parametrize(("memory", "n_again"), [(None, 0), (recurrent(2), 2 * 5)])
def test_abort_keeps_cells_where_memory_can_trim(
    memory: KvCapabilities | None, n_again: int
) -> None:
    rig = make_scheduler(2, memory=memory, code=in_turn([0, 0, 2]))
    requests = make_sequences(2, max_tokens=6)
    rig.submit(*requests)
    drive(rig, before=lambda rig: rig.backend.interrupt())
    assert rig.stats.n_recomputed_tokens == n_again  # 4 + 1 of each
    check_innocents(rig, requests)


def test_abort_in_a_prompt_goes_on_behind_the_last_known_cell() -> None:
    rig = make_scheduler(1, n_batch=16, code=in_turn([2]))
    request = make_request("0", range(10), max_tokens=2)
    rig.submit(request)
    step(rig)
    assert rig.drivers["0"].n_computed == 5  # the fake backend keeps half
    drive(rig)
    check_innocents(rig, [request])


# ---- the context ----


@pytest.mark.parametrize(
    ("codes", "n_rebuilt"),
    [([-3], 0), ([-3, 0, -3], 0), ([-3, -3], 1), ([-2, -3], 1), ([2, 2], 0), ([-1, -1], 0)],
)
def test_context_is_made_anew_when_a_computation_fails_twice_in_a_row(
    codes: list[int], n_rebuilt: int
) -> None:
    rig = make_scheduler(4, n_batch=64, code=in_turn(codes))
    requests = make_sequences(4, max_tokens=6)
    rig.submit(*requests)
    drive(rig)
    assert rig.backend.n_rebuilt == n_rebuilt
    check_innocents(rig, requests)


@pytest.mark.parametrize(("codes", "n_rebuilt"), [([-3] * 9, 1), ([-3, -3, 0, -3, -3], 2)])
def test_context_is_made_anew_once_until_a_computation_works(
    codes: list[int], n_rebuilt: int
) -> None:
    rig = make_scheduler(4, n_batch=64, code=in_turn(codes))
    rig.submit(*make_sequences(9, max_tokens=6))
    drive(rig)
    assert rig.backend.n_rebuilt == n_rebuilt


def test_rebuilt_context_goes_on_with_those_that_wait_and_with_saved_cells() -> None:
    rig = make_scheduler(
        1, memory=partitioned(64), policy="round_robin", quantum=2, code=in_turn([0] * 4 + [-3, -3])
    )
    requests = make_sequences(3, max_tokens=6)
    rig.submit(*requests)
    drive(rig)
    assert rig.backend.n_rebuilt == 1
    check_innocents(rig, requests)


def test_one_alone_is_not_blamed_before_the_context_was_made_anew() -> None:
    rig = make_scheduler(1, code=in_turn([-3, -3]))
    [request] = make_sequences(1, max_tokens=3)
    rig.submit(request)
    drive(rig)
    check_innocents(rig, [request])


def test_newcomers_wait_while_the_context_is_made_anew() -> None:
    rig = make_scheduler(2, code=in_turn([-3, -3]))
    rig.submit(*make_sequences(1, max_tokens=3))
    step(rig)
    step(rig)
    rig.submit(late := make_request("late", max_tokens=3))
    plan = step(rig)
    assert plan is not None
    assert plan.is_rebuild
    assert [b.slot for b in plan.binds] == [0]
    drive(rig)
    check_innocents(rig, [late])


# ---- all is lost ----


@pytest.mark.parametrize("code", [-2, -3])
def test_computation_that_always_fails_ends_the_engine_after_a_bound(code: int) -> None:
    failed: list[int] = []
    rig = make_scheduler(2, code=counted(lambda _: code, failed))
    rig.submit(*make_sequences(50, max_tokens=3))
    with pytest.raises(DecodeError) as caught:
        drive(rig)
    assert caught.value.code == code
    assert len(failed) == N_FAILURES_MAX + 1


@pytest.mark.parametrize("code", [1, -1, 2])
def test_codes_that_leave_the_context_whole_never_end_the_engine(code: int) -> None:
    rig = make_scheduler(2, code=lambda _: code)
    rig.submit(*make_sequences(50, max_tokens=3))
    drive(rig)
    assert {r.finish_reason for r in rig.results.values()} == {"error"}


def test_one_success_begins_the_count_anew() -> None:
    rig = make_scheduler(16, n_batch=64, code=in_turn(([-3] * 9 + [0]) * 6))
    rig.submit(*make_sequences(40, max_tokens=3))
    drive(rig)
    assert len(rig.results) == 40


def test_as_many_failures_as_allowed_are_borne() -> None:
    rig = make_scheduler(2, code=in_turn([-3] * N_FAILURES_MAX))
    rig.submit(*make_sequences(50, max_tokens=3))
    drive(rig)
    assert sum(r.error is None for r in rig.results.values()) >= 40


def test_nobody_running_though_somebody_could_is_a_bug_that_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = make_scheduler(2)
    rig.submit(make_request())
    monkeypatch.setattr(SlotPlan, "can_admit", False)
    with pytest.raises(PlanError, match=r"0 requests run, 1 wait, 128 cells and 2 slots are free"):
        rig.scheduler.plan(0.0)


def test_somebody_running_who_is_not_computed_is_a_bug_that_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = make_scheduler(2)
    rig.submit(make_request())
    rig.backend.interrupt()
    step(rig)
    monkeypatch.setattr(rig.scheduler, "_shares", lambda *_: {})
    with pytest.raises(PlanError, match="no progress: 1 requests run"):
        rig.scheduler.plan(0.0)


def test_cleared_request_stays_cleared_when_it_loses_its_cells() -> None:
    rig = make_scheduler(code=in_turn([-1]))
    rig.submit(*make_sequences(2, max_tokens=9))
    for _ in range(3):
        rig.backend.interrupt()
        step(rig)
    for driver in rig.drivers.values():
        rig.batcher.keep_cells(driver, 0)
    assert rig.scheduler.bisection.suspects() == []
