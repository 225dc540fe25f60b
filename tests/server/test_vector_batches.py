"""Batches for embeddings and scores: each line is answered as its endpoint answers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from cbatch import Engine, RunOptions
from cbatch.backend.fake import FakeBackend
from cbatch.chat.vector_calls import RerankCall
from cbatch.files.judged_run import JudgedRun
from cbatch.files.work import OpenGate
from tests.runtime.backends import GatedBackend, in_thread
from tests.runtime.test_text_room import Gate
from tests.server.clients import CHAT, USER, call, wait_until
from tests.server.kept import SHORT, answers, batch_of, begun, ended, kept_app, line, lines
from tests.vector_engine import N_LIMIT, VectorEngine

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

EMBEDDINGS = "/v1/embeddings"


def test_lines_are_answered_as_the_endpoint_answers(tmp_path: Path) -> None:
    bodies: dict[str, dict[str, Any]] = {
        "text": {"input": "abc", "model": "m"},
        "several": {"input": ["a", "b"], "encoding_format": "base64", "model": "m"},
        "tokens": {"input": [[1, 2]], "dimensions": 4, "model": "m"},
        "empty": {"input": ["a", ""], "model": "m"},
        "long": {"input": "a" * (N_LIMIT + 1), "model": "m"},
        "wrong": {"input": 5, "model": "m"},
    }
    with kept_app(tmp_path, VectorEngine()) as app:
        data = lines(*(line(id, EMBEDDINGS, **body) for id, body in bodies.items()))
        batch = ended(app, begun(app, data, EMBEDDINGS))
        found = answers(app, batch)
        alone = {id: call(app, EMBEDDINGS, body) for id, body in bodies.items()}
    assert batch["request_counts"] == {"total": 6, "completed": 3, "failed": 3}
    for id, answer in alone.items():
        assert found[id]["response"]["status_code"] == answer.status_code
        assert found[id]["response"]["body"] == answer.json()
    assert batch["usage"]["total_tokens"] == batch["usage"]["input_tokens"] == 3 + 2 + 2


def test_batch_that_a_model_cannot_answer_has_an_error_a_line(tmp_path: Path) -> None:
    with kept_app(tmp_path, VectorEngine(can_embed=False)) as app:
        data = lines(line("a", EMBEDDINGS, input="a"))
        found = answers(app, ended(app, begun(app, data, EMBEDDINGS)))
    assert found["a"]["response"]["status_code"] == 501


# ---- beside calls ----


def test_call_is_computed_before_the_waiting_texts_of_a_batch(tmp_path: Path) -> None:
    backend, gate = FakeBackend(2, 64), Gate()
    backend.hold_texts = gate
    with kept_app(tmp_path, Engine(backend)) as app:
        engine = app.state.desk.engine
        data = lines(*(line(f"r{i}", EMBEDDINGS, input=f"text {i}") for i in range(600)))
        id = begun(app, data, EMBEDDINGS)
        gate.has_come.wait()
        wait_until(lambda: engine.stats().n_submitted == 600)
        waiting = in_thread(lambda: call(app, EMBEDDINGS, {"input": "a call"}))
        wait_until(lambda: engine.stats().n_submitted == 601)
        gate.may_go.set()
        assert waiting().status_code == 200
        (embedder,) = backend.embedders
        assert list(b"a call") in [list(text) for text in embedder.calls[1]]
        assert ended(app, id)["request_counts"]["completed"] == 600
        assert len(embedder.calls) < 150  # many lines go together


def test_cancel_of_a_batch_of_texts_does_not_wait_for_the_engine(tmp_path: Path) -> None:
    engine = VectorEngine()
    engine.may_go.clear()
    with kept_app(tmp_path, engine) as app:
        data = lines(*(line(f"r{i}", EMBEDDINGS, input=f"text {i}") for i in range(1100)))
        id = begun(app, data, EMBEDDINGS)
        wait_until(lambda: len(engine.asked) == 2)
        try:
            answer = in_thread(lambda: call(app, f"/v1/batches/{id}/cancel", method="POST"))()
            listed = in_thread(lambda: call(app, "/v1/batches", method="GET"))()
        finally:
            engine.may_go.set()
        assert answer.json()["status"] == "cancelling"
        assert listed.json()["data"][0]["id"] == id
        assert ended(app, id)["status"] == "cancelled"


RERANK: list[tuple[str, dict[str, Any]]] = [
    ("/v1/rerank", {"query": "q", "documents": [f"{i}" for i in range(50)]}),
    ("/v1/score", {"text_1": "q", "text_2": [f"{i}" for i in range(50)]}),
]


@pytest.mark.parametrize(("url", "body"), RERANK)
def test_documents_that_are_judged_leave_slots_to_calls(
    tmp_path: Path, url: str, body: dict[str, Any]
) -> None:
    backend = GatedBackend(4, 4096, hold_at=2)
    with kept_app(tmp_path, Engine(backend)) as app:
        engine, room = app.state.desk.engine, app.state.desk.room
        alone = None
        id = begun(app, lines(*(line(f"{i}", url, **body) for i in range(3))), url)
        backend.wait_until_held()
        room.set_calls(4)
        backend.release()
        wait_until(lambda: not engine.stats().n_running)
        assert not batch_of(app, id)["request_counts"]["completed"]
        room.set_calls(0)
        found = answers(app, ended(app, id))
        alone = call(app, url, body).json()
    assert {id: each["response"]["body"] for id, each in found.items()} == dict.fromkeys(
        "012", alone
    )


def test_lines_to_judge_fail_alone(tmp_path: Path) -> None:
    bodies: dict[str, dict[str, Any]] = {
        "good": {"query": "q", "documents": ["a", "b"], "raw_scores": True},
        "empty": {"query": "q", "documents": ["a", ""]},
        "all empty": {"query": "q", "documents": [""]},
        "priority": {"query": "q", "documents": ["a"], "priority": 5},
        "long": {"query": "q", "documents": ["a" * 9999]},
        "cut": {"query": "q", "documents": ["a" * 9999], "truncate": "end"},
        "texts": {"query": "abc", "texts": ["x", "ab"]},
    }
    url = "/v1/rerank"
    with kept_app(tmp_path, Engine(FakeBackend(4, 1024))) as app:
        data = lines(*(line(id, url, model="m", **body) for id, body in bodies.items()))
        found = answers(app, ended(app, begun(app, data, url)))
        for id, body in bodies.items():
            alone = call(app, url, {**body, "model": "m"})
            assert found[id]["response"]["status_code"] == alone.status_code, id
            if id != "priority":  # whose words name the request here
                assert found[id]["response"]["body"] == alone.json(), id
    assert found["good"]["response"]["status_code"] == 200


@pytest.mark.parametrize("is_threaded", [False, True])
def test_calls_none_of_whose_documents_is_judged_are_told_as_they_are_read(
    is_threaded: bool,
) -> None:
    n_read = []

    def calls() -> Iterator[tuple[str, RerankCall]]:
        for i in range(3000):
            n_read.append(i)
            yield f"{i}", RerankCall("q", ["", ""])

    with Engine(FakeBackend(4, 4096), threaded=is_threaded) as engine:
        results = JudgedRun(engine, calls(), OpenGate(), RunOptions(), None).as_completed()
        first = next(results)
        assert len(n_read) < 100
        failed = [result.id for result in (first, *results) if result.origin is not None]
    assert failed == [f"{i}" for i in range(3000)]


def test_batch_of_documents_to_judge_is_cancelled_and_goes_on(tmp_path: Path) -> None:
    url, body = RERANK[0]
    data = lines(*(line(f"{i}", url, **body) for i in range(9)))
    backend = GatedBackend(4, 4096, hold_at=40)
    with kept_app(tmp_path, Engine(backend)) as app:
        id = begun(app, data, url)
        backend.wait_until_held()
        backend.release_when_asked(lambda: app.state.desk.batches.is_closed)
    with kept_app(tmp_path, Engine(FakeBackend(4, 4096))) as app:
        assert len(answers(app, ended(app, id))) == 9
        room = app.state.desk.room
        room.set_calls(4)
        other = begun(app, data, url)
        wait_until(lambda: batch_of(app, other)["status"] == "in_progress")
        call(app, f"/v1/batches/{other}/cancel", method="POST")
        assert ended(app, other)["request_counts"] == {"total": 9, "completed": 0, "failed": 9}
        room.set_calls(0)
        assert call(app, CHAT, {"messages": USER, **SHORT}).status_code == 200
