"""What steps cost, learned from those that were done, and what may go into the next one for that."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from statistics import mean
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cbatch.backend.fake import StepCost
from cbatch.bench.experiments.step_costs import SMALL
from cbatch.core.budget import SHORT_RUN_S, StepCosts
from cbatch.core.span import PromptCuts
from cbatch.runtime.output import result_of
from tests.helpers import Rig, drive, make_request, make_scheduler, make_sequences, step

if TYPE_CHECKING:
    from collections.abc import Callable

    from cbatch.core.plan import StepPlan


def learned(*decodes: tuple[int, float], token_s: float = 0.0) -> StepCosts:
    costs = StepCosts()
    for n_rows, seconds in decodes:
        costs.learn_decode(n_rows, seconds)
    if token_s:
        costs.learn_mixed(0, 100, 100 * token_s)
    return costs


def test_nothing_is_known_before_a_step_was_seen() -> None:
    assert learned().decode_s(4) is None
    assert learned().n_prompt_within(4, 1.0) is None
    assert learned((4, 1.0)).n_prompt_within(4, 2.0) is None
    assert learned(token_s=0.1).n_prompt_within(4, 2.0) is None


@pytest.mark.parametrize(("n_rows", "seconds"), [(1, 1.0), (4, 2.0), (8, 4.0), (9, 4.0), (13, 4.0)])
def test_width_that_was_not_seen_costs_what_the_nearest_does(n_rows: int, seconds: float) -> None:
    assert learned((1, 1.0), (3, 2.0), (9, 4.0)).decode_s(n_rows) == seconds


def test_much_wider_step_than_was_seen_costs_more_in_proportion() -> None:
    costs = learned((4, 1.0))
    assert [costs.decode_s(n) for n in (1, 6, 9, 12)] == [1.0, 1.0, 1.5, 2.0]
    assert [costs.seen_s(n) for n in (1, 6, 9, 12)] == [1.0] * 4
    assert learned().seen_s(4) == 0.0


def test_one_slow_step_of_few_rows_costs_no_more_than_one_of_many() -> None:
    costs = StepCosts()
    costs.learn_decode(1, 9.0)  # the first of all
    for _ in range(3):
        costs.learn_decode(4, 1.0)
    assert costs.decode_s(1) == costs.seen_s(1) == 1.0


def test_slow_steps_change_nothing_and_a_slower_machine_does() -> None:
    costs = learned(*[(2, 1.0)] * 5)
    for _ in range(4):
        costs.learn_decode(2, 9.0)
    assert costs.decode_s(2) == 1.0
    costs.learn_decode(2, 9.0)
    assert costs.decode_s(2) == 9.0


def test_prompt_tokens_cost_what_a_step_takes_beyond_its_rows() -> None:
    costs = learned((3, 1.0))
    costs.learn_mixed(3, 10, 1.5)
    assert costs.n_prompt_within(3, 2.01) == 20


def test_aim_that_cannot_be_met_costs_half_as_long_again() -> None:
    costs = learned((3, 1.0))
    costs.learn_mixed(3, 10, 1.5)
    assert costs.n_prompt_within(3, 0.1) == 10
    assert costs.n_prompt_within(3, 1.0) == 10


def test_fixed_part_of_a_run_of_the_graph_is_not_charged_to_tokens() -> None:
    """Chunks of 17 tokens that take 0.5 s more than their rows, whatever they have: a larger one costs hardly more."""
    costs = learned((1, 1.0))
    costs.learn_mixed(0, 1000, 1.5)
    for n in (17, 17, 17, 34):
        costs.learn_mixed(1, n, 1.5 + n * 1e-3)
    assert costs.prompt == pytest.approx((0.5, 1e-3, 0.0))
    assert costs.n_prompt_within(1, 2.0001) == 500
    assert costs.n_prompt_for(1, 0.5) == pytest.approx(1500, abs=1)
    assert costs.n_prompt_for(0, 0.5) == pytest.approx(500, abs=1)


def test_slow_steps_do_not_spoil_the_cost_of_tokens() -> None:
    costs = learned((1, 1.0))
    for i, n in enumerate((100, 200, 300, 100, 200, 300, 100, 200, 300, 400)):
        costs.learn_mixed(1, n, 1.25 + n * 1e-3 + 5 * (i in (2, 7)))
    assert costs.prompt == pytest.approx((0.25, 1e-3, 0.0), rel=0.2)


@pytest.mark.parametrize("n_rows", [0, 1])
def test_tokens_late_in_a_prompt_cost_more(n_rows: int) -> None:
    costs = learned((1, 1.0))

    def learn(n: int, start: int) -> None:
        before = n * (start + n / 2)
        costs.learn_mixed(n_rows, n, 0.5 + n_rows + n * 1e-3 + before * 1e-6, before)

    for n, start in ((400, 0), (100, 0), (50, 0), (100, 1000), (100, 2000), (50, 2000), (100, 500)):
        learn(n, start)
    if n_rows:
        assert costs.prompt == pytest.approx((0.5, 1e-3, 1e-6))
        assert costs.n_prompt_within(1, 1.9) == pytest.approx(341, abs=1)  # n + n²/2 · 1e-3 = 400
    n_first, n_late = (costs.n_prompt_within(1, 1.9, start) or 0 for start in (0, 3000))
    assert 3 * n_late < n_first
    n_first, n_late = (costs.n_prompt_for(1, 0.5, start=start) or 0 for start in (0, 3000))
    assert 2 * n_late < n_first


def test_steps_alike_are_followed_by_another_that_tells_more() -> None:
    costs = learned((1, 1.0))
    for _ in range(4):
        costs.learn_mixed(1, 20, 1.5)
    assert costs.n_prompt_within(1, 1.5001) == 16  # not 20 for ever
    costs.learn_mixed(1, 16, 1.4996)
    assert (costs.n_prompt_within(1, 1.51) or 0) > 100


def test_slow_steps_of_single_tokens_do_not_keep_prompts_out() -> None:
    costs = learned((8, 8e-3))
    for i in range(40):
        costs.learn_mixed(8, 1, 8e-3 + (0.001, 0.025, 0.033)[i % 3], float(i))
        assert (costs.n_prompt_within(8, 0.02, i) or 0) > 1
    n = costs.n_prompt_within(8, 0.02, 40) or 0
    for i in range(30):
        costs.learn_mixed(8, n, 9e-3 + n * 1e-4, n * 100.0 * i)
        n = costs.n_prompt_within(8, 0.02, 100 * i) or 0
    assert n > 64


def test_steps_behind_a_prompt_in_one_run_tell_what_rows_cost() -> None:
    rig = make_scheduler(3, 64, cost=COST)
    rig.submit(*make_sequences(3, n_prompt=4, max_tokens=8))
    plan = step(rig)
    assert plan is not None
    assert plan.n_steps == 8
    assert rig.scheduler.costs.widths_s == pytest.approx({3: COST(3, 0)})


def test_time_that_other_programs_take_is_no_cost_of_steps() -> None:
    rig = make_scheduler(3, 64, cost=COST)
    rig.submit(*make_sequences(3, n_prompt=1, max_tokens=40))
    for i in range(8):
        rig.backend.interrupt()
        rig.scheduler.begin_step(rig.now)
        plan = rig.scheduler.plan(rig.now)
        assert plan is not None
        result = rig.backend.run(plan.step)
        waited_s = i * result.decode_s
        took_s = result.decode_s + waited_s
        slow = replace(result, decode_s=took_s, first_s=took_s, waited_s=waited_s)
        rig.scheduler.apply(plan, slow, rig.now)
    costs = rig.scheduler.costs
    assert costs.widths_s == pytest.approx({3: COST(3, 0)}, rel=0.01)
    assert costs.slower == 4.0


def test_prompt_alone_tells_the_cost_of_its_tokens() -> None:
    costs = learned((1, 1.0))
    costs.learn_mixed(0, 64, 6.4)
    assert costs.n_prompt_within(1, 2.05) == 10


def test_prompt_of_one_token_says_little_of_what_many_cost() -> None:
    """A pass over the weights takes as long for one token as for ten: an engine's first request may have one."""
    costs = learned((1, 1.0))
    costs.learn_mixed(0, 1, 1.0)
    costs.learn_mixed(0, 2000, 20.0)
    assert 90 <= (costs.n_prompt_within(1, 2.0) or 0) <= 110


