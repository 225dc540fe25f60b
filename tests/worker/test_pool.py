"""Several workers behind one engine: who computes what, and what becomes of requests that change their worker."""

from __future__ import annotations

import gc
import logging
import threading
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from cbatch.backend.fake import FakeBackend, Faults
from cbatch.engine import Engine, run_soon
from cbatch.engine_options import ScheduleOptions
from cbatch.errors import ConfigError, EngineClosedError, EngineError, WorkerDiedError
from cbatch.options import RunOptions
from cbatch.runtime.ids import RequestId, check_own
from cbatch.runtime.in_flight import InFlight
from cbatch.runtime.local import LocalRuntime
from cbatch.worker.client import Workers
from cbatch.worker.pool import N_ENTERING_MAX, read_texts
from cbatch.worker.protocol_commands import TakeBack
from cbatch.worker.replica import N_STOPPED_MAX
from tests.places import can_all, expected, item, text_of, wait_until
from tests.profiles import examples
from tests.runtime.backends import (
    PATIENCE_S,
    GatedBackend,
    all_results,
    in_thread,
    mailbox_of,
    n_commands_of,
    runtime_of,
    together,
)
from tests.worker.links import Launches, MortalBackend, ThreadLink, engine_over
from tests.worker.started import RUNTIMES

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from cbatch.messages import BatchPrompt
    from cbatch.response import BatchResult
    from cbatch.runtime.batch_response import BatchResponse
    from cbatch.runtime.interface import Submission

OPTIONS = {"temperature": 0, "ignore_eos": True, "seed": 1, "max_tokens": 6}
COMMON = text_of(128)
"""Two blocks: a beginning by which prompts are routed."""


def alike(n: int, first: int = 0) -> list[BatchPrompt]:
    """Prompts with one beginning."""
    return [item([*COMMON, first + i, 7], f"r{first + i}") for i in range(n)]


def answers(prompts: Sequence[BatchPrompt]) -> list[tuple[int, ...]]:
    return [expected(prompt.tokens or ()) for prompt in prompts]


def tokens_of(results: Sequence[BatchResult]) -> list[tuple[int, ...]]:
    return [result.token_ids for result in results]


def workers_of(engine: Engine) -> Workers:
    workers = runtime_of(engine)
    assert isinstance(workers, Workers)
    return workers


def at_each(engine: Engine) -> list[list[str]]:
    """The ids of requests in flight at each worker."""
    return [[*connection.requests] for connection in workers_of(engine).ready]


def check_empty(engine: Engine) -> None:
    """Fail unless nothing is left of any request in any table; the engine is open."""
    workers = workers_of(engine)
    engine.stats()  # what workers had to say before is said
    pool = workers.pool
    assert (pool.requests, [*pool.held], at_each(engine)) == ({}, [], [[] for _ in pool.ready])
    for runtime in RUNTIMES.get(workers, ()):
        assert not runtime.orders.routes
        assert not runtime.batcher.in_flight


def held(n_slots: int = 1) -> GatedBackend:
    """A backend that stops before its first run."""
    return GatedBackend(n_slots, 256, 256, hold_at=0)


class Asleep:
    """An engine over two workers that stop before their first step, with requests at the first one."""

    def __init__(self, n: int, n_slots: int = 1, **more: Any) -> None:
        self.backends = [held(n_slots), held(n_slots)]
        self.engine = engine_over(*self.backends, options=OPTIONS, **more)
        self.n = n

    def __enter__(self) -> Asleep:
        self.engine.open()
        first, second = workers_of(self.engine).ready
        pool = workers_of(self.engine).pool
        self.prompts = alike(self.n)
        n_running = min(self.n, first.n_slots)
        with together(n_running):
            with patch.object(pool.routing, "choose", lambda keys, loads: 0):
                self.response = self.engine.run(self.prompts)
            self.backends[0].wait_until_held()
        assert at_each(self.engine) == [[f"r{i}" for i in range(self.n)], []]
        self.first, self.second = first, second
        running = [pool.requests[f"r{i}"] for i in range(n_running)]
        wait_until(lambda: all(asked.has_begun for asked in running))  # the client knows it too
        return self

    def take_over(self) -> None:
        """Have the second worker ask for what waits at the first, which answers behind its step."""
        workers = workers_of(self.engine)
        with workers.pool.lock():
            workers.pool.take_over(self.second)
        [runtime] = (r for r in RUNTIMES[workers] if r.backend is self.backends[0])
        wait_until(lambda: n_commands_of(runtime.loop) > 0)

    def release(self) -> None:
        for backend in self.backends:
            backend.release()

    def __exit__(self, *_: object) -> None:
        self.release()
        self.engine.close()


