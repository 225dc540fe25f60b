"""Ctrl-C at every moment: raised when nothing is torn by it, and nothing is left behind."""

from __future__ import annotations

import asyncio
import gc
import linecache
import os
import random
import signal
import sys
import threading
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

import pytest

import cbatch.loading
from cbatch.backend.fake import FakeBackend
from cbatch.backend.threads import run_in_fresh_thread
from cbatch.engine import Engine
from cbatch.engine_options import ScheduleOptions
from cbatch.errors import EngineClosedError
from cbatch.messages import BatchPrompt, as_prompts
from cbatch.runtime.local import LocalRuntime
from cbatch.runtime.work_thread import WorkThread
from cbatch.support.interrupts import HeldBack, Latch, Postponed, run_async
from tests import interrupt_runs
from tests.kinds import Reason, each_kind, engine_on, no_pool
from tests.profiles import lines_apart
from tests.runtime.backends import PATIENCE_S, all_results, in_thread, streams

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path
    from types import FrameType

    from cbatch.core.plan import StepPlan, StepResult
    from cbatch.runtime.batch_response import BatchResponse


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return interrupt_runs.make_model(tmp_path_factory.mktemp("interrupted"))


@each_kind
@pytest.mark.real
@pytest.mark.parametrize("scene", interrupt_runs.SCENES)
def test_ctrl_c_ends_no_process_and_leaves_nothing_behind(scene: str, model: Path) -> None:
    assert interrupt_runs.run(scene, random.randrange(2**32), model) == ""


# ---- what is postponed ----


def press() -> None:
    signal.raise_signal(signal.SIGINT)


def interrupted(work: Callable[[], object]) -> KeyboardInterrupt:
    """What `work` raises, which has to be Ctrl-C."""
    with pytest.raises(KeyboardInterrupt) as caught:
        work()
    return caught.value


