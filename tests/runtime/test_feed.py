"""Prompts from a generator: read as slots and reader take them, and nothing left behind whichever way it ends."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections import deque
from itertools import count
from typing import TYPE_CHECKING, Any, TypeVar

import pytest

from cbatch.backend.fake import FakeBackend
from cbatch.errors import (
    ConfigError,
    DuplicateIdError,
    EngineClosedError,
    PromptError,
    RequestCancelledError,
    RequestFailedError,
)
from cbatch.messages import BatchPrompt
from cbatch.progress import BatchSnapshot, SilentView
from cbatch.response import BatchError, BatchResult
from cbatch.runtime.mailbox import N_AHEAD_PER_SLOT
from cbatch.runtime.sequences import SequenceMaker
from tests.kinds import Reason, each_kind, engine_on, no_pool, thread_only
from tests.places import wait_until
from tests.runtime.backends import (
    PATIENCE_S,
    FailingBackend,
    GatedBackend,
    all_results,
    ids_in_flight,
    in_thread,
    mailbox_of,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Iterator

    from cbatch.engine import Engine
    from cbatch.runtime.batch_response import BatchResponse

T = TypeVar("T")

pytestmark = each_kind

N_SLOTS = 2
N_AHEAD = N_AHEAD_PER_SLOT * N_SLOTS
SHORT = {"max_tokens": 3, "temperature": 0, "ignore_eos": True, "seed": 1}


@pytest.fixture(params=[True, False], ids=["threaded", "by hand"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    with engine_on(FakeBackend(N_SLOTS, 64, 16), options=SHORT, threaded=request.param) as made:
        yield made
    assert_no_feed()


@pytest.fixture
def threaded() -> Iterator[Engine]:
    with engine_on(FakeBackend(N_SLOTS, 64, 16), options=SHORT) as made:
        yield made
    assert_no_feed()


class Source:
    """Endless or finite prompts; knows how many were taken and when it was closed."""

    def __init__(self, n: int | None = None) -> None:
        self.n_read = 0
        self.has_ended = threading.Event()
        self._n = n

    def prompts(self) -> Iterator[str]:
        try:
            for i in count() if self._n is None else range(self._n):
                self.n_read += 1
                yield f"prompt {i}"
        finally:
            self.has_ended.set()


def assert_no_feed() -> None:
    for thread in threading.enumerate():
        if thread.name == "cbatch-feed":
            thread.join(PATIENCE_S)
            assert not thread.is_alive(), "a feed is left"


def texts(response: BatchResponse) -> list[str]:
    return [r.text for r in all_results(response)]


# ---- what comes out ----


def test_generator_gives_what_a_list_gives(engine: Engine) -> None:
    listed = [f"prompt {i}" for i in range(3 * N_AHEAD)]
    fed = engine.run(prompt for prompt in listed)
    assert texts(fed) == texts(engine.run(listed))
    assert fed.ids == [str(i) for i in range(3 * N_AHEAD)]


def test_chunks_and_results_of_a_generator_come_while_it_is_read(engine: Engine) -> None:
    response = engine.run(Source(3 * N_AHEAD).prompts())
    joined: dict[str, str] = {}
    for chunk in response:
        joined[chunk.id] = joined.get(chunk.id, "") + chunk.text
    assert joined == {r.id: r.text for r in response.results()}
    completed = engine.run(Source(3 * N_AHEAD).prompts()).as_completed()
    assert sorted(r.text for r in completed) == sorted(joined.values())


def test_generator_of_nothing_is_an_empty_batch(engine: Engine) -> None:
    assert engine.run(iter(())).results() == []
    assert list(engine.run(iter(()))) == []
    assert list(engine.run(iter(())).as_completed()) == []


def test_iterable_without_a_length_is_read_as_a_generator(engine: Engine) -> None:
    class Lines:
        def __iter__(self) -> Iterator[str]:
            return iter(["a", "b"])

    assert texts(engine.run(Lines())) == texts(engine.run(["a", "b"]))


def test_async_generator_without_an_event_loop_is_refused_with_a_hint(engine: Engine) -> None:
    async def lines() -> AsyncIterator[str]:
        yield "a"

    with pytest.raises(ConfigError, match="async iterable, and no event loop"):
        engine.run(lines())


def run_and_close(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in an event loop that is closed with its tasks in it."""
    loop = asyncio.new_event_loop()
    loop.set_exception_handler(lambda *_: None)  # it is told of tasks that never end
    try:
        return loop.run_until_complete(main)
    finally:
        loop.close()