@pytest.mark.parametrize(("n", "n_slots"), [(4, 2), (2, 1)])
def test_idle_worker_gets_what_waits_at_another(n: int, n_slots: int) -> None:
    """Its beginning is at the first worker, which has no more to do than others; but that one has no slot free."""
    with Asleep(n, n_slots) as scene:
        scene.take_over()
        scene.backends[0].release()
        scene.backends[1].wait_until_held()
        if n_slots == 1:
            assert at_each(scene.engine)[1] == ["r1"]
        scene.release()
        assert tokens_of(all_results(scene.response)) == answers(scene.prompts)
        assert all(backend.n_runs for backend in scene.backends)
        stats = scene.engine.stats()
        assert (stats.n_submitted, stats.n_finished) == (n, {"length": n})
        check_empty(scene.engine)


class Cancelling:
    """Cancels all requests when the garbage collector finds it."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.itself = engine, self

    def __del__(self) -> None:
        self.engine.cancel_all()


def test_finalizer_amid_a_submission_cancels_no_request_that_is_half_sent() -> None:
    backends = [held(), held()]
    with engine_over(*backends, options=OPTIONS) as engine:
        engine.open()
        pool = workers_of(engine).pool

        def choose(keys: object, loads: object) -> int:
            Cancelling(engine)
            _ = [[i] for i in range(5000)]  # more than what the collector waits for
            return 0

        for backend in backends:
            backend.release()
        with patch.object(pool.routing, "choose", choose):
            response = engine.run(alike(2))
        [*results] = response.results(timeout=PATIENCE_S, return_errors=True)
        assert len(results) == 2
        assert response.n_open == 0
        gc.collect()  # none of it is left for other tests
        check_empty(engine)


def test_request_that_was_just_admitted_stays() -> None:
    with Asleep(2) as scene:
        pool = workers_of(scene.engine).pool
        asked = pool.requests["r0"]
        assert asked.has_begun
        asked.has_begun = False  # as if that were not known yet
        with pool.lock():
            scene.first.is_giving = True
            reply = scene.first.ask(
                TakeBack(ids=["r0"]),
                read_texts,
                partial(pool.taken_back, scene.first, scene.second),
            )
        scene.release()
        assert reply.wait() == []
        assert tokens_of(all_results(scene.response)) == answers(scene.prompts)
        assert scene.engine.stats().n_submitted == 2
        check_empty(scene.engine)


@pytest.mark.parametrize("way", ["all", "batch", "soon", "waiting"])
def test_request_cancelled_while_it_changes_its_worker_ends_once(way: str) -> None:
    with Asleep(3) as scene:
        workers, mailbox = workers_of(scene.engine), mailbox_of(scene.response)
        ids = dict(workers.pool.requests)
        scene.take_over()  # it is answered behind the step
        ways: dict[str, Callable[[], object]] = {
            "all": scene.engine.cancel_all,
            "batch": scene.response.cancel,
            "soon": lambda: workers.cancel_batch_soon(mailbox),
            "waiting": lambda: workers.cancel([*ids], is_for_waiting=True),
        }
        n = in_thread(ways[way])
        wait_until(lambda: all(a.is_unwanted or a.is_unwanted_waiting for a in ids.values()))
        scene.release()
        results = all_results(scene.response)
        reasons = [r.finish_reason for r in results]
        assert reasons[2] == "cancelled"
        assert n() == (None if way == "soon" else reasons.count("cancelled"))
        check_empty(scene.engine)


def test_request_paused_while_it_changes_its_worker_is_paused_there() -> None:
    with Asleep(2) as scene:
        asked = workers_of(scene.engine).pool.requests["r1"]
        scene.take_over()
        paused = in_thread(lambda: scene.engine.pause("r1"))
        wait_until(lambda: asked.is_paused)
        scene.backends[0].release()
        left = scene.response.as_completed()
        first = next(left)
        assert (first.id, paused()) == ("r0", True)
        scene.engine.stats()  # the second worker has read all that came before
        assert [*scene.second.requests] == ["r1"]
        assert (scene.backends[1].n_runs, scene.backends[1].is_held) == (0, False)
        assert scene.engine.resume("r1")
        scene.release()
        assert tokens_of(all_results(scene.response)) == answers(scene.prompts)
        check_empty(scene.engine)


def test_paused_request_does_not_change_its_worker() -> None:
    with Asleep(2) as scene:
        pool = workers_of(scene.engine).pool
        pool.requests["r1"].is_paused = True
        with pool.lock():
            pool.take_over(scene.second)
        assert not scene.first.is_giving


@pytest.mark.parametrize("n_tokens", [None, 2])
@pytest.mark.parametrize("is_extension", [False, True])
def test_request_paused_while_no_worker_is_there_begins_paused(
    n_tokens: int | None, *, is_extension: bool
) -> None:
    launches = Launches(partial(MortalBackend, 1, 256, 256))
    with launches.engine(options={**OPTIONS, "max_tokens": 5}) as engine:
        first = all_results(engine.run(alike(1))) if is_extension else []
        launches.gate.clear()
        launches.links[0].kill()
        wait_until(lambda: not workers_of(engine).ready)
        wait = in_thread(lambda: engine.extend(first[0], 4) if first else engine.run(alike(1)))
        wait_until(lambda: bool(workers_of(engine).pool.held))
        assert engine.pause("r0")
        assert not engine.pause("r0")
        if n_tokens:
            assert engine.resume("r0", n_tokens)
        launches.gate.set()
        response = wait()
        if n_tokens:
            wait_until(lambda: [s.status for s in engine.slots()] == ["paused"])
        wait_until(lambda: bool(workers_of(engine).ready))
        engine.stats()  # the worker has read all that came before
        assert launches.backends[1].n_runs == (n_tokens or 0)
        assert engine.resume("r0")
        n = 9 if first else 5
        assert tokens_of(all_results(response)) == [expected(alike(1)[0].tokens or (), n)]
        check_empty(engine)


def test_worker_that_comes_later_gets_what_waits_at_another() -> None:
    launches = Launches(partial(MortalBackend, 1, 256, 256))
    with launches.engine(2, options=OPTIONS) as engine:
        first, second = launches.backends
        first.hold_at = second.hold_at = 0
        launches.gate.clear()
        prompts = alike(6)
        response = engine.run(prompts, ask_again=True)
        first.wait_until_held()
        launches.links[1].kill()
        second.release()
        wait_until(lambda: len(at_each(engine)) == 1)
        launches.gate.set()
        first.release_when_asked()
        launches.wait_for(3)
        assert tokens_of(all_results(response)) == answers(prompts)
        assert launches.backends[2].n_runs > 0


def test_burst_with_one_beginning_uses_all_workers() -> None:
    backends = [FakeBackend(2, 256, 256, memory=can_all(512)) for _ in range(3)]
    prompts = alike(24)
    with engine_over(*backends, options=OPTIONS) as engine:
        results = all_results(engine.run(prompts))
        assert tokens_of(results) == answers(prompts)
        stats = engine.stats()
        check_empty(engine)
    assert all(backend.plans for backend in backends)
    assert stats.n_submitted == 24
    assert stats.n_prompt_tokens <= 3 * len(COMMON) + 24 * 2


def test_long_list_is_given_to_workers_in_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    n_given: list[int] = []

    def counted(ids: Sequence[RequestId], known: Mapping[str, object]) -> None:
        n_given.append(len(ids))
        check_own(ids, known)

    monkeypatch.setattr("cbatch.worker.pool._N_PORTION", 5)
    monkeypatch.setattr("cbatch.worker.pool.check_own", counted)
    prompts = alike(24)
    with engine_over(FakeBackend(2, 256), FakeBackend(2, 256), options=OPTIONS) as engine:
        assert tokens_of(all_results(engine.run(prompts))) == answers(prompts)
    assert n_given == [5, 5, 5, 5, 4]


def test_close_in_a_step_recorder_waits_for_no_other_recorder() -> None:
    both = threading.Barrier(2)

    def close(_: object) -> None:
        with suppress(threading.BrokenBarrierError):  # more steps may come
            both.wait(PATIENCE_S)
            both.abort()
        engine.close()

    def run() -> None:
        with suppress(EngineClosedError):
            all_results(engine.run(["one", "two"], options={"max_tokens": 40}))

    engine = engine_over(FakeBackend(1, 64), FakeBackend(1, 64), options=OPTIONS)
    engine.record_steps(close)
    in_thread(run)()
    in_thread(engine.close)()
    assert both.broken


def test_steps_that_fail_change_no_token() -> None:
    def faults() -> Faults:
        n_steps = iter(range(10**6))
        return Faults(code=lambda _: -1 if next(n_steps) % 23 == 22 else 0)

    prompts = [item(text_of(20, i), f"r{i}", max_tokens=60) for i in range(6)]
    with engine_over(*(FakeBackend(2, 128, 64, faults=faults()) for _ in range(2))) as engine:
        results = all_results(engine.run(prompts, options=OPTIONS))
    assert tokens_of(results) == [expected(prompt.tokens or (), 60) for prompt in prompts]


def of_two_and_three_slots() -> tuple[list[FakeBackend], Engine]:
    backends = [FakeBackend(2, 256, 256), FakeBackend(3, 256, 256)]
    return backends, engine_over(*backends, options=OPTIONS)


@pytest.mark.parametrize("slot", [0, 1, 2, 4])
@pytest.mark.parametrize("is_own", [False, True])
def test_slot_is_numbered_over_all_workers(slot: int, *, is_own: bool) -> None:
    backends, engine = of_two_and_three_slots()
    place, there = (0, slot) if slot < 2 else (1, slot - 2)
    prompt = item(text_of(9), "r", **({"slot": slot} if is_own else {}))
    options: dict[str, Any] = {} if is_own else {"slot": slot}
    with engine:
        [result] = all_results(engine.run([prompt], options={**options, "max_tokens": 3}))
        [more] = all_results(engine.extend(result, 3))
        states = engine.slots()
    assert more.token_ids == expected(text_of(9))
    assert [state.slot for state in states] == [*range(5)]
    assert [state.slot for state in states if state.n_cells] == [slot]
    assert {c.slot for plan in backends[place].plans for c in plan.spans} == {there}
    assert not [chunk for plan in backends[1 - place].plans for chunk in plan.spans]


def test_slot_that_no_worker_has_is_refused_by_name() -> None:
    _, engine = of_two_and_three_slots()
    message = "slot=5 is not a slot of this engine, which has 0 … 4"
    with engine:
        with pytest.raises(ConfigError, match=message) as caught:
            engine.run([item(text_of(9), "r", slot=5)])
        assert str(caught.value).startswith("request 'r': ")
        runtime, prompt = runtime_of(engine), item(text_of(9))
        with pytest.raises(ConfigError, match=message):
            runtime.checked(prompt, RunOptions(slot=5))
        assert runtime.checked(prompt, RunOptions(slot=4)) == 9
        check_empty(engine)


def test_requests_for_slots_stay_where_these_are() -> None:
    backends, engine = of_two_and_three_slots()
    prompts = [item(text_of(9, i), f"r{i}", slot=i % 2) for i in range(8)]
    with engine:
        assert tokens_of(all_results(engine.run(prompts))) == answers(prompts)
        check_empty(engine)
    assert not [chunk for plan in backends[1].plans for chunk in plan.spans]


def test_slots_keep_their_numbers_while_a_worker_is_not_there() -> None:
    launches = Launches(partial(MortalBackend, 2, 256, 256))
    with launches.engine(2, options=OPTIONS) as engine:
        at = [id(link) for link in launches.links].index(id(workers_of(engine).ready[0].link))
        first, second = launches.backends[at], launches.backends[1 - at]
        first.hold_at = 0
        response = engine.run([item(text_of(9), "gone", slot=1)], ask_again=True)
        first.wait_until_held()
        launches.gate.clear()
        launches.links[at].kill()
        first.release()
        wait_until(lambda: len(workers_of(engine).ready) == 1)
        assert engine.parallel == 4
        with pytest.raises(ConfigError, match="slot=4 is not a slot of this engine"):
            engine.run([item(text_of(9), "r", slot=4)])
        prompts = [item(text_of(9, i), f"r{i}", slot=i) for i in (2, 3)]
        assert tokens_of(all_results(engine.run(prompts))) == answers(prompts)
        assert [(state.slot, state.n_cells > 0) for state in engine.slots()] == [
            (2, True),
            (3, True),
        ]
        launches.gate.set()
        assert tokens_of(all_results(response)) == [expected(text_of(9))]
        check_empty(engine)
    chunks = [chunk for plan in second.plans for chunk in plan.spans]
    assert {chunk.slot for chunk in chunks} == {0, 1}


def test_request_too_long_for_its_next_worker_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = Launches(partial(MortalBackend, 1, 256, 256))
    with launches.engine(options=OPTIONS) as engine:
        first = launches.backends[0]
        first.hold_at = 0
        response = engine.run([*alike(2), item([9, 7], "short")], ask_again=True)
        first.wait_until_held()
        monkeypatch.setattr("cbatch.worker.connection.N_LINE_MAX", 200)
        monkeypatch.setattr("cbatch.worker.requests.N_MESSAGE_BYTES", 1)  # each in its own
        launches.links[0].kill()
        first.release()
        results = all_results(response)
        assert [type(r.error) for r in results] == [ConfigError, ConfigError, type(None)]
        assert "is too long for a worker process" in str(results[0].error)
        assert results[2].token_ids == expected([9, 7])
        with pytest.raises(ConfigError, match="too long for a worker process"):
            engine.run(alike(1))
        assert tokens_of(all_results(engine.run([item([9, 7], "short")]))) == [expected([9, 7])]
        check_empty(engine)


@pytest.mark.parametrize("where", ["message", "options"])
def test_value_that_cannot_be_sent_is_refused_and_nothing_is_queued(where: str) -> None:
    odd: Any = object()
    message = {"role": "user", "content": "a", **({"at": odd} if where == "message" else {})}
    options = {"chat_template_kwargs": {"at": odd}} if where == "options" else {}
    with engine_over(FakeBackend(2, 256, 64), options=OPTIONS) as engine:
        with pytest.raises(ConfigError, match="object"):
            engine.run([[{"role": "user", "content": "good"}], [message]], options=options)
        if where == "message":
            good, bad = all_results(engine.run(iter([[{**message, "at": "noon"}], [message]])))
            assert (good.error, type(bad.error)) == (None, ConfigError)
        with pytest.raises(ConfigError, match="object"):
            engine.count_tokens([message], options=options)
        assert engine.stats().n_submitted == (1 if where == "message" else 0)
        check_empty(engine)


@pytest.mark.parametrize("way", ["chunks", "cancel", "leave"])
def test_messages_with_the_ids_of_many_requests_are_short(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    send = ThreadLink.send

    def noted(link: ThreadLink, message: bytes) -> None:
        sizes.append(len(message))
        send(link, message)

    backend = held()
    prompts = [item([*text_of(9), i], f"{i:04}" + "x" * 100) for i in range(60)]
    ids = [prompt.id or "" for prompt in prompts]
    with engine_over(backend, options=OPTIONS) as engine:
        response = engine.run(prompts)
        backend.wait_until_held()
        backend.release_when_asked()
        monkeypatch.setattr("cbatch.worker.pool.N_MESSAGE_BYTES", 1000)
        monkeypatch.setattr(ThreadLink, "send", noted)
        if way == "chunks":
            assert sum(len(chunk.token_ids) for chunk in response) == 60 * 6
        elif way == "leave":
            response.leave()
        else:
            assert workers_of(engine).cancel(ids)
        wait_until(lambda: not response.n_open)
        check_empty(engine)
    assert len(sizes) > 6
    assert max(sizes) < 1300


def test_reader_of_a_batch_is_told_to_its_worker_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each order to watch a batch walks all of its requests, and ends the run in flight."""
    watched: list[object] = []
    monkeypatch.setattr(InFlight, "watch", lambda _, target: watched.append(target))
    backend = held()
    with engine_over(backend, options=OPTIONS) as engine:
        response = engine.run(alike(60))
        backend.wait_until_held()
        assert not mailbox_of(response).has_chunk()
        backend.release()
        assert tokens_of(all_results(response)) == answers(alike(60))
    assert len(watched) == 1


