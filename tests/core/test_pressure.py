"""The engine when there is too much to do: a full queue, time that runs out, pauses and failures."""

from __future__ import annotations

import gc
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread
import pytest

from cbatch.backend.fake import FakeBackend, Faults
from cbatch.core.scheduler import N_FAILURES_MAX
from cbatch.engine import Engine
from cbatch.engine_options import ScheduleOptions
from cbatch.errors import (
    ConfigError,
    DeadlineError,
    DecodeError,
    DuplicateIdError,
    EngineClosedError,
    QueueFullError,
    RequestCancelledError,
)
from cbatch.messages import BatchPrompt
from cbatch.response import BatchError
from cbatch.runtime.batch_response import BatchResponse
from cbatch.runtime.step_record import StepRecord
from tests.helpers import A_SECOND_A_STEP, partitioned
from tests.kinds import Reason, engine_on, no_pool, thread_only
from tests.places import wait_until
from tests.runtime.backends import (
    PATIENCE_S,
    GatedBackend,
    all_results,
    backend_of,
    batcher_of,
    ids_in_flight,
    ids_outside,
    in_thread,
    is_room_awaited,
    is_threaded,
    loop_of,
    n_commands,
    stats_of,
    streams,
)

if TYPE_CHECKING:
    from cbatch.core.plan import StepPlan, StepResult

pytestmark = no_pool(Reason.ONE_BACKEND)

GREEDY = {"temperature": 0, "ignore_eos": True, "seed": 1}
ENDLESS = 10**6
"""A window that nobody fills."""
MakeEngine = Callable[..., Engine]


class SteppedBackend(FakeBackend):
    """Does one step a run, each only when it is let."""

    def __init__(self, *sizes: int, **given: Any) -> None:
        super().__init__(*sizes, **given)
        self._arrived, self._permits = threading.Semaphore(0), threading.Semaphore(0)

    def run(self, plan: StepPlan) -> StepResult:
        if plan.spans:
            self._arrived.release()
            assert self._permits.acquire(timeout=PATIENCE_S)
        self.interrupt()
        return super().run(plan)

    def let(self, n_runs: int = 1) -> None:
        self._permits.release(n_runs)

    def wait_for_run(self) -> None:
        """Until the next run begins."""
        assert self._arrived.acquire(timeout=PATIENCE_S)


@pytest.fixture(params=[True, False], ids=["threaded", "by hand"])
def make(request: pytest.FixtureRequest) -> Iterator[MakeEngine]:
    """Return a factory of engines on one slot, one step a run."""
    made: list[Engine] = []

    def make_engine(parallel: int = 1, n_window: int = 64, **schedule: Any) -> Engine:
        backend = GatedBackend(parallel, n_window, 64, cost=A_SECOND_A_STEP)
        options = ScheduleOptions(**schedule)
        made.append(engine_on(backend, options=GREEDY, schedule=options, threaded=request.param))
        return made[-1]

    yield make_engine
    for engine in made:
        engine.close()


@pytest.fixture
def by_hand() -> MakeEngine:
    """Return a factory of engines on one slot that work by hand, one step at a time."""

    def make_engine(parallel: int = 1, **schedule: Any) -> Engine:
        backend = GatedBackend(parallel, 64, 64, cost=A_SECOND_A_STEP)
        options = ScheduleOptions(**schedule)
        return engine_on(backend, options=GREEDY, schedule=options, threaded=False)

    return make_engine


@pytest.fixture
def virtual(monkeypatch: pytest.MonkeyPatch) -> MakeEngine:
    """Return a factory of engines by hand whose clock is the backend's: each step takes a second."""

    def make_engine(parallel: int = 1, **schedule: Any) -> Engine:
        backend = GatedBackend(parallel, 64, 64, cost=A_SECOND_A_STEP)
        monkeypatch.setattr("time.perf_counter", lambda: backend.now_s)
        options = ScheduleOptions(**schedule)
        return engine_on(backend, options=GREEDY, schedule=options, threaded=False)

    return make_engine


def prompts(*ids: str, **options: Any) -> list[BatchPrompt]:
    return [BatchPrompt(tokens=[5, 6, ord(id[0]), 8], id=id, options=options) for id in ids]