@pytest.mark.parametrize("run", [asyncio.run, run_and_close])
def test_async_generator_ends_with_its_event_loop(
    threaded: Engine, run: Callable[[Coroutine[Any, Any, BatchResponse]], BatchResponse]
) -> None:
    async def lines() -> AsyncIterator[str]:
        yield "a"
        is_waiting.set()
        await asyncio.sleep(1e6)

    async def begin() -> BatchResponse:
        response = threaded.run(lines())
        await is_waiting.wait()
        return response

    is_waiting = asyncio.Event()
    response = run(begin())
    with pytest.raises(BatchError, match="its event loop ended") as caught:
        response.results(timeout=PATIENCE_S)
    assert len(caught.value.results) == 1


def test_generator_may_read_another_batch_of_its_engine(engine: Engine) -> None:
    first = engine.run([f"prompt {i}" for i in range(20)])
    second = engine.run(result.text + "?" for result in first.as_completed())
    assert len(second.results(timeout=PATIENCE_S)) == 20


# ---- back-pressure ----


def test_generator_is_read_no_further_than_reader_and_slots_need(engine: Engine) -> None:
    source, n_ahead = Source(), N_AHEAD_PER_SLOT * engine.parallel
    completed = engine.run(source.prompts()).as_completed()
    for n_given in range(1, 5 * n_ahead):
        assert next(completed).finish_reason == "length"
        assert source.n_read <= n_given + n_ahead
    completed.close()
    del completed
    assert source.has_ended.wait(PATIENCE_S)


def test_generator_that_nobody_reads_from_stops_at_its_bound(threaded: Engine) -> None:
    source, n_ahead = Source(), N_AHEAD_PER_SLOT * threaded.parallel
    response = threaded.run(source.prompts())
    while threaded.stats().n_finished.get("length", 0) < n_ahead:
        pass
    threaded.run(["another"]).results()
    assert source.n_read == n_ahead
    response.cancel()


@thread_only(Reason.BY_HAND)
def test_step_by_hand_reads_the_generator() -> None:
    source = Source(5)
    with engine_on(FakeBackend(N_SLOTS, 64, 16), options=SHORT, threaded=False) as engine:
        response = engine.run(source.prompts())
        assert source.n_read == 0
        while engine.step():
            pass
        assert [len(r.token_ids) for r in response.results(timeout=0)] == [3] * 5


# ---- bad prompts, bad generators ----


def test_prompt_that_is_refused_fails_alone_at_its_place(engine: Engine) -> None:
    mixed: list[Any] = [
        "good",
        [1, 2],
        BatchPrompt(prompt="own", id="a"),
        BatchPrompt(prompt="again", id="a"),
        BatchPrompt(prompt="far", options={"stop_token_ids": [10**6]}),
        17,
        BatchPrompt(tokens=[10**6]),
        "good",
    ]
    response = engine.run(iter(mixed))
    results = all_results(response)
    kinds = [type(r.error) for r in results]
    assert kinds == [
        type(None), ConfigError, type(None), DuplicateIdError, ConfigError, ConfigError, PromptError, type(None),
    ]  # fmt: skip
    assert response.ids == [r.id for r in results] == ["0", "1", "a", "3", "4", "5", "6", "7"]
    assert results[0].text == results[7].text
    assert engine.stats().n_running == 0