# ---- workers that a signal has stopped ----


def test_stopped_worker_gets_nothing_until_it_goes_on() -> None:
    launches = Launches(partial(MortalBackend, 2, 256, 256))
    with launches.engine(2, options=OPTIONS) as engine:
        pool = workers_of(engine).pool
        launches.links[0].has_stopped = True
        pool.look()
        assert tokens_of(all_results(engine.run(alike(6)))) == answers(alike(6))
        assert launches.backends[0].n_runs == 0
        launches.links[1].has_stopped = True
        pool.look()
        response = engine.run(alike(2))  # held, for nobody takes it
        assert [asked.id for asked in pool.held] == ["r0", "r1"]
        launches.links[0].has_stopped = False
        pool.look()
        assert tokens_of(all_results(response)) == answers(alike(2))
        assert launches.backends[0].n_runs > 0
        launches.links[1].has_stopped = False
        pool.look()
        check_empty(engine)
    assert len(launches.links) == 2


def test_worker_that_is_stopped_for_long_is_replaced(caplog: pytest.LogCaptureFixture) -> None:
    launches = Launches(partial(MortalBackend, 1, 256, 256))
    with launches.engine(options=OPTIONS) as engine, caplog.at_level(logging.WARNING):
        pool, first = workers_of(engine).pool, launches.backends[0]
        first.hold_at = 0
        response = engine.run(alike(2))
        first.wait_until_held()
        begun = pool.requests["r0"]
        wait_until(lambda: begun.has_begun)  # the client knows it too
        launches.links[0].has_stopped = True
        for _ in range(N_STOPPED_MAX):
            pool.look()
        first.release()
        died, waited = all_results(response)
        assert isinstance(died.error, WorkerDiedError)
        assert waited.token_ids == answers(alike(2))[1]
        check_empty(engine)
    assert "killed, because a signal had stopped it for" in caplog.text