def population(engine: Engine) -> tuple[int, int, list[str]]:
    """Who waits, who runs, and what is in flight; needs no turn of the engine."""
    batcher = batcher_of(engine)
    return batcher.occupancy().n_waiting, batcher.occupancy().n_running, [*batcher.in_flight]


def steps(engine: Engine, n: int) -> None:
    for _ in range(n):
        engine.step()


def ends(response: BatchResponse) -> list[tuple[str, int]]:
    return [(r.finish_reason, len(r.token_ids)) for r in all_results(response)]


# ---- a full queue that rejects ----


@thread_only(Reason.BY_HAND)
def test_free_slots_count_as_room(by_hand: MakeEngine) -> None:
    engine = by_hand(parallel=3, max_queue=2, when_full="reject")
    with pytest.raises(QueueFullError):
        engine.run(prompts(*"abcdef"))
    assert ends(engine.run(prompts(*"vwxyz", max_tokens=2))) == [("length", 2)] * 5


@thread_only(Reason.BY_HAND)
def test_rejected_batch_leaves_nothing(by_hand: MakeEngine) -> None:
    engine = by_hand(max_queue=2, when_full="reject")
    first = engine.run(prompts("a", max_tokens=3))
    engine.step()
    before, n_submitted = population(engine), engine.stats().n_submitted
    with pytest.raises(QueueFullError, match="max_queue is 2") as caught:
        engine.run(prompts("b", "c", "d"))
    assert (caught.value.n_waiting, caught.value.n_limit) == (0, 2)
    engine.step()
    assert population(engine) == before
    assert engine.stats().n_submitted == n_submitted
    assert ids_in_flight(engine) == ["a"]
    assert ends(first) == [("length", 3)]


@thread_only(Reason.BY_HAND)
def test_prompts_of_a_rejected_batch_are_not_tokenized(monkeypatch: pytest.MonkeyPatch) -> None:
    backend, seen = SteppedBackend(1, 64, 64), list[str]()
    tokenize = backend.vocab.tokenize

    def noted(text: str) -> list[int]:
        seen.append(text)
        return tokenize(text)

    monkeypatch.setattr(backend.vocab, "tokenize", noted)
    schedule = ScheduleOptions(max_queue=1, when_full="reject")
    engine = engine_on(backend, options=GREEDY, schedule=schedule)
    engine.run(["a", "b"])
    backend.wait_for_run()
    with pytest.raises(QueueFullError):
        engine.run(["x", "y"])
    backend.let(1000)
    engine.close()
    assert {"a"} <= {*seen} <= {"a", "b"}


@thread_only(Reason.BY_HAND)
@pytest.mark.parametrize("is_threaded", [True, False])
def test_ids_of_a_rejected_batch_are_free_at_once(is_threaded: bool) -> None:
    backend = SteppedBackend(1, 64, 64)
    schedule = ScheduleOptions(max_queue=1, when_full="reject")
    engine = engine_on(backend, options=GREEDY, schedule=schedule, threaded=is_threaded)
    engine.run(prompts("a", "b"))
    if is_threaded:
        backend.wait_for_run()
        backend.let()  # then the owner looks for commands, and waits in its next run
    for _ in range(2):
        with pytest.raises(QueueFullError):
            engine.run(prompts("x"))
        backend.let()
    backend.let(1000)
    engine.close()


@thread_only(Reason.BY_HAND)
def test_paused_ones_slot_counts_as_room(by_hand: MakeEngine) -> None:
    engine = by_hand(max_queue=0, when_full="reject")
    engine.run(prompts("a"))
    engine.step()
    assert engine.pause("a")
    assert ends(engine.run(prompts("b", max_tokens=2))) == [("length", 2)]


# ---- a full queue that lets wait ----


@pytest.mark.parametrize("when_full", ["wait", "reject"])
def test_generator_waits_for_room_whatever_a_full_queue_does(
    make: MakeEngine, when_full: str
) -> None:
    engine, records = make(max_queue=1, when_full=when_full), list[StepRecord]()
    engine.record_steps(records.append)
    response = engine.run(iter(prompts(*"abcdefghij", max_tokens=3)))
    assert ends(response) == [("length", 3)] * 10
    assert max(r.n_waiting for r in records) <= 1