class UnspeakableError(Exception):
    """Cannot be shown."""

    def __repr__(self) -> str:
        raise OSError("no words")

    __str__ = __repr__


@pytest.mark.parametrize(
    ("error", "words"),
    [(OSError("the disk is gone"), "the disk is gone"), (UnspeakableError(), "UnspeakableError")],
    ids=["told", "untold"],
)
def test_prompt_at_which_the_engine_itself_stumbles_fails_alone(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, error: Exception, words: str
) -> None:
    of_prompt = SequenceMaker.of_prompt

    def stumbling(self: SequenceMaker, item: BatchPrompt, *given: Any, **more: Any) -> Any:
        if item.prompt == "bad":
            raise error
        return of_prompt(self, item, *given, **more)

    monkeypatch.setattr(SequenceMaker, "of_prompt", stumbling)
    one, bad, two = all_results(engine.run(iter(["one", "bad", "two"])))
    assert (one.error, two.error) == (None, None)
    assert isinstance(bad.error, RequestFailedError)
    assert words in str(bad.error)


def broken() -> Iterator[str]:
    yield "one"
    yield "two"
    raise OSError("the file ends here")


def test_error_of_the_generator_reaches_the_reader_behind_what_was_read(engine: Engine) -> None:
    completed = engine.run(broken()).as_completed()
    assert {next(completed).id, next(completed).id} == {"0", "1"}
    with pytest.raises(OSError, match="ends here"):
        next(completed)
    chunks = engine.run(broken())
    with pytest.raises(OSError, match="ends here"):
        list(chunks)