def test_worker_that_is_stopped_while_it_loads_is_killed_and_that_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("cbatch.worker.replica.N_STOPPED_MAX", 1)
    launches = Launches(partial(MortalBackend, 1, 256, 256))
    launches.is_silent = True

    def launch() -> ThreadLink:
        link = launches()
        link.has_stopped = True
        return link

    engine = Engine(opener=lambda _: Workers([launch], can_replace=True))
    with pytest.raises(EngineError, match="ready: killed, because a signal had stopped it for"):
        engine.open()


@st.composite
def batches(draw: st.DrawFn) -> list[list[BatchPrompt]]:
    """Some batches; some of their prompts have a beginning in common."""
    ids = count()
    found = []
    for _ in range(draw(st.integers(1, 3))):
        batch = []
        for _ in range(draw(st.integers(1, 7))):
            start = draw(st.sampled_from([COMMON, COMMON[:64], text_of(70, 3), []]))
            options = {
                "n": draw(st.sampled_from([1, 1, 1, 2])),
                "priority": draw(st.integers(0, 2)),
                "timeout_s": draw(st.sampled_from([60.0, 60.0, 60.0, 1e-3])),
                "max_tokens": draw(st.integers(1, 12)),
            }
            own = draw(st.lists(st.integers(0, 255), min_size=1, max_size=9))
            batch.append(item([*start, *own], f"r{next(ids)}", **options))
        found.append(batch)
    return found