@pytest.mark.parametrize("seconds", [0.5, 1.0])
def test_mixed_step_no_longer_than_its_rows_alone_teaches_nothing(seconds: float) -> None:
    costs = learned((2, 1.0), token_s=0.01)
    costs.learn_mixed(2, 50, seconds)
    assert costs.n_prompt_within(2, 1.105) == 10


def test_mixed_step_before_any_decode_is_understood_afterwards() -> None:
    costs = learned()
    costs.learn_mixed(2, 50, 3.0)
    assert costs.n_prompt_within(2, 2.0) is None
    costs.learn_decode(2, 1.0)
    costs.learn_mixed(2, 50, 3.0)
    assert costs.n_prompt_within(2, 2.001) == 25


@given(st.floats(1e-4, 10), st.floats(1e-6, 1), st.floats(1.01, 4), st.integers(1, 16))
def test_budget_keeps_the_step_within_its_time(
    decode_s: float, share: float, factor: float, n_rows: int
) -> None:
    token_s = share * decode_s / n_rows
    costs = learned((n_rows, decode_s), token_s=token_s)
    n_prompt = costs.n_prompt_within(n_rows, factor * decode_s)
    assert n_prompt is not None
    assert n_prompt == 1 or decode_s + n_prompt * token_s <= factor * decode_s * (1 + 1e-6)
    is_bound = n_prompt == 200  # twice the tokens that a step had
    assert is_bound or decode_s + (n_prompt + 1) * token_s > factor * decode_s * (1 - 1e-6)


