"""Texts to embed at workers: they are spread, their vectors cross as bytes, and a death costs none of them."""

from __future__ import annotations

import base64
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from cbatch.backend.fake import FakeBackend
from cbatch.backend.fake.fake_embedder import fake_vector
from cbatch.errors import PromptError, RequestCancelledError, TextTooLongError, UnsupportedTaskError
from cbatch.response import BatchError
from cbatch.runtime.local import LocalRuntime
from cbatch.worker.pool import N_ENTERING_MAX, Pool
from tests.places import wait_until
from tests.runtime.backends import PATIENCE_S, in_thread, runtime_of
from tests.worker.links import Launches, MortalBackend, engine_over
from tests.worker.programs import Program

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cbatch.runtime.interface import Submission


def unit(text: str) -> Any:
    found = fake_vector(text.encode()).astype(np.float64)
    return (found / np.linalg.norm(found)).astype(np.float32)


class FirstOnes:
    """The numbers from 0 on as texts; `wait` returns when so many were read."""

    def __init__(self, n: int) -> None:
        self._n, self._done = n, threading.Event()

    def __iter__(self) -> Iterator[str]:
        yield from map(str, range(self._n))
        self._done.set()

    def wait(self) -> None:
        self._done.wait()


def test_first_texts_wait_for_no_question_to_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    with engine_over(FakeBackend(2, 64)) as engine:

        def refuse(*_: object) -> None:
            pytest.fail("an event loop would wait for the answer")

        assert engine.stats().n_texts == 0  # the model is loaded
        monkeypatch.setattr(Pool, "ask", refuse)
        assert (engine.model_facts.n_vocab, engine.can_embed) == (320, True)
        assert engine.embed(["red"]).array().shape == (1, 8)


def test_texts_are_spread_over_workers_and_come_back_in_order() -> None:
    backends = [FakeBackend(2, 64), FakeBackend(2, 64)]
    with engine_over(*backends) as engine:
        texts = [f"text {i}" for i in range(400)]
        found = engine.embed(texts).array()
        assert np.array_equal(found, np.stack([unit(text) for text in texts]))
        n_computed = [sum(map(len, b.embedders[0].calls)) for b in backends]
        # one that is given to an idle worker may have been begun in that moment
        assert 400 <= sum(n_computed) < 440
        assert min(n_computed) > 50
        assert engine.stats().n_texts == 400


def test_wrong_texts_fail_alone_at_a_worker() -> None:
    with engine_over(FakeBackend(2, 64)) as engine:
        texts = ["", "x" * 65, [400], "fine"]
        found = engine.embed(texts).results(return_errors=True)
        kinds = [PromptError, TextTooLongError, PromptError, type(None)]
        assert [type(r.error) for r in found] == kinds
        long = found[1].error
        assert isinstance(long, TextTooLongError)
        assert (long.n_prompt, long.n_limit) == (65, 64)
        none = engine.embed(["ab"], pooling="none", normalize=False).results()[0].embedding
        assert none is not None
        assert np.array_equal(none, np.stack([fake_vector([t]) for t in b"ab"]))


def test_task_that_the_workers_model_cannot_do_is_refused() -> None:
    backend = FakeBackend(2, 64)
    backend.can_generate, backend.pooling = False, "rank"
    with engine_over(backend) as engine:
        assert (engine.can_embed, engine.can_rerank, engine.can_generate) == (False, True, False)
        assert engine.rerank("q", ["a", "b"]).scores().shape == (2,)
        with pytest.raises(UnsupportedTaskError) as caught:
            engine.embed(["a"])
        assert caught.value.task == "embed"
        with pytest.raises(UnsupportedTaskError):
            engine.run(["a"])