@pytest.mark.parametrize("max_queue", [0, 3])
def test_run_returns_when_the_last_one_is_in_and_never_more_wait(
    make: MakeEngine, max_queue: int
) -> None:
    engine, records = make(max_queue=max_queue), list[StepRecord]()
    engine.record_steps(records.append)
    response = engine.run(prompts(*"abcdefghij", max_tokens=3))
    n_done = engine.stats().n_finished.get("length", 0)
    assert 10 - 1 - max_queue <= n_done
    assert ends(response) == [("length", 3)] * 10
    assert max(r.n_waiting for r in records) <= max_queue
    assert response.ids == [*"abcdefghij"]


def test_waiting_for_room_changes_no_stream_and_no_order(make: MakeEngine) -> None:
    items = prompts(*"abcdefgh", max_tokens=4)
    narrow, wide = make(max_queue=1, when_full="wait"), make()
    order = [r.id for r in narrow.run(items).as_completed()]
    assert order == [*"abcdefgh"]
    assert streams(narrow.run(items)) == streams(wide.run(items))


def test_two_threads_that_wait_for_room_both_get_in() -> None:
    backend = GatedBackend(1, 64, 64)
    with engine_on(backend, options=GREEDY, schedule=ScheduleOptions(max_queue=1)) as engine:
        calls = [
            in_thread(partial(engine.run, prompts(*ids, max_tokens=3)))
            for ids in ("abcdef", "ghijkl")
        ]
        for wait in calls:
            assert ends(wait()) == [("length", 3)] * 6


@thread_only(Reason.BY_HAND)
def test_duplicate_id_is_refused_before_anybody_waits(by_hand: MakeEngine) -> None:
    engine = by_hand(max_queue=0)
    engine.run(prompts("a"))
    engine.step()
    with pytest.raises(Exception, match="give each request its own id"):
        engine.run(prompts("b", "a"))
    assert population(engine) == (0, 1, ["a"])


def test_cancel_of_one_that_waits_makes_room_for_another(make: MakeEngine) -> None:
    engine = make(n_window=ENDLESS, max_queue=1)
    engine.run(prompts("a", "b"))
    if not is_threaded(engine):
        engine.cancel("b")
    run = in_thread(lambda: engine.run(prompts("c", max_tokens=1)))
    if is_threaded(engine):
        wait_until(lambda: is_room_awaited(engine))
        engine.cancel("b")
    response = run()
    engine.cancel("a")
    assert ends(response) == [("length", 1)]


Crowd = Callable[..., tuple[Engine, Callable[[], BatchResponse]]]


@pytest.fixture
def crowd(make: MakeEngine) -> Crowd:
    """Return what makes an engine where `a` runs for ever and `b` and `c` wait for room, and waits for these."""

    def make_crowd(**options: Any) -> tuple[Engine, Callable[[], BatchResponse]]:
        engine = make(n_window=ENDLESS, max_queue=0)
        engine.run(prompts("a"))
        newcomers = prompts("b", "c", **{"max_tokens": 2, **options})
        wait = in_thread(lambda: engine.run(newcomers))
        wait_until(lambda: len(ids_outside(engine)) >= 2)
        return engine, wait

    return make_crowd


def test_one_that_waits_for_room_can_be_cancelled(crowd: Crowd) -> None:
    engine, wait = crowd()
    assert engine.cancel("b") is True
    assert engine.cancel("b") is False
    assert engine.resume("c") is False
    engine.cancel("a")
    response = wait()
    assert ends(response) == [("cancelled", 0), ("length", 2)]
    assert isinstance(all_results(response)[0].error, RequestCancelledError)
    assert engine.stats().n_finished == {"cancelled": 2, "length": 1}


def test_id_of_one_that_was_cancelled_while_it_waited_for_room_is_free(crowd: Crowd) -> None:
    engine, wait = crowd()
    with pytest.raises(DuplicateIdError):
        engine.run(prompts("b"))
    assert engine.cancel("b")
    again = in_thread(lambda: engine.run(prompts("b", max_tokens=3)))
    wait_until(lambda: "b" in ids_outside(engine))
    engine.cancel("a")
    assert ends(wait()) == [("cancelled", 0), ("length", 2)]
    assert ends(again()) == [("length", 3)]


def test_all_that_wait_for_room_are_cancelled_with_all_others(crowd: Crowd) -> None:
    engine, wait = crowd()
    assert engine.cancel_all() == 3
    assert ends(wait()) == [("cancelled", 0)] * 2
    assert (ids_in_flight(engine), ids_outside(engine), population(engine)) == ([], [], (0, 0, []))