def test_ctrl_c_in_a_block_is_raised_behind_it() -> None:
    done: list[str] = []

    def work() -> None:
        with Postponed() as signals:
            assert not signals.has_struck
            press()
            press()
            assert signals.has_struck
            done.append("all")
        done.append("too much")

    interrupted(work)
    assert done == ["all"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_in_a_block_within_a_block_is_raised_behind_both() -> None:
    done: list[str] = []

    def work() -> None:
        with Postponed():
            with Postponed():
                press()
            done.append("outer")

    interrupted(work)
    assert done == ["outer"]


def test_ctrl_c_comes_before_the_error_of_its_block() -> None:
    def work() -> None:
        with Postponed():
            press()
            raise OSError("no room")

    assert isinstance(interrupted(work).__context__, OSError)


@pytest.fixture
def handled() -> Iterator[list[int]]:
    """Numbers of signals for which a handler of the program's own was called, which raises nothing."""
    seen: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        seen.append(number)

    before = signal.signal(signal.SIGINT, handle)
    yield seen
    signal.signal(signal.SIGINT, before)


def test_handler_that_raises_nothing_is_called_at_once(handled: list[int]) -> None:
    with Postponed() as signals:
        press()
        assert handled == [signal.SIGINT]
        assert not signals.has_struck
    press()
    assert len(handled) == 2


def test_handler_set_in_a_block_stays(handled: list[int]) -> None:
    with Postponed():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


@pytest.mark.skipif(not hasattr(signal, "SIGALRM"), reason="POSIX alone has it")
def test_other_signals_that_raise_are_postponed_too() -> None:
    def handle(number: int, frame: FrameType | None) -> None:
        raise TimeoutError("too long")

    done: list[str] = []

    def work() -> None:
        with Postponed():
            signal.raise_signal(signal.SIGALRM)
            done.append("all")

    before = signal.signal(signal.SIGALRM, handle)
    try:
        with pytest.raises(TimeoutError):
            work()
    finally:
        signal.signal(signal.SIGALRM, before)
    assert done == ["all"]


class Alarm:
    """A program's own handler of SIGALRM."""

    def strike(self, number: int, frame: FrameType | None) -> None:
        raise TimeoutError("too long")

    __call__ = strike


@pytest.mark.skipif(not hasattr(signal, "SIGALRM"), reason="POSIX alone has it")
@pytest.mark.parametrize("handle", [Alarm.__call__.__get__(Alarm()), Alarm(), partial(Alarm())])
def test_error_of_a_handler_is_raised_as_it_is(handle: Callable[..., object]) -> None:
    def prompts() -> Iterator[str]:
        yield "a"
        signal.raise_signal(signal.SIGALRM)

    def record(_: object) -> None:
        signal.raise_signal(signal.SIGALRM)

    before = signal.signal(signal.SIGALRM, handle)
    try:
        with Engine(FakeBackend(), threaded=False) as engine:
            with pytest.raises(TimeoutError):
                as_prompts(prompts())
            engine.record_steps(record)
            with pytest.raises(TimeoutError):
                engine.run(["a"], options={"max_tokens": 1}).results()
    finally:
        signal.signal(signal.SIGALRM, before)


def test_block_in_another_thread_is_an_ordinary_one() -> None:
    def enter() -> object:
        with Postponed():
            return signal.getsignal(signal.SIGINT)

    assert in_thread(enter)() is signal.default_int_handler


# ---- waits ----


def test_latch_that_was_waited_for_in_vain_lets_everybody_through() -> None:
    latch, n_pressed = Latch(), 0
    waiting = [in_thread(latch.wait) for _ in range(3)]
    for _ in range(3):
        timer = threading.Timer(0.01, signal.pthread_kill, (threading.get_ident(), signal.SIGINT))
        try:
            timer.start()
            latch.wait()
        except KeyboardInterrupt:
            n_pressed += 1
    assert n_pressed == 3
    latch.open()
    latch.wait()
    for wait in waiting:
        wait()


def test_ctrl_c_while_work_is_done_aside_is_raised_when_it_has_ended() -> None:
    main, has_ended = threading.get_ident(), False

    def work() -> None:
        nonlocal has_ended
        for _ in range(3):
            signal.pthread_kill(main, signal.SIGINT)
        has_ended = True

    with pytest.raises(KeyboardInterrupt):
        run_in_fresh_thread(work)
    assert has_ended


# ---- engines ----


def test_ctrl_c_while_loading_frees_the_model_and_the_next_use_loads_again() -> None:
    loaded: list[FakeBackend] = []

    def opener(is_stopped: Callable[[], bool]) -> LocalRuntime:
        loaded.append(FakeBackend())
        if len(loaded) == 1:
            press()
            assert is_stopped()
        return LocalRuntime(loaded[-1], ScheduleOptions())

    engine = Engine(opener=opener)
    with pytest.raises(KeyboardInterrupt):
        engine.open()
    assert loaded[0].is_closed
    assert len(all_results(engine.run(["a"], options={"max_tokens": 2}))) == 1
    engine.close()
    assert [b.is_closed for b in loaded] == [True, True]


def test_closing_while_another_thread_loads_breaks_that_off() -> None:
    begun, backend = threading.Event(), FakeBackend()

    def opener(is_stopped: Callable[[], bool]) -> LocalRuntime:
        begun.set()
        while not is_stopped():
            pass
        return LocalRuntime(backend, ScheduleOptions())

    engine = Engine(opener=opener)
    wait = in_thread(engine.open)
    begun.wait()
    engine.close()
    with pytest.raises(EngineClosedError, match="cancelled"):
        wait()
    assert backend.is_closed


class Pressing(FakeBackend):
    """Has Ctrl-C pressed within each run, before and after its work."""

    def run(self, plan: StepPlan) -> StepResult:
        self.interrupt()
        if not plan.spans:
            return super().run(plan)
        press()
        result = super().run(plan)
        press()
        return result


@each_kind
def test_ctrl_c_in_every_step_by_hand_changes_nothing() -> None:
    options = {"ignore_eos": True, "max_tokens": 5, "seed": 1}
    with engine_on(FakeBackend(2, 64, 16)) as engine:
        expected = streams(engine.run(["a", "b", "c"], options=options))
    engine = engine_on(Pressing(2, 64, 16), options=options, threaded=False)
    response, n_pressed = engine.run(["a", "b", "c"]), 0

    def is_stepped() -> bool:
        nonlocal n_pressed
        try:
            return engine.step()
        except KeyboardInterrupt:
            n_pressed += 1
            return True

    while is_stepped():
        pass
    assert n_pressed > 5
    assert streams(response) == expected
    engine.close()


def test_frames_of_what_was_postponed_are_given_up() -> None:
    class Kept:
        pass

    def use(kept: Kept) -> None:
        with Postponed():
            press()

    kept = Kept()
    with pytest.raises(KeyboardInterrupt) as caught:
        use(kept)
    del caught
    assert sys.getrefcount(kept) == 2


# ---- handlers that use the engine ----


@contextmanager
def alarms(handle: Callable[[], object]) -> Iterator[Callable[[], None]]:
    """Have `handle` called by a signal; gives what sends it."""
    before = signal.signal(signal.SIGTERM, lambda number, frame: handle() and None)
    try:
        yield partial(signal.raise_signal, signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)


class Ringing(FakeBackend):
    """Does one step a run, and sends a signal in the middle of each."""

    ring: Callable[[], None]

    def run(self, plan: StepPlan) -> StepResult:
        self.interrupt()
        result = super().run(plan)
        if plan.spans:
            self.ring()
        return result


def test_handlers_held_back_by_a_block_are_called_after_it_in_order() -> None:
    seen: list[str] = []

    def handle() -> None:
        seen.append("handled")
        raise OSError("no room")

    def work() -> None:
        with HeldBack(), HeldBack():
            ring()
            press()
            seen.append("all")

    with alarms(handle) as ring, pytest.raises(OSError, match="no room"):
        work()
    assert seen == ["all", "handled"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("order", ["cancel", "pause", "stats", "submit", "cancel_all"])
def test_handler_that_uses_an_engine_by_hand_in_every_step_finds_it_whole(order: str) -> None:
    backend = Ringing(2, 64, 16)
    engine = engine_on(backend, threaded=False, options={"ignore_eos": True, "max_tokens": 5})
    response = engine.run(["a", "b", "c", "d", "e"])
    asked = iter(response.ids)
    added: list[BatchResponse] = []

    def handle() -> None:
        id = next(asked, "")
        if order == "cancel" and id:
            engine.cancel(id)
        elif order == "pause" and id:
            assert engine.pause(id)
            assert engine.resume(id)
        elif order == "submit" and id:
            added.append(engine.submit(id))
        elif order == "cancel_all":
            engine.cancel_all()
        engine.stats()

    with alarms(handle) as ring:
        backend.ring = ring
        results = all_results(response)
        later = [all_results(more) for more in added]
    expected = "cancelled" if order.startswith("cancel") else "length"
    assert [(r.id, r.finish_reason) for r in results] == [(id, expected) for id in response.ids]
    assert [r.finish_reason for [r] in later] == ["length"] * len(added)
    assert len(added) == (5 if order == "submit" else 0)
    engine.close()


@no_pool(Reason.ONE_BACKEND)
@pytest.mark.parametrize("is_threaded", [True, False], ids=["threaded", "by hand"])
def test_handler_that_closes_an_engine_being_closed_waits_for_nobody(*, is_threaded: bool) -> None:
    class Closing(FakeBackend):
        ring: Callable[[], None]

        def close(self) -> None:
            self.ring()
            super().close()

    backend = Closing(2, 64, 16)
    engine = engine_on(backend, threaded=is_threaded)
    has_struck = threading.Event()

    def handle() -> None:
        has_struck.set()
        engine.close()

    def ring_main() -> None:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)
        assert has_struck.wait(PATIENCE_S)

    with alarms(handle) as ring:
        backend.ring = ring_main if is_threaded else ring
        response = engine.run(["a", "b", "c"], options={"ignore_eos": True})
        engine.close()
    assert has_struck.is_set()
    assert backend.is_closed
    # a worker may be done before it reads that it is to end
    assert {r.finish_reason for r in all_results(response)} <= {"cancelled", "window"}


def test_handler_that_closes_an_engine_by_hand_ends_who_waits_for_it() -> None:
    backend = Ringing(2, 64, 16)
    engine = engine_on(backend, threaded=False)
    response = engine.run(["a", "b", "c"], options={"ignore_eos": True, "max_tokens": 5})
    with alarms(engine.close) as ring:
        backend.ring = ring
        results = all_results(response)
    assert backend.is_closed
    assert [r.finish_reason for r in results] == ["cancelled"] * 3


Traced: TypeAlias = "Callable[[FrameType, str, object], Traced | None]"


def struck_at_line(
    n_line: int, work: Callable[[], object], number: signal.Signals = signal.SIGTERM
) -> bool:
    """Do `work`, and send a signal before the n-th line of cbatch that it executes; whether it has so many.

    Where that is the end of a `with`, the signal comes a line later: Python leaves a lock before it looks for signals.
    """
    n_left, last_lines, has_struck = n_line, dict[int, int](), False

    def trace(frame: FrameType, event: str, argument: object) -> Traced | None:
        nonlocal n_left, has_struck
        if has_struck or f"{os.sep}cbatch{os.sep}" not in frame.f_code.co_filename:
            return None
        n_left -= event == "line"
        is_back = event == "line" and frame.f_lineno < last_lines.get(id(frame), 0)
        last_lines[id(frame)] = 0 if event == "call" else frame.f_lineno
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
        has_struck = n_left < 0 and not (is_back and line.lstrip().startswith("with "))
        if has_struck:
            sys.settrace(None)
            signal.raise_signal(number)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return has_struck


@pytest.mark.parametrize("block", [Postponed, HeldBack])
def test_exception_of_any_handler_is_raised_behind_the_block(block: type[Postponed]) -> None:
    passed = list[signal.Signals]()

    def handle(*_: object) -> None:
        raise TimeoutError

    def work(number: signal.Signals) -> None:
        with block():
            signal.raise_signal(number)
            passed.append(number)

    numbers = [
        signal.SIGINT,
        signal.SIGIO,
        signal.SIGPIPE,
        signal.SIGPROF,
        signal.SIGVTALRM,
        signal.SIGWINCH,
    ]
    for number in numbers:
        before = signal.signal(number, handle)
        try:
            with pytest.raises(TimeoutError):
                work(number)
        finally:
            signal.signal(number, before)
    assert passed == numbers


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("block", [Postponed, HeldBack])
def test_signal_at_any_line_of_a_block_leaves_no_handler_behind(
    block: type[Postponed], number: signal.Signals
) -> None:
    def enter() -> None:
        with block():
            pass

    def raise_it() -> None:
        raise KeyboardInterrupt

    n_line, is_struck = 0, True
    with alarms(raise_it):
        before = [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)]
        while is_struck:
            try:
                is_struck = struck_at_line(n_line, enter, number)
            except KeyboardInterrupt:
                is_struck = True
            found = [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)]
            for each, handler in zip((signal.SIGTERM, signal.SIGINT), before, strict=True):
                signal.signal(each, handler)
            assert found == before, n_line
            n_line += 1
    assert n_line > 10