def test_cancel_reaches_texts_at_a_worker() -> None:
    backend, may_go, has_come = FakeBackend(2, 64), threading.Event(), threading.Event()

    def hold() -> None:
        has_come.set()
        may_go.wait()

    backend.hold_texts = hold
    with engine_over(backend) as engine:
        texts = FirstOnes(40)
        response = engine.embed(texts)
        texts.wait()
        has_come.wait()
        engine.stats()  # what was sent before has been read
        response.cancel()
        may_go.set()
        found = response.results(return_errors=True)
        assert len(found) == 40
        assert all(isinstance(r.error, RequestCancelledError) for r in found[20:])
        assert engine.embed(["more"]).array().shape == (1, 8)


def test_texts_of_a_worker_that_dies_are_computed_by_another() -> None:
    launches = Launches(lambda: MortalBackend(2, 64))

    def die() -> None:
        if len(launches.links) == 1 and len(launches.backends[0].embedders[0].calls) == 2:
            launches.links[0].kill("ended by SIGSEGV")

    with launches.engine() as engine:
        launches.backends[0].hold_texts = die
        texts = [f"text {i}" for i in range(300)]
        found = engine.embed(texts).array()
        assert len(launches.links) == 2
    assert np.array_equal(found, np.stack([unit(text) for text in texts]))


def test_program_gets_vectors_as_base64() -> None:
    with Program(FakeBackend(2, 64)) as program:
        items = [{"prompt": "red", "id": "r"}, {"prompt": "x" * 65, "id": "l"}]
        program.send("run", n=0, items=items, texts={"normalize": False})
        found: dict[str, Any] = {}
        while len(found) < 2:  # the reply may come in the frame of results, or before it
            frame = program.read()
            assert frame.get("replies", [[0, ["r", "l"]]]) == [[0, ["r", "l"]]]
            found.update((result["id"], result) for result in frame.get("results", ()))
        vector = np.frombuffer(base64.b64decode(found["r"]["embedding"]), "<f4")
        assert np.array_equal(vector, fake_vector(b"red"))
        assert found["l"]["error"]["type"] == "TextTooLongError"
        program.send("run", n=1, items=items, texts={"dimensions": 0})
        [[_, _, error]] = program.read_until("replies")["replies"]
        assert error["type"] == "ConfigError"


def test_few_texts_stand_before_what_others_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    gate, enter = threading.Event(), LocalRuntime.enter

    def late(runtime: LocalRuntime, submission: Submission) -> Any:
        gate.wait(PATIENCE_S)
        return enter(runtime, submission)

    with engine_over(FakeBackend(2, 64)) as engine:
        assert engine.embed(["red"]).array().shape == (1, 8)
        monkeypatch.setattr(LocalRuntime, "enter", late)
        responses = [engine.embed(f"{i} {k}" for i in range(300)) for k in range(3)]
        pool = runtime_of(engine).pool
        wait_until(lambda: len(pool._entrance) == 3)
        assert N_ENTERING_MAX <= pool.ready[0].n_entering <= N_ENTERING_MAX + 3
        asked = in_thread(lambda: engine.tokenize("red"))
        gate.set()
        assert asked() == engine.tokenize("red")
        assert [response.array().shape for response in responses] == [(300, 8)] * 3
        assert not pool.ready[0].n_entering


def test_feeds_that_wait_end_with_their_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    gate, enter = threading.Event(), LocalRuntime.enter

    def late(runtime: LocalRuntime, submission: Submission) -> Any:
        gate.wait(PATIENCE_S)
        return enter(runtime, submission)

    monkeypatch.setattr(LocalRuntime, "enter", late)
    with engine_over(FakeBackend(2, 64)) as engine:
        response = engine.embed(str(i) for i in range(300))
        feeds = runtime_of(engine).pool._entrance
        wait_until(lambda: len(feeds) == 1)
        closing = in_thread(engine.close)
        wait_until(lambda: not len(feeds))
        gate.set()
        closing()
        with pytest.raises(BatchError, match="failed after 65 of them: EngineClosedError"):
            response.results()
