"""Embeddings, rerank and scores over HTTP."""

from __future__ import annotations

import base64
import re
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from cbatch.backend.fake import FakeBackend
from cbatch.engine import Engine
from cbatch.errors import EngineClosedError
from cbatch.runtime.submit import Feed
from tests.runtime.backends import GatedBackend, in_thread
from tests.server.clients import CHAT, USER, call, error_of, fake_app, leave_once
from tests.vector_engine import N_LIMIT, VectorEngine, score_of, vector_of
from tests.worker.links import engine_over

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from starlette.applications import Starlette

EMBEDDINGS, RERANK, SCORE = "/v1/embeddings", "/v1/rerank", "/v1/score"


@contextmanager
def vector_app(engine: VectorEngine | None = None, **settings: Any) -> Iterator[Starlette]:
    with fake_app(engine=engine or VectorEngine(), **settings) as app:
        yield app


def test_embeddings_of_texts_come_in_their_order() -> None:
    texts = ["abc", "de", "the sea"]
    with vector_app() as app:
        body = call(app, EMBEDDINGS, {"input": texts, "model": "m"}).json()
    assert body["object"] == "list"
    assert body["model"] == "m"
    assert [item["index"] for item in body["data"]] == [0, 1, 2]
    assert {item["object"] for item in body["data"]} == {"embedding"}
    found = np.array([item["embedding"] for item in body["data"]], np.float32)
    assert (found == np.stack([vector_of(text) for text in texts])).all()
    assert body["usage"] == {"prompt_tokens": 12, "total_tokens": 12}


@pytest.mark.parametrize("said", ["abc", [97, 98], ["abc"], [[97, 98]], ["a", [97, 98]]])
def test_input_is_a_text_or_tokens_alone_or_in_a_list(said: Any) -> None:
    listed = [said] if isinstance(said, str) or isinstance(said[0], int) else said
    with vector_app() as app:
        body = call(app, "/embeddings", {"input": said}).json()
    found = [np.float32(item["embedding"]) for item in body["data"]]
    assert all((a == vector_of(b)).all() for a, b in zip(found, listed, strict=True))


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (EMBEDDINGS, {"input": "abc"}),
        (RERANK, {"query": "a", "documents": ["b"]}),
        (SCORE, {"text_1": "a", "text_2": "b"}),
    ],
)
def test_adapter_that_would_change_nothing_is_refused(path: str, body: dict[str, Any]) -> None:
    with vector_app(VectorEngine(adapters=("tuned",))) as app:
        assert call(app, path, body).status_code == 200
        error = error_of(call(app, path, {**body, "model": "tuned"}), 400)
    assert error["param"] == "model"
    assert "'tuned' is an adapter, which has no effect on embeddings and scores" in error["message"]


def test_base64_has_the_same_numbers() -> None:
    with vector_app() as app:
        asked = {"input": "abc", "encoding_format": "base64", "dimensions": 4}
        body = call(app, EMBEDDINGS, asked).json()
    data = base64.b64decode(body["data"][0]["embedding"])
    assert (np.frombuffer(data, "<f4") == vector_of("abc", 4)).all()


IN_INPUT: dict[str, list[Any]] = {
    "input must be": [[], 5, {"text": "a"}],
    r"input\[1\] must be a string or a list of token ids": [["a", 5]],
    r"input\[0\] must be a list of token ids": [[["a"]]],
    r"input\[0\] must be": [[True]],
    "input has 9 texts; at most 8 are allowed": [["a"] * 9],
    r"^input\[1\]: the text is empty$": [["ab", ""]],
}
IN_RERANK: dict[str, list[dict[str, Any]]] = {
    "texts": [{"query": "q", "texts": ["a", ""]}],
    "query": [
        {"query": "", "texts": ["a"]},
        {"documents": ["a"]},
        {"query": [], "documents": ["a"]},
    ],
    "documents": [{"query": "a"}, *({"query": "a", "documents": said} for said in ("a", [], [1]))],
    "top_n": [{"query": "a", "documents": ["a"], "top_n": 0}],
    "return_documents": [{"query": "a", "documents": ["a"], "return_documents": "y"}],
    "raw_scores": [{"query": "a", "texts": ["a"], "raw_scores": 1}],
}
WRONG = {"dimensions": 0, "encoding_format": "hex", "truncate": "middle", "pooling": "rank"}