def test_a_few_noisy_steps_do_not_tell_that_tokens_cost_nothing() -> None:
    costs = learned((1, 0.02), (15, 0.03))
    costs.learn_mixed(0, 60, 0.036)  # the first one was slow
    costs.learn_mixed(0, 110, 0.018)
    assert costs.prompt is not None
    assert costs.prompt.token_s > 1e-4
    assert (costs.n_prompt_within(15, 0.06) or 0) < 200


def test_step_has_at_most_twice_the_prompt_tokens_that_one_had() -> None:
    costs = learned((1, 1.0), token_s=1e-6)
    for n in (200, 400, 800):
        assert costs.n_prompt_within(1, 2.0) == costs.n_prompt_for(1, 0.1) == n
        costs.learn_mixed(1, n, 1 + n * 1e-6)


# ---- the shape of a step ----

COST = StepCost(base_s=1.0, token_s=0.01)
"""Virtual seconds: a decoding step of 8 rows takes 1.08, a prompt of 100 tokens alone 2."""


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 40), st.floats(0.001, 9.0)), max_size=60),
    st.lists(st.booleans(), min_size=60, max_size=60),
)
def test_reading_what_steps_cost_changes_nothing(
    steps: list[tuple[int, int, float]], are_read: list[bool]
) -> None:
    costs, often = StepCosts(), StepCosts()

    def told(of: StepCosts) -> tuple[object, ...]:
        return of.decode_s(2), of.n_prompt_within(2, 0.1), of.seen_s(3), of.decode_s(2), of.prompt

    for (n_rows, n_prompt, seconds), is_read in zip(steps, are_read, strict=False):
        for each in (costs, often):
            if n_prompt:
                each.learn_mixed(n_rows, n_prompt, seconds)
            elif n_rows:
                each.learn_decode(n_rows, seconds)
        if is_read:
            assert told(often) == told(often)
    assert told(costs) == told(often)


def load_followers(
    n_decoding: int, *, is_watched: bool = False, cost: StepCost = COST, **options: Any
) -> Rig:
    """A scheduler with so many rows that decode, all of whose prompts had 64 tokens, and a slot to spare."""
    rig = make_scheduler(n_decoding + 1, 4096, 2048, cost=cost, **options)
    rig.submit(*make_sequences(n_decoding, n_prompt=64, max_tokens=500))
    while any(d.n_output < 2 for d in rig.drivers.values()):
        one_step(rig)
    for driver in rig.drivers.values():
        driver.reply.is_watched = is_watched
    return rig