def test_one_that_waits_for_room_can_be_paused_and_others_pass_it(crowd: Crowd) -> None:
    engine, wait = crowd()
    assert engine.pause("b") is True
    assert engine.pause("b") is False
    engine.cancel("a")
    response = wait()
    reader = response.as_completed()
    assert next(reader).id == "c"
    assert engine.stats().n_held == 1
    assert engine.resume("b") is True
    assert [(r.id, r.finish_reason) for r in reader] == [("b", "length")]


@pytest.mark.parametrize("way", [BatchResponse.cancel, BatchResponse.wind_down])
def test_generators_prompt_that_waits_for_room_ends_with_its_batch(
    way: Callable[[BatchResponse], object],
) -> None:
    schedule = ScheduleOptions(max_queue=0)
    with engine_on(GatedBackend(1, ENDLESS, 64), options=GREEDY, schedule=schedule) as engine:
        engine.run(prompts("a"))
        response = engine.run(iter(prompts("b", "c")))
        wait_until(lambda: "b" in ids_outside(engine))
        way(response)
        assert ends(response) == [("cancelled", 0)]


def test_winding_down_while_a_prompt_waits_for_room_spares_what_runs() -> None:
    schedule, others = ScheduleOptions(max_queue=0), threading.enumerate()
    with engine_on(GatedBackend(1, ENDLESS, 64), options=GREEDY, schedule=schedule) as engine:
        response = engine.run(iter(prompts("a", "b", "c")))
        wait_until(lambda: "b" in ids_outside(engine) and population(engine)[1] == 1)
        response.wind_down()
        own = [t for t in threading.enumerate() if t.name == "cbatch-feed" and t not in others]
        wait_until(lambda: not any(t.is_alive() for t in own))
        assert engine.stats().n_running == 1
        response.cancel()
        assert [r.error is None for r in all_results(response)] == [True, False]


def test_close_while_somebody_waits_for_room_tells_it_and_leaves_nobody() -> None:
    backend = GatedBackend(1, ENDLESS, 64)
    engine = engine_on(backend, options=GREEDY, schedule=ScheduleOptions(max_queue=1))
    first = engine.run(prompts("a", "b"))
    waits = in_thread(lambda: engine.run(prompts("c", "d")))
    wait_until(lambda: is_room_awaited(engine))
    engine.close()
    with pytest.raises(EngineClosedError):
        waits()
    assert [r.finish_reason for r in all_results(first)] == ["cancelled"] * 2
    assert (ids_in_flight(engine), ids_outside(engine), population(engine)) == ([], [], (0, 0, []))


@thread_only(Reason.DEATH)
def test_failure_while_somebody_waits_for_room_tells_it() -> None:
    backend = GatedBackend(1, ENDLESS, 64)
    engine = engine_on(backend, options=GREEDY, schedule=ScheduleOptions(max_queue=1))
    first = engine.run(prompts("a", "b"))
    waits = in_thread(lambda: engine.run(prompts("c", "d")))
    wait_until(lambda: is_room_awaited(engine))
    backend.run = None  # type: ignore[assignment, method-assign]
    with pytest.raises(EngineClosedError) as caught:
        waits()
    assert isinstance(caught.value.__cause__, TypeError)
    assert [r.finish_reason for r in all_results(first)] == ["error"] * 2
    engine.close()


def test_close_while_half_a_batch_waits_for_room_disturbs_no_run() -> None:
    backend = GatedBackend(2, ENDLESS, 64)
    closing, told = threading.Event(), threading.Event()
    engine = engine_on(backend, options=GREEDY, schedule=ScheduleOptions(max_queue=0))
    run = backend.run

    def lingering(plan: StepPlan) -> StepResult:
        if closing.is_set():
            told.wait(0.5)
        return run(plan)

    def wait() -> None:
        try:
            engine.run(prompts("b", "c"))  # b gets the other slot, c waits for room
        finally:
            told.set()

    backend.run = lingering  # type: ignore[method-assign]
    other = engine.run(prompts("a"))
    wait_until(lambda: engine.stats().n_running)
    waiting = in_thread(wait)
    wait_until(lambda: is_room_awaited(engine))
    closing.set()
    engine.close()
    with pytest.raises(EngineClosedError):
        waiting()
    assert [(r.finish_reason, r.error) for r in all_results(other)] == [("cancelled", None)]