def test_wrong_field_is_named() -> None:
    with vector_app(max_choices=8) as app:

        def told(path: str, asked: dict[str, Any], param: str) -> str:
            error = error_of(call(app, path, asked), 400)
            assert error["param"] == param
            return str(error["message"])

        for words, inputs in IN_INPUT.items():
            for said in inputs:
                assert re.search(words, told(EMBEDDINGS, {"input": said}, "input"))
        for name, value in WRONG.items():
            assert f"{name} must be" in told(EMBEDDINGS, {"input": "a", name: value}, name)
        for param, bodies in IN_RERANK.items():
            for body in bodies:
                assert param in told(RERANK, body, param)
        told(SCORE, {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1")


def test_text_that_is_too_long_has_openais_error() -> None:
    with vector_app() as app:
        error = error_of(call(app, EMBEDDINGS, {"input": ["ab", "a" * (N_LIMIT + 1)]}), 400)
    assert (error["code"], error["param"]) == ("context_length_exceeded", "input")
    assert error["message"].startswith(f"This model's maximum context length is {N_LIMIT} tokens")
    assert f"input[1] has {N_LIMIT + 1} tokens: shorten it, or give truncate" in error["message"]


OVER = "a" * (N_LIMIT + 1)


@pytest.mark.parametrize(
    ("first", "second", "place"),
    [(["p", "q"], ["a", OVER], "text_2[1]"), (["p", OVER], ["a", "b"], "text_1[1]")],
)
def test_text_of_a_pair_that_is_too_long_is_named(
    first: list[str], second: list[str], place: str
) -> None:
    with vector_app(VectorEngine(can_rerank=False)) as app:
        error = error_of(call(app, SCORE, {"text_1": first, "text_2": second}), 400)
    assert error["param"] == place.partition("[")[0]
    assert f"{place} has" in error["message"]


@pytest.mark.parametrize("pooling", ["rank", "last"])
def test_pairs_are_one_batch(pooling: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each batch has a thread that reads it: thousands of them would leave none for others."""
    feeds: list[object] = []
    start = Feed.start

    def counted(feed: Feed) -> None:
        feeds.append(feed)
        start(feed)

    monkeypatch.setattr(Feed, "start", counted)
    backend = FakeBackend(4, 512)
    backend.pooling = pooling
    firsts, seconds = ["p", "q", "p"], ["a", "b", "c"]
    with fake_app(engine=Engine(backend)) as app:
        body = call(app, SCORE, {"text_1": firsts, "text_2": seconds}).json()
        assert len(feeds) == 1
        alone = [
            call(app, SCORE, {"text_1": a, "text_2": b}).json()
            for a, b in zip(firsts, seconds, strict=True)
        ]
    assert [item["score"] for item in body["data"]] == [one["data"][0]["score"] for one in alone]


def test_empty_text_of_a_pair_is_refused() -> None:
    backend = FakeBackend(4, 512)
    backend.pooling = "rank"
    with fake_app(engine=Engine(backend)) as app:
        error = error_of(call(app, SCORE, {"text_1": ["p", ""], "text_2": ["a", "b"]}), 400)
    assert error["message"] == "the query is empty"


SAME = {"dimensions": 4, "normalize": False, "pooling": "mean", "instruction": "q: "}
SETTINGS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"truncate": True}, {"truncate": "end"}),
    ({"truncate": True, "truncation_direction": "Left"}, {"truncate": "start"}),
    ({"truncate": False}, {}),
    ({"truncate": "start"}, {"truncate": "start"}),
    ({"dimensions": None, "user": "u"}, {}),
    (SAME, SAME),
    ({"priority": 3, "timeout_s": 9}, {"priority": 3, "timeout_s": 9}),
]


def test_settings_reach_the_engine() -> None:
    engine = VectorEngine()
    with vector_app(engine) as app:
        for said, _ in SETTINGS:
            assert call(app, EMBEDDINGS, {"input": "a", **said}).status_code == 200
    assert engine.asked == [(1, given) for _, given in SETTINGS]


def test_unknown_fields_are_named_or_refused() -> None:
    asked = {"input": "a", "colour": 1}
    with vector_app() as app:
        assert call(app, EMBEDDINGS, asked).headers["x-ignored-fields"] == "colour"
    with vector_app(strict_fields=True) as app:
        assert error_of(call(app, EMBEDDINGS, asked), 400)["code"] == "unknown_parameter"


# ---- rerank ----

DOCUMENTS = ["xyz", "abcd", "ab", "a"]
BEST = [1, 2, 3, 0]


@pytest.mark.parametrize("path", [RERANK, "/rerank"])
def test_documents_come_best_first(path: str) -> None:
    with vector_app() as app:
        body = call(app, path, {"query": "abc", "documents": DOCUMENTS}).json()
    assert [result["index"] for result in body["results"]] == BEST
    scores = [result["relevance_score"] for result in body["results"]]
    assert scores == [score_of("abc", DOCUMENTS[i]) for i in BEST]
    assert body["usage"]["total_tokens"] == 12 + 10
    assert "document" not in body["results"][0]


def test_top_documents_are_repeated_where_asked() -> None:
    documents = [{"text": text} for text in DOCUMENTS]
    asked = {"query": "abc", "documents": documents, "top_n": 2, "return_documents": True}
    with vector_app() as app:
        body = call(app, RERANK, asked).json()
    assert [r["document"]["text"] for r in body["results"]] == ["abcd", "ab"]


def test_texts_are_answered_as_tei_does() -> None:
    engine = VectorEngine()
    asked = {"query": "abc", "texts": DOCUMENTS, "raw_scores": True, "return_text": True}
    with vector_app(engine) as app:
        body = call(app, "/rerank", asked).json()
    assert [(r["index"], r["text"]) for r in body] == [(i, DOCUMENTS[i]) for i in BEST]
    assert engine.asked == [(4, {"raw_scores": True})]


# ---- score ----


@pytest.mark.parametrize("first", ["abc", ["abc"], ["abc", "abc", "x"]])
def test_pairs_are_scored_in_their_order(first: Any) -> None:
    seconds = ["ab", "abc", "x"]
    firsts = first if isinstance(first, list) and len(first) > 1 else ["abc"] * 3
    with vector_app() as app:
        body = call(app, SCORE, {"text_1": first, "text_2": seconds}).json()
    assert [item["index"] for item in body["data"]] == [0, 1, 2]
    found = [item["score"] for item in body["data"]]
    assert found == [score_of(a, b) for a, b in zip(firsts, seconds, strict=True)]


def test_scores_of_a_model_without_rerank_are_cosines() -> None:
    with vector_app(VectorEngine(can_rerank=False)) as app:
        body = call(app, SCORE, {"text_1": "abc", "text_2": ["abc", "xyz"]}).json()
    scores = [item["score"] for item in body["data"]]
    assert scores == pytest.approx([1.0, float(vector_of("abc") @ vector_of("xyz"))], abs=1e-6)


# ---- what a model can ----


@pytest.mark.parametrize(
    ("path", "asked", "can"),
    [
        (EMBEDDINGS, {"input": "a"}, {"can_embed": False}),
        (RERANK, {"query": "a", "documents": ["a"]}, {"can_rerank": False}),
        (SCORE, {"text_1": "a", "text_2": "a"}, {"can_rerank": False, "can_embed": False}),
    ],
)
def test_call_for_what_a_model_cannot_is_refused(path: str, asked: Any, can: Any) -> None:
    with vector_app(VectorEngine(**can)) as app:
        assert error_of(call(app, path, asked), 501)["code"] == "not_implemented"


def test_chat_with_a_model_that_only_embeds_is_refused() -> None:
    backend = FakeBackend(2, 64)
    backend.can_generate = False
    with fake_app(engine=Engine(backend)) as app:
        error = error_of(call(app, CHAT, {"messages": USER}), 501)
    assert error["code"] == "not_implemented"
    assert "only embeds texts" in error["message"]


def test_metrics_count_texts_and_tokens() -> None:
    with fake_app() as app:
        call(app, EMBEDDINGS, {"input": ["ab", "abc", "ab"]})
        text = call(app, "/metrics").text
    assert "cbatch:texts_total 3.0" in text
    assert "cbatch:text_tokens_total 5.0" in text


def test_engine_that_ended_is_told_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = VectorEngine()

    def ended(*args: object, **settings: object) -> None:
        raise EngineClosedError("closed")

    monkeypatch.setattr(engine, "embed", ended)
    with vector_app(engine) as app:
        assert error_of(call(app, EMBEDDINGS, {"input": "a"}), 503)["code"] == "engine_closed"


def test_client_that_leaves_cancels_its_texts() -> None:
    engine = VectorEngine()
    engine.may_go.clear()
    with vector_app(engine) as app:
        leave_once(app, EMBEDDINGS, {"input": "a"}, lambda: bool(engine.asked))
        assert app.state.desk.n_visits == 0
    assert engine.n_cancelled == 1
    engine.may_go.set()


@pytest.mark.parametrize("make", [Engine, engine_over])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        (EMBEDDINGS, {"input": ["a", "b"]}),
        (RERANK, {"query": "q", "documents": ["a", "b"]}),
        (SCORE, {"text_1": ["p", "q"], "text_2": ["a", "b"]}),
    ],
)
def test_client_that_leaves_waits_for_no_engine(
    path: str, body: dict[str, Any], make: Callable[[GatedBackend], Engine]
) -> None:
    """See `loop_waits`."""
    backend = GatedBackend(2, 1024, hold_at=0)
    is_held, may_go = threading.Event(), threading.Event()

    def hold() -> None:
        is_held.set()
        may_go.wait()

    backend.hold_texts = hold
    with fake_app(engine=make(backend)) as app:
        try:
            leave_once(app, path, body, lambda: is_held.is_set() or backend.is_held)
        finally:
            may_go.set()
            backend.release()
        assert app.state.desk.n_visits == 0


@pytest.mark.parametrize(
    ("url", "body", "limits"),
    [
        (RERANK, {"query": "q", "documents": ["a"] * 9}, {"max_queue": 3}),
        (SCORE, {"text_1": "q", "text_2": ["a"] * 9}, {"max_queue": 3}),
        (RERANK, {"query": "q", "documents": ["a" * 99] * 9}, {"max_queue_tokens": 500}),
    ],
)
def test_documents_to_judge_count_as_requests(
    url: str, body: dict[str, Any], limits: dict[str, int]
) -> None:
    backend = GatedBackend(2, 1024, hold_at=0)
    with fake_app(engine=Engine(backend), **limits) as app:
        first = in_thread(lambda: call(app, CHAT, {"messages": USER, "max_tokens": 2}))
        backend.wait_until_held()
        (limit,) = limits.values()
        assert f"at most {limit}" in error_of(call(app, url, body), 429)["message"]
        backend.release()
        assert first().status_code == 200
        assert call(app, url, body).status_code == 200
        assert app.state.desk.n_in_flight == 0