def one_step(rig: Rig) -> StepPlan:
    rig.backend.interrupt()
    plan = step(rig)
    assert plan is not None
    return plan


def bare_step(rig: Rig) -> StepPlan:
    """One step that need not compute all that the step has room for."""
    rig.backend.interrupt()
    rig.scheduler.begin_step(rig.now)
    plan = rig.scheduler.plan(rig.now)
    assert plan is not None
    rig.scheduler.apply(plan, rig.backend.run(plan.step), rig.now)
    return plan.step


def load(rig: Rig, n_prompt: int, id: str = "long") -> tuple[list[int], list[float]]:
    """Submit a prompt and step until it is loaded; return its chunks and the seconds of the steps."""
    rig.submit(make_request(id, [i % 256 for i in range(n_prompt)], max_tokens=9))
    chunks, seconds = list[int](), list[float]()
    while not chunks or rig.drivers[id].n_output == 0:
        start_s = rig.now
        plan = bare_step(rig)
        seconds.append(rig.now - start_s)
        chunks.append(len(plan.spans[-1].inputs))
        assert [len(c.inputs) for c in plan.spans[:-1]] == [1] * (len(plan.spans) - 1)
    return chunks, seconds


def test_prompt_of_512_in_chunks_of_128_is_ready_after_four_steps() -> None:
    assert load(load_followers(1, prefill_chunk=128), 512)[0] == [128] * 4


@pytest.mark.parametrize("n_decoding", [1, 8])
def test_prefill_budget_is_all_that_joins_rows_that_decode(n_decoding: int) -> None:
    assert load(load_followers(n_decoding, prefill_budget=100), 350)[0] == [100, 100, 100, 50]


def test_prefill_budget_is_shared_by_all_newcomers() -> None:
    rig = make_scheduler(4, 512, 256, prefill_budget=30)
    rig.submit(make_request("runs", (1,), max_tokens=50))
    one_step(rig)
    rig.submit(*make_sequences(3, n_prompt=40, max_tokens=2))
    n_prompt = [sum(len(c.inputs) for c in one_step(rig).spans if c.start < 40) for _ in range(4)]
    assert n_prompt == [1 + 30] * 4


def test_prefill_budget_less_than_a_piece_lets_one_join() -> None:
    rig = make_scheduler(2, 128, 64, prefill_budget=10, cuts=PromptCuts.every(16))
    rig.submit(make_request("a", [1] * 8, max_tokens=9))
    rig.backend.interrupt()
    step(rig)
    rig.submit(make_request("b", [2] * 40, max_tokens=1))
    plan = step(rig)
    assert plan is not None
    assert [len(c.inputs) for c in plan.spans] == [1, 16]


def test_prefill_budget_does_not_hold_up_prompts_where_nobody_decodes() -> None:
    rig = make_scheduler(4, 512, 256, prefill_budget=10)
    rig.submit(*make_sequences(4, n_prompt=40, max_tokens=2))
    assert sum(len(c.inputs) for c in one_step(rig).spans) == 160


def test_prefill_chunk_holds_for_each_prompt_and_with_nobody_decoding() -> None:
    rig = make_scheduler(4, 512, 256, prefill_chunk=30)
    rig.submit(*make_sequences(4, n_prompt=40, max_tokens=2))
    assert [len(c.inputs) for c in one_step(rig).spans] == [30] * 4
    assert [len(c.inputs) for c in one_step(rig).spans] == [10] * 4


def test_nobody_reading_along_leaves_the_whole_step_to_prompts() -> None:
    assert load(load_followers(8), 3000)[0] == [2040, 960]


@pytest.mark.parametrize("n_decoding", [1, 8, 15])
@pytest.mark.parametrize(("n_prompt", "most", "n_most"), [(4000, 2.8, 25), (500, 4.1, 4)])
def test_prompt_makes_no_step_much_longer_than_without_it(
    n_decoding: int, n_prompt: int, most: float, n_most: int
) -> None:
    rig = load_followers(n_decoding, is_watched=True)
    chunks, seconds = load(rig, n_prompt)
    assert max(seconds) <= most * COST(n_decoding + 1, 0)
    assert len(chunks) <= n_most  # two hundred tokens take two seconds


