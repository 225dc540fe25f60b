"""A beginning that prompts have in common is computed once, and nobody's tokens change by it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from cbatch.core.driver import Status, Wait
from cbatch.core.plan import Slot
from cbatch.core.prefix import MIN_SHARED_TOKENS, PrefixSource
from cbatch.core.span import PromptCuts
from cbatch.options import RunOptions
from cbatch.support import prefix_index
from tests.helpers import (
    Rig,
    drive,
    known_in,
    make_request,
    make_scheduler,
    make_sequences,
    park_paused,
    partitioned,
    plan_of,
    recurrent,
    run,
    shared_pool,
    step,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from cbatch.core.plan import KvCapabilities
    from cbatch.core.request import Request

COMMON = range(50)


def make_rig(n_slots: int = 4, **options: Any) -> Rig:
    given: dict[str, Any] = {
        "n_window": 128,
        "n_batch": 64,
        "memory": partitioned(n_slots * 128),
        "share_prefixes": True,
        **options,
    }
    return make_scheduler(n_slots, **given)


def alike(n: int, first: int = 0, **options: Any) -> list[Request]:
    """Requests with `COMMON` and one token of their own."""
    said = {"max_tokens": 4, **options}
    return [make_request(str(i), [*COMMON, 100 + i], **said) for i in range(first, first + n)]


def entered(rig: Rig) -> list[str]:
    """The requests that get a slot with the next plan."""
    rig.scheduler.begin_step(rig.now)
    plan = rig.scheduler.plan(rig.now)
    assert plan is not None
    return [driver.request.id for driver in plan.slot_plan.placed]


def drive_until(rig: Rig, id: str) -> None:
    """Step until a request has ended."""
    while id not in rig.results:
        step(rig)


def test_newcomers_of_one_plan_are_not_compared_with_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    n_compared, n_common = 0, prefix_index.n_common

    def counted(*args: Any) -> int:
        nonlocal n_compared
        n_compared += 1
        return n_common(*args)

    rig = make_rig(33)
    rig.submit(*alike(33))
    step(rig)
    for name in ("cbatch.support.prefix_index.n_common", "cbatch.core.prefix.n_common"):
        monkeypatch.setattr(name, counted)
    assert len(entered(rig)) == 32
    assert n_compared <= 4 * 32


@pytest.mark.parametrize("n", [2, 4, 9])
def test_common_beginning_of_those_that_come_together_is_computed_once(n: int) -> None:
    rig = make_rig()
    requests = alike(n)
    rig.submit(*requests)
    drive(rig)
    assert rig.stats.n_prompt_tokens == 50 + n
    assert [rig.results[r.id].usage.cached_tokens for r in requests] == [0] + [50] * (n - 1)
    for request in requests:
        assert rig.results[request.id].token_ids == tuple(rig.alone(request, 4))


@pytest.mark.parametrize("is_together", [True, False])
@pytest.mark.parametrize(
    "memory", [partitioned(5 * 128), shared_pool(5 * 128, can_copy=True), recurrent(5)]
)
def test_prompts_of_different_salts_share_no_cells(
    memory: KvCapabilities, *, is_together: bool
) -> None:
    rig = make_rig(5, memory=memory, checkpoint_mib=1)
    requests = []
    for i, salt in enumerate([None, "a", "b", "a", None]):
        requests.append(replace(alike(1, i)[0], options=RunOptions(cache_salt=salt, max_tokens=4)))
        rig.submit(requests[-1])
        if not is_together:
            drive(rig)
    drive(rig)
    shared = [rig.results[r.id].usage.cached_tokens for r in requests]
    assert shared[:3] == [0, 0, 0]
    assert is_together or memory.can_trim is False or min(shared[3:]) == 50
    for request in requests:
        assert rig.results[request.id].token_ids == tuple(rig.alone(request, 4))


def test_followers_wait_for_the_leader_and_go_on_in_the_plan_after() -> None:
    rig = make_rig(n_batch=26)
    rig.submit(*alike(3))
    step(rig)
    assert [rig.drivers[id].waits_for for id in "012"] == [None, Wait.LEADER, Wait.LEADER]
    step(rig)
    plan = step(rig)
    assert plan is not None
    assert {(c.slot, c.start) for c in plan.spans} >= {(1, 50), (2, 50)}


def test_another_prompt_passes_those_that_wait_for_a_leader() -> None:
    rig = make_rig(n_batch=26)
    rig.submit(*alike(2), make_request("other", (7, 7, 7), max_tokens=4))
    step(rig)
    assert rig.running() == ["0", "other"]


def test_leader_of_other_adapters_is_waited_for_during_another_turn() -> None:
    rig = make_rig(n_batch=40, adapters=("a",))
    rig.submit(make_request("other", (7, 7, 7), max_tokens=9, adapter="a"), *alike(2))
    drive(rig)
    assert rig.stats.n_prompt_tokens == 3 + 50 + 2


def test_gap_below_a_leader_is_left_to_those_that_follow_it() -> None:
    rig = make_rig(n_batch=26)
    rig.submit(make_request("short", (7, 7, 7), max_tokens=1), *alike(2, max_tokens=20))
    for _ in range(2):
        rig.backend.interrupt()
        step(rig)
    assert min(rig.ledger.free_slots) == 0
    assert (rig.drivers["0"].slot, rig.drivers["1"].waits_for) == (1, Wait.LEADER)


def test_leader_that_leaves_is_followed_by_the_oldest_in_the_same_plan() -> None:
    rig = make_rig(n_batch=26)
    rig.submit(*alike(3))
    step(rig)
    rig.cancel("0")
    plan = step(rig)
    assert plan is not None
    assert rig.running() == ["1"]
    assert [c.start for c in plan.spans] == [26]  # the cells of the one that left are of use
    drive(rig)
    assert rig.stats.n_prompt_tokens == 26 + 25 + 1


def test_leader_that_is_paused_holds_up_nobody() -> None:
    rig = make_rig(n_batch=26)
    rig.submit(*alike(2))
    step(rig)
    rig.batcher.pause("0")
    step(rig)
    assert rig.drivers["1"].status is Status.RUNNING
    rig.batcher.resume("0")
    drive(rig)


def test_paused_one_whose_slot_the_next_needs_is_no_source() -> None:
    rig = make_rig(2)
    rig.submit(*alike(1, max_tokens=60))
    rig.backend.interrupt()
    step(rig)
    rig.batcher.pause("0")
    rig.submit(*alike(1, first=1), make_request("c", [9] * 40, max_tokens=2))
    plan = step(rig)
    assert plan is not None
    assert (plan.copies, rig.running()) == ((), ["c", "1"])


def test_follower_that_is_cancelled_or_paused_is_no_longer_one() -> None:
    rig = make_rig(n_batch=26)
    rig.submit(*alike(3))
    step(rig)
    rig.cancel("1")
    assert len(rig.state.held[Wait.LEADER]) == 1
    rig.batcher.pause("2")
    for _ in range(3):
        step(rig)
    assert not len(rig.state.held[Wait.LEADER])
    assert rig.drivers["2"].status is Status.PAUSED
    rig.batcher.resume("2")
    drive(rig)
    assert rig.results["2"].usage.cached_tokens == 50


def test_short_beginning_is_not_worth_a_copy_but_is_kept_where_it_stands() -> None:
    rig = make_rig(n_slots=2)
    rig.submit(make_request("a", (1, 2, 3, 4), max_tokens=2))
    drive(rig)
    rig.submit(make_request("b", (1, 2, 3, 9), max_tokens=20))
    rig.backend.interrupt()
    step(rig)
    assert rig.drivers["b"].n_cached == 3
    rig.submit(make_request("c", (1, 2, 3, 8), max_tokens=2))
    drive(rig)
    assert rig.results["c"].usage.cached_tokens == 0


def test_cells_of_one_that_failed_are_not_passed_on() -> None:
    rig = make_rig(n_slots=1, broken=lambda chunk: chunk.start + len(chunk.inputs) == 51)
    rig.submit(
        make_request("bad", [*COMMON, 1]), make_request("good", [*COMMON, 1, 2], max_tokens=2)
    )
    drive(rig)
    assert rig.results["bad"].finish_reason == "error"
    assert rig.results["good"].usage.cached_tokens == 0


def test_newcomer_takes_the_slot_that_holds_most_of_its_prompt() -> None:
    rig = make_rig(n_slots=3)
    rig.submit(*(make_request(str(i), [i] * 40, max_tokens=2) for i in range(3)))
    drive(rig)
    rig.submit(make_request("again", [2] * 40, max_tokens=2))
    step(rig)
    assert rig.drivers["again"].slot == rig.drivers["2"].slot


def test_newcomer_with_nothing_in_common_takes_the_slot_unused_for_longest() -> None:
    rig = make_rig(n_slots=3)
    for i in range(5):
        rig.submit(make_request(str(i), [i] * 40, max_tokens=2))
        drive(rig)
    assert [rig.drivers[str(i)].slot for i in range(5)] == [0, 1, 2, 0, 1]


def test_newcomer_stands_beside_those_that_run() -> None:
    rig = make_rig(n_slots=4)
    for i in range(4):
        rig.submit(make_request(str(i), [i] * 40, max_tokens=2))
        drive(rig)
    rig.submit(make_request("again", [2] * 40, max_tokens=60))  # in slot 2, where its cells are
    rig.backend.interrupt()
    step(rig)
    rig.submit(make_request("b", [9] * 40, max_tokens=2))
    step(rig)
    assert [rig.drivers[id].slot for id in ("again", "b")] == [2, 1]


LONG = [*COMMON, *range(160, 210)]


def test_newcomer_takes_a_free_slot_before_it_copies_from_one_in_use() -> None:
    rig = make_rig()
    short, long = alike(1, max_tokens=2), alike(1, first=1, max_tokens=60)
    rig.submit(*long, *short)
    while "0" not in rig.results:
        step(rig)
    rig.submit(*alike(1, first=2))
    plan = step(rig)
    assert plan is not None
    assert (plan.copies, rig.drivers["2"].slot) == ((), rig.drivers["0"].slot)


@pytest.mark.parametrize(
    ("is_alone", "can_copy", "slot"), [(True, True, 1), (False, True, 0), (True, False, 0)]
)
def test_newcomer_leaves_what_follows_its_prefix_where_it_can_copy(
    is_alone: bool, can_copy: bool, slot: int
) -> None:
    rig = make_rig(2, memory=replace(partitioned(256), can_copy=can_copy))
    rig.submit(make_request("long", LONG, max_tokens=2))
    drive(rig)
    rig.submit(make_request("new", [*COMMON, 7], max_tokens=2))
    if not is_alone:
        rig.submit(make_request("other", [9] * 40, max_tokens=2))
    drive(rig)
    assert rig.drivers["new"].slot == slot
    assert rig.results["new"].usage.cached_tokens == 50


@pytest.mark.parametrize("n_common", [1, 10, MIN_SHARED_TOKENS - 1])
def test_few_cells_are_kept_in_a_slot_whose_others_are_lost_anyway(n_common: int) -> None:
    rig = make_rig(1)
    rig.submit(make_request("old", [*range(n_common), *[90] * 60], max_tokens=2))
    drive(rig)
    new = make_request("new", [*range(n_common), *[91] * 20], max_tokens=4)
    rig.submit(new)
    drive(rig)
    assert rig.results["new"].usage.cached_tokens == n_common
    assert rig.results["new"].token_ids == tuple(rig.alone(new, 4))


def test_newcomer_takes_no_slot_that_was_used_since_its_beginning_was() -> None:
    rig = make_rig(3)
    rig.submit(make_request("long", LONG, max_tokens=2), make_request("b", [9] * 40, max_tokens=2))
    rig.submit(make_request("running", [8] * 40, max_tokens=8))
    while len(rig.results) < 2:
        step(rig)
    rig.submit(make_request("new", [*COMMON, 7], max_tokens=2))
    drive(rig)
    assert rig.drivers["new"].slot == rig.drivers["long"].slot == 0


@pytest.mark.parametrize(("prompt", "n_cached"), [([9] * 40, 0), ([*COMMON, 7], 50)])
def test_slot_emptied_last_is_taken_before_one_that_holds_cells(
    prompt: list[int], n_cached: int
) -> None:
    rig = make_rig(2, broken=lambda chunk: chunk.inputs[0] == 8)
    rig.submit(make_request("long", LONG, max_tokens=20), make_request("bad", [8] * 40))
    drive(rig)
    rig.submit(make_request("new", prompt, max_tokens=2))
    drive(rig)
    assert [rig.drivers[id].slot for id in ("long", "bad", "new")] == [0, 1, 1]
    assert rig.results["new"].usage.cached_tokens == n_cached


def test_beginning_that_holds_no_whole_piece_is_not_waited_for() -> None:
    rig = make_rig(cuts=PromptCuts.every(64))
    rig.submit(*alike(2))
    step(rig)
    assert rig.running() == ["0", "1"]


def step_until(rig: Rig, is_there: Callable[[], bool]) -> None:
    """Do steps of one token each until something is so, which must be soon."""
    for _ in range(100):
        if is_there():
            return
        rig.backend.interrupt()
        step(rig)
    raise AssertionError("it never was")


def test_one_that_goes_on_never_takes_what_another_left_where_it_stood() -> None:
    rig = make_rig(3)
    first = make_request("a", [2] * 40, max_tokens=2)
    stays = make_request("stays", [4] * 40, max_tokens=60)
    rig.submit(stays, make_request("x", [1] * 40, max_tokens=20), first)
    step_until(rig, lambda: "a" in rig.results)
    rig.submit(make_request("b", [3] * 15, max_tokens=60))  # in the slot of "a"
    step_until(rig, lambda: rig.drivers["b"].slot == 2)
    step_until(rig, lambda: rig.drivers["b"].slot == 1)  # into which "x" leaves a gap
    more = make_request("a+", [2] * 40, max_tokens=6)
    output, number = rig.results["a"].token_ids, rig.drivers["a"].number
    rig.submit(replace(more, output=output, continues=number))
    drive(rig)
    assert rig.results["a+"].token_ids == tuple(rig.alone(more, 6))


def test_window_of_one_that_goes_on_does_not_move_shared_cells() -> None:
    memory = replace(shared_pool(256, can_copy=True), can_shift=True)
    rig = make_rig(2, n_batch=96, memory=memory)
    text = [5] * 110
    first = make_request("a", text, prefill_only=True, n_keep=4, n_discard=8)
    rig.submit(first)
    step(rig)
    rig.cancel("a")
    stays = make_request("stays", [*[5] * 50, 6], max_tokens=60)
    rig.submit(stays)
    step_until(rig, lambda: rig.ledger.n_used_slots == 1)
    more = make_request("a+", text, max_tokens=60, n_keep=4, n_discard=8)
    rig.submit(replace(more, continues=rig.drivers["a"].number))
    drive(rig)
    assert rig.results["stays"].usage.cached_tokens == 50
    assert rig.results["a+"].usage.cached_tokens == 0
    assert rig.results["stays"].token_ids == tuple(rig.alone(stays, 60))


@pytest.mark.parametrize(("copy_s", "admitted"), [(10.0, ["1"]), (1.0, ["1", "2"])])
def test_no_more_is_copied_in_a_step_than_takes_as_long_as_decoding(
    copy_s: float, admitted: list[str]
) -> None:
    rig = make_rig(4)
    rig.submit(*alike(1, max_tokens=60))
    for _ in range(3):
        rig.backend.interrupt()
        step(rig)
    rig.scheduler.costs.learn_copy(50, copy_s)  # a step takes a second
    rig.submit(*alike(3, first=1))
    assert entered(rig) == admitted


def test_state_is_passed_on_where_it_ends_a_piece_and_nowhere_else() -> None:
    for n_prompt, n_cached in [(48, 48), (50, 0)]:
        rig = make_rig(1, memory=recurrent(1), cuts=PromptCuts.every(16))
        rig.submit(make_request("a", range(n_prompt), prefill_only=True))
        drive(rig)
        rig.submit(make_request("b", range(n_prompt + 20), max_tokens=2))
        drive(rig)
        assert rig.results["b"].usage.cached_tokens == n_cached


def test_state_behind_a_stop_string_is_passed_on_to_nobody() -> None:
    rig = make_rig(1, n_vocab=4096, memory=recurrent(1))
    text = b"".join(
        map(rig.backend.vocab.piece, rig.alone(make_request(prompt=COMMON), 9))
    ).decode()
    rig.submit(make_request("a", COMMON, max_tokens=9, stop=text[3:5]))
    drive(rig)
    rig.submit(make_request("b", [*COMMON, *rig.drivers["a"].output, 7], max_tokens=2))
    drive(rig)
    assert rig.results["b"].usage.cached_tokens == 0


@pytest.mark.parametrize("can_copy", [True, False])
def test_one_that_cannot_copy_waits_for_nobody_and_computes_all(can_copy: bool) -> None:
    rig = make_rig(3, memory=replace(partitioned(384), can_copy=can_copy))
    rig.submit(*alike(2, max_tokens=20))
    step(rig)
    assert rig.running() == (["0"] if can_copy else ["0", "1"])
    rig.submit(*alike(1, first=2))
    drive(rig)
    assert rig.stats.n_prompt_tokens == (53 if can_copy else 153)


def test_source_of_a_copy_is_not_the_next_to_be_emptied() -> None:
    rig = make_rig(3)
    for request in (make_request("long", LONG), make_request("b", [9] * 40)):
        rig.submit(replace(request, options=replace(request.options, max_tokens=2)))
        drive(rig)
    for prompt in ([*COMMON, 7], [8] * 40):  # a copy, then one that takes a slot
        rig.submit(make_request(str(prompt[0]), prompt, max_tokens=2))
        drive(rig)
    assert rig.drivers["8"].slot == rig.drivers["b"].slot == 1


def test_one_that_moves_where_nothing_is_shared_leaves_an_empty_slot() -> None:
    rig = make_rig(3, share_prefixes=False)
    stays, long = (make_request(id, [9] * 40, max_tokens=40) for id in ("stays", "long"))
    rig.submit(stays, make_request("x", max_tokens=2), long)
    step_until(rig, lambda: rig.drivers["long"].slot == 2)
    step_until(rig, lambda: rig.drivers["long"].slot == 1)
    drive(rig)
    assert rig.results["long"].token_ids == tuple(rig.alone(long, 40))
    assert rig.stats.n_recomputed_tokens == 0


def test_saved_cells_restored_into_a_pool_evict_what_nobody_needs() -> None:
    memory = shared_pool(100, can_save=True, can_copy=True)
    rig = make_rig(3, memory=memory)
    rig.submit(make_request("a", COMMON, max_tokens=20))
    rig.backend.interrupt()
    step(rig)
    rig.batcher.pause("a")
    rig.submit(*(make_request(str(i), [i] * 28, max_tokens=2) for i in (7, 8, 9)))
    drive_until(rig, "9")
    rig.batcher.resume("a")
    drive(rig)
    assert rig.stats.n_recomputed_tokens == 0
    assert len(rig.results["a"].token_ids) == 20


def test_pool_counts_shared_cells_once() -> None:
    rig = make_rig(memory=shared_pool(128, can_copy=True), n_slots=4)
    rig.submit(*alike(4, max_tokens=10))  # 240 cells if each had its own
    n_most = 0

    def look(rig: Rig, _: object) -> None:
        nonlocal n_most
        n_most = max(n_most, rig.ledger.n_used)

    drive(rig, after=look)
    assert rig.stats.n_active_max == 4
    assert n_most == 50 + 4 * 10  # a last token has no cell
    assert rig.stats.n_prompt_tokens == 54


def test_pool_keeps_cells_of_those_that_ended_until_somebody_needs_them() -> None:
    rig = make_rig(memory=shared_pool(128, can_copy=True), n_slots=4)
    rig.submit(make_request("a", COMMON, max_tokens=4), make_request("b", [7] * 30, max_tokens=4))
    drive(rig)
    assert rig.ledger.n_used == 53 + 33
    rig.submit(make_request("c", [8] * 60, max_tokens=4))
    drive(rig)
    assert rig.ledger.n_used == 33 + 63  # the oldest gave way
    rig.submit(make_request("d", [7] * 30, max_tokens=4))
    drive(rig)
    assert rig.results["d"].usage.cached_tokens == 29


def test_cells_of_a_slot_that_nobody_has_are_room_that_its_heir_takes() -> None:
    memory = shared_pool(100, can_copy=True)
    rig = make_rig(3, memory=memory, n_window=100, admission="reserve")
    rig.submit(make_request("left", COMMON, max_tokens=1))
    drive(rig)
    rig.submit(make_request("a", [7] * 40, max_tokens=10))
    rig.submit(make_request("heir", [*COMMON, 8], max_tokens=9))
    rig.backend.interrupt()
    step(rig)
    assert rig.running() == ["a"]  # 50 cells, and 60 are wanted
    drive(rig)
    assert rig.results["heir"].finish_reason == "length"


def test_exact_pieces_are_passed_on_whole_and_output_never() -> None:
    rig = make_rig(n_slots=2, cuts=PromptCuts.every(16))
    rig.submit(make_request("a", COMMON, max_tokens=20))
    drive(rig)
    longer = make_request("b", [*COMMON, *rig.results["a"].token_ids, 5], max_tokens=2)
    rig.submit(longer)
    drive(rig)
    assert rig.results["b"].usage.cached_tokens == 48
    assert max(known_in(rig, [*COMMON, 200]).values()) == 50


def test_rebuilt_context_has_nothing_to_pass_on() -> None:
    codes = [0] * 8 + [-3, -3]
    rig = make_rig(n_slots=2, code=lambda _: codes.pop(0) if codes else 0)
    rig.submit(make_request("a", COMMON, max_tokens=8))
    drive(rig)
    rig.submit(make_request("b", (1, 2, 3), max_tokens=4))
    drive(rig)
    assert rig.backend.n_rebuilt == 1
    rig.submit(make_request("c", COMMON, max_tokens=2))
    drive(rig)
    assert rig.results["c"].usage.cached_tokens == 0


def test_cells_that_the_same_plan_puts_back_are_no_source() -> None:
    rig = make_rig(n_slots=2)
    first = make_request("a", [*COMMON, 100], max_tokens=40)
    rig.submit(first)
    rig.backend.interrupt()
    step(rig)
    rig.batcher.pause("a")
    rig.submit(*(make_request(id, [200 + i] * 60, max_tokens=3) for i, id in enumerate("xy")))
    rig.backend.interrupt()
    step(rig)
    assert rig.drivers["a"].saved_key is not None
    rig.batcher.resume("a")
    second = make_request("b", [*COMMON, 101], max_tokens=4)
    rig.submit(second)
    drive(rig)
    assert rig.results["a"].token_ids == tuple(rig.alone(first, 40))
    assert rig.results["b"].token_ids == tuple(rig.alone(second, 4))


@pytest.mark.parametrize("n_done", [0, 1, 2])
def test_run_that_was_broken_off_costs_its_cells_and_no_token(n_done: int) -> None:
    """Before the backend ran it, before it was applied, and behind: where `apply` raises when it has committed."""
    rig = make_rig(n_slots=4)
    rig.submit(*alike(2, max_tokens=20))
    for _ in range(2):
        rig.backend.interrupt()
        step(rig)
    rig.batcher.pause("0")
    park_paused(rig)
    rig.backend.interrupt()
    step(rig)
    rig.batcher.resume("0")
    rig.submit(*alike(2, first=2, max_tokens=20))
    plan = plan_of(rig)  # with a load and a copy
    assert plan is not None
    assert plan.step.loads
    assert plan.step.copies
    if n_done:
        result = rig.backend.run(plan.step)
        if n_done == 2:
            rig.scheduler.apply(plan, result, rig.now)
    rig.batcher.lose_cells(plan.step)
    step(rig)
    assert not rig.backend.saved
    drive(rig)
    for request in alike(4, max_tokens=20):
        assert rig.results[request.id].token_ids == tuple(rig.alone(request, 20))


@pytest.mark.parametrize("is_applied", [False, True])
def test_broken_off_run_that_saved_a_sequence_costs_cells_and_no_token(*, is_applied: bool) -> None:
    memory = shared_pool(60, can_save=True)
    rig = make_scheduler(2, 60, 60, memory=memory, swap_mib=8)
    rig.submit(*make_sequences(2, n_prompt=4, max_tokens=36))
    plan = None
    while plan is None or not plan.step.saves:
        rig.backend.interrupt()
        plan = plan_of(rig)
        assert plan is not None
        if not plan.step.saves:
            run(rig, plan)
    result = rig.backend.run(plan.step)
    if is_applied:
        rig.scheduler.apply(plan, result, rig.now)
    rig.batcher.lose_cells(plan.step)
    drive(rig)
    for request in make_sequences(2, n_prompt=4, max_tokens=36):
        assert rig.results[request.id].token_ids == tuple(rig.alone(request, 36))


def test_cells_are_loaded_when_the_copies_beside_them_leave_room() -> None:
    """A free slot that a plan copies from keeps all that it holds, so the cells of another wait for a plan."""
    memory = shared_pool(195, can_save=True, can_copy=True)
    rig = make_scheduler(5, 200, 200, memory=memory, share_prefixes=True, swap_mib=8)
    common, own = [*range(40)], [150 + i % 50 for i in range(62)]
    rig.submit(make_request("w", own, max_tokens=1, cache_key="b", save_cache=True))
    drive(rig)
    rig.submit(make_request("c", [*common, *(i % 100 for i in range(101))], max_tokens=2))
    drive(rig)
    copying = make_request("a", [*common, 200, 201], max_tokens=2, cache_key="none")
    loading = make_request("b", [*own, 3], max_tokens=2, cache_key="b")
    rig.submit(copying, loading)
    drive(rig)
    for request in (copying, loading):
        assert rig.results[request.id].token_ids == tuple(rig.alone(request, 2))
    assert rig.results["b"].usage.cached_tokens == 62


def test_sequence_at_the_head_is_passed_only_where_another_enters() -> None:
    memory = shared_pool(200, can_copy=True)
    rig = make_rig(
        2, n_window=200, n_batch=200, memory=memory, admission="reserve", prefill_chunk=2
    )
    leader = [*range(100)]
    for request in (
        make_request("l", leader, max_tokens=5),
        make_request("f", [*leader, 101], max_tokens=5),
    ):
        rig.submit(request)
        step(rig)
    long = [7 * i % 256 for i in range(150)]
    rig.submit(make_request("head", long, max_tokens=5), make_request("s", [9, 8], max_tokens=2))
    for _ in range(20):  # the free slot is kept for the follower
        step(rig)
    assert rig.drivers["head"].n_overtaken == 0


def test_chats_with_a_common_first_token_do_not_drive_each_other_out() -> None:
    rig = make_rig(n_slots=4)
    for turn in range(3):
        for chat in range(3):
            prompt = [9, *[20 + chat] * 40, *range(turn)]
            rig.submit(make_request(f"{chat}.{turn}", prompt, max_tokens=2))
            drive(rig)
    assert all(rig.results[f"{chat}.2"].usage.cached_tokens >= 41 for chat in range(3))


@pytest.mark.parametrize("memory", [partitioned(5 * 256), shared_pool(5 * 160, can_copy=True)])
@pytest.mark.parametrize("n_at_once", [1, 2, 4])
def test_chats_with_a_common_system_prompt_find_their_whole_history(
    memory: KvCapabilities, n_at_once: int
) -> None:
    n_chats, rig = 4, make_rig(5, n_window=256, memory=memory)
    chats = {str(chat): [*COMMON, *[100 + chat] * 40] for chat in range(n_chats)}
    for turn in range(5):
        for first in range(0, n_chats, n_at_once):
            asked = [*chats][first : first + n_at_once]
            rig.submit(*(make_request(f"{c}.{turn}", chats[c], max_tokens=6) for c in asked))
            drive(rig)
        for chat, history in chats.items():
            result = rig.results[f"{chat}.{turn}"]
            n_known = len(history) - 5 if turn else 50 if int(chat) else 0
            assert result.usage.cached_tokens == n_known  # an answer's last token has no cell
            history += [*result.token_ids, 60 + turn, 70, 80, 90]


@pytest.mark.parametrize("memory", [partitioned(8 * 256), shared_pool(8 * 128, can_copy=True)])
def test_chats_that_come_together_take_the_slots_of_those_that_come_last(
    memory: KvCapabilities,
) -> None:
    rig, n_chats, n_found = make_rig(8, n_window=256, memory=memory), 10, 0
    chats = {str(chat): [*COMMON, *[100 + chat] * 40] for chat in range(n_chats)}
    for turn in range(6):
        rig.submit(*(make_request(f"{c}.{turn}", chats[c], max_tokens=6) for c in chats))
        drive(rig)
        for chat, history in chats.items():
            result = rig.results[f"{chat}.{turn}"]
            n_found += result.usage.cached_tokens > len(COMMON)
            history += [*result.token_ids, 60 + turn, 70, 80, 90]
    assert n_found >= 5 * 5  # of 5 × 6: the last two never do, and each drives out another


def test_output_under_exact_is_not_reused_for_a_prompt_of_equal_text() -> None:
    rig = make_rig(n_slots=2, cuts=PromptCuts.every(16))
    rig.submit(make_request("a", [7] * 90, max_tokens=1))
    drive(rig)
    rig.submit(replace(make_request("b", [7] * 40), output=(7,) * 30))
    assert rig.state.cells.prefixes.find(rig.drivers["b"]).source == PrefixSource(Slot(0), 32)


def test_slots_promised_to_followers_are_given_to_nobody() -> None:
    rig = make_rig(3, n_batch=26)
    rig.submit(*alike(3), make_request("other", (7, 7, 7)))
    step(rig)
    assert rig.running() == ["0"]


def test_slot_that_a_plan_copies_from_is_given_to_nobody_in_it() -> None:
    rig = make_rig(n_slots=4)
    prompts = {"a": [8] * 40, "b": [*COMMON, *[9] * 40], "c": [7] * 40, "d": [6] * 40}
    for id, prompt in prompts.items():
        rig.submit(make_request(id, prompt, max_tokens=2))
        drive(rig)
    rig.submit(make_request("e", [*COMMON, 1]), make_request("f", [5] * 40, max_tokens=2))
    plan = step(rig)
    assert plan is not None
    assert plan.copies == ((1, 0, 50),)
    assert rig.drivers["f"].slot == 2
    drive(rig)
    assert not rig.state.cells.prefixes.copied


def test_lost_load_takes_the_copies_of_its_plan_with_it() -> None:
    is_broken = False
    rig = make_rig(n_slots=3, swap=lambda _: not is_broken)
    rig.submit(make_request("a", COMMON, max_tokens=30), make_request("b", [7] * 40, max_tokens=30))
    rig.backend.interrupt()
    step(rig)
    rig.batcher.pause("b")
    park_paused(rig)
    rig.backend.interrupt()
    step(rig)
    rig.batcher.resume("b")
    rig.submit(make_request("c", [*COMMON, 1], max_tokens=5))
    is_broken = True
    drive(rig)
    assert {id: r.finish_reason for id, r in rig.results.items()} == dict.fromkeys("abc", "length")
    assert rig.results["c"].token_ids == tuple(rig.alone(make_request("c", [*COMMON, 1]), 5))


def known_of(rig: Rig, id: str) -> int:
    """How many tokens of one and the same value the index knows in a sequence's slot."""
    slot = rig.drivers[id].slot
    assert slot is not None
    return known_in(rig, [5] * 64).get(slot, 0)


