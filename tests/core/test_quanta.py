"""Requests that pause whenever they have sampled so many tokens: exactly then, and in parts as in one run."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cbatch.core.driver import Status
from tests.helpers import (
    Rig,
    drive,
    make_request,
    make_scheduler,
    partitioned,
    recurrent,
    shared_pool,
    step,
)
from tests.profiles import examples

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cbatch.core.plan import KvCapabilities
    from cbatch.core.request import Request

MEMORIES = [None, partitioned(192), shared_pool(80, can_copy=True), shared_pool(64, can_save=True)]


def until_paused(rig: Rig) -> None:
    """Step until there is nothing to do, with what was compiled meanwhile."""
    while step(rig) is not None or rig.compiling:
        pass


def parts_of(rig: Rig, request: Request, more: Sequence[int | None] = ()) -> list[int]:
    """Run a request to its end, resumed whenever it pauses, with these numbers; return the tokens of each part."""
    rig.submit(request)
    driver, parts, n_tokens = rig.drivers[request.id], list[int](), [*more]
    while True:
        n_before = driver.n_output
        until_paused(rig)
        parts.append(driver.n_output - n_before)
        if driver.finish_reason is not None:
            return parts
        assert driver.status is Status.PAUSED
        assert rig.batcher.resume(request.id, n_tokens.pop(0) if n_tokens else None)


def tokens_of(rig: Rig, id: str = "a") -> tuple[int, ...]:
    return rig.results[id].token_ids


# ---- how many ----


@pytest.mark.parametrize(
    ("n", "parts"), [(1, [1] * 7), (3, [3, 3, 1]), (6, [6, 1]), (7, [7]), (8, [7])]
)
def test_request_pauses_each_time_it_has_sampled_so_many(n: int, parts: list[int]) -> None:
    rig = make_scheduler()
    request = make_request(max_tokens=7, pause_every=n)
    assert parts_of(rig, request) == parts
    assert tokens_of(rig) == tuple(rig.alone(request, 7))
    assert (rig.stats.n_prompt_tokens, rig.stats.n_recomputed_tokens) == (4, 0)
    assert rig.stats.n_output_tokens == 7


def test_number_of_a_resume_comes_before_the_option() -> None:
    rig = make_scheduler()
    request = make_request(max_tokens=20, pause_every=3)
    assert parts_of(rig, request, [5, None, 1, 2]) == [3, 5, 3, 1, 2, 3, 3]
    assert tokens_of(rig) == tuple(rig.alone(request, 20))


def test_number_of_a_resume_pauses_one_that_has_no_such_option() -> None:
    rig = make_scheduler()
    request = make_request(max_tokens=20)
    rig.submit(request)
    rig.batcher.pause("a")
    assert rig.batcher.resume("a", 6)
    until_paused(rig)
    driver = rig.drivers["a"]
    assert (driver.status, driver.n_output) == (Status.PAUSED, 6)
    assert rig.batcher.resume("a")
    drive(rig)
    assert tokens_of(rig) == tuple(rig.alone(request, 20))


def test_pause_on_demand_begins_the_count_anew() -> None:
    rig = make_scheduler()
    rig.submit(make_request(max_tokens=20, pause_every=5))
    for _ in range(3):
        rig.backend.interrupt()
        step(rig)
    rig.batcher.pause("a")
    rig.batcher.resume("a")
    until_paused(rig)
    assert rig.drivers["a"].n_output == 3 + 5


def test_resume_of_one_that_runs_changes_nothing() -> None:
    rig = make_scheduler()
    rig.submit(make_request(max_tokens=20, pause_every=5))
    rig.backend.interrupt()
    step(rig)
    assert not rig.batcher.resume("a", 9)
    until_paused(rig)
    assert rig.drivers["a"].n_output == 5


def test_others_run_on_while_one_pauses() -> None:
    rig = make_scheduler(3)
    rig.submit(make_request("a", max_tokens=20, pause_every=4))
    rig.submit(other := make_request("b", max_tokens=20, seed=1))
    rig.submit(make_request("c", max_tokens=20, pause_every=7, seed=2))
    until_paused(rig)
    assert {id: d.n_output for id, d in rig.drivers.items()} == {"a": 4, "b": 20, "c": 7}
    assert tokens_of(rig, "b") == tuple(rig.alone(other, 20))
    assert rig.running() == ["a", "c"]


def test_pause_comes_with_the_output_of_its_last_token() -> None:
    rig = make_scheduler()
    rig.submit(make_request(max_tokens=9, pause_every=3))
    given: list[tuple[int, Status]] = []
    while step(rig) is not None:
        n_given = sum(len(chunk.token_ids) for chunk in rig.chunks["a"])
        given.append((n_given, rig.drivers["a"].status))
    assert given[-1] == (3, Status.PAUSED)
    assert all(status is Status.RUNNING for n, status in given if n < 3)


# ---- ends ----


@pytest.mark.parametrize("i_stop", [2, 3])
def test_end_at_the_place_of_a_pause_is_an_end(i_stop: int) -> None:
    rig = make_scheduler()
    stop = rig.alone(make_request(), 9)[i_stop]
    assert parts_of(rig, make_request(pause_every=4, stop_token_ids=[stop])) == [i_stop + 1]
    assert rig.results["a"].finish_reason == "stop"


def test_cancel_of_one_that_has_paused_keeps_its_tokens() -> None:
    rig = make_scheduler()
    rig.submit(request := make_request(max_tokens=9, pause_every=4))
    until_paused(rig)
    assert rig.cancel("a")
    assert not rig.batcher.resume("a", 4)
    drive(rig)
    assert (rig.results["a"].finish_reason, rig.results["a"].error) == ("cancelled", None)
    assert tokens_of(rig) == tuple(rig.alone(request, 4))


def test_prompt_without_an_answer_does_not_pause() -> None:
    rig = make_scheduler()
    assert parts_of(rig, make_request(prefill_only=True, pause_every=1)) == [0]


def test_full_window_moves_on_behind_a_pause() -> None:
    rig = make_scheduler(1, 16, memory=moving(16))
    request = make_request(max_tokens=60, n_discard=5, pause_every=3)
    assert parts_of(rig, request) == [3] * 20
    assert tokens_of(rig) == tuple(rig.alone(request, 60))
    assert rig.results["a"].usage.context_shifts > 0


def moving(n_cells: int) -> KvCapabilities:
    """Memory whose cells can be moved."""
    return replace(partitioned(n_cells), can_shift=True)


# ---- grammars ----


@pytest.mark.parametrize("n", [1, 3, 7])
@pytest.mark.parametrize("regex", ["1", "1:5", "0:4:6"])
def test_tokens_that_a_grammar_forces_are_counted_and_held(n: int, regex: str) -> None:
    rig, whole = make_scheduler(), make_scheduler()
    whole.submit(make_request(max_tokens=40, regex=regex))
    drive(whole)
    parts = parts_of(rig, make_request(max_tokens=40, regex=regex, pause_every=n))
    assert parts[:-1] == [n] * (len(parts) - 1)
    assert tokens_of(rig) == whole.results["a"].token_ids
    assert rig.results["a"].finish_reason == whole.results["a"].finish_reason
    assert rig.stats.n_output_tokens == whole.stats.n_output_tokens
    assert rig.stats.n_recomputed_tokens == 0


@pytest.mark.parametrize("can_save", [True, False])
def test_held_tokens_come_where_the_slot_was_lost_meanwhile(can_save: bool) -> None:
    rig = make_scheduler(1, memory=partitioned(64) if can_save else None)
    request = make_request(max_tokens=40, regex="0", pause_every=1)
    rig.submit(request)
    n_parked = n_held = 0
    while rig.drivers["a"].finish_reason is None:
        until_paused(rig)
        if rig.drivers["a"].finish_reason is None:
            n_held += rig.drivers["a"].held is not None
            rig.submit(make_request(f"o{n_parked}", max_tokens=1))
            until_paused(rig)
            n_parked += 1
            assert rig.drivers["a"].slot is None
            rig.batcher.resume("a")
    assert n_held
    assert tokens_of(rig) == tuple(rig.alone(request, 40))


# ---- in company ----


ASKED = st.tuples(
    st.none() | st.integers(1, 9),  # pause_every
    st.integers(1, 30),  # max_tokens
    st.integers(1, 30),  # tokens of the prompt
    st.sampled_from([None, None, "0", "1", "1:5"]),
    st.none() | st.integers(0, 2),  # slot
)


@given(
    asked=st.lists(ASKED, min_size=2, max_size=8),
    memory=st.sampled_from([*MEMORIES, recurrent(3), recurrent(3, can_save=True)]),
    options=st.sampled_from(
        [{"policy": "fcfs"}, {"policy": "shortest"}]
        + [{"policy": "round_robin", "quantum": q} for q in (1, 3, 5)]
    ),
    codes=st.lists(st.sampled_from([0, 0, 0, 2, -2]), max_size=12),
    waits=st.lists(st.integers(0, 3), max_size=9),
    more=st.lists(st.none() | st.integers(1, 12), max_size=30),
    is_sharing=st.booleans(),
)
@settings(max_examples=examples(200), deadline=None)
def test_parts_give_what_one_run_gives_in_any_company(
    asked: list[tuple[int | None, int, int, str | None, int | None]],
    memory: KvCapabilities | None,
    options: dict[str, Any],
    codes: list[int],
    waits: list[int],
    more: list[int | None],
    is_sharing: bool,
) -> None:
    todo = iter(codes)
    rig = make_scheduler(
        3,
        64,
        memory=memory,
        code=lambda _: next(todo, 0),
        share_prefixes=is_sharing,
        **options,
    )
    requests = [
        make_request(
            str(i), range(n), pause_every=p, max_tokens=cap, regex=regex, slot=slot, seed=i
        )
        for i, (p, cap, n, regex, slot) in enumerate(asked)
    ]
    rig.submit(*requests)
    due = {r.id: r.options.pause_every or 99 for r in requests}
    allowed = {**due}
    while rig.batcher.in_flight:
        for _ in range(waits.pop(0) if waits else 0):
            step(rig)
        until_paused(rig)
        for id, driver in rig.batcher.in_flight.items():
            assert (driver.status, driver.n_output) == (Status.PAUSED, allowed[id])
            n_more = more.pop(0) if more else None
            allowed[id] += n_more or due[id]
            assert rig.batcher.resume(id, n_more)
    for request in requests:
        if rig.results[request.id].error is None:
            n_output = request.options.max_tokens or 0
            assert tokens_of(rig, request.id) == tuple(rig.alone(request, n_output))