def test_run_in_an_event_loop_returns_at_once_and_its_items_wait_for_room() -> None:
    backend = GatedBackend(1, ENDLESS, 64)
    with engine_on(backend, options=GREEDY, schedule=ScheduleOptions(max_queue=1)) as engine:

        async def submit() -> None:
            first = engine.run(prompts("a"))
            late = [engine.run(prompts(*names, max_tokens=4)) for names in ("b", "cde", "f")]
            assert [r.ids for r in late] == [["b"], ["c", "d", "e"], ["f"]]
            await anyio.to_thread.run_sync(wait_until, lambda: ids_outside(engine) == [*"cdef"])
            await anyio.to_thread.run_sync(first.cancel)
            results = [result for response in late for result in await response]
            assert [r.id for r in results] == [*"bcdef"]
            times = [r.timings.queue_s for r in results[1:4]]
            assert times == sorted(times)  # first come, first served

        anyio.run(submit)
        assert (ids_in_flight(engine), ids_outside(engine)) == ([], [])


@pytest.mark.parametrize("end", ["cancel", "batch", "close", "time"])
def test_items_of_an_event_loop_that_wait_for_room_can_end(end: str) -> None:
    schedule = ScheduleOptions(max_queue=0)
    with engine_on(GatedBackend(1, ENDLESS, 64), options=GREEDY, schedule=schedule) as engine:

        async def submit() -> None:
            first = engine.run(prompts("a"))
            limit = {"timeout_s": 0.05} if end == "time" else {}
            late = engine.run(prompts("b", "c", **limit))
            if end != "time":
                await anyio.to_thread.run_sync(wait_until, lambda: len(ids_outside(engine)) == 2)
            if end == "cancel":
                assert await anyio.to_thread.run_sync(engine.cancel, "b")
                assert await anyio.to_thread.run_sync(engine.cancel, "c")
            elif end == "batch":
                assert await anyio.to_thread.run_sync(late.cancel) == 2
            elif end == "close":
                await anyio.to_thread.run_sync(engine.close)
            with pytest.raises(BatchError) as caught:
                await late
            kinds = {type(r.error) for r in caught.value.results}
            assert kinds == {DeadlineError if end == "time" else RequestCancelledError}
            await anyio.to_thread.run_sync(first.cancel) if end != "close" else None

        anyio.run(submit)


def test_deadlines_of_items_that_wait_for_room_need_one_timer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    schedule = ScheduleOptions(max_queue=0)
    with engine_on(GatedBackend(2, ENDLESS, 64), options=GREEDY, schedule=schedule) as engine:
        loop, timers = loop_of(engine), list[float]()
        monkeypatch.setattr(loop, "call_at", lambda when_s, _: timers.append(when_s))

        async def submit() -> None:
            engine.run(prompts("a"))
            late = [engine.run(prompts(str(i), timeout_s=1e5 + i)) for i in range(20)]
            await anyio.to_thread.run_sync(wait_until, lambda: len(ids_outside(engine)) == 19)
            await anyio.to_thread.run_sync(engine.cancel_all)
            for response in late:
                await response.gather(return_errors=True)

        anyio.run(submit)
        assert len(timers) == 1


@thread_only(Reason.BY_HAND)
def test_engine_without_a_thread_lets_items_of_an_event_loop_wait() -> None:
    engine = Engine(
        FakeBackend(1, 64, 64),
        options=GREEDY,
        schedule=ScheduleOptions(max_queue=0),
        threaded=False,
    )

    async def submit() -> list[str]:
        responses = [engine.run(prompts(name, max_tokens=2)) for name in "abc"]
        return [r.id for response in responses for r in await response]

    with engine:
        assert anyio.run(submit) == ["a", "b", "c"]


# ---- time ----


@thread_only(Reason.BY_HAND)
def test_time_of_a_request_ends_it_with_its_text_or_with_an_error(virtual: MakeEngine) -> None:
    engine = virtual()
    response = engine.run(prompts("a", "b", max_tokens=9, timeout_s=3.0))
    assert ends(response) == [("timeout", 3), ("timeout", 0)]
    ran, queued = response.results(return_errors=True)
    assert ran.error is None
    assert len(ran.text) > 0
    assert isinstance(queued.error, DeadlineError)
    assert queued.error.waited_s == 3.0


