"""Work between the steps of the owner thread: its share of the time, and what happens to it amid steps."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from cbatch.backend.fake import FakeBackend
from cbatch.backend.fake.fake_embedder import FakeEmbedder
from cbatch.embedding import EmbedResult
from cbatch.engine import Engine
from cbatch.errors import DeadlineError, EngineClosedError, RequestCancelledError
from cbatch.response import BatchError
from cbatch.runtime.side_work import N_SAVED, SHARE, SideWork
from tests.runtime.backends import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from cbatch.core.plan import StepPlan, StepResult
    from cbatch.embedding import Pooling
    from cbatch.runtime.text_responses import EmbedResponse

STEP_S, NODE_S = 0.01, 0.0002
LOOK_AGAIN_S = 0.01
"""After which a turn is taken where nothing waits."""


class World:
    """Time passes by steps and by nodes of work."""

    def __init__(self, *, is_watched: bool, itl_s: float | None = None) -> None:
        self.now_s, self.steps_s, self.nodes_s = 0.0, 0.0, 0.0
        self.n_steps_left = 0
        self.side = SideWork(self.step, lambda: is_watched, bool, lambda: self.now_s, itl_s)

    def step(self) -> bool:
        if not self.n_steps_left:
            return False
        self.n_steps_left -= 1
        self.now_s += STEP_S
        self.steps_s += STEP_S
        self.side.earn(STEP_S)
        return True

    def work(self, n_nodes: int) -> list[int]:
        """Compute nodes; return how many were computed before each turn."""
        found: list[int] = []

        def compute(take_turn: Callable[[], float]) -> None:
            until_s = 0.0
            for n in range(n_nodes):
                self.now_s += NODE_S
                self.nodes_s += NODE_S
                if self.now_s >= until_s:
                    found.append(n + 1)
                    left_s = min(take_turn(), LOOK_AGAIN_S)
                    until_s = self.now_s + left_s

        with ThreadPoolExecutor() as pool:
            asked = pool.submit(self.side.do, compute, bool, bool)
            while not self.side.begin_idle():
                pass
            self.side.do_next()
            assert asked.result()[1] == pytest.approx(n_nodes * NODE_S)
        return found


@pytest.mark.parametrize(
    ("is_watched", "itl_s", "share"),
    [
        (True, None, SHARE),
        (True, STEP_S / 2, SHARE),
        (True, STEP_S * 3.5, 2.5),
        (False, None, 1.0),
    ],
)
def test_work_has_its_share_of_the_time(
    is_watched: bool, itl_s: float | None, share: float
) -> None:
    world = World(is_watched=is_watched, itl_s=itl_s)
    world.n_steps_left = 10**9
    world.work(20_000)
    assert world.nodes_s == pytest.approx(share * world.steps_s, rel=0.05)


def test_gaps_grow_by_the_share_and_a_node_at_most() -> None:
    world = World(is_watched=True)
    world.n_steps_left = 10**9
    turns = world.work(5000)
    nodes = np.diff(turns)[len(turns) // 2 :]  # behind the time that was saved up
    assert nodes.max() * NODE_S <= SHARE * STEP_S + NODE_S


def test_work_goes_on_while_nothing_else_is_to_be_done() -> None:
    turns = World(is_watched=True).work(5000)
    assert len(turns) == pytest.approx(5000 * NODE_S / LOOK_AGAIN_S, abs=2)


def test_text_that_comes_now_and_then_has_as_much_time_as_steps() -> None:
    world = World(is_watched=True)
    world.n_steps_left = 10**6
    for _ in range(10_000):
        world.step()
    before_s = world.steps_s
    n_nodes = int(N_SAVED * STEP_S / NODE_S)
    world.work(n_nodes)
    assert world.steps_s - before_s == pytest.approx(N_SAVED * STEP_S, rel=0.1)
    before_s = world.steps_s
    world.work(500)  # nothing is saved any more
    assert world.steps_s - before_s == pytest.approx(500 * NODE_S / SHARE, rel=0.2)


def test_work_that_had_the_time_of_idleness_has_saved_none() -> None:
    world = World(is_watched=True)
    world.n_steps_left = 1000
    while world.step():
        pass
    world.work(int(N_SAVED * STEP_S / NODE_S))
    world.n_steps_left, before_s = 10**6, world.steps_s
    world.work(500)
    assert world.steps_s - before_s == pytest.approx(500 * NODE_S / SHARE, rel=0.2)


# ---- in an engine ----


class EndlessEmbedder(FakeEmbedder):
    """Computes until a turn ends it."""

    def __init__(self, pooling: Pooling, n_most: int, has_begun: threading.Event) -> None:
        super().__init__(pooling, n_most)
        self.has_begun = has_begun

    def compute(
        self, texts: Sequence[Sequence[int]], take_turn: Callable[[], float] | None = None
    ) -> list[NDArray[np.float32] | None]:
        assert take_turn is not None
        self.thread = threading.current_thread()
        self.has_begun.set()
        while take_turn() >= 0:
            pass
        raise AssertionError


class EndlessBackend(FakeBackend):
    """Fails at a run once it is broken; notes which threads compute."""

    def __init__(self) -> None:
        super().__init__(2, 64)
        self.broken_by: BaseException | None = None
        self.has_begun = threading.Event()
        self.threads = set[threading.Thread]()

    def run(self, plan: StepPlan) -> StepResult:
        self.threads.add(threading.current_thread())
        if self.broken_by is not None:
            raise self.broken_by
        return super().run(plan)

    def make_embedder(self, pooling: Pooling) -> FakeEmbedder:
        self.embedders.append(EndlessEmbedder(pooling, self.n_window, self.has_begun))
        return self.embedders[-1]


@pytest.fixture
def backend() -> EndlessBackend:
    return EndlessBackend()


@contextmanager
def embedding(engine: Engine, backend: EndlessBackend, **given: Any) -> Iterator[EmbedResponse]:
    """Texts that are being computed, or are late."""
    backend.has_begun.clear()
    texts = engine.embed(["a", "b"], **given)
    assert given or backend.has_begun.wait(PATIENCE_S)
    yield texts


def ended(texts: EmbedResponse) -> list[EmbedResult]:
    """The results of texts whose engine has ended: it may have before it was known that there are no others."""
    try:
        return texts.results(return_errors=True)
    except BatchError as error:
        return [result for result in error.results if isinstance(result, EmbedResult)]


def test_requests_run_amid_a_text_in_the_thread_that_computes_it(backend: EndlessBackend) -> None:
    with Engine(backend) as engine, embedding(engine, backend):
        answers = engine.run(["a", "b", "c"], options={"max_tokens": 20}).results()
        assert [answer.error for answer in answers] == [None] * 3
        assert backend.threads == {backend.embedders[0].thread}  # type: ignore[attr-defined]


def test_close_breaks_off_a_text_amid_its_computing(backend: EndlessBackend) -> None:
    with Engine(backend) as engine, embedding(engine, backend) as texts:
        engine.close()
        assert {type(result.error) for result in ended(texts)} == {RequestCancelledError}


def test_text_that_nobody_waits_for_is_broken_off(backend: EndlessBackend) -> None:
    with Engine(backend) as engine:
        with embedding(engine, backend) as texts:
            texts.cancel()
        with embedding(engine, backend, timeout_s=0.001) as texts:
            for result in texts.results(return_errors=True):
                assert isinstance(result.error, DeadlineError)
        with embedding(engine, backend) as texts:
            late = engine.embed(["c"], timeout_s=0.001)  # it waits behind them
            assert isinstance(late.results(return_errors=True)[0].error, DeadlineError)
            texts.cancel()


@pytest.mark.parametrize("kind", [SystemExit, SystemError])
def test_step_that_fails_amid_a_text_ends_the_engine_and_the_text(
    backend: EndlessBackend, kind: type[BaseException]
) -> None:
    with Engine(backend) as engine, embedding(engine, backend) as texts:
        backend.broken_by = kind("the device is gone")
        answers = engine.run(["a"], options={"max_tokens": 30})
        errors = [result.error for result in ended(texts)]
        errors += [result.error for result in answers.results(return_errors=True)]
        for error in errors:
            assert isinstance(error, EngineClosedError)
            assert "the device is gone" in str(error)
        with pytest.raises(EngineClosedError):
            engine.embed(["b"])


def test_texts_and_answers_beside_each_other_are_those_alone() -> None:
    texts, options = ["x" * i for i in range(1, 60)], {"max_tokens": 400, "seed": 1}
    with Engine(FakeBackend(2, 512)) as engine:
        vectors = engine.embed(texts).array()
        answers = engine.run(["a", "b"], options=options).results()
    with Engine(FakeBackend(2, 512)) as engine:
        running = engine.run(["a", "b"], options=options)
        assert np.array_equal(engine.embed(texts).array(), vectors)
        assert [a.token_ids for a in running.results()] == [a.token_ids for a in answers]