ORDERS = st.lists(
    st.tuples(st.sampled_from(["cancel", "pause", "resume", "some"]), st.integers(0, 20)),
    max_size=12,
)
BY_PRIORITY = ScheduleOptions(policy="priority")


def alone(prompts: Sequence[BatchPrompt]) -> dict[str, BatchResult]:
    """What an engine in a thread says, without a limit of time."""
    with Engine(FakeBackend(4, 256, 64), schedule=BY_PRIORITY, options=OPTIONS) as engine:
        limit = RunOptions(timeout_s=60.0)
        patient = [replace(p, options=limit.over(RunOptions.of(p.options))) for p in prompts]
        return {result.id: result for result in all_results(engine.run(patient))}


def check_answer(found: BatchResult, whole: BatchResult) -> None:
    """Fail unless an answer is the one that an engine alone gives, or its beginning where it was cut off."""
    assert len(found.choices) == len(whole.choices)
    pairs = zip(found.choices or [found], whole.choices or [whole], strict=True)
    for one, other in pairs:
        assert one.token_ids == other.token_ids[: len(one.token_ids)]
        if one.finish_reason not in ("cancelled", "timeout"):
            assert (one.finish_reason, one.token_ids) == (other.finish_reason, other.token_ids)


@settings(max_examples=examples(20), deadline=None, phases=[Phase.explicit, Phase.generate])
@given(
    n_workers=st.integers(2, 3),
    given_batches=batches(),
    orders=ORDERS,
    feed=st.booleans(),
    n_portion=st.sampled_from([2, 1024]),
)
def test_every_request_ends_once_as_in_an_engine_alone(
    n_workers: int,
    given_batches: list[list[BatchPrompt]],
    orders: list[tuple[str, int]],
    n_portion: int,
    *,
    feed: bool,
) -> None:
    whole = alone([prompt for batch in given_batches for prompt in batch])
    backends = [GatedBackend(2, 256, 64) for _ in range(n_workers)]
    with (
        patch("cbatch.worker.pool._N_PORTION", n_portion),
        engine_over(*backends, schedule=BY_PRIORITY, options=OPTIONS) as engine,
    ):
        responses = [engine.run(iter(batch) if feed else batch) for batch in given_batches]
        for op, i in orders:
            if op == "some":
                engine.stats()
            else:
                getattr(engine, op)(f"r{i}")
        for id in map(str, whole):  # as text: those of another engine's results mean nobody here
            engine.resume(id)
        for batch, response in zip(given_batches, responses, strict=True):
            results = [*response.as_completed()] if feed else all_results(response)
            ids = [prompt.id or "" for prompt in batch]
            found = [result.id for result in results]
            assert (sorted(found) if feed else found) == (sorted(ids) if feed else ids)
            for result in results:
                check_answer(result, whole[result.id])
            done = [r for r in results if r.finish_reason == "length" and not r.choices]
            for result in done[:2]:
                [more] = all_results(engine.extend(result, 2))
                assert more.token_ids[: len(result.token_ids)] == result.token_ids
        check_empty(engine)


