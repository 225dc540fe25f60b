"""Batches for embeddings and scores: each line is answered as its endpoint answers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.server.clients import call, error_of
from tests.server.kept import answers, begun, ended, kept_app, line, lines, upload
from tests.vector_engine import N_LIMIT, VectorEngine

if TYPE_CHECKING:
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


@pytest.mark.parametrize(
    ("url", "body"),
    [
        ("/v1/rerank", {"query": "abc", "documents": ["x", "ab"], "top_n": 1}),
        ("/v1/rerank", {"query": "abc", "texts": ["x", "ab"]}),
        ("/v1/score", {"text_1": "abc", "text_2": ["x", "ab"]}),
    ],
)
def test_scores_are_answered(tmp_path: Path, url: str, body: dict[str, Any]) -> None:
    with kept_app(tmp_path, VectorEngine()) as app:
        batch = ended(app, begun(app, lines(line("a", url, **body)), url))
        found = answers(app, batch)["a"]["response"]["body"]
        assert found == call(app, url, body).json()


def test_batch_that_a_model_cannot_answer_has_an_error_a_line(tmp_path: Path) -> None:
    with kept_app(tmp_path, VectorEngine(can_embed=False)) as app:
        data = lines(line("a", EMBEDDINGS, input="a"))
        found = answers(app, ended(app, begun(app, data, EMBEDDINGS)))
    assert found["a"]["response"]["status_code"] == 501


def test_many_lines_go_together(tmp_path: Path) -> None:
    engine = VectorEngine()
    with kept_app(tmp_path, engine) as app:
        data = lines(*(line(f"r{i}", EMBEDDINGS, input=f"text {i}") for i in range(600)))
        batch = ended(app, begun(app, data, EMBEDDINGS))
        assert batch["request_counts"]["completed"] == 600
    assert [n for n, _ in engine.asked] == [512, 88]


def test_endpoint_that_is_not_served_names_those_that_are(tmp_path: Path) -> None:
    with kept_app(tmp_path, VectorEngine()) as app:
        file = upload(app, lines(line("a", EMBEDDINGS, input="a"))).json()["id"]
        asked = {"input_file_id": file, "endpoint": "/v1/images", "completion_window": "24h"}
        error = error_of(call(app, "/v1/batches", asked), 400)
    assert EMBEDDINGS in error["message"]