WORKS: dict[str, Callable[[Engine, BatchResponse], object]] = {
    "results": lambda _, response: all_results(response),
    "chunks": lambda _, response: list(response),
    "cancel": lambda _, response: response.cancel(),
    "stats": lambda engine, _: engine.stats(),
    "run": lambda engine, _: all_results(engine.run([BatchPrompt(prompt="d", id="own")])),
    "read": lambda engine, _: list(engine.run(iter(["d", "e"])).as_completed()),
}


@no_pool(Reason.LONG)
@pytest.mark.parametrize("name", WORKS)
def test_handler_at_any_line_may_ask_the_thread_that_computes(name: str) -> None:
    options = {"ignore_eos": True, "max_tokens": 2, "seed": 1}
    n_line, is_struck = 0, True
    while is_struck:
        with engine_on(FakeBackend(2, 64, 16), options=options) as engine:
            response = engine.run(["a", "b", "c"])
            added: list[BatchResponse] = []

            def handle(engine: Engine = engine, added: list[BatchResponse] = added) -> None:
                engine.cancel("1")
                engine.stats()
                added.append(engine.submit("from the handler"))

            with alarms(handle):
                is_struck = struck_at_line(n_line, partial(WORKS[name], engine, response))
            assert len(all_results(response)) == 3
            assert [len(all_results(more)) for more in added] == [1] * is_struck
            assert engine.stats().n_running == 0
        n_line += lines_apart(3)
    assert n_line > 10


