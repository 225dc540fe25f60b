"""The engine in event loops, asyncio and trio: iterating, awaiting, and every way of leaving."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
from contextlib import aclosing, nullcontext, suppress
from functools import partial, wraps
from typing import TYPE_CHECKING, Any

import anyio
import pytest
from anyio.lowlevel import checkpoint

import cbatch
from cbatch.backend.fake import FakeBackend
from cbatch.engine import Engine
from cbatch.engine_options import ScheduleOptions
from cbatch.errors import ConfigError, EngineClosedError, ModelLoadError
from cbatch.response import BatchError
from cbatch.runtime.local import LocalRuntime
from cbatch.runtime.mailbox import N_AHEAD_PER_SLOT
from cbatch.runtime.waking import LoopWaker
from tests.kinds import Reason, each_kind, engine_on, no_pool, thread_only
from tests.runtime.backends import (
    PATIENCE_S,
    FailingBackend,
    GatedBackend,
    all_results,
    check_balance,
    ids_in_flight,
    owner_of,
    streams,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator
    from pathlib import Path

    from cbatch.runtime.batch_response import BatchResponse

pytestmark = [pytest.mark.anyio, each_kind]
ENDLESS = {"ignore_eos": True}
HANG_S = 10 * PATIENCE_S
"""After which a test hangs: many times what the longest takes on a machine whose cores others have."""


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(autouse=True)
def patience(request: pytest.FixtureRequest) -> None:
    """Fail rather than hang. Around the test alone: the runner of fixtures does not outlive a scope that it is in."""
    test = request.node.obj

    @wraps(test)
    async def patient(**given: Any) -> None:
        with anyio.fail_after(HANG_S):
            await test(**given)

    request.node.obj = patient


@pytest.fixture
def engine() -> Iterator[Engine]:
    with engine_on(FakeBackend(4, 128, 64)) as made:
        yield made


def small(n_slots: int = 2, n_window: int = 64) -> GatedBackend:
    return GatedBackend(n_slots, n_window, 64)


async def until_idle(engine: Engine) -> None:
    """Wait until nothing runs or waits; the counts must balance then."""
    while ids_in_flight(engine):
        await checkpoint()
    stats = await anyio.to_thread.run_sync(engine.stats)
    assert (stats.n_running, stats.n_waiting) == (0, 0)
    check_balance(engine)


async def collect(response: BatchResponse) -> dict[str, str]:
    texts = dict.fromkeys(response.ids, "")
    async for chunk in response:
        texts[chunk.id] += chunk.text
    return texts


# ---- reading ----


async def test_chunks_joined_are_the_awaited_texts(engine: Engine) -> None:
    response = engine.run(["one", "two", "three", "four", "five"])
    texts = await collect(response)
    assert texts == {r.id: r.text for r in await response}


async def test_tokens_are_those_of_the_sync_reader(engine: Engine) -> None:
    prompts = [cbatch.BatchPrompt(prompt=p, options={"seed": 7}) for p in ("a", "bc", "def")]
    by_thread = await anyio.to_thread.run_sync(partial(_done, engine, prompts))
    response = engine.run(prompts)
    await response
    assert streams(response) == streams(by_thread)


def _done(engine: Engine, prompts: list[cbatch.BatchPrompt]) -> BatchResponse:
    response = engine.run(prompts)
    response.results()
    return response


async def test_awaiting_a_failed_item_raises_with_all_results(engine: Engine) -> None:
    with pytest.raises(BatchError) as caught:
        await engine.run(["x" * 500, "fine"])
    assert [r.error is None for r in caught.value.results] == [False, True]


async def test_loop_is_woken_once_for_all_results(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    woken: list[object] = []
    set_soon = LoopWaker.set_soon

    def counted(waker: LoopWaker, event: anyio.Event) -> None:
        woken.append(event)
        set_soon(waker, event)

    monkeypatch.setattr(LoopWaker, "set_soon", counted)
    assert len(await engine.run(["a"] * 40, options={"max_tokens": 2})) == 40
    assert len(woken) <= 1


async def test_gathered_errors_are_in_their_places(engine: Engine) -> None:
    items: list[Any] = ["a", "b" * 200, "c"]
    results = await engine.run(items).gather(return_errors=True)
    assert [result.error is None for result in results] == [True, False, True]


@no_pool(Reason.ONE_BACKEND)
async def test_a_slow_reader_gets_every_token_and_stops_nobody() -> None:
    with engine_on(FakeBackend(2, 128, 64), options={**ENDLESS, "max_tokens": 40}) as engine:
        slow, quick = engine.submit("slow"), engine.submit("quick")
        reader = aiter(slow)
        first = await anext(reader)
        assert len((await quick)[0].token_ids) == 40
        await until_idle(engine)
        rest = [c.token_ids async for c in reader]
        assert len(first.token_ids) + sum(map(len, rest)) == 40


@thread_only(Reason.AT_ONCE)
async def test_one_wakeup_serves_all_readers_of_a_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Callable[[], None]] = []
    waker = LoopWaker(calls.append)
    monkeypatch.setattr(LoopWaker, "here", lambda: waker)
    backend = GatedBackend(8, 64, 64, hold_at=0)
    with engine_on(backend, options={**ENDLESS, "max_tokens": 1}) as engine:
        responses = [engine.submit(str(i)) for i in range(8)]
        await anyio.to_thread.run_sync(backend.wait_until_held)
        async with anyio.create_task_group() as tasks:
            for response in responses:
                tasks.start_soon(collect, response)
            await anyio.wait_all_tasks_blocked()
            backend.release()
            await anyio.to_thread.run_sync(partial(wait_for_end, engine))
            [wake_all] = calls
            wake_all()


def wait_for_end(engine: Engine) -> None:
    while ids_in_flight(engine):
        engine.stats()
    engine.stats()  # the last ones are delivered by then


@thread_only(Reason.BY_HAND)
async def test_engine_without_a_thread_works_in_a_loop() -> None:
    with engine_on(FakeBackend(2, 64, 32), threaded=False, options={"max_tokens": 6}) as engine:
        response = engine.run(["a", "b", "c"])
        texts = await collect(response)
        assert texts == {r.id: r.text for r in await response}


# ---- leaving ----


@no_pool(Reason.ONE_BACKEND)
@pytest.mark.parametrize("way", ["break", "raise", "close"])
async def test_leaving_the_reader_frees_the_slots(way: str) -> None:
    with engine_on(FakeBackend(2, 100_000, 64), options=ENDLESS) as engine:
        response = engine.run(["a", "b", "c"])
        with suppress(ZeroDivisionError):
            async with aclosing(aiter(response)) if way == "close" else nullcontext():
                async for _ in response:
                    if way == "raise":
                        raise ZeroDivisionError
                    break
        await until_idle(engine)
        reasons = [r.finish_reason for r in response.results(return_errors=True)]
        assert reasons == ["cancelled"] * 3


@no_pool(Reason.ONE_BACKEND)
@pytest.mark.parametrize("way", ["await", "iterate", "as_completed"])
async def test_a_cancelled_task_frees_the_slots(way: str) -> None:
    async def read(response: BatchResponse) -> None:
        if way == "await":
            await response
        elif way == "iterate":
            await collect(response)
        else:
            [r async for r in response.as_completed()]

    with engine_on(FakeBackend(2, 100_000, 64), options=ENDLESS) as engine:
        response = engine.run(["a", "b", "c"])
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(read, response)
            await anyio.wait_all_tasks_blocked()
            tasks.cancel_scope.cancel()
        await until_idle(engine)
        assert {r.finish_reason for r in all_results(response)} == {"cancelled"}


async def test_leaving_one_batch_leaves_others_their_tokens() -> None:
    with engine_on(FakeBackend(4, 256, 64), options={**ENDLESS, "seed": 3}) as engine:
        alone = (await engine.submit("b", options={"max_tokens": 50}))[0].token_ids
        leaving = engine.submit("a")
        staying = engine.submit("b", options={"max_tokens": 50})
        async for _ in leaving:
            break
        assert (await staying)[0].token_ids == alone


@thread_only(Reason.BY_HAND)
@pytest.mark.slow
async def test_two_hundred_that_vanish_leave_nothing() -> None:
    with engine_on(FakeBackend(4, 100_000, 64), options=ENDLESS) as engine:
        await collect(engine.submit("warm", options={"max_tokens": 2}))
        n_threads, n_files = threading.active_count(), len(os.listdir("/proc/self/fd"))

        async def vanish(i: int) -> None:
            n_read = 0
            async for _ in engine.run([f"{i}a", f"{i}b"]):
                n_read += 1
                if n_read == 3:
                    return

        async with anyio.create_task_group() as tasks:
            for i in range(200):
                tasks.start_soon(vanish, i)
        await until_idle(engine)
        gc.collect()
        left = threading.enumerate()
        assert len(left) <= n_threads + 1, left  # anyio keeps a worker of its own
        assert len(os.listdir("/proc/self/fd")) <= n_files


async def test_close_ends_everyone_who_waits() -> None:
    engine = engine_on(FakeBackend(2, 100_000, 64), options=ENDLESS)
    ends: list[Any] = []

    async def read(response: BatchResponse) -> None:
        ends.extend([c.finish_reason async for c in response if c.finish_reason])

    async with anyio.create_task_group() as tasks:
        for prompts in (["a", "b"], ["c", "d"]):
            tasks.start_soon(read, engine.run(prompts))
        await anyio.wait_all_tasks_blocked()
        await anyio.to_thread.run_sync(engine.close)
    assert ends == ["cancelled"] * 4


@thread_only(Reason.DEATH)
async def test_a_failing_backend_ends_everyone_who_waits() -> None:
    broken = RuntimeError("broken")
    with engine_on(FailingBackend(2, 64, 64, error=broken, fail_at=2), options=ENDLESS) as engine:
        with pytest.raises(BatchError) as caught:
            await engine.run(["a", "b", "c"])
        assert all(isinstance(r.error, EngineClosedError) for r in caught.value.results)


# ---- loading ----


async def test_loads_and_closes_in_a_worker_thread(
    test_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cbatch.backend.load import loader as load

    threads: list[threading.Thread] = []
    real = load.load_backend

    def observed(*given: Any, **more: Any) -> Any:
        threads.append(threading.current_thread())
        return real(*given, **more)

    monkeypatch.setattr(load, "load_backend", observed)
    async with cbatch.load(test_model, parallel=2, ctx_per_seq=256, n_threads=1) as engine:
        assert [t is threading.main_thread() for t in threads] == [False]
        [result] = await engine.submit("Hi", options={"max_tokens": 4, **ENDLESS})
        assert len(result.token_ids) == 4
    with pytest.raises(EngineClosedError):
        engine.run("Hi")


class HeldOpener:
    """Loads a fake backend when it is let go."""

    def __init__(self) -> None:
        self.backend = FakeBackend(2, 64, 64)
        self.has_begun, self._go = threading.Event(), threading.Event()

    def __call__(self, is_stopped: object) -> LocalRuntime:
        self.has_begun.set()
        assert self._go.wait(PATIENCE_S)
        return LocalRuntime(self.backend, ScheduleOptions())

    def release(self) -> None:
        self._go.set()


@no_pool(Reason.ONE_BACKEND)
async def test_a_scope_cancelled_twice_while_leaving_has_closed_the_engine() -> None:
    backend = small()
    backend.hold_at = 1
    engine, has_left = engine_on(backend, options=ENDLESS), anyio.Event()

    async def use() -> None:
        with anyio.CancelScope() as inner:
            scopes.append(inner)
            async with engine:
                engine.run(["a", "b"])
                await anyio.sleep_forever()
        has_left.set()

    scopes: list[anyio.CancelScope] = []
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(use)
        await anyio.to_thread.run_sync(backend.wait_until_held)
        for scope in (scopes[0], tasks.cancel_scope):
            scope.cancel()
            with anyio.CancelScope(shield=True):
                await anyio.wait_all_tasks_blocked()
        assert not has_left.is_set()
        backend.release()
    assert not owner_of(engine).is_alive()
    assert backend.is_closed


@thread_only(Reason.BY_HAND)
async def test_a_scope_cancelled_while_loading_has_closed_the_engine() -> None:
    opener = HeldOpener()
    engine = Engine(opener=opener)

    async def use() -> None:
        async with engine:
            await anyio.sleep_forever()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(use)
        await anyio.to_thread.run_sync(opener.has_begun.wait)
        tasks.cancel_scope.cancel()
        opener.release()
    assert opener.backend.is_closed


@thread_only(Reason.BY_HAND)
async def test_who_is_cancelled_before_entering_loads_nothing() -> None:
    opener = HeldOpener()
    with anyio.CancelScope() as scope:
        scope.cancel()
        async with Engine(opener=opener):
            pass
    assert not opener.has_begun.is_set()


@no_pool(Reason.ONE_BACKEND)
async def test_what_closing_raises_is_raised_to_who_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_on(small())
    close = engine.close

    def failing() -> None:
        close()
        raise OSError("not freed")

    monkeypatch.setattr(engine, "close", failing)
    with pytest.raises(OSError, match="not freed"):
        async with engine:
            pass


@thread_only(Reason.BY_HAND)
async def test_a_missing_model_raises_where_the_engine_is_entered(tmp_path: Path) -> None:
    later = cbatch.load(tmp_path / "none.gguf")
    with pytest.raises(ModelLoadError):
        async with later:
            pass


async def test_an_engine_closed_before_it_was_loaded_says_so(test_model: Path) -> None:
    engine = cbatch.load(test_model)
    engine.close()
    with pytest.raises(EngineClosedError):
        engine.run("Hi")


# ---- asyncio's own cancelling ----


@pytest.fixture
def only_asyncio(anyio_backend_name: str) -> None:
    if anyio_backend_name != "asyncio":
        pytest.skip("trio cancels scopes alone")


async def turns(n: int) -> None:
    """Let the other tasks have so many turns."""
    for _ in range(n):
        await checkpoint()


@thread_only(Reason.BY_HAND)
@pytest.mark.usefixtures("only_asyncio")
@pytest.mark.parametrize("n_between", [0, 1, 3])
async def test_a_task_cancelled_often_while_leaving_has_closed_the_engine(n_between: int) -> None:
    backend = small()
    backend.hold_at = 1
    engine = engine_on(backend, options=ENDLESS)

    async def use() -> None:
        async with engine:
            engine.run(["a", "b"])
            await anyio.sleep_forever()

    task = asyncio.create_task(use())
    await anyio.to_thread.run_sync(backend.wait_until_held)
    for _ in range(3):
        task.cancel()
        await turns(n_between)
    await anyio.wait_all_tasks_blocked()
    assert not task.done()
    backend.release()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not owner_of(engine).is_alive()
    assert backend.is_closed


@thread_only(Reason.BY_HAND)
@pytest.mark.usefixtures("only_asyncio")
async def test_a_task_cancelled_while_loading_has_the_loading_end_soon() -> None:
    begun, backend = threading.Event(), FakeBackend(2, 64, 64)

    def opener(is_stopped: Callable[[], bool]) -> LocalRuntime:
        begun.set()
        while not is_stopped():
            pass
        return LocalRuntime(backend, ScheduleOptions())

    async def use() -> None:
        async with Engine(opener=opener):
            pass

    task = asyncio.create_task(use())
    await anyio.to_thread.run_sync(begun.wait)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert backend.is_closed


@thread_only(Reason.BY_HAND)
@pytest.mark.usefixtures("only_asyncio")
@pytest.mark.parametrize("n_between", [0, 1, 3])
async def test_a_task_cancelled_often_while_loading_leaves_no_model(n_between: int) -> None:
    opener = HeldOpener()
    engine, has_entered = Engine(opener=opener), False

    async def use() -> None:
        nonlocal has_entered
        async with engine:
            has_entered = True

    task = asyncio.create_task(use())
    await anyio.to_thread.run_sync(opener.has_begun.wait)
    for _ in range(3):
        task.cancel()
        await turns(n_between)
    await anyio.wait_all_tasks_blocked()
    opener.release()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert opener.backend.is_closed
    assert not has_entered
    with pytest.raises(EngineClosedError):
        engine.run("a")


# ---- async generators as prompts ----


class Lines:
    """Prompts of an async generator, and how it ended."""

    def __init__(self, n: int | None = None, fails_at: int | None = None) -> None:
        self.n, self.fails_at = n, fails_at
        self.n_read, self.waits, self.has_ended = 0, anyio.Event(), anyio.Event()

    async def prompts(self) -> AsyncIterator[str]:
        try:
            with anyio.CancelScope():  # has to be left in the task that entered it
                while self.n is None or self.n_read < self.n:
                    if self.n_read == self.fails_at:
                        raise OSError("the source is gone")
                    await checkpoint()
                    self.n_read += 1
                    yield f"prompt {self.n_read - 1}"
        finally:
            self.has_ended.set()

    async def stalling(self) -> AsyncIterator[str]:
        yield "one"
        self.waits.set()
        try:
            await anyio.sleep_forever()
        finally:
            self.has_ended.set()


async def test_async_generator_gives_the_results_of_a_list(engine: Engine) -> None:
    short = {"max_tokens": 3, "temperature": 0, "seed": 1}
    lines = Lines(40)
    found = await engine.run(lines.prompts(), options=short)
    assert [r.text for r in found] == [
        r.text for r in await engine.run([f"prompt {i}" for i in range(40)], options=short)
    ]
    await lines.has_ended.wait()


async def test_async_generator_is_read_no_further_than_its_reader_needs(engine: Engine) -> None:
    lines, n_given = Lines(), 0
    reader = engine.run(lines.prompts(), options={"max_tokens": 2}).as_completed()
    async for _ in reader:
        n_given += 1
        assert lines.n_read <= n_given + N_AHEAD_PER_SLOT * engine.parallel
        if n_given == 60:
            break
    del reader
    await lines.has_ended.wait()


async def test_error_of_an_async_generator_comes_after_the_prompts_before_it(
    engine: Engine,
) -> None:
    lines = Lines(fails_at=5)
    with pytest.raises(
        BatchError, match=r"failed after 5 of them: OSError: the source is gone"
    ) as caught:
        await engine.run(lines.prompts(), options={"max_tokens": 2})
    assert len(caught.value.results) == 5


async def test_left_batch_ends_the_async_generator_that_it_waits_for(engine: Engine) -> None:
    lines = Lines()
    reader = engine.run(lines.stalling(), options={"max_tokens": 2}).as_completed()
    assert (await reader.__anext__()).finish_reason in ("stop", "length")
    await lines.waits.wait()
    reader.close()
    await lines.has_ended.wait()


@thread_only(Reason.BY_HAND)
async def test_engine_without_a_thread_refuses_an_async_generator() -> None:
    with (
        engine_on(FakeBackend(2, 64, 16), threaded=False) as engine,
        pytest.raises(ConfigError, match="loaded with threaded=True"),
    ):
        engine.run(Lines(1).prompts())