def test_prompt_may_take_a_step_the_time_from_one_delivery_to_the_next() -> None:
    quick = StepCost(base_s=0.001, token_s=0.0001)
    rig = load_followers(8, is_watched=True, cost=quick)
    chunks, seconds = load(rig, 500)
    assert max(seconds) <= 1.05 * SHORT_RUN_S
    assert len(chunks) == 3


@pytest.mark.parametrize(
    ("itl_ms", "most_s"), [(None, SHORT_RUN_S / 2), (1000 * SHORT_RUN_S, SHORT_RUN_S / 4)]
)
def test_step_of_a_prompt_counts_the_time_that_other_programs_take(
    itl_ms: float | None, most_s: float
) -> None:
    """Half of it, in proportion; a target of the user's counts all of it."""
    quick = StepCost(base_s=0.001, token_s=0.0001)
    rig = load_followers(8, is_watched=True, cost=quick, itl_ms=itl_ms)
    for _ in range(99):
        rig.scheduler.costs.learn_waits(4.0, 3.0)
    _, seconds = load(rig, 500)
    assert 0.6 * most_s <= max(seconds) <= 1.05 * most_s


@pytest.mark.parametrize("n_prompt", [500, 3000])
def test_many_prompts_that_nobody_reads_leave_readers_a_tenth_of_a_step(n_prompt: int) -> None:
    rig = make_scheduler(8, 4096, 2048, cost=COST)
    rig.submit(*make_sequences(3, n_prompt=64, max_tokens=500))
    while any(d.n_output < 2 for d in rig.drivers.values()):
        one_step(rig)
    for driver in rig.drivers.values():
        driver.reply.is_watched = True
    late = [make_request(f"late {i}", [i + 1] * n_prompt, max_tokens=9) for i in range(4)]
    rig.submit(*late)
    while any(rig.drivers[each.id].n_output == 0 for each in late):
        start_s = rig.now
        plan = bare_step(rig)
        n_decoding = sum(len(c.inputs) == 1 for c in plan.spans)
        assert rig.now - start_s <= 10.1 * COST(n_decoding, 0)


def test_one_reader_among_many_is_enough_to_spare_it() -> None:
    rig = load_followers(8)
    rig.drivers["3"].reply.is_watched = True
    assert max(load(rig, 2500)[1]) <= 4.1 * COST(9, 0)


def test_reader_of_a_prompt_that_still_loads_holds_up_nobody() -> None:
    rig = load_followers(8)
    rig.submit(make_request("other", [1] * 3000, max_tokens=2))
    rig.drivers["other"].reply.is_watched = True
    assert len(one_step(rig).spans[-1].inputs) == 2040


@pytest.mark.parametrize("options", [{}, {"itl_ms": 1500}, {"prefill_budget": 40}], ids=str)
def test_budgets_that_are_told_are_those_of_the_next_prompt(options: dict[str, Any]) -> None:
    rig = load_followers(8, is_watched=True, **options)
    load(rig, 500)
    rig.drivers["long"].reply.is_watched = True
    while rig.drivers["long"].finish_reason is None:
        one_step(rig)
    for _ in range(20):
        one_step(rig)
    n_told = rig.scheduler.budget.beside_rows()[8]
    rig.submit(make_request("next", [9] * n_told * 3, max_tokens=9))
    rig.drivers["next"].reply.is_watched = True
    assert len(one_step(rig).spans[-1].inputs) == n_told


@pytest.mark.parametrize("options", [{}, {"itl_ms": 1500}], ids=str)
def test_steps_of_a_prompt_among_readers_are_as_few_and_alike(options: dict[str, Any]) -> None:
    rig = load_followers(8, is_watched=True, **options)
    load(rig, 500)
    for _ in range(20):
        one_step(rig)
    for n_over, n_steps in ((0, 1), (1, 2), (7, 2)):
        n_prompt, id = rig.scheduler.budget.beside_rows()[8] + n_over, f"over by {n_over}"
        rig.submit(make_request(id, [9] * n_prompt, max_tokens=9))
        rig.drivers[id].reply.is_watched = True
        chunks = [len(one_step(rig).spans[-1].inputs) for _ in range(n_steps)]
        assert sum(chunks) == n_prompt
        assert max(chunks) - min(chunks) <= 1
        while rig.drivers[id].finish_reason is None:
            one_step(rig)


