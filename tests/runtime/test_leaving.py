"""Every way of leaving a batch without an event loop: the slots are free before the next plan, and nobody hangs."""

from __future__ import annotations

import gc
from collections import Counter
from contextlib import closing, suppress
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest

from cbatch.backend.fake import FakeBackend
from cbatch.core.batcher import N_ENDED_MAX, MultiRequestBatcher
from cbatch.errors import RequestCancelledError
from cbatch.messages import BatchPrompt
from cbatch.runtime import in_flight
from tests.kinds import Reason, each_kind, engine_on, no_pool, thread_only
from tests.places import ask_held, wait_until
from tests.runtime.backends import (
    GatedBackend,
    all_results,
    check_balance,
    ids_in_flight,
    in_owner,
    in_thread,
    n_commands,
    owner_of,
    streams,
    together,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from cbatch.core.driver import SequenceDriver
    from cbatch.core.plan import StepPlan, StepResult
    from cbatch.engine import Engine
    from cbatch.runtime.batch_response import BatchResponse

pytestmark = each_kind

ENDLESS = {"ignore_eos": True}
LONG = 1_000_000  # a window that no test waits to see filled


def break_off(response: BatchResponse) -> None:
    for _ in response:
        break


def break_off_results(response: BatchResponse) -> None:
    for _ in response.as_completed():
        break


def raise_in_the_body(response: BatchResponse) -> None:
    with suppress(ZeroDivisionError):
        for _ in response:
            raise ZeroDivisionError


def close_the_reader(response: BatchResponse) -> None:
    with closing(iter(response)) as reader:
        next(reader)


def drop_the_reader(response: BatchResponse) -> None:
    reader = iter(response)
    next(reader)
    del reader
    gc.collect()


def cancel_the_batch(response: BatchResponse) -> None:
    next(iter(response))
    response.cancel()


def cancel_from_another_thread(response: BatchResponse) -> None:
    next(iter(response))
    in_thread(response.cancel)()


WAYS: list[Callable[[BatchResponse], None]] = [
    break_off,
    raise_in_the_body,
    close_the_reader,
    drop_the_reader,
    cancel_the_batch,
    cancel_from_another_thread,
]


@pytest.fixture
def engine() -> Iterator[Engine]:
    with engine_on(FakeBackend(2, LONG, 64), options=ENDLESS) as made:
        yield made


@no_pool(Reason.ONE_BACKEND)
@pytest.mark.parametrize("leave", WAYS)
def test_who_leaves_frees_the_slots_for_the_next(
    engine: Engine, leave: Callable[[BatchResponse], None]
) -> None:
    response = engine.run(["a", "b", "c"])
    leave(response)
    [(reason, tokens)] = streams(engine.run(["next"], options={"max_tokens": 3}))
    assert (reason, len(tokens)) == ("length", 3)  # no slot was free while the others ran
    ours, other, queued = all_results(response)
    assert {ours.finish_reason, other.finish_reason, queued.finish_reason} == {"cancelled"}
    assert isinstance(queued.error, RequestCancelledError)
    assert not ids_in_flight(engine)


@thread_only(Reason.BY_HAND)
@pytest.mark.parametrize("leave", WAYS)
def test_who_leaves_an_engine_by_hand_frees_the_slots_for_the_next(
    leave: Callable[[BatchResponse], None],
) -> None:
    engine = engine_on(GatedBackend(2, LONG, 64), options=ENDLESS, threaded=False)
    response = engine.run(["a", "b", "c"])
    leave(response)
    [(reason, _)] = streams(engine.run(["next"], options={"max_tokens": 3}))
    assert reason == "length"
    assert [r.finish_reason for r in all_results(response)] == ["cancelled"] * 3
    engine.close()


def test_results_left_in_their_order_of_completion_free_the_slots(engine: Engine) -> None:
    short = engine.run(["a"], options={"max_tokens": 1})
    all_results(short)
    break_off_results(short)
    response = engine.run(["b", "c"], options={"max_tokens": LONG // 2})
    reader = response.as_completed()
    reader.close()
    [(reason, _)] = streams(engine.run(["next"], options={"max_tokens": 3}))
    assert reason == "length"
    assert [r.finish_reason for r in all_results(response)] == ["cancelled"] * 2


@no_pool(Reason.ONE_BACKEND)
@pytest.mark.parametrize("leave", [lambda r: iter(r).close(), lambda r: iter(r) and gc.collect()])
def test_slots_are_free_before_the_next_plan(leave: Callable[[BatchResponse], None]) -> None:
    backend = GatedBackend(2, LONG, 16, hold_at=3)
    with engine_on(backend, options=ENDLESS) as engine:
        with together(2):
            response = engine.run(["left", "left too", "left in the queue"])
            backend.wait_until_held()
        n_plans = len(backend.plans)  # the one that is held comes next, and no other may hold them
        leave(response)
        wait_until(lambda: n_commands(engine) > 0)
        backend.release()
        assert len(all_results(response)) == 3
        engine.stats()
        assert [len(p.spans) for p in backend.plans[n_plans + 1 :]] in ([], [0])
        assert sum(len(p.binds) for p in backend.plans) == 2


class CountingBackend(FakeBackend):
    """Counts the items of a response that have not ended, before each run."""

    response: BatchResponse | None = None

    def run(self, plan: StepPlan) -> StepResult:
        if self.response is not None:
            self.n_open.append(self.response.n_open)
        return super().run(plan)

    n_open: list[int]


@thread_only(Reason.BY_HAND)
@pytest.mark.parametrize("way", ["cancel", "cancel_all", "leave"])
def test_many_cancelled_end_some_between_two_steps(way: str) -> None:
    backend, n_many = CountingBackend(2, LONG, 16), 3 * N_ENDED_MAX
    backend.n_open = []
    with engine_on(backend, options=ENDLESS) as engine:
        other = iter(engine.submit("other"))
        next(other)
        backend.response = many = engine.run(
            [BatchPrompt(prompt="p", id=f"m{i}") for i in range(n_many)]
        )
        wait_until(lambda: engine.stats().n_running == 2)
        if way == "leave":
            many.leave()
        elif way == "cancel":
            assert many.cancel() == n_many
        else:
            assert engine.cancel_all() == n_many + 1
        if way != "leave":  # their ids are free
            engine.run([BatchPrompt(prompt="p", id=f"m{i}") for i in range(n_many)]).cancel()
        ended = all_results(many)
        other.close()
    assert [r.finish_reason for r in ended] == ["cancelled"] * n_many
    n_ended = [a - b for a, b in pairwise(backend.n_open)]
    assert way == "cancel_all" or 0 < max(n_ended) <= N_ENDED_MAX + 2


@thread_only(Reason.BY_HAND)
@pytest.mark.parametrize("end", ["length", "cancelled", "timeout"])
def test_many_of_one_call_enter_and_leave_some_between_two_steps(
    monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    monkeypatch.setattr(in_flight, "N_ENTERED_MAX", 8)
    monkeypatch.setattr(in_flight, "N_ENDED_MAX", 4)
    backend, n_many, entered = GatedBackend(2, LONG, 16), 50, list[tuple[int, int]]()
    submit = MultiRequestBatcher.submit

    def counted(self: MultiRequestBatcher, drivers: Sequence[SequenceDriver]) -> None:
        entered.append((len(drivers), backend.n_runs))
        submit(self, drivers)

    monkeypatch.setattr(MultiRequestBatcher, "submit", counted)
    with engine_on(backend, options=ENDLESS) as engine:
        other = iter(engine.submit("other"))
        next(other)
        in_owner(engine, lambda: setattr(backend, "hold_at", backend.n_runs))
        backend.wait_until_held()
        seconds = 1e-6 if end == "timeout" else None
        many = engine.run(["p"] * n_many, options={"max_tokens": 1}, max_time_s=seconds)
        if end == "cancelled":
            many.leave()
        backend.release()
        ended = all_results(many)
        other.close()
    reasons = {r.finish_reason if r.error is None else type(r.error).__name__ for r in ended}
    assert len(ended) == n_many
    assert reasons == {
        {"cancelled": "RequestCancelledError", "timeout": "DeadlineError"}.get(end, end)
    }
    assert sum(n for n, _ in entered) == n_many + 1
    assert max(n for n, _ in entered) <= 8
    n_by_run = Counter(n_run for n, n_run in entered for _ in range(n))
    assert max(n_by_run.values()) <= 8 + 4 + 8  # at a command, and at the step after it
    assert end == "length" or sum(len(p.binds) for p in backend.plans) <= 2


@no_pool(Reason.ONE_BACKEND)
def test_many_that_leave_in_one_step_cost_no_step_each() -> None:
    backend, n_clients = GatedBackend(2, LONG, 16), 20
    with engine_on(backend, options=ENDLESS) as engine:
        readers = [iter(engine.submit(f"{i}")) for i in range(n_clients)]
        engine.stats()  # what was sent before it has been read
        in_owner(engine, lambda: setattr(backend, "hold_at", backend.n_runs))
        backend.wait_until_held()
        n_plans = len(backend.plans)
        for reader in readers:
            reader.close()
        wait_until(lambda: n_commands(engine) >= n_clients)
        backend.release()
        [(reason, _)] = streams(engine.run(["next"], options={"max_tokens": 1}))
        assert reason == "length"
        assert len(backend.plans) - n_plans <= 3  # the one that is held, and two for the next


def test_leaving_twice_or_after_the_end_is_harmless(engine: Engine) -> None:
    response = engine.run(["a"], options={"max_tokens": 3})
    reader = iter(response)
    assert sum(len(c.token_ids) for c in reader) == 3
    reader.close()
    again = engine.run(["b"])
    left = iter(again)
    next(left)
    left.close()
    left.close()
    assert list(left) == []
    assert [r.finish_reason for r in (*all_results(response), *all_results(again))] == [
        "length",
        "cancelled",
    ]


@no_pool(Reason.ONE_BACKEND)
def test_leaving_after_close_is_harmless() -> None:
    engine = engine_on(FakeBackend(2, LONG, 64), options=ENDLESS)
    reader = iter(engine.run(["a", "b"]))
    next(reader)
    engine.close()
    reader.close()
    assert not owner_of(engine).is_alive()


@no_pool(Reason.ONE_BACKEND)
@pytest.mark.slow
def test_many_that_vanish_in_threads_of_their_own_leave_nothing(engine: Engine) -> None:
    responses = [engine.run([f"{i}a", f"{i}b"]) for i in range(40)]
    waits = [in_thread(partial(WAYS[i % len(WAYS)], r)) for i, r in enumerate(responses)]
    for wait in waits:
        wait()
    for response in responses:
        assert {r.finish_reason for r in all_results(response)} == {"cancelled"}
    stats = engine.stats()
    assert (stats.n_running, stats.n_waiting, ids_in_flight(engine)) == (0, 0, [])
    check_balance(engine)


@no_pool(Reason.ONE_BACKEND)
def test_everyone_who_waits_for_one_batch_is_told_once() -> None:
    backend = GatedBackend(2, LONG, 16, hold_at=3)
    engine = engine_on(backend, options=ENDLESS)
    response = engine.run(["a", "b", "c"])
    waits: list[Callable[[], Any]] = [in_thread(lambda: all_results(response)) for _ in range(3)]
    chunks = in_thread(lambda: [c.id for c in response if c.finish_reason])
    completed = in_thread(lambda: [r.id for r in response.as_completed()])
    backend.wait_until_held()
    assert ask_held(engine, backend, engine.cancel_all) == 3
    assert [len(wait()) for wait in waits] == [3, 3, 3]
    assert sorted(chunks()) == sorted(completed()) == response.ids
    engine.close()


@thread_only(Reason.OWNER)
def test_cancel_by_the_owner_does_not_wait_for_itself(engine: Engine) -> None:
    response = engine.run(["a", "b", "c"])
    assert in_owner(engine, lambda: engine.cancel("0")) is True
    assert in_owner(engine, engine.cancel_all) == 2
    assert [r.finish_reason for r in all_results(response)] == ["cancelled"] * 3