@thread_only(Reason.BY_HAND)
def test_time_of_a_run_ends_what_is_left_of_it_and_nothing_else(virtual: MakeEngine) -> None:
    engine = virtual()
    timed = engine.run(prompts(*"abcd", max_tokens=4), max_time_s=6.0)
    other = engine.run(prompts("z", max_tokens=4))
    assert ends(timed) == [("length", 4), ("timeout", 2), ("timeout", 0), ("timeout", 0)]
    assert ends(other) == [("length", 4)]


@thread_only(Reason.BY_HAND)
@pytest.mark.parametrize(("timeout_s", "max_time_s"), [(2.0, 5.0), (5.0, 2.0)])
def test_sooner_of_two_times_counts(
    virtual: MakeEngine, timeout_s: float, max_time_s: float
) -> None:
    response = virtual().run(prompts("a", timeout_s=timeout_s), max_time_s=max_time_s)
    assert ends(response) == [("timeout", 2)]


def test_no_time_at_all_ends_everything_before_it_runs(make: MakeEngine) -> None:
    engine = make()
    response = engine.run(prompts(*"abc"), max_time_s=0.0)
    assert ends(response) == [("timeout", 0)] * 3
    assert engine.stats().n_steps == 0


@thread_only(Reason.OWNER)
def test_time_of_a_run_ends_the_reading_of_a_generator_that_never_ends(virtual: MakeEngine) -> None:
    engine, is_closed = virtual(), threading.Event()

    def endless() -> Iterator[str]:
        try:
            yield from map(str, count())
        finally:
            is_closed.set()

    response = engine.run(endless(), options={"max_tokens": 4}, max_time_s=10.0)
    found = ends(response)
    assert found[:3] == [("length", 4), ("length", 4), ("timeout", 2)]
    assert set(found[3:]) <= {("timeout", 0)}
    assert not ids_in_flight(engine)
    gc.collect()
    assert is_closed.is_set()


def test_time_of_a_run_ends_a_generator_that_is_read_in_a_thread() -> None:
    with engine_on(GatedBackend(1, 64, 64), options=GREEDY) as engine:
        response = engine.run(map(str, count()), options={"max_tokens": 4}, max_time_s=0.05)
        assert {reason for reason, _ in ends(response)} <= {"length", "timeout"}
        assert not ids_in_flight(engine)


@thread_only(Reason.BY_HAND)
def test_time_of_a_run_counts_while_it_waits_for_room(virtual: MakeEngine) -> None:
    engine = virtual(max_queue=1)
    engine.run(prompts("a", "b", max_tokens=40))
    response = engine.run(prompts("c", max_tokens=2), max_time_s=3.0)
    assert backend_of(engine, FakeBackend).now_s <= 5.0
    assert ends(response) == [("timeout", 0)]


@pytest.mark.parametrize("max_time_s", [-1.0, float("nan"), "soon"])
def test_wrong_time_of_a_run_is_refused_and_nothing_is_queued(
    make: MakeEngine, max_time_s: Any
) -> None:
    engine = make()
    with pytest.raises(ConfigError, match="max_time_s"):
        engine.run(prompts("a"), max_time_s=max_time_s)
    assert not ids_in_flight(engine)


# ---- pauses, and commands that come too late ----


def test_pause_and_resume_change_no_token(make: MakeEngine) -> None:
    engine, items = make(parallel=2), prompts("a", "b", max_tokens=30)
    expected = streams(engine.run(items))
    response = engine.run(items)
    is_paused = engine.pause("a")
    assert engine.resume("a") is is_paused
    assert streams(response) == expected
    assert [engine.pause("a"), engine.resume("a"), engine.pause("nobody")] == [False] * 3


@thread_only(Reason.BY_HAND)
def test_paused_one_gives_nothing_until_it_is_resumed(by_hand: MakeEngine) -> None:
    engine = by_hand(parallel=2)
    response = engine.run(prompts("a", "b", max_tokens=9))
    steps(engine, 3)
    assert [engine.pause("a"), engine.pause("a")] == [True, False]
    steps(engine, 20)
    stats = engine.stats()
    assert (stats.n_paused, stats.n_running, stats.n_output_tokens) == (1, 0, 3 + 9)
    assert engine.step() is False
    assert engine.resume("a")
    assert ends(response) == [("length", 9)] * 2
    assert engine.stats().n_recomputed_tokens == 0


