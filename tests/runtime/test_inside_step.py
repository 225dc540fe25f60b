"""What callbacks and finalizers ask of an engine in the thread that computes, in the middle of its steps."""

from __future__ import annotations

import gc
import itertools
import logging
import random
import threading
from contextlib import closing, contextmanager, nullcontext, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cbatch.backend.fake import FakeBackend
from cbatch.engine_options import ScheduleOptions
from cbatch.errors import (
    DuplicateIdError,
    EngineClosedError,
    EngineError,
    InsideStepError,
    QueueFullError,
    RequestCancelledError,
)
from cbatch.messages import BatchPrompt
from cbatch.support.interrupts import HeldBack, note
from cbatch.support.logs import HeldLogs, Log
from tests.core.drivers import make_running
from tests.kinds import Reason, each_kind, engine_on, no_pool, thread_only
from tests.places import wait_until
from tests.profiles import examples
from tests.runtime.backends import (
    PATIENCE_S,
    GatedBackend,
    PokedBackend,
    all_results,
    batcher_of,
    books_of,
    in_owner,
    n_commands,
    owner_of,
    parts_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from cbatch.engine import Engine
    from cbatch.response import BatchResult
    from cbatch.runtime.batch_response import BatchResponse

pytestmark = each_kind

OPTIONS = {"max_tokens": 12, "ignore_eos": True}
PLACES = ("run", "tokenize", "finalizer", "llama's log", "the log", "admission", "recorder")


class Finalized:
    """Does something when the garbage collector finds it."""

    def __init__(self, do: Callable[[], object]) -> None:
        self.do, self.itself = do, self

    def __del__(self) -> None:
        self.do()


class Handler(logging.Handler):
    def __init__(self, do: Callable[[logging.LogRecord], object]) -> None:
        super().__init__()
        self.do = do

    def emit(self, record: logging.LogRecord) -> None:
        self.do(record)


@contextmanager
def logged(name: str, do: Callable[[logging.LogRecord], object]) -> Iterator[None]:
    """Have `do` called with what the logger `name` logs."""
    logger, handler = logging.getLogger(name), Handler(do)
    level = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


@contextmanager
def called_in(engine: Engine, backend: PokedBackend, do: Callable[[str], object]) -> Iterator[None]:
    """Have `do` called in every place of the steps of an engine, with the place's name."""

    def poke(place: str) -> None:
        do(place)
        Finalized(lambda: do("finalizer"))
        gc.collect()

    backend.poke = poke
    parts_of(engine).loop.on_admit = lambda _: do("admission")
    engine.record_steps(lambda _: do("recorder"))
    with (
        logged("cbatch.llama", lambda _: do("llama's log")),
        logged("cbatch", lambda r: do("the log") if r.name == "cbatch" else None),
    ):
        yield
    backend.poke = lambda _: None
    with suppress(EngineClosedError):
        engine.record_steps(None)


def tokens_alone(prompts: Sequence[str], n_tokens: int = 12) -> list[tuple[int, ...]]:
    with engine_on(FakeBackend(4, 256, 64), threaded=False, options=OPTIONS) as engine:
        return [
            engine.submit(prompt, options={"max_tokens": n_tokens, "seed": 1}).result().token_ids
            for prompt in prompts
        ]


def named(*ids: str) -> list[BatchPrompt]:
    return [BatchPrompt(prompt=f"prompt {id}", id=id, options={"seed": 1}) for id in ids]


@thread_only(Reason.OWNER)
@pytest.mark.parametrize("is_threaded", [False, True], ids=["by hand", "threaded"])
@pytest.mark.parametrize("place", PLACES)
def test_orders_in_the_middle_of_a_step_are_done_behind_it(place: str, is_threaded: bool) -> None:
    backend = PokedBackend(2, 256, 16)
    said: list[object] = []
    more: list[BatchResponse] = []

    def order(here: str) -> None:
        if here != place or said or "a" not in ids_of(engine) or "wait" not in ids_of(engine):
            return
        said.append(None)
        said.extend([engine.cancel("gone"), engine.pause("a"), engine.cancel("wait")])
        said.extend([engine.cancel("nobody"), engine.resume("paused"), engine.pause("paused")])
        more.extend([engine.submit(named("new")[0]), engine.run(named("new 2", "new 3"))])
        assert engine.stats().n_cells >= 0
        assert len(engine.slots()) == 2

    schedule = ScheduleOptions(share_prefixes=True)
    with engine_on(backend, options=OPTIONS, threaded=is_threaded, schedule=schedule) as engine:
        with called_in(engine, backend, order):
            brief = BatchPrompt(prompt="brief", id="brief", options={"max_tokens": 2})
            first = engine.run([brief, *named("a", "gone", "wait", "paused", "last")])
            engine.pause("paused") if not said else None
            while not said and (is_threaded or engine.step()):
                pass
            engine.resume("a")
            engine.resume("paused")
            results = all_results(first) + [r for some in more for r in all_results(some)]
        found = {r.id: r for r in results}
        assert said[1:5] == [True, True, True, False]
        assert engine.stats().n_held == 0
        assert not batcher_of(engine).imbalance()
    whole = [*found.keys() - {"gone", "wait", "brief"}]
    assert {found[id].finish_reason for id in ("gone", "wait")} == {"cancelled"}
    alone = tokens_alone([f"prompt {id}" for id in whole])
    assert [found[id].token_ids for id in whole] == alone


def error_of(work: Callable[[], object]) -> BaseException | None:
    try:
        work()
    except BaseException as error:
        return error
    return None


def ids_of(engine: Engine) -> Sequence[str]:
    return [*parts_of(engine).ids]


@thread_only(Reason.OWNER)
@pytest.mark.parametrize("is_threaded", [False, True], ids=["by hand", "threaded"])
@pytest.mark.parametrize("place", PLACES)
def test_what_would_wait_for_itself_is_refused_in_words(place: str, is_threaded: bool) -> None:
    backend = PokedBackend(2, 256, 16)
    caught: list[BaseException | None] = []
    response: list[BatchResponse] = []

    def ask(here: str) -> None:
        if here != place or caught or not response:
            return
        waits: list[Callable[[], object]] = [
            response[0].result,
            response[0].results,
            lambda: next(iter(response[0])),
            lambda: next(response[0].as_completed()),
            engine.compare_rows,
        ]
        if not is_threaded:
            waits.append(engine.step)
        caught.extend(map(error_of, waits))

    with engine_on(backend, options=OPTIONS, threaded=is_threaded) as engine:
        # the log is told behind the steps of an engine by hand, where one may wait
        is_free = not is_threaded and place in ("the log", "llama's log")
        with called_in(engine, backend, ask):
            response.append(engine.submit("prompt", options={"pause_every": 1}))
            all_results(engine.run(["x", "y", "z"]))
    if not is_free:
        assert {type(error) for error in caught} == {InsideStepError}
        assert "make it in another thread, or after the callback" in str(caught[0])


@no_pool(Reason.ONE_BACKEND)
def test_recorder_that_waits_for_a_result_is_told_and_called_no_more(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with engine_on(FakeBackend(2, 256, 16), options=OPTIONS) as engine:
        response = engine.submit("prompt")
        engine.record_steps(lambda _: response.result() if response.n_open else None)
        assert [r.finish_reason for r in all_results(engine.run(["b"]))] == ["length"]
        assert [r.finish_reason for r in all_results(response)] == ["length"]


def test_recorder_may_give_orders() -> None:
    with engine_on(FakeBackend(2, 1_000_000, 64), options={"ignore_eos": True}) as engine:
        response = engine.run(named("a", "b"), options={"max_tokens": 100_000})
        engine.record_steps(lambda _: [engine.cancel(id) for id in ("a", "b")])
        assert [r.finish_reason for r in all_results(response)] == ["cancelled"] * 2


@thread_only(Reason.OWNER)
@pytest.mark.parametrize("is_threaded", [False, True], ids=["by hand", "threaded"])
@pytest.mark.parametrize("place", ["run", "finalizer", "admission", "recorder", "llama's log"])
def test_close_in_the_middle_of_a_step_ends_the_engine_behind_it(
    place: str, is_threaded: bool
) -> None:
    backend = PokedBackend(2, 256, 16)
    engine = engine_on(backend, options=OPTIONS | {"max_tokens": 200}, threaded=is_threaded)
    with called_in(engine, backend, lambda here: engine.close() if here == place else None):
        results = all_results(engine.run(["a", "b", "c"]))
    assert [r.finish_reason for r in results[:2]] == ["cancelled"] * 2
    assert isinstance(results[2].error, RequestCancelledError)
    if is_threaded:
        owner_of(engine).join(PATIENCE_S)
    with pytest.raises(EngineClosedError):
        engine.submit("d")
    engine.close()


@thread_only(Reason.OWNER)
@pytest.mark.parametrize("when_full", ["reject", "wait"])
def test_full_queue_is_told_in_the_middle_of_a_step(when_full: Any) -> None:
    backend = PokedBackend(1, 256, 16)
    schedule = ScheduleOptions(max_queue=2, when_full=when_full)
    said: list[BaseException | None] = []
    more: list[BatchResponse] = []

    def submit(id: str) -> None:
        more.append(engine.submit(named(id)[0]))

    def fill(here: str) -> None:
        if here == "run" and not said:
            said.extend(error_of(partial(submit, id)) for id in "abcd")

    with engine_on(backend, options=OPTIONS, schedule=schedule) as engine:
        with called_in(engine, backend, fill):
            all_results(engine.run(["first"]))
        assert [one.result().finish_reason for one in more] == ["length"] * 2
        assert said[:2] == [None, None]
        assert {type(error) for error in said[2:]} == {QueueFullError}


@no_pool(Reason.ONE_BACKEND)
@pytest.mark.parametrize("is_lock", [True, False])
def test_finalizer_under_a_lock_gives_orders_and_does_not_wait(is_lock: bool) -> None:
    backend = GatedBackend(2, 256, 16, hold_at=2)
    with engine_on(backend, options=OPTIONS) as engine:
        response = engine.run(named("a", "b", "c"))
        backend.wait_until_held()
        lock = threading.RLock()
        note(lock)
        with lock if is_lock else HeldBack():
            assert engine.cancel("a") is True  # and the run is held
            assert engine.pause("b") is True
            assert engine.resume("c") is False
        wait_until(lambda: n_commands(engine) > 0)
        backend.release()
        engine.resume("b")
        assert [r.finish_reason for r in all_results(response)] == ["cancelled", "length", "length"]


@thread_only(Reason.AT_ONCE)
@pytest.mark.parametrize("when_full", ["reject", "wait"])
def test_finalizer_under_a_lock_submits_and_does_not_wait(when_full: Any) -> None:
    backend = GatedBackend(1, 256, 16, hold_at=2)
    schedule = ScheduleOptions(max_queue=1, when_full=when_full)
    with engine_on(backend, options=OPTIONS, schedule=schedule) as engine:
        response = engine.run(["a"])
        backend.wait_until_held()
        with HeldBack():
            more = engine.submit("b")
        backend.release()
        assert [r.finish_reason for r in all_results(response) + all_results(more)] == [
            "length"
        ] * 2


@no_pool(Reason.ONE_BACKEND)
@pytest.mark.parametrize("is_handler", [True, False])
def test_close_where_others_may_wait_returns_at_once(is_handler: bool) -> None:
    backend = GatedBackend(1, 256, 16, hold_at=2)
    engine = engine_on(backend, options=OPTIONS)
    response = engine.run(["a", "b"])
    backend.wait_until_held()
    if is_handler:
        with logged("cbatch.test", lambda _: engine.close()):
            Log("cbatch.test").tell("event")
    else:
        with HeldBack():
            engine.close()
    backend.release()
    assert {r.finish_reason for r in all_results(response)} <= {"cancelled", "error"}
    engine.close()


@no_pool(Reason.ONE_BACKEND)
@pytest.mark.parametrize("place", ["held back", "log handler", "held log", "worker's record"])
def test_questions_where_others_may_wait_are_answered_at_once_or_refused(place: str) -> None:
    backend, said = GatedBackend(2, 256, 16, hold_at=2), list[object]()

    def ask(_: object = None) -> None:
        said.append(engine.stats().n_submitted)
        with pytest.raises(InsideStepError):
            engine.run(["b"]).results()
        said.append("refused")

    with engine_on(backend, options=OPTIONS) as engine:
        engine.stats()
        response = engine.run(["a"])
        backend.wait_until_held()
        if place == "held back":
            with HeldBack():
                ask()
        elif place == "worker's record":
            with logged("cbatch.test", ask):
                Log("cbatch.test").pass_on(logging.INFO, "event", {})
        else:
            with logged("cbatch.test", ask), HeldLogs() if place == "held log" else nullcontext():
                Log("cbatch.test").tell("event")
        assert said in ([1, "refused"], [0, "refused"])  # what a worker said last
        backend.release()
        assert [r.finish_reason for r in all_results(response)] == ["length"]


@thread_only(Reason.OWNER)
def test_handler_in_the_thread_of_one_engine_waits_for_no_other() -> None:
    backend, seen = GatedBackend(2, 256, hold_at=2), list[int]()
    with (
        engine_on(backend, options=OPTIONS) as held,
        engine_on(FakeBackend(2, 256, 16), options=OPTIONS) as engine,
    ):
        response = held.run(["a"])
        backend.wait_until_held()
        with logged("cbatch", lambda _: seen.append(held.stats().n_running)):
            all_results(engine.run(["b"]))
            wait_until(lambda: seen)
        backend.release()
        all_results(response)
    assert set(seen) == {1}


@thread_only(Reason.OWNER)
def test_handlers_get_lines_in_order_and_find_no_step_half_done() -> None:
    backend, seen = PokedBackend(2, 256, 16), list[str]()

    def look(record: logging.LogRecord) -> None:
        seen.append(record.getMessage().split()[0])
        imbalances.append(batcher_of(engine).imbalance())
        raise SystemExit

    imbalances: list[str] = []
    with engine_on(backend, options=OPTIONS | {"max_tokens": 2}) as engine:
        with logged("cbatch.llama", look), logged("cbatch", look):
            all_results(engine.run(["a"]))
            engine.stats()
        assert seen == ["a", "a", "request"] or seen == ["a", "request"]
        assert not any(imbalances)
        assert [r.finish_reason for r in all_results(engine.run(["b"]))] == ["length"]


def test_callbacks_that_raise_system_exit_disturb_no_request() -> None:
    places: set[str] = set()

    def leave(place: str) -> None:
        if threading.current_thread() is not threading.main_thread():
            places.add(place)
            raise SystemExit

    with engine_on(FakeBackend(2, 256, 16), options=OPTIONS) as engine:
        engine.record_steps(lambda _: leave("recorder"))
        with logged("cbatch", lambda _: leave("log")):
            for _ in range(2):
                found = all_results(engine.run(["a", "b"]))
                assert [r.finish_reason for r in found] == ["length"] * 2
            wait_until(lambda: places == {"recorder", "log"})


@thread_only(Reason.OWNER)
def test_handler_in_another_thread_waits_for_no_step() -> None:
    seen: list[tuple[str, int]] = []

    def look(record: logging.LogRecord) -> None:
        if record.getMessage().startswith("request") and threading.current_thread() is not owner:
            # as if the owner waited for the lock of this handler, it does nothing before this returns
            backend.wait_until_held()
            engine.cancel("long")
            seen.append((threading.current_thread().name, engine.stats().n_running))
            backend.release()

    backend = GatedBackend(2, 256, hold_at=2)
    with engine_on(backend, options=OPTIONS) as engine:
        owner = owner_of(engine)
        long = engine.run([BatchPrompt(prompt="long", id="long", options={"max_tokens": 100})])
        with logged("cbatch", look):
            refused = engine.run(iter([b"no prompt"]))  # type: ignore[arg-type]
            assert [r.finish_reason for r in all_results(refused)] == ["error"]
            assert [r.finish_reason for r in all_results(long)] == ["cancelled"]
    assert seen == [("cbatch-feed", 1)]


# ---- books that do not balance ----


def lose_a_slot(engine: Engine) -> None:
    books_of(engine).cells.ledger.n_free_slots -= 1


def lose_cells(engine: Engine) -> None:
    books_of(engine).cells.ledger.n_used += 3


def keep_a_ghost(engine: Engine) -> None:
    ledger = books_of(engine).cells.ledger
    ledger.assign(ledger.free_slots[0], make_running())


def count_saved(engine: Engine) -> None:
    books_of(engine).saved.n_bytes += 7


@thread_only(Reason.OWNER)
@pytest.mark.parametrize("unbalance", [lose_a_slot, lose_cells, keep_a_ghost, count_saved])
def test_idle_engine_whose_books_are_wrong_says_so_and_begins_anew(
    unbalance: Callable[[Engine], None],
    caplog: pytest.LogCaptureFixture,
    imbalances: list[str],
) -> None:
    with engine_on(FakeBackend(2, 256, 16), options=OPTIONS) as engine:
        first = [r.token_ids for r in all_results(engine.run(named("a", "b")))]
        in_owner(engine, lambda: unbalance(engine))
        engine.stats()
        in_owner(engine, int)
        assert "internal error, all slots are emptied" in caplog.text
        assert [r.token_ids for r in all_results(engine.run(named("a", "b")))] == first
        assert not in_owner(engine, batcher_of(engine).imbalance)
    imbalances.clear()


# ---- random workloads ----


class Chaos:
    """Gives random orders wherever an engine calls, and knows which requests they concern."""

    def __init__(self, engine: Engine, chance: random.Random, n_orders: int) -> None:
        self.engine, self.chance, self.n_left = engine, chance, n_orders
        self.responses: dict[str, BatchResponse] = {}
        self.cut: set[str] = set()
        self.new_ids = map("r{}".format, itertools.count())
        self.ids: list[str] = []
        self.places: set[str] = set()
        self.under_way: list[str] = []
        self.is_over = False

    def submit(self) -> None:
        id = next(self.new_ids)
        self.ids.append(id)  # first: another thread may cancel all
        self.responses[id] = self.engine.submit(named(id)[0])

    def order(self, place: str) -> None:
        self.under_way.append(place)
        try:
            if not self.is_over:
                self.order_in(place)
        finally:
            self.under_way.pop()

    def order_in(self, place: str) -> None:
        if self.n_left <= 0 or self.chance.random() < 0.5:
            return
        self.n_left -= 1
        self.places.add(place)
        with suppress(EngineClosedError):
            self.do(self.chance.choice([*self.responses]))

    def do(self, id: str) -> None:
        engine = self.engine
        match self.chance.randrange(9):
            case 0:
                self.cut.add(id)
                engine.cancel(id)
            case 1 | 2:
                engine.pause(id)
            case 3 | 4:
                engine.resume(id)
            case 5:
                self.submit()
            case 6:
                assert engine.stats().n_running >= 0
            case 7:
                self.extend(id)
            case 8 if self.chance.random() < 0.2:
                self.cut |= {*self.ids}
                engine.cancel_all()

    def extend(self, id: str) -> None:
        response = self.responses[id]
        if not response.n_open:
            [result] = response.results(return_errors=True)
            if result.finish_reason == "length":
                with suppress(DuplicateIdError):
                    self.responses[f"{id} {self.n_left}"] = self.engine.extend(result, 5)

    def results(self) -> dict[str, BatchResult]:
        """Every result, once no order can bring another request."""
        self.go_on()
        self.is_over = True
        wait_until(lambda: not self.under_way)
        self.go_on()
        return {id: all_results(r)[0] for id, r in self.responses.items()}

    def go_on(self) -> None:
        while still := [r for r in [*self.responses.values()] if r.n_open]:
            for id in [*self.responses]:
                self.engine.resume(id)
            with suppress(TimeoutError, EngineError):  # it was paused again
                still[0].results(timeout=0.01, return_errors=True)


@thread_only(Reason.LONG)
@settings(max_examples=examples(60), deadline=None)
@given(st.integers(0, 2**32), st.booleans(), st.booleans(), st.integers(1, 4))
def test_random_orders_from_everywhere_change_no_other_answer(
    seed: int, is_threaded: bool, collects: bool, n_slots: int
) -> None:
    backend, chance = PokedBackend(n_slots, 64, 16), random.Random(seed)
    before = gc.get_threshold()
    gc.freeze()  # what was there before is not looked through a thousand times
    with closing(engine_on(backend, options=OPTIONS, threaded=is_threaded)) as engine:
        chaos = Chaos(engine, chance, 40)
        if collects:
            gc.set_threshold(1, 10, 10)
        try:
            with called_in(engine, backend, chaos.order):
                for _ in range(chance.randrange(2, 12)):
                    chaos.submit()
                found = chaos.results()
        finally:
            gc.set_threshold(*before)
        assert (engine.stats().n_held, engine.stats().n_running, ids_of(engine)) == (0, 0, [])
    whole = {id: r for id, r in found.items() if r.id not in chaos.cut}
    alone = tokens_alone([f"prompt {r.id}" for r in whole.values()], 64)
    for result, tokens in zip(whole.values(), alone, strict=True):
        assert result.finish_reason == "length"
        assert result.token_ids == tokens[: len(result.token_ids)]
        assert len(result.token_ids) >= 12
