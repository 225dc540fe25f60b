"""Who gives up its cells when a shared pool is full, how it comes back, and that nobody notices but by a pause."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from cbatch.core.driver import Status
from cbatch.core.slots import N_OVERTAKEN_MAX, N_PREEMPTED_MAX
from cbatch.core.span import PromptCuts
from tests.helpers import (
    Rig,
    drive,
    make_request,
    make_scheduler,
    make_sequences,
    shared_pool,
    step,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from cbatch.core.plan import StepPlan
    from cbatch.core.request import Request

WAYS: dict[str, dict[str, Any]] = {
    "saved": {"can_save": True},
    "no budget": {"can_save": True, "swap_mib": 0},
    "cannot": {},
}


def hopeful(n_pool: int, n_slots: int = 4, *, can_save: bool = False, **given: Any) -> Rig:
    """A scheduler on a shared pool that expects next to no output, so the pool fills up."""
    memory = shared_pool(n_pool, can_save=can_save)
    rig = make_scheduler(n_slots, n_pool, 64, memory=memory, admission="optimistic", **given)
    rig.state.demand.ratio = 0.01
    return rig


def one_step(rig: Rig) -> StepPlan:
    rig.backend.interrupt()
    plan = step(rig)
    assert plan is not None
    return plan


def until(rig: Rig, is_so: Callable[[], bool]) -> None:
    while not is_so():
        one_step(rig)


def hope(rig: Rig) -> None:
    """Expect no output again, whatever was learned, and do one step a plan."""
    rig.state.demand.ratio = 0.01
    rig.backend.interrupt()


def fill(rig: Rig) -> None:
    """Step until the first one has lost its cells."""
    until(rig, lambda: any(d.n_preempted for d in rig.drivers.values()))


def preempted(rig: Rig) -> dict[str, int]:
    return {id: d.n_preempted for id, d in rig.drivers.items() if d.n_preempted}


def check_streams(rig: Rig, requests: list[Request]) -> None:
    """Every answer and what its reader saw is what the request gives alone."""
    for request in requests:
        n_output = request.options.max_tokens or 0
        result, chunks = rig.results[request.id], rig.chunks[request.id]
        assert result.token_ids == tuple(rig.alone(request, n_output))
        assert tuple(t for c in chunks for t in c.token_ids) == result.token_ids
        assert "".join(c.text for c in chunks) == result.text


# ---- the victim ----


def test_pool_that_is_full_takes_the_cells_of_the_younger() -> None:
    rig = hopeful(16)
    rig.submit(*make_sequences(2, max_tokens=12))
    fill(rig)
    assert preempted(rig) == {"1": 1}
    assert rig.drivers["0"].n_computed == 9  # 8 + 8 were full, and it went on in the same step
    assert rig.drivers["1"].status is Status.WAITING


def test_victim_has_computed_least_and_is_not_the_oldest() -> None:
    rig = hopeful(20)
    rig.submit(*(make_request(str(i), [1] * n, max_tokens=8) for i, n in enumerate((2, 6, 4, 5))))
    fill(rig)
    assert preempted(rig) == {"2": 1}


def test_oldest_alone_never_loses_its_cells() -> None:
    rig = hopeful(24)
    rig.submit(make_request("old", (1,), max_tokens=20), *make_sequences(8, max_tokens=18))
    drive(rig, before=lambda rig: rig.backend.interrupt())
    assert preempted(rig)
    assert "old" not in preempted(rig)


def test_who_lost_its_cells_too_often_keeps_them() -> None:
    rig = hopeful(20)
    rig.submit(*make_sequences(3, max_tokens=8))
    one_step(rig)
    rig.drivers["2"].n_preempted = N_PREEMPTED_MAX
    until(rig, lambda: rig.drivers["1"].n_preempted > 0)
    assert rig.drivers["2"].n_preempted == N_PREEMPTED_MAX


def test_no_request_is_preempted_more_than_three_times_in_a_full_pool() -> None:
    rig = hopeful(24)
    requests = make_sequences(12, max_tokens=18)
    rig.submit(*requests)

    drive(rig, before=hope)
    assert max(preempted(rig).values()) == N_PREEMPTED_MAX
    check_streams(rig, requests)


def test_paused_one_gives_up_its_cells_before_anybody_who_runs() -> None:
    rig = hopeful(16)
    rig.submit(*make_sequences(3, n_prompt=3, max_tokens=9))
    one_step(rig)
    rig.batcher.pause("0")
    until(rig, lambda: rig.drivers["0"].slot is None)
    assert preempted(rig) == {}
    assert rig.running() == ["1", "2"]


@pytest.mark.parametrize("failed", [(2,), (2, 3), (3, 4)])
def test_pool_that_lost_shared_cells_goes_on_whoever_was_a_victim(failed: tuple[int, ...]) -> None:
    codes = iter([-2 if i in failed else 0 for i in range(9)])
    memory = shared_pool(100, can_copy=True)
    rig = make_scheduler(
        2,
        100,
        100,
        memory=memory,
        admission="reserve",
        share_prefixes=True,
        code=lambda _: next(codes, 0),
    )
    requests = [
        make_request("a", range(64), max_tokens=8),
        make_request("b", [*range(60), 200], max_tokens=8),
    ]
    rig.submit(*requests)
    rig.drivers["b"].n_preempted = N_PREEMPTED_MAX
    drive(rig, before=lambda rig: rig.backend.interrupt())
    check_streams(rig, requests)
    assert preempted(rig) == {"b": N_PREEMPTED_MAX + 1}
    assert rig.ledger.n_cells[0] + rig.ledger.n_cells[1] > 100  # shared again


# ---- the step ----


def test_step_that_took_cells_back_admits_nobody() -> None:
    rig = hopeful(16)
    rig.submit(*make_sequences(2, max_tokens=12))
    until(rig, lambda: rig.ledger.n_free_cells == 0)
    rig.submit(make_request("late", (1,), max_tokens=1))
    assert one_step(rig).binds == ()
    assert preempted(rig) == {"1": 1}
    assert len(one_step(rig).binds) == 1


def test_pool_that_the_backend_found_full_preempts_and_admits_nobody() -> None:
    codes = iter([0, 1])
    rig = hopeful(64, code=lambda _: next(codes, 0))
    requests = make_sequences(3, max_tokens=6)
    rig.submit(*requests)
    one_step(rig)
    one_step(rig)
    assert preempted(rig) == {}
    assert one_step(rig).binds == ()
    assert preempted(rig) == {"2": 1}
    assert len(one_step(rig).binds) == 1
    drive(rig)
    check_streams(rig, requests)


def test_pool_that_the_backend_found_full_retains_no_cells_of_the_victim() -> None:
    codes: list[int] = []
    rig = hopeful(6400, share_prefixes=True, code=lambda _: codes.pop() if codes else 0)
    requests = make_sequences(3, n_prompt=80, max_tokens=6)
    rig.submit(*requests)
    until(rig, lambda: all(d.n_output for d in rig.drivers.values()))
    codes.append(1)
    one_step(rig)
    step = one_step(rig)
    assert (step.binds, step.clears, preempted(rig)) == ((), (2,), {"2": 1})
    drive(rig)
    check_streams(rig, requests)


@pytest.mark.parametrize("n_pool", [13, 16, 40])
@pytest.mark.parametrize("n_batch", [4, 64])
def test_pool_filled_on_purpose_ends_everybody_well(n_pool: int, n_batch: int) -> None:
    memory = shared_pool(n_pool)
    rig = make_scheduler(4, 13, n_batch, memory=memory, admission="optimistic")
    requests = make_sequences(20, n_prompt=5, max_tokens=8)
    rig.submit(*requests)
    n_plans = len(drive(rig, before=hope))
    check_streams(rig, requests)
    assert n_plans < 20 * (5 + 8) * (1 + N_PREEMPTED_MAX)


# ---- how it comes back ----


@pytest.mark.parametrize("way", WAYS)
def test_who_comes_back_goes_on_where_it_was(way: str) -> None:
    rig = hopeful(16, **WAYS[way])
    requests = make_sequences(5, max_tokens=12)
    rig.submit(*requests)
    drive(rig, before=lambda rig: rig.backend.interrupt())
    assert preempted(rig)
    check_streams(rig, requests)
    assert (rig.stats.n_recomputed_tokens == 0) is (way == "saved")
    assert rig.stats.n_prompt_tokens == 5 * 4 + (0 if way == "saved" else recomputed_prompts(rig))
    assert rig.backend.saved == {}


def recomputed_prompts(rig: Rig) -> int:
    """Prompt tokens that were computed again: all of the prompt, at each return."""
    return 4 * sum(preempted(rig).values())


def test_saved_cells_come_back_without_a_prefill() -> None:
    rig = hopeful(16, can_save=True)
    rig.submit(*make_sequences(2, max_tokens=12))
    fill(rig)
    assert len(rig.backend.saved) == 1
    until(rig, lambda: rig.drivers["1"].slot is not None)
    plan = rig.backend.plans[-1]
    assert [len(c.inputs) for c in plan.spans] == [1]
    assert len(plan.loads) == 1


def test_lost_cells_are_computed_again_with_the_output_in_one_chunk() -> None:
    rig = hopeful(16)
    rig.submit(*make_sequences(2, max_tokens=12))
    fill(rig)
    until(rig, lambda: rig.drivers["1"].slot is not None)
    assert [len(c.inputs) for c in rig.backend.plans[-1].spans] == [4 + 5]
    assert rig.stats.n_recomputed_tokens == 4 + 4


def test_who_comes_back_goes_before_the_queue() -> None:
    rig = hopeful(16)
    rig.submit(*make_sequences(2, max_tokens=12))
    fill(rig)
    rig.submit(*(make_request(f"late{i}", (i,), max_tokens=9) for i in range(3)))
    drive(rig)
    assert [*rig.results][:2] == ["0", "1"]


def test_older_of_those_that_come_back_goes_first() -> None:
    rig = hopeful(20)
    rig.submit(*make_sequences(4, max_tokens=14))
    until(rig, lambda: len(preempted(rig)) == 3)
    assert sorted(preempted(rig)) == ["1", "2", "3"]
    drive(rig)
    assert [*rig.results] == ["0", "1", "2", "3"]


@pytest.mark.parametrize("is_lost_at", ["save", "load"])
def test_cells_that_get_lost_on_the_way_are_computed_again(is_lost_at: str) -> None:
    n_asked: Counter[int] = Counter()

    def swap(key: int) -> bool:
        n_asked[key] += 1
        return n_asked[key] != (1 if is_lost_at == "save" else 2)

    rig = hopeful(16, can_save=True, swap=swap)
    requests = make_sequences(5, max_tokens=12)
    rig.submit(*requests)
    drive(rig, before=lambda rig: rig.backend.interrupt())
    assert max(n_asked.values()) == (1 if is_lost_at == "save" else 2)
    assert rig.stats.n_recomputed_tokens > 0
    assert rig.backend.saved == {}
    check_streams(rig, requests)


# ---- who leaves meanwhile ----


@pytest.mark.parametrize("reason", ["cancelled", "timeout"])
def test_request_that_ends_while_its_cells_are_saved_keeps_its_text(
    reason: str,
) -> None:
    rig = hopeful(16, can_save=True)
    rig.submit(make_request("0", max_tokens=12), make_request("1", max_tokens=12, timeout_s=6.5))
    fill(rig)
    if reason == "cancelled":
        assert rig.cancel("1")
    until(rig, lambda: "1" in rig.results)
    assert rig.results["1"].finish_reason == reason
    assert rig.results["1"].token_ids == tuple(rig.alone(make_request(), 5))
    drive(rig)
    assert (rig.backend.saved, rig.state.saved.n_bytes) == ({}, 0)


def test_head_is_passed_by_a_bounded_number_while_others_lose_their_cells() -> None:
    rig = hopeful(16)
    rig.submit(*make_sequences(2, max_tokens=12), make_request("big", max_tokens=12))
    rig.submit(*(make_request(f"s{i}", (i,), max_tokens=1) for i in range(40)))
    drive(rig)
    assert rig.drivers["big"].n_overtaken <= N_OVERTAKEN_MAX
    assert len(rig.results) == 43


# ---- what nobody needs goes first ----


def test_cells_that_one_left_go_before_those_of_somebody_who_runs() -> None:
    rig = hopeful(10, 3, share_prefixes=True)
    caps = {"0": 4, "1": 4, "2": 2}
    rig.submit(*(make_request(id, [int(id)] * 2, max_tokens=n) for id, n in caps.items()))
    until(rig, lambda: "2" in rig.results)
    assert (rig.ledger.n_used, rig.ledger.n_in_use()) == (9, 6)
    drive(rig, before=hope)
    assert [d.n_preempted for d in rig.drivers.values()] == [0, 0, 0]


@pytest.mark.parametrize("n_left", [31, 12])
def test_cells_that_one_left_go_before_a_prompt_is_cut_or_a_run_is_short(n_left: int) -> None:
    rig = hopeful(40, 2, share_prefixes=True)
    rig.submit(make_request("left", [7] * (n_left - 1), max_tokens=2))
    drive(rig)
    rig.submit(make_request("a", [8] * 20, max_tokens=20))
    plan = step(rig)
    assert plan is not None
    assert ([len(c.inputs) for c in plan.spans], plan.n_steps) == ([20], 20)


def test_nobody_who_decodes_is_left_out_for_want_of_cells() -> None:
    rig = hopeful(11, 2)
    rig.submit(*make_sequences(2, max_tokens=6))
    until(rig, lambda: rig.ledger.n_free_cells == 1)
    plan = one_step(rig)
    assert rig.drivers["1"].n_preempted == 1
    assert [c.slot for c in plan.spans] == [0]


def test_pool_that_a_paused_one_fills_lets_a_prompt_go_on() -> None:
    rig = hopeful(20, 2, prefill_chunk=1)
    rig.submit(make_request("a", (1, 2), max_tokens=18), make_request("b", [7] * 12, max_tokens=1))
    until(rig, lambda: not rig.ledger.n_free_cells)
    rig.batcher.pause("a")
    one_step(rig)
    assert rig.drivers["a"].slot is None
    assert rig.drivers["b"].n_preempted == 0


def test_turn_of_adapters_for_which_there_is_no_room_goes_to_others() -> None:
    rig = hopeful(40, 2, cuts=PromptCuts.every(16), adapters=("a",))
    rig.submit(make_request("0", (1, 2, 3), max_tokens=30))
    rig.submit(make_request("1", [7] * 32, max_tokens=1, adapter="a"))
    until(rig, lambda: rig.drivers["1"].n_computed == 16)
    rig.batcher.pause("1")
    until(rig, lambda: rig.ledger.n_free_cells < 16)
    rig.batcher.resume("1")
    assert one_step(rig).adapters == ()
    drive(rig)


def test_victims_whose_cells_are_all_shared_make_room_together() -> None:
    """The oldest sequence has a turn of its own, and its run takes the last cells."""
    memory = shared_pool(1280, can_copy=True)
    rig = make_scheduler(64, 1280, 64, memory=memory, share_prefixes=True, adapters=("x",))
    common = [*range(100, 132)]
    rig.submit(make_request("before", common, max_tokens=1))
    drive(rig)
    rig.submit(make_request("oldest", [1] * 1121, adapter="x"))
    while not rig.drivers["oldest"].n_output:
        step(rig)
    rig.submit(*[make_request(id, [*common, i], max_tokens=1) for i, id in enumerate("bc")])
    drive(rig)
    assert rig.results["oldest"].finish_reason == "window"
    for i, id in enumerate("bc"):
        alone = rig.alone(make_request(id, [*common, i]), 1)
        assert rig.results[id].token_ids == tuple(alone)