def test_requests_given_up_before_a_worker_has_them_cost_it_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate, n_entered, enter = threading.Event(), list[int](), LocalRuntime.enter

    def late(runtime: LocalRuntime, submission: Submission) -> Any:
        gate.wait(PATIENCE_S)
        n_entered.append(len(submission.prompts))
        return enter(runtime, submission)

    def ask(engine: Engine, i: int, **more: Any) -> BatchResponse:
        found = run_soon(
            engine, item([i + 1], f"r{i}"), RunOptions.of({**OPTIONS, **more}), streamed=False
        )
        assert found is not None
        return found

    monkeypatch.setattr(LocalRuntime, "enter", late)
    with engine_over(FakeBackend(2, 64)) as engine:
        some = [ask(engine, i, n=8) for i in range(100)]
        assert len(runtime_of(engine).pool.late) == 100 - N_ENTERING_MAX // 8
        last = ask(engine, 100)
        runtime_of(engine).cancel_soon([f"r{i}" for i in range(100)])
        gate.set()
        assert [r.finish_reason for r in all_results(last)] == ["length"]
        ended = {r.finish_reason for response in some[8:] for r in all_results(response)}
        assert ended == {"cancelled"}
    assert sum(n_entered) == N_ENTERING_MAX // 8 + 1


def test_requests_that_wait_for_others_to_enter_all_run() -> None:
    with engine_over(FakeBackend(2, 64), FakeBackend(2, 64)) as engine:
        some = [
            run_soon(engine, item([i % 50 + 1], f"r{i}"), RunOptions.of(OPTIONS), streamed=False)
            for i in range(1000)
        ]
        results = [r for response in some if response for r in all_results(response)]
        pool = runtime_of(engine).pool
        assert [r.finish_reason for r in results] == ["length"] * 1000
        assert not pool.late
        wait_until(lambda: not any(worker.n_entering for worker in pool.ready))