@thread_only(Reason.BY_HAND)
def test_paused_one_can_be_cancelled_and_closed(by_hand: MakeEngine) -> None:
    engine = by_hand(parallel=2)
    response = engine.run(prompts("a", "b"))
    steps(engine, 2)
    assert engine.pause("a")
    assert engine.pause("b")
    assert engine.cancel("a")
    engine.close()
    assert ends(response) == [("cancelled", 2)] * 2


# ---- all is lost ----


@thread_only(Reason.DEATH)
@pytest.mark.parametrize("is_threaded", [True, False])
def test_computation_that_always_fails_ends_the_engine_and_tells_all_once(
    is_threaded: bool,
) -> None:
    backend = GatedBackend(2, 64, 64, hold_at=0, faults=Faults(code=lambda _: -3))
    engine = engine_on(backend, options=GREEDY, threaded=is_threaded)
    responses = [engine.run(prompts(*(f"{c}{i}" for i in range(15)))) for c in "ab"]
    backend.release()  # else it may have failed before all are in
    told = Counter(c.id for r in responses for c in r if c.finish_reason is not None)
    assert set(told.values()) == {1}
    assert len(told) == 30
    errors = [r.error for response in responses for r in all_results(response)]
    causes = [e.__cause__ for e in errors if isinstance(e, EngineClosedError)]
    assert len(causes) >= 30 - N_FAILURES_MAX
    assert {type(c) for c in causes} == {DecodeError}
    with pytest.raises(EngineClosedError) as caught:
        engine.run(prompts("late"))
    assert isinstance(caught.value.__cause__, DecodeError)
    engine.close()


def test_engine_goes_on_when_failures_pass(make: MakeEngine) -> None:
    codes = iter([-3] * N_FAILURES_MAX)
    backend = FakeBackend(2, 64, 64, faults=Faults(code=lambda _: next(codes, 0)))
    with engine_on(backend, options=GREEDY) as engine:
        all_results(engine.run(prompts(*(f"a{i}" for i in range(20)), max_tokens=2)))
        assert ends(engine.run(prompts("b", max_tokens=2))) == [("length", 2)]
        assert backend.n_rebuilt == 1


# ---- figures ----


@thread_only(Reason.BY_HAND)
def test_records_come_while_they_are_asked_for(by_hand: MakeEngine) -> None:
    engine, records = by_hand(), list[StepRecord]()
    engine.run(prompts("a", "b", max_tokens=9))
    engine.step()
    engine.record_steps(records.append)
    steps(engine, 3)
    engine.record_steps(None)
    steps(engine, 3)
    assert [(r.n_rows, r.n_tokens, r.n_waiting, r.code) for r in records] == [(1, 1, 1, 0)] * 3
    for r in records:
        assert min(r.admit_s, r.build_s, r.run_s, r.apply_s, r.deliver_s) >= 0
    starts = [r.start_s for r in records]
    assert starts == sorted(starts)
    for r, next_s in zip(records, starts[1:], strict=False):
        assert (
            r.admit_s + r.build_s + r.run_s + r.apply_s + r.deliver_s <= next_s - r.start_s + 1e-9
        )


def test_recorder_that_raises_is_called_no_more_and_harms_no_request(
    caplog: pytest.LogCaptureFixture,
) -> None:
    n_calls = 0

    def fail(record: StepRecord) -> None:
        nonlocal n_calls
        n_calls += 1
        raise ValueError(record.n_rows)

    with engine_on(GatedBackend(1, 64, 64), options=GREEDY) as engine:
        engine.record_steps(fail)
        [result] = all_results(engine.run(prompts("a", max_tokens=9)))
    assert (result.finish_reason, n_calls) == ("length", 1)
    assert "record_steps raised" in caplog.text


@pytest.mark.parametrize("wrong", [5, "print"])
def test_recorder_that_is_no_function_is_refused(wrong: Any) -> None:
    with engine_on(FakeBackend(1, 64, 64)) as engine, pytest.raises(ConfigError, match="function"):
        engine.record_steps(wrong)