@pytest.mark.parametrize("is_watched", [True, False])
def test_aim_for_a_step_decides_how_much_of_a_prompt_joins(is_watched: bool) -> None:
    rig = load_followers(8, is_watched=is_watched, itl_ms=1500)
    chunks, seconds = load(rig, 500)
    assert max(seconds) <= 1.5 * 1.05
    assert 20 <= min(chunks[:-1]) <= max(chunks) <= 45


# ---- first tokens first ----


def burst(n_chats: int, lengths: Callable[[int], int], **options: Any) -> tuple[list[float], float]:
    """Chats that come at once and are read as they come; return when each has its first token, and when all end."""
    cost = options.pop("cost", SMALL)
    rig = make_scheduler(n_chats, 2048, 2048, cost=cost, speculate="off", **options)
    for i in range(n_chats):
        rig.submit(make_request(str(i), [i + 1] * lengths(i), max_tokens=64))
        rig.drivers[str(i)].reply.is_watched = True
    while rig.batcher.in_flight:
        bare_step(rig)
    firsts = [d.clock.first_token_s for d in rig.drivers.values()]
    return [s for s in firsts if s is not None], rig.now


def test_chats_of_a_burst_begin_one_after_the_other() -> None:
    firsts, end_s = burst(4, lambda _: 400)
    together, end_together_s = burst(4, lambda _: 400, ttft="any")
    assert sorted(firsts) == firsts
    assert len(set(firsts)) == 4
    assert len(set(together)) == 1
    assert mean(firsts) <= 0.65 * mean(together)
    assert end_s <= end_together_s / 0.98


@pytest.mark.parametrize(("n_chats", "ratio"), [(4, 0.6), (16, 0.8)])
@pytest.mark.parametrize("seed", range(3))
def test_burst_of_many_lengths_begins_sooner_in_the_same_time(
    n_chats: int, seed: int, ratio: float
) -> None:
    lengths = Random(seed).choices(range(20, 800), k=n_chats)
    firsts, end_s = burst(n_chats, lengths.__getitem__)
    together, end_together_s = burst(n_chats, lengths.__getitem__, ttft="any")
    assert mean(firsts) <= ratio * mean(together)
    assert end_s <= end_together_s / 0.98


def test_short_prompts_pass_a_long_one_but_not_for_ever() -> None:
    """One of 3,000 tokens, beside chats of 200 that never stop coming, is passed by about as many tokens."""
    rig = make_scheduler(4, 4096, 2048, cost=SMALL)
    rig.submit(make_request("long", [1] * 3000, max_tokens=2))
    n_short = 0
    while rig.drivers["long"].n_output == 0:
        while len(rig.batcher.in_flight) < 4:
            rig.submit(make_request(f"s{n_short}", [n_short % 200 + 2] * 200, max_tokens=2))
            rig.drivers[f"s{n_short}"].reply.is_watched = True
            n_short += 1
        bare_step(rig)
        rig.batcher.take_ended()
    assert 3 < n_short <= 2 * 3000 / 200


# ---- from the first step on ----

LIMITS: dict[str, tuple[dict[str, Any], float]] = {
    "aim": ({"itl_ms": 1500}, 1.5),
    "reader": ({}, 4 * COST(2, 0)),
    "budget": ({"prefill_budget": 40}, COST(2, 39)),
}


