"""Who waits, who gets a slot, who leaves, and what a refused request leaves behind: nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cbatch.core import batcher
from cbatch.errors import ConfigError, PromptTooLongError, RequestFailedError
from tests.helpers import Rig, drive, make_request, make_scheduler, make_sequences, step

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cbatch.messages import BatchPrompt


def snapshot(rig: Rig) -> object:
    batcher = rig.batcher
    cells = [[*row] for row in rig.backend.cells]
    return (
        batcher.occupancy().n_waiting,
        [*batcher.in_flight],
        rig.running(),
        [*rig.ledger.n_cells],
        cells,
    )


def test_admission_takes_the_lowest_free_slot_in_order_of_submission() -> None:
    rig = make_scheduler(n_slots=3)
    rig.submit(*make_sequences(5))
    rig.backend.interrupt()
    step(rig)
    assert rig.running() == ["0", "1", "2"]
    assert rig.batcher.occupancy().n_waiting == 2
    rig.cancel("1")
    rig.backend.interrupt()
    step(rig)
    assert rig.running() == ["0", "3", "2"]


@given(
    n_slots=st.integers(1, 4),
    n_batch=st.integers(4, 16),
    n_prompt=st.integers(1, 20),
    cap=st.integers(1, 9),
)
def test_equal_requests_finish_in_order_of_submission(
    n_slots: int, n_batch: int, n_prompt: int, cap: int
) -> None:
    rig = make_scheduler(n_slots, n_batch=n_batch)
    rig.submit(*make_sequences(10, n_prompt, max_tokens=cap))
    drive(rig)
    clocks = [rig.drivers[str(i)].clock for i in range(10)]
    stations = [(c.admitted_s, c.first_token_s, c.finished_s) for c in clocks]
    for times in zip(*stations, strict=True):
        assert [*times] == sorted(t for t in times if t is not None)


@pytest.mark.parametrize("n_prompt", [64, 65, 1000])
def test_prompt_that_does_not_fit_is_refused_alone_and_leaves_nothing(n_prompt: int) -> None:
    rig = make_scheduler(n_slots=2, n_window=64)
    rig.submit(make_request("good", max_tokens=4))
    rig.backend.interrupt()
    step(rig)
    before = snapshot(rig)
    rig.submit(make_request("bad", [0] * n_prompt))
    rig.scheduler.begin_step(rig.now)
    [bad] = rig.batcher.take_ended()
    assert isinstance(bad.error, PromptTooLongError)
    assert (bad.error.n_prompt, bad.error.n_limit) == (n_prompt, 64)
    assert snapshot(rig) == before
    del rig.drivers["bad"]
    drive(rig)
    assert rig.results["good"].finish_reason == "length"


def test_refused_request_gives_its_slot_to_the_next_in_the_same_plan() -> None:
    rig = make_scheduler(n_slots=1, n_window=8)
    rig.submit(make_request("bad", range(9)), make_request("good", (1,), max_tokens=1))
    step(rig)
    assert [*rig.results] == ["bad", "good"]
    assert rig.results["bad"].finish_reason == "error"
    assert len(rig.backend.plans) == 1


@pytest.mark.parametrize("cause", [ConfigError("no"), ValueError("template"), KeyError("role")])
def test_prompt_that_cannot_be_prepared_fails_alone(cause: Exception) -> None:
    def tokenize(prompt: BatchPrompt, _: object) -> Sequence[int]:
        if prompt.prompt == "bad":
            raise cause
        return (1, 2)

    rig = make_scheduler(n_slots=1, tokens_of=tokenize)
    rig.submit(make_request("a", "bad"), make_request("b", "good", max_tokens=2))
    drive(rig)
    error = rig.results["a"].error
    assert error is cause or (isinstance(error, RequestFailedError) and error.__cause__ is cause)
    assert rig.results["b"].finish_reason == "length"


def test_long_queue_is_tokenized_only_when_its_turn_comes() -> None:
    seen: list[str | None] = []

    def tokenize(prompt: BatchPrompt, _: object) -> Sequence[int]:
        seen.append(prompt.prompt)
        return (1,)

    rig = make_scheduler(n_slots=1, tokens_of=tokenize)
    rig.submit(*(make_request(id, id, max_tokens=1) for id in "abc"))
    step(rig)
    assert seen == ["a"]


@given(
    n_many=st.integers(3, 30),
    policy=st.sampled_from(["fcfs", "shortest", "priority"]),
    paused=st.sets(st.integers(0, 29)),
    is_late=st.booleans(),
)
def test_many_cancelled_or_late_end_some_before_each_plan(
    n_many: int, policy: str, paused: set[int], is_late: bool
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batcher, "N_ENDED_MAX", 4)
        rig = make_scheduler(2, share_prefixes=False, policy=policy)
        many = [str(i) for i in range(n_many)]
        rig.submit(make_request("first", max_tokens=30), make_request("last", max_tokens=3))
        rig.submit(*make_sequences(n_many, max_tokens=9, timeout_s=2.0 if is_late else 99))
        step(rig)
        for i in paused:
            rig.batcher.pause(str(i))
        if not is_late:
            assert rig.batcher.cancel_all([*many, many[0], "unknown"], rig.now) == many
            assert rig.batcher.cancel_all(many, rig.now) == []
        rig.submit(make_request("new", max_tokens=3))
        has_run = {id for id in many if rig.drivers[id].has_run}
        while rig.batcher.in_flight:
            n_before = len(rig.results)
            step(rig)
            assert len(rig.results) - n_before <= 4 + 2 * rig.backend.n_slots
    assert [rig.results[id].finish_reason for id in ("first", "last", "new")] == ["length"] * 3
    assert {rig.results[id].finish_reason for id in many} == {"timeout" if is_late else "cancelled"}
    assert is_late or has_run == {id for id in many if rig.drivers[id].has_run}