@no_pool(Reason.LONG)
def test_ctrl_c_at_any_line_of_a_run_leaves_no_id_taken() -> None:
    own = BatchPrompt(prompt="a", id="own", options={"ignore_eos": True, "max_tokens": 2})

    def press_main() -> None:
        raise KeyboardInterrupt

    n_line, is_struck = 0, True
    kept: list[BatchResponse] = []  # what strikes where one is dropped is lost, as Python has it
    with engine_on(FakeBackend(2, 64, 16)) as engine, alarms(press_main):
        while is_struck:
            try:
                is_struck = struck_at_line(n_line, lambda: kept.append(engine.run([own])))
            except KeyboardInterrupt:
                is_struck = True
            engine.cancel_all()
            [result] = all_results(engine.run([own]))
            assert result.finish_reason == "length"
            n_line += lines_apart(2)
    assert n_line > 10


def test_ctrl_c_at_any_line_of_the_first_work_starts_one_thread() -> None:
    n_line, is_struck = 0, True
    while is_struck:
        done: list[int] = []
        work = WorkThread(f"struck {n_line}", is_threaded=True)
        with suppress(KeyboardInterrupt):
            is_struck = struck_at_line(n_line, lambda: work.do(bool), signal.SIGINT)  # noqa: B023
        work.do(partial(done.append, n_line))
        n_threads = sum(t.name == f"struck {n_line}" for t in threading.enumerate())
        assert n_threads == 1, "close() would end one of them, and wait for the other"
        work.close()
        assert done == [n_line]
        n_line += 1
    assert n_line > 10