def test_moved_cells_that_come_back_are_no_beginning_behind_those_kept() -> None:
    memory = replace(partitioned(2 * 64), can_shift=True)
    rig = make_rig(2, n_window=64, memory=memory)
    request = make_request("a", [5] * 40, max_tokens=60, n_keep=3, n_discard=8)
    rig.submit(request)
    while not rig.drivers["a"].n_shifts:
        rig.backend.interrupt()
        step(rig)
    rig.backend.interrupt()
    step(rig)  # the cells follow
    rig.batcher.pause("a")
    park_paused(rig)
    step(rig)
    rig.batcher.resume("a")
    rig.backend.interrupt()
    plan = step(rig)
    assert plan is not None
    assert plan.loads
    assert known_of(rig, "a") == 3
    drive(rig)
    assert rig.results["a"].token_ids == tuple(rig.alone(request, 60))


@pytest.mark.parametrize(
    ("n_saved", "n_shared", "n_prompt", "n_usable"),
    [
        (100, 1, 60, 0),  # as every chat begins
        (100, MIN_SHARED_TOKENS - 1, 60, 0),
        (100, MIN_SHARED_TOKENS, 60, MIN_SHARED_TOKENS),
        (5, 5, 60, 5),  # the whole file
        (100, 9, 10, 9),  # all that the prompt can begin with
        (100, 8, 10, 0),
    ],
)
def test_few_of_many_saved_cells_are_none(
    n_saved: int, n_shared: int, n_prompt: int, n_usable: int
) -> None:
    rig = make_rig()
    prompt = [*range(n_shared), *range(200, 200 + n_prompt - n_shared)]
    rig.submit(make_request("a", prompt))
    found = rig.state.cells.prefixes.n_usable(rig.drivers["a"], range(n_saved), n_saved)
    assert found == n_usable