def test_error_of_the_generator_is_raised_with_all_results(engine: Engine) -> None:
    for wait in (lambda r: r.results(), all_results):
        with pytest.raises(
            BatchError, match=r"failed after 2 of them: OSError.*ends here"
        ) as caught:
            wait(engine.run(broken()))
        assert [r.finish_reason for r in caught.value.results] == ["length"] * 2
        assert isinstance(caught.value.__cause__, OSError)
    assert texts(engine.run(["still good"])) != [""]


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_end_of_the_program_inside_the_generator_is_the_readers_alone(
    engine: Engine, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    def ended() -> Iterator[str]:
        yield "one"
        raise error

    seen: list[object] = []
    monkeypatch.setattr(threading, "excepthook", seen.append)
    with pytest.raises(error):
        list(engine.run(ended()))
    assert_no_feed()
    assert not seen
    assert texts(engine.run(["still good"])) != [""]


class Ending(dict[str, Any]):
    """A row whose reading is to end the program."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(messages=[])
        self.error = error

    def get(self, *_: object) -> Any:
        raise self.error

    __getitem__ = keys = items = __iter__ = get


@pytest.mark.parametrize("error", [SystemExit(3), asyncio.CancelledError(), GeneratorExit()])
def test_prompt_at_which_the_program_is_to_end_tells_the_reader(
    threaded: Engine, error: BaseException
) -> None:
    rows: list[Any] = ["one", Ending(error), "two"]
    completed = threaded.run(iter(rows)).as_completed()
    found = sorted((next(completed), next(completed)), key=lambda r: r.id)
    assert [r.finish_reason for r in found] == ["length", "error"]
    with pytest.raises(type(error)):
        next(completed)
    assert texts(threaded.run(["still good"])) != [""]


@thread_only(Reason.DEATH)
def test_engine_that_dies_while_its_generator_hangs_tells_the_reader() -> None:
    go = threading.Event()

    def hanging() -> Iterator[str]:
        yield "one"
        assert go.wait(PATIENCE_S)

    backend = FailingBackend(N_SLOTS, 64, 16, error=MemoryError("gone"), fail_at=1)
    with engine_on(backend, options=SHORT) as engine:
        with pytest.raises(BatchError, match="gone") as caught:
            all_results(engine.run(hanging()))
        [result] = caught.value.results
        assert isinstance(result.error, EngineClosedError)
    go.set()
    assert_no_feed()


# ---- an engine that is closed, or cancels all, in the midst ----

N_BEFORE = 9
"""Prompts that are read before the end."""


def close(engine: Engine) -> None:
    engine.close()


def cancel_all(engine: Engine) -> None:
    engine.cancel_all()


class Ender:
    """A thousand prompts, of which the tenth ends the work of its engine."""

    def __init__(self, engine: Engine, end: Callable[[Engine], None]) -> None:
        self._engine, self._end = engine, end

    def __iter__(self) -> Iterator[str]:
        for i in range(1000):
            if i == N_BEFORE:
                self._end(self._engine)
            yield f"prompt {i}"


ENDS = [
    pytest.param(close, EngineClosedError, "closed before all prompts were read", id="close"),
    pytest.param(cancel_all, RequestCancelledError, "cancel_all", id="cancel_all"),
]


@pytest.mark.parametrize("as_completed", [True, False])
@pytest.mark.parametrize(("end", "error", "words"), ENDS)
def test_reader_is_told_of_the_end_behind_what_was_read(
    engine: Engine,
    end: Callable[[Engine], None],
    error: type[Exception],
    words: str,
    as_completed: bool,
) -> None:
    response = engine.run(Ender(engine, end))
    reader = response.as_completed() if as_completed else iter(response)
    ended: list[str] = []

    def read() -> None:
        for item in reader:
            ended.extend([item.id] * (item.finish_reason is not None))

    with pytest.raises(error, match=words):
        read()
    assert sorted(ended) == [str(i) for i in range(N_BEFORE)]


@pytest.mark.parametrize(("end", "error", "words"), ENDS)
def test_results_are_attached_to_the_error_of_the_end(
    engine: Engine, end: Callable[[Engine], None], error: type[Exception], words: str
) -> None:
    response = engine.run(Ender(engine, end))
    with pytest.raises(BatchError, match=words) as caught:
        response.results(timeout=PATIENCE_S, return_errors=True)
    assert isinstance(caught.value.__cause__, error)
    assert [r.id for r in caught.value.results] == [str(i) for i in range(N_BEFORE)]
    assert {r.finish_reason for r in caught.value.results} <= {"length", "cancelled"}


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio", "trio"])
@pytest.mark.parametrize(("end", "error", "words"), ENDS)
async def test_reader_in_an_event_loop_is_told_of_the_end(
    end: Callable[[Engine], None], error: type[Exception], words: str
) -> None:
    ids: list[str] = []

    async def read(reader: Any) -> None:
        async for item in reader:
            ids.extend([item.id] * (item.finish_reason is not None))

    for way in ("chunks", "as_completed", "await"):
        with engine_on(FakeBackend(N_SLOTS, 64, 16), options=SHORT) as engine:
            response = engine.run(Ender(engine, end))
            if way == "await":
                with pytest.raises(BatchError, match=words) as caught:
                    await response
                assert isinstance(caught.value.__cause__, error)
                assert len(caught.value.results) == N_BEFORE
                continue
            with pytest.raises(error, match=words):
                await read(response if way == "chunks" else response.as_completed())
    assert sorted(ids) == sorted([str(i) for i in range(N_BEFORE)] * 2)


def test_generator_that_was_read_to_its_end_ends_with_what_was_cancelled(threaded: Engine) -> None:
    source = Source(3)
    response = threaded.run(source.prompts(), options={"max_tokens": None})
    assert source.has_ended.wait(PATIENCE_S)
    assert_no_feed()
    n_cancelled = threaded.cancel_all()
    results = all_results(response)
    assert [r.finish_reason for r in results].count("cancelled") == n_cancelled
    assert len(results) == 3


def test_batch_that_its_own_reader_cancels_ends_without_an_error(engine: Engine) -> None:
    response = engine.run(Source().prompts())
    reader = response.as_completed()
    next(reader)
    response.cancel()
    assert {r.finish_reason for r in reader} <= {"cancelled", "length"}


# ---- leaving ----


def leave_by_break(engine: Engine, response: BatchResponse) -> None:
    for _ in response:
        break


def leave_by_cancel(engine: Engine, response: BatchResponse) -> None:
    next(iter(response))
    response.cancel()


def leave_by_cancel_all(engine: Engine, response: BatchResponse) -> None:
    engine.cancel_all()


def leave_by_close(engine: Engine, response: BatchResponse) -> None:
    engine.close()


def leave_by_dropping(engine: Engine, response: BatchResponse) -> None:
    pass


LEAVES = (leave_by_break, leave_by_cancel, leave_by_cancel_all, leave_by_close, leave_by_dropping)


@no_pool(Reason.ONE_BACKEND)
@pytest.mark.parametrize("leave", LEAVES)
def test_leaving_ends_the_reading(
    threaded: Engine, leave: Callable[[Engine, BatchResponse], None]
) -> None:
    source = Source()
    response = threaded.run(source.prompts(), options={"max_tokens": None})
    wait_until(lambda: source.n_read > 0)  # a generator that was never begun has no end
    leave(threaded, response)
    del response
    gc.collect()
    assert source.has_ended.wait(PATIENCE_S)
    assert_no_feed()
    if leave is not leave_by_close:
        while ids_in_flight(threaded):
            pass
        assert threaded.stats().n_running == 0


def test_prompt_that_comes_after_everybody_left_is_not_run() -> None:
    arrived, go = threading.Event(), threading.Event()

    def slow() -> Iterator[str]:
        yield "one"
        arrived.set()
        assert go.wait(PATIENCE_S)
        yield "two"

    with engine_on(FakeBackend(N_SLOTS, 64, 16), options=SHORT) as engine:
        response = engine.run(slow())
        assert arrived.wait(PATIENCE_S)
        response.cancel()
        go.set()
        assert_no_feed()
        assert len(all_results(response)) == 1
        assert engine.stats().n_submitted == 1


def test_generator_that_hangs_stops_nobody() -> None:
    go = threading.Event()

    def hanging() -> Iterator[str]:
        yield "one"
        assert go.wait(PATIENCE_S)

    with engine_on(FakeBackend(N_SLOTS, 64, 16), options=SHORT) as engine:
        response = engine.run(hanging())
        reader = response.as_completed()
        assert next(reader).id == "0"
        assert len(engine.run(["a", "b", "c"]).results(timeout=PATIENCE_S)) == 3
        with pytest.raises(TimeoutError):
            response.results(timeout=0.01)
    go.set()
    assert_no_feed()


def test_close_while_a_reader_waits_on_a_hung_generator_tells_it_once() -> None:
    go, arrived = threading.Event(), threading.Event()

    def hanging() -> Iterator[str]:
        yield "one"
        arrived.set()
        assert go.wait(PATIENCE_S)

    engine = engine_on(FakeBackend(N_SLOTS, 64, 16), options=SHORT)
    wait = in_thread(lambda: all_results(engine.run(hanging())))
    assert arrived.wait(PATIENCE_S)
    engine.close()
    with pytest.raises(BatchError, match="closed before all prompts were read") as caught:
        wait()
    assert [r.id for r in caught.value.results] == ["0"]
    go.set()
    assert_no_feed()


@no_pool(Reason.ONE_BACKEND)
def test_feed_does_not_interrupt_a_run_behind_others_that_wait() -> None:
    backend = GatedBackend(1, 64, 16, hold_at=0)
    with engine_on(backend, options=SHORT) as engine:
        first = engine.run(["a", "b"])
        backend.wait_until_held()
        n_before = backend.n_interrupts
        second = engine.run(["c", "d"])
        assert backend.n_interrupts == n_before
        backend.release()
        assert len(first.results() + second.results()) == 4


# ---- progress ----


class Shown(SilentView):
    """Keeps what it was told at the end."""

    def __init__(self) -> None:
        self.last: list[BatchSnapshot] = []

    def finish(self, snapshot: BatchSnapshot) -> None:
        self.last.append(snapshot)


def test_progress_says_at_the_end_what_was_done(
    engine: Engine, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.run(["a", "b"], progress=True).results()
    assert capsys.readouterr().err.startswith("2/2 · out 6 tokens, ")
    mixed: list[Any] = ["a", 17]
    engine.run(iter(mixed), progress=True).results(return_errors=True)
    assert capsys.readouterr().err.startswith("2/2, 1 failed · out 3 tokens, ")
    list(engine.run(["a"], progress=True))
    assert capsys.readouterr().err.startswith("1/1 · out 3 tokens, ")


def test_progress_ends_where_the_reader_leaves(engine: Engine) -> None:
    view = Shown()
    reader = engine.run(Source().prompts(), progress=view).as_completed()
    next(reader)
    reader.close()
    [last] = view.last
    assert last.counts.n_done >= 1
    assert last.counts.n_failed == 0


# ---- in event loops ----


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio", "trio"])
async def test_generator_is_read_for_an_event_loop(threaded: Engine) -> None:
    source = Source(3 * N_AHEAD)
    results = await threaded.run(source.prompts(), progress=Shown())
    assert [r.id for r in results] == [str(i) for i in range(3 * N_AHEAD)]
    n_chunks = 0
    async for _ in threaded.run(source.prompts()):
        n_chunks += 1
    assert n_chunks >= 3 * N_AHEAD
    with pytest.raises(OSError, match="ends here"):
        async for _ in threaded.run(broken()):
            pass
    with pytest.raises(BatchError, match="ends here"):
        await threaded.run(broken())
    async for _ in threaded.run(Source().prompts()):
        break


@pytest.mark.usefixtures("new_objects_only")
def test_nothing_is_kept_of_what_was_given_out(engine: Engine) -> None:
    response = engine.run(BatchPrompt(prompt="a", id=f"mine {i}") for i in range(10 * N_AHEAD))
    for result in response.as_completed():
        assert result.id.startswith("mine")
        assert len(response.ids) <= N_AHEAD_PER_SLOT * engine.parallel
    del result
    box: Any = mailbox_of(response)
    assert [len(kept) for kept in (response.ids, box.ids, box.given)] == [0] * 3
    # a worker's thread lets go of what it has written when it has its turn
    wait_until(lambda: not any(isinstance(o, BatchResult) for o in gc.get_objects()))


def test_id_may_come_again_once_its_result_was_given_out(engine: Engine) -> None:
    n_ahead = N_AHEAD_PER_SLOT * engine.parallel
    ids: list[str] = []
    given_out: deque[str] = deque()

    def prompts() -> Iterator[BatchPrompt]:
        for i in range(8 * n_ahead):
            ids.append(given_out.popleft() if given_out else f"new {i}")
            yield BatchPrompt(prompt="a", id=ids[-1])

    for result in engine.run(prompts()).as_completed():
        assert result.error is None
        given_out.append(str(result.id))
    assert len(ids) == 8 * n_ahead
    # it is read no further ahead of what was given out, so all others came again
    assert len(set(ids)) <= n_ahead + 1


def test_winding_down_finishes_what_runs_and_gives_back_the_rest(engine: Engine) -> None:
    source = Source()
    response = engine.run(source.prompts(), options={"max_tokens": 20})
    results = response.as_completed()
    next(results)
    response.wind_down()
    rest = list(results)
    assert source.has_ended.wait(PATIENCE_S) or source.n_read <= 2 * N_AHEAD
    ran = [r for r in rest if r.error is None]
    assert len(ran) <= 2 * N_AHEAD
    assert {r.finish_reason for r in ran} <= {"length"}
    assert {r.finish_reason for r in rest if r.error is not None} <= {"cancelled"}