@pytest.mark.usefixtures("new_objects_only")
def test_ctrl_c_at_any_line_of_a_load_frees_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    backends: list[FakeBackend] = []
    kept: list[Engine] = []

    def opener(is_stopped: Callable[[], bool]) -> LocalRuntime:
        backends.append(FakeBackend())
        return LocalRuntime(backends[-1], ScheduleOptions())

    def unloaded(*args: object, **given: object) -> Engine:
        return Engine(opener=opener)

    monkeypatch.setattr(cbatch.loading, "_unloaded", unloaded)
    n_line, n_broken_off, is_struck = 0, 0, True
    while is_struck:
        try:
            is_struck = struck_at_line(n_line, lambda: kept.append(cbatch.load()), signal.SIGINT)
        except KeyboardInterrupt:
            n_broken_off += bool(backends)
        gc.collect()
        assert sum(not b.is_closed for b in backends) == len(kept), n_line
        for engine in kept:
            engine.close()
        backends.clear()
        kept.clear()
        n_line += lines_apart(1)
    assert n_broken_off > 10


def test_signal_just_before_a_task_is_woken_ends_the_loop() -> None:
    """Raised there by the handler, `asyncio.run` would wait for the task for ever."""
    ended: list[str] = []

    def strike(frame: FrameType, event: str, _: object) -> None:
        callback = getattr(frame.f_locals.get("self"), "_callback", None)
        if (
            event == "call"
            and frame.f_code.co_name == "_run"
            and "wakeup" in repr(callback).lower()
        ):
            sys.settrace(None)
            signal.raise_signal(signal.SIGTERM)

    async def wait() -> None:
        try:
            await asyncio.sleep(0.01)
            sys.settrace(strike)
            await asyncio.sleep(0.01)
            await asyncio.sleep(60)
        finally:
            ended.append("task")

    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
    try:
        with pytest.raises(SystemExit, match="3"):
            run_async(wait())
    finally:
        sys.settrace(None)
        signal.signal(signal.SIGTERM, before)
    assert ended == ["task"]


def test_loop_returns_or_raises_what_its_coroutine_does() -> None:
    async def fail() -> int:
        await asyncio.sleep(0)
        raise ValueError("no")

    assert run_async(asyncio.sleep(0, 5)) == 5
    with pytest.raises(ValueError, match="no"):
        run_async(fail())


@pytest.mark.real
def test_ctrl_c_at_any_moment_of_tokenizing_keeps_no_lock_of_the_model(test_model: Path) -> None:
    """Also amid `threading`'s own Python code. Before, one of some twenty kept a lock."""

    def strike(*_: object) -> None:
        raise KeyboardInterrupt

    drawn = random.Random(1)
    before = signal.signal(signal.SIGALRM, strike)
    with cbatch.loading.load(test_model, parallel=1, ctx_per_seq=256) as engine:
        try:
            for _ in range(400):
                with suppress(KeyboardInterrupt):
                    try:
                        signal.setitimer(signal.ITIMER_REAL, drawn.uniform(1e-6, 6e-4))
                        while True:
                            engine.tokenize("abc")
                    finally:
                        signal.setitimer(signal.ITIMER_REAL, 0)
        finally:
            signal.signal(signal.SIGALRM, before)
        wait = in_thread(lambda: engine.tokenize("abc"))
        assert wait()
        in_thread(engine.close)()