@pytest.mark.parametrize("name", LIMITS)
@pytest.mark.parametrize("n_first", [1, 2, 64])
def test_first_steps_of_an_engine_are_no_longer_than_later_ones(name: str, n_first: int) -> None:
    options, limit_s = LIMITS[name]
    rig = make_scheduler(4, 8192, 2048, cost=COST, **options)
    rig.submit(
        make_request("short", range(n_first), max_tokens=400),
        make_request("long", [7] * 4000, max_tokens=5),
    )
    rig.drivers["short"].reply.is_watched = name == "reader"
    while "long" not in rig.results:
        is_decoding = rig.drivers["short"].n_output > 0
        start_s = rig.now
        bare_step(rig)
        assert not is_decoding or rig.now - start_s <= 1.05 * limit_s
        for driver in rig.batcher.take_ended():
            rig.results[driver.request.id] = result_of(driver)
    assert rig.drivers["short"].finish_reason is None


def test_prompt_waits_one_step_where_nobody_knows_what_decoding_takes() -> None:
    rig = make_scheduler(2, 4096, 1024, cost=COST, itl_ms=1500)
    rig.submit(make_request("short", [3], max_tokens=100), make_request("long", [7] * 2000))
    shapes = [[len(c.inputs) for c in bare_step(rig).spans] for _ in range(3)]
    assert shapes[0] == [1, 1023]
    assert shapes[1] == [1]
    assert shapes[2][0] == 1
    assert 16 <= shapes[2][1] <= 50


@pytest.mark.parametrize("options", [{"itl_ms": 10}, {}])
def test_prompts_that_cost_nothing_are_not_held_up(options: dict[str, Any]) -> None:
    rig = make_scheduler(2, 8192, 2048, cost=StepCost(), **options)
    rig.submit(make_request("short", [3], max_tokens=400))
    rig.drivers["short"].reply.is_watched = True
    bare_step(rig)
    rig.submit(make_request("long", [7] * 4000, max_tokens=5))
    n_steps = 0
    while not rig.drivers["long"].n_output:
        bare_step(rig)
        n_steps += 1
    assert n_steps <= 12


def test_aim_below_what_decoding_takes_still_lets_prompts_in() -> None:
    chunks, seconds = load(load_followers(8, itl_ms=10), 400)
    assert max(seconds) <= 1.6 * COST(8, 0)
    assert len(chunks) <= 12


def test_one_alone_runs_as_many_steps_at_once_as_there_are() -> None:
    rig = make_scheduler(4, 256)
    rig.submit(make_request(max_tokens=64))
    assert [p.n_steps for p in drive(rig) if p.spans] == [64]


def test_one_that_comes_at_forty_percent_of_a_lone_request_is_soon_served() -> None:
    rig = make_scheduler(4, 256, cost=StepCost(1.0, 0.1))
    rig.submit(make_request("a", max_tokens=100))
    while rig.drivers["a"].n_output < 40:
        one_step(rig)
    came_s = rig.now
    rig.submit(make_request("b", (7, 8, 9), max_tokens=100))
    drive(rig, before=lambda rig: rig.backend.interrupt())
    first, second = rig.drivers["a"].clock, rig.drivers["b"].clock
    assert second.first_token_s == pytest.approx(came_s + 1.4)  # one step of 1 + 3 tokens
    assert (second.first_token_s or 0) < (first.finished_s or 0)
    alone_s = 1.3 + 99 * 1.1
    assert (second.finished_s or 0) - came_s < 1.1 * alone_s


def test_second_wave_is_served_as_the_first_was_without_a_rebuild() -> None:
    rig, shapes = make_scheduler(4, 64, 32), []
    for wave in "ab":
        rig.submit(*(make_request(f"{wave}{i}", (i, 5, 6), max_tokens=4) for i in range(6)))
        plans = drive(rig)
        shapes.append([([len(c.inputs) for c in p.spans], p.n_steps, p.clears) for p in plans])
    assert shapes[0] == shapes[1]
    assert rig.backend.n_rebuilt == 0


def test_wave_that_comes_as_the_last_one_ends_joins_without_an_empty_step() -> None:
    rig = make_scheduler(2)
    rig.submit(*make_sequences(2, max_tokens=3))
    while not rig.results:
        step(rig)
    rig.submit(make_request("next", max_tokens=3))
    plan = one_step(rig)
    assert [c.slot for c in plan.spans] == [0]
    assert plan.clears == (0, 1)
    assert rig.drivers["next"].clock.first_token_s == 4.0