@thread_only(Reason.BY_HAND)
def test_statistics_begun_anew_count_what_comes_later(by_hand: MakeEngine) -> None:
    engine = by_hand()
    response = engine.run(prompts("a", max_tokens=9))
    steps(engine, 4)
    engine.reset_stats()
    stats = engine.stats()
    assert (stats.n_steps, stats.n_submitted, stats.n_running, stats.itl_s.n) == (0, 0, 1, 0)
    assert ends(response) == [("length", 9)]
    stats = engine.stats()
    assert (stats.n_steps, stats.n_output_tokens, stats.n_finished) == (5, 5, {"length": 1})
    assert (stats.n_prompt_tokens, stats.itl_s.n, stats.ttft_s.n) == (0, 5, 1)


def test_statistics_are_never_begun_anew_in_the_middle_of_a_run() -> None:
    backend = SteppedBackend(1, 64, 64)
    engine = engine_on(backend, options=GREEDY)
    engine.run(prompts("a"))
    backend.wait_for_run()
    resetting = in_thread(engine.reset_stats)
    wait_until(lambda: n_commands(engine) > 0)
    assert stats_of(engine).n_submitted == 1
    backend.let(1000)
    resetting()
    engine.close()
    assert stats_of(engine).n_submitted == 0


@thread_only(Reason.BY_HAND)
def test_snapshot_stays_as_it_was(by_hand: MakeEngine) -> None:
    engine = by_hand()
    response = engine.run(prompts("a", max_tokens=9))
    steps(engine, 3)
    stats = engine.stats()
    all_results(response)
    assert (stats.n_steps, stats.itl_s.n, stats.n_finished) == (3, 2, {})


# ---- at the edges ----


def test_priority_without_its_policy_is_an_error_that_says_so() -> None:
    with engine_on(FakeBackend(2, 64, 16)) as engine:
        with pytest.raises(ConfigError, match="priority=5 has no effect with policy='fcfs'"):
            engine.run(["a", "b"], options={"priority": 5})
        assert engine.stats().n_submitted == 0


@thread_only(Reason.BY_HAND)
def test_recorder_may_ask_for_statistics_while_another_thread_waits() -> None:
    engine = engine_on(GatedBackend(2, 4096, 32), options=GREEDY, threaded=False)
    engine.record_steps(lambda _: engine.stats())
    waits = [in_thread(engine.run(["ab"], options={"max_tokens": 60}).results) for _ in range(3)]
    assert [len(wait()) for wait in waits] == [1, 1, 1]
    engine.close()


@thread_only(Reason.DEATH)
def test_error_that_strikes_again_at_the_end_is_told_to_everybody(imbalances: list[str]) -> None:
    backend = FakeBackend(2, 512, 32)
    piece, n_calls = backend.vocab.piece, count()

    def fail_later(token: int) -> bytes:
        if next(n_calls) > 5:
            raise RuntimeError("no such piece")
        return piece(token)

    backend.vocab.piece = fail_later  # type: ignore[method-assign]
    with engine_on(backend, options=GREEDY) as engine:
        results = all_results(engine.run(["ab", "cd"], options={"max_tokens": 40}))
    assert len(results) == 2
    assert "error" in {r.finish_reason for r in results}
    imbalances.clear()  # the step was broken off, and the engine has ended


@thread_only(Reason.BY_HAND)
def test_paused_ones_time_is_waited_for_without_a_thread() -> None:
    backend = FakeBackend(2, 512, 32)
    engine = engine_on(backend, options=GREEDY, threaded=False)
    response = engine.run(["ab"], options={"max_tokens": 400, "timeout_s": 0.05})
    backend.interrupt()
    engine.step()
    engine.pause("0")
    assert [r.finish_reason for r in all_results(response)] == ["timeout"]
    engine.close()


@thread_only(Reason.BY_HAND)
def test_slots_that_followers_wait_for_are_no_room_in_the_queue() -> None:
    backend = FakeBackend(4, 512, 32, memory=partitioned(4 * 512))
    schedule = ScheduleOptions(max_queue=0, when_full="reject")
    engine = engine_on(backend, options=GREEDY, schedule=schedule, threaded=False)
    n_in = 0
    with suppress(QueueFullError):
        while n_in < 20:
            prompt = BatchPrompt(tokens=[*[9] * 200, n_in])
            engine.run([prompt], options={"max_tokens": 300})
            n_in += 1
            backend.interrupt()
            engine.step()
    assert n_in == 4
    engine.close()
